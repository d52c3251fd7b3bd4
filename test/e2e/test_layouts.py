"""Short prompts on many ranks, long ones in small chunks, full pools and full contexts: the tokens of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from . import tiny as tiny_models
from .server import Server

CONTEXT = 300


@pytest.fixture(scope="module")
def wide(tiny_model: Path) -> Iterator[Server]:
    """Eight ranks, runs of 16 tokens: most ranks own nothing of a short prompt. Four requests fill the pool."""
    flags = ("--dcp", "8", "--dcp-interleave", "16", "--context-length", str(CONTEXT), "--kv-cache-tokens", "1536")
    with Server(*tiny_models.flags(tiny_model), *flags, "--chunked-prefill-size", "50") as running:
        yield running.wait_ready()
        assert running.process.poll() is None, running.log
        assert "Traceback" not in running.log, running.log


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(i * 7919 + seed * 104729 + 13) % 49000 + 100 for i in range(length)]


def tokens(server: Server, prompt: list[int], count: int = 8) -> list[int]:
    answer = server.generate(prompt, max_new_tokens=count, ignore_eos=True)
    assert answer["meta_info"]["completion_tokens"] == count
    return list(answer["output_ids"])


@pytest.mark.parametrize("length", [1, 2, 6, 10, 16, 17, 129])
def test_ranks_that_own_nothing(wide: Server, tiny: Server, length: int) -> None:
    """K2 and K3."""
    prompt = prompt_of(length, seed=length)
    assert tokens(wide, prompt) == tokens(wide, prompt) == tokens(tiny, prompt)


def test_several_at_once(wide: Server, tiny: Server) -> None:
    """K3: rows with and without context in one step."""
    prompts = [prompt_of(length, seed=50 + length) for length in (3, 10, 150, 1)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: tokens(wide, prompt), prompts))
    assert found == [tokens(tiny, prompt) for prompt in prompts]


def test_many_chunks(wide: Server, tiny: Server) -> None:
    """K4: a length that nothing divides."""
    prompt = prompt_of(277, seed=1)
    assert tokens(wide, prompt) == tokens(tiny, prompt)


@pytest.mark.parametrize("left", [1, 2, 5])
def test_to_the_end_of_the_context(wide: Server, tiny: Server, left: int) -> None:
    """K6 and S11: to the last token, and none beyond."""
    prompt = prompt_of(CONTEXT - left, seed=left)
    assert tokens(wide, prompt, left) == tokens(tiny, prompt, left)
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": left + 1}}
    message = wide.post("/generate", body).json()["error"]["message"]
    assert f"{len(prompt)} tokens and {left + 1} new ones are asked for, {CONTEXT + 1} together" in message


def test_recycled_pages_carry_nothing_over(wide: Server, tiny: Server) -> None:
    """K5: more was allocated than the pool holds, several times over."""
    early = prompt_of(200, seed=2)
    first = tokens(wide, early)
    assert first == tokens(tiny, early)
    capacity = wide.info()["kv_capacity_tokens"]
    others = [prompt_of(280, seed=100 + i) for i in range(3 * capacity // 280)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda prompt: tokens(wide, prompt, 2), others))
    again = wide.generate(early, max_new_tokens=8, ignore_eos=True)
    assert again["meta_info"]["cached_tokens"] == 0, "it was meant to be evicted"
    assert again["output_ids"] == first
    pages = wide.settle()["pages"]
    assert (pages["in_use"], pages["free"] + pages["evictable"]) == (0, pages["total"])
