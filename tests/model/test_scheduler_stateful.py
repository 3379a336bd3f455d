"""Random lives of requests over a scheduler, with ranks that are late, fail, repeat or die.

The engine and the workers around the scheduler are simulated with real bytes; see
:mod:`tests.model.simulation`. After every step the bookkeeping proves itself, every copy still to
be carried out has its memory to itself, and every running request computes with the right bytes.
In the end everything lands, and nothing is left claimed, held or waiting.

What must hold, and a one-line break of the code that these tests were seen to catch:

- A block is a hit only once every rank has it. ``Flights.settle`` lands a flight at its first
  receipt: a device block is released while a transfer still needs it.
- A rank that fails fails the transfer for all. ``Flights._take`` ignores failed receipts, or
  ``Flights._land`` commits a failed store: a request computes with bytes that are not its own.
- A deadline ends the waiting and never the claim. ``Landings.report`` releases overdue flights at
  once: a block is let go while a slow rank still writes to it.
- What did not come in time is expected no more. ``Landings.report`` does not disown overdue leases:
  blocks stay on their way for ever.
- Nobody is told to have loaded before all groups have. ``_tell`` does not wait for the rest: the
  other group's blocks still hold garbage.
- Old weights are never stored under new keys. ``reset`` leaves ``outdated`` false: a later request
  loads the bytes of the old ones.
- Groups and slots never mix. ``Matcher.scoped`` uses group 0 for all, or ``Outbox.rows`` forgets
  the rows per slot: the wrong bytes, or a slot that is not claimed.
- A repeated receipt changes nothing. ``Flights.settle`` takes a rank's second receipt: it is not
  counted as stale.
- A dead rank is not waited for. ``Flights.lose_rank`` keeps it in ``waiting``, or flights launched
  with no rank left are not landed: they never end.
- Every pin and claim ends. ``RequestRecord.let_go`` or ``Outbox.cancel_loads`` does not release:
  leases are left over.
"""

from __future__ import annotations

import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.model.shapes import GROUPS, PROMPTS, TIERS
from tests.model.simulation import Driver, Shape, Simulation

from kvferry.core.keys import Keys
from kvferry.errors import ClosedError, ReceiptError
from kvferry.types import Outcome, Rank, Receipt, TransferId

picks = st.integers(0, 11)


def is_open(machine: SchedulerMachine) -> bool:
    return machine.sim is not None and not machine.sim.closed


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of anything an engine, its workers and its machine can do."""

    sim: Simulation | None = None

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        tiers=st.sampled_from(sorted(TIERS)),
        num_ranks=st.integers(1, 4),
        num_slots=st.integers(2, 9),
        num_device_blocks=st.integers(6, 14),
        joins_loads=st.booleans(),
        bounded=st.booleans(),
    )
    def begin(
        self,
        groups: str,
        tiers: str,
        num_ranks: int,
        num_slots: int,
        num_device_blocks: int,
        joins_loads: bool,
        bounded: bool,
    ) -> None:
        self.sim = Simulation(
            Shape(
                GROUPS[groups],
                PROMPTS,
                num_ranks=num_ranks,
                num_slots=num_slots,
                num_device_blocks=num_device_blocks,
                joins_loads=joins_loads,
                tiers=TIERS[tiers],
                bounded=bounded,
            )
        )
        self.driver = Driver(self.sim)
        self.driver.arrive(0)

    @precondition(is_open)
    @rule(pick=picks)
    def arrive(self, pick: int) -> None:
        self.driver.arrive(pick)

    @precondition(is_open)
    @rule(
        pick=picks,
        computed=st.sampled_from([0, 0, 0, 1, 2]),
        cap=st.sampled_from([None, None, 7, 11, 15]),
        load=st.booleans(),
    )
    def match(self, pick: int, computed: int, cap: int | None, load: bool) -> None:
        self.driver.match(pick, computed, cap, load)

    @precondition(is_open)
    @rule(pick=picks, num_tokens=st.integers(1, 24), store=st.booleans())
    def compute(self, pick: int, num_tokens: int, store: bool) -> None:
        self.driver.compute(pick, num_tokens, store)

    @precondition(is_open)
    @rule(pick=picks)
    def store(self, pick: int) -> None:
        self.driver.store(pick)

    @precondition(is_open)
    @rule(pick=picks)
    def forget_window(self, pick: int) -> None:
        self.driver.forget_window(pick)

    @precondition(is_open)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        self.driver.preempt(pick)

    @precondition(is_open)
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        self.driver.finish(pick)

    @precondition(is_open)
    @rule()
    def plan(self) -> None:
        assert self.sim is not None
        self.sim.plan()

    @precondition(is_open)
    @rule(pick=picks, outcome=st.sampled_from(["ok", "ok", "ok", "failed"]), deliver=st.booleans())
    def execute(self, pick: int, outcome: str, deliver: bool) -> None:
        self.driver.execute(pick, outcome, deliver)

    @precondition(is_open)
    @rule()
    def work_off(self) -> None:
        assert self.sim is not None
        self.sim.work_off()

    @precondition(is_open)
    @rule(pick=picks, count=st.integers(0, 6))
    def deliver(self, pick: int, count: int) -> None:
        self.driver.deliver(pick, count)

    @precondition(is_open)
    @rule(pick=picks)
    def repeat(self, pick: int) -> None:
        self.driver.repeat(pick)

    @precondition(is_open)
    @rule(rank=st.integers(0, 5), ahead=st.integers(0, 2))
    def refuse_foreign_receipts(self, rank: int, ahead: int) -> None:
        assert self.sim is not None
        before = self.sim.scheduler.stats()
        unknown = TransferId(self.sim.scheduler.transfers._num_sent + ahead)
        with pytest.raises(ReceiptError, match=f"transfer {unknown}"):
            self.sim.scheduler.settle([Receipt(unknown, Rank(0), Outcome.OK)])
        if rank >= self.sim.shape.num_ranks and unknown > ahead:
            with pytest.raises(ReceiptError, match=f"rank {rank}"):
                self.sim.scheduler.settle([Receipt(TransferId(0), Rank(rank), Outcome.OK)])
        assert self.sim.scheduler.stats() == before

    @precondition(is_open)
    @rule(pick=picks, really=st.integers(0, 3))
    def lose_rank(self, pick: int, really: int) -> None:
        if not really:
            self.driver.lose_rank(pick)

    @precondition(is_open)
    @rule()
    def wait_past_deadlines(self) -> None:
        self.driver.wait()

    @precondition(is_open)
    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        self.driver.evict(count)

    @precondition(is_open)
    @rule()
    def reset(self) -> None:
        assert self.sim is not None
        self.sim.reset()

    @precondition(is_open)
    @rule(really=st.integers(0, 5))
    def shut_down(self, really: int) -> None:
        assert self.sim is not None
        if not really:
            self.sim.shut_down()

    @precondition(lambda machine: not is_open(machine))
    @rule()
    def use_after_close(self) -> None:
        assert self.sim is not None
        scheduler = self.sim.scheduler
        for use in (
            scheduler.plan,
            scheduler.settle,
            scheduler.reset,
            lambda: scheduler.match("late", Keys.empty()),
            lambda: scheduler.load("late", [[]]),
            lambda: scheduler.store("late", Keys.empty(), [[]], 0),
            lambda: scheduler.lose_rank(Rank(0), "late"),
        ):
            with pytest.raises(ClosedError, match="closed"):
                use()
        scheduler.finish("late")
        scheduler.preempt("late")
        scheduler.close()
        self.sim._check_empty()

    @invariant()
    def always(self) -> None:
        if is_open(self):
            assert self.sim is not None
            self.sim.check()

    def teardown(self) -> None:
        if is_open(self):
            assert self.sim is not None
            self.sim.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=4 * settings().max_examples, stateful_step_count=60)


# What a serving engine does all day, and how often; disturbances are rare.
HABITS = {
    "arrive": 6,
    "match": 14,
    "compute": 14,
    "plan": 10,
    "execute": 30,
    "work_off": 2,
    "deliver": 6,
    "finish": 4,
    "preempt": 2,
    "forget_window": 2,
    "repeat": 1,
    "wait": 0.2,
    "evict": 1,
    "reset": 0.1,
}


def live(sim: Simulation, rng: np.random.Generator, steps: int, check_every: int = 1) -> Counter:
    """So many random steps, mostly the usual ones; returns how often each was taken."""
    driver = Driver(sim)
    names = sorted(HABITS)
    odds = np.array([HABITS[name] for name in names])
    done: Counter[str] = Counter()
    for step, name in enumerate(rng.choice(names, size=steps, p=odds / odds.sum())):
        done[name] += 1
        pick = int(rng.integers(0, 1000))
        if name == "match":
            computed = int(rng.choice([0, 0, 0, 1, 2]))
            cap = [None, None, 7, 15][int(rng.integers(4))]
            driver.match(pick, computed, cap, load=bool(rng.random() < 0.8))
        elif name == "compute":
            driver.compute(pick, int(rng.integers(1, 24)), store=bool(rng.random() < 0.8))
        elif name == "execute":
            failed = rng.random() < 0.01
            driver.execute(pick, "failed" if failed else "ok", deliver=bool(rng.random() < 0.7))
        elif name == "deliver":
            driver.deliver(pick, int(rng.integers(0, 5)))
        elif name == "evict":
            driver.evict(int(rng.integers(1, 3)))
        elif name in ("plan", "work_off", "reset"):
            getattr(sim, name)()
        elif name == "wait":
            driver.wait()
        else:
            getattr(driver, name)(pick)
        if step % check_every == 0:
            sim.check()
    return done


@pytest.mark.parametrize("tiers", sorted(TIERS))
@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_a_long_life(groups: str, tiers: str) -> None:
    """Longer than Hypothesis goes, and proof that loads really happen in these tests."""
    rng = np.random.default_rng(zlib.crc32(f"{groups} {tiers}".encode()))
    sim = Simulation(
        Shape(
            GROUPS[groups],
            PROMPTS,
            num_ranks=int(rng.integers(1, 5)),
            num_slots=20,
            num_device_blocks=20,
            joins_loads=bool(rng.integers(2)),
            tiers=TIERS[tiers],
        )
    )
    # At a chunk's end nothing is loaded, and short prompts have few large blocks.
    live(sim, rng, 2000 if groups in ("chunks", "mixed-blocks") else 800)
    assert sim.num_loaded > 5
    sim.lose_rank(0)
    live(sim, rng, 60)
    sim.drain()
