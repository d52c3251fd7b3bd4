"""The details of OpenAI's protocol through the official client, on four ranks and on one."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from dcprt.tokenizer.text import TextCodec

from . import tiny as tiny_models
from .server import MODEL, Server
from .stream import events

STORY = "Once upon a time, in a small village by the sea, there lived"
EMOJI = "🎉🦄" * 4
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
WARM = {"temperature": 1.0, "seed": 7, "max_tokens": 5, "extra_body": {"ignore_eos": True}}


@pytest.fixture(params=["server", "solo"], ids=["dcp4", "tp1"])
def host(request: pytest.FixtureRequest) -> Server:
    """Four ranks, then one."""
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def client(host: Server) -> openai.OpenAI:
    return host.client()


def complete(client: openai.OpenAI, prompt: Any = STORY, **options: Any) -> Any:
    """One greedy completion of eight tokens, unless `options` say otherwise."""
    return client.completions.create(model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 8, **options})


def chat(client: openai.OpenAI, **options: Any) -> Any:
    """A greedy answer to a question."""
    messages = options.pop("messages", QUESTION)
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 20, **options}
    )


def refused(error: type[openai.APIStatusError] = openai.BadRequestError) -> Any:
    return pytest.raises(error)


def joined(chunks: Any) -> dict[int, str]:
    """The text of each choice of a stream, which must have exactly one finish_reason each (T4), and nothing after."""
    texts: dict[int, str] = defaultdict(str)
    ended: list[int] = []
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in ended
            assert choice.finish_reason in (None, "stop", "length")
            texts[choice.index] += choice.delta.content or "" if hasattr(choice, "delta") else choice.text
            if choice.finish_reason:
                ended.append(choice.index)
    assert sorted(ended) == sorted(texts)
    return dict(texts)


def until(text: str, *stops: str) -> str:
    """`text` up to the stop string that is complete first."""
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    return text if not ends else text[: sum(min(ends))]


class TestEcho:
    def test_the_prompt_comes_first(self, client: openai.OpenAI) -> None:
        plain, echoed = complete(client), complete(client, echo=True)
        assert echoed.choices[0].text == STORY + plain.choices[0].text
        assert echoed.usage.completion_tokens == plain.usage.completion_tokens == 8
        assert joined(complete(client, echo=True, stream=True)) == {0: echoed.choices[0].text}

    @pytest.mark.parametrize("stream", [False, True])
    def test_nothing_but_the_prompt(self, client: openai.OpenAI, stream: bool) -> None:
        answer = complete(client, echo=True, max_tokens=0, stream=stream)
        if stream:
            assert joined(answer) == {0: STORY}
            return
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (STORY, "length")
        assert answer.usage.completion_tokens == 0

    def test_neither_prompt_nor_output(self, client: openai.OpenAI) -> None:
        answer = complete(client, max_tokens=0)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")

    def test_token_ids_are_echoed_as_text(self, client: openai.OpenAI, codec: TextCodec) -> None:
        by_ids = complete(client, codec.encode(STORY), echo=True, max_tokens=4)
        assert by_ids.choices[0].text == complete(client, echo=True, max_tokens=4).choices[0].text

    def test_every_choice_has_it(self, client: openai.OpenAI) -> None:
        options = {**WARM, "n": 2, "max_tokens": 3, "echo": True}
        whole = complete(client, [STORY, "Hello"], **options)
        assert [c.text[:5] for c in whole.choices] == [STORY[:5]] * 2 + ["Hello"] * 2
        assert joined(complete(client, [STORY, "Hello"], **options, stream=True)) == {
            c.index: c.text for c in whole.choices
        }


class TestSeveralChoices:
    def test_seeds(self, client: openai.OpenAI) -> None:
        three = complete(client, n=3, **WARM)
        texts = [choice.text for choice in three.choices]
        assert [choice.index for choice in three.choices] == [0, 1, 2]
        assert len(set(texts)) == 3
        assert [choice.text for choice in complete(client, n=3, **WARM).choices] == texts
        assert complete(client, **WARM).choices[0].text == texts[0]
        assert [c.text for c in complete(client, n=3, **{**WARM, "seed": 1000}).choices] != texts
        assert joined(complete(client, n=3, stream=True, **WARM)) == dict(enumerate(texts))

    def test_usage_counts_a_prompt_once(self, client: openai.OpenAI) -> None:
        one, three = complete(client, **WARM).usage, complete(client, n=3, **WARM).usage
        assert three.prompt_tokens == one.prompt_tokens
        assert three.completion_tokens == 3 * one.completion_tokens
        assert three.total_tokens == three.prompt_tokens + three.completion_tokens

    def test_the_largest_seed(self, client: openai.OpenAI) -> None:
        assert len(complete(client, n=2, **{**WARM, "seed": 2**64 - 1, "max_tokens": 1}).choices) == 2

    def test_chats(self, client: openai.OpenAI) -> None:
        options = {**WARM, "n": 2, "max_tokens": 6}
        whole = chat(client, **options)
        chunks = list(chat(client, **options, stream=True))
        assert joined(chunks) == {c.index: c.message.content for c in whole.choices}
        roles = [c.choices[0].index for c in chunks if c.choices[0].delta.role == "assistant"]
        assert sorted(roles) == [0, 1]

    def test_there_is_a_limit(self, client: openai.OpenAI) -> None:
        with refused() as caught:
            complete(client, ["Hello"] * 100, n=128, temperature=1)
        assert caught.value.param == "n"
        assert "12800 answers; one request may ask for 1024" in caught.value.message
        with refused() as caught:
            complete(client, ["Hello"] * 1025)
        assert caught.value.param == "prompt"
        with refused() as caught:
            complete(client, n=129)
        assert caught.value.param == "n"


class TestLogprobs:
    """T6."""

    def test_zero_reports_the_chosen_tokens(self, client: openai.OpenAI) -> None:
        choice = complete(client, logprobs=0).choices[0]
        found = choice.logprobs
        assert "".join(found.tokens) == choice.text
        assert [list(top) for top in found.top_logprobs] == [[token] for token in found.tokens]
        assert [top[token] for top, token in zip(found.top_logprobs, found.tokens, strict=True)] == found.token_logprobs
        assert all(value <= 0 for value in found.token_logprobs)
        assert complete(client).choices[0].logprobs is None

    def test_the_greedy_token_is_the_best(self, client: openai.OpenAI) -> None:
        found = complete(client, logprobs=4).choices[0].logprobs
        assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs
        assert {len(top) for top in found.top_logprobs} == {4}

    def test_the_chosen_token_is_always_among_them(self, client: openai.OpenAI) -> None:
        found = complete(client, logprobs=2, **{**WARM, "temperature": 2.0}).choices[0].logprobs
        pairs = list(zip(found.tokens, found.top_logprobs, strict=True))
        assert all(token in top for token, top in pairs)
        assert any(len(top) == 3 for _, top in pairs), "at this temperature some token is not among the best two"

    def test_of_the_prompt(self, client: openai.OpenAI) -> None:
        answer = complete(client, echo=True, logprobs=2)
        found, text = answer.choices[0].logprobs, answer.choices[0].text
        assert "".join(found.tokens) == text
        assert len(found.tokens) == answer.usage.prompt_tokens + 8
        assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
        assert None not in found.token_logprobs[1:]
        assert found.text_offset[answer.usage.prompt_tokens] == len(STORY)
        for token, offset in zip(found.tokens, found.text_offset, strict=True):
            assert text[offset : offset + len(token)] == token

    def test_scoring_a_text_gives_what_writing_it_gave(self, client: openai.OpenAI, codec: TextCodec) -> None:
        written = complete(client, codec.encode(STORY), logprobs=0).choices[0]
        ids = codec.encode(STORY + written.text)
        scored = complete(client, ids, echo=True, max_tokens=0, logprobs=0).choices[0]
        assert scored.text == STORY + written.text
        assert len(scored.logprobs.tokens) == len(ids)
        assert scored.logprobs.tokens[-8:] == written.logprobs.tokens
        assert scored.logprobs.token_logprobs[-8:] == pytest.approx(written.logprobs.token_logprobs, abs=1e-3)

    @pytest.mark.parametrize("prompt", [STORY, EMOJI], ids=["words", "emoji"])
    def test_a_stream_has_the_same(self, client: openai.OpenAI, prompt: str) -> None:
        options: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 6}
        whole = complete(client, **options).choices[0].logprobs
        pieces = [c.choices[0].logprobs for c in complete(client, **options, stream=True) if c.choices[0].logprobs]
        for field in ("tokens", "text_offset", "top_logprobs"):
            assert [x for piece in pieces for x in getattr(piece, field)] == getattr(whole, field), field

    def test_offsets_where_characters_take_several_tokens(self, client: openai.OpenAI, codec: TextCodec) -> None:
        choice = complete(client, EMOJI, echo=True, logprobs=0, max_tokens=6).choices[0]
        starts = choice.logprobs.text_offset
        assert starts == sorted(starts)
        per_character = len(codec.encode(EMOJI)) // len(EMOJI)
        expected = [i // per_character for i in range(len(EMOJI) * per_character)]
        assert starts[: len(expected)] == expected

    def test_offsets_where_special_tokens_are_left_out(self, client: openai.OpenAI, codec: TextCodec) -> None:
        prompt = codec.encode(f"<|im_start|>user\n{STORY}<|im_end|>\n")
        choice = complete(client, prompt, echo=True, logprobs=0).choices[0]
        assert choice.text.startswith(f"user\n{STORY}\n")
        found = choice.logprobs
        for token, offset in zip(found.tokens, found.text_offset, strict=True):
            assert token.startswith("<|im_") or choice.text[offset : offset + len(token)] == token

    def test_of_a_one_token_prompt(self, client: openai.OpenAI) -> None:
        found = complete(client, [500], echo=True, max_tokens=0, logprobs=1).choices[0].logprobs
        assert found.token_logprobs == found.top_logprobs == [None]

    @pytest.mark.parametrize("value", [-1, 21, 1.5, "5", True])
    def test_other_values_are_refused(self, client: openai.OpenAI, value: Any) -> None:
        with refused() as caught:
            complete(client, logprobs=value)
        assert caught.value.param == "logprobs"

    def test_of_a_chat(self, client: openai.OpenAI) -> None:
        answer = chat(client, logprobs=True, top_logprobs=2, max_tokens=5).choices[0]
        entries = answer.logprobs.content
        assert len(entries) == 5
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == answer.message.content
        for entry in entries:
            best = entry.top_logprobs[0]
            assert (best.token, best.logprob, best.bytes) == (entry.token, entry.logprob, entry.bytes)
            assert len(entry.top_logprobs) == 2
        streamed = [
            entry
            for chunk in chat(client, logprobs=True, top_logprobs=2, max_tokens=5, stream=True)
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
        assert streamed == entries

    def test_of_a_chat_without_alternatives(self, client: openai.OpenAI) -> None:
        for options in ({}, {"top_logprobs": 0}):
            entries = chat(client, logprobs=True, max_tokens=3, **options).choices[0].logprobs.content
            assert [entry.top_logprobs for entry in entries] == [[]] * 3
        assert chat(client, max_tokens=1).choices[0].logprobs is None

    @pytest.mark.parametrize("options", [{"top_logprobs": 2}, {"logprobs": False, "top_logprobs": 1}])
    def test_alternatives_of_nothing(self, client: openai.OpenAI, options: dict[str, Any]) -> None:
        with refused() as caught:
            chat(client, **options)
        assert caught.value.param == "top_logprobs"


class TestStreams:
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_usage_comes_last_and_is_null_before(self, host: Server, path: str) -> None:
        """T5."""
        body = {"max_tokens": 3, "temperature": 0, **({"prompt": STORY} if "chat" not in path else {})}
        body = {**body, **({"messages": QUESTION} if "chat" in path else {})}
        *chunks, last = events(host, path, {**body, "stream_options": {"include_usage": True}})
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 3
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 3
        assert all(chunk["usage"] is None for chunk in chunks)
        for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
            chunks = events(host, path, {**body, **options})
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)

    def test_the_first_delta_has_the_role(self, host: Server) -> None:
        """T7."""
        chunks = events(host, "/v1/chat/completions", {"messages": QUESTION, "temperature": 0, "max_tokens": 20})
        first = chunks[0]["choices"][0]
        assert (first["delta"], first["finish_reason"]) == ({"role": "assistant", "content": ""}, None)
        assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER
        heads = {(c["id"], c["object"], c["created"], c["model"]) for c in chunks}
        assert len(heads) == 1
        assert heads.pop()[1:4:2] == ("chat.completion.chunk", MODEL)

    def test_a_completion_without_output(self, client: openai.OpenAI) -> None:
        assert joined(complete(client, max_tokens=0, stream=True)) == {0: ""}


class TestStops:
    """T2."""

    @pytest.fixture
    def text(self, client: openai.OpenAI) -> str:
        return str(complete(client, max_tokens=12).choices[0].text)

    @pytest.mark.parametrize("cut", [(3, 8), (6, 7), (10, 25), (14, 22)])
    def test_across_the_borders_of_tokens(self, client: openai.OpenAI, text: str, cut: tuple[int, int]) -> None:
        stop = text[slice(*cut)]
        expected = until(text, stop)
        whole = complete(client, max_tokens=12, stop=stop)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
        chunks = list(complete(client, max_tokens=12, stop=[stop, "never"], stream=True))
        assert joined(chunks) == {0: expected}
        sent = list(itertools.accumulate(chunk.choices[0].text for chunk in chunks))
        assert all(expected.startswith(so_far) for so_far in sent)

    def test_the_first_of_several_counts(self, client: openai.OpenAI, text: str) -> None:
        stops = [text[20:26], text[9:12], text[13:30], "never"]
        answer = complete(client, max_tokens=12, stop=stops).choices[0]
        assert answer.text == until(text, *stops)
        assert joined(complete(client, max_tokens=12, stop=stops, stream=True)) == {0: answer.text}

    def test_what_only_begins_like_one_is_sent_in_the_end(self, client: openai.OpenAI, text: str) -> None:
        chunks = complete(client, max_tokens=12, stop=[text[-6:] + "#"], stream=True)
        assert joined(chunks) == {0: text}

    def test_each_choice_stops_by_itself(self, client: openai.OpenAI) -> None:
        options = {**WARM, "n": 3, "max_tokens": 12}
        free = [choice.text for choice in complete(client, **options).choices]
        stop = free[1][5:9]
        expected = {i: until(text, stop) for i, text in enumerate(free)}
        assert expected[1] != free[1]
        assert {c.index: c.text for c in complete(client, **options, stop=stop).choices} == expected
        assert joined(complete(client, **options, stop=stop, stream=True)) == expected

    def test_in_a_chat(self, client: openai.OpenAI) -> None:
        answer = chat(client, stop=["of Fr"]).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("The capital ", "stop")
        assert joined(chat(client, stop=["of Fr"], stream=True)) == {0: "The capital "}

    @pytest.mark.parametrize("stop", ["", [""], ["a", ""], ["a"] * 65, "a" * 1025, 5, [5], [["a"]]])
    def test_wrong_ones(self, client: openai.OpenAI, stop: Any) -> None:
        with refused() as caught:
            complete(client, stop=stop)
        assert caught.value.param == "stop"


class TestFields:
    def test_max_completion_tokens(self, client: openai.OpenAI) -> None:
        assert chat(client, max_completion_tokens=3, max_tokens=openai.NOT_GIVEN).usage.completion_tokens == 3
        assert chat(client, max_completion_tokens=2, max_tokens=5).usage.completion_tokens == 2

    def test_parts_of_type_text(self, client: openai.OpenAI) -> None:
        parts = [{"type": "text", "text": text} for text in ("What is the capital", "", " of France?")]
        assert chat(client, messages=[{"role": "user", "content": parts}]).choices[0].message.content == ANSWER

    @pytest.mark.parametrize(
        ("part", "words"),
        [
            ({"type": "image_url", "image_url": {"url": "http://x"}}, "'image_url'"),
            ({"type": "input_audio", "input_audio": {}}, "'input_audio'"),
            ({"type": "text"}, "'text'"),
            ({"type": "text", "text": 5}, "'text'"),
            ({"text": "hello"}, "None"),
            ({"type": ["text"], "text": "hello"}, "['text']"),
        ],
    )
    def test_other_parts_are_refused(self, client: openai.OpenAI, part: dict[str, Any], words: str) -> None:
        with refused() as caught:
            chat(client, messages=[{"role": "user", "content": [part]}])
        assert caught.value.param == "messages"
        assert f"must be of type text, with a text; not {words}" in caught.value.message

    def test_unknown_fields_are_ignored(self, client: openai.OpenAI) -> None:
        extra = {"frobnicate": {"deep": [1]}, "user": "me", "store": True, "": None}
        assert chat(client, extra_body=extra).choices[0].message.content == ANSWER
        assert complete(client, extra_body=extra).choices[0].text == complete(client).choices[0].text

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("max_tokens", "5"),
            ("max_tokens", 1.5),
            ("max_tokens", True),
            ("temperature", "0.5"),
            ("temperature", True),
            ("temperature", []),
            ("top_p", "1"),
            ("n", 0),
            ("n", "2"),
            ("n", 1.0),
            ("stream", "yes"),
            ("stream", 1),
            ("stream_options", True),
            ("stream_options", {"include_usage": "yes"}),
            ("seed", "seven"),
            ("seed", 1.5),
            ("frequency_penalty", 2.1),
            ("presence_penalty", "much"),
            ("logit_bias", []),
            ("logit_bias", {"5": "much"}),
            ("logit_bias", {"five": 1}),
            ("logit_bias", {"-5": 1}),
            ("logit_bias", {"5": 101}),
            ("logit_bias", {"49152": 1}),
            ("min_p", 1.5),
            ("min_p", "0"),
            ("min_tokens", -1),
            ("min_tokens", 10**30),
            ("top_k", 1.5),
            ("top_k", -2),
            ("repetition_penalty", 0),
            ("stop_token_ids", 5),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", [49152]),
            ("stop_token_ids", ["5"]),
            ("ignore_eos", "no"),
            ("skip_special_tokens", 0),
            ("timeout", 0),
            ("timeout", "1s"),
            ("model", 5),
            ("cache_salt", []),
        ],
        ids=str,
    )
    def test_wrong_values_are_named(self, host: Server, field: str, value: Any) -> None:
        bodies = {"/v1/completions": {"prompt": "Hello"}, "/v1/chat/completions": {"messages": QUESTION}}
        for path, body in bodies.items():
            response = host.post(path, {"max_tokens": 1, **body, field: value})
            assert response.status_code == 400, (path, response.text)
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", field), error

    @pytest.mark.parametrize("field", ["echo", "prompt", "logprobs"])
    def test_wrong_values_of_a_completion(self, host: Server, field: str) -> None:
        error = host.post("/v1/completions", {"prompt": "Hello", field: {"a": 1}}).json()["error"]
        assert error["param"] == field
        assert host.post("/v1/completions", {}).json()["error"]["param"] == "prompt"

    @pytest.mark.parametrize(
        ("field", "value"),
        [("messages", []), ("messages", "hi"), ("max_completion_tokens", -1), ("logprobs", 1), ("top_logprobs", 21)],
    )
    def test_wrong_values_of_a_chat(self, host: Server, field: str, value: Any) -> None:
        error = host.post("/v1/chat/completions", {"messages": QUESTION, field: value}).json()["error"]
        assert error["param"] == field
        assert host.post("/v1/chat/completions", {}).json()["error"]["param"] == "messages"

    def test_an_unknown_model_is_told_the_right_one(self, client: openai.OpenAI) -> None:
        for ask in (complete, chat):
            with refused(openai.NotFoundError) as caught:
                ask(client.with_options(), extra_body={"model": "gpt-4o"})
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
            assert f"'gpt-4o' is not served here; '{MODEL}' is." in caught.value.message


class TestChoosing:
    """What has no place in OpenAI's API goes through `extra_body`."""

    def tokens(self, client: openai.OpenAI, **options: Any) -> list[str]:
        """The tokens of a greedy completion."""
        return list(complete(client, logprobs=0, **options).choices[0].logprobs.tokens)

    def test_a_bias_forces_and_bans(self, client: openai.OpenAI, codec: TextCodec) -> None:
        free = codec.encode(complete(client).choices[0].text)
        [forced] = codec.encode(" banana")
        assert complete(client, logit_bias={str(forced): 100}).choices[0].text == " banana" * 8
        banned = complete(client, logit_bias={str(free[0]): -100}).choices[0].text
        assert free[0] not in codec.encode(banned)

    def test_min_tokens_postpones_the_end_token(self, client: openai.OpenAI) -> None:
        short, long = chat(client), chat(client, extra_body={"min_tokens": 12})
        assert (short.choices[0].message.content, short.choices[0].finish_reason) == (ANSWER, "stop")
        assert short.usage.completion_tokens == 8
        assert long.usage.completion_tokens >= 12
        assert long.choices[0].message.content.startswith(ANSWER)
        with refused() as caught:
            chat(client, extra_body={"min_tokens": 21})
        assert caught.value.param == "min_tokens"

    def test_min_tokens_postpones_stops(self, client: openai.OpenAI, codec: TextCodec) -> None:
        free = complete(client, logit_bias={str(codec.encode(" banana")[0]): 100})
        assert free.choices[0].text == " banana" * 8
        options: dict[str, Any] = {"logit_bias": {str(codec.encode(" banana")[0]): 100}}
        stopped = complete(client, stop="nana", extra_body={"min_tokens": 4}, **options)
        assert stopped.choices[0].text == " banana" * 3 + " ba"
        assert stopped.usage.completion_tokens == 4
        ended = complete(client, extra_body={"stop_token_ids": codec.encode(" banana"), "min_tokens": 4}, **options)
        assert "banana" not in codec.decode(codec.encode(ended.choices[0].text)[:3])

    def test_stop_tokens_and_the_end_token(self, client: openai.OpenAI, codec: TextCodec) -> None:
        [paris] = codec.encode(" Paris")
        stopped = chat(client, extra_body={"stop_token_ids": [paris]})
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
            "The capital of France is",
            "stop",
        )
        past = chat(client, max_tokens=12, extra_body={"ignore_eos": True, "skip_special_tokens": False})
        assert past.choices[0].message.content.startswith(f"{ANSWER}<|im_end|>")
        assert past.usage.completion_tokens == 12
        hidden = chat(client, max_tokens=12, extra_body={"ignore_eos": True}).choices[0].message.content
        assert "<|im_end|>" not in hidden

    def test_penalties(self, client: openai.OpenAI) -> None:
        prompt = "tick tock tick tock tick tock tick tock tick tock"
        free = self.tokens(client, prompt=prompt)
        assert len(set(free)) < len(free)
        once = self.tokens(client, prompt=prompt, extra_body={"repetition_penalty": 1e6})
        assert len(set(once)) == len(once)
        assert not {" tick", " tock"}.intersection(once)
        for penalty in ("frequency_penalty", "presence_penalty"):
            less = self.tokens(client, prompt=prompt, max_tokens=12, **{penalty: 2})
            more = self.tokens(client, prompt=prompt, max_tokens=12, **{penalty: -2})
            assert len(set(less)) > len(set(more)), penalty

    @pytest.mark.parametrize("options", [{"min_p": 1.0}, {"top_k": 1}])
    def test_only_the_best_is_left(self, client: openai.OpenAI, options: dict[str, Any]) -> None:
        hot = complete(client, temperature=50, seed=3, extra_body={**options, "ignore_eos": True})
        assert hot.choices[0].text == complete(client, extra_body={"ignore_eos": True}).choices[0].text


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model without a chat template, and with a name of its own."""
    model = tiny_models.directory(tmp_path_factory.mktemp("models") / "plain", template=False)
    flags = ("--kv-cache-tokens", "2048", "--served-model-name", "my/name")
    with Server(*tiny_models.flags(model), *flags) as running:
        yield running.wait_ready()


class TestFlags:
    """Servers with other flags, of a tiny model: one rank each."""

    def test_a_chat_without_a_template(self, plain: Server) -> None:
        with refused() as caught:
            plain.client().chat.completions.create(model="my/name", messages=QUESTION, max_tokens=1)  # type: ignore[arg-type]
        assert "This model has no chat template" in caught.value.message
        assert caught.value.param == "messages"
        assert plain.client().completions.create(model="my/name", prompt="Hello", max_tokens=2).usage

    def test_the_served_name(self, plain: Server) -> None:
        assert [model.id for model in plain.client().models.list()] == ["my/name"]
        assert plain.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1}).json()["model"] == "my/name"
        with refused(openai.NotFoundError) as caught:
            plain.client().completions.create(model="plain", prompt="Hello")
        assert "'my/name' is." in caught.value.message

    def test_a_template_of_the_operator(self, tmp_path: Path, codec: TextCodec) -> None:
        model = tiny_models.directory(tmp_path / "model")
        (tmp_path / "chat.jinja").write_text(tiny_models.TEMPLATE)
        flags = ("--kv-cache-tokens", "2048", "--chat-template", str(tmp_path / "chat.jinja"))
        with Server(*tiny_models.flags(model), *flags) as running:
            running.wait_ready()
            tokens = running.post("/tokenize", {"messages": QUESTION}).json()["tokens"]
            assert codec.decode(tokens) == f"user: {QUESTION[0]['content']}\nassistant:"
            answer = running.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1}).json()
            assert answer["usage"]["prompt_tokens"] == len(tokens)

    @pytest.mark.parametrize(
        ("text", "status", "words"),
        [
            ("{% for %}", 1, "The chat template given is no valid jinja template"),
            (None, 2, "Cannot read the chat"),
        ],
    )
    def test_a_wrong_template_ends_the_start(
        self, tmp_path: Path, text: str | None, status: int, words: str, tiny_model: Path
    ) -> None:
        path = tmp_path / "chat.jinja"
        if text is not None:
            path.write_text(text)
        with Server(*tiny_models.flags(tiny_model), "--chat-template", str(path)) as running:
            assert running.process.wait(60) == status
            assert words in running.log
            assert "Traceback" not in running.log

    def test_without_a_tokenizer(self, tmp_path: Path) -> None:
        model = tiny_models.directory(tmp_path / "model", tokenizer=False)
        with Server(*tiny_models.flags(model), "--kv-cache-tokens", "2048", "--skip-tokenizer-init") as running:
            running.wait_ready()
            client = running.client()
            answer = client.completions.create(model="model", prompt=[1, 2, 3], max_tokens=3, logprobs=1, echo=True)
            assert (answer.choices[0].text, answer.usage.completion_tokens) == ("", 3)  # type: ignore[union-attr]
            assert len(running.generate([1, 2, 3], max_new_tokens=3, ignore_eos=True)["output_ids"]) == 3
            for options in ({"prompt": "Hello"}, {"prompt": [1, 2, 3], "stop": ["x"]}):
                with refused() as caught:
                    client.completions.create(model="model", **options)  # type: ignore[call-overload]
                assert "--skip-tokenizer-init" in caught.value.message
            for path, body in (
                ("/v1/chat/completions", {"messages": QUESTION}),
                ("/tokenize", {"prompt": "Hello"}),
                ("/detokenize", {"tokens": [1]}),
            ):
                response = running.post(path, body)
                assert response.status_code == 400
                assert "--skip-tokenizer-init" in response.json()["error"]["message"]

    def test_a_model_without_tokenizer_files_names_the_flag(self, tmp_path: Path) -> None:
        model = tiny_models.directory(tmp_path / "model", tokenizer=False)
        with Server(*tiny_models.flags(model), "--kv-cache-tokens", "2048") as running:
            assert running.process.wait(60) == 1
            assert "neither tokenizer.json nor tokenizer.model; --skip-tokenizer-init" in running.log
