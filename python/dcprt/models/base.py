"""What a model file is given, and what it has to offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dcprt.attention.dcp import DcpAttention
from dcprt.attention.plan import AttentionPlan
from dcprt.comm.protocol import Collective
from dcprt.ids import Rank
from dcprt.kv.pool import KVPool
from dcprt.parallel.grid import Grid, RankHeads
from dcprt.spec import ModelSpec


@dataclass(frozen=True)
class ModelShard:
    """A rank's place, and what it talks through.

    With `replicate_q`, queries are projected for the whole head shard instead of being gathered. With `ep`, experts
    are cut by expert instead of by width.
    """

    grid: Grid
    rank: Rank
    heads: RankHeads
    world: Collective
    attention: DcpAttention
    replicate_q: bool = False
    ep: bool = False


@dataclass(frozen=True)
class StepInput:
    """One step's tokens on every rank alike.

    token_ids, positions: int64 [tokens].
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionPlan


class Model(Protocol):
    """A causal language model, sharded."""

    spec: ModelSpec

    def forward(self, step: StepInput, kv: KVPool) -> Tensor:
        """Hidden states [tokens, hidden] before the last norm; stores the step's KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Some rows of hidden states to float32 [rows, vocab_size]. A collective: all ranks call it alike."""
        ...
