"""The layers of the code: a module imports only from its own line or the lines above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "python"


@dataclass(frozen=True)
class Line:
    """A line of the table: its packages, and whether they may import torch when they are imported."""

    name: str
    packages: tuple[str, ...]
    torch: bool


TABLE = [
    Line(
        "words",
        ("errors", "env", "ids", "config", "messages", "metrics", "params", "spec", "trace", "wire"),
        torch=False,
    ),
    Line(
        "pure logic",
        ("parallel", "kv", "kv.layout", "kv.allocator", "kv.radix", "scheduler", "planner"),
        torch=False,
    ),
    Line("device", ("comm", "kv.pool", "ops"), torch=True),
    Line("operators", ("attention", "layers", "sampling", "grammar"), torch=True),
    Line("models", ("models", "weights"), torch=True),
    Line("execution", ("worker",), torch=True),
    Line("processes", ("tokenizer", "runtime", "engine", "server", "launch_server"), torch=False),
]
HEAVY = {"torch", "transformers", "accelerate"}


@dataclass(frozen=True)
class Import:
    """`name` is a module; `eager` ones run when the importing module is imported, `typing` ones never."""

    name: str
    line: int
    eager: bool
    typing: bool


@cache
def modules() -> dict[str, Path]:
    """Every module of dcprt and its file."""
    found = {}
    for path in sorted((ROOT / "dcprt").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def statements(body: list[ast.stmt], eager: bool, typing: bool) -> Iterator[tuple[ast.stmt, bool, bool]]:
    """All import statements, however deep."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, eager, typing
        inside = eager and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            below = getattr(node, part, [])
            yield from statements(below, inside, typing or (part == "body" and is_type_checking(node)))


def targets(node: ast.stmt, package: str) -> Iterator[str]:
    """The modules a statement imports, by absolute name."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, *([base] if base else [])])
        for alias in node.names:
            name = f"{base}.{alias.name}"
            yield name if name in modules() else base


@cache
def imports(module: str) -> list[Import]:
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    return [
        Import(name, node.lineno, eager and not typing, typing)
        for node, eager, typing in statements(tree.body, True, False)
        for name in targets(node, package)
    ]


def line_of(module: str) -> int | None:
    """Index of the table's line that names the module or the nearest package above it."""
    name = module.removeprefix("dcprt.")
    while name:
        for index, line in enumerate(TABLE):
            if name in line.packages:
                return index
        name = name.rpartition(".")[0]
    return None


def ours(name: str) -> bool:
    return name.startswith("dcprt.")


def packages_of(name: str) -> Iterator[str]:
    """The module and the packages that are imported with it."""
    while name in modules():
        yield name
        name = name.rpartition(".")[0]


@cache
def eager_closure(module: str) -> frozenset[str]:
    """All that is imported when `module` is."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += packages_of(name)
            if name in modules():
                todo += [found.name for found in imports(name) if found.eager]
    return frozenset(seen)


EVERY = sorted(name for name in modules() if name != "dcprt")


def test_every_module_has_its_line() -> None:
    assert len(EVERY) > 30
    assert [name for name in EVERY if line_of(name) is None] == []


@pytest.mark.parametrize("module", EVERY)
def test_imports_go_up(module: str) -> None:
    own = line_of(module)
    assert own is not None, f"{module} is on no line of the table"
    for found in imports(module):
        if ours(found.name):
            other = line_of(found.name)
            assert other is not None, f"{module}:{found.line} imports {found.name}, which is on no line"
            assert other <= own, f"{module}:{found.line} ({TABLE[own].name}) imports {found.name} ({TABLE[other].name})"


@pytest.mark.parametrize("module", [m for m in EVERY if (line_of(m) or 0) < 2])
def test_words_and_pure_logic_know_no_torch_at_all(module: str) -> None:
    assert not HEAVY & {found.name.partition(".")[0] for found in imports(module)}
    assert not HEAVY & {name.partition(".")[0] for name in eager_closure(module)}


@pytest.mark.parametrize("module", [m for m in EVERY if not TABLE[line_of(m) or 0].torch])
def test_processes_import_neither_torch_nor_workers_until_they_are_one(module: str) -> None:
    closure = eager_closure(module)
    assert not HEAVY & {name.partition(".")[0] for name in closure}
    named = {"dcprt.models", "dcprt.models.registry"}
    assert not [x for x in closure - named if x.startswith(("dcprt.worker", "dcprt.models", "dcprt.attention"))]


def test_the_package_itself_imports_nothing() -> None:
    assert [found.name for found in imports("dcprt") if found.eager and ours(found.name)] == []


def test_there_are_no_circles_of_packages() -> None:
    for module in EVERY:
        for found in imports(module):
            if found.eager and found.name in modules():
                assert module not in eager_closure(found.name), f"{module} and {found.name} import each other"


def test_the_walk_sees_what_it_should() -> None:
    assert "dcprt.planner.host" in {found.name for found in imports("dcprt.planner.capacity")}
    assert "dcprt.env" in {found.name for found in imports("dcprt.comm.groups")}
    assert "torch" in eager_closure("dcprt.kv.pool")
    lazy = {found.name for found in imports("dcprt.models.registry") if not found.eager}
    assert "dcprt.models.base" in lazy
    assert line_of("dcprt.kv.pool") == 2
    assert line_of("dcprt.kv.layout") == line_of("dcprt.kv") == 1
