"""The model behind the handlers: there or not yet, and requests to it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from dcprt.errors import RequestError, RuntimeFailed, did_you_mean
from dcprt.messages import Finish, TextOut, TextRequest, Usage, pack_tokens
from dcprt.params import SamplingParams
from dcprt.runtime.runtime import Runtime, Stream
from dcprt.server.protocol import Prompt


@dataclass
class Choice:
    """What one request has produced so far."""

    prompt_len: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    usage: Usage = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
    finish: Finish | None = None

    def add(self, event: TextOut) -> None:
        self.text += event.text
        self.token_ids += event.token_ids
        self.usage = event.usage
        self.finish = event.finish


class Service:
    """Holds the runtime once it is there. `stopping` refuses new requests while old ones finish."""

    def __init__(self, model_name: str = "") -> None:
        self.model_name = model_name
        self.runtime: Runtime | None = None
        self.stopping = False
        self.live = 0

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

    async def start(self, requests: Sequence[TextRequest]) -> list[Stream]:
        """Submit all, and wait until all are accepted; if one is refused, none goes on.

        Raises:
            RequestError, RuntimeFailed.
        """
        runtime = self.get()
        streams: list[Stream] = []
        try:
            streams.extend(runtime.submit(request) for request in requests)
            await asyncio.gather(*(stream.accepted() for stream in streams))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    async def events(self, streams: Sequence[Stream]) -> AsyncIterator[tuple[int, TextOut]]:
        """The events of several streams as they come, each with the index of its stream."""
        merged: asyncio.Queue[tuple[int, TextOut | BaseException | None]] = asyncio.Queue()

        async def pump(index: int, stream: Stream) -> None:
            try:
                async for item in stream:
                    merged.put_nowait((index, item))
                merged.put_nowait((index, None))
            except RuntimeFailed as error:
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
            for stream in streams:
                stream.close()

    async def collect(self, requests: Sequence[TextRequest]) -> list[Choice]:
        """Everything at once."""
        streams = await self.start(requests)
        choices = [Choice(stream.prompt_len) for stream in streams]
        async for index, item in self.events(streams):
            choices[index].add(item)
        return choices


def text_request(rid: str, prompt: Prompt, sampling: SamplingParams, salt: str | None) -> TextRequest:
    """A request for a text or for token ids."""
    if isinstance(prompt, str):
        return TextRequest(rid=rid, prompt=prompt, sampling=sampling, cache_salt=salt or "")
    return TextRequest(rid=rid, token_ids=pack_tokens(prompt), sampling=sampling, cache_salt=salt or "")


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:24]}"
