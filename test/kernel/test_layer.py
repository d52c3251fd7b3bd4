"""What the call for all layers refuses; what it computes is compared in test/unit/models/test_whole.py."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("dcprt_kernel.layer")

import torch
from torch import Tensor

from dcprt_kernel import held
from dcprt_kernel.layer import PARTS, WEIGHTS, decoder_layers

from .tensors import packed

HIDDEN, HEADS, KEY_HEADS, DIM, WIDTH, LAYERS, TOKENS = 24, 4, 2, 8, 20, 2, 3
QKV = (HEADS + 2 * KEY_HEADS) * DIM


def weights(**changes: Tensor) -> list[Tensor]:
    """Of all layers; `changes` are for the last one."""
    one = {
        "norm1": torch.ones(HIDDEN),
        "norm2": torch.ones(HIDDEN),
        "q_norm": torch.ones(DIM),
        "k_norm": torch.ones(DIM),
        "qkv": packed(torch.randn(QKV, HIDDEN)),
        "qkv_bias": torch.randn(QKV),
        "o": packed(torch.randn(HIDDEN, HEADS * DIM)),
        "o_bias": torch.randn(HIDDEN),
        "gate_up": packed(torch.randn(2 * WIDTH, HIDDEN)),
        "gate_up_bias": torch.empty(0),
        "down": packed(torch.randn(HIDDEN, WIDTH)),
        "down_bias": torch.empty(0),
    }
    assert tuple(one) == WEIGHTS
    return [*one.values()] * (LAYERS - 1) + [*{**one, **changes}.values()]


def pool(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape or (4, 4, KEY_HEADS, DIM), dtype=dtype)


def call(
    layers: list[Tensor] | None = None,
    pools: list[Tensor] | None = None,
    heads: list[int] | None = None,
    projected: int = HEADS,
    **changes: Tensor,
) -> Tensor:
    run = decoder_layers(
        held(weights() if layers is None else layers),
        held([pool()] * 2 * LAYERS if pools is None else pools),
        1e-5,
        WIDTH,
        torch.tensor([0, 0, 1, 1] if heads is None else heads),
        projected,
        0.3,
    )
    step = {
        "x": torch.randn(TOKENS, HIDDEN),
        "cos": torch.ones(TOKENS, DIM // 2),
        "sin": torch.zeros(TOKENS, DIM // 2),
        "tokens": torch.arange(TOKENS),
        "slots": torch.arange(4, 4 + TOKENS),
        "rows": torch.tensor([[0, TOKENS, 0, 0]]),
        "pages": torch.tensor([1]),
        "out": torch.full((TOKENS, HIDDEN), torch.nan),
        "ends": torch.empty(0, dtype=torch.int64),
        **changes,
    }
    assert run(*step.values(), 1) == 0
    return step["out"]


def test_what_fits() -> None:
    assert call().isfinite().all()


def test_ends_of_parts() -> None:
    """One after the other, on Python's clock; what only ranks do is not noted."""
    ends, begin = torch.zeros(LAYERS, len(PARTS), dtype=torch.int64), time.perf_counter_ns()
    call(ends=ends)
    alone = [
        i
        for i, part in enumerate(PARTS)
        if part in ("begun", "projected", "stored", "attended", "output", "gated", "output summed")
    ]
    assert ends[:, alone].flatten().tolist() == sorted(ends[:, alone].flatten().tolist())
    assert begin <= ends[0, 0] and ends.max() <= time.perf_counter_ns()
    assert ends.count_nonzero() == LAYERS * len(alone)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: call(layers=weights()[:-1]),
        lambda: call(layers=[]),
        lambda: call(layers=weights(norm1=torch.ones(HIDDEN - 1))),
        lambda: call(layers=weights(norm2=torch.ones(HIDDEN).bfloat16())),
        lambda: call(layers=weights(q_norm=torch.ones(DIM - 1))),
        lambda: call(layers=weights(k_norm=torch.empty(0))),
        lambda: call(layers=weights(k_norm=torch.ones(DIM).bfloat16())),
        lambda: call(layers=weights(o_bias=torch.ones(HIDDEN + 1))),
        lambda: call(layers=weights(down_bias=torch.ones(HIDDEN).bfloat16())),
        lambda: call(layers=weights(qkv=packed(torch.randn(QKV + 16, HIDDEN)))),
        lambda: call(layers=weights(qkv_bias=torch.ones(QKV - 1))),
        lambda: call(layers=weights(gate_up_bias=torch.ones(2 * WIDTH).bfloat16())),
        lambda: call(layers=weights(down=packed(torch.randn(HIDDEN, WIDTH).bfloat16()))),
        lambda: call(pools=[pool()] * (2 * LAYERS - 1)),
        lambda: call(pools=[*[pool()] * (2 * LAYERS - 2), *[pool(5, 4, KEY_HEADS, DIM)] * 2]),
        lambda: call(pools=[*[pool()] * (2 * LAYERS - 2), *[pool(dtype=torch.bfloat16)] * 2]),
        lambda: call(pools=[pool(4, 4, KEY_HEADS, DIM - 1)] * 2 * LAYERS),
        lambda: call(out=torch.empty(TOKENS, HIDDEN + 1)),
        lambda: call(cos=torch.ones(TOKENS, DIM)),
        lambda: call(cos=torch.ones(TOKENS - 1, DIM // 2)),
        lambda: call(slots=torch.tensor([4, 5, 16])),
        lambda: call(tokens=torch.tensor([0, 1, TOKENS])),
        lambda: call(heads=[0, 0, 1, 2]),
        lambda: call(projected=HEADS // 2),
        lambda: call(x=torch.randn(TOKENS, HIDDEN + 1), out=torch.empty(TOKENS, HIDDEN + 1)),
        lambda: call(ends=torch.zeros(LAYERS, len(PARTS) - 1, dtype=torch.int64)),
        lambda: call(ends=torch.zeros(LAYERS, len(PARTS))),
        lambda: call(pages=torch.tensor([4])),
        lambda: call(rows=torch.tensor([[0, TOKENS, 9, 0]])),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError):
        wrong()
