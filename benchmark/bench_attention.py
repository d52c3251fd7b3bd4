"""Attention backends side by side: microseconds a call, and bytes of KV read a second.

    python benchmark/bench_attention.py --threads 2
    DCPRT_KERNEL_ISA=avx2 python benchmark/bench_attention.py --dtype float32 --contexts 7000 --prefill 4096

Every layer of a model has a pool of its own, so pools are visited in turn, as many as do not fit into the caches; a
backend is measured in several rounds, the backends taking turns, and the best round counts. `ratio` is native to torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dcprt.attention.backend import AttentionBackend
from dcprt.attention.plan import AttentionPlan, RowSlice
from dcprt.attention.registry import available, make_backend

PAGE_SIZE = 16
POOL_BYTES = 256 << 20
MOST_POOLS = 32


@dataclass(frozen=True)
class Shape:
    """Heads of a model."""

    name: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    def pools(self, pages: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of as many layers as make a step read from memory."""
        row = self.kv_heads * (self.key_dim + (0 if self.latent else self.value_dim)) * dtype.itemsize
        count = min(max(POOL_BYTES // (row * pages * PAGE_SIZE), 1), MOST_POOLS)
        return [self._pool(pages, dtype) for _ in range(count)]

    def _pool(self, pages: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k = torch.randn(pages, PAGE_SIZE, self.kv_heads, self.key_dim).to(dtype)
        if self.latent:
            return k, k[..., : self.value_dim]
        return k, torch.randn(pages, PAGE_SIZE, self.kv_heads, self.value_dim).to(dtype)

    def bytes_of(self, tokens: int, dtype: torch.dtype) -> int:
        dims = self.key_dim + (0 if self.latent else self.value_dim)
        return tokens * self.kv_heads * dims * dtype.itemsize


SHAPES = [
    Shape("smollm2 9q/3kv/64", 9, 3, 64, 64),
    Shape("one head 4q/1kv/128", 4, 1, 128, 128),
    Shape("mla 16q/1kv/576", 16, 1, 576, 512, latent=True),
]


def best_of(calls: dict[str, Callable[[int], object]], rounds: int, seconds: float) -> dict[str, float]:
    """Seconds of one call each, the best of `rounds`; a call is given its number."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            count, start = 0, time.perf_counter()
            while count < 3 or time.perf_counter() - start < seconds:
                call(count)
                count += 1
            best[name] = min(best[name], (time.perf_counter() - start) / count)
    return best


def decode(shape: Shape, context: int, batch: int, dtype: torch.dtype, args: argparse.Namespace) -> None:
    """One token a row over its context."""
    used = -(-context // PAGE_SIZE)
    pools = shape.pools(used * batch, dtype)
    order = torch.randperm(used * batch).view(batch, used)
    rows = tuple(RowSlice(i, i + 1, context, context, order[i]) for i in range(batch))
    q = torch.randn(batch, shape.heads, shape.key_dim).to(dtype)

    def call_of(backend: AttentionBackend) -> Callable[[int], object]:
        return lambda i: backend.context(q, *pools[i % len(pools)], rows, shape.key_dim**-0.5)

    calls = {name: call_of(make_backend(name)) for name in args.backends}
    report(shape, f"context {context} x {batch}", best_of(calls, args.rounds, args.seconds), args,
           shape.bytes_of(context * batch, dtype))  # fmt: skip


def prefill(shape: Shape, tokens: int, dtype: torch.dtype, args: argparse.Namespace) -> None:
    """New tokens of one row among themselves."""
    q = torch.randn(tokens, shape.heads, shape.key_dim).to(dtype)
    k = torch.randn(tokens, shape.kv_heads, shape.key_dim).to(dtype)
    v = torch.randn(tokens, shape.kv_heads, shape.value_dim).to(dtype)
    none = torch.zeros(0, dtype=torch.int64)
    plan = AttentionPlan((RowSlice(0, tokens, 0, 0, none),), none, none)
    q_to_kv = [h * shape.kv_heads // shape.heads for h in range(shape.heads)]

    def call_of(backend: AttentionBackend) -> Callable[[int], object]:
        return lambda _: backend.new_tokens(q, k, v, q_to_kv, plan, shape.key_dim**-0.5)

    calls = {name: call_of(make_backend(name)) for name in args.backends}
    found = best_of(calls, args.rounds, args.seconds)
    work = tokens * (tokens + 1) * shape.heads * (shape.key_dim + shape.value_dim)
    report(shape, f"prefill {tokens}", found, args, work, unit="GFLOP/s")


def report(
    shape: Shape, what: str, seconds: dict[str, float], args: argparse.Namespace, amount: int, unit: str = "GB/s"
) -> None:
    cells = [f"{name} {t * 1e6:10.1f} us {amount / t / 1e9:7.1f} {unit}" for name, t in seconds.items()]
    ratio = f"ratio {seconds['torch'] / seconds['native']:6.1f}" if len(seconds) == 2 else ""
    print(f"{shape.name:20} {args.dtype:8} {what:18} {'   '.join(cells)}   {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 1024, 7000])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument(
        "--prefill", type=int, nargs="*", default=[], help="also new tokens of one row, of these lengths"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--backends", nargs="*", default=available())
    parser.add_argument("--shapes", nargs="*", default=[], help="parts of the names of shapes; default all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.1, help="of one backend in one round")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    with torch.inference_mode():
        for shape in [s for s in SHAPES if not args.shapes or any(part in s.name for part in args.shapes)]:
            for batch in args.batches:
                for context in args.contexts:
                    decode(shape, context, batch, dtype, args)
            for tokens in args.prefill:
                prefill(shape, tokens, dtype, args)


if __name__ == "__main__":
    main()
