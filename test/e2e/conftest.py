from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcprt.tokenizer.text import TextCodec
from dcprt.weights.presets import PRESETS
from dcprt.weights.resolve import resolve

from . import tiny as tiny_models
from .server import MODEL, Server


@pytest.fixture(scope="session", autouse=True)
def _hear_interrupts() -> None:
    """A run in the background ignores Ctrl-C, and so would everything it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _demo_model() -> None:
    if PRESETS[MODEL].find() is None:
        pytest.skip("the demo model's package is not installed")


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    return TextCodec(resolve(MODEL, "auto", lambda line: None))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Four ranks, one sequence over all of them."""
    flags = ("--dcp", "4", "--dtype", "float32", "--kv-cache-tokens", "16384")
    with Server(*flags) as running:
        yield running.wait_ready()
        assert running.process.poll() is None, running.log
        assert running.interrupt() == 0, running.log
        assert "Traceback" not in running.log, running.log
        assert running.traces.gone() == []


@pytest.fixture(scope="session")
def single() -> Iterator[Server]:
    """One rank, a key, and room for 64 tokens."""
    flags = ("--context-length", "64", "--dtype", "float32", "--api-key", "secret", "--kv-cache-tokens", "1024")
    with Server(*flags) as running:
        yield running.wait_ready()


@pytest.fixture(scope="session")
def solo() -> Iterator[Server]:
    """One rank with the demo model."""
    with Server("--dtype", "float32", "--kv-cache-tokens", "8192") as running:
        yield running.wait_ready()
        assert running.process.poll() is None, running.log
        assert "Traceback" not in running.log, running.log


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of random weights, with tokenizer and chat template."""
    return tiny_models.directory(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> Iterator[Server]:
    """One rank with the tiny model: nonsense in no time."""
    with Server(*tiny_models.flags(tiny_model), "--kv-cache-tokens", "16384") as running:
        yield running.wait_ready()
        assert running.process.poll() is None, running.log
        assert "Traceback" not in running.log, running.log
