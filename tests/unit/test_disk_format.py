"""docs/DISK_FORMAT.md against the bytes: every offset in its tables is the real one."""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.fakes.crafted_keys import keys

from kvferry.cache.slots import as_slots
from kvferry.tiers.disk import state
from kvferry.tiers.disk.block_file import AesProver, HashProver
from kvferry.tiers.disk.files import DiskFile
from kvferry.tiers.disk.index import DiskIndex, Shape
from kvferry.tiers.disk.state import DayBudget, read_reset, write_reset
from kvferry.tiers.disk.superblock import StoreIdentity, Superblock

PAGE = (Path(__file__).parents[2] / "docs" / "DISK_FORMAT.md").read_text()
DAY = 86400.0
Table = dict[int, tuple[int, str]]


def table(name: str) -> Table:
    """Offset to bytes and words, of the table behind ``<!-- name -->``."""
    text = PAGE.split(f"<!-- {name} -->")[1].split("\n\n")[1]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (.*) \|$", text, re.MULTILINE)
    return {int(at): (int(count), words) for at, count, words in rows}


def number(data: bytes, rows: Table, words: str) -> int:
    """The number that the table says lies where its row begins with ``words``."""
    ((at, count),) = [(at, row[0]) for at, row in rows.items() if row[1].startswith(words)]
    return int.from_bytes(data[at : at + count], "little")


def text(data: bytes, rows: Table, words: str) -> bytes:
    ((at, count),) = [(at, row[0]) for at, row in rows.items() if row[1].startswith(words)]
    return data[at : at + count]


def test_rows_leave_no_gap() -> None:
    for name, end in (("superblock", 448), ("page", 64), ("state", 1056)):
        rows = sorted((at, row[0]) for at, row in table(name).items())
        ends = [at + count for at, count in rows]
        gaps = [b for (b, _), a in zip(rows[1:], ends, strict=False) if a != b]
        assert gaps == {"state": [1024]}.get(name, [])
        assert ends[-1] == end


def test_the_superblock_is_as_written() -> None:
    identity = StoreIdentity(
        namespace=bytes(range(32)),
        block_bytes=70001,
        is_sealed=True,
        rank=3,
        num_ranks=5,
        stripe=1,
        num_stripes=2,
        family=b"family",
        label="größer",
    )
    block = Superblock(identity, 123456, b"i" * 16, b"k" * 16, 1_800_000_000)
    data, rows = block.pack(), table("superblock")
    assert text(data, rows, "`KVFERRY`") == b"KVFERRY\0"
    assert number(data, rows, "format") == 3
    assert text(data, rows, "store id") == b"i" * 16
    assert text(data, rows, "namespace") == bytes(range(32))
    assert text(data, rows, "family") == b"family".ljust(32, b"\0")
    for words, expected in {
        "bytes of a block": 70001,
        "pitch": 73728,
        "number of places": 123456,
        "rank": 3,
        "number of ranks": 5,
        "which of the directories": 1,
        "number of directories": 2,
        "0: blocks as they are": 1,
        "bytes of a proof": 28,
        "when it was made": 1_800_000_000,
        "bytes of the family": 6,
        "bytes of the label": len("größer".encode()),
    }.items():
        assert number(data, rows, words) == expected, words
    assert text(data, rows, "check of the key") == b"k" * 16
    assert text(data, rows, "label").rstrip(b"\0").decode() == "größer"


def test_a_page_is_as_written(tmp_path: Path) -> None:
    shape, rows, last = Shape(16), table("page"), Shape(16).per_page + 1
    (tmp_path / "index").write_bytes(bytes(shape.file_bytes(100)))
    (tmp_path / "state").write_bytes(bytes(4096))
    index = DiskIndex.open(tmp_path, Superblock(StoreIdentity(bytes(32), 4096), 100, b"i" * 16))
    index.reset(1 << 60)
    for turn in (1, 2):
        index.record_written(as_slots([last]), keys([turn]), np.full((1, 16), turn, np.uint8))
        index.commit()
    index.close()
    data = (tmp_path / "index").read_bytes()
    assert len(data) == 2 * 2 * 4096
    assert not any(data[: 2 * 4096]), "no place of the first page was written"
    for at, commit in ((2, 2), (3, 1)):
        page = data[at * 4096 : (at + 1) * 4096]
        digest = blake2b(page[16:], digest_size=16, key=b"i" * 16, person=b"kvferry.page").digest()
        assert text(page, rows, "digest") == digest
        for words, expected in {
            "commit": commit,
            "number of this page": 1,
            "reset number": 1 << 60,
        }.items():
            assert number(page, rows, words) == expected, words
        assert int.from_bytes(page[120:128], "little") == commit
        assert page[128:160] == keys([commit]).array.tobytes()
        assert page[160:176] == bytes([commit]) * 16
        assert not any(page[28:32] + page[40:120] + page[176:])


def test_records_in_a_page_are_as_said() -> None:
    (plain, sealed) = re.findall(r"(\d+) with proofs of 16 bytes, (\d+) with 28", PAGE)[0]
    assert Shape(HashProver.proof_bytes).per_page == int(plain)
    assert Shape(AesProver.proof_bytes).per_page == int(sealed)


def test_the_state_is_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows = tmp_path / "state", table("state")
    path.write_bytes(bytes(4096))
    file = DiskFile(path)
    assert read_reset(file) is None, "it was never written"
    write_reset(file, 1_800_000_000_123_456_789)
    monkeypatch.setattr(state, "time", SimpleNamespace(time=lambda: 1_800_000_000))
    budget = DayBudget(file, 1e9)
    assert budget.take(12345)
    budget.save()
    assert read_reset(file) == 1_800_000_000_123_456_789
    file.close()
    data = path.read_bytes()
    assert len(data) == 4096
    for begin in (0, 512):
        sector = data[begin : begin + 512]
        assert number(sector, rows, "reset number") == 1_800_000_000_123_456_789
        digest = blake2b(sector[16:24], digest_size=16, person=b"kvferry.reset").digest()
        assert text(sector, rows, "digest of bytes 16 to 23") == digest
    assert number(data, rows, "bytes that") == 12345
    assert number(data, rows, "when") == 1_800_000_000
    digest = blake2b(data[1040:1056], digest_size=16, person=b"kvferry.budget").digest()
    assert text(data, rows, "digest of bytes 1040") == digest
    assert not any(data[1056:])


@pytest.mark.parametrize("pause", [600.0, DAY / 3, 2 * DAY])
def test_no_day_sees_more_than_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    """Bit by bit or after a rest; and a restart gives nothing back."""
    now = 1_800_000_000.0
    monkeypatch.setattr(state, "time", SimpleNamespace(time=lambda: now))
    path = tmp_path / "state"
    path.write_bytes(bytes(4096))
    taken: list[float] = []
    while now < 1_800_000_000 + 3 * DAY:
        budget = DayBudget(DiskFile(path), 80_000)
        while budget.take(100):
            taken.append(now)
        budget.save()
        now += pause
    most = max(sum(1 for each in taken if at <= each < at + DAY) for at in set(taken))
    assert 80_000 / 8 <= 100 * most <= 80_000
