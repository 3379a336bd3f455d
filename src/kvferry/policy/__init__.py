"""What goes first, what is worth keeping, what is worth loading. The pool decides what may go."""

from kvferry.policy.admission import SeenOften
from kvferry.policy.demand import Watermark
from kvferry.policy.eviction import (
    Arriving,
    EvictionPolicy,
    EvictionPolicyMaker,
    Evidence,
    HearsHints,
    HearsRequests,
    Residents,
)
from kvferry.policy.fair import Fair
from kvferry.policy.lru import Lru
from kvferry.policy.names import policy_named
from kvferry.policy.overlap import OverlapDecision, Overlapping, OverlapVerdict
from kvferry.policy.worth import BusyTime, Decision, LoadOrCompute, Verdict

__all__ = [
    "Arriving",
    "BusyTime",
    "Decision",
    "EvictionPolicy",
    "EvictionPolicyMaker",
    "Evidence",
    "Fair",
    "HearsHints",
    "HearsRequests",
    "LoadOrCompute",
    "Lru",
    "OverlapDecision",
    "OverlapVerdict",
    "Overlapping",
    "Residents",
    "SeenOften",
    "Verdict",
    "Watermark",
    "policy_named",
]
