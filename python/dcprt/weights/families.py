"""What the config.json of each family says beside the fields that all families share.

A reader gets the fields and a `ModelSpec` that holds the shared ones, and returns the finished one. It raises
`ModelError` for a field that is wrong, and for one that asks for something not served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dcprt.errors import ModelError
from dcprt.spec import MLASpec, ModelSpec, MoESpec
from dcprt.weights.config_fields import Fields
from dcprt.weights.rope_config import partial_rotary, softmax_growth


def llama(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Llama 2, 3 and 3.x: biases where the checkpoint says so."""
    return replace(
        _whole_rotary(fields, spec),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def mistral(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """A missing `sliding_window` is 4096, as in transformers; a window as long as the longest request is none."""
    window = fields.values.get("sliding_window", 4096)
    if window is not None and fields.integer("sliding_window", 4096) < spec.max_position:
        raise ModelError(f"{fields.path}: sliding_window is {window}; sliding windows are not served.")
    return _whole_rotary(fields, spec)


def qwen2(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Qwen2 and 2.5: query, key and value have biases, the output has none."""
    _check_qwen(fields, spec)
    return replace(_whole_rotary(fields, spec), attention_bias=True)


def qwen3(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Qwen3: each query and key head is normalized."""
    _check_qwen(fields, spec)
    bias = fields.flag("attention_bias", False)
    return replace(_whole_rotary(fields, spec), attention_bias=bias, qk_norm=True)


def qwen3_moe(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Qwen3-MoE: routed experts in every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    step, only = fields.integer("decoder_sparse_step", 1), fields.indices("mlp_only_layers")
    named = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    moe = MoESpec(
        num_experts=fields.integer(named),
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        expert_width=fields.integer("moe_intermediate_size", 768),
        normalize=fields.flag("norm_topk_prob", False),
        other_dense_layers=tuple(i for i in range(spec.num_layers) if i in only or (i + 1) % step),
    )
    return replace(qwen3(fields, spec), moe=_checked(fields, moe, named))


def glm4_moe(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """GLM-4.5 and 4.6: half of a head is rotated, experts are chosen as in DeepSeek-V3."""
    return replace(
        spec,
        attention_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
        partial_rotary=partial_rotary(fields, 0.5),
        moe=_noaux_tc(fields, scale=1.0, groups=1, top_groups=1, dense=1),
        mtp_layers=fields.count("num_nextn_predict_layers"),
    )


def deepseek_v2(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """DeepSeek-V2 and V2-Lite: softmax routing, limited to the groups with the best single expert."""
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.wrong("topk_method", "greedy or group_limited_greedy")
    grouped = method == "group_limited_greedy"
    fields.only("norm_topk_prob", False, "the published V2 checkpoints do not normalize the weights")
    fields.only("scoring_func", "softmax", "DeepSeek-V2 routes by softmax")
    moe = MoESpec(
        num_experts=fields.integer("n_routed_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        expert_width=fields.integer("moe_intermediate_size", 1407),
        shared_width=_shared_width(fields, 2, 1407),
        dense_layers=fields.count("first_k_dense_replace"),
        normalize=False,
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group") if grouped else 1,
        top_groups=fields.integer("topk_group") if grouped else 1,
    )
    return _mla(fields, replace(spec, rope_interleaved=True), _checked(fields, moe, "n_routed_experts"))


def deepseek_v3(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """DeepSeek-V3, R1 and Kimi K2: sigmoid routing, corrected by a learned bias, in groups scored by their best two."""
    moe = _noaux_tc(fields, scale=2.5, groups=8, top_groups=4, dense=3)
    interleaved = fields.flag("rope_interleave", True)
    mtp = fields.count("num_nextn_predict_layers")
    return _mla(fields, replace(spec, rope_interleaved=interleaved, mtp_layers=mtp), moe)


def _whole_rotary(fields: Fields, spec: ModelSpec) -> ModelSpec:
    if partial_rotary(fields, 1.0) != 1:
        raise ModelError(f"{fields.path}: partial_rotary_factor must be 1 or absent for {spec.architecture}.")
    return spec


def _check_qwen(fields: Fields, spec: ModelSpec) -> None:
    """Windows are in the layers from `max_window_layers` on; in all, where that is missing."""
    if fields.flag("use_sliding_window", False) and fields.count("max_window_layers") < spec.num_layers:
        raise ModelError(f"{fields.path}: use_sliding_window is true; sliding windows are not served.")
    if fields.values.get("dual_chunk_attention_config") is not None:
        raise ModelError(f"{fields.path}: dual_chunk_attention_config is set; dual chunk attention is not served.")


def _noaux_tc(fields: Fields, *, scale: float, groups: int, top_groups: int, dense: int) -> MoESpec:
    """Routing without auxiliary loss (DeepSeek-V3, 2024); the defaults of missing fields differ by family."""
    fields.only("topk_method", "noaux_tc", "this architecture routes by noaux_tc")
    fields.only("scoring_func", "sigmoid", "this architecture routes by sigmoid")
    moe = MoESpec(
        num_experts=fields.integer("n_routed_experts"),
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        expert_width=fields.integer("moe_intermediate_size"),
        shared_width=_shared_width(fields, 1),
        dense_layers=fields.count("first_k_dense_replace", dense),
        scoring="sigmoid",
        normalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", scale),
        groups=fields.integer("n_group", groups),
        top_groups=fields.integer("topk_group", top_groups),
        group_score="top2",
        bias_corrected=True,
    )
    return _checked(fields, moe, "n_routed_experts")


def _shared_width(fields: Fields, shared: int, width: int | None = None) -> int:
    """Shared experts side by side are one MLP."""
    return fields.count("n_shared_experts", shared) * fields.integer("moe_intermediate_size", width)


def _checked(fields: Fields, moe: MoESpec, experts: str) -> MoESpec:
    """`moe`, if a token finds enough experts. `experts` is the name of their field."""
    fields.only("moe_layer_freq", 1, "only 1 is served")
    if moe.num_experts % moe.groups:
        raise fields.wrong(experts, f"a multiple of n_group ({moe.groups})")
    if moe.top_groups > moe.groups:
        raise fields.wrong("topk_group", f"at most n_group ({moe.groups})")
    if moe.group_score == "top2" and moe.groups > 1 and moe.num_experts < 2 * moe.groups:
        raise fields.wrong("n_group", f"at most half of {experts} ({moe.num_experts})")
    choice = moe.num_experts // moe.groups * moe.top_groups
    if moe.experts_per_token > choice:
        raise fields.wrong("num_experts_per_tok", f"at most {choice}, the experts that a token may choose from")
    return moe


def _mla(fields: Fields, spec: ModelSpec, moe: MoESpec) -> ModelSpec:
    """Latent attention: for the cache, one KV head of the latent and the rotated key."""
    fields.only("mlp_bias", False, "biases of experts are not served")
    nope, rope = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    if rope % 2:
        raise fields.wrong("qk_rope_head_dim", "even")
    mla = MLASpec(
        q_lora_rank=_q_lora_rank(fields),
        kv_lora_rank=fields.integer("kv_lora_rank", 512),
        nope_dim=nope,
        rope_dim=rope,
        v_dim=fields.integer("v_head_dim", 128),
        softmax_scale=(nope + rope) ** -0.5 * softmax_growth(fields),
    )
    changes: dict[str, Any] = {"num_kv_heads": 1, "head_dim": mla.kv_lora_rank + rope, "mla": mla, "moe": moe}
    changes["attention_bias"] = fields.flag("attention_bias", False)
    return replace(_whole_rotary(fields, spec), **changes)


def _q_lora_rank(fields: Fields) -> int:
    """0 for null; a missing field is 1536, as in transformers."""
    return fields.count("q_lora_rank") if "q_lora_rank" in fields.values else 1536
