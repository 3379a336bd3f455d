"""The scheduler half: what moves, when, and what became of it. Never touches a byte."""

from kvferry.scheduler.level import KeyedLevel, Level, PlacedLevel, WriteMode
from kvferry.scheduler.level_making import level_of
from kvferry.scheduler.orders import NO_BLOCK, BlockTable, EngineBlocks, Ordered
from kvferry.scheduler.request import Request
from kvferry.scheduler.request_state import State
from kvferry.scheduler.scheduler import Scheduler
from kvferry.scheduler.settled import FailedLoad, Settled
from kvferry.scheduler.why import Explanation, Reason

__all__ = [
    "NO_BLOCK",
    "BlockTable",
    "EngineBlocks",
    "Explanation",
    "FailedLoad",
    "KeyedLevel",
    "Level",
    "Ordered",
    "PlacedLevel",
    "Reason",
    "Request",
    "Scheduler",
    "Settled",
    "State",
    "WriteMode",
    "level_of",
]
