"""What clients get is the same whatever goes on around a request: chunks, hits, preemption, grids, plans ahead."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from dcprt.messages import TokenLogprobs, TokensOut
from dcprt.params import SamplingParams

from .harness import Harness, write_llama

VOCAB = 131
SETTINGS: list[dict[str, Any]] = [
    {},
    {"tp": 2, "dcp": 2, "page_size": 4, "chunked_prefill_size": 7},
    {"tp": 4, "dcp": 2, "page_size": 8, "dcp_interleave": 8, "ahead": 1},
    {"page_size": 4, "kv_cache_tokens": 160, "ahead": 1},
    {"tp": 3, "dcp": 3, "page_size": 2, "kv_cache_tokens": 150, "chunked_prefill_size": 16},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(directory: Path) -> LlamaForCausalLM:
    return write_llama(directory)


def prompt_of(length: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(VOCAB) for _ in range(length)]


def tokens_of(outputs: list[TokensOut]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def logprobs_of(outputs: list[TokensOut]) -> list[TokenLogprobs]:
    return [entry for output in outputs for entry in output.logprobs]


@torch.inference_mode()
def scores(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Log probabilities [tokens - 1, vocab]: row i is what follows token i."""
    return model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)


def assert_scored(entries: list[TokenLogprobs], rows: torch.Tensor, tokens: list[int], count: int) -> None:
    assert [entry.token for entry in entries] == tokens
    for entry, row in zip(entries, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=2e-4)
        best = row.sort(descending=True)
        assert [value for _, value in entry.top] == pytest.approx(best.values[:count].tolist(), abs=2e-4)


PARAMS: list[SamplingParams] = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=6, top_p=0.9, top_k=40, min_p=0.02, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.4, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, frequency_penalty=1.5, presence_penalty=0.7, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, logit_bias={3: 4.0, 9: -5.0}, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.5, seed=1, max_tokens=24, min_tokens=20, stop_token_ids=tuple(range(0, 131, 2))),
]


def test_tokens_do_not_depend_on_what_goes_on_around(directory: Path, model: LlamaForCausalLM) -> None:
    """Every kind of sampling, under every setting; small pools preempt."""
    asked = [(prompt_of(30 + 3 * i, seed=i % 3), params) for i, params in enumerate(PARAMS)]
    with Harness(directory) as harness:
        alone = [tokens_of(harness.run([one])[1][0]) for one in asked]
    preempted = 0
    for setting in SETTINGS:
        with Harness(directory, **setting) as harness:
            for _ in range(2):
                _, outputs = harness.run(asked)
                assert [tokens_of(output) for output in outputs] == alone, setting
            preempted += harness.scheduler.counters.preemptions
    assert preempted > 0, "the settings were meant to bring preemptions"


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_log_probabilities_of_output_and_prompt(
    directory: Path, model: LlamaForCausalLM, setting: dict[str, Any]
) -> None:
    """A cached prompt is computed again for them; a preempted one reports each place once."""
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    asked = [(prompt_of(40, seed=1), params), (prompt_of(55, seed=2), params), (prompt_of(1, seed=3), params)]
    with Harness(directory, **setting) as harness:
        for _ in range(2):
            requests, outputs = harness.run(asked)
            for request, got in zip(requests, outputs, strict=True):
                rows, prompt = scores(model, list(request.tokens)), list(request.tokens[: request.prompt_len])
                assert_scored(logprobs_of(got), rows[request.prompt_len - 1 :], tokens_of(got), 3)
                assert_scored(got[0].prompt_logprobs, rows[: request.prompt_len - 1], prompt[1:], 2)
                assert not any(output.prompt_logprobs for output in got[1:])
                assert request.cached_len == 0


def test_only_the_prompt(directory: Path, model: LlamaForCausalLM) -> None:
    """max_tokens 0 ends with its prompt computed, and what it computed is there for the next."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    for setting in SETTINGS:
        with Harness(directory, **setting) as harness:
            _requests, outputs = harness.run([(prompt_of(70, seed=4), params)])
            assert [output.token_ids for output in outputs[0]] == [[]]
            assert outputs[0][0].finish is not None
            assert outputs[0][0].finish.reason == "length"
            assert len(outputs[0][0].prompt_logprobs) == 69
            again, _ = harness.run([(prompt_of(70, seed=4), SamplingParams(max_tokens=1))])
            assert again[0].cached_len == 69


def test_requests_that_begin_alike_compute_it_once(directory: Path, model: LlamaForCausalLM) -> None:
    """n answers to one prompt, sent together: the others wait a step, then share all whole spans."""
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=4, ignore_eos=True) for i in range(5)]
    prompt = prompt_of(100, seed=8)
    with Harness(directory, page_size=4, tp=2, dcp=2, ahead=1) as harness:
        requests, _ = harness.run([(prompt, one) for one in params])
    assert [request.cached_len for request in requests] == [0, 96, 96, 96, 96]
    assert len({tuple(request.tokens) for request in requests}) > 1
