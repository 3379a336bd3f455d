"""The worker: carries out plans and reports receipts; knows no requests."""

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
"""Source tier and destination tier of a transfer."""


class Worker:
    """Carries out plans on one rank: passes each order to the mover of its route.

    Owns and closes the movers. Every transfer and question of a plan ends in exactly one receipt,
    whatever fails.
    """

    def __init__(
        self,
        movers: Mapping[Route, Mover],
        *,
        tiers: Mapping[TierName, LowerTierMover] | None = None,
        rank: Rank = FIRST_RANK,
    ) -> None:
        """Take movers by route, and ``tiers``: lower tiers by name, each for both directions."""
        self.rank = rank
        self._tiers = dict(tiers or {})
        self._routes = dict(movers)
        for name, tier in self._tiers.items():
            self._routes[HOST, name] = self._routes[name, HOST] = tier
        self._movers = list({id(mover): mover for mover in self._routes.values()}.values())
        self._refused: list[Receipt] = []
        self._detached: list[Health] = []
        self._closed = False

    def execute(self, plan: Plan) -> None:
        """Submit the orders of a plan.

        Call this after the compute that wrote the stored blocks was queued, and before the compute
        that reads the loaded blocks is.
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
            except Exception as error:  # the rest of the plan must still be submitted
                self._refuse(transfer.id, f"{type(error).__name__}: {error}")

    def poll(self) -> list[Receipt]:
        """Return the receipts since the last call; never blocks.

        If a mover raises, the exception propagates; the next call returns the others' receipts.
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
        """Return the tiers that became unavailable or available since the last call."""
        changes, self._detached = self._detached, []
        for tier in self._tiers.values():
            change = tier.health()
            if change is not None:
                changes.append(change)
        return changes

    def drain(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until no copy touches the device, or for ``timeout`` seconds; return the receipts.

        Lower tiers are neither drained nor polled: one may hang, or its ``poll`` may have failed.
        If a mover raises, the next call returns the receipts so far, as in :meth:`poll`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        receipts, self._refused = self._refused, []
        try:
            for mover in self._movers:
                if not any(mover is tier for tier in self._tiers.values()):
                    left = None if end is None else max(0.0, end - time.monotonic())
                    receipts += mover.drain(left)
        except BaseException:
            self._refused = receipts
            raise
        return receipts

    def close(self) -> None:
        """Finish the submitted orders and close the movers. Safe to call twice."""
        if not self._closed:
            self._closed = True
            with ExitStack() as closing:  # closes all of them, even if one raises
                for mover in reversed(self._movers):
                    closing.callback(mover.close)

    def _forget(self, name: TierName, reset: Reset | None) -> None:
        tier = self._tiers.get(name)
        if tier is None:
            return
        try:
            tier.forget(reset)
        except Exception as error:  # it may still have blocks from before the reset: detach it
            del self._tiers[name], self._routes[HOST, name], self._routes[name, HOST]
            reason = f"it could not forget: {type(error).__name__}: {error}"
            self._detached.append(Health(self.rank, name, reason))

    def _refuse(self, order_id: TransferId, reason: str) -> None:
        self._refused.append(Receipt(order_id, self.rank, Outcome.FAILED, reason))
