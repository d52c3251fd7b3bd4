"""Request bodies of the HTTP API. Unknown fields are ignored, wrong types are refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dcprt.errors import RequestError
from dcprt.params import SamplingParams

Prompt = str | list[int]


class Body(BaseModel):
    """Base of all bodies: `1` is a float, but `"1"` is not a number."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class OpenAIBody(Body):
    """What completions and chat completions share; `top_k` and those below it are extensions of vLLM and SGLang."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
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

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        """Raises RequestError for a value outside its range."""
        return SamplingParams(
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
    max_completion_tokens: int | None = Field(default=None, ge=1)


class GenerateSampling(Body):
    """SGLang's `sampling_params`."""

    max_new_tokens: int | None = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None

    def sampling(self) -> SamplingParams:
        """Raises RequestError for a value outside its range."""
        return SamplingParams(
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
    rid: str | list[str] | None = None
    cache_salt: str | None = None

    @property
    def is_batch(self) -> bool:
        given = self.text if self.text is not None else self.input_ids
        return isinstance(given, list) and (not given or not isinstance(given[0], int))

    def prompts(self) -> list[Prompt]:
        given = self.text if self.text is not None else self.input_ids
        return [] if given is None else _many(given)


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
