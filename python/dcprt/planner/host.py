"""What this machine offers: memory, cores, whether it multiplies bfloat16, and whether the kernels are installed."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def cpu_flags() -> frozenset[str]:
    """Feature flags of the first core, as /proc/cpuinfo names them; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def multiplies_bfloat16() -> bool:
    """Whether the CPU has dot products of bfloat16: AVX-512-BF16 or AMX on x86, BF16 on Arm."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def has_kernels() -> bool:
    """Whether `dcprt_kernel` is installed, on a system it runs on. Imports nothing."""
    return sys.platform == "linux" and find_spec("dcprt_kernel") is not None


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_room(root: Path) -> int | None:
    """Bytes left under the tightest memory limit of this process's cgroups (v2, then v1); None without a limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base / path.lstrip("/")
        for directory in [group, *group.parents]:
            limit, used = _number(directory / names[0]), _number(directory / names[1])
            if limit is not None and used is not None and limit < 1 << 60:
                rooms.append(max(limit - used, 0))
            if directory == base:
                break
    return min(rooms, default=None)


def available_memory(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken without swapping, cgroup limits respected."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    room = _cgroup_room(cgroup_root)
    return available if room is None else min(available, room)
