"""Which vLLM versions the connector was written for and tested with."""

from __future__ import annotations

import re

from kvferry.errors import ConfigError

OLDEST = (0, 26)
NEWEST = (0, 32)


def require_supported(version: str) -> None:
    """Refuse a vLLM whose connector interface we do not know."""
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else None
    if number is None or not OLDEST <= number <= NEWEST:
        raise ConfigError(
            f"kvferry supports vLLM {_text(OLDEST)} to {_text(NEWEST)}, this is {version}; "
            "install a vLLM of that range, or a kvferry that knows yours"
        )


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
