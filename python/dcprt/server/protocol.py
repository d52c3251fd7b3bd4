"""Request bodies of the HTTP API. Unknown fields are ignored, wrong types are refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dcprt.errors import RequestError
from dcprt.params import MAX_LOGPROBS, SamplingParams

Prompt = str | list[int]

MAX_CHOICES = 1024
"""Most answers that one HTTP request may ask for: prompts times `n`."""


def check_choices(prompts: int, n: int) -> None:
    """Raises RequestError for more answers than one HTTP request may ask for."""
    if prompts * n > MAX_CHOICES:
        raise RequestError(
            f"{prompts} prompt(s) with n = {n} are {prompts * n} answers; one request may ask for {MAX_CHOICES}.",
            param="n" if n > 1 else "prompt",
        )


class Body(BaseModel):
    """Base of all bodies: `1` is a float, but `"1"` is not a number."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class OpenAIBody(Body):
    """What completions and chat completions share; `top_k` and those below it are extensions of vLLM and SGLang."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=0)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    min_tokens: int | None = Field(default=None, ge=0)
    timeout: float | None = Field(default=None, gt=0)

    @property
    def choices(self) -> int:
        """How many answers to each prompt."""
        return self.n or 1

    def sampling(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """Raises RequestError for a value outside its range."""
        return SamplingParams(
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=_bias(self.logit_bias),
            min_tokens=self.min_tokens or 0,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=-1 if self.top_k is None else self.top_k,
            stop=_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            skip_special_tokens=self.skip_special_tokens,
        )

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage and no choices."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(OpenAIBody):
    """`POST /v1/completions`; a list of prompts gives one choice each."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    def prompts(self) -> list[Prompt]:
        return _many(self.prompt)


class ChatMessage(Body):
    """One message; further fields go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: parts of type text joined to one string.

        Raises:
            RequestError: a part of another type.
        """
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "".join(_text_of(part) for part in self.content)
        return message


class ChatBody(OpenAIBody):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    def wanted_logprobs(self) -> int | None:
        """How many alternatives at each place; None for no log probabilities at all.

        Raises:
            RequestError: `top_logprobs` without `logprobs`.
        """
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class GenerateSampling(Body):
    """SGLang's `sampling_params`."""

    max_new_tokens: int | None = Field(default=128, ge=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None
    n: int = Field(default=1, ge=1, le=128)
    min_p: float = Field(default=0.0, ge=0, le=1)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0)
    min_new_tokens: int = Field(default=0, ge=0)
    logit_bias: dict[str, float] | None = None

    def sampling(self, logprobs: int | None = None, prompt_logprobs: int | None = None) -> SamplingParams:
        """Raises RequestError for a value outside its range."""
        return SamplingParams(
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_new_tokens,
            logit_bias=_bias(self.logit_bias),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            max_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            seed=self.sampling_seed,
            skip_special_tokens=self.skip_special_tokens,
        )


class GenerateBody(Body):
    """`POST /generate`, in SGLang's shape; lists of texts or of id lists give a list of answers."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: GenerateSampling = Field(default_factory=GenerateSampling)
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = Field(default=-1, ge=-1)
    top_logprobs_num: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    timeout: float | None = Field(default=None, gt=0)
    rid: str | list[str] | None = None
    cache_salt: str | None = None

    def wanted_logprobs(self) -> tuple[int | None, int | None]:
        """How many alternatives at each place of output and of prompt; None for no log probabilities."""
        if not self.return_logprob:
            return None, None
        return self.top_logprobs_num, self.top_logprobs_num if self.logprob_start_len >= 0 else None

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list."""
        if self.sampling_params.n > 1:
            return True
        given = self.text if self.text is not None else self.input_ids
        return isinstance(given, list) and (not given or not isinstance(given[0], int))

    def prompts(self) -> list[Prompt]:
        given = self.text if self.text is not None else self.input_ids
        return [] if given is None else _many(given)


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or a chat as the model would see it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = True


class AbortBody(Body):
    """`POST /abort_request`: one request by its whole id, or all."""

    rid: str = ""
    abort_all: bool = False


def _bias(given: dict[str, float] | None) -> dict[int, float]:
    """Raises RequestError for a key that is no token id."""
    try:
        return {int(token): value for token, value in (given or {}).items()}
    except ValueError as error:
        raise RequestError("The keys of logit_bias are token ids.", param="logit_bias") from error


def _text_of(part: dict[str, Any]) -> str:
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f"Content parts must be of type text, with a text; not {part.get('type')!r}.", param="messages"
        )
    return str(part["text"])


def _strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _many(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)
