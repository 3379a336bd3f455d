"""A ferry: scheduler, worker and host memory in one process, for engines that call it directly."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from threading import current_thread
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakMethod

import numpy as np

from kvferry.cache.policies import policy_named
from kvferry.cache.pool import Pool
from kvferry.cache.reach import Group
from kvferry.config import Config
from kvferry.core.identity import Extra, Namespace, chain, scope
from kvferry.core.keys import Key, Keys
from kvferry.core.lifecycle import Closing, OwnerThread, close_if_dropped, pause
from kvferry.core.quantities import Integers, integer
from kvferry.errors import DeadlineError, InputError, StateError
from kvferry.hints import Hints, read_seconds
from kvferry.hostmem.memory import GrowthStats
from kvferry.rank import RankMemory
from kvferry.scheduler.control import Acted
from kvferry.scheduler.journal import Explanation
from kvferry.scheduler.request import Request, State
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.tier import WriteMode, lower_tier
from kvferry.telemetry import DEFAULT_PORT
from kvferry.telemetry.source import Mailbox, Source
from kvferry.telemetry.stats import SchedulerStats
from kvferry.tickets import Hit, Tables, Ticket, Tickets, whole_tables
from kvferry.transfer.layout import GroupLayout
from kvferry.types import DEVICE, FIRST_RANK, HOST, MatchState
from kvferry.worker import Worker

if TYPE_CHECKING:  # few ferries serve metrics, and these modules would triple our own import
    from kvferry.telemetry.endpoint import Endpoint

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

HintsGiven = Hints | Mapping[str, Any] | None
"""Hints as callers give them."""

_request_numbers = itertools.count()
"""Shared by all ferries of the process, so that no two of their requests have the same name."""

_POLL_SECONDS = 0.02
"""Longest pause of a waiting ferry between two looks at its growth and its mailbox."""
_TIER_POLL_SECONDS = 5e-4
"""The same with lower tiers, which announce nothing."""
_INTERRUPTED = "an interrupt tore this ferry's bookkeeping; close it and attach again"
_GONE = "the hit is gone: it was released, loaded, or too old"
_LONG_BYTES = 32 << 20
"""Policies learn of requests while at least this much is being copied, which takes longer."""


def _guarded(
    call: Callable[Concatenate[Ferry, P], T],
) -> Callable[Concatenate[Ferry, P], T]:
    """For calls that use the bookkeeping: refuse other threads, and all once one was interrupted.

    An interrupt within such a call may leave half of its changes behind.
    """

    @wraps(call)
    def guarded(self: Ferry, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if current_thread() is not self._owner.thread:
            self._owner.require()
        if self._is_torn:
            raise StateError(_INTERRUPTED)
        self._is_torn = True
        try:
            result = call(self, *args, **kwargs)
        except Exception:
            self._is_torn = False
            raise
        self._is_torn = False
        return result

    return guarded


class Ferry(Closing):
    """Keeps blocks of one engine in host memory. Owns scheduler, worker and memory until ``close``.

    A ferry belongs to the first thread that uses it, until that thread ends or calls
    :meth:`hand_over`. Other threads and forked children get a StateError, except from :meth:`keys`
    and :meth:`host_stats`. Only :meth:`wait`, :meth:`await_hit`, :meth:`close`, :meth:`reset` and
    :meth:`poll` with a timeout block; tickets can be awaited (``await ferry.load(...)``). A ferry
    that is dropped without ``close`` is closed in the background, with a ResourceWarning.
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
        self._num_blocks = [layout.num_blocks for layout in layouts]
        self._config = config
        self._keep_alive = keep_alive
        self._rank = rank
        self._worker = Worker(
            {(DEVICE, HOST): rank.engine, (HOST, DEVICE): rank.engine}, tiers=rank.tiers
        )
        self._scheduler = _scheduler_of(rank, layouts, groups, namespace, config)
        self._scheduler.watch_requests()
        self._has_tiers = bool(rank.tiers)
        self._pending: dict[Request, float] = {}
        """Requests with pending hits, and when each ends unless it is asked for again."""
        self._tickets = Tickets(WeakMethod(self._advance))
        self._in_pieces: dict[Request, tuple[Ticket, int]] = {}
        """Loads whose last blocks still come up: the ticket, and the blocks before them."""
        self._mailbox = Mailbox()
        self._mailbox.before_answers = self._scheduler.book.drain
        self._endpoint: Endpoint | None = None
        self._owner = OwnerThread("this ferry")
        self._is_torn = False
        """Whether a call changes the bookkeeping now, or was interrupted while it did."""
        self._is_growing = True
        self._parts = ExitStack()  # all of them are closed, even when one raises
        for part in (rank, self._scheduler, self._worker):
            self._parts.callback(part.close)
        self._dropped = close_if_dropped(
            self, "a kvferry.Ferry", self._parts.close, keep_alive=keep_alive
        )
        if isinstance(config.metrics_port, int):
            with ExitStack() as undo:
                undo.callback(self.close)
                self.serve_metrics(config.metrics_port, config.metrics_host)
                self.hand_over()  # the thread that attached need not be the one that uses it
                undo.pop_all()

    # -- match and load -------------------------------------------------------------------------

    def keys(
        self,
        tokens: Integers,
        *,
        parent: Key | None = None,
        salt: str = "",
        extra: Extra = "",
    ) -> Keys:
        """Return one key per full block of ``tokens``; each key covers every token before it too.

        With ``parent``, the key before these tokens, the chain continues from there. Everything
        besides the tokens that decides the blocks must be given, or a request is served another's
        KV: ``extra`` is the content that tokens only stand for (a digest of the images) or what was
        added to the model (an adapter), ``salt`` names those that may share (a tenant). Each is
        given once, where it begins; see :func:`kvferry.chain`.
        """
        return chain(self.namespace, tokens, parent, salt=salt, extra=extra)

    @_guarded
    def match(self, keys: Keys, *, on_device: int = 0, hints: HintsGiven = None) -> Hit:
        """Pin the blocks of a request, after the ``on_device`` first ones, that can be loaded now.

        The hit is empty while more than ``Config.max_bytes_in_flight`` are being copied, and where
        computing is expected to be faster than loading (see :meth:`note_prefill`). Blocks are
        counted by their keys, ``block_tokens`` tokens each. With lower tiers a hit may be pending
        (:attr:`Hit.is_pending`): see
        :meth:`await_hit`. ``hints`` are a :class:`Hints`, or a mapping
        that :meth:`Hints.read` takes; they hold for what is loaded of this request.
        """
        if not isinstance(keys, Keys):
            raise _not_keys(keys)
        on_device = on_device if type(on_device) is int else integer(on_device, "on_device")
        if not 0 <= on_device <= len(keys.array):
            raise InputError(f"{on_device} blocks on the device do not fit {len(keys)} keys")
        given = None if hints is None else _hints(hints)
        request = self._scheduler.open(f"hit-{next(_request_numbers)}", keys, given)
        try:
            match = request.match(computed_tokens=on_device * self.namespace.block_tokens)
        except Exception:  # what a policy raises
            request.end()
            raise
        if match.state is not MatchState.HIT:
            promotion = request.promotion
            if promotion is not None and promotion.waits:
                self._pending[request] = time.monotonic() + self._config.match_deadline
                return Hit(request, 0, on_device, is_pending=True)
            request.end()
        return Hit(request, match.num_tokens // self.namespace.block_tokens - on_device, on_device)

    def await_hit(self, hit: Hit, timeout: float | None = None, *, early: bool = False) -> Hit:
        """Return what became of a pending hit; after ``timeout`` seconds it may still be pending.

        One that is not pending is returned as it is. After ``Config.lookup_deadline`` and
        ``Config.promote_deadline`` at the latest a hit is pending no longer: it has all of its
        blocks, some, or none. With ``timeout=0`` it asks once. Ends of tickets stay for
        :meth:`poll`.

        With ``early`` it is pending no longer once its last blocks come up in less time than all of
        it takes to be copied. Queue compute only when the ticket of such a load has ended; if it is
        not ``ok``, ``num_blocks`` of the first blocks are there.
        """
        now = hit

        def found() -> bool:
            nonlocal now
            now = self._match_again(hit, early)
            return not now.is_pending

        if not isinstance(hit, Hit):
            raise _not_a_hit(hit)
        if hit.is_pending:
            self._wait_for(found, timeout)
        return now

    @_guarded
    def _match_again(self, hit: Hit, early: bool) -> Hit:
        request, on_device, tokens = hit.request, hit.on_device, self.namespace.block_tokens
        if request not in self._scheduler:
            return Hit(request, 0, on_device)
        if request.promotion is not None:
            request.promotion.may_be_early = early
        match = request.match(computed_tokens=on_device * tokens)
        if request.waits_below:
            self._pending[request] = time.monotonic() + self._config.match_deadline
            if match.state is not MatchState.HIT:
                return Hit(request, 0, on_device, is_pending=True)
        else:
            self._pending.pop(request, None)
            if match.state is not MatchState.HIT:
                request.end()
        return Hit(request, match.num_tokens // tokens - on_device, on_device)

    @_guarded
    def load(self, hit: Hit, device_blocks: Tables) -> Ticket:
        """Load a hit's blocks into ``device_blocks``, one for each; return at once.

        With several groups these are block tables, one for each group: the request's whole table,
        in which the places that ``hit.needed`` names are filled. Compute queued on the ``compute``
        stream after this call comes after the load, also while that is still being queued; where
        the load fails, it has read what was there before.

        A pending hit is given no blocks, and released.
        """
        if not isinstance(hit, Hit):
            raise _not_a_hit(hit)
        request = hit.request
        needed = request.needed_blocks if len(self._layouts) > 1 else ()
        first = hit.on_device
        tables = whole_tables(self._num_blocks, device_blocks, before=first, needed=needed)
        if len(tables) == 1 and len(tables[0]) != hit.on_device + hit.num_blocks:
            raise InputError(
                f"a hit of {len(hit)} blocks needs as many device blocks, "
                f"got {len(tables[0]) - hit.on_device}"
            )
        if self._is_growing:
            self._rank.activity.note_step()
        ordered = request.load(tables) if request in self._scheduler else ()
        if ordered:
            self._send()
            self._rank.engine.order_compute_after_loads()
            ticket = self._tickets.issue(ordered)
            if self._pending.pop(request, None) is not None and request.has_more_to_load:
                self._tickets.add(ticket)
                self._in_pieces[request] = ticket, hit.on_device
            return ticket
        self._release(request)
        return self._tickets.issue((), failure=_GONE if len(hit) else "")

    @_guarded
    def release(self, hit: Hit) -> None:
        """Release a hit that will not be loaded."""
        if not isinstance(hit, Hit):
            raise _not_a_hit(hit)
        self._release(hit.request)

    def _release(self, request: Request) -> None:
        if request in self._scheduler and request.state is not State.LOADING:
            self._pending.pop(request, None)
            request.end()

    # -- store ----------------------------------------------------------------------------------

    @_guarded
    def store(
        self, keys: Keys, device_blocks: Tables, *, first: int = 0, hints: HintsGiven = None
    ) -> Ticket:
        """Store ``device_blocks``, which hold the blocks of ``keys`` from number ``first`` on.

        Blocks that are stored already are not copied again, and blocks that find no room are
        skipped; the ticket says how many were copied, and why not all. Blocks that follow one that
        is not stored could never be found, so they are skipped too. Do not overwrite the device
        blocks until the ticket has ended. With several groups these are whole block tables, one for
        each group; ``NO_BLOCK`` where the engine keeps no block (any more). ``hints``, as for
        :meth:`match`, say how long all blocks of this request should stay.
        """
        if not isinstance(keys, Keys):
            raise _not_keys(keys)
        first = first if type(first) is int else integer(first, "first")
        num_keys = len(keys.array)
        before = min(max(0, first), num_keys)
        tables = whole_tables(self._num_blocks, device_blocks, before=before)
        if first != before or (len(tables) == 1 and len(tables[0]) != num_keys):
            raise InputError(
                f"{len(tables[0]) - before} device blocks from block {first} on do not fit "
                f"{num_keys} keys; there must be one key per block, from the first block on"
            )
        if self._is_growing:
            self._rank.activity.note_step()
            self._note_ready()  # what has grown since the last poll takes blocks too
        given = None if hints is None else _hints(hints)
        request = self._scheduler.open(f"store-{next(_request_numbers)}", keys, given)
        try:
            if first:
                request.progress.begin_at(first * self.namespace.block_tokens)
            ordered = request.store(tables, num_keys * self.namespace.block_tokens)
            reason = ""
            if len(tables) == 1:
                num_ordered = len(ordered[0].blocks) if ordered else 0
                if num_ordered < num_keys - first:
                    reason = self._skip_reason(request, keys, first, num_ordered)
            self._send()
            ticket = self._tickets.issue(ordered, reason)
        except BaseException:
            # The caller may write to those blocks now: no copy of them must ever be found.
            self._scheduler.disown(request)
            request.end()
            raise
        request.end()
        return ticket

    def _skip_reason(self, request: Request, keys: Keys, first: int, num_ordered: int) -> str:
        """Why of the blocks from ``first`` on only ``num_ordered`` are copied.

        Empty if the others are stored already, unless that is all of them.
        """
        pool, config, hints = self._scheduler.pool, self._config, request.hints
        known = pool.known(keys.masked(scope(self._scheduler.epoch, 0)))
        if known[first:].all():
            return "" if num_ordered else "stored already"
        gap = int(np.argmin(known))
        if hints is not None and hints.max_store_tokens is not None:
            most = hints.max_store_tokens // self.namespace.block_tokens
            if most <= max(gap, first):
                return f"a hint lets nothing be stored from block {most} on"
        if gap < first:
            return (
                f"block {gap} is not stored, so the blocks from {first} on could never be found; "
                "store from there on"
            )
        why = "no slot can be freed for it: others are pinned, in use, or the policy keeps them"
        stores = self._scheduler.stores
        if stores.is_full or self._layouts[0].block_bytes > config.max_bytes_in_flight:
            why = "max_bytes_in_flight are being copied; store it later"
        elif config.store_threshold > 1:
            why = f"not asked for often enough yet (store_threshold = {config.store_threshold})"
        return f"from block {gap} on: {why}"

    # -- wait -----------------------------------------------------------------------------------

    def poll(self, timeout: float = 0.0) -> list[Ticket]:
        """Return what ended since the last call; wait up to ``timeout`` seconds for the first end.

        What was waited for or awaited meanwhile is left out. Of more than 65,536 the newest are
        kept.
        """
        return self._wait_for(self._tickets.take_all, timeout) or []

    def wait(self, ticket: Ticket, timeout: float | None = None) -> Ticket:
        """Wait for one ticket; other ends stay for :meth:`poll`. DeadlineError after ``timeout``.

        In an event loop ``await`` the ticket instead: the loop runs on meanwhile.
        """
        tickets = self._tickets
        if not isinstance(ticket, Ticket) or ticket.owner is not tickets:
            raise InputError(f"{ticket!r} is no ticket of this ferry")
        if not ticket.has_ended:
            self._wait_for(partial(tickets.unreported.get, ticket), timeout)
        if not ticket.has_ended:
            raise DeadlineError(f"{ticket!r} did not end within {timeout} seconds")
        tickets.unreported.pop(ticket, None)
        return ticket

    def _wait_for(self, find: Callable[[], T], timeout: float | None) -> T | None:
        """What ``find`` finds, asked again whenever a copy ends; None after ``timeout`` seconds."""
        most = _TIER_POLL_SECONDS if self._has_tiers else _POLL_SECONDS
        began = time.monotonic()
        while True:
            self._advance()
            found = find()
            if found:
                return found
            left = most if timeout is None else timeout - (time.monotonic() - began)
            if left <= 0:
                return None
            self._rank.engine.wait_for_end(min(most, left))

    @_guarded
    def _advance(self) -> None:
        """Learn what ended, and answer questions of other threads."""
        scheduler = self._scheduler
        if self._is_growing:
            self._note_ready()
        if self._mailbox.has_mail:
            self._mailbox.answer()
        if self._has_tiers:
            for change in self._worker.health():
                scheduler.note_health(change)
        settled = scheduler.settle(self._worker.poll())
        for part in settled.ordered:
            if part.request in self._in_pieces:
                self._tickets.add(self._in_pieces[part.request][0], part)
        for request in settled.loaded + settled.expired:
            if request in self._in_pieces:
                self._tickets.end(self._in_pieces.pop(request)[0], "")
            request.end()
        for failure in settled.failed:
            request = failure.request
            if request in self._in_pieces:
                ticket, first = self._in_pieces.pop(request)
                ticket.num_blocks = failure.first_token // self.namespace.block_tokens - first
                self._tickets.end(ticket, failure.reason)
            request.end()
        # A load that is overdue has failed, but its copy may still write: only landing ends it.
        if settled.landed:
            self._tickets.complete(settled.landed)
        if self._has_tiers:  # what landed may have to go down, or be asked for next
            now = time.monotonic()
            for request in [each for each, until in self._pending.items() if until <= now]:
                del self._pending[request]
                request.end()
            if settled.landed or scheduler.num_queued:
                self._send()
        if not settled.landed:  # while copies run, there is time for it
            num_bytes = scheduler.transfers.num_bytes
            if not num_bytes or num_bytes >= _LONG_BYTES:
                scheduler.drain_events()

    def _note_ready(self) -> None:
        """Host memory that has grown since the last call serves from now on."""
        num_ready = self._rank.ready_slots
        self._scheduler.note_ready(FIRST_RANK, num_ready)
        self._is_growing = num_ready < self._rank.host.num_slots

    def _send(self) -> None:
        """Send off what was ordered."""
        plan = self._scheduler.plan()
        if plan.transfers or plan:
            self._worker.execute(plan)
            if self._is_growing:
                self._rank.activity.note_plan(plan)

    # -- actions on blocks by their keys --------------------------------------------------------

    def lookup(self, keys: Keys) -> Acted:
        """Say where these blocks are, without claiming or moving any."""
        return self._act(self._scheduler.control.lookup, keys)

    def hint(self, keys: Keys, hints: Hints | Mapping[str, Any]) -> Acted:
        """Apply hints to stored blocks: that a conversation is over, or goes on.

        Returns how many blocks were found and affected, and what was refused and why.
        """
        given = _hints(hints)
        if given is None:
            raise InputError("hints must be given; see kvferry.hints.Hints")
        return self._act(self._scheduler.control.hint, keys, given)

    def pin(self, keys: Keys, seconds: float | str | None = None) -> Acted:
        """Keep these blocks for so long, or until they are unpinned, reset or closed.

        At most ``Config.pin_share`` of each tier is pinned, the beginning of a request first.
        """
        return self._act(self._scheduler.control.pin, keys, _seconds(seconds))

    def unpin(self, keys: Keys) -> Acted:
        """Forget pins, TTLs and priorities of these blocks: they may be evicted as all others."""
        return self._act(self._scheduler.control.unpin, keys)

    def prefetch(self, keys: Keys, *, keep: float | str | None = None) -> Acted:
        """Bring these blocks up to host memory ahead of a request, and keep them so long.

        They arrive with :meth:`poll`.
        """
        return self._act(self._scheduler.control.prefetch, keys, _seconds(keep))

    def drop(self, keys: Keys) -> Acted:
        """Forget these blocks on every tier, except those that other requests continue."""
        return self._act(self._scheduler.control.drop, keys)

    @_guarded
    def _act(self, act: Callable[..., Acted], keys: Keys, *given: object) -> Acted:
        if not isinstance(keys, Keys):
            raise _not_keys(keys)
        done = act(keys, *given)
        self._send()  # what is to be prefetched
        return done

    # -- figures --------------------------------------------------------------------------------

    @_guarded
    def stats(self) -> SchedulerStats:
        """Return a snapshot of everything counted so far."""
        return self._scheduler.stats()

    def host_stats(self) -> GrowthStats:
        """Return how much of the host memory is usable by now, and what became of the rest."""
        return self._rank.host.stats()

    @_guarded
    def explain(self, hit: Hit) -> Explanation | None:
        """Return why a hit is no longer than it is; None if that was too long ago."""
        if not isinstance(hit, Hit):
            raise _not_a_hit(hit)
        return self._scheduler.explain(hit.request.id)

    @_guarded
    def serve_metrics(self, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> str:
        """Serve ``/metrics`` and ``/explain`` until closed; return the address.

        Port 0 takes any that is free. :meth:`poll` counts what ended and answers questions. Called
        again, it returns the address where it already serves.
        """
        if self._endpoint is None:
            from kvferry.telemetry.endpoint import ControlApi, Endpoint

            # The parts, not this ferry, or a ferry that is dropped would never be collected.
            rank, namespace, config = self._rank, self.namespace, self._config
            control = None
            if config.control_token is not None:
                control = ControlApi(
                    self._scheduler.control,
                    self._mailbox,
                    config.control_token,
                    keys_of_tokens=lambda tokens, salt: chain(namespace, tokens, salt=salt),
                )
            source = Source(
                self._scheduler.onlooker,
                self._mailbox,
                slot_bytes=dict.fromkeys((HOST, *rank.tiers), rank.host.tier.slot_bytes),
                pinned_bytes=lambda: rank.host.stats().pinned_bytes,
                disks=rank.disks,
            )
            self._endpoint = Endpoint(source, host=host, port=port, control=control)
            self._parts.callback(self._endpoint.close)
        return self._endpoint.url

    @_guarded
    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Tell that the engine computed this many prompt tokens in this time.

        Once told, and after a first load, ``match`` offers a hit only where loading it is expected
        to be faster than computing it (``Config.load_policy``).
        """
        self._scheduler.note_prefill(num_tokens, seconds)

    # -- ends -----------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Give this ferry to another thread: the next one that uses it."""
        self._owner.hand_over()

    def reset(self, *, new_weights: bool = False) -> bool:
        """Forget every stored block at once; hits that are not loaded yet are gone too.

        Say so if the weights are no longer those of ``revision`` (``new_weights``): then blocks
        stored from now on are not for the next process. Returns whether what is on disk stays
        forgotten whatever happens next; it waits up to ``Config.disk_deadline`` seconds for that.
        """
        self._forget(not new_weights)
        end = time.monotonic() + self._config.disk_deadline
        tiers = self._rank.tiers.values()
        return all(tier.wait_forgotten(max(0.0, end - time.monotonic())) for tier in tiers)

    @_guarded
    def _forget(self, is_kept: bool) -> None:
        self._scheduler.reset(is_kept=is_kept)
        for request in self._scheduler.requests:
            self._release(request)
        if self._has_tiers:
            self._send()  # a tier may outlive this process: it must learn of the reset

    def close(self) -> None:
        """Finish the copies in flight and give the memory back. Safe to call twice.

        Blocks that only host memory holds go to disk first, for ``Config.tier_flush`` seconds at
        most; an interrupt ends that. In a forked child it does nothing: all belongs to the parent.
        """
        if self._owner.is_closed or self._owner.is_forked_child:
            return
        self._owner.require()
        try:
            self._flush(self._config.tier_flush)
        finally:
            self._owner.close()
            self._dropped.detach()
            try:
                self._parts.close()
            except Exception:
                if not self._is_torn:
                    raise
                log.exception("a ferry that was interrupted in its midst could not end all of it")

    def _flush(self, seconds: float) -> None:
        """Write blocks that only host memory holds to the disk; an error ends the flush alone."""
        writeback, began = self._scheduler.writeback, time.monotonic()
        end = began + seconds
        try:
            while writeback.can_flush and (now := time.monotonic()) < end:
                self._advance()
                writeback.flush()
                self._send()
                if not writeback.is_flushing:
                    return
                pause(now - began)
        except Exception:
            log.exception("blocks that only host memory holds could not be written to disk")


def _hints(given: HintsGiven) -> Hints | None:
    return given if given is None or isinstance(given, Hints) else Hints.read(given)


def _seconds(given: float | str | None) -> float | None:
    return None if given is None else read_seconds("seconds", given)


def _not_keys(given: object) -> InputError:
    return InputError(f"keys must come from ferry.keys, got {type(given).__name__}")


def _not_a_hit(given: object) -> InputError:
    return InputError(f"a hit must come from ferry.match, got {type(given).__name__}")


def _scheduler_of(
    rank: RankMemory,
    layouts: Sequence[GroupLayout],
    groups: Sequence[Group],
    namespace: Namespace,
    config: Config,
) -> Scheduler:
    """The scheduler over one rank's memory and the tiers below it."""
    return Scheduler(
        Pool(
            rank.host.num_slots,
            policy_named(config.policy),
            num_ready=rank.ready_slots,
        ),
        groups,
        config=config,
        hash_block_tokens=namespace.block_tokens,
        block_bytes=[layout.block_bytes for layout in layouts],
        tiers=[
            lower_tier(
                name,
                tier.num_places,
                WriteMode(config.tier_write),
                policy_named(config.tier_policy),
                recovered=[tier.recovered()],
            )
            for name, tier in rank.tiers.items()
        ],
        joins_loads=False,
        loads_early=True,
    )
