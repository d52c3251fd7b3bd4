"""transformers through `generate`, with the attention of torch (sdpa)."""

from __future__ import annotations

import time

import torch
import transformers
from protocol import Job, Streamed, run
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when each new token comes; the prompt comes first and is not counted."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        del value
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        pass


class Transformers:
    """One model; every call has a cache of its own."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            job.model, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        ).eval()

    def stream(self, prompt: list[int], new: int) -> Streamed:
        clock = Clock()
        return Streamed(self._generate([prompt], new, clock)[0], clock.times)

    def batch(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        return self._generate(prompts, new, None)

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def close(self) -> None:
        pass

    def _generate(self, prompts: list[list[int]], new: int, clock: Clock | None) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                streamer=clock,
            )
        return [row.tolist() for row in found[:, ids.shape[1] :]]


if __name__ == "__main__":
    run(Transformers)
