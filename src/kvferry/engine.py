"""The parts for authors of engines: scheduler, worker, groups, tiers, messages.

::

    scheduler's process   Scheduler over a Pool -> Request: match, load, run, store, leave
                              | Plan      ^ Receipt
    every rank's process      v           |
                          Worker over a RankMemory, and a TierMover for each tier below the host

``docs/engine.md`` builds an engine from these parts. Importing this module imports numpy and
nothing heavier; opening a rank on a GPU imports torch and the copy kernels.
"""

from kvferry.cache.policies import policy_named as policy_named
from kvferry.cache.policies.contract import Arriving as Arriving
from kvferry.cache.policies.contract import EvictionPolicy as EvictionPolicy
from kvferry.cache.policies.contract import EvictionPolicyMaker as EvictionPolicyMaker
from kvferry.cache.policies.contract import Evidence as Evidence
from kvferry.cache.policies.contract import HearsHints as HearsHints
from kvferry.cache.policies.contract import Residents as Residents
from kvferry.cache.policies.load_or_compute import Decision as Decision
from kvferry.cache.policies.load_or_compute import Verdict as Verdict
from kvferry.cache.policies.lru import Lru as Lru
from kvferry.cache.pool import Pool as Pool
from kvferry.cache.reach import ChunkedLocal as ChunkedLocal
from kvferry.cache.reach import FullAttention as FullAttention
from kvferry.cache.reach import Group as Group
from kvferry.cache.reach import RecurrentState as RecurrentState
from kvferry.cache.reach import SlidingWindow as SlidingWindow
from kvferry.cache.reach import longest_hit as longest_hit
from kvferry.cache.reach import needed as needed
from kvferry.cache.slots import PoolCounts as PoolCounts
from kvferry.config import Config as Config
from kvferry.core.identity import Namespace as Namespace
from kvferry.core.identity import adopt as adopt
from kvferry.core.identity import chain as chain
from kvferry.core.keys import Key as Key
from kvferry.core.keys import KeyChain as KeyChain
from kvferry.core.keys import Keys as Keys
from kvferry.core.keys import Recovered as Recovered
from kvferry.hints import Hints as Hints
from kvferry.hints import TokenPriority as TokenPriority
from kvferry.hostmem.memory import HostMemory as HostMemory
from kvferry.hostmem.slots import HostTier as HostTier
from kvferry.hostmem.slots import SharedHandle as SharedHandle
from kvferry.hostmem.slots import SharedMemory as SharedMemory
from kvferry.hostmem.slots import SlotLayout as SlotLayout
from kvferry.rank import Contents as Contents
from kvferry.rank import RankMemory as RankMemory
from kvferry.rank import slot_layout as slot_layout
from kvferry.scheduler.control import Acted as Acted
from kvferry.scheduler.journal import Explanation as Explanation
from kvferry.scheduler.journal import Reason as Reason
from kvferry.scheduler.request import FailedLoad as FailedLoad
from kvferry.scheduler.request import Request as Request
from kvferry.scheduler.request import State as State
from kvferry.scheduler.scheduler import Scheduler as Scheduler
from kvferry.scheduler.scheduler import Settled as Settled
from kvferry.scheduler.tier import KeyedTier as KeyedTier
from kvferry.scheduler.tier import LowerTier as LowerTier
from kvferry.scheduler.tier import SlotTier as SlotTier
from kvferry.scheduler.tier import WriteMode as WriteMode
from kvferry.scheduler.tier import lower_tier as lower_tier
from kvferry.scheduler.transfers import NO_BLOCK as NO_BLOCK
from kvferry.scheduler.transfers import BlockTable as BlockTable
from kvferry.scheduler.transfers import EngineBlocks as EngineBlocks
from kvferry.scheduler.transfers import Ordered as Ordered
from kvferry.telemetry.stats import SchedulerStats as SchedulerStats
from kvferry.tiers.contract import Batch as Batch
from kvferry.tiers.contract import BatchId as BatchId
from kvferry.tiers.contract import Result as Result
from kvferry.tiers.contract import Tier as Tier
from kvferry.tiers.contract import TierSetup as TierSetup
from kvferry.tiers.contract import Way as Way
from kvferry.tiers.memory import MemoryTier as MemoryTier
from kvferry.tiers.movers import LowerTierMover as LowerTierMover
from kvferry.tiers.movers import Mover as Mover
from kvferry.tiers.movers import SharedMover as SharedMover
from kvferry.tiers.movers import TierMover as TierMover
from kvferry.tiers.queued import Task as Task
from kvferry.tiers.queued import ThreadedTier as ThreadedTier
from kvferry.transfer.engine.cpu import CpuEngine as CpuEngine
from kvferry.transfer.engine.cpu import Stream as Stream
from kvferry.transfer.job import CopyEngine as CopyEngine
from kvferry.transfer.layout import GroupLayout as GroupLayout
from kvferry.transfer.layout import describe as describe
from kvferry.types import DEVICE as DEVICE
from kvferry.types import FIRST_RANK as FIRST_RANK
from kvferry.types import HOST as HOST
from kvferry.types import DeviceBlocks as DeviceBlocks
from kvferry.types import Health as Health
from kvferry.types import Landing as Landing
from kvferry.types import Match as Match
from kvferry.types import MatchState as MatchState
from kvferry.types import Outcome as Outcome
from kvferry.types import Plan as Plan
from kvferry.types import Question as Question
from kvferry.types import Rank as Rank
from kvferry.types import Receipt as Receipt
from kvferry.types import RequestId as RequestId
from kvferry.types import TierName as TierName
from kvferry.types import Transfer as Transfer
from kvferry.types import TransferId as TransferId
from kvferry.worker import Worker as Worker
