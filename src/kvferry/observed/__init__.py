"""What is learned from the requests that come, beside the engine: traces, and what memory buys."""

from kvferry.observed.curve import TIMES, MemoryCurve, TierSizes
from kvferry.observed.observer import Observer
from kvferry.observed.recorder import Recorder
from kvferry.observed.request import ObservedRequest

__all__ = ["TIMES", "MemoryCurve", "ObservedRequest", "Observer", "Recorder", "TierSizes"]
