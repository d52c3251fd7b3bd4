"""Tokenizers from GGUF files, through the codec: the same ids as the tokenizers they were made from."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from dcprt.errors import ModelError
from dcprt.tokenizer.text import TextCodec
from dcprt.weights.gguf_file import read_gguf
from dcprt.weights.gguf_splits import SPLITS
from dcprt.weights.gguf_tokenizer import read_tokenizer

from .samples import corpus, texts

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
MIDDLE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3 = [rf"(?:{ENDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{MIDDLE}"]
DIGITS = [r"\p{N}", GPT2]

PATTERNS: dict[str, list[str]] = {
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": [rf"(?:{ENDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{MIDDLE}"],
    "gpt-2": [GPT2],
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "command-r": DIGITS,
    "tekken": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-llm": [
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-\ud7ff]+",
        r"\p{N}",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        r"[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}
"""Written from the split rules that llama.cpp lists for these names, for another regular expression library."""

NFC = ("qwen2", "command-r")
IGNORES_MERGES = ("llama-bpe", "llama-v3", "llama3", "tekken")


PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_CHARACTERS = {
    **{byte: chr(byte) for byte in PRINTABLE},
    **{byte: chr(256 + i) for i, byte in enumerate(OTHERS)},
}
"""The characters that stand for bytes in byte-level tokens."""


def write_tokenizer(path: Path, values: dict[str, Any]) -> Path:
    """A GGUF file with nothing but tokenizer.ggml.* metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        name = f"tokenizer.ggml.{key}" if key != "chat_template" else "tokenizer.chat_template"
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(directory: Path, values: dict[str, Any]) -> TextCodec:
    found = read_tokenizer(read_gguf(write_tokenizer(directory / "x.gguf", values)))
    target = directory / "converted"
    target.mkdir(exist_ok=True)
    (target / found.file_name).write_bytes(found.content)
    (target / "tokenizer_config.json").write_text(json.dumps(found.tokenizer_config))
    return TextCodec(target)


@pytest.fixture(scope="module")
def unsplit() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges learned without any split, so that each split gives other tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    saved = json.loads(tokenizer.to_str())["model"]
    return saved["vocab"], [tuple(pair) for pair in saved["merges"]]


def gpt2_values(vocabulary: dict[str, int], merges: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    tokens = [*sorted(vocabulary, key=lambda token: vocabulary[token]), "<|bos|>", "<|eos|>", "<user>"]
    plain = [1] * len(vocabulary)
    return {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [*plain, 3, 3, 4],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": len(plain),
        "eos_token_id": len(plain) + 1,
        "add_bos_token": False,
        **more,
    }


class Merger:
    """Byte-pair merging by its definition."""

    def __init__(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
        self.vocabulary = vocabulary
        self.ranks = {pair: i for i, pair in enumerate(merges)}
        self.known: dict[str, list[int]] = {}

    def __call__(self, part: str, ignore_merges: bool) -> list[int]:
        word = "".join(BYTE_CHARACTERS[byte] for byte in part.encode())
        if ignore_merges and word in self.vocabulary:
            return [self.vocabulary[word]]
        if word not in self.known:
            self.known[word] = [self.vocabulary[symbol] for symbol in self.merged(list(word))]
        return self.known[word]

    def merged(self, symbols: list[str]) -> list[str]:
        while len(symbols) > 1:
            rank, i = min((self.ranks.get(pair, 10**9), i) for i, pair in enumerate(itertools.pairwise(symbols)))
            if rank == 10**9:
                break
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        return symbols


@pytest.fixture(scope="module")
def merger(unsplit: tuple[dict[str, int], list[tuple[str, str]]]) -> Merger:
    return Merger(*unsplit)


def pieces_by_definition(pre: str, text: str) -> list[str]:
    parts = [unicodedata.normalize("NFC", text) if pre in NFC else text]
    for pattern in PATTERNS[pre]:
        parts = [piece for part in parts for piece in split(regex.compile(pattern), part)]
    return parts


def split(pattern: regex.Pattern[str], text: str) -> list[str]:
    """The matches and what lies between them."""
    found, at = [], 0
    for match in pattern.finditer(text):
        found += [text[at : match.start()], match[0]]
        at = match.end()
    return [piece for piece in [*found, text[at:]] if piece]


@pytest.mark.parametrize("pre", PATTERNS)
def test_ids_of_every_split(
    tmp_path: Path, unsplit: tuple[dict[str, int], list[tuple[str, str]]], merger: Merger, pre: str
) -> None:
    codec = convert(tmp_path, gpt2_values(*unsplit, pre=pre))
    for text in texts():
        parts = pieces_by_definition(pre, text)
        assert codec.encode(text) == [i for part in parts for i in merger(part, pre in IGNORES_MERGES)], text
        if pre not in NFC:
            assert codec.decode(codec.encode(text)) == text
    assert codec.encode("<|bos|>a<user>", False) == [len(unsplit[0]), *codec.encode("a"), len(unsplit[0]) + 2]


def load(directory: Path, pre: str) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate([*BYTE_CHARACTERS.values(), "ab"])}
    path = write_tokenizer(directory / "x.gguf", gpt2_values(vocabulary, [("a", "b")], pre=pre))
    return Tokenizer.from_str(read_tokenizer(read_gguf(path)).content.decode())


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """What is merged by itself."""
    to_byte = {character: byte for byte, character in BYTE_CHARACTERS.items()}
    return [bytes(to_byte[c] for c in piece).decode() for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


MIXED = "I'LL pay 1234€\n\n for  naïveCamel中文12ab, okayかな\t(x)--  \n"

_LLAMA3 = ["I", "'LL", " pay", " ", "123", "4", "€\n\n", " for", " ", " naïveCamel中文", "12", "ab", ",", " okayかな"]
_END = ["\t", "(x", ")--", "  \n"]
_DIGITS = ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "€", "\n\n", " for", " ", " naïveCamel中文", "1", "2", "ab"]
_GPT2_END = [",", " okayかな", "\t", "(", "x", ")--", "  \n"]
_DEEPSEEK = ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "€", "\n", "\n", " for", " "]
_DEEPSEEK_END = ["中文", "1", "2", "ab", ",", " okay", "かな", "\t(", "x", ")--", "  ", "\n"]

PIECES: dict[str, list[str]] = {
    "llama-bpe": [*_LLAMA3, *_END],
    "llama-v3": [*_LLAMA3, *_END],
    "llama3": [*_LLAMA3, *_END],
    "qwen2": [*_LLAMA3[:4], "1", "2", "3", "4", *_LLAMA3[6:10], "1", "2", *_LLAMA3[11:], *_END],
    "gpt-2": [*_DIGITS[:4], " 1234", *_DIGITS[9:14], "12", "ab", *_GPT2_END],
    "smollm": [*_DIGITS, *_GPT2_END],
    "starcoder": [*_DIGITS, *_GPT2_END],
    "refact": [*_DIGITS, *_GPT2_END],
    "command-r": [*_DIGITS, *_GPT2_END],
    "tekken": [*_LLAMA3[:4], "1", "2", "3", "4", *_LLAMA3[6:9], " naïve", "Camel中文", "1", "2", *_LLAMA3[11:], *_END],
    "deepseek-llm": [*_DEEPSEEK, " na", "ï", "veCamel", *_DEEPSEEK_END],
    "deepseek-coder": [*_DEEPSEEK, " naïveCamel", *_DEEPSEEK_END],
    "deepseek-v3": [*_LLAMA3[:9], " naïveCamel", "中文", "12", "ab", ",", " okay", "かな", *_END],
}
"""How each splits `MIXED`. DeepSeek LLM's marks go from ":" to "~", which takes Latin letters out of words."""


def test_every_name_is_covered() -> None:
    assert set(PIECES) == set(PATTERNS) == set(SPLITS)


@pytest.mark.parametrize("pre", PIECES)
def test_pieces_by_hand(tmp_path: Path, pre: str) -> None:
    assert pieces(load(tmp_path, pre), MIXED) == PIECES[pre]


def test_the_letters_of_deepseek_llm(tmp_path: Path) -> None:
    """All letters with case below the East Asian range that Unicode had at the time, and nothing else."""
    tokenizer = load(tmp_path, "deepseek-llm")
    for character in map(chr, range(0x80, 0x800)):
        expected = unicodedata.category(character) in ("Lu", "Ll", "Lt") and not "\u0560" <= character <= "\u0588"
        assert (len(pieces(tokenizer, f" {character}é")) == 1) == expected, hex(ord(character))


@pytest.mark.parametrize(
    ("pre", "class_name"), [("qwen2", "Qwen2Tokenizer"), ("command-r", "CohereTokenizer"), ("gpt-2", "GPT2Tokenizer")]
)
def test_ids_are_those_of_transformers(
    tmp_path: Path, unsplit: tuple[dict[str, int], list[tuple[str, str]]], pre: str, class_name: str
) -> None:
    transformers = pytest.importorskip("transformers")
    reference = getattr(transformers, class_name)(vocab=unsplit[0], merges=unsplit[1])
    codec = convert(tmp_path, gpt2_values(*unsplit, pre=pre))
    for text in texts():
        assert codec.encode(text) == reference.encode(text, add_special_tokens=False), text


def llama_values(model: bytes, **more: Any) -> dict[str, Any]:
    """The metadata that a converter writes for a SentencePiece model, with two tokens added."""
    loaded = sentencepiece.SentencePieceProcessor()
    loaded.LoadFromSerializedProto(model)
    size = loaded.get_piece_size()

    def kind(i: int) -> int:
        return 2 if loaded.is_unknown(i) else 3 if loaded.is_control(i) else 6 if loaded.is_byte(i) else 1

    return {
        "model": "llama",
        "tokens": [*(loaded.id_to_piece(i) for i in range(size)), "<|end|>", "<user>"],
        "scores": [*(loaded.get_score(i) for i in range(size)), -1000.0, -1000.0],
        "token_type": [*(kind(i) for i in range(size)), 3, 4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **more,
    }


def test_llama_ids_are_those_of_sentencepiece(tmp_path: Path, llama_model: bytes) -> None:
    codec = convert(tmp_path, llama_values(llama_model))
    reference = sentencepiece.SentencePieceProcessor()
    reference.LoadFromSerializedProto(llama_model)
    for text in texts():
        if "<|end|>" not in text:
            ids = reference.encode(text)
            assert codec.encode(text) == [1, *ids], text
            assert codec.decode(ids) == reference.decode(ids)
    assert codec.vocab_size == 902 and codec.special_ids == frozenset([0, 1, 2, 900])


def test_llama_puts_a_space_after_every_special_token(tmp_path: Path, llama_model: bytes) -> None:
    codec = convert(tmp_path, llama_values(llama_model))
    a, b = codec.encode("a", False), codec.encode("b", False)
    assert codec.encode("a<|end|>b<user>a</s>", False) == [*a, 900, *b, 901, *a, 2]
    assert codec.decode(codec.encode("a<user>b")) == "a<user> b"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, ([1], [])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_eos_token": True}, ([1], [2])),
        ({"bos_token_id": 2}, ([2], [])),
    ],
)
def test_llama_bos_and_eos(
    tmp_path: Path, llama_model: bytes, metadata: dict[str, Any], expected: tuple[list[int], list[int]]
) -> None:
    codec = convert(tmp_path, llama_values(llama_model, **metadata))
    assert codec.encode("a") == [*expected[0], *codec.encode("a", False), *expected[1]]


def test_llama_without_a_space_in_front(tmp_path: Path, llama_model: bytes) -> None:
    codec = convert(tmp_path, llama_values(llama_model, add_space_prefix=False, chat_template="{{ eos_token }}"))
    assert codec.decode(codec.encode(" the fox")) == " the fox"
    assert codec.encode("a", False) != convert(tmp_path, llama_values(llama_model)).encode("a", False)


def test_equal_scores_merge_from_the_left(tmp_path: Path, llama_model: bytes) -> None:
    """Two ways to make one token have one score, so the leftmost pair goes first."""
    values = llama_values(llama_model)
    base = values["tokens"][:259]
    tokens = [*base, "a", "b", "▁", "ab", "ba", "aba"]
    values |= {
        "tokens": tokens,
        "scores": [0.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -2.0, -1.0],
        "token_type": [*values["token_type"][:259], 1, 1, 1, 1, 1, 1],
        "add_space_prefix": False,
    }
    codec = convert(tmp_path, values)

    def split_up(text: str) -> list[str]:
        return [tokens[i] for i in codec.encode(text, False)]

    assert split_up("ababa") == ["aba", "ba"]
    assert split_up("babab") == ["ba", "ba", "b"]
    assert split_up("a c") == ["a", "▁", "<0x63>"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.pop("scores"), "no tokenizer.ggml.scores"),
        (lambda v: v["scores"].pop(), "902 tokens, but 901 values in tokenizer.ggml.scores"),
        (lambda v: v["token_type"].__setitem__(0, 1), "0 tokens have the type of the unknown token"),
        (lambda v: v["token_type"].__setitem__(5, 1), "no byte token <0x02>"),
        (lambda v: v["token_type"].__setitem__(500, 9), "the type 9"),
        (lambda v: v["tokens"].__setitem__(500, ""), "an empty token"),
        (lambda v: v.update(remove_extra_whitespaces=True), "remove_extra_whitespaces is set"),
        (lambda v: v.update(bos_token_id=902), "bos_token_id is 902"),
        (lambda v: v.update(model="t5"), "'t5'.*gpt2.*llama"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, llama_model: bytes, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    values = llama_values(llama_model)
    change(values)
    with pytest.raises(ModelError, match=words):
        convert(tmp_path, values)


@pytest.mark.parametrize("pre", ["default", "gpt2", "falcon3", "deepseek-r1-qwen", "llama4", "QWEN2"])
def test_other_splits_are_refused_by_name(tmp_path: Path, pre: str) -> None:
    with pytest.raises(ModelError, match=f"'{pre}', which is not supported; supported: llama-bpe.*deepseek-v3"):
        convert(tmp_path, gpt2_values({"a": 0}, [], pre=pre))
