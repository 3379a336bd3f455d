"""A block of nobody's, written to a store and read back: whether it is worth asking again.

A store may answer look-ups and small objects, and hang in what is as large as a block. So one that
requests have lost a deadline to proves itself with such an object, under a name as blocks have
them, while no request waits for it.
"""

from __future__ import annotations

import secrets

from kvferry.tiers.remote.client import Fault, StoreClient
from kvferry.tiers.remote.names import Whose
from kvferry.tiers.remote.sealing import Sealing
from kvferry.types import KEY_BYTES

_NOT_GIVEN = Fault("a block that it was given it does not give back")


class BlockTrial:
    """Owns the key of that block, which no prompt has."""

    def __init__(self, client: StoreClient, whose: Whose, sealing: Sealing) -> None:
        self._client = client
        self._whose = whose
        self._sealing = sealing
        self._key = secrets.token_bytes(KEY_BYTES)
        self._names = whose.names([self._key])

    async def make(self) -> Fault | None:
        """Write it, look it up, read it: all that orders do."""
        size = self._whose.object_bytes
        rooms = self._client.staging.lend(1)
        if not rooms:  # calls that hung may have them for a minute yet: nothing to try it with
            return None
        room = rooms[0][:size]
        self._sealing.plain(room)[:] = secrets.token_bytes(self._whose.block_bytes)
        self._sealing.seal(room, self._key)
        (end,) = await self._client.put(self._names, [room], replace=[True])
        if end is not None:  # without room for it there is nothing to be read
            return end if isinstance(end, Fault) else None
        (count,) = await self._client.find(self._names, size)
        if not isinstance(count, int):
            return count if isinstance(count, Fault) else _NOT_GIVEN
        (stored,) = await self._client.get(self._names, size, [])
        if not isinstance(stored, memoryview):
            return stored if isinstance(stored, Fault) else _NOT_GIVEN
        try:
            is_ours = self._sealing.unseal(stored, self._key) is not None
        finally:
            self._client.staging.give_back(stored)
        return None if is_ours else _NOT_GIVEN
