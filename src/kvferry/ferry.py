"""A ferry: both halves in one process, for an engine that calls us directly."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from kvferry.answers import MatchState
from kvferry.awaited import Awaited
from kvferry.block_tables import Distinct, Tables, whole_tables
from kvferry.closing import Closing, close_if_dropped, weakly
from kvferry.config import Config
from kvferry.device.layout import GroupLayout
from kvferry.early_loads import EarlyLoads
from kvferry.errors import ClosedError, InputError
from kvferry.ferry_control import FerryControl, Said, read_hints
from kvferry.ferry_metrics import FerryLooks
from kvferry.ferry_scheduler import scheduler_over
from kvferry.ferry_storing import FerryStoring
from kvferry.ferry_waiting import FerryWaiting
from kvferry.first_piece import FirstPiece
from kvferry.hits import Hit, PendingHits, not_a_hit, pending
from kvferry.identity import Extra, Namespace, chain
from kvferry.integers import Integers, integer
from kvferry.keys import Keys
from kvferry.last_writes import write_out
from kvferry.metrics.inbox import Inbox
from kvferry.ownership import OneThread
from kvferry.rank import RankMemory
from kvferry.reach import Group
from kvferry.scheduler import State
from kvferry.tickets import Done, Ticket, Tickets
from kvferry.types import DEVICE, FIRST_RANK, HOST, Key
from kvferry.worker import Worker

if TYPE_CHECKING:
    from kvferry.metrics.endpoint import Endpoint

_names = itertools.count()
"""For all ferries of the process, so that what is explained of one names no hit of another."""
_LONG_BYTES = 32 << 20
"""Fewer are copied before a policy has heard of one request: some 0.4 ms beside a fast link."""


class Ferry(FerryLooks, FerryControl, FerryStoring, FerryWaiting, Closing):
    """Blocks of one engine, kept in host memory. Owns both halves and the memory; ends in close.

    It belongs to the first thread that uses it, until that thread ends or calls :meth:`hand_over`;
    another one, or a forked child, is refused (:meth:`keys` and :meth:`host_stats` are for all).
    Nothing here waits, except :meth:`wait`, :meth:`poll` with a timeout, :meth:`await_hit` and
    :meth:`close`; tickets can be awaited (``await ferry.load(...)``). One that is
    dropped without ``close`` is closed in the background, with a ResourceWarning.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        groups: Sequence[Group],
        namespace: Namespace,
        config: Config,
        rank: RankMemory,
        *,
        keep_alive: object = None,
    ) -> None:
        """``keep_alive`` is memory that is copied by address: held until no copy runs."""
        self.namespace = namespace
        self._layouts = tuple(layouts)
        self._distinct = Distinct(self._layouts)
        self._config = config
        self._keep_alive = keep_alive
        self._rank = rank
        self._worker = Worker(
            {(DEVICE, HOST): rank.engine, (HOST, DEVICE): rank.engine}, levels=rank.levels
        )
        self._scheduler = scheduler_over(rank, layouts, groups, namespace, config)
        self._scheduler.watch_requests()
        self._scheduler.pool.told_later.is_on = True
        self._has_levels = bool(rank.levels)
        # With levels a plan looks at the pool, and of several groups each store at the one before.
        later = not rank.levels and len(groups) == 1
        self._written_later: AbstractContextManager[None] = (
            self._scheduler.pool.later if later else nullcontext()
        )
        self._first_piece = FirstPiece(self._scheduler, layouts[0].block_bytes) if later else None
        self._pending = PendingHits(config.match_deadline)
        self._tickets = Tickets()
        self._awaited = Awaited(
            self._tickets,
            weakly(self, Ferry._advance, ClosedError("this ferry was dropped")),
            rank.engine.await_news,
            has_levels=self._has_levels,
        )
        self._tickets.awaited_by(self._awaited.wait)
        self._early = EarlyLoads(self._scheduler, self._tickets, namespace.block_tokens)
        self._inbox = Inbox()
        self._endpoint: Endpoint | None = None
        self._owner = OneThread("this ferry")
        self._is_growing = True
        self._parts = ExitStack()  # closed in turn, each though one before it raises
        for part in (rank, self._scheduler, self._worker):
            self._parts.callback(part.close)
        self._parts.callback(self._awaited.close)
        self._dropped = close_if_dropped(
            self, "a kvferry.Ferry", self._parts.close, keep_alive=keep_alive
        )
        if config.metrics_port is not None:
            with ExitStack() as undo:
                undo.callback(self.close)
                self.serve_metrics(config.metrics_port, config.metrics_host)
                self.hand_over()  # whoever attached need not be who uses it
                undo.pop_all()

    # -- blocks ---------------------------------------------------------------------------------

    def keys(
        self,
        tokens: Integers,
        *,
        parent: Key | None = None,
        salt: str = "",
        extra: Extra = "",
    ) -> Keys:
        """One key per full block of ``tokens``; each covers every token before it too.

        With ``parent``, the key before these tokens, the chain goes on from there. What decides the
        blocks besides the tokens must be said, or a request is served another's KV: ``extra`` is
        the content that tokens only stand for (a digest of the images) or what was added to the
        model (an adapter), ``salt`` names who may share (a tenant). Each is given once, where it
        begins; see :func:`kvferry.chain`.
        """
        return chain(self.namespace, tokens, parent, salt=salt, extra=extra)

    def match(self, keys: Keys, *, on_device: int = 0, hints: Said = None) -> Hit:
        """How many of a request's blocks, after the ``on_device`` first ones, can be loaded now.

        None while more than ``Config.max_bytes_in_flight`` are on their way already, or where
        computing them is expected to be faster (see :meth:`note_prefill`). Blocks are counted by
        their keys, ``block_tokens`` tokens each. With levels below host memory a hit may be pending
        (:attr:`Hit.is_pending`): see :meth:`again`. ``hints`` are a :class:`Hints`, or a mapping
        that :meth:`Hints.read` takes; they hold for what is loaded of this request.
        """
        self._owner.require()
        if not isinstance(keys, Keys):
            raise InputError(f"keys must come from ferry.keys, got {type(keys).__name__}")
        on_device = on_device if type(on_device) is int else integer(on_device, "on_device")
        if not 0 <= on_device <= len(keys):
            raise InputError(f"{on_device} blocks on the device do not fit {len(keys)} keys")
        self._scheduler.pool.told_later.require_well()
        request = self._scheduler.open(f"hit-{next(_names)}", keys, read_hints(hints))
        tokens = self.namespace.block_tokens
        match = request.match(computed_tokens=on_device * tokens)
        if match.state is not MatchState.HIT:
            if request.waits_below:
                self._pending.keep(request)
                return pending(request, on_device, tokens)
            request.end()
        elif not self._is_growing and (slots := request.pinned_slots) is not None:
            # While memory is pinned, every call of the driver waits; this one need not be.
            self._rank.engine.read_ahead(0, slots)
        return Hit(request, (match.num_tokens - match.computed_tokens) // tokens, on_device)

    def again(self, hit: Hit) -> Hit:
        """What has become of a pending hit; one that is not pending is the answer itself.

        What a level was asked for, and what it brings up, comes with :meth:`poll`. By
        ``Config.ask_deadline`` and ``Config.promote_deadline`` at the latest a hit is pending no
        longer: with all of its blocks, with some, or with none.
        """
        self._owner.require()
        if not isinstance(hit, Hit):
            raise not_a_hit(hit)
        return self._pending.again(hit, self._scheduler, self.namespace.block_tokens)

    def load(self, hit: Hit, device_blocks: Tables) -> Ticket:
        """Bring a hit's blocks to ``device_blocks``, one for each.

        With several groups these are block tables, one for each group: the request's whole table,
        in which the places that ``hit.needed`` names are filled. Compute queued on the ``compute``
        stream after this call comes after the load, also while that is still being queued; where
        the load fails, it has read what was there before.

        A pending hit is let go, given no blocks. Given ``hit.coming`` (of one group, with full
        attention), they are filled as they come up, with :meth:`poll`: queue compute once the
        ticket has ended, which says how many of the first are there.
        """
        self._owner.require()
        if not isinstance(hit, Hit):
            raise not_a_hit(hit)
        tables = whole_tables(self._layouts, device_blocks, before=hit.on_device)
        if hit.is_pending and len(tables) == 1 and len(tables[0]) > hit.on_device:
            ticket = self._early.begin(hit.request, tables[0], hit.on_device, hit.coming)
            self._pending.drop(hit.request)
            self._load_early()
            return ticket
        if len(tables) == 1 and len(tables[0]) != hit.on_device + len(hit):
            raise InputError(
                f"a hit of {len(hit)} blocks needs as many device blocks, "
                f"got {len(tables[0]) - hit.on_device}"
            )
        for table, needed in zip(tables, hit.request.needed_blocks, strict=True):
            if not self._distinct.are(table[needed.start : needed.stop]):
                raise InputError("two blocks of a hit cannot be loaded into one device block")
        self._rank.note_step()
        ticket = self._tickets.give()
        ordered = hit.request.load(tables) if hit.request in self._scheduler else ()
        if ordered:
            self._tickets.send(ticket, ordered)
            self._send_off(compute_waits=True)
        elif len(hit):
            self.release(hit)
            reason = "the hit is gone: it was released, loaded, or too old"
            self._tickets.end(Done(ticket, 0, reason, ok=False))
        else:
            self.release(hit)
            self._tickets.end(Done(ticket, 0))
        return ticket

    def release(self, hit: Hit) -> None:
        """Let a hit go that will not be loaded."""
        self._owner.require()
        if not isinstance(hit, Hit):
            raise not_a_hit(hit)
        if hit.request in self._scheduler and hit.request.state is not State.LOADING:
            self._pending.drop(hit.request)
            hit.request.end()

    def _send_off(self, *, compute_waits: bool = False) -> None:
        """Send off what was just ordered, begun by this thread."""
        plan = self._scheduler.plan(counts=False)
        if plan.transfers or plan:
            with self._rank.engine.begun_here(compute_waits=compute_waits):
                self._worker.execute(plan)
            if self._is_growing:
                self._rank.note_plan(plan)

    def _load_early(self) -> None:
        """Send on what has come up of hits that are loaded as they come, ahead of later compute."""
        if self._early.advance():
            self._rank.note_step()
            self._send_plan()
            self._rank.engine.order_compute_after_loads()

    def _send_plan(self) -> None:
        """Send off what was ordered for nobody's ticket."""
        plan = self._scheduler.plan()
        if plan:
            self._worker.execute(plan)
            if self._is_growing:
                self._rank.note_plan(plan)

    # -- what ended -----------------------------------------------------------------------------

    def _advance(self) -> None:
        """Learn what ended, and answer who asks from other threads."""
        self._owner.require()
        self._note_ready()
        self._inbox.answer()
        if self._has_levels:
            for change in self._worker.health():
                self._scheduler.note_health(change)
        settled = self._scheduler.settle(self._worker.poll())
        for request in settled.loaded + settled.expired:
            request.end()
        for failure in settled.failed:
            failure.request.end()
        # A load that is overdue has failed, but its copy may still write: only landing ends it.
        for landing in settled.landed:
            self._tickets.land(landing.transfer_id, landing.reason)
            if self._early:
                self._early.land(landing.transfer_id, landing.reason)
        if self._has_levels:
            self._serve_levels(has_news=bool(settled.landed))
        if not settled.landed:  # while copies run, there is time for it
            self._catch_up()

    def _catch_up(self) -> None:
        """Count what was answered; tell the policy what it is owed, where nobody waits for that."""
        if self._scheduler.owing:
            self._scheduler.count_answered(are_whole=True)
        num_bytes = self._scheduler.bytes_in_flight
        if not num_bytes or num_bytes >= _LONG_BYTES:
            self._scheduler.pool.told_later.catch_up()

    def _note_ready(self) -> None:
        """Host memory that has grown since serves from now on."""
        if self._is_growing:
            num_ready = self._rank.ready_slots
            self._scheduler.note_ready(FIRST_RANK, num_ready)
            self._is_growing = num_ready < self._rank.host.num_slots

    def _serve_levels(self, *, has_news: bool) -> None:
        """Send on what goes up and down. What landed may have to go down, or be asked for next."""
        self._pending.expire()
        if self._early:
            self._load_early()
        if has_news or self._scheduler.num_queued:
            self._send_plan()

    # -- the rest -------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Let another thread have this ferry: the next one that uses it."""
        self._owner.hand_over()

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine computed this many prompt tokens in this time.

        Once told, and once it has seen a load, ``match`` offers a hit only where loading it is
        expected to be faster than computing it (``Config.load_policy``).
        """
        self._owner.require()
        self._scheduler.note_prefill(num_tokens, seconds)

    def reset(self) -> bool:
        """Forget every block kept, at once; hits not loaded yet are gone too.

        Returns whether what is on disk stays forgotten whatever happens next, for which it waits
        ``Config.disk_deadline`` seconds at most. A drive that is away forgets when it is back.
        """
        self._owner.require()
        self._scheduler.reset()
        for request in self._scheduler.requests:
            if request.state is not State.LOADING:
                self._pending.drop(request)
                request.end()
        if self._has_levels:
            self._send_plan()  # a level may outlive us: it must hear of this
        end = time.monotonic() + self._config.disk_deadline
        levels = self._rank.levels.values()
        return all(level.wait_forgotten(max(0.0, end - time.monotonic())) for level in levels)

    def close(self) -> None:
        """Finish the copies in flight and give the memory back. Safe to call twice.

        What only host memory holds goes to disk first, for ``Config.level_write_out`` seconds at
        most; an interrupt ends that. In a forked child it does nothing: all of it is the parent's.
        """
        if self._owner.is_closed or self._owner.is_forked:
            return
        self._owner.require()
        try:
            seconds = self._config.level_write_out
            write_out(self._scheduler, self._advance, self._send_plan, seconds)
        finally:
            self._owner.close()
            self._dropped.detach()
            self._parts.close()
