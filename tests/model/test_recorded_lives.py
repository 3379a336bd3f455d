"""Pools decide as they did when these lives were recorded: every slot, every hit, every eviction.

Recorded by code whose pool told its policy of everything at once. ``python -m
tests.model.test_recorded_lives FILE [CALLS]`` records today's. ``returns`` computes with ``exp``,
whose last bit differs between processors: where it does, only totals are compared. In its lives no
lease fails: it is told of a failed copy after the chains have changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.crafted_keys import key, keys
from tests.fakes.pool_events import Evictions
from tests.model.recorded_lives import CHECK_EVERY, Life, Recorded

from kvferry.cache.policies import policy_named
from kvferry.cache.policies.contract import Evidence
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Lease, Purpose

RECORDED = Path(__file__).with_name("recorded_lives.json")
POLICIES = ("lru", "returns", "arc", "s3fifo", "wtinylfu")
SHAPES = {"plain": (300, 1), "tenants": (240, 3), "placed": (256, 1)}
SEED, CALLS = 7, 2000


class Current:
    """A pool of today's code."""

    def __init__(self, policy: str, shape: str) -> None:
        self.time = 0.0
        num_slots, tenants = SHAPES[shape]
        self.pool = Pool(
            num_slots,
            policy_named(policy),
            placed=shape == "placed",
            clock=lambda: self.time,
        )
        if tenants > 1:
            self.pool.eviction.divide([None, 0.4, None], [1.0, 1.0, 0.5], 0)
        self._evictions = Evictions(self.pool)

    def advance(self, seconds: float) -> None:
        self.time += seconds

    def lookup(self, blocks: Sequence[int]) -> list[int]:
        return self.pool.lookup(keys(blocks)).tolist()

    def reserve(
        self, blocks: Sequence[int], parent: int | None, chained: bool, tenant: int
    ) -> Lease | None:
        above = None if parent is None else key(parent)
        return self.pool.reserve(keys(blocks), parent=above, chained=chained, tenant=tenant)

    def lease(self, blocks: Sequence[int], copies: bool) -> Lease | None:
        return self.pool.lease(keys(blocks), Purpose.COPY if copies else Purpose.READ)

    def end(self, lease: Lease, how: str, failed: Sequence[int]) -> None:
        writes = lease.purpose is Purpose.WRITE
        if how == "fail":
            lease.abort() if writes else lease.spoil()
        elif writes:
            lease.commit(failed)
        else:
            lease.release(failed)

    def touch(self, blocks: Sequence[int]) -> None:
        self.pool.touch(keys(blocks))

    def asked(self, blocks: Sequence[int], tokens: int, found: int) -> None:
        named = keys(blocks)
        self.pool.asked(named, tokens, self.pool.lookup(named)[:found])

    def answered(self, blocks: Sequence[int], tokens: int) -> None:
        """Once it was told; the events of a life stay as they were recorded."""

    def hint(self, blocks: Sequence[int], over: bool, within: float | None) -> int:
        return self.pool.hint(keys(blocks), Evidence(over, not over, within))

    def pin(self, blocks: Sequence[int], seconds: float, priority: int | None) -> int:
        slots = self.pool.lookup(keys(blocks))
        return self.pool.eviction.pin(slots, seconds, priority) if len(slots) else 0

    def unpin(self, blocks: Sequence[int]) -> int:
        slots = self.pool.lookup(keys(blocks))
        return self.pool.eviction.unpin(slots) if len(slots) else 0

    def evict_first(self, blocks: Sequence[int], priority: int, first: int) -> None:
        slots = self.pool.lookup(keys(blocks))
        if len(slots):
            self.pool.eviction.evict_first(slots, priority, first=first)

    def drop(self, blocks: Sequence[int]) -> int:
        slots = self.pool.lookup(keys(blocks))
        return self.pool.drop(slots) if len(slots) else 0

    def coldest(self, count: int) -> list[bytes]:
        return list(self.pool.eviction.coldest(count))

    def reset(self) -> None:
        self.pool.reset()

    def grow(self, num_ready: int) -> None:
        self.pool.grow(num_ready)

    def evicted(self) -> list[bytes]:
        gone: list[bytes] = list(self._evictions.read())
        self._evictions.clear()
        return gone

    def counts(self) -> list[int]:
        c = self.pool.counts
        return [c.free, c.cached, c.leased, c.evicted, c.unready, c.pinned, c.refused_pins]

    def check(self) -> None:
        self.pool.check_integrity()


def lived(policy: str, shape: str, num_calls: int) -> Recorded:
    num_slots, tenants = SHAPES[shape]
    life = Life(Current(policy, shape), SEED, num_slots, tenants, fails=policy != "returns")
    return life.play(num_calls)


def exponentials() -> str:
    """A digest of what ``exp`` gives here."""
    return blake2b(np.exp(np.linspace(-9, 9, 4096)).tobytes(), digest_size=6).hexdigest()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_decides_as_it_did(policy: str, shape: str) -> None:
    recorded: dict[str, Any] = json.loads(RECORDED.read_text())
    before = recorded["lives"][f"{policy} {shape}"]
    now = lived(policy, shape, CALLS)
    if policy == "returns" and recorded["exponentials"] != exponentials():
        assert now.num_hits == pytest.approx(before["num_hits"], rel=0.05)
        assert now.num_evicted == pytest.approx(before["num_evicted"], rel=0.05)
        return
    same = [a == b for a, b in zip(now.checkpoints, before["checkpoints"], strict=True)]
    assert all(same), f"parts before call {(same.index(False) + 1) * CHECK_EVERY}"
    assert (now.num_hits, now.num_evicted) == (before["num_hits"], before["num_evicted"])


def main() -> None:
    num_calls = int(sys.argv[2]) if len(sys.argv) > 2 else CALLS
    lives = {
        f"{policy} {shape}": asdict(lived(policy, shape, num_calls))
        for policy in POLICIES
        for shape in SHAPES
    }
    text = json.dumps({"exponentials": exponentials(), "lives": lives}, indent=1)
    Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
