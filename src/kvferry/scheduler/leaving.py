"""How a request that ends leaves what it has not stored, and how that is stored later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.answers import DeviceBlocks
from kvferry.scheduler.orders import Ordered, held_blocks
from kvferry.scheduler.rests import Rest, Rests

if TYPE_CHECKING:
    from kvferry.scheduler.parts import Parts
    from kvferry.scheduler.request import Request

Held = tuple[DeviceBlocks, ...] | tuple[Ordered, ...]
"""Device blocks to hold until they are released."""


def leave(request: Request, num_tokens: int, parts: Parts, rests: Rests) -> Held | None:
    """See to what a request with so many tokens computed has not stored; None if that is nothing.

    A short rest waits for the next turn, others are held; where blocks are given up while a request
    runs there is no waiting at all, and what is left is stored at once.
    """
    progress, chain = request.progress, request.chain
    storable = progress.storable(chain, num_tokens)
    num_new = storable - max(progress.tokens, progress.past)
    if not rests.stores_late:
        from_token = progress.unstored_from(chain, storable)
        if from_token is None:
            return None
        tables = rests.engine.tables(request, storable, from_token)
        return progress.store(request, chain, tables, storable)
    is_short = parts.least_tokens <= num_new < rests.store_step
    if is_short and rests.can_wait and not (progress.is_outdated or parts.stores.is_lazy):
        twin = rests.wait(request, storable, chain[storable // parts.matcher.hash_tokens - 1])
        if twin is not None:
            twin.request.end_left()
        return ()
    from_token = progress.unstored_from(chain, storable)
    if from_token is None:
        return None
    tables = rests.engine.tables(request, storable, from_token)
    held = held_blocks(tables, parts.sizes, from_token)
    key = chain[storable // parts.matcher.hash_tokens - 1]
    rests.hold(request, storable, key, tables, held)
    return held


def take_back_loads(request: Request, parts: Parts) -> None:
    """Its loads do not count any more; those that no rank has heard of are not sent."""
    for order in parts.outbox.cancel_loads(request):
        parts.hits.ended(order.lease)
        transfer = order.transfer
        parts.released.append(DeviceBlocks(transfer.group, transfer.dst_slots))
    request.loading.clear()


def go_on(request: Request, computed_tokens: int, parts: Parts) -> None:
    """Where a request goes on with what another left, it stores both, when it stores.

    Not one that may not store so much: what the other left would never be stored then.
    """
    rests, num_keys = parts.rests, computed_tokens // parts.matcher.hash_tokens
    if computed_tokens > request.progress.most_tokens:
        return
    if rests is not None and num_keys and not request.progress.tokens:
        rest = rests.take_continued(request.chain, num_keys)
        if rest is not None:
            request.progress.go_on(rest.request.progress)
            rest.request.end_left()


def store_left(parts: Parts, rests: Rests, *, is_idle: bool) -> list[Ordered]:
    """Order what is due of what ended requests left; all of it if nothing else runs."""
    ordered: list[Ordered] = []
    due = rests.take_due(is_idle=is_idle)
    for number, rest in enumerate(due):
        ordered += _store(rest, parts, rests)
        lacks = rest.request.progress.tokens + parts.least_tokens <= rest.num_tokens
        if lacks and parts.stores.is_full:
            rests.put_back(due[number:])
            break
        parts.released.extend(rest.held)
        rest.request.end_left()
    return ordered


def _store(rest: Rest, parts: Parts, rests: Rests) -> tuple[Ordered, ...]:
    request: Request = rest.request
    progress, chain, tables = request.progress, request.chain, rest.tables
    if tables is None:
        from_token = progress.unstored_from(chain, rest.num_tokens)
        if from_token is None:
            return ()
        tables = rests.engine.remains(request, rest.num_tokens, from_token)
    return progress.store(request, chain, tables, rest.num_tokens)
