"""The model behind the handlers: there or not yet, and requests to it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec

from dcprt.errors import DcprtError, RequestError, RuntimeFailed, did_you_mean
from dcprt.messages import Finish, TextLogprob, TextOut, TextRequest, Usage, pack_tokens
from dcprt.params import SamplingParams
from dcprt.runtime.runtime import Runtime, Stream
from dcprt.server.protocol import Prompt


@dataclass
class Choice:
    """What one request has produced so far."""

    usage: Usage
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[TextLogprob] = field(default_factory=list)
    prompt_logprobs: list[TextLogprob] = field(default_factory=list)
    prompt_text: str = ""

    @classmethod
    def of(cls, stream: Stream) -> Choice:
        """Nothing yet."""
        return cls(Usage(prompt_tokens=stream.prompt_len, completion_tokens=0, cached_tokens=0))

    def add(self, item: TextOut) -> None:
        self.text += item.text
        self.token_ids += item.token_ids
        self.usage = item.usage
        self.finish = item.finish
        self.logprobs += item.logprobs
        self.prompt_logprobs += item.prompt_logprobs
        self.prompt_text += item.prompt_text


class Service:
    """Holds the runtime once it is there. `stopping` refuses new requests while old ones finish."""

    def __init__(self, model_name: str = "") -> None:
        self.model_name = model_name
        self.runtime: Runtime | None = None
        self.stopping = False
        self.live = 0
        self._groups: dict[str, list[Stream]] = {}

    @property
    def is_ready(self) -> bool:
        return self.runtime is not None and self.runtime.is_ready and not self.stopping

    def get(self) -> Runtime:
        """The runtime.

        Raises:
            RuntimeFailed: it is not ready, or no more.
        """
        if self.runtime is None or not self.is_ready:
            raise RuntimeFailed("The server is shutting down." if self.stopping else "The model is still loading.")
        return self.runtime

    def check_model(self, name: str | None) -> None:
        """Raises RequestError (404) for a model that is not served here."""
        if name is not None and name != self.get().deployment.model_name:
            served = self.get().deployment.model_name
            raise RequestError(
                f"The model {name!r} is not served here; {served!r} is.{did_you_mean(name, [served])}",
                param="model",
                status=404,
                code="model_not_found",
            )

    async def start(self, requests: Sequence[TextRequest], group: str = "") -> list[Stream]:
        """Submit all, and wait until all are accepted; if one is refused, none goes on.

        `group` is a name under which all of them can be aborted, as long as one is live.

        Raises:
            RequestError, RuntimeFailed.
        """
        runtime = self.get()
        streams: list[Stream] = []
        try:
            streams.extend(runtime.submit(request) for request in requests)
            if group and len(requests) > 1:
                self._groups[group] = streams
            await asyncio.gather(*(stream.accepted() for stream in streams))
        except BaseException:
            self.close(streams)
            raise
        return streams

    def close(self, streams: list[Stream]) -> None:
        """Abort those that have not ended, and forget the name of the group they are."""
        for stream in streams:
            stream.close()
        self._groups = {name: others for name, others in self._groups.items() if others is not streams}

    def abort(self, rid: str) -> int:
        """Abort the live request with this id, or all of the group; returns how many."""
        runtime = self.get()
        return sum(runtime.abort(one) for one in [rid, *(stream.rid for stream in self._groups.get(rid, ()))])

    def abort_all(self) -> int:
        """Abort everything; returns how many."""
        runtime = self.get()
        return sum(runtime.abort(rid) for rid in runtime.live_rids())

    async def events(self, streams: list[Stream]) -> AsyncIterator[tuple[int, TextOut]]:
        """The events of several streams as they come, each with the index of its stream."""
        merged: asyncio.Queue[tuple[int, TextOut | BaseException | None]] = asyncio.Queue()

        async def pump(index: int, stream: Stream) -> None:
            try:
                async for item in stream:
                    merged.put_nowait((index, item))
                merged.put_nowait((index, None))
            except DcprtError as error:
                merged.put_nowait((index, error))

        self.live += 1
        tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
        try:
            left = len(streams)
            while left:
                index, item = await merged.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield index, item
        finally:
            self.live -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.close(streams)

    async def collect(self, requests: Sequence[TextRequest], group: str = "") -> list[Choice]:
        """Everything at once."""
        streams = await self.start(requests, group)
        choices = [Choice.of(stream) for stream in streams]
        async for index, item in self.events(streams):
            choices[index].add(item)
        return choices


def text_request(rid: str, prompt: Prompt, sampling: SamplingParams) -> TextRequest:
    """A request for a text or for token ids."""
    if isinstance(prompt, str):
        return TextRequest(rid=rid, prompt=prompt, sampling=sampling)
    return TextRequest(rid=rid, token_ids=pack_tokens(prompt), sampling=sampling)


def nth_choice(sampling: SamplingParams, number: int) -> SamplingParams:
    """The same with the seed of the choice `number` of a prompt; the first has the seed that was given."""
    if sampling.seed is None or not number:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + number) % 2**64)


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:24]}"
