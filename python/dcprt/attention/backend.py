"""What an attention kernel has to offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from dcprt.attention.partial import Partial
from dcprt.attention.plan import AttentionPlan, RowSlice


class AttentionBackend(Protocol):
    """Attention over disjoint sets of keys, each a `Partial`; none of it knows of dcp.

    Values may have another dimension than keys; outputs have that of the values.
    """

    def context(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: Sequence[RowSlice], scale: float) -> Partial:
        """Non-causal attention over the local slots of each row; queries of no row get an empty result.

        q: [tokens, heads, dim]; k_pool, v_pool: [pages, page_size, kv_heads, dim], where `kv_heads` divides
        `heads` and query head `h` attends to KV head `h // (heads // kv_heads)`. A row without local slots gets
        `out` 0 and `lse` -inf.
        """
        ...

    def new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, q_to_kv: Sequence[int], plan: AttentionPlan, scale: float
    ) -> Partial:
        """Causal attention of each row's new tokens among themselves.

        q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]; query head `h` attends to KV head
        `q_to_kv[h]`, however uneven.
        """
        ...

    def dense(self, q: Tensor, k: Tensor, v: Tensor, q_to_kv: Sequence[int], scale: float) -> Partial:
        """Non-causal attention of all queries to all keys; k, v: [keys, kv_heads, dim], otherwise as `new_tokens`."""
        ...


@runtime_checkable
class FusedBackend(AttentionBackend, Protocol):
    """One that also does both passes at once, where all of the cache is on one rank."""

    def paged(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, q_to_kv: Sequence[int], rows: Sequence[RowSlice], scale: float
    ) -> Tensor:
        """Causal attention of each row's tokens to its context and to themselves, whose KV is stored already.

        q: [tokens, heads, dim]; pools as in `context`, heads as in `new_tokens`; rows of one token or more, which cover
        all tokens. Returns float32 [tokens, heads, value dim].
        """
        ...
