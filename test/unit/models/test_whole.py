"""All layers in one native call do, bit for bit, what their parts do one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dcprt_kernel.layer")

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dcprt.comm.arena import create_arenas
from dcprt.comm.groups import connect
from dcprt.errors import CollectiveError, CollectiveTimeout
from dcprt.models import decoder
from dcprt.models.whole import NativeLayers
from dcprt.ops import Matrix, WholeLayers
from dcprt.params import SamplingParams

from .checkpoints import SHAPE, write
from .harness import Harness, relative_error, write_llama

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], list(range(2, 120)), [3, 1, 4, 1, 5, 9, 2, 6, 8, 8]]


def is_whole(model: Harness) -> bool:
    found = model._recorder._model._whole  # type: ignore[attr-defined]
    assert found is None or isinstance(found, NativeLayers)
    return found is not None


def logits(directory: Path, dtype: str) -> tuple[list[Tensor], bool]:
    """Of a few tokens after each prompt, in chunks, with reuse of prefixes; and whether the layers are one call."""
    with Harness(directory, dtype=dtype, chunked_prefill_size=16, page_size=4) as model:
        return [model.greedy(prompt, 5)[1] for prompt in PROMPTS], is_whole(model)


LLAMAS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 3},
    {"num_key_value_heads": 1, "head_dim": 24},
    {"attention_bias": True},
    {"mlp_bias": True},
]
WRITERS: dict[str, Callable[[Path], object]] = {
    **{str(changes): partial(write_llama, **changes) for changes in LLAMAS},
    "qwen2": lambda to: write(to, Qwen2ForCausalLM, Qwen2Config(**SHAPE, head_dim=8)),
    "qwen3": lambda to: write(to, Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16)),
    "qwen3-biased": lambda to: write(to, Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=8, attention_bias=True)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", WRITERS)
def test_equals_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str) -> None:
    WRITERS[kind](tmp_path)
    whole, together = logits(tmp_path, dtype)
    assert together
    monkeypatch.setattr(decoder, "NATIVE", False)
    parts, together = logits(tmp_path, dtype)
    assert not together
    for found, expected in zip(whole, parts, strict=True):
        assert torch.equal(found, expected)


def test_coded_weights_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one call, as parts, and not coded."""
    write_llama(tmp_path, hidden_size=96, intermediate_size=176, head_dim=16, attention_bias=False)
    found = []
    for least, together in ((0, True), (0, False), (1 << 40, True)):
        monkeypatch.setattr(Matrix, "CODED_BYTES", least)
        monkeypatch.setattr(decoder, "NATIVE", together)
        with Harness(tmp_path, dtype="bfloat16", chunked_prefill_size=16, page_size=4) as model:
            layer = model._recorder._model._layers[0]  # type: ignore[attr-defined]
            assert is_whole(model) is together
            assert (layer.mlp.gate_up._data.dtype == torch.uint8) is (least == 0)
            found.append([model.greedy(prompt, 5)[1] for prompt in PROMPTS])
    for coded, parts, plain in zip(*found, strict=True):
        assert torch.equal(coded, parts)
        assert torch.equal(coded, plain)


def test_layers_it_does_not_know_stay_as_they_are(tmp_path: Path) -> None:
    """Heads that the kernels do not take."""
    write_llama(tmp_path, head_dim=6)
    assert not logits(tmp_path, "float32")[1]


def test_ranks_that_share_no_memory_have_no_whole_layers(tmp_path: Path) -> None:
    write_llama(tmp_path)
    with Harness(tmp_path, dcp=2) as model:
        assert not is_whole(model)


@contextmanager
def over_ranks(directory: Path, tp: int, dcp: int, timeout_s: float = 60, **options: Any) -> Iterator[Harness]:
    """A model whose ranks meet in shared memory."""
    arenas = create_arenas(tp, dcp)
    groups = [connect("shm", rank, tp, dcp, arenas=arenas, timeout_s=timeout_s) for rank in range(tp)]
    try:
        with Harness(directory, groups=groups, tp=tp, dcp=dcp, page_size=4, **options) as model:
            yield model
    finally:
        for group in groups:
            group.close()
        arenas.close()


def together(model: Harness, lengths: Sequence[int]) -> list[Tensor]:
    """Logits of all steps of some requests that are decoded in the same steps."""
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[(7 * i + 3 * n) % 120 for i in range(n)] for n in lengths]
    model._recorder.kept.clear()
    model.run([(prompt, sampling) for prompt in prompts])
    return list(model._recorder.kept)


class Calls:
    """Counts the steps that were one native call, over all ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        compute = NativeLayers.__call__

        def counted(*args: Any) -> Tensor:
            self.count += 1
            return compute(*args)

        monkeypatch.setattr(NativeLayers, "__call__", counted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tp", "dcp", "options", "kind"),
    [
        (2, 2, {}, "{}"),
        (4, 4, {}, "{}"),
        (4, 2, {}, "{}"),
        (2, 1, {}, "{}"),
        (3, 3, {"dcp_replicate_q": True}, "{}"),
        (2, 2, {"dcp_interleave": 4}, "{}"),
        (4, 2, {}, "qwen3-biased"),
        (3, 3, {"dcp_replicate_q": True}, "qwen3"),
        (2, 1, {}, "{'mlp_bias': True}"),
    ],
)
def test_ranks_equal_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, dcp: int, options: dict[str, Any], kind: str, dtype: str
) -> None:
    """Rows on every rank and on one alone, and more tokens than one."""
    WRITERS[kind](tmp_path)
    calls = Calls(monkeypatch)
    found = []
    for native in (True, False):
        monkeypatch.setattr(decoder, "NATIVE", native)
        with over_ranks(tmp_path, tp, dcp, dtype=dtype, dcp_comm="a2a", **options) as model:
            found.append([together(model, lengths) for lengths in ([9], [1], [33, 4, 70, 21, 1])])
            assert is_whole(model) is native
        if native:
            assert calls.count >= 4 * tp
            calls.count = 0
    assert calls.count == 0
    for whole, parts in zip(*found, strict=True):
        assert len(whole) == len(parts)
        for one, other in zip(whole, parts, strict=True):
            assert torch.equal(one, other)


def test_another_exchange_is_done_by_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path)
    calls = Calls(monkeypatch)
    found = []
    for way in ("a2a", "ag_rs"):
        with over_ranks(tmp_path, 2, 2, dcp_comm=way) as model:
            found.append(torch.cat(together(model, [30, 11])))
        assert (calls.count > 0) is (way == "a2a")
        calls.count = 0
    assert relative_error(*found) < 1e-5


@pytest.mark.parametrize(
    ("dcp", "failed"), [(1, "all_reduce of group 'world'"), (2, "all_gather of group 'dcp'")], ids=["world", "dcp"]
)
def test_a_missing_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dcp: int, failed: str) -> None:
    """In the middle of a native call, as everywhere else; afterwards the group cannot be used."""
    write_llama(tmp_path)
    steps: list[tuple[WholeLayers, Any]] = []
    compute = WholeLayers.__call__

    def kept(self: WholeLayers, *step: Any) -> Tensor:
        steps.append((self, step))
        return compute(self, *step)

    monkeypatch.setattr(WholeLayers, "__call__", kept)
    with over_ranks(tmp_path, 2, dcp, timeout_s=1, dcp_comm="a2a") as model:
        together(model, [9])
        first = model._recorder._model._whole._layers  # type: ignore[attr-defined]
        step = next(step for layers, step in reversed(steps) if layers is first)
        with pytest.raises(CollectiveTimeout, match=f"{failed} in step [0-9]+: no answer from rank 1 after 1 s"):
            compute(first, *step)
        with pytest.raises(CollectiveError, match="cannot be used any more"):
            compute(first, *step)
