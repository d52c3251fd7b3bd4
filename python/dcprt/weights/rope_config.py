"""The rotary embedding in a config.json."""

from __future__ import annotations

import math

from dcprt.errors import ModelError
from dcprt.spec import RopeSpec
from dcprt.weights.config_fields import Fields

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def _scaling(fields: Fields) -> Fields:
    return fields.object("rope_parameters") or fields.object("rope_scaling") or Fields(fields.path, {})


def partial_rotary(fields: Fields, default: float) -> float:
    """The share of a head's dimensions that is rotated.

    Raises:
        ModelError: it is not in (0, 1].
    """
    scaling = _scaling(fields)
    owner = scaling if scaling.values.get("partial_rotary_factor") is not None else fields
    share = owner.number("partial_rotary_factor", default)
    if share > 1:
        raise owner.wrong("partial_rotary_factor", "at most 1")
    return share


def softmax_growth(fields: Fields) -> float:
    """What YaRN with `mscale_all_dim` multiplies the softmax scale of MLA with (DeepSeek-V2, 2024); 1 without."""
    scaling = _scaling(fields)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default" or not scaling.values.get("mscale_all_dim"):
        return 1.0
    factor = scaling.number("factor")
    growth = 0.1 * scaling.number("mscale_all_dim") * math.log(factor) + 1 if factor > 1 else 1.0
    return growth * growth


def read_rope(fields: Fields, max_position: int) -> RopeSpec:
    """Both spellings: `rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (before)."""
    scaling = _scaling(fields)
    theta = fields.number("rope_theta", 10000.0)
    theta = scaling.number("rope_theta", theta)
    nested = [name for name, value in scaling.values.items() if isinstance(value, dict)]
    if nested:
        raise ModelError(
            f"{fields.path}: {scaling.prefix}{nested[0]}: one rotary embedding per kind of layer is not supported."
        )
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in _KINDS:
        raise ModelError(f"{fields.path}: {scaling.prefix}rope_type is {kind!r}; supported: {', '.join(_KINDS)}.")
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


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    """What cos and sin are multiplied with: given, or from `mscale`s, or 0.1 ln(factor) + 1."""
    if scaling.values.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    above, below = scaling.values.get("mscale"), scaling.values.get("mscale_all_dim")
    if above and below:
        return (scaling.number("mscale") * growth + 1) / (scaling.number("mscale_all_dim") * growth + 1)
    return growth + 1
