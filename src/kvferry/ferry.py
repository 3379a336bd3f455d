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
"""Hints as callers pass them: an object, a mapping of its fields, or none."""

_request_numbers = itertools.count()
"""Numbers for request names, shared by all ferries of the process so that names are unique."""

_POLL_SECONDS = 0.02
"""Longest sleep of a waiting call between two checks of host memory's growth and the mailbox."""
_TIER_POLL_SECONDS = 5e-4
"""The same with lower tiers, whose completions do not wake the waiting thread."""
_INTERRUPTED = "an interrupt tore this ferry's bookkeeping; close it and attach again"
_GONE = "the hit is gone: it was released, loaded, or too old"
_LONG_BYTES = 32 << 20
"""The event log is drained during copies of at least this many bytes: they take longer."""


def _guarded(
    call: Callable[Concatenate[Ferry, P], T],
) -> Callable[Concatenate[Ferry, P], T]:
    """Make a method refuse calls from other threads, and all calls after an interrupted one.

    An interrupt in a method that changes the bookkeeping may leave half of its changes behind.
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
        """``keep_alive`` owns memory that is copied by address: referenced until no copy runs."""
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
        """Requests with pending hits, and the time at which each ends unless matched again."""
        self._tickets = Tickets(WeakMethod(self._advance))
        self._in_pieces: dict[Request, tuple[Ticket, int]] = {}
        """Pipelined loads by request: the ticket, and how many blocks the device had already."""
        self._mailbox = Mailbox()
        self._mailbox.before_answers = self._scheduler.book.drain
        self._endpoint: Endpoint | None = None
        self._owner = OwnerThread("this ferry")
        self._is_torn = False
        """Whether a guarded call is running, or was interrupted and left its changes half done."""
        self._is_growing = True
        self._parts = ExitStack()  # closes every part, even when closing one of them raises
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
        """Return one key per full block of ``tokens``; each key also covers all tokens before it.

        ``parent`` is the key of the block before these tokens: the chain continues from it. Pass
        everything besides the tokens that changes the KV, or a request loads KV of another one.
        ``extra`` is content that tokens only stand for (a digest of the images), or an adapter of
        the model. ``salt`` names the requests that may share blocks (a tenant). Pass each of them
        once, with the tokens at which it begins; see :func:`kvferry.chain`.
        """
        return chain(self.namespace, tokens, parent, salt=salt, extra=extra)

    @_guarded
    def match(self, keys: Keys, *, on_device: int = 0, hints: HintsGiven = None) -> Hit:
        """Look up a request and pin the blocks that can be loaded now.

        ``on_device`` is how many of the request's first blocks the device already has; the hit
        begins after them. The hit is empty while more than ``Config.max_bytes_in_flight`` are being
        copied, and where computing is expected to be faster than loading (see
        :meth:`note_prefill`). With lower tiers a hit may be pending: see :meth:`await_hit`. A block
        is one key, ``block_tokens`` tokens. ``hints`` are a :class:`Hints`, or a mapping that
        :meth:`Hints.read` accepts; they apply to the loads of this request.
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
        except Exception:  # raised by an eviction policy, say
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
        """Wait for a pending hit and return its result; after ``timeout`` it may still be pending.

        A hit that is not pending is returned unchanged. A hit stays pending no longer than
        ``Config.lookup_deadline`` plus ``Config.promote_deadline``; then it has all of its blocks,
        some, or none. ``timeout=0`` checks once. Tickets that end meanwhile stay for :meth:`poll`.

        With ``early`` the hit is returned before its last blocks are in host memory, if promoting
        them takes less time than copying the whole hit. Queue compute only when the ticket of that
        load has ended. If the ticket is not ``ok``, the first ``num_blocks`` blocks were loaded.
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
        """Start loading a hit into ``device_blocks``, one device block per block of the hit.

        With several groups pass one whole block table per group; the load fills the positions in
        ``hit.needed``. Compute queued on the ``compute`` stream after this call runs after the
        load, even while the load is still being queued. If the load fails, that compute has read
        the old bytes of the device blocks.

        A pending hit takes no device blocks and is released.
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
        """Store ``device_blocks``, which hold the blocks of ``keys`` from block ``first`` on.

        Blocks that are already stored are not copied again. Blocks for which no slot is free are
        skipped, and so are the blocks behind a skipped one: a lookup could never reach them. The
        ticket says how many blocks were copied, and why not all. Do not overwrite the device blocks
        until the ticket has ended. With several groups pass one whole block table per group, with
        ``NO_BLOCK`` where the engine keeps no block. ``hints`` are as for :meth:`match`; they say
        how long all blocks of this request should stay.
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
            self._note_ready()  # slots that became ready since the last poll can take blocks
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
            # The caller may now overwrite these device blocks: no lookup may find a copy of them.
            self._scheduler.disown(request)
            request.end()
            raise
        request.end()
        return ticket

    def _skip_reason(self, request: Request, keys: Keys, first: int, num_ordered: int) -> str:
        """Return why only ``num_ordered`` of the blocks from ``first`` on are copied.

        Empty if the others are already stored; not empty if all of them are.
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
        """Return the tickets that ended since the last call; wait ``timeout`` seconds for one.

        Tickets that were waited for or awaited meanwhile are left out. Only the newest 65,536 ended
        tickets are kept.
        """
        return self._wait_for(self._tickets.take_all, timeout) or []

    def wait(self, ticket: Ticket, timeout: float | None = None) -> Ticket:
        """Wait for one ticket; DeadlineError after ``timeout``. Others stay for :meth:`poll`.

        In an event loop ``await`` the ticket instead: the loop goes on running.
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
        """Call ``find`` whenever a copy ends, until its result is true; None after ``timeout``."""
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
        """Take receipts, end tickets and requests, and run the calls in the mailbox."""
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
        # The copy of an overdue load may still write: its ticket ends when all ranks have reported.
        if settled.landed:
            self._tickets.complete(settled.landed)
        if self._has_tiers:  # completed transfers may cause writebacks, lookups and promotions
            now = time.monotonic()
            for request in [each for each, until in self._pending.items() if until <= now]:
                del self._pending[request]
                request.end()
            if settled.landed or scheduler.num_queued:
                self._send()
        if not settled.landed:  # draining costs no time while copies run
            num_bytes = scheduler.transfers.num_bytes
            if not num_bytes or num_bytes >= _LONG_BYTES:
                scheduler.drain_events()

    def _note_ready(self) -> None:
        """Let the scheduler use the host slots that became ready since the last call."""
        num_ready = self._rank.ready_slots
        self._scheduler.note_ready(FIRST_RANK, num_ready)
        self._is_growing = num_ready < self._rank.host.num_slots

    def _send(self) -> None:
        """Hand the queued orders to the worker, as one plan."""
        plan = self._scheduler.plan()
        if plan.transfers or plan:
            self._worker.execute(plan)
            if self._is_growing:
                self._rank.activity.note_plan(plan)

    # -- actions on blocks by their keys --------------------------------------------------------

    def lookup(self, keys: Keys) -> Acted:
        """Count these blocks in host memory and on lower tiers, without pinning or moving any."""
        return self._act(self._scheduler.control.lookup, keys)

    def hint(self, keys: Keys, hints: Hints | Mapping[str, Any]) -> Acted:
        """Apply hints to stored blocks, for example that their conversation has ended.

        Returns how many blocks were found and changed, and what was refused and why.
        """
        given = _hints(hints)
        if given is None:
            raise InputError("hints must be given; see kvferry.hints.Hints")
        return self._act(self._scheduler.control.hint, keys, given)

    def pin(self, keys: Keys, seconds: float | str | None = None) -> Acted:
        """Pin these blocks for ``seconds``, or (None) until :meth:`unpin`, reset or close.

        At most ``Config.pin_share`` of each tier is pinned, the first blocks of a request first.
        """
        return self._act(self._scheduler.control.pin, keys, _seconds(seconds))

    def unpin(self, keys: Keys) -> Acted:
        """Remove pins, TTLs and priorities of these blocks, so that they can be evicted again."""
        return self._act(self._scheduler.control.unpin, keys)

    def prefetch(self, keys: Keys, *, keep: float | str | None = None) -> Acted:
        """Promote these blocks to host memory ahead of a request, and pin them for ``keep``.

        Call :meth:`poll` meanwhile: it orders the next pieces and takes their receipts.
        """
        return self._act(self._scheduler.control.prefetch, keys, _seconds(keep))

    def drop(self, keys: Keys) -> Acted:
        """Remove these blocks from every tier, except blocks shared with other requests."""
        return self._act(self._scheduler.control.drop, keys)

    @_guarded
    def _act(self, act: Callable[..., Acted], keys: Keys, *given: object) -> Acted:
        if not isinstance(keys, Keys):
            raise _not_keys(keys)
        done = act(keys, *given)
        self._send()  # the promotions of a prefetch
        return done

    # -- figures --------------------------------------------------------------------------------

    @_guarded
    def stats(self) -> SchedulerStats:
        """Return a snapshot of everything counted so far."""
        return self._scheduler.stats()

    def host_stats(self) -> GrowthStats:
        """Return how much host memory is ready, and why the rest is not."""
        return self._rank.host.stats()

    @_guarded
    def explain(self, hit: Hit) -> Explanation | None:
        """Return why a hit is not longer; None if the request is too old to be remembered."""
        if not isinstance(hit, Hit):
            raise _not_a_hit(hit)
        return self._scheduler.explain(hit.request.id)

    @_guarded
    def serve_metrics(self, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> str:
        """Serve ``/metrics`` and ``/explain`` over HTTP until closed; return the address.

        Port 0 picks a free port. Call :meth:`poll` regularly: it updates the counters and answers
        the HTTP requests. A second call returns the address of the first.
        """
        if self._endpoint is None:
            from kvferry.telemetry.endpoint import ControlApi, Endpoint

            # Pass the parts, not this ferry: a reference to it would keep it from being collected.
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
        """Report that the engine computed ``num_tokens`` prompt tokens in ``seconds``.

        After the first report and the first load, ``match`` returns a hit only where loading is
        expected to be faster than computing (``Config.load_policy``).
        """
        self._scheduler.note_prefill(num_tokens, seconds)

    # -- ends -----------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Let the next thread that uses this ferry own it."""
        self._owner.hand_over()

    def reset(self, *, new_weights: bool = False) -> bool:
        """Forget every stored block at once, and release hits that are not loaded yet.

        Pass ``new_weights`` if the weights are no longer those of ``revision``: the next process
        then does not find blocks stored from now on. Waits up to ``Config.disk_deadline`` seconds
        for the disk; returns whether the reset is durable there.
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
            self._send()  # the reset must reach tiers whose blocks outlive this process

    def close(self) -> None:
        """Finish the copies in flight and free the memory. Safe to call twice.

        First flushes blocks that only host memory holds, for at most ``Config.tier_flush`` seconds;
        an interrupt ends the flush. Does nothing in a forked child: the parent owns everything.
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
        """Flush blocks that only host memory holds to disk; log errors instead of raising them."""
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
    """Return the scheduler of one rank's host memory and lower tiers."""
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
