"""llama.cpp through the low-level interface of llama-cpp-python: real parallel sequences, no sampling chain.

The high-level `Llama` class runs one sequence at a time and samples in Python; llama.cpp itself can do better, and
that is what is measured. The greatest logit is found with numpy, which costs 5 us a token.
"""

from __future__ import annotations

import importlib.metadata
import time

import llama_cpp as llama
import numpy as np
import numpy.typing as npt
from protocol import KV_TOKENS, LONGEST, Job, Streamed, run

LONGEST_BATCH = 8192
"""Tokens handed over at once; llama.cpp cuts them into micro-batches of its default size, 512."""

FLASH_ATTENTION = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
"""One run each with a bfloat16 KV: prefill of 4096 at 627 tokens a second without it and 188 with it, decode after 7000
at 31 and 23. Other work may have slowed the runs with it down; to be measured again on a quiet machine."""

BF16 = 30
"""`GGML_TYPE_BF16`, which llama-cpp-python has no name for."""


class LlamaCpp:
    """One context at a time, made for one sequence or for many, since its KV is cut evenly over its sequences."""

    def __init__(self, job: Job) -> None:
        llama.llama_backend_init()
        self._threads = job.threads
        self._model = llama.llama_model_load_from_file(job.model.encode(), llama.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {job.model}.")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(LONGEST_BATCH, 0, 1)
        self._sequences = 0
        self._context: llama.llama_context_p | None = None

    def stream(self, prompt: list[int], new: int) -> Streamed:
        self._open(1)
        tokens: list[int] = []
        times: list[float] = []
        self._prefill([prompt])
        while len(tokens) < new:
            tokens += self._greatest(1)
            times.append(time.perf_counter())
            if len(tokens) < new:
                self._step(tokens[-1:], len(prompt) + len(tokens) - 1)
        return Streamed(tokens, times)

    def batch(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        self._open(len(prompts))
        self._prefill(prompts)
        rounds = [self._greatest(len(prompts))]
        while len(rounds) < new:
            self._step(rounds[-1], len(prompts[0]) + len(rounds) - 1)
            rounds.append(self._greatest(len(prompts)))
        return [list(tokens) for tokens in zip(*rounds)]

    def versions(self) -> dict[str, str]:
        return {
            "llama-cpp-python": importlib.metadata.version("llama-cpp-python"),
            "system": llama.llama_print_system_info().decode(),
        }

    def close(self) -> None:
        pass

    def _open(self, sequences: int) -> None:
        """An empty context for this many sequences."""
        if self._sequences != sequences:
            if self._context is not None:
                llama.llama_free(self._context)
            self._context = llama.llama_init_from_model(self._model, self._parameters(sequences))
            if not self._context:
                raise SystemExit("llama.cpp cannot make a context.")
            self._sequences = sequences
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def _parameters(self, sequences: int) -> llama.llama_context_params:
        found = llama.llama_context_default_params()
        found.n_ctx = LONGEST if sequences == 1 else KV_TOKENS
        found.n_batch = LONGEST_BATCH
        found.n_seq_max = sequences
        found.n_threads = found.n_threads_batch = self._threads
        found.type_k = found.type_v = BF16
        found.flash_attn_type = FLASH_ATTENTION
        found.no_perf = True
        return found

    def _prefill(self, prompts: list[list[int]]) -> None:
        """Every prompt, with logits of its last token only, those in the order of the prompts."""
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                self._add(token, position, sequence, position == len(prompt) - 1)
        self._decode()

    def _step(self, tokens: list[int], position: int) -> None:
        """One token of each sequence."""
        for sequence, token in enumerate(tokens):
            self._add(token, position, sequence, True)
        self._decode()

    def _add(self, token: int, position: int, sequence: int, wanted: bool) -> None:
        at = self._batch.n_tokens
        self._batch.token[at] = token
        self._batch.pos[at] = position
        self._batch.n_seq_id[at] = 1
        self._batch.seq_id[at][0] = sequence
        self._batch.logits[at] = wanted
        self._batch.n_tokens = at + 1

    def _decode(self) -> None:
        status = llama.llama_decode(self._context, self._batch)
        self._batch.n_tokens = 0
        if status:
            raise SystemExit(f"llama_decode returned {status}.")

    def _greatest(self, count: int) -> list[int]:
        """The most likely token of each row of logits; rows lie one after another."""
        first = llama.llama_get_logits(self._context)
        shape = (count, self._vocabulary)
        logits: npt.NDArray[np.float32] = np.ctypeslib.as_array(first, shape)
        return [int(token) for token in logits.argmax(axis=1)]


if __name__ == "__main__":
    run(LlamaCpp)
