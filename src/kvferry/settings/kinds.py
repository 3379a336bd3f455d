"""What a setting accepts, in words and in code: sizes, times, addresses, a few words, none, auto.

Every kind reads a value from any door into one normal form or refuses it by the setting's name, and
shows a value as a file would write it.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from kvferry.core.quantities import (
    format_size,
    parse_count,
    parse_rate,
    parse_seconds,
    parse_share,
    parse_size,
    show_share,
    shown,
)
from kvferry.errors import ConfigError
from kvferry.settings.disk import read_directories, read_file_name, show_directories
from kvferry.settings.policies import ACCEPTS, read_policy
from kvferry.settings.remote import read_remote
from kvferry.settings.secrets import read_secret
from kvferry.settings.tenants import read_tenants, show_tenants
from kvferry.settings.tiers import read_tiers, show_tiers

_LONGEST_NAME = 64

T = TypeVar("T")


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What a setting accepts: in words, how it is read, how a value is shown."""

    words: str
    read: Callable[[str, object], T]
    show: Callable[[T], str] = str


@dataclass(frozen=True)
class Setting:
    """One setting, described for people: everything is text."""

    name: str
    env: str
    accepts: str
    default: str
    help: str

    def __str__(self) -> str:
        return f"{self.name} = {self.default}  ({self.accepts}; {self.env})  {self.help}"


class Auto(Enum):
    """A value to be found by looking at the machine."""

    AUTO = "auto"


AUTO = Auto.AUTO


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
SECRET = Kind("text or file:PATH", read_secret, lambda value: "(not shown)")


PORT = Kind("port", lambda name, value: parse_count(value, name=name, maximum=65535))

_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")


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


ADDRESS = Kind("address", _read_address)
TIERS = Kind("KIND:OPTIONS, ...|none", read_tiers, show_tiers)
POLICY = Kind(ACCEPTS, read_policy)
TENANTS = Kind("NAME=SHARE[:CEILING], ...|none", read_tenants, show_tenants)
DIRECTORIES = Kind("PATH, ...|none", read_directories, show_directories)
FILE_NAME = Kind("PATH", read_file_name)

STORE = Kind("URL", lambda name, value: str(read_remote(name, value)))


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
    """The same, or None; files and the environment write None as "none"."""

    def read(name: str, value: object) -> T | None:
        if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
            return None
        return kind.read(name, value)

    def show(value: T | None) -> str:
        return "none" if value is None else kind.show(value)

    return Kind(f"{kind.words}|none", read, show)


def or_auto(kind: Kind[T]) -> Kind[T | Auto]:
    """The same, or "auto": found by looking at the machine."""

    def read(name: str, value: object) -> T | Auto:
        if value is AUTO or (isinstance(value, str) and value.strip().lower() == AUTO.value):
            return AUTO
        return kind.read(name, value)

    def show(value: T | Auto) -> str:
        return AUTO.value if isinstance(value, Auto) else kind.show(value)

    return Kind(f"{kind.words}|auto", read, show)


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint at the name that was meant, if one is near."""
    near = difflib.get_close_matches(name[:_LONGEST_NAME].lower(), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
