"""What is said about the disk: which directories, how much of them, and the key to encrypt with."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.quantities import quoted, shown

KEY_ENV = "KVFERRY_DISK_KEY"
"""Holds the key as base64 where no file does. No setting: it is never shown."""

KEY_SIZE = 32
_MOST_DIRECTORIES = 16
_MOST_KEY_FILE_BYTES = 4096


@dataclass(frozen=True)
class DiskSettings:
    """What a tier on disk is told: plain data, checked.

    ``size`` bounds everything under ``directories``, whoever wrote it; ``keep_free`` stays free on
    each file system, and ``for_others`` is the share of it left to other models that were there of
    late. ``direct`` is "auto" or "never".
    """

    directories: tuple[str, ...]
    size: int
    keep_free: int = 0
    for_others: float = 0.0
    write_per_day: int | None = None
    deadline: float = 10.0
    key_file: str | None = None
    direct: str = "auto"

    def read_key(self, env: Mapping[str, str] | None = None) -> bytes | None:
        """The key to encrypt with, from the file or else from ``KVFERRY_DISK_KEY``; None: neither.

        Read where it is used, so that no settings and no message carry it. ConfigError, without a
        byte of it, where it cannot be used.
        """
        if self.key_file is not None:
            return _key_of(_content(self.key_file), f"disk_key_file: {quoted(self.key_file)}")
        told = (os.environ if env is None else env).get(KEY_ENV, "").strip()
        return _key_of(told.encode(), KEY_ENV) if told else None


def read_directories(name: str, value: object) -> tuple[str, ...]:
    """Directories from one text with commas or from a list of texts."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
        return ()
    parts: list[object]
    if isinstance(value, (str, os.PathLike)):
        parts = list(os.fspath(value).split(",")) if isinstance(value, str) else [value]
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        raise ConfigError(f"{name}: expected a path or a list of paths, got {shown(value)}")
    if len(parts) > _MOST_DIRECTORIES:
        raise ConfigError(f"{name}: at most {_MOST_DIRECTORIES} directories, got {len(parts)}")
    paths = [read_file_name(name, part) for part in parts]
    for at, path in enumerate(paths):
        for other in paths[:at]:
            if path == other or os.path.commonpath((path, other)) in (path, other):
                raise ConfigError(
                    f"{name}: {quoted(path)} and {quoted(other)} are not two directories apart; "
                    "give one for each drive"
                )
    return tuple(paths)


def read_file_name(name: str, value: object) -> str:
    """A whole path, as it will be opened in every process."""
    told = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(told, str):
        raise ConfigError(f"{name}: expected a path, got {shown(value)}")
    path = os.path.expanduser(told.strip())
    if not path.isprintable() or "," in path or len(path) > 1000:
        raise ConfigError(
            f"{name}: {quoted(told)} cannot be used as a path here: give one of less than 1000 "
            "letters, without commas and without letters that cannot be shown"
        )
    if not os.path.isabs(path):
        raise ConfigError(
            f"{name}: expected a whole path such as /mnt/nvme/kvferry, got {shown(told)}; the "
            "processes of a server need not run in one directory"
        )
    return os.path.normpath(path)


def show_directories(directories: tuple[str, ...]) -> str:
    return ", ".join(directories) or "none"


def _content(path: str) -> bytes:
    what = f"disk_key_file: {quoted(path)}"
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # to open a pipe would wait for its writer
            raise ConfigError(f"{what} is no file")
        if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ConfigError(
                f"{what} can be read or changed by others: chmod 600 it (440 for a group is fine)"
            )
        with open(path, "rb") as file:
            content = file.read(_MOST_KEY_FILE_BYTES + 1)
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
