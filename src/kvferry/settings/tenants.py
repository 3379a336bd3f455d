"""Which part of the memory each tenant keeps, as a setting says it.

::

    search=40%:60%, chat=20%, *=fair:50%     name=share[:ceiling]; * is every other tenant

A share is what a tenant keeps while others need room. *fair* is an even part of what the named
shares leave over, among the tenants that have blocks; a share of ``*`` bounds such a part. A
ceiling is never passed, even while there is room. Both are parts of every tier with slots; a store
that finds blocks by their keys decides itself what it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.core.quantities import parse_share, quoted, show_share
from kvferry.errors import ConfigError
from kvferry.hints import MOST_TENANT_CHARS
from kvferry.settings.kinds import split_list

EVERYBODY_ELSE = "*"
NONE, OTHER, BEFORE = "none", "other", "before"
RESERVED = (NONE, OTHER, BEFORE)
"""Count requests without a tenant, tenants not told apart, and blocks of an earlier life."""
_MOST_NAMED = 32
_FAIR = "fair"
_ROUNDING = 1e-9  # shares that are written to add up to 100% are floats that may not


@dataclass(frozen=True)
class TenantShare:
    """One tenant's part; ``share`` is None where it is an even one."""

    name: str
    share: float | None = None
    ceiling: float = 1.0

    def __str__(self) -> str:
        share = _FAIR if self.share is None else show_share(self.share)
        ceiling = f":{show_share(self.ceiling)}" if self.ceiling < 1.0 else ""
        return f"{self.name}={share}{ceiling}"


def read_tenants(name: str, value: object) -> tuple[TenantShare, ...]:
    """From text as above, a mapping of names to ``share[:ceiling]``, or a tuple of shares."""
    given = list(value.items()) if isinstance(value, Mapping) else value
    parts = split_list(name, given, "NAME=SHARE[:CEILING], ...", _MOST_NAMED)
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
    """From ``name=share[:ceiling]``, or from a name and the rest."""
    pair = given if isinstance(given, tuple) else str(given).partition("=")[::2]
    tenant, part = str(pair[0]).strip(), str(pair[-1])
    if not tenant or len(tenant) > MOST_TENANT_CHARS or not tenant.isprintable():
        raise ConfigError(f"{name}: {quoted(tenant)} is no name of a tenant")
    if tenant in RESERVED:
        raise ConfigError(f"{name}: {quoted(tenant)} has a meaning of its own; name it otherwise")
    share, _, ceiling = (word.strip() for word in part.partition(":"))
    found = TenantShare(
        tenant,
        None if share.lower() in ("", _FAIR) else parse_share(share, name=f"{name}: {tenant}"),
        parse_share(ceiling, name=f"{name}: ceiling of {tenant}") if ceiling else 1.0,
    )
    if found.share is not None and found.ceiling < found.share:
        raise ConfigError(
            f"{name}: {tenant} cannot keep {show_share(found.share)} under a ceiling of "
            f"{show_share(found.ceiling)}; give it a smaller share or a higher ceiling"
        )
    return found
