"""Which eviction policies there are, and how a setting names one.

::

    lru                          a policy of ours
    my_package.policies:Mine     a policy of yours: module, and the class or function that makes it

A policy is a short name for what makes it; whoever adds one adds a line to ``POLICIES``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from kvferry.core.quantities import shown
from kvferry.errors import ConfigError

_OWN = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_LONGEST = 256


@dataclass(frozen=True)
class PolicyKind:
    """One policy: its name, what it does in words, and what makes it (``module:name``)."""

    name: str
    words: str
    factory: str


POLICIES = (
    PolicyKind(
        "lru",
        "what was used longest ago goes first",
        "kvferry.cache.policies.lru:Lru",
    ),
    PolicyKind(
        "returns",
        "learns when conversations return, and keeps those most likely to, for as long as it pays",
        "kvferry.cache.policies.returns:Returns",
    ),
    PolicyKind(
        "slru",
        "what was used again outlives what came only once",
        "kvferry.cache.policies.slru:Slru",
    ),
    PolicyKind(
        "arc",
        "recency and frequency share the memory as misses say they should",
        "kvferry.cache.policies.arc:Arc",
    ),
    PolicyKind(
        "s3fifo",
        "queues in order of arrival; a small one sifts out what comes only once",
        "kvferry.cache.policies.s3fifo:S3Fifo",
    ),
)

BY_NAME = {kind.name: kind for kind in POLICIES}

DEFAULT_POLICY = "returns"
DEFAULT_TIER_POLICY = "lru"

ACCEPTS = "|".join((*BY_NAME, "package.module:factory"))


def read_policy(name: str, value: object) -> str:
    """A policy's name, or the path of a factory of somebody's own, which is looked for later."""
    text = value.strip() if isinstance(value, str) and len(value) <= _LONGEST else ""
    if text.lower() in BY_NAME:
        return text.lower()
    if _OWN.fullmatch(text):
        return text
    near = difflib.get_close_matches(text.lower(), BY_NAME, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"{name}: expected {', '.join(BY_NAME)} or a policy of your own as "
        f"package.module:factory, got {shown(value)}{hint}"
    )


def factory_of(policy: str) -> str:
    """``module:name`` of what makes a policy that was read."""
    return BY_NAME[policy].factory if policy in BY_NAME else policy
