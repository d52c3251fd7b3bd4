"""The demo model against transformers, on real processes, over grids, page sizes, interleaves and chunks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from dcprt import Engine, SamplingParams
from dcprt.tokenizer.text import TextCodec
from dcprt.weights.resolve import resolve

from .prompts import LENGTHS, QUICK, make_prompts
from .reference import Greedy, Reference, compare

QUICK_TOKENS, ALL_TOKENS = 16, 64


@dataclass(frozen=True)
class Case:
    """One configuration; an interleave of 0 stands for the page size."""

    tp: int
    dcp: int
    page_size: int
    interleave: int
    chunk: int

    def __str__(self) -> str:
        return f"tp{self.tp}-dcp{self.dcp}-page{self.page_size}-interleave{self.interleave}-chunk{self.chunk}"


CASES = [
    Case(1, 1, 4, 1, 2048),
    Case(2, 2, 4, 0, 2048),
    Case(3, 3, 1, 1, 64),
    Case(4, 1, 4, 1, 64),
    Case(4, 2, 16, 1, 2048),
    Case(4, 4, 16, 1, 2048),
    Case(5, 5, 16, 0, 64),
    Case(6, 3, 4, 1, 64),
    Case(8, 1, 16, 0, 2048),
    Case(6, 3, 1, 0, 2048),
    Case(4, 2, 4, 1, 64),
    Case(3, 3, 16, 0, 2048),
    Case(4, 2, 1, 0, 2048),
    Case(2, 2, 16, 1, 64),
    Case(5, 5, 1, 1, 2048),
    Case(4, 4, 1, 0, 64),
    Case(2, 1, 16, 1, 2048),
    Case(8, 1, 4, 1, 64),
    Case(4, 1, 1, 0, 2048),
    Case(2, 1, 4, 0, 64),
    Case(1, 1, 1, 0, 64),
    Case(5, 5, 4, 0, 64),
    Case(3, 3, 4, 1, 64),
    Case(2, 2, 1, 0, 2048),
]
QUICK_CASES = CASES[:8]


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve("smollm2-135m", "auto", lambda _: None)


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    return make_prompts(TextCodec(directory))


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


@pytest.fixture(scope="module")
def quick_reference(reference: Reference, prompts: list[list[int]]) -> list[Greedy]:
    return [reference.greedy(prompts[i], QUICK_TOKENS) for i in QUICK]


@pytest.fixture(scope="module")
def full_reference(reference: Reference, prompts: list[list[int]]) -> list[Greedy]:
    return [reference.greedy(prompt, ALL_TOKENS) for prompt in prompts]


def generate(case: Case, prompts: list[list[int]], count: int) -> list[list[int]]:
    options = {"dtype": "float32", "kv_cache_tokens": 16384, "page_size": case.page_size}
    with Engine(
        model="smollm2-135m",
        tp=case.tp,
        dcp=case.dcp,
        dcp_interleave=case.interleave or case.page_size,
        chunked_prefill_size=case.chunk,
        **options,
    ) as engine:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return [output.token_ids for output in engine.generate(prompts, params)]


@pytest.mark.parametrize("case", QUICK_CASES, ids=str)
def test_few_prompts(case: Case, prompts: list[list[int]], quick_reference: list[Greedy]) -> None:
    wrong, excused = compare(generate(case, [prompts[i] for i in QUICK], QUICK_TOKENS), quick_reference)
    assert not wrong
    assert len(excused) <= 1, excused


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_prompts(case: Case, prompts: list[list[int]], full_reference: list[Greedy]) -> None:
    wrong, excused = compare(generate(case, prompts, ALL_TOKENS), full_reference)
    print(f"{case}: {len(prompts)} prompts x {ALL_TOKENS} tokens, excused: {excused or 'none'}")
    assert not wrong


def test_cases_cover_pairs() -> None:
    """Every pair of values occurs, but for six of grid and page size: ten grids times three sizes are thirty."""
    values = [((c.tp, c.dcp), c.page_size, c.interleave, c.chunk) for c in CASES]
    assert len(CASES) <= 24
    assert len(LENGTHS) == 20
    for i, j in itertools.combinations(range(4), 2):
        wanted = set(itertools.product({v[i] for v in values}, {v[j] for v in values}))
        missing = wanted - {(v[i], v[j]) for v in values}
        assert len(missing) == (6 if (i, j) == (0, 1) else 0), missing
