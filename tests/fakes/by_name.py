"""A scheduler whose requests are called by name, for tests that tell stories about names.

A name stands for the request of that name which has not ended; it is opened when first used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.core.keys import Keys
from kvferry.scheduler.request import Request, State
from kvferry.scheduler.scheduler import Scheduler, Settled
from kvferry.scheduler.transfers import BlockTable, Ordered
from kvferry.types import DeviceBlocks, Landing, Match, Receipt


@dataclass(frozen=True)
class FailedByName:
    """A failed load, with the request's name."""

    request_id: str
    first_token: int
    num_tokens: int
    reason: str


@dataclass(frozen=True)
class SettledByName:
    """What changed, with names for requests."""

    loaded: tuple[str, ...]
    failed: tuple[FailedByName, ...]
    released: tuple[DeviceBlocks, ...]
    landed: tuple[Landing, ...]
    expired: tuple[str, ...]
    ordered: tuple[DeviceBlocks, ...] = ()


class ByName(Scheduler):
    """The scheduler itself, and who is called what. Owns only the names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.named: dict[str, Request] = {}

    def called(self, name: str, keys: Keys | None = None) -> Request:
        request = self.named.get(name)
        if request is None or request.state in (State.ENDED, State.LEFT):
            request = self.named[name] = self.open(name, keys if keys is not None else Keys.empty())
        elif keys is not None:
            request.chain = keys
        return request

    def match(
        self,
        name: str,
        keys: Keys,
        *,
        computed_tokens: int = 0,
        max_tokens: int | None = None,
    ) -> Match:
        return self.called(name, keys).match(computed_tokens=computed_tokens, max_tokens=max_tokens)

    def load(self, name: str, tables: Sequence[BlockTable]) -> tuple[DeviceBlocks, ...]:
        return blocks_of(self.called(name).load(tables))

    def store(
        self, name: str, keys: Keys, tables: Sequence[BlockTable], num_tokens: int
    ) -> tuple[DeviceBlocks, ...]:
        return blocks_of(self.called(name, keys).store(tables, num_tokens))

    def stored_tokens(self, name: str) -> int:
        return self.named[name].stored_tokens if name in self.named else 0

    def preempt(self, name: str) -> None:
        if name in self.named:
            self.named[name].preempt()

    def finish(self, name: str) -> None:
        request = self.named.pop(name, None)
        if request is not None:
            request.end()

    abort = finish

    def settle(self, receipts: Iterable[Receipt] = ()) -> SettledByName:  # type: ignore[override]
        return self._by_name(super().settle(receipts))

    def _by_name(self, settled: Settled) -> SettledByName:
        return SettledByName(
            tuple(request.id for request in settled.loaded),
            tuple(
                FailedByName(f.request.id, f.first_token, f.num_tokens, f.reason)
                for f in settled.failed
            ),
            settled.released,
            settled.landed,
            tuple(request.id for request in settled.expired),
            blocks_of(settled.ordered),
        )


def blocks_of(ordered: Iterable[Ordered]) -> tuple[DeviceBlocks, ...]:
    return tuple(DeviceBlocks(part.group, part.blocks) for part in ordered)
