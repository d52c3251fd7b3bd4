from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from dcprt.errors import ModelError  # noqa: E402
from dcprt.weights.checkpoint import Checkpoint, DummyCheckpoint  # noqa: E402
from dcprt.weights.loader import Loader  # noqa: E402

HEADS, HEAD_DIM, COLS = 5, 4, 6
SHAPE = (HEADS * HEAD_DIM, COLS)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(SHAPE, generator=generator),
        "o": torch.randn((COLS, HEADS * HEAD_DIM), generator=generator),
        "b": torch.randn((HEADS * HEAD_DIM,), generator=generator),
    }


@pytest.fixture(scope="module")
def source(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("loader")
    save_file(tensors, directory / "model.safetensors")
    return Checkpoint(directory)


class Counting:
    """A checkpoint that notes what is read."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.names = inner.names
        self.shape = inner.shape
        self.reads: list[tuple[slice | None, slice | None]] = []

    def read(
        self, name: str, rows: slice | None = None, cols: slice | None = None, at: int | None = None
    ) -> torch.Tensor:
        self.reads.append((rows, cols))
        return self.inner.read(name, rows, cols, at)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_ranges_against_the_whole(
    source: Checkpoint, tensors: dict[str, torch.Tensor], data: st.DataObject, dtype: torch.dtype
) -> None:
    loader = Loader(source, dtype)
    start = data.draw(st.integers(0, 20))
    stop = data.draw(st.integers(start, 20))
    padded = data.draw(st.integers(stop - start, 25))
    rows = loader.rows("w", SHAPE, start, stop, padded)
    cols = loader.cols("o", (COLS, 20), start, stop, padded)
    bias = loader.rows("b", (20,), start, stop, padded)
    taken = stop - start
    for result, whole in ((rows, tensors["w"]), (cols.T, tensors["o"].T), (bias, tensors["b"])):
        assert result.dtype == dtype and result.shape[0] == padded
        assert torch.equal(result[:taken], whole[start:stop].to(dtype))
        assert not result[taken:].any()
    assert rows.is_contiguous() and cols.is_contiguous()
    assert torch.equal(loader.cols("b", (20,), start, stop, padded), bias)


@settings(max_examples=60, deadline=None)
@given(heads=st.lists(st.integers(-1, HEADS - 1), max_size=8))
def test_heads_against_the_whole(source: Checkpoint, tensors: dict[str, torch.Tensor], heads: list[int]) -> None:
    loader = Loader(source, torch.float32)
    zeros = torch.zeros(HEAD_DIM, COLS)
    parts = tensors["w"].split(HEAD_DIM)
    expected = torch.cat([zeros[:0], *(zeros if head < 0 else parts[head] for head in heads)])
    assert torch.equal(loader.head_rows("w", SHAPE, heads, HEAD_DIM), expected)
    parts = tensors["o"].T.split(HEAD_DIM)
    expected = torch.cat([zeros[:0], *(zeros if head < 0 else parts[head] for head in heads)])
    assert torch.equal(loader.head_cols("o", (COLS, 20), heads, HEAD_DIM).T, expected)
    bias = tensors["b"].split(HEAD_DIM)
    expected = torch.cat([zeros[:0, 0], *(zeros[:, 0] if head < 0 else bias[head] for head in heads)])
    assert torch.equal(loader.head_rows("b", (20,), heads, HEAD_DIM), expected)


def test_consecutive_heads_are_one_read(source: Checkpoint) -> None:
    counting = Counting(source)
    Loader(counting, torch.float32).head_rows("w", SHAPE, [1, 2, 3, -1, 4, 4, 0], HEAD_DIM)
    assert [rows for rows, _ in counting.reads] == [slice(4, 16), slice(16, 20), slice(16, 20), slice(0, 4)]


def test_one_matrix_of_a_stack(tmp_path: Path) -> None:
    stack = torch.arange(60, dtype=torch.float32).view(3, 4, 5)
    save_file({"s": stack}, tmp_path / "model.safetensors")
    loader = Loader(Checkpoint(tmp_path), torch.float32)
    assert torch.equal(loader.rows("s", (3, 4, 5), 1, 3, 2, at=2), stack[2, 1:3])
    padded = loader.cols("s", (3, 4, 5), 3, 5, 4, at=1)
    assert torch.equal(padded[:, :2], stack[1, :, 3:]) and padded.shape == (4, 4) and not padded[:, 2:].any()
    assert loader.rows("s", (3, 4, 5), 0, 0, 0, at=0).shape == (0, 5)
    dummy = Loader(DummyCheckpoint(1), torch.float32)
    assert torch.equal(dummy.rows("s", (3, 4, 5), 0, 2, 2, at=2), dummy.full("s", (3, 4, 5))[2, :2])


def test_another_type_than_the_model(source: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    found = Loader(source, torch.bfloat16).full("b", (20,), torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, tensors["b"])


def test_full_is_a_copy(source: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    loader = Loader(source, torch.float32)
    loader.full("w", SHAPE).zero_()
    assert torch.equal(loader.full("w", SHAPE), tensors["w"])


def test_missing_and_misshapen(source: Checkpoint) -> None:
    loader = Loader(source, torch.float32)
    with pytest.raises(ModelError) as caught:
        loader.full("absent.weight", (3, 4))
    assert "absent.weight" in str(caught.value) and "(3, 4)" in str(caught.value)
    for read in (
        lambda: loader.full("w", (20, 7)),
        lambda: loader.rows("w", (20, 7), 0, 1, 1),
        lambda: loader.cols("w", (20, 7), 0, 1, 1),
        lambda: loader.head_rows("w", (20, 7), [0], 4),
        lambda: loader.head_cols("w", (20, 7), [0], 1),
    ):
        with pytest.raises(ModelError) as caught:
            read()
        assert "w has" in str(caught.value)
        assert "(20, 6)" in str(caught.value) and "(20, 7)" in str(caught.value)


def test_finish_and_progress(source: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    loader = Loader(source, torch.float32, lambda done, total: seen.append((done, total)))
    loader.full("w", SHAPE)
    loader.rows("w", SHAPE, 0, 1, 1)
    loader.rows("b", (20,), 20, 20, 3)
    assert seen == [(1, 3), (2, 3)]
    with pytest.raises(ModelError, match="does not use: o"):
        loader.finish()
    loader.finish(ignore=["o"])
    loader.finish(ignore=["x*", "?"])
    assert loader.has("w") and not loader.has("nothing")


def test_ranks_agree_on_dummy_weights() -> None:
    whole = Loader(DummyCheckpoint(3), torch.float32).full("w", SHAPE)
    parts = [Loader(DummyCheckpoint(3), torch.float32).rows("w", SHAPE, i * 7, min(20, i * 7 + 7), 7) for i in range(3)]
    assert torch.equal(torch.cat(parts)[:20], whole)
    loader = Loader(DummyCheckpoint(3), torch.bfloat16)
    assert torch.equal(loader.head_rows("w", SHAPE, [3], 4), whole[12:16].bfloat16())
    loader.finish()
