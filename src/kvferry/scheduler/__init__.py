"""The scheduler half: what moves, when, and what became of it. Never touches a byte."""

from kvferry.scheduler.half import Scheduler
from kvferry.scheduler.level import KeyedLevel, Level, PlacedLevel, WriteMode
from kvferry.scheduler.matching import Missing
from kvferry.scheduler.storing import NO_BLOCK, BlockTable
from kvferry.scheduler.why import Explanation, Reason

__all__ = [
    "NO_BLOCK",
    "BlockTable",
    "Explanation",
    "KeyedLevel",
    "Level",
    "Missing",
    "PlacedLevel",
    "Reason",
    "Scheduler",
    "WriteMode",
]
