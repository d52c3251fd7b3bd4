"""torch belongs to the workers alone."""

from __future__ import annotations

from .processes import has_torch
from .server import Server


def test_only_workers_load_torch(server: Server) -> None:
    server.generate("Hello", max_new_tokens=1)
    for kind, count in (("parent", 1), ("tokenizer", 1), ("scheduler", 1)):
        pids = server.pids(kind)
        assert len(pids) == count
        assert not any(map(has_torch, pids)), kind
    workers = server.pids("rank")
    assert len(workers) == 4
    assert all(map(has_torch, workers))
