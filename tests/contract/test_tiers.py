"""The contract of tiers below the host, run against every one that needs nothing but this machine.

A new tier joins by a line in ``TIERS``: how to make it, and how to be cruel to it. The blocks a
test writes are random, and where a block is read to is poisoned first, so nothing can look right
by chance.
"""

from __future__ import annotations

import atexit
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.fakes import mooncake_store, remote, s3_servers
from tests.fakes.crafted_keys import key, keys
from tests.fakes.disk_life import setups
from tests.fakes.drives import Weather
from tests.fakes.memory_tiers import KeyedMemoryTier, MemoryTier
from tests.fakes.remote_in_thread import InThread, Watched

from kvferry.cache.slots import as_slots
from kvferry.core.keys import Key, Keys
from kvferry.errors import ClosedError, InputError, TransferError
from kvferry.settings.tiers import read_remote
from kvferry.tiers.contract import Batch, BatchId, Result, Tier, Way
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.remote.bucket import BucketClient
from kvferry.tiers.remote.mooncake import MooncakeClient, open_mooncake
from kvferry.tiers.remote.objects import ObjectFormat
from kvferry.tiers.remote.tier import RemoteTier
from kvferry.types import TierName

NUM_BLOCKS, BLOCK_BYTES = 6, 48
LONG = 30.0
SMALL_STORE = 4 << 20
Fault = Callable[[Way, Key], None]


@dataclass(eq=False)
class Rig:
    """A tier, and what a test can do with it and to it. Block ``n`` has key and place ``n``."""

    tier: Tier
    block_bytes: int
    set_fault: Callable[[Fault | None], None]
    lose: Callable[[Sequence[int]], None]
    go_away: Callable[[str], None]
    come_back: Callable[[], None]
    cleanup: Callable[[], None] = lambda: None
    next_id: int = 0
    memory: list[np.ndarray] = field(default_factory=list)
    """What batches were told of: it must outlive them."""

    def send(
        self,
        way: Way,
        numbers: Sequence[int],
        rows: np.ndarray | None = None,
        *,
        within: float = LONG,
        cuts: Sequence[int] = (),
    ) -> int:
        """Submit a batch for these blocks, whose bytes are ``rows``, cut at ``cuts``."""
        self.next_id += 1
        edges = [0, *cuts, self.block_bytes]
        offsets = np.array(edges[:-1], dtype=np.int64)
        batch = Batch(BatchId(self.next_id), way, keys(numbers), time.monotonic() + within)
        if rows is not None:
            self.memory.append(rows)
            starts = rows.ctypes.data + np.arange(len(numbers)) * rows.strides[0]
            batch = Batch(
                batch.id,
                way,
                batch.keys,
                batch.deadline,
                addresses=starts[:, None] + offsets,
                sizes=np.diff(edges).astype(np.int64),
                places=as_slots(numbers) if self.tier.num_places is not None else None,
            )
        self.tier.submit(batch)
        return self.next_id

    def do(self, way: Way, numbers: Sequence[int], rows: np.ndarray | None = None) -> Result:
        sent = self.send(way, numbers, rows)
        (result,) = self.tier.drain(LONG)
        assert result.batch_id == sent
        return result

    def write(self, numbers: Sequence[int], rows: np.ndarray) -> None:
        assert self.do(Way.WRITE, numbers, rows).ok.all()

    def poll_one(self) -> list[Result]:
        """What comes first: while others hang, none may be waited for."""
        results: list[Result] = []
        give_up = time.monotonic() + LONG
        while not results and time.monotonic() < give_up:
            results = self.tier.poll()
        return results

    def poll_for(self, batch_id: int) -> Result:
        """What became of it, though others that were sent before hang."""
        give_up = time.monotonic() + LONG
        while True:
            for result in self.tier.poll():
                if result.batch_id == batch_id:
                    return result
            assert time.monotonic() < give_up, f"batch {batch_id} never ends"

    def wait_well(self) -> None:
        give_up = time.monotonic() + LONG
        while self.tier.ailment:
            assert time.monotonic() < give_up, self.tier.ailment
            self.tier.poll()
            time.sleep(0.001)

    def close(self) -> None:
        self.tier.close()
        self.cleanup()

    def read(self, numbers: Sequence[int]) -> tuple[np.ndarray, Result]:
        into = poisoned(len(numbers), self.block_bytes)
        return into, self.do(Way.READ, numbers, into)


def placed(block_bytes: int = BLOCK_BYTES) -> Rig:
    tier = MemoryTier(NUM_BLOCKS, block_bytes, name=TierName("placed"))
    return Rig(
        tier,
        block_bytes,
        lambda fault: setattr(tier, "fault", fault),
        lambda numbers: tier.lose(as_slots(numbers)),
        tier.go_away,
        tier.come_back,
    )


def keyed(block_bytes: int = BLOCK_BYTES) -> Rig:
    tier = KeyedMemoryTier(block_bytes, name=TierName("keyed"))
    return Rig(
        tier,
        block_bytes,
        lambda fault: setattr(tier, "fault", fault),
        lambda numbers: tier.lose(keys(numbers)),
        tier.go_away,
        tier.come_back,
    )


def on_disk(
    block_bytes: int = BLOCK_BYTES, *, secret: bytes | None = None, num_drives: int = 1
) -> Rig:
    """One thread each way and one block a call, so that a test can say which blocks wait."""
    weather = Weather()
    folder = tempfile.mkdtemp(prefix="kvferry-test-")
    told = setups(
        Path(folder),
        num_drives,
        block_bytes=block_bytes,
        size=SMALL_STORE,
        key=secret,
        num_threads=1,
        job_bytes=1,
        check_seconds=0.02,
    )
    try:
        tier = DiskTier(TierName("disk"), told, weather.launch)
    except InputError:
        shutil.rmtree(folder)
        raise
    weather.stripes = tier.stripes

    def lose(numbers: Sequence[int]) -> None:
        for drive, _, places in tier.stripes.split(as_slots(numbers)):
            (file,) = [file for file in weather.files if file.stripe == drive]
            for place in places.tolist():
                file.flip(place)

    def be(reason: str) -> None:
        weather.ailment = reason
        give_up = time.monotonic() + LONG
        while tier.figures().drives_away != (num_drives if reason else 0):
            assert time.monotonic() < give_up
            time.sleep(0.001)

    return Rig(
        tier,
        block_bytes,
        lambda fault: setattr(weather, "fault", fault),
        lose,
        be,
        lambda: be(""),
        lambda: shutil.rmtree(folder),
    )


def bucket(block_bytes: int = BLOCK_BYTES, *, kind: str, scheme: str = "s3") -> Rig:
    """In a real server, behind a door at which blocks can be told apart by their names."""
    namespace = secrets.token_bytes(32)
    door = s3_servers.Door(s3_servers.server(kind))
    try:
        account = f"/{s3_servers.ACCOUNT}" if scheme == "az" else ""
        endpoint = f"{door.endpoint}{account}"
        tier = remote.open_s3(endpoint, block_bytes, namespace=namespace, scheme=scheme)
    except InputError:
        door.close()
        raise
    objects = ObjectFormat(namespace, block_bytes)
    return Rig(
        tier,
        block_bytes,
        lambda fault: setattr(door, "fault", fault),
        lambda numbers: remote.remove(kind, objects.names(keys(numbers))),
        lambda reason: setattr(tier, "_store_ailment", reason),
        lambda: setattr(tier, "_store_ailment", ""),
        door.close,
    )


def watched(
    address: str,
    client: Watched,
    objects: ObjectFormat,
    lose: Callable[[Sequence[int]], None],
    cleanup: Callable[[], None],
) -> Rig:
    """A tier whose process is a thread of the test, with a client that is watched."""
    hello = remote.hello(address, objects)
    try:
        tier = RemoteTier(
            TierName("remote"), objects.block_bytes, hello, lambda told, _: InThread(client, told)
        )
    except InputError:
        cleanup()
        raise
    tier.open(LONG)
    return Rig(
        tier,
        objects.block_bytes,
        lambda fault: setattr(client, "fault", fault),
        lose,
        lambda reason: setattr(tier, "_store_ailment", reason),
        lambda: setattr(tier, "_store_ailment", ""),
        cleanup,
    )


def directory(block_bytes: int = BLOCK_BYTES) -> Rig:
    """On a file system that servers share, whose client is watched."""
    objects = ObjectFormat(secrets.token_bytes(32), block_bytes)
    folder = tempfile.mkdtemp(prefix="kvferry-test-")
    address = read_remote("remote", f"file://{folder}")
    client = Watched(BucketClient(address, max(1, objects.object_bytes), objects.folder(), {}))

    def lose(numbers: Sequence[int]) -> None:
        for name in objects.names(keys(numbers)):
            for file in Path(folder).rglob(name.rpartition("/")[2]):
                file.unlink()

    return watched(str(address), client, objects, lose, lambda: shutil.rmtree(folder))


@lru_cache
def mooncake_client(object_bytes: int) -> MooncakeClient:
    """To join the store takes a while, and to leave it more: one for all tests of a size."""
    mooncake_store.load_here()
    address = read_remote("remote", f"mooncake://{mooncake_store.shared_master().place}")
    client = open_mooncake(address, object_bytes, secrets.token_hex(16))
    atexit.register(client.close)
    return client


def mooncake(block_bytes: int = BLOCK_BYTES) -> Rig:
    """In a real store, whose client is watched where blocks can be told apart."""
    objects = ObjectFormat(secrets.token_bytes(32), block_bytes)
    client = Watched(mooncake_client(max(1, objects.object_bytes)))

    def lose(numbers: Sequence[int]) -> None:
        for name in objects.names(keys(numbers)):
            client.library.remove(name, True)

    address = f"mooncake://{mooncake_store.shared_master().place}"
    return watched(address, client, objects, lose, lambda: None)


TIERS: dict[str, Callable[..., Rig]] = {
    "memory, placed": placed,
    "memory, keyed": keyed,
    "disk": on_disk,
    "disk, encrypted": partial(on_disk, secret=b"k" * 32),
    "disk, two drives": partial(on_disk, num_drives=2),
}
FINDS = {"memory, keyed"}
QUICK = sorted(TIERS)
"""Opened in no time: by the hundred, if need be."""

for each in s3_servers.SERVERS:
    TIERS[f"s3, {each}"] = partial(bucket, kind=each)
TIERS["gs"] = partial(bucket, kind="moto", scheme="gs")
TIERS["file"] = directory
if s3_servers.azurite():
    TIERS["az"] = partial(bucket, kind="azurite", scheme="az")
if not mooncake_store.lacking():
    TIERS["mooncake"] = mooncake
SLOW = sorted(TIERS.keys() - set(QUICK))
FINDS.update(SLOW)
SIDE_BY_SIDE = {*SLOW, "disk, two drives"}
"""Blocks of a batch are under way together, and what has not come at the deadline is given up:
nobody touches its memory any more.
"""
PULLS_BACK = {kind for kind in TIERS if kind.startswith("disk")} | SIDE_BY_SIDE
"""Closing leaves nothing behind: whoever could still touch the memory is ended."""
every_tier = pytest.mark.parametrize("kind", sorted(TIERS))
every_keyed = pytest.mark.parametrize("kind", sorted(FINDS))
every_placed = pytest.mark.parametrize("kind", sorted(TIERS.keys() - FINDS))


@pytest.fixture
def rig(kind: str) -> Iterator[Rig]:
    made = TIERS[kind]()
    yield made
    made.set_fault(None)
    made.close()


def fresh(count: int, size: int = BLOCK_BYTES) -> np.ndarray:
    return np.random.default_rng().integers(0, 256, (count, size), dtype=np.uint8)


def poisoned(count: int, size: int = BLOCK_BYTES) -> np.ndarray:
    return np.full((count, size), 0xEE, dtype=np.uint8)


class Gate:
    """A medium that hangs at chosen blocks until it is opened."""

    def __init__(self, rig: Rig, way: Way, *numbers: int) -> None:
        self._held = {key(number) for number in numbers}
        self._way = way
        self._reached = threading.Semaphore(0)
        self._open = threading.Event()
        rig.set_fault(self)

    def __call__(self, way: Way, at: Key) -> None:
        if way is self._way and at in self._held:
            self._reached.release()
            assert self._open.wait(LONG)

    def wait_reached(self, times: int = 1) -> None:
        for _ in range(times):
            assert self._reached.acquire(timeout=LONG)

    def is_reached(self, timeout: float) -> bool:
        return self._reached.acquire(timeout=timeout)

    def open(self) -> None:
        self._open.set()


def failing(*numbers: int, way: Way | None = None, error: Exception | None = None) -> Fault:
    bad = {key(number) for number in numbers}

    def fault(asked: Way, at: Key) -> None:
        if at in bad and way in (None, asked):
            raise error or TransferError("worn out")

    return fault


_writes = st.lists(
    st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1), min_size=1, max_size=5
)
_sizes = st.sampled_from([1, 3, 48, 4097])


@pytest.mark.parametrize("kind", QUICK)
@given(writes=_writes, size=_sizes)
def test_reads_give_what_was_last_written(kind: str, writes: list[list[int]], size: int) -> None:
    _check_reads(TIERS[kind](size), writes, size)


@pytest.mark.parametrize("kind", SLOW)
@given(writes=_writes, size=_sizes)
@settings(max_examples=2, phases=[Phase.generate], deadline=None)
def test_reads_give_what_was_written(kind: str, writes: list[list[int]], size: int) -> None:
    _check_reads(TIERS[kind](size), writes, size)


def _check_reads(rig: Rig, writes: list[list[int]], size: int) -> None:
    expected: dict[int, bytes] = {}
    contents = fresh(NUM_BLOCKS, size)
    for numbers in writes:
        # A key names its bytes; a place is given to another block when it is written again.
        rows = fresh(len(numbers), size) if rig.tier.num_places is not None else contents[numbers]
        rig.write(numbers, rows)
        expected.update((n, row.tobytes()) for n, row in zip(numbers, rows, strict=True))
        rows[:] = 0  # the result is here: the memory is ours again
    for order in (sorted(expected), sorted(expected, reverse=True)):
        into, result = rig.read(order)
        assert result.ok.all()
        assert not result.reasons
        assert result.num_bytes == len(order) * size
        assert [row.tobytes() for row in into] == [expected[number] for number in order]
    rig.close()


_cuts = {
    "size": st.integers(2, 300),
    "cuts": st.sets(st.integers(1, 299), max_size=4),
    "gap": st.integers(0, 9),
    "shift": st.integers(0, 7),
}


@pytest.mark.parametrize("kind", QUICK)
@given(**_cuts)
@settings(max_examples=30)
def test_blocks_in_scattered_pieces_at_any_address(
    kind: str, size: int, cuts: set[int], gap: int, shift: int
) -> None:
    _check_pieces(TIERS[kind](size), size, cuts, gap, shift)


@pytest.mark.parametrize("kind", SLOW)
def test_blocks_in_scattered_pieces(kind: str) -> None:
    _check_pieces(TIERS[kind](217), 217, {1, 8, 100}, 5, 3)


def _check_pieces(rig: Rig, size: int, cuts: set[int], gap: int, shift: int) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < size), size]
    sizes = np.diff(edges).astype(np.int64)
    rows = fresh(3, size)
    rig.write([0, 1, 2], rows)
    # The pieces of a block lie in another order than their own, with gaps, at odd addresses.
    memory = np.full(shift + 3 * (size + gap * len(sizes)) + 64, 0xEE, dtype=np.uint8)
    starts, at = np.zeros((3, len(sizes)), dtype=np.int64), shift
    for piece in reversed(range(len(sizes))):
        for block in range(3):
            starts[block, piece] = at
            at += int(sizes[piece]) + gap
    batch = Batch(
        BatchId(99),
        Way.READ,
        keys([2, 0, 1]),
        time.monotonic() + LONG,
        memory.ctypes.data + starts,
        sizes,
        as_slots([2, 0, 1]) if rig.tier.num_places is not None else None,
    )
    rig.tier.submit(batch)
    (result,) = rig.tier.drain(LONG)
    assert result.ok.all()
    touched = np.zeros(len(memory), dtype=bool)
    for block, number in enumerate([2, 0, 1]):
        parts = []
        for start, length in zip(starts[block], sizes, strict=True):
            parts.append(memory[start : start + length])
            touched[start : start + length] = True
        assert np.concatenate(parts).tobytes() == rows[number].tobytes()
    assert (memory[~touched] == 0xEE).all(), "bytes beside the pieces were written"
    rig.close()


@every_tier
def test_many_batches_at_once_and_one_block_read_by_many(rig: Rig) -> None:
    rows = fresh(NUM_BLOCKS)
    for number in range(NUM_BLOCKS):
        rig.send(Way.WRITE, [number], rows[number : number + 1])
    assert all(result.ok.all() for result in rig.tier.drain(LONG))
    wanted = [[n % NUM_BLOCKS, (n + 1) % NUM_BLOCKS, 0] for n in range(1, 40)]
    wanted = [numbers for numbers in wanted if len(set(numbers)) == 3]
    landings = {}
    for numbers in wanted:
        into = poisoned(3)
        landings[rig.send(Way.READ, numbers, into)] = (numbers, into)
    results = rig.tier.drain(LONG)
    assert sorted(result.batch_id for result in results) == sorted(landings)
    for result in results:
        numbers, into = landings[result.batch_id]
        assert result.ok.all()
        assert (into == rows[numbers]).all()
    assert rig.tier.poll() == [], "a result comes once"


@every_keyed
def test_racing_writers_of_one_key_do_no_harm(rig: Rig) -> None:
    rows = fresh(1)
    for _ in range(20):
        rig.send(Way.WRITE, [3], rows)
    results = rig.tier.drain(LONG)
    assert len(results) == 20
    assert all(result.ok.all() for result in results)
    into, _ = rig.read([3])
    assert (into == rows).all()


@every_tier
def test_what_was_never_written_fails_alone(rig: Rig) -> None:
    rows = fresh(2)
    rig.write([0, 2], rows)
    into, result = rig.read([0, 1, 2, 5])
    assert result.ok.tolist() == [True, False, True, False]
    assert set(result.reasons) == {1, 3}
    assert all("holds nothing" in reason for reason in result.reasons.values())
    assert result.num_bytes == 2 * BLOCK_BYTES
    assert (into[[0, 2]] == rows).all()


@every_tier
@pytest.mark.parametrize(
    "error", [TransferError("worn out"), OSError(28, "disk full"), KeyError("what")]
)
def test_a_fault_of_any_kind_fails_one_block_each_way(rig: Rig, error: Exception) -> None:
    rows = fresh(4)
    rig.set_fault(failing(1, error=error))
    result = rig.do(Way.WRITE, [0, 1, 2, 3], rows)
    assert result.ok.tolist() == [True, False, True, True]
    assert str(error) in result.reasons[1]
    rig.set_fault(failing(2, error=error))
    into, result = rig.read([0, 1, 2, 3])
    assert result.ok.tolist() == [True, False, False, True]
    assert (into[[0, 3]] == rows[[0, 3]]).all()
    rig.set_fault(None)
    into, result = rig.read([2, 3])
    assert result.ok.all(), "a read that failed harms nothing"
    assert (into == rows[2:]).all()


@every_placed
def test_a_write_that_failed_leaves_its_place_without_a_block(rig: Rig) -> None:
    rig.write([0, 1], fresh(2))
    rig.set_fault(failing(1))
    assert rig.do(Way.WRITE, [1], fresh(1)).ok.tolist() == [False]
    rig.set_fault(None)
    assert rig.read([0, 1])[1].ok.tolist() == [True, False], "the old block must not be read"


@every_tier
def test_what_is_lost_cannot_be_read_and_can_be_written_again(rig: Rig) -> None:
    rows = fresh(2)
    rig.write([0, 1], rows)
    rig.lose([1, 3])
    assert rig.read([0, 1])[1].ok.tolist() == [True, False]
    rig.write([1], rows[1:])
    into, result = rig.read([0, 1])
    assert result.ok.all()
    assert (into == rows).all()


@every_keyed
def test_finding_says_which_are_there(rig: Rig, kind: str) -> None:
    rig.write([0, 3], fresh(2))
    assert rig.do(Way.FIND, [0, 1, 2, 3]).ok.tolist() == [True, False, False, True]
    rig.lose([0])
    assert rig.do(Way.FIND, [0, 3]).ok.tolist() == [False, True]
    rig.set_fault(failing(3, way=Way.FIND))
    result = rig.do(Way.FIND, [0, 3])
    assert result.ok.tolist() == [False, False]
    assert "worn out" in result.reasons[1] or kind[:2] in (
        "s3",
        "gs",
        "az",
    )  # HEAD answers have no words


@every_tier
def test_forgetting_is_for_everything_written_before(rig: Rig) -> None:
    rows = fresh(2)
    rig.write([0], rows[:1])
    gate = Gate(rig, Way.WRITE, 1)
    rig.send(Way.WRITE, [1], rows[1:])
    gate.wait_reached()
    rig.tier.forget()
    rig.send(Way.WRITE, [2], rows[:1])  # after it
    gate.open()
    rig.tier.drain(LONG)
    assert rig.read([0, 1, 2])[1].ok.tolist() == [False, False, True]


@every_tier
def test_nothing_is_begun_after_its_deadline(rig: Rig) -> None:
    rig.write([0], fresh(1))
    into = poisoned(1)
    rig.send(Way.READ, [0], into, within=-1.0)
    (result,) = rig.tier.drain(LONG)
    assert result.ok.tolist() == [False]
    assert "in time" in result.reasons[0]
    assert (into == 0xEE).all()


@every_tier
def test_a_hung_read_holds_up_neither_polls_nor_writes(rig: Rig) -> None:
    rows = fresh(2)
    rig.write([0], rows[:1])
    gate = Gate(rig, Way.READ, 0)
    into = poisoned(1)
    hung = rig.send(Way.READ, [0], into)
    gate.wait_reached()
    assert rig.tier.poll() == []
    assert rig.tier.drain(0.01) == [], "a drain gives up when its time is over"
    down = rig.send(Way.WRITE, [1], rows[1:])
    results = rig.poll_one()
    assert [result.batch_id for result in results] == [down]
    gate.open()
    (result,) = rig.tier.drain(LONG)
    assert result.batch_id == hung
    assert (into == rows[:1]).all()


@every_tier
def test_a_result_is_late_rather_than_untrue(rig: Rig, kind: str) -> None:
    """Past its deadline a block under way may still be written to: no result until it is not."""
    rows = fresh(3)
    rig.write([0, 1, 2], rows)
    for within in (1.0, 4.0, 16.0):  # until the block is begun, also on a machine that is busy
        gate = Gate(rig, Way.READ, 1)
        into = poisoned(3)
        rig.send(Way.READ, [0, 1, 2], into, within=within)
        if gate.is_reached(within):
            break
        gate.open()
        (missed,) = rig.tier.drain(LONG)
        assert (into[missed.ok] == rows[missed.ok]).all()
        rig.wait_well()
    time.sleep(within + 0.05)
    early = rig.tier.poll()
    assert not early or kind in SIDE_BY_SIDE
    gate.open()
    (result,) = early or rig.tier.drain(LONG)
    if early:
        time.sleep(0.2)  # now it comes, after its result
        assert not result.ok[1]
        assert "in time" in result.reasons[1]
        assert (into[1] == 0xEE).all(), "nobody touches the memory after the result"
    elif kind not in SIDE_BY_SIDE:
        assert not result.ok[2], "the block that had not begun in time is not begun"
        assert (into[2] == 0xEE).all()
    assert (into[result.ok] == rows[result.ok]).all()


@every_tier
def test_what_waits_behind_a_hung_medium_fails_in_time(rig: Rig) -> None:
    """No thread is free, and still the batch ends: its memory was never touched."""
    rig.write([0, 2], fresh(2))
    gate = Gate(rig, Way.READ, 0)
    for _ in range(8):  # more than there are threads
        rig.send(Way.READ, [0], poisoned(1))
    into = poisoned(1)
    behind = rig.send(Way.READ, [2], into, within=0.05)
    results = rig.poll_one()
    assert [(r.batch_id, r.ok.tolist()) for r in results] == [(behind, [False])]
    assert "in time" in results[0].reasons[0]
    gate.open()
    assert len(rig.tier.drain(LONG)) == 8
    assert (into == 0xEE).all()


@every_tier
def test_a_tier_that_goes_away_fails_at_once_and_comes_back(rig: Rig) -> None:
    rows = fresh(2)
    rig.write([0, 2], rows)
    assert rig.tier.ailment == ""
    gate = Gate(rig, Way.READ, 0)
    for _ in range(8):
        rig.send(Way.READ, [0], poisoned(1))
    gate.wait_reached()
    waiting = rig.send(Way.READ, [2], poisoned(1))
    rig.go_away("cable pulled")
    assert "cable pulled" in rig.tier.ailment
    assert not rig.poll_for(waiting).ok.any(), "nobody waits for a thread"
    late = rig.send(Way.WRITE, [0], rows[:1])
    result = rig.poll_for(late)
    assert not result.ok.any()
    assert "cable pulled" in result.reasons[0]
    gate.open()
    rig.tier.drain(LONG)
    rig.set_fault(None)
    rig.come_back()
    assert rig.tier.ailment == ""
    into, result = rig.read([0, 2])
    assert result.ok.all(), "what it had it still has"
    assert (into == rows).all()


@every_tier
def test_closing_finishes_what_was_submitted(rig: Rig) -> None:
    rows = fresh(3)
    for number in range(3):
        rig.send(Way.WRITE, [number], rows[number : number + 1])
    assert rig.tier.close() == ()
    assert rig.tier.close() == ()
    results = rig.tier.poll()
    assert len(results) == 3
    assert all(result.ok.all() for result in results)
    assert rig.tier.drain() == []
    with pytest.raises(ClosedError, match=f"tier {rig.tier.name} is closed"):
        rig.send(Way.READ, [0], poisoned(1))


@every_tier
def test_closing_a_hung_tier_says_what_it_leaves_behind(rig: Rig, kind: str) -> None:
    rows = fresh(2)
    rig.write([0, 1], rows)
    gate = Gate(rig, Way.READ, 0)
    into = [poisoned(1) for _ in range(8)]
    sent = [rig.send(Way.READ, [0], each) for each in into]
    waiting = rig.send(Way.READ, [1], poisoned(1))
    gate.wait_reached()
    start = time.monotonic()
    abandoned = rig.tier.close(0.05)
    assert time.monotonic() - start < LONG / 2
    assert bool(abandoned) != (kind in PULLS_BACK)
    assert set(abandoned) < set(sent)
    failed = {result.batch_id for result in rig.tier.poll()}
    assert failed == {*sent, waiting} - set(abandoned), "each is either over or left behind"
    assert rig.tier.close() == abandoned
    gate.open()  # it wakes up long after: the memory had to stay
    rig.tier.drain(LONG)
    for batch, each in zip(sent, into, strict=True):
        assert (each == (rows[0] if batch in abandoned else 0xEE)).all()


@every_tier
@pytest.mark.parametrize("way", [Way.READ, Way.WRITE])
def test_batches_that_do_not_fit_are_refused(rig: Rig, way: Way) -> None:
    kept = fresh(NUM_BLOCKS)
    rig.write(range(NUM_BLOCKS), kept)
    rows = poisoned(2)
    places = as_slots([0, 1]) if rig.tier.num_places is not None else None
    end = time.monotonic() + LONG
    at = rows.ctypes.data + np.arange(2)[:, None] * BLOCK_BYTES
    size = np.array([BLOCK_BYTES], dtype=np.int64)
    both = keys([0, 1])
    bad = [
        Batch(BatchId(1000), way, Keys.empty(), end, at[:0], size, places),
        Batch(BatchId(1001), way, both, end, at[:1], size, places),
        Batch(BatchId(1002), way, both, end, at, size - 1, places),
        Batch(BatchId(1003), way, both, end, at, size + 1, places),
        Batch(BatchId(1004), way, both, end, np.hstack([at, at]), size, places),
        Batch(BatchId(1005), way, both, end, np.hstack([at, at]), np.array([48, 0]), places),
    ]
    if places is not None:
        bad += [
            Batch(BatchId(1010), Way.FIND, both, end),  # it has places, and knows no keys
            Batch(BatchId(1006), way, both, end, at, size, None),
            Batch(BatchId(1007), way, both, end, at, size, as_slots([1])),
            Batch(BatchId(1008), way, both, end, at, size, np.array([-1, 2])),
            Batch(BatchId(1009), way, both, end, at, size, as_slots([0, rig.tier.num_places or 0])),
        ]
    for batch in bad:
        with pytest.raises(InputError, match=f"tier {rig.tier.name}, batch {batch.id}"):
            rig.tier.submit(batch)
    assert rig.tier.poll() == []
    assert (rows == 0xEE).all()
    again, _ = rig.read(range(NUM_BLOCKS))
    assert (again == kept).all(), "nothing was lost"


@every_tier
def test_an_id_under_way_is_not_given_twice(rig: Rig) -> None:
    gate = Gate(rig, Way.WRITE, 0)
    rows = fresh(1)
    rig.send(Way.WRITE, [0], rows)
    gate.wait_reached()
    rig.next_id -= 1
    with pytest.raises(InputError, match="batch 1 is under way"):
        rig.send(Way.WRITE, [1], rows)
    gate.open()
    assert len(rig.tier.drain(LONG)) == 1


@every_tier
@pytest.mark.parametrize("size", [0, -8])
def test_blocks_without_bytes_are_refused(kind: str, size: int) -> None:
    with pytest.raises(InputError, match=f"of {size} bytes"):
        TIERS[kind](size)
