"""docs/DISK_FORMAT.md against the bytes: every offset in its tables is the real one."""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path

import numpy as np

from kvferry.tiers.disk.block_file import Digests, Seals
from kvferry.tiers.disk.files import DiskFile
from kvferry.tiers.disk.journal_pages import Header, Seal, Shape, pack
from kvferry.tiers.disk.state import read_reset, read_spent, write_reset, write_spent
from kvferry.tiers.disk.superblock import StoreIdentity, Superblock

PAGE = (Path(__file__).parents[2] / "docs" / "DISK_FORMAT.md").read_text()
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
    for name, end in (("superblock", 448), ("header", 512), ("state", 1056)):
        rows = sorted((at, row[0]) for at, row in table(name).items())
        ends = [at + count for at, count in rows]
        gaps = [b for (b, _), a in zip(rows[1:], ends, strict=False) if a != b]
        assert gaps == {"header": [96], "state": [1024]}.get(name, [])
        assert ends[-1] == end


def test_the_superblock_is_as_written() -> None:
    identity = StoreIdentity(
        namespace=bytes(range(32)),
        block_bytes=70001,
        pitch=73728,
        proof_bytes=28,
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
    assert number(data, rows, "format") == 2
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


def test_the_header_is_as_written() -> None:
    last = np.array([7, 8], dtype=np.uint32)
    data = Header(Seal(9, b"t" * 32), 77, last).pack(Shape(16), b"i" * 16)
    rows = table("header")
    assert text(data, rows, "`KVFYJRNL`") == b"KVFYJRNL"
    for words, expected in {
        "format": 2,
        "bytes of a page": 4096,
        "bytes of a proof": 16,
        "the page behind": 77,
        "generation": 9,
        "how many places": 2,
    }.items():
        assert number(data, rows, words) == expected, words
    assert text(data, rows, "salt") == b"t" * 32
    assert text(data, rows, "the places in the last")[:8] == last.astype("<u4").tobytes()


def test_a_page_is_as_written() -> None:
    shape = Shape(16)
    records = np.zeros(2, dtype=shape.record)
    records["place"] = [5, 6]
    records["key"] = [[1, 2, 3, 4], [5, 6, 7, 8]]
    records["proof"] = 0xAB
    before = np.array([3], dtype=np.uint32)
    data = pack(shape, Seal(9, b"t" * 32), records, 12, 10, before, 77).tobytes()
    rows = table("page")
    assert len(data) == 4096
    for words, expected in {
        "generation": 9,
        "number of this page": 12,
        "base": 10,
        "number of records": 2,
        "number of places before": 1,
        "reset number": 77,
    }.items():
        assert number(data, rows, words) == expected, words
    assert data[64:68] == (3).to_bytes(4, "little")
    begins = 64 + 4 * shape.per_page
    assert data[begins : begins + 52] == records[0].tobytes()
    assert data[begins + 52 : begins + 104] == records[1].tobytes()
    assert records.dtype.itemsize == 36 + 16


def test_records_in_a_page_are_as_said() -> None:
    (plain, sealed) = re.findall(r"(\d+) with proofs of 16 bytes, (\d+) with 28", PAGE)[0]
    assert Shape(Digests.proof_bytes).per_page == int(plain)
    assert Shape(Seals.proof_bytes).per_page == int(sealed)


def test_the_state_is_as_written(tmp_path: Path) -> None:
    path, rows = tmp_path / "state", table("state")
    path.write_bytes(bytes(4096))
    file = DiskFile(path)
    assert read_reset(file) is None, "it was never written"
    write_reset(file, 1_800_000_000_123_456_789)
    write_spent(file, 12345, 1_800_000_000)
    assert read_reset(file) == 1_800_000_000_123_456_789
    assert read_spent(file) == (12345, 1_800_000_000)
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
