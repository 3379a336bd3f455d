"""The contract of eviction policies, run against every one we have and some that only tests have.

A new policy joins by a line in ``POLICIES``. What holds for all: which slots it holds, that each is
given out at most once, and that a pool stays sound whatever it says. LRU's order is checked against
an oracle.

One-line breaks that were tried; each made a test of this module fail.

- ``victims`` does not look at ``is_idle``; goes on asking for ever
- ``Pool._make_room`` does not look for slots that were let go of twice; leaves readers behind when
  a policy raises
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.crafted_keys import key, keys
from tests.fakes.policies import Fifo, Odd, Tails
from tests.model.pool_lives import Disown, End, Event, Grow, Pin, Reserve, Reset, Touch, life

from kvferry.cache.policies import policy_named
from kvferry.cache.policies.contract import (
    Arriving,
    EvictionPolicy,
    EvictionPolicyMaker,
    Residents,
)
from kvferry.cache.policies.lru import Lru
from kvferry.cache.pool import Pool
from kvferry.cache.slots import Lease, Purpose, as_slots
from kvferry.core.keys import Keys
from kvferry.errors import IntegrityError
from kvferry.settings.eviction import POLICIES as KINDS
from kvferry.types import NO_SLOT, SlotArray

POLICIES: dict[str, EvictionPolicyMaker] = {
    **{name: policy_named(name) for name in KINDS},
    "fifo": Fifo,
    "tails": Tails,
    "odd": Odd,
}
HONEST = {name: make for name, make in POLICIES.items() if make is not Odd}
NUM_SLOTS = 12

every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())
honest_policy = pytest.mark.parametrize("make", HONEST.values(), ids=HONEST.keys())

slot_lists = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("insert", "use", "keep", "discard")), slot_lists),
        st.tuples(st.just("take"), st.integers(0, NUM_SLOTS + 2)),
        st.tuples(st.just("put_back"), st.just(None)),
        st.tuples(st.just("clear"), st.just(None)),
    ),
    max_size=60,
)
Steps = list[tuple[str, list[int] | int | None]]


def policy_of(make: EvictionPolicyMaker) -> EvictionPolicy:
    """A policy without a pool: block n is key n."""
    ticks = iter(range(1 << 30))
    return make(
        Residents(
            num_slots=NUM_SLOTS,
            now=lambda: float(next(ticks)),
            keys_of=lambda slots: keys(slots.tolist()),
            parents_of=lambda slots: np.full(len(slots), NO_SLOT),
            num_followers_of=lambda slots: np.zeros(len(slots), dtype=np.int32),
            is_idle=lambda slots: np.ones(len(slots), dtype=bool),
            can_go=lambda slot: True,
        )
    )


ARRIVING = Arriving(Keys.from_bytes([key(99)]), np.array([NO_SLOT]), NO_SLOT, True)


def check_membership(policy: EvictionPolicy, members: set[int]) -> None:
    peeked = policy.peek(NUM_SLOTS).tolist()
    assert len(peeked) == len(members)
    assert set(peeked) == members
    held = policy.holds(as_slots(range(NUM_SLOTS)))
    assert set(np.flatnonzero(held).tolist()) == members


@honest_policy
@given(steps=steps)
def test_membership(make: EvictionPolicyMaker, steps: Steps) -> None:
    policy = policy_of(make)
    members: set[int] = set()
    taken: list[int] = []
    for what, argument in steps:
        if isinstance(argument, list):
            getattr(policy, what)(as_slots(argument))
            members = members - set(argument) if what == "discard" else members | set(argument)
        elif isinstance(argument, int):
            taken = policy.take(argument, ARRIVING).tolist()
            assert len(taken) == len(set(taken)) <= min(argument, len(members))
            assert set(taken) <= members
            members -= set(taken)
        elif what == "put_back":
            back = [slot for slot in taken if slot not in members]
            policy.put_back(as_slots(back))
            members |= set(back)
        else:
            policy.clear()
            members = set()
        check_membership(policy, members)


@honest_policy
def test_what_was_put_back_goes_first_again(make: EvictionPolicyMaker) -> None:
    policy = policy_of(make)
    policy.insert(as_slots(range(6)))
    taken = policy.take(3, ARRIVING)
    policy.put_back(taken)
    first = policy.peek(len(taken)).tolist()
    policy.insert(as_slots(range(6, 9)))
    assert policy.peek(len(taken)).tolist() == first == taken.tolist()


@honest_policy
def test_emptiness(make: EvictionPolicyMaker) -> None:
    policy = policy_of(make)
    for call in (policy.insert, policy.use, policy.keep, policy.put_back):
        call(as_slots(()))
    policy.discard(as_slots(range(NUM_SLOTS)))
    assert policy.take(5, ARRIVING).tolist() == []
    assert policy.take(0, ARRIVING).tolist() == []
    check_membership(policy, set())


class Owner:
    """A pool with a policy, the leases on it, and where each block must be in its chain."""

    def __init__(self, make: EvictionPolicyMaker, num_slots: int) -> None:
        self.pool = Pool(num_slots, make, clock=iter(range(1 << 30)).__next__)
        self.open: list[Lease] = []

    def tell(self, event: Event, rng: Random) -> None:
        match event:
            case Reserve(_, _, chained):
                lease = self.pool.reserve(event.keys, parent=event.parent_key, chained=chained)
                self.claim(lease)
            case Pin(_, purpose):
                self.claim(self.pool.lease(event.keys, purpose))
            case Touch():
                self.pool.touch(event.keys)
            case End(at, well):
                if at < len(self.open):
                    self.end(self.open.pop(at), well, rng)
            case Disown(at):
                if at < len(self.open):
                    self.open[at].disown()
            case Reset():
                self.pool.reset()
            case Grow(num_ready):
                self.pool.grow(num_ready)
        self.pool.check_integrity()
        claimed = {slot for lease in self.open for slot in lease.slots.tolist()}
        assert self.pool.counts.leased == len(claimed)

    def claim(self, lease: Lease | None) -> None:
        if lease is not None:
            if lease.purpose is Purpose.WRITE:
                for other in self.open:
                    assert not set(lease.slots.tolist()) & set(other.slots.tolist())
            self.open.append(lease)

    def end(self, lease: Lease, well: bool, rng: Random) -> None:
        failed = [at for at in range(len(lease)) if rng.random() < 0.1]
        if lease.purpose is Purpose.WRITE:
            lease.commit(failed) if well else lease.abort()
        else:
            lease.release(failed) if well else lease.spoil()


@every_policy
@pytest.mark.parametrize("seed", range(5))
def test_a_pool_is_sound_with_it(make: EvictionPolicyMaker, seed: int) -> None:
    num_slots = (2, 7, 16, 24, 40)[seed]
    owner, rng = Owner(make, num_slots), Random(seed)
    for event in life(seed, num_slots, 400):
        owner.tell(event, rng)
    for lease in owner.open:
        owner.end(lease, True, rng)
    owner.pool.check_integrity()
    assert owner.pool.counts.leased == 0
    assert owner.pool.counts.evicted > 20


def stored(pool: Pool, numbers: list[int], *, after: int | None = None) -> None:
    lease = pool.reserve(keys(numbers), parent=key(after) if after is not None else None)
    assert lease is not None
    lease.commit()


def test_what_a_policy_may_see_of_a_block() -> None:
    seen: list[Residents] = []

    def make(residents: Residents) -> Fifo:
        seen.append(residents)
        return Fifo(residents)

    pool = Pool(16, make, clock=lambda: 12.5)
    (residents,) = seen
    stored(pool, [0, 1, 2])
    stored(pool, [0, 1, 5, 6])  # branches off after 1
    stored(pool, [3], after=2)  # goes on with the first
    stored(pool, [7, 8], after=6)  # and with the second
    stored(pool, [9], after=0)  # a third
    lone = pool.reserve(keys([20, 21]), chained=False)
    assert lone is not None
    lone.commit()
    stored(pool, [30])
    numbers = [0, 1, 2, 3, 5, 6, 7, 8, 9, 20, 21, 30]
    slots = pool.table.index.find(keys(numbers))
    assert residents.keys_of(slots) == keys(numbers)
    assert residents.num_followers_of(slots).tolist() == [2, 2, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    pin = pool.lease(keys([0, 1]))
    assert pin is not None
    assert residents.is_idle(slots).tolist() == [False] * 2 + [True] * 10
    assert residents.now() == 12.5


def test_a_newcomer_may_be_refused_and_is_described() -> None:
    asked: list[Arriving] = []

    class Refusing(Lru):
        def take(self, count: int, arriving: Arriving) -> SlotArray:
            asked.append(arriving._replace(slots=arriving.slots.copy()))
            return super().take(3, arriving) if len(asked) == 1 else as_slots(())

    pool = Pool(4, Refusing)
    stored(pool, [0, 1])
    stored(pool, [10, 11])
    lease = pool.reserve(keys([1, 2, 3, 4]), parent=key(0))
    assert lease is not None
    assert lease.positions.tolist() == [1], "one block made room"
    assert len(asked) == 2
    here = int(pool.table.index.find(keys([0]))[0])
    assert asked[0].keys == keys([1, 2, 3, 4])
    assert (asked[0].slots == NO_SLOT).tolist() == [False, True, True, True]
    assert asked[0].parent == here
    assert asked[0].chained
    pool.check_integrity()
    assert pool.cached(keys([0, 1, 10, 11])).tolist() == [True, True, True, False]
    assert pool.reserve(keys([30])) is None
    pool.check_integrity()


def test_use_is_not_insertion_is_not_keeping() -> None:
    told: list[tuple[str, list[int]]] = []

    class Told(Lru):
        def insert(self, slots: SlotArray) -> None:
            told.append(("insert", slots.tolist()))
            Lru.use(self, slots)

        def use(self, slots: SlotArray) -> None:
            told.append(("use", slots.tolist()))
            Lru.use(self, slots)

        def keep(self, slots: SlotArray) -> None:
            told.append(("keep", slots.tolist()))
            Lru.use(self, slots[::-1].copy())

    pool = Pool(4, Told)
    stored(pool, [0, 1, 2])
    pin = pool.lease(keys([0, 1]))
    assert pin is not None
    pin.release()
    pool.touch(keys([2]))  # now the last to go, behind those it follows
    stored(pool, [10, 11], after=None)
    pool.catch_up()
    a, b, c = pool.table.index.find(keys([0, 1, 2])).tolist()
    assert told[:3] == [("insert", [0, 1, 2]), ("use", [0, 1]), ("use", [2])]
    assert c == NO_SLOT
    assert ("keep", [b, a]) in told or ("keep", []) in told
    assert told[-1][0] == "insert"


def test_a_policy_that_lets_go_of_a_slot_twice_is_named() -> None:
    class Twice(Lru):
        def take(self, count: int, arriving: Arriving) -> SlotArray:
            return super().take(1, arriving).repeat(2)

    pool = Pool(3, Twice)
    stored(pool, [0, 1, 2])
    with pytest.raises(IntegrityError, match="Twice let go of a slot twice"):
        pool.reserve(keys([5, 6]))
    assert pool.table.readers.sum() == 0


def test_a_policy_that_raises_leaves_no_claim_behind() -> None:
    class Broken(Lru):
        def take(self, count: int, arriving: Arriving) -> SlotArray:
            raise ZeroDivisionError

    pool = Pool(3, Broken)
    stored(pool, [0, 1, 2])
    with pytest.raises(ZeroDivisionError):
        pool.reserve(keys([0, 1, 2, 3]))
    pool.check_integrity()
    assert pool.match(keys([0, 1, 2])) == 3


def test_a_policy_that_names_only_what_cannot_go_is_not_asked_for_ever() -> None:
    class Stubborn(Lru):
        def take(self, count: int, arriving: Arriving) -> SlotArray:
            return self.peek(count)

    pool = Pool(3, Stubborn)
    stored(pool, [0, 1, 2])
    pin = pool.lease(keys([0, 1, 2]))
    assert pin is not None
    assert pool.reserve(keys([5])) is None
    pin.release()
    pool.check_integrity()


def test_parents_that_stay_wait_behind_and_what_was_not_needed_keeps_its_place() -> None:
    """Seen red with parents kept as they were met, and with all that stays kept behind."""
    pool = Pool(10)
    for chain in ([0, 1, 2], [3, 4], [5, 6], [9], [10], [11]):
        stored(pool, chain)
    for number in (2, 4, 6):  # the ends, so what they follow stays
        assert pool.lease(keys([number]), Purpose.COPY) is not None
    for number in (0, 1, 9, 3, 10, 5, 11):
        pool.touch(keys([number]))
    assert pool.reserve(keys([20, 21]), chained=False) is not None
    left = pool.eviction.policy.peek(10)
    assert pool.table.index.keys_of(left) == keys([5, 11, 1, 0, 3])


class Oracle:
    """The order of touches, the longest untouched first; a chain is touched from its end on."""

    def __init__(self) -> None:
        self.slots: OrderedDict[int, None] = OrderedDict()

    def keep(self, slots: list[int]) -> None:
        for slot in slots:
            self.slots[slot] = None
            self.slots.move_to_end(slot)

    def insert(self, slots: list[int]) -> None:
        self.keep(slots[::-1])

    use = insert

    def take(self, count: int) -> list[int]:
        return [self.slots.popitem(last=False)[0] for _ in range(min(count, len(self.slots)))]

    def put_back(self, slots: list[int]) -> None:
        for slot in reversed(slots):
            self.slots[slot] = None
            self.slots.move_to_end(slot, last=False)


def test_lru_over_many_laps_of_its_queue() -> None:
    """Long enough that the queue of touches is compacted again and again."""
    policy, oracle = policy_of(Lru), Oracle()
    rng = np.random.default_rng(5)
    calls: list[tuple[Callable[[SlotArray], None], Callable[[list[int]], None]]] = [
        (policy.use, oracle.use),
        (policy.insert, oracle.insert),
        (policy.keep, oracle.keep),
    ]
    for lap in range(3000):
        touched = rng.permutation(NUM_SLOTS)[: rng.integers(0, NUM_SLOTS + 1)].tolist()
        tell, tell_oracle = calls[lap % 3]
        tell(as_slots(touched))
        tell_oracle(touched)
        if lap % 211 == 0:
            count = int(rng.integers(0, 6))
            taken = oracle.take(count)
            assert policy.take(count, ARRIVING).tolist() == taken
            policy.put_back(as_slots(taken[: count // 2]))
            oracle.put_back(taken[: count // 2])
        assert policy.peek(NUM_SLOTS).tolist() == list(oracle.slots)
    assert policy.take(NUM_SLOTS, ARRIVING).tolist() == oracle.take(NUM_SLOTS)
