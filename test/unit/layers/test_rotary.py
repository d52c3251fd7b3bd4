"""Rotary embedding against transformers, for every scaling kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from dcprt.layers.rotary import Rotary
from dcprt.spec import RopeSpec

KINDS: list[tuple[RopeSpec, dict[str, Any]]] = [
    (RopeSpec(theta=1e5), {"rope_type": "default", "rope_theta": 1e5}),
    (RopeSpec(kind="linear", factor=4.0), {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    (RopeSpec(kind="dynamic", factor=2.0), {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    (
        RopeSpec(theta=5e5, kind="llama3", factor=8.0, original_max_position=256),
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
    (
        RopeSpec(kind="yarn", factor=4.0, original_max_position=256),
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256},
    ),
]


@pytest.mark.parametrize(("rope", "parameters"), KINDS, ids=lambda x: x.kind if isinstance(x, RopeSpec) else "")
def test_agrees_with_transformers(rope: RopeSpec, parameters: dict[str, Any]) -> None:
    torch.manual_seed(0)
    head_dim = 32
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=1024,
        rope_parameters=parameters,
    )
    positions = torch.tensor([0, 1, 2, 63, 255, 256, 700, 1000])
    q, k = torch.randn(1, 2, 8, head_dim), torch.randn(1, 1, 8, head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    rotary = Rotary(rope, head_dim)
    angles = rotary.angles(positions)
    for x, theirs in zip((q, k), expected, strict=True):
        ours = rotary.rotate(x[0].transpose(0, 1), angles).transpose(0, 1)
        torch.testing.assert_close(ours, theirs[0], atol=2e-6, rtol=1e-5)
