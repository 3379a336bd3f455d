"""Settings of eviction: the policy of each tier, and the share of each tenant.

::

    lru                          a policy of kvferry
    my_package.policies:Mine     another policy: module, and the class or function that makes it

    search=40%, chat=20%, *=fair     name=share; * is every other tenant

A tenant keeps its share of a tier while other tenants need slots. *fair* splits the rest of the
tier evenly among the tenants that have blocks. Shares hold for every tier with slots; a keyed tier
decides itself which blocks it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.core.quantities import FACTORY, nearest, parse_share, quoted, show_share, shown
from kvferry.errors import ConfigError
from kvferry.hints import MOST_TENANT_CHARS
from kvferry.settings.kinds import split_list

_LONGEST = 256
_PACKAGE = "kvferry.cache.policies."

POLICIES = {
    "lru": f"{_PACKAGE}lru:Lru",
    "returns": f"{_PACKAGE}returns:Returns",
    "arc": f"{_PACKAGE}arc:Arc",
    "s3fifo": f"{_PACKAGE}s3fifo:S3Fifo",
    "wtinylfu": f"{_PACKAGE}wtinylfu:WTinyLfu",
}
"""Factory (``module:name``) of each policy, by name. A new policy adds a line here."""

DEFAULT_POLICY = "returns"
DEFAULT_TIER_POLICY = "lru"

ACCEPTS = "|".join((*POLICIES, "package.module:factory"))


def read_policy(name: str, value: object) -> str:
    """Return a policy's name, or a factory's path, which is imported only when it is used."""
    text = value.strip() if isinstance(value, str) and len(value) <= _LONGEST else ""
    if text.lower() in POLICIES:
        return text.lower()
    if FACTORY.fullmatch(text):
        return text
    raise ConfigError(
        f"{name}: expected {', '.join(POLICIES)} or a policy of your own as "
        f"package.module:factory, got {shown(value)}{nearest(text, tuple(POLICIES))}"
    )


OTHER_TENANTS = "*"
NONE, OTHER, BEFORE = "none", "other", "before"
RESERVED = (NONE, OTHER, BEFORE)
"""Names in metrics for: no tenant, tenants counted together, blocks of an earlier process."""
_MOST_NAMED = 32
_FAIR = "fair"
_ROUNDING = 1e-9  # shares written to add up to 100% may exceed it as floats


@dataclass(frozen=True)
class TenantShare:
    """One tenant's share of each tier; a ``share`` of None is *fair*."""

    name: str
    share: float | None = None

    def __str__(self) -> str:
        return f"{self.name}={_FAIR if self.share is None else show_share(self.share)}"


def read_tenants(name: str, value: object) -> tuple[TenantShare, ...]:
    """Read shares from text (see the module), a mapping by name, or a tuple of TenantShare."""
    given = list(value.items()) if isinstance(value, Mapping) else value
    parts = split_list(name, given, "NAME=SHARE, ...", _MOST_NAMED)
    found = tuple(
        part if isinstance(part, TenantShare) else _read_tenant(name, part)
        for part in parts
        if not isinstance(part, str) or part.strip()
    )
    if len({each.name for each in found}) < len(found):
        raise ConfigError(f"{name}: a tenant is named twice in {quoted(value)}")
    total = sum(each.share or 0.0 for each in found)
    if total > 1.0 + _ROUNDING:
        raise ConfigError(f"{name}: the shares add up to {show_share(total)}; at most 100%")
    return found


def _read_tenant(name: str, given: object) -> TenantShare:
    """Read one share from ``name=share``, or from a pair of name and share."""
    pair = given if isinstance(given, tuple) else str(given).partition("=")[::2]
    tenant, share = str(pair[0]).strip(), str(pair[-1]).strip()
    if not tenant or len(tenant) > MOST_TENANT_CHARS or not tenant.isprintable():
        raise ConfigError(f"{name}: {quoted(tenant)} is no name of a tenant")
    if tenant in RESERVED:
        raise ConfigError(f"{name}: {quoted(tenant)} has a meaning of its own; name it otherwise")
    if share.lower() in ("", _FAIR):
        return TenantShare(tenant)
    if tenant == OTHER_TENANTS:
        raise ConfigError(f"{name}: * stands for many tenants; it can only be {_FAIR}")
    return TenantShare(tenant, parse_share(share, name=f"{name}: {tenant}"))
