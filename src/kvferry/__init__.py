"""kvferry: KV-cache offloading for LLM serving.

``attach`` to an engine's paged KV tensors, then ``match``, ``load``, ``store`` and ``poll``. An
engine with its own scheduler and workers uses :class:`Scheduler` and :class:`Worker` instead; what
else it needs is in :mod:`kvferry.engine`.
"""

from kvferry.api import attach
from kvferry.cache.reach import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow
from kvferry.config import Config
from kvferry.core.identity import Namespace, chain
from kvferry.core.keys import Keys
from kvferry.errors import KvferryError
from kvferry.ferry import Ferry
from kvferry.hints import Hints
from kvferry.scheduler.journal import Explanation, Reason
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.transfers import NO_BLOCK
from kvferry.tickets import Hit, Ticket
from kvferry.worker import Worker

__version__: str

__all__ = [
    "NO_BLOCK",
    "ChunkedLocal",
    "Config",
    "Explanation",
    "Ferry",
    "FullAttention",
    "Hints",
    "Hit",
    "Keys",
    "KvferryError",
    "Namespace",
    "Reason",
    "RecurrentState",
    "Scheduler",
    "SlidingWindow",
    "Ticket",
    "Worker",
    "__version__",
    "attach",
    "chain",
]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version  # not at every import: it is slow

    try:
        return version("kvferry")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "0+unknown"
