"""Every error kvferry raises, as one tree under ``KvferryError``.

``InputError`` and ``StateError`` mean the caller's code needs a change. ``TransferError`` never
reaches a serving loop: it becomes a failed receipt, and a failed receipt is a miss.
"""

from __future__ import annotations


class KvferryError(Exception):
    """Base of all errors raised by kvferry."""


class ConfigError(KvferryError, ValueError):
    """A setting is invalid; the message names the setting, its value and what it accepts."""


class InputError(KvferryError, ValueError):
    """A call got invalid arguments and changed nothing."""


class LayoutError(InputError):
    """KV tensors have a layout that kvferry cannot describe exactly, so it must not copy them."""


class StateError(KvferryError, RuntimeError):
    """A valid call was made in a state that does not allow it."""


class ClosedError(StateError):
    """An object was used after its ``close()``."""


class TransferError(KvferryError, RuntimeError):
    """A copy failed."""


class DriverError(TransferError):
    """The GPU driver refused a call; the message has the call, its arguments, and the error.

    ``unsupported`` is true when this driver or card lacks the call: do not try it again.
    """

    def __init__(self, message: str, *, code: int = 0, unsupported: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.unsupported = unsupported


class DeadlineError(TransferError, TimeoutError):
    """A copy did not end before its deadline."""


class StoreError(KvferryError, RuntimeError):
    """A store on disk cannot be opened; the message names the store and the remedy."""


class StoreInUseError(StoreError):
    """Another process has the store on disk open; the message names the store and the process."""


class UnreachableError(KvferryError, ConnectionError):
    """A metrics endpoint did not answer, or its answer is not metrics; the message says which."""


class IntegrityError(KvferryError, AssertionError):
    """kvferry's own bookkeeping contradicts itself: please report it."""


def words_of(error: BaseException) -> str:
    """Return an error's message, with the type's name before it unless the error is kvferry's."""
    return str(error) if isinstance(error, KvferryError) else f"{type(error).__name__}: {error}"


def install(extra: str) -> str:
    """Return the command that installs an extra. kvferry is not on a package index yet."""
    return f"pip install '.[{extra}]' in kvferry's source tree"
