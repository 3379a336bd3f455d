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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NewType

import numpy as np
import numpy.typing as npt

from kvferry.answers import MatchState
from kvferry.closing import Closing
from kvferry.config import Config
from kvferry.device.engine.stream import Stream
from kvferry.device.layout import GroupLayout, describe
from kvferry.errors import ClosedError, ConfigError, DeadlineError, InputError
from kvferry.identity import Described, Namespace, chain
from kvferry.keys import Keys
from kvferry.metrics import DEFAULT_PORT
from kvferry.metrics.desk import Desk
from kvferry.metrics.source import Source
from kvferry.pool import Pool
from kvferry.rank import RankMemory, open_on_cpu, open_on_gpu
from kvferry.reach import FullAttention
from kvferry.scheduler import NO_BLOCK, Ordered, Request, Scheduler, Settled, State
from kvferry.scheduler.journal import Copy
from kvferry.scheduler.why import Explanation
from kvferry.stats import SchedulerStats
from kvferry.tiers import GrowthStats
from kvferry.types import DEVICE, FIRST_RANK, HOST, Key, TransferId
from kvferry.worker import Worker

if TYPE_CHECKING:
    from kvferry.metrics.endpoint import Endpoint

Ticket = NewType("Ticket", int)
Blocks = Sequence[int] | npt.NDArray[np.integer]

_POLL_SECONDS = 0.0005


@dataclass(frozen=True, eq=False)
class Hit:
    """Blocks that can be loaded: ``len(hit)`` of them, after the ``on_device`` first ones.

    They stay where they are until the hit is loaded, released, or left alone for
    ``Config.match_deadline`` seconds.
    """

    request: Request
    num_blocks: int
    on_device: int

    def __len__(self) -> int:
        return self.num_blocks


@dataclass(frozen=True)
class Done:
    """A load or store that ended: nothing touches its device blocks any more.

    A failed load means: compute those blocks.
    """

    ticket: Ticket
    num_blocks: int
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason


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

    ``block_axis`` counts the blocks in every tensor. ``model``, ``revision``, ``overrides`` and
    ``salt`` become part of every key: blocks of another model, revision, rope setting or tenant
    never match. ``settings`` are those of :class:`Config`, e.g. ``host="8GiB"``; what is not given
    comes from the environment, a configuration file, or the defaults (see :meth:`Config.load`).
    """
    if config is not None and settings:
        raise ConfigError("give either a config or single settings, not both")
    config = config if config is not None else Config.load(overrides=settings)
    if config.store_mode == "lazy":
        raise ConfigError(
            "store_mode: lazy needs an engine that offers its blocks before it drops them; with "
            "attach you store what you want kept, so use eager"
        )
    logging.getLogger("kvferry").setLevel(config.log_level.upper())
    layout = describe(kv, block_axis=block_axis)
    tensors = list(kv.values()) if isinstance(kv, Mapping) else list(kv)
    namespace = Namespace(
        model=model,
        revision=revision,
        dtype=str(tensors[0].dtype),
        layout=layout.format,
        geometry={"block_bytes": layout.block_bytes, "segments": layout.sizes.tolist()},
        block_tokens=config.block_tokens,
        overrides=overrides,
        salt=salt,
    )
    rank = _open_rank(layout, config, tensors[0], compute)
    return Ferry(layout, namespace, config, rank, keep_alive=tensors)


def _open_rank(
    layout: GroupLayout, config: Config, tensor: Any, compute: Stream | None
) -> RankMemory:
    if not getattr(tensor, "is_cuda", False):
        return open_on_cpu((layout,), config, compute=compute)
    if compute is not None:
        raise InputError("compute is for tensors in ordinary memory; on a GPU it is torch's stream")
    return open_on_gpu((layout,), config, device=tensor.device.index or 0)


class Ferry(Closing):
    """Blocks of one engine, kept in host memory. Owns both halves and the memory; ends in close.

    Call it from one thread. Nothing here waits, except :meth:`wait` and :meth:`close`.
    """

    def __init__(
        self,
        layout: GroupLayout,
        namespace: Namespace,
        config: Config,
        rank: RankMemory,
        *,
        keep_alive: Sequence[Any] = (),
    ) -> None:
        self.namespace = namespace
        self._layout = layout
        self._keep_alive = tuple(keep_alive)  # the engine copies by address
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
        self._names = itertools.count()
        self._tickets = itertools.count()
        self._moving: dict[TransferId, tuple[Ticket, int]] = {}
        self._done: list[Done] = []
        self._desk = Desk()
        self._endpoint: Endpoint | None = None
        self._closed = False
        if config.metrics_port is not None:
            with ExitStack() as undo:
                undo.callback(self.close)
                self.serve_metrics(config.metrics_port, config.metrics_host)
                undo.pop_all()

    def keys(
        self, tokens: Sequence[int] | npt.NDArray[np.integer], *, parent: Key | None = None
    ) -> Keys:
        """One key per full block of ``tokens``; each covers every token before it too.

        With ``parent``, the key before these tokens, the chain goes on from there.
        """
        return chain(self.namespace, tokens, parent)

    def match(self, keys: Keys, *, on_device: int = 0) -> Hit:
        """How many of a request's blocks, after the ``on_device`` first ones, can be loaded now.

        None while more than ``Config.max_bytes_in_flight`` are on their way already, or where
        computing them is expected to be faster (see :meth:`note_prefill`).
        """
        self._require_open()
        if not 0 <= on_device <= len(keys):
            raise InputError(f"{on_device} blocks on the device do not fit {len(keys)} keys")
        request = self._scheduler.open(f"hit-{next(self._names)}", keys)
        tokens = self.namespace.block_tokens
        match = request.match(computed_tokens=on_device * tokens)
        if match.state is not MatchState.HIT:
            request.end()
        return Hit(request, match.to_load // tokens, on_device)

    def load(self, hit: Hit, device_blocks: Blocks) -> Ticket:
        """Bring a hit's blocks to ``device_blocks``, one for each.

        Compute queued on the ``compute`` stream after this call comes after the load.
        """
        self._require_open()
        if len(device_blocks) != len(hit):
            raise InputError(
                f"a hit of {len(hit)} blocks needs as many device blocks, got {len(device_blocks)}"
            )
        self._require_blocks(device_blocks)
        if len(np.unique(device_blocks)) != len(device_blocks):
            raise InputError("two blocks of a hit cannot be loaded into one device block")
        self._rank.note_step()
        ticket = Ticket(next(self._tickets))
        table = np.concatenate((np.full(hit.on_device, NO_BLOCK), np.asarray(device_blocks)))
        ordered = hit.request.load((table,)) if len(hit) else ()
        if ordered:
            self._send(ticket, ordered)
            self._rank.engine.order_compute_after_loads()
        else:
            lost = "the hit is gone: it was released, loaded, or too old" if len(hit) else ""
            self.release(hit)
            self._done.append(Done(ticket, 0, lost))
        return ticket

    def release(self, hit: Hit) -> None:
        """Let a hit go that will not be loaded."""
        self._require_open()
        if hit.request.state is not State.LOADING:
            hit.request.end()

    def store(self, keys: Keys, device_blocks: Blocks, *, first: int = 0) -> Ticket:
        """Keep ``device_blocks``, which hold the blocks of ``keys`` from number ``first`` on.

        What is kept already is not copied again, and what finds no room is left out; ``Done`` says
        how many blocks were copied. Do not overwrite the device blocks until then.
        """
        self._require_open()
        if first < 0 or len(keys) != first + len(device_blocks):
            raise InputError(
                f"{len(device_blocks)} device blocks from block {first} on do not fit "
                f"{len(keys)} keys; there must be one key per block, from the first block on"
            )
        self._require_blocks(device_blocks)
        self._rank.note_step()
        ticket = Ticket(next(self._tickets))
        table = np.concatenate((np.full(first, NO_BLOCK), np.asarray(device_blocks, dtype=int)))
        request = self._scheduler.open(f"store-{next(self._names)}", keys)
        try:
            ordered = request.store((table,), len(keys) * self.namespace.block_tokens)
        finally:
            request.end()
        self._send(ticket, ordered)
        if not ordered:
            self._done.append(Done(ticket, 0))
        return ticket

    def _send(self, ticket: Ticket, ordered: Sequence[Ordered]) -> None:
        """Send off what was just ordered for a ticket."""
        for part in ordered:
            self._moving[part.transfer] = (ticket, len(part.blocks))
        plan = self._scheduler.plan()
        if plan.transfers:
            self._worker.execute(plan)

    def poll(self) -> list[Done]:
        """What ended since the last call; never blocks."""
        self._require_open()
        self._scheduler.note_ready(FIRST_RANK, self._rank.ready_slots)
        self._desk.answer()
        self._take(self._scheduler.settle(self._worker.poll()))
        done, self._done = self._done, []
        return done

    def wait(self, ticket: Ticket, timeout: float | None = None) -> Done:
        """Wait for one ticket; what else ends meanwhile stays for :meth:`poll`."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            waiting = self.poll()
            self._done = [done for done in waiting if done.ticket != ticket]
            if len(self._done) < len(waiting):
                return next(done for done in waiting if done.ticket == ticket)
            if not self._is_open(ticket):
                raise InputError(
                    f"ticket {ticket} is not in flight: it was never given out, "
                    "or its end was already told"
                )
            if end is not None and time.monotonic() >= end:
                raise DeadlineError(f"ticket {ticket} did not end within {timeout} seconds")
            time.sleep(_POLL_SECONDS)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine computed this many prompt tokens in this time.

        Once told, and once it has seen a load, ``match`` offers a hit only where loading it is
        expected to be faster than computing it (``Config.load_policy``).
        """
        self._scheduler.note_prefill(num_tokens, seconds)

    def reset(self) -> None:
        """Forget every block kept, at once."""
        self._require_open()
        self._scheduler.reset()

    def stats(self) -> SchedulerStats:
        """A snapshot of everything counted so far."""
        return self._scheduler.stats()

    def host_stats(self) -> GrowthStats:
        """How much of the host memory is usable by now, and what became of the rest."""
        return self._rank.host.stats()

    def explain(self, hit: Hit) -> Explanation | None:
        """Why a hit is no longer than it is; None if that was too long ago."""
        return self._scheduler.explain(hit.request.id)

    def serve_metrics(self, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> str:
        """Serve ``/metrics`` and ``/explain`` until closed; returns the address.

        Port 0 takes any that is free. What others ask is answered in :meth:`poll`. Called again, it
        says where it already serves.
        """
        self._require_open()
        if self._endpoint is None:
            # Imported here: few need a server, and its modules would triple our own import.
            from kvferry.metrics.endpoint import Endpoint

            source = Source(
                self._scheduler,
                self._desk,
                slot_bytes={HOST: self._layout.block_bytes},
                pinned_bytes=lambda: self._rank.host.stats().pinned_bytes,
                why_path=self._why_path,
            )
            self._endpoint = Endpoint(source, host=host, port=port)
        return self._endpoint.url

    def close(self) -> None:
        """Finish the copies in flight and give the memory back. Safe to call twice."""
        if not self._closed:
            self._closed = True
            with ExitStack() as rest:  # each of them, though one before it raises
                rest.callback(self._rank.close)
                rest.callback(self._scheduler.close)
                rest.callback(self._worker.close)
                if self._endpoint is not None:
                    rest.callback(self._endpoint.close)

    def _why_path(self, copy: Copy) -> str:
        from kvferry.metrics.reasons import why_path  # here: few ask, and it brings the planner

        return why_path(copy, getattr(self._rank.engine, "choices", None))

    def _take(self, settled: Settled) -> None:
        for request in (*settled.loaded, *settled.expired):
            request.end()
        for failure in settled.failed:
            failure.request.end()
        # A load that is overdue has failed, but its copy may still write: only landing ends it.
        for landing in settled.landed:
            ticket, count = self._moving.pop(landing.transfer_id)
            self._done.append(Done(ticket, count if landing.ok else 0, landing.reason))

    def _is_open(self, ticket: Ticket) -> bool:
        return any(ticket == known for known, _ in self._moving.values())

    def _require_blocks(self, blocks: Blocks) -> None:
        array = np.asarray(blocks)
        wrong = array[(array < 0) | (array >= self._layout.num_blocks)]
        if len(wrong):
            raise InputError(
                f"device block {int(wrong[0])} does not exist: the tensors have blocks "
                f"0 to {self._layout.num_blocks - 1}"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this ferry is closed")
