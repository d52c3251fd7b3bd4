"""What the processes say to each other: frozen tagged structs in MessagePack, never a pickle, never a tensor.

A frame on a socket is one message, or a list of messages that belong to one step.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from dcprt.errors import RequestError
from dcprt.params import SamplingParams


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of everything that crosses a socket."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request. `cached_tokens` of the prompt were not computed, because their KV was there."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def without_output(self, count: int) -> Usage:
        """The same with `count` tokens of output less."""
        return msgspec.structs.replace(self, completion_tokens=self.completion_tokens - count)


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request ended: `stop`, `length` or `abort`; `matched` is the stop string or token that did it."""

    reason: str
    matched: str | int | None = None


# ---- client side -> tokenizer


def wire_id(rid: str, number: int) -> str:
    """The id of a request between processes: no late message of one can be taken for another of the same `rid`."""
    return f"{rid}#{number}"


def client_id(wire: str) -> str:
    """The id that the client knows."""
    return wire.rpartition("#")[0] or wire


class TextRequest(Message, frozen=True):
    """A new request: exactly one of `prompt`, `token_ids` and `chat` (messages of role and content) is given.

    With `echo` the prompt's text comes back with the first output. `timeout_s` is how long it may take in all.
    """

    rid: str
    sampling: SamplingParams
    prompt: str | None = None
    token_ids: bytes | None = None
    chat: list[dict[str, Any]] | None = None
    cache_salt: str = ""
    echo: bool = False
    timeout_s: float | None = None


class Abort(Message, frozen=True):
    """Forget a request, in whatever state it is. Unknown ids are ignored."""

    rid: str


class Query(Message, frozen=True):
    """Ask for something outside any request; answered by a `Reply` with the same id.

    The tokenizer answers `tokenize` and `detokenize`, the scheduler `info`, `metrics` and `flush_cache`.
    """

    qid: int
    kind: str
    body: dict[str, Any] = {}


# ---- tokenizer -> scheduler (also Abort and Query)


class TokenRequest(Message, frozen=True):
    """A request as tokens: `token_ids` are int32, `namespace` keeps equal tokens apart in the prefix cache."""

    rid: str
    token_ids: bytes
    sampling: SamplingParams
    namespace: str
    timeout_s: float | None = None


class StopHit(Message, frozen=True):
    """A stop string was found in the text: the request is over, its last message has been sent already."""

    rid: str
    completion_tokens: int


# ---- scheduler -> tokenizer -> client side


class Accepted(Message, frozen=True):
    """The request is valid and will be computed."""

    rid: str
    prompt_len: int


class RequestFailed(Message, frozen=True):
    """The last message of a request that could not be served."""

    rid: str
    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, rid: str, error: RequestError) -> RequestFailed:
        return cls(rid=rid, message=str(error), status=error.status, param=error.param, code=error.code)

    def error(self) -> RequestError:
        return RequestError(self.message, param=self.param, status=self.status, code=self.code)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log probabilities of a token and of the best ones at its place, from the model's own logits.

    `top` is sorted, best first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class TokensOut(Message, frozen=True):
    """New tokens of a request; with `finish` set, its last message.

    `logprobs` has one entry a token, if asked for; `prompt_logprobs` come once, from the second prompt token on.
    """

    rid: str
    token_ids: list[int]
    usage: Usage
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []


class TextLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token as text and raw bytes, its log probability (None for a first prompt token), the best at its place.

    The first `hidden` of its bytes are left out of the request's text: all of a skipped special token.
    """

    token: int
    text: str
    raw: bytes
    logprob: float | None
    top: list[TextLogprob] = []
    hidden: int = 0


class TextOut(Message, frozen=True):
    """New text and tokens of a request; with `finish` set, its last message.

    `prompt_logprobs` and, for an echo, `prompt_text` come once, with the first message.
    """

    rid: str
    text: str
    token_ids: list[int]
    usage: Usage
    finish: Finish | None = None
    logprobs: list[TextLogprob] = []
    prompt_logprobs: list[TextLogprob] = []
    prompt_text: str = ""


class Reply(Message, frozen=True):
    """Answer to a `Query`: `body`, or why there is none."""

    qid: int
    body: dict[str, Any] = {}
    failed: RequestFailed | None = None


# ---- scheduler <-> workers


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy the first `length` tokens of a span from page `src` to page `dst`; each rank its own part."""

    src: int
    dst: int
    length: int


class RowSampling(msgspec.Struct, frozen=True, array_like=True):
    """What a worker needs to choose a row's tokens.

    No token of `end_ids` is chosen for a position before `min_len`. `logprobs` and `prompt_logprobs` are how many of
    the best tokens are reported beside the chosen one; -1 reports nothing.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = []
    min_len: int = 0
    end_ids: list[int] = []
    logprobs: int = -1
    prompt_logprobs: int = -1

    @property
    def uses_history(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return bool(self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty)


class RowAdd(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a row: its int32 tokens so far, of which `computed_len` have KV in `pages`.

    The first `prompt_len` tokens are its prompt; those behind it were chosen before the row was lost.
    """

    row: int
    token_ids: bytes
    computed_len: int
    pages: list[int]
    sampling: RowSampling
    prompt_len: int = 0


class RowGrowth(msgspec.Struct, frozen=True, array_like=True):
    """Pages to append to a row's page table."""

    row: int
    pages: list[int]


class RowWork(msgspec.Struct, frozen=True, array_like=True):
    """Compute `num_tokens` more tokens of a row; it may yield up to `max_new` tokens."""

    row: int
    num_tokens: int
    max_new: int


class PlanBody(msgspec.Struct, frozen=True, kw_only=True):
    """What workers do in one step, in this order: copies, rows to drop and to add, growth, work."""

    copies: list[PageCopy] = []
    drops: list[int] = []
    adds: list[RowAdd] = []
    growth: list[RowGrowth] = []
    work: list[RowWork] = []


class StepPlan(Message, frozen=True):
    """`body` is an encoded `PlanBody`; `digest` covers it and every plan of the epoch before it."""

    number: int
    epoch: int
    digest: bytes
    body: bytes


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of a row's tokens from `position` on."""

    row: int
    position: int
    tokens: list[TokenLogprobs]


class StepResult(Message, frozen=True):
    """Per row, the tokens accepted in the step, and the log probabilities asked for; from rank 0 only.

    `failed` rows got no token, for the reason given.
    """

    number: int
    epoch: int
    digest: bytes
    tokens: list[tuple[int, list[int]]]
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[RowLogprobs] = []
    failed: list[tuple[int, str]] = []


class WorkerReady(Message, frozen=True):
    """A worker has loaded its weights and waits for plans."""

    rank: int


def chain_digest(previous: bytes, number: int, epoch: int, body: bytes) -> bytes:
    """Digest of a plan that continues the chain of the plans before it."""
    head = number.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    return hashlib.blake2b(previous + head + body, digest_size=8).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32 bytes.

    Raises:
        RequestError: an id is no int or does not fit in 31 bits.
    """
    try:
        packed = array("i", token_ids)
    except (OverflowError, TypeError) as problem:
        raise RequestError(f"Token ids must be integers of 31 bits: {problem}.", param="prompt") from problem
    return packed.tobytes()


def unpack_tokens(data: bytes) -> array[int]:
    """Int32 bytes to token ids."""
    tokens = array("i")
    tokens.frombytes(data)
    return tokens


ToTokenizer = TextRequest | Abort | Query
ToScheduler = TokenRequest | Abort | StopHit | Query
FromScheduler = Accepted | RequestFailed | TokensOut | Reply
FromTokenizer = Accepted | RequestFailed | TextOut | Reply
FromWorker = WorkerReady | StepResult
