"""Greedy tokens of transformers, with how far its two best logits lay apart at each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

EXCUSE = 1e-3
"""Where the reference's two best logits are this close, either is right."""


@dataclass(frozen=True)
class Greedy:
    """`tokens[i]` was best, and `gaps[i]` better than the second best."""

    tokens: list[int]
    gaps: list[float]


class Reference:
    """A checkpoint as transformers computes it, at float32."""

    def __init__(self, directory: str | Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model.eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], count: int) -> Greedy:
        """`count` tokens after `prompt`, going on behind any end token."""
        tokens: list[int] = []
        gaps: list[float] = []
        step = torch.tensor([list(prompt)])
        cache = None
        for _ in range(count):
            out = self.model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            best = out.logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            step = best.indices[:1].unsqueeze(0)
        return Greedy(tokens, gaps)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocab]."""
        logits: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
        return logits


def first_difference(found: Sequence[int], reference: Greedy) -> int | None:
    """Where `found` first leaves the reference, or None."""
    assert len(found) == len(reference.tokens)
    return next((i for i, (a, b) in enumerate(zip(found, reference.tokens, strict=True)) if a != b), None)


def compare(found: Sequence[Sequence[int]], reference: Sequence[Greedy]) -> tuple[list[str], list[str]]:
    """What differs without excuse, and what is excused."""
    wrong: list[str] = []
    excused: list[str] = []
    for index, (tokens, greedy) in enumerate(zip(found, reference, strict=True)):
        place = first_difference(tokens, greedy)
        if place is None:
            continue
        text = (
            f"prompt {index}, token {place}: {tokens[place]} for {greedy.tokens[place]}, gap {greedy.gaps[place]:.1e}"
        )
        (excused if greedy.gaps[place] < EXCUSE else wrong).append(text)
    return wrong, excused
