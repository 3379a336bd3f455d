"""kvferry: KV-cache offloading for LLM serving.

``attach`` to an engine's paged KV tensors, then ``match``, ``load``, ``store`` and ``poll``. An
engine with its own scheduler and workers uses :class:`Scheduler` and :class:`Worker` instead.
"""

from kvferry.api import attach
from kvferry.config import Config
from kvferry.errors import KvferryError
from kvferry.ferry import Ferry
from kvferry.hits import Hit
from kvferry.identity import Namespace, chain
from kvferry.keys import Keys
from kvferry.scheduler import Scheduler
from kvferry.tickets import Done
from kvferry.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Done",
    "Ferry",
    "Hit",
    "Keys",
    "KvferryError",
    "Namespace",
    "Scheduler",
    "Worker",
    "__version__",
    "attach",
    "chain",
]
