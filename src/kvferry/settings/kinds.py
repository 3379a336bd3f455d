"""The kinds of values that settings accept: sizes, times, addresses, words, none, auto.

A :class:`Kind` reads a value from any source into one normal form, or raises a ConfigError that
names the setting. It also formats a value as a file would have it. A secret, in a setting or in a
file that a setting names, is never shown, not even in an error.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvferry.core.quantities import (
    format_size,
    nearest,
    parse_count,
    parse_seconds,
    parse_share,
    parse_size,
    quoted,
    show_share,
    shown,
)
from kvferry.errors import ConfigError

LEAST_CHARS = 16
KEY_SIZE = 32
_MOST_PATH = 1000
_MOST_SECRET = 4096
_FILE = "file:"


def read_file_name(name: str, value: object) -> str:
    """Return an absolute, normalized path: processes of a server may differ in their directory."""
    given = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(given, str):
        raise ConfigError(f"{name}: expected a path, got {shown(value)}")
    path = os.path.expanduser(given.strip())
    if not path.isprintable() or "," in path or len(path) > _MOST_PATH:
        raise ConfigError(
            f"{name}: {quoted(given)} cannot be used as a path here: give one of at most "
            f"{_MOST_PATH} printable characters, without commas"
        )
    if not os.path.isabs(path):
        raise ConfigError(
            f"{name}: expected a whole path such as /mnt/nvme/kvferry, got {shown(given)}; the "
            "processes of a server need not run in one directory"
        )
    return os.path.normpath(path)


def read_file(path: str | Path, what: str, most: int, *, is_private: bool = False) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    ``what`` begins the message of a ConfigError. Other users must not be able to read a private
    file.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its writer
            raise ConfigError(f"{what} cannot be read: it is no file")
        if is_private and found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ConfigError(
                f"{what} can be read or changed by others: chmod 600 it (440 for a group is fine)"
            )
        with open(path, "rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        words = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"{what} cannot be read: {words or error}") from error
    if len(content) > most:
        raise ConfigError(f"{what} has more than {format_size(most)}")
    return content


def read_secret(name: str, value: object) -> str:
    """Return a secret of printable ASCII without spaces, given as text or as ``file:PATH``."""
    if not isinstance(value, str):
        raise ConfigError(f"{name}: expected text, or file:PATH of a file with it")
    secret, where = value.strip(), ""
    if secret.startswith(_FILE):
        path = secret.removeprefix(_FILE)
        where = f" in {quoted(path)}"
        content = read_file(os.path.expanduser(path), f"{name}: {quoted(path)}", _MOST_SECRET)
        secret = content.decode("ascii", errors="replace").strip()
    if not LEAST_CHARS <= len(secret) <= _MOST_SECRET:
        raise ConfigError(
            f"{name}: a secret{where} has at least {LEAST_CHARS} characters, this one {len(secret)}"
        )
    if not (secret.isascii() and secret.isprintable() and " " not in secret):
        raise ConfigError(f"{name}: a secret{where} is printable ASCII without spaces")
    return secret


def read_key(
    setting: str, file: str | None, variable: str, env: Mapping[str, str] | None = None
) -> bytes | None:
    """Return the key in ``file``, or else in the environment variable; None without either.

    ``setting`` names the file's setting in errors. Call this where the key is used, so that no
    Config holds it. ConfigError, without a byte of the key, if it is invalid.
    """
    if file is not None:
        what = f"{setting}: {quoted(file)}"
        return _key_of(read_file(file, what, _MOST_SECRET, is_private=True), what)
    given = (os.environ if env is None else env).get(variable, "").strip()
    return _key_of(given.encode(), variable) if given else None


def _key_of(content: bytes, what: str) -> bytes:
    """Return the key from ``KEY_SIZE`` bytes or their base64."""
    if len(content) == KEY_SIZE:
        return content
    try:
        key = base64.b64decode(content.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_SIZE:
        raise ConfigError(
            f"{what} holds no key: give {KEY_SIZE} random bytes, or their base64 "
            "(openssl rand -base64 32)"
        )
    return key


T = TypeVar("T")
U = TypeVar("U")


class Auto(Enum):
    """A value that kvferry finds out from the machine."""

    AUTO = "auto"


AUTO = Auto.AUTO


@dataclass(frozen=True)
class Kind(Generic[T]):
    """One kind of value: its description in ``words``, its reader and its formatter.

    ``read`` takes the setting's name and a value, and raises ConfigError.
    """

    words: str
    read: Callable[[str, object], T]
    show: Callable[[T], str] = str


class Bytes(int):
    """A size in bytes that was already read: reading it again needs no unit, however small."""


def _read_size(name: str, value: object, minimum: int = 1) -> int:
    is_new = not isinstance(value, Bytes)
    return Bytes(parse_size(value, name=name, minimum=minimum, needs_unit=is_new))


SIZE = Kind("size", _read_size, format_size)
SIZE_OR_ZERO = Kind("size", partial(_read_size, minimum=0), format_size)
SECONDS = Kind("seconds", lambda name, value: parse_seconds(value, name=name), "{:g}s".format)
SECONDS_OR_ZERO = Kind(
    "seconds", lambda name, value: parse_seconds(value, name=name, may_be_zero=True), "{:g}s".format
)
COUNT = Kind("count", lambda name, value: parse_count(value, name=name))
SHARE = Kind("share", lambda name, value: parse_share(value, name=name), show_share)
PORT = Kind("port", lambda name, value: parse_count(value, name=name, maximum=65535))


def one_of(*choices: str) -> Kind[str]:
    """Return the kind that accepts one of a few words, in any case."""

    def read(name: str, value: object) -> str:
        word = value.strip().lower() if isinstance(value, str) and value.isascii() else None
        if word not in choices:
            near = nearest(word or "", choices)
            raise ConfigError(
                f"{name}: expected one of {', '.join(choices)}, got {shown(value)}{near}"
            )
        return word

    return Kind("|".join(choices), read)


def matching(pattern: str, expected: str, words: str = "text") -> Kind[str]:
    """Return the kind that accepts text of this pattern; ``expected`` describes it in errors."""

    def read(name: str, value: object) -> str:
        text = value.strip() if isinstance(value, str) else ""
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ConfigError(f"{name}: expected {expected}, got {shown(value)}")
        return text

    return Kind(words, read)


_HOST_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}"
_IPV6 = r"[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?"
ADDRESS = matching(f"{_HOST_NAME}|{_IPV6}", "an address such as 127.0.0.1 or ::1", "address")


def optional(kind: Kind[T]) -> Kind[T | None]:
    """Return the kind that also accepts None, which files and the environment write as "none"."""
    return _or(kind, None, "none")


def or_auto(kind: Kind[T]) -> Kind[T | Auto]:
    """Return the kind that also accepts "auto"."""
    return _or(kind, AUTO, AUTO.value)


def _or(kind: Kind[T], special: U, word: str) -> Kind[T | U]:
    def read(name: str, value: object) -> T | U:
        is_special = value is special or (isinstance(value, str) and value.strip().lower() == word)
        return special if is_special else kind.read(name, value)

    def show(value: Any) -> str:
        return word if value is special else kind.show(value)

    return Kind(f"{kind.words}|{word}", read, show)


def split_list(name: str, value: object, expected: str, most: int) -> list[object]:
    """Return the items of a list or of text with commas; None, "" and "none" have no items.

    ConfigError for another type, and for more than ``most`` items; ``expected`` describes them.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
        return []
    if not isinstance(value, (str, list, tuple)):
        raise ConfigError(f"{name}: expected {expected}, got {shown(value)}")
    items: list[object] = [*(value.split(",") if isinstance(value, str) else value)]
    if len(items) > most:
        raise ConfigError(f"{name}: at most {most} can be given, got {len(items)}")
    return items
