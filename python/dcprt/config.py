"""What a user can choose, by domain; and what a checkpoint is, once read.

One declaration gives the field, its flag, its help text and its row in the docs. The classes are frozen and
are handed to the parts that need them; nothing reads flags from anywhere else.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, get_type_hints

from dcprt.errors import ConfigError, GridError, did_you_mean


def option(default: Any, help: str, *, flags: Sequence[str] = (), choices: Sequence[str] = ()) -> Any:
    """A dataclass field that is also a command line flag; `flags` are spellings beside `--field-name`."""
    return field(default=default, metadata={"help": help, "flags": tuple(flags), "choices": tuple(choices)})


def parse_bytes(text: str | int) -> int:
    """`"4GiB"`, `"512M"`, `"1e9"` or `4096` to bytes; K, M, G, T are powers of 1024.

    Raises:
        ConfigError: the text is no positive size.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    try:
        size = float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ") if match else 0.0
    except ValueError:
        size = 0.0
    if not 1 <= size < math.inf:
        raise ConfigError(f"{text!r} is not a size in bytes; write for example 4GiB, 512MiB or 1073741824.")
    return int(size)


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}.")


@dataclass(frozen=True)
class ModelConfig:
    """Model"""

    model: str | None = option(
        None,
        "preset name (smollm2-135m), Hugging Face directory or .gguf file; "
        "default: the demo model, where its package is installed",
        flags=("--model-path",),
    )
    dtype: str = option(
        "auto",
        "type of weights, activations and KV; auto: bfloat16, but float32 without dcprt-kernel on a CPU that has no "
        "instruction for it",
        choices=("auto", "bfloat16", "float32"),
    )
    device: str = option("cpu", "where the workers compute", choices=("cpu",))
    context_length: int | None = option(
        None, "longest request in tokens, prompt and output together; default: the model's own"
    )
    load_format: str = option(
        "auto",
        "auto: by what is found; dummy: random weights for the shape in config.json",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    served_model_name: str | None = option(None, "name of the model in the API; default: from --model")
    skip_tokenizer_init: bool = option(False, "token ids in, token ids out: load no tokenizer")
    chat_template: str | None = option(None, "file with a jinja2 chat template that replaces the model's")

    def __post_init__(self) -> None:
        _positive(self, "context_length")


@dataclass(frozen=True)
class GridConfig:
    """Grid"""

    tp: int | None = option(
        None,
        "ranks that hold one copy of the model; default: as many as --dcp",
        flags=("--tp-size", "--tensor-parallel-size"),
    )
    dcp: int = option(
        1,
        "ranks over which the KV of one sequence is spread; divides --tp",
        flags=("--dcp-size", "--decode-context-parallel-size"),
    )
    dcp_interleave: int = option(1, "consecutive tokens on one rank before the next; divides --page-size")
    dcp_comm: str = option(
        "a2a",
        "how partial results are combined: ag_rs (all-gather of lse, reduce-scatter), a2a (one all-to-all), "
        "or auto: measured at start-up",
        choices=("a2a", "ag_rs", "auto"),
    )
    dcp_replicate_q: bool = option(
        False, "keep the query projection of the whole head shard on each rank: no gather of queries, more weights"
    )
    dcp_workspace: str = option("64MiB", "most bytes of queries, or of K and V, that are gathered at a time")
    ep: bool = option(False, "cut experts by expert instead of by width", flags=("--enable-expert-parallel",))

    def __post_init__(self) -> None:
        _positive(self, "tp", "dcp", "dcp_interleave")
        parse_bytes(self.dcp_workspace)
        if self.ranks % self.dcp:
            fits = [d for d in range(1, self.ranks + 1) if self.ranks % d == 0]
            raise GridError(
                f"--dcp {self.dcp} does not divide --tp {self.ranks}. "
                f"With --tp {self.ranks}, --dcp can be {', '.join(map(str, fits))}."
            )

    @property
    def ranks(self) -> int:
        """`tp`, or `dcp` where `--tp` is not given."""
        return self.tp if self.tp is not None else self.dcp


@dataclass(frozen=True)
class KVConfig:
    """KV cache"""

    page_size: int = option(16, "tokens of one page on one rank")
    kv_cache_tokens: int | None = option(
        None, "KV capacity in tokens of whole requests over all ranks, rounded down to spans"
    )
    kv_cache_memory: str | None = option(
        None,
        "KV capacity in bytes per rank (4GiB, 512M); default: a quarter of the available memory over all ranks, "
        "or --max-running-requests x --context-length if that is less",
    )
    disable_radix_cache: bool = option(False, "reuse no KV between requests")

    def __post_init__(self) -> None:
        _positive(self, "page_size", "kv_cache_tokens")
        if self.kv_cache_tokens is not None and self.kv_cache_memory is not None:
            raise ConfigError("Give --kv-cache-tokens or --kv-cache-memory, not both.")
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory)


@dataclass(frozen=True)
class ScheduleConfig:
    """Scheduling"""

    chunked_prefill_size: int = option(2048, "most prompt tokens computed in one step")
    max_running_requests: int = option(64, "most requests that are computed at a time; more wait")
    max_queued_requests: int | None = option(None, "most requests that wait; more are refused with HTTP 503")
    request_timeout: int | None = option(None, "seconds that a request may take, unless it brings its own timeout")
    disable_overlap_schedule: bool = option(False, "wait for the result of each step before the next one is planned")
    random_seed: int = option(0, "seed of requests that bring none, and of dummy weights")

    def __post_init__(self) -> None:
        _positive(self, "chunked_prefill_size", "max_running_requests", "request_timeout")
        if self.max_queued_requests is not None and self.max_queued_requests < 0:
            raise ConfigError(f"--max-queued-requests must not be negative, it is {self.max_queued_requests}.")


@dataclass(frozen=True)
class ServerConfig:
    """Server"""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(30000, "port to listen on; 0 takes a free one")
    api_key: str | None = option(None, "bearer token that guards everything but /health")
    log_level: str = option("info", "least severe line that is logged", choices=("debug", "info", "warning", "error"))
    profile_steps: str | None = option(
        None, "file that gets, at the end, where the time of the last 256 steps went: a Chrome trace of all ranks"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}.")


@dataclass(frozen=True)
class Config:
    """All of it. Build it with `Config.of(model=..., dcp=4)` or `parse_args(argv)`."""

    model: ModelConfig = ModelConfig()
    grid: GridConfig = GridConfig()
    kv: KVConfig = KVConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    server: ServerConfig = ServerConfig()

    def __post_init__(self) -> None:
        if self.kv.page_size % self.grid.dcp_interleave:
            fits = [i for i in range(1, self.kv.page_size + 1) if self.kv.page_size % i == 0]
            raise ConfigError(
                f"--dcp-interleave {self.grid.dcp_interleave} does not divide --page-size {self.kv.page_size}; "
                f"it can be {', '.join(map(str, fits))}."
            )

    @classmethod
    def of(cls, **options: Any) -> Config:
        """From options named like the flags, with underscores.

        Raises:
            ConfigError: an unknown name, a value of a wrong type, or values that do not fit each other.
        """
        groups: dict[str, dict[str, Any]] = {}
        homes = {f.name: (group, f) for group, kind in _GROUPS.items() for f in dataclasses.fields(kind)}
        for name, value in options.items():
            if name not in homes:
                raise ConfigError(f"Unknown option {name!r}.{did_you_mean(name, homes)}")
            group, declared = homes[name]
            kind, optional = flag_type(_GROUPS[group], name)
            if not (value is None and optional) and (
                not isinstance(value, kind) or (kind is int and isinstance(value, bool))
            ):
                raise ConfigError(f"{name} takes {kind.__name__}, not {value!r}.")
            choices = declared.metadata["choices"]
            if choices and value not in choices:
                raise ConfigError(f"{name} takes one of {', '.join(choices)}, not {value!r}.")
            groups.setdefault(group, {})[name] = value
        return cls(**{group: _GROUPS[group](**values) for group, values in groups.items()})


_GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "grid": GridConfig,
    "kv": KVConfig,
    "schedule": ScheduleConfig,
    "server": ServerConfig,
}


def flag_type(group: type, name: str) -> tuple[type, bool]:
    """The type a flag's value has, and whether None is allowed too."""
    hint = get_type_hints(group)[name]
    kinds = [kind for kind in getattr(hint, "__args__", (hint,)) if kind is not type(None)]
    return kinds[0], len(kinds) != len(getattr(hint, "__args__", (hint,)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message[0].upper() + message[1:] + ("" if message.endswith(".") else "."))


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The command line, grouped by domain."""
    parser = _Parser(
        prog=prog,
        description="Serve a language model with its KV cache sharded along the sequence.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for group in _GROUPS.values():
        section = parser.add_argument_group(str(group.__doc__))
        for declared in dataclasses.fields(group):
            flags = [f"--{declared.name.replace('_', '-')}", *declared.metadata["flags"]]
            kind, _ = flag_type(group, declared.name)
            common = {"dest": declared.name, "help": declared.metadata["help"]}
            if declared.default is None:
                common["default"] = argparse.SUPPRESS
            else:
                common["default"] = declared.default
            if kind is bool:
                section.add_argument(*flags, action="store_true", **common)
            else:
                choices = declared.metadata["choices"] or None
                metavar = None if choices else {int: "N", str: "TEXT"}[kind]
                section.add_argument(*flags, type=kind, choices=choices, metavar=metavar, **common)
    return parser


def parse_args(argv: Sequence[str], prog: str = "python -m dcprt.launch_server") -> Config:
    """`argv` (without the program) to a `Config`.

    Raises:
        ConfigError: an unknown flag (with the nearest known one), or a value that cannot work.
    """
    parser = build_parser(prog)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        word = unknown[0].split("=")[0]
        raise ConfigError(f"Unknown argument {unknown[0]!r}.{did_you_mean(word, flags)} See --help.")
    return Config.of(**vars(known))
