"""A keyword that a function does not have, told from a setting that does not exist."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from kvferry.errors import UnknownSettingError

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
