"""Environment variables: what they take, and what is said of anything else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dcprt import env
from dcprt.config import Config
from dcprt.errors import ConfigError
from dcprt.runtime.prepare import prepare

SOURCE = Path(env.__file__).read_text()
PARSED: dict[str, tuple[Callable[[], object], dict[str, object], list[str], str]] = {
    "DCPRT_COLLECTIVE_TIMEOUT": (
        env.collective_timeout_s,
        {"": 60.0, "5": 5.0, "0.5": 0.5, "1e3": 1000.0},
        ["abc", "0", "-1", "nan", "inf", "5 s"],
        "a number of seconds above 0",
    ),
    "DCPRT_DCP_Q_REPLICATE": (
        env.replicate_q,
        {"": False, "0": False, "false": False, "no": False, "1": True, "True": True, "on": True},
        ["2", "maybe", "-"],
        "1 or 0",
    ),
    "DCPRT_COMM": (env.comm_backend, {"": "", "shm": "shm", "gloo": "gloo"}, ["SHM", "nccl", " "], "shm or gloo"),
    "DCPRT_ATTENTION": (
        env.attention_backend,
        {"": "", "torch": "torch", "native": "native"},
        ["natve", "flash"],
        "torch or native",
    ),
}
UNPARSED = {"DCPRT_CACHE_DIR"}
WRONG = [(name, value) for name, (_, _, wrong, _) in PARSED.items() for value in wrong]


@pytest.mark.parametrize("name", PARSED)
def test_what_it_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, good, _, _ = PARSED[name]
    monkeypatch.delenv(name, raising=False)
    assert read() == good[""]
    for value, meant in good.items():
        monkeypatch.setenv(name, value)
        assert read() == meant


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_anything_else_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, _, _, accepted = PARSED[name]
    monkeypatch.setenv(name, value)
    for reader in (read, env.check):
        with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}; it takes {accepted}.")):
            reader()


def test_a_near_name_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPRT_ATTENTION", "natve")
    with pytest.raises(ConfigError, match="Did you mean 'native'"):
        env.attention_backend()


def test_every_variable_is_in_this_test() -> None:
    assert set(re.findall(r"\"(DCPRT_\w+)\"", SOURCE)) == {*PARSED, *UNPARSED}


@pytest.mark.parametrize("name", PARSED)
def test_it_is_told_before_anything_starts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, PARSED[name][2][0])
    with pytest.raises(ConfigError, match=name):
        prepare(Config.of(model="/there/is/none"), lambda _: None)


@pytest.mark.parametrize(("name", "value"), [("DCPRT_COLLECTIVE_TIMEOUT", "abc"), ("DCPRT_ATTENTION", "natve")])
def test_the_server_says_it_in_a_line(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "dcprt.launch_server", "--port", "0", "--model", "/there/is/none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{name} is {value!r}" in done.stderr
    assert "Traceback" not in done.stderr
