"""The data of one step that attention needs, the same for every layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowSlice:
    """One row of a step on one rank.

    `start`, `stop`: its new tokens in the step's flat token order. `context_len`: tokens cached before the step, over
    all ranks; `local_len` of them on this rank, in the first slots of `pages` (int64 [pages], those of the context).
    """

    start: int
    stop: int
    context_len: int
    local_len: int
    pages: Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """All rows of a step, in token order.

    `store_tokens`, `store_slots`: int64 [owned]; which new tokens this rank owns, and the slots they go to.
    `any_context` is what every rank knows alike, so it decides whether the context pass is run at all.
    """

    rows: tuple[RowSlice, ...]
    store_tokens: Tensor
    store_slots: Tensor

    @property
    def any_context(self) -> bool:
        return any(row.context_len for row in self.rows)
