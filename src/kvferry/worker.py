"""The worker half: carries out plans, reports receipts, knows no requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack

from kvferry.errors import ClosedError
from kvferry.tiers.movers import LowerTierMover, Mover
from kvferry.types import (
    FIRST_RANK,
    HOST,
    Health,
    Outcome,
    Plan,
    Rank,
    Receipt,
    Reset,
    TierName,
    TransferId,
)

Route = tuple[TierName, TierName]
"""From which tier to which."""


class Worker:
    """One rank's half: sends each order of a plan to the mover of its route.

    Owns the movers (and closes them). Every transfer and question it was given ends in exactly one
    receipt, whatever goes wrong.
    """

    def __init__(
        self,
        movers: Mapping[Route, Mover],
        *,
        tiers: Mapping[TierName, LowerTierMover] | None = None,
        rank: Rank = FIRST_RANK,
    ) -> None:
        """``tiers`` are those below the host, by name: each carries its routes both ways."""
        self.rank = rank
        self._tiers = dict(tiers or {})
        self._routes = dict(movers)
        for name, tier in self._tiers.items():
            self._routes[HOST, name] = self._routes[name, HOST] = tier
        self._movers = list({id(mover): mover for mover in self._routes.values()}.values())
        self._refused: list[Receipt] = []
        self._shut_out: list[Health] = []
        self._closed = False

    def execute(self, plan: Plan) -> None:
        """Submit a plan's orders, in its order.

        Call it when the compute that wrote the stored blocks has been queued, and before the
        compute that reads the loaded ones is.
        """
        if self._closed:
            raise ClosedError("the worker is closed; no plan can be executed")
        for name in plan.forget:
            self._forget(name, plan.reset)
        for question in plan.questions:
            tier = self._tiers.get(question.tier)
            if tier is None:
                self._refuse(question.id, f"there is no tier {question.tier} here")
                continue
            try:
                tier.ask(question)
            except Exception as error:
                self._refuse(question.id, f"{type(error).__name__}: {error}")
        for transfer in plan.transfers:
            mover = self._routes.get((transfer.src, transfer.dst))
            if mover is None:
                self._refuse(transfer.id, f"no way from {transfer.src} to {transfer.dst}")
                continue
            try:
                mover.submit(transfer)
            except Exception as error:  # a plan must not stop half-way: others wait for the rest
                self._refuse(transfer.id, f"{type(error).__name__}: {error}")

    def poll(self) -> list[Receipt]:
        """Receipts since the last call; never blocks.

        What a mover raises is passed on; the receipts of the others come with the next call.
        """
        receipts, self._refused = self._refused, []
        try:
            for mover in self._movers:
                receipts += mover.poll()
        except BaseException:
            self._refused = receipts
            raise
        return receipts

    def health(self) -> list[Health]:
        """The tiers that went away or came back since the last call; never blocks."""
        changes, self._shut_out = self._shut_out, []
        for tier in self._tiers.values():
            change = tier.health()
            if change is not None:
                changes.append(change)
        return changes

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until no copy touches the device, or for ``timeout`` seconds; returns receipts.

        Tiers are neither waited for nor asked: one may hang, or be the mover whose ``poll`` failed.
        """
        end = None if timeout is None else time.monotonic() + timeout
        receipts, self._refused = self._refused, []
        for mover in self._movers:
            if not any(mover is tier for tier in self._tiers.values()):
                left = None if end is None else max(0.0, end - time.monotonic())
                receipts += mover.drain(left)
        return receipts

    def close(self) -> None:
        """Finish what was submitted and close the movers. Safe to call twice."""
        if not self._closed:
            self._closed = True
            with ExitStack() as closing:  # all of them, also when one cannot
                for mover in reversed(self._movers):
                    closing.callback(mover.close)

    def _forget(self, name: TierName, reset: Reset | None) -> None:
        tier = self._tiers.get(name)
        if tier is None:
            return
        try:
            tier.forget(reset)
        except Exception as error:  # it may still hold what must never be read again: shut it out
            del self._tiers[name], self._routes[HOST, name], self._routes[name, HOST]
            reason = f"it could not forget: {type(error).__name__}: {error}"
            self._shut_out.append(Health(self.rank, name, reason))

    def _refuse(self, order_id: TransferId, reason: str) -> None:
        self._refused.append(Receipt(order_id, self.rank, Outcome.FAILED, reason))
