"""What is said about the disk: which directories, how much of them, and the key to encrypt with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.core.quantities import quoted, shown
from kvferry.errors import ConfigError
from kvferry.settings.secrets import read_key

KEY_ENV = "KVFERRY_DISK_KEY"
"""Holds the key as base64 where no file does. No setting: it is never shown."""

_MOST_DIRECTORIES = 16


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

        ConfigError, without a byte of it, where it cannot be used.
        """
        return read_key("disk_key_file", self.key_file, KEY_ENV, env)


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
