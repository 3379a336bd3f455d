"""The vLLM versions that the connector was tested with, and checks of a newer one's hooks."""

from __future__ import annotations

import inspect
import logging
import re
from types import FunctionType
from typing import Any

from kvferry.errors import ConfigError

log = logging.getLogger(__name__)

OLDEST = (0, 26)
NEWEST = (0, 33)

_FIXED_SEEDS = (0, 29)
"""From this version on, cryptographic block hashes, the default, have one seed in all processes."""

_OF_OLDER_ONES = {"prefer_cross_layer_blocks", "register_cross_layers_kv_cache"}
"""Hooks of ours that the newest tested vLLM no longer calls."""

_CALLED = ("_get_connector_metadata",)
"""Methods of vLLM's base class that our connector calls and does not define."""


def refusal(version: str) -> str:
    """Return why a vLLM of this version is refused whatever its hooks are; empty if it is not."""
    if (_number(version) or (0, 0)) >= OLDEST:
        return ""
    return (
        f"kvferry supports vLLM {_text(OLDEST)} to {_text(NEWEST)}, this is {version}; "
        "install a vLLM of that range, or a kvferry that knows yours"
    )


def is_newer(version: str) -> bool:
    """Whether this vLLM is newer than the newest that kvferry was tested with."""
    return (_number(version) or (0, 0)) > NEWEST


def require_fit(version: str, connector: type) -> None:
    """Raise ConfigError for a vLLM too old for ``connector``, or so new that its hooks differ.

    A newer vLLM whose hooks fit is served, with a warning.
    """
    if words := refusal(version):
        raise ConfigError(words)
    if not is_newer(version):
        return
    if wrong := misfits(connector):
        raise ConfigError(
            f"vLLM {version} is newer than {_text(NEWEST)}, the newest kvferry was tested with, "
            f"and speaks to connectors differently: {'; '.join(wrong)}; install vLLM "
            f"{_text(OLDEST)} to {_text(NEWEST)}, or a kvferry that knows yours"
        )
    log.warning(
        "vLLM %s is newer than %s, the newest kvferry was tested with. Its hooks for connectors "
        "have not changed, so kvferry serves; compare some answers with and without it.",
        version,
        _text(NEWEST),
    )


def misfits(connector: type) -> list[str]:
    """Return, in words, each hook of ``connector`` that does not fit vLLM's base classes."""
    wrong = [f"{name} is no more" for name in _CALLED if not hasattr(connector, name)]
    for name, ours in vars(connector).items():
        if _function(ours) is None or (name.startswith("_") and name != "__init__"):
            continue
        above = (vars(one)[name] for one in connector.__mro__[1:] if name in vars(one))
        theirs = next(above, None)
        if theirs is None:
            wrong += [] if name in _OF_OLDER_ONES else [f"{name} is no more"]
        elif type(ours) is not type(theirs):
            here = type(ours).__name__
            wrong.append(f"{name} is now a {type(theirs).__name__}, here a {here}")
        elif not _takes(mine := _signature(ours), asked := _signature(theirs)):
            wrong.append(f"{name}{asked} is here {name}{mine}")
    return wrong


def _takes(ours: inspect.Signature, theirs: inspect.Signature) -> bool:
    """Whether each call that fits ``theirs``, by position or name, means the same to ``ours``."""
    mine = list(ours.parameters.values())
    asked = list(theirs.parameters.values())
    may_be_missing = {p.name for p in asked if p.default is not p.empty}
    may_be_missing |= {p.name for p in mine[len(asked) :]}  # no caller of ``theirs`` passes these
    same = [(p.name, p.kind) for p in mine[: len(asked)]] == [(p.name, p.kind) for p in asked]
    return same and all(p.default is not p.empty for p in mine if p.name in may_be_missing)


def _function(member: Any) -> FunctionType | None:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    return member if isinstance(member, FunctionType) else None


def _signature(member: Any) -> inspect.Signature:
    """Return a signature without annotations, which can write the same type in many ways."""
    function = _function(member)
    assert function is not None
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)


def seeds_are_fixed(version: str) -> bool:
    """Whether all processes of this vLLM hash a block alike even without PYTHONHASHSEED."""
    return (_number(version) or (0, 0)) >= _FIXED_SEEDS


def _number(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
