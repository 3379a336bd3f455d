"""The same conversations served three ways: what a small device costs, and what kvferry saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from kvferry.config import Config
from kvferry.errors import InputError
from kvferry.settings.tiers import TierSpec, show_tiers
from kvferry.tools.demo.blocks import ServedRequest
from kvferry.tools.demo.engine import Engine, Limits, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape
from kvferry.tools.demo.workload import Chat, Served, serve
from kvferry.types import DEVICE, HOST

Answers = dict[str, list[int]]
"""Every turn's generated tokens by request id."""


class ServingWay(Enum):
    """One way to serve the workload."""

    ROOMY = "roomy"  # a device that holds the whole working set
    SMALL = "small"  # a device that does not; what it forgets is computed again
    KVFERRY = "kvferry"  # the same small device; what it forgets comes back from host memory


@dataclass(frozen=True)
class Scenario:
    """What all three ways share, and how small the small device is."""

    chat: Chat
    shape: ModelShape
    device_blocks: int
    host_bytes: int
    block_tokens: int = 16
    tiers: tuple[TierSpec, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.chat.longest > self.shape.max_tokens:
            raise InputError(
                f"a conversation grows to {self.chat.longest} tokens, "
                f"the model ends at {self.shape.max_tokens}; make it shorter"
            )
        needed = -(-self.chat.longest // self.block_tokens)
        if self.device_blocks < needed:
            raise InputError(
                f"a conversation grows to {self.chat.longest} tokens, that is {needed} blocks; "
                f"{self.device_blocks} device blocks cannot hold even one"
            )
        if self.device_blocks >= self.working_set:
            raise InputError(
                f"{self.device_blocks} device blocks hold the whole working set of "
                f"{self.working_set}, so there is nothing to offload; give fewer"
            )

    @property
    def working_set(self) -> int:
        """Blocks of all conversations at their longest."""
        return self.chat.num_blocks(self.block_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.shape.num_layers * int(np.prod(self.shape.kv_shape(1, self.block_tokens))) * 4


@dataclass(frozen=True)
class Turn:
    """One answered question: how long until its first token, and where its prompt came from."""

    conversation: int
    turn: int
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    prefilled_tokens: int
    first_token_seconds: float


@dataclass(frozen=True)
class Figures:
    """What one way cost. Tokens are counted each time they are computed or loaded."""

    way: ServingWay
    device_blocks: int
    seconds: float
    turns: Sequence[Turn]
    generated_tokens: int
    prompt_tokens: int
    prefill_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    stored_bytes: int
    loaded_bytes: int
    num_preemptions: int
    failed_load_tokens: int
    spilled_bytes: int = 0
    promoted_bytes: int = 0

    def first_token_seconds(self, percentile: float) -> float:
        return float(np.percentile([turn.first_token_seconds for turn in self.turns], percentile))

    def first_token_median_by_turn(self) -> list[float]:
        """The median time to first token of every round."""
        rounds: dict[int, list[float]] = {}
        for turn in self.turns:
            rounds.setdefault(turn.turn, []).append(turn.first_token_seconds)
        return [float(np.median(rounds[number])) for number in sorted(rounds)]

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds

    @property
    def device_hit_rate(self) -> float:
        return self.device_hit_tokens / self.looked_up_tokens

    @property
    def host_hit_rate(self) -> float:
        return self.host_hit_tokens / self.looked_up_tokens

    @property
    def looked_up_tokens(self) -> int:
        """Prompt tokens, counted again for a request that was preempted and came back."""
        return self.device_hit_tokens + self.host_hit_tokens + self.prefill_tokens

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "device_blocks": self.device_blocks,
            "seconds": self.seconds,
            "ttft_p50_seconds": self.first_token_seconds(50),
            "ttft_p95_seconds": self.first_token_seconds(95),
            "ttft_p50_seconds_by_turn": self.first_token_median_by_turn(),
            "tokens_per_second": self.tokens_per_second,
            "generated_tokens": self.generated_tokens,
            "prompt_tokens": self.prompt_tokens,
            "prefill_tokens_computed": self.prefill_tokens,
            "hit_rate": {DEVICE: self.device_hit_rate, HOST: self.host_hit_rate},
            "hit_tokens": {DEVICE: self.device_hit_tokens, HOST: self.host_hit_tokens},
            "bytes_moved": {
                f"{DEVICE}->{HOST}": self.stored_bytes,
                f"{HOST}->{DEVICE}": self.loaded_bytes,
                f"{HOST}->tiers": self.spilled_bytes,
                f"tiers->{HOST}": self.promoted_bytes,
            },
            "preemptions": self.num_preemptions,
            "failed_load_tokens": self.failed_load_tokens,
        }


@dataclass(frozen=True)
class Comparison:
    """The three ways' figures, and whether their tokens agree."""

    setting: Scenario
    figures: dict[ServingWay, Figures]
    num_different_turns: int

    @property
    def tokens_equal(self) -> bool:
        return self.num_different_turns == 0

    @property
    def prefill_ratio(self) -> float:
        """How many times fewer prefill tokens the small device computes with kvferry."""
        with_kvferry = self.figures[ServingWay.KVFERRY].prefill_tokens
        return self.figures[ServingWay.SMALL].prefill_tokens / with_kvferry

    @property
    def first_token_ratio(self) -> float:
        """How many times sooner the median first token comes with kvferry."""
        with_kvferry = self.figures[ServingWay.KVFERRY].first_token_seconds(50)
        return self.figures[ServingWay.SMALL].first_token_seconds(50) / with_kvferry

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        setting, chat, shape = self.setting, self.setting.chat, self.setting.shape
        return {
            "tokens_equal": self.tokens_equal,
            "different_turns": self.num_different_turns,
            "prefill_ratio": self.prefill_ratio,
            "ttft_p50_ratio": self.first_token_ratio,
            "setting": {
                "conversations": chat.num_conversations,
                "turns": chat.num_turns,
                "opening_tokens": chat.opening_tokens,
                "question_tokens": chat.question_tokens,
                "answer_tokens": chat.answer_tokens,
                "users": chat.num_users,
                "seed": chat.seed,
                "windows": list(shape.windows),
                "layers": shape.num_layers,
                "width": shape.width,
                "block_tokens": setting.block_tokens,
                "block_bytes": setting.block_bytes,
                "working_set_blocks": setting.working_set,
                "device_blocks": setting.device_blocks,
                "host_bytes": setting.host_bytes,
                "tiers": show_tiers(setting.tiers),
            },
            "ways": {way.value: figures.to_dict() for way, figures in self.figures.items()},
        }


def run(
    setting: Scenario,
    way: ServingWay,
    decoder: Decoder,
    on_finish: Callable[[ServedRequest], None] | None = None,
) -> tuple[Figures, Answers]:
    """Serve the workload one way."""
    num_blocks = setting.working_set if way is ServingWay.ROOMY else setting.device_blocks
    with Runner(decoder, num_blocks=num_blocks, block_tokens=setting.block_tokens) as runner:
        if way is not ServingWay.KVFERRY:
            engine = Engine(runner, limits=setting.limits)
            served = serve(engine, setting.chat, on_finish)
            return _figures(way, engine, served, {}), served.answers()
        config = Config(tiers=setting.tiers)
        with Offloader(runner, host_bytes=setting.host_bytes, config=config) as offloader:
            engine = Engine(runner, limits=setting.limits, offloader=offloader)
            served = serve(engine, setting.chat, on_finish)
            engine.drain()
            engine.memory.check_integrity(num_held=0)
            offloader.scheduler.check_integrity()
            moved = dict(offloader.stats().bytes_moved)
            return _figures(way, engine, served, moved), served.answers()


def compare(setting: Scenario, results: dict[ServingWay, tuple[Figures, Answers]]) -> Comparison:
    """Put the ways side by side; the first one's answers are the truth."""
    everything = [answers for _, answers in results.values()]
    turns = set().union(*everything)
    num_different = sum(
        any(answers.get(turn) != everything[0].get(turn) for answers in everything)
        for turn in turns
    )
    figures = {way: figures for way, (figures, _) in results.items()}
    return Comparison(setting, figures, num_different)


def _figures(
    way: ServingWay, engine: Engine, served: Served, moved: dict[tuple[str, str], int]
) -> Figures:
    counts = engine.counts
    return Figures(
        way=way,
        device_blocks=engine.memory.num_blocks,
        seconds=served.seconds,
        turns=[turn_of(request) for request in served.requests],
        generated_tokens=sum(len(request.generated) for request in served.requests),
        prompt_tokens=sum(len(request.prompt) for request in served.requests),
        prefill_tokens=counts.num_prefill_tokens,
        device_hit_tokens=counts.num_device_hit_tokens,
        host_hit_tokens=counts.num_loaded_tokens,
        stored_bytes=moved.get((DEVICE, HOST), 0),
        loaded_bytes=moved.get((HOST, DEVICE), 0),
        num_preemptions=counts.num_preemptions,
        failed_load_tokens=counts.num_failed_load_tokens,
        spilled_bytes=sum(n for (src, dst), n in moved.items() if src == HOST and dst != DEVICE),
        promoted_bytes=sum(n for (src, dst), n in moved.items() if src != DEVICE and dst == HOST),
    )


def turn_of(request: ServedRequest) -> Turn:
    """What became of a request that is answered."""
    assert request.first_token_at is not None
    _, conversation, _, turn = request.id.split("-")
    return Turn(
        conversation=int(conversation),
        turn=int(turn),
        prompt_tokens=len(request.prompt),
        device_tokens=request.num_device_hits,
        host_tokens=request.num_loaded,
        prefilled_tokens=request.num_prefilled,
        first_token_seconds=request.first_token_at - request.arrival,
    )


# ------------------------------------------------------------------------------------------------
# Conversations that come back after a while, or never: as those of a chat service do.
#
# Most people ask once. The more often one has asked, the likelier the next question; it comes after
# two minutes in the median, after most of what was asked meanwhile. So memory that holds less than
# that is full of conversations of which few return, and then late.

RETURN_CHANCES = (0.28, 0.41, 0.54, 0.62, 0.68, 0.74, 0.79, 0.83)
"""The chance of one more turn, by how many there were; after the last of these none follows."""

GAP_MEDIAN_SECONDS = 123.0
GAP_TENTH_SECONDS = 39.0
"""A tenth of those who return do so sooner."""

_NORMAL_TENTH = 1.2816  # standard deviations from the median to a tenth


class Arrival(NamedTuple):
    """One turn: when it is asked, in the service's seconds."""

    seconds: float
    conversation: int
    turn: int


@dataclass(frozen=True)
class ReturningChat:
    """The first ``num_turns`` turns of a service where ``new_per_second`` conversations begin.

    Texts and lengths are those of a :class:`Chat` with the same numbers.
    """

    num_turns: int = 700
    new_per_second: float = 0.16
    opening_tokens: int = 96
    question_tokens: int = 40
    answer_tokens: int = 3
    vocab: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.new_per_second < math.inf:
            raise InputError(f"new_per_second must be above 0, got {self.new_per_second}")

    @property
    def texts(self) -> Chat:
        """What is said in which turn."""
        return Chat(
            num_conversations=self.num_turns,
            num_turns=len(RETURN_CHANCES) + 1,
            opening_tokens=self.opening_tokens,
            question_tokens=self.question_tokens,
            answer_tokens=self.answer_tokens,
            num_users=1,
            vocab=self.vocab,
            seed=self.seed,
        )

    @property
    def longest(self) -> int:
        """Tokens that no conversation exceeds."""
        turn = (self.question_tokens, self.answer_tokens)
        parts = (self.opening_tokens, *turn * (len(RETURN_CHANCES) + 1))
        return sum(each + each // 2 for each in parts)

    def arrivals(self) -> list[Arrival]:
        """Every turn, in the order in which they are asked; the same for one seed."""
        rng = np.random.default_rng((self.seed, 5))
        spread = math.log(GAP_MEDIAN_SECONDS / GAP_TENTH_SECONDS) / _NORMAL_TENTH
        found: list[Arrival] = []
        begin = 0.0
        for conversation in range(self.num_turns):  # as many as if nobody returned
            begin += float(rng.exponential(1 / self.new_per_second))
            found.append(Arrival(begin, conversation, 0))
            at = begin
            for turn, chance in enumerate(RETURN_CHANCES, start=1):
                if rng.random() >= chance:
                    break
                at += float(rng.lognormal(math.log(GAP_MEDIAN_SECONDS), spread))
                found.append(Arrival(at, conversation, turn))
        return sorted(found)[: self.num_turns]
