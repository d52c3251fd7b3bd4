"""From a deployment to one rank's worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from dcprt.attention.combine import choose
from dcprt.attention.dcp import DcpAttention
from dcprt.attention.plan import ContextCosts
from dcprt.attention.registry import make_backend
from dcprt.comm.groups import Groups
from dcprt.config import parse_bytes
from dcprt.env import attention_backend
from dcprt.ids import Rank
from dcprt.kv.layout import LayoutDescriptor
from dcprt.kv.pool import KVPool
from dcprt.models.base import ModelShard
from dcprt.models.registry import build, ignored, open_checkpoint
from dcprt.parallel.grid import RankHeads
from dcprt.planner.capacity import ITEMSIZE
from dcprt.planner.deployment import Deployment
from dcprt.weights.checkpoint import DummyCheckpoint, TensorSource
from dcprt.weights.loader import Loader
from dcprt.worker.profile import StepProfile
from dcprt.worker.worker import Worker


def build_worker(
    deployment: Deployment,
    rank: Rank,
    groups: Groups,
    progress: Callable[[int, int], None] | None = None,
    profile: StepProfile | None = None,
) -> Worker:
    """Load `rank`'s part of the weights and lay out its KV pool. `progress` hears (tensors done, tensors in all).

    With `profile`, the parts of the worker record what they do.

    Raises:
        ModelError: a tensor is missing, extra or misshapen, or a file is damaged.
    """
    spec, grid, options = deployment.spec, deployment.grid, deployment.config.grid
    heads = grid.heads(rank, spec.num_heads, spec.cached_heads)
    if profile is not None:
        groups = profile.groups(groups)
    attention = make_attention(deployment, heads, groups, profile)
    shard = ModelShard(grid, rank, heads, groups.world, attention, replicate_q=options.dcp_replicate_q, ep=options.ep)
    checkpoint: TensorSource
    if deployment.config.model.load_format == "dummy":
        checkpoint = DummyCheckpoint(deployment.config.schedule.random_seed)
    else:
        checkpoint = open_checkpoint(Path(deployment.directory), spec)
    load = Loader(checkpoint, getattr(torch, deployment.dtype), progress)
    model = build(spec, shard, load if profile is None else profile.loader(load))
    load.finish(ignored(spec))
    descriptor = LayoutDescriptor(
        layout=deployment.layout,
        num_layers=spec.num_layers,
        kv_heads=heads.kv_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        own_values=spec.mla is None,
        dtype=deployment.dtype,
    )
    pool = KVPool(descriptor, deployment.num_pages)
    if profile is not None:
        model, pool = profile.model(model), profile.pool(pool)
    return Worker(model, pool, groups)


def make_attention(
    deployment: Deployment, heads: RankHeads, groups: Groups, profile: StepProfile | None = None
) -> DcpAttention:
    """The attention of one rank, with what its two ways of gathering cost."""
    spec, options = deployment.spec, deployment.config.grid
    itemsize, places = ITEMSIZE[deployment.dtype], len(heads.shard_q_heads)
    raised = spec.mla is not None and options.dcp_replicate_q
    out_dim = spec.mla.v_dim if spec.mla and raised else spec.value_dim
    queries = 0 if options.dcp_replicate_q else spec.key_dim * itemsize
    costs = ContextCosts(
        query_bytes=places * (queries + 4 * (out_dim + 1)),
        kv_bytes=len(heads.kv_heads) * spec.kv_elements_per_head * itemsize,
        workspace=parse_bytes(options.dcp_workspace),
    )
    scale = spec.mla.softmax_scale if spec.mla else spec.head_dim**-0.5
    combine = choose(options.dcp_comm, groups, places, out_dim)
    backend = make_backend(attention_backend())
    if profile is not None:
        backend = profile.backend(backend)
    return DcpAttention(heads, scale, backend, groups.dcp, combine, costs)
