"""Random sequences over a pool, against a model made of plain dicts and sets.

After every step the pool proves itself (``check_integrity``) and agrees with the model about what
is cached, on its way in, free and claimed.

What must hold, and a one-line break of the code that these tests were seen to catch:

- A slot being written is never matchable. ``Pool.pin`` takes any slot
  that is not free.
- A slot being read is never evicted. ``Pool._is_idle`` does not look at readers.
- No cached child outlives its parent through eviction. ``Chains.can_go`` lets all go.
- Everything that can go goes when room is needed. ``victims`` looks only once.
- A partial store takes the leading missing keys. ``Pool.reserve`` takes the last ones.
- What is spoiled while claimed comes back with its claim. ``Pool.end`` does not free doomed
  slots.
- What is disowned is not matched. ``Pool._doom`` leaves it in the index.
- A slot that is not ready is never given out, and is used like any other from then on.
- A lease ends exactly once. ``Lease._finish`` does not look at ``ended``.
- Two keys are one only if all their bytes are. ``Index._find_in_table`` compares one word.
- What follows a failed block of its lease is not committed. ``Chains.follow`` says that nothing
  follows.
- New hits are announced. ``Pool.end`` does not raise the generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from tests.fakes.crafted_keys import colliding_key, key
from tests.fakes.pools import evict

from kvferry.cache.pool import Pool
from kvferry.cache.slots import Lease, Purpose
from kvferry.core.keys import Key, Keys
from kvferry.errors import InputError, StateError

# Conversations that share beginnings, as numbers of blocks; a number always has the same parent.
CHAINS = (
    (0, 1, 2, 3, 4, 5),
    (0, 1, 2, 6, 7, 8),
    (0, 9, 10, 11),
    (12, 13, 14, 15, 16),
)
LOOSE = tuple(range(20, 26))
EVERY = sorted({number for chain in CHAINS for number in chain} | set(LOOSE))


@dataclass(eq=False)
class Block:
    """One block the model believes in, or no longer does but somebody still claims."""

    number: int
    slot: int
    written: bool = False
    believed: bool = True
    parent: Block | None = None


@dataclass(eq=False)
class Claim:
    """An open lease as the model sees it."""

    lease: Lease
    blocks: list[Block]


@dataclass
class Model:
    """What the pool should be, one block at a time and with no cleverness."""

    total: int
    blocks: dict[int, Block] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)

    def claimed(self) -> set[Block]:
        return {block for claim in self.claims for block in claim.blocks}

    def free(self) -> int:
        return self.total - len(set(self.blocks.values()) | self.claimed())

    def children(self, block: Block) -> list[Block]:
        return [other for other in self.blocks.values() if other.parent is block]

    def evictable(self, spared: set[int]) -> set[Block]:
        """Blocks that nobody claims and that no kept block depends on."""
        claimed = self.claimed()
        kept = {b for b in self.blocks.values() if b in claimed or b.number in spared}
        todo = list(kept)
        while todo:
            parent = todo.pop().parent
            if parent is not None and parent.believed and parent not in kept:
                kept.add(parent)
                todo.append(parent)
        return set(self.blocks.values()) - kept

    def follows(self, block: Block, lost: set[Block]) -> bool:
        """Whether a block comes after any of these in its chain."""
        parent = block.parent
        while parent is not None and parent not in lost:
            parent = parent.parent
        return parent is not None

    def drop(self, block: Block) -> None:
        block.believed = False
        block.parent = None
        del self.blocks[block.number]
        for child in self.children(block):
            child.parent = None


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool and the model side by side."""

    make_key: Callable[[int], Key] = staticmethod(key)
    writes = Bundle("writes")
    reads = Bundle("reads")

    @initialize(num_slots=st.integers(1, 12), ready=st.integers(0, 36))
    def start(self, num_slots: int, ready: int) -> None:
        self.pool = Pool(num_slots, num_ready=min(ready, num_slots))
        self.model = Model(self.pool.num_ready)
        self.every = self.keys(EVERY)

    def keys(self, numbers: Sequence[int]) -> Keys:
        return Keys.from_bytes([self.make_key(number) for number in numbers])

    # -- claiming -------------------------------------------------------------------------------

    @rule(target=writes, chain=st.sampled_from(CHAINS), cut=st.tuples(*[st.integers(0, 6)] * 2))
    def reserve_chained(self, chain: tuple[int, ...], cut: tuple[int, int]):
        first, last = min(cut), max(cut)
        parent = chain[first - 1] if 0 < first <= len(chain) else None
        return self.reserve(chain[first:last], parent, chained=True)

    @rule(target=writes, numbers=st.lists(st.sampled_from(LOOSE), unique=True))
    def reserve_loose(self, numbers: list[int]):
        return self.reserve(numbers, None, chained=False)

    def reserve(self, numbers: Sequence[int], parent: int | None, *, chained: bool):
        model = self.model
        missing = [number for number in numbers if number not in model.blocks]
        spared = set(numbers) | ({parent} if parent is not None else set())
        free, can_go = model.free(), model.evictable(spared)
        room = min(len(missing), free + len(can_go))
        lease = self.pool.reserve(
            self.keys(numbers),
            parent=self.make_key(parent) if parent is not None else None,
            chained=chained,
        )
        self.see_evictions(can_go, max(0, min(len(missing) - free, len(can_go))))
        stored = missing[:room]  # the leading missing keys, and as many as there is room for
        fresh: list[Block] = []
        if lease is not None:
            assert lease.purpose is Purpose.WRITE
            assert [numbers[p] for p in lease.positions] == stored
            in_use = {b.slot for b in model.claimed() | set(model.blocks.values())}
            assert not in_use & set(lease.slots.tolist()), "a slot in use was given out"
            fresh = [Block(n, int(s)) for n, s in zip(stored, lease.slots, strict=True)]
            model.blocks.update((block.number, block) for block in fresh)
        else:
            assert not stored
        if chained:
            self.link(numbers, parent)
        if lease is None:
            return multiple()
        claim = Claim(lease, fresh)
        model.claims.append(claim)
        return claim

    def link(self, numbers: Sequence[int], parent: int | None) -> None:
        before = self.model.blocks.get(parent) if parent is not None else None
        for number in numbers:
            block = self.model.blocks.get(number)
            if block is not None and block.parent is None and before is not None:
                block.parent = before
            before = block

    def see_evictions(self, can_go: set[Block], count: int) -> None:
        """Exactly ``count`` blocks went, all of them allowed to, none before its children."""
        known = self.pool.known(self.every)
        gone = {
            self.model.blocks[number]
            for number, still in zip(EVERY, known, strict=True)
            if number in self.model.blocks and not still
        }
        assert gone <= can_go, f"evicted {[b.number for b in gone - can_go]} against the rules"
        assert len(gone) == count
        for block in gone:
            assert set(self.model.children(block)) <= gone, "a child outlived its parent"
        for block in gone:
            self.model.drop(block)

    @rule(target=reads, chain=st.sampled_from(CHAINS), cut=st.tuples(*[st.integers(0, 6)] * 2))
    def pin_chained(self, chain: tuple[int, ...], cut: tuple[int, int]):
        return self.pin(chain[min(cut) : max(cut)])

    @rule(target=reads, chain=st.sampled_from(CHAINS))
    def pin_to_copy(self, chain: tuple[int, ...]):
        return self.pin(chain, Purpose.COPY)

    @rule(target=reads, numbers=st.lists(st.sampled_from(LOOSE), unique=True))
    def pin_loose(self, numbers: list[int]):
        return self.pin(numbers)

    def pin(self, numbers: Sequence[int], purpose: Purpose = Purpose.READ):
        blocks: list[Block] = []
        for number in numbers:
            block = self.model.blocks.get(number)
            if block is None or not block.written:
                break
            blocks.append(block)
        assert self.pool.match(self.keys(numbers)) == len(blocks)
        lease = self.pool.lease(self.keys(numbers), purpose)
        if not blocks:
            assert lease is None
            return multiple()
        assert lease is not None
        assert lease.slots.tolist() == [block.slot for block in blocks]
        claim = Claim(lease, blocks)
        self.model.claims.append(claim)
        return claim

    # -- ending ---------------------------------------------------------------------------------

    def end(self, claim: Claim) -> None:
        self.model.claims.remove(claim)
        for ending in ("commit", "abort", "release", "spoil"):
            with pytest.raises(StateError):
                getattr(claim.lease, ending)()
        with pytest.raises(StateError, match="disowned"):
            claim.lease.disown()

    @rule(claim=consumes(writes))
    def commit(self, claim: Claim) -> None:
        generation = self.pool.generation
        claim.lease.commit()
        assert self.pool.generation > generation
        for block in claim.blocks:
            block.written = True
        self.end(claim)

    @rule(claim=consumes(writes))
    def abort(self, claim: Claim) -> None:
        claim.lease.abort()
        for block in claim.blocks:
            if block.believed:
                self.model.drop(block)
        self.end(claim)

    @rule(claim=consumes(writes), failed=st.sets(st.integers(0, 5)))
    def commit_partly(self, claim: Claim, failed: set[int]) -> None:
        """What failed, and what follows it in this lease, was never there."""
        lost = {block for at, block in enumerate(claim.blocks) if at in failed and block.believed}
        gone = lost | {block for block in claim.blocks if self.model.follows(block, lost)}
        generation = self.pool.generation
        claim.lease.commit(failed=[at for at in failed if at < len(claim.blocks)])
        assert self.pool.generation > generation
        for block in claim.blocks:
            block.written = block not in gone
            if block in gone:
                self.model.drop(block)
        self.end(claim)

    @rule(claim=consumes(reads), failed=st.sets(st.integers(0, 5)))
    def release_partly(self, claim: Claim, failed: set[int]) -> None:
        """What failed is gone, and nothing else."""
        claim.lease.release(failed=[at for at in failed if at < len(claim.blocks)])
        for at, block in enumerate(claim.blocks):
            if at in failed and block.believed:
                self.model.drop(block)
        self.end(claim)

    @rule(claim=consumes(reads))
    def release(self, claim: Claim) -> None:
        claim.lease.release()
        self.end(claim)

    @rule(claim=consumes(reads))
    def spoil(self, claim: Claim) -> None:
        claim.lease.spoil()
        for block in claim.blocks:
            if block.believed:
                self.model.drop(block)
        self.end(claim)

    @rule(claim=writes)
    def end_a_write_as_a_read(self, claim: Claim) -> None:
        for ending in (claim.lease.release, claim.lease.spoil):
            with pytest.raises(StateError):
                ending()

    # -- disturbing -----------------------------------------------------------------------------

    @rule(numbers=st.lists(st.sampled_from(EVERY)))
    def touch(self, numbers: list[int]) -> None:
        self.pool.touch(self.keys(numbers))

    @rule(count=st.integers(0, 14))
    def evict(self, count: int) -> None:
        can_go = self.model.evictable(set())
        assert evict(self.pool, count) == min(count, len(can_go))
        self.see_evictions(can_go, min(count, len(can_go)))

    @rule(claim=st.one_of(writes, reads))
    def disown(self, claim: Claim) -> None:
        claim.lease.disown()
        for block in claim.blocks:
            if block.believed:
                self.model.drop(block)

    @rule(ready=st.integers(0, 12))
    def grow(self, ready: int) -> None:
        if ready > self.pool.num_slots:
            with pytest.raises(InputError, match=f"cannot have {ready} ready"):
                self.pool.grow(ready)
            return
        self.pool.grow(ready)
        self.model.total = max(self.model.total, ready)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        for block in list(self.model.blocks.values()):
            self.model.drop(block)

    @rule(chain=st.sampled_from(CHAINS))
    def refuse_nonsense(self, chain: tuple[int, ...]) -> None:
        twice = self.keys([*chain, chain[0]])
        with pytest.raises(InputError, match=f"{len(twice)} keys to reserve are not distinct"):
            self.pool.reserve(twice)
        if self.pool.match(twice) == len(twice):
            with pytest.raises(InputError, match=f"{len(twice)} blocks to lease are not distinct"):
                self.pool.lease(twice)

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def the_pool_proves_itself(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()

    @invariant()
    def the_model_agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        blocks, claimed = self.model.blocks, self.model.claimed()
        assert self.pool.known(self.every).tolist() == [n in blocks for n in EVERY]
        assert self.pool.cached(self.every).tolist() == [
            n in blocks and blocks[n].written for n in EVERY
        ]
        counts = self.pool.counts
        assert counts.unready == self.pool.num_slots - self.model.total
        for claim in self.model.claims:
            assert all(slot < self.model.total for slot in claim.lease.slots.tolist())
        assert counts.free == self.model.free()
        assert counts.leased == len(claimed)
        assert counts.cached == len(set(blocks.values()) - claimed)
        assert self.pool.num_leases == len(self.model.claims)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for claim in self.model.claims:
            if claim.lease.purpose is Purpose.WRITE:
                claim.lease.abort()
            else:
                claim.lease.release()
        self.pool.check_integrity()
        self.pool.grow(self.pool.num_slots)
        counts = self.pool.counts
        assert self.pool.num_leases == 0
        assert counts.leased == 0
        assert counts.free + counts.cached == counts.total
        # With no claim left, everything can go: nothing is stuck behind its children.
        assert evict(self.pool, counts.total) == counts.cached
        assert self.pool.counts.free == counts.total
        self.pool.check_integrity()


class CollidingPoolMachine(PoolMachine):
    """The same, with keys that all want one row of the table and carry one tag."""

    make_key = staticmethod(colliding_key)


_effort = settings()  # the profile's own
TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=2 * _effort.max_examples, stateful_step_count=50)
TestPoolWithCollidingKeys = CollidingPoolMachine.TestCase
TestPoolWithCollidingKeys.settings = settings(stateful_step_count=50)
