"""Renamed tensors, and e4m3 blocks scaled by slice."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from dcprt.errors import ModelError  # noqa: E402
from dcprt.weights.checkpoint import Checkpoint  # noqa: E402
from dcprt.weights.loader import Loader  # noqa: E402
from dcprt.weights.views import BlockScaled, Renamed  # noqa: E402

HEIGHT, WIDTH, BLOCK = 11, 14, (4, 3)


def quantized(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 values, their scales, and what they stand for, place by place."""
    generator = torch.Generator().manual_seed(len(shape))
    values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    blocks = (*shape[:-2], -(-shape[-2] // BLOCK[0]), -(-shape[-1] // BLOCK[1]))
    scales = torch.rand(blocks, generator=generator) + 0.5
    whole = values.float()
    for i in range(shape[-2]):
        for j in range(shape[-1]):
            whole[..., i, j] *= scales[..., i // BLOCK[0], j // BLOCK[1]]
    return values, scales, whole


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> BlockScaled:
    directory = tmp_path_factory.mktemp("fp8")
    values, scales, _ = quantized(HEIGHT, WIDTH)
    stack, stack_scales, _ = quantized(2, HEIGHT, WIDTH)
    save_file(
        {
            "w": values,
            "w_scale_inv": scales,
            "s": stack,
            "s_scale_inv": stack_scales,
            "plain": torch.ones(5),
            "lost_scale_inv": torch.ones(1, 1),
        },
        directory / "model.safetensors",
    )
    return BlockScaled(Checkpoint(directory, fp8=True), BLOCK)


cuts = st.tuples(st.integers(0, HEIGHT), st.integers(0, HEIGHT)).map(lambda pair: slice(min(pair), max(pair)))


@settings(max_examples=80, deadline=None)
@given(rows=st.none() | cuts, cols=st.none() | cuts, at=st.none() | st.integers(0, 1))
def test_slices_against_the_whole(source: BlockScaled, rows: slice | None, cols: slice | None, at: int | None) -> None:
    whole = quantized(HEIGHT, WIDTH)[2] if at is None else quantized(2, HEIGHT, WIDTH)[2][at]
    found = source.read("w" if at is None else "s", rows, cols, at)
    assert found.dtype == torch.float32
    assert torch.equal(found, whole[rows or slice(None), cols or slice(None)])


def test_loading_by_slice(source: BlockScaled) -> None:
    whole = quantized(HEIGHT, WIDTH)[2]
    loader = Loader(source, torch.bfloat16)
    assert torch.equal(loader.rows("w", (HEIGHT, WIDTH), 3, 6, 3), whole[3:6].bfloat16())
    assert torch.equal(loader.head_cols("w", (HEIGHT, WIDTH), [3, -1, 6], 2)[:, 4:], whole[:, 12:14].bfloat16())
    loader.rows("s", (2, HEIGHT, WIDTH), 0, 0, 0, at=0)
    assert torch.equal(loader.full("plain", (5,)), torch.ones(5, dtype=torch.bfloat16))
    with pytest.raises(ModelError, match="does not use: lost_scale_inv"):
        loader.finish()


def test_scales_are_missing_or_misshapen(tmp_path: Path) -> None:
    values, scales, _ = quantized(HEIGHT, WIDTH)
    for extra, words in (
        ({}, "no tensor w_scale_inv"),
        ({"w_scale_inv": scales[:2].clone()}, r"w_scale_inv has shape \(2, 5\).*\(3, 5\)"),
    ):
        save_file({"w": values, **extra}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=words):
            BlockScaled(Checkpoint(tmp_path, fp8=True), BLOCK).read("w")
    save_file({"w": values[0].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="only matrices have scales"):
        BlockScaled(Checkpoint(tmp_path, fp8=True), BLOCK).read("w")


def test_renamed(tmp_path: Path) -> None:
    save_file(
        {"text.model.blocks.0.a": torch.zeros(2), "text.head": torch.ones(2), "tower.x": torch.ones(1)},
        tmp_path / "model.safetensors",
    )
    source = Renamed(Checkpoint(tmp_path), (("text.model.blocks.", "model.layers."), ("text.", "")))
    assert set(source.names) == {"model.layers.0.a", "head", "tower.x"}
    assert source.shape("head", (2,)) == (2,) and source.shape("other", (2,)) is None
    assert torch.equal(source.read("head"), torch.ones(2))
