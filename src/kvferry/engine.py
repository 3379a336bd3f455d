"""What the author of an engine needs, in one place: both halves, groups, levels, messages.

::

    scheduler's process   Scheduler over a Pool -> Request: match, load, run, store, leave
                              | Plan      ^ Receipt
    every rank's process      v           |
                          Worker over a RankMemory, and a TierMover for each level below the host

``docs/engine.md`` builds an engine of these, step by step. Importing this module brings numpy and
nothing heavier; what a GPU needs is imported when a rank is opened on one.
"""

from kvferry.answers import DeviceBlocks, Landing, Match, MatchState
from kvferry.config import Config
from kvferry.contents import Contents
from kvferry.device.engine.base import CopyEngine
from kvferry.device.engine.cpu import CpuEngine
from kvferry.device.engine.stream import Stream
from kvferry.device.layout import GroupLayout, describe
from kvferry.hints import Hints, TokenPriority
from kvferry.identity import Namespace, adopt, chain
from kvferry.keys import KeyChain, Keys, Recovered
from kvferry.policy import (
    Arriving,
    Decision,
    EvictionPolicy,
    EvictionPolicyMaker,
    Evidence,
    HearsHints,
    Lru,
    Residents,
    Verdict,
    policy_named,
)
from kvferry.pool import Pool
from kvferry.rank import RankMemory, open_on_cpu, open_on_gpu, slot_layout
from kvferry.reach import (
    ChunkedLocal,
    FullAttention,
    Group,
    RecurrentState,
    SlidingWindow,
    longest_hit,
    needed,
)
from kvferry.scheduler import (
    NO_BLOCK,
    BlockTable,
    EngineBlocks,
    Explanation,
    FailedLoad,
    KeyedLevel,
    Level,
    Ordered,
    PlacedLevel,
    Reason,
    Request,
    Scheduler,
    Settled,
    State,
    WriteMode,
    level_of,
)
from kvferry.scheduler.control import Acted
from kvferry.slot_states import PoolCounts
from kvferry.stats import SchedulerStats
from kvferry.tiers import (
    Batch,
    BatchId,
    HostMemory,
    HostTier,
    KeyedMemoryTier,
    LastingTier,
    LevelMover,
    MemoryTier,
    Mover,
    Result,
    SharedHandle,
    SharedLevelMover,
    SharedMemory,
    SharedMover,
    SlotLayout,
    Tier,
    TierMover,
    TierSetup,
    Way,
)
from kvferry.tiers.threaded import Task, ThreadedTier
from kvferry.types import (
    DEVICE,
    FIRST_RANK,
    HOST,
    Health,
    Key,
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
    "KeyedLevel",
    "KeyedMemoryTier",
    "Keys",
    "Landing",
    "LastingTier",
    "Level",
    "LevelMover",
    "Lru",
    "Match",
    "MatchState",
    "MemoryTier",
    "Mover",
    "Namespace",
    "Ordered",
    "Outcome",
    "PlacedLevel",
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
    "SharedLevelMover",
    "SharedMemory",
    "SharedMover",
    "SlidingWindow",
    "SlotLayout",
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
    "level_of",
    "longest_hit",
    "needed",
    "open_on_cpu",
    "open_on_gpu",
    "policy_named",
    "slot_layout",
]
