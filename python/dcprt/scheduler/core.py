"""Scheduler and executor, one step at a time: the inner loop of a server, without its sockets."""

from __future__ import annotations

from dcprt.messages import TokensOut
from dcprt.scheduler.executor import Executor, PlanWriter
from dcprt.scheduler.scheduler import Scheduler


class Core:
    """Plans, has them executed, applies the results. Synchronous: a plan leaves when the one before it is done."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._writer = PlanWriter()

    def step(self) -> list[TokensOut]:
        """One step, or nothing if there is nothing to compute."""
        body = self.scheduler.plan()
        if body is None:
            return []
        plan = self._writer.write(body)
        self._executor.submit(plan)
        result = self._executor.result()
        assert (result.number, result.digest) == (plan.number, plan.digest), (result.number, plan.number)
        return self.scheduler.apply(result.tokens)
