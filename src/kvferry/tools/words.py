"""Formatting of numbers and of untrusted text for people to read."""

from __future__ import annotations

from collections.abc import Mapping

_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIERS = {"device": "on the device", "host": "in host memory"}


def clip(text: object, most: int = 200) -> str:
    """Return untrusted text on one line, without control characters, cut to ``most`` characters."""
    words = clean(text)
    return words if len(words) <= most else f"{words[: most - 1]}…"


def clean(text: object) -> str:
    """Return untrusted text on one line, with the characters that control a terminal replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def counted(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def show_bytes(num_bytes: float) -> str:
    for factor, unit in _SIZES:
        if num_bytes >= factor * 0.99995:  # 999,950 bytes are 1.0 MB, not 1000.0 kB
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def show_share(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%"


def show_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


def tier_words(tokens: Mapping[str, int]) -> str:
    """Tokens by tier: "0 on the device, 240 in host memory, 1,472 on disk"."""
    return ", ".join(f"{n:,} {_TIERS.get(name, f'on {name}')}" for name, n in tokens.items())
