"""A shared store in which every block of a test is the last of two in one object.

So a suite that knows blocks one by one runs over packs: what befalls an object befalls one block.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from kvferry.core.keys import Keys
from kvferry.tiers.contract import CLOSE_SECONDS, Batch, BatchId, Result, Way, check_batch
from kvferry.tiers.remote.tier import RemoteTier


class Paired:
    """Sends each block behind another of its own; a block counts if both do. Owns the tier."""

    def __init__(self, tier: RemoteTier) -> None:
        self.inner = tier
        self.name = tier.name
        self.num_places: int | None = None
        self.block_bytes = tier.block_bytes
        self._batches: dict[BatchId, tuple[Batch, np.ndarray]] = {}

    def submit(self, batch: Batch) -> None:
        """The same blocks, each behind the one whose key is a digest of its own."""
        check_batch(self.inner, batch)
        pairs = [(hashlib.blake2b(key, digest_size=32).digest(), key) for key in batch.keys]
        keys = Keys.from_bytes([key for pair in pairs for key in pair])
        runs = np.repeat(np.arange(len(batch)), 2)
        # As the block is cut in pieces, so is the other one.
        others = np.zeros((len(batch), self.block_bytes), dtype=np.uint8)
        for row, (key, _) in zip(others, pairs, strict=True):
            if batch.way is Way.WRITE:
                row[:] = self._content(key)
        addresses = batch.addresses
        if batch.way is not Way.FIND:
            starts = np.cumsum(batch.sizes) - batch.sizes
            rows = others.ctypes.data + np.arange(len(batch))[:, None] * self.block_bytes + starts
            both = np.stack((rows, batch.addresses), axis=1)
            addresses = both.reshape(2 * len(batch), len(batch.sizes))
        self.inner.submit(replace(batch, keys=keys, addresses=addresses, runs=runs))
        self._batches[batch.id] = (batch, others)

    def poll(self) -> list[Result]:
        return [self._single(result) for result in self.inner.poll()]

    def drain(self, timeout: float | None = None) -> list[Result]:
        return [self._single(result) for result in self.inner.drain(timeout)]

    def _single(self, result: Result) -> Result:
        batch, others = self._batches.pop(result.batch_id)
        if batch.way is Way.READ:
            for at, key in enumerate(batch.keys):
                if result.ok[2 * at]:
                    content = self._content(hashlib.blake2b(key, digest_size=32).digest())
                    assert (others[at] == content).all(), "another block's bytes"
        ok = result.ok[::2] & result.ok[1::2]
        assert (ok == (result.ok[::2] | result.ok[1::2])).all(), "half of an object"
        reasons = {at // 2: why for at, why in result.reasons.items()}
        return replace(result, ok=ok, reasons=reasons, num_bytes=result.num_bytes // 2)

    def _content(self, key: bytes) -> np.ndarray:
        digest = np.frombuffer(key, dtype=np.uint8)
        return np.resize(digest, self.block_bytes)

    @property
    def ailment(self) -> str:
        return self.inner.ailment

    def forget(self) -> None:
        self.inner.forget()

    def close(self, timeout: float = CLOSE_SECONDS) -> tuple[BatchId, ...]:
        return self.inner.close(timeout)
