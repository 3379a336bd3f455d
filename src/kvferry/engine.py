"""What the author of an engine needs, in one place: both halves, groups, tiers, messages.

::

    scheduler's process   Scheduler over a Pool -> Request: match, load, run, store, leave
                              | Plan      ^ Receipt
    every rank's process      v           |
                          Worker over a RankMemory, and a TierMover for each tier below the host

``docs/engine.md`` builds an engine of these, step by step. Importing this module brings numpy and
nothing heavier; what a GPU needs is imported when a rank is opened on one.
"""

from kvferry.cache.leases import PoolCounts
from kvferry.cache.policies import policy_named
from kvferry.cache.policies.contract import (
    Arriving,
    EvictionPolicy,
    EvictionPolicyMaker,
    Evidence,
    HearsHints,
    Residents,
)
from kvferry.cache.policies.load_or_compute import Decision, Verdict
from kvferry.cache.policies.lru import Lru
from kvferry.cache.pool import Pool
from kvferry.cache.reach import (
    ChunkedLocal,
    FullAttention,
    Group,
    RecurrentState,
    SlidingWindow,
    longest_hit,
    needed,
)
from kvferry.config import Config
from kvferry.core.identity import Namespace, adopt, chain
from kvferry.core.keys import Key, KeyChain, Keys, Recovered
from kvferry.hints import Hints, TokenPriority
from kvferry.hostmem.memory import HostMemory, SharedHandle, SharedMemory, SlotLayout
from kvferry.hostmem.slots import HostTier
from kvferry.rank import Contents, RankMemory, open_on_cpu, open_on_gpu, slot_layout
from kvferry.scheduler.control import Acted
from kvferry.scheduler.journal import Explanation, Reason
from kvferry.scheduler.request import Request, State
from kvferry.scheduler.scheduler import FailedLoad, Scheduler, Settled
from kvferry.scheduler.tier import KeyedTier, LowerTier, SlotTier, WriteMode, lower_tier
from kvferry.scheduler.transfers import NO_BLOCK, BlockTable, EngineBlocks, Ordered
from kvferry.telemetry.stats import SchedulerStats
from kvferry.tiers.contract import Batch, BatchId, LastingTier, Result, Tier, TierSetup, Way
from kvferry.tiers.memory import KeyedMemoryTier, MemoryTier
from kvferry.tiers.movers import LowerTierMover, Mover, SharedMover, TierMover
from kvferry.tiers.queued import Task, ThreadedTier
from kvferry.transfer.engine.cpu import CpuEngine, Stream
from kvferry.transfer.job import CopyEngine
from kvferry.transfer.layout import GroupLayout, describe
from kvferry.types import (
    DEVICE,
    FIRST_RANK,
    HOST,
    DeviceBlocks,
    Health,
    Landing,
    Match,
    MatchState,
    Outcome,
    Plan,
    Question,
    Rank,
    Receipt,
    RequestId,
    TierName,
    Transfer,
    TransferId,
)
from kvferry.worker import Worker

__all__ = [
    "DEVICE",
    "FIRST_RANK",
    "HOST",
    "NO_BLOCK",
    "Acted",
    "Arriving",
    "Batch",
    "BatchId",
    "BlockTable",
    "ChunkedLocal",
    "Config",
    "Contents",
    "CopyEngine",
    "CpuEngine",
    "Decision",
    "DeviceBlocks",
    "EngineBlocks",
    "EvictionPolicy",
    "EvictionPolicyMaker",
    "Evidence",
    "Explanation",
    "FailedLoad",
    "FullAttention",
    "Group",
    "GroupLayout",
    "Health",
    "HearsHints",
    "Hints",
    "HostMemory",
    "HostTier",
    "Key",
    "KeyChain",
    "KeyedMemoryTier",
    "KeyedTier",
    "Keys",
    "Landing",
    "LastingTier",
    "LowerTier",
    "LowerTierMover",
    "Lru",
    "Match",
    "MatchState",
    "MemoryTier",
    "Mover",
    "Namespace",
    "Ordered",
    "Outcome",
    "Plan",
    "Pool",
    "PoolCounts",
    "Question",
    "Rank",
    "RankMemory",
    "Reason",
    "Receipt",
    "Recovered",
    "RecurrentState",
    "Request",
    "RequestId",
    "Residents",
    "Result",
    "Scheduler",
    "SchedulerStats",
    "Settled",
    "SharedHandle",
    "SharedMemory",
    "SharedMover",
    "SlidingWindow",
    "SlotLayout",
    "SlotTier",
    "State",
    "Stream",
    "Task",
    "ThreadedTier",
    "Tier",
    "TierMover",
    "TierName",
    "TierSetup",
    "TokenPriority",
    "Transfer",
    "TransferId",
    "Verdict",
    "Way",
    "Worker",
    "WriteMode",
    "adopt",
    "chain",
    "describe",
    "longest_hit",
    "lower_tier",
    "needed",
    "open_on_cpu",
    "open_on_gpu",
    "policy_named",
    "slot_layout",
]
