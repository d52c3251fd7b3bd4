"""dcprt through its offline Engine, token ids in and out."""

from __future__ import annotations

import importlib.metadata
import time
from itertools import repeat

from protocol import KV_TOKENS, Job, Streamed, run

from dcprt import Engine, SamplingParams


class Dcprt:
    """Defaults, but for the type, a KV cache of just the size the workloads need, and no reuse of KV."""

    def __init__(self, job: Job) -> None:
        self._engine = Engine(
            model=job.model,
            tp=1,
            dtype="bfloat16",
            kv_cache_tokens=KV_TOKENS + 1024,
            disable_radix_cache=True,
            skip_tokenizer_init=True,
        )

    def stream(self, prompt: list[int], new: int) -> Streamed:
        tokens: list[int] = []
        times: list[float] = []
        for piece in self._engine.stream(prompt, _greedy(new)):
            tokens += piece.token_ids
            times += repeat(time.perf_counter(), len(piece.token_ids))
        return Streamed(tokens, times)

    def batch(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        return [output.token_ids for output in self._engine.generate(prompts, _greedy(new), progress=False)]

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("dcprt", "dcprt-kernel", "torch")}

    def close(self) -> None:
        self._engine.close()


def _greedy(new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)


if __name__ == "__main__":
    run(Dcprt)
