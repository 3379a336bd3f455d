"""What a setting accepts, in words and in code: sizes, times, addresses, words, none, auto.

A :class:`Kind` reads a value from any source into one normal form, or refuses it by the setting's
name, and shows a value as a file would write it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from kvferry.core.quantities import (
    format_size,
    nearest,
    parse_count,
    parse_rate,
    parse_seconds,
    parse_share,
    parse_size,
    show_share,
    shown,
)
from kvferry.errors import ConfigError

_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")

T = TypeVar("T")


class Auto(Enum):
    """A value to be found by looking at the machine."""

    AUTO = "auto"


AUTO = Auto.AUTO


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What a setting accepts: in words, how it is read, how a value is shown.

    ``read`` takes the setting's name and a value and raises ConfigError.
    """

    words: str
    read: Callable[[str, object], T]
    show: Callable[[T], str] = str


def _read_address(name: str, value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    if not _HOST_NAME.fullmatch(text) and not _is_ipv6(text):
        raise ConfigError(
            f"{name}: expected an address such as 127.0.0.1 or ::1, got {shown(value)}"
        )
    return text


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return text.isascii() and text.isprintable()


SIZE = Kind("size", lambda name, value: parse_size(value, name=name), format_size)
SIZE_OR_ZERO = Kind(
    "size", lambda name, value: parse_size(value, name=name, minimum=0), format_size
)
SECONDS = Kind("seconds", lambda name, value: parse_seconds(value, name=name), "{:g}s".format)
SECONDS_OR_ZERO = Kind(
    "seconds", lambda name, value: parse_seconds(value, name=name, may_be_zero=True), "{:g}s".format
)
RATE = Kind("number", lambda name, value: parse_rate(value, name=name), "{:g}".format)
COUNT = Kind("count", lambda name, value: parse_count(value, name=name))
SHARE = Kind("share", lambda name, value: parse_share(value, name=name), show_share)
PORT = Kind("port", lambda name, value: parse_count(value, name=name, maximum=65535))
ADDRESS = Kind("address", _read_address)


def one_of(*choices: str) -> Kind[str]:
    """One of a few words, whatever their case."""

    def read(name: str, value: object) -> str:
        word = value.strip().lower() if isinstance(value, str) and value.isascii() else None
        if word not in choices:
            near = nearest(word or "", choices)
            raise ConfigError(
                f"{name}: expected one of {', '.join(choices)}, got {shown(value)}{near}"
            )
        return word

    return Kind("|".join(choices), read)


def optional(kind: Kind[T]) -> Kind[T | None]:
    """The same kind, or None; files and the environment write None as "none"."""

    def read(name: str, value: object) -> T | None:
        is_none = value is None or (isinstance(value, str) and value.strip().lower() == "none")
        return None if is_none else kind.read(name, value)

    return Kind(f"{kind.words}|none", read, lambda value: _or(value, None, "none", kind))


def or_auto(kind: Kind[T]) -> Kind[T | Auto]:
    """The same kind, or "auto": found by looking at the machine."""

    def read(name: str, value: object) -> T | Auto:
        is_auto = value is AUTO or (isinstance(value, str) and value.strip().lower() == AUTO.value)
        return AUTO if is_auto else kind.read(name, value)

    return Kind(f"{kind.words}|auto", read, lambda value: _or(value, AUTO, AUTO.value, kind))


def _or(value: Any, special: object, word: str, kind: Kind[Any]) -> str:
    return word if value is special else kind.show(value)


def split_list(name: str, value: object, expected: str, most: int) -> list[object]:
    """The items of a text with commas, or of a list; none of None, "" and "none".

    ConfigError for another type, and for more than ``most`` items; ``expected`` describes the
    items.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
        return []
    if not isinstance(value, (str, list, tuple)):
        raise ConfigError(f"{name}: expected {expected}, got {shown(value)}")
    items: list[object] = [*(value.split(",") if isinstance(value, str) else value)]
    if len(items) > most:
        raise ConfigError(f"{name}: at most {most} can be given, got {len(items)}")
    return items
