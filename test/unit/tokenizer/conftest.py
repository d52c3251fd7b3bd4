from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from dcprt.tokenizer.text import TextCodec
from dcprt.weights.presets import PRESETS
from dcprt.weights.resolve import resolve

from .samples import corpus


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


@pytest.fixture(scope="session")
def llama_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A SentencePiece model made the way that of Llama 2 was."""
    return train_pieces(
        tmp_path_factory.mktemp("llama-model"),
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        byte_fallback=True,
    )


def train_pieces(directory: Path, vocab_size: int = 900, **options: Any) -> bytes:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_prefix=str(directory / "m"),
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=0.99,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return (directory / "m.model").read_bytes()


@pytest.fixture
def write_pieces(tmp_path: Path, llama_model: bytes) -> Callable[..., Path]:
    """Writes a directory with a tokenizer.model and the files given beside it."""

    def write(config: dict[str, Any] | None = None, model: bytes = llama_model, **files: dict[str, Any]) -> Path:
        (tmp_path / "tokenizer.model").write_bytes(model)
        for name, content in {"tokenizer_config": config, **files}.items():
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


@pytest.fixture(scope="session")
def llama_directory(tmp_path_factory: pytest.TempPathFactory, llama_model: bytes) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    (directory / "tokenizer.model").write_bytes(llama_model)
    (directory / "tokenizer_config.json").write_text(json.dumps(LLAMA_CONFIG))
    return directory


LLAMA_CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "legacy": True,
    "added_tokens_decoder": {
        "0": {"content": "<unk>", "special": True},
        "1": {"content": "<s>", "special": True},
        "2": {"content": "</s>", "special": True},
        "900": {"content": "<|end|>", "special": True, "rstrip": True},
        "901": {"content": "<mask>", "special": True, "lstrip": True},
        "902": {"content": "<tool>", "special": False},
        "903": {"content": "<tool>call", "special": False},
    },
    "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}",
}
"""Added tokens of every kind; the model has 900 pieces."""


@pytest.fixture(scope="session")
def llama(llama_directory: Path) -> TextCodec:
    return TextCodec(llama_directory)


@pytest.fixture(scope="session")
def byte_level_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json in the style of Llama 3, saved by transformers."""
    transformers = pytest.importorskip("transformers")
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>", "<|header|>", "<|/header|>"])
    tokenizer.add_tokens(["<tool>", "two words", AddedToken("<strip>", lstrip=True, rstrip=True)])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]),
        ]
    )
    directory = tmp_path_factory.mktemp("byte-level")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def byte_level(byte_level_directory: Path) -> TextCodec:
    return TextCodec(byte_level_directory)
