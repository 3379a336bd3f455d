"""Transfers from order to completion; block tables and orders as engine and scheduler share them.

::

    load, store, move, ask ──> queued ──launch──> in flight ──settle──> landed
                                                       └──expire──> overdue
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from kvferry.cache.reach import Group
from kvferry.cache.slots import Lease, Purpose
from kvferry.config import Config
from kvferry.core.keys import Keys
from kvferry.core.quantities import integers
from kvferry.errors import InputError
from kvferry.telemetry.stats import Traffic, TrafficKey
from kvferry.types import (
    DEVICE,
    HOST,
    NO_SLOTS,
    DeviceBlocks,
    Outcome,
    Plan,
    Question,
    Rank,
    Receipt,
    Reset,
    SlotArray,
    TierName,
    Transfer,
    TransferId,
)

_LONG_AGO = float("-inf")
_NEVER = float("inf")


@dataclass(eq=False)
class InFlight:
    """One queued or launched transfer and its leases; or a question, which has none.

    ``served`` are the requests of its blocks. Launch sets the ``deadline`` and the ranks it is
    ``waiting`` for. ``receipts`` are those taken so far. ``reason`` says why the whole transfer
    failed; ``failed`` are positions that failed on some rank while the others count, and ``note``
    says why. An ``overdue`` transfer keeps its leases, but no request waits for it any longer. Of a
    store that was ``taken_back`` the engine has the device blocks back already.
    """

    transfer: Transfer | Question
    leases: tuple[Lease, ...] = ()
    served: tuple[Any, ...] = ()
    deadline: float = _NEVER
    waiting: set[Rank] = field(default_factory=set)
    reason: str = ""
    overdue: bool = False
    taken_back: bool = False
    receipts: list[Receipt] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    note: str = ""

    @property
    def lost(self) -> npt.NDArray[np.bool_]:
        """Whether each block failed on any rank."""
        lost = np.full(len(self.transfer), bool(self.reason))
        lost[list(self.failed)] = True
        return lost

    @property
    def in_doubt(self) -> tuple[Lease, ...]:
        """The leases whose blocks must not be matched if this transfer fails.

        A block that could not be loaded or promoted must not match again: the next request would
        fail, too. A block whose writeback failed is still good in the host.
        """
        order = self.transfer
        upward = isinstance(order, Transfer) and order.dst in (DEVICE, HOST)
        return tuple(lease for lease in self.leases if upward or lease.purpose is Purpose.WRITE)


@dataclass
class TransferCounts:
    """Counters of transfers, failures, receipts and traffic."""

    landed: int = 0
    failed: int = 0
    overdue: int = 0
    lost_blocks: int = 0
    stale_receipts: int = 0
    traffic: dict[TrafficKey, Traffic] = field(default_factory=dict)


class StoreOrder(NamedTuple):
    """The part of a store that one request, or one offer of the engine, contributed."""

    lease: Lease
    device_blocks: SlotArray
    request: Any = None


class Transfers:
    """All transfers of one scheduler, queued and in flight. Owns their leases; calls no request.

    ``blocks_to_device`` and the other three counters cover transfers between device and host that
    are queued or in flight. Overdue ones do not count: a hanging rank must not block the others.
    Requests are only labels of orders.
    """

    def __init__(self, num_ranks: int, block_bytes: Sequence[int], config: Config) -> None:
        """``block_bytes`` is the size of one device block, by group."""
        self.counts = TransferCounts()
        self.next_deadline = _NEVER
        """The time before which :meth:`expire` finds no overdue transfer."""
        self.blocks_to_device = self.bytes_to_device = 0
        self.blocks_from_device = self.bytes_from_device = 0
        self._block_bytes = tuple(block_bytes)
        self._config = config
        self._ranks = frozenset(map(Rank, range(num_ranks)))
        self._new_id = cast(Callable[[], TransferId], itertools.count().__next__)
        self._loads: list[InFlight] = []
        self._moves: list[InFlight] = []
        self._stores: dict[int, tuple[TransferId, list[StoreOrder]]] = {}  # by group
        self._questions: dict[TierName, tuple[TransferId, list[Keys]]] = {}
        self._forget: tuple[TierName, ...] = ()
        self._reset: Reset | None = None
        self._step = 0
        self.in_flight: dict[TransferId, InFlight] = {}
        """Launched transfers and questions that not all ranks have answered."""
        self._num_sent = 0

    @property
    def num_queued(self) -> int:
        """Orders that no plan has carried yet."""
        orders = len(self._loads) + len(self._moves) + sum(1 for _ in self.store_orders())
        return orders + len(self._questions) + len(self._forget)

    def store_orders(self) -> Iterator[StoreOrder]:
        """Yield the queued parts of stores."""
        return (order for _, orders in self._stores.values() for order in orders)

    @property
    def num_awaited(self) -> int:
        """Transfers and questions in flight that are not overdue."""
        return sum(not each.overdue for each in self.in_flight.values())

    @property
    def num_bytes(self) -> int:
        """Bytes queued and in flight between device and host, either way."""
        return self.bytes_to_device + self.bytes_from_device

    def leases(self) -> Iterator[Lease]:
        """Yield the leases of all transfers queued and in flight."""
        yield from (order.lease for order in self.store_orders())
        for each in (*self._loads, *self._moves, *self.in_flight.values()):
            yield from each.leases

    def count_kept(self, num_blocks: int) -> None:
        """Add ``num_blocks`` (may be negative) kept for later pieces of pipelined loads."""
        self.blocks_to_device += num_blocks

    def _uncount(self, transfer: Transfer) -> None:
        """Subtract a transfer that completed, was cancelled, or is overdue from the counters."""
        num_blocks, size = len(transfer.dst_slots), self._block_bytes[transfer.group]
        if transfer.dst == DEVICE:
            self.blocks_to_device -= num_blocks
            self.bytes_to_device -= num_blocks * size
        elif transfer.src == DEVICE:
            self.blocks_from_device -= num_blocks
            self.bytes_from_device -= num_blocks * size

    # -- orders ---------------------------------------------------------------------------------

    def load(
        self,
        request: Any,
        group: int,
        lease: Lease,
        blocks: SlotArray,
        *,
        in_parts: bool = False,
    ) -> TransferId:
        """Order the load of one group's blocks of a hit; ``in_parts``: layer by layer."""
        transfer = Transfer(
            self._new_id(), HOST, DEVICE, lease.slots, blocks, group, in_parts=in_parts
        )
        self._loads.append(InFlight(transfer, (lease,), (request,)))
        self.blocks_to_device += len(blocks)
        self.bytes_to_device += len(blocks) * self._block_bytes[group]
        return transfer.id

    def store(
        self, group: int, lease: Lease, device_blocks: SlotArray, request: Any = None
    ) -> TransferId:
        """Order a store into host slots. All stores of one group and step are one transfer."""
        if group not in self._stores:
            self._stores[group] = (self._new_id(), [])
        transfer_id, orders = self._stores[group]
        orders.append(StoreOrder(lease, device_blocks, request))
        self.blocks_from_device += len(device_blocks)
        self.bytes_from_device += len(device_blocks) * self._block_bytes[group]
        return transfer_id

    def move(
        self,
        src: TierName,
        dst: TierName,
        keys: Keys,
        reading: Lease | None,
        writing: Lease | None,
    ) -> TransferId:
        """Order a copy between host and a lower tier; a keyed tier's side has no lease."""
        config = self._config
        transfer = Transfer(
            self._new_id(),
            src,
            dst,
            reading.slots if reading is not None else NO_SLOTS,
            writing.slots if writing is not None else NO_SLOTS,
            keys=keys.array,
            within=config.promote_deadline if dst == HOST else config.store_deadline,
        )
        leases = () if reading is None else (reading,)
        self._moves.append(InFlight(transfer, leases if writing is None else (*leases, writing)))
        return transfer.id

    def ask(self, tier: TierName, keys: Keys) -> TransferId:
        """Ask a tier which of these keys it has; all keys of one step are one question."""
        if tier not in self._questions:
            self._questions[tier] = (self._new_id(), [])
        question_id, asked = self._questions[tier]
        asked.append(keys)
        return question_id

    def forget(self, tiers: tuple[TierName, ...], reset: Reset) -> list[TransferId]:
        """Order a reset of these tiers, ahead of all orders from now on.

        Drops queued writebacks, which would run after the reset and leave old blocks on the tier.
        Returns their ids.
        """
        self._forget = tuple(dict.fromkeys((*self._forget, *tiers)))
        self._reset = reset
        down = [move for move in self._moves if cast(Transfer, move.transfer).src == HOST]
        self._moves = [move for move in self._moves if move not in down]
        _drop(down)
        return [move.transfer.id for move in down]

    def cancel_loads(self, request: Any) -> list[Transfer]:
        """Cancel a request's queued loads and release their leases; return their transfers."""
        cancelled = [order for order in self._loads if request in order.served]
        self._loads = [order for order in self._loads if request not in order.served]
        _drop(cancelled)
        transfers = [cast(Transfer, order.transfer) for order in cancelled]
        for transfer in transfers:
            self._uncount(transfer)
        return transfers

    def disown(
        self, request: Any = None
    ) -> tuple[list[tuple[int, StoreOrder]], list[DeviceBlocks]]:
        """Make the stores of a request (None: of all requests) unmatchable.

        Returns the queued parts of stores, each with its group, which are dropped. Also returns the
        device blocks of stores in flight, whose host slots stay leased until they complete. Those
        of all requests are taken back: each is returned once.
        """
        dropped = []
        for group, (transfer_id, orders) in tuple(self._stores.items()):
            kept = []
            for order in orders:
                if request is not None and order.request is not request:
                    kept.append(order)
                    continue
                order.lease.abort()
                self.blocks_from_device -= len(order.device_blocks)
                self.bytes_from_device -= len(order.device_blocks) * self._block_bytes[group]
                dropped.append((group, order))
            self._stores[group] = (transfer_id, kept)
            if not kept:
                del self._stores[group]
        flying = []
        for each in self.in_flight.values():
            order_sent = each.transfer
            if not isinstance(order_sent, Transfer) or order_sent.src != DEVICE or each.taken_back:
                continue
            if request is None or request in each.served:
                each.taken_back = request is None
                flying.append(DeviceBlocks(order_sent.group, order_sent.src_slots))
                for lease in each.leases:
                    lease.disown()
        return dropped, flying

    # -- launch ---------------------------------------------------------------------------------

    def launch(self, now: float) -> Plan:
        """Return all orders as one plan: loads, then copies of lower tiers, then stores.

        The stores of one group are one transfer: one copy of many blocks beats many of a few.
        """
        self._step += 1
        if not (self._loads or self._stores or self._moves or self._questions or self._forget):
            return Plan(self._step)
        loads, moves, stores = self._loads, self._moves, self._stores
        # Clear the queues first: an interrupt must not leave an order both queued and in flight.
        self._loads, self._moves, self._stores = [], [], {}
        config = self._config
        transfers: tuple[Transfer, ...] = ()
        for load in loads:
            transfers += (self._fly(load, now + config.load_deadline),)
        for move in moves:
            assert isinstance(move.transfer, Transfer)
            assert move.transfer.within is not None
            transfers += (self._fly(move, now + move.transfer.within),)
        for group in sorted(stores):
            store = _one_store(group, *stores[group])
            transfers += (self._fly(store, now + config.store_deadline),)
        if not self._questions and not self._forget:
            return Plan(self._step, transfers)
        questions = [self._launch_question(tier, now) for tier in self._questions]
        forget, self._forget, self._questions = self._forget, (), {}
        reset, self._reset = self._reset, None
        return Plan(self._step, transfers, tuple(questions), forget, reset)

    def _launch_question(self, tier: TierName, now: float) -> Question:
        question_id, asked = self._questions[tier]
        within = self._config.lookup_deadline
        question = Question(
            question_id, tier, np.concatenate([keys.array for keys in asked]), within
        )
        self._fly(InFlight(question), now + within)
        return question

    def _fly(self, each: InFlight, deadline: float) -> Transfer:
        """Put an order in flight; its leases end when all ranks have reported."""
        transfer = cast(Transfer, each.transfer)
        each.deadline, each.waiting = deadline, set(self._ranks)
        self.in_flight[transfer.id] = each
        self._num_sent = max(self._num_sent, transfer.id + 1)
        self.next_deadline = min(self.next_deadline, deadline)
        return transfer

    # -- completion -----------------------------------------------------------------------------

    def settle(self, receipts: Iterable[Receipt]) -> list[InFlight]:
        """Take receipts in any order; return the transfers that they complete.

        A receipt for a completed transfer, or a rank's second one, is counted and ignored. If any
        receipt is malformed or for a transfer never sent, raises InputError and takes none.
        """
        receipts = list(receipts)
        for receipt in receipts:
            is_sent = 0 <= receipt.transfer_id < self._num_sent
            if receipt.failed or receipt.rank not in self._ranks or not is_sent:
                self._check(receipt)
        landed = []
        for receipt in receipts:
            each = self.in_flight.get(receipt.transfer_id)
            if each is None or receipt.rank not in each.waiting:
                self.counts.stale_receipts += 1
                continue
            self._take(each, receipt)
            if not each.waiting:
                landed.append(self._land(each))
        return landed

    def expire(self, now: float) -> list[InFlight]:
        """Mark and return the transfers whose deadline has passed since the last call.

        They stay in flight until they complete. Overdue questions, which lease nothing, end now.
        """
        flying = self.in_flight.values()
        late = [each for each in flying if each.deadline <= now and not each.overdue]
        self.next_deadline = min((f.deadline for f in flying if f.deadline > now), default=_NEVER)
        for each in late:
            each.overdue = True
            each.reason = each.reason or (
                f"no answer in time from rank {', '.join(map(str, sorted(each.waiting)))}"
            )
            if isinstance(each.transfer, Question):
                del self.in_flight[each.transfer.id]
            else:
                self._uncount(each.transfer)
                self.counts.overdue += 1
        return late

    def give_up(self, tier: TierName, reason: str) -> None:
        """Let all transfers of an unavailable tier be overdue at the next :meth:`expire`."""
        for each in self.in_flight.values():
            order = each.transfer
            tiers = (order.tier,) if isinstance(order, Question) else (order.src, order.dst)
            if tier in tiers and not each.overdue:
                each.deadline = self.next_deadline = _LONG_AGO
                each.reason = each.reason or reason

    def close(self) -> None:
        """Drop all orders and fail all transfers. Call it only once no worker touches memory."""
        _drop((*self._loads, *self._moves))
        for store in self.store_orders():
            store.lease.abort()
        self._loads, self._moves, self._stores = [], [], {}
        self._questions, self._forget = {}, ()
        for each in list(self.in_flight.values()):
            each.reason = each.reason or "closed"
            self._land(each)

    def _check(self, receipt: Receipt) -> None:
        subject = f"receipt for transfer {receipt.transfer_id}"
        if not 0 <= receipt.transfer_id < self._num_sent:
            raise InputError(
                f"{subject}, but only {self._num_sent} were ever sent; drop it and settle the "
                "others"
            )
        each = self.in_flight.get(receipt.transfer_id)
        if receipt.failed and each is not None:
            least, most = min(receipt.failed), max(receipt.failed)
            if least < 0 or most >= len(each.transfer):
                raise InputError(
                    f"{subject} says that blocks {least} to {most} failed, but it has "
                    f"{len(each.transfer)}"
                )
        if receipt.rank not in self._ranks:
            raise InputError(
                f"{subject} from rank {receipt.rank}, but ranks are 0 to {len(self._ranks) - 1}"
            )

    def _take(self, each: InFlight, receipt: Receipt) -> None:
        each.waiting.discard(receipt.rank)
        each.receipts.append(receipt)
        transfer, counts = each.transfer, self.counts
        if receipt.outcome is not Outcome.OK:
            reason = f"rank {receipt.rank}: {receipt.reason or 'failed without a reason'}"
            # Copies of lower tiers fail block by block, those of the device as a whole.
            below = isinstance(transfer, Question) or DEVICE not in (transfer.src, transfer.dst)
            if receipt.outcome is Outcome.PARTIAL and below:
                each.failed.update(receipt.failed)
                each.note = each.note or reason
            else:
                each.reason = each.reason or reason
        if isinstance(transfer, Question):
            return
        if receipt.outcome is not Outcome.FAILED:
            key = (transfer.src, transfer.dst, receipt.path)
            copies, num_bytes, seconds = counts.traffic.get(key, Traffic())
            counts.traffic[key] = Traffic(
                copies + 1, num_bytes + receipt.num_bytes, seconds + receipt.seconds
            )

    def _land(self, each: InFlight) -> InFlight:
        del self.in_flight[each.transfer.id]
        if each.failed and len(each.failed) == len(each.transfer):
            each.reason = each.reason or each.note
        if isinstance(each.transfer, Transfer):
            if not each.overdue:
                self._uncount(each.transfer)
            self.counts.landed += 1
            self.counts.failed += bool(each.reason)
            self.counts.lost_blocks += len(each.failed) if not each.reason else 0
        doubtful = each.in_doubt if each.failed or each.reason else ()
        for lease in each.leases:
            failed = sorted(each.failed) if lease in doubtful else ()
            if lease.purpose is Purpose.WRITE:
                lease.abort() if each.reason else lease.commit(failed)
            else:
                lease.spoil() if each.reason and lease in doubtful else lease.release(failed)
        return each


def _one_store(group: int, transfer_id: TransferId, orders: Sequence[StoreOrder]) -> InFlight:
    leases: tuple[Lease, ...] = ()
    served: tuple[Any, ...] = ()
    for order in orders:
        leases += (order.lease,)
        served += (order.request,) if order.request is not None else ()
    blocks, slots = orders[0].device_blocks, leases[0].slots
    if len(orders) > 1:
        blocks = np.concatenate([order.device_blocks for order in orders])
        slots = np.concatenate([lease.slots for lease in leases])
    return InFlight(Transfer(transfer_id, DEVICE, HOST, blocks, slots, group), leases, served)


def _drop(orders: Iterable[InFlight]) -> None:
    """End the leases of orders that were never sent to a rank, so that no byte was touched."""
    for order in orders:
        for lease in order.leases:
            lease.abort() if lease.purpose is Purpose.WRITE else lease.release()


# -- device blocks and block tables -------------------------------------------------------------

NO_BLOCK = -1
"""In a block table: the engine keeps no device block at this position (outside a window, say)."""

BlockTable = Sequence[int] | npt.NDArray[np.integer]
"""One group's device blocks of a request, by position."""


class Ordered(NamedTuple):
    """One group's part of a load or store: hold ``blocks`` until ``settle`` releases them.

    ``positions`` are the blocks' indexes in the block table of ``request``, which is None if the
    engine offered the blocks. ``keys`` are their keys in the pool. Stores of one group and step
    share one ``transfer``.
    """

    group: int
    blocks: SlotArray
    transfer: TransferId
    positions: npt.NDArray[np.integer] | range
    keys: Keys
    request: Any = None


class EngineBlocks(Protocol):
    """What the scheduler asks an engine about device blocks, for the deferred stores.

    ``request`` is the scheduler's object; the engine finds its own request by the object's chain.
    """

    @property
    def evicts(self) -> bool:
        """Whether the engine must evict from its own prefix cache to allocate the next blocks."""

    @property
    def num_free(self) -> int:
        """Device blocks that the engine could allocate to a request now."""

    @property
    def num_held(self) -> int:
        """Device blocks held for copies and for deferred stores of ended requests."""

    def tables(self, request: Any, num_tokens: int, from_token: int) -> Sequence[BlockTable]:
        """Return a live request's block tables; below ``from_token`` they may be ``NO_BLOCK``."""

    def remains(self, request: Any, num_tokens: int, from_token: int) -> Sequence[BlockTable]:
        """Return the same for an ended request, with the blocks that the engine still has."""


def checked_blocks(
    group: int, table: BlockTable, blocks: range, *, least: int = NO_BLOCK
) -> npt.NDArray[np.int64]:
    """Return a copy of these positions of a block table; InputError for an invalid block number.

    A copy, because the engine may change its table while the blocks are still being transferred.
    """
    part: Any = table[blocks.start : blocks.stop]
    if type(part) is not np.ndarray or part.dtype != np.int64:
        part = integers(part, "device blocks")
    found: npt.NDArray[np.int64] = part.copy()
    if found.size and np.minimum.reduce(found) < least:
        or_none = f", or NO_BLOCK ({NO_BLOCK})" if least == NO_BLOCK else ""
        raise InputError(
            f"group {group}'s block table holds {int(found.min())}; a block is 0 or more{or_none}"
        )
    return found


def wrong_tables(tables: Sequence[BlockTable], num_groups: int) -> InputError:
    """Return the error to raise if there is not one table for each group."""
    return InputError(f"got {len(tables)} block tables for {num_groups} groups; give one per group")


def held_blocks(
    tables: Sequence[BlockTable], block_tokens: Sequence[int], from_token: int
) -> tuple[DeviceBlocks, ...]:
    """Return the device blocks of these tables from ``from_token`` on, by group."""
    found = []
    for group, (table, size) in enumerate(zip(tables, block_tokens, strict=True)):
        blocks = np.asarray(table, dtype=np.int64)[from_token // size :]
        found.append(DeviceBlocks(group, blocks[blocks != NO_BLOCK]))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The engine's fixed properties, as given to :class:`Scheduler`; checked when made.

    ``block_bytes`` is the size of one device block, by group; zeros if unknown.
    """

    groups: tuple[Group, ...]
    num_ranks: int
    hash_block_tokens: int | None
    num_device_blocks: int | None
    block_bytes: tuple[int, ...]
    spare_tokens: int
    joins_loads: bool
    loads_early: bool

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise InputError(f"num_ranks must be at least 1, got {self.num_ranks}")
        if not self.groups:
            raise InputError("no groups given; a model has at least one")
        if len(self.block_bytes) != len(self.groups):
            raise InputError(
                f"got {len(self.block_bytes)} block sizes for {len(self.groups)} groups"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens per block, by group."""
        return tuple(group.block_tokens for group in self.groups)

    @property
    def hash_tokens(self) -> int:
        """Tokens that one key of a request's chain covers."""
        return self.hash_block_tokens or min(self.sizes)

    def bound(self, given: int | None, share: float) -> int | None:
        """Return ``given``, or ``share`` of the device's blocks; None if neither is known."""
        if given is not None or self.num_device_blocks is None:
            return given
        return max(1, int(self.num_device_blocks * share))
