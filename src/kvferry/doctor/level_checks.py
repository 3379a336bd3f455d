"""The levels below host memory: whether each of them can be opened here."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.config import Config
from kvferry.doctor.finding import Finding, fail, ok, warn
from kvferry.errors import ConfigError
from kvferry.level_kinds import DISK, REMOTE, LevelSpec
from kvferry.tiers import TierSetup, open_tier

_BLOCK_BYTES = 4096
"""A small block: an engine's own are larger, which only the engine knows."""

_NOBODYS = bytes(32)
"""The namespace in which a shared store is tried out: no blocks are there."""

_CLOSE_SECONDS = 1.0


def check_levels(config: Config) -> Iterator[Finding]:
    """Open each level that the settings name, and close it again."""
    for spec in config.all_levels:
        if spec.kind != DISK:
            yield _check(spec, config)


def _check(spec: LevelSpec, config: Config) -> Finding:
    name = f"level {spec.name}"
    setup = TierSetup(
        spec.name,
        _BLOCK_BYTES,
        options=spec.options,
        shared_namespace=_NOBODYS,
        remote=config.remote_settings,
    )
    setting = REMOTE if spec.kind == REMOTE else "levels"
    try:
        tier = open_tier(spec, setup)
    except ConfigError as error:
        return fail(name, str(error), f"correct the setting {setting}, or leave the level out")
    ailment, num_places = tier.ailment, tier.num_places
    tier.close(_CLOSE_SECONDS)
    if ailment:
        return warn(name, f"{spec}: cannot be used now: {ailment}", "see to it, or leave it out")
    kind = "finds blocks by their keys" if num_places is None else "has places for blocks"
    return ok(name, f"{spec}: can be opened, {kind}")
