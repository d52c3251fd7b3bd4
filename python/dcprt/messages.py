"""What the processes say to each other: frozen tagged structs in MessagePack, never a pickle, never a tensor.

A frame on a socket is one message, or a list of messages that belong to one step.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from dcprt.errors import RequestError

INT_MAX = 2**31 - 1


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of everything that crosses a socket."""


def _check(ok: bool, param: str, text: str) -> None:
    if not ok:
        raise RequestError(text, param=param)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request's tokens are chosen, and when it ends.

    Attributes:
        max_tokens: most new tokens; None fills the context.
        temperature: logits are divided by it; 0 (in fact, below 1e-5) takes the most likely token.
        top_p: keep the most likely tokens whose probabilities sum to at least this, 0 < top_p <= 1.
        top_k: keep this many of the most likely tokens; -1 or 0 keeps all.
        stop: strings that end the request; they are not part of the text.
        stop_token_ids: tokens that end the request; they are part of the token ids, not of the text.
        ignore_eos: go on after the model's own end token.
        seed: random numbers depend on it and the position only; None lets the server choose.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: a value outside its range; `param` names it.
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        limit = self.max_tokens
        _check(
            limit is None or 1 <= limit <= INT_MAX,
            "max_tokens",
            f"max_tokens must be at least 1 and fit in 31 bits, not {limit}.",
        )
        _check(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            f"temperature must be 0 or more and finite, not {self.temperature}.",
        )
        _check(0 < self.top_p <= 1, "top_p", f"top_p must be above 0 and at most 1, not {self.top_p}.")
        _check(
            -1 <= self.top_k <= INT_MAX,
            "top_k",
            f"top_k must be -1, 0 or positive, and fit in 31 bits, not {self.top_k}.",
        )
        _check(all(self.stop), "stop", "A stop string must not be empty.")
        for token in self.stop_token_ids:
            _check(0 <= token <= INT_MAX, "stop_token_ids", f"{token} in stop_token_ids is no token id.")
        _check(
            self.seed is None or -(2**63) <= self.seed < 2**64,
            "seed",
            f"seed must fit in 64 bits, not {self.seed}.",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request. `cached_tokens` of the prompt were not computed, because their KV was there."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


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
    """A new request: exactly one of `prompt`, `token_ids` and `chat` (messages of role and content) is given."""

    rid: str
    sampling: SamplingParams
    prompt: str | None = None
    token_ids: bytes | None = None
    chat: list[dict[str, Any]] | None = None
    cache_salt: str = ""


class Abort(Message, frozen=True):
    """Forget a request, in whatever state it is. Unknown ids are ignored."""

    rid: str


class Query(Message, frozen=True):
    """Ask for something outside any request; answered by a `Reply` with the same id."""

    qid: int
    kind: str


# ---- tokenizer -> scheduler (also Abort and Query)


class TokenRequest(Message, frozen=True):
    """A request as tokens: `token_ids` are int32, `namespace` keeps equal tokens apart in the prefix cache."""

    rid: str
    token_ids: bytes
    sampling: SamplingParams
    namespace: str


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


class TokensOut(Message, frozen=True):
    """New tokens of a request; with `finish` set, its last message."""

    rid: str
    token_ids: list[int]
    usage: Usage
    finish: Finish | None = None


class TextOut(Message, frozen=True):
    """New text and tokens of a request; with `finish` set, its last message."""

    rid: str
    text: str
    token_ids: list[int]
    usage: Usage
    finish: Finish | None = None


class Reply(Message, frozen=True):
    """Answer to a `Query`."""

    qid: int
    body: dict[str, Any]


# ---- scheduler <-> workers


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy the first `length` tokens of a span from page `src` to page `dst`; each rank its own part."""

    src: int
    dst: int
    length: int


class RowSampling(msgspec.Struct, frozen=True, array_like=True):
    """What a worker needs to choose a row's tokens."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


class RowAdd(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a row: its int32 tokens so far, of which `computed_len` have KV in `pages`."""

    row: int
    token_ids: bytes
    computed_len: int
    pages: list[int]
    sampling: RowSampling


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


class StepResult(Message, frozen=True):
    """Per row, the tokens accepted in the step; from rank 0 only."""

    number: int
    epoch: int
    digest: bytes
    tokens: list[tuple[int, list[int]]]


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
