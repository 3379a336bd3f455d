"""How many bytes a store may take: its share of the bound, above the floor of free space.

::

    bound of the directory  |  open stores of others  |  rank 0 here  |  rank 1 here  |  ...
                               never touched             equal shares

Stores that nobody has open and that are not ours are removed when their bytes are needed, those
first that were used longest ago. Those of this server's other ranks are left: they may be about to
be opened. All of this while alone in the directory, so that two who start at once cannot both take
the last bytes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import StoreError, StoreInUseError
from kvferry.quantities import format_size
from kvferry.tiers.disk.folder import (
    StoreFolder,
    allocated_bytes,
    remove_remains,
    remove_store,
    stores_under,
)
from kvferry.tiers.disk.ledger import journal_bytes
from kvferry.tiers.disk.pages import MOST_PLACES, Shape
from kvferry.tiers.disk.store_identity import StoreIdentity

log = logging.getLogger(__name__)

_SMALL_FILES = 3 * 4096  # superblock, lock and epoch
_ASIDE = 4096  # the superblock that takes the place of the old one


@dataclass(frozen=True)
class DiskBound:
    """What stores may take under one directory.

    ``size`` bounds all of this host's stores there, whoever wrote them; ``keep_free`` stays free on
    the file system; ``num_ranks_here`` ranks of this server share it.
    """

    size: int
    keep_free: int = 0
    num_ranks_here: int = 1


def store_bytes(num_places: int, identity: StoreIdentity) -> int:
    """What a store of so many places takes, everything counted."""
    journals = 2 * journal_bytes(Shape(identity.proof_bytes), num_places)
    return num_places * identity.pitch + journals + _SMALL_FILES + _ASIDE


def most_places(num_bytes: int, identity: StoreIdentity) -> int:
    """The most places whose store takes no more than ``num_bytes``; 0 if not even one fits."""
    low, high = 0, MOST_PLACES - 1
    while low < high:
        middle = (low + high + 1) // 2
        if store_bytes(middle, identity) <= num_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def free_bytes(root: Path) -> int:
    """Free on the file system, for users that are not root."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


class DiskRoom:
    """The sharing out of one directory, for one store of ``identity`` that is about to be opened.

    ``shrink`` makes a store that nobody has open smaller, to so many places. ``notes`` tells what
    was done to others. Only while alone in the directory.
    """

    def __init__(
        self,
        root: Path,
        identity: StoreIdentity,
        bound: DiskBound,
        shrink: Callable[[StoreFolder, int], None],
    ) -> None:
        self.notes: list[str] = []
        self._root = root
        self._identity = identity
        self._bound = bound
        self._shrink = shrink
        self._mine = root / identity.folder_name
        remove_remains(root)
        self._others = [each for each in stores_under(root) if each.path != self._mine]

    def make(self) -> int:
        """How many places the store may have; what is in the way is removed. StoreError if none."""
        share = self._share()
        if most_places(min(share, self._reachable(share)), self._identity) < 1:
            raise StoreError(self._why_not(share))  # before anything is removed in vain
        self._remove_while(lambda: self._left_of_bound() < share)
        if self._left_of_bound() < share:
            self._shrink_siblings(share)
        num_bytes = min(share, self._left_of_bound())
        self._remove_while(lambda: self._above_floor() < num_bytes)
        num_bytes = min(num_bytes, self._above_floor())
        num_places = most_places(num_bytes, self._identity)
        if num_places < 1:
            raise StoreError(self._why_not(share))
        return num_places

    def _share(self) -> int:
        """Ours, if every rank of this server here gets as much."""
        theirs = sum(o.num_bytes for o in self._others if o.is_open and not self._is_sibling(o))
        return max(0, self._bound.size - theirs) // self._bound.num_ranks_here

    def _left_of_bound(self) -> int:
        return self._bound.size - sum(other.num_bytes for other in self._others)

    def _above_floor(self) -> int:
        """What the file system has for us, if every rank of this server here gets as much of it."""
        spare = free_bytes(self._root) - self._bound.keep_free
        mine = allocated_bytes(self._mine)
        kin = sum(allocated_bytes(o.path) for o in self._others if self._is_sibling(o))
        return min(spare + mine, (spare + mine + kin) // self._bound.num_ranks_here)

    def _reachable(self, share: int) -> int:
        """What could be had if everything went that may go."""
        idle = sum(other.num_bytes for other in self._idle())
        excess = sum(
            max(0, other.num_bytes - share)
            for other in self._others
            if not other.is_open and self._is_sibling(other)
        )
        return min(self._left_of_bound() + idle + excess, self._above_floor() + idle)

    def _idle(self) -> list[StoreFolder]:
        """What nobody uses and nobody is about to, the longest unused first."""
        idle = [o for o in self._others if not o.is_open and not self._is_sibling(o)]
        return sorted(idle, key=lambda each: each.last_used)

    def _is_sibling(self, other: StoreFolder) -> bool:
        """Whether another rank of this server has it, or may be about to open it."""
        if other.superblock is None or other.trouble:
            return False
        mine, its = self._identity, other.superblock.identity
        kin = its.family == mine.family if mine.family else its.namespace == mine.namespace
        parts = (its.num_ranks, its.stripe, its.num_stripes)
        same_parts = parts == (mine.num_ranks, mine.stripe, mine.num_stripes)
        return kin and same_parts and its.rank != mine.rank

    def _remove_while(self, is_needed: Callable[[], bool]) -> None:
        """Remove what nobody uses, as long as it is needed."""
        for other in self._idle():
            if not is_needed():
                return
            try:
                remove_store(other.path)
            except (StoreInUseError, OSError) as error:  # opened just now, or not ours to remove
                log.warning("%s could not be removed: %s", other.path, error)
                continue
            self._others.remove(other)
            self._note(f"{other.path} was removed: {format_size(other.num_bytes)} were needed")

    def _shrink_siblings(self, share: int) -> None:
        """The bound is smaller than it was: a sibling not opened yet gets its share now."""
        for other in [o for o in self._others if not o.is_open and o.num_bytes > share]:
            if other.superblock is not None and self._is_sibling(other):
                its = other.superblock.identity
                num_places = most_places(share, its)
                if num_places:
                    self._shrink(other, num_places)
                else:
                    remove_store(other.path)
                self._others = [o for o in stores_under(self._root) if o.path != self._mine]
                self._note(f"{other.path} was made smaller, to its share of the bound")

    def _note(self, words: str) -> None:
        log.info("%s", words)
        self.notes.append(words)

    def _why_not(self, share: int) -> str:
        bound, least = self._bound, store_bytes(1, self._identity)
        held = sum(other.num_bytes for other in self._others)
        reason = (
            f"the bound is {format_size(bound.size)} (disk_size over its directories), other "
            f"stores there hold {format_size(held)}, a rank's share is {format_size(share)}"
        )
        if min(share, self._left_of_bound()) >= least:
            reason = (
                f"{format_size(bound.keep_free)} of the file system must stay free "
                f"(disk_keep_free), which leaves {format_size(max(0, self._above_floor()))}"
            )
        return (
            f"{self._root}: no room for a store: it needs {format_size(least)} for one block, but "
            f"{reason}; raise the bound, free some space, or see kvferry disk ls"
        )
