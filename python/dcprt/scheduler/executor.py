"""What the scheduler knows of the workers: plans go in, results come out, in order."""

from __future__ import annotations

from typing import Protocol

import msgspec

from dcprt.errors import PlanError
from dcprt.messages import PlanBody, StepPlan, StepResult, chain_digest


class Executor(Protocol):
    """Workers, wherever they are."""

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every worker; does not wait."""
        ...

    def result(self) -> StepResult:
        """The result of the oldest plan that has none yet; waits for it."""
        ...


class PlanWriter:
    """Numbers plans and chains their digests, so that a worker notices a lost or foreign one."""

    def __init__(self, epoch: int = 0) -> None:
        self._epoch = epoch
        self._number = 0
        self._digest = b""

    def write(self, body: PlanBody) -> StepPlan:
        encoded = msgspec.msgpack.encode(body)
        self._number += 1
        self._digest = chain_digest(self._digest, self._number, self._epoch, encoded)
        return StepPlan(number=self._number, epoch=self._epoch, digest=self._digest, body=encoded)


class PlanReader:
    """A worker's end of the chain."""

    def __init__(self, epoch: int = 0) -> None:
        self._epoch = epoch
        self._number = 0
        self._digest = b""

    def read(self, plan: StepPlan) -> PlanBody:
        """Check and decode.

        Raises:
            PlanError: a wrong epoch, a gap in the numbers, or a digest that does not continue the chain.
        """
        if plan.epoch != self._epoch:
            raise PlanError(f"Plan {plan.number} is of epoch {plan.epoch}, this worker of epoch {self._epoch}.")
        if plan.number != self._number + 1:
            raise PlanError(f"Plan {plan.number} came after plan {self._number}; plans in between are missing.")
        digest = chain_digest(self._digest, plan.number, plan.epoch, plan.body)
        if digest != plan.digest:
            raise PlanError(
                f"Plan {plan.number} has digest {plan.digest.hex()}, but {digest.hex()} would continue "
                "the plans this worker has seen."
            )
        self._number, self._digest = plan.number, digest
        return msgspec.msgpack.decode(plan.body, type=PlanBody)
