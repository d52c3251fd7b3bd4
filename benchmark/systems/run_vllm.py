"""vLLM through `LLM` and its engine, compiled, token ids in and out."""

from __future__ import annotations

import os
import time

import torch
import vllm
from protocol import LONGEST, Job, Streamed, run
from vllm import LLM, SamplingParams, TokensPrompt

STEP_TOKENS = 8192
"""Most tokens of one step: each prompt is computed whole, and the 32 of workload b together."""

KV_BYTES = 1 << 29
"""22,000 tokens; the workloads need 12,288. vLLM takes all of it at once."""


class Vllm:
    """Whole prompts in one step, and no reuse of KV."""

    def __init__(self, job: Job) -> None:
        self._llm = LLM(
            model=job.model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=LONGEST + 8,
            max_num_seqs=32,
            max_num_batched_tokens=STEP_TOKENS,
            kv_cache_memory_bytes=KV_BYTES,
            disable_log_stats=True,
        )

    def stream(self, prompt: list[int], new: int) -> Streamed:
        engine = self._llm.llm_engine
        engine.add_request(str(time.monotonic_ns()), TokensPrompt(prompt_token_ids=prompt), _greedy(new))
        tokens: list[int] = []
        times: list[float] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                fresh = output.outputs[0].token_ids[len(tokens) :]
                tokens += fresh
                times += [time.perf_counter()] * len(fresh)
        return Streamed(tokens, times)

    def batch(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        wanted = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self._llm.generate(wanted, _greedy(new), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def versions(self) -> dict[str, str]:
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "preloaded": os.environ.get("LD_PRELOAD", ""),
        }

    def close(self) -> None:
        pass


def _greedy(new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    run(Vllm)
