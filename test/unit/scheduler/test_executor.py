"""Plans are numbered and chained: a worker notices one that is lost, foreign or changed."""

from __future__ import annotations

import msgspec
import pytest

from dcprt.errors import PlanError
from dcprt.messages import PageCopy, PlanBody, RowAdd, RowGrowth, RowSampling, RowWork, StepPlan, pack_tokens
from dcprt.scheduler.executor import PlanReader, PlanWriter

BODY = PlanBody(
    copies=[PageCopy(1, 2, 3)],
    drops=[4],
    adds=[RowAdd(5, pack_tokens([7, 8]), 1, [2], RowSampling(0.5, 0.9, 10, 2**63 + 1))],
    growth=[RowGrowth(6, [9, 10])],
    work=[RowWork(5, 1, 1), RowWork(6, 2, 0)],
)


def plans(count: int, epoch: int = 0) -> list[StepPlan]:
    writer = PlanWriter(epoch)
    return [writer.write(PlanBody(work=[RowWork(row, 1, 1)])) for row in range(count)]


def test_a_plan_arrives_as_it_was_sent() -> None:
    plan = PlanWriter().write(BODY)
    wire = msgspec.msgpack.encode(plan)
    assert PlanReader().read(msgspec.msgpack.decode(wire, type=StepPlan)) == BODY


def test_plans_in_order_are_read() -> None:
    reader = PlanReader(3)
    assert [reader.read(plan).work[0].row for plan in plans(4, epoch=3)] == [0, 1, 2, 3]


def test_a_gap_is_named() -> None:
    reader, (first, _, third) = PlanReader(), plans(3)
    reader.read(first)
    with pytest.raises(PlanError, match="Plan 3 came after plan 1"):
        reader.read(third)


def test_a_repeated_plan_is_refused() -> None:
    reader, (first,) = PlanReader(), plans(1)
    reader.read(first)
    with pytest.raises(PlanError, match="Plan 1 came after plan 1"):
        reader.read(first)


def test_a_plan_of_another_epoch_is_refused() -> None:
    with pytest.raises(PlanError, match="epoch 1, this worker of epoch 0"):
        PlanReader().read(plans(1, epoch=1)[0])


def test_a_changed_body_is_refused() -> None:
    (plan,) = plans(1)
    other = PlanWriter().write(BODY)
    with pytest.raises(PlanError, match=plan.digest.hex()):
        PlanReader().read(msgspec.structs.replace(plan, body=other.body))


def test_a_right_plan_after_a_foreign_history_is_refused() -> None:
    writer = PlanWriter()
    writer.write(BODY)
    second = writer.write(PlanBody())
    reader = PlanReader()
    reader.read(plans(1)[0])
    with pytest.raises(PlanError, match="digest"):
        reader.read(second)


def test_after_a_refused_plan_the_right_one_is_still_read() -> None:
    reader, (first, second) = PlanReader(), plans(2)
    with pytest.raises(PlanError):
        reader.read(second)
    reader.read(first)
    reader.read(second)
