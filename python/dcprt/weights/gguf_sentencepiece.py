"""The `llama` tokenizer of a GGUF file, written as a SentencePiece model.

Such a tokenizer is a SentencePiece BPE model taken apart into tokens, scores and types. Put together again,
the `sentencepiece` library merges exactly as the original does and as llama.cpp does: the pair whose result
has the highest score, of equal ones the leftmost. A list of merges cannot say that, since it ranks the ways
to make one token.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from dcprt.errors import ModelError
from dcprt.weights.gguf_file import GgufFile

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
_TYPES = range(1, 7)
_BPE = 2


def write_model(gguf: GgufFile, tokens: Sequence[str], types: Sequence[int], bos: int | None, eos: int | None) -> bytes:
    """The contents of tokenizer.model for the tokens of `gguf`.

    Raises:
        ModelError: scores are missing, or the tokens make no SentencePiece model.
    """
    scores = gguf.need("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise ModelError(f"{gguf.path}: {len(tokens)} tokens, but {len(scores)} values in tokenizer.ggml.scores.")
    if gguf.get("tokenizer.ggml.remove_extra_whitespaces", bool, False):
        raise ModelError(f"{gguf.path}: tokenizer.ggml.remove_extra_whitespaces is set; not supported.")
    _check_types(gguf, tokens, types)
    unknown = types.index(UNKNOWN)
    pieces = b"".join(_message(1, _piece(*piece)) for piece in zip(tokens, scores, types, strict=True))
    raw = pieces + _message(2, _trainer(tokens, unknown, bos, eos)) + _message(3, _normalizer(gguf))
    _check_loads(gguf, raw)
    return raw


def _check_types(gguf: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> None:
    for token, kind in zip(tokens, types, strict=True):
        if kind not in _TYPES:
            raise ModelError(f"{gguf.path}: token {token!r} has the type {kind}, which is not known.")
        if not token:
            raise ModelError(f"{gguf.path}: tokenizer.ggml.tokens has an empty token.")
    if (count := types.count(UNKNOWN)) != 1:
        raise ModelError(f"{gguf.path}: {count} tokens have the type of the unknown token, expected one.")
    found = {token for token, kind in zip(tokens, types, strict=True) if kind == BYTE}
    if missing := {f"<0x{byte:02X}>" for byte in range(256)} - found:
        raise ModelError(f"{gguf.path}: the tokenizer has no byte token {min(missing)}; not supported without all 256.")


def _check_loads(gguf: GgufFile, raw: bytes) -> None:
    import sentencepiece

    try:
        sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(raw)
    except RuntimeError as error:
        raise ModelError(f"{gguf.path}: the tokenizer in the metadata is damaged: {error}") from error


def _piece(token: str, score: float, kind: int) -> bytes:
    return _text(1, token) + _tag(2, 5) + struct.pack("<f", score) + _number(3, kind)


def _trainer(tokens: Sequence[str], unknown: int, bos: int | None, eos: int | None) -> bytes:
    """The part of the trainer's settings that the library reads: the algorithm and the special tokens."""
    raw = _number(3, _BPE) + _number(4, len(tokens)) + _number(35, 1)
    for number, token_id in ((0, unknown), (1, bos), (2, eos)):
        if token_id is not None:
            raw += _number(40 + number, token_id) + _text(45 + number, tokens[token_id])
    return raw


def _normalizer(gguf: GgufFile) -> bytes:
    """Text is taken as it is, but for spaces, which become marks, and perhaps one in front."""
    prefix = gguf.get("tokenizer.ggml.add_space_prefix", bool, True)
    return _text(1, "identity") + _number(3, int(prefix)) + _number(4, 0) + _number(5, 1)


def _varint(value: int) -> bytes:
    """A number in protobuf's encoding: seven bits a byte, lowest first, the top bit set where more follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _number(field: int, value: int) -> bytes:
    return _tag(field, 0) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(content)) + content


def _text(field: int, content: str) -> bytes:
    return _message(field, content.encode("utf-8"))
