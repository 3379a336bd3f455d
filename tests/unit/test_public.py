"""The public surface: what is public is documented, what the documents name is public."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from enum import Enum
from importlib import import_module
from pathlib import Path

import pytest

import kvferry
import kvferry.engine

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "api.md").read_text()
OTHER_DOORS = ("kvferry.telemetry.", "kvferry.errors")
"""Documented, and imported from where they are: few need them."""

FOR_ENGINES = [name for name in vars(kvferry.engine) if not name.startswith("_")]
PUBLIC = {
    **{f"kvferry.engine.{name}": getattr(kvferry.engine, name) for name in FOR_ENGINES},
    **{f"kvferry.{name}": getattr(kvferry, name) for name in kvferry.__all__},
}
ENUMS = [each for each in PUBLIC.values() if inspect.isclass(each) and issubclass(each, Enum)]


def found(path: str) -> object:
    module, _, name = path.rpartition(".")
    return import_module(path) if path == "kvferry.errors" else getattr(import_module(module), name)


def documented() -> list[str]:
    return re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE)


def test_what_the_reference_names_is_public() -> None:
    others = {path for path in documented() if not path.startswith(OTHER_DOORS)}
    assert others <= set(PUBLIC), sorted(others - set(PUBLIC))
    for path in documented():
        found(path)


def test_what_is_public_is_in_the_reference_once() -> None:
    places = Counter(path.rpartition(".")[2] for path in documented())
    names = {path.rpartition(".")[2] for path in PUBLIC} - {"__version__", "KvferryError"}
    assert names <= set(places), sorted(names - set(places))
    assert max(places.values()) == 1, places.most_common(1)


def test_a_name_in_both_is_one_thing() -> None:
    for name in set(kvferry.__all__) & set(FOR_ENGINES):
        assert getattr(kvferry, name) is getattr(kvferry.engine, name)


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.__name__)
def test_every_value_says_what_it_means(enum: type[Enum]) -> None:
    """In the comment beside it, which the reference shows."""
    lines = inspect.getsource(enum).splitlines()
    for value in enum:
        assert any(re.match(rf"\s+{value.name} = .+  # \S", line) for line in lines), value


def test_everything_public_says_what_it_is() -> None:
    silent = [
        path
        for path, each in PUBLIC.items()
        if (inspect.isclass(each) or inspect.isfunction(each)) and not inspect.getdoc(each)
    ]
    assert not silent


def test_examples_need_nothing_that_is_not_public() -> None:
    """But for the playground's engine, which is there to be looked at and promises nothing."""
    for example in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(example.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvferry"):
                for alias in node.names:
                    if (node.module or "").startswith("kvferry.tools.demo"):
                        continue
                    assert f"{node.module}.{alias.name}" in PUBLIC, f"{example.name}: {alias.name}"


def test_the_references_programs_run() -> None:
    programs = re.findall(r"```python\n(.*?)```", REFERENCE, re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        exec(compile(program, "api.md", "exec"), {})


def test_one_name_means_one_class() -> None:
    names: Counter[str] = Counter()
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        names.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]
