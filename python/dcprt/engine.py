"""The offline engine: the same processes as a server, driven from Python."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import msgspec

from dcprt.config import Config
from dcprt.errors import DcprtError, RequestError, RuntimeFailed
from dcprt.messages import Finish, TextOut, TextRequest, Usage, pack_tokens
from dcprt.params import SamplingParams
from dcprt.runtime import logs
from dcprt.runtime.prepare import prepare
from dcprt.runtime.runtime import Event, Runtime, Stream
from dcprt.runtime.supervisor import GRACE_S

T = TypeVar("T")
Prompt = str | Sequence[int]
Chat = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Output:
    """What a request produced.

    Attributes:
        text: generated text; in a stream, what is new of it.
        token_ids: generated tokens; in a stream, those that are new.
        finish_reason: `stop`, `length` or `abort`; None in a stream until the end.
        matched_stop: the stop string or token id that ended it.
        usage: tokens of prompt and output so far, and how many of the prompt were cached.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    matched_stop: str | int | None
    usage: Usage

    @classmethod
    def of(cls, event: TextOut) -> Output:
        finish = event.finish or Finish(reason="")
        return cls(event.text, event.token_ids, finish.reason or None, finish.matched, event.usage)


class Engine:
    """A model with its KV cache sharded over `dcp` ranks, for use from any script, notebook or standard input.

        with Engine(model="smollm2-135m", dcp=4) as engine:
            output = engine.generate("The capital of France is", SamplingParams(temperature=0))

    Options are named like the flags of the server, with underscores. The constructor returns when the model is
    ready; `close`, or leaving the context, ends all processes.

    Raises:
        ConfigError, ModelError: the options or the checkpoint cannot work.
        RuntimeFailed: a process ended while starting.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("log_level", "warning")
        config = Config.of(**options)
        log = logs.setup("engine", config.server.log_level)
        self.deployment = prepare(config, log.info)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dcprt engine", daemon=True)
        self._thread.start()
        self._runtime: Runtime | None = None
        try:
            self._runtime = self._run(self._start())
        except BaseException:
            self._stop_loop()
            raise

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str, params: SamplingParams | None = None, *, progress: bool | None = None
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Output]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> Output | list[Output]:
        """Complete one prompt, or many at once.

        A prompt is a text or a list of token ids; a list of prompts gives a list of outputs in the same order.
        `params` is one for all, or one for each. `progress` shows a bar; by default from 16 prompts on.

        Raises:
            RequestError: a prompt or its parameters are wrong, or it does not fit.
            RuntimeFailed: the processes ended.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]
        each = _one_for_each(params, len(many))
        bar = progress if progress is not None else len(many) >= 16
        requests = [_request(p, prompt=prompt) for prompt, p in zip(many, each, strict=True)]
        outputs = self._run(self._collect_all(requests, bar))
        return outputs[0] if single else outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Output]:
        """Complete one prompt, piece by piece. Leaving the iterator early aborts the request."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        opened: list[Stream] = []
        try:
            self._run(self._open(_request(params, prompt=prompt), events.put, opened))
            while not opened[0].ended:
                event = opened[0].read(events.get())
                if isinstance(event, TextOut):
                    yield Output.of(event)
        finally:
            with suppress(RuntimeError):  # the loop is closed, and with it the engine
                self._loop.call_soon_threadsafe(_close, opened)

    async def async_stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Output]:
        """Like `stream`, in any event loop."""
        pieces: asyncio.Queue[_Piece] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(piece: _Piece) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        pumping = self._schedule(self._pump(_request(params, prompt=prompt), put))
        try:
            while (piece := await pieces.get()) is not None:
                yield _unwrap(piece)
        finally:
            pumping.cancel()

    async def async_generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Output:
        """Like `generate` for one prompt, in any event loop."""
        return await asyncio.wrap_future(self._schedule(self._collect(_request(params, prompt=prompt))))

    def chat(self, messages: Chat, params: SamplingParams | None = None) -> Output:
        """Answer a chat: messages of `role` and `content`, through the model's chat template."""
        return self._run(self._collect(_request(params, chat=messages)))

    def server_info(self) -> dict[str, Any]:
        """Grid, KV capacity, and where each running request's tokens live."""
        return self._run(self._query())

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        if self._runtime is not None:
            runtime, self._runtime = self._runtime, None
            self._run(runtime.close())
            self._stop_loop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _schedule(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            work.close()
            raise RuntimeFailed("The engine is closed.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, done in the engine's thread; an interrupt here cancels it there."""
        future = self._schedule(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _start(self) -> Runtime:
        runtime = Runtime(self.deployment)
        try:
            runtime.start()
            await runtime.ready()
        except BaseException:
            await runtime.close()
            raise
        return runtime

    def _submit(self, request: TextRequest, put: Callable[[Event], None] | None = None) -> Stream:
        if self._runtime is None:
            raise RuntimeFailed("The engine is closed.")
        return self._runtime.submit(request, put)

    async def _open(self, request: TextRequest, put: Callable[[Event], None], opened: list[Stream]) -> None:
        """The stream goes to `opened`, since an interrupt can make the caller miss a result."""
        opened.append(self._submit(request, put))

    async def _query(self) -> dict[str, Any]:
        assert self._runtime is not None
        return await self._runtime.query("info")

    async def _collect(self, request: TextRequest, done: Callable[[], object] = lambda: None) -> Output:
        """The whole output of a request."""
        stream = self._submit(request)
        await stream.accepted()
        text, token_ids = [], []
        async for event in stream:
            text.append(event.text)
            token_ids += event.token_ids
        done()
        last = Output.of(event)
        return dataclasses.replace(last, text="".join(text), token_ids=token_ids)

    async def _collect_all(self, requests: list[TextRequest], bar: bool) -> list[Output]:
        """All outputs, in order; if one fails, the others are aborted."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        with tqdm(total=len(requests), disable=not bar, unit="prompt", desc="generate") as progress:
            tasks = [asyncio.ensure_future(self._collect(request, progress.update)) for request in requests]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, request: TextRequest, put: Callable[[_Piece], None]) -> None:
        """Hand a request's pieces to another thread, then None; or what went wrong."""
        try:
            stream = self._submit(request)
            await stream.accepted()
            async for event in stream:
                put(Output.of(event))
            put(None)
        except DcprtError as error:
            put(error)

    def _stop_loop(self) -> None:
        """End the engine's thread, once all that was cancelled or has failed in it has come to its end."""
        asyncio.run_coroutine_threadsafe(_others_done(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _close(streams: list[Stream]) -> None:
    for stream in streams:
        stream.close()


async def _others_done() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=GRACE_S)


_Piece = Output | DcprtError | None


def _unwrap(piece: Output | DcprtError) -> Output:
    if isinstance(piece, DcprtError):
        raise piece
    return piece


def _one_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"There are {count} prompts and {len(params)} sampling parameters.", param="params")
    return list(params)


def _typed(params: SamplingParams) -> SamplingParams:
    """`params` with the types that messages carry; a list for a tuple and an int for a float will do.

    Raises:
        RequestError: a value of another type, which nothing has checked so far.
    """
    try:
        return msgspec.convert(msgspec.structs.asdict(params), SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"The sampling parameters cannot be used: {error}.", param="params") from error


def _request(params: SamplingParams | None, *, prompt: Prompt | None = None, chat: Chat | None = None) -> TextRequest:
    text = prompt if isinstance(prompt, str) else None
    return TextRequest(
        rid=f"engine-{uuid.uuid4().hex[:12]}",
        sampling=_typed(params or SamplingParams()),
        prompt=text,
        token_ids=None if prompt is None or text is not None else pack_tokens(prompt),  # type: ignore[arg-type]
        chat=None if chat is None else [dict(message) for message in chat],
    )
