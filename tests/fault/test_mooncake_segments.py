"""Memory of a Mooncake store that goes while others read from it: misses, never wrong bytes."""

from __future__ import annotations

import os
import signal

import pytest
from tests.fakes import mooncake_store
from tests.fakes.mooncake_fleet import ALL, Fleet, is_well
from tests.fakes.mooncake_fleet import fleet as fleet  # a fixture
from tests.fakes.remote import LONG, Store

from kvferry.tiers.contract import Way

pytestmark = pytest.mark.skipif(bool(mooncake_store.lacking()), reason=mooncake_store.lacking())

POISON = 0xEE


def drain_right(reader: Store) -> None:
    """What is said to have come is there to the last byte."""
    for result in reader.tier.drain(LONG):
        assert (reader.into[result.ok] == reader.rows[result.ok]).all()


def test_a_peer_restarted_while_others_read_from_it(fleet: Fleet) -> None:
    peer, reader = fleet.peer(), fleet.server()
    reader.wait_healed()
    reader.write(ALL)
    reader.into[:] = POISON
    for number in range(40):
        reader.send(Way.READ, ALL, within=2.0)
        if number == 20:
            reader.wait(lambda: (reader.into != POISON).any())  # they are in the midst of it
            peer.kill()
    drain_right(reader)
    assert not reader.tier._tasks, "every batch has its answer"
    fleet.peer()
    reader.wait(lambda: is_well(reader))


def test_a_server_that_loses_its_segment_gives_another(fleet: Fleet) -> None:
    """The process that gave it dies; the engine beside it, and the others, go on."""
    giver, reader = fleet.server("&segment=16MiB"), fleet.server()
    reader.wait_healed()
    giver.write(ALL)
    assert reader.reads(ALL) == [True] * 8
    reader.into[:] = POISON
    for _ in range(4):
        reader.send(Way.READ, ALL, within=2.0)
    assert giver.tier._child is not None
    os.kill(giver.tier._child.pid, signal.SIGKILL)
    drain_right(reader)
    giver.wait(lambda: "process" in giver.tier.ailment)
    giver.wait(lambda: is_well(giver))
    reader.wait(lambda: is_well(reader))
