"""What a tier on disk is told: directories, bounds, and the key to encrypt with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.core.quantities import quoted
from kvferry.errors import ConfigError
from kvferry.settings.files import read_file_name, read_key
from kvferry.settings.kinds import split_list

KEY_ENV = "KVFERRY_DISK_KEY"
"""Holds the key as base64 where no file does. It is no setting: it is never shown."""

_MOST_DIRECTORIES = 16


@dataclass(frozen=True)
class DiskSettings:
    """The settings of the disk, checked.

    ``size`` bounds everything under ``directories``, whichever model wrote it; ``keep_free`` stays
    free on each file system. ``for_others`` is the share of ``size`` left to other models that
    wrote lately. ``direct`` is "auto" or "never".
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
        """The key to encrypt with; None without one. ConfigError where it cannot be used."""
        return read_key("disk_key_file", self.key_file, KEY_ENV, env)


def read_directories(name: str, value: object) -> tuple[str, ...]:
    """Directories, none within another, from one text with commas or from a list."""
    given = [value] if isinstance(value, os.PathLike) else value
    parts = split_list(name, given, "a path or a list of paths", _MOST_DIRECTORIES)
    paths = [read_file_name(name, part) for part in parts]
    for at, path in enumerate(paths):
        for other in paths[:at]:
            if os.path.commonpath((path, other)) in (path, other):
                raise ConfigError(
                    f"{name}: {quoted(path)} and {quoted(other)} are not two directories apart; "
                    "give one for each drive"
                )
    return tuple(paths)
