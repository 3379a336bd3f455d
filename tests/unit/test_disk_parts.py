"""The small parts of the tier on disk: places over drives, messages, the line, the file."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.hostmem.slots import PrivateMemory
from kvferry.tiers.disk.block_file import BlockFile
from kvferry.tiers.disk.files import SECTOR, runs
from kvferry.tiers.disk.protocol import DriveSetup
from kvferry.tiers.disk.superblock import DiskBound, StoreIdentity
from kvferry.tiers.disk.tier import Stripes


@given(drives=st.integers(1, 5), each=st.integers(1, 200))
def test_every_place_is_on_one_drive_and_no_two_are_the_same(drives: int, each: int) -> None:
    stripes = Stripes(drives, each)
    assert stripes.num_places == drives * each
    seen = set()
    back = np.full(stripes.num_places, -1)
    for drive, positions, there in stripes.split(np.arange(stripes.num_places)):
        assert int(there.max()) < each
        assert (np.diff(there) == 1).all(), "one call for all of a run that this drive has"
        seen |= {(drive, place) for place in there.tolist()}
        here, places = stripes.join(drive, there)
        assert here.all()
        back[positions] = places
    assert len(seen) == stripes.num_places
    assert (back == np.arange(stripes.num_places)).all()
    here, _ = stripes.join(0, np.array([each]))
    assert not here.any(), "a place beyond those of the tier is none of it"


def test_a_setup_arrives_as_it_was_and_never_shows_its_key() -> None:
    identity = StoreIdentity(os.urandom(32), 5, label="é")
    setup = DriveSetup("/x", identity, DiskBound(6), 7, key=os.urandom(32))
    assert pickle.loads(pickle.dumps(setup)) == setup
    assert repr(setup.key)[2:-1] not in repr(setup)


@pytest.mark.parametrize("when", ["opening", "calling"])
def test_a_file_system_without_direct_calls_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    path = tmp_path / "blocks"
    path.write_bytes(bytes(8 * SECTOR))
    really = os.open

    def refuse(name: str, flags: int, *more: int, **named: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no such flag here")
        return really(name, flags, *more, **named)  # type: ignore[arg-type]

    if when == "opening":
        monkeypatch.setattr(os, "open", refuse)
    file = BlockFile(str(path), SECTOR)
    memory = PrivateMemory(2 * SECTOR).bytes
    if when == "calling":
        assert file.is_direct
        preadv = os.preadv
        calls = []

        def once(*arguments: object) -> int:
            calls.append(arguments)
            if len(calls) == 1:
                raise OSError(errno.EINVAL, "not aligned as it likes")
            return preadv(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "preadv", once)
        file.read(0, memory.data)
    assert not file.is_direct
    memory[:] = np.random.default_rng().integers(0, 256, len(memory))
    file.write(3, memory.data)
    file.sync()
    again = PrivateMemory(2 * SECTOR).bytes
    file.read(3, again.data)
    assert (again == memory).all()
    with pytest.raises(OSError, match="the file ends"):
        file.read(7, again.data)
    file.close()


_steps = st.sampled_from([1, 1, 1, 2, 0, -1])


@given(steps=st.lists(st.tuples(_steps, _steps), max_size=8))
def test_a_run_is_as_long_as_neighbours_are_neighbours_on_both_sides(
    steps: list[tuple[int, int]],
) -> None:
    """In any order, and with a place that is named twice."""
    places, slots = np.cumsum([(9, 9), *steps], axis=0).T
    found = runs(places, slots)
    assert [at for first, last in found for at in range(first, last)] == list(range(len(places)))
    starts = {first for first, _ in found}
    for at, step in enumerate(steps, 1):
        assert (at in starts) == (step != (1, 1))
