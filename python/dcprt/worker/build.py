"""From a deployment to one rank's worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from dcprt.attention.dcp import DcpAttention
from dcprt.attention.torch_backend import TorchBackend
from dcprt.comm.groups import Groups
from dcprt.ids import Rank
from dcprt.kv.layout import LayoutDescriptor
from dcprt.kv.pool import KVPool
from dcprt.models.base import ModelShard
from dcprt.models.registry import build
from dcprt.planner.deployment import Deployment
from dcprt.weights.checkpoint import Checkpoint, DummyCheckpoint
from dcprt.weights.loader import Loader
from dcprt.worker.worker import Worker


def build_worker(
    deployment: Deployment, rank: Rank, groups: Groups, progress: Callable[[int, int], None] | None = None
) -> Worker:
    """Load `rank`'s part of the weights and lay out its KV pool. `progress` hears (tensors done, tensors in all).

    Raises:
        ModelError: a tensor is missing, extra or misshapen, or a file is damaged.
    """
    spec, grid = deployment.spec, deployment.grid
    heads = grid.heads(rank, spec.num_heads, spec.num_kv_heads)
    attention = DcpAttention(heads, spec.head_dim, TorchBackend(), groups.dcp)
    shard = ModelShard(grid, rank, heads, groups.world, attention)
    checkpoint: Checkpoint | DummyCheckpoint
    if deployment.config.model.load_format == "dummy":
        checkpoint = DummyCheckpoint(deployment.config.schedule.random_seed)
    else:
        checkpoint = Checkpoint(Path(deployment.directory))
    load = Loader(checkpoint, getattr(torch, deployment.dtype), progress)
    model = build(spec, shard, load)
    load.finish(["*.rotary_emb.inv_freq", *(["lm_head.weight"] if spec.tie_embeddings else [])])
    descriptor = LayoutDescriptor(
        deployment.layout, spec.num_layers, heads.kv_heads, spec.head_dim, deployment.dtype
    )
    return Worker(model, KVPool(descriptor, deployment.num_pages), groups)
