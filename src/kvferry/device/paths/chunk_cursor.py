"""Going through a job in chunks that fit a ring's slots: rows for the kernel, bytes for copies."""

from __future__ import annotations

from kvferry.device.job import CopyJob
from kvferry.device.kernels.rows import RowTable


class ChunkCursor:
    """Goes through a job in chunks as large as it is told; its attributes are the chunk at hand.

    Rows ``first_row`` to ``last_row`` of the job are bytes ``start`` to ``end`` of its blocks.
    """

    def __init__(self, job: CopyJob, rows: RowTable) -> None:
        self._rows = rows
        self._total = job.num_bytes
        self.first_row = self.last_row = self.start = self.end = 0

    @property
    def is_last(self) -> bool:
        return self.end == self._total

    @property
    def num_left(self) -> int:
        """The bytes after this chunk."""
        return self._total - self.end

    def fit(self, num_bytes: int, *, keep: int = 0) -> None:
        """Go on to the next chunk, of at most ``num_bytes``; leave ``keep`` bytes, or none."""
        self.first_row, self.start = self.last_row, self.end
        left = self._total - self.start
        wanted = left - keep if left > keep else left
        # A chunk ends where a row does, so it may fall short of its size but never exceed it.
        row = self._rows.row_at(self.start + (wanted if wanted < num_bytes else num_bytes))
        self.last_row = row if row > self.first_row else self.first_row + 1
        self.end = self._rows.position_of(self.last_row)
