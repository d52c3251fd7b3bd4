"""Everything beside generation: aborting, timeouts, the queue, the cache, the tokenizer, metrics, the key."""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dcprt.tokenizer.text import TextCodec

from . import tiny as tiny_models
from .processes import wait_until
from .server import Server
from .stream import Background, events, open_stream

STORY = "Once upon a time"
CHAT = [{"role": "user", "content": "Hello"}]
LONG, OUTPUT = 7000, 350
ROOT = Path(__file__).parents[2]
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def cramped(tiny_model: Path) -> Iterator[Server]:
    """Two ranks, and 16 spans of 32 tokens for two requests at a time; prompts in small chunks."""
    yield from serve(tiny_model, "--kv-cache-tokens", "512", "--chunked-prefill-size", "16")


@pytest.fixture(scope="module")
def narrow(tiny_model: Path) -> Iterator[Server]:
    """Two ranks with much room for two requests at a time, and three in the queue."""
    yield from serve(tiny_model, "--kv-cache-tokens", "16384", "--max-queued-requests", "3")


def serve(model: Path, *flags: str) -> Iterator[Server]:
    with Server(*tiny_models.flags(model), "--dcp", "2", "--max-running-requests", "2", *flags) as running:
        yield running.wait_ready()
        assert running.process.poll() is None, running.log
        assert "Traceback" not in running.log, running.log


def post(server: Server, path: str, **body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def abort(server: Server, rid: str) -> int:
    """How many it aborted."""
    return int(post(server, "/abort_request", rid=rid)["aborted"])


def error_of(server: Server, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    return dict(response.json()["error"])


def fresh_prompt(length: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    return [1000 + next(numbers)] + [500] * (length - 1)


def running_rids(server: Server) -> set[str]:
    return {request["rid"] for request in server.info()["running"]}


def assert_all_pages_back(server: Server) -> None:
    pages = server.settle()["pages"]
    assert pages["free"] + pages["evictable"] == pages["total"]
    assert pages["in_use"] == 0


def start_pair(server: Server, **second: Any) -> tuple[Background, Background]:
    """Two requests that cannot both stay, most likely admitted in this order."""
    server.settle()
    one = Background(server, max_new_tokens=OUTPUT, input_ids=fresh_prompt(150), rid="one")
    return one, Background(server, max_new_tokens=OUTPUT, input_ids=fresh_prompt(150), rid="two", **second)


def is_over(job: Background) -> bool:
    """Whether its last event has come."""
    return bool(job.last and (job.last.get("error") or job.last["meta_info"]["finish_reason"]))


def preempted_pair(server: Server) -> tuple[Background, Background]:
    """One that runs and one that was preempted and waits; it takes some tries to be there in time."""
    for _ in range(20):
        before = server.settle()["totals"]["preemptions"]
        pair = start_pair(server)
        state: dict[str, Any] = {}

        def is_decided(
            state: dict[str, Any] = state, before: int = before, pair: tuple[Background, ...] = pair
        ) -> bool:
            state.update(server.info())
            return state["totals"]["preemptions"] > before or all(map(is_over, pair))

        assert wait_until(is_decided)
        if len(state["running"]) == state["waiting"] == 1:
            return pair if state["running"][0]["rid"] == "one" else (pair[1], pair[0])
        assert {job.join() for job in pair} == {"events"}
    raise AssertionError("nothing was preempted for long enough to be seen")


def pair_with_one_aborted(server: Server, which: int) -> tuple[Background, Background]:
    """Such a pair, after the one that runs (0) or the one that waits (1) was aborted."""
    for _ in range(20):
        pair = preempted_pair(server)
        if abort(server, pair[which].rid):
            return pair
        assert {job.join() for job in pair} == {"events"}
    raise AssertionError("both were always over before the abort came")


def two_running(server: Server) -> list[Background]:
    """Two requests that take all rows until they are aborted."""
    jobs = [Background(server, max_new_tokens=LONG, rid=f"long{i}") for i in range(2)]
    assert wait_until(lambda: running_rids(server) == {"long0", "long1"})
    return jobs


def abort_all(server: Server, jobs: list[Background]) -> None:
    post(server, "/abort_request", abort_all=True)
    for job in jobs:
        assert job.join() == "events"


class TestAbort:
    """S2."""

    def test_a_running_request(self, tiny: Server) -> None:
        job = Background(tiny, max_new_tokens=LONG, rid="job")
        assert job.started.wait(60)
        assert abort(tiny, "job") == 1
        assert job.join() == "events"
        assert job.finish_reason == "abort"
        assert job.last["output_ids"]
        assert abort(tiny, "job") == 0
        assert_all_pages_back(tiny)

    def test_a_client_without_stream_is_told(self, tiny: Server) -> None:
        job = Background(tiny, max_new_tokens=LONG, rid="job", stream=False)
        assert wait_until(lambda: running_rids(tiny) == {"job"})
        assert abort(tiny, "job") == 1
        assert (job.join(), job.finish_reason) == ("events", "abort")

    def test_twice(self, tiny: Server) -> None:
        job = Background(tiny, max_new_tokens=LONG, rid="job")
        assert job.started.wait(60)
        assert abort(tiny, "job") == 1
        assert abort(tiny, "job") in (0, 1)
        assert (job.join(), job.finish_reason) == ("events", "abort")
        assert tiny.generate(STORY, max_new_tokens=2, ignore_eos=True)["output_ids"]

    @pytest.mark.parametrize("rid", ["", "nobody", "nobody#1", "job\ud800", "x" * 100_000])
    def test_an_unknown_id(self, tiny: Server, rid: str) -> None:
        assert abort(tiny, rid) == 0

    def test_only_whole_ids(self, tiny: Server) -> None:
        jobs = {rid: Background(tiny, max_new_tokens=LONG, rid=rid) for rid in ("job", "job-1", "job-10", "job-1#0")}
        assert all(job.started.wait(60) for job in jobs.values())
        assert abort(tiny, "job-1") == 1
        assert (jobs.pop("job-1").join(), running_rids(tiny)) == ("events", {"job", "job-10", "job-1#0"})
        assert [abort(tiny, part) for part in ("jo", "job-", "job-100", "JOB")] == [0] * 4
        assert post(tiny, "/abort_request", abort_all=True) == {"aborted": 3}
        assert {job.join() for job in jobs.values()} == {"events"}
        assert {job.finish_reason for job in jobs.values()} == {"abort"}
        assert post(tiny, "/abort_request", abort_all=True) == {"aborted": 0}
        assert_all_pages_back(tiny)

    def test_a_completion_by_the_id_of_its_chunks(self, tiny: Server) -> None:
        for n in (1, 2):
            body = {"prompt": STORY, "max_tokens": LONG, "ignore_eos": True, "n": n}
            with open_stream(tiny, "/v1/completions", body) as stream:
                first = next(stream)
                assert first is not None
                assert abort(tiny, first["id"]) == n
                ended = [c["finish_reason"] for event in stream if event for c in event["choices"]]
            assert [reason for reason in ended if reason] == ["abort"] * n
        assert_all_pages_back(tiny)

    def test_a_refused_namesake_changes_nothing(self, tiny: Server) -> None:
        """S3 for a request of several choices: it can still be aborted by its name."""
        body = {"text": STORY, "rid": "pair", "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True, "n": 2}}
        with open_stream(tiny, "/generate", body) as stream:
            next(stream)
            assert "is running already" in error_of(tiny, "/generate", **body)["message"]
            assert running_rids(tiny) == {"pair-0", "pair-1"}
            assert abort(tiny, "pair") == 2
            list(stream)
        assert abort(tiny, "pair") == 0
        assert_all_pages_back(tiny)

    def test_a_waiting_request(self, narrow: Server) -> None:
        jobs = two_running(narrow)
        waiting = Background(narrow, max_new_tokens=5, rid="waiting", stream=False)
        assert wait_until(lambda: narrow.info()["waiting"] == 1)
        assert abort(narrow, "waiting") == 1
        assert (waiting.join(), waiting.finish_reason, waiting.last["output_ids"]) == ("events", "abort", [])
        assert (running_rids(narrow), narrow.info()["waiting"]) == ({"long0", "long1"}, 0)
        abort_all(narrow, jobs)
        assert_all_pages_back(narrow)

    def test_a_prompt_under_way(self, cramped: Server) -> None:
        """It is computed in 31 chunks; the abort comes at any of them, or at the end."""
        for _ in range(8):
            job = Background(cramped, max_new_tokens=5, input_ids=fresh_prompt(500), rid="job")
            while not abort(cramped, "job") and not is_over(job):
                pass
            assert job.join() == "events"
            assert job.finish_reason in ("abort", "length")
        assert_all_pages_back(cramped)

    def test_a_text_that_is_still_encoded(self, tiny: Server) -> None:
        job = Background(tiny, max_new_tokens=5, text="word " * 1_000_000, rid="job", stream=False)
        assert wait_until(lambda: abort(tiny, "job") or job.outcome)
        assert job.join() in ("events", "error")
        assert job.status in (200, 400), job.detail
        assert tiny.generate(STORY, max_new_tokens=1)["output_ids"]

    def test_a_preempted_request(self, cramped: Server) -> None:
        one, two = pair_with_one_aborted(cramped, 1)
        assert (two.join(), two.finish_reason) == ("events", "abort")
        assert (one.join(), len(one.last["output_ids"])) == ("events", OUTPUT)
        assert_all_pages_back(cramped)

    def test_the_one_that_runs_while_a_preempted_one_waits(self, cramped: Server) -> None:
        """S6: nobody is left running; the next step starts from the queue."""
        one, two = pair_with_one_aborted(cramped, 0)
        assert (one.join(), one.finish_reason) == ("events", "abort")
        assert (two.join(), len(two.last["output_ids"])) == ("events", OUTPUT)
        assert_all_pages_back(cramped)

    def test_a_client_that_leaves_while_preempted(self, cramped: Server) -> None:
        """S1 and S2."""
        one, two = preempted_pair(cramped)
        two.leave()
        assert one.join() == "events"
        assert two.join() in ("closed", "events")
        assert_all_pages_back(cramped)


class TestPreemption:
    def test_a_hit_is_counted_once(self, cramped: Server) -> None:
        """K12: both had 100 tokens cached when they were admitted; that the second came twice does not count."""
        shared = fresh_prompt(100)
        prompts = [shared + [600 + i] * 50 for i in range(2)]
        alone = [cramped.generate(p, max_new_tokens=250, ignore_eos=True, salt="alone") for p in prompts]
        assert len(cramped.generate(shared, max_new_tokens=1, ignore_eos=True)["output_ids"]) == 1
        before = cramped.settle()["totals"]
        sampling = {"temperature": 0, "max_new_tokens": 250, "ignore_eos": True}
        both = post(cramped, "/generate", input_ids=prompts, sampling_params=sampling)
        after = cramped.settle()["totals"]
        assert after["preemptions"] > before["preemptions"]
        assert [answer["meta_info"]["cached_tokens"] for answer in both] == [100, 100]
        assert after["cached_tokens"] - before["cached_tokens"] == 200
        assert after["prompt_tokens"] - before["prompt_tokens"] == 300
        assert [answer["output_ids"] for answer in both] == [answer["output_ids"] for answer in alone]
        assert_all_pages_back(cramped)

    def test_log_probabilities_and_seeds_outlive_it(self, cramped: Server) -> None:
        sampling = {"temperature": 0.9, "top_k": 20, "sampling_seed": 3, "max_new_tokens": 200, "ignore_eos": True}
        sampling |= {"repetition_penalty": 1.2, "frequency_penalty": 0.5}
        body = {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0, "sampling_params": sampling}
        prompts = [fresh_prompt(150) for _ in range(2)]
        fields = ("output_token_logprobs", "input_token_logprobs")
        alone = [post(cramped, "/generate", input_ids=prompt, **body) for prompt in prompts]
        before = cramped.settle()["totals"]["preemptions"]
        both = post(cramped, "/generate", input_ids=prompts, **body)
        assert cramped.settle()["totals"]["preemptions"] > before
        for one, again in zip(alone, both, strict=True):
            assert again["output_ids"] == one["output_ids"]
            for field in fields:
                expected, found = one["meta_info"][field], again["meta_info"][field]
                assert [entry[1:] for entry in found] == [entry[1:] for entry in expected]
                numbers_of = [[entry[0] or 0.0 for entry in entries] for entries in (found, expected)]
                assert numbers_of[0] == pytest.approx(numbers_of[1], abs=1e-3)


class TestTimeouts:
    def test_without_a_stream(self, tiny: Server) -> None:
        error = error_of(
            tiny,
            "/generate",
            408,
            text=STORY,
            timeout=0.3,
            sampling_params={"max_new_tokens": LONG, "ignore_eos": True},
        )
        assert error["code"] == "timeout"
        assert error["message"] == "The request took longer than its 0.3 s."
        assert_all_pages_back(tiny)

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_of_openai_requests(self, tiny: Server, path: str) -> None:
        prompt = {"messages": CHAT} if "chat" in path else {"prompt": STORY}
        error = error_of(tiny, path, 408, **prompt, timeout=0.2, max_tokens=LONG, ignore_eos=True)
        assert error["code"] == "timeout"

    def test_before_the_first_token_of_a_stream(self, tiny: Server) -> None:
        body = {"text": STORY, "timeout": 1e-9, "sampling_params": {"max_new_tokens": 5}}
        with open_stream(tiny, "/generate", body) as stream:
            seen = list(stream)
        assert [event["error"]["code"] for event in seen if event] == ["timeout"]

    def test_in_the_middle_of_a_stream(self, tiny: Server) -> None:
        job = Background(tiny, max_new_tokens=LONG, timeout=0.5, rid="late")
        assert job.join() == "error"
        assert job.status == 200
        assert job.last["error"]["code"] == "timeout"
        assert tiny.log.count("request late timeout") == 1
        assert_all_pages_back(tiny)

    def test_in_the_queue(self, narrow: Server) -> None:
        """S5: only the scheduler looks at a clock; the ranks never hear of it."""
        jobs = two_running(narrow)
        late = Background(narrow, max_new_tokens=5, timeout=0.2, stream=False)
        assert (late.join(), late.status) == ("error", 408)
        assert running_rids(narrow) == {"long0", "long1"}
        abort_all(narrow, jobs)
        assert_all_pages_back(narrow)

    def test_while_preempted(self, cramped: Server) -> None:
        """S5: at whatever moment it is late, it alone gets the error."""
        seen = 0
        for timeout in (1, 2, 0.5, 4) * 4:
            before = cramped.settle()["totals"]["preemptions"]
            one, two = start_pair(cramped, timeout=timeout)
            assert (one.join(), len(one.last["output_ids"])) == ("events", OUTPUT)
            if two.join() == "error":
                assert two.last["error"]["code"] == "timeout"
                seen += cramped.info()["totals"]["preemptions"] > before
            assert_all_pages_back(cramped)
            if seen:
                return
        raise AssertionError("none was late after it had been preempted")

    def test_of_all_requests(self, tiny_model: Path) -> None:
        flags = ("--kv-cache-tokens", "16384", "--request-timeout", "1")
        with Server(*tiny_models.flags(tiny_model), *flags) as server:
            server.wait_ready()
            sampling = {"max_new_tokens": LONG, "ignore_eos": True}
            for timeout, seconds in ((None, "1"), (0.5, "0.5"), (1.5, "1.5")):
                error = error_of(server, "/generate", 408, text=STORY, timeout=timeout, sampling_params=sampling)
                assert error["message"] == f"The request took longer than its {seconds} s."
            assert server.generate(STORY, max_new_tokens=2, ignore_eos=True)["output_ids"]


class TestQueue:
    def test_one_too_many(self, narrow: Server) -> None:
        """S5: refused at once; those before it are served, and give what they give alone."""
        jobs = two_running(narrow)
        prompts = [fresh_prompt(20) for _ in range(3)]
        queue = [Background(narrow, max_new_tokens=20, input_ids=prompt, stream=False) for prompt in prompts]
        assert wait_until(lambda: narrow.info()["waiting"] == 3)
        response = narrow.post("/generate", {"text": STORY})
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("queue_full", "server_error")
        assert error["message"] == "3 requests wait already; at most 3 may."
        streamed = Background(narrow, max_new_tokens=5)
        assert (streamed.join(), streamed.status, streamed.headers["retry-after"]) == ("error", 503, "1")
        assert abort(narrow, "long0") == 1
        assert [job.join() for job in queue] == ["events"] * 3
        assert running_rids(narrow) == {"long1"}
        abort_all(narrow, jobs)
        for prompt, job in zip(prompts, queue, strict=True):
            alone = narrow.generate(prompt, max_new_tokens=20, ignore_eos=True, salt="alone")
            assert job.last["output_ids"] == alone["output_ids"]
        assert_all_pages_back(narrow)

    def test_a_batch_that_does_not_fit_leaves_nothing(self, narrow: Server) -> None:
        narrow.settle()
        response = narrow.post("/v1/completions", {"prompt": [STORY] * 12, "max_tokens": LONG, "ignore_eos": True})
        assert response.status_code == 503
        assert_all_pages_back(narrow)

    def test_overload_and_timeouts_together(self, narrow: Server) -> None:
        """S5: whatever is refused, late or aborted, the ranks stay together."""
        prompt = [700] * 30
        expected = narrow.generate(prompt, max_new_tokens=40, ignore_eos=True, salt="alone")["output_ids"]
        jobs = [
            Background(
                narrow, max_new_tokens=40, input_ids=prompt, timeout=(None, 0.05, 0.1)[i % 3], stream=bool(i % 2)
            )
            for i in range(24)
        ]
        ended = [job for job in jobs if job.join() == "events"]
        assert ended
        assert all(job.last["output_ids"] == expected for job in ended)
        assert {job.outcome for job in jobs} <= {"events", "error"}
        assert {job.status for job in jobs} <= {200, 408, 503}
        assert_all_pages_back(narrow)


class TestCache:
    def test_flushing(self, tiny: Server) -> None:
        prompt = fresh_prompt(200)
        cached = [tiny.generate(prompt, max_new_tokens=1)["meta_info"]["cached_tokens"] for _ in range(2)]
        assert cached == [0, 199]
        evictable = tiny.settle()["pages"]["evictable"]
        assert post(tiny, "/flush_cache") == {"flushed_tokens": evictable * 16}
        pages = tiny.info()["pages"]
        assert (pages["free"], pages["evictable"]) == (pages["total"], 0)
        assert tiny.generate(prompt, max_new_tokens=1)["meta_info"]["cached_tokens"] == 0
        assert tiny.generate(prompt, max_new_tokens=1)["meta_info"]["cached_tokens"] == 199

    def test_flushing_leaves_what_runs(self, tiny: Server) -> None:
        prompt = fresh_prompt(100)
        alone = tiny.generate(prompt, max_new_tokens=200, ignore_eos=True, salt="alone")["output_ids"]
        job = Background(tiny, max_new_tokens=200, input_ids=prompt)
        assert job.started.wait(60)
        for _ in range(10):
            post(tiny, "/flush_cache")
        assert job.join() == "events"
        assert job.last["output_ids"] == alone
        assert_all_pages_back(tiny)


class TestTokenizer:
    @pytest.mark.parametrize(
        "text", ["", "Hello, world", "  x\n\ty  ", "🎉🦄 漢字 1234567", "<|im_start|>user", "\0", "a" * 9000]
    )
    def test_round_trip(self, tiny: Server, codec: TextCodec, text: str) -> None:
        answer = post(tiny, "/tokenize", prompt=text)
        assert answer["tokens"] == codec.encode(text)
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == 8192
        back = post(tiny, "/detokenize", tokens=answer["tokens"], skip_special_tokens=False)
        assert back == {"prompt": text}

    def test_special_tokens_are_left_out(self, tiny: Server, codec: TextCodec) -> None:
        tokens = codec.encode("<|im_start|>user")
        assert post(tiny, "/detokenize", tokens=tokens) == {"prompt": "user"}
        assert post(tiny, "/detokenize", tokens=[]) == {"prompt": ""}
        assert post(tiny, "/detokenize", tokens=[-1, 10**9]) == {"prompt": ""}

    def test_a_chat(self, tiny: Server, codec: TextCodec) -> None:
        assert post(tiny, "/tokenize", messages=CHAT)["tokens"] == codec.encode_chat(CHAT)
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
        assert post(tiny, "/tokenize", messages=parts)["tokens"] == codec.encode_chat(CHAT)
        usage = post(tiny, "/v1/chat/completions", messages=CHAT, max_tokens=1)["usage"]
        assert usage["prompt_tokens"] == len(codec.encode_chat(CHAT))

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/tokenize", {"prompt": "\ud800"}, None),
            ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
            ("/tokenize", {"messages": [{"role": "user", "content": "x", "more": 10**30}]}, None),
            ("/tokenize", {"messages": [{"role": "user"}]}, "messages"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
            ("/detokenize", {"tokens": [1.5]}, "tokens"),
            ("/detokenize", {"tokens": [10**30]}, None),
        ],
        ids=str,
    )
    def test_wrong_questions(self, tiny: Server, path: str, body: dict[str, Any], param: str | None) -> None:
        assert error_of(tiny, path, **body)["param"] == param

    def test_another_model(self, tiny: Server) -> None:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            assert error_of(tiny, path, 404, model="other", **body)["code"] == "model_not_found"
            assert post(tiny, path, model="tiny", **body)

    def test_a_long_text_stalls_nobody(self, tiny: Server) -> None:
        """Tokens of others come while it is encoded."""
        job = Background(tiny, max_new_tokens=LONG, rid="job")
        assert job.started.wait(60)
        assert post(tiny, "/tokenize", prompt="word " * 200_000)["count"] == 200_001
        assert running_rids(tiny) == {"job"}
        abort(tiny, "job")
        job.join()


def test_health_generate(tiny: Server) -> None:
    job = Background(tiny, max_new_tokens=LONG, rid="job")
    assert job.started.wait(60)
    with httpx.Client(timeout=60) as http:
        assert [http.get(f"{tiny.url}/health_generate").status_code for _ in range(5)] == [200] * 5
        assert [http.get(f"{tiny.url}/health_generate").content for _ in range(2)] == [b"", b""]
    assert running_rids(tiny) == {"job"}
    abort(tiny, "job")
    assert job.join() == "events"


class Vanishing:
    """A client on a bare socket, so that it can go without a word."""

    def __init__(self, server: Server, rid: str, stream: bool) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        sampling = {"max_new_tokens": 3000, "ignore_eos": True}
        body = json.dumps({"text": rid, "rid": rid, "stream": stream, "sampling_params": sampling}).encode()
        head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)

    def vanish(self) -> None:
        self._socket.close()


def test_200_clients_vanish_at_once(tiny: Server) -> None:
    """S1: some run, some wait, some stream, some do not."""
    tiny.settle()
    clients = [Vanishing(tiny, f"vanishing-{i}", stream=i % 2 == 0) for i in range(200)]
    state: dict[str, Any] = {}

    def are_all_there() -> bool:
        state.update(tiny.info())
        return len(state["running"]) + state["waiting"] == 200

    try:
        assert wait_until(are_all_there)
    finally:
        for client in clients:
            client.vanish()
    assert state["running"]
    assert state["waiting"]
    after = tiny.settle()
    assert after["pages"]["in_use"] == 0
    assert after["pages"]["free"] + after["pages"]["evictable"] == after["pages"]["total"]
    assert len(tiny.generate(STORY, max_new_tokens=3, ignore_eos=True)["output_ids"]) == 3
    told = [len(re.findall(rf"\bvanishing-{i}\b", tiny.log)) for i in range(200)]
    assert set(told) == {1}
    assert after["totals"]["generated_tokens"] - state["totals"]["generated_tokens"] < 200 * 3000


def test_an_id_cannot_write_lines_of_the_log(tiny: Server) -> None:
    answer = post(tiny, "/generate", text=STORY, rid="evil\n12:00:00 [api] fake", sampling_params={"max_new_tokens": 1})
    assert answer["meta_info"]["id"] == "evil\n12:00:00 [api] fake"
    assert not any(line.startswith("12:00:00 [api] fake") for line in tiny.log.splitlines())
    assert tiny.log.count("evil\\n12:00:00 [api] fake") == 1


class TestMetrics:
    def read(self, server: Server) -> dict[str, float]:
        """Every sample by its name, with its label where it has one."""
        response = httpx.get(f"{server.url}/metrics", timeout=60)
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {
            "/".join([sample.name, *sample.labels.values()]): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }

    def test_names_are_those_of_the_docs(self, tiny: Server) -> None:
        page = (ROOT / "docs" / "metrics.md").read_text()
        documented = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE))
        text = httpx.get(f"{tiny.url}/metrics", timeout=60).text
        found = text_string_to_metric_families(text)
        families = {family.name: family.type for family in found}
        assert {name.removesuffix("_total"): kind for name, kind in documented.items()} == families

    def test_they_add_up(self, tiny: Server) -> None:
        tiny.settle()
        before = self.read(tiny)
        prompt = fresh_prompt(100)
        for _ in range(3):
            tiny.generate(prompt, max_new_tokens=10, ignore_eos=True)
        token = tiny.generate(prompt, max_new_tokens=1, ignore_eos=True)["output_ids"][0]
        tiny.generate(prompt, max_new_tokens=10, stop_token_ids=[token])
        error_of(tiny, "/generate", text=STORY, sampling_params={"max_new_tokens": 9000})
        error_of(tiny, "/generate", 408, text=STORY, timeout=1e-9)
        job = Background(tiny, max_new_tokens=LONG, rid="job")
        assert job.started.wait(60)
        running = self.read(tiny)
        assert (running["dcprt_requests_running"], running["dcprt_requests_waiting"]) == (1, 0)
        assert running["dcprt_kv_pages/in_use"] > 0
        abort(tiny, "job")
        job.join()
        tiny.settle()
        after = self.read(tiny)
        change = {name: after[name] - before.get(name, 0) for name in after}
        story = job.last["meta_info"]["prompt_tokens"]
        story_cached = job.last["meta_info"]["cached_tokens"]
        assert change["dcprt_tokens_total/prompt"] == 500 + story
        assert change["dcprt_tokens_total/cached"] == 4 * 99 + story_cached
        assert change["dcprt_tokens_total/prefilled"] == 100 + 4 + story - story_cached
        generated = 3 * 10 + 1 + 1
        assert generated + len(job.last["output_ids"]) <= change["dcprt_tokens_total/generated"]
        reasons = {"length": 4, "stop": 1, "abort": 1, "refused": 1, "timeout": 1}
        assert {name: change[f"dcprt_requests_total/{name}"] for name in reasons} == reasons
        assert change["dcprt_request_seconds_count"] == 7
        assert change["dcprt_time_to_first_token_seconds_count"] == 6
        assert change["dcprt_inter_token_seconds_count"] == change["dcprt_tokens_total/generated"] - 6
        assert change["dcprt_step_seconds_count"] >= change["dcprt_inter_token_seconds_count"] - 10
        assert (after["dcprt_requests_running"], after["dcprt_requests_waiting"]) == (0, 0)
        assert after["dcprt_kv_pages/in_use"] == 0
        assert after["dcprt_kv_pages/free"] + after["dcprt_kv_pages/cached"] == tiny.info()["pages"]["total"]
        assert after["dcprt_kv_span_tokens"] == 16
        assert after["dcprt_kv_bytes_per_rank"] == tiny.info()["kv_bytes_per_rank"]
        rate = after["dcprt_tokens_total/cached"] / after["dcprt_tokens_total/prompt"]
        assert after["dcprt_prefix_cache_hit_rate"] == pytest.approx(rate)

    def test_preemptions(self, cramped: Server) -> None:
        for job in preempted_pair(cramped):
            job.join()
        totals = cramped.settle()["totals"]
        assert self.read(cramped)["dcprt_preemptions_total"] == totals["preemptions"] > 0

    def test_the_queue(self, narrow: Server) -> None:
        jobs = two_running(narrow)
        waiting = Background(narrow, max_new_tokens=5, rid="waiting", stream=False)
        assert wait_until(lambda: narrow.info()["waiting"] == 1)
        metrics = self.read(narrow)
        assert (metrics["dcprt_requests_running"], metrics["dcprt_requests_waiting"]) == (2, 1)
        abort_all(narrow, [*jobs, waiting])


def test_the_key_guards_every_route(single: Server) -> None:
    headers = {"Authorization": "Bearer secret"}
    paths = httpx.get(f"{single.url}/openapi.json", headers=headers).json()["paths"]
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    assert len(routes) >= 12
    for method, path in [*routes, ("get", "/openapi.json"), ("get", "/docs"), ("options", "/generate"), ("get", "/x")]:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer"}):
            answer = httpx.request(method, f"{single.url}{path}", headers=given)
            assert answer.status_code == (200 if path == "/health" else 401), (method, path)
    for path in ("/health/", "//health", "/health/../metrics", "/health_generate", "/HEALTH"):
        assert httpx.get(f"{single.url}{path}").status_code == 401, path
    assert httpx.get(f"{single.url}/metrics", headers=headers).status_code == 200


def test_streams_of_errors_end_with_the_error(tiny: Server) -> None:
    """An error event is the last one: nobody waits for more."""
    body = {"prompt": STORY, "max_tokens": LONG, "ignore_eos": True, "timeout": 0.3}
    with open_stream(tiny, "/v1/completions", body) as stream:
        seen = list(stream)
    assert seen[-1] is not None
    assert seen[-1]["error"]["code"] == "timeout"
    assert all(event and "choices" in event for event in seen[:-1])
    assert events(tiny, "/v1/completions", {"prompt": STORY, "max_tokens": 2, "ignore_eos": True})
