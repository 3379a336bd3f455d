"""Between a worker and a tier: transfers become batches of addresses, results become receipts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np

from kvferry.errors import ClosedError, InputError
from kvferry.keys import Keys, Recovered
from kvferry.tiers.base import CLOSE_SECONDS, Batch, BatchId, Result, Tier, Way
from kvferry.tiers.host import HostTier
from kvferry.tiers.mapping import Bytes
from kvferry.types import (
    FIRST_RANK,
    NO_SLOTS,
    Health,
    Outcome,
    Question,
    Rank,
    Receipt,
    SlotArray,
    Transfer,
    TransferId,
)

if TYPE_CHECKING:
    from kvferry.tiers.disk.messages import StoreAt
    from kvferry.tiers.disk.status import DiskFigures

log = logging.getLogger(__name__)

NOTHING: Recovered = (Keys.empty(), NO_SLOTS)

_kept: list[Bytes] = []
"""Host memory that a hung operation may still touch: it is never unmapped."""


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
        ready_slots: Callable[[], int] | None = None,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """``ready_slots`` says how many host slots can be used by now (default: all of them)."""
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
        self._ready_slots = ready_slots if ready_slots is not None else lambda: host.num_slots
        self._close_seconds = close_seconds
        self._memory = host.bytes
        self._address = host.address
        self._sizes = np.array([host.slot_bytes], dtype=np.int64)
        self._num_attached = 0
        self._ailment = ""
        self._is_closed = False

    @property
    def num_places(self) -> int | None:
        """The tier's places, for ``scheduler.level_of``; None where it finds blocks by keys."""
        return self._tier.num_places

    @property
    def most_in_one(self) -> int:
        """How many blocks of a chain the tier may keep in one object, for the same."""
        return int(getattr(self._tier, "most_in_one", 1))

    def recovered(self) -> Recovered:
        """What the tier still has from an earlier life, for ``PlacedLevel.restore``.

        Nothing where it has no memory of one, or cannot say: then it begins empty.
        """
        recall = getattr(self._tier, "recovered", None)
        if recall is None or self._tier.num_places is None:
            return NOTHING
        try:
            keys, places = recall()
        except Exception:  # a medium on a bad day must not keep an engine from starting
            log.exception("tier %s cannot say what it still has", self._tier.name)
            return NOTHING
        return keys, places

    def submit(self, transfer: Transfer) -> None:
        """Hand one transfer to the tier and return at once."""
        self._require_open()
        self._tier.submit(self._batch(transfer))

    def ask(self, question: Question) -> None:
        """Have the tier find out which keys it has."""
        self._require_open()
        end = time.monotonic() + question.within
        keys = Keys(question.keys)
        self._tier.submit(Batch(BatchId(question.id), Way.FIND, keys, end, runs=question.runs))

    def forget(self) -> None:
        self._require_open()
        self._tier.forget()

    def poll(self) -> list[Receipt]:
        """Receipts of what ended since the last call; never blocks."""
        return [self._receipt(result) for result in self._tier.poll()]

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is under way (or ``timeout`` passed); returns the receipts."""
        return [self._receipt(result) for result in self._tier.drain(timeout)]

    def health(self) -> Health | None:
        """Whether the tier went away or came back since the last call, if it did."""
        ailment = self._tier.ailment
        if ailment == self._ailment:
            return None
        self._ailment = ailment
        return Health(self._rank, self._tier.name, ailment)

    def figures(self) -> DiskFigures | None:
        """What the drives below did so far, if there are any; never waits for one."""
        figures = getattr(self._tier, "figures", None)
        return cast("DiskFigures", figures()) if callable(figures) else None

    def wait_forgotten(self, timeout: float) -> bool:
        """Whether what was forgotten stays so after a crash, where the tier outlives us."""
        wait = getattr(self._tier, "wait_forgotten", None)
        return bool(wait(timeout)) if callable(wait) else True

    def stores(self) -> tuple[StoreAt, ...]:
        """Where the tier's blocks lie on disk, if they do."""
        stores = getattr(self._tier, "stores", None)
        return cast("tuple[StoreAt, ...]", stores()) if callable(stores) else ()

    def close(self) -> None:
        """Finish what was submitted and close the tier; never waits long for one that hangs."""
        if self._is_closed:
            return
        self._is_closed = True
        abandoned = self._tier.close(self._close_seconds)
        if abandoned:
            self.is_stuck = True
            _kept.append(self._memory)
            log.error(
                "tier %s: %d batches never ended; the host memory they touch stays as it is",
                self._tier.name,
                len(abandoned),
            )

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the mover for tier {self._tier.name} is closed")

    def _batch(self, transfer: Transfer) -> Batch:
        host, lower = self._host.name, self._tier.name
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
            transfer.runs,
        )

    def _addresses(self, transfer: Transfer, slots: SlotArray) -> SlotArray:
        last = int(slots.max())
        if not (int(slots.min()) >= 0 and last < self._host.num_slots):
            raise InputError(
                f"transfer {transfer.id}: host slots are 0 to {self._host.num_slots - 1}, asked "
                f"for {int(slots.min())} to {last}"
            )
        if last >= self._num_attached:
            self._attach()
        return (self._address + slots * self._host.pitch)[:, None]

    def _attach(self) -> None:
        """Tell the tier of the host memory that became ready since."""
        ready, pitch = self._ready_slots(), self._host.pitch
        if ready > self._num_attached:
            start = self._num_attached * pitch
            self._tier.attach_memory(self._address + start, ready * pitch - start)
            self._num_attached = ready

    def _receipt(self, result: Result) -> Receipt:
        outcome, reason = Outcome.OK, ""
        failed: tuple[int, ...] = ()
        if not result.ok.all():
            outcome = Outcome.PARTIAL if result.ok.any() else Outcome.FAILED
            reason = next(iter(result.reasons.values()), "")
            if outcome is Outcome.PARTIAL:
                failed = tuple(np.flatnonzero(~result.ok).tolist())
        return Receipt(
            TransferId(result.batch_id),
            self._rank,
            outcome,
            reason,
            result.num_bytes,
            result.seconds,
            "tier",
            failed=failed,
        )
