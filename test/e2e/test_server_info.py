"""`/server_info` on four ranks."""

from __future__ import annotations

from .server import MODEL, Server
from .stream import open_stream


def test_the_grid_and_the_bytes(server: Server) -> None:
    info = server.info()
    assert (info["model"], info["tp"], info["dcp"], info["dcp_interleave"]) == (MODEL, 4, 4, 1)
    assert (info["page_size"], info["span_tokens"], info["kv_capacity_tokens"]) == (16, 64, 16384)
    assert info["kv_bytes_per_token_and_rank"] == 3 * 64 * 2 * 30 * 4 / 4
    assert info["context_len"] == 8192


def test_tokens_are_spread_evenly_over_four_ranks(server: Server) -> None:
    sampling = {"max_new_tokens": 500, "ignore_eos": True}
    body = {"input_ids": [[500] * 301, [600] * 75], "rid": ["long", "short"], "sampling_params": sampling}
    with open_stream(server, "/generate", body) as stream:
        seen: set[str] = set()
        while len(seen) < 2:
            event = next(stream)
            assert event
            seen.add(event["meta_info"]["id"])
        for _ in range(5):
            info = server.info()
            assert {request["rid"] for request in info["running"]} == {"long", "short"}
            for request in info["running"]:
                spread = request["tokens_per_dcp_rank"]
                assert len(spread) == 4
                assert sum(spread) == request["computed_tokens"] >= request["prompt_tokens"]
                assert max(spread) - min(spread) <= info["dcp_interleave"]
            ranks = info["ranks"]
            assert [rank["rank"] for rank in ranks] == [rank["dcp_rank"] for rank in ranks] == [0, 1, 2, 3]
            for i, rank in enumerate(ranks):
                assert rank["tokens"] == sum(r["tokens_per_dcp_rank"][i] for r in info["running"])
            assert info["pages"]["in_use"] >= 301 // 64 + 75 // 64 + 2
            next(stream)
    idle = server.settle()
    assert [rank["tokens"] for rank in idle["ranks"]] == [0] * 4
    assert idle["pages"]["in_use"] == 0
