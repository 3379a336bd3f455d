"""Opens the tiers that the settings name, and makes sure that they keep the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from kvferry.core.factories import find_factory
from kvferry.errors import ConfigError, KvferryError
from kvferry.hostmem.slots import HostTier
from kvferry.settings.tiers import DISK, REMOTE, TierSpec
from kvferry.tiers.contract import Tier, TierSetup
from kvferry.tiers.movers import TierMover
from kvferry.types import TierName

_VERBS = ("attach_memory", "submit", "cancel", "poll", "drain", "forget", "close")


def open_tiers(
    specs: Sequence[TierSpec],
    host: HostTier,
    setup: TierSetup | None = None,
    *,
    ready_slots: Callable[[], int] | None = None,
) -> dict[TierName, TierMover]:
    """One rank's tiers below its host memory, nearest first; all of them or none.

    ``setup`` has what all of them are told; name, block size and options are each tier's own. The
    caller closes them, before the host memory. ConfigError, with the tier and the reason, where one
    cannot be opened.
    """
    setup = setup if setup is not None else TierSetup(TierName(""), host.slot_bytes)
    tiers: dict[TierName, TierMover] = {}
    with ExitStack() as undo:
        for spec in specs:
            own = replace(
                setup,
                name=spec.name,
                block_bytes=host.slot_bytes,
                options=spec.options,
                host_file=host.file,
            )
            tier = open_tier(spec, own)
            undo.callback(tier.close)
            tiers[spec.name] = TierMover(host, tier, rank=setup.rank, ready_slots=ready_slots)
        undo.pop_all()
    return tiers


def open_tier(spec: TierSpec, setup: TierSetup) -> Tier:
    """Open one tier; ConfigError where it cannot be opened or breaks the contract."""
    is_own = spec.kind in (DISK, REMOTE)
    what = f"{spec.kind}: {spec.options}" if is_own else f"tiers: {spec}"
    factory = find_factory(spec.factory, what=what, where="workers run")
    try:
        tier = factory(setup)
    except Exception as error:  # a user's factory may raise anything
        reason = (
            str(error) if isinstance(error, KvferryError) else f"{type(error).__name__}: {error}"
        )
        raise ConfigError(f"{what} cannot be opened: {reason}") from error
    wrong = _what_is_wrong(tier, setup)
    if wrong:
        close = getattr(tier, "close", None)
        if callable(close):
            close()
        raise ConfigError(
            f"tiers: {spec.factory} gave {type(tier).__name__}, which is no tier for "
            f"{spec.name}: {wrong} (see kvferry.tiers.Tier)"
        )
    return cast(Tier, tier)


def _what_is_wrong(tier: Any, setup: TierSetup) -> str:
    """Where it breaks the contract as far as can be seen from outside; empty if nowhere."""
    lacking = [verb for verb in _VERBS if not callable(getattr(tier, verb, None))]
    if lacking:
        return f"it lacks {', '.join(lacking)}"
    for name, wanted in (("name", setup.name), ("block_bytes", setup.block_bytes)):
        if getattr(tier, name, None) != wanted:
            return f"its {name} is {getattr(tier, name, None)!r}, it was asked for {wanted!r}"
    places = getattr(tier, "num_places", 0)
    if places is not None and (not isinstance(places, int) or places < 1):
        return f"its num_places is {places!r}; give how many it has, or None if it knows keys"
    if not isinstance(getattr(tier, "ailment", None), str):
        return "its ailment is no text"
    return ""
