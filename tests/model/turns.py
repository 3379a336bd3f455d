"""Conversations, turn by turn, in an engine that ends requests before all of them is stored.

The engine has blocks with real bytes, finds them again by content, and evicts the oldest; requests
leave rests (``Request.leave``), and the next turn goes on with them. Every block that is loaded,
read by compute, or offered by the host is compared.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from tests.model import request_laws

from kvferry.cache.pool import Pool
from kvferry.cache.reach import FullAttention
from kvferry.cache.slots import SlotState
from kvferry.config import Config
from kvferry.core.keys import KEY_BYTES, Key, Keys
from kvferry.scheduler.request import Request, State
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.transfers import NO_BLOCK, BlockTable, Ordered
from kvferry.types import DEVICE, DeviceBlocks, MatchState, Outcome, Rank, Receipt, Transfer

TOKENS = 4
POISON = np.uint64(0xEEEE)


class Chain:
    """The keys of one conversation so far; it grows as the answer does."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = list(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, item: int, /) -> Key:
        return self._keys[item]

    def keys(self) -> Keys:
        return Keys.from_bytes(self._keys) if self._keys else Keys.empty()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def grow(self, number: int) -> None:
        before = self._keys[-1] if self._keys else b""
        digest = blake2b(before + number.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()
        self._keys.append(Key(digest))


class DeviceMemory:
    """Device blocks as an engine has them: counted, found by content, the oldest given out first.

    What the scheduler asks of it is :class:`kvferry.scheduler.EngineBlocks`.
    """

    def __init__(self, num_blocks: int, num_ranks: int) -> None:
        self.bytes = np.full((num_ranks, num_blocks), POISON, dtype=np.uint64)
        self.uses: Counter[int] = Counter()
        self.holds: Counter[int] = Counter()
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.block_of: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.of_request: dict[Request, Turn] = {}

    @property
    def evicts(self) -> bool:
        return not self.free or next(iter(self.free)) in self.key_of

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_held(self) -> int:
        return sum(1 for count in self.holds.values() if count)

    def tables(self, request: Request, num_tokens: int, from_token: int) -> Sequence[BlockTable]:
        return [self.of_request[request].table[: num_tokens // TOKENS]]

    def remains(self, request: Request, num_tokens: int, from_token: int) -> Sequence[BlockTable]:
        keys = list(request.chain)[: num_tokens // TOKENS]  # type: ignore[call-overload]
        return [[self.block_of.get(key, NO_BLOCK) for key in keys]]

    def take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            key = self.key_of.pop(block, None)
            if key is not None:
                del self.block_of[key]
            self.bytes[:, block] = POISON
            self.uses[block] += 1
            taken.append(block)
        return taken

    def use(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.free.pop(block, None)
            self.uses[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in reversed(list(blocks)):  # the end of a conversation goes first
            self.uses[block] -= 1
            assert self.uses[block] >= 0
            if not self.uses[block]:
                self.free[block] = None

    def hold(self, parts: Iterable[DeviceBlocks | Ordered]) -> None:
        for part in parts:
            blocks = [int(block) for block in part.blocks]
            self.holds.update(blocks)
            self.use(blocks)

    def let_go(self, parts: Iterable[DeviceBlocks]) -> None:
        for part in parts:
            blocks = [int(block) for block in part.blocks]
            for block in blocks:
                assert self.holds[block] > 0, "a block was let go that nobody held"
                self.holds[block] -= 1
            self.give_back(blocks)

    def publish(self, block: int, key: Key) -> None:
        if key not in self.block_of and block not in self.key_of:
            self.block_of[key] = block
            self.key_of[block] = key

    def forget(self) -> None:
        self.block_of.clear()
        self.key_of.clear()


@dataclass(eq=False)
class Turn:
    """One request in the engine: ``waiting``, ``loading`` or ``running``."""

    conversation: int
    chain: Chain
    request: Request
    state: str = "waiting"
    num_computed: int = 0  # blocks
    table: list[int] = field(default_factory=list)


class Turns:
    """The engine, its ranks and the host's bytes around one scheduler."""

    def __init__(
        self, *, num_blocks: int = 24, num_slots: int = 16, num_ranks: int = 2, bounded: bool = True
    ) -> None:
        self.now = 0.0
        self.pool = Pool(num_slots)
        self.device = DeviceMemory(num_blocks, num_ranks)
        self.host = np.full((num_ranks, num_slots), POISON, dtype=np.uint64)
        self.scheduler = Scheduler(
            self.pool,
            (FullAttention(TOKENS),),
            config=Config(load_policy="always", max_storing_blocks=3 if bounded else None),
            num_ranks=num_ranks,
            num_device_blocks=num_blocks,
            engine=self.device,
            clock=lambda: self.now,
        )
        self.turns: list[Turn] = []
        self.left: list[Request] = []
        self.histories: dict[int, list[Key]] = {}
        self.todo: list[list[Transfer]] = [[] for _ in range(num_ranks)]
        self.weights = 0
        self.number = 0
        self.counts: Counter[str] = Counter()

    # -- requests -------------------------------------------------------------------------------

    def come(self, conversation: int, num_new: int) -> Turn:
        """The next turn of a conversation, with so many blocks that are new."""
        chain = Chain(self.histories.get(conversation, ()))
        for _ in range(max(1, num_new)):
            self._grow(chain, conversation)
        self.number += 1
        request = self.scheduler.open(f"{conversation}-{self.number}", chain)
        turn = Turn(conversation, chain, request)
        self.turns.append(turn)
        self.device.of_request[request] = turn
        return turn

    def _grow(self, chain: Chain, conversation: int) -> None:
        """Mostly the same words follow the same words, so that turns share blocks and ends."""
        self.number += 1
        chain.grow(conversation * 2 + (self.number % 5 == 0))

    def admit(self, turn: Turn) -> None:
        device, total = self.device, len(turn.chain)
        prefix: list[int] = []
        for key in turn.chain:
            block = device.block_of.get(key)
            if block is None or len(prefix) == total - 1:
                break
            prefix.append(block)
        match = turn.request.match(
            computed_tokens=len(prefix) * TOKENS, max_tokens=total * TOKENS - 1
        )
        if match.state is MatchState.WAIT:
            self.counts["waited"] += 1
            return
        rests = self.scheduler.deferred
        assert rests is not None
        num_new = total - len(prefix)
        if device.num_free - sum(block in device.free for block in prefix) < num_new:
            rests.is_wanted = True
            return
        device.use(prefix)
        turn.table = prefix + device.take(num_new)
        turn.num_computed = len(prefix)
        ordered: tuple[Ordered, ...] = ()
        if match.state is MatchState.HIT:
            ordered = turn.request.load([turn.table])
            device.hold(ordered)
        if ordered:
            turn.state = "loading"
            turn.num_computed = match.num_tokens // TOKENS
        else:
            self._run(turn)

    def _run(self, turn: Turn) -> None:
        before = len(self.scheduler.deferred or ())
        turn.request.run()
        turn.state = "running"
        self.counts["went on"] += len(self.scheduler.deferred or ()) < before

    def compute(self, turn: Turn, num_blocks: int) -> None:
        """Compute on; beyond the prompt it is the answer, as far as there are blocks for it."""
        self._check_bytes(turn, "is computed on")
        for _ in range(num_blocks):
            at = turn.num_computed
            if at == len(turn.chain):
                self._grow(turn.chain, turn.conversation)
            if at == len(turn.table):
                if not self.device.num_free:
                    self.preempt(turn)
                    return
                turn.table += self.device.take(1)
            self.device.bytes[:, turn.table[at]] = self.value(turn.chain[at])
            turn.num_computed += 1
            self.device.publish(turn.table[at], turn.chain[at])
        if turn.num_computed * TOKENS >= self._due(turn):
            tokens = turn.num_computed * TOKENS
            self.device.hold(turn.request.store([turn.table], tokens))
            self.counts["stored running"] += 1

    def _due(self, turn: Turn) -> int:
        """With so many tokens computed it is worth storing some."""
        rests = self.scheduler.deferred
        assert rests is not None
        return turn.request.progress.next_from + rests.step

    def finish(self, turn: Turn) -> None:
        self.device.hold(turn.request.leave(turn.num_computed * TOKENS))
        if turn.request.state is State.LEFT:
            self.counts["left"] += 1
            self.left.append(turn.request)
        self.histories[turn.conversation] = list(turn.chain)[: turn.num_computed]
        self._drop(turn)

    def abort(self, turn: Turn) -> None:
        turn.request.end()
        self._drop(turn)

    def preempt(self, turn: Turn) -> None:
        turn.request.preempt()
        self._take_away(turn)

    def _take_away(self, turn: Turn) -> None:
        self.device.give_back(turn.table)
        turn.table, turn.num_computed, turn.state = [], 0, "waiting"

    def _drop(self, turn: Turn) -> None:
        self._take_away(turn)
        self.turns.remove(turn)
        del self.device.of_request[turn.request]

    def reset(self) -> None:
        """The weights change: the engine starts all of them again."""
        for turn in self.turns:
            if turn.state != "waiting":
                self.preempt(turn)
        self.scheduler.reset()
        self.device.forget()
        self.weights += 1

    # -- the copies -----------------------------------------------------------------------------

    def dispatch(self) -> None:
        """The end of a step."""
        is_idle = not any(turn.state == "running" for turn in self.turns)
        ordered = self.scheduler.store_left(is_idle=is_idle)
        self.counts["stored late"] += len(ordered)
        self.device.hold(ordered)
        for transfer in self.scheduler.plan().transfers:
            for todo in self.todo:
                todo.append(transfer)

    def copy(self, rank: int, at: int = 0, *, fails: bool = False) -> None:
        """One rank carries one of its transfers out and answers."""
        if not self.todo[rank]:
            return
        transfer = self.todo[rank].pop(at % len(self.todo[rank]))
        host, device = self.host[rank], self.device.bytes[rank]
        loads = transfer.dst == DEVICE
        blocks = transfer.dst_slots if loads else transfer.src_slots
        assert all(self.device.holds[int(block)] for block in blocks), "copied without a hold"
        if fails:
            (device if loads else host)[transfer.dst_slots] = POISON
        elif loads:
            device[transfer.dst_slots] = host[transfer.src_slots]
        else:
            host[transfer.dst_slots] = device[transfer.src_slots]
        outcome = Outcome.FAILED if fails else Outcome.OK
        self.settle([Receipt(transfer.id, Rank(rank), outcome, "no" if fails else "")])

    def settle(self, receipts: Sequence[Receipt] = ()) -> None:
        settled = self.scheduler.settle(receipts)
        for request in settled.loaded:
            turn = self.device.of_request[request]
            self._check_bytes(turn, "was loaded")
            self.counts["loaded"] += 1
            for block, key in zip(turn.table[: turn.num_computed], turn.chain, strict=False):
                self.device.publish(block, key)
            self._run(turn)
        for failed in settled.failed:
            self.counts["failed"] += 1
            self._take_away(self.device.of_request[failed.request])
        self.device.let_go(settled.released)

    # -- what holds -----------------------------------------------------------------------------

    def value(self, key: Key) -> np.ndarray:
        """What a block holds on every rank: of these tokens, of these weights."""
        ranks = range(len(self.todo))
        return np.array(
            [
                int.from_bytes(
                    blake2b(key + bytes((rank, self.weights)), digest_size=8).digest(), "little"
                )
                for rank in ranks
            ],
            dtype=np.uint64,
        )

    def _check_bytes(self, turn: Turn, what: str) -> None:
        for at in range(turn.num_computed):
            found = self.device.bytes[:, turn.table[at]]
            assert (found == self.value(turn.chain[at])).all(), (
                f"block {at} of {turn.request} {what} and holds other bytes"
            )

    def check(self) -> None:
        self.left = [request for request in self.left if request.state is not State.ENDED]
        request_laws.check(self.scheduler, [*self.left, *(turn.request for turn in self.turns)])
        for turn in self.turns:
            if turn.state == "running":
                self._check_bytes(turn, "runs")
        for block, key in self.device.key_of.items():
            assert (self.device.bytes[:, block] == self.value(key)).all(), (
                "a block the engine finds by content was given out or overwritten"
            )
        self._check_promises()

    def _check_promises(self) -> None:
        """What the host offers it has, on every rank."""
        matcher, index = self.scheduler.matcher, self.pool.table.index
        known: dict[Key, Key] = {}
        for chain in (*self.histories.values(), *(list(turn.chain) for turn in self.turns)):
            if chain:
                names = matcher.all_keys(0, Keys.from_bytes(chain))
                known.update(zip(names, chain, strict=True))
        for slot in np.flatnonzero(self.pool.table.state == SlotState.CACHED).tolist():
            key = known.get(Key(index.key_of(slot)))
            if key is not None:
                assert (self.host[:, slot] == self.value(key)).all(), "the host lies"
                self.counts["compared"] += 1

    def drain(self) -> None:
        for turn in list(self.turns):
            if turn.state == "running":
                self.finish(turn)
            else:
                self.abort(turn)
        for _ in range(100):
            self.now += 10.0
            self.dispatch()
            for rank, todo in enumerate(self.todo):
                while todo:
                    self.copy(rank)
            self.settle()
            if not self.scheduler.requests and not self.scheduler.num_in_flight:
                break
        self.check()
        request_laws.check_nothing_left(self.scheduler)
        assert not +self.device.holds, "a device block is held for ever"
        assert self.device.num_free == self.device.bytes.shape[1], "a device block is lost"
