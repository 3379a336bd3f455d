"""kvferry: KV-cache offloading for LLM serving.

``attach`` to an engine's paged KV tensors, then ``match``, ``load``, ``store`` and ``poll``. An
engine with its own scheduler and workers uses :class:`Scheduler` and :class:`Worker` instead; what
else it needs is in :mod:`kvferry.engine`.
"""

from kvferry.api import attach
from kvferry.config import Config
from kvferry.errors import KvferryError
from kvferry.ferry import Ferry
from kvferry.hints import Hints
from kvferry.hits import Hit
from kvferry.identity import Namespace, chain
from kvferry.keys import Keys
from kvferry.reach import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow
from kvferry.scheduler import NO_BLOCK, Explanation, Reason, Scheduler
from kvferry.tickets import Done
from kvferry.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "NO_BLOCK",
    "ChunkedLocal",
    "Config",
    "Done",
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
    "Worker",
    "__version__",
    "attach",
    "chain",
]
