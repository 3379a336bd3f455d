"""Every error kvferry raises, as one tree.

::

    KvferryError
    ├── ConfigError (ValueError)         a setting that cannot be used
    │   └── UnknownSettingError          a setting we do not have; names the nearest one we do
    ├── InputError (ValueError)          a call with arguments that cannot be right
    │   ├── KeyFormatError               a key that is not KEY_BYTES long
    │   ├── LayoutError                  KV tensors we cannot describe exactly
    │   └── ReceiptError                 a receipt that answers nothing we ever sent
    ├── StateError (RuntimeError)        the right call at the wrong time
    │   ├── ClosedError                  use after close
    │   └── LeaseError                   a lease ended twice, or ended the wrong way
    ├── TransferError (RuntimeError)     bytes did not move
    │   ├── DriverError                  the GPU driver said no; carries its code and words
    │   ├── DeadlineError (TimeoutError) bytes did not move in time
    │   └── JournalError                 what lies on disk could not be written down
    ├── StoreError (RuntimeError)        a store on disk that cannot be opened as it is
    │   └── StoreInUseError              another process has it open
    ├── UnreachableError (ConnectionError)  a metrics endpoint did not answer, or is another's
    └── IntegrityError (AssertionError)  our own bookkeeping is wrong: please report it

``InputError`` and ``StateError`` mean the caller's code needs a change. ``TransferError`` never
reaches a serving loop: it is turned into a failed receipt, and a failed receipt is a miss.
"""

from __future__ import annotations


class KvferryError(Exception):
    """Base of all errors raised by kvferry."""


class ConfigError(KvferryError, ValueError):
    """A setting that cannot be used; the message names it, its value and what would be right."""


class UnknownSettingError(ConfigError):
    """A setting that does not exist; the message names the nearest one that does."""


class InputError(KvferryError, ValueError):
    """A call with arguments that cannot be right; nothing was changed."""


class KeyFormatError(InputError):
    """A key of the wrong length or type."""


class LayoutError(InputError):
    """KV tensors whose blocks we cannot describe exactly; copying them would be a guess."""


class ReceiptError(InputError):
    """A receipt for a transfer or a rank that never existed; nothing was changed."""


class StateError(KvferryError, RuntimeError):
    """The right call at the wrong time."""


class ClosedError(StateError):
    """Use of something after its ``close()``."""


class LeaseError(StateError):
    """A lease ended a second time, or ended in a way its kind does not have."""


class TransferError(KvferryError, RuntimeError):
    """Bytes did not move."""


class DriverError(TransferError):
    """The GPU driver refused a call; the message has its name, code, words and what was asked.

    ``unsupported`` is true when this driver or card lacks the call, so that asking again is vain.
    """

    def __init__(self, message: str, *, code: int = 0, unsupported: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.unsupported = unsupported


class DeadlineError(TransferError, TimeoutError):
    """Bytes did not move in time."""


class JournalError(TransferError):
    """What lies on disk could not be written down; the blocks noted last are not durable."""


class StoreError(KvferryError, RuntimeError):
    """A store on disk that cannot be opened as it is; the message names it and says what to do."""


class StoreInUseError(StoreError):
    """A store on disk that another process has open; the message names both."""


class UnreachableError(KvferryError, ConnectionError):
    """A metrics endpoint did not answer, or answered something else; the message says which."""


class IntegrityError(KvferryError, AssertionError):
    """kvferry's own bookkeeping contradicts itself."""
