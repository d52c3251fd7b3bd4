"""Puts load on a server: requests at their times, or as many at a time as may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import repeat

from serving.client import Client, Outcome, Shape
from serving.prompts import Vocabulary
from serving.workloads import Request


async def run(
    client: Client,
    shape: Shape,
    vocabulary: Vocabulary,
    requests: Sequence[Request],
    starts: Sequence[float] | None,
    max_concurrency: int | None,
    ended: Callable[[Outcome], None],
) -> list[Outcome]:
    """Send all requests; `ended` is called with each that is through.

    With `starts`, in seconds, a request is due at its own time, whether or not earlier ones are through: a slow
    server does not slow the schedule down, and what a request waits for one of `max_concurrency` places, or for this
    client, lies between `scheduled` and `sent`. Without, it is due when a place is free.
    """
    places = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    outcomes: list[Outcome] = []

    async def one(body: bytes, outcome: Outcome) -> None:
        try:
            await client.send(body, outcome)
        finally:
            places.release()
        ended(outcome)

    async with asyncio.TaskGroup() as tasks:
        for request, start in zip(requests, starts if starts is not None else repeat(None)):
            body = shape.body(request.prompt, request.output_len, vocabulary)  # before it is due: long ones take ms
            if not outcomes:
                client.begin()
            await asyncio.sleep(0 if start is None else max(0.0, start - client.now()))
            await places.acquire()
            outcome = Outcome(client.now() if start is None else start)
            outcome.asked_input, outcome.asked_output = request.input_len, request.output_len
            outcomes.append(outcome)
            tasks.create_task(one(body, outcome))
    return outcomes
