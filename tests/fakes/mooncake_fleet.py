"""A Mooncake store with servers on it, as tests of its bad days have them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.fakes import mooncake_store, remote
from tests.fakes.mooncake_wires import DataWires
from tests.fakes.remote import Store

from kvferry.tiers.contract import Way

ALL = list(range(8))


class Fleet:
    """A master, and servers in one namespace with the same bytes to share."""

    def __init__(self, close: ExitStack) -> None:
        self._close = close
        self.master = mooncake_store.Master()
        self.master.start()
        close.callback(self.master.kill)
        self._wires: DataWires | None = None
        self._namespace = secrets.token_bytes(32)
        self._servers: list[Store] = []

    @property
    def wires(self) -> DataWires:
        """Between all who join from now on, if it is called before they do."""
        if self._wires is None:
            self._wires = DataWires(self.master)
            self._close.callback(self._wires.close)
        return self._wires

    def server(
        self, options: str = "", place: str = "", metadata: str = "", namespace: bytes = b""
    ) -> Store:
        """``options`` begin with ``&``."""
        if not metadata:
            metadata = self._wires.metadata if self._wires is not None else "P2PHANDSHAKE"
        namespace = namespace or self._namespace
        tier = remote.open_mooncake_tier(
            place or self.master.place,
            f"?metadata={metadata}{options}",
            namespace=namespace,
            environment_=mooncake_store.environment(),
        )
        self._close.callback(tier.close)
        made = Store(tier, namespace)
        if self._servers:
            made.rows[:] = self._servers[0].rows
        self._servers.append(made)
        return made

    def peer(self) -> mooncake_store.Peer:
        metadata = self._wires.metadata if self._wires is not None else ""
        made = mooncake_store.Peer(self.master, metadata=metadata)
        self._close.callback(made.kill)
        return made


def is_well(server: Store) -> bool:
    """Whether all can be read, after writing what is missing; what comes is right at every step."""
    server.tier.poll()
    if server.tier.ailment:
        return False
    came = server.reads(ALL)
    missing = [number for number in ALL if not came[number]]
    if missing:
        server.do(Way.WRITE, missing, within=2.0)
    return not missing


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with ExitStack() as close:
        yield Fleet(close)
