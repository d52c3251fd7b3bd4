"""What the text codec needs of a tokenizer, whatever file it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Vocabulary(Protocol):
    """A tokenizer whose every token stands for bytes of its own, so that text can be decoded as it comes."""

    @property
    def table(self) -> Sequence[bytes]:
        """Bytes of each token by its id; empty for an id without a token."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are left out of the text, such as <|im_end|>."""

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Named special tokens (bos_token and so on) that the tokenizer's own file declares."""

    @property
    def strips_first_space(self) -> bool:
        """Whether a space at the very beginning of a decoded text is left out (SentencePiece style)."""

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; special tokens written in it become those tokens."""
