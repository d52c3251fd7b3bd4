"""Text to token ids and back, and chats to prompts, from the files of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcprt.errors import ModelError, RequestError
from dcprt.tokenizer.chat_template import ChatTemplates
from dcprt.tokenizer.files import read_json, special_tokens
from dcprt.tokenizer.vocabulary import Vocabulary


class TextCodec:
    """The tokenizer of a model: tokenizer.json or tokenizer.model, with tokenizer_config.json beside it.

    `decode` joins the bytes of all tokens and reads them as UTF-8, with U+FFFD for what is not. For
    byte-level tokenizers that is what the `tokenizers` library does; for SentencePiece-style ones it differs
    only where byte tokens form no valid UTF-8: the libraries then spoil the whole run, or one character per
    byte, which no stream can do.

    Where both files are there, tokenizer.json counts. `chat_template` replaces the model's chat templates.

    Raises:
        ModelError: a file is missing or damaged, the tokenizer is of a kind that is not known, or
            `chat_template` is no template.
    """

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        config = read_json(directory / "tokenizer_config.json")
        named = read_json(directory / "special_tokens_map.json")
        self._vocabulary = _open_vocabulary(directory, config, named)
        self._special = {**self._vocabulary.named_tokens, **special_tokens(config, named)}
        if chat_template is None:
            self._templates = ChatTemplates.of_model(directory, config)
        else:
            self._templates = ChatTemplates.given(chat_template)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the tokenizer has one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the tokenizer has one; the model's config may name more."""
        return self._named_id("eos_token")

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._vocabulary.table)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are left out of the text, such as <|im_end|>."""
        return self._vocabulary.special_ids

    @property
    def strips_first_space(self) -> bool:
        """Whether a space at the very beginning of a decoded text is left out (SentencePiece style)."""
        return self._vocabulary.strips_first_space

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it become those tokens.

        `add_special_tokens` puts around it what the tokenizer declares: its post-processor, or the tokens
        that `add_bos_token` and `add_eos_token` ask for.

        Raises:
            RequestError: the text is no Unicode text: it has half of a surrogate pair.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"The text has half of a surrogate pair (U+{ord(text[error.start]):04X}) at character "
                f"{error.start}, so it is no Unicode text."
            ) from error
        return self._vocabulary.encode(text, add_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids without a token (padding of the vocabulary) give nothing."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join(self.token_bytes(i) for i in ids if i not in skip)
        if self.strips_first_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; none for an id without a token."""
        table = self._vocabulary.table
        return table[token_id] if 0 <= token_id < len(table) else b""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a chat. The template alone decides about BOS, so there is never a second one.

        Raises:
            RequestError: as from `apply_chat_template`.
        """
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt for a chat; encode it with `add_special_tokens=False`. `kwargs` go to the template.

        Fields of a message that are None are left out, since templates test for presence.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        return self._templates.render(messages, add_generation_prompt, {**self._special, **kwargs})

    def _named_id(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._vocabulary.token_id(token)


def _open_vocabulary(directory: Path, config: dict[str, Any], named: dict[str, Any]) -> Vocabulary:
    if (path := directory / "tokenizer.json").is_file():
        from dcprt.tokenizer.tokenizer_json import JsonVocabulary

        special = special_tokens(config, named)
        bos = special.get("bos_token") if config.get("add_bos_token") is True else None
        eos = special.get("eos_token") if config.get("add_eos_token") is True else None
        return JsonVocabulary(path, bos, eos)
    if (path := directory / "tokenizer.model").is_file():
        from dcprt.tokenizer.sentencepiece import PieceVocabulary

        return PieceVocabulary(path, config, named)
    raise ModelError(
        f"{directory} has neither tokenizer.json nor tokenizer.model; --skip-tokenizer-init serves token ids "
        f"without them."
    )
