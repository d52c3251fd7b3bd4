"""Where the tokens of a request begin in the text that the client gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dcprt.messages import Finish, TextOut, TokenLogprobs, TokensOut, Usage
from dcprt.params import SamplingParams
from dcprt.server.service import Choice
from dcprt.server.shapes import CompletionShape
from dcprt.tokenizer.output import OutputText
from dcprt.tokenizer.text import TextCodec

THE_CODE = [1, 260, 261]
"""`<s>`, `▁the` and `▁code` of the tokenizer `pieces`."""
USAGE = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)


def message(tokens: Sequence[int], prompt: Sequence[int] = (), finish: Finish | None = None) -> TokensOut:
    return TokensOut(
        rid="r",
        token_ids=list(tokens),
        usage=USAGE,
        finish=finish,
        logprobs=[TokenLogprobs(token, -1.0) for token in tokens],
        prompt_logprobs=[TokenLogprobs(token, -1.0) for token in prompt[1:]],
    )


def answer(
    codec: TextCodec, prompt: Sequence[int], output: Sequence[int], *, text: str | None = None, skip: bool = True
) -> dict[str, Any]:
    """A completion with echo, its tokens one by one; a stream of it is the same. `text`: the prompt as written."""
    params = SamplingParams(logprobs=0, prompt_logprobs=0, skip_special_tokens=skip)
    echo = codec.decode(prompt, skip) if text is None else text
    request = OutputText(codec, params, prompt, echo, written=text is not None)
    shape, choice = CompletionShape(logprobs=True), Choice(USAGE)
    pieces = []
    for number, token in enumerate(output):
        finish = Finish(reason="length") if number == len(output) - 1 else None
        item: TextOut = request.push(message([token], prompt if number == 0 else (), finish))
        pieces.append(shape.piece(item, choice))
        choice.add(item)
    whole = shape.whole(choice)
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for name, column in whole["logprobs"].items():
        assert [x for piece in pieces for x in piece["logprobs"][name]] == column, name
    return whole


def places(found: dict[str, Any], hidden: Sequence[str] = ()) -> list[int]:
    """Offsets, each of which has been held against the text; tokens in `hidden` have none."""
    for token, offset in zip(found["logprobs"]["tokens"], found["logprobs"]["text_offset"], strict=True):
        if token not in hidden:
            assert found["text"][offset : offset + len(token)] == token
    offsets: list[int] = found["logprobs"]["text_offset"]
    return offsets


def test_special_tokens_that_are_skipped_take_no_room(demo: TextCodec) -> None:
    start, end = demo.encode("<|im_start|>"), demo.encode("<|im_end|>")
    words = demo.encode("Hello there")
    found = answer(demo, [*start, *words, *end, *start], [*words, *end, *words])
    assert found["text"] == "Hello thereHello thereHello there"
    assert places(found, ["<|im_start|>", "<|im_end|>"]) == [0, 0, 5, 11, 11, 11, 16, 22, 22, 27]


def test_they_take_room_where_they_are_kept(demo: TextCodec) -> None:
    prompt = demo.encode("<|im_start|>Hello<|im_end|>")
    found = answer(demo, prompt, prompt, skip=False)
    assert found["text"] == "<|im_start|>Hello<|im_end|>" * 2
    assert places(found) == [0, 12, 17, 27, 39, 44]


def test_a_written_prompt_comes_back_with_its_special_tokens(demo: TextCodec) -> None:
    text = "<|im_start|>Hello<|im_end|>"
    found = answer(demo, demo.encode(text), [*demo.encode("<|im_end|>"), *demo.encode("Hello")], text=text)
    assert found["text"] == text + "Hello"
    assert places(found, ["<|im_end|>"]) == [0, 12, 17, 27, 27]


def test_what_the_tokenizer_puts_around_a_written_prompt_takes_no_room(pieces: TextCodec) -> None:
    """A beginning token and a space before the first word; a space before the first word of the output."""
    found = answer(pieces, THE_CODE, THE_CODE[1:], text="the code")
    assert found["text"] == "the codethe code"
    assert found["logprobs"]["tokens"][:2] == ["<s>", " the"]
    assert found["logprobs"]["text_offset"] == [0, 0, 3, 8, 11]


def test_ids_of_a_prompt_lose_their_first_space(pieces: TextCodec) -> None:
    found = answer(pieces, THE_CODE, THE_CODE[1:])
    assert found["text"] == "the codethe code"
    assert found["logprobs"]["text_offset"] == [0, 0, 3, 8, 11]


def test_output_begins_behind_a_prompt_that_ends_within_a_character(demo: TextCodec) -> None:
    emoji = demo.encode("\N{ROCKET}")
    assert len(emoji) > 1
    found = answer(demo, emoji[:-1], demo.encode("Hello there"))
    assert found["text"] == "�Hello there"
    assert found["logprobs"]["text_offset"][-2:] == [1, 6]


@pytest.mark.parametrize("skip", [True, False])
def test_the_token_that_ends_a_request_has_no_room(demo: TextCodec, skip: bool) -> None:
    end = demo.encode("<|im_end|>")[0]
    params = SamplingParams(logprobs=0, skip_special_tokens=skip)
    request = OutputText(demo, params)
    item = request.push(message([*demo.encode("Hello"), end], finish=Finish(reason="stop", matched=end)))
    choice = Choice(USAGE)
    choice.add(item)
    found = CompletionShape(logprobs=True).whole(choice)
    assert (found["text"], found["logprobs"]["text_offset"]) == ("Hello", [0, 5])
