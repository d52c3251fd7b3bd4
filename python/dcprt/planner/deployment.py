"""Everything decided before the first process starts; handed to every process as it is."""

from __future__ import annotations

from dataclasses import dataclass

from dcprt.config import Config
from dcprt.kv.layout import Layout
from dcprt.parallel.grid import Grid
from dcprt.spec import ModelSpec


@dataclass(frozen=True)
class Deployment:
    """One server or engine: the user's choices, the checkpoint's shape, and what follows from both.

    `directory` holds config.json, weights and tokenizer. `num_pages` includes page 0. `threads` are those of one
    worker. `comm` names the collective backend. `chat_template` replaces the model's own.
    """

    config: Config
    model_name: str
    directory: str
    spec: ModelSpec
    dtype: str
    context_len: int
    layout: Layout
    num_pages: int
    comm: str
    threads: int
    chat_template: str | None = None

    @property
    def grid(self) -> Grid:
        return Grid(self.config.grid.ranks, self.config.grid.dcp)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of whole requests over all ranks."""
        return (self.num_pages - 1) * self.layout.span_tokens
