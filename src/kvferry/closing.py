"""The ``with`` statement for everything that has a ``close``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

T = TypeVar("T", bound="Closing")


class Closing(ABC):
    """Something that owns what must be given back: by ``close``, or at the end of ``with``."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Safe to call twice."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
