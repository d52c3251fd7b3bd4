from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from dcprt.errors import ModelError  # noqa: E402
from dcprt.weights.checkpoint import Checkpoint, DummyCheckpoint  # noqa: E402


def test_slices(tmp_path: Path) -> None:
    whole = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    save_file({"a": whole, "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    source = Checkpoint(tmp_path)
    assert set(source.names) == {"a", "b"}
    assert source.shape("a") == (6, 10) and source.shape("b") == (3,) and source.shape("c") is None
    assert torch.equal(source.read("a"), whole)
    assert torch.equal(source.read("a", rows=slice(1, 4)), whole[1:4])
    assert torch.equal(source.read("a", cols=slice(2, 5)), whole[:, 2:5])
    assert torch.equal(source.read("a", slice(1, 4), slice(2, 5)), whole[1:4, 2:5])
    assert source.read("b", rows=slice(1, 2)).dtype == torch.bfloat16


def test_several_files_with_and_without_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "model-2.safetensors")
    assert set(Checkpoint(tmp_path).names) == {"a", "b"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert set(Checkpoint(tmp_path).names) == {"a"}
    for places, words in (
        ({"a": "model-3.safetensors"}, r"model-3\.safetensors is missing"),
        ({"z": "model-1.safetensors"}, "tensor z"),
        ({"a": "../model-1.safetensors"}, "no file beside it"),
        ({"a": 3}, "no file beside it"),
        ([], "weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(ModelError, match=words):
            Checkpoint(tmp_path)
    index.write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        Checkpoint(tmp_path)
    index.unlink()
    save_file({"a": torch.ones(2)}, tmp_path / "model-2.safetensors")
    with pytest.raises(ModelError, match="Tensor a is both"):
        Checkpoint(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        Checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:4], whole[:40], whole[:-1], b"\xff" * 64, whole[:8] + b"x" + whole[9:]):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            Checkpoint(tmp_path).read("a")


def test_quantized_types_are_refused(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(4, dtype=torch.int8), "b": torch.zeros(4).to(torch.float8_e4m3fn)},
        tmp_path / "model.safetensors",
    )
    for name in "ab":
        with pytest.raises(ModelError, match=f"tensor {name} has the type"):
            Checkpoint(tmp_path).read(name)


def test_dummy_is_the_same_on_every_rank() -> None:
    one, two, other = DummyCheckpoint(7), DummyCheckpoint(7), DummyCheckpoint(8)
    shape = (40, 30)
    for source in (one, two, other):
        assert source.shape("w", shape) == shape
        assert source.shape("layers.0.input_layernorm.weight", (30,)) == (30,)
        assert source.shape("model.norm.weight", (30,)) == (30,)
    whole = one.read("w")
    assert torch.equal(two.read("w", rows=slice(10, 20)), whole[10:20])
    assert torch.equal(two.read("w", cols=slice(3, 9)), whole[:, 3:9])
    assert not torch.equal(other.read("w"), whole)
    assert 0.015 < whole.std().item() < 0.025
    assert torch.equal(one.read("model.norm.weight"), torch.ones(30))
    assert torch.equal(one.read("layers.0.input_layernorm.weight"), torch.ones(30))
    one.shape("w", (5, 5))
    assert one.read("w").shape == (5, 5)
