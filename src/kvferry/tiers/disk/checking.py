"""Reads the blocks of a store that nobody has open, and holds them against their proofs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvferry.errors import StoreError
from kvferry.keys import Keys
from kvferry.tiers.disk.block_file import BlockFile
from kvferry.tiers.disk.entries import Proofs
from kvferry.tiers.disk.inspection import StoreContent
from kvferry.tiers.disk.proofs import Buffer, key_check, open_prover
from kvferry.types import SlotArray

_BUFFER_BYTES = 32 << 20


class FileChecker:
    """Checks blocks of one store, some megabytes at a time. Owns the file and a buffer."""

    def __init__(self, content: StoreContent, key: bytes | None) -> None:
        """StoreError where the key is missing or another one."""
        superblock, mine = content.superblock, content.superblock.identity
        if mine.is_sealed and key is None:
            raise StoreError(
                "it is encrypted: name the key, by disk_key_file or KVFERRY_DISK_KEY, to verify it"
            )
        key = key if mine.is_sealed else None
        if key is not None and key_check(key, superblock.store_id) != superblock.key_check:
            raise StoreError("it is encrypted with another key than the one given")
        self._prover = open_prover(mine.block_bytes, superblock.store_id, key)
        self._most = max(1, _BUFFER_BYTES // mine.pitch)
        self._buffer = Buffer(self._most, mine.pitch, is_sealed=mine.is_sealed)
        self._pitch = mine.pitch
        self._file = BlockFile(str(content.blocks_path), mine.pitch)

    def __call__(self, places: SlotArray, keys: Keys, proofs: Proofs) -> npt.NDArray[np.bool_]:
        """Which of these blocks are as they were written; what cannot be read is not."""
        order = np.argsort(places, kind="stable")
        right = np.zeros(len(places), dtype=bool)
        for start in range(0, len(order), self._most):
            part = order[start : start + self._most]
            read = self._read(places[part])
            found = self._prover.check(self._buffer, places[part], keys.array[part], proofs[part])
            right[part] = found & read
        return right

    def _read(self, places: SlotArray) -> npt.NDArray[np.bool_]:
        """Bring ascending places into the buffer, side by side; neighbours by one call."""
        done = np.zeros(len(places), dtype=bool)
        ends = np.flatnonzero(np.diff(places, append=places[-1:] + 2) != 1) + 1
        first = 0
        for end in ends.tolist():
            data = self._buffer.stored[first * self._pitch : end * self._pitch]
            try:
                self._file.read(int(places[first]), data)
                done[first:end] = True
            except OSError:
                for at in range(first, end):
                    done[at] = self._read_one(int(places[at]), at)
            first = end
        return done

    def _read_one(self, place: int, at: int) -> bool:
        try:
            self._file.read(place, self._buffer.stored[at * self._pitch : (at + 1) * self._pitch])
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._file.close()


def checker_of(key: bytes | None) -> Callable[[StoreContent], FileChecker]:
    """For ``verify_store``: opens checkers with this key."""
    return lambda content: FileChecker(content, key)
