"""How much KV fits, and what the grid costs: everything a user should know before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from dcprt.config import Config, parse_bytes
from dcprt.errors import ConfigError
from dcprt.ids import Rank
from dcprt.kv.layout import Layout
from dcprt.parallel.grid import Grid
from dcprt.planner import host
from dcprt.spec import ModelSpec

ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Capacity:
    """KV cache of one server. `num_pages` includes page 0; bytes are per rank, over all layers."""

    num_pages: int
    layout: Layout
    page_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens of whole requests over all ranks."""
        return (self.num_pages - 1) * self.layout.span_tokens

    @property
    def bytes_per_token(self) -> float:
        return self.page_bytes / self.layout.span_tokens

    @property
    def bytes_per_rank(self) -> int:
        return self.num_pages * self.page_bytes


def page_bytes(spec: ModelSpec, grid: Grid, layout: Layout, dtype: str) -> int:
    """Bytes of one page on one rank, over all layers."""
    kv_heads = len(grid.heads(Rank(0), spec.num_heads, spec.cached_heads).kv_heads)
    return layout.page_size * kv_heads * spec.kv_elements_per_head * spec.num_layers * ITEMSIZE[dtype]


def resolve_dtype(config: Config) -> str:
    """`--dtype`; auto is bfloat16, but for what would be slow: torch on a CPU that does not multiply it."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "bfloat16" if host.has_kernels() or host.multiplies_bfloat16() else "float32"


def context_len(config: Config, spec: ModelSpec) -> int:
    """`--context-length`, or the model's own.

    Raises:
        ConfigError: longer than the positions the model was made for.
    """
    asked = config.model.context_length
    if asked is not None and asked > spec.max_position:
        raise ConfigError(f"--context-length {asked} is more than the model's {spec.max_position} positions.")
    return asked if asked is not None else spec.max_position


def plan_capacity(config: Config, spec: ModelSpec) -> Capacity:
    """Pages for `--kv-cache-tokens`, `--kv-cache-memory` or the default (see its help).

    Raises:
        ConfigError: less than one page; says how much one takes.
    """
    grid = Grid(config.grid.ranks, config.grid.dcp)
    layout = Layout(config.kv.page_size, config.grid.dcp, config.grid.dcp_interleave)
    size = page_bytes(spec, grid, layout, resolve_dtype(config))
    if config.kv.kv_cache_tokens is not None:
        pages = config.kv.kv_cache_tokens // layout.span_tokens
    elif config.kv.kv_cache_memory is not None:
        pages = parse_bytes(config.kv.kv_cache_memory) // size - 1
    else:
        wanted = config.schedule.max_running_requests * layout.pages_for(context_len(config, spec))
        pages = min(host.available_memory() // 4 // grid.tp // size - 1, wanted)
    if pages < 1:
        raise ConfigError(
            f"The KV cache has no room for a single page: one covers {layout.span_tokens} tokens "
            f"(page size {layout.page_size} x dcp {layout.dcp}) and takes {size} bytes on each of {grid.tp} ranks, "
            f"page 0 as much. Give at least --kv-cache-tokens {layout.span_tokens}, "
            f"or --kv-cache-memory {2 * size}."
        )
    return Capacity(pages + 1, layout, size)
