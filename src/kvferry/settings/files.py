"""Files that settings name: their paths, and the secrets and keys in them.

A secret is never shown, not even where it is refused.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvferry.core.quantities import format_size, quoted, shown
from kvferry.errors import ConfigError

LEAST_CHARS = 16
KEY_SIZE = 32
_MOST_PATH = 1000
_MOST_SECRET = 4096
_FILE = "file:"


def read_file_name(name: str, value: object) -> str:
    """An absolute path, as every process will open it."""
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
    """The content of a regular file of at most ``most`` bytes; ``what`` begins a ConfigError.

    A private file must not be readable by other users.
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
    """A secret of printable ASCII without spaces, or ``file:PATH`` of a file with it."""
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


def has_key(file: str | None, variable: str, env: Mapping[str, str] | None = None) -> bool:
    """Whether a key was given, valid or not."""
    return file is not None or bool((os.environ if env is None else env).get(variable, "").strip())


def read_key(
    setting: str, file: str | None, variable: str, env: Mapping[str, str] | None = None
) -> bytes | None:
    """The key in the file that ``setting`` names, or else in ``variable``; None without either.

    Read where it is used, so that no settings carry it. ConfigError, without a byte of the key,
    where it cannot be used.
    """
    if file is not None:
        what = f"{setting}: {quoted(file)}"
        return _key_of(read_file(file, what, _MOST_SECRET, is_private=True), what)
    given = (os.environ if env is None else env).get(variable, "").strip()
    return _key_of(given.encode(), variable) if given else None


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
        )
    return key
