"""What an attention kernel has to offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dcprt.attention.partial import Partial
from dcprt.attention.plan import AttentionPlan


class AttentionBackend(Protocol):
    """Two passes over two disjoint sets of keys; neither knows of dcp."""

    def context(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: AttentionPlan, scale: float) -> Partial:
        """Non-causal attention over the local slots of each row.

        q: [tokens, heads, head_dim]; k_pool, v_pool: [pages, page_size, kv_heads, head_dim], where `kv_heads` divides
        `heads` and query head `h` attends to KV head `h // (heads // kv_heads)`. A row without local slots gets
        `out` 0 and `lse` -inf.
        """
        ...

    def new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, q_to_kv: Sequence[int], plan: AttentionPlan, scale: float
    ) -> Partial:
        """Causal attention of each row's new tokens among themselves.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; query head `h` attends to KV head
        `q_to_kv[h]`, however uneven.
        """
        ...
