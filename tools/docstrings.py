"""Docstrings as the documentation site reads them: our few reST marks turned into Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|mod|data|attr):`~?([^`]+)`")
_LITERAL = re.compile(r"^::\n", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites each docstring when it is found; the source stays as it is."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _LITERAL.sub("", text).replace("``", "`")
