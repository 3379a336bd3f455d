"""A secret as a setting gives it: itself, or the file it is in."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvferry.core.quantities import quoted
from kvferry.errors import ConfigError

LEAST_CHARS = 16
_MOST_CHARS = 4096
_FILE = "file:"


def read_secret(name: str, value: object) -> str:
    """A secret of printable ASCII without spaces, so that a header can carry it.

    It is never shown, not even where it is refused.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{name}: expected text, or file:PATH of a file with it")
    secret, where = value.strip(), ""
    if secret.startswith(_FILE):
        where = f" in {quoted(secret.removeprefix(_FILE))}"
        secret = _from_file(name, secret.removeprefix(_FILE))
    if not LEAST_CHARS <= len(secret) <= _MOST_CHARS:
        raise ConfigError(
            f"{name}: a secret{where} has at least {LEAST_CHARS} characters, this one {len(secret)}"
        )
    if not (secret.isascii() and secret.isprintable() and " " not in secret):
        raise ConfigError(f"{name}: a secret{where} is printable ASCII without spaces")
    return secret


def _from_file(name: str, path: str) -> str:
    try:
        with Path(path).expanduser().open(encoding="ascii") as file:
            return file.read(_MOST_CHARS + 2).strip()
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is no ASCII text"
        raise ConfigError(f"{name}: cannot read {quoted(path)}: {words}") from None


# ------------------------------------------------------------------------------------------------
# A key to encrypt with: from a file, or from the environment. Never shown, never kept.

KEY_SIZE = 32
_MOST_FILE_BYTES = 4096


def has_key(file: str | None, variable: str, env: Mapping[str, str] | None = None) -> bool:
    """Whether somebody gave one, good or not."""
    return file is not None or bool((os.environ if env is None else env).get(variable, "").strip())


def read_key(
    setting: str, file: str | None, variable: str, env: Mapping[str, str] | None = None
) -> bytes | None:
    """The key in ``file``, which ``setting`` named, or else in ``variable``; None: neither.

    Read where it is used, so that no settings carry it. ConfigError, without a byte of it, where it
    cannot be used.
    """
    if file is not None:
        what = f"{setting}: {quoted(file)}"
        return _key_of(_content(file, what), what)
    told = (os.environ if env is None else env).get(variable, "").strip()
    return _key_of(told.encode(), variable) if told else None


def _content(path: str, what: str) -> bytes:
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # to open a pipe would wait for its writer
            raise ConfigError(f"{what} is no file")
        if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ConfigError(
                f"{what} can be read or changed by others: chmod 600 it (440 for a group is fine)"
            )
        with open(path, "rb") as file:
            content = file.read(_MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror or error}") from error
    return content


def _key_of(content: bytes, what: str) -> bytes:
    """32 bytes as they are, or base64 of as many."""
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
        ) from None
    return key
