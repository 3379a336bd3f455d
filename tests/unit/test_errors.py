"""The tree drawn in the docstring is the tree of classes."""

from __future__ import annotations

import inspect
import re

import pytest

from kvferry import errors

CLASSES = {
    name: cls
    for name, cls in vars(errors).items()
    if inspect.isclass(cls) and issubclass(cls, BaseException)
}
LINE = re.compile(r"^ {4}(?P<indent>[│├└─ ]*)(?P<name>\w+Error)(?: \((?P<builtin>\w+)\))?(?:\s|$)")


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Class name to (parent in the drawing, builtin base in brackets)."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := LINE.match(line):
            depth = len(match["indent"]) // 4
            path[depth:] = [match["name"]]
            tree[match["name"]] = (path[depth - 1] if depth else None, match["builtin"])
    return tree


def test_every_class_is_drawn_and_every_drawn_class_exists():
    assert set(drawn()) == set(CLASSES)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_bases_are_as_drawn(name):
    parent, builtin = drawn()[name]
    bases = [base.__name__ for base in CLASSES[name].__bases__]
    assert bases[0] == (parent or "Exception")
    assert bases[1:] == ([builtin] if builtin else [])
