"""The perplexity of a text at bfloat16, on the native kernels, against transformers.

The reference computes in float32 with the same weights, rounded to bfloat16: that is stricter than transformers at
bfloat16, whose own rounding would be part of the difference. The text is this repository's documentation.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from dcprt.tokenizer.text import TextCodec
from dcprt.weights.resolve import resolve

from .server import MODEL, Server

ROOT = Path(__file__).parents[2]
QUICK, WHOLE = 1024, 4096
AGREEMENT = 0.005
"""Largest relative difference of two perplexities."""
LOGITS = 256
"""Tokens whose logits are held at a time."""
GRIDS = {"tp1": ("--tp", "1"), "dcp4": ("--dcp", "4")}

pytestmark = pytest.mark.skipif(find_spec("dcprt_kernel") is None, reason="dcprt-kernel is not installed")


@pytest.fixture(scope="module")
def tokens(codec: TextCodec) -> list[int]:
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    found = codec.encode(text)[:WHOLE]
    assert len(found) == WHOLE
    return found


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    directory = resolve(MODEL, "auto", lambda _: None)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).float().eval()


@torch.inference_mode()
def reference(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Log probabilities of all tokens but the first, float32 [tokens - 1]."""
    ids = torch.tensor(tokens)
    found = []
    hidden = model.model(ids[None]).last_hidden_state[0, :-1]
    for part, following in zip(hidden.split(LOGITS), ids[1:].split(LOGITS), strict=True):
        scores = model.lm_head(part).log_softmax(-1)
        found.append(scores.gather(1, following[:, None])[:, 0])
    return torch.cat(found)


def perplexity(logprobs: Tensor) -> float:
    return math.exp(-float(logprobs.double().mean()))


def scored(server: Server, tokens: list[int]) -> Tensor:
    """What the server finds, float32 [tokens - 1]."""
    answer = server.client().completions.create(model=MODEL, prompt=tokens, max_tokens=0, echo=True, logprobs=0)
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None
    assert len(found.token_logprobs) == len(tokens)
    return torch.tensor(found.token_logprobs[1:])


def check(grid: str, tokens: list[int], model: PreTrainedModel) -> None:
    expected = perplexity(reference(model, tokens))
    flags = ("--dtype", "bfloat16", "--kv-cache-tokens", "8192", *GRIDS[grid])
    with Server(*flags, env={"DCPRT_ATTENTION": "native"}) as server:
        found = perplexity(scored(server.wait_ready(), tokens))
    print(f"{grid}, {len(tokens)} tokens: perplexity {found:.4f}, transformers {expected:.4f}")
    assert abs(found / expected - 1) <= AGREEMENT, (found, expected)


@pytest.mark.parametrize("grid", GRIDS)
def test_of_a_page(grid: str, tokens: list[int], model: PreTrainedModel) -> None:
    check(grid, tokens[:QUICK], model)


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS)
def test_of_many_pages(grid: str, tokens: list[int], model: PreTrainedModel) -> None:
    check(grid, tokens, model)
