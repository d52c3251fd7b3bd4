"""Memory and CPU of a made-up machine: its /proc and cgroups are files in a temporary directory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dcprt.planner import host

MIB = 1 << 20
NO_LIMIT_V1 = 9223372036854771712


class Machine:
    """Files where the kernel has its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cgroups = root / "sys/fs/cgroup"
        self.write("proc/meminfo", "MemTotal: 2000 kB\nMemFree: 10 kB\nMemAvailable:    1048576 kB\n")

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))

    def limit(self, group: str, limit: object, used: int) -> None:
        """A v2 group's memory."""
        self.write(f"sys/fs/cgroup/{group}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup/{group}/memory.current", f"{used}\n")

    def limit_v1(self, group: str, limit: int, used: int) -> None:
        self.write(f"sys/fs/cgroup/memory/{group}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"sys/fs/cgroup/memory/{group}/memory.usage_in_bytes", f"{used}\n")

    def available(self) -> int:
        return host.available_memory(self.cgroups)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(host, "Path", lambda text: tmp_path / text.lstrip("/"))
    return Machine(tmp_path)


def test_without_cgroups_it_is_what_the_kernel_says(machine: Machine) -> None:
    assert machine.available() == 1024 * MIB


def test_v2_limit_of_the_own_group(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/user/job\n")
    machine.limit("user/job", 300 * MIB, 100 * MIB)
    assert machine.available() == 200 * MIB


def test_v2_the_tightest_group_above_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/user/job\n")
    machine.limit("user/job", 300 * MIB, 100 * MIB)
    machine.limit("user", 400 * MIB, 350 * MIB)
    assert machine.available() == 50 * MIB


def test_v2_without_a_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.limit("", "max", 100 * MIB)
    assert machine.available() == 1024 * MIB


def test_v2_a_path_that_only_the_host_sees_still_finds_the_container(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/docker/0123\n")
    machine.limit("", 500 * MIB, 100 * MIB)
    assert machine.available() == 400 * MIB


def test_v2_a_full_group_leaves_nothing(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.limit("job", 100 * MIB, 101 * MIB)
    assert machine.available() == 0


def test_v1_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/job\n")
    machine.limit_v1("job", 256 * MIB, 56 * MIB)
    machine.limit_v1("", NO_LIMIT_V1, 900 * MIB)
    assert machine.available() == 200 * MIB


def test_v1_without_a_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/\n0::/\n")
    machine.limit_v1("", NO_LIMIT_V1, 900 * MIB)
    assert machine.available() == 1024 * MIB


def test_a_limit_above_the_memory_changes_nothing(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.limit("job", 1 << 40, 0)
    assert machine.available() == 1024 * MIB


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("processor: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n\nprocessor: 1\n", True),
        ("flags : fpu avx2 amx_bf16 amx_tile\n", True),
        ("flags : fpu avx2 avx512f\n", False),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("Features\t: fp asimd\n", False),
        ("model name: none\n", False),
    ],
)
def test_native_bfloat16(machine: Machine, text: str, native: bool) -> None:
    machine.write("proc/cpuinfo", text)
    assert host.multiplies_bfloat16() is native


def test_no_cpuinfo_means_no_features(machine: Machine) -> None:
    assert host.cpu_flags() == frozenset()
    assert host.multiplies_bfloat16() is False


@pytest.mark.parametrize(
    ("platform", "found", "kernels"), [("linux", object(), True), ("linux", None, False), ("darwin", object(), False)]
)
def test_kernels_are_installed(
    monkeypatch: pytest.MonkeyPatch, platform: str, found: object | None, kernels: bool
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(host, "find_spec", {"dcprt_kernel": found}.get)
    assert host.has_kernels() is kernels


def test_this_machine_answers() -> None:
    assert host.cores() >= 1
    assert host.available_memory() > 0
