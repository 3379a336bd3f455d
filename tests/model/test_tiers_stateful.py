"""Everything at once: models of every shape, several tiers, ranks that fail, and real bytes.

Hypothesis chooses the server and what happens to it. After every operation all pools prove their
bookkeeping, every block that can be matched holds the right bytes on every rank, and every block a
request computes with is the one it should be. In the end every request finishes, and nothing is
left claimed, held, or waited for.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.model.serving import Serving
from tests.model.stage import Setup
from tests.model.weather import ODDS, RARE, Weather, random_setup

from kvferry.scheduler.tier import WriteMode

chance = st.randoms(use_true_random=False)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    rng = draw(chance)
    num_slots, num_blocks = rng.choice([16, 6, 40]), rng.choice([13, 20])
    setup = random_setup(rng)
    return replace(setup, num_slots=num_slots, num_blocks=num_blocks, longest=48, num_stories=4)


class TiersMachine(RuleBasedStateMachine):
    """A server in any weather. Chooses; :class:`Serving` acts and checks."""

    serving: Serving | None = None
    hung: int | None = None

    @initialize(setup=setups())
    def begin(self, setup: Setup) -> None:
        self.serving = Serving(setup)

    @property
    def server(self) -> Serving:
        assert self.serving is not None
        return self.serving

    @rule(rng=chance, what=st.sampled_from([name for name in ODDS if name not in RARE]))
    def happen(self, rng: random.Random, what: str) -> None:
        getattr(Weather(self.server, rng, bad=0.3, hung=self.hung), what)()

    @rule(rng=chance, what=st.sampled_from(RARE), really=st.integers(0, 3))
    def happen_seldom(self, rng: random.Random, what: str, really: int) -> None:
        if not really:
            getattr(Weather(self.server, rng, bad=0.3), what)()
            self.hung = None if what == "restart" else self.hung

    @rule(count=st.integers(1, 3))
    def serve(self, count: int) -> None:
        """Some steps in which all goes well, so that interesting states are near."""
        for _ in range(count):
            self.server.step(hung=[] if self.hung is None else [self.hung])

    @precondition(lambda self: self.serving is not None and self.hung is None)
    @rule(pick=st.integers(0, 63), really=st.integers(0, 4))
    def hang(self, pick: int, really: int) -> None:
        """A rank stops doing anything, and nobody knows."""
        if not really:
            self.hung = pick % len(self.server.ranks)

    @precondition(lambda self: self.serving is not None and self.hung is not None)
    @rule()
    def unhang(self) -> None:
        """It wakes up and does what it was told long ago."""
        self.hung = None

    @invariant()
    def promises_are_kept(self) -> None:
        if self.serving is not None:
            self.serving.check()

    def teardown(self) -> None:
        if self.serving is not None:
            self.serving.quiesce()
            self.serving.drain()


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=3 * settings().max_examples, stateful_step_count=50)


@pytest.mark.parametrize("seed", range(12))
def test_any_weather(seed: int) -> None:
    """Longer lives than Hypothesis leads, on servers of every kind."""
    rng = random.Random(seed)
    serving = Serving(random_setup(rng))
    weather = Weather(serving, rng, bad=rng.choice([0.0, 0.02, 0.2]))
    for _ in range(20):
        weather.blow(50)
        serving.check()
    serving.quiesce()
    serving.drain()


def test_loads_in_pieces_in_any_weather() -> None:
    """After each restart all is below: hits are loaded while they come up, some fail half-way."""
    num_pieces = num_parts = 0
    for seed in (0, 1, 3, 10):
        rng = random.Random(seed)
        serving = Serving(
            Setup(
                kind=("full", "pairs")[seed % 2],
                hash_tokens=(4, 2)[seed % 5 == 0],
                num_slots=96,
                num_blocks=64,
                tiers=((600, WriteMode.THROUGH),),
                num_ranks=1 + seed % 3,
                joins_loads=seed % 2 == 0,
                piece_slots=1 + seed % 3,
            )
        )
        weather = Weather(serving, rng, bad=(0.02, 0.1, 0.3)[seed % 3])
        for _ in range(8):
            for _ in range(20):
                weather.blow(15)
                serving.check()
            serving.restart(lambda place: False)
        serving.quiesce()
        serving.drain()
        num_pieces += serving.num_pieces
        num_parts += serving.num_parts
    assert num_pieces > 5
    assert num_parts > 0


def test_the_weather_reaches_everything() -> None:
    """A test that never loads proves nothing: each thing these tests are about does happen."""
    rng = random.Random(9)
    seen: set[str] = set()
    for kind, far in zip(
        ("full", "window", "recurrent", "pairs"), (200, None, None, 200), strict=True
    ):
        serving = Serving(
            Setup(
                kind=kind,
                num_slots=16,
                num_blocks=26,
                tiers=((200, WriteMode.SPILL), (far, WriteMode.THROUGH)),
                num_ranks=2,
                num_stories=8,
            )
        )
        weather = Weather(serving, rng)
        weather.blow(4000)
        serving.quiesce()
        serving.drain()
        seen |= {"restored"} if serving.num_restored else set()
        seen |= {"failed"} if serving.num_failed else set()
        seen |= {"loaded"} if serving.num_loads else set()
        for stats in (*serving.past, serving.scheduler.stats()):
            seen |= {"promoted"} if stats.promoted_tokens else set()
            seen |= {"overdue"} if stats.overdue else set()
            seen |= {"shed"} if stats.shed_stores else set()
            seen |= {"lost block"} if stats.lost_blocks else set()
            seen |= {"found" for asked, found in stats.asked.values() if 0 < found < asked}
            seen |= {f"{src} to {dst}" for src, dst in stats.bytes_moved}
            seen |= set(stats.missed)
    late = Serving(Setup(num_slots=40, num_blocks=60, num_ranks=2, stores_late=True))
    Weather(late, rng).blow(6000)
    late.quiesce()
    late.drain()
    assert late.num_left
    assert late.num_late
    assert late.num_continued
    assert late.num_loads
    assert seen >= {
        "loaded",
        "failed",
        "promoted",
        "restored",
        "overdue",
        "shed",
        "device to host",
        "host to device",
        "host to lower0",
        "host to lower1",
        "lower0 to host",
        "lower1 to host",
        "lost block",
        "found",
        "nothing_missed",
        "never_stored",
        "in_flight",
        "evicted",
        "other_namespace",
        "not_promoted",
    }
