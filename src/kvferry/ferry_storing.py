"""Keeping blocks: what a ferry's ``store`` checks, orders and sends off, in one piece or two."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from kvferry.block_tables import Tables, whole_tables
from kvferry.config import Config
from kvferry.device.layout import GroupLayout
from kvferry.errors import InputError
from kvferry.ferry_control import Said, read_hints
from kvferry.first_piece import FirstPiece
from kvferry.identity import Namespace
from kvferry.integers import integer
from kvferry.keys import Keys
from kvferry.left_out import why_left_out
from kvferry.ownership import OneThread
from kvferry.rank import RankMemory
from kvferry.scheduler import Ordered, Request, Scheduler
from kvferry.tickets import Ticket, Tickets
from kvferry.types import SlotArray

_names = itertools.count()
"""For all ferries of the process, as those of hits are."""


class FerryStoring(ABC):
    """The way in. Leaves tickets, requests and copies to the ferry."""

    namespace: Namespace
    _owner: OneThread
    _layouts: tuple[GroupLayout, ...]
    _config: Config
    _rank: RankMemory
    _scheduler: Scheduler
    _tickets: Tickets
    _written_later: AbstractContextManager[None]
    _first_piece: FirstPiece | None

    @abstractmethod
    def _note_ready(self) -> None: ...

    @abstractmethod
    def _send_off(self) -> None: ...

    def store(
        self, keys: Keys, device_blocks: Tables, *, first: int = 0, hints: Said = None
    ) -> Ticket:
        """Keep ``device_blocks``, which hold the blocks of ``keys`` from number ``first`` on.

        What is kept already is not copied again, and what finds no room is left out; ``Done`` says
        how many blocks were copied, and why not all. Blocks that follow one that is not kept could
        never be found, so they are left out too. Do not overwrite the device blocks until it ended.
        With several groups these are whole block tables, one for each group; ``NO_BLOCK`` where the
        engine keeps no block (any more). ``hints``, as for :meth:`match`, say how long all blocks
        of this request should stay.
        """
        self._owner.require()
        if not isinstance(keys, Keys):
            raise InputError(f"keys must come from ferry.keys, got {type(keys).__name__}")
        first = first if type(first) is int else integer(first, "first")
        num_keys = len(keys)
        before = min(max(0, first), num_keys)
        tables = whole_tables(self._layouts, device_blocks, before=before)
        if first != before or (len(tables) == 1 and len(tables[0]) != num_keys):
            raise InputError(
                f"{len(tables[0]) - before} device blocks from block {first} on do not fit "
                f"{num_keys} keys; there must be one key per block, from the first block on"
            )
        self._rank.note_step()
        self._note_ready()  # else what has grown since the last poll would find no room
        ticket = self._tickets.give()
        request = self._scheduler.open(f"store-{next(_names)}", keys, read_hints(hints))
        try:
            with self._written_later:
                ahead = self._send_ahead(request, tables, keys, first)
                self._send_rest(request, tables, keys, first, ticket, ahead)
            if self._first_piece is not None:
                self._scheduler.make_spare(keys)
        except BaseException:
            # Its caller has no ticket to wait for, and may write to those blocks: whatever is, or
            # was to be, copied of them must never be found.
            self._tickets.drop(ticket)
            self._scheduler.disown(request)
            raise
        finally:
            request.end()
        return ticket

    def _send_ahead(
        self, request: Request, tables: Sequence[SlotArray], keys: Keys, first: int
    ) -> tuple[Ordered, ...]:
        """Send off what needs no room to be made, of a store that does."""
        piece = self._first_piece
        count = piece.num_blocks(keys, first) if piece is not None else 0
        if not count:
            return ()
        ordered = request.store(tables, (first + count) * self.namespace.block_tokens)
        self._send_off()
        self._scheduler.pool.later.catch_up()  # the rest follows these, so they must be known
        return ordered

    def _send_rest(
        self,
        request: Request,
        tables: Sequence[SlotArray],
        keys: Keys,
        first: int,
        ticket: Ticket,
        ahead: tuple[Ordered, ...],
    ) -> None:
        num_keys, note = len(keys), ""
        ordered = ahead + request.store(tables, num_keys * self.namespace.block_tokens)
        if len(tables) == 1:
            num_ordered = sum(len(order.blocks) for order in ordered)
            if num_ordered < num_keys - first:
                note = self._why_left_out(request, keys, first, num_ordered)
        self._tickets.send(ticket, ordered, note)
        self._send_off()

    def _why_left_out(self, request: Request, keys: Keys, first: int, num_ordered: int) -> str:
        hints, most = request.hints, None
        if hints is not None and hints.max_store_tokens is not None:
            most = hints.max_store_tokens // self.namespace.block_tokens
        self._scheduler.pool.later.catch_up()  # it is asked what it knows of these keys
        return why_left_out(
            self._scheduler,
            self._config,
            keys,
            first=first,
            num_ordered=num_ordered,
            block_bytes=self._layouts[0].block_bytes,
            most=most,
        )
