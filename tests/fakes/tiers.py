"""Tiers of somebody else's, as a setting names them: ``tests.fakes.tiers:open_mine:OPTIONS``."""

from __future__ import annotations

from typing import Any

from tests.fakes.memory_tiers import KeyedMemoryTier, MemoryTier

from kvferry.tiers.contract import TierSetup

opened: list[tuple[TierSetup, Any]] = []
"""What was opened, the latest last; whoever looks clears it."""


def open_mine(setup: TierSetup) -> MemoryTier:
    tier = MemoryTier(int(setup.options or 64), setup.block_bytes, name=setup.name)
    opened.append((setup, tier))
    return tier


def open_keyed(setup: TierSetup) -> KeyedMemoryTier:
    tier = KeyedMemoryTier(setup.block_bytes, name=setup.name)
    opened.append((setup, tier))
    return tier


def open_with_other_blocks(setup: TierSetup) -> MemoryTier:
    tier = MemoryTier(4, setup.block_bytes + 1, name=setup.name)
    opened.append((setup, tier))
    return tier


def open_under_another_name(setup: TierSetup) -> MemoryTier:
    return MemoryTier(4, setup.block_bytes)


def open_nothing(setup: TierSetup) -> object:
    return object()


def open_never(setup: TierSetup) -> MemoryTier:
    raise OSError("the cupboard is locked")


NO_FACTORY = 3
