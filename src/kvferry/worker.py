"""The worker half: carries out plans, reports receipts, knows neither keys nor requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Protocol

from kvferry.errors import ClosedError
from kvferry.types import FIRST_RANK, Outcome, Plan, Rank, Receipt, TierName, Transfer

Route = tuple[TierName, TierName]
"""From which tier to which."""


class Mover(Protocol):
    """Whatever carries transfers of one or more routes: a copy engine, a tier mover."""

    def submit(self, transfer: Transfer) -> object:
        """Queue one transfer and return at once."""

    def poll(self) -> list[Receipt]:
        """Receipts of transfers that ended since the last call; never blocks."""

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is in flight (or ``timeout`` seconds passed)."""

    def close(self) -> None:
        """Finish what was submitted and give everything back."""


class Worker:
    """One rank's half: sends each transfer of a plan to the mover of its route.

    Owns the movers (and closes them). Every transfer it was given ends in exactly one receipt,
    whatever goes wrong.
    """

    def __init__(self, movers: Mapping[Route, Mover], *, rank: Rank = FIRST_RANK) -> None:
        self.rank = rank
        self._routes = dict(movers)
        self._movers: list[Mover] = []
        for mover in movers.values():
            if not any(mover is known for known in self._movers):
                self._movers.append(mover)
        self._refused: list[Receipt] = []
        self._closed = False

    def execute(self, plan: Plan) -> None:
        """Submit a plan's transfers, in its order.

        Call it when the compute that wrote the stored blocks has been queued, and before the
        compute that reads the loaded ones is.
        """
        if self._closed:
            raise ClosedError("the worker is closed; no plan can be executed")
        for transfer in plan.transfers:
            mover = self._routes.get((transfer.src, transfer.dst))
            if mover is None:
                self._refuse(transfer, f"no way from {transfer.src} to {transfer.dst}")
                continue
            try:
                mover.submit(transfer)
            except Exception as error:  # a plan must not stop half-way: others wait for the rest
                self._refuse(transfer, f"{type(error).__name__}: {error}")

    def poll(self) -> list[Receipt]:
        """Receipts since the last call; never blocks."""
        receipts, self._refused = self._refused, []
        for mover in self._movers:
            receipts += mover.poll()
        return receipts

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until nothing is in flight (or ``timeout`` seconds passed); returns the receipts."""
        end = None if timeout is None else time.monotonic() + timeout
        receipts, self._refused = self._refused, []
        for mover in self._movers:
            receipts += mover.drain(None if end is None else max(0.0, end - time.monotonic()))
        return receipts

    def close(self) -> None:
        """Finish what was submitted and close the movers. Safe to call twice."""
        if not self._closed:
            self._closed = True
            with ExitStack() as closing:  # all of them, also when one cannot
                for mover in reversed(self._movers):
                    closing.callback(mover.close)

    def _refuse(self, transfer: Transfer, reason: str) -> None:
        self._refused.append(Receipt(transfer.id, self.rank, Outcome.FAILED, reason))
