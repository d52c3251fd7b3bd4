from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dcprt.errors import ModelError
from dcprt.weights.gguf_file import read_gguf
from dcprt.weights.gguf_tokenizer import read_tokenizer


@pytest.fixture
def tokens_of(write_gguf: Callable[..., Path]) -> Callable[..., list[str]]:
    """Tokens of a text under the metadata given; the only merges make `he` and `12`."""

    def tokens(text: str, **metadata: Any) -> list[str]:
        named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
        found = read_tokenizer(read_gguf(write_gguf(metadata=named)))
        return Tokenizer.from_str(found.content.decode()).encode(text).tokens

    return tokens


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["he", "1", "2", "Ġ", "1", "2"]),
        ("gpt-2", ["he", "12", "Ġ", "12"]),
        ("qwen2", ["he", "1", "2", "Ġ", "1", "2"]),
        ("llama-bpe", ["<s>", "he", "12", "Ġ", "12"]),
    ],
)
def test_digits(tokens_of: Callable[..., list[str]], pre: str, expected: list[str]) -> None:
    assert tokens_of("he12 12", pre=pre) == expected


def test_llama3_keeps_three_digits_together(tokens_of: Callable[..., list[str]]) -> None:
    assert tokens_of("01212", pre="llama-bpe") == ["<s>", "0", "12", "12"]
    assert tokens_of("00121200", pre="llama-bpe") == ["<s>", "0", "0", "1", "2", "12", "0", "0"]


def test_qwen2_composes_characters(tokens_of: Callable[..., list[str]]) -> None:
    assert tokens_of("e\u0301", pre="qwen2") == tokens_of("\u00e9", pre="qwen2")
    assert tokens_of("e\u0301", pre="smollm") != tokens_of("\u00e9", pre="smollm")


def test_bos_and_eos(tokens_of: Callable[..., list[str]]) -> None:
    assert tokens_of("he", add_bos_token=True) == ["<s>", "he"]
    assert tokens_of("he", add_bos_token=True, add_eos_token=True) == ["<s>", "he", "</s>"]
    assert tokens_of("he", pre="llama-bpe", add_bos_token=False) == ["he"]
    with pytest.raises(ModelError, match="add_bos_token"):
        tokens_of("he", add_bos_token=True, bos_token_id=None)


def test_token_types(write_gguf: Callable[..., Path]) -> None:
    found = read_tokenizer(read_gguf(write_gguf()))
    added = {token["content"]: token["special"] for token in json.loads(found.content.decode())["added_tokens"]}
    assert added == {"<s>": True, "</s>": True, "<tool>": False}
    tokenizer = Tokenizer.from_str(found.content.decode())
    assert tokenizer.encode("he<tool></s>").tokens == ["he", "<tool>", "</s>"]
    assert tokenizer.decode([*tokenizer.encode("he<tool></s>").ids]) == "he<tool>"


def test_end_tokens_and_template(write_gguf: Callable[..., Path]) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 2, "tokenizer.chat_template": "{{ x }}"}
    found = read_tokenizer(read_gguf(write_gguf(metadata=metadata)))
    assert (found.bos_token_id, found.eos_token_ids) == (0, (1, 2))
    assert found.tokenizer_config["chat_template"] == "{{ x }}"
    assert (found.tokenizer_config["bos_token"], found.tokenizer_config["eos_token"]) == ("<s>", "</s>")


def test_damaged_vocabulary(write_gguf: Callable[..., Path]) -> None:
    for metadata, words in (
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "'a' twice"),
        ({"tokenizer.ggml.token_type": [1, 2]}, r"token_type"),
    ):
        with pytest.raises(ModelError, match=words):
            read_tokenizer(read_gguf(write_gguf(metadata=metadata)))
