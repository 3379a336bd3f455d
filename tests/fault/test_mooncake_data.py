"""Bad lines between the clients of a Mooncake store: every byte of a block goes through a wire."""

from __future__ import annotations

import pytest
from tests.fakes import mooncake_store
from tests.fakes.mooncake_fleet import ALL, Fleet, is_well
from tests.fakes.mooncake_fleet import fleet as fleet  # a fixture
from tests.fakes.remote import MOONCAKE_SIZE, Store

from kvferry.tiers.contract import Way

pytestmark = pytest.mark.skipif(bool(mooncake_store.lacking()), reason=mooncake_store.lacking())

POISON, OTHERS = 0xEE, 0xAA


class Line:
    """A server that gives no memory, and a peer that gives all of it, with a wire between them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        wires = fleet.wires
        fleet.peer()
        self.store: Store = fleet.server()
        self.store.wait_healed()
        (self.wire,) = wires.all

    @property
    def passed(self) -> int:
        return self.wire.num_answered

    def costs_one_deadline(self) -> None:
        """A batch is lost to it, and no other: those after are answered before they begin."""
        store = self.store
        store.into[:] = POISON
        store.lose(Way.READ, ALL)
        for way in Way:
            store.send(way, ALL)
            (result,) = store.tier.poll()
            assert not result.ok.any()

    def is_well_again(self) -> None:
        self.store.wait(lambda: is_well(self.store))
        assert self.store.reads(ALL) == [True] * 8


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are not given up before a test is done with them."""
    for what in ("PROGRESS", "STATUS"):
        monkeypatch.setenv(f"MC_TCP_{what}_TIMEOUT_SEC", "100")


@pytest.fixture
def line(fleet: Fleet) -> Line:
    return Line(fleet)


def test_a_line_that_is_held_up_costs_one_deadline(patient: None, line: Line) -> None:
    """And what was on its way, and comes when its slots are others', touches nothing."""
    line.store.write(ALL)
    before = line.passed
    line.wire.is_held = True
    line.costs_one_deadline()
    assert line.passed == before
    line.store.into[:] = OTHERS
    line.wire.is_held = False
    line.store.wait(lambda: line.passed - before >= 8 * MOONCAKE_SIZE)
    line.store.wait_healed()  # with later calls answered, whatever came has been taken in
    assert (line.store.into == OTHERS).all()
    line.is_well_again()


def test_connections_that_end_without_a_word(line: Line) -> None:
    """As a firewall forgets them: nothing comes any more, and new ones would do."""
    line.store.write(ALL)
    line.wire.lose()
    line.costs_one_deadline()
    line.is_well_again()


def test_a_line_cut_in_the_middle_of_reads(line: Line) -> None:
    line.store.write(ALL)
    for num_bytes in (0, 1000, 40_000, 100_000):  # of each connection
        line.wire.cut()
        line.wire.cut_after = num_bytes
        line.store.reads(ALL)
        line.wire.cut_after = None
        line.is_well_again()


@pytest.mark.parametrize("num_bytes", [1000, 40_000])
def test_a_line_cut_in_the_middle_of_writes(line: Line, num_bytes: int) -> None:
    line.wire.cut()
    line.wire.cut_asking_after = num_bytes
    assert not line.store.do(Way.WRITE, ALL, within=5.0).ok.any()
    line.wire.cut_asking_after = None
    line.store.wait_healed()
    line.store.reads(ALL)  # what is there of it is no block
    line.is_well_again()


def test_a_line_that_garbles(line: Line) -> None:
    line.store.write(ALL)
    line.wire.garble = one_bit_changed
    assert not all(line.store.reads(ALL))
    line.wire.garble = None
    line.is_well_again()


def one_bit_changed(data: bytes) -> bytes:
    """In the middle of what is long: in a block, not in what is said about it."""
    at = len(data) // 2
    return data if len(data) < 4096 else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_others_reach_a_server_by_the_address_it_names(line: Line) -> None:
    """With a metadata server too, where the engine left alone names an interface it has found."""
    giver = line.fleet.server("&segment=16MiB&host=127.0.0.1")
    giver.wait_healed()
    assert line.fleet.wires.named[-1]["tcp_data_host"] == "127.0.0.1"
