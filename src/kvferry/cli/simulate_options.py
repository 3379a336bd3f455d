"""What ``kvferry simulate`` is asked to try: policies, capacities and parts of a trace, read."""

from __future__ import annotations

from kvferry.errors import ConfigError
from kvferry.policy import policy_named
from kvferry.policy_kinds import POLICIES, read_policy
from kvferry.quantities import parse_count, parse_seconds, parse_size, quoted

_MOST_BLOCKS = 1 << 30
_MOST_TRIALS = 1000


def read_policies(text: str) -> tuple[str, ...]:
    """Policies by name or module path, each once; a name that cannot be found is refused."""
    names: dict[str, None] = {}
    for part in text.split(","):
        if part.strip().lower() == "all":
            names |= dict.fromkeys(kind.name for kind in POLICIES)
        elif part.strip():
            names[read_policy("--policy", part)] = None
    if not names:
        raise ConfigError("--policy: name at least one policy")
    for name in names:
        policy_named(name)
    return tuple(names)


def read_level_policy(text: str) -> str:
    """One policy; a name that cannot be found is refused."""
    name = read_policy("--level-policy", text)
    policy_named(name)
    return name


def read_capacities(text: str, block_bytes: int | None) -> dict[tuple[int, ...], str]:
    """Capacities in blocks, host first, each with what it was called."""
    found: dict[tuple[int, ...], str] = {}
    for part in text.split(","):
        if part.strip():
            levels = tuple(_blocks(each.strip(), block_bytes) for each in part.split("+"))
            found.setdefault(levels, part.strip())
    if not found:
        raise ConfigError("--capacity: name at least one, such as 3000 or 3000+30000")
    if len(found) > _MOST_TRIALS:
        raise ConfigError(f"--capacity: at most {_MOST_TRIALS}, got {len(found)}")
    return found


def _blocks(text: str, block_bytes: int | None) -> int:
    if text.isdigit() and text.isascii():
        return parse_count(text, name="--capacity", maximum=_MOST_BLOCKS)
    if text[-1:].lower() == "k" and text[:-1].isdigit() and text.isascii():
        return parse_count(f"{text[:-1]}000", name="--capacity", maximum=_MOST_BLOCKS)
    size = parse_size(text, name="--capacity")
    if block_bytes is None:
        raise ConfigError(
            f"--capacity: {quoted(text)} is a size: say what a token takes (--token-bytes), or "
            "give a number of blocks"
        )
    blocks = size // block_bytes
    if not 0 < blocks <= _MOST_BLOCKS:
        raise ConfigError(
            f"--capacity: {quoted(text)} holds {blocks} blocks of {block_bytes} bytes; from 1 to "
            f"{_MOST_BLOCKS} can be simulated"
        )
    return blocks


def read_point(name: str, text: str | None, share: float, seconds: float) -> tuple[float, float]:
    """A place in a trace, as a share of its requests and as seconds; one of them is as given."""
    if text is None:
        return share, seconds
    if text.strip().endswith("%"):
        try:
            percent = float(text.strip()[:-1])
        except ValueError:
            percent = -1.0
        if not 0 <= percent <= 100:
            raise ConfigError(f"{name}: expected 0% to 100%, got {quoted(text)}")
        return percent / 100, seconds
    if text.strip() in ("0", "0s"):
        return share, 0.0
    return share, parse_seconds(text, name=name)
