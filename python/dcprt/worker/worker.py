"""One rank: executes plans strictly in order."""

from __future__ import annotations

import torch

from dcprt.comm.groups import Groups
from dcprt.kv.pool import KVPool
from dcprt.messages import StepPlan, StepResult
from dcprt.models.base import Model
from dcprt.sampling.sampler import sample
from dcprt.scheduler.executor import PlanReader
from dcprt.worker.rows import RowTable, Step


class Worker:
    """Weights, KV pool and rows of one rank."""

    def __init__(self, model: Model, pool: KVPool, groups: Groups) -> None:
        self._model = model
        self._pool = pool
        self._groups = groups
        self._rows = RowTable(pool.descriptor.layout, groups.dcp.rank)
        self._plans = PlanReader()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Copies, rows, forward, stores, sampling; every rank returns the same result.

        Raises:
            PlanError: the plan does not follow the ones before it.
            CollectiveTimeout: another rank did not take part.
        """
        body = self._plans.read(plan)
        self._groups.set_step(plan.number)
        self._pool.copy(body.copies, self._groups.dcp.rank)
        self._rows.update(body)
        chosen: list[tuple[int, list[int]]] = []
        if body.work:
            step = self._rows.step(body)
            chosen = self._choose(step, self._model.forward(step.inputs, self._pool))
            self._rows.advance(body, dict(chosen))
        return StepResult(number=plan.number, epoch=plan.epoch, digest=plan.digest, tokens=chosen)

    def _choose(self, step: Step, logits: torch.Tensor) -> list[tuple[int, list[int]]]:
        """Rank 0 samples; all ranks learn the tokens."""
        if not step.yielding:
            return []
        ids = torch.zeros(len(step.yielding), dtype=torch.int64)
        if self._groups.world.rank == 0:
            ids = torch.tensor(sample(logits, step.samples))
        ids = self._groups.world.broadcast(ids)
        return [(row, [token]) for row, token in zip(step.yielding, ids.tolist(), strict=True)]
