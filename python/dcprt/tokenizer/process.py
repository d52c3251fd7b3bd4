"""The tokenizer's process: text to tokens on the way in, tokens to text on the way out.

Long prompts are encoded in a thread (the library lets go of the GIL), so that they freeze nobody's stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop
import zmq

from dcprt.errors import RequestError
from dcprt.messages import (
    Abort,
    Accepted,
    Finish,
    FromScheduler,
    FromTokenizer,
    Query,
    Reply,
    RequestFailed,
    StopHit,
    TextOut,
    TextRequest,
    TokenRequest,
    TokensOut,
    ToTokenizer,
    Usage,
    pack_tokens,
    unpack_tokens,
)
from dcprt.runtime.channel import Launch
from dcprt.tokenizer.output import OutputText
from dcprt.tokenizer.text import TextCodec
from dcprt.wire import AsyncReceiver, Sender, endpoint

LONG_TEXT = 4096
"""Characters from which on a prompt is encoded in a thread."""


class TokenizerProcess:
    """Turns requests into tokens and tokens into text; keeps only what is needed for that."""

    def __init__(self, codec: TextCodec | None, to_scheduler: Sender, to_client: Sender) -> None:
        self._codec = codec
        self._to_scheduler = to_scheduler
        self._to_client = to_client
        self._live: dict[str, OutputText] = {}
        self._encoding: dict[str, asyncio.Task[None]] = {}
        self._asked: set[asyncio.Task[None]] = set()

    def from_client(self, message: ToTokenizer) -> None:
        """One message from the client side."""
        if isinstance(message, TextRequest):
            self._start(message)
        elif isinstance(message, Query) and message.kind in ("tokenize", "detokenize"):
            self._ask(message)
        elif isinstance(message, Abort) and (task := self._encoding.pop(message.rid, None)):
            task.cancel()
            self._abort_unsent(message.rid)
        else:
            self._to_scheduler.send([message])

    def from_scheduler(self, messages: list[FromScheduler]) -> None:
        """The messages of one step, answered as one frame."""
        answers: list[FromTokenizer] = []
        for message in messages:
            if isinstance(message, TokensOut):
                if output := self._live.get(message.rid):
                    answers.append(self._text(message, output))
            else:
                if isinstance(message, RequestFailed):
                    self._live.pop(message.rid, None)
                answers.append(message)
        self._to_client.send(answers)

    def _start(self, request: TextRequest) -> None:
        if request.rid in self._live or request.rid in self._encoding:
            error = RequestError(f"A request with id {request.rid!r} is running already.", param="rid")
            self._to_client.send([RequestFailed.of(request.rid, error)])
            return
        size = len(request.prompt or "") + sum(len(str(m.get("content"))) for m in request.chat or ())
        if size < LONG_TEXT:
            self._submit(request, self._encode_safely(request))
        else:
            self._encoding[request.rid] = asyncio.create_task(self._start_long(request))

    async def _start_long(self, request: TextRequest) -> None:
        result = await asyncio.to_thread(self._encode_safely, request)
        if self._encoding.pop(request.rid, None):
            self._submit(request, result)

    def _submit(self, request: TextRequest, result: bytes | RequestError) -> None:
        if isinstance(result, RequestError):
            self._to_client.send([RequestFailed.of(request.rid, result)])
            return
        prompt: Sequence[int] = ()
        if request.echo or request.sampling.prompt_logprobs is not None:
            prompt = unpack_tokens(result)
        echo = self._echo(request, prompt) if request.echo else ""
        written = request.echo and request.prompt is not None
        self._live[request.rid] = OutputText(self._codec, request.sampling, prompt, echo, written=written)
        message = TokenRequest(
            rid=request.rid,
            token_ids=result,
            sampling=request.sampling,
            namespace=request.cache_salt,
            timeout_s=request.timeout_s,
        )
        self._to_scheduler.send([message])

    def _echo(self, request: TextRequest, prompt: Sequence[int]) -> str:
        if request.prompt is not None or self._codec is None:
            return request.prompt or ""
        return self._codec.decode(prompt, request.sampling.skip_special_tokens)

    def _encode_safely(self, request: TextRequest) -> bytes | RequestError:
        try:
            return self._encode(request)
        except RequestError as error:
            return error

    def _encode(self, request: TextRequest) -> bytes:
        """Raises RequestError."""
        if request.token_ids is not None and not request.sampling.stop:
            return request.token_ids
        if self._codec is None:
            raise RequestError("The server runs with --skip-tokenizer-init: give token ids, and no stop strings.")
        if request.token_ids is not None:
            return request.token_ids
        if request.chat is not None:
            return pack_tokens(self._codec.encode_chat(request.chat))
        assert request.prompt is not None
        return pack_tokens(self._codec.encode(request.prompt))

    def _abort_unsent(self, rid: str) -> None:
        """Aborted before the scheduler ever heard of it."""
        usage = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
        finish = Finish(reason="abort")
        last = TextOut(rid=rid, text="", token_ids=[], usage=usage, finish=finish)
        self._to_client.send([Accepted(rid=rid, prompt_len=0), last])

    def _text(self, message: TokensOut, output: OutputText) -> TextOut:
        """A request that a stop string has ended is over here; the scheduler learns it, unless it knows."""
        text = output.push(message)
        if text.finish:
            del self._live[message.rid]
            if not message.finish:
                self._to_scheduler.send([StopHit(rid=message.rid, completion_tokens=text.usage.completion_tokens)])
        return text

    def _ask(self, query: Query) -> None:
        if sum(len(value) for value in query.body.values() if isinstance(value, str | list)) < LONG_TEXT:
            self._to_client.send([self._answer(query)])
        else:
            task = asyncio.create_task(self._answer_long(query))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)

    async def _answer_long(self, query: Query) -> None:
        self._to_client.send([await asyncio.to_thread(self._answer, query)])

    def _answer(self, query: Query) -> Reply:
        """`tokenize` and `detokenize`: token ids of a text or chat, text of token ids."""
        try:
            if self._codec is None:
                raise RequestError("The server runs with --skip-tokenizer-init: it knows token ids only.")
            if query.kind == "detokenize":
                skip = bool(query.body.get("skip_special_tokens", True))
                return Reply(qid=query.qid, body={"text": self._codec.decode(query.body["tokens"], skip)})
            if query.body.get("chat") is not None:
                tokens = self._codec.encode_chat(query.body["chat"])
            else:
                tokens = self._codec.encode(query.body["text"], bool(query.body.get("add_special_tokens", True)))
        except RequestError as error:
            return Reply(qid=query.qid, failed=RequestFailed.of("", error))
        return Reply(qid=query.qid, body={"tokens": tokens})


async def serve(launch: Launch, ready: Callable[[], None]) -> None:
    """Serve until the process is ended."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    run_dir = launch.run_dir
    requests: AsyncReceiver[ToTokenizer] = AsyncReceiver(context, endpoint(run_dir, "requests"), ToTokenizer)
    tokens: AsyncReceiver[FromScheduler] = AsyncReceiver(context, endpoint(run_dir, "tokens"), FromScheduler)
    skip = launch.deployment.config.model.skip_tokenizer_init
    codec = None if skip else TextCodec(Path(launch.deployment.directory), launch.deployment.chat_template)
    process = TokenizerProcess(
        codec,
        to_scheduler=Sender(context, endpoint(run_dir, "scheduler")),
        to_client=Sender(context, endpoint(run_dir, "texts")),
    )
    ready()

    def from_client(messages: list[ToTokenizer]) -> None:
        for message in messages:
            process.from_client(message)

    await asyncio.gather(requests.serve(from_client), tokens.serve(process.from_scheduler))


def run(launch: Launch, ready: Callable[[], None]) -> None:
    """The tokenizer's process."""
    uvloop.run(serve(launch, ready))
