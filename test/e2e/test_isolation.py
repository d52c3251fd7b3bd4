"""A request that fails alone fails alone; a rank that stops answering is named."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import tiny as tiny_models
from .processes import wait_until
from .server import Server
from .stream import Background

POISON = 1234
"""A token whose embedding is not a number."""


@pytest.fixture(scope="module", params=["1", "2"], ids=["tp1", "dcp2"])
def fragile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A sound model but for one token, in a pool of 512 tokens."""
    model = tiny_models.poisoned_directory(tmp_path_factory.mktemp("models") / "poisoned", POISON)
    flags = ("--model", str(model), "--dtype", "float32", "--kv-cache-tokens", "512")
    with Server(*flags, "--dcp", request.param) as running:
        yield running.wait_ready()
        assert running.process.poll() is None, running.log
        assert "Traceback" not in running.log, running.log


def ask(server: Server, prompt: list[int], **body: Any) -> httpx.Response:
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 30, **body.pop("sampling", {})}
    return server.post("/generate", {"input_ids": prompt, "sampling_params": sampling, **body})


def assert_all_pages_back(server: Server) -> None:
    pages = server.settle()["pages"]
    assert (pages["in_use"], pages["free"] + pages["evictable"]) == (0, pages["total"])


class TestLogitsThatAreNoNumbers:
    @pytest.mark.parametrize("prompt", [[POISON], [5, POISON, 7], [5] * 100 + [POISON] + [5] * 50])
    def test_of_the_prompt(self, fragile: Server, prompt: list[int]) -> None:
        before = ask(fragile, [5, 6, 7]).json()["output_ids"]
        response = ask(fragile, prompt)
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["message"] == f"Token {len(prompt)} cannot be chosen: its logits are not finite."
        assert error["type"] == "server_error"
        assert ask(fragile, [5, 6, 7], cache_salt="other").json()["output_ids"] == before
        assert_all_pages_back(fragile)

    @pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "repetition_penalty": 1.1, "min_new_tokens": 5}])
    def test_of_a_token_chosen_later(self, fragile: Server, sampling: dict[str, Any]) -> None:
        """The step after the failed one has left already when the failure becomes known."""
        sampling = {**sampling, "logit_bias": {str(POISON): 100}}
        job = Background(fragile, max_new_tokens=30, input_ids=[8, 9], sampling_params=sampling)
        assert job.join() == "error"
        assert job.last["error"]["message"] == "Token 3 cannot be chosen: its logits are not finite."
        assert_all_pages_back(fragile)

    def test_others_in_the_batch_do_not_notice(self, fragile: Server) -> None:
        prompts = [[100 + i] * (5 + 7 * i) for i in range(6)]
        alone = [ask(fragile, prompt, cache_salt="alone").json()["output_ids"] for prompt in prompts]
        poisoned = [[300 + i, *prompt, POISON, 5] for i, prompt in enumerate(prompts)]
        with ThreadPoolExecutor(12) as pool:
            sound = [pool.submit(ask, fragile, prompt) for prompt in prompts]
            broken = [pool.submit(ask, fragile, prompt, stream=i % 2 == 0) for i, prompt in enumerate(poisoned)]
        assert [job.result().json()["output_ids"] for job in sound] == alone
        for job in broken:
            assert "logits are not finite" in job.result().text
        assert_all_pages_back(fragile)

    @pytest.mark.parametrize("length", [3, 40, 200])
    def test_nobody_reuses_what_it_computed(self, fragile: Server, length: int) -> None:
        """What came before the token is suspect too; others compute it anew."""
        prompt = [400 + length] * length
        assert ask(fragile, [*prompt, POISON, 5]).status_code == 500
        again = ask(fragile, [*prompt, 6]).json()
        assert again["meta_info"]["cached_tokens"] == 0
        assert again["output_ids"] == ask(fragile, [*prompt, 6], cache_salt="alone").json()["output_ids"]
        assert ask(fragile, [*prompt, POISON, 5]).status_code == 500
        assert ask(fragile, [*prompt, 6]).status_code == 200
        assert_all_pages_back(fragile)

    def test_pages_that_held_them_are_clean_for_the_next(self, fragile: Server) -> None:
        """K5: the whole pool was full of what is not a number."""
        prompts = [[200 + i] * 130 for i in range(3)]
        fragile.post("/flush_cache", {})
        alone = [ask(fragile, prompt, cache_salt="before").json()["output_ids"] for prompt in prompts]
        for i in range(3):
            fragile.post("/flush_cache", {})
            assert ask(fragile, [POISON] * 480, cache_salt=str(i)).status_code == 500
            fragile.post("/flush_cache", {})
            again = [ask(fragile, prompt, cache_salt=str(i)).json()["output_ids"] for prompt in prompts]
            assert again == alone

    def test_one_of_several_prompts(self, fragile: Server) -> None:
        assert ask(fragile, [[5, 6], [5, POISON]]).status_code == 500  # type: ignore[list-item]
        assert_all_pages_back(fragile)

    def test_scores_of_a_prompt(self, fragile: Server) -> None:
        """There is no number for what follows the token, so there is no answer, and no crash."""
        sampling = {"max_new_tokens": 0}
        response = ask(fragile, [5, POISON, 7], return_logprob=True, logprob_start_len=0, sampling=sampling)
        assert response.status_code in (200, 500)
        assert ask(fragile, [5, 6, 7]).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "chat template"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "'video'"),
        ("/generate", {"input_ids": [5] * 9000}, "9000"),
        ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 9000}}, "9001"),
        ("/generate", {"input_ids": [49152]}, "49152"),
        ("/generate", {"input_ids": [5], "sampling_params": {"logit_bias": {"49152": 1}}}, "vocabulary of 49152"),
        ("/generate", {"input_ids": [5], "sampling_params": {"stop_token_ids": [60000], "min_new_tokens": 2}}, "60000"),
        ("/generate", {"text": "\ud800"}, "surrogate"),
    ],
)
def test_a_request_that_cannot_be_served_disturbs_nobody(tiny: Server, path: str, body: Any, words: str) -> None:
    alone = tiny.generate([300, 301], max_new_tokens=60, ignore_eos=True, salt="alone")["output_ids"]
    other = Background(tiny, max_new_tokens=60, input_ids=[300, 301], rid="other")
    assert other.started.wait(60)
    for stream in (False, True):
        response = tiny.post(path, {**body, "stream": stream})
        assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
        assert words in response.json()["error"]["message"]
    assert other.join() == "events"
    assert other.last["output_ids"] == alone
    assert_all_pages_back(tiny)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_stops_is_named(tiny_model: Path, backend: str) -> None:
    """The others pass their deadline, which ends the server and tells every client."""
    env = {"DCPRT_COLLECTIVE_TIMEOUT": "3", "DCPRT_COMM": backend}
    with Server(*tiny_models.flags(tiny_model), "--dcp", "2", "--kv-cache-tokens", "8192", env=env) as server:
        server.wait_ready()
        clients = [Background(server, max_new_tokens=8000, stream=stream) for stream in (True, False)]
        assert clients[0].started.wait(60)
        assert wait_until(lambda: len(server.info()["running"]) == 2)
        [stopped] = [pid for pid in server.pids("rank") if rank_of(pid) == 1]
        os.kill(stopped, signal.SIGSTOP)
        assert [client.join() for client in clients] == ["error", "error"]
        told = {client.detail for client in clients}
        assert len(told) == 1
        text = told.pop()
        assert re.match(r"rank 0: failed in step (\d+): \w+ of group '(world|dcp)' in step \1: ", text), text
        if backend == "shm":
            assert text.endswith("no answer from rank 1 after 3 s")
        assert server.process.wait(30) == 1
        assert f"error: {text}; the server ends." in server.log
        assert server.traces.gone() == []
        assert "Traceback" not in server.log, server.log


def rank_of(pid: int) -> int:
    """The rank of a worker process, by the order in which they were started."""
    children = Path(f"/proc/{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1]}/task")
    found = sorted(int(p) for task in children.iterdir() for p in (task / "children").read_text().split())
    ranks = [p for p in found if b"rank" in Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0")]
    return ranks.index(pid)
