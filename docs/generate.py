"""Writes the pages that follow from the code: configuration.md, metrics.md and models.md. `--check` only compares.

python docs/generate.py
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from dcprt.config import Config, flag_type
from dcprt.metrics import Metrics
from dcprt.models.registry import NOT_SERVED, rows

HERE = Path(__file__).parent
HEAD = "<!-- Written by docs/generate.py; change the code it describes, then run `make docs`. -->\n\n"


def configuration() -> str:
    """A table of flags for each group, from the declarations."""
    lines = [
        "# Configuration\n",
        "Flags of `python -m dcprt.launch_server`; `Engine` takes the same names with underscores. "
        "Environment variables are in `python/dcprt/env.py`.\n",
    ]
    for group in (type(getattr(Config(), field.name)) for field in dataclasses.fields(Config)):
        lines += [f"## {group.__doc__}\n", "| flag | takes | default | meaning |", "| --- | --- | --- | --- |"]
        for declared in dataclasses.fields(group):
            kind, _ = flag_type(group, declared.name)
            names = [f"--{declared.name.replace('_', '-')}", *declared.metadata["flags"]]
            takes = ", ".join(declared.metadata["choices"]) or {bool: "nothing", int: "a number"}.get(kind, "text")
            default = "" if declared.default in (None, False) else f"`{declared.default}`"
            flags = ", ".join(f"`{name}`" for name in names)
            lines.append(f"| {flags} | {takes} | {default} | {declared.metadata['help']} |")
        lines.append("")
    return HEAD + "\n".join(lines)


def metrics() -> str:
    """A table of metric names, from the registry."""
    lines = [
        "# Metrics\n",
        "`GET /metrics`, in Prometheus' text format. All times are taken by the scheduler.\n",
        "| name | kind | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| `{x.name}` | {x.kind} | {', '.join(x.labels)} | {x.text} |" for x in Metrics().describe()]
    return HEAD + "\n".join([*lines, ""])


def models() -> str:
    """A table of architectures, from the registry."""
    served = [f"| `{name}` | `{module}` | {found} | {special} |" for name, module, found, special in rows()]
    refused = [f"| `{name}` | {need} |" for name, need in NOT_SERVED.items()]
    lines = [
        "# Models\n",
        "The first name in `architectures` of a checkpoint's `config.json` decides. Weights are safetensors in "
        "float32, bfloat16 or float16, or e4m3 with a scale per block (`quant_method` fp8 with `weight_block_size`), "
        "which are dequantized as they are read. Every architecture runs on every grid; `--ep` cuts experts by expert "
        "instead of by width. [Adding a model](adding-a-model.md) says how to add one.\n",
        "| architecture | module | checkpoints | what is special |",
        "| --- | --- | --- | --- |",
        *served,
        "\nRefused by name, for what they need:\n",
        "| architecture | needs |",
        "| --- | --- |",
        *refused,
        "\nSo is any checkpoint of a served architecture whose `config.json` asks for sliding windows "
        "(`sliding_window` of Mistral, `use_sliding_window` of Qwen, `layer_types`), for another quantization, or for "
        "a rope scaling other than linear, dynamic, llama3 and yarn.\n",
    ]
    return HEAD + "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not current")
    check = parser.parse_args().check
    stale = []
    for name, text in (("configuration.md", configuration()), ("metrics.md", metrics()), ("models.md", models())):
        page = HERE / name
        if not page.exists() or page.read_text() != text:
            stale.append(name)
            if not check:
                page.write_text(text)
    if check and stale:
        sys.stderr.write(f"Not current: {', '.join(stale)}. Run `make docs`.\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
