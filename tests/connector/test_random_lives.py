"""Random lives of many requests against both sides: every loaded byte, and nothing left over.

The test is vLLM's scheduler: it shares prefixes, prefills in chunks, preempts, resumes, aborts,
uses names again and resets everything for new weights; with ``ahead`` it schedules a step before
the output of the one before it is known. A block's bytes follow from its hash and
from the weights, fresh blocks are poisoned, and every load is compared.

Seen red with: a reset before which requests are not told, or after which a calm step carries the
epoch before; a name used again that takes over what its namesake left.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.sides import BLOCK_TOKENS, NUM_BLOCKS, Sides

BUDGET = 700
MOST_REQUESTS = 6
POISON = -7.0
NUM_LIVES = 40
NAMES = [f"n{number}" for number in range(12)]


def hashes_of(conversation: int, count: int) -> list[bytes]:
    """Conversations share their first two blocks in pairs."""
    last = hashlib.sha256(b"root%d" % (conversation // 2)).digest()
    found = []
    for number in range(count):
        last = hashlib.sha256(last + (b"%d" % conversation if number >= 2 else b"")).digest()
        found.append(last)
    return found


def bytes_of(name: bytes, weights: int) -> float:
    """What a block with this hash holds, all over."""
    digest = hashlib.sha256(name + b"%d" % weights).digest()
    return float(int.from_bytes(digest[:3], "little") + 1)


@dataclass(eq=False)
class Life:
    """A request as the connector sees it, and what only its scheduler knows."""

    request_id: str
    num_tokens: int
    limit: int
    hashes: list[bytes]
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    state: str = "waiting"
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_ahead: int = 0  # tokens that are being computed and not known yet
    is_new: bool = True
    is_over: bool = False
    is_outdated: bool = False
    loads: tuple[int, int, int] = (0, 0, 0)  # from token, to token, weights of that time

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens
        self.block_hashes = self.hashes[: self.num_tokens // BLOCK_TOKENS]

    def grow(self) -> None:
        self.num_tokens += 1
        self.num_output_tokens += 1
        self.block_hashes = self.hashes[: self.num_tokens // BLOCK_TOKENS]


Batch = list[tuple[Life, int, bool]]
"""Who ran, how often it had been preempted by then, and whether it samples a token."""


class World:
    """vLLM's scheduler, its cache and one rank. Owns the requests that live."""

    def __init__(self, seed: int, ahead: int) -> None:
        self.rng = random.Random(seed)
        self.sides = Sides(["layer0"], host=[self.rng.choice(["64KiB", "1MiB"])])
        self.kv = self.sides.kv[0]["layer0"]
        self.pool = self.sides.pool
        self.lives: dict[str, Life] = {}
        self.weights = 0
        self.ahead = ahead
        self.pending: list[Batch] = []
        self.num_compared = 0
        self.num_quiet = 0

    def come(self) -> None:
        name = self.rng.choice([name for name in NAMES if name not in self.lives])
        tokens = self.rng.randint(3, 130)
        limit = tokens + self.rng.choice([0, 0, 1, 3, 20, 60])
        hashes = hashes_of(self.rng.randrange(4), limit // BLOCK_TOKENS + 3)
        self.lives[name] = Life(name, tokens, limit, hashes)

    def end(self, life: Life) -> None:
        life.is_over = True
        self.sides.side.finished(life, (list(life.blocks),))
        self.free(life)
        del self.lives[life.request_id]

    def replace_weights(self) -> None:
        self.weights += 1
        self.pool.evict_blocks({block.block_id for block in self.pool.blocks})
        for life in self.lives.values():
            life.is_outdated |= bool(life.blocks)
        self.sides.side.reset()

    def preempt(self, life: Life) -> None:
        self.free(life)
        life.state, life.is_new, life.is_outdated = "waiting", False, False
        life.num_preemptions += 1
        life.num_computed_tokens = life.num_ahead = 0

    def allocate(self, life: Life, num_tokens: int) -> bool:
        need = -(-num_tokens // BLOCK_TOKENS) - len(life.blocks)
        if need > self.pool.get_num_free_blocks():
            return False
        for block in self.pool.get_new_blocks(max(0, need)):
            self.kv[block.block_id] = POISON
            life.blocks.append(block.block_id)
        self.sides.tables[life.request_id] = life.blocks
        return True

    def free(self, life: Life) -> None:
        self.pool.free_blocks([self.pool.blocks[number] for number in reversed(life.blocks)])
        life.blocks, life.num_cached = [], 0

    def cached_prefix(self, life: Life) -> list[Any]:
        found: list[Any] = []
        for name in life.block_hashes:
            block = self.pool.get_cached_block(name, [0])
            if not block or (len(found) + 1) * BLOCK_TOKENS > life.num_tokens - 1:
                break
            found.append(block[0])
        return found

    def step(self, *, waits: bool = False) -> None:
        scheduled, preempted = self.schedule_running()
        new: list[str] = []
        if not preempted or self.rng.random() < 0.3:
            new = self.schedule_waiting(scheduled)
        orders = self.sides.orders(scheduled, new=new, preempted=sorted(preempted))
        assert self.sides.side.serving is not None
        epoch = self.sides.side.serving.scheduler.epoch
        assert orders.epoch == epoch, "the ranks do not hear of an epoch"
        self.num_quiet += orders.is_quiet
        self.pending.append([self.compute(self.lives[name], n) for name, n in scheduled.items()])
        self.sides.run(orders)
        while len(self.pending) > (0 if waits else self.ahead):
            self.take_output(self.pending.pop(0))

    def schedule_running(self) -> tuple[dict[str, int], set[str]]:
        scheduled: dict[str, int] = {}
        preempted: set[str] = set()
        running = [life for life in self.lives.values() if life.state == "running"]
        for life in running:
            known = life.num_tokens + life.num_ahead
            count = min(known - life.num_computed_tokens, BUDGET - sum(scheduled.values()))
            if life.state != "running" or count <= 0 or known > life.limit + 1:
                continue
            if count > 3 and self.rng.random() < 0.1:
                count = self.rng.randint(1, count)
            while life.state == "running" and count:
                if self.allocate(life, life.num_computed_tokens + count):
                    scheduled[life.request_id] = count
                    break
                if self.sides.side.frees_soon() and self.rng.random() < 0.8:
                    break
                victim = [other for other in running if other.state == "running"][-1]
                scheduled.pop(victim.request_id, None)
                self.preempt(victim)
                preempted.add(victim.request_id)
        return scheduled, preempted

    def schedule_waiting(self, scheduled: dict[str, int]) -> list[str]:
        new = []
        for life in [life for life in self.lives.values() if life.state in ("waiting", "arrived")]:
            room = BUDGET - sum(scheduled.values())
            if life.num_tokens > life.limit or room <= 0:
                continue
            count = self.resume(life, room) if life.state == "arrived" else self.begin(life, room)
            if count:
                scheduled[life.request_id] = count
                life.state = "running"
                new += [life.request_id] if life.is_new else []
                life.is_new = False
        return new

    def begin(self, life: Life, room: int) -> int:
        """Ask the connector and allocate; how many tokens it computes now, none if it loads."""
        prefix = self.cached_prefix(life)
        local = len(prefix) * BLOCK_TOKENS
        external, is_async = self.sides.side.match(life, local)
        if external is None or self.rng.random() < 0.2:  # vLLM may have no room for other reasons
            return 0
        computed = min(local + external, life.num_tokens - 1)
        count = min(life.num_tokens - computed, room)
        self.pool.touch(prefix)
        life.blocks, life.num_cached = [block.block_id for block in prefix], len(prefix)
        if not self.allocate(life, local + external if is_async else computed + count):
            self.free(life)
            return 0
        self.tell_blocks(life, external)
        life.num_computed_tokens = computed
        if is_async:
            life.state, life.loads = "loading", (local, local + external, self.weights)
            return 0
        return count

    def resume(self, life: Life, room: int) -> int:
        count = min(life.num_tokens - life.num_computed_tokens, room)
        if not self.allocate(life, life.num_computed_tokens + count):
            return 0
        self.tell_blocks(life, 0)
        return count

    def tell_blocks(self, life: Life, external: int) -> None:
        ids = (list(life.blocks),)
        self.sides.side.allocated(life, SimpleNamespace(get_block_ids=lambda: ids), external)

    def compute(self, life: Life, count: int) -> tuple[Life, int, bool]:
        start = life.num_computed_tokens
        for token in range(start, start + count):
            at = token // BLOCK_TOKENS
            value = bytes_of(life.hashes[at], self.weights)
            self.kv[life.blocks[at], :, token % BLOCK_TOKENS] = value
        life.num_computed_tokens += count
        samples = life.num_computed_tokens >= life.num_tokens + life.num_ahead
        life.num_ahead += samples
        return life, life.num_preemptions, samples

    def take_output(self, batch: Batch) -> None:
        told = self.sides.answer(0)
        for name in told.finished_recving or ():
            if name in self.lives and self.lives[name].state == "loading":
                self.arrive(self.lives[name], set(told.invalid_block_ids or ()))
        for life, num_preemptions, samples in batch:
            if life.is_over or life.num_preemptions != num_preemptions:
                continue
            if samples:
                life.num_ahead -= 1
                life.grow()
            self.cache(life)
            if life.num_tokens > life.limit:
                self.end(life)

    def arrive(self, life: Life, invalid: set[int]) -> None:
        first, last, weights = life.loads
        missing = [at for at, number in enumerate(life.blocks) if number in invalid]
        if missing:
            last = life.num_computed_tokens = missing[0] * BLOCK_TOKENS
        for at in range(first // BLOCK_TOKENS, last // BLOCK_TOKENS):
            wanted = bytes_of(life.hashes[at], weights)
            assert bool((self.kv[life.blocks[at]] == wanted).all()), (
                f"{life.request_id}: block {at}"
            )
            self.num_compared += 1
        life.state = "arrived"

    def cache(self, life: Life) -> None:
        """Let vLLM's prefix cache know what was computed, unless it is of weights that are gone."""
        count = min(life.num_computed_tokens // BLOCK_TOKENS, len(life.block_hashes))
        if count > life.num_cached and not life.is_outdated:
            self.pool.cache_full_blocks(
                life,
                [self.pool.blocks[number] for number in life.blocks],
                num_cached_blocks=life.num_cached,
                num_full_blocks=count,
                block_size=BLOCK_TOKENS,
                kv_cache_group_id=0,
            )
            life.num_cached = count

    def check(self) -> None:
        side = self.sides.side
        assert not side.guard.broken, side.guard.reason
        serving = side.serving
        assert serving is not None
        answered = {request.id for request in serving.scheduler._requests.answered}
        assert answered <= set(serving._requests) <= set(self.lives), "a request is leaked"

    def check_end(self) -> None:
        side = self.sides.side
        self.check()
        assert side.serving is not None
        scheduler = side.serving.scheduler
        assert not scheduler.requests
        assert side.serving.engine.num_held == 0
        assert self.pool.get_num_free_blocks() == NUM_BLOCKS - 1
        assert scheduler.pool.num_leases == 0
        scheduler.check_integrity()


@contextmanager
def world(seed: int, ahead: int) -> Iterator[World]:
    made = World(seed, ahead)
    try:
        yield made
    finally:
        made.sides.close()


def live(world: World, num_steps: int) -> None:
    for _ in range(num_steps):
        if world.rng.random() < 0.6 and len(world.lives) < MOST_REQUESTS:
            world.come()
        if world.rng.random() < 0.05 and world.lives:
            world.end(world.rng.choice(list(world.lives.values())))
        if world.rng.random() < 0.03:
            world.replace_weights()
        world.step()
        world.check()
    for life in list(world.lives.values()):
        world.end(life)
    for _ in range(500):
        if not world.sides.side.has_work:
            break
        world.step(waits=True)
    assert not world.sides.side.has_work, "it works for ever"
    world.step(waits=True)
    world.check_end()


@pytest.mark.parametrize("ahead", [0, 1], ids=["in turn", "ahead"])
def test_no_wrong_byte_and_nothing_left(monkeypatch, ahead):
    monkeypatch.setattr("kvferry.scheduler.stores.STORE_TOKENS", 4096)
    num_compared = num_quiet = 0
    for seed in range(NUM_LIVES):
        with world(seed, ahead) as one:
            live(one, 250)
            num_compared += one.num_compared
            num_quiet += one.num_quiet
    print(f"{num_compared} blocks compared, {num_quiet} quiet steps")
    assert num_compared > 2 * NUM_LIVES
    assert num_quiet > NUM_LIVES // 2
