"""Objects of a Mooncake store: what is under our names and not ours, and what is to be removed."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes import mooncake_store
from tests.fakes.crafted_keys import keys
from tests.fakes.mooncake_fleet import ALL, Fleet
from tests.fakes.mooncake_fleet import fleet as fleet  # a fixture
from tests.fakes.remote import Store

from kvferry.tiers.contract import Way

pytestmark = pytest.mark.skipif(bool(mooncake_store.lacking()), reason=mooncake_store.lacking())


@pytest.fixture
def raw(fleet: Fleet) -> Iterator[Any]:
    """The engine's own client, past everything of ours; a peer gives the store memory."""
    fleet.peer()
    mooncake_store.load_here()
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    assert not client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", fleet.master.place)
    yield client
    client.close()


def opened(fleet: Fleet) -> Store:
    store = fleet.server()
    store.wait_healed()
    return store


def test_what_is_not_ours_under_our_names_is_a_miss_and_is_replaced(fleet: Fleet, raw: Any) -> None:
    """Seen red where another size was no more than a miss, and where nothing was removed first:
    what was there stayed, however often it was written.
    """
    store = opened(fleet)
    size = store.objects.object_bytes
    strange = {0: 100, 1: size - 1, 2: size + 1, 3: 2 * size, 5: size, 6: 1}
    names = store.objects.names(keys(ALL))
    for number, num_bytes in strange.items():
        assert not raw.put(names[number], secrets.token_bytes(num_bytes))
    store.write([4])
    assert store.reads(ALL) == [number == 4 for number in ALL]
    assert not store.tier.ailment, "the store answered: nothing is wrong with it"
    assert store.do(Way.FIND, ALL).ok.tolist() == [number == 4 for number in ALL]
    store.write(ALL)
    assert opened(fleet).reads(ALL) == [True] * 8


def test_what_a_server_wrote_for_itself_alone_is_removed_when_it_forgets(
    fleet: Fleet, raw: Any
) -> None:
    """Also what was read just now, which the master keeps for its readers unless it is forced.

    Seen red where nothing was removed, and where it was not by force.
    """
    store = opened(fleet)
    store.write(ALL)
    shared = store.objects.names(keys(ALL))
    store.tier.forget()
    store.write(ALL)
    own = store.objects.names(keys(ALL), store.tier._generation)
    assert list(raw.batch_is_exist(own)) == [1] * 8
    assert store.reads(ALL) == [True] * 8
    store.tier.forget()
    store.wait(lambda: not any(raw.batch_is_exist(own)))
    assert list(raw.batch_is_exist(shared)) == [1] * 8, "others' too: not ours to remove"
