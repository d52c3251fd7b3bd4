"""The official client against a real server on four ranks."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from .server import MODEL, Server
from .stream import open_stream

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time, in a small village by the sea, there lived"
salts = map("salt-{}".format, itertools.count())


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    """One greedy completion, unless `options` say otherwise."""
    salt = options.pop("salt", "")
    extra = {"cache_salt": salt, **options.pop("extra_body", {})}
    return client.completions.create(
        model=MODEL, prompt=prompt, extra_body=extra, **{"temperature": 0, "max_tokens": 8, **options}
    )


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [(model.id, model.object, model.owned_by) for model in models] == [(MODEL, "model", "dcprt")]


def test_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=20)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_in_a_stream_is_the_same_chat(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    *body, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in body)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert body[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in body] == [None] * (len(body) - 1) + ["stop"]
    assert "".join(c.choices[0].delta.content or "" for c in body) == whole.choices[0].message.content


def test_content_parts(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], temperature=0, max_completion_tokens=20
    )
    assert "Paris" in answer.choices[0].message.content


def test_a_completion_and_its_stream_agree(client: openai.OpenAI) -> None:
    whole = complete(client, STORY).choices[0]
    chunks = list(complete(client, STORY, stream=True))
    assert whole.text
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_max_tokens_of_a_completion_is_16_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=STORY, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_token_ids_as_prompt(client: openai.OpenAI, codec: Any) -> None:
    by_text = complete(client, STORY)
    by_ids = complete(client, codec.encode(STORY))
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage.prompt_tokens == by_text.usage.prompt_tokens


def test_several_prompts_give_a_choice_each(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "One, two, three, four,"]
    both = complete(client, prompts)
    assert [choice.index for choice in both.choices] == [0, 1]
    alone = [complete(client, prompt) for prompt in prompts]
    assert [c.text for c in both.choices] == [a.choices[0].text for a in alone]
    assert both.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone)


def test_a_stream_of_several_prompts_has_one_finish_reason_each(client: openai.OpenAI) -> None:
    chunks = list(complete(client, [STORY, "One, two, three,", "Hello"], stream=True, max_tokens=4))
    finished = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
    assert sorted(finished) == [0, 1, 2]


# ---- prefix cache


def test_an_equal_prompt_is_cached_but_for_its_last_token(client: openai.OpenAI) -> None:
    """K9 and K10."""
    salt = next(salts)
    cold, warm = (complete(client, STORY, salt=salt) for _ in range(2))
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == warm.usage.prompt_tokens - 1
    assert warm.choices[0].text == cold.choices[0].text


def test_the_second_turn_reuses_what_was_generated(server: Server) -> None:
    """K8: all of the first turn but its last token, which has no KV yet."""
    salt = next(salts)
    prompt = [(i * 37 + 11) % 40000 + 500 for i in range(100)]
    first = server.generate(prompt, salt=salt, max_new_tokens=50, ignore_eos=True)
    assert len(first["output_ids"]) == 50
    second = server.generate(prompt + first["output_ids"] + prompt[:50], salt=salt, max_new_tokens=1)
    assert second["meta_info"]["prompt_tokens"] == 200
    assert second["meta_info"]["cached_tokens"] == 149


def test_a_prefix_that_ends_inside_a_span_leaks_nothing(server: Server) -> None:
    """K1: 150 of 550 tokens are shared, and spans are 64 tokens."""
    salt = next(salts)
    first, second = [40] * 150 + [50] * 400, [40] * 150 + [60] * 400
    alone = server.generate(second, salt=next(salts), max_new_tokens=6)
    server.generate(first, salt=salt, max_new_tokens=1)
    after = server.generate(second, salt=salt, max_new_tokens=6)
    assert after["meta_info"]["cached_tokens"] == 150
    assert after["output_ids"] == alone["output_ids"]


def test_different_salts_share_nothing(client: openai.OpenAI) -> None:
    """K13."""
    one, other = next(salts), next(salts)
    cached = [complete(client, STORY, salt=salt).usage for salt in (one, other, one)]
    assert [u.prompt_tokens_details.cached_tokens for u in cached] == [0, 0, cached[0].prompt_tokens - 1]


# ---- sampling and stops


def test_a_seed_gives_the_same_text_in_any_batch(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    alone = complete(client, STORY, seed=7, **options).choices[0].text
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(complete, client, STORY, seed=seed, **options) for seed in (1, 7, 2, 3, 7, 4)]
        texts = [job.result().choices[0].text for job in jobs]
    assert texts[1] == texts[4] == alone
    assert len(set(texts)) > 2


@pytest.mark.parametrize("cut", [0, 3, 11])
def test_no_fragment_of_a_stop_string_is_sent(client: openai.OpenAI, cut: int) -> None:
    """T2: stop strings that begin and end inside tokens."""
    text = complete(client, STORY, max_tokens=16).choices[0].text
    stop = text[cut + 5 : cut + 16]
    expected = text[: text.index(stop)]
    whole = complete(client, STORY, max_tokens=16, stop=stop).choices[0]
    chunks = list(complete(client, STORY, max_tokens=16, stop=[stop, "never seen"], stream=True))
    assert (whole.text, whole.finish_reason) == (expected, "stop")
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_token_is_not_in_the_text(server: Server) -> None:
    free = server.generate(STORY, max_new_tokens=6)
    stopped = server.generate(STORY, max_new_tokens=6, stop_token_ids=[free["output_ids"][3]])
    at = free["output_ids"].index(free["output_ids"][3])
    assert stopped["output_ids"] == free["output_ids"][: at + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": free["output_ids"][3]}
    assert free["text"].startswith(stopped["text"])
    assert len(stopped["text"]) < len(free["text"])


def test_characters_of_several_tokens_are_sent_whole(client: openai.OpenAI, server: Server) -> None:
    """T1: every emoji here takes three tokens."""
    prompt = "🎉🦄" * 6
    whole = complete(client, prompt, max_tokens=12)
    pieces = [c.choices[0].text for c in complete(client, prompt, max_tokens=12, stream=True)]
    assert "".join(pieces) == whole.choices[0].text
    assert whole.choices[0].text == "🎉🦄" * 2
    assert not any("\ufffd" in piece for piece in pieces)


# ---- limits and errors


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_far_over_the_limit(client: openai.OpenAI, server: Server, stream: bool) -> None:
    """S10."""
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "word " * 20000, stream=stream)
    assert caught.value.response.headers["content-type"] == "application/json"
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in caught.value.message
    assert "20001" in caught.value.message
    state = server.settle()
    assert state["pages"]["in_use"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_one_token_over_the_limit(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=r"100.*8093.*8193.*8192"):
        complete(client, [500] * 100, max_tokens=8093, stream=stream)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"extra_body": {"top_k": 10**30}}, "top_k"),
        ({"extra_body": {"stop_token_ids": [10**30]}}, "stop_token_ids"),
        ({"extra_body": {"cache_salt": 5}}, "cache_salt"),
    ],
)
def test_wrong_values_are_named(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, options.pop("prompt", "Hello"), **options)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param, caught.value.message


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
        {"role": "user", "content": [{"type": "text", "text": "\ud800"}]},
        {"role": "user", "content": "hello", "extra": 10**30},
        {"role": "user", "content": "hello", "\ud800": 1},
        {"role": "user"},
        {"content": "hello"},
        {"role": 3, "content": "hello"},
    ],
)
def test_wrong_messages_are_refused(server: Server, message: dict[str, Any]) -> None:
    response = server.post("/v1/chat/completions", {"messages": [message], "max_tokens": 1})
    if "content" in message and "role" in message:
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "messages"
    else:
        assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}'])
def test_a_body_that_is_no_request(server: Server, body: bytes) -> None:
    response = httpx.post(f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="smollm2-135n", prompt="Hello")
    assert caught.value.code == "model_not_found"
    assert f"Did you mean '{MODEL}'?" in caught.value.message


def test_an_unknown_path_and_method(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=MODEL, input="Hello")
    assert "/v1/embeddings" in caught.value.message
    response = httpx.get(f"{server.url}/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_api_key_guards_all_but_health(single: Server) -> None:
    for key in ("wrong", "", "secret "):
        with pytest.raises(openai.AuthenticationError) as caught:
            openai.OpenAI(
                base_url=f"{single.url}/v1", api_key="x", default_headers={"Authorization": f"Bearer {key}."}
            ).models.list()
        assert caught.value.code == "invalid_api_key"
    for path in ("/server_info", "/v1/models", "/docs", "/nothing"):
        assert httpx.get(f"{single.url}{path}").status_code == 401
    assert httpx.post(f"{single.url}/generate", json={"text": "Hello"}).status_code == 401
    assert httpx.get(f"{single.url}/health").status_code == 200
    assert [model.id for model in single.client("secret").models.list()] == [MODEL]


@pytest.mark.parametrize("prompt_len", [1, 40, 63])
def test_exactly_at_the_limit(single: Server, prompt_len: int) -> None:
    """S11: served to the last token; one more is refused with both numbers and the limit."""
    client, prompt, room = single.client("secret"), [500] * prompt_len, 64 - prompt_len
    extra = {"ignore_eos": True}
    answer = complete(client, prompt, max_tokens=room, extra_body=extra)
    assert answer.usage.completion_tokens == room
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match=rf"{prompt_len}.*{room + 1}.*65.*64"):
        complete(client, prompt, max_tokens=room + 1, extra_body=extra)


def test_a_prompt_of_the_whole_context_is_refused(single: Server) -> None:
    for length in (64, 65, 5000):
        with pytest.raises(openai.BadRequestError, match=rf"{length}.*64") as caught:
            complete(single.client("secret"), [500] * length, max_tokens=1)
        assert caught.value.param == "prompt"


def test_a_chat_without_max_tokens_fills_the_context(single: Server) -> None:
    answer = single.client("secret").chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Count."}], extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == 64
    assert answer.choices[0].finish_reason == "length"


def test_a_replacement_character_does_not_stall_a_stream(single: Server, codec: Any) -> None:
    """T3: at this temperature all tokens are about equally likely, pieces of characters among them."""
    client = single.client("secret")
    options: dict[str, Any] = {"temperature": 1e6, "seed": 11, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    whole = complete(client, [500], **options).choices[0].text
    pieces = [c.choices[0].text for c in complete(client, [500], **options, stream=True)]
    assert "\ufffd" in whole[:-40]
    assert "".join(pieces) == whole
    assert len(pieces) > 25


# ---- clients that leave, and many of them


def test_a_disconnected_stream_frees_its_pages(server: Server) -> None:
    """S1."""
    body = {"text": STORY, "rid": "leaver", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
    with open_stream(server, "/generate", body) as stream:
        for _ in range(3):
            next(stream)
        assert [r["rid"] for r in server.info()["running"]] == ["leaver"]
    assert server.settle()["pages"]["in_use"] == 0
    assert server.log.count("request leaver abort") == 1


def test_a_disconnected_client_without_stream_frees_its_pages(server: Server) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": STORY, "max_tokens": 2000, "ignore_eos": True},
            timeout=httpx.Timeout(60, read=1),
        )
    assert server.settle()["pages"]["in_use"] == 0


def test_health_checks_while_generating(server: Server) -> None:
    """S9."""
    body = {"text": STORY, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
    with open_stream(server, "/generate", body) as stream, httpx.Client(timeout=60) as http:
        next(stream)
        assert {http.get(f"{server.url}/health").status_code for _ in range(200)} == {200}
        next(stream)
    server.settle()


PREFIXES = [f"Chapter {i}. " + f"It was a cold and rainy day in the town of number {i}. " * 3 for i in range(5)]


def visit(server: Server, number: int) -> str | None:
    """One of many clients; every fifth leaves early, so that it has no text to show."""
    sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    body: dict[str, Any] = {"text": PREFIXES[number % len(PREFIXES)], "sampling_params": sampling}
    if number % 7 == 3:
        body["sampling_params"] = {**sampling, "max_new_tokens": 500}
        with open_stream(server, "/generate", body) as stream:
            if number % 2:
                next(stream)
            return None
    if number % 7 == 5:
        body["sampling_params"] = {**sampling, "max_new_tokens": 500}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{server.url}/generate", json=body, timeout=httpx.Timeout(300, read=0.01))
        return None
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return str(response.json()["text"])


@pytest.mark.parametrize("clients", [20, 256])
def test_many_clients_leave_no_page_behind(server: Server, clients: int) -> None:
    """K11."""
    with ThreadPoolExecutor(clients) as pool:
        texts = list(pool.map(lambda number: visit(server, number), range(clients)))
    for first in range(len(PREFIXES)):
        same = {text for text in texts[first :: len(PREFIXES)] if text is not None}
        assert len(same) == 1, same
    pages = server.settle()["pages"]
    assert pages["free"] + pages["evictable"] == pages["total"]
    assert pages["in_use"] == 0


# ---- a small pool over four ranks


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """512 tokens are 8 spans of 64."""
    with Server("--dcp", "4", "--dtype", "float32", "--kv-cache-tokens", "530") as running:
        yield running.wait_ready()


class TestSmallPool:
    def test_capacity_has_one_unit(self, small: Server) -> None:
        """K7."""
        state = small.info()
        assert state["kv_capacity_tokens"] == 512
        assert state["span_tokens"] == 64
        assert state["pages"]["total"] == 8
        assert next(iter(small.client().models.list())).max_model_len == 512
        served = small.generate([500] * 500, max_new_tokens=12, ignore_eos=True)
        assert served["meta_info"]["completion_tokens"] == 12
        with pytest.raises(openai.BadRequestError, match=r"500.*13.*513.*512"):
            complete(small.client(), [500] * 500, max_tokens=13)

    def test_one_that_never_fits_disturbs_nobody(self, small: Server) -> None:
        """K14."""
        body = {"text": STORY, "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0}}
        with open_stream(small, "/generate", body) as stream:
            next(stream)
            with pytest.raises(openai.BadRequestError, match=r"600.*512"):
                complete(small.client(), [500] * 600)
            seen = [event for event in stream if event]
        assert seen[-1]["meta_info"]["completion_tokens"] == 12

    def test_two_that_fit_only_one_after_the_other_both_end(self, small: Server) -> None:
        """K12 and K14: the later one is preempted or waits; both get all their tokens, and hits are counted once."""
        prompts = [[500 + i] * 300 for i in range(2)]
        before = small.info()["totals"]
        with ThreadPoolExecutor(2) as pool:
            answers = list(
                pool.map(lambda p: small.generate(p, max_new_tokens=24, ignore_eos=True, salt="pair"), prompts)
            )
        assert [a["meta_info"]["completion_tokens"] for a in answers] == [24, 24]
        assert [a["meta_info"]["cached_tokens"] for a in answers] == [0, 0]
        after = small.settle()
        assert after["totals"]["prompt_tokens"] - before["prompt_tokens"] == 600
        assert after["totals"]["cached_tokens"] == before["cached_tokens"]
        alone = [small.generate(p, max_new_tokens=24, ignore_eos=True, salt="alone") for p in prompts]
        assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in alone]
        pages = small.settle()["pages"]
        assert pages["free"] + pages["evictable"] == pages["total"]


def test_a_reader_that_stalls_and_leaves_is_forgotten(server: Server) -> None:
    """S1 for a client whose buffers are full when it goes."""
    host, port = server.url.removeprefix("http://").split(":")
    payload = (
        b'{"text": "Hello", "rid": "stalled", "stream": true, '
        b'"sampling_params": {"max_new_tokens": 4000, "ignore_eos": true}}'
    )
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.connect((host, int(port)))
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
        sock.sendall(head.encode() + b"\r\n\r\n" + payload)
        sock.recv(100)
        time.sleep(1)
    assert server.settle()["pages"]["in_use"] == 0
