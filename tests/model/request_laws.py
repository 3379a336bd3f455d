"""What holds of a scheduler's requests after every step, whatever was done to them.

:func:`check` is looked at between steps, :func:`check_step` knows the drawing at the top of
``kvferry/scheduler/request.py``, and :func:`check_nothing_left` is for the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvferry.scheduler.request import Request, State
from kvferry.scheduler.scheduler import Scheduler
from kvferry.types import DEVICE, Transfer, TransferId

_OVER = {State.LEFT, State.ENDED}
_LIVE = set(State) - _OVER
_ASKED = {State.UNKNOWN, State.WAITING, State.MATCHED}

Steps = Mapping[State, set[State]]


def _same(**others: set[State]) -> dict[State, set[State]]:
    """Every state stays as it is, but for those named."""
    return {state: others.get(state.name, {state}) for state in State}


STEPS: Mapping[str, Steps] = {
    "match": _same(
        **{state.name: _ASKED for state in _LIVE - {State.LOADING, State.RUNNING}},
        RUNNING={*_ASKED, State.RUNNING},  # it was run while its load was under way
    ),
    "load": _same(
        MATCHED={State.LOADING, State.LOADED, State.MATCHED},
        WAITING={State.LOADING, State.LOADED, State.WAITING},
        RUNNING={State.LOADING, State.LOADED, State.RUNNING},
    ),
    "run": _same(**{state.name: {State.RUNNING} for state in _LIVE}),
    "store": _same(UNKNOWN={State.RUNNING}, LOADED={State.RUNNING}),
    "preempt": _same(**{state.name: {State.UNKNOWN} for state in _LIVE}),
    "end": _same(**{state.name: {State.ENDED} for state in State}),
    "leave": _same(
        **{state.name: {State.ENDED} for state in _LIVE - {State.RUNNING}},
        RUNNING={State.LEFT, State.ENDED},
    ),
    "others": _same(LEFT={State.LEFT, State.ENDED}),
    "plan": _same(LEFT={State.LEFT, State.ENDED}),
    "store left": _same(LEFT={State.LEFT, State.ENDED}),
    "settle": _same(
        LOADING={State.LOADING, State.LOADED, State.UNKNOWN},
        WAITING={State.WAITING, State.UNKNOWN},
        MATCHED={State.MATCHED, State.UNKNOWN},
    ),
    "reset": _same(
        MATCHED={State.UNKNOWN},
        WAITING={State.UNKNOWN, State.WAITING},  # what comes up goes on coming
        LEFT={State.ENDED},
    ),
}
"""For each verb the states a request may be in afterwards; ``others`` are those not spoken to."""


def check_step(verb: str, before: State, after: State) -> None:
    assert after in STEPS[verb][before], f"{verb} made {before.value} {after.value}"


def check(scheduler: Scheduler, everyone: Iterable[Request]) -> None:
    """``everyone`` are all requests ever opened, or all that have not ended."""
    scheduler.check_integrity()
    parts, live = scheduler._requests, scheduler.requests
    everyone = list(everyone)
    assert len(set(live)) == len(live)
    assert {r for r in everyone if r.state is not State.ENDED} == set(live), "a request was lost"
    assert set(parts.pinned) == {r for r in live if r._hit is not None}
    for request in everyone:
        _check_one(scheduler, request)
    _check_waits(scheduler)
    _check_transit(scheduler)
    _check_leases(scheduler)


def _check_one(scheduler: Scheduler, request: Request) -> None:
    state = request.state
    if state in _OVER:
        assert request._hit is None
        assert not request.loading
        assert not waits_of(request)
    if state is State.MATCHED:
        assert request._hit is not None
        assert request._hit.leases
    is_pipelined = request in scheduler._requests.promoter.loads
    if state is State.LOADING:
        assert request.loading or is_pipelined, "loading, and nothing is on its way"
    assert (request._promised is not None) == (bool(request.loading) and not is_pipelined)
    if request.loading:
        assert state in (State.LOADING, State.RUNNING)
        assert request.loading <= {t for t, owner in _loads(scheduler) if owner is request}
    rests = scheduler.deferred
    if rests is not None:
        left = [r for r in rests._rests if r.request is request]
        assert len(left) == (state is State.LEFT), "what it left is lost, or there twice"


def _loads(scheduler: Scheduler) -> list[tuple[int, Request]]:
    """Loads that somebody may wait for, and whose they are."""
    queued = [(order.transfer.id, order.served[0]) for order in scheduler.transfers._loads]
    flying = [
        (flight.transfer.id, flight.served[0])
        for flight in scheduler.transfers.in_flight.values()
        if isinstance(flight.transfer, Transfer)
        and flight.transfer.dst == DEVICE
        and not flight.overdue
    ]
    return [*queued, *flying]


def waits_of(request: Request) -> set[TransferId]:
    """What it waits for from below the host."""
    return request.promotion.waits if request.promotion is not None else set()


def _check_waits(scheduler: Scheduler) -> None:
    waited = {t for r in scheduler.requests for t in waits_of(r)}
    moving = {order.transfer.id for order in scheduler.transfers._moves}
    moving |= {question_id for question_id, _ in scheduler.transfers._questions.values()}
    moving |= {t for t, f in scheduler.transfers.in_flight.items() if not f.overdue}
    assert waited <= moving, "somebody waits for what is over"


def _check_transit(scheduler: Scheduler) -> None:
    """The running counts are what counting from the start gives."""
    outbox, transit = scheduler.transfers, scheduler.transfers
    flying = [
        (f.transfer, f.leases[0])
        for f in scheduler.transfers.in_flight.values()
        if isinstance(f.transfer, Transfer) and not f.overdue
    ]
    loads = [(o.transfer, o.leases[0]) for o in outbox._loads]
    loads += [(transfer, lease) for transfer, lease in flying if transfer.dst == DEVICE]
    stores = sum(len(o.device_blocks) for o in outbox.store_orders())
    stores += sum(len(transfer) for transfer, _ in flying if transfer.src == DEVICE)
    pipelined = scheduler._requests.promoter.loads.values()
    kept = sum(load.end - load.sent for load in pipelined if load.is_open)
    assert transit.blocks_to_device == sum(len(transfer) for transfer, _ in loads) + kept
    assert transit.blocks_from_device == stores
    hits = scheduler.hits
    joined = loads if hits.joins_loads else []
    reading = Counter(int(slot) for _, lease in joined for slot in lease.slots)
    found = hits._being_loaded
    assert {int(s): int(found[s]) for s in found.nonzero()[0]} == dict(reading)


def _check_leases(scheduler: Scheduler) -> None:
    """Every lease belongs to a pinned hit, an order or a flight."""
    outbox = scheduler.transfers
    leases = [le for r in scheduler.requests if r._hit for le in r._hit.leases if le is not None]
    leases += outbox.leases()
    pools = [scheduler.pool, *(tier.pool for tier in scheduler.lower.tiers)]
    assert len(leases) == sum(pool.num_leases for pool in pools if pool is not None)


def check_nothing_left(scheduler: Scheduler) -> None:
    """All requests have ended and all transfers have landed: not one record is left of them."""
    parts = scheduler._requests
    check(scheduler, ())
    assert not parts.live
    assert not parts.pinned
    assert not parts.released
    assert not scheduler.deferred
    assert not scheduler.lower.moves
    assert not scheduler.lower._asking
    assert not scheduler.num_queued
    assert not scheduler.num_in_flight
    assert not scheduler.transfers.blocks_to_device
    assert not scheduler.transfers.blocks_from_device
    assert not scheduler.pool.num_leases
