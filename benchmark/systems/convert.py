"""The demo model once for each kind of system: bfloat16 as a Hugging Face directory, and as a GGUF file.

Both hold the same values: what dequantization gives, rounded to bfloat16.

    python benchmark/adapters/convert.py DIRECTORY
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from dcprt.weights.presets import PRESETS
from dcprt.weights.resolve import resolve

MOSTLY_BF16 = 32
"""`general.file_type` of a GGUF file whose matrices are bfloat16."""


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    preset = next(iter(PRESETS.values()))
    for name, write in (("hf", write_directory), ("model.gguf", write_gguf)):
        if not (target / name).exists():
            partial = target / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            write(preset.name, partial)
            partial.rename(target / name)


def write_directory(model: str, target: Path) -> None:
    """The directory that dcprt makes of its preset, with weights and configuration in bfloat16."""
    import torch

    source = resolve(model, "auto", print)
    shutil.copytree(source, target)
    weights = {name: value.to(torch.bfloat16) for name, value in load_file(source / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2))


def write_gguf(model: str, target: Path) -> None:
    """The preset's own file with other values: names, shapes and the order of rows stay llama.cpp's."""
    reader = GGUFReader(PRESETS[model].path())
    writer = GGUFWriter(target, "llama")
    for name, found in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            copy_field(writer, name, found)
    writer.add_file_type(MOSTLY_BF16)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        rounded = quantize(values, GGMLQuantizationType.BF16)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, rounded, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(tensor.name, dequantize(rounded, GGMLQuantizationType.BF16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_field(writer: GGUFWriter, name: str, found: Any) -> None:
    kind = found.types[0]
    inner = found.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(name, found.contents(), kind, inner)


if __name__ == "__main__":
    main()
