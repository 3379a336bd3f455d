"""A small engine of our own around kvferry: the code of the guide "Write your own engine".

Its model has two kinds of layers, full attention and a sliding window, each with paged KV blocks
and a block table of its own. It has a prefix cache, preempts, and outlives failed copies. Below the
device lie host memory and, below that, a tier with numbered places. The "model" is a running sum:
enough for every token's KV to depend on all tokens before it. Before it computes, it compares every
byte that attention would read, so a wrong block anywhere stops the program.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.engine import (
    DEVICE,
    FIRST_RANK,
    HOST,
    NO_BLOCK,
    BlockTable,
    Config,
    CopyEngine,
    DeviceBlocks,
    FullAttention,
    Group,
    Key,
    Keys,
    MatchState,
    MemoryTier,
    Namespace,
    Ordered,
    Outcome,
    PlacedLevel,
    Pool,
    Receipt,
    Request,
    Scheduler,
    SlidingWindow,
    State,
    TierMover,
    TierName,
    Transfer,
    Worker,
    WriteMode,
    chain,
    describe,
    longest_hit,
    needed,
    open_on_cpu,
)

BLOCK_TOKENS, STEP_TOKENS, DIM, LAYERS = 4, 8, 16, 2
BOTH_KINDS = (FullAttention(BLOCK_TOKENS), SlidingWindow(BLOCK_TOKENS, window=8))
FULL_ONLY = (FullAttention(BLOCK_TOKENS),)
BELOW = TierName("below")


class Model:
    """KV tensors of every group, and a forward pass that reads and writes them."""

    def __init__(self, groups: Sequence[Group], num_blocks: int) -> None:
        shape = (num_blocks, BLOCK_TOKENS, DIM)
        self.kv = [[np.zeros(shape, np.uint64) for _ in range(LAYERS)] for _ in groups]
        self.groups = groups
        self.num_computed = 0

    def forward(self, tokens: Sequence[int], tables: Sequence[list[int]], span: range) -> int:
        """Compute the tokens of ``span``; returns the next token."""
        positions = np.arange(7, 7 + len(tokens), dtype=np.uint64)
        values = np.cumsum((np.array(tokens, np.uint64) + np.uint64(1)) * positions)
        for g, group in enumerate(self.groups):
            for layer, tensor in enumerate(self.kv[g]):
                rows = values[:, None] * np.arange(1 + layer, DIM + 1 + layer, dtype=np.uint64)
                for position in range(max(0, group.first_token(span.start)), span.stop):
                    block = tables[g][position // BLOCK_TOKENS]
                    place = block, position % BLOCK_TOKENS
                    if position >= span.start:
                        tensor[place] = rows[position]
                    elif block == NO_BLOCK or not np.array_equal(tensor[place], rows[position]):
                        raise AssertionError(f"group {g}: wrong bytes at token {position}")
        self.num_computed += len(span)
        return int(values[span.stop - 1]) % 1000


class Blocks:
    """One group's device blocks: who holds them, and a prefix cache over the free ones."""

    def __init__(self, num_blocks: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.by_key: dict[Key, int] = {}
        self._holders = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks

    def take(self, count: int) -> list[int]:
        """The blocks freed longest ago, for a request; what they cached is forgotten."""
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            key, self._keys[block] = self._keys[block], None
            if key is not None:
                del self.by_key[key]
            self._holders[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._holders[block] += 1
            self.free.pop(block, None)

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self.free[block] = None

    def publish(self, block: int, key: Key) -> None:
        """A full block can be found by its content from now on."""
        if key not in self.by_key:
            self.by_key[key], self._keys[block] = block, key

    def is_cached(self, block: int) -> bool:
        return self._keys[block] is not None


@dataclass(eq=False)
class Turn:
    """One request as the engine knows it; ``ferried`` is the same request as kvferry does."""

    tokens: list[int]
    num_new: int
    ferried: Request
    keys: Keys
    tables: list[list[int]] = field(default_factory=list)
    num_computed: int = 0
    num_hit: int = 0
    num_loads: int = 0
    num_preemptions: int = 0


class FailingCopies:
    """Stands between the worker and its copy engine; a load can be made to fail."""

    def __init__(self, copies: CopyEngine) -> None:
        self.fails_next = False
        self._copies = copies
        self._failed: list[Receipt] = []

    def submit(self, transfer: Transfer) -> None:
        if self.fails_next and transfer.dst == DEVICE:
            reason, self.fails_next = "a cable was pulled", False
            self._failed.append(Receipt(transfer.id, FIRST_RANK, Outcome.FAILED, reason))
        else:
            self._copies.submit(transfer)

    def poll(self) -> list[Receipt]:
        failed, self._failed = self._failed, []
        return failed + self._copies.poll()

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        return self.poll() + self._copies.drain(timeout)

    def close(self) -> None:
        self._copies.close()


class Engine:
    """The serving loop. Owns the device's blocks and both of kvferry's halves."""

    def __init__(self, groups: Sequence[Group], *, device_blocks: int, host_slots: int) -> None:
        self.model = Model(groups, device_blocks)
        self.blocks = [Blocks(device_blocks) for _ in groups]
        self.waiting: list[Turn] = []
        self.running: list[Turn] = []
        self.turns: dict[Request, Turn] = {}
        self.num_held = 0
        self.namespace = Namespace(
            model="running-sum",
            dtype="uint64",
            layout="block,token,dim",
            geometry={"groups": [repr(group) for group in groups], "dim": DIM, "layers": LAYERS},
            block_tokens=BLOCK_TOKENS,
        )
        # The worker half: this rank's host memory, its copy engine, and a tier below the host.
        layouts = [describe(tensors, block_axis=0) for tensors in self.model.kv]
        config = Config(host=host_slots * max(layout.block_bytes for layout in layouts))
        self.rank = open_on_cpu(layouts, config)
        tier = MemoryTier(1024, self.rank.host.tier.slot_bytes, name=BELOW)
        below = TierMover(self.rank.host.tier, tier, ready_slots=lambda: self.rank.ready_slots)
        self.copies = FailingCopies(self.rank.engine)
        routes = {(DEVICE, HOST): self.copies, (HOST, DEVICE): self.copies}
        self.worker = Worker(routes, levels={BELOW: below})
        # The scheduler half: which slots hold what, on the host and below.
        self.scheduler = Scheduler(
            Pool(self.rank.host.num_slots, num_ready=self.rank.ready_slots),
            groups,
            config=config,
            num_device_blocks=device_blocks,
            block_bytes=[layout.block_bytes for layout in layouts],
            levels=[PlacedLevel(BELOW, Pool(1024), WriteMode.THROUGH)],
            engine=self,
        )
        assert self.scheduler.rests is not None  # it was given an engine
        self.rests = self.scheduler.rests

    def close(self) -> None:
        self.scheduler.check_integrity()
        assert not self.num_held, "every hold must have been released"
        self.worker.close()
        self.scheduler.close()
        self.rank.close()

    def submit(self, name: str, tokens: Sequence[int], num_new: int = 4) -> Turn:
        """A request has come: its tokens so far, and how many it wants generated."""
        keys = chain(self.namespace, tokens)
        turn = Turn(list(tokens), num_new, self.scheduler.open(name, keys), keys)
        self.turns[turn.ferried] = turn
        self.waiting.append(turn)
        return turn

    def step(self) -> None:
        """Hear what ended, let requests in, compute, and order what is worth storing."""
        self.settle()
        while self.waiting and self.admit(self.waiting[0]):
            del self.waiting[0]
        for turn in list(self.running):
            if turn in self.running:  # it may have been preempted for one before it
                self.run(turn)
        self.hold(self.scheduler.store_left(is_idle=not self.running))
        plan = self.scheduler.plan()
        if plan:
            self.worker.execute(plan)

    def settle(self) -> None:
        self.scheduler.note_ready(FIRST_RANK, self.rank.ready_slots)
        for change in self.worker.health():
            self.scheduler.note_health(change)
        settled = self.scheduler.settle(self.worker.poll())
        for request in settled.loaded:
            turn = self.turns[request]
            turn.num_loads += 1
            self.computed(turn, turn.num_hit)
            self.start(turn)
        for failed in settled.failed:  # compute it, in other blocks: a late copy may write these
            turn = self.turns[failed.request]
            self.cut(turn, failed.first_token)
            self.start(turn)
        for group, blocks in settled.released:
            self.blocks[group].release(blocks.tolist())
            self.num_held -= len(blocks)

    def admit(self, turn: Turn) -> bool:
        """Give a request what its KV is known of, or leave it waiting."""
        on_device = self.find(turn)
        match = turn.ferried.match(
            computed_tokens=on_device,
            max_tokens=len(turn.tokens) - 1,  # one is always computed
        )
        if match.state is MatchState.WAIT:  # it comes up from below, or another loads it
            self.cut(turn, 0)
            return False
        turn.num_hit, turn.num_computed = match.num_tokens, on_device
        if match.state is MatchState.MISS:
            self.start(turn)
            return True
        for table, blocks, places in zip(
            turn.tables, self.blocks, turn.ferried.needed_blocks, strict=True
        ):
            if len(places) > len(blocks.free):
                self.cut(turn, 0)  # no room: its hit stays pinned until it is asked for again
                return False
            unread = match.num_tokens // BLOCK_TOKENS - len(places) - len(table)
            table += [NO_BLOCK] * unread + blocks.take(len(places))
        self.hold(turn.ferried.load(turn.tables))
        if turn.ferried.state is not State.LOADING:  # the hit is gone: compute
            self.cut(turn, on_device)
            self.start(turn)
        return True

    def find(self, turn: Turn) -> int:
        """The longest prefix that the device itself has, for all groups; holds its blocks."""
        groups, usable = self.model.groups, turn.keys[: (len(turn.tokens) - 1) // BLOCK_TOKENS]
        there = [np.array([key in b.by_key for key in usable], bool) for b in self.blocks]
        num_tokens = longest_hit(groups, there, len(usable) * BLOCK_TOKENS)
        turn.tables = []
        for group, blocks in zip(groups, self.blocks, strict=True):
            places = needed(group, num_tokens)
            found = [blocks.by_key[key] for key in usable[places.start : places.stop]]
            blocks.hold(found)
            turn.tables.append([NO_BLOCK] * (num_tokens // BLOCK_TOKENS - len(places)) + found)
        return num_tokens

    def start(self, turn: Turn) -> None:
        turn.ferried.run()
        self.running.append(turn)

    def run(self, turn: Turn) -> None:
        """Compute some tokens of a request and store what became whole."""
        start = turn.num_computed
        stop = min(len(turn.tokens), start + STEP_TOKENS)
        while not self.grow(turn, stop):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is turn:
                return
        token = self.model.forward(turn.tokens, turn.tables, range(start, stop))
        self.computed(turn, stop)
        if turn.num_computed >= turn.ferried.progress.since + self.rests.step:
            self.hold(turn.ferried.store(turn.tables, turn.num_computed))
        self.pass_window(turn)  # only now: what a store reads is held
        if turn.num_computed == len(turn.tokens):
            self.append(turn, token)

    def append(self, turn: Turn, token: int) -> None:
        """It has one more token, and with every full block one more key."""
        turn.tokens.append(token)
        turn.num_new -= 1
        new = turn.tokens[len(turn.keys) * BLOCK_TOKENS :]
        if len(new) == BLOCK_TOKENS:
            parent = turn.keys[-1] if len(turn.keys) else None
            turn.keys += chain(self.namespace, new, parent)
            turn.ferried.chain = turn.keys
        if not turn.num_new:
            self.finish(turn)

    def grow(self, turn: Turn, num_tokens: int) -> bool:
        """Blocks for its first tokens, in every group; False if there are not enough."""
        missing = -(-num_tokens // BLOCK_TOKENS) - len(turn.tables[0])
        if any(missing > len(blocks.free) for blocks in self.blocks):
            return False
        for table, blocks in zip(turn.tables, self.blocks, strict=True):
            table += blocks.take(missing)
        return True

    def computed(self, turn: Turn, num_tokens: int) -> None:
        """Its KV is there up to this token: full blocks go into the prefix cache."""
        for at in range(turn.num_computed // BLOCK_TOKENS, num_tokens // BLOCK_TOKENS):
            for table, blocks in zip(turn.tables, self.blocks, strict=True):
                if table[at] != NO_BLOCK:
                    blocks.publish(table[at], turn.keys[at])
        turn.num_computed = num_tokens

    def pass_window(self, turn: Turn) -> None:
        for group, table, blocks in zip(self.model.groups, turn.tables, self.blocks, strict=True):
            passed = max(0, group.first_token(turn.num_computed)) // BLOCK_TOKENS
            blocks.release(block for block in table[:passed] if block != NO_BLOCK)
            table[:passed] = [NO_BLOCK] * passed

    def cut(self, turn: Turn, num_tokens: int) -> None:
        """Let go of its blocks from this token on."""
        for table, blocks in zip(turn.tables, self.blocks, strict=True):
            first = num_tokens // BLOCK_TOKENS
            blocks.release(block for block in reversed(table[first:]) if block != NO_BLOCK)
            del table[first:]

    def hold(self, ordered: Iterable[Ordered | DeviceBlocks]) -> None:
        """Blocks that a copy reads or writes stay as they are until ``settle`` releases them."""
        for part in ordered:
            self.blocks[part.group].hold(part.blocks.tolist())
            self.num_held += len(part.blocks)

    def preempt(self, turn: Turn) -> None:
        """Take its blocks away; it comes back and is asked for again."""
        self.running.remove(turn)
        turn.ferried.preempt()
        turn.num_preemptions += 1
        self.cut(turn, 0)
        self.waiting.insert(0, turn)

    def finish(self, turn: Turn) -> None:
        """It is done. What of it is not stored yet is stored now, or late."""
        self.hold(turn.ferried.leave(turn.num_computed))
        self.running.remove(turn)
        del self.turns[turn.ferried]
        self.cut(turn, 0)

    @property
    def evicts(self) -> bool:
        """Whether the next block given to a request is one that the prefix cache knows."""
        return any(b.is_cached(next(iter(b.free))) for b in self.blocks if b.free)

    @property
    def num_free(self) -> int:
        return min(len(blocks.free) for blocks in self.blocks)

    def tables(self, request: Request, num_tokens: int, from_token: int) -> Sequence[BlockTable]:
        """The blocks of a request that is about to leave."""
        turn = self.turns[request]
        return [table[: num_tokens // BLOCK_TOKENS] for table in turn.tables]

    def remains(self, request: Request, num_tokens: int, from_token: int) -> Sequence[BlockTable]:
        """Those of one that has ended: what the prefix cache still has of them."""
        keys = request.chain.keys()[: num_tokens // BLOCK_TOKENS]
        return [[blocks.by_key.get(key, NO_BLOCK) for key in keys] for blocks in self.blocks]

    def serve(self) -> None:
        """Until everything that was submitted is done, and nothing is on its way."""
        while self.turns or self.scheduler.num_in_flight + self.scheduler.num_queued:
            self.step()
            time.sleep(0.0002)


def talk(engine: Engine, name: str, tokens: list[int]) -> str:
    """Serve one turn; says how it was served. The conversation grows by the answer."""
    moved, computed = engine.scheduler.stats().bytes_moved, engine.model.num_computed
    turn = engine.submit(name, tokens)
    engine.serve()
    tokens[:] = turn.tokens
    computed = engine.model.num_computed - computed
    came_up = engine.scheduler.stats().bytes_moved.get((BELOW, HOST), 0)
    level = "below" if came_up > moved.get((BELOW, HOST), 0) else "the host"
    source = f", {turn.num_hit} of them loaded from {level}" if turn.num_loads else ""
    line = f"{name}: {len(turn.tokens)} tokens{source}, {computed} computed"
    print(line)
    return line


def main() -> None:
    chance = np.random.default_rng(7)
    stories = [chance.integers(0, 1000, 41).tolist() for _ in range(6)]
    engine = Engine(BOTH_KINDS, device_blocks=24, host_slots=72)
    for number in range(3):
        assert talk(engine, f"{number}, first turn", stories[number]).endswith("44 computed")
    # The device forgot the first conversation meanwhile; the host has it.
    assert "loaded from the host" in talk(engine, "0, second turn", stories[0])
    # Others take its room in the host too; what was stored was also written to the level below.
    for number in range(3, 6):
        talk(engine, f"{number}, first turn", stories[number])
    assert "loaded from below" in talk(engine, "0, third turn", stories[0])
    # A load that fails is computed instead, into other blocks.
    engine.copies.fails_next = True
    assert "loaded" not in talk(engine, "4, second turn", stories[4])
    assert engine.scheduler.stats().failed == 1
    # Two at a time on a device for one: the second is preempted, and still gets it right.
    turns = [engine.submit(f"{n}, beside another", stories[n], 24) for n in (1, 2)]
    engine.serve()
    print(f"two at a time: {sum(turn.num_preemptions for turn in turns)} preemptions")
    assert any(turn.num_preemptions for turn in turns)
    engine.close()

    # Full attention alone lets an ended request wait: the next turn stores for both.
    engine = Engine(FULL_ONLY, device_blocks=64, host_slots=64)
    first = engine.submit("first turn", stories[0][:41])
    beside = engine.submit("beside it", stories[1][:41], 40)
    while first in engine.running or first in engine.waiting:
        engine.step()
    print("beside another it ended:", first.ferried)
    assert first.ferried.state is State.LEFT
    assert not engine.scheduler.stats().bytes_moved
    second = engine.submit("second turn", first.tokens)
    while second in engine.running or second in engine.waiting:
        engine.step()
    print("its next turn took over:", first.ferried)
    assert first.ferried not in engine.scheduler
    engine.serve()
    assert second.num_hit == 44
    assert beside.num_new == 0
    engine.close()


if __name__ == "__main__":
    main()
