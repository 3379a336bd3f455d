"""A lease ends exactly once, in a way its purpose has."""

from __future__ import annotations

import itertools

import pytest

from kvferry.cache.leases import Ending, Lease, Purpose, as_slots
from kvferry.errors import InputError, LeaseError
from kvferry.types import SlotArray

ALLOWED = {
    Purpose.WRITE: {Ending.COMMIT, Ending.ABORT},
    Purpose.READ: {Ending.RELEASE, Ending.SPOIL},
    Purpose.COPY: {Ending.RELEASE, Ending.SPOIL},
}


class Owner:
    """Writes down what its leases tell it."""

    def __init__(self) -> None:
        self.ended: list[Ending] = []
        self.failed: list[list[int]] = []
        self.disowned: list[Lease] = []

    def end(self, lease: Lease, ending: Ending, failed: SlotArray) -> None:
        self.ended.append(ending)
        self.failed.append(failed.tolist())

    def disown(self, lease: Lease) -> None:
        self.disowned.append(lease)


def lease_of(purpose: Purpose) -> tuple[Lease, list[Ending]]:
    owner = Owner()
    return Lease(purpose, as_slots([4, 2]), as_slots([0, 1]), owner), owner.ended


def end(lease: Lease, ending: Ending) -> None:
    getattr(lease, ending.value)()


@pytest.mark.parametrize(("purpose", "ending"), list(itertools.product(Purpose, Ending)))
def test_each_purpose_has_its_own_endings(purpose: Purpose, ending: Ending) -> None:
    lease, ended = lease_of(purpose)
    if ending in ALLOWED[purpose]:
        end(lease, ending)
        assert lease.ended is ending
        assert ended == [ending]
        return
    with pytest.raises(LeaseError) as error:
        end(lease, ending)
    assert ending.value in str(error.value)
    for allowed in ALLOWED[purpose]:
        assert allowed.value in str(error.value)
    assert lease.ended is None
    assert ended == []


@pytest.mark.parametrize("purpose", Purpose)
def test_a_second_ending_is_refused_and_names_both(purpose: Purpose) -> None:
    for first, second in itertools.product(ALLOWED[purpose], Ending):
        lease, ended = lease_of(purpose)
        end(lease, first)
        with pytest.raises(LeaseError, match=f"cannot {second.value}.*ended by {first.value}"):
            end(lease, second)
        assert ended == [first]
        assert lease.ended is first


def test_length_and_repr() -> None:
    lease, _ = lease_of(Purpose.READ)
    assert len(lease) == 2
    assert repr(lease) == "Lease(read, 2 slots)"


def test_disowning_is_the_owners_business_and_ends_nothing() -> None:
    owner = Owner()
    lease = Lease(Purpose.WRITE, as_slots([1]), as_slots([0]), owner)
    lease.disown()
    assert owner.disowned == [lease]
    assert lease.ended is None
    lease.commit()
    assert owner.ended == [Ending.COMMIT]


@pytest.mark.parametrize(
    ("purpose", "ending"), [(Purpose.WRITE, "commit"), (Purpose.READ, "release")]
)
def test_some_of_its_slots_may_fail(purpose: Purpose, ending: str) -> None:
    owner = Owner()
    lease = Lease(purpose, as_slots([4, 2, 7]), as_slots([0, 1, 2]), owner)
    for wrong, words in (([0, 3], "place 3 failed: its places are 0 to 2"), ([-1], "negative")):
        with pytest.raises(InputError, match=words):
            getattr(lease, ending)(failed=wrong)
        assert lease.ended is None
        assert not owner.ended
    getattr(lease, ending)(failed=[2, 0])
    assert lease.ended is Ending(ending)
    assert owner.failed == [[2, 0]]
    with pytest.raises(LeaseError, match=f"cannot {ending}.*ended by {ending}"):
        getattr(lease, ending)(failed=[1])
