"""The tokenizer inside a GGUF file, written as the files of a Hugging Face directory.

`tokenizer.ggml.model` names the kind: `gpt2` is a byte-level BPE and becomes a tokenizer.json, `llama` is a
SentencePiece model and becomes a tokenizer.model.

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
from dcprt.weights.gguf_sentencepiece import CONTROL, UNKNOWN, USER_DEFINED, write_model
from dcprt.weights.gguf_splits import SPLITS, Split

_KINDS = ("gpt2", "llama")
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


@dataclass(frozen=True)
class GgufTokenizer:
    """The tokenizer's file by name and content, tokenizer_config.json, and ids that config.json repeats."""

    file_name: str
    content: bytes
    tokenizer_config: dict[str, Any]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def read_tokenizer(gguf: GgufFile) -> GgufTokenizer:
    """Translate the tokenizer of a GGUF file.

    Raises:
        ModelError: a kind of tokenizer or a way of splitting that is not known, or metadata that is damaged.
    """
    kind = gguf.need("tokenizer.ggml.model", str)
    if kind not in _KINDS:
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.model is {kind!r}; supported in GGUF files: gpt2 (byte-level BPE), "
            f"llama (SentencePiece). Use the model's Hugging Face directory instead."
        )
    split = _find_split(gguf) if kind == "gpt2" else None
    tokens, types = _tokens(gguf)
    config = _tokenizer_config(gguf, tokens)
    if split is None:
        bos, eos = _token_id(gguf, "bos", tokens, 1), _token_id(gguf, "eos", tokens, 2)
        content = write_model(gguf, tokens, types, bos, eos)
        config |= _sentencepiece_config(gguf, tokens, types, bos, eos)
        file_name = "tokenizer.model"
    else:
        bos, eos = _token_id(gguf, "bos", tokens), _token_id(gguf, "eos", tokens)
        content = _tokenizer_json(gguf, split, tokens, types, bos, eos).encode("utf-8")
        config["add_bos_token"] = _adds_bos(gguf, split)
        file_name = "tokenizer.json"
    ends = (eos, _token_id(gguf, "eot", tokens), _token_id(gguf, "eom", tokens))
    return GgufTokenizer(
        file_name=file_name,
        content=content,
        tokenizer_config=config,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
    )


def _tokens(gguf: GgufFile) -> tuple[list[str], list[int]]:
    """Texts and types of all tokens."""
    tokens: list[str] = gguf.need("tokenizer.ggml.tokens", list)
    types: list[int] = gguf.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(f"{gguf.path}: {len(tokens)} tokens, but {len(types)} values in tokenizer.ggml.token_type.")
    last = {token: i for i, token in enumerate(tokens)}
    if len(last) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if last[token] != i)
        raise ModelError(f"{gguf.path}: tokenizer.ggml.tokens has the token {twice!r} twice.")
    return tokens, types


def _tokenizer_json(
    gguf: GgufFile, split: Split, tokens: list[str], types: list[int], bos: int | None, eos: int | None
) -> str:
    text = json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(tokens, types),
            "normalizer": split.normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(split.steps)},
            "post_processor": _post_processor(gguf, split, tokens, bos, eos),
            "decoder": _BYTE_LEVEL,
            "model": _model(gguf, split, {token: i for i, token in enumerate(tokens)}),
        },
        ensure_ascii=False,
    )
    _check(gguf, text)
    return text


def _find_split(gguf: GgufFile) -> Split:
    pre = gguf.get("tokenizer.ggml.pre", str)
    known = ", ".join(SPLITS)
    if pre is None:
        raise ModelError(
            f"{gguf.path}: the metadata has no tokenizer.ggml.pre, so it is not known how text is split into "
            f"tokens. Convert the model again with a newer llama.cpp; supported values: {known}."
        )
    if pre not in SPLITS:
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.pre is {pre!r}, which is not supported; supported: {known}."
            f"{did_you_mean(pre, SPLITS)}"
        )
    return SPLITS[pre]


def _token_id(gguf: GgufFile, which: str, tokens: list[str], default: int | None = None) -> int | None:
    key = f"tokenizer.ggml.{which}_token_id"
    value: int | None = gguf.get(key, int, default)
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
            "special": kind != USER_DEFINED,
        }
        for i, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _model(gguf: GgufFile, split: Split, vocabulary: dict[str, int]) -> dict[str, Any]:
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


def _adds_bos(gguf: GgufFile, split: Split) -> bool:
    return bool(gguf.get("tokenizer.ggml.add_bos_token", bool, split.add_bos))


def _post_processor(
    gguf: GgufFile, split: Split, tokens: list[str], bos: int | None, eos: int | None
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


def _tokenizer_config(gguf: GgufFile, tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
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


def _sentencepiece_config(
    gguf: GgufFile, tokens: list[str], types: list[int], bos: int | None, eos: int | None
) -> dict[str, Any]:
    """What a tokenizer.model does not say itself.

    `legacy` is a property of the original tokenizer that GGUF files drop. Its older behaviour, a space in
    front of every text between special tokens, is the one that llama.cpp has.
    """
    around = {
        "add_bos_token": gguf.get("tokenizer.ggml.add_bos_token", bool, True),
        "add_eos_token": gguf.get("tokenizer.ggml.add_eos_token", bool, False),
    }
    for (key, wanted), token in zip(around.items(), (bos, eos), strict=True):
        if wanted and token is None:
            raise ModelError(f"{gguf.path}: tokenizer.ggml.{key} is set, but no token to add is named.")
    return {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": True,
        **around,
        "added_tokens_decoder": {str(token.pop("id")): token for token in _added_tokens(tokens, types)},
    }


def _check(gguf: GgufFile, text: str) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises Exception itself
        raise ModelError(f"{gguf.path}: the tokenizer in the metadata is damaged: {error}") from error
