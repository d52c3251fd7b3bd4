"""Tiny random checkpoints of any family, and dcprt compared with transformers on them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .harness import Harness, relative_error

TOLERANCE = 1e-5
TIE = 1e-3
"""Greedy tokens may differ where the reference's two best logits lie closer than this."""
ROUTER_GAP = 1e-5
"""Least distance, in a test's prompts, between the last expert (or group) chosen and the first not chosen."""
VOCAB = 131
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
GRIDS = [(1, 1), (2, 2), (4, 2), (4, 4), (3, 3)]
LENGTHS = [1, 2, 63, 64, 65, 200, 600]


def write(directory: Path, kind: type[Any], config: Any, seed: int = 0) -> Any:
    """Save a random model of class `kind`. Biases and norms are random too; the model is returned.

    Its experts compute one by one: transformers' grouped product takes only widths that are multiples of 4.
    """
    torch.manual_seed(seed)
    model = kind(config).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                tensor.normal_(0, 0.3)
            elif "norm" in name:
                tensor.normal_(1, 0.2)
    model.save_pretrained(directory)
    return model


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(VOCAB) for _ in range(length)]


@torch.inference_mode()
def reference(model: Any, tokens: Sequence[int], prompt_len: int) -> Tensor:
    """Logits for every token behind the prompt, from one pass over the whole text; refuses near ties of a router."""
    gaps: list[float] = []

    def note(router: Any, _: Any, output: Any) -> None:
        gaps.append(router_gap(router, output[0].float()))

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(note) for router in routers]
    logits: Tensor = model(torch.tensor([list(tokens)])).logits[0, prompt_len - 1 : -1]
    for hook in hooks:
        hook.remove()
    assert all(gap >= ROUTER_GAP for gap in gaps), f"router gap {min(gaps)}: choose another seed"
    return logits


def router_gap(router: Any, logits: Tensor) -> float:
    """Least distance between what was chosen last and what was not; logits: float32 [tokens, experts].

    Softmax keeps the order of the logits, so distances are taken between these.
    """
    bias = getattr(router, "e_score_correction_bias", None)
    scores = logits if bias is None else logits.sigmoid() + bias
    groups = getattr(router, "num_group", None) or 1
    gap = float("inf")
    if groups > 1 and getattr(router, "topk_method", "") != "greedy":
        grouped = scores.unflatten(-1, (groups, -1))
        value = grouped.amax(-1) if bias is None else grouped.topk(2).values.sum(-1)
        gap = _gap(value, router.topk_group)
        best = value.topk(router.topk_group).indices
        inside = torch.zeros_like(value, dtype=torch.bool).scatter(-1, best, True)
        scores = grouped.masked_fill(~inside.unsqueeze(-1), -1e9).flatten(-2)
    return min(gap, _gap(scores, router.top_k))


def _gap(scores: Tensor, chosen: int) -> float:
    if chosen >= scores.shape[-1]:
        return float("inf")
    best = scores.topk(chosen + 1).values
    return float((best[:, -2] - best[:, -1]).min())


def assert_agrees(harness: Harness, model: Any, prompt: Sequence[int], count: int = 4) -> None:
    """Logits within the tolerance, and each token the reference's best."""
    request, logits = harness.greedy(prompt, count)
    expected = reference(model, list(request.tokens), len(prompt))
    assert relative_error(logits, expected) <= TOLERANCE
    best = expected.topk(2).values
    wrong = expected.argmax(-1) != torch.tensor(list(request.tokens)[len(prompt) :])
    assert not (wrong & (best[:, 0] - best[:, 1] > TIE)).any()


def assert_family(
    directory: Path,
    model: Any,
    grid: tuple[int, int],
    *,
    chunk: int = 64,
    lengths: Sequence[int] = LENGTHS,
    **options: Any,
) -> None:
    """Prompts of all lengths on one grid; `chunk` is the most prompt tokens of a step."""
    with Harness(directory, tp=grid[0], dcp=grid[1], page_size=4, chunked_prefill_size=chunk, **options) as harness:
        for length in lengths:
            assert_agrees(harness, model, prompt_of(length, seed=length))
