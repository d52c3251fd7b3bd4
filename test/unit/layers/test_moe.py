"""Routing and experts against a loop over tokens, and both ways of cutting experts against the uncut sum."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from dcprt.comm.protocol import Collective
from dcprt.ids import Rank
from dcprt.layers.mlp import Expert
from dcprt.layers.moe import Experts, MoE, Router
from dcprt.layers.norm import Normed
from dcprt.ops import Matrix
from dcprt.parallel.grid import Grid, split_evenly
from dcprt.spec import MoESpec

from .test_linear import on_ranks

HIDDEN, WIDTH, SHARED = 12, 7, 5
V3 = MoESpec(8, 3, WIDTH, scoring="sigmoid", scale=2.5, group_score="top2", bias_corrected=True)
KINDS = {
    "softmax": MoESpec(6, 2, WIDTH, normalize=False),
    "softmax-normalized": MoESpec(6, 2, WIDTH),
    "softmax-scaled": MoESpec(6, 3, WIDTH, normalize=False, scale=16.0),
    "groups-by-best": MoESpec(12, 3, WIDTH, normalize=False, groups=4, top_groups=2),
    "sigmoid-bias": V3,
    "groups-by-best-two": dataclasses.replace(V3, num_experts=12, groups=4, top_groups=2),
    "groups-all": dataclasses.replace(V3, groups=2, top_groups=2),
    "not-normalized": dataclasses.replace(V3, normalize=False),
    "one-expert": MoESpec(1, 1, WIDTH),
    "one-sigmoid-expert": dataclasses.replace(V3, num_experts=1, experts_per_token=1),
    "all-experts": MoESpec(4, 4, WIDTH),
}


class Weights:
    """Of one layer: float32 [experts, ...]."""

    def __init__(self, moe: MoESpec) -> None:
        generator = torch.Generator().manual_seed(moe.num_experts)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.gate = random(moe.num_experts, HIDDEN)
        self.bias = random(moe.num_experts) * 0.5 if moe.bias_corrected else None
        self.gate_up = random(moe.num_experts, 2 * WIDTH, HIDDEN)
        self.down = random(moe.num_experts, HIDDEN, WIDTH)
        self.shared_gate_up, self.shared_down = random(2 * SHARED, HIDDEN), random(HIDDEN, SHARED)


def chosen_by_definition(token: Tensor, weights: Weights, moe: MoESpec) -> dict[int, float]:
    """Experts of one token and their weights, from the papers' formulas."""
    logits = [float(row @ token) for row in weights.gate.double()]
    exps = [torch.tensor(x).double().exp().item() for x in logits]
    scores = [x / sum(exps) if moe.scoring == "softmax" else x / (1 + x) for x in exps]
    bias = [0.0] * moe.num_experts if weights.bias is None else weights.bias.tolist()
    preferred = [s + b for s, b in zip(scores, bias, strict=True)]
    size = moe.num_experts // moe.groups
    members = [range(g * size, (g + 1) * size) for g in range(moe.groups)]
    best = 1 if moe.group_score == "max" else 2
    value = [sum(sorted((preferred[e] for e in group), reverse=True)[:best]) for group in members]
    groups = sorted(range(moe.groups), key=lambda g: -value[g])[: moe.top_groups]
    allowed = [e for g in groups for e in members[g]]
    experts = sorted(allowed, key=lambda e: -preferred[e])[: moe.experts_per_token]
    total = sum(scores[e] for e in experts) if moe.normalize else 1.0
    return {e: scores[e] / total * moe.scale for e in experts}


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (gate_up.double() @ x).chunk(2)
    return down.double() @ (gate / (1 + (-gate).exp()) * up)


def by_definition(x: Tensor, weights: Weights, moe: MoESpec, shared: bool) -> Tensor:
    """float64 [tokens, hidden]."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for i, token in enumerate(x.double()):
        for expert, weight in chosen_by_definition(token, weights, moe).items():
            out[i] += weight * mlp(token, weights.gate_up[expert], weights.down[expert])
        if shared:
            out[i] += mlp(token, weights.shared_gate_up, weights.shared_down)
    return out


class Given(Normed):
    """What is normed already."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def value(self) -> Tensor:
        return self._x


def padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def moe_on_ranks(x: Tensor, weights: Weights, moe: MoESpec, ranks: int, ep: bool, shared: bool) -> list[Tensor]:
    """What each of `ranks` ranks returns, each holding its part only."""

    def cut(gate_up: Tensor, down: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        part = Grid(ranks).width(Rank(rank), down.shape[-1])
        own = slice(part.start, part.stop)
        gate, up = gate_up.chunk(2)
        rows = torch.cat([padded(gate[own], part.padded), padded(up[own], part.padded)])
        return rows, padded(down.T[own], part.padded).T

    def compute(rank: int, world: Collective) -> Tensor:
        if ep:
            held = split_evenly(moe.num_experts, ranks)[rank]
            own = slice(held.start, held.stop)
            held_parts = list(zip(weights.gate_up[own], weights.down[own], strict=True))
            first = held.start
        else:
            held_parts = [cut(a, b, rank) for a, b in zip(weights.gate_up, weights.down, strict=True)]
            first = 0
        experts = Experts([Expert(Matrix(a), Matrix(b)) for a, b in held_parts], first)
        rows, cols = cut(weights.shared_gate_up, weights.shared_down, rank)
        common = Expert(Matrix(rows), Matrix(cols)) if shared else None
        return MoE(Router(weights.gate, weights.bias, moe), experts, common, world)(Given(x))

    return on_ranks(ranks, compute)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within float32's rounding of the largest value."""
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert found.numel() == 0 or (found - expected).abs().max() <= 2e-6 * expected.abs().max()


def tokens_of(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count + 1)) * 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_routing_by_definition(kind: str) -> None:
    moe, x = KINDS[kind], tokens_of(40)
    weights = Weights(moe)
    found, chosen = Router(weights.gate, weights.bias, moe)(x)
    assert found.dtype == torch.float32 and found.shape == chosen.shape == (40, moe.experts_per_token)
    for i, token in enumerate(x.double()):
        expected = chosen_by_definition(token, weights, moe)
        assert dict(zip(chosen[i].tolist(), found[i].tolist(), strict=True)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_cut_over_ranks(kind: str, ranks: int, ep: bool) -> None:
    """More ranks than experts, widths that do not divide, experts without tokens, a single token, none."""
    moe = KINDS[kind]
    weights = Weights(moe)
    for count in (0, 1, 23):
        x = tokens_of(count)
        expected = by_definition(x, weights, moe, shared=True)
        results = moe_on_ranks(x, weights, moe, ranks, ep, shared=True)
        assert len(results) == ranks and all(torch.equal(result, results[0]) for result in results)
        assert_close(results[0], expected)


def test_without_shared_experts() -> None:
    moe, x = KINDS["softmax"], tokens_of(9)
    weights = Weights(moe)
    [result] = moe_on_ranks(x, weights, moe, 1, ep=True, shared=False)
    assert_close(result, by_definition(x, weights, moe, shared=False))


def test_all_tokens_to_one_expert() -> None:
    """The others hold no token; the sum does not depend on what is batched with a token."""
    moe = MoESpec(5, 1, WIDTH)
    weights = Weights(moe)
    x = tokens_of(6).abs() + 0.1
    weights.gate = torch.full((5, HIDDEN), -1.0)
    weights.gate[3] = 1.0
    _, chosen = Router(weights.gate, None, moe)(x)
    assert chosen.unique().tolist() == [3]
    for ep in (False, True):
        results = moe_on_ranks(x, weights, moe, 3, ep, shared=False)
        assert_close(results[0], by_definition(x, weights, moe, shared=False))


def test_bfloat16_is_summed_in_float32() -> None:
    moe, x = KINDS["softmax-normalized"], tokens_of(5).bfloat16()
    weights = Weights(moe)
    narrow = zip(weights.gate_up.bfloat16(), weights.down.bfloat16(), strict=True)
    experts = Experts([Expert(Matrix(a), Matrix(b)) for a, b in narrow])
    router = Router(weights.gate, None, moe)
    out = experts(x, *router(x))
    assert out.dtype == torch.float32
    expected = by_definition(x.float(), weights, moe, shared=False).float()
    assert (out - expected).abs().max() < 0.03 * expected.abs().max()
