"""The text side of one running request: tokens in, whole characters out, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from dcprt.messages import Finish, TextLogprob, TextOut, TokenLogprobs, TokensOut
from dcprt.params import SamplingParams
from dcprt.tokenizer.detokenizer import Detokenizer
from dcprt.tokenizer.stops import StopMatcher
from dcprt.tokenizer.text import TextCodec


class OutputText:
    """What is known of a request's text. Without a codec there is none, only tokens.

    `prompt` are the prompt's tokens, kept only where the client wants them back as text or with log probabilities;
    `echo` is the text to be given back with the first output, and `written` whether the client wrote it, special
    tokens included.
    """

    def __init__(
        self,
        codec: TextCodec | None,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        echo: str = "",
        *,
        written: bool = False,
    ) -> None:
        self._codec = codec
        self._params = params
        self._prompt = prompt
        self._echo = echo
        self._written = written
        self._detokenizer = Detokenizer(codec, params.skip_special_tokens) if codec else None
        self._left_out = LeftOut(codec, params.skip_special_tokens) if codec else None
        self._stops = StopMatcher(params.stop)
        self._count = 0

    def push(self, message: TokensOut) -> TextOut:
        """The message as the client gets it. It has a `finish` of its own where a stop string is complete."""
        text = ""
        for used, token in enumerate(message.token_ids, 1):
            self._count += 1
            ends = message.finish is not None and message.finish.matched == token and used == len(message.token_ids)
            if self._detokenizer is not None and not ends:  # the token that ends a request has no text
                text += self._whole(self._detokenizer.push([token]))
            if self._stops.matched is not None:
                return self._out(message, text, used)
        if message.finish and self._detokenizer is not None:
            text += self._whole(self._detokenizer.flush())
            if self._stops.matched is None:
                text += self._stops.flush()
        return self._out(message, text, len(message.token_ids))

    def _whole(self, text: str) -> str:
        """What of `text` cannot be part of a stop string any more; all of it before `min_tokens`."""
        return text if self._count < self._params.min_tokens else self._stops.push(text)

    def _out(self, message: TokensOut, text: str, used: int) -> TextOut:
        """The first `used` tokens of `message`; they end the request if a stop string has been found."""
        finish, usage = message.finish, message.usage
        if self._stops.matched is not None:
            finish = Finish(reason="stop", matched=self._stops.matched)
            unused = len(message.token_ids) - used
            usage = usage.without_output(unused)
        prompt_logprobs = self._prompt_logprobs(message)
        echo, self._echo = self._echo, ""
        return TextOut(
            rid=message.rid,
            text=text,
            token_ids=message.token_ids[:used],
            usage=usage,
            finish=finish,
            logprobs=[self._named(entry, self._left_out) for entry in message.logprobs[:used]],
            prompt_logprobs=prompt_logprobs,
            prompt_text=echo,
        )

    def _prompt_logprobs(self, message: TokensOut) -> list[TextLogprob]:
        """One entry a prompt token; nothing comes before the first, so it has no log probability."""
        if self._params.prompt_logprobs is None or not self._prompt:
            return []
        left_out: LeftOut | None = None
        if self._codec is not None:
            skip = self._params.skip_special_tokens
            left_out = LeftOutOfWritten(self._codec, self._echo) if self._written else LeftOut(self._codec, skip)
        first = self._token(self._prompt[0], None, hidden=left_out.hidden(self._prompt[0]) if left_out else 0)
        self._prompt = ()
        return [first, *(self._named(entry, left_out) for entry in message.prompt_logprobs)]

    def _named(self, entry: TokenLogprobs, left_out: LeftOut | None) -> TextLogprob:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return self._token(entry.token, entry.logprob, top, left_out.hidden(entry.token) if left_out else 0)

    def _token(
        self, token: int, logprob: float | None, top: Sequence[TextLogprob] = (), hidden: int = 0
    ) -> TextLogprob:
        raw = self._codec.token_bytes(token) if self._codec else b""
        return TextLogprob(token, raw.decode("utf-8", "replace"), raw, logprob, list(top), hidden)


class LeftOut:
    """How many bytes of each token in turn, from its first on, a `Detokenizer` leaves out of the text."""

    def __init__(self, codec: TextCodec, skip_special_tokens: bool) -> None:
        self._codec = codec
        self._skip = codec.special_ids if skip_special_tokens else frozenset()
        self._strip = codec.strips_first_space

    def hidden(self, token: int) -> int:
        """Of the next token."""
        raw = self._codec.token_bytes(token)
        if token in self._skip:
            return len(raw)
        if raw and self._strip:
            self._strip = False
            return int(raw.startswith(b" "))
        return 0


class LeftOutOfWritten(LeftOut):
    """The same for the tokens of a text that is given back as it was written.

    Special tokens in it are part of it; those that the tokenizer put around it are not, nor is a space that it put
    before it.
    """

    def __init__(self, codec: TextCodec, text: str) -> None:
        super().__init__(codec, True)
        self._text = text.encode("utf-8", "replace")
        self._at = 0

    def hidden(self, token: int) -> int:
        raw = self._codec.token_bytes(token)
        hidden = 0
        if not self._text.startswith(raw, self._at):
            if self._at == 0 and raw.startswith(b" ") and self._text.startswith(raw[1:]):
                hidden = 1
            elif token in self._skip:
                hidden = len(raw)
        self._at += len(raw) - hidden
        return hidden
