"""Which eviction policies there are, and how a setting names one.

::

    lru                          a policy of kvferry
    my_package.policies:Mine     another policy: module, and the class or function that makes it
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.factories import FACTORY, nearest
from kvferry.core.quantities import shown
from kvferry.errors import ConfigError

_LONGEST = 256
_PACKAGE = "kvferry.cache.policies."


@dataclass(frozen=True)
class PolicyKind:
    """One policy: its name, what it does in words, and what makes it (``module:name``)."""

    name: str
    words: str
    factory: str


POLICIES = (
    PolicyKind("lru", "what was used longest ago goes first", f"{_PACKAGE}lru:Lru"),
    PolicyKind(
        "returns",
        "learns when conversations return, and keeps those most likely to, for as long as it pays",
        f"{_PACKAGE}returns:Returns",
    ),
    PolicyKind("slru", "what was used again outlives what came only once", f"{_PACKAGE}slru:Slru"),
    PolicyKind(
        "arc",
        "recency and frequency share the memory as misses say they should",
        f"{_PACKAGE}arc:Arc",
    ),
    PolicyKind(
        "s3fifo",
        "queues in order of arrival; a small one sifts out what comes only once",
        f"{_PACKAGE}s3fifo:S3Fifo",
    ),
)
"""A new policy adds a line here."""

DEFAULT_POLICY = "returns"
DEFAULT_TIER_POLICY = "lru"

_BY_NAME = {kind.name: kind for kind in POLICIES}
ACCEPTS = "|".join((*_BY_NAME, "package.module:factory"))


def read_policy(name: str, value: object) -> str:
    """A policy's name, or the path of a user's factory, which is looked up when it is opened."""
    text = value.strip() if isinstance(value, str) and len(value) <= _LONGEST else ""
    if text.lower() in _BY_NAME:
        return text.lower()
    if FACTORY.fullmatch(text):
        return text
    raise ConfigError(
        f"{name}: expected {', '.join(_BY_NAME)} or a policy of your own as "
        f"package.module:factory, got {shown(value)}{nearest(text, tuple(_BY_NAME))}"
    )


def factory_of(policy: str) -> str:
    """``module:name`` of what makes a policy that was read."""
    return _BY_NAME[policy].factory if policy in _BY_NAME else policy
