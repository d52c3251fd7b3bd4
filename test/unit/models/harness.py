"""Tiny random checkpoints written by transformers, and dcprt's logits on them over any grid."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dcprt.comm.groups import Groups
from dcprt.config import Config
from dcprt.kv.pool import KVPool
from dcprt.messages import TokensOut
from dcprt.models.base import Model, StepInput
from dcprt.params import SamplingParams
from dcprt.planner.deployment import Deployment
from dcprt.runtime.prepare import prepare
from dcprt.scheduler.core import Core
from dcprt.scheduler.request import Request
from dcprt.scheduler.scheduler import Limits, Scheduler
from dcprt.scheduler.store import KVStore
from dcprt.worker.local import LocalExecutor


def write_llama(directory: Path, **changes: Any) -> LlamaForCausalLM:
    """A checkpoint of odd sizes; weights are large enough that every part of the model matters."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 131,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(directory)
    return model


class Recorder:
    """A model that keeps the logits it returns."""

    def __init__(self, model: Model) -> None:
        self.spec = model.spec
        self.kept: list[Tensor] = []
        self._model = model

    def forward(self, step: StepInput, kv: KVPool) -> Tensor:
        return self._model.forward(step, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.logits(hidden)
        self.kept.append(logits.clone())
        return logits


class Harness:
    """dcprt in this process: scheduler, cache and all ranks; one request at a time."""

    def __init__(
        self, directory: Path, *, ahead: int = 0, groups: Sequence[Groups] | None = None, **options: Any
    ) -> None:
        config = Config.of(model=str(directory), **{"dtype": "float32", "kv_cache_tokens": 4096, **options})
        self.deployment: Deployment = prepare(config, lambda _: None)
        self._executor = LocalExecutor(self.deployment, groups)
        self._recorder = Recorder(self._executor.workers[0]._model)
        self._executor.workers[0]._model = self._recorder
        limits = Limits(self.deployment.context_len, self.deployment.capacity_tokens, self.deployment.spec.vocab_size)
        store = KVStore(self.deployment.layout, self.deployment.num_pages)
        self.scheduler = Scheduler(store, config.schedule, limits)
        self._core = Core(self.scheduler, self._executor, ahead)

    def greedy(self, prompt: Sequence[int], count: int, namespace: str = "") -> tuple[Request, Tensor]:
        """The finished request, and the float32 logits [count, vocab] its tokens were chosen from."""
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        self._recorder.kept.clear()
        [request], _ = self.run([(prompt, sampling)], namespace)
        return request, torch.cat(self._recorder.kept)

    def run(
        self, asked: Sequence[tuple[Sequence[int], SamplingParams]], namespace: str = ""
    ) -> tuple[list[Request], list[list[TokensOut]]]:
        """All requests at once, up to their ends; and what each client got."""
        requests = []
        for number, (prompt, params) in enumerate(asked):
            count = self.scheduler.limits.output_room(len(prompt), params.max_tokens)
            seed = params.seed or 0
            requests.append(Request(f"r{number}", array("i", prompt), len(prompt), count, params, seed, namespace))
            self.scheduler.add(requests[-1])
        outputs: dict[str, list[TokensOut]] = {request.rid: [] for request in requests}
        while not self._core.idle:
            for output in self._core.step():
                assert isinstance(output, TokensOut), output
                outputs[output.rid].append(output)
            self.scheduler.check()
        return requests, list(outputs.values())

    def close(self) -> None:
        self._executor.close()

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest logit: the measure of DESIGN's tolerance, 1e-5."""
    return float((found - expected).abs().max() / expected.abs().max())
