"""A keyword that a function does not have, told from a setting that does not exist."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar, cast

from kvferry.errors import ConfigError, UnknownSettingError

P = ParamSpec("P")
T = TypeVar("T")


def names_misspelt(settings: Iterable[str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For a function that takes ``settings`` besides its own keywords: refuse others by name.

    Looked at before the call: else Python would complain of what is missing (``model``), not of
    what is wrong (``modle``).
    """
    known_settings = tuple(settings)

    def checked(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters.values()
        own = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in own and name not in known_settings:
                    raise UnknownSettingError(
                        _words(function.__name__, name, own, known_settings)
                    ) from None
            return function(*args, **kwargs)

        return call

    return checked


def _words(function: str, name: str, own: list[str], settings: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.lower(), [*own, *settings], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"{function}: there is no keyword {name!r}{hint}; it takes {', '.join(own)}, "
        f"and the settings {', '.join(settings)}"
    )


# ------------------------------------------------------------------------------------------------
# A factory of somebody's own, found by the module path that a setting names.


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
