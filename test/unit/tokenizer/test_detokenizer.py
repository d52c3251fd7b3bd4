from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcprt.tokenizer.detokenizer import Detokenizer
from dcprt.tokenizer.text import TextCodec

TEXTS = st.one_of(
    st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"]), max_size=40),
    st.text(alphabet="中文字符日本語한국어👩‍👧🇫🇷é1234567890 \n\t{}()def", max_size=40),
)

NOT_REPRESENTABLE = dict.fromkeys(map(ord, "\x04\x06\x13\x14\x16\x1d"))
"""Control characters that the demo model's vocabulary lacks; encoding drops them."""


def stream(codec: TextCodec, ids: list[int], skip: bool, sizes: list[int]) -> list[str]:
    detokenizer = Detokenizer(codec, skip)
    parts = []
    at = 0
    for size in sizes:
        parts.append(detokenizer.push(ids[at : at + size]))
        at += size
    parts.append(detokenizer.push(ids[at:]))
    parts.append(detokenizer.flush())
    return parts


@pytest.fixture(scope="session")
def codecs(demo: TextCodec, pieces: TextCodec, llama: TextCodec, byte_level: TextCodec) -> list[TextCodec]:
    """One of every kind."""
    return [demo, pieces, llama, byte_level]


@pytest.fixture(params=["demo", "pieces", "llama", "byte_level"])
def codec(request: pytest.FixtureRequest) -> TextCodec:
    return request.getfixturevalue(request.param)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(0, 4), max_size=30))
def test_any_ids(codecs: list[TextCodec], data: st.DataObject, skip: bool, sizes: list[int]) -> None:
    for codec in codecs:
        known = st.integers(0, codec.vocab_size + 3)
        common = st.sampled_from([*sorted(codec.special_ids), *(i for i in range(min(300, codec.vocab_size)))])
        ids = data.draw(st.lists(st.one_of(known, common), max_size=40))
        assert "".join(stream(codec, ids, skip, sizes)) == codec.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(0, 4), max_size=30))
def test_any_text_arrives_whole(
    codecs: list[TextCodec], demo: TextCodec, pieces: TextCodec, text: str, sizes: list[int]
) -> None:
    for codec in codecs:
        ids = codec.encode(text, add_special_tokens=False)
        parts = stream(codec, ids, False, sizes)
        assert "".join(parts) == codec.decode(ids, False)
        if codec is not pieces and "\ufffd" not in text and "▁" not in text:
            assert "".join(parts) == (text.translate(NOT_REPRESENTABLE) if codec is demo else text)
            assert not any("\ufffd" in part for part in parts)


def test_a_split_character_is_held_back(codec: TextCodec) -> None:
    ids = codec.encode("🤖", add_special_tokens=False)
    detokenizer = Detokenizer(codec)
    parts = [detokenizer.push([i]) for i in ids]
    assert len(ids) > 1
    assert parts[-1] == "🤖" and not any(parts[:-1])
    assert detokenizer.flush() == ""


def test_a_real_replacement_character_passes_at_once(codec: TextCodec) -> None:
    detokenizer = Detokenizer(codec)
    for _ in range(3):
        text = "".join(detokenizer.push([i]) for i in codec.encode("\ufffd", add_special_tokens=False))
        assert text.strip() == "\ufffd"


def test_an_unfinished_character_comes_out_at_the_end(codec: TextCodec) -> None:
    ids = codec.encode("🤖", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(codec)
    assert detokenizer.push(ids) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens(demo: TextCodec) -> None:
    ids = [*demo.encode("a"), 2, *demo.encode("b")]
    assert Detokenizer(demo, True).push(ids) == "ab"
    assert Detokenizer(demo, False).push(ids) == "a<|im_end|>b"


def test_first_space(pieces: TextCodec) -> None:
    ids = pieces.encode("the the")
    assert "".join(stream(pieces, ids, True, [1, 1, 1, 1])) == "the the"
    assert "".join(stream(pieces, ids, False, [1, 1])) == "<s> the the"
