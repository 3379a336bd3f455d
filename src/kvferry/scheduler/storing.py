"""Which device blocks are stored, and when: as they are computed, or as they are about to go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry import reach
from kvferry.answers import DeviceBlocks
from kvferry.config import Config
from kvferry.errors import ConfigError, InputError
from kvferry.integers import integers
from kvferry.keys import Keys
from kvferry.policy import SeenOften, Watermark
from kvferry.pool import Pool
from kvferry.scheduler.matching import Matcher
from kvferry.scheduler.outbox import Outbox, StoreOrder
from kvferry.scheduler.request import RequestRecord
from kvferry.types import RequestId, as_slots

NO_BLOCK = -1
"""In a block table: the engine keeps no device block here (outside a window, say)."""

BlockTable = Sequence[int] | npt.NDArray[np.integer]
"""One group's device blocks of a request, by position."""


class Storing:
    """Turns computed blocks into store orders. Owns admission and the lazy watermark.

    Stores are the first to wait: while the bounds are reached nothing is ordered, and an eager
    request asks again in its next step.
    """

    def __init__(
        self,
        matcher: Matcher,
        pool: Pool,
        outbox: Outbox,
        config: Config,
        *,
        max_blocks: int | None,
        block_bytes: Sequence[int],
    ) -> None:
        self.is_lazy = config.store_mode == "lazy"
        if self.is_lazy and any(group.blocks_per_slot > 1 for group in matcher.groups):
            raise ConfigError(
                "store_mode: lazy stores single device blocks, but a slot here holds "
                f"{max(g.blocks_per_slot for g in matcher.groups)}; use eager"
            )
        self.admission = SeenOften(config.store_after, num_keys=pool.num_slots)
        self.num_shed = 0
        self._matcher = matcher
        self._pool = pool
        self._outbox = outbox
        self._max_blocks = max_blocks
        self._max_bytes = config.max_bytes_in_flight
        self._block_bytes = tuple(block_bytes)
        self._watermark = Watermark(most=max_blocks if max_blocks is not None else 1 << 20)

    # -- eager ----------------------------------------------------------------------------------

    def computed(
        self,
        request_id: RequestId,
        record: RequestRecord,
        keys: Keys,
        tables: Sequence[BlockTable],
        num_tokens: int,
    ) -> tuple[DeviceBlocks, ...]:
        """Order the whole slots below ``num_tokens`` that this request has not stored yet."""
        held = []
        todo = [
            range(record.stored[g], num_tokens // group.slot_tokens)
            for g, group in enumerate(self._matcher.groups)
        ]
        blocks = [self._blocks(g, slots, tables[g], num_tokens) for g, slots in enumerate(todo)]
        for g, slots in enumerate(todo):
            if not slots:
                continue
            fitting = self._fitting(g, keys, slots)
            self.num_shed += len(fitting) < len(slots)
            slots = fitting
            if not slots:
                continue
            record.stored[g] = slots.stop
            order = self._order(request_id, g, keys, slots, blocks[g][: len(slots)])
            if order is not None:
                self._outbox.store(order)
                held.append(DeviceBlocks(g, order.device_blocks))
        return tuple(held)

    def skip_known(self, record: RequestRecord, keys: Keys, num_tokens: int) -> None:
        """Count the whole slots below ``num_tokens`` as stored, group by group, if they are kept.

        Only where every hit reads every block: what is kept of a conversation is its beginning
        then, so the last of these slots speaks for all of them.
        """
        for g, group in enumerate(self._matcher.groups):
            count = num_tokens // group.slot_tokens
            if count > record.stored[g] and isinstance(group, reach.FullAttention):
                slot_keys = self._matcher.slot_keys(g, keys, range(count))
                if self._pool.known(slot_keys[-1:])[0]:
                    self._pool.touch(slot_keys)  # they are in use: keep them longer
                    record.stored[g] = count

    def _fitting(self, g: int, keys: Keys, slots: range) -> range:
        """The first of these slots, as far as the bounds allow; what is stored takes no room."""
        room = self._room(g)
        if len(slots) <= room:
            return slots
        new = np.flatnonzero(~self._pool.known(self._matcher.slot_keys(g, keys, slots)))
        return slots if len(new) <= room else slots[: int(new[room])]

    def _blocks(
        self, g: int, slots: range, table: BlockTable, num_tokens: int
    ) -> npt.NDArray[np.int64]:
        """The device blocks of these slots, a row each; refused before anything is claimed."""
        per_slot = self._matcher.groups[g].blocks_per_slot
        if slots and len(table) < slots.stop * per_slot:
            raise InputError(
                f"group {g}'s block table has {len(table)} blocks, the first "
                f"{num_tokens} tokens need {slots.stop * per_slot}"
            )
        blocks = integers(table[slots.start * per_slot : slots.stop * per_slot], "device blocks")
        _require_blocks(g, blocks)
        return blocks.reshape(-1, per_slot)

    def _order(
        self,
        request_id: RequestId,
        g: int,
        keys: Keys,
        slots: range,
        blocks: npt.NDArray[np.int64],
    ) -> StoreOrder | None:
        group = self._matcher.groups[g]
        slot_keys = self._matcher.slot_keys(g, keys, slots)
        wanted = (blocks != NO_BLOCK).all(axis=1)
        wanted &= self._matcher.worth_storing(g, slots)
        wanted &= self.admission.admits(slot_keys)
        chained = isinstance(group, reach.FullAttention)
        if chained and not wanted.all():  # what follows a block left out could never be reached
            wanted = np.logical_and.accumulate(wanted | self._pool.known(slot_keys))
        chosen = np.flatnonzero(wanted)
        parent = self._matcher.key_before(g, keys, slots) if chained else None
        if parent is not None and not self._matcher.has(parent):
            return None  # the same, and it would push out what can be reached
        lease = self._pool.reserve(slot_keys.take(chosen), parent=parent, chained=chained)
        if lease is None:
            return None
        places = self._outbox.rows(lease.slots[:, None], np.arange(group.blocks_per_slot))
        device_blocks = as_slots(blocks[chosen[lease.positions]].ravel())
        return StoreOrder(g, lease, device_blocks, places.ravel(), request_id)

    # -- lazy -----------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """How many blocks of its free queue the engine should offer in this step."""
        return self._watermark.depth if self.is_lazy else 0

    def demand(self, num_blocks: int) -> None:
        """The engine took this many device blocks in the step that just passed."""
        self._watermark.demand(num_blocks)

    def offered(self, g: int, keys: Keys, blocks: BlockTable) -> tuple[DeviceBlocks, ...]:
        """Order those of the blocks at the head of the free queue that are not stored yet."""
        if len(keys) != len(blocks):
            raise InputError(f"{len(keys)} keys for {len(blocks)} offered blocks; pair them up")
        if not 0 <= g < len(self._matcher.groups):
            raise InputError(f"there are {len(self._matcher.groups)} groups, got group {g}")
        device = integers(blocks, "device blocks")
        _require_blocks(g, device)
        if not self.is_lazy or not len(keys):
            return ()
        slot_keys = self._matcher.scoped(g, keys)
        wanted = ~self._pool.known(slot_keys) & self.admission.admits(slot_keys)
        # The queue may hold the same content twice.
        first = {key: at for at, key in reversed(list(enumerate(slot_keys)))}
        wanted &= np.isin(np.arange(len(keys)), list(first.values())) & (device != NO_BLOCK)
        # Soonest to go last: the pool keeps the front of a batch longest, as the front of a chain.
        chosen = np.flatnonzero(wanted)[: self._room(g)][::-1]
        lease = self._pool.reserve(slot_keys.take(chosen), chained=False)
        if lease is None:
            return ()
        device_blocks = as_slots(device[chosen[lease.positions]])
        self._outbox.store(StoreOrder(g, lease, device_blocks, lease.slots))
        return (DeviceBlocks(g, device_blocks),)

    @property
    def is_full(self) -> bool:
        """Whether the bounds let some group store nothing more for now.

        With nothing on its way they never will: whoever waited for that would wait for ever.
        """
        outbox = self._outbox
        if not outbox.num_blocks_from_device() and not outbox.bytes_in_flight(self._block_bytes):
            return False
        return any(self._room(g) <= 0 for g in range(len(self._matcher.groups)))

    def _room(self, g: int) -> int:
        """How many slots of this group may be ordered now without passing the bounds."""
        per_slot = self._matcher.groups[g].blocks_per_slot
        room = 1 << 40
        if self._max_blocks is not None:
            room = (self._max_blocks - self._outbox.num_blocks_from_device()) // per_slot
        if self._block_bytes and self._block_bytes[g]:
            bytes_left = self._max_bytes - self._outbox.bytes_in_flight(self._block_bytes)
            room = min(room, bytes_left // (self._block_bytes[g] * per_slot))
        return max(0, room)


def _require_blocks(group: int, blocks: npt.NDArray[np.int64]) -> None:
    if blocks.size and int(blocks.min()) < NO_BLOCK:
        raise InputError(
            f"group {group}'s block table holds {int(blocks.min())}; a block is 0 or more, "
            f"or NO_BLOCK ({NO_BLOCK})"
        )
