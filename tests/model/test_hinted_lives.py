"""Random lives of hinted requests and of orders from outside, with tiers below: always sound.

After every step the scheduler proves itself, nothing is held beyond the bound on any tier, nothing
is stored or loaded of requests whose hints forbid it. At the end nothing is left over.

Seen red with orders that name a block twice: slots were on the free list twice.
"""

from __future__ import annotations

from contextlib import nullcontext
from random import Random

import numpy as np
import pytest
from tests.fakes.desk import Desk, story

from kvferry.cache.pool import Pool
from kvferry.core.keys import Keys
from kvferry.errors import InputError
from kvferry.hints import Hints
from kvferry.scheduler.request import Request, State
from kvferry.scheduler.tier import SlotTier, WriteMode
from kvferry.types import MatchState, TierName

NUM_STORIES, LONGEST = 8, 6


def any_hints(rng: Random) -> Hints | None:
    choice = rng.choice(("", "", "keep", "ended", "goes", "rank", "store", "load", "all"))
    tenant = rng.choice(("", "a", "b"))
    if choice == "keep":
        return Hints(pin_seconds=rng.choice((0.5, 5.0)), tenant=tenant)
    if choice == "ended":
        return Hints(ended=True, tenant=tenant)
    if choice == "goes":
        return Hints(continues=True, within=rng.choice((None, 2.0)), tenant=tenant)
    if choice == "rank":
        first = 4 * rng.randrange(3)
        said = {"token_start": first, "token_end": first + 8, "priority": rng.randrange(101)}
        return Hints.read({"priorities": [said], "tenant": tenant})
    if choice == "store":
        return Hints(max_store_tokens=rng.choice((0, 8)))
    if choice == "load":
        return Hints(max_load_tokens=rng.choice((0, 8)))
    return Hints(pin_seconds=1.0, max_load_tokens=4, max_store_tokens=12) if choice else None


def any_keys(rng: Random) -> Keys:
    """A request's, mostly; or whatever somebody else may think of."""
    keys = story(rng.randrange(NUM_STORIES), LONGEST)
    kind = rng.random()
    if kind < 0.2:
        keys = keys.take(np.array(rng.sample(range(LONGEST), rng.randint(1, LONGEST))))
    elif kind < 0.3:
        keys = keys + story(rng.randrange(NUM_STORIES), LONGEST)
    elif kind < 0.4:
        keys = keys.take(np.array(rng.choices(range(LONGEST), k=rng.randint(1, 8))))
    return keys


class Life:
    """One scheduler and whatever happens to it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.tiers = [
            SlotTier(TierName(f"l{n}"), Pool(rng.choice((12, 60))), rng.choice(list(WriteMode)))
            for n in range(rng.choice((0, 1, 2)))
        ]
        settings: dict[str, object] = {"pin_share": rng.choice((0.0, 0.25, 0.5))}
        if rng.random() < 0.5:
            settings["tenants"] = rng.choice(("*", "a=50%, b=10%"))
        slots = rng.choice((10, 24))
        self.desk = Desk(slots=slots, tiers=self.tiers, **settings)  # type: ignore[arg-type]
        self.live: list[Request] = []
        self.may_be_stored: dict[bytes, bool] = {}
        """Of each block that was ever asked for: whether somebody may have had it stored."""

    def step(self) -> None:
        rng, desk = self.rng, self.desk
        what = rng.choice(("ask", "ask", "store", "end", "land", "land", "order", "time", "reset"))
        if what == "ask":
            self.ask()
        elif what in ("store", "end") and self.live:
            request = self.live.pop(rng.randrange(len(self.live)))
            if what == "store" and request.state not in (State.LOADING, State.WAITING):
                num_tokens = 4 * rng.randint(1, LONGEST)
                request.store(desk.tables(num_tokens), num_tokens)
            request.end()
        elif what == "land":
            desk.run()
        elif what == "order":
            keys, control = any_keys(rng), desk.scheduler.control
            act = rng.choice(("lookup", "pin", "unpin", "prefetch", "drop", "hint"))
            refuses = pytest.raises(InputError, match="is twice among")
            with refuses if len(set(keys)) < len(keys) else nullcontext():
                if act == "pin":
                    control.pin(keys, rng.choice((None, 1.0)))
                elif act == "hint":
                    hints = any_hints(rng) or Hints()
                    stays = hints if hints.shapes_what_stays else Hints(ended=True)
                    control.hint(keys, stays)
                else:
                    told = getattr(control, act)(keys)
                    assert act != "drop" or told.refused or not self.knows_any(keys)
        elif what == "time":
            desk.now += rng.choice((0.1, 1.0, 20.0))
        elif rng.random() < 0.1:
            desk.scheduler.reset()

    def knows_any(self, keys: Keys) -> bool:
        """Whether any tier has any of these blocks, or is getting it."""
        matcher = self.desk.scheduler.matcher
        pools = (self.desk.pool, *(tier.pool for tier in self.tiers))
        blocks = [matcher.names[g].all(keys) for g in range(len(matcher.groups))]
        return any(pool.known(each).any() for pool in pools for each in blocks)

    def ask(self) -> None:
        number, hints = self.rng.randrange(NUM_STORIES), any_hints(self.rng)
        request = self.desk.scheduler.open(f"r{number}", story(number, LONGEST), hints)
        most = hints.max_store_tokens if hints is not None else None
        for at, key in enumerate(story(number, LONGEST)):
            may = most is None or 4 * at + 4 <= most
            self.may_be_stored[key] = self.may_be_stored.get(key, False) or may
        match = request.match()
        most = hints.max_load_tokens if hints is not None else None
        if most is not None:
            assert match.num_tokens <= most
        if match.state is MatchState.HIT:
            request.load(self.desk.tables(match.num_tokens))
        self.live.append(request)

    def check(self) -> None:
        self.desk.scheduler.check_integrity()
        for pool in (self.desk.pool, *(tier.pool for tier in self.tiers)):
            assert pool.counts.pinned <= pool.eviction.pins.most
            for key, may in self.may_be_stored.items():
                assert may or not pool.known(Keys.from_bytes((key,)))[0]

    def close(self) -> None:
        for request in self.live:
            request.end()
        for _ in range(60):
            self.desk.run()
        assert not self.desk.scheduler.control.is_busy
        self.desk.scheduler.reset()
        self.desk.run()
        self.desk.check_empty()
        assert self.desk.pool.counts.free == self.desk.pool.num_slots


@pytest.mark.parametrize("seed", range(20))
def test_a_life_with_hints_and_orders(seed):
    life = Life(seed)
    for _ in range(80):
        life.step()
        life.check()
    life.close()
