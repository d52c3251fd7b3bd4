"""Whatever a body looks like, if it fits the served OpenAPI document or nearly does: no 5xx, and no hang."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from dcprt.server.app import build_app
from dcprt.server.service import Service

from . import tiny as tiny_models
from .server import Server

EXAMPLES = 30
ANSWER_S = 60.0
"""No answer within this is a hang."""


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> Iterator[Server]:
    """A short context, so that an answer of unlimited length ends soon."""
    flags = ("--context-length", "128", "--kv-cache-tokens", "4096")
    with Server(*tiny_models.flags(tiny_model), *flags) as running:
        yield running.wait_ready()
        assert running.process.poll() is None, running.log
        assert "Traceback" not in running.log, running.log
        pages = running.settle()["pages"]
        assert (pages["in_use"], pages["free"] + pages["evictable"]) == (0, pages["total"])


DOCUMENT = build_app(Service(), None).openapi()
OPERATIONS = {found.ok().label: found.ok() for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()}


def test_the_document_is_the_one_that_is_served(target: Server) -> None:
    assert httpx.get(f"{target.url}/openapi.json", timeout=ANSWER_S).json() == json.loads(json.dumps(DOCUMENT))
    assert {"POST /generate", "POST /v1/completions", "POST /v1/chat/completions"} < set(OPERATIONS)


@pytest.mark.parametrize("label", OPERATIONS)
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
def test_what_the_document_allows_and_what_it_does_not(target: Server, label: str, mode: GenerationMode) -> None:
    @seed(0)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call(base_url=target.url, timeout=ANSWER_S)
        assert response.status_code < 500, (case.as_curl_command(), response.text)

    with contextlib.suppress(Unsatisfiable):  # an operation without a body has nothing that could be wrong
        send()


def nested(depth: int, inner: str = "1") -> str:
    return "[" * depth + inner + "]" * depth


HUGE = ["1e400", "-1e400", "NaN", "Infinity", "-0.0", "1" + "0" * 400, "9" * 5000, "1e-400", str(2**63), str(2**64)]
ODD = [
    *HUGE,
    '"\\ud800"',
    '"\\u0000"',
    '""',
    "null",
    "[]",
    "{}",
    "[[]]",
    '[""]',
    "[null]",
    nested(900),
    '{"\\ud800": 1}',
]
FIELDS = {
    "/v1/completions": [
        *("prompt", "model", "n", "max_tokens", "temperature", "top_p", "stop", "seed", "stream", "stream_options"),
        *("logit_bias", "frequency_penalty", "presence_penalty", "top_k", "stop_token_ids", "ignore_eos", "min_p"),
        *("skip_special_tokens", "cache_salt", "repetition_penalty", "min_tokens", "timeout", "echo", "logprobs"),
        "unknown",
    ],
    "/v1/chat/completions": ["messages", "max_completion_tokens", "logprobs", "top_logprobs", "n", "stop"],
    "/generate": ["text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "timeout"],
    "/tokenize": ["prompt", "messages", "add_special_tokens", "model"],
    "/detokenize": ["tokens", "skip_special_tokens", "model"],
    "/abort_request": ["rid", "abort_all"],
}
BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    "/generate": {"text": "Hello", "sampling_params": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1]},
    "/abort_request": {"rid": "nobody"},
}


class Sender:
    """Posts bodies that no JSON library would write."""

    def __init__(self, server: Server) -> None:
        self._client = httpx.Client(base_url=server.url, timeout=ANSWER_S)

    def post(self, path: str, body: str) -> httpx.Response:
        return self._client.post(path, content=body, headers={"Content-Type": "application/json"})


@pytest.fixture(scope="module")
def sender(target: Server) -> Sender:
    return Sender(target)


def with_raw(base: dict[str, Any], field: str, raw: str) -> str:
    """`base` as JSON, with a field that is written as it is."""
    rest = json.dumps({key: value for key, value in base.items() if key != field})
    return rest[:-1] + (", " if rest != "{}" else "") + f"{json.dumps(field)}: {raw}}}"


def assert_no_server_error(response: httpx.Response, body: str) -> None:
    assert response.status_code < 500, (body[:200], response.text[:300])
    if response.status_code >= 400:
        assert response.json()["error"]["type"] == "invalid_request_error", response.text


@pytest.mark.parametrize("path", FIELDS)
def test_odd_values_in_every_field(sender: Sender, path: str) -> None:
    for field, raw in itertools.product(FIELDS[path], ODD):
        body = with_raw(BASE[path], field, raw)
        assert_no_server_error(sender.post(path, body), body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"])
def test_numbers_that_are_none_are_named(sender: Sender, path: str, field: str) -> None:
    for raw in ("NaN", "1e400", "-1e400"):
        response = sender.post(path, with_raw(BASE[path], field, raw))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "body",
    [
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-6, "temperature": 1e300},
        {"temperature": 1e-4, "repetition_penalty": 1e300, "frequency_penalty": 2, "presence_penalty": 2},
        {"temperature": 5e-324, "top_p": 5e-324, "min_p": 1.0},
        {"logit_bias": {str(i): -100 for i in range(49152)}, "temperature": 1},
        {"stop_token_ids": list(range(49152)), "min_tokens": 2, "temperature": 1},
        {"stop_token_ids": list(range(49152)), "min_tokens": 2, "temperature": 0, "logprobs": 20},
        {"top_k": 2**31 - 1, "seed": -(2**63)},
        {"logit_bias": {"0": 100, "00": -100, " 0 ": 5, "1_0": 1}},
        {"prompt": [0] * 127, "max_tokens": 1},
        {"prompt": ["Hello"] * 1024, "max_tokens": 0},
        {"n": 128, "prompt": ["Hello"] * 8, "max_tokens": 1, "stream": True},
    ],
    ids=lambda body: ",".join(body),
)
def test_extremes_that_are_served(sender: Sender, body: dict[str, Any]) -> None:
    response = sender.post("/v1/completions", json.dumps({**BASE["/v1/completions"], **body}))
    assert response.status_code == 200, response.text[:300]
    assert "error" not in response.text[:100]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["Hello"] * 1025}, "prompt"),
        ("/v1/completions", {"prompt": ["Hello"] * 9, "n": 128}, "n"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": [["Hello"]]}, "prompt"),
        ("/v1/completions", {"prompt": "Hello", "n": 128, "max_tokens": 2**31}, "max_tokens"),
        ("/generate", {"text": ["Hello"] * 1025}, "prompt"),
        ("/generate", {"text": "Hello", "sampling_params": {"n": 129}}, "sampling_params"),
        ("/generate", {"text": "Hello" * 400_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 2000}, "prompt"),
        ("/v1/completions", {"prompt": "Hello", "stop": ["x"] * 100_000}, "stop"),
    ],
    ids=range(10),
)
def test_too_much_of_everything(sender: Sender, path: str, body: dict[str, Any], param: str) -> None:
    response = sender.post(path, json.dumps(body))
    assert response.status_code == 400, response.text[:300]
    assert response.json()["error"]["param"] == param
