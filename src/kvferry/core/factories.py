"""Names that users give: the nearest known one, or a factory by its module path."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

from kvferry.errors import ConfigError

_LONGEST_NAME = 64
FACTORY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""``package.module:name``, which a user may give where kvferry has names of its own."""


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint at the name that was meant, if one is near; else nothing."""
    near = difflib.get_close_matches(name[:_LONGEST_NAME].lower(), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def find_factory(path: str, *, what: str, where: str) -> Callable[..., Any]:
    """The callable that ``package.module:name`` names; ConfigError where there is none.

    ``what`` begins the message; ``where`` names the process whose machine needs the module.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(
            f"{what}: {module} cannot be imported ({error}); install it where the engine's "
            f"{where}, or correct the setting"
        ) from error
    except Exception as error:  # its code may do anything on import
        raise ConfigError(
            f"{what}: importing {module} failed: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(f"{what}: {module} has no factory {name} that can be called")
    return cast("Callable[..., Any]", found)
