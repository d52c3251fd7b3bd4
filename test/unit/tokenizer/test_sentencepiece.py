"""tokenizer.model against the sentencepiece library itself and against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from dcprt.errors import ModelError, RequestError
from dcprt.tokenizer.text import TextCodec

from .conftest import LLAMA_CONFIG, train_pieces
from .samples import texts

SPECIAL_TEXTS = [
    "<s>",
    "<s>a",
    "<s> a",
    "a<s>b</s>c",
    "a <s> b </s> c",
    "<s><s></s>",
    "<unk>x<unk>",
    "hi<|end|>  \n there<|end|>",
    "hi  <mask>  there",
    "hi  <mask><|end|>  there <|end|>",
    "<tool>x <tool> y<tool>call z <tool>cal",
    "<tool>",
    " <s>",
    "<|end|",
]


def processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    loaded = sentencepiece.SentencePieceProcessor()
    loaded.LoadFromSerializedProto(model)
    return loaded


@pytest.fixture(scope="module")
def slow(llama_directory: Path) -> Any:
    """transformers' tokenizer that calls sentencepiece for what lies between added tokens."""
    module = pytest.importorskip("transformers.tokenization_utils_sentencepiece")
    return module.SentencePieceBackend.from_pretrained(llama_directory)


@pytest.fixture(scope="module")
def fast(llama_model: bytes) -> Any:
    """transformers' LlamaTokenizer, which merges with the `tokenizers` library; not legacy."""
    transformers = pytest.importorskip("transformers")
    loaded = processor(llama_model)
    pieces = [loaded.id_to_piece(i) for i in range(loaded.get_piece_size())]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    base = pytest.importorskip("transformers.tokenization_utils_base")
    scores = {piece: loaded.get_score(i) for i, piece in enumerate(pieces) if i > 258}
    tokenizer = transformers.LlamaTokenizer(
        vocab=vocabulary, merges=base.generate_merges(vocabulary, scores), legacy=False
    )
    added = LLAMA_CONFIG["added_tokens_decoder"]
    for token in list(added.values())[3:]:  # type: ignore[attr-defined]
        tokenizer.add_tokens([base.AddedToken(**{"normalized": False, **token})], special_tokens=token["special"])
    return tokenizer


def test_ids_are_those_of_sentencepiece(llama: TextCodec, llama_model: bytes) -> None:
    reference = processor(llama_model)
    for text in texts():
        if "<|end|>" not in text:
            ids = reference.encode(text)
            assert llama.encode(text, add_special_tokens=False) == ids, text
            assert llama.encode(text) == [1, *ids]
            assert llama.decode(ids) == reference.decode(ids), text


def test_legacy_ids_are_those_of_transformers(llama: TextCodec, slow: Any) -> None:
    for text in [*texts(), *SPECIAL_TEXTS]:
        assert llama.encode(text, add_special_tokens=False) == slow.encode(text, add_special_tokens=False), text


def test_other_ids_are_those_of_transformers(write_pieces: Callable[..., Path], fast: Any) -> None:
    """transformers takes a space that begins the text for the one put in front; sentencepiece adds another."""
    codec = TextCodec(write_pieces({**LLAMA_CONFIG, "legacy": False}))
    for text in [*texts(), *SPECIAL_TEXTS]:
        if not text.startswith((" ", "▁")):
            assert codec.encode(text, add_special_tokens=False) == fast.encode(text, add_special_tokens=False), text
    assert codec.decode(codec.encode("  a")) == "  a"
    assert codec.decode(codec.encode(" </s> a", False), skip_special_tokens=False) == " </s> a"


def test_decoding_is_that_of_transformers(llama: TextCodec, fast: Any) -> None:
    for text in [*texts(), *SPECIAL_TEXTS]:
        ids = llama.encode(text)
        for skip in (False, True):
            assert llama.decode(ids, skip) == fast.decode(ids, skip_special_tokens=skip), (text, skip)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(259, 903), max_size=30), skip=st.booleans())
def test_decoding_of_anything_but_bytes_is_that_of_transformers(
    llama: TextCodec, fast: Any, ids: list[int], skip: bool
) -> None:
    assert llama.decode(ids, skip) == fast.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
def test_nothing_is_lost(llama: TextCodec, text: str) -> None:
    assert llama.decode(llama.encode(text)) == text


def test_facts(llama: TextCodec) -> None:
    assert llama.vocab_size == 904
    assert llama.special_ids == frozenset([0, 1, 2, 900, 901])
    assert (llama.bos_token_id, llama.eos_token_id) == (1, 2)
    assert llama.strips_first_space
    assert llama.token_bytes(3 + 0xE4) == b"\xe4"
    assert llama.token_bytes(1) == b"<s>" and llama.token_bytes(902) == b"<tool>"
    assert llama.token_bytes(904) == llama.token_bytes(-1) == b""
    chat = llama.encode_chat([{"role": "user", "content": "hi"}])
    assert chat[0] == 1 and chat.count(1) == 1 and chat[-1] == 2


def test_without_any_configuration(write_pieces: Callable[..., Path], llama_model: bytes) -> None:
    codec = TextCodec(write_pieces())
    assert (codec.bos_token_id, codec.eos_token_id, codec.vocab_size) == (1, 2, 900)
    assert codec.encode("a</s>b") == [1, *processor(llama_model).encode("a"), 2, *processor(llama_model).encode("b")]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"add_bos_token": False}, ([], [])),
        ({"add_eos_token": True}, ([1], [2])),
        ({"add_bos_token": False, "add_eos_token": True}, ([], [2])),
        ({"bos_token": None}, ([], [])),
        ({"bos_token": "</s>"}, ([2], [])),
    ],
)
def test_bos_and_eos(
    write_pieces: Callable[..., Path], config: dict[str, Any], expected: tuple[list[int], list[int]]
) -> None:
    codec = TextCodec(write_pieces(config))
    plain = codec.encode("hello", add_special_tokens=False)
    assert codec.encode("hello") == [*expected[0], *plain, *expected[1]]


def test_added_tokens_json(write_pieces: Callable[..., Path]) -> None:
    codec = TextCodec(
        write_pieces(
            {"pad_token": "<pad>", "additional_special_tokens": ["<extra>", "<known>"]},
            added_tokens={"<plain>": 900, "<known>": 901},
            special_tokens_map={"eos_token": {"content": "<known>"}},
        )
    )
    assert codec.encode("<plain><known><pad><extra>", add_special_tokens=False) == [900, 901, 902, 903]
    assert codec.special_ids == frozenset([0, 1, 2, 901, 902, 903])
    assert codec.eos_token_id == 901


def test_a_token_can_be_renamed(write_pieces: Callable[..., Path]) -> None:
    codec = TextCodec(write_pieces({"added_tokens_decoder": {"300": {"content": "<|im|>", "special": True}}}))
    assert codec.encode("<|im|>", add_special_tokens=False) == [300]
    assert codec.decode([300]) == "" and codec.decode([300], skip_special_tokens=False) == "<|im|>"


def test_single_words_only_where_no_word_goes_on(write_pieces: Callable[..., Path]) -> None:
    token = {"content": "low", "single_word": True}
    codec = TextCodec(write_pieces({"added_tokens_decoder": {"900": token}}))
    assert codec.encode("low (low) low", False).count(900) == 3
    assert codec.encode("lower slow _low", False).count(900) == 0


@pytest.mark.parametrize("legacy", [True, False])
def test_no_space_in_front(write_pieces: Callable[..., Path], llama_model: bytes, legacy: bool) -> None:
    codec = TextCodec(write_pieces({"add_prefix_space": False, "legacy": legacy}))
    assert not codec.strips_first_space
    assert processor(llama_model).decode(codec.encode("a b", False)) == "a b"
    assert codec.decode(codec.encode(" a b")) == " a b"
    assert codec.encode("a</s>a", False) == [*codec.encode("a", False), 2, *codec.encode("a", False)]


def test_a_model_that_normalizes(tmp_path: Path, write_pieces: Callable[..., Path]) -> None:
    """sentencepiece's defaults: NFKC, spaces collapsed, and an unknown token instead of bytes."""
    model = train_pieces(tmp_path, vocab_size=600, user_defined_symbols=["<user>"], control_symbols=["<ctl>"])
    directory = write_pieces(model=model)
    codec, reference = TextCodec(directory), processor(model)
    for text in texts():
        if "<|end|>" not in text:
            assert codec.encode(text, add_special_tokens=False) == reference.encode(text), text
    assert codec.decode(codec.encode("  ｆｕｌｌ   fox ")) == "full fox"
    assert codec.encode("a<user>b", False) == reference.encode("a<user>b")
    assert codec.encode("<ctl>", False) == [reference.piece_to_id("<ctl>")]
    assert reference.piece_to_id("<ctl>") in codec.special_ids


def test_tokenizer_json_goes_first(pieces_directory: Path, llama_model: bytes, tmp_path: Path) -> None:
    for path in pieces_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.model").write_bytes(llama_model)
    assert TextCodec(tmp_path).vocab_size == TextCodec(pieces_directory).vocab_size


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        ({"tokenizer_class": "T5Tokenizer"}, {}, "'T5Tokenizer'.*LlamaTokenizer"),
        ({"add_bos_token": True, "bos_token": "<nope"}, {}, None),
        ({"add_bos_token": True, "bos_token": None}, {}, "add_bos_token is set"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, {}, "'x' is no token id"),
        ({"added_tokens_decoder": {"900": {}}}, {}, "900 has no content"),
        (None, {"added_tokens": {"a": -1}}, "added_tokens.json: -1 is no token id"),
    ],
)
def test_what_is_refused(
    write_pieces: Callable[..., Path], config: dict[str, Any], files: dict[str, Any], words: str | None
) -> None:
    directory = write_pieces(config, **files)
    if words is None:
        assert TextCodec(directory).bos_token_id == 900
        return
    with pytest.raises(ModelError, match=words):
        TextCodec(directory)


def test_damaged_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        TextCodec(tmp_path)
    for content in (b"", b"IQ== 0\nIg== 1\n", b"\xff" * 40):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ModelError, match=r"tokenizer\.model is no SentencePiece model"):
            TextCodec(tmp_path)


def test_half_a_surrogate_pair_is_the_requests_fault(llama: TextCodec, byte_level: TextCodec) -> None:
    broken = json.loads('"ab\\ud83d"')
    for codec in (llama, byte_level):
        with pytest.raises(RequestError, match=r"U\+D83D\) at character 2"):
            codec.encode(broken)
