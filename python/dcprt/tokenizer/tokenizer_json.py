"""The vocabulary in a tokenizer.json, through the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dcprt.errors import ModelError

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class JsonVocabulary:
    """A tokenizer.json with byte-level tokens, or with tokens in the style of SentencePiece.

    `bos` and `eos` are tokens that the configuration wants around a text; they are added where the
    post-processor does not add them itself.

    Raises:
        ModelError: the file is damaged, or the decoder is of a kind that is not known; names it.
    """

    def __init__(self, path: Path, bos: str | None = None, eos: str | None = None) -> None:
        self._tokenizer = _load_tokenizer(path)
        self._decoder = _Decoder(self._tokenizer, path)
        around = self._tokenizer.encode("").ids
        self._before = self._missing(bos, around)
        self._after = self._missing(eos, around)

    @cached_property
    def table(self) -> list[bytes]:
        """Bytes of each token by its id."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            table[token_id] = self._decoder.token_bytes(token)
        return table

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Added tokens that are marked as special."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """None: a tokenizer.json does not say which of its tokens plays which role."""
        return {}

    @property
    def strips_first_space(self) -> bool:
        """Whether the decoder strips it."""
        return self._decoder.strips_first_space

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, with what the post-processor and the configuration put around it."""
        ids = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def _missing(self, token: str | None, around: list[int]) -> list[int]:
        """The id of `token`, unless it is among `around`, what the post-processor adds."""
        token_id = None if token is None else self.token_id(token)
        return [] if token_id is None or token_id in around else [token_id]


class _Decoder:
    """How a tokenizer turns tokens into bytes; the two kinds that can be streamed."""

    def __init__(self, tokenizer: Tokenizer, path: Path) -> None:
        steps = _decoder_steps(tokenizer)
        kinds = [step.get("type") for step in steps]
        self.strips_first_space = False
        if kinds == ["ByteLevel"]:
            self._to_latin1: dict[int, str] | None = _latin1_table()
            return
        self._to_latin1 = None
        if kinds and kinds[-1] == "Strip" and _strips_one_space(steps.pop()):
            self.strips_first_space = True
            kinds.pop()
        if kinds != ["Replace", "ByteFallback", "Fuse"] or not _replaces_space_mark(steps[0]):
            found = ", ".join(map(str, kinds)) or "none"
            raise ModelError(
                f"{path}: the decoder ({found}) is not supported; supported: ByteLevel, and Replace, "
                f"ByteFallback, Fuse (SentencePiece style)."
            )

    def token_bytes(self, token: str) -> bytes:
        """Bytes of one token."""
        if self._to_latin1 is not None:
            try:
                return token.translate(self._to_latin1).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode("utf-8")
        text = token.replace(_SPACE_MARK, " ")
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.encode("utf-8")


def _latin1_table() -> dict[int, str]:
    """From the characters that stand for bytes in byte-level tokens to the characters U+0000 to U+00FF.

    Printable bytes stand for themselves, the others are counted up from U+0100. A character that stands for
    no byte is mapped out of Latin-1, so that encoding such a token fails and it is taken literally.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = dict.fromkeys(others, "\uffff")
    table.update({0x100 + i: chr(byte) for i, byte in enumerate(others)})
    return table


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return list(state["decoders"]) if state.get("type") == "Sequence" else [state]


def _strips_one_space(step: dict[str, Any]) -> bool:
    return step.get("content") == " " and step.get("start") == 1 and step.get("stop") == 0


def _replaces_space_mark(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": _SPACE_MARK} and step.get("content") == " "


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ModelError(f"{path} is damaged: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
