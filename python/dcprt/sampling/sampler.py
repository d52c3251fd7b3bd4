"""From logits to tokens. A row's choice depends on its logits, its parameters, its seed and what came before only.

Order: repetition, frequency and presence penalty, logit bias, end tokens banned; then, unless the best is taken,
temperature, min-p, top-k, top-p, and the inverse of the cumulative distribution. Log probabilities are those of the
model's own logits, before any of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcprt import ops
from dcprt.messages import RowSampling, TokenLogprobs
from dcprt.sampling.history import History


@dataclass(frozen=True)
class SampleRow:
    """`position` is that of the token to be chosen; `history` what came before, where the parameters need it."""

    params: RowSampling
    position: int
    history: History | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from seed and position: 53 bits of their BLAKE2b hash."""
    data = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) / 2**53


FAILED = -1
"""Stands for the token of a row that could not be sampled."""


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """float32 logits [rows, vocab] to one token a row; the logits are left as they are.

    A row whose logits have no finite maximum gets `FAILED`; the others do not notice. Parameters that leave no token to
    choose from, such as a ban of all of them, are not heeded.
    """
    places, values = ops.argmax(logits)
    tokens: list[int] = places.tolist()
    sound: list[bool] = values.isfinite().tolist()
    for i, row in enumerate(rows):
        own = logits[i]
        if not sound[i]:
            tokens[i] = FAILED
            continue
        changed = adjusted(own, row)
        if changed is not own and not changed.max().isfinite():
            changed = own
        if row.params.temperature > 0:
            params, drawn = row.params, uniform(row.params.seed, row.position)
            tokens[i] = ops.draw(changed, params.temperature, params.top_k, params.top_p, params.min_p, drawn)
        elif changed is not own:
            tokens[i] = int(changed.argmax())
    return tokens


def adjusted(logits: Tensor, row: SampleRow) -> Tensor:
    """[vocab] with penalties, bias and banned end tokens; the same tensor where there are none."""
    params = row.params
    banned = params.end_ids if row.position < params.min_len else []
    if not (row.history or params.logit_bias or banned):
        return logits
    changed = logits.clone()
    if row.history is not None:
        row.history.penalize(changed, params)
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        changed[list(ids)] += torch.tensor(values)
    if banned:
        changed[banned] = -torch.inf
    return changed


def logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """float32 logits [n, vocab]; for each, the log probability of its token and of the `counts[i]` best."""
    normalized = logits - logits.logsumexp(-1, keepdim=True)
    own = normalized.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()
    most = min(max(counts, default=0), logits.shape[-1])
    best = normalized.topk(most, dim=-1) if most else None
    found = []
    for i, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        top = []
        if best is not None and count:
            top = list(zip(best.indices[i, :count].tolist(), best.values[i, :count].tolist(), strict=True))
        found.append(TokenLogprobs(token, own[i], top))
    return found
