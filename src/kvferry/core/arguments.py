"""A factory that a setting names by its module path."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from kvferry.errors import ConfigError


def find_factory(path: str, *, what: str, where: str) -> Callable[..., Any]:
    """What ``package.module:name`` names; ConfigError where it cannot be had.

    ``what`` begins the refusal; ``where`` says whose machine needs the module.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(
            f"{what}: {module} cannot be imported ({error}); install it where the engine's "
            f"{where}, or correct the setting"
        ) from error
    except Exception as error:  # whatever its code does on import
        raise ConfigError(
            f"{what}: importing {module} failed: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(f"{what}: {module} has no factory {name} that can be called")
    return cast("Callable[..., Any]", found)
