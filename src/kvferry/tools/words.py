"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping

_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_BARS = "▁▂▃▄▅▆▇█"


def clean(text: object) -> str:
    """What someone else wrote, on one line and without what a terminal would obey."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def said(text: object, most: int = 200) -> str:
    """The same, and not longer than a message can bear."""
    words = clean(text)
    return words if len(words) <= most else f"{words[: most - 1]}…"


def counted(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def show_bytes(num_bytes: float) -> str:
    for factor, unit in _SIZES:
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def show_share(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%"


def show_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


def sparkline(values: list[float], width: int) -> str:
    """The last values as a line of bars, the highest of them a full one."""
    values = values[-width:] if width else []
    top = max(values, default=0.0)
    if top <= 0:
        return _BARS[0] * len(values)
    steps = len(_BARS) - 1
    return "".join(_BARS[round(steps * max(0.0, value) / top)] for value in values)


_IDLE = {
    "refused": "this model or these settings are not served; vLLM's log has the reason",
    "failed": "something went wrong in kvferry and vLLM goes on without; its log has the error",
}


def why_idle(reason: str) -> str:
    """Why nothing is served, in words."""
    return _IDLE.get(reason, reason)


def memory_words(name: str, curve: Mapping[str, float]) -> str:
    """What twice the memory of a tier would buy, in a sentence; empty while that is not known."""
    if "1" not in curve or "2" not in curve:
        return ""
    memory = "host memory" if name == "host" else name
    now, twice = curve["1"], curve["2"]
    return (
        f"twice the {memory}: about {show_share(twice)} instead of {show_share(now)} of prompt "
        "tokens"
    )
