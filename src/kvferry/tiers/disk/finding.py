"""Which of a ledger's two files holds its journal; the other is left without one."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.tiers.disk.entries import Entries
from kvferry.tiers.disk.files import JournalFile, read_whole, write_whole
from kvferry.tiers.disk.header import HEADER_BYTES, Header, erase_header, read_header, write_header
from kvferry.tiers.disk.journal import DiskJournal
from kvferry.tiers.disk.pages import Shape
from kvferry.tiers.disk.recovery import Found, recover


def newest_header(
    files: Sequence[JournalFile], shape: Shape, store_id: bytes
) -> tuple[JournalFile, Header] | None:
    """The file with the journal that counts, and its header. Only reads.

    After a crash between the two halves of a switch both files have one; the newer one counts.
    """
    found = [(file, read_header(file, shape, store_id)) for file in files]
    there = [(file, header) for file, header in found if header is not None]
    return max(there, key=lambda each: each[1].seal.generation, default=None)


def find_journal(
    files: tuple[JournalFile, JournalFile], shape: Shape, store_id: bytes, num_places: int
) -> tuple[DiskJournal, Found]:
    """The journal, ready for the next commit, and what it says; a new one where there is none.

    Leaves exactly one header, and nothing behind the journal's end that could be taken for more.
    """
    newest = newest_header(files, shape, store_id)
    if newest is None:
        return _begin(files, shape, store_id, num_places)
    file, header = newest
    found = recover(file, header, shape, num_places)
    # A killed process may leave in the page cache what never reached the medium, and after a failed
    # sync the kernel would not write it any more. What is believed here is written again.
    size = shape.page_bytes
    tail = read_whole(file, found.base * size, (found.end - found.base) * size)
    write_whole(file, found.base * size, tail + bytes((found.junk_end - found.end) * size))
    write_header(file, header, shape, store_id)
    for other in files:
        if other is not file:
            erase_header(other)
    return DiskJournal(file, shape, header.seal, found.end, found.before), found


def _begin(
    files: tuple[JournalFile, JournalFile], shape: Shape, store_id: bytes, num_places: int
) -> tuple[DiskJournal, Found]:
    is_new = not any(any(read_whole(file, 0, HEADER_BYTES)) for file in files)
    for file in files:
        erase_header(file)
    journal = DiskJournal.begin(files[0], shape, 1)
    journal.declare(store_id)
    found = Found(Entries(num_places, shape), journal.end, journal.end, journal.before, journal.end)
    if not is_new:
        found.report.words = "no journal could be read: everything is left out"
    return journal, found
