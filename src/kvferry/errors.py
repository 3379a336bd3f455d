"""Every error kvferry raises, as one tree under ``KvferryError``.

``InputError`` and ``StateError`` mean the caller's code needs a change. ``TransferError`` never
reaches a serving loop: it becomes a failed receipt, and a failed receipt is a miss.
"""

from __future__ import annotations


class KvferryError(Exception):
    """Base of all errors raised by kvferry."""


class ConfigError(KvferryError, ValueError):
    """A setting that cannot be used; the message names it, its value and what would be right."""


class InputError(KvferryError, ValueError):
    """A call with arguments that cannot be right; nothing was changed."""


class LayoutError(InputError):
    """KV tensors that cannot be described exactly; copying their blocks would be a guess."""


class StateError(KvferryError, RuntimeError):
    """The right call at the wrong time."""


class ClosedError(StateError):
    """Use of an object after its ``close()``."""


class TransferError(KvferryError, RuntimeError):
    """Bytes did not move."""


class DriverError(TransferError):
    """The GPU driver refused a call; the message has its name, code, words and arguments.

    ``unsupported`` is true when this driver or card lacks the call: do not try it again.
    """

    def __init__(self, message: str, *, code: int = 0, unsupported: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.unsupported = unsupported


class DeadlineError(TransferError, TimeoutError):
    """Bytes did not move in time."""


class StoreError(KvferryError, RuntimeError):
    """A store on disk that cannot be opened as it is; the message names it and the remedy."""


class StoreInUseError(StoreError):
    """A store on disk that another process has open; the message names both."""


class UnreachableError(KvferryError, ConnectionError):
    """A metrics endpoint did not answer, or answered something else; the message says which."""


class IntegrityError(KvferryError, AssertionError):
    """kvferry's own bookkeeping contradicts itself: please report it."""


def words_of(error: BaseException) -> str:
    """What an error says: our own explain themselves, others need their type's name."""
    return str(error) if isinstance(error, KvferryError) else f"{type(error).__name__}: {error}"


def install(extra: str) -> str:
    """How to install one of the extras. kvferry is not on a package index yet."""
    return f"pip install '.[{extra}]' in kvferry's source tree"
