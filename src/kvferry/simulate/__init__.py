"""Traces through the real pool and the real policies, without bytes: what each would have hit."""

from kvferry.simulate.run import Simulated, Simulation, simulate
from kvferry.simulate.serving import ALL_KNOWING, TracePart
from kvferry.simulate.trials import Capacity, Score, Tally, Trial

__all__ = [
    "ALL_KNOWING",
    "Capacity",
    "Score",
    "Simulated",
    "Simulation",
    "Tally",
    "TracePart",
    "Trial",
    "simulate",
]
