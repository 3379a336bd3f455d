"""Stores on a real file system: made, locked, grown, shrunk, shared out, removed."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys as numbered

from kvferry.cache.slots import as_slots
from kvferry.core.quantities import MiB
from kvferry.errors import StoreError, StoreInUseError
from kvferry.tiers.disk import files as allocation
from kvferry.tiers.disk import quota as room
from kvferry.tiers.disk.quota import (
    StoreLock,
    allocated_bytes,
    apparent_bytes,
    purge_store,
    store_bytes,
    stores_under,
)
from kvferry.tiers.disk.store import Store
from kvferry.tiers.disk.superblock import (
    DiskBound,
    StoreIdentity,
    Superblock,
    SuperblockError,
    read_superblock,
)

PITCH = 64 << 10
BOUND = DiskBound(16 * MiB)


def identity(name: int = 1, **changes: Any) -> StoreIdentity:
    made = StoreIdentity(
        namespace=bytes([name]) * 32,
        block_bytes=PITCH - 100,
        family=b"one server",
        label="a model",
    )
    return replace(made, **changes)


def fill(store: Store, numbers: list[int]) -> None:
    rows = np.random.default_rng().integers(0, 256, (len(numbers), 16), dtype=np.uint8)
    store.index.record_written(as_slots(numbers), numbered(numbers), rows)


def placed(store: Store) -> list[int]:
    """Where blocks were when it was opened, in the order written."""
    return store.index.take_recovered()[1].tolist()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_smaller_bound_shrinks_all_ranks_and_a_larger_one_lets_them_grow(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    ranks = [identity(n, rank=n, num_ranks=2) for n in order]
    places = []
    for size in (16, 8, 24):
        bound = DiskBound(size * MiB, num_ranks_here=2)
        with (
            Store.open(tmp_path, ranks[0], bound) as one,
            Store.open(tmp_path, ranks[1], bound) as two,
        ):
            held = sum(apparent_bytes(each.folder) for each in (one, two))
            assert bound.size * 0.9 < held <= bound.size
            assert one.num_places == two.num_places
            places.append(one.num_places)
            for each in (one, two):
                if size == 16:
                    fill(each, [0, 1, each.num_places - 1])
                else:
                    assert placed(each) == [0, 1]
    assert places[1] < places[0] < places[2]


def test_stores_that_nobody_uses_make_room_the_oldest_first(tmp_path: Path) -> None:
    third = BOUND.size // 3
    others = [
        Store.open(tmp_path, identity(name, family=bytes([name])), DiskBound((name - 1) * third))
        for name in (2, 3, 4)
    ]
    for other, used in zip(others[:2], (2000, 1000), strict=True):
        other.close()
        for file in other.folder.iterdir():
            os.utime(file, (used, used))
    held = others[2]  # open: never touched
    with Store.open(tmp_path, identity(1), DiskBound(2 * third)) as store:
        left = {each.path.name for each in stores_under(tmp_path)}
        assert left == {identity(n).folder_name for n in (1, 4)}
        assert len(store.notes) == 2
        assert identity(3).folder_name in store.notes[0]
        total = sum(apparent_bytes(each.path) for each in stores_under(tmp_path))
        assert total <= 2 * third
    held.close()


def test_where_there_is_no_room_it_says_why(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no room for a store.*raise the bound"):
        Store.open(tmp_path, identity(), DiskBound(PITCH))
    with pytest.raises(StoreError, match="must stay free"):
        Store.open(tmp_path, identity(), replace(BOUND, keep_free=1 << 60))
    with (
        Store.open(tmp_path, identity(2, family=b"2"), BOUND),
        pytest.raises(StoreError, match="other stores there hold"),
    ):
        Store.open(tmp_path, identity(), BOUND)


def test_a_second_process_is_refused_by_name(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from tests.unit.test_disk_store import BOUND, Store, identity\n"
        "store = Store.open(pathlib.Path(sys.argv[1]), identity(), BOUND)\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline() == b"open\n"
    try:
        words = rf"{identity().folder_name}.*{other.pid}.*disk"
        with pytest.raises(StoreInUseError, match=words):
            Store.open(tmp_path, identity(), BOUND)
        (listed,) = stores_under(tmp_path)
        assert f"process {other.pid}" in listed.holder
        with pytest.raises(StoreInUseError, match="stop that one first"):
            purge_store(listed.path)
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()
    Store.open(tmp_path, identity(), BOUND).close()  # the kernel let it go with the process


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"namespace": b"\1" * 31 + b"\2"}, "has namespace"),
        ({"block_bytes": PITCH}, "has block_bytes"),
        ({"is_sealed": True}, "holds unencrypted blocks"),
    ],
)
def test_what_does_not_agree_is_refused_and_left_alone(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with Store.open(tmp_path, identity(), BOUND) as store:
        fill(store, [1])
    with pytest.raises(StoreError, match=words):
        Store.open(tmp_path, identity(**change), BOUND)
    with Store.open(tmp_path, identity(), BOUND) as store:
        assert store.index.num_blocks == 1


def test_a_store_whose_superblock_cannot_be_believed_begins_anew(tmp_path: Path) -> None:
    with Store.open(tmp_path, identity(), BOUND) as store:
        fill(store, [1])
    path = store.folder / "superblock"
    bad = bytearray(path.read_bytes())
    bad[100] ^= 1
    path.write_bytes(bad)
    with Store.open(tmp_path, identity(), BOUND) as store:  # from its second copy
        assert placed(store) == [1]
    bad[600] ^= 1
    path.write_bytes(bad)
    with pytest.raises(SuperblockError, match="damaged"):
        read_superblock(store.folder)
    with pytest.raises(StoreError, match="no room"):
        Store.open(tmp_path, identity(), replace(BOUND, size=1))
    assert path.read_bytes() == bad
    with Store.open(tmp_path, identity(), BOUND) as store:
        assert placed(store) == []
        assert "begins anew" in store.notes[0]
        assert (store.index.report.bad_pages, store.index.report.torn_pages) == (0, 0)
        fill(store, [2])
    with Store.open(tmp_path, identity(), BOUND) as store:
        assert placed(store) == [2]


def test_a_store_of_another_format_is_refused_counted_and_left_alone(tmp_path: Path) -> None:
    with Store.open(tmp_path, identity(), BOUND) as store:
        fill(store, [1])
        folder = store.folder
    sector = bytearray(store.superblock.pack())
    sector[24:28] = (7).to_bytes(4, "little")
    sector[:16] = blake2b(sector[16:], digest_size=16, person=b"kvferry.super").digest()
    path = folder / "superblock"
    path.write_bytes((bytes(sector) * 2).ljust(4096, b"\0"))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(StoreError, match=rf"has format 7.*reads format 3.*purge {folder}"):
        Store.open(tmp_path, identity(), BOUND)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    (listed,) = stores_under(tmp_path)
    assert "has format 7" in listed.trouble
    holding = StoreLock.take(folder)  # as a server of that kvferry does
    with pytest.raises(StoreError, match="other stores there hold"):
        Store.open(tmp_path, identity(2, family=b"2"), BOUND)
    holding.close()
    assert "is gone" in purge_store(folder)
    Store.open(tmp_path, identity(), BOUND).close()


def test_no_flipped_bit_in_a_superblock_is_believed() -> None:
    block = Superblock(identity(), 1234)
    whole = block.pack()
    assert Superblock.unpack(whole) == block
    for bit in range(len(whole) * 8):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SuperblockError):
            Superblock.unpack(bytes(flipped))


def test_without_fallocate_files_are_sparse_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "_fallocate", lambda *args: False)
    with Store.open(tmp_path, identity(), BOUND) as store:
        assert "cannot reserve space" in store.notes[0]
        assert store.blocks_path.stat().st_size == store.num_places * PITCH
        assert store.blocks_path.stat().st_blocks == 0


def test_no_space_for_a_file_leaves_the_rest_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(tmp_path, identity(), BOUND) as store:
        fill(store, [1])
        places = store.num_places

    def full(fd: int, offset: int, count: int) -> bool:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(allocation, "_fallocate", full)
        with Store.open(tmp_path, identity(), DiskBound(2 * BOUND.size)) as store:
            assert "does not grow: no space" in store.notes[0]
            assert store.num_places == places
    with Store.open(tmp_path, identity(), BOUND) as store:
        assert store.num_places == places
        assert store.index.num_blocks == 1


def test_engines_of_one_server_share_equally_and_find_all_again(tmp_path: Path) -> None:
    """Data-parallel engines are no strangers that take turns."""
    families = (b"engine 0", b"engine 1")
    bound = replace(BOUND, num_ranks_here=2, families=frozenset(families))
    engines = [identity(10 + n, family=family) for n, family in enumerate(families)]
    places: set[int] = set()
    for order in ((0, 1), (1, 0), (0, 1)):
        with (
            Store.open(tmp_path, engines[order[0]], bound) as one,
            Store.open(tmp_path, engines[order[1]], bound) as two,
        ):
            for store in (one, two):
                assert len(placed(store)) == (store.num_places if places else 0)
                fill(store, [*range(store.num_places)])
            places |= {one.num_places, two.num_places}
    assert len(places) == 1
    assert store_bytes(max(places), engines[0]) > 0.45 * bound.size


def test_a_small_file_system_is_shared_by_all_ranks_and_keeps_its_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(root: Path) -> int:
        return 20 * MiB - sum(allocated_bytes(each.path) for each in stores_under(tmp_path))

    monkeypatch.setattr(room, "free_bytes", free)
    bound = DiskBound(100 * MiB, keep_free=4 * MiB, num_ranks_here=2)
    for server in (1, 2, 2):  # the second takes the bytes of the first
        ranks = [
            identity(10 * server + n, rank=n, num_ranks=2, family=bytes([server])) for n in (0, 1)
        ]
        with (
            Store.open(tmp_path, ranks[0], bound) as one,
            Store.open(tmp_path, ranks[1], bound) as two,
        ):
            assert abs(one.num_places - two.num_places) <= 1
            assert bound.keep_free <= free(tmp_path) < bound.keep_free + 4 * PITCH


def test_servers_that_come_and_go_never_fill_more_than_the_bound(tmp_path: Path) -> None:
    """Two models, two ranks each, at sizes that change; who is open is never touched."""
    rng = random.Random(11)
    bound = DiskBound(12 * MiB, num_ranks_here=2)
    open_now: dict[tuple[int, int], Store] = {}
    for _ in range(60):
        model, rank = rng.randrange(2), rng.randrange(2)
        mine = open_now.pop((model, rank), None)
        if mine is not None:
            mine.close()
        else:
            if not open_now and rng.random() < 0.3:
                bound = replace(bound, size=rng.choice((8, 12, 16)) * MiB)
            which = identity(
                10 * model + rank, rank=rank, num_ranks=2, family=bytes([model]), label=str(model)
            )
            try:
                open_now[model, rank] = Store.open(tmp_path, which, bound)
            except StoreError:  # the other model has it all
                assert any(other != model for other, _ in open_now)
        for store in open_now.values():
            assert apparent_bytes(store.folder) == sum(
                -(-each.stat().st_size // 4096) * 4096 for each in store.folder.iterdir()
            )
            assert store.blocks_path.stat().st_size == store.num_places * PITCH
        if open_now:
            assert sum(each.num_bytes for each in stores_under(tmp_path)) <= bound.size
    for store in open_now.values():
        store.close()


def test_recovery_says_what_it_did(tmp_path: Path) -> None:
    """The newer copy of one page is damaged, and the only one of another."""
    with Store.open(tmp_path, identity(), BOUND) as store:
        fill(store, [1])
        store.index.commit()
        fill(store, [2, 100])
    assert str(store.index.report).startswith("0 blocks from 0 pages")
    path = store.folder / "index"
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    data[3 * 4096 + 3000] ^= 1
    path.write_bytes(data)
    with Store.open(tmp_path, identity(), BOUND) as store:
        report = store.index.report
        assert placed(store) == [1]
    assert (report.num_blocks, report.bad_pages, report.torn_pages) == (1, 1, 1)
    assert "1 pages had gone bad" in str(report)
    assert "one copy of 1 pages was not whole" in str(report)
