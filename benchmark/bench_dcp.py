"""What DCP brings: tokens a second of decoding with dcp=4 against dcp=1, both at tp=4, through real processes.

    python benchmark/bench_dcp.py --json dcp.json
    python benchmark/bench_dcp.py --shapes "4q/1kv" --context 4096 --steps 16

Random checkpoints of one KV head, written to a temporary folder, and prompts of random token ids, all different, so
that every request has pages of its own. With dcp=1 each of the 4 ranks keeps all KV and reads all of it in every step,
with dcp=4 a quarter. Only decoding counts: from the moment when all requests have their first token to the last token
of the one that ends first. `KV GB/s` is what all ranks read of KV in that time. The read bandwidth of the machine is
measured before and after each configuration, since what a shared machine gives changes within minutes, and the better
of the two counts for it; a ratio counts if the dcp=1 run reaches 70% of its own. Most of the time goes into the
prompts, which are computed in full.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dcprt import Engine, SamplingParams
from dcprt.planner import host
from systems.machine import read_bandwidth

HIDDEN, WIDTH, VOCAB, HEAD_DIM = 512, 1536, 512, 128
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
ENOUGH = 0.7
"""Part of the read bandwidth that dcp=1 has to reach, or else something other than memory was measured."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "max_position_embeddings": 1 << 17,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


@dataclass(frozen=True)
class Shape:
    """A model with one KV head; `target` is the least ratio that is asked for."""

    name: str
    heads: int
    layers: int
    latent: bool = False
    target: float | None = None

    def config(self) -> dict[str, Any]:
        """config.json."""
        shared = {**COMMON, "num_hidden_layers": self.layers, "num_attention_heads": self.heads}
        if not self.latent:
            kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
            return {**shared, **kind, "num_key_value_heads": 1, "head_dim": HEAD_DIM}
        return {
            **shared,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": NOPE,
            "v_head_dim": VALUE,
            "first_k_dense_replace": self.layers,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        }

    def matrices(self) -> dict[str, tuple[int, int]]:
        """[out, in] of the products of a layer."""
        products = {
            "mlp.gate_proj": (WIDTH, HIDDEN),
            "mlp.up_proj": (WIDTH, HIDDEN),
            "mlp.down_proj": (HIDDEN, WIDTH),
        }
        if self.latent:
            return {
                **products,
                "self_attn.q_proj": (self.heads * (NOPE + ROPE), HIDDEN),
                "self_attn.kv_a_proj_with_mqa": (LATENT + ROPE, HIDDEN),
                "self_attn.kv_b_proj": (self.heads * (NOPE + VALUE), LATENT),
                "self_attn.o_proj": (HIDDEN, self.heads * VALUE),
            }
        return {
            **products,
            "self_attn.q_proj": (self.heads * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, self.heads * HEAD_DIM),
        }

    def write(self, directory: Path) -> Path:
        """A checkpoint of random weights; products keep the size of what goes in."""
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(self.config()))
        generator = torch.Generator().manual_seed(0)

        def matrix(rows: int, cols: int) -> torch.Tensor:
            return (torch.randn(rows, cols, generator=generator) * cols**-0.5).bfloat16()

        norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
        if self.latent:
            norms["self_attn.kv_a_layernorm"] = LATENT
        tensors = {
            "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
            "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
        }
        for i in range(self.layers):
            name = f"model.layers.{i}"
            tensors |= {f"{name}.{key}.weight": matrix(*sizes) for key, sizes in self.matrices().items()}
            tensors |= {f"{name}.{key}.weight": torch.ones(size).bfloat16() for key, size in norms.items()}
        save_file(tensors, directory / "model.safetensors")
        return directory


SHAPES = [
    Shape("4q/1kv/128", 4, 8, target=2.0),
    Shape("8q/1kv/128", 8, 8),
    Shape("mla 4q/576", 4, 2, latent=True),
]


@dataclass
class Measured:
    """One configuration. `read_gbs` is the machine's read bandwidth in GB/s, the others are of the decoding."""

    shape: str
    dcp: int
    prefill_s: float = 0.0
    steps: float = 0.0
    step_ms: float = 0.0
    tokens_per_s: float = 0.0
    kv_gbs: float = 0.0
    read_gbs: float = 0.0

    @property
    def of_read(self) -> float:
        return self.kv_gbs / self.read_gbs


async def decode(engine: Engine, options: argparse.Namespace) -> list[list[float]]:
    """When the tokens of each request came, in seconds of the clock; ends when one of them has all its tokens."""
    chosen = random.Random(0)
    prompts = [[chosen.randrange(1, VOCAB) for _ in range(options.context)] for _ in range(options.requests)]
    chunks = -(-options.context // options.chunk)
    params = SamplingParams(temperature=0, max_tokens=options.requests * chunks + options.steps, ignore_eos=True)
    times: list[list[float]] = [[] for _ in prompts]

    async def read(number: int) -> None:
        async for piece in engine.async_stream(prompts[number], params):
            times[number] += [time.perf_counter()] * len(piece.token_ids)

    tasks = [asyncio.create_task(read(number)) for number in range(len(prompts))]
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for task in done:
        task.result()
    assert all(times), "a request ended before all were decoding"
    return times


def evaluate(times: list[list[float]], options: argparse.Namespace, token_bytes: float) -> dict[str, float]:
    """Rates of the time in which all requests decoded. `token_bytes`: KV of a token on all ranks together."""
    begin, end = max(found[0] for found in times), min(found[-1] for found in times)
    tokens, contexts = 0, 0
    for found in times:
        inside = [index for index, at in enumerate(found) if begin < at <= end]
        tokens += len(inside)
        contexts += sum(options.context + index - 1 for index in inside)
    seconds, steps = end - begin, tokens / len(times)
    return {
        "steps": steps,
        "step_ms": seconds / steps * 1e3,
        "tokens_per_s": tokens / seconds,
        "kv_gbs": contexts * token_bytes / seconds / 1e9,
    }


def profile_path(shape: Shape, dcp: int, options: argparse.Namespace) -> str | None:
    """Where the trace of a configuration goes."""
    if options.profile is None:
        return None
    name = f"{shape.name}-dcp{dcp}.json".replace("/", "-").replace(" ", "-")
    return str(options.profile / name)


def measure(shape: Shape, dcp: int, directory: Path, options: argparse.Namespace) -> Measured:
    """One configuration, in processes of its own."""
    read = read_bandwidth(options.read_seconds)
    tokens = options.context + -(-options.context // options.chunk) * options.requests + options.steps
    with Engine(
        model=str(directory),
        tp=options.tp,
        dcp=dcp,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        chunked_prefill_size=options.chunk,
        max_running_requests=options.requests,
        kv_cache_tokens=options.requests * -(-tokens // 512) * 512,
        page_size=options.page_size,
        profile_steps=profile_path(shape, dcp, options),
    ) as engine:
        token_bytes = engine.server_info()["kv_bytes_per_token_and_rank"] * options.tp
        start = time.perf_counter()
        times = asyncio.run(decode(engine, options))
    read = max(read, read_bandwidth(options.read_seconds))
    found = Measured(shape.name, dcp, read_gbs=read, **evaluate(times, options, token_bytes))
    found.prefill_s = max(times[i][0] for i in range(len(times))) - start
    return found


def table(found: list[Measured]) -> str:
    """Markdown."""
    lines = [
        "| shape | dcp | ms a step | tokens/s | KV GB/s | read GB/s before or after | KV of it | against dcp 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        base = next((x for x in found if x.shape == one.shape and x.dcp == 1), None)
        ratio = "" if base is None or base is one else f"{one.tokens_per_s / base.tokens_per_s:.2f}x"
        if ratio and base is not None and base.of_read < ENOUGH:
            ratio += f" (does not count: dcp 1 below {ENOUGH:.0%})"
        lines.append(
            f"| {one.shape} | {one.dcp} | {one.step_ms:.1f} | {one.tokens_per_s:.1f} | {one.kv_gbs:.1f} "
            f"| {one.read_gbs:.1f} | {one.of_read:.0%} | {ratio} |"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--shapes", nargs="*", default=[], help="parts of the names of shapes; default all")
    out.add_argument("--dcp", type=int, nargs="+", default=[1, 4])
    out.add_argument("--tp", type=int, default=4)
    out.add_argument("--context", type=int, default=16384, help="tokens of a prompt")
    out.add_argument("--requests", type=int, default=16)
    out.add_argument("--steps", type=int, default=64, help="least steps in which all requests decode")
    out.add_argument("--page-size", type=int, default=64, help="in smaller pages memory is read less fast")
    out.add_argument("--chunk", type=int, default=2048, help="prompt tokens of a step")
    out.add_argument("--read-seconds", type=float, default=2.0, help="of each of two measurements of the bandwidth")
    out.add_argument("--profile", type=Path, help="folder that gets a trace of the last steps of each configuration")
    out.add_argument("--json", type=Path, help="also write all figures to this file")
    return out


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(host.cores())
    before = os.getloadavg()[0]
    found: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="bench-dcp-") as folder:
        for shape in [s for s in SHAPES if not options.shapes or any(part in s.name for part in options.shapes)]:
            directory = shape.write(Path(folder) / shape.name.replace("/", "-"))
            for dcp in options.dcp:
                found.append(measure(shape, dcp, directory, options))
                print(json.dumps(dataclasses.asdict(found[-1])), flush=True)
    print(f"\n{datetime.date.today()}, {host.cores()} cores, load average before the run {before:.1f}\n")
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
