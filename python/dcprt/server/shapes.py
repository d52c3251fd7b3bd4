"""The two shapes of OpenAI's answers: completions and chat completions, whole and in pieces."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from dcprt.messages import Finish, TextLogprob, TextOut
from dcprt.server.service import Choice


class Shape(Protocol):
    """What differs between the two."""

    id_prefix: str
    object: str
    chunk_object: str

    def opening(self) -> dict[str, Any] | None:
        """What a stream says before any text."""
        ...

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A finished choice, without its index."""
        ...

    def piece(self, item: TextOut, so_far: Choice) -> dict[str, Any]:
        """A piece of a choice, of which `so_far` was sent before."""
        ...


def reason(finish: Finish | None) -> str | None:
    return finish.reason if finish else None


class CompletionShape:
    """`text` and log probabilities as parallel lists. With `echo`, both begin with the prompt's."""

    id_prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs

    def opening(self) -> None:
        return None

    def whole(self, choice: Choice) -> dict[str, Any]:
        return {
            "text": choice.prompt_text + choice.text,
            "logprobs": self._columns(choice.prompt_logprobs, choice.logprobs, len(choice.prompt_text)),
            "finish_reason": reason(choice.finish),
        }

    def piece(self, item: TextOut, so_far: Choice) -> dict[str, Any]:
        echoed = len(so_far.prompt_text) + len(item.prompt_text)
        return {
            "text": item.prompt_text + item.text,
            "logprobs": self._columns(item.prompt_logprobs, item.logprobs, echoed, so_far.logprobs),
            "finish_reason": reason(item.finish),
        }

    def _columns(
        self,
        prompt: Sequence[TextLogprob],
        output: Sequence[TextLogprob],
        echoed: int,
        before: Sequence[TextLogprob] = (),
    ) -> dict[str, Any] | None:
        """OpenAI's legacy lists. Offsets count characters of the text that is returned, of which `echoed` are the
        prompt's; `before` came before `output`.
        """
        if not self._logprobs:
            return None
        entries = [*prompt, *output]
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [_by_text(entry) for entry in entries],
            "text_offset": [*_offsets(prompt, 0), *_offsets(output, echoed, before)],
        }


def _offsets(entries: Sequence[TextLogprob], offset: int, before: Sequence[TextLogprob] = ()) -> list[int]:
    """Where each token begins: behind the characters that are whole before it. `before` begin at `offset`."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    offset += len(utf8.decode(b"".join(entry.raw[entry.hidden :] for entry in before)))
    found = []
    for entry in entries:
        found.append(offset)
        offset += len(utf8.decode(entry.raw[entry.hidden :]))
    return found


def _by_text(entry: TextLogprob) -> dict[str, float | None] | None:
    """The best tokens at a place, and the token itself; nothing for the first of a prompt."""
    if entry.logprob is None:
        return None
    return {**{other.text: other.logprob for other in entry.top}, entry.text: entry.logprob}


class ChatShape:
    """A message, or deltas of it of which the first tells the role."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def whole(self, choice: Choice) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._content(choice.logprobs),
            "finish_reason": reason(choice.finish),
        }

    def piece(self, item: TextOut, so_far: Choice) -> dict[str, Any]:
        del so_far
        return {
            "delta": {"content": item.text} if item.text else {},
            "logprobs": self._content(item.logprobs) if item.logprobs else None,
            "finish_reason": reason(item.finish),
        }

    def _content(self, entries: Sequence[TextLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {"content": [{**_named(e), "top_logprobs": [_named(other) for other in e.top]} for e in entries]}


def _named(entry: TextLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.raw)}
