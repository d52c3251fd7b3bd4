"""config.json of a Hugging Face directory, read into a `ModelSpec`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dcprt.config import ModelSpec, RopeSpec
from dcprt.errors import ModelError, did_you_mean

ARCHITECTURES = ("LlamaForCausalLM",)
"""Architectures whose config.json is understood."""

_MODEL_TYPES = {"llama": "LlamaForCausalLM"}
_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


class _Fields:
    """One JSON object, read field by field; a complaint names file and field."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def wrong(self, field: str, wanted: str) -> ModelError:
        return ModelError(
            f"{self.path}: {self.prefix}{field} must be {wanted}, but is {self.values.get(field)!r}."
        )

    def integer(self, field: str, default: int | None = None) -> int:
        """A positive integer; `null` counts as missing."""
        value = self._given(field, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(field, "a positive integer")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A positive finite number; `null` counts as missing."""
        value = self._given(field, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(field, "a positive number")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self._given(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def text(self, field: str, default: str) -> str:
        value = self._given(field, default)
        if not isinstance(value, str):
            raise self.wrong(field, "a string")
        return value

    def ids(self, field: str) -> tuple[int, ...]:
        """A token id or a list of them; none where the field is missing or null."""
        value = self.values.get(field)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in found):
            raise self.wrong(field, "a token id or a list of token ids")
        return tuple(found)

    def object(self, field: str) -> _Fields | None:
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(field, "an object")
        return _Fields(self.path, value, f"{self.prefix}{field}.")

    def _given(self, field: str, default: Any) -> Any:
        value = self.values.get(field)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.path}: the field {self.prefix}{field} is missing.")
        return value


def read_spec(directory: Path) -> ModelSpec:
    """Read config.json, and the end tokens of generation_config.json where that exists.

    Defaults of missing fields are those of transformers' LlamaConfig.

    Raises:
        ModelError: no or damaged JSON, a field missing or wrong (named), or something not supported (named).
    """
    fields = _read(directory / "config.json")
    architecture = _architecture(fields)
    _check_supported(fields)
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    hidden = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden // heads if hidden >= heads else None)
    if head_dim % 2:
        raise ModelError(f"{fields.path}: head_dim is {head_dim}; rotary embedding needs an even one.")
    max_position = fields.integer("max_position_embeddings", 2048)
    bos = fields.ids("bos_token_id")
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, max_position),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos(directory, fields),
        dtype=_dtype(fields),
    )


def _read(path: Path) -> _Fields:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} is no JSON object.")
    return _Fields(path, values)


def _architecture(fields: _Fields) -> str:
    named = fields.values.get("architectures")
    model_type = fields.text("model_type", "")
    if isinstance(named, list) and named and all(isinstance(name, str) for name in named):
        name = str(named[0])
    elif named is None and model_type in _MODEL_TYPES:
        name = _MODEL_TYPES[model_type]
    else:
        raise fields.wrong("architectures", "a list with the name of the architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{fields.path}: the architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}."
            f"{did_you_mean(name, ARCHITECTURES)}"
        )
    return name


def _check_supported(fields: _Fields) -> None:
    quantization = fields.object("quantization_config")
    if quantization is not None:
        method = quantization.text("quant_method", "unnamed")
        raise ModelError(
            f"{fields.path}: quantization_config is set (quant_method {method}); quantized checkpoints "
            f"are not supported, except GGUF files."
        )
    if (activation := fields.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"{fields.path}: hidden_act is {activation!r}; supported: 'silu'.")


def _eos(directory: Path, fields: _Fields) -> tuple[int, ...]:
    """End tokens of config.json, then those that generation_config.json adds."""
    ids = fields.ids("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.is_file():
        ids += _read(generation).ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _dtype(fields: _Fields) -> str:
    field = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    name = fields.text(field, "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"{fields.path}: {field} is {name!r}; supported: {', '.join(_DTYPES)}.")
    return name


def _rope(fields: _Fields, max_position: int) -> RopeSpec:
    """Both spellings: `rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (before)."""
    new, old = fields.object("rope_parameters"), fields.object("rope_scaling")
    scaling = new or old or _Fields(fields.path, {})
    theta = fields.number("rope_theta", 10000.0)
    theta = scaling.number("rope_theta", theta)
    nested = [name for name, value in scaling.values.items() if isinstance(value, dict)]
    if nested:
        raise ModelError(
            f"{fields.path}: {scaling.prefix}{nested[0]}: one rotary embedding per kind of layer "
            f"is not supported."
        )
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in _ROPE_KINDS:
        raise ModelError(
            f"{fields.path}: {scaling.prefix}rope_type is {kind!r}; supported: {', '.join(_ROPE_KINDS)}."
        )
    for owner in (fields, scaling):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{fields.path}: {owner.prefix}partial_rotary_factor must be 1 or absent.")
    if kind == "default":
        return RopeSpec(theta=theta)
    factor = scaling.number("factor")
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor)
    if kind == "dynamic":
        return RopeSpec(theta=theta, kind=kind, factor=factor, original_max_position=max_position)
    original = scaling.integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", max_position)
    )
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            raise scaling.wrong("low_freq_factor", f"less than high_freq_factor ({high:g})")
        return RopeSpec(theta, kind, factor, low, high, original)
    if not scaling.flag("truncate", True):
        raise ModelError(f"{fields.path}: {scaling.prefix}truncate false is not supported.")
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        attention_factor=_yarn_attention_factor(scaling, factor),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
    )


def _yarn_attention_factor(scaling: _Fields, factor: float) -> float:
    """What cos and sin are multiplied with: given, or from `mscale`s, or 0.1 ln(factor) + 1."""
    if scaling.values.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    above, below = scaling.values.get("mscale"), scaling.values.get("mscale_all_dim")
    if above and below:
        return (scaling.number("mscale") * growth + 1) / (scaling.number("mscale_all_dim") * growth + 1)
    return growth + 1
