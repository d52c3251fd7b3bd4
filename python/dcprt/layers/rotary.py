"""Rotary position embedding (RoFormer, Su et al. 2021), and the scaling kinds of Llama checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dcprt import ops
from dcprt.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """float32 [head_dim / 2], after scaling.

    `dynamic` equals `default`: its base changes only behind the positions a model was made for, and no request
    may go there. `llama3` is the piecewise scaling of the Llama 3.1 release; `yarn` is Peng et al. 2023.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    waves = rope.theta**exponents
    plain = 1.0 / waves
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(waves, rope, head_dim)
    assert rope.kind in ("default", "dynamic"), rope.kind
    return plain


def attention_factor(rope: RopeSpec) -> float:
    """What cosines and sines are multiplied with."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.kind == "yarn" and rope.factor > 1 else 1.0


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Long waves are slowed down by `factor`, short ones kept, those between blended."""
    turns = rope.original_max_position * plain / (2 * math.pi)
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(waves: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """Dimensions that turn often over the original context are kept, those that turn seldom interpolated."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (rope.factor * waves)) * (1 - kept) + (1.0 / waves) * kept


class Rotary:
    """Rotates queries and keys; `angles` are computed once a step and shared by all layers."""

    def __init__(self, rope: RopeSpec, head_dim: int) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._factor = attention_factor(rope)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [tokens] to cosines and sines, float32 [tokens, 1, head_dim / 2]."""
        turned = positions.float().unsqueeze(-1) * self._frequencies
        return (turned.cos() * self._factor).unsqueeze(1), (turned.sin() * self._factor).unsqueeze(1)

    @staticmethod
    def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[tokens, heads, head_dim], halves paired as in Hugging Face checkpoints; x is overwritten and returned.

        Where the angles are for fewer dimensions than a head has, the others stay as they are.
        """
        return ops.rotate(x, *angles)
