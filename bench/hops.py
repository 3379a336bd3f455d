"""How many calls, and how many changes of module, a block's way through kvferry takes.

Traced call by call, with a profile function that counts every Python function of kvferry that is
entered, and every time the next one is in another file. Calls are what this code can be judged by
on any machine: they do not depend on what else runs there. Two ways in are traced: the library, and
both sides of the vLLM connector with stand-ins for vLLM's requests and block pool (vLLM itself is
not needed).

``before`` is what the same lines took at commit 839a5bc, when a request was spread over a dozen
maps; of the whole life and the match below at fb18565 (0 changes of module where they
were not counted).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np

import kvferry
from kvferry.config import Config
from kvferry.types import FIRST_RANK

SOURCE = str(Path(kvferry.__file__).parent)
BLOCK_TOKENS = 16
NUM_BLOCKS = 64
BLOCKS = 8
LIVES = 32

FINDS = ("cache/slots.py:find", "cache/slots.py:find_leading", "cache/slots.py:find_few")
"""Lookups of keys in the index of a pool."""


@dataclass
class Trace:
    """What was entered so far. Owns only counts."""

    calls: int = 0
    changes: int = 0
    modules: set[str] = field(default_factory=set)
    by_function: Counter[str] = field(default_factory=Counter)
    _last: str = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(SOURCE):
            return
        self.calls += 1
        self.changes += name != self._last
        self._last = name
        self.modules.add(name)
        self.by_function[f"{name[len(SOURCE) + 1 :]}:{frame.f_code.co_name}"] += 1

    @contextmanager
    def on(self) -> Iterator[None]:
        """Count while this lasts."""
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


Traces = dict[str, Trace]


def settle_down(is_done: Callable[[], bool]) -> None:
    """Copies run on threads of their own: let them end before anybody looks."""
    end = time.monotonic() + 10
    while not is_done() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)


def has_ended(engine: Any) -> bool:
    """Whether a copy has ended that nobody polled for yet."""
    return bool(engine._done)


def attached(**settings: Any) -> kvferry.Ferry:
    kv = [np.zeros((NUM_BLOCKS, 64), dtype=np.uint8) for _ in range(4)]
    config = Config(block_tokens=BLOCK_TOKENS, load_policy="always", **settings)
    ferry = kvferry.attach(kv, model="m", config=config)
    while ferry.host_stats().ready_slots < ferry.host_stats().num_slots:
        time.sleep(0.01)
    return ferry


def through_the_library() -> Traces:
    traces: Traces = {
        "library: store": Trace(),
        "library: match": Trace(),
        "library: load": Trace(),
    }
    store, match, load = traces.values()
    with attached(host=1 << 20) as ferry:
        blocks = list(range(BLOCKS))
        other = ferry.keys(np.arange(BLOCKS * BLOCK_TOKENS) + 7)
        ferry.wait(ferry.store(other, blocks))  # what is made at the first call is not a step
        ferry.wait(ferry.load(ferry.match(other), blocks))
        keys = ferry.keys(np.arange(BLOCKS * BLOCK_TOKENS))
        with store.on():
            ferry.store(keys, blocks)
        settle_down(lambda: has_ended(ferry._rank.engine))
        with store.on():
            ferry.poll()
        with load.on(), match_too(load, match):
            hit = ferry.match(keys)
        with load.on():
            ferry.load(hit, blocks)
        settle_down(lambda: has_ended(ferry._rank.engine))
        with load.on():
            ferry.poll()
    return traces


def whole_lives() -> Traces:
    """Store, wait, match, load, wait, and nothing left to do later: one life in many, on average.

    The pool is full and evicts with the default policy.
    """
    trace = Trace()
    with attached(host=f"{NUM_BLOCKS * 4 * 64}B") as ferry:
        blocks = list(range(BLOCKS))

        def live(number: int, trace: Trace) -> None:
            keys = ferry.keys(np.arange(BLOCKS * BLOCK_TOKENS) + 10_000 * number)
            with trace.on():
                ticket = ferry.store(keys, blocks)
            settle_down(lambda: has_ended(ferry._rank.engine))
            with trace.on():
                done = ferry.wait(ticket)
                assert done.num_blocks == BLOCKS, done
                ticket = ferry.load(ferry.match(keys), blocks)
            settle_down(lambda: has_ended(ferry._rank.engine))
            with trace.on():
                assert ferry.wait(ticket).ok

        for number in range(2 * NUM_BLOCKS // BLOCKS):
            live(number, Trace())
        ferry.poll()
        for number in range(1000, 1000 + LIVES):
            live(number, trace)
        with trace.on():
            ferry.poll()
    trace.calls //= LIVES
    trace.changes //= LIVES
    return {"library: whole life": trace}


def on_a_lower_tier() -> Traces:
    """A match whose blocks were evicted to a lower tier; it orders them up."""
    trace = Trace()
    few = 4
    with attached(
        host=f"{16 * 4 * 64}B", tiers=f"memory:{64 * 4 * 64}B", tier_write="through"
    ) as ferry:

        def keys_of(number: int) -> Any:
            return ferry.keys(np.arange(few * BLOCK_TOKENS) + 10_000 * number)

        def settled() -> None:
            for _ in range(20):
                ferry.poll()
                time.sleep(0.005)

        for number in range(8):
            ferry.wait(ferry.store(keys_of(number), list(range(few))))
            settled()
        for number, counted in ((0, Trace()), (1, trace)):
            keys = keys_of(number)
            with counted.on():
                hit = ferry.match(keys)
            assert hit.is_pending, "it was found in the host"
            ferry.await_hit(hit, 10)
            settled()
    return {"library: match below": trace}


@contextmanager
def match_too(whole: Trace, part: Trace) -> Iterator[None]:
    """A part of a line that is a line of its own."""
    before = (whole.calls, whole.changes, set(whole.modules), Counter(whole.by_function))
    whole.modules = set()
    yield
    part.calls = whole.calls - before[0]
    part.changes = whole.changes - before[1]
    part.modules = set(whole.modules)
    part.by_function = whole.by_function - before[3]
    whole.modules |= before[2]


class Block:
    """One of vLLM's, as far as kvferry looks."""

    def __init__(self, number: int) -> None:
        self.block_id = number
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.next_free_block: Any = None
        self.is_null = False


class BlockPool:
    """As vLLM's, as far as kvferry asks it: free blocks in a queue, cached ones by hash."""

    hash_block_size = BLOCK_TOKENS
    num_gpu_blocks = NUM_BLOCKS

    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(NUM_BLOCKS)]
        for block, follower in zip(self.blocks[:-1], self.blocks[1:], strict=True):
            block.next_free_block = follower
        self.free_block_queue = SimpleNamespace(
            fake_free_list_head=SimpleNamespace(next_free_block=self.blocks[0])
        )
        self.cached: dict[bytes, Block] = {}

    def get_num_free_blocks(self) -> int:
        return sum(not block.ref_cnt for block in self.blocks)

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    def get_cached_block(self, name: bytes, groups: list[int]) -> list[Block] | None:
        return [self.cached[name]] if name in self.cached else None


SPEC = type("FullAttentionSpec", (SimpleNamespace,), {})(block_size=BLOCK_TOKENS)


def vllm_request(name: str, seed: int, num_blocks: int) -> Any:
    hashes = [bytes(np.random.default_rng((seed, at)).bytes(32)) for at in range(num_blocks)]
    tokens = num_blocks * BLOCK_TOKENS + 1
    return SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        num_preemptions=0,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        num_output_tokens=0,
    )


class Server:
    """Both sides of the connector and one rank, stepped by hand as vLLM would."""

    def __init__(self) -> None:
        from kvferry.connectors.common.ranks import RankPlace
        from kvferry.connectors.common.session import SchedulerSession
        from kvferry.connectors.common.worker import WorkerSession
        from kvferry.connectors.vllm.engine import VllmEngine
        from kvferry.connectors.vllm.geometry import kv_cache_of
        from kvferry.connectors.vllm.setup import contents_of, namespace_of, setup_of, support_of

        groups = [SimpleNamespace(kv_cache_spec=SPEC, layer_names=["layer0"])]
        caches = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=groups)
        vllm_config = stand_in_config()
        support = support_of(vllm_config, caches, recomputes_requests=False)
        config = Config(host=1 << 22, load_policy="always")
        self.pool = BlockPool()
        self.tables: dict[str, list[int]] = {}
        self.rank = WorkerSession(
            place=RankPlace(FIRST_RANK),
            config=config,
            contents=contents_of(vllm_config, caches),
        )
        self.side = SchedulerSession(setup_of(vllm_config, caches, config, support))
        groups_ours, namespace = support.groups, namespace_of(vllm_config, caches)
        manager = SimpleNamespace(get_block_ids=lambda name: (self.tables[name],))
        self.side.bind(lambda: VllmEngine(groups_ours, namespace, self.pool, manager))
        kv = np.zeros((NUM_BLOCKS, 2, BLOCK_TOKENS, 8), dtype=np.float32).view(OnCpu)
        self.rank.register(lambda: kv_cache_of({"layer0": kv}, [["layer0"]], NUM_BLOCKS))
        self.side.meet_ranks([self.rank.introduce()])
        for _ in range(20):  # until the host memory is there
            self.step({})
            self.hear()
            time.sleep(0.01)

    def blocks_of(self, name: str, numbers: range) -> Any:
        self.tables[name] = list(numbers)
        return SimpleNamespace(get_block_ids=lambda: (self.tables[name],))

    def step(self, scheduled: dict[str, int], new: tuple[str, ...] = ()) -> None:
        orders = self.side.orders(scheduled, sum(scheduled.values()), new=bool(new), preempted=())
        self.rank.begin(orders)
        if self.rank.is_busy:  # as the connector class does
            self.rank.after_forward()

    def hear(self) -> None:
        if self.rank.is_busy or self.rank.finished.arrived:
            self.rank.poll()
            self.rank.finished.take("arrived")
        report = self.rank.take_receipts()
        if report is not None:
            self.side.take(report)

    def wait(self) -> None:
        settle_down(lambda: has_ended(self.rank._memory.engine))  # type: ignore[union-attr]

    def store(self, name: str, seed: int, trace: Trace) -> Any:
        """A short request comes, computes, ends, and is stored in the next step."""
        request = vllm_request(name, seed, BLOCKS)
        blocks = self.blocks_of(name, range(1, BLOCKS + 2))
        with trace.on():
            self.side.match(request, 0)
            self.side.allocated(request, blocks.get_block_ids, 0)
            self.step({name: request.num_tokens}, (name,))
            request.num_computed_tokens = request.num_tokens
            request.num_output_tokens = 1
            self.hear()
        for number, block_hash in zip(self.tables[name], request.block_hashes, strict=False):
            self.pool.cached[block_hash] = self.pool.blocks[number]
        with trace.on():
            self.side.finished(request, (self.tables[name],))
            self.step({})
        self.wait()
        with trace.on():
            self.hear()
        return request

    def load(self, name: str, seed: int, trace: Trace, match: Trace) -> None:
        """The same conversation comes back: matched, loaded, told."""
        request = vllm_request(name, seed, BLOCKS)
        with trace.on(), match_too(trace, match):
            tokens = self.side.match(request, 0)
        assert tokens, "nothing was stored"
        blocks = self.blocks_of(name, range(1, BLOCKS + 2))
        with trace.on():
            self.side.allocated(request, blocks.get_block_ids, tokens)
            self.step({})
        self.wait()
        with trace.on():
            self.hear()
        self.side.finished(request)
        self.step({})

    def close(self) -> None:
        self.rank.close()
        self.side.close()


class OnCpu(np.ndarray):
    """An array that says where it is, as a tensor does."""

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="cpu", index=None)


def stand_in_config() -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_rank_local=None,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto"),
        model_config=SimpleNamespace(
            model="m",
            revision=None,
            dtype="float32",
            quantization=None,
            hf_overrides={},
            hf_text_config=SimpleNamespace(),
        ),
        lora_config=None,
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
    )


def through_the_connector() -> Traces:
    server = Server()
    traces: Traces = {"vLLM: store": Trace(), "vLLM: match": Trace(), "vLLM: load": Trace()}
    store, match, load = traces.values()
    try:
        server.store("first", 1, Trace())
        server.load("again", 1, Trace(), Trace())
        server.store("one", 2, store)
        server.load("two", 2, load, match)
    finally:
        server.close()
    return traces


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the counts to this file too")
    parser.add_argument("--functions", action="store_true", help="say which functions were entered")
    arguments = parser.parse_args()
    traces = {
        **through_the_library(),
        **whole_lives(),
        **on_a_lower_tier(),
        **through_the_connector(),
    }
    print(
        f"a request of {BLOCKS} blocks, Python {sys.version.split()[0]}, numpy {np.__version__}\n"
    )
    print("| line | calls | before | changes of module | before | modules |")
    print("|---|---|---|---|---|---|")
    for line, trace in traces.items():
        calls, changes = BEFORE.get(line, (0, 0))
        print(
            f"| {line} | {trace.calls} | {calls} | {trace.changes} | {changes} "
            f"| {len(trace.modules)} |"
        )
        if arguments.functions:
            for name, count in trace.by_function.most_common():
                print(f"    {count:3} {name}")
    below, store = traces["library: match below"], traces["library: store"]
    finds = {name: below.by_function[name] for name in FINDS if below.by_function[name]}
    print(f"\na match below looks keys up: {finds}")
    modules = sorted(name[len(SOURCE) + 1 :] for name in store.modules)
    others = [name for name in modules if not name.startswith("cache/policies/")]
    print(f"a library store enters {len(others)} modules besides the policy: {', '.join(others)}")
    if arguments.json:
        plain = {line: [trace.calls, trace.changes] for line, trace in traces.items()}
        arguments.json.write_text(json.dumps(plain, indent=2) + "\n")
    return 0


BEFORE: dict[str, tuple[int, int]] = {
    "library: store": (184, 110),
    "library: match": (171, 93),
    "library: load": (289, 160),
    "library: whole life": (444, 0),
    "library: match below": (432, 0),
    "vLLM: store": (414, 258),
    "vLLM: match": (215, 126),
    "vLLM: load": (399, 229),
}

if __name__ == "__main__":
    sys.exit(main())
