"""A store's client that writes when nobody waits for it any more: never into a slot given back.

The client is ours, its library a dict that hangs, fails and writes late, as the real one may.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from tests.fakes import remote
from tests.fakes.crafted_keys import keys
from tests.fakes.remote import LONG, Store
from tests.fakes.remote_in_thread import InThread

from kvferry.settings.tiers import RemoteAddress
from kvferry.tiers.contract import Way
from kvferry.tiers.remote import mooncake as mooncake_module
from kvferry.tiers.remote.client import SlotMapping
from kvferry.tiers.remote.mooncake import MooncakeClient
from kvferry.tiers.remote.objects import ObjectFormat
from kvferry.tiers.remote.tier import RemoteTier
from kvferry.types import TierName

PEER_GONE = -800
SENTINEL = 0x5A


class Library:
    """Mooncake's client: objects in a dict, bytes by address."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.removed: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.fails_but_writes_late = False
        self.written: set[str] = set()
        self.is_called = threading.Event()

    def setup(self, *_: object) -> int:
        return 0

    def register_buffer(self, address: int, num_bytes: int) -> int:
        return 0

    def put(self, name: str, content: bytes) -> int:
        self.objects[name] = bytes(content)
        return 0

    def get(self, name: str) -> bytes:
        return self.objects.get(name, b"")

    def remove(self, name: str, force: bool) -> int:
        self.objects.pop(name, None)
        self.removed.add(name)
        return 0

    def batch_remove(self, names: Sequence[str], force: bool) -> list[int]:
        return [self.remove(name, force) for name in names]

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [int(name in self.objects) for name in names]

    def batch_put_from(
        self, names: list[str], places: list[int], sizes: list[int]
    ) -> Sequence[int]:
        self._pass()
        for name, place, size in zip(names, places, sizes, strict=True):
            self.objects.setdefault(name, ctypes.string_at(place, size))
        return [0] * len(names)

    def batch_get_into(
        self, names: list[str], places: list[int], sizes: list[int]
    ) -> Sequence[int]:
        if self.fails_but_writes_late:
            threading.Thread(target=self._write, args=(names, places)).start()
            return [PEER_GONE] * len(names)
        self._write(names, places)
        return [len(self.objects[name]) if name in self.objects else -704 for name in names]

    def _write(self, names: list[str], places: list[int]) -> None:
        self._pass()
        for name, place in zip(names, places, strict=True):
            if name in self.objects:
                ctypes.memmove(place, self.objects[name], len(self.objects[name]))
        self.written.update(names)

    def _pass(self) -> None:
        self.is_called.set()
        self.gate.wait(LONG)

    def close(self) -> None:
        pass


class Rig:
    """A store that works in place, with its process as a thread."""

    def __init__(self) -> None:
        self.library = Library()
        self.slots = remote.mapped_slots(16)
        objects = ObjectFormat(secrets.token_bytes(32), self.slots.slot_bytes)
        file = self.slots.file
        assert file is not None
        self.mapping = SlotMapping(file.fd, file.address, file.num_bytes, file.pitch)
        client = MooncakeClient(
            RemoteAddress("mooncake", "127.0.0.1:1"),
            objects.object_bytes,
            objects.folder(),
            lambda: self.library,
            self.mapping,
        )
        hello = remote.hello("mooncake://127.0.0.1:1", objects)
        self.tier = RemoteTier(
            TierName("remote"),
            objects.block_bytes,
            hello,
            lambda told, _: InThread(client, told, self.mapping),
        )
        self.tier.open(LONG)
        self.store = Store(self.tier, objects.namespace, self.slots)
        self.names = objects.names(keys(range(8)))

    def lose(self, way: Way, numbers: list[int]) -> None:
        """Their deadline passes while the library has them, behind its gate.

        A machine that is busy may not come so far in a tenth of a second: then again, with more.
        """
        for within in (0.1, 1.0, 10.0):
            self.library.gate.clear()
            self.library.is_called.clear()
            assert not self.store.do(way, numbers, within=within).ok.any()
            if self.library.is_called.is_set():
                return
            self.library.gate.set()  # for the trial, without which it does not heal
            self.store.wait_healed()
        raise AssertionError("the library was never called")

    def is_whole(self, number: int) -> bool:
        return self.store.objects.is_whole(
            memoryview(self.library.objects[self.names[number]]), keys([number])[0]
        )

    def in_place(self, number: int) -> bool:
        """Whether the slot that this block is read into can be used where it lies."""
        address = np.array([self.store.into[number].ctypes.data])
        return bool(self.mapping.rooms(address, self.store.objects.object_bytes))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(mooncake_module, "_knock", lambda place: None)
    made = Rig()
    yield made
    made.library.gate.set()
    made.tier.close()


def wait_until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def reuse(rig: Rig, numbers: list[int]) -> None:
    """The slots were given back: somebody else's block lies there now."""
    rig.store.into[numbers] = SENTINEL


def test_blocks_go_from_slot_to_store_and_back_without_a_copy(rig: Rig) -> None:
    rooms = {rig.mapping.address + at * rig.slots.pitch for at in range(16)}
    used: set[int] = set()
    inner = rig.library.batch_get_into

    def noted(names: list[str], places: list[int], sizes: list[int]) -> Sequence[int]:
        used.update(places)
        return inner(names, places, sizes)

    rig.library.batch_get_into = noted  # type: ignore[method-assign]
    rig.store.write([0, 1, 2])
    assert rig.store.reads([0, 1, 2]) == [True] * 3
    assert used
    assert used <= rooms
    whole = rig.library.objects[rig.names[1]]
    rig.library.objects[rig.names[1]] = whole[:-1] + bytes([whole[-1] ^ 1])
    assert rig.store.reads([0, 1, 2]) == [True, False, True], "proven where it lies"


@pytest.mark.parametrize("has_barrier", [True, False])
def test_a_late_get_writes_into_no_slot_given_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, has_barrier: bool
) -> None:
    """Checks itself: without the cut it must write there."""
    if not has_barrier:
        monkeypatch.setattr(SlotMapping, "detach", lambda self, room: None)
    rig.store.write([0, 1])
    rig.lose(Way.READ, [0, 1])
    reuse(rig, [0, 1])
    rig.library.written.clear()
    rig.library.gate.set()
    wait_until(lambda: rig.names[0] in rig.library.written)
    assert (rig.store.into[[0, 1]] == SENTINEL).all() == has_barrier
    wait_until(lambda: rig.in_place(0) and rig.in_place(1))
    rig.store.wait_healed()
    assert rig.store.reads([0, 1]) == [True, True], "when the call came back, all is as before"


@pytest.mark.parametrize("has_barrier", [True, False])
def test_bytes_that_come_after_a_failure_fall_into_no_slot(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, has_barrier: bool
) -> None:
    """A client gives up a transfer that takes too long; its bytes may come all the same."""
    if not has_barrier:
        monkeypatch.setattr(SlotMapping, "detach", lambda self, room: None)
    rig.store.write([0, 1])
    rig.library.gate.clear()
    rig.library.fails_but_writes_late = True
    assert not rig.store.do(Way.READ, [0]).ok.any()
    reuse(rig, [0])
    rig.library.gate.set()
    wait_until(lambda: rig.names[0] in rig.library.written)
    assert (rig.store.into[0] == SENTINEL).all() == has_barrier
    if has_barrier:
        rig.library.fails_but_writes_late = False
        rig.store.wait_healed()
        assert not rig.in_place(0), "for this process's life"
        assert rig.store.reads([0, 1]) == [True, True], "it is used by copies from then on"


def test_what_a_late_put_stored_is_removed(rig: Rig) -> None:
    """The slot may have been another's by the time it was read."""
    rig.lose(Way.WRITE, [0])
    rig.store.rows[0] ^= 0xFF
    rig.library.gate.set()
    wait_until(lambda: rig.names[0] in rig.library.removed)
    rig.store.wait_healed()
    rig.store.write([0])
    assert rig.is_whole(0)


@pytest.mark.parametrize("has_barrier", [True, False])
def test_a_copy_under_way_ends_at_the_cut(
    monkeypatch: pytest.MonkeyPatch, has_barrier: bool
) -> None:
    """A thread that writes into a slot all the time; the cut is made in the middle of that."""
    slots = remote.mapped_slots(4)
    file = slots.file
    assert file is not None
    mapping = SlotMapping(file.fd, file.address, file.num_bytes, file.pitch)
    rooms = mapping.rooms(np.array([slots.address + slots.pitch]), slots.slot_bytes)
    here = mapping.address + slots.pitch
    is_over = threading.Event()
    num_copies = 0

    def copy() -> None:
        nonlocal num_copies
        content = secrets.token_bytes(slots.slot_bytes)
        while not is_over.is_set():
            ctypes.memmove(here, content, len(content))
            num_copies += 1

    thread = threading.Thread(target=copy)
    thread.start()
    is_whole = True
    for _ in range(100):
        if has_barrier:
            mapping.detach(rooms[0])
        slots.rows[:] = SENTINEL
        before = num_copies
        wait_until(lambda before=before: num_copies > before + 1)  # type: ignore[misc]
        is_whole = is_whole and bool((slots.rows == SENTINEL).all())
        if has_barrier:
            mapping.reattach(rooms[0])
    is_over.set()
    thread.join()
    assert is_whole == has_barrier
    if has_barrier:
        ctypes.memmove(here, bytes(slots.slot_bytes), slots.slot_bytes)
        assert not slots.rows[1].any(), "mended: it is the engine's memory again"


def test_only_whole_slots_of_ours_are_used_in_place() -> None:
    slots = remote.mapped_slots(4)
    file = slots.file
    assert file is not None
    mapping = SlotMapping(file.fd, file.address, file.num_bytes, file.pitch)
    start, pitch, size = slots.address, slots.pitch, slots.slot_bytes + 120
    assert len(mapping.rooms(np.array([start, start + 3 * pitch]), size)) == 2
    for wrong in (start - pitch, start + 4 * pitch, start + 8, start + pitch - 1):
        assert mapping.rooms(np.array([start, wrong]), size) == []
    assert mapping.rooms(np.array([start]), pitch + 1) == []
    (room,) = mapping.rooms(np.array([start]), size)
    mapping.detach(room)
    assert mapping.rooms(np.array([start]), size) == []
    assert len(mapping.rooms(np.array([start + pitch]), size)) == 1
    mapping.reattach(room)
    (room,) = mapping.rooms(np.array([start]), size)
    room[:4] = b"here"
    assert slots.rows[0, :4].tobytes() == b"here"
