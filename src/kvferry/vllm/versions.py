"""Which vLLM versions the connector was written for and tested with."""

from __future__ import annotations

import re

from kvferry.errors import ConfigError

OLDEST = (0, 26)
NEWEST = (0, 32)

_FIXED_SEEDS = (0, 29)
"""From here on a cryptographic block hash, the default, has the same seed in every process."""


def seeds_are_fixed(version: str) -> bool:
    """Whether all processes of this vLLM name a block alike though PYTHONHASHSEED is not set."""
    number = _number(version)
    return number is not None and number >= _FIXED_SEEDS


def require_supported(version: str) -> None:
    """Refuse a vLLM whose connector interface we do not know."""
    number = _number(version)
    if number is None or not OLDEST <= number <= NEWEST:
        raise ConfigError(
            f"kvferry supports vLLM {_text(OLDEST)} to {_text(NEWEST)}, this is {version}; "
            "install a vLLM of that range, or a kvferry that knows yours"
        )


def _number(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
