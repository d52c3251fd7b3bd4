"""Chats to prompts, with the jinja templates of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcprt.errors import ModelError, RequestError
from dcprt.tokenizer.files import read_text

if TYPE_CHECKING:
    import jinja2

_BAD_INPUT = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template raises, beside jinja2's own errors, when messages lack what it expects."""


class ChatTemplates:
    """The templates of a model by name: `default`, and perhaps `tool_use` for requests with tools."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def of_model(cls, directory: Path, config: dict[str, Any]) -> ChatTemplates:
        """Those of a directory; chat_template.jinja goes before what tokenizer_config.json has.

        Raises:
            ModelError: chat_template.jinja cannot be read.
        """
        declared = config.get("chat_template")
        sources: dict[str, str] = {}
        if isinstance(declared, str):
            sources["default"] = declared
        elif isinstance(declared, list):
            for entry in declared:
                if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                    sources[str(entry.get("name"))] = entry["template"]
        beside = read_text(directory / "chat_template.jinja")
        if beside is not None:
            sources = {"default": beside}
        if sources and "default" not in sources:
            sources["default"] = next(iter(sources.values()))
        return cls(sources)

    @classmethod
    def given(cls, text: str) -> ChatTemplates:
        """One template that the operator chose; it is compiled at once, so that a mistake shows at the start.

        Raises:
            ModelError: the text is no template; names the line.
        """
        import jinja2

        templates = cls({"default": text})
        try:
            templates._template("default")
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"The chat template given is no valid jinja template: line {error.lineno}: {error}"
            ) from error
        return templates

    def __bool__(self) -> bool:
        return bool(self._sources)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, values: Mapping[str, Any]
    ) -> str:
        """The prompt for a chat. `values` are what else the template sees.

        Fields of a message that are None are left out, since templates test for presence.

        Raises:
            RequestError: there is no template, or the template refuses the messages.
        """
        import jinja2

        if not self._sources:
            raise RequestError(
                "This model has no chat template, so it cannot answer chats; use text completions instead.",
                param="messages",
            )
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        name = "tool_use" if values.get("tools") and "tool_use" in self._sources else "default"
        try:
            return self._template(name).render(**values, messages=plain, add_generation_prompt=add_generation_prompt)
        except (jinja2.TemplateError, *_BAD_INPUT) as error:
            reason = str(error) or type(error).__name__
            text = f"The chat template cannot use these messages: {reason}"
            raise RequestError(text, param="messages") from error

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            self._compiled[name] = _environment().from_string(self._sources[name])
        return self._compiled[name]


def _environment() -> jinja2.Environment:
    """What chat templates may rely on, in a sandbox that cannot change its inputs."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's words for training; here they are rendered as they are."""

        tags = {"generation"}  # noqa: RUF012, jinja2 declares it like this

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
