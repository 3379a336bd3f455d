"""What happens to a server, at random: mostly ordinary days, and every kind of bad one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from tests.model.serving import Serving
from tests.model.stage import KINDS, Setup

from kvferry.scheduler.tier import WriteMode

ODDS = {
    "arrive": 8,
    "admit": 16,
    "compute": 22,
    "dispatch": 12,
    "execute": 30,
    "settle": 14,
    "advance": 4,
    "abort": 1,
    "preempt": 1,
    "expire": 0.1,
    "reset": 0.05,
    "lose_bytes": 0.1,
    "tier_goes": 0.3,
    "restart": 0.05,
}
RARE = ("expire", "reset", "restart")


class Weather:
    """Drives one server by a random source. Owns the odds; the server owns its state."""

    def __init__(
        self,
        serving: Serving,
        rng: random.Random,
        *,
        bad: float = 0.02,
        hung: int | None = None,
    ) -> None:
        self.serving = serving
        self.rng = rng
        self.bad = bad
        self.hung = hung
        self.counts: Counter[str] = Counter()
        self._names = list(ODDS)
        self._odds = list(ODDS.values())
        self._ops: dict[str, Callable[[], None]] = {
            name: getattr(self, name) for name in self._names
        }

    def blow(self, count: int) -> None:
        """So many random operations."""
        for name in self.rng.choices(self._names, self._odds, k=count):
            self._ops[name]()
            self.counts[name] += 1

    def arrive(self) -> None:
        serving, rng = self.serving, self.rng
        if len(serving.requests) < 8:
            story = rng.randrange(serving.setup.num_stories)
            serving.arrive(story, rng.randint(1, serving.setup.longest), rng.randint(1, 24))

    def admit(self) -> None:
        self._each("waiting", lambda request: self.serving.admit(request))

    def compute(self) -> None:
        self._each("running", lambda r: self.serving.compute(r, self.rng.randint(1, 20)))

    def abort(self) -> None:
        requests = list(self.serving.requests.values())
        if requests:
            self.serving.abort(self.rng.choice(requests))

    def preempt(self) -> None:
        requests = [r for r in self.serving.requests.values() if r.state != "waiting"]
        if requests:
            self.serving.preempt(self.rng.choice(requests))

    def dispatch(self) -> None:
        self.serving.dispatch()

    def execute(self) -> None:
        busy = [rank for rank in self.serving.ranks if rank.todo and rank.rank != self.hung]
        if busy:
            rank = self.rng.choice(busy)
            outcome = "ok"
            if self.rng.random() < self.bad:
                outcome = self.rng.choice(["fail", "refuse", "some", "some"])
            self.serving.execute(rank, self.rng.randrange(len(rank.todo)), outcome)

    def settle(self) -> None:
        receipts = list(self.serving.receipts)
        self.rng.shuffle(receipts)
        self.serving.settle(receipts[: self.rng.randint(0, len(receipts))])

    def restart(self) -> None:
        """The process dies; some of what it wrote never reached the medium, on some ranks."""
        share = self.rng.choice([0.0, 0.0, 0.1, 0.5])
        self.serving.restart(lambda place: self.rng.random() < share)

    def advance(self) -> None:
        self.serving.now += self.rng.random() / 4

    def expire(self) -> None:
        self.serving.now += 6.0
        self.serving.settle()

    def reset(self) -> None:
        self.serving.reset()

    def lose_bytes(self) -> None:
        if self.serving.tiers:
            tier = self.rng.randrange(len(self.serving.tiers))
            self.serving.lose_bytes(tier, [self.rng.randrange(200) for _ in range(2)])

    def tier_goes(self) -> None:
        """A tier goes away on a rank, or comes back to it."""
        if self.serving.tiers:
            tier, rank = (
                self.rng.randrange(len(self.serving.tiers)),
                self.rng.choice(self.serving.ranks),
            )
            ails = rank.tiers[self.serving.tiers[tier].name].ailment
            if ails or self.rng.random() < 10 * self.bad:
                self.serving.tier_goes(tier, rank, "" if ails else "out of order")

    def _each(self, state: str, act: Callable[..., object]) -> None:
        there = [r for r in self.serving.requests.values() if r.state == state]
        if there:
            act(self.rng.choice(there))


def random_setup(rng: random.Random) -> Setup:
    """Any model on any server."""
    kind = rng.choice(sorted(KINDS))
    tiers = [
        (rng.choice([6, 80, 200, None, None]), rng.choice(list(WriteMode)))
        for _ in range(rng.choice([0, 1, 1, 2]))
    ]
    return Setup(
        kind=kind,
        hash_tokens=rng.choice([2, 4]),
        num_ranks=rng.randint(1, 3),
        num_slots=rng.choice([4, 16, 32, 96]),
        num_blocks=rng.choice([26, 26, 34, 64]),
        tiers=tuple(tiers),
        joins_loads=rng.random() < 0.8,
        bounded=rng.random() < 0.8,
        store_threshold=rng.choice([1, 1, 1, 2, 3]),
        load_policy=rng.choice(["always", "always", "auto"]),
        num_stories=rng.choice([4, 8, 12]),
        seed=rng.randrange(1 << 16),
        piece_slots=rng.choice([0, 1, 2, 4]),
        stores_late=rng.random() < 0.4,
    )
