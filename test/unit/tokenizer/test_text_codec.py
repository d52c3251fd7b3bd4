from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, processors

from dcprt.errors import ModelError, RequestError
from dcprt.tokenizer.text import TextCodec

REPRESENTABLE = st.characters(
    max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d"
)
"""The demo model has no tokens for these control characters, nor for bytes that begin the last planes."""

TEXTS = [
    "def f(x: int) -> int:\n\treturn x ** 2  # naïve\n\n\n",
    "中文字符，日本語のテキスト、한국어",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 🤖",
    "1234567890 3.14159 1,000,000 0x1F ½ ² ٣",
    "a  b   c    d\n\n  \t \r\n e\u00a0f ",
    " leading and trailing ",
    "I'll don't WE'RE it's",
    "\ufffd and \x00 and \x7f and \u00ad",
]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(demo: TextCodec, text: str) -> None:
    assert demo.decode(demo.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(REPRESENTABLE))
def test_round_trip_of_anything(demo: TextCodec, text: str) -> None:
    assert demo.decode(demo.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello, we can use", [19556, 28, 392, 416, 722]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("\n", [198]),
        ("<|im_start|>user\n", [1, 4093, 198]),
    ],
)
def test_known_encodings(demo: TextCodec, text: str, ids: list[int]) -> None:
    assert demo.encode(text) == ids


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="0123456789 .,abc\n", max_size=30))
def test_every_digit_is_one_token(demo: TextCodec, text: str) -> None:
    tokens = [demo.decode([i]) for i in demo.encode(text)]
    assert "".join(tokens) == text
    for token in tokens:
        assert token.isdigit() is False or len(token) == 1
        assert len(token) == 1 or not any(c.isdigit() for c in token)


def test_a_separate_implementation_of_merging_agrees(demo_directory: Path, demo: TextCodec) -> None:
    """Byte-pair merging by its definition, on words that need no splitting."""
    saved = json.loads((demo_directory / "tokenizer.json").read_text())
    ranks = {pair: i for i, pair in enumerate(saved["model"]["merges"])}
    vocabulary = saved["model"]["vocab"]
    for word in ["internationalization", "Ġtokenizers", "supercalifragilistic", "Ġthe", "Ġ中", "ĠGPU"]:
        text = word.replace("Ġ", " ")
        parts = list("".join(_byte_characters()[b] for b in text.encode()))
        while len(parts) > 1:
            pairs = [(ranks.get(f"{a} {b}", 10**9), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
            rank, i = min(pairs)
            if rank == 10**9:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        assert demo.encode(text) == [vocabulary[part] for part in parts], word


def _byte_characters() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49200), max_size=40), skip=st.booleans())
def test_decode_is_the_librarys(demo: TextCodec, demo_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert demo.decode(ids, skip) == demo_tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def demo_tokenizer(demo_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_directory / "tokenizer.json"))


def test_transformers_encodes_alike(demo_directory: Path, demo: TextCodec) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(demo_directory)
    for text in TEXTS:
        assert demo.encode(text) == reference(text).input_ids
    messages = [{"role": "user", "content": "What is 12 + 30?"}, {"role": "assistant", "content": "42"}]
    for prompt in (True, False):
        expected = reference.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert demo.apply_chat_template(messages, add_generation_prompt=prompt) == expected


def test_facts_of_the_demo(demo: TextCodec) -> None:
    assert demo.vocab_size == 49152
    assert demo.special_ids == frozenset(range(17))
    assert (demo.bos_token_id, demo.eos_token_id) == (1, 2)
    assert demo.token_bytes(demo.encode(" ")[0]) == b" "
    assert demo.token_bytes(10**9) == b"" and demo.token_bytes(-1) == b""


def test_added_tokens_are_taken_literally(tmp_path: Path) -> None:
    characters = {c: i for i, c in enumerate(_byte_characters().values())}
    tokenizer = Tokenizer(models.BPE(vocab=characters, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<｜begin▁of｜>", "two words", "soft\u00adhyphen", "Ġé"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    for i in range(codec.vocab_size):
        assert codec.decode([i]) == tokenizer.decode([i]), i


def test_bos_comes_once(pieces: TextCodec, pieces_directory: Path, tmp_path: Path) -> None:
    assert pieces.encode("the")[0] == 1 and pieces.encode("the").count(1) == 1
    assert 1 not in pieces.encode("the", add_special_tokens=False)
    chat = pieces.encode_chat([{"role": "user", "content": "the"}])
    assert chat[0] == 1 and chat.count(1) == 1
    shutil.copytree(pieces_directory, tmp_path / "bare")
    saved = json.loads((tmp_path / "bare" / "tokenizer.json").read_text())
    saved["post_processor"] = None
    (tmp_path / "bare" / "tokenizer.json").write_text(json.dumps(saved))
    assert TextCodec(tmp_path / "bare").encode("the") == pieces.encode("the")
    (tmp_path / "bare" / "tokenizer_config.json").write_text("{}")
    assert TextCodec(tmp_path / "bare").encode("the") == pieces.encode("the", add_special_tokens=False)


def test_space_mark_style(pieces: TextCodec, pieces_directory: Path) -> None:
    library = Tokenizer.from_file(str(pieces_directory / "tokenizer.json"))
    for text in ["the code", " the", "中文 é 🤖", "the  code\n", "日本", "<0x41>", "_<>_"]:
        ids = pieces.encode(text)
        assert pieces.decode(ids) == library.decode(ids) == text
        assert pieces.decode(ids, False) == library.decode(ids, skip_special_tokens=False)
    byte = {value: 3 + value for value in range(256)}
    assert pieces.decode([byte[0xE4], byte[0xB8], byte[0xAD]]) == "中"
    assert pieces.decode([byte[0xE4], byte[0xB8], 274]) == "\ufffd" + pieces.decode([274])


def with_template(directory: Path, template: Any, **extra: Any) -> TextCodec:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **extra}))
    return TextCodec(directory)


MESSAGES = [{"role": "user", "content": "é<&>"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "é<&>"}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}x{{ messages[0].role }}{% endgeneration %}", "xuser"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{% if tools %}t{% endif %}{{ enable_thinking }}", "tFalse"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{{ eos_token }}{{ add_generation_prompt }}", "</s>True"),
        ([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "u"}], "u"),
    ],
)
def test_what_templates_may_use(tmp_path: Path, template: Any, expected: str) -> None:
    codec = with_template(tmp_path, template, eos_token="</s>")
    assert codec.apply_chat_template(MESSAGES, tools=[{"a": 1}], enable_thinking=False) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "concatenate str"),
        ("{{ messages[7].content.x }}", "no attribute|no element"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__mro__|unsafe"),
        ("{% for %}", "messages"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_template_errors_are_the_requests(tmp_path: Path, template: str, words: str) -> None:
    codec = with_template(tmp_path, template)
    with pytest.raises(RequestError, match=words) as caught:
        codec.apply_chat_template(MESSAGES)
    assert caught.value.status == 400 and caught.value.param == "messages"


def test_absent_fields_and_files(tmp_path: Path) -> None:
    codec = with_template(tmp_path, "{% if messages[0].content is defined %}yes{% else %}no{% endif %}")
    assert codec.apply_chat_template([{"role": "assistant", "content": None}]) == "no"
    (tmp_path / "chat_template.jinja").write_text("from the file {{ messages[0].role }}")
    assert TextCodec(tmp_path).apply_chat_template(MESSAGES) == "from the file user"
    codec = with_template(tmp_path, None)
    (tmp_path / "chat_template.jinja").unlink()
    codec = TextCodec(tmp_path)
    assert not codec.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        codec.apply_chat_template(MESSAGES)


def test_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--skip-tokenizer-init"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged"):
        TextCodec(tmp_path)
    with_template(tmp_path, "x")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is no JSON"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="WordPiece"):
        TextCodec(tmp_path)
