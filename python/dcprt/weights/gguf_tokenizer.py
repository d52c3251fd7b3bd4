"""The tokenizer inside a GGUF file, written as tokenizer.json and tokenizer_config.json.

A GGUF file does not say how text is split before byte-pair merging; it only names the way in
`tokenizer.ggml.pre`. A wrong guess gives tokens the model was never trained on, and no error. So a name is
served only where the original tokenizer behind it is known, and refused otherwise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dcprt.errors import ModelError, did_you_mean
from dcprt.weights.gguf_file import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_DIGITS = {"type": "Digits", "individual_digits": True}
_GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _split(digits: str) -> dict[str, Any]:
    """The split of Llama 3 and Qwen 2, which differ only in how many digits stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@dataclass(frozen=True)
class _Split:
    """What a value of `tokenizer.ggml.pre` stands for."""

    steps: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3 = _Split((_split(r"\p{N}{1,3}"), _BYTES_ONLY), ignore_merges=True, add_bos=True)
_SPLITS = {
    "smollm": _Split((_DIGITS, _GPT2_SPLIT)),
    "gpt-2": _Split((_GPT2_SPLIT,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Split((_split(r"\p{N}"), _BYTES_ONLY), normalizer={"type": "NFC"}),
}


@dataclass(frozen=True)
class GgufTokenizer:
    """Contents of tokenizer.json and tokenizer_config.json, and the ids that config.json repeats."""

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def read_tokenizer(gguf: GgufFile) -> GgufTokenizer:
    """Translate the tokenizer of a GGUF file.

    Raises:
        ModelError: a kind of tokenizer or a way of splitting that is not known, or metadata that is damaged.
    """
    split = _find_split(gguf)
    tokens: list[str] = gguf.need("tokenizer.ggml.tokens", list)
    types: list[int] = gguf.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(
            f"{gguf.path}: {len(tokens)} tokens, but {len(types)} values in tokenizer.ggml.token_type."
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise ModelError(f"{gguf.path}: tokenizer.ggml.tokens has the token {twice!r} twice.")
    bos, eos = _token_id(gguf, "bos", tokens), _token_id(gguf, "eos", tokens)
    text = json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(tokens, types),
            "normalizer": split.normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(split.steps)},
            "post_processor": _post_processor(gguf, split, tokens, bos, eos),
            "decoder": {**_GPT2_SPLIT, "add_prefix_space": True},
            "model": _model(gguf, split, vocabulary),
        },
        ensure_ascii=False,
    )
    _check(gguf, text)
    ends = (eos, _token_id(gguf, "eot", tokens), _token_id(gguf, "eom", tokens))
    return GgufTokenizer(
        tokenizer_json=text,
        tokenizer_config=_tokenizer_config(gguf, split, tokens),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
    )


def _find_split(gguf: GgufFile) -> _Split:
    kind = gguf.need("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) is supported in "
            f"GGUF files. Use the model's Hugging Face directory instead."
        )
    pre = gguf.get("tokenizer.ggml.pre", str)
    known = ", ".join(_SPLITS)
    if pre is None:
        raise ModelError(
            f"{gguf.path}: the metadata has no tokenizer.ggml.pre, so it is not known how text is split into "
            f"tokens. Convert the model again with a newer llama.cpp; supported values: {known}."
        )
    if pre not in _SPLITS:
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.pre is {pre!r}, which is not supported; supported: {known}."
            f"{did_you_mean(pre, _SPLITS)}"
        )
    return _SPLITS[pre]


def _token_id(gguf: GgufFile, which: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{which}_token_id"
    value: int | None = gguf.get(key, int)
    if value is not None and value >= len(tokens):
        raise ModelError(f"{gguf.path}: {key} is {value}, but there are only {len(tokens)} tokens.")
    return value


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for i, kind in enumerate(types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _model(gguf: GgufFile, split: _Split, vocabulary: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": split.ignore_merges,
        "vocab": vocabulary,
        "merges": gguf.need("tokenizer.ggml.merges", list),
    }


def _adds_bos(gguf: GgufFile, split: _Split) -> bool:
    return bool(gguf.get("tokenizer.ggml.add_bos_token", bool, split.add_bos))


def _post_processor(
    gguf: GgufFile, split: _Split, tokens: list[str], bos: int | None, eos: int | None
) -> dict[str, Any]:
    """What surrounds an encoded text; plain ByteLevel where nothing does."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    around = []
    for wanted, key, token in (
        (_adds_bos(gguf, split), "add_bos_token", bos),
        (gguf.get("tokenizer.ggml.add_eos_token", bool, False), "add_eos_token", eos),
    ):
        if wanted and token is None:
            raise ModelError(f"{gguf.path}: tokenizer.ggml.{key} is set, but no token to add is named.")
        around.append(token if wanted else None)
    if around == [None, None]:
        return byte_level
    before, after = ([] if i is None else [tokens[i]] for i in around)

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        def special(names: list[str]) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": token, "type_id": type_id}} for token in names]

        return [*special(before), {"Sequence": {"id": name, "type_id": type_id}}, *special(after)]

    used = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in around if i is not None}
    single = sequence("A", 0)
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *sequence("B", 1)],
        "special_tokens": used,
    }
    return {"type": "Sequence", "processors": [byte_level, template]}


def _tokenizer_config(gguf: GgufFile, split: _Split, tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(gguf, split),
        "clean_up_tokenization_spaces": False,
    }
    for field, which in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _token_id(gguf, which, tokens)
        if token is not None:
            config[f"{field}_token"] = tokens[token]
    template = gguf.get("tokenizer.chat_template", str)
    if template is not None:
        config["chat_template"] = template
    return config


def _check(gguf: GgufFile, text: str) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises Exception itself
        raise ModelError(f"{gguf.path}: the tokenizer in the metadata is damaged: {error}") from error
