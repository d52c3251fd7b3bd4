"""Flags and options: one declaration gives both, and mistakes are answered with what would be right."""

from __future__ import annotations

import dataclasses

import pytest

from dcprt.config import (
    Config,
    GridConfig,
    KVConfig,
    ModelConfig,
    ScheduleConfig,
    ServerConfig,
    build_parser,
    parse_args,
    parse_bytes,
)
from dcprt.errors import ConfigError, GridError
from dcprt.spec import ModelSpec

DOMAINS = {
    "model": ModelConfig,
    "grid": GridConfig,
    "kv": KVConfig,
    "schedule": ScheduleConfig,
    "server": ServerConfig,
}
FIELDS = [(domain, field) for domain, kind in DOMAINS.items() for field in dataclasses.fields(kind)]
ASKED_FOR = [
    "--model", "--tp", "--tp-size", "--tensor-parallel-size", "--dcp", "--dcp-size",
    "--decode-context-parallel-size", "--dcp-interleave", "--page-size", "--kv-cache-tokens",
    "--kv-cache-memory", "--dtype", "--device", "--context-length", "--chunked-prefill-size",
    "--max-running-requests", "--disable-radix-cache", "--served-model-name", "--api-key", "--host",
    "--port", "--log-level", "--random-seed", "--load-format", "--skip-tokenizer-init",
]  # fmt: skip


def test_defaults() -> None:
    config = parse_args([])
    assert config == Config()
    assert (config.server.host, config.server.port) == ("127.0.0.1", 30000)
    assert (config.kv.page_size, config.grid.dcp_interleave) == (16, 1)
    assert (config.schedule.chunked_prefill_size, config.model.dtype) == (2048, "auto")
    assert (config.grid.ranks, config.grid.dcp, config.grid.tp) == (1, 1, None)
    assert (config.model.model, config.server.api_key) == (None, None)


def test_all_flags_there_should_be() -> None:
    known = {flag for action in build_parser("x")._actions for flag in action.option_strings}
    assert set(ASKED_FOR) <= known


@pytest.mark.parametrize("flag", ["--dcp", "--dcp-size", "--decode-context-parallel-size"])
def test_dcp_alone_sets_tp_too(flag: str) -> None:
    for argv in ([flag, "4"], [f"{flag}=4"]):
        grid = parse_args(argv).grid
        assert (grid.dcp, grid.ranks, grid.tp) == (4, 4, None)


@pytest.mark.parametrize("flag", ["--tp", "--tp-size", "--tensor-parallel-size"])
def test_tp_alone_leaves_dcp_at_one(flag: str) -> None:
    grid = parse_args([flag, "4"]).grid
    assert (grid.dcp, grid.ranks) == (1, 4)


def test_flags_and_options_mean_the_same() -> None:
    argv = (
        "--model-path m --dtype float32 --context-length 100 --load-format gguf --served-model-name s "
        "--skip-tokenizer-init --tp 4 --dcp 2 --dcp-interleave 2 --page-size 8 --kv-cache-memory 1GiB "
        "--disable-radix-cache --chunked-prefill-size 64 --max-running-requests 3 --random-seed 7 "
        "--host 0.0.0.0 --port 0 --api-key k --log-level debug"
    )
    assert parse_args(argv.split()) == Config.of(
        model="m",
        dtype="float32",
        context_length=100,
        load_format="gguf",
        served_model_name="s",
        skip_tokenizer_init=True,
        tp=4,
        dcp=2,
        dcp_interleave=2,
        page_size=8,
        kv_cache_memory="1GiB",
        disable_radix_cache=True,
        chunked_prefill_size=64,
        max_running_requests=3,
        random_seed=7,
        host="0.0.0.0",
        port=0,
        api_key="k",
        log_level="debug",
    )


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (["--dcp-sise", "4"], "--dcp-size"),
        (["--kv-cache-token=7"], "--kv-cache-tokens"),
        (["--max-running-request", "3"], "--max-running-requests"),
        (["--decode-context-paralel-size", "2"], "--decode-context-parallel-size"),
        (["--modle", "x"], "--model"),
    ],
)
def test_an_unknown_flag_gets_the_nearest(argv: list[str], near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv)
    assert f"Did you mean {near!r}?" in str(caught.value)
    assert argv[0].split("=")[0] in str(caught.value)


def test_flags_are_never_abbreviated() -> None:
    with pytest.raises(ConfigError, match="--context"):
        parse_args(["--context", "100"])


def test_a_word_without_a_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'model\.gguf'"):
        parse_args(["model.gguf"])


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--dtype", "float16"], ["--dtype", "float16", "bfloat16", "float32", "auto"]),
        (["--load-format", "pickle"], ["--load-format", "pickle", "safetensors", "gguf"]),
        (["--log-level", "loud"], ["--log-level", "loud", "warning"]),
        (["--dcp", "four"], ["--dcp", "four"]),
        (["--port"], ["--port"]),
        (["--port", "65536"], ["--port", "65536", "65535"]),
        (["--port", "-1"], ["--port"]),
        (["--page-size", "0"], ["--page-size", "at least 1", "0"]),
        (["--dcp", "0"], ["--dcp", "at least 1"]),
        (["--tp", "0"], ["--tp", "at least 1"]),
        (["--context-length", "0"], ["--context-length", "at least 1"]),
        (["--kv-cache-tokens", "0"], ["--kv-cache-tokens", "at least 1"]),
        (["--chunked-prefill-size", "0"], ["--chunked-prefill-size", "at least 1"]),
        (["--max-running-requests", "0"], ["--max-running-requests", "at least 1"]),
        (["--kv-cache-memory", "lots"], ["lots", "4GiB"]),
    ],
)
def test_a_wrong_value_names_flag_and_value(argv: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"tp": 4, "dcp": 3}, ["--dcp 3", "--tp 4", "1, 2, 4"]),
        ({"tp": 2, "dcp": 4}, ["--dcp 4", "--tp 2", "1, 2"]),
        ({"page_size": 16, "dcp_interleave": 3}, ["--dcp-interleave 3", "--page-size 16", "1, 2, 4, 8, 16"]),
        ({"page_size": 2, "dcp_interleave": 4}, ["--dcp-interleave 4", "--page-size 2", "1, 2"]),
        (
            {"kv_cache_tokens": 64, "kv_cache_memory": "1GiB"},
            ["--kv-cache-tokens", "--kv-cache-memory", "not both"],
        ),
    ],
)
def test_values_that_do_not_fit_each_other_name_those_that_do(options: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.of(**options)
    for part in parts:
        assert part in str(caught.value)


def test_a_wrong_grid_is_a_grid_error() -> None:
    with pytest.raises(GridError):
        Config.of(tp=4, dcp=3)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"dcp": "4"}, "int"),
        ({"dcp": 4.0}, "int"),
        ({"dcp": True}, "int"),
        ({"dcp": None}, "int"),
        ({"model": 7}, "str"),
        ({"disable_radix_cache": 1}, "bool"),
        ({"kv_cache_memory": 4096}, "str"),
    ],
)
def test_options_of_a_wrong_type_are_refused(options: dict[str, object], kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} takes {kind}"):
        Config.of(**options)


def test_none_is_allowed_where_it_is_the_default() -> None:
    assert Config.of(tp=None, model=None, api_key=None, kv_cache_tokens=None) == Config()


def test_an_unknown_option_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'dcp_interleaf'.*'dcp_interleave'"):
        Config.of(dcp_interleaf=1)


def test_options_respect_choices() -> None:
    with pytest.raises(ConfigError, match="dtype takes one of auto, bfloat16, float32, not 'float16'"):
        Config.of(dtype="float16")


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().grid.dcp = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("1K", 1024),
        ("1k", 1024),
        ("512M", 512 << 20),
        ("512MB", 512 << 20),
        ("512MiB", 512 << 20),
        ("4GiB", 4 << 30),
        ("4g", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("0.5 KiB", 512),
        ("2T", 2 << 40),
        ("1e9", 10**9),
        ("1E3", 1000),
        (" 7 B ", 7),
    ],
)
def test_sizes_in_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "lots", "4X", "4 G B", "..", "1.2.3", ".", "GiB", "nan", "inf", "1e999", "0.1", "1e-9"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size in bytes"):
        parse_bytes(text)


def test_help_lists_every_field_with_its_group_and_default() -> None:
    text = " ".join(build_parser("dcprt").format_help().split())
    assert text.startswith("usage: dcprt")
    for domain, field in FIELDS:
        flag = f"--{field.name.replace('_', '-')}"
        assert flag in text
        assert " ".join(field.metadata["help"].split()) in text, field.name
        assert f"{DOMAINS[domain].__doc__}:" in text
        for other in field.metadata["flags"]:
            assert other in text
        if field.default is not None and field.default is not False:
            assert f"(default: {field.default})" in text


def test_every_field_has_help_and_one_home() -> None:
    names = [field.name for _, field in FIELDS]
    assert len(names) == len(set(names))
    assert all(field.metadata["help"] for _, field in FIELDS)
    assert {name: type(getattr(Config(), name)) for name in DOMAINS} == DOMAINS


def test_the_shape_of_a_checkpoint_counts_its_kv() -> None:
    assert ModelSpec("L", 1, 1, 1, 30, 9, 3, 64, 8192).kv_elements_per_head == 128
