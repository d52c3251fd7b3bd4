"""How text is split before byte-pair merging, by the names that `tokenizer.ggml.pre` has for it.

A name is listed only where the tokenizer.json of the models behind it is public knowledge, and then with the
steps of that file: llama.cpp, which coined the names, splits the same way but leaves out normalizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Step = dict[str, Any]

_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_GPT2: Step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY: Step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_NFC: Step = {"type": "NFC"}
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Split:
    """What a value of `tokenizer.ggml.pre` stands for: steps of a tokenizer.json, and BOS where no key says."""

    steps: tuple[Step, ...]
    normalizer: Step | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _regex(pattern: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _words(digits: str) -> Step:
    """The split of Llama 3 and Qwen 2, which differ only in how many digits stay together."""
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    return _regex(contractions + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES)


def _tekken() -> Step:
    """The split of Mistral Nemo: words break where lower case turns into upper case."""
    before = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return _regex(f"{before}{upper}*{lower}+|{before}{upper}+{lower}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES)


_LETTERS_WITH_CASE = (
    rb"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    rb"\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    rb"\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    rb"\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57"
    rb"\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    rb"\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124"
    rb"\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    rb"\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    rb"\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    rb"\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    rb"\U000118a0-\U000118df\U0001e900-\U0001e943"
).decode("unicode-escape")
"""Letters that have upper and lower case, as of the Unicode that DeepSeek's tokenizers were made with."""

_EAST_ASIA = _regex("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")


def _deepseek_llm() -> tuple[Step, ...]:
    marks = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
    return (
        _regex("[\r\n]"),
        _regex(rf"\s?[{_LETTERS_WITH_CASE}]+"),
        _regex(rf"\s?[{marks}]+"),
        _regex(r"\s+$"),
        _EAST_ASIA,
        _DIGITS,
        _BYTES_ONLY,
    )


def _deepseek_coder() -> tuple[Step, ...]:
    return _regex("[\r\n]"), _regex(r"\s?\p{L}+"), _regex(r"\s?\p{P}+"), _EAST_ASIA, _DIGITS, _BYTES_ONLY


def _deepseek_v3() -> tuple[Step, ...]:
    marks = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    words = r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    return (
        _regex(r"\p{N}{1,3}"),
        _regex("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        _regex(marks + words + _SPACES),
        _BYTES_ONLY,
    )


_LLAMA3 = Split((_words(r"\p{N}{1,3}"), _BYTES_ONLY), ignore_merges=True, add_bos=True)
_STARCODER = Split((_DIGITS, _GPT2))

SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": Split((_words(r"\p{N}"), _BYTES_ONLY), normalizer=_NFC),
    "gpt-2": Split((_GPT2,)),
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "command-r": Split((_DIGITS, _GPT2), normalizer=_NFC),
    "tekken": Split((_tekken(), _BYTES_ONLY), ignore_merges=True, add_bos=True),
    "deepseek-llm": Split(_deepseek_llm()),
    "deepseek-coder": Split(_deepseek_coder()),
    "deepseek-v3": Split(_deepseek_v3()),
}
