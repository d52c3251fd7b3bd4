"""How much KV fits: bytes per token by the formula, rounding to spans, and what start-up says of the grid."""

from __future__ import annotations

import pytest

from dcprt.config import Config
from dcprt.errors import ConfigError
from dcprt.kv.layout import Layout
from dcprt.parallel.grid import Grid
from dcprt.planner import capacity, host
from dcprt.planner.capacity import context_len, plan_capacity, resolve_dtype
from dcprt.planner.grid_report import describe_grid
from dcprt.spec import ModelSpec

SMOLLM2 = ModelSpec("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64, 8192)
ONE_KV_HEAD = ModelSpec("LlamaForCausalLM", 128, 64, 96, 2, 4, 1, 16, 4096)


def config(**options: object) -> Config:
    return Config.of(dtype="bfloat16", **options)


@pytest.mark.parametrize(
    ("tp", "dcp", "size"),
    [(1, 1, 23_040), (4, 4, 5_760), (4, 2, 7_680), (4, 1, 7_680), (8, 8, 2_880), (3, 1, 7_680), (6, 3, 5_120)],
)
def test_smollm2_bytes_per_token_and_rank(tp: int, dcp: int, size: int) -> None:
    planned = plan_capacity(config(tp=tp, dcp=dcp, kv_cache_tokens=4096), SMOLLM2)
    assert planned.bytes_per_token == size
    assert planned.page_bytes == size * 16 * dcp
    assert planned.bytes_per_rank == planned.num_pages * planned.page_bytes


def test_float32_takes_twice_the_bytes() -> None:
    options = Config.of(dtype="float32", dcp=4, kv_cache_tokens=4096)
    assert plan_capacity(options, SMOLLM2).bytes_per_token == 2 * 5_760


def test_one_kv_head_takes_a_quarter_and_serves_four_times_the_tokens() -> None:
    one = plan_capacity(config(tp=4, dcp=1, kv_cache_memory="8MiB"), ONE_KV_HEAD)
    four = plan_capacity(config(tp=4, dcp=4, kv_cache_memory="8MiB"), ONE_KV_HEAD)
    assert four.bytes_per_token * 4 == one.bytes_per_token
    assert four.tokens == 4 * one.tokens
    assert four.bytes_per_rank == one.bytes_per_rank <= 8 << 20


@pytest.mark.parametrize(
    ("asked", "dcp", "page_size", "tokens"),
    [(8192, 4, 16, 8192), (8191, 4, 16, 8128), (64, 4, 16, 64), (127, 4, 16, 64), (100, 1, 1, 100), (100, 3, 7, 84)],
)
def test_k7_tokens_are_of_whole_requests_and_rounded_down_to_spans(
    asked: int, dcp: int, page_size: int, tokens: int
) -> None:
    planned = plan_capacity(config(dcp=dcp, page_size=page_size, kv_cache_tokens=asked), SMOLLM2)
    assert planned.tokens == tokens
    assert planned.num_pages == tokens // (dcp * page_size) + 1


def test_memory_includes_page_0_and_is_never_exceeded() -> None:
    size = plan_capacity(config(dcp=4, kv_cache_tokens=64), SMOLLM2).page_bytes
    for extra, pages in [(0, 2), (size - 1, 2), (size, 3)]:
        planned = plan_capacity(config(dcp=4, kv_cache_memory=str(2 * size + extra)), SMOLLM2)
        assert planned.num_pages == pages
        assert planned.bytes_per_rank <= 2 * size + extra


@pytest.mark.parametrize("option", [{"kv_cache_tokens": 63}, {"kv_cache_memory": "700KiB"}])
def test_no_room_for_a_page_is_refused_with_what_one_takes(option: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_capacity(config(dcp=4, **option), SMOLLM2)
    text = str(caught.value)
    for part in ["64 tokens", "368640 bytes", "4 ranks", "--kv-cache-tokens 64", "--kv-cache-memory 737280"]:
        assert part in text
    plan_capacity(config(dcp=4, kv_cache_tokens=64), SMOLLM2)
    plan_capacity(config(dcp=4, kv_cache_memory="737280"), SMOLLM2)


def test_the_default_is_a_quarter_of_the_memory_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 4 << 30)
    planned = plan_capacity(config(dcp=4), SMOLLM2)
    assert planned.bytes_per_rank * 4 <= 1 << 30 < (planned.bytes_per_rank + planned.page_bytes) * 4


def test_the_default_is_no_more_than_the_running_requests_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 40)
    planned = plan_capacity(config(dcp=4, max_running_requests=3, context_length=1000), SMOLLM2)
    assert planned.tokens == 3 * 1024
    assert plan_capacity(config(dcp=4), SMOLLM2).tokens == 64 * 8192


def test_no_memory_at_all_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 0)
    with pytest.raises(ConfigError, match="no room for a single page"):
        plan_capacity(config(), SMOLLM2)


def test_context_length() -> None:
    assert context_len(config(), SMOLLM2) == 8192
    assert context_len(config(context_length=100), SMOLLM2) == 100
    assert context_len(config(context_length=8192), SMOLLM2) == 8192
    with pytest.raises(ConfigError, match=r"--context-length 8193 .* 8192"):
        context_len(config(context_length=8193), SMOLLM2)


def test_auto_dtype_is_bfloat16_unless_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, kernels, dtype in [
        ({"avx512_bf16"}, False, "bfloat16"),
        ({"amx_bf16"}, False, "bfloat16"),
        ({"avx512f", "avx2"}, False, "float32"),
        (set(), False, "float32"),
        ({"avx512f", "avx2"}, True, "bfloat16"),
        (set(), True, "bfloat16"),
    ]:
        monkeypatch.setattr(host, "cpu_flags", lambda flags=flags: frozenset(flags))
        monkeypatch.setattr(host, "has_kernels", lambda kernels=kernels: kernels)
        assert resolve_dtype(Config.of()) == dtype
        assert resolve_dtype(Config.of(dtype="float32")) == "float32"
        assert resolve_dtype(Config.of(dtype="bfloat16")) == "bfloat16"


def describe(tp: int, dcp: int, spec: ModelSpec = SMOLLM2) -> str:
    return "\n".join(describe_grid(spec, Grid(tp, dcp), Layout(16, dcp), "bfloat16"))


def test_start_up_names_the_grid_and_its_bytes() -> None:
    text = describe(4, 4)
    for part in ["tp 4", "dcp 4", "1 head shard", "3 KV head", "span is 64 tokens", "5,760 bytes"]:
        assert part in text


def test_start_up_names_padding_in_bytes() -> None:
    query_places = 3 * 64 * 576 * 30 * 2 * 2
    assert f"3 query head places are zero, {query_places:,} bytes" in describe(4, 4)
    kv_places = 64 * 2 * 30 * 2
    assert f"1 of 4 KV head places are zero, {kv_places:,} bytes" in describe(4, 2)
    assert "padding" not in describe(1, 1)
    assert "padding" not in describe(3, 1)


def test_start_up_names_replication_in_bytes() -> None:
    assert f"4 places hold 3 KV head(s), {64 * 2 * 30 * 2:,} bytes" in describe(4, 1)
    assert f"4 places hold 1 KV head(s), {3 * 16 * 2 * 2 * 2:,} bytes" in describe(4, 1, ONE_KV_HEAD)
    assert "replication" not in describe(4, 4, ONE_KV_HEAD)
    assert "replication" not in describe(4, 2)


def test_start_up_says_whether_dcp_brings_memory() -> None:
    assert "brings no memory" in describe(4, 2)
    assert "1.33x the tokens" in describe(4, 4)
    assert "4.00x the tokens" in describe(4, 4, ONE_KV_HEAD)
    assert "memory" not in describe(4, 1)


def test_every_dtype_has_a_size() -> None:
    assert capacity.ITEMSIZE == {"bfloat16": 2, "float32": 4}
