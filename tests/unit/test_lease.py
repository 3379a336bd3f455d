"""A lease ends exactly once, in a way its purpose has."""

from __future__ import annotations

import itertools

import pytest
from tests.fakes.crafted_keys import keys

from kvferry.cache.pool import Pool
from kvferry.cache.slots import Ending, Lease, Purpose
from kvferry.errors import InputError, StateError

ALLOWED = {
    Purpose.WRITE: {Ending.COMMIT, Ending.ABORT},
    Purpose.READ: {Ending.RELEASE, Ending.SPOIL},
    Purpose.COPY: {Ending.RELEASE, Ending.SPOIL},
}


def lease_of(purpose: Purpose) -> tuple[Pool, Lease]:
    """A lease of three slots, in a pool of its own."""
    pool, blocks = Pool(4), keys(range(3))
    lease = pool.reserve(blocks)
    assert lease is not None
    if purpose is not Purpose.WRITE:
        lease.commit()
        lease = pool.lease(blocks, purpose)
        assert lease is not None
    return pool, lease


@pytest.mark.parametrize(("purpose", "ending"), list(itertools.product(Purpose, Ending)))
def test_each_purpose_has_its_own_endings_and_ends_once(purpose: Purpose, ending: Ending) -> None:
    pool, lease = lease_of(purpose)
    assert repr(lease) == f"Lease({purpose.value}, 3 slots)"
    if ending not in ALLOWED[purpose]:
        with pytest.raises(StateError) as error:
            getattr(lease, ending.value)()
        for named in (ending, *ALLOWED[purpose]):
            assert named.value in str(error.value)
        assert lease.ended is None
        assert pool.num_leases == 1
        return
    getattr(lease, ending.value)()
    assert lease.ended is ending
    for second in Ending:
        with pytest.raises(StateError, match=f"cannot {second.value}.*ended by {ending.value}"):
            getattr(lease, second.value)()
    with pytest.raises(StateError, match="cannot be disowned"):
        lease.disown()
    assert lease.ended is ending
    assert pool.num_leases == 0
    pool.check_integrity()


@pytest.mark.parametrize(
    ("purpose", "ending"), [(Purpose.WRITE, "commit"), (Purpose.READ, "release")]
)
def test_some_of_its_slots_may_fail(purpose: Purpose, ending: str) -> None:
    pool, lease = lease_of(purpose)
    for wrong, words in (([0, 3], "place 3 failed: its places are 0 to 2"), ([-1], "negative")):
        with pytest.raises(InputError, match=words):
            getattr(lease, ending)(failed=wrong)
        assert lease.ended is None
    getattr(lease, ending)(failed=[2, 1])
    assert lease.ended is Ending(ending)
    assert pool.match(keys(range(3))) == 1
    with pytest.raises(StateError, match=f"cannot {ending}.*ended by {ending}"):
        getattr(lease, ending)(failed=[1])
