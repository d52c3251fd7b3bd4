"""Token ids of one request to text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from dcprt.tokenizer.text import TextCodec


class Detokenizer:
    """Turns a stream of token ids into whole characters.

    All that `push` returned, followed by `flush`, is what `codec.decode` gives for all ids at once. A
    character whose bytes are not complete is held back; a U+FFFD that the model really wrote is not.
    """

    def __init__(self, codec: TextCodec, skip_special_tokens: bool = True) -> None:
        self._codec = codec
        self._skip = codec.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = codec.strips_first_space

    def push(self, ids: Iterable[int]) -> str:
        """Text that is complete with these ids; may be empty."""
        raw = b"".join(self._codec.token_bytes(i) for i in ids if i not in self._skip)
        if raw and self._strip:
            raw = raw.removeprefix(b" ")
            self._strip = False
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was not completed, or nothing."""
        return self._utf8.decode(b"", final=True)
