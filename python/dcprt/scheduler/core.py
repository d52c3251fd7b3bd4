"""Scheduler and executor, one step at a time: the inner loop of a server, without its sockets."""

from __future__ import annotations

from collections import deque

from dcprt.messages import RequestFailed, StepPlan, TokensOut
from dcprt.scheduler.executor import Executor, PlanWriter
from dcprt.scheduler.scheduler import Scheduler


class Core:
    """Plans, has them executed, applies the results.

    With `ahead` 1 a plan leaves before the result of the one before it is back, so that the workers do not wait for
    the scheduler; with 0 each waits for the other.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, ahead: int = 0) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._ahead = ahead
        self._writer = PlanWriter()
        self._flights: deque[StepPlan] = deque()

    @property
    def idle(self) -> bool:
        """Nothing to plan and nothing under way."""
        return self.scheduler.idle and not self._flights

    def step(self) -> list[TokensOut | RequestFailed]:
        """Send the next plan, if there is one, and take the result that is due, if there is one."""
        body = self.scheduler.plan()
        if body is not None:
            plan = self._writer.write(body)
            self._executor.submit(plan)
            self._flights.append(plan)
        if len(self._flights) > self._ahead or (body is None and self._flights):
            return self._apply()
        return []

    def _apply(self) -> list[TokensOut | RequestFailed]:
        plan, result = self._flights.popleft(), self._executor.result()
        assert (result.number, result.digest) == (plan.number, plan.digest), (result.number, plan.number)
        return self.scheduler.apply(result.tokens, result.logprobs, result.prompt_logprobs, result.failed)
