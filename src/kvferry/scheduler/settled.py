"""What changed for the engine by the receipts just taken."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.answers import DeviceBlocks, Landing
from kvferry.scheduler.orders import Ordered
from kvferry.scheduler.request import Request


@dataclass(frozen=True)
class FailedLoad:
    """A load that did not bring its bytes: the request must compute these tokens.

    Into other device blocks: a slow rank may write to the ones it named until they are released.
    """

    request: Request
    first_token: int
    num_tokens: int
    reason: str


@dataclass(frozen=True)
class Settled:
    """What changed by the receipts just taken.

    ``loaded`` requests may run. ``failed`` ones must compute what they hoped to load. ``released``
    device blocks are touched by no transfer any more: drop the hold taken when ``load``, ``store``
    or ``leave`` returned them (one hold per mention). ``landed`` are all transfers that ended.
    ``expired`` requests left their hit alone for too long: it is let go, as if never asked for.
    ``ordered`` are further pieces of loads whose blocks still come up: hold their device blocks, as
    when ``load`` returned the first.
    """

    loaded: tuple[Request, ...] = ()
    failed: tuple[FailedLoad, ...] = ()
    released: tuple[DeviceBlocks, ...] = ()
    landed: tuple[Landing, ...] = ()
    expired: tuple[Request, ...] = ()
    ordered: tuple[Ordered, ...] = ()
