"""Which part of the memory is whose, as a setting says it.

::

    search=40%:60%, chat=20%, *=fair:50%     name=share[:ceiling]; * is every other tenant

A share is what a tenant keeps while others need room; *fair* is an even part, among those that have
blocks, of what all shares that are named leave over; a share of ``*`` is such a part, of that size
at most. A ceiling is never passed, even while there is room. Both are parts of every tier whose
places we give out: host memory, a disk, memory below it. A store that finds blocks by their keys (a
shared one, say) decides itself what it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.core.quantities import parse_share, quoted, show_share, shown
from kvferry.errors import ConfigError
from kvferry.hints import MOST_TENANT_CHARS

EVERYBODY_ELSE = "*"
NONE, OTHER, BEFORE = "none", "other", "before"
RESERVED = (NONE, OTHER, BEFORE)
"""What is counted under these: requests of no tenant, tenants that are not told apart, and blocks
of an earlier life."""
MOST_NAMED = 32
_FAIR = "fair"
_ROUNDING = 1e-9  # shares that are written to add up to 100% are floats that may not


@dataclass(frozen=True)
class TenantShare:
    """One tenant's part: ``share`` is None where it is an even one."""

    name: str
    share: float | None = None
    ceiling: float = 1.0

    def __str__(self) -> str:
        share = _FAIR if self.share is None else show_share(self.share)
        ceiling = f":{show_share(self.ceiling)}" if self.ceiling < 1.0 else ""
        return f"{self.name}={share}{ceiling}"


def read_tenants(name: str, value: object) -> tuple[TenantShare, ...]:
    """From text as above, a mapping of names to ``share[:ceiling]``, or what this returned."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
        return ()
    if isinstance(value, tuple) and all(isinstance(each, TenantShare) for each in value):
        return value
    if isinstance(value, str):
        pairs = [_pair(part) for part in value.split(",") if part.strip()]
    elif isinstance(value, Mapping):
        pairs = [(str(key).strip(), str(part)) for key, part in value.items()]
    else:
        raise ConfigError(f"{name}: expected NAME=SHARE[:CEILING], ..., got {shown(value)}")
    found = tuple(_tenant(name, *pair) for pair in pairs)
    if len({each.name for each in found}) < len(found):
        raise ConfigError(f"{name}: a tenant is named twice in {quoted(value)}")
    if len(found) > MOST_NAMED:
        raise ConfigError(f"{name}: at most {MOST_NAMED} tenants can be named, got {len(found)}")
    total = sum(each.share or 0.0 for each in found)
    if total > 1.0 + _ROUNDING:
        raise ConfigError(f"{name}: the shares add up to {show_share(total)}; at most 100%")
    return found


def show_tenants(tenants: tuple[TenantShare, ...]) -> str:
    """As a setting would write them."""
    return ", ".join(map(str, tenants)) or "none"


def _pair(text: str) -> tuple[str, str]:
    tenant, _, part = text.partition("=")
    return tenant.strip(), part


def _tenant(name: str, tenant: str, part: str) -> TenantShare:
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
