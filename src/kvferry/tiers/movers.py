"""Movers carry out a rank's transfers; for tiers, as batches whose results become receipts.

If ranks share one host memory, a :class:`SharedMover` lets each of them move a part.
:func:`open_tiers` opens the tiers that the settings name, and checks that they keep the contract.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np

from kvferry.core.keys import Keys
from kvferry.core.quantities import find_factory
from kvferry.errors import ClosedError, ConfigError, InputError, words_of
from kvferry.hostmem.slots import Bytes, HostTier
from kvferry.settings.tiers import DISK, REMOTE, TierSpec
from kvferry.tiers.contract import CLOSE_SECONDS, Batch, BatchId, Result, Tier, TierSetup, Way
from kvferry.types import (
    DEVICE,
    FIRST_RANK,
    HOST,
    NO_SLOTS,
    Health,
    KeyRows,
    Opened,
    Outcome,
    Question,
    Rank,
    Receipt,
    Reset,
    SlotArray,
    TierName,
    Transfer,
    TransferId,
)

log = logging.getLogger(__name__)

_abandoned_memory: list[Bytes] = []
"""Host memory that a hung operation may still touch: it is never unmapped."""


class Mover(Protocol):
    """Carries out transfers of one or more routes: a copy engine, or the mover of a tier."""

    def submit(self, transfer: Transfer, /) -> object:
        """Queue one transfer and return at once."""

    def poll(self) -> list[Receipt]:
        """Return the receipts of transfers that ended since the last call; never block."""

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is in flight (or ``timeout`` seconds passed); return the receipts."""

    def close(self) -> None:
        """Finish what was submitted and release all resources."""


class LowerTierMover(Mover, Protocol):
    """Carries out a lower tier's transfers to and from the host, its lookups and its resets."""

    def ask(self, question: Question, /) -> object:
        """Look up which keys are in the tier and return at once; a receipt has the answer."""

    def forget(self, reset: Reset | None = None, /) -> None:
        """Drop all blocks of the tier, before anything submitted later."""

    def health(self) -> Health | None:
        """Return the tier's new health if it became available or unavailable, else None."""


class SharedMover:
    """Carries out one rank's part of the transfers of a host memory that ``num_ranks`` ranks share.

    Owns its mover. The scheduler waits for all ranks, so a block can be matched once it is
    complete. The part of this rank::

        load to the device      all of it: every device needs every block
        store from the device   block i of transfer t is rank (i + t)'s, modulo the ranks
        keyed lower tier        by key: word 0 of the keys of rank r is r, modulo the ranks
        placed lower tier       by place: place p is place p // ranks of rank p modulo the ranks

    A block must be looked up on the rank that stored it, so the last two are fixed. Every place of
    every rank is used, and adjacent places are spread over all ranks.
    """

    def __init__(self, mover: Mover, *, rank: Rank, num_ranks: int) -> None:
        if not 0 <= rank < num_ranks:
            raise InputError(f"rank {rank} is not one of 0 to {num_ranks - 1}")
        self._mover = mover
        self._tier = cast(LowerTierMover, mover)
        self._rank = rank
        self._num_ranks = num_ranks
        self._empty_receipts: list[Receipt] = []
        self._parts: dict[TransferId, SlotArray] = {}

    @property
    def is_stuck(self) -> bool:
        """Whether ``close`` abandoned an operation that may still touch host memory."""
        return bool(getattr(self._mover, "is_stuck", False))

    def submit(self, transfer: Transfer) -> None:
        """Submit this rank's part of a transfer. InputError: keys are missing for a lower tier."""
        if (transfer.src, transfer.dst) == (HOST, DEVICE):
            self._mover.submit(transfer)
            return
        src, dst = transfer.src_slots, transfer.dst_slots
        if transfer.src == DEVICE:
            # The transfer's id shifts the parts: else rank 0 would do all transfers of one block.
            first = (self._rank - transfer.id) % self._num_ranks
            part = np.arange(first, len(transfer), self._num_ranks)
            src, dst = src[part], dst[part]
        else:
            part, below = self._part_below(transfer)
            src, dst = (src[part], below) if transfer.src == HOST else (below, dst[part])
        keys = None if transfer.keys is None else transfer.keys[part]
        if self._is_ours(transfer.id, part, is_below=transfer.src != DEVICE):
            self._mover.submit(replace(transfer, src_slots=src, dst_slots=dst, keys=keys))

    def _part_below(self, transfer: Transfer) -> tuple[SlotArray, SlotArray]:
        """Return the positions of this rank's part, and their places in its tier."""
        if transfer.keys is None:
            raise InputError(f"transfer {transfer.id} goes below the host without its keys")
        places = transfer.dst_slots if transfer.src == HOST else transfer.src_slots
        if not len(places):
            return self._own(transfer.keys), places
        part = np.flatnonzero(places % self._num_ranks == self._rank)
        return part, places[part] // self._num_ranks

    def _is_ours(self, order_id: TransferId, part: SlotArray, *, is_below: bool) -> bool:
        """Return whether this rank has a part; if not, queue its receipt."""
        if not len(part):
            done = Receipt(order_id, self._rank, Outcome.OK, path="shared")
            self._empty_receipts.append(done)
        elif is_below:
            self._parts[order_id] = part
        return bool(len(part))

    def ask(self, question: Question) -> None:
        """Look up the keys of this rank's part."""
        part = self._own(question.keys)
        if self._is_ours(question.id, part, is_below=True):
            self._tier.ask(replace(question, keys=question.keys[part]))

    def forget(self, reset: Reset | None = None) -> None:
        """As :meth:`LowerTierMover.forget`."""
        self._tier.forget(reset)

    def health(self) -> Health | None:
        """As :meth:`LowerTierMover.health`."""
        return self._tier.health()

    def poll(self) -> list[Receipt]:
        return self._whole(self._mover.poll())

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        return self._whole(self._mover.drain(timeout))

    def close(self) -> None:
        self._mover.close()

    def _own(self, keys: KeyRows) -> SlotArray:
        return np.flatnonzero(keys[:, 0] % np.uint64(self._num_ranks) == self._rank)

    def _whole(self, receipts: list[Receipt]) -> list[Receipt]:
        """Convert positions in receipts from this rank's part to the whole order."""
        idle, self._empty_receipts = self._empty_receipts, []
        return idle + [self._of_whole(receipt) for receipt in receipts]

    def _of_whole(self, receipt: Receipt) -> Receipt:
        part = self._parts.pop(receipt.transfer_id, None)
        if part is None or receipt.outcome is Outcome.OK:
            return receipt
        failed = part if receipt.outcome is Outcome.FAILED else part[list(receipt.failed)]
        return replace(receipt, outcome=Outcome.PARTIAL, failed=tuple(failed.tolist()))


def _call(tier: Tier, name: str, default: object, *args: object) -> Any:
    """Call a method that only some tiers have; return ``default`` if this one lacks it."""
    method = getattr(tier, name, None)
    return method(*args) if callable(method) else default


def opened(tier: Tier) -> Opened | None:
    """Return the blocks that a placed tier recovered, only once; None while it is not open."""
    if not _call(tier, "is_open", True):
        return None
    keys, places = Keys.empty(), NO_SLOTS
    try:
        keys, places = _call(tier, "recovered", (keys, places))
    except Exception:  # a faulty medium must not keep an engine from starting
        log.exception("tier %s cannot say what it still has", tier.name)
    number = getattr(tier, "reset_number", 0)
    stores = tuple(_call(tier, "stores", ()))
    return Opened(tier.num_places or 0, keys.array, places, number, stores)


class TierMover:
    """Carries out transfers between one rank's host slots and one lower tier. Owns the tier.

    It has no thread and makes no copy: the tier reads and writes the slots in place. Every order
    ends in one receipt, unless the medium hangs; then its memory is never freed.
    """

    def __init__(
        self,
        host: HostTier,
        tier: Tier,
        *,
        rank: Rank = FIRST_RANK,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        if host.slot_bytes != tier.block_bytes:
            raise InputError(
                f"tier {tier.name} has blocks of {tier.block_bytes} bytes, the host slots of "
                f"{host.slot_bytes}; blocks move whole, so they must agree"
            )
        self.is_stuck = False
        """Whether ``close`` abandoned an operation that may still touch host memory."""
        self._host = host
        self._tier = tier
        self._rank = rank
        self._close_seconds = close_seconds
        self._sizes = np.array([host.slot_bytes], dtype=np.int64)
        self._ailment = self._fault = ""
        self._under_way: dict[BatchId, int] = {}
        """Number of blocks of each batch in flight."""
        self._has_reported = tier.num_places is None
        """Whether the recovered blocks were reported; True for a keyed tier, which has none."""
        self._is_closed = False

    @property
    def num_places(self) -> int | None:
        """Number of the tier's places; None if it is keyed."""
        return self._tier.num_places

    def recovered(self) -> Opened | None:
        """Return the blocks that a placed tier recovered from an earlier process.

        None while it is not open: :meth:`health` reports them later. Empty if the tier keeps
        nothing across processes, or cannot list it. The result is for ``lower_tier``.
        """
        found = opened(self._tier)
        self._has_reported = found is not None
        return found

    def submit(self, transfer: Transfer) -> None:
        """Hand one transfer to the tier and return at once."""
        self._submit(self._batch(transfer))

    def ask(self, question: Question) -> None:
        """Submit a lookup of keys to the tier."""
        end = time.monotonic() + question.within
        self._submit(Batch(BatchId(question.id), Way.FIND, Keys(question.keys), end))

    def _submit(self, batch: Batch) -> None:
        self._require_open()
        self._under_way[batch.id] = len(batch)
        try:
            self._tier.submit(batch)
        except Exception:
            del self._under_way[batch.id]
            raise

    def forget(self, reset: Reset | None = None) -> None:
        """Drop all blocks as :meth:`kvferry.tiers.contract.Tier.forget`; a disk needs ``reset``."""
        self._require_open()
        lasting = getattr(self._tier, "reset", None)
        if callable(lasting) and reset is not None:
            lasting(reset)
        else:
            self._tier.forget()

    def poll(self) -> list[Receipt]:
        """Return the receipts of what ended since the last call; never block, and never raise.

        A tier that raises counts as unavailable until it answers again.
        """
        return self._receipts(self._tier.poll)

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is in flight (or ``timeout`` seconds passed); return the receipts."""
        return self._receipts(self._tier.drain, timeout)

    def _receipts(self, verb: Callable[..., Iterable[Result]], *args: object) -> list[Receipt]:
        """Call a tier's ``poll`` or ``drain``; a user's own tier may return anything."""
        fault, receipts = "", list[Receipt]()
        try:
            for result in verb(*args):
                try:
                    receipts.append(self._receipt(result))
                except _NOT_A_RESULT as error:
                    log.error("tier %s: a result is ignored: %s", self._tier.name, error)
        except Exception as error:
            fault = f"{verb.__name__} failed: {words_of(error)}"
            if not self._fault:
                log.exception("tier %s is unavailable until it answers again", self._tier.name)
        self._fault = fault
        return receipts

    def health(self) -> Health | None:
        """Return the tier's new health if it became available or unavailable, else None."""
        found = None if self._has_reported else self.recovered()
        ailment = self._fault or self._tier.ailment
        if ailment == self._ailment and found is None:
            return None
        self._ailment = ailment
        return Health(self._rank, self._tier.name, ailment, found)

    def figures(self) -> Any:
        """Return the ``DiskFigures`` of the tier's drives; None without drives. Never waits."""
        return _call(self._tier, "figures", None)

    def wait_forgotten(self, timeout: float) -> bool:
        """Return whether dropped blocks stay dropped after a crash, if the tier outlives us."""
        return bool(_call(self._tier, "wait_forgotten", True, timeout))

    def away(self) -> tuple[str, ...]:
        """Return the directories of a disk tier that are not open."""
        return tuple(_call(self._tier, "away", ()))

    def keep_nothing(self) -> None:
        """Hide blocks that are stored from now until the next reset from other processes."""
        _call(self._tier, "keep_nothing", None)

    def close(self) -> None:
        """Finish what was submitted and close the tier; never wait long for one that hangs."""
        if self._is_closed:
            return
        self._is_closed = True
        abandoned = self._tier.close(self._close_seconds)
        if abandoned:
            self.is_stuck = True
            _abandoned_memory.append(self._host.rows)
            log.error(
                "tier %s: %d batches never ended; the host memory they touch stays as it is",
                self._tier.name,
                len(abandoned),
            )

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the mover for tier {self._tier.name} is closed")

    def _batch(self, transfer: Transfer) -> Batch:
        host, lower = HOST, self._tier.name
        if (transfer.src, transfer.dst) == (host, lower):
            way, slots, places = Way.WRITE, transfer.src_slots, transfer.dst_slots
        elif (transfer.src, transfer.dst) == (lower, host):
            way, slots, places = Way.READ, transfer.dst_slots, transfer.src_slots
        else:
            raise InputError(
                f"no way from {transfer.src} to {transfer.dst}: this mover serves "
                f"{host} and {lower}"
            )
        if transfer.keys is None or transfer.within is None:
            raise InputError(f"transfer {transfer.id} goes below the host without keys or deadline")
        return Batch(
            BatchId(transfer.id),
            way,
            Keys(transfer.keys),
            time.monotonic() + transfer.within,
            self._addresses(transfer, slots),
            self._sizes,
            places if self._tier.num_places is not None else None,
        )

    def _addresses(self, transfer: Transfer, slots: SlotArray) -> SlotArray:
        last = int(slots.max())
        if not (int(slots.min()) >= 0 and last < self._host.num_slots):
            raise InputError(
                f"transfer {transfer.id}: host slots are 0 to {self._host.num_slots - 1}, asked "
                f"for {int(slots.min())} to {last}"
            )
        return (self._host.address + slots * self._host.pitch)[:, None]

    def _receipt(self, result: Result) -> Receipt:
        """Return the receipt of a batch; raise one of ``_NOT_A_RESULT`` if none such is in flight.

        A malformed result fails all blocks of its batch.
        """
        batch_id = result.batch_id
        if batch_id not in self._under_way:
            raise ValueError(f"batch {batch_id} is not under way, or has ended already")
        num_blocks = self._under_way.pop(batch_id)
        outcome, reason, num_bytes, seconds = Outcome.OK, "", 0, 0.0
        failed: tuple[int, ...] = ()
        try:
            ok = result.ok
            if type(ok) is not np.ndarray or ok.dtype != np.bool_ or ok.shape != (num_blocks,):
                given = f"{len(ok)} flags" if isinstance(ok, Sized) else type(ok).__name__
                raise ValueError(f"{given} for {num_blocks} blocks")
            num_bytes, seconds = int(result.num_bytes), float(result.seconds)
            if not ok.all():
                outcome = Outcome.PARTIAL if ok.any() else Outcome.FAILED
                reason = str(next(iter(result.reasons.values()), ""))
                failed = tuple(np.flatnonzero(~ok).tolist()) if ok.any() else ()
        except Exception as error:
            outcome = Outcome.FAILED
            reason = f"tier {self._tier.name}: its result makes no sense: {error}"
        moved = num_bytes, seconds, "tier"
        return Receipt(TransferId(batch_id), self._rank, outcome, reason, *moved, failed=failed)


_NOT_A_RESULT = (AttributeError, TypeError, ValueError)

_VERBS = ("submit", "poll", "drain", "forget", "close")


def open_tiers(
    specs: Sequence[TierSpec], host: HostTier, setup: TierSetup
) -> dict[TierName, TierMover]:
    """Open one rank's tiers below its host memory, nearest first; all of them or none.

    ``setup`` is common to all; name, block size and options are set for each tier. The caller
    closes them, before the host memory. Raises ConfigError, with the tier and the reason, if one
    cannot be opened.
    """
    tiers: dict[TierName, TierMover] = {}
    with ExitStack() as undo:
        for spec in specs:
            size = host.slot_bytes
            own = replace(setup, name=spec.name, block_bytes=size, options=spec.options)
            tier = open_tier(spec, own)
            undo.callback(tier.close)
            tiers[spec.name] = TierMover(host, tier, rank=setup.rank)
        undo.pop_all()
    return tiers


def open_tier(spec: TierSpec, setup: TierSetup) -> Tier:
    """Open one tier. Raises ConfigError if it cannot be opened or breaks the contract."""
    is_own = spec.kind in (DISK, REMOTE)
    what = f"{spec.kind}: {spec.options}" if is_own else f"tiers: {spec}"
    factory = find_factory(spec.factory, what=what, where="workers run")
    try:
        tier = factory(setup)
    except Exception as error:  # a user's factory may raise anything
        raise ConfigError(f"{what} cannot be opened: {words_of(error)}") from error
    wrong = _contract_violation(tier, setup)
    if wrong:
        close = getattr(tier, "close", None)
        if callable(close):
            close()
        raise ConfigError(
            f"tiers: {spec.factory} gave {type(tier).__name__}, which is no tier for "
            f"{spec.name}: {wrong} (see kvferry.tiers.Tier)"
        )
    return cast(Tier, tier)


def _contract_violation(tier: Any, setup: TierSetup) -> str:
    """Return how a tier breaks the contract, as far as visible from outside; else nothing."""
    lacking = [verb for verb in _VERBS if not callable(getattr(tier, verb, None))]
    if lacking:
        return f"it lacks {', '.join(lacking)}"
    for name, wanted in (("name", setup.name), ("block_bytes", setup.block_bytes)):
        if getattr(tier, name, None) != wanted:
            return f"its {name} is {getattr(tier, name, None)!r}, it was asked for {wanted!r}"
    places = getattr(tier, "num_places", 0)
    if places is not None and (not isinstance(places, int) or places < 1):
        return f"its num_places is {places!r}; give how many it has, or None if it knows keys"
    if not isinstance(getattr(tier, "ailment", None), str):
        return "its ailment is no text"
    return ""
