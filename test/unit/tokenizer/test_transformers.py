"""A byte-level tokenizer.json and chat templates against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcprt.errors import ModelError, RequestError
from dcprt.tokenizer.text import TextCodec

from .samples import texts

SPECIAL_TEXTS = [
    "<|begin|>a<|end|>",
    "<tool> x<tool>y two words two  words",
    "a  <strip> \n b<strip>",
    "<|header|>user<|/header|>\n\nhi<|end|>",
    "<|begin",
]


@pytest.fixture(scope="module")
def reference(byte_level_directory: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(byte_level_directory)


def test_ids_and_text(byte_level: TextCodec, reference: Any) -> None:
    for text in [*texts(), *SPECIAL_TEXTS]:
        for special in (True, False):
            ids = byte_level.encode(text, special)
            assert ids == reference.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert byte_level.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), text


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decoding_of_anything(byte_level: TextCodec, reference: Any, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=30))
    assert byte_level.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_nothing_is_lost(byte_level: TextCodec, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text


def test_facts(byte_level: TextCodec, reference: Any) -> None:
    assert byte_level.vocab_size == len(reference)
    assert byte_level.bos_token_id == reference.bos_token_id
    assert byte_level.eos_token_id == reference.eos_token_id
    assert byte_level.special_ids == set(
        reference.convert_tokens_to_ids(["<|begin|>", "<|end|>", "<|header|>", "<|/header|>"])
    )


def test_eos_where_only_the_configuration_asks_for_it(byte_level_directory: Path, tmp_path: Path) -> None:
    for path in byte_level_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_eos_token": True}))
    codec = TextCodec(tmp_path)
    plain = codec.encode("hello", add_special_tokens=False)
    assert codec.encode("hello") == [codec.bos_token_id, *plain, codec.eos_token_id]


LLAMA3_STYLE = """
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "1 Jan 2025" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|header|>system<|/header|>\\n\\nToday: " + date_string + "\\n" + system }}
{%- if tools is not none and tools is defined %}
{{- "\\nTools:\\n" }}
    {%- for tool in tools %}
{{- tool | tojson(indent=2) }}{{ "\\n" }}
    {%- endfor %}
{%- endif %}
{{- "<|end|>" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role ' + message.role) }}
    {%- endif %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}
{{- '<tool>' + (call.function | tojson) }}
        {%- endfor %}
    {%- endif %}
    {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' + (message['content'] or '') | trim + '<|end|>' }}
    {%- if loop.last and message.role == 'user' %}{# the last word #}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}
"""

CHATML = (
    "{% for message in messages %}\n"
    "    {% if loop.index0 > 2 %}{% break %}{% endif %}\n"
    "    {{ '<|header|>' + message.role + '\\n' + message.content + '<|end|>' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|header|>assistant\\n' }}{% endif %}\n"
)

ALTERNATING = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% elif m.role == 'user' %}[INST] {{ ns.system ~ m.content }} [/INST]"
    "{% else %}{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Gives the weather <now> & "later" für Zürich',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]

CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "  Wer bist du? é<&>'\"  "}],
    [
        {"role": "user", "content": "12 + 30?"},
        {"role": "assistant", "content": "42\n"},
        {"role": "user", "content": "中文 🤖"},
        {"role": "assistant", "content": "ok"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
        },
        {"role": "tool", "content": '{"sun": true}'},
    ],
]


@pytest.mark.parametrize("template", [LLAMA3_STYLE, CHATML, ALTERNATING])
@pytest.mark.parametrize("chat", CHATS)
def test_prompts(byte_level_directory: Path, reference: Any, template: str, chat: list[dict[str, Any]]) -> None:
    codec = TextCodec(byte_level_directory, template)
    for options in ({}, {"tools": TOOLS}, {"date_string": "2 Feb 2026", "add_generation_prompt": False}):
        options = {"add_generation_prompt": True, "tools": None, **options}
        expected = reference.apply_chat_template(chat, chat_template=template, tokenize=False, **options)
        assert codec.apply_chat_template(chat, **options) == expected
        assert codec.encode_chat(chat, **options) == reference.encode(expected, add_special_tokens=False)


def test_a_refusal_of_the_template(byte_level_directory: Path, reference: Any) -> None:
    codec = TextCodec(byte_level_directory, LLAMA3_STYLE)
    chat = [{"role": "user", "content": "x"}, {"role": "critic", "content": "y"}]
    with pytest.raises(RequestError, match="Unknown role critic") as caught:
        codec.apply_chat_template(chat)
    assert caught.value.param == "messages"
    with pytest.raises(Exception, match="Unknown role critic"):
        reference.apply_chat_template(chat, chat_template=LLAMA3_STYLE, tokenize=False)


def test_the_date_of_today(byte_level_directory: Path, reference: Any) -> None:
    template = "{{ strftime_now('%B') }} {{ messages | length }}"
    codec = TextCodec(byte_level_directory, template)
    expected = reference.apply_chat_template(CHATS[0], chat_template=template, tokenize=False)
    assert codec.apply_chat_template(CHATS[0]) == expected


def test_a_given_template_replaces_those_of_the_model(byte_level_directory: Path, tmp_path: Path) -> None:
    for path in byte_level_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("of the model")
    assert TextCodec(tmp_path).apply_chat_template(CHATS[0]) == "of the model"
    codec = TextCodec(tmp_path, "given {{ messages[0].content }}{% if tools %} with tools{% endif %}")
    assert codec.has_chat_template
    assert codec.apply_chat_template(CHATS[0], tools=TOOLS) == "given hi with tools"


def test_a_given_template_must_be_one(byte_level_directory: Path) -> None:
    with pytest.raises(ModelError, match=r"chat template given .* line 2"):
        TextCodec(byte_level_directory, "fine\n{% for m in %}")
