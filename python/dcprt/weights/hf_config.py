"""config.json of a Hugging Face directory, read into a `ModelSpec`."""

from __future__ import annotations

from pathlib import Path

from dcprt.errors import ModelError, did_you_mean
from dcprt.models.registry import ARCHITECTURES, NOT_SERVED
from dcprt.spec import ModelSpec
from dcprt.weights.config_fields import Fields, read_json
from dcprt.weights.rope_config import read_rope

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def read_spec(directory: Path) -> ModelSpec:
    """Read config.json, and the end tokens of generation_config.json where that exists.

    Missing fields take the defaults of transformers: those that families share of its LlamaConfig, the others of the
    family's own.

    Raises:
        ModelError: no or damaged JSON, a field missing or wrong (named), or something not supported (named).
    """
    outer = read_json(directory / "config.json")
    architecture = _architecture(outer)
    row = ARCHITECTURES[architecture]
    fields = outer
    if row.nested is not None:
        found = outer.object(row.nested)
        if found is None:
            raise ModelError(f"{outer.path}: the field {row.nested} is missing.")
        fields = found
    _check_supported(fields)
    bos = fields.ids("bos_token_id")
    hidden, heads, kv_heads, head_dim = _heads(fields)
    max_position = fields.integer("max_position_embeddings", 2048)
    spec = ModelSpec(
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
        rope=read_rope(fields, max_position),
        tie_embeddings=outer.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", False)),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos(directory, outer, fields),
        dtype=_dtype(outer, fields),
        fp8_block=_fp8_block(outer) or _fp8_block(fields),
    )
    spec = row.read(fields, spec)
    if spec.rotary_dim % 2:
        raise ModelError(
            f"{fields.path}: head_dim is {head_dim}, of which {spec.rotary_dim} are rotated; "
            f"rotary embedding needs an even number."
        )
    return spec


def _architecture(fields: Fields) -> str:
    named = fields.values.get("architectures")
    model_type = fields.text("model_type", "")
    types = {row.model_type: name for name, row in reversed(ARCHITECTURES.items())}
    if isinstance(named, list) and named and all(isinstance(name, str) for name in named):
        name = str(named[0])
    elif named is None and model_type in types:
        name = types[model_type]
    else:
        raise fields.wrong("architectures", "a list with the name of the architecture")
    if name in NOT_SERVED:
        raise ModelError(f"{fields.path}: the architecture {name} is not supported: it needs {NOT_SERVED[name]}.")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{fields.path}: the architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}."
            f"{did_you_mean(name, ARCHITECTURES)}"
        )
    return name


def _heads(fields: Fields) -> tuple[int, int, int, int]:
    """hidden_size, query heads, KV heads and head_dim."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    hidden = fields.integer("hidden_size")
    return hidden, heads, kv_heads, fields.integer("head_dim", hidden // heads if hidden >= heads else None)


def _check_supported(fields: Fields) -> None:
    if (activation := fields.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"{fields.path}: hidden_act is {activation!r}; supported: 'silu'.")
    kinds = fields.values.get("layer_types")
    others = sorted({str(kind) for kind in kinds} - {"full_attention"}) if isinstance(kinds, list) else []
    if others:
        raise ModelError(f"{fields.path}: layer_types has {', '.join(others)}; only full_attention is served.")


def _fp8_block(fields: Fields) -> tuple[int, ...]:
    """Rows and columns of a block of an e4m3 weight (DeepSeek-V3, 2024); () without quantization."""
    quantization = fields.object("quantization_config")
    if quantization is None:
        return ()
    method = quantization.text("quant_method", "unnamed")
    block = quantization.values.get("weight_block_size")
    if method != "fp8" or block is None or quantization.text("fmt", "e4m3") != "e4m3":
        what = f"quant_method {method}" + (" without e4m3 blocks" if method == "fp8" else "")
        raise ModelError(
            f"{fields.path}: {fields.prefix}quantization_config is set ({what}); quantized checkpoints are not "
            f"supported, except fp8 with e4m3 weights and a weight_block_size, and GGUF files."
        )
    sizes = quantization.indices("weight_block_size")
    if len(sizes) != 2 or min(sizes) < 1:
        raise quantization.wrong("weight_block_size", "two positive integers")
    return sizes


def _eos(directory: Path, outer: Fields, fields: Fields) -> tuple[int, ...]:
    """End tokens of config.json, then those that generation_config.json adds."""
    ids = outer.ids("eos_token_id") or fields.ids("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.is_file():
        ids += read_json(generation).ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _dtype(*levels: Fields) -> str:
    """The type of the weights, from the first that says it."""
    for fields in levels:
        for field in ("dtype", "torch_dtype"):
            if fields.values.get(field) is not None:
                name = fields.text(field, "").removeprefix("torch.")
                if name not in _DTYPES:
                    raise ModelError(f"{fields.path}: {field} is {name!r}; supported: {', '.join(_DTYPES)}.")
                return name
    return "float32"
