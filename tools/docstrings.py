"""Docstrings as the documentation site reads them: our few reST marks turned into Markdown.

What an enum's value means is a comment beside it in the source, and its docstring on the site.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|mod|data|attr):`~?([^`]+)`")
_LITERAL = re.compile(r"^::\n", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites each docstring when it is found; the source stays as it is."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is None and _is_value(obj) and "  # " in obj.source:
            comment = obj.source.partition("  # ")[2].strip()
            obj.docstring = griffe.Docstring(comment, parent=obj, lineno=obj.lineno)
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _LITERAL.sub("", text).replace("``", "`")


def _is_value(obj: Any) -> bool:
    """Whether it is one of an enum's values."""
    if not obj.is_attribute or obj.parent is None or not obj.parent.is_class:
        return False
    return any(str(base) in ("Enum", "IntEnum") for base in obj.parent.bases)
