"""What of a request is where: the look-up over all groups, host first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry import reach
from kvferry.identity import scope
from kvferry.keys import KeyChain, Keys, masked_key
from kvferry.lease import Lease
from kvferry.pool import Pool
from kvferry.scheduler.levels import LowerLevels
from kvferry.scheduler.request import GroupKeys
from kvferry.slot_states import SlotState
from kvferry.types import Key

Present = list[npt.NDArray[np.bool_]]
"""Per group, which slots of a request can be read."""


@dataclass(frozen=True, eq=False)
class Look:
    """One look at a request: how far the host alone reaches, and how far with the levels below."""

    keys: Keys
    computed_tokens: int
    max_tokens: int
    host: Present
    host_tokens: int
    everywhere: Present
    all_tokens: int


class Missing(NamedTuple):
    """A slot that no hit can do without, and that is not here: its first token, its key."""

    group: int
    token: int
    key: Key


class Matcher:
    """Finds the longest hit that all groups can serve. Changes nothing but pins it is asked for.

    Owns the cutting of a request's chain into slot keys, in the current epoch.
    """

    def __init__(
        self, groups: Sequence[reach.Group], host: Pool, lower: LowerLevels, hash_tokens: int
    ) -> None:
        self.groups = tuple(groups)
        self.epoch = 0
        self.hash_tokens = hash_tokens
        self._host = host
        self._lower = lower
        self._keys = [GroupKeys(group, hash_tokens) for group in self.groups]
        # A slot was matched by its key, so all its tokens are right: a hit may end inside it, at
        # any boundary that both the device's blocks and the engine's hash blocks know.
        self._alignment = math.lcm(hash_tokens, *(group.block_tokens for group in self.groups))
        self._step = math.lcm(self._alignment, *(group.stop_tokens for group in self.groups))
        self._is_full = all(isinstance(group, reach.FullAttention) for group in self.groups)
        self._can_serve: Present = [np.empty(0, dtype=bool) for _ in self.groups]

    def slot_keys(self, group: int, keys: Keys, slots: range) -> Keys:
        """The pool keys of these slots of a request."""
        return self.scoped(group, self._keys[group].cut(keys, slots))

    def all_keys(self, group: int, keys: Keys) -> Keys:
        """The pool keys of every whole slot of a request."""
        return self.slot_keys(group, keys, range(self._keys[group].count(keys)))

    def scoped(self, group: int, keys: Keys) -> Keys:
        """Chain keys, each at the end of one slot, as the pool knows them in this epoch."""
        return keys.masked(scope(self.epoch, group))

    def next_missing(self, keys: KeyChain, computed_tokens: int, max_tokens: int) -> Missing | None:
        """The slot every hit needs and the host lacks.

        The short way to a miss, which is all that a request finds whose history never left the
        device. None if there is no such slot, or if a longer look is needed to know.
        """
        longer = computed_tokens + self._step
        if not self._is_full or self._lower or longer - longer % self._step > max_tokens:
            return None
        for g, group in enumerate(self.groups):
            slot = computed_tokens // group.slot_tokens
            chain_key = self._keys[g].one(keys, slot)
            if chain_key is not None:
                key = masked_key(chain_key, scope(self.epoch, g))
                if self._host.state_of(key) is not SlotState.CACHED:
                    return Missing(g, slot * group.slot_tokens, key)
        return None

    def look(
        self, keys: Keys, computed_tokens: int, max_tokens: int, spare_tokens: int = 0
    ) -> Look:
        """See what is there, without claiming any of it: hits end ``spare_tokens`` early."""
        host = [self._present(g, keys, computed_tokens) for g in range(len(self.groups))]
        host_tokens = self._longest(host, computed_tokens, max_tokens, spare_tokens)
        everywhere, all_tokens = host, host_tokens
        if self._lower and host_tokens + self._alignment <= max_tokens:
            everywhere = [
                here | self._lower.cached(self.slot_keys(g, keys, range(len(here))))
                for g, here in enumerate(host)
            ]
            all_tokens = self._longest(everywhere, computed_tokens, max_tokens, spare_tokens)
        return Look(keys, computed_tokens, max_tokens, host, host_tokens, everywhere, all_tokens)

    def _present(self, g: int, keys: Keys, computed_tokens: int) -> npt.NDArray[np.bool_]:
        """Which slots of a group the host can give; those the engine has itself nobody asks for."""
        present = np.ones(self._keys[g].count(keys), dtype=bool)
        first = computed_tokens // self.groups[g].slot_tokens
        if first < len(present):
            asked = self.slot_keys(g, keys, range(first, len(present)))
            present[first:] = self._host.cached(asked)
        return present

    def _longest(
        self, present: Present, computed_tokens: int, max_tokens: int, spare_tokens: int = 0
    ) -> int:
        longest = reach.longest_hit(
            self.groups,
            present,
            max_tokens,
            alignment=self._alignment,
            computed_tokens=computed_tokens,
        )
        if not spare_tokens or longest <= computed_tokens:
            return longest
        return self._longest(present, computed_tokens, max(computed_tokens, longest - spare_tokens))

    def pin(self, look: Look) -> tuple[Lease | None, ...]:
        """Claim what the host's hit reads, by group; None where a group needs nothing."""
        return tuple(self._pin(g, look) for g in range(len(self.groups)))

    def _pin(self, g: int, look: Look) -> Lease | None:
        slots = self._needed(g, look.host_tokens, look.computed_tokens)
        return self._host.pin(self.slot_keys(g, look.keys, slots)) if slots else None

    def within(self, look: Look, num_slots: int) -> Look:
        """The same look, its longer hit cut down until so few slots complete it in the host.

        Half of every group would serve nobody: the hit gets shorter in all groups at once.
        """
        if self._num_to_bring(look, look.all_tokens) <= num_slots:
            return look
        best = look.host_tokens
        low, high = look.host_tokens // self._step, -(-look.all_tokens // self._step)
        while high - low > 1:
            middle = (low + high) // 2
            length = self._longest(look.everywhere, look.computed_tokens, middle * self._step)
            if self._num_to_bring(look, length) <= num_slots:
                best, low = max(best, length), middle
            else:
                high = middle
        return replace(look, all_tokens=best)

    def _num_to_bring(self, look: Look, num_tokens: int) -> int:
        """Slots that a hit of this length needs and that are not even on their way to the host."""
        count = 0
        for g in range(len(self.groups)):
            slots = self._needed(g, num_tokens, look.computed_tokens)
            if slots:
                count += int((~self._host.known(self.slot_keys(g, look.keys, slots))).sum())
        return count

    def to_ask(self, look: Look) -> Keys:
        """The keys of which to know whether a level has them: a longer hit may hang on them.

        No more of them than there is room for: what could not be brought up need not be known.
        """
        keys = [self.slot_keys(g, look.keys, range(len(here))) for g, here in enumerate(look.host)]
        unknown = [self._lower.unknown(k) & ~e for k, e in zip(keys, look.everywhere, strict=True)]
        maybe = [e | u for e, u in zip(look.everywhere, unknown, strict=True)]
        longest = self._longest(maybe, look.computed_tokens, look.max_tokens)
        if longest <= look.all_tokens:
            return Keys.empty()
        hoped = self.within(replace(look, everywhere=maybe, all_tokens=longest), self._lower.room)
        asked = Keys.empty()
        for g, group in enumerate(self.groups):
            stop = -(-hoped.all_tokens // group.slot_tokens)
            asked += keys[g][:stop].take(unknown[g][:stop])
        return asked

    def to_promote(self, look: Look) -> Iterator[tuple[int, Keys, Key | None]]:
        """By group, the run of blocks to complete for the longer hit, and the key before it."""
        for g in range(len(self.groups)):
            slots = self._needed(g, look.all_tokens, look.computed_tokens)
            lacking = np.flatnonzero(~look.host[g][slots.start : slots.stop])
            if len(lacking):
                run = slots[int(lacking[0]) :]
                yield g, self.slot_keys(g, look.keys, run), self.key_before(g, look.keys, run)

    def key_before(self, group: int, keys: Keys, slots: range) -> Key | None:
        """The key of the slot before these, None at the start of the request."""
        before = range(slots.start - 1, slots.start)
        return self.slot_keys(group, keys, before)[0] if slots.start else None

    def has(self, key: Key) -> bool:
        """Whether this block is in the host, on its way there, or below it."""
        if self._host.state_of(key) is not SlotState.FREE:
            return True
        return bool(self._lower) and bool(self._lower.cached(Keys.from_bytes((key,)))[0])

    def watch(self, look: Look) -> Keys:
        """Keys that must be cached before a hit longer than the host's is possible.

        Only full attention needs one block for every longer hit, and only if it is missing at the
        very next length: else another group stopped the hit, and may let it go on any time.
        """
        watch = Keys.empty()
        longer = self._next_length(look)
        for g, group in enumerate(self.groups):
            if isinstance(group, reach.FullAttention):
                first = look.host_tokens // group.slot_tokens
                missing = np.flatnonzero(~look.host[g][first:])
                slot = first + int(missing[0]) if len(missing) else len(look.host[g])
                if len(missing) and slot * group.slot_tokens < longer:
                    watch += self.slot_keys(g, look.keys, range(slot, slot + 1))
        return watch

    def lacking(self, look: Look) -> npt.NDArray[np.uint64]:
        """The first words, sorted, of all keys that the host lacked at this look."""
        words = [
            self.slot_keys(g, look.keys, range(len(here))).take(~here).array[:, 0]
            for g, here in enumerate(look.host)
        ]
        return np.sort(np.concatenate(words))

    def can_grow(self, look: Look) -> bool:
        """Whether a longer hit than the host's would still be within what was asked for."""
        return self._next_length(look) <= look.max_tokens

    def _next_length(self, look: Look) -> int:
        longer = look.host_tokens + self._step
        return longer - longer % self._step

    def first_missing(self, look: Look) -> Missing | None:
        """The slot that stopped the host's hit."""
        longer = self._next_length(look)
        if longer > look.max_tokens:
            return None
        for g, group in enumerate(self.groups):
            slots = self._needed(g, longer, look.computed_tokens)
            present = look.host[g][slots.start : slots.stop]
            if not present.all():
                slot = slots.start + int(present.argmin())
                key = self.slot_keys(g, look.keys, range(slot, slot + 1))[0]
                return Missing(g, slot * group.slot_tokens, key)
        return None

    def worth_storing(self, group: int, slots: range) -> npt.NDArray[np.bool_]:
        """Which of these slots any hit can ever read."""
        if slots.stop > len(self._can_serve[group]):
            tokens = 2 * slots.stop * max(g.slot_tokens for g in self.groups)
            self._can_serve = reach.can_serve(self.groups, tokens, alignment=self._alignment)
        return self._can_serve[group][slots.start : slots.stop]

    def num_device_blocks(self, num_tokens: int, computed_tokens: int) -> int:
        """How many device blocks a load of this hit fills, over all groups."""
        if num_tokens <= computed_tokens:  # what the engine has may end where no state is kept
            return 0
        return sum(
            len(reach.needed_device_blocks(group, num_tokens, computed_tokens=computed_tokens))
            for group in self.groups
        )

    def _needed(self, g: int, num_tokens: int, computed_tokens: int) -> range:
        if num_tokens <= computed_tokens:
            return range(0)
        return reach.needed(self.groups[g], num_tokens, computed_tokens=computed_tokens)
