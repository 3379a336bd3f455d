"""Loads of hits whose blocks still come up from a level: the first go on while the last are read.

::

    level   ──read──> ▓▓▓▓▓▓░░░░░░     pieces land in the host, one after the other
    device  ──load──> ▓▓▓▓░░░░░░░░     each goes on as it lands, beside the next one's read

What does not come up ends the load early: the blocks before it are there, the others are computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.answers import MatchState
from kvferry.errors import InputError
from kvferry.keys import Keys
from kvferry.reach import FullAttention
from kvferry.scheduler import Ordered, Request, Scheduler
from kvferry.tickets import Done, Ticket, Tickets
from kvferry.types import SlotArray, TransferId

_names = itertools.count()


@dataclass(eq=False)
class _EarlyPiece:
    """Blocks on their way to the device. ``reason`` says why they did not get there."""

    num_blocks: int
    waiting: set[TransferId]
    reason: str = ""


@dataclass(eq=False)
class _EarlyLoad:
    """One hit. ``request`` waits for what comes up; ``sent`` blocks of ``end`` are on their way."""

    request: Request
    keys: Keys
    table: SlotArray
    ticket: Ticket
    first: int
    sent: int
    end: int
    pieces: list[_EarlyPiece] = field(default_factory=list)


class EarlyLoads:
    """Owns loads of pending hits until they end, and the requests that wait for their blocks.

    Every piece is a request of its own, so a piece that fails, or finds its blocks gone, harms no
    other. For models whose hits read every block, of one group.
    """

    def __init__(self, scheduler: Scheduler, tickets: Tickets, block_tokens: int) -> None:
        self._scheduler = scheduler
        self._tickets = tickets
        self._tokens = block_tokens
        self._loads: list[_EarlyLoad] = []
        self._moving: dict[TransferId, _EarlyPiece] = {}

    def __bool__(self) -> bool:
        return bool(self._loads)

    def begin(self, request: Request, table: SlotArray, first: int, num_coming: int) -> Ticket:
        """Fill the places of a block table after the ``first`` ones, as their blocks come.

        Nothing is ordered before :meth:`advance`. Refuses a table that does not fit what is coming;
        nothing is lost then.
        """
        blocks = np.sort(table[first:])
        if len(blocks) != num_coming or not isinstance(self._scheduler.groups[0], FullAttention):
            raise InputError(
                f"{num_coming} blocks of this hit are coming up, got {len(blocks)} device blocks; "
                "ask again (Ferry.again), or load none of it"
            )
        if np.count_nonzero(blocks[1:] == blocks[:-1]):
            raise InputError("two blocks of a hit cannot be loaded into one device block")
        ticket = self._tickets.give()
        self._tickets.begin(ticket)
        keys = request.chain.keys()
        self._loads.append(_EarlyLoad(request, keys, table, ticket, first, first, len(table)))
        return ticket

    def land(self, transfer_id: TransferId, reason: str) -> None:
        """A transfer has ended; those of others are not ours."""
        piece = self._moving.pop(transfer_id, None)
        if piece is not None:
            piece.waiting.discard(transfer_id)
            piece.reason = piece.reason or reason

    def advance(self) -> bool:
        """Order what has come up since, end what is over; whether there is a plan to send."""
        has_ordered = False
        for load in tuple(self._loads):
            has_ended = not load.request.waits_below  # before we look, or the last may be missed
            has_ordered |= self._order(load)
            if (has_ended or load.sent == load.end) and not any(p.waiting for p in load.pieces):
                self._end(load)
        return has_ordered

    def _order(self, load: _EarlyLoad) -> bool:
        if load.sent == load.end or any(piece.reason for piece in load.pieces):
            return False
        count = self._scheduler.num_loadable(load.keys, load.sent, load.end)
        if not count:
            return False
        stop = load.sent + count
        piece = self._scheduler.open(f"early-{next(_names)}", load.keys[:stop])
        piece.is_counted = piece.is_explained = True  # the hit was, as a whole
        match = piece.match(computed_tokens=load.sent * self._tokens)
        ordered: Sequence[Ordered] = ()
        if match.state is MatchState.HIT:
            stop = match.num_tokens // self._tokens
            ordered = piece.load([load.table[:stop]])
        if not ordered:
            piece.end()
            return False
        moving = _EarlyPiece(stop - load.sent, {part.transfer for part in ordered})
        self._moving |= dict.fromkeys(moving.waiting, moving)
        load.pieces.append(moving)
        load.sent = stop
        return True

    def _end(self, load: _EarlyLoad) -> None:
        self._loads.remove(load)
        load.request.end()
        came = list(itertools.takewhile(lambda piece: not piece.reason, load.pieces))
        num_blocks = sum(piece.num_blocks for piece in came)
        reason = next((piece.reason for piece in load.pieces if piece.reason), "")
        wanted = len(load.table) - load.first
        if num_blocks < wanted and not reason:
            reason = f"{wanted - num_blocks} of {wanted} blocks did not come up from below"
        self._tickets.finish(Done(load.ticket, num_blocks, reason, ok=num_blocks == wanted))
