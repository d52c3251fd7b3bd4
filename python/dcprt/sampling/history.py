"""Which tokens a row has seen, for the penalties."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcprt.messages import RowSampling


class History:
    """Prompt and output of one row: `seen` bool [vocab] over both, `counts` float32 [vocab] over the output."""

    def __init__(self, tokens: Sequence[int], prompt_len: int, vocab_size: int) -> None:
        self._seen = torch.zeros(vocab_size, dtype=torch.bool)
        self._counts = torch.zeros(vocab_size)
        if len(tokens):
            self._seen[torch.tensor(tokens, dtype=torch.int64)] = True
        for token in tokens[prompt_len:]:
            self._counts[token] += 1

    def add(self, token: int) -> None:
        """A token was chosen."""
        self._seen[token] = True
        self._counts[token] += 1

    def penalize(self, logits: Tensor, params: RowSampling) -> None:
        """Change `logits` [vocab] in place.

        Repetition (CTRL, Keskar et al. 2019): positive logits of tokens in prompt or output are divided, negative
        ones multiplied. Frequency and presence (OpenAI): subtracted per occurrence, and once, over the output.
        """
        if params.repetition_penalty != 1:
            own = logits[self._seen]
            factor = params.repetition_penalty
            logits[self._seen] = torch.where(own > 0, own / factor, own * factor)
        if params.frequency_penalty:
            logits -= params.frequency_penalty * self._counts
        if params.presence_penalty:
            logits -= params.presence_penalty * (self._counts > 0)
