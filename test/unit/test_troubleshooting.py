"""Every message that docs/troubleshooting.md quotes is one that the code can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = [" ".join(block.split()) for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)]
VALUE = "\0"
"""Stands for what is put into a text when it is printed."""

PURE_VALUE = re.compile(r"/\S+|'\S+' is")

LEAST = 8
"""Characters beside the values that make a clause worth looking for."""


def texts() -> Iterator[str]:
    """Every string of the package and every message of the Makefile, with `VALUE` where values are put in."""
    for path in sorted((ROOT / "python" / "dcprt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(p.value) if isinstance(p, ast.Constant) else VALUE for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sd]|%\.\df", VALUE, node.value)
    make = (ROOT / "Makefile").read_text()
    yield from (text.replace("$$missing", f" {VALUE}") for text in re.findall(r'"(Missing:[^"]*)"', make))


def clauses(text: str) -> list[str]:
    """Parts between full stops, colons and semicolons, without these, if they are long enough to tell."""
    found = [part.strip(" .:;…") for part in re.split(rf"[.:;](?=[ {VALUE}]|$)", " ".join(text.split()))]
    return [part for part in found if len(part.replace(VALUE, "")) >= LEAST and not PURE_VALUE.fullmatch(part)]


KNOWN = {re.compile(".+".join(map(re.escape, clause.split(VALUE)))) for text in texts() for clause in clauses(text)}


def unknown(quote: str) -> list[str]:
    """The clauses of a quote that nothing prints."""
    return [clause for clause in clauses(quote) if not any(pattern.fullmatch(clause) for pattern in KNOWN)]


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_in_the_code(quote: str) -> None:
    assert clauses(quote)
    assert unknown(quote) == []


def test_what_is_not_in_the_code_is_noticed() -> None:
    assert len(QUOTES) > 30
    assert unknown("Port 30000 on 127.0.0.1 is taken. Choose another with --port.") != []
    assert unknown("The request took more time than its 30 s.") != []
