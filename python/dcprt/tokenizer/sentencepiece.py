"""The vocabulary in a tokenizer.model, through the `sentencepiece` library.

SentencePiece itself knows nothing of tokens that were added later. What is done about them follows the
Llama tokenizer of Hugging Face that reads the same files: added and special tokens are cut out of the text,
and what lies between them is encoded piece by piece. How the space before a text ("dummy prefix") is put in
front of these pieces depends on `legacy` in tokenizer_config.json: every piece gets one where it is true,
which is the default, and only a piece that begins the text where it is false.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcprt.errors import ModelError
from dcprt.tokenizer.files import read_json, special_tokens, token_text

if TYPE_CHECKING:
    import sentencepiece

_SPACE_MARK = "▁"
_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
"""ModelProto with `normalizer_spec.add_dummy_prefix = false`; appended to a model, it replaces that field."""


@dataclass(frozen=True)
class _Added:
    """A token that is cut out of the text before SentencePiece sees it."""

    token_id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class PieceVocabulary:
    """A SentencePiece model with the tokens that the files beside it add.

    `config` is tokenizer_config.json, `named` special_tokens_map.json; added_tokens.json is read from beside
    the model.

    Raises:
        ModelError: a file is damaged, or the tokenizer is not one of the Llama family; names it.
    """

    def __init__(self, path: Path, config: dict[str, Any], named: dict[str, Any]) -> None:
        self._check_class(path, config)
        raw, model = _load_model(path)
        self._whole = self._between = model
        if config.get("add_prefix_space") is False:
            self._whole = self._between = _load(raw + _NO_DUMMY_PREFIX)
        elif config.get("legacy") is False:
            self._between = _load(raw + _NO_DUMMY_PREFIX)
        self.strips_first_space = self._whole.normalize("a").startswith(_SPACE_MARK)
        self.named_tokens = _own_names(model, config)
        names = {**self.named_tokens, **special_tokens(config, named)}
        self._added = _added_tokens(path, model, config, [*names.values(), *_more_special(config, named)])
        self._pattern = _pattern(self._added)
        self.table = _table(model, self._added)
        self.special_ids = frozenset(token.token_id for token in self._added.values() if token.special)
        self._before = self._wanted(path, config, "add_bos_token", True, names.get("bos_token"))
        self._after = self._wanted(path, config, "add_eos_token", False, names.get("eos_token"))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text."""
        if (added := self._added.get(token)) is not None:
            return added.token_id
        token_id = self._whole.piece_to_id(token)
        return token_id if self._whole.id_to_piece(token_id) == token else None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, with BOS and EOS as configured."""
        ids = [*self._before] if add_special_tokens else []
        for at, part in self._parts(text):
            if isinstance(part, _Added):
                ids.append(part.token_id)
            elif part:
                ids.extend((self._between if at else self._whole).encode(part))
        return [*ids, *self._after] if add_special_tokens else ids

    def _parts(self, text: str) -> Iterator[tuple[int, str | _Added]]:
        """What lies between added tokens, and these, with the place where each begins."""
        start, rstrip = 0, False
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            token = self._added[match[0]]
            part = text[start : match.start()]
            part = part.lstrip() if rstrip else part
            yield start, part.rstrip() if token.lstrip else part
            yield match.start(), token
            start, rstrip = match.end(), token.rstrip
        yield start, text[start:].lstrip() if rstrip else text[start:]

    def _check_class(self, path: Path, config: dict[str, Any]) -> None:
        kind = config.get("tokenizer_class")
        if kind is not None and kind not in _CLASSES:
            raise ModelError(
                f"{path}: tokenizer_class is {kind!r}; from a tokenizer.model only {', '.join(_CLASSES)} are "
                f"supported. Save the tokenizer as tokenizer.json."
            )

    def _wanted(
        self, path: Path, config: dict[str, Any], key: str, default: bool, token: str | None
    ) -> tuple[int, ...]:
        """The token that `key` of the configuration wants around a text."""
        if not config.get(key, default):
            return ()
        token_id = None if token is None else self.token_id(token)
        if token_id is None and config.get(key):
            raise ModelError(f"{path}: {key} is set in tokenizer_config.json, but there is no such token.")
        return () if token_id is None else (token_id,)


def _load_model(path: Path) -> tuple[bytes, sentencepiece.SentencePieceProcessor]:
    try:
        raw = path.read_bytes()
        return raw, _load(raw)
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from error
    except RuntimeError as error:
        raise ModelError(f"{path} is no SentencePiece model: {error}") from error


def _load(raw: bytes) -> sentencepiece.SentencePieceProcessor:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(raw)
    return model


def _own_names(model: sentencepiece.SentencePieceProcessor, config: dict[str, Any]) -> Mapping[str, str]:
    """The special tokens that the model names itself, where the configuration says nothing about them."""
    ids = {
        "bos_token": model.bos_id(),
        "eos_token": model.eos_id(),
        "unk_token": model.unk_id(),
        "pad_token": model.pad_id(),
    }
    return {name: model.id_to_piece(i) for name, i in ids.items() if i >= 0 and name not in config}


def _more_special(*sources: dict[str, Any]) -> list[str]:
    """Special tokens without a role."""
    found = []
    for source in sources:
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = source.get(key)
            values = tokens.values() if isinstance(tokens, dict) else tokens if isinstance(tokens, list) else ()
            found += [text for token in values if (text := token_text(token)) is not None]
    return found


def _added_tokens(
    path: Path, model: sentencepiece.SentencePieceProcessor, config: dict[str, Any], special: list[str]
) -> dict[str, _Added]:
    """Tokens by their text; what is declared with most detail counts.

    Special tokens that have no id anywhere get the ids after the last one, in the order of `special`.
    """
    size = model.get_piece_size()
    own = [i for i in range(size) if model.is_control(i) or model.is_unknown(i)]
    added = {model.id_to_piece(i): _Added(i, special=True) for i in own}
    beside = path.with_name("added_tokens.json")
    for text, token_id in read_json(beside).items():
        added[text] = _Added(_id(beside, token_id), special=text in special)
    place = path.with_name("tokenizer_config.json")
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        content = token_text(token)
        if content is None or not isinstance(token, dict):
            raise ModelError(f"{place}: added token {token_id} has no content.")
        flags = {key: bool(token.get(key)) for key in ("special", "lstrip", "rstrip", "single_word")}
        flags["special"] |= content in special
        added[content] = _Added(_id(place, token_id), **flags)
    added.pop("", None)
    following = max([size, *(token.token_id + 1 for token in added.values())])
    for text in dict.fromkeys(token for token in special if token and token not in added):
        known = model.piece_to_id(text)
        if model.id_to_piece(known) != text:
            known, following = following, following + 1
        added[text] = _Added(known, special=True)
    return added


def _id(path: Path, value: Any) -> int:
    try:
        token_id = int(value)
    except (TypeError, ValueError):
        token_id = -1
    if token_id < 0:
        raise ModelError(f"{path}: {value!r} is no token id.")
    return token_id


def _pattern(added: Mapping[str, _Added]) -> re.Pattern[str] | None:
    """Finds added tokens in a text: the leftmost one, and of those that begin there the longest."""
    texts = sorted(added, key=len, reverse=True)
    if not texts:
        return None
    forms = {text: rf"(?<!\w){re.escape(text)}(?!\w)" for text in texts if added[text].single_word}
    return re.compile("|".join(forms.get(text, re.escape(text)) for text in texts))


def _table(model: sentencepiece.SentencePieceProcessor, added: Mapping[str, _Added]) -> list[bytes]:
    """Bytes of each token by its id."""
    size = model.get_piece_size()
    table = [b""] * max([size, *(token.token_id + 1 for token in added.values())])
    for i in range(size):
        piece = model.id_to_piece(i)
        table[i] = bytes([int(piece[3:5], 16)]) if model.is_byte(i) else _text_bytes(piece)
    for text, token in added.items():
        table[token.token_id] = _text_bytes(text)
    return table


def _text_bytes(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode("utf-8")
