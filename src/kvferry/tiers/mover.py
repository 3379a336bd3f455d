"""What carries a worker's transfers, and a rank's part of them where all share one memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from kvferry.errors import InputError
from kvferry.types import (
    DEVICE,
    HOST,
    Health,
    KeyRows,
    Outcome,
    Question,
    Rank,
    Receipt,
    RunNumbers,
    SlotArray,
    Transfer,
    TransferId,
)


class Mover(Protocol):
    """Whatever carries transfers of one or more routes: a copy engine, a tier's mover."""

    def submit(self, transfer: Transfer, /) -> object:
        """Queue one transfer and return at once."""

    def poll(self) -> list[Receipt]:
        """Receipts of what ended since the last call; never blocks."""

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is in flight (or ``timeout`` seconds passed)."""

    def close(self) -> None:
        """Finish what was submitted and give everything back."""


class LevelMover(Mover, Protocol):
    """Carries transfers between the host and one level below it, and its other orders."""

    def ask(self, question: Question, /) -> object:
        """Find out which keys are there; the answer is a receipt. Returns at once."""

    def forget(self) -> None:
        """Everything below is forgotten, before anything submitted later."""

    def health(self) -> Health | None:
        """Whether the level went away or came back since the last call, if it did."""


class SharedMover:
    """One rank's part of the transfers of a host pool that ``num_ranks`` ranks share.

    Owns its mover. Loads to the device go through whole; of everything else this rank moves a part
    and the others move theirs. The scheduler waits for all of them anyway, so a block is matchable
    when it is complete.
    """

    def __init__(self, mover: Mover, *, rank: Rank, num_ranks: int) -> None:
        if not 0 <= rank < num_ranks:
            raise InputError(f"rank {rank} is not one of 0 to {num_ranks - 1}")
        self._mover = mover
        self._rank = rank
        self._num_ranks = num_ranks
        self._nothing_to_do: list[Receipt] = []

    @property
    def is_stuck(self) -> bool:
        """Whether, once closed, an operation was left behind that may touch host memory."""
        return bool(getattr(self._mover, "is_stuck", False))

    def submit(self, transfer: Transfer) -> object:
        if (transfer.src, transfer.dst) == (HOST, DEVICE):
            return self._mover.submit(transfer)
        # By transfer too: else rank 0 would do all of the transfers of one block.
        first = (self._rank - transfer.id) % self._num_ranks
        part = np.arange(first, len(transfer), self._num_ranks)
        if not len(part):
            return self._pass(transfer.id)
        src, dst = transfer.src_slots[part], transfer.dst_slots[part]
        return self._mover.submit(replace(transfer, src_slots=src, dst_slots=dst))

    def poll(self) -> list[Receipt]:
        idle, self._nothing_to_do = self._nothing_to_do, []
        return idle + self._mover.poll()

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        idle, self._nothing_to_do = self._nothing_to_do, []
        return idle + self._mover.drain(timeout)

    def close(self) -> None:
        self._mover.close()

    def _pass(self, order_id: TransferId) -> object:
        self._nothing_to_do.append(Receipt(order_id, self._rank, Outcome.OK, path="shared"))
        return None


class SharedLevelMover(SharedMover):
    """One rank's part of a level below such a host pool: a block must be looked for where it was
    put, so the parts are fixed::

        finds blocks by keys   by key: the word 0 of rank r's blocks is r modulo the ranks
        has places             by place: place p is place p // ranks of rank p modulo the ranks

    So every place of every rank is used, and neighbours are spread over all of them.
    """

    _mover: LevelMover

    def __init__(self, mover: LevelMover, *, rank: Rank, num_ranks: int) -> None:
        super().__init__(mover, rank=rank, num_ranks=num_ranks)
        self._parts: dict[TransferId, SlotArray] = {}

    def submit(self, transfer: Transfer) -> object:
        if transfer.keys is None:
            raise InputError(f"transfer {transfer.id} goes below the host without its keys")
        src, dst = transfer.src_slots, transfer.dst_slots
        below = dst if transfer.src == HOST else src
        if len(below):
            part = np.flatnonzero(below % self._num_ranks == self._rank)
            below = below[part] // self._num_ranks
        else:
            part = self._own(transfer.keys)
        if not len(part):
            return self._pass(transfer.id)
        self._parts[transfer.id] = part
        src, dst = (src[part], below) if transfer.src == HOST else (below, dst[part])
        keys, runs = transfer.keys[part], _some_of(transfer.runs, part)
        return self._mover.submit(
            replace(transfer, src_slots=src, dst_slots=dst, keys=keys, runs=runs)
        )

    def ask(self, question: Question) -> object:
        part = self._own(question.keys)
        if not len(part):
            return self._pass(question.id)
        self._parts[question.id] = part
        runs = _some_of(question.runs, part)
        return self._mover.ask(replace(question, keys=question.keys[part], runs=runs))

    def forget(self) -> None:
        self._mover.forget()

    def health(self) -> Health | None:
        return self._mover.health()

    def poll(self) -> list[Receipt]:
        return [self._whole(receipt) for receipt in super().poll()]

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        return [self._whole(receipt) for receipt in super().drain(timeout)]

    def _own(self, keys: KeyRows) -> SlotArray:
        return np.flatnonzero(keys[:, 0] % np.uint64(self._num_ranks) == self._rank)

    def _whole(self, receipt: Receipt) -> Receipt:
        """A receipt for a part names positions of the part: say those of the whole."""
        part = self._parts.pop(receipt.transfer_id, None)
        if part is None or receipt.outcome is Outcome.OK:
            return receipt
        failed = part if receipt.outcome is Outcome.FAILED else part[list(receipt.failed)]
        return replace(receipt, outcome=Outcome.PARTIAL, failed=tuple(failed.tolist()))


def _some_of(runs: RunNumbers | None, part: SlotArray) -> RunNumbers | None:
    """A rank's own blocks of a run follow each other, too: whose each is, its key alone says."""
    return None if runs is None else runs[part]
