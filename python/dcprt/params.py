"""What a client may ask of the choice of tokens."""

from __future__ import annotations

import math

import msgspec

from dcprt.errors import RequestError

MAX_LOGPROBS = 20
"""Most alternatives that are reported at each place, as in OpenAI's API."""

MAX_STOPS, MAX_STOP_LEN = 64, 1024
"""Most stop strings of a request, and most characters of one: each character of the text is held against them."""

INT_MAX = 2**31 - 1


def _check(ok: bool, param: str, text: str) -> None:
    if not ok:
        raise RequestError(text, param=param)


def _between(param: str, value: float, low: float, high: float) -> None:
    _check(low <= value <= high, param, f"{param} must be between {low} and {high}, not {value}.")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request's tokens are chosen, and when it ends.

    Attributes:
        max_tokens: most new tokens; None fills the context, 0 only computes the prompt.
        temperature: logits are divided by it; 0 (in fact, below 1e-5) takes the most likely token.
        top_p: keep the most likely tokens whose probabilities sum to at least this, 0 < top_p <= 1.
        top_k: keep this many of the most likely tokens; -1 or 0 keeps all.
        min_p: keep tokens at least this likely relative to the most likely one, 0 to 1.
        repetition_penalty: above 1, tokens of prompt and output become less likely (CTRL).
        frequency_penalty: taken from a logit for each occurrence in the output, -2 to 2 (OpenAI).
        presence_penalty: taken from a logit if the token occurs in the output, -2 to 2 (OpenAI).
        logit_bias: added to the logits of token ids, -100 to 100.
        min_tokens: no end token is chosen and no stop string counts before this many new tokens.
        stop: strings that end the request; they are not part of the text.
        stop_token_ids: tokens that end the request; they are part of the token ids, not of the text.
        ignore_eos: go on after the model's own end token.
        seed: random numbers depend on it and the position only; None lets the server choose.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: report the log probability of each new token, and of this many of the best at its place.
        prompt_logprobs: the same for the prompt, from its second token on; such a prompt is computed whole.

    Raises:
        RequestError: a value outside its range; `param` names it.
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_ends()
        self._check_choice()
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _between(name, count, 0, MAX_LOGPROBS)

    def _check_ends(self) -> None:
        limit = self.max_tokens
        _check(
            limit is None or 0 <= limit <= INT_MAX,
            "max_tokens",
            f"max_tokens must be at least 0 and fit in 31 bits, not {limit}.",
        )
        most = INT_MAX if limit is None else limit
        _check(
            0 <= self.min_tokens <= most,
            "min_tokens",
            f"min_tokens must be between 0 and max_tokens ({most}), not {self.min_tokens}.",
        )
        _check(all(self.stop), "stop", "A stop string must not be empty.")
        _check(
            len(self.stop) <= MAX_STOPS and all(len(stop) <= MAX_STOP_LEN for stop in self.stop),
            "stop",
            f"There may be at most {MAX_STOPS} stop strings of at most {MAX_STOP_LEN} characters.",
        )
        for token in self.stop_token_ids:
            _check(0 <= token <= INT_MAX, "stop_token_ids", f"{token} in stop_token_ids is no token id.")

    def _check_choice(self) -> None:
        for name, least in (("temperature", 0.0), ("repetition_penalty", 1e-6)):
            value = getattr(self, name)
            _check(
                math.isfinite(value) and value >= least,
                name,
                f"{name} must be {least} or more and finite, not {value}.",
            )
        _check(0 < self.top_p <= 1, "top_p", f"top_p must be above 0 and at most 1, not {self.top_p}.")
        _check(
            -1 <= self.top_k <= INT_MAX,
            "top_k",
            f"top_k must be -1, 0 or positive, and fit in 31 bits, not {self.top_k}.",
        )
        _between("min_p", self.min_p, 0, 1)
        _between("frequency_penalty", self.frequency_penalty, -2, 2)
        _between("presence_penalty", self.presence_penalty, -2, 2)
        for token, value in self.logit_bias.items():
            _check(0 <= token <= INT_MAX, "logit_bias", f"{token} in logit_bias is no token id.")
            _between("logit_bias", value, -100, 100)
        _check(
            self.seed is None or -(2**63) <= self.seed < 2**64,
            "seed",
            f"seed must fit in 64 bits, not {self.seed}.",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1
