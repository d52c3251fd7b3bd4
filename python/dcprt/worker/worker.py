"""One rank: executes plans strictly in order."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from dcprt.comm.groups import Groups
from dcprt.kv.pool import KVPool
from dcprt.messages import RowLogprobs, StepPlan, StepResult, TokenLogprobs
from dcprt.models.base import Model
from dcprt.sampling.sampler import FAILED, logprobs, sample
from dcprt.scheduler.executor import PlanReader
from dcprt.worker.rows import RowTable, ScoredPrompt, Step

SCORE_BLOCK = 64
"""Prompt tokens scored at a time: their logits over a large vocabulary must not fill the memory."""


STAND_IN = 0
"""The token of a row that got none: the next plan, which may be here already, still works on it."""


class Worker:
    """Weights, KV pool and rows of one rank."""

    def __init__(self, model: Model, pool: KVPool, groups: Groups) -> None:
        self._model = model
        self._pool = pool
        self._groups = groups
        self._rows = RowTable(pool.descriptor.layout, groups.dcp.rank, model.spec.vocab_size)
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
        result = StepResult(number=plan.number, epoch=plan.epoch, digest=plan.digest, tokens=[])
        if not body.work:
            return result
        step = self._rows.step(body)
        hidden = self._model.forward(step.inputs, self._pool)
        scored = [self._score(prompt, hidden) for prompt in step.scored]
        tokens, logprobs = self._choose(step, hidden)
        chosen = dict(tokens)
        failed = [(row, "its logits are not finite") for row in step.yielding if row not in chosen]
        self._rows.advance(body, {**chosen, **{row: [STAND_IN] for row, _ in failed}})
        return msgspec.structs.replace(result, tokens=tokens, logprobs=logprobs, prompt_logprobs=scored, failed=failed)

    def _choose(self, step: Step, hidden: Tensor) -> tuple[list[tuple[int, list[int]]], list[RowLogprobs]]:
        """Rank 0 samples; all ranks learn the tokens. Rows that cannot be sampled get none."""
        if not step.yielding:
            return [], []
        logits = self._model.logits(hidden[step.logit_index])
        ids = torch.zeros(len(step.yielding), dtype=torch.int64)
        found: list[RowLogprobs] = []
        if self._groups.world.rank == 0:
            chosen = sample(logits, step.samples)
            ids = torch.tensor(chosen)
            found = self._logprobs(step, logits, chosen)
        ids = self._groups.world.broadcast(ids)
        tokens = zip(step.yielding, ids.tolist(), strict=True)
        return [(row, [token]) for row, token in tokens if token != FAILED], found

    @staticmethod
    def _logprobs(step: Step, logits: Tensor, chosen: list[int]) -> list[RowLogprobs]:
        """Log probabilities of the chosen tokens, for the rows that want them."""
        wanted = [i for i, row in enumerate(step.samples) if row.params.logprobs >= 0 and chosen[i] != FAILED]
        if not wanted:
            return []
        counts = [step.samples[i].params.logprobs for i in wanted]
        found = logprobs(logits[wanted], [chosen[i] for i in wanted], counts)
        return [
            RowLogprobs(step.yielding[i], step.samples[i].position, [one]) for i, one in zip(wanted, found, strict=True)
        ]

    def _score(self, prompt: ScoredPrompt, hidden: Tensor) -> RowLogprobs:
        """Log probabilities of prompt tokens, a block of logits at a time."""
        found: list[TokenLogprobs] = []
        for start in range(0, len(prompt.tokens), SCORE_BLOCK):
            tokens = prompt.tokens[start : start + SCORE_BLOCK]
            first = prompt.start + start
            logits = self._model.logits(hidden[first : first + len(tokens)])
            if self._groups.world.rank == 0:
                found += logprobs(logits, tokens, [prompt.count] * len(tokens))
        return RowLogprobs(prompt.row, prompt.position, found)
