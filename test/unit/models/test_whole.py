"""All layers in one native call do, bit for bit, what their parts do one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dcprt_kernel.layer")

import torch
from torch import Tensor

from dcprt.models import decoder
from dcprt.models.whole import NativeLayers
from dcprt.ops import Matrix

from .harness import Harness, write_llama

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], list(range(2, 120)), [3, 1, 4, 1, 5, 9, 2, 6, 8, 8]]


def is_whole(model: Harness) -> bool:
    found = model._recorder._model._whole  # type: ignore[attr-defined]
    assert found is None or isinstance(found, NativeLayers)
    return found is not None


def logits(directory: Path, dtype: str) -> tuple[list[Tensor], bool]:
    """Of a few tokens after each prompt, in chunks, with reuse of prefixes; and whether the layers are one call."""
    with Harness(directory, dtype=dtype, chunked_prefill_size=16, page_size=4) as model:
        return [model.greedy(prompt, 5)[1] for prompt in PROMPTS], is_whole(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": False, "num_key_value_heads": 3}, {"num_key_value_heads": 1, "head_dim": 24}]
)
def test_equals_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], dtype: str) -> None:
    write_llama(tmp_path, **changes)
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


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 6}])
def test_layers_it_does_not_know_stay_as_they_are(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A bias behind the heads or the MLP, and heads that the kernels do not take."""
    write_llama(tmp_path, **changes)
    assert not logits(tmp_path, "float32")[1]


def test_more_than_one_rank_has_no_whole_layers(tmp_path: Path) -> None:
    write_llama(tmp_path)
    with Harness(tmp_path, dcp=2) as model:
        assert not is_whole(model)
