"""A token from logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcprt_kernel import _LIBRARY

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["draw"]

_draw = _LIBRARY.sampling_draw


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, drawn: float) -> int:
    """The token at `drawn`, in [0, 1), of the cumulative distribution over float32 logits [vocab], likeliest first.

    Temperature, then the `top_k` best (0: all), then those with at least `min_p` times the weight of the best, then the
    fewest that hold `top_p` of the rest. Equal logits are ordered by token. The greatest logit must be finite.

    Raises:
        ValueError: shapes, types or parameters do not fit.
    """
    return int(_draw(logits, temperature, top_k, top_p, min_p, drawn))
