"""What a ferry serves over HTTP: its figures, and why a hit is no longer than it is."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from kvferry.config import Config
from kvferry.core.identity import Namespace, chain
from kvferry.core.keys import Keys
from kvferry.core.lifecycle import OneThread
from kvferry.hostmem.growth import GrowthStats
from kvferry.rank import RankMemory
from kvferry.scheduler.journal import Copy, Explanation
from kvferry.scheduler.scheduler import Scheduler
from kvferry.telemetry import DEFAULT_PORT
from kvferry.telemetry.mailbox import Inbox
from kvferry.telemetry.source import Source
from kvferry.telemetry.stats import SchedulerStats
from kvferry.tickets import Hit
from kvferry.types import HOST

if TYPE_CHECKING:
    from kvferry.telemetry.endpoint import Endpoint
    from kvferry.tiers.disk.status import DiskFigures


class FerryLooks:
    """What can be seen of a ferry. Owns nothing: the ferry does."""

    _owner: OneThread
    _scheduler: Scheduler
    _rank: RankMemory
    _inbox: Inbox
    _parts: ExitStack
    _config: Config
    _endpoint: Endpoint | None
    namespace: Namespace

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
        return self._scheduler.explain(hit.request.id)

    def serve_metrics(self, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> str:
        """Serve ``/metrics`` and ``/explain`` until closed; returns the address.

        Port 0 takes any that is free. What others ask is answered in :meth:`poll`. Called again, it
        says where it already serves.
        """
        self._owner.require()
        if self._endpoint is None:
            # Their parts, not us, or we are never dropped.
            self._endpoint = open_endpoint(
                self._scheduler,
                self._inbox,
                self._rank,
                self._config,
                self.namespace,
                host=host,
                port=port,
            )
            self._parts.callback(self._endpoint.close)
        return self._endpoint.url


def open_endpoint(
    scheduler: Scheduler,
    inbox: Inbox,
    rank: RankMemory,
    config: Config,
    namespace: Namespace,
    *,
    host: str,
    port: int,
) -> Endpoint:
    """The server's threads hold what they ask: not the memory, which should go with its ferry."""
    # Imported here: few need a server, and its modules would triple our own import.
    from kvferry.telemetry.endpoint import ControlDoor, Endpoint

    memory = weakref.ref(rank)
    source = Source(
        scheduler.onlooker,
        inbox,
        slot_bytes=dict.fromkeys((HOST, *rank.tiers), rank.host.tier.slot_bytes),
        pinned_bytes=partial(_pinned_bytes, memory),
        why_path=partial(_why_path, memory),
        disks=partial(_disks, memory),
    )
    door = None
    if config.control_token is not None and config.control != "off":
        door = ControlDoor(
            scheduler.control,
            inbox,
            config.control_token,
            keys_of_tokens=partial(_keys_of_tokens, namespace),
            local_only=config.control == "local",
        )
    return Endpoint(source, host=host, port=port, door=door)


def _keys_of_tokens(namespace: Namespace, tokens: list[int], salt: str) -> Keys:
    return chain(namespace, tokens, salt=salt)


def _pinned_bytes(rank: weakref.ref[RankMemory]) -> int | None:
    found = rank()
    return found.host.stats().pinned_bytes if found is not None else None


def _disks(rank: weakref.ref[RankMemory]) -> dict[str, DiskFigures]:
    found = rank()
    return found.disks() if found is not None else {}


def _why_path(rank: weakref.ref[RankMemory], copy: Copy) -> str:
    from kvferry.telemetry.catalog import why_path  # here: few ask, and it brings the planner

    found = rank()
    return why_path(copy, getattr(found.engine, "choices", None) if found is not None else None)
