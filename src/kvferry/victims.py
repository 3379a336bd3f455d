"""Which blocks make room: the policy says who should go first, chains and claims who can."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvferry.chains import Chains
from kvferry.policy import Arriving, EvictionPolicy
from kvferry.types import SlotArray


def victims(
    policy: EvictionPolicy,
    chains: Chains,
    is_idle: Callable[[SlotArray], npt.NDArray[np.bool_]],
    wanted: int,
    arriving: Arriving,
) -> SlotArray:
    """Up to ``wanted`` slots that can go together, which the policy has let go of.

    Only what ``is_idle`` goes, whatever the policy names. A policy that names the same slots again
    and again is asked no more once it has named as many as there are.
    """
    looked = np.empty(0, dtype=np.int64)
    can_go = np.empty(0, dtype=bool)
    num_going = num_taken = 0
    # A look that finds too few, because their children stay, is followed by one twice as wide:
    # a conversation of any length that was stored block by block is seen whole after a few.
    while num_going < wanted and num_taken <= chains.num_slots:
        taken = policy.take(max(wanted, len(looked)), arriving)
        if not len(taken):
            break
        num_taken += len(taken)
        # Slots being read leave the policy's hands here; their release puts them back.
        idle = taken[is_idle(taken)]
        looked = np.concatenate((looked, idle)) if len(looked) else idle
        can_go = chains.can_go(looked)
        num_going = int(np.count_nonzero(can_go))
    if num_going == len(looked) == wanted or not len(looked):
        return looked
    going = chains.children_first(looked[can_go])
    going, spare = going[:wanted], going[wanted:]
    gone = np.flatnonzero(np.isin(looked, going) if len(spare) else can_go)
    end = int(gone[-1]) + 1 if len(gone) else len(looked)
    stays = ~can_go
    # What we looked at beyond need keeps its place. A parent met before, whose children stay, is
    # kept behind them.
    policy.put_back(np.concatenate((spare, looked[end:][stays[end:]])))
    policy.keep(chains.children_first(looked[:end][stays[:end]]))
    return going
