"""Text to token ids and back, and chats to prompts, from the files of a Hugging Face directory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from dcprt.errors import ModelError, RequestError

if TYPE_CHECKING:
    import jinja2

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BAD_INPUT = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template raises, beside jinja2's own errors, when messages lack what it expects."""


class TextCodec:
    """The tokenizer of a model: tokenizer.json, tokenizer_config.json and, if present, chat_template.jinja.

    `decode` joins the bytes of all tokens and reads them as UTF-8, with U+FFFD for what is not. For
    byte-level tokenizers that is what the `tokenizers` library does; for SentencePiece-style ones it differs
    only where byte tokens form no valid UTF-8: the library then spoils the whole run, which no stream can do.

    Raises:
        ModelError: a file is missing or damaged, or the decoder is of a kind that is not known; names it.
    """

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        self._directory = directory
        self._tokenizer = _load_tokenizer(directory / "tokenizer.json")
        self._decoder = _Decoder(self._tokenizer, directory / "tokenizer.json")
        config = _read_json(directory / "tokenizer_config.json")
        self._special = _special_tokens(config, _read_json(directory / "special_tokens_map.json"))
        self._templates = {"default": chat_template} if chat_template else _chat_templates(directory, config)
        self._compiled: dict[str, jinja2.Template] = {}
        self._missing_bos = self._find_missing_bos(config.get("add_bos_token"))

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the tokenizer has one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the tokenizer has one; the model's config may name more."""
        return self._named_id("eos_token")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._table)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are left out of the text, such as <|im_end|>."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @property
    def strips_first_space(self) -> bool:
        """Whether a space at the very beginning of a decoded text is left out (SentencePiece style)."""
        return self._decoder.strips_first_space

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it become those tokens.

        `add_special_tokens` puts around it what the tokenizer declares: its post-processor, or the BOS token
        that `add_bos_token` asks for where the post-processor adds none.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._missing_bos is not None:
            return [self._missing_bos, *ids]
        return list(ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids without a token (padding of the vocabulary) give nothing."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join(self.token_bytes(i) for i in ids if i not in skip)
        if self.strips_first_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; none for an id without a token."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

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
        import jinja2

        if not self._templates:
            raise RequestError(
                "This model has no chat template, so it cannot answer chats; use text completions instead.",
                param="messages",
            )
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self._templates else "default"
        try:
            if name not in self._compiled:
                self._compiled[name] = _environment().from_string(self._templates[name])
            return self._compiled[name].render(
                **{**self._special, **kwargs},
                messages=plain,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, *_BAD_INPUT) as error:
            reason = str(error) or type(error).__name__
            text = f"The chat template cannot use these messages: {reason}"
            raise RequestError(text, param="messages") from error

    @cached_property
    def _table(self) -> list[bytes]:
        """Bytes of each token by its id."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            table[token_id] = self._decoder.token_bytes(token)
        return table

    def _named_id(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    def _find_missing_bos(self, wanted: Any) -> int | None:
        """The BOS token, where the configuration asks for one and the post-processor adds none."""
        bos = self.bos_token_id
        if wanted is not True or bos is None or bos in self._tokenizer.encode("").ids:
            return None
        return bos


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
    if not path.is_file():
        raise ModelError(f"{path} is missing; --skip-tokenizer-init serves token ids without it.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ModelError(f"{path} is damaged: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file that may be missing."""
    text = _read_text(path)
    try:
        values = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} is no JSON object.")
    return values


def _read_text(path: Path) -> str | None:
    """The text of a file, or None where it is missing."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8: {error}.") from error


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens; the first source that has one counts."""
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_NAMES:
            token = source.get(name)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                found.setdefault(name, token)
    return found


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; chat_template.jinja goes before what tokenizer_config.json has."""
    declared = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(declared, str):
        templates["default"] = declared
    elif isinstance(declared, list):
        for entry in declared:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name"))] = entry["template"]
    beside = _read_text(directory / "chat_template.jinja")
    if beside is not None:
        templates = {"default": beside}
    if templates and "default" not in templates:
        templates["default"] = next(iter(templates.values()))
    return templates


def _environment() -> jinja2.Environment:
    """What chat templates may rely on, in a sandbox that cannot change its inputs."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's words for training; here they are rendered as they are."""

        tags = {"generation"}  # noqa: RUF012, jinja2 declares it like this

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
