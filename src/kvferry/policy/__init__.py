"""What goes first, what is worth keeping, what is worth loading. The pool decides what may go."""

from kvferry.policy.admission import SeenOften
from kvferry.policy.base import EvictionOrder
from kvferry.policy.demand import Watermark
from kvferry.policy.lru import LruOrder
from kvferry.policy.worth import Decision, LoadOrCompute, Verdict

__all__ = [
    "Decision",
    "EvictionOrder",
    "LoadOrCompute",
    "LruOrder",
    "SeenOften",
    "Verdict",
    "Watermark",
]
