"""A small engine of our own around kvferry: the code of the guide "Write your own engine".

Its model has two kinds of layers, full attention and a sliding window, each with paged KV blocks
and a block table of its own. It has a prefix cache, preempts, and outlives a failed copy. Below the
device lies host memory and below that another tier. The model is a running sum: enough for every
token's KV to depend on all tokens before it. It compares every byte that attention would read
before it computes, so a wrong block anywhere ends the program.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

import kvferry.engine as kf

BLOCK_TOKENS, STEP_TOKENS, DIM, LAYERS = 4, 8, 16, 2
BOTH_KINDS = (kf.FullAttention(BLOCK_TOKENS), kf.SlidingWindow(BLOCK_TOKENS, window=8))
FULL_ONLY = (kf.FullAttention(BLOCK_TOKENS),)
Tables = Sequence[kf.BlockTable]  # one for each group


class Model:
    """KV tensors of every group, and a forward pass that reads and writes them."""

    def __init__(self, groups: Sequence[kf.Group], num_blocks: int) -> None:
        shape = (num_blocks, BLOCK_TOKENS, DIM)
        self.groups = groups
        self.kv = [[np.zeros(shape, np.uint64) for _ in range(LAYERS)] for _ in groups]
        self.num_computed = 0

    def forward(self, tokens: Sequence[int], tables: Sequence[list[int]], span: range) -> int:
        """Compute the tokens of ``span``; returns the next token."""
        factors = np.arange(7, 7 + len(tokens), dtype=np.uint64)
        sums = np.cumsum((np.array(tokens, np.uint64) + np.uint64(1)) * factors)
        for g, group in enumerate(self.groups):
            for layer, tensor in enumerate(self.kv[g], start=1):
                rows = sums[:, None] * np.arange(layer, layer + DIM, dtype=np.uint64)
                for position in range(max(0, group.first_token(span.start)), span.stop):
                    block = tables[g][position // BLOCK_TOKENS]
                    place = block, position % BLOCK_TOKENS
                    if position in span:
                        tensor[place] = rows[position]
                    elif block == kf.NO_BLOCK or not np.array_equal(tensor[place], rows[position]):
                        raise AssertionError(f"group {g}: wrong bytes for token {position}")
        self.num_computed += len(span)
        return int(sums[span.stop - 1]) % 1000


class Blocks:
    """One group's device blocks: their holders, and a prefix cache over the free ones."""

    def __init__(self, num_blocks: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.by_key: dict[kf.Key, int] = {}
        self._num_holders = [0] * num_blocks
        self._keys: list[kf.Key | None] = [None] * num_blocks

    def take(self, count: int) -> list[int]:
        """The blocks freed longest ago, for one holder; what they cached is forgotten."""
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            key, self._keys[block] = self._keys[block], None
            if key is not None:
                del self.by_key[key]
            self._num_holders[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._num_holders[block] += 1
            self.free.pop(block, None)

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block != kf.NO_BLOCK:
                self._num_holders[block] -= 1
                if not self._num_holders[block]:
                    self.free[block] = None

    def publish(self, block: int, key: kf.Key) -> None:
        """A full block can be found by its content from now on."""
        if key not in self.by_key:
            self.by_key[key], self._keys[block] = block, key

    def is_cached(self, block: int) -> bool:
        return self._keys[block] is not None


@dataclass(eq=False)
class Turn:
    """One request as the engine knows it; ``ferried`` is the same request as kvferry does."""

    ferried: kf.Request
    tokens: list[int]
    keys: kf.Keys
    num_new: int
    tables: list[list[int]] = field(default_factory=list)
    num_computed: int = 0
    num_hit: int = 0
    is_loaded: bool = False
    num_preemptions: int = 0


class LosingWorker(kf.Worker):
    """A worker that can be made to lose a copy, as if a cable had been pulled."""

    loses_next = False

    def poll(self) -> list[kf.Receipt]:
        receipts = super().poll()
        if receipts and self.loses_next:
            self.loses_next = False
            receipts[0] = replace(receipts[0], outcome=kf.Outcome.FAILED, reason="cable pulled")
        return receipts


class Engine:
    """The serving loop. Owns the device's blocks and both of kvferry's halves."""

    def __init__(self, groups: Sequence[kf.Group], *, device_blocks: int, host_slots: int) -> None:
        self.model = Model(groups, device_blocks)
        self.blocks = [Blocks(device_blocks) for _ in groups]
        self.waiting: list[Turn] = []
        self.running: list[Turn] = []
        self.turns: dict[kf.Request, Turn] = {}
        self.num_held = 0  # blocks that copies read or write
        self.namespace = kf.Namespace(
            model="running-sum",
            dtype="uint64",
            layout="block,token,dim",
            geometry={"groups": [repr(group) for group in groups], "dim": DIM, "layers": LAYERS},
            block_tokens=BLOCK_TOKENS,
        )
        self.open_halves(device_blocks, host_slots)

    def open_halves(self, device_blocks: int, host_slots: int) -> None:
        layouts = [kf.describe(tensors, block_axis=0) for tensors in self.model.kv]
        block_bytes = [layout.block_bytes for layout in layouts]
        config = kf.Config.from_dict(
            {
                "host": f"{host_slots * max(block_bytes)}B",
                "policy": "lru",  # the default has to learn from more requests than these
                "tiers": "below=memory:2MiB",
            }
        )
        # The worker half, one for each rank: host memory, a copy engine, the tiers below.
        self.rank = kf.RankMemory.open(layouts, config)
        routes = {(kf.DEVICE, kf.HOST): self.rank.engine, (kf.HOST, kf.DEVICE): self.rank.engine}
        self.worker = LosingWorker(routes, tiers=self.rank.tiers)
        # The scheduler half, one for all ranks: which block is where. It touches no bytes.
        write = kf.WriteMode.THROUGH
        tiers = [
            kf.lower_tier(
                name,
                mover.num_places,
                write,
                kf.policy_named(config.tier_policy),
                recovered=[mover.recovered()],
            )
            for name, mover in self.rank.tiers.items()
        ]
        self.scheduler = kf.Scheduler(
            kf.Pool(
                self.rank.host.num_slots,
                kf.policy_named(config.policy),
                num_ready=self.rank.ready_slots,
            ),
            self.model.groups,
            config=config,
            num_device_blocks=device_blocks,
            block_bytes=block_bytes,
            tiers=tiers,
            engine=self,
        )

    def close(self) -> None:
        self.scheduler.check_integrity()
        assert not self.num_held, "a hold was never released"
        self.worker.close()
        self.scheduler.close()
        self.rank.close()

    def submit(self, name: str, tokens: Sequence[int], num_new: int = 4) -> Turn:
        """A request has come: its tokens so far, and how many it wants generated."""
        keys = kf.chain(self.namespace, tokens)
        turn = Turn(self.scheduler.open(name, keys), list(tokens), keys, num_new)
        self.turns[turn.ferried] = turn
        self.waiting.append(turn)
        return turn

    def step(self) -> None:
        """Hear what ended, let requests in, compute, send off what was ordered."""
        self.settle()
        while self.waiting and self.admit(self.waiting[0]):
            del self.waiting[0]
        for turn in list(self.running):
            if turn in self.running:  # not preempted for one before it
                self.run(turn)
        self.hold(self.scheduler.store_left(is_idle=not self.running))
        plan = self.scheduler.plan()
        if plan:
            self.worker.execute(plan)

    def settle(self) -> None:
        self.scheduler.note_ready(kf.FIRST_RANK, self.rank.ready_slots)
        for change in self.worker.health():
            self.scheduler.note_health(change)
        settled = self.scheduler.settle(self.worker.poll())
        for request in settled.loaded:
            turn = self.turns[request]
            turn.is_loaded = True
            self.advance(turn, turn.num_hit)
            self.start(turn)
        for failed in settled.failed:
            turn = self.turns[failed.request]
            self.cut(turn, failed.first_token)
            self.start(turn)
        for group, blocks in settled.released:
            self.blocks[group].release(blocks.tolist())
            self.num_held -= len(blocks)

    def admit(self, turn: Turn) -> bool:
        """Give a request what is known of its KV; False while it has to wait."""
        turn.num_computed = turn.num_hit = self.find(turn)
        match = turn.ferried.match(
            computed_tokens=turn.num_computed,
            max_tokens=len(turn.tokens) - 1,  # one must be computed, to have a next token
        )
        if match.state is kf.MatchState.WAIT:
            self.cut(turn, 0)
            return False
        if match.state is kf.MatchState.HIT and not self.load(turn, match.num_tokens):
            return False
        if turn.ferried.state is not kf.State.LOADING:
            self.start(turn)
        return True

    def load(self, turn: Turn, num_tokens: int) -> bool:
        """Order a hit into blocks of its own; False if the device has not enough of them."""
        places = turn.ferried.needed_blocks
        if any(len(p) > len(b.free) for p, b in zip(places, self.blocks, strict=True)):
            self.cut(turn, 0)
            return False
        for table, blocks, wanted in zip(turn.tables, self.blocks, places, strict=True):
            num_unread = num_tokens // BLOCK_TOKENS - len(table) - len(wanted)
            table += [kf.NO_BLOCK] * num_unread + blocks.take(len(wanted))
        self.hold(turn.ferried.load(turn.tables))
        turn.num_hit = num_tokens
        return True

    def find(self, turn: Turn) -> int:
        """The longest prefix that the device itself has, in all groups; holds its blocks."""
        groups, keys = self.model.groups, turn.keys[: (len(turn.tokens) - 1) // BLOCK_TOKENS]
        there = [np.array([key in b.by_key for key in keys], dtype=bool) for b in self.blocks]
        num_tokens = kf.longest_hit(groups, there, len(keys) * BLOCK_TOKENS)
        turn.tables = []
        for group, blocks in zip(groups, self.blocks, strict=True):
            read = kf.needed(group, num_tokens)
            found = [blocks.by_key[key] for key in keys[read.start : read.stop]]
            blocks.hold(found)
            turn.tables.append([kf.NO_BLOCK] * (num_tokens // BLOCK_TOKENS - len(found)) + found)
        return num_tokens

    def start(self, turn: Turn) -> None:
        turn.ferried.run()
        self.running.append(turn)

    def run(self, turn: Turn) -> None:
        """Compute some tokens of a request, and store what is worth it by now."""
        start = turn.num_computed
        stop = min(len(turn.tokens), start + STEP_TOKENS)
        while not self.grow(turn, stop):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is turn:
                return
        token = self.model.forward(turn.tokens, turn.tables, range(start, stop))
        self.advance(turn, stop)
        if turn.ferried.is_worth_storing(turn.num_computed):
            self.hold(turn.ferried.store(turn.tables, turn.num_computed))
        self.let_pass(turn)  # after that: what a store reads is held
        if turn.num_computed == len(turn.tokens):
            self.append(turn, token)

    def append(self, turn: Turn, token: int) -> None:
        """It has one more token, and with every full block one more key."""
        turn.tokens.append(token)
        turn.num_new -= 1
        new = turn.tokens[len(turn.keys) * BLOCK_TOKENS :]
        if len(new) == BLOCK_TOKENS:
            parent = turn.keys[-1] if len(turn.keys) else None
            turn.keys += kf.chain(self.namespace, new, parent)
            turn.ferried.chain = turn.keys
        if not turn.num_new:
            self.finish(turn)

    def grow(self, turn: Turn, num_tokens: int) -> bool:
        """Blocks for its first tokens, in every group; False if there are not enough."""
        num_missing = -(-num_tokens // BLOCK_TOKENS) - len(turn.tables[0])
        if any(num_missing > len(blocks.free) for blocks in self.blocks):
            return False
        for table, blocks in zip(turn.tables, self.blocks, strict=True):
            table += blocks.take(num_missing)
        return True

    def advance(self, turn: Turn, num_tokens: int) -> None:
        """Its KV is there up to this token: full blocks go into the prefix cache."""
        for at in range(turn.num_computed // BLOCK_TOKENS, num_tokens // BLOCK_TOKENS):
            for table, blocks in zip(turn.tables, self.blocks, strict=True):
                if table[at] != kf.NO_BLOCK:
                    blocks.publish(table[at], turn.keys[at])
        turn.num_computed = num_tokens

    def let_pass(self, turn: Turn) -> None:
        """Let go of the blocks that a window has passed."""
        for group, table, blocks in zip(self.model.groups, turn.tables, self.blocks, strict=True):
            num_passed = max(0, group.first_token(turn.num_computed)) // BLOCK_TOKENS
            blocks.release(table[:num_passed])
            table[:num_passed] = [kf.NO_BLOCK] * num_passed

    def cut(self, turn: Turn, num_tokens: int) -> None:
        """Let go of its blocks from this token on."""
        first = num_tokens // BLOCK_TOKENS
        for table, blocks in zip(turn.tables, self.blocks, strict=True):
            blocks.release(reversed(table[first:]))  # the end is forgotten before the beginning
            del table[first:]

    def hold(self, ordered: Iterable[kf.Ordered | kf.DeviceBlocks]) -> None:
        """Keep the blocks that a copy reads or writes until ``settle`` releases them."""
        for part in ordered:
            self.blocks[part.group].hold(part.blocks.tolist())
            self.num_held += len(part.blocks)

    def preempt(self, turn: Turn) -> None:
        """Take its blocks away; it waits, and is asked for again."""
        turn.ferried.preempt()
        self.running.remove(turn)
        self.waiting.insert(0, turn)
        self.cut(turn, 0)
        turn.num_preemptions += 1

    def finish(self, turn: Turn) -> None:
        """It is done; what of it is not stored yet is stored now, or late."""
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
        """Blocks that a request could be given now, in every group."""
        return min(len(blocks.free) for blocks in self.blocks)

    def tables(self, request: kf.Request, num_tokens: int, from_token: int) -> Tables:
        """The blocks of a request that is about to leave."""
        return [table[: num_tokens // BLOCK_TOKENS] for table in self.turns[request].tables]

    def remains(self, request: kf.Request, num_tokens: int, from_token: int) -> Tables:
        """Those of one that has left: whatever the prefix cache still has of them."""
        keys = request.chain.keys()[: num_tokens // BLOCK_TOKENS]
        return [[blocks.by_key.get(key, kf.NO_BLOCK) for key in keys] for blocks in self.blocks]

    def serve(self) -> None:
        """Until everything is served, and nothing is on its way any more."""
        while self.turns or self.scheduler.num_in_flight or self.scheduler.num_queued:
            self.step()
            time.sleep(0.0002)


def talk(engine: Engine, name: str, tokens: list[int]) -> str:
    """Serve one turn and say how; the conversation grows by its answer."""
    num_before, up_before = engine.model.num_computed, engine.scheduler.stats().promoted_tokens
    turn = engine.submit(name, tokens)
    engine.serve()
    tokens[:] = turn.tokens
    source = "below" if engine.scheduler.stats().promoted_tokens > up_before else "the host"
    loaded = f", {turn.num_hit} loaded from {source}" if turn.is_loaded else ""
    line = f"{name}: {engine.model.num_computed - num_before} tokens computed{loaded}"
    print(line)
    return line


def two_groups() -> None:
    chance = np.random.default_rng(7)
    stories = [chance.integers(0, 1000, 41).tolist() for _ in range(6)]
    engine = Engine(BOTH_KINDS, device_blocks=24, host_slots=72)
    for number in range(3):
        assert "44 tokens computed" in talk(engine, f"{number}, first turn", stories[number])
    # The device forgot the first conversation meanwhile; the host has it.
    assert "44 loaded from the host" in talk(engine, "0, second turn", stories[0])
    # Others take its place in the host too; the tier below has it.
    for number in range(3, 6):
        talk(engine, f"{number}, first turn", stories[number])
    assert "48 loaded from below" in talk(engine, "0, third turn", stories[0])
    # A load that fails is computed instead.
    engine.worker.loses_next = True
    assert "48 tokens computed" in talk(engine, "4, second turn", stories[4])
    assert not engine.worker.loses_next, "it was not even tried"
    # Two at a time on a device for one: the later one is preempted, and comes back.
    turns = [engine.submit(f"{n}, beside another", stories[n], 24) for n in (1, 2)]
    engine.serve()
    print(f"two at a time: {sum(turn.num_preemptions for turn in turns)} preemptions")
    assert any(turn.num_preemptions for turn in turns)
    engine.close()


def rests() -> None:
    """Where all layers see everything, a request may end before it is stored."""
    chance = np.random.default_rng(8)
    engine = Engine(FULL_ONLY, device_blocks=64, host_slots=64)
    first = engine.submit("first turn", chance.integers(0, 1000, 41).tolist())
    beside = engine.submit("beside it", chance.integers(0, 1000, 41).tolist(), num_new=40)
    while first.num_new:
        engine.step()
    print("ended, and not stored yet:", first.ferried)
    assert first.ferried.state is kf.State.LEFT
    assert not engine.scheduler.stats().bytes_moved
    second = engine.submit("second turn", first.tokens)
    while second.num_new:
        engine.step()
    print("its next turn took over:", first.ferried)
    assert first.ferried not in engine.scheduler
    engine.serve()
    print("stored once nothing else ran:", engine.scheduler.stats().pool.cached, "blocks")
    assert beside.num_new == 0
    engine.close()


if __name__ == "__main__":
    two_groups()
    rests()
