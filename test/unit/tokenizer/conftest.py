from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from dcprt.tokenizer.text import TextCodec
from dcprt.weights.presets import PRESETS
from dcprt.weights.resolve import resolve


@pytest.fixture(scope="session")
def demo_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The converted demo model, in a cache of this test run."""
    if PRESETS["smollm2-135m"].find() is None:
        pytest.skip("the demo model's package is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCPRT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "demo-cache"))
        yield resolve("smollm2-135m", "auto", lambda line: None)


@pytest.fixture(scope="session")
def demo(demo_directory: Path) -> TextCodec:
    return TextCodec(demo_directory)


@pytest.fixture(scope="session")
def pieces_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer in the style of Llama 2: the space mark, byte tokens, and a first space that is dropped."""
    directory = tmp_path_factory.mktemp("pieces")
    words = ["▁", "▁the", "▁code", "h", "e", "t", "o", "▁▁", "中", "文", "é", "<", ">", "_", "1", "2"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def pieces(pieces_directory: Path) -> TextCodec:
    return TextCodec(pieces_directory)
