"""Between a worker and what moves bytes: transfers become batches, results become receipts.

Where ranks share one host memory, a :class:`SharedMover` lets each of them move a part.
:func:`open_tiers` opens what the settings name, and makes sure that it keeps the contract.
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

_kept: list[Bytes] = []
"""Host memory that a hung operation may still touch: it is never unmapped."""


class Mover(Protocol):
    """Carries transfers of one or more routes: a copy engine, or the mover of a tier."""

    def submit(self, transfer: Transfer, /) -> object:
        """Queue one transfer and return at once."""

    def poll(self) -> list[Receipt]:
        """Receipts of what ended since the last call; never blocks."""

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is in flight (or ``timeout`` seconds passed)."""

    def close(self) -> None:
        """Finish what was submitted and give everything back."""


class LowerTierMover(Mover, Protocol):
    """Carries transfers between the host and one tier below it, and the tier's other orders."""

    def ask(self, question: Question, /) -> object:
        """Look up which keys are there; the answer is a receipt. Returns at once."""

    def forget(self, reset: Reset | None = None, /) -> None:
        """Everything below is forgotten, before anything submitted later."""

    def health(self) -> Health | None:
        """Whether the tier went away or came back since the last call; None: neither."""


class SharedMover:
    """One rank's part of the transfers of a host memory that ``num_ranks`` ranks share.

    Owns its mover. The scheduler waits for all ranks, so a block can be matched once it is
    complete. Which part is this rank's::

        load to the device      all of it: every device needs every block
        store from the device   block i of transfer t is rank (i + t)'s, modulo the ranks
        below, found by key     by key: the word 0 of rank r's blocks is r modulo the ranks
        below, with places      by place: place p is place p // ranks of rank p modulo the ranks

    A block below must be looked up where it was put, so those parts are fixed. Every place of every
    rank is used, and neighbours are spread over all of them.
    """

    def __init__(self, mover: Mover, *, rank: Rank, num_ranks: int) -> None:
        if not 0 <= rank < num_ranks:
            raise InputError(f"rank {rank} is not one of 0 to {num_ranks - 1}")
        self._mover = mover
        self._tier = cast(LowerTierMover, mover)
        self._rank = rank
        self._num_ranks = num_ranks
        self._nothing_to_do: list[Receipt] = []
        self._parts: dict[TransferId, SlotArray] = {}

    @property
    def is_stuck(self) -> bool:
        """Whether, once closed, an operation was left behind that may touch host memory."""
        return bool(getattr(self._mover, "is_stuck", False))

    def submit(self, transfer: Transfer) -> None:
        """Submit this rank's part of a transfer; InputError for one below without its keys."""
        if (transfer.src, transfer.dst) == (HOST, DEVICE):
            self._mover.submit(transfer)
            return
        src, dst = transfer.src_slots, transfer.dst_slots
        if transfer.src == DEVICE:
            # Counted from the transfer too: else rank 0 would do all transfers of one block.
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
        """The positions of this rank's part, and the places they have in its tier."""
        if transfer.keys is None:
            raise InputError(f"transfer {transfer.id} goes below the host without its keys")
        places = transfer.dst_slots if transfer.src == HOST else transfer.src_slots
        if not len(places):
            return self._own(transfer.keys), places
        part = np.flatnonzero(places % self._num_ranks == self._rank)
        return part, places[part] // self._num_ranks

    def _is_ours(self, order_id: TransferId, part: SlotArray, *, is_below: bool) -> bool:
        """Whether this rank has a part; else its receipt is made here."""
        if not len(part):
            done = Receipt(order_id, self._rank, Outcome.OK, path="shared")
            self._nothing_to_do.append(done)
        elif is_below:
            self._parts[order_id] = part
        return bool(len(part))

    def ask(self, question: Question) -> None:
        """Look up this rank's part of the keys."""
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
        """Receipts that name positions of the whole order, not of this rank's part."""
        idle, self._nothing_to_do = self._nothing_to_do, []
        return idle + [self._of_whole(receipt) for receipt in receipts]

    def _of_whole(self, receipt: Receipt) -> Receipt:
        part = self._parts.pop(receipt.transfer_id, None)
        if part is None or receipt.outcome is Outcome.OK:
            return receipt
        failed = part if receipt.outcome is Outcome.FAILED else part[list(receipt.failed)]
        return replace(receipt, outcome=Outcome.PARTIAL, failed=tuple(failed.tolist()))


def _call(tier: Tier, name: str, default: object, *args: object) -> Any:
    """What only some tiers can do; ``default`` where this one cannot."""
    method = getattr(tier, name, None)
    return method(*args) if callable(method) else default


def opened(tier: Tier) -> Opened | None:
    """What a tier with places has from an earlier life, told once; None while it is not open."""
    if not _call(tier, "is_open", True):
        return None
    keys, places = Keys.empty(), NO_SLOTS
    try:
        keys, places = _call(tier, "recovered", (keys, places))
    except Exception:  # a medium on a bad day must not keep an engine from starting
        log.exception("tier %s cannot say what it still has", tier.name)
    number = getattr(tier, "reset_number", 0)
    stores = tuple(_call(tier, "stores", ()))
    return Opened(tier.num_places or 0, keys.array, places, number, stores)


class TierMover:
    """Carries transfers between one rank's host slots and one lower tier. Owns the tier.

    No thread and no copy of its own: the tier reads and writes the slots where they are. Every
    order ends in one receipt, unless the medium hangs; then its memory stays for ever.
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
        """Whether an operation was left behind that may still touch host memory."""
        self._host = host
        self._tier = tier
        self._rank = rank
        self._close_seconds = close_seconds
        self._sizes = np.array([host.slot_bytes], dtype=np.int64)
        self._ailment = self._fault = ""
        self._under_way: dict[BatchId, int] = {}
        """How many blocks each batch has whose result has not come yet."""
        self._has_told = tier.num_places is None
        """Whether what the tier has from an earlier life was told."""
        self._is_closed = False

    @property
    def num_places(self) -> int | None:
        """The tier's places; None where it finds blocks by keys."""
        return self._tier.num_places

    def recovered(self) -> Opened | None:
        """What a tier with places has from an earlier life; for ``lower_tier``.

        None while it is not open: then :meth:`health` tells it later. Nothing where it has no
        memory of an earlier life, or cannot say: then it begins empty.
        """
        found = opened(self._tier)
        self._has_told = found is not None
        return found

    def submit(self, transfer: Transfer) -> None:
        """Hand one transfer to the tier and return at once."""
        self._submit(self._batch(transfer))

    def ask(self, question: Question) -> None:
        """Have the tier look up which keys it has."""
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
        """As :meth:`kvferry.tiers.contract.Tier.forget`; a disk needs ``reset``."""
        self._require_open()
        lasting = getattr(self._tier, "reset", None)
        if callable(lasting) and reset is not None:
            lasting(reset)
        else:
            self._tier.forget()

    def poll(self) -> list[Receipt]:
        """Receipts of what ended since the last call; never blocks, and never raises.

        A tier that raises counts as unavailable until it answers again.
        """
        return self._receipts(self._tier.poll)

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is in flight (or ``timeout`` passed); returns the receipts."""
        return self._receipts(self._tier.drain, timeout)

    def _receipts(self, verb: Callable[..., Iterable[Result]], *args: object) -> list[Receipt]:
        """What a tier's ``poll`` or ``drain`` returns; a user's own tier may return anything."""
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
        """Whether the tier went away or came back since the last call; None: neither."""
        found = None if self._has_told else self.recovered()
        ailment = self._fault or self._tier.ailment
        if ailment == self._ailment and found is None:
            return None
        self._ailment = ailment
        return Health(self._rank, self._tier.name, ailment, found)

    def figures(self) -> Any:
        """The ``DiskFigures`` of the tier's drives so far; None without drives. Never waits."""
        return _call(self._tier, "figures", None)

    def wait_forgotten(self, timeout: float) -> bool:
        """Whether what was forgotten stays so after a crash, where the tier outlives us."""
        return bool(_call(self._tier, "wait_forgotten", True, timeout))

    def away(self) -> tuple[str, ...]:
        """The directories of a disk that are not open."""
        return tuple(_call(self._tier, "away", ()))

    def keep_nothing(self) -> None:
        """What is stored from now on, until the next reset, is for no other server."""
        _call(self._tier, "keep_nothing", None)

    def close(self) -> None:
        """Finish what was submitted and close the tier; never waits long for one that hangs."""
        if self._is_closed:
            return
        self._is_closed = True
        abandoned = self._tier.close(self._close_seconds)
        if abandoned:
            self.is_stuck = True
            _kept.append(self._host.rows)
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
        """The receipt of a batch; raises one of ``_NOT_A_RESULT`` where the tier has no such one.

        A result that says nothing clear of a batch's blocks fails all of them.
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
    """One rank's tiers below its host memory, nearest first; all of them or none.

    ``setup`` has what all of them are told; name, block size and options are each tier's own. The
    caller closes them, before the host memory. ConfigError, with the tier and the reason, where one
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
    """Open one tier; ConfigError where it cannot be opened or breaks the contract."""
    is_own = spec.kind in (DISK, REMOTE)
    what = f"{spec.kind}: {spec.options}" if is_own else f"tiers: {spec}"
    factory = find_factory(spec.factory, what=what, where="workers run")
    try:
        tier = factory(setup)
    except Exception as error:  # a user's factory may raise anything
        raise ConfigError(f"{what} cannot be opened: {words_of(error)}") from error
    wrong = _what_is_wrong(tier, setup)
    if wrong:
        close = getattr(tier, "close", None)
        if callable(close):
            close()
        raise ConfigError(
            f"tiers: {spec.factory} gave {type(tier).__name__}, which is no tier for "
            f"{spec.name}: {wrong} (see kvferry.tiers.Tier)"
        )
    return cast(Tier, tier)


def _what_is_wrong(tier: Any, setup: TierSetup) -> str:
    """Where it breaks the contract as far as can be seen from outside; empty if nowhere."""
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
