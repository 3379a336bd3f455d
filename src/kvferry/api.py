"""The library: both halves in one process, for an engine that calls us directly.

::

    with kvferry.attach(kv, model="my-model", block_tokens=16, host="1GiB") as ferry:
        keys = ferry.keys(tokens)               # one key per full block, from the first token on
        hit = ferry.match(keys)                 # pinned: these blocks stay until loaded or released
        ferry.load(hit, blocks[: len(hit)])     # asynchronous; poll() or wait() says when
        ...compute the rest...
        ferry.store(keys, blocks)               # asynchronous too; stores only what is new
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.answers import MatchState, Settled
from kvferry.attached import AttachedTensors
from kvferry.closing import Closing, close_if_dropped
from kvferry.config import Config
from kvferry.device.layout import GroupLayout
from kvferry.device.stream import Stream
from kvferry.errors import ClosedError, ConfigError, DeadlineError, InputError
from kvferry.identity import Described, Extra, Namespace, chain
from kvferry.integers import Integers, integer, integers
from kvferry.keys import Keys
from kvferry.keywords import names_misspelt
from kvferry.left_out import why_left_out
from kvferry.metrics import DEFAULT_PORT
from kvferry.metrics.desk import Desk
from kvferry.metrics.source import Source
from kvferry.ownership import OneThread
from kvferry.pool import Pool
from kvferry.rank import RankMemory, open_on_cpu, open_on_gpu
from kvferry.reach import FullAttention
from kvferry.scheduler import NO_BLOCK, Scheduler
from kvferry.scheduler.journal import Copy
from kvferry.scheduler.why import Explanation
from kvferry.stats import SchedulerStats
from kvferry.tickets import Done, Ticket, Tickets
from kvferry.tiers import GrowthStats
from kvferry.types import DEVICE, FIRST_RANK, HOST, Key, RequestId, SlotArray
from kvferry.worker import Worker

if TYPE_CHECKING:
    from kvferry.metrics.endpoint import Endpoint

_POLL_SECONDS = 0.0005

_names = itertools.count()
"""For all ferries of the process: a hit of one must not name a hit of another."""


@dataclass(frozen=True, eq=False)
class Hit:
    """Blocks that can be loaded: ``len(hit)`` of them, after the ``on_device`` first ones.

    They stay where they are until the hit is loaded, released, or left alone for
    ``Config.match_deadline`` seconds.
    """

    request_id: RequestId
    num_blocks: int
    on_device: int

    def __len__(self) -> int:
        return self.num_blocks


@names_misspelt(settings=[field.name for field in fields(Config)])
def attach(
    kv: Mapping[str, Any] | Sequence[Any],
    *,
    model: str,
    block_axis: int = 0,
    revision: str = "",
    overrides: Described = "",
    salt: str = "",
    compute: Stream | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Ferry:
    """Attach to an engine's paged KV tensors (one or more per layer, in layer order).

    ``block_axis`` counts the blocks in every tensor; the tensors are numpy arrays or torch tensors
    that can be written, all on one device. ``model``, ``revision``, ``overrides`` and ``salt``
    become part of every key: blocks of another model, revision, rope setting or tenant never match
    (what differs from request to request goes to :meth:`Ferry.keys`). ``settings`` are those of
    :class:`Config`, e.g. ``host="8GiB"``; what is not given comes from the environment, a
    configuration file, or the defaults (see :meth:`Config.load`).
    """
    config = _checked_config(config, settings)
    if compute is not None and not isinstance(compute, Stream):
        raise InputError(f"compute must be a kvferry Stream, got {type(compute).__name__}")
    logging.getLogger("kvferry").setLevel(config.log_level.upper())
    attached = AttachedTensors.of(kv, block_axis)
    layout = attached.layout
    namespace = Namespace(
        model=model,
        revision=revision,
        dtype=attached.dtype,
        layout=layout.format,
        geometry={"block_bytes": layout.block_bytes, "segments": layout.sizes.tolist()},
        block_tokens=config.block_tokens,
        overrides=overrides,
        salt=salt,
    )
    rank = _open_rank(attached, config, compute)
    return Ferry(layout, namespace, config, rank, keep_alive=attached)


def _checked_config(config: Config | None, settings: Mapping[str, Any]) -> Config:
    if config is not None and settings:
        raise ConfigError("give either a config or single settings, not both")
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config must be a kvferry.Config, got {type(config).__name__}")
    config = config if config is not None else Config.load(overrides=settings)
    if config.store_mode == "lazy":
        raise ConfigError(
            "store_mode: lazy needs an engine that offers its blocks before it drops them; with "
            "attach you store what you want kept, so use eager"
        )
    return config


def _open_rank(attached: AttachedTensors, config: Config, compute: Stream | None) -> RankMemory:
    layouts = (attached.layout,)
    if attached.gpu is None:
        return open_on_cpu(layouts, config, compute=compute)
    if compute is not None:
        raise InputError("compute is for tensors in ordinary memory; on a GPU it is torch's stream")
    return open_on_gpu(layouts, config, device=attached.gpu)


class Ferry(Closing):
    """Blocks of one engine, kept in host memory. Owns both halves and the memory; ends in close.

    It belongs to the first thread that uses it, until that thread ends or calls :meth:`hand_over`;
    another one, or a forked child, is refused (:meth:`keys` and :meth:`host_stats` are for all).
    Nothing here waits, except :meth:`wait` and :meth:`close`. One that is dropped without ``close``
    is closed in the background, with a ResourceWarning.
    """

    def __init__(
        self,
        layout: GroupLayout,
        namespace: Namespace,
        config: Config,
        rank: RankMemory,
        *,
        keep_alive: object = None,
    ) -> None:
        """``keep_alive`` is memory that is copied by address: held until no copy runs."""
        self.namespace = namespace
        self._layout = layout
        self._config = config
        self._keep_alive = keep_alive
        self._rank = rank
        self._worker = Worker({(DEVICE, HOST): rank.engine, (HOST, DEVICE): rank.engine})
        group = FullAttention(config.block_tokens)
        pool = Pool(rank.host.num_slots, num_ready=rank.ready_slots)
        self._scheduler = Scheduler(
            pool,
            (group,),
            config=config,
            block_bytes=(layout.block_bytes,),
            joins_loads=False,
        )
        self._tickets = Tickets()
        self._pinned: set[RequestId] = set()  # hits that were not loaded or let go yet
        self._loading: set[RequestId] = set()
        self._desk = Desk()
        self._endpoint: Endpoint | None = None
        self._owner = OneThread("this ferry")
        self._closed = False
        self._parts = ExitStack()  # closed in turn, each though one before it raises
        for part in (rank, self._scheduler, self._worker):
            self._parts.callback(part.close)
        self._dropped = close_if_dropped(
            self, "a kvferry.Ferry", self._parts.close, keep_alive=keep_alive
        )
        if config.metrics_port is not None:
            with ExitStack() as undo:
                undo.callback(self.close)
                self.serve_metrics(config.metrics_port, config.metrics_host)
                self.hand_over()  # whoever attached need not be who uses it
                undo.pop_all()

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

    def match(self, keys: Keys, *, on_device: int = 0) -> Hit:
        """How many of a request's blocks, after the ``on_device`` first ones, can be loaded now.

        None while more than ``Config.max_bytes_in_flight`` are on their way already, or where
        computing them is expected to be faster (see :meth:`note_prefill`).
        """
        self._require_usable()
        _require_keys(keys)
        on_device = integer(on_device, "on_device")
        if not 0 <= on_device <= len(keys):
            raise InputError(f"{on_device} blocks on the device do not fit {len(keys)} keys")
        request_id = f"hit-{next(_names)}"
        tokens = self.namespace.block_tokens
        match = self._scheduler.match(request_id, keys, computed_tokens=on_device * tokens)
        if match.state is MatchState.HIT:
            self._pinned.add(request_id)
        else:
            self._scheduler.finish(request_id)
        return Hit(request_id, match.to_load // tokens, on_device)

    def load(self, hit: Hit, device_blocks: Integers) -> Ticket:
        """Bring a hit's blocks to ``device_blocks``, one for each.

        Compute queued on the ``compute`` stream after this call comes after the load.
        """
        self._require_usable()
        _require_hit(hit)
        blocks = self._checked_blocks(device_blocks)
        if len(blocks) != len(hit):
            raise InputError(
                f"a hit of {len(hit)} blocks needs as many device blocks, got {len(blocks)}"
            )
        if len(np.unique(blocks)) != len(blocks):
            raise InputError("two blocks of a hit cannot be loaded into one device block")
        self._rank.note_step()
        ticket = self._tickets.give()
        table = np.concatenate((np.full(hit.on_device, NO_BLOCK), blocks))
        if hit.request_id in self._pinned and self._scheduler.load(hit.request_id, (table,)):
            self._pinned.discard(hit.request_id)
            self._loading.add(hit.request_id)
            self._send(ticket)
            self._rank.engine.order_compute_after_loads()
        elif len(hit):
            self.release(hit)
            reason = "the hit is gone: it was released, loaded, or too old"
            self._tickets.end(Done(ticket, 0, reason, ok=False))
        else:
            self._tickets.end(Done(ticket, 0))
        return ticket

    def release(self, hit: Hit) -> None:
        """Let a hit go that will not be loaded."""
        self._require_usable()
        _require_hit(hit)
        if hit.request_id in self._pinned:
            self._pinned.discard(hit.request_id)
            self._scheduler.finish(hit.request_id)

    def store(self, keys: Keys, device_blocks: Integers, *, first: int = 0) -> Ticket:
        """Keep ``device_blocks``, which hold the blocks of ``keys`` from number ``first`` on.

        What is kept already is not copied again, and what finds no room is left out; ``Done`` says
        how many blocks were copied, and why not all. Blocks that follow one that is not kept could
        never be found, so they are left out too. Do not overwrite the device blocks until it ended.
        """
        self._require_usable()
        _require_keys(keys)
        first, blocks = integer(first, "first"), self._checked_blocks(device_blocks)
        if first < 0 or len(keys) != first + len(blocks):
            raise InputError(
                f"{len(blocks)} device blocks from block {first} on do not fit "
                f"{len(keys)} keys; there must be one key per block, from the first block on"
            )
        self._rank.note_step()
        ticket = self._tickets.give()
        request_id = f"store-{next(_names)}"
        table = np.concatenate((np.full(first, NO_BLOCK), blocks))
        try:
            num_tokens = len(keys) * self.namespace.block_tokens
            ordered = self._scheduler.store(request_id, keys, (table,), num_tokens)
        finally:
            self._scheduler.finish(request_id)
        why = why_left_out(
            self._scheduler,
            self._config,
            keys,
            first=first,
            num_ordered=sum(len(part.blocks) for part in ordered),
            block_bytes=self._layout.block_bytes,
        )
        self._send(ticket, why)
        return ticket

    def _send(self, ticket: Ticket, note: str = "") -> None:
        """Send off what was just ordered for a ticket."""
        plan = self._scheduler.plan()
        self._tickets.send(ticket, {move.id: len(move) for move in plan.transfers}, note)
        self._worker.execute(plan)

    def poll(self) -> list[Done]:
        """What ended since the last call; never blocks.

        What nobody asks for is kept, up to the newest 65,536 ends.
        """
        self._advance()
        return self._tickets.take_all()

    def wait(self, ticket: Ticket, timeout: float | None = None) -> Done:
        """Wait for one ticket; what else ends meanwhile stays for :meth:`poll`."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._advance()
            if (done := self._tickets.take(ticket)) is not None:
                return done
            if end is not None and time.monotonic() >= end:
                raise DeadlineError(f"ticket {ticket} did not end within {timeout} seconds")
            time.sleep(_POLL_SECONDS)

    def _advance(self) -> None:
        """Learn what ended, and answer who asks from other threads."""
        self._require_usable()
        self._scheduler.note_ready(FIRST_RANK, self._rank.ready_slots)
        self._desk.answer()
        self._take(self._scheduler.settle(self._worker.poll()))

    def hand_over(self) -> None:
        """Let another thread have this ferry: the next one that uses it."""
        self._owner.hand_over()

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine computed this many prompt tokens in this time.

        Once told, and once it has seen a load, ``match`` offers a hit only where loading it is
        expected to be faster than computing it (``Config.load_policy``).
        """
        self._require_usable()
        self._scheduler.note_prefill(num_tokens, seconds)

    def reset(self) -> None:
        """Forget every block kept, at once; hits not loaded yet are gone too."""
        self._require_usable()
        self._scheduler.reset()
        for request_id in self._pinned:
            self._scheduler.finish(request_id)
        self._pinned.clear()

    def stats(self) -> SchedulerStats:
        """A snapshot of everything counted so far."""
        self._owner.require()
        return self._scheduler.stats()

    def host_stats(self) -> GrowthStats:
        """How much of the host memory is usable by now, and what became of the rest."""
        return self._rank.host.stats()

    def explain(self, hit: Hit) -> Explanation | None:
        """Why a hit is no longer than it is; None if that was too long ago."""
        self._owner.require()
        return self._scheduler.explain(hit.request_id)

    def serve_metrics(self, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> str:
        """Serve ``/metrics`` and ``/explain`` until closed; returns the address.

        Port 0 takes any that is free. What others ask is answered in :meth:`poll`. Called again, it
        says where it already serves.
        """
        self._require_usable()
        if self._endpoint is None:
            # Imported here: few need a server, and its modules would triple our own import.
            from kvferry.metrics.endpoint import Endpoint

            # The server's threads hold the source: it must hold neither us, or we are never
            # dropped, nor the memory, which should be gone when we are.
            rank = weakref.ref(self._rank)
            source = Source(
                self._scheduler,
                self._desk,
                slot_bytes={HOST: self._layout.block_bytes},
                pinned_bytes=partial(_pinned_bytes, rank),
                why_path=partial(_why_path, rank),
            )
            self._endpoint = Endpoint(source, host=host, port=port)
            self._parts.callback(self._endpoint.close)
        return self._endpoint.url

    def close(self) -> None:
        """Finish the copies in flight and give the memory back. Safe to call twice.

        In a forked child it does nothing: all of it is the parent's.
        """
        if self._closed or self._owner.is_forked:
            return
        self._owner.require()
        self._closed = True
        self._dropped.detach()
        self._parts.close()

    def _take(self, settled: Settled) -> None:
        failed = (load.request_id for load in settled.failed)
        for request_id in (*settled.loaded, *failed, *settled.expired):
            self._pinned.discard(request_id)
            self._loading.discard(request_id)
            self._scheduler.finish(request_id)
        # A load that is overdue has failed, but its copy may still write: only landing ends it.
        for landing in settled.landed:
            self._tickets.land(landing.transfer_id, landing.reason)

    def _checked_blocks(self, device_blocks: Integers) -> SlotArray:
        blocks = integers(device_blocks, "device blocks")
        wrong = blocks[(blocks < 0) | (blocks >= self._layout.num_blocks)]
        if len(wrong):
            raise InputError(
                f"device block {int(wrong[0])} does not exist: the tensors have blocks "
                f"0 to {self._layout.num_blocks - 1}"
            )
        return blocks

    def _require_usable(self) -> None:
        if self._closed:
            raise ClosedError("this ferry is closed")
        self._owner.require()


def _pinned_bytes(rank: weakref.ref[RankMemory]) -> int | None:
    found = rank()
    return found.host.stats().pinned_bytes if found is not None else None


def _why_path(rank: weakref.ref[RankMemory], copy: Copy) -> str:
    from kvferry.metrics.reasons import why_path  # here: few ask, and it brings the planner

    found = rank()
    return why_path(copy, getattr(found.engine, "choices", None) if found is not None else None)


def _require_keys(keys: object) -> None:
    if not isinstance(keys, Keys):
        raise InputError(f"keys must come from ferry.keys, got {type(keys).__name__}")


def _require_hit(hit: object) -> None:
    if not isinstance(hit, Hit):
        raise InputError(f"a hit must come from ferry.match, got {type(hit).__name__}")
