"""The eviction policy for vLLM's OffloadingConnector, under vLLM's own manager of host memory."""

from __future__ import annotations

import random
from functools import partial

import pytest

if not hasattr(pytest.importorskip("vllm.v1.kv_offload.cpu.policies.base"), "ChunkStatus"):
    pytest.skip("this vLLM takes no eviction policies of others", allow_module_level=True)

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvferry.cache.pool import Pool
from kvferry.errors import ConfigError

CHUNKS = 32


def open_manager(num_chunks: int = CHUNKS, policy: str = "KvferryPolicy") -> CPUOffloadingManager:
    module = "kvferry.connectors.vllm.policy" if policy == "KvferryPolicy" else None
    return CPUOffloadingManager(num_chunks, policy, module)


class Life:
    """Requests through a manager, and what it must have: which chunk is in which place."""

    def __init__(self, manager: CPUOffloadingManager) -> None:
        self.manager = manager
        self.places: dict[int, bytes] = {}
        self.num_hits = self.num_requests = 0

    def begin(self, keys: list[bytes]) -> ReqContext:
        self.num_requests += 1
        request = ReqContext(f"request-{self.num_requests}")
        for at, key in enumerate(keys):
            request.set_offload_key_position(key, 16 * (at + 1))
        self.manager.on_new_request(request)
        return request

    def load(self, keys: list[bytes], request: ReqContext) -> int:
        """How many leading chunks are there; they are loaded, and still in use."""
        hits = 0
        while hits < len(keys) and self.manager.lookup(keys[hits], request) is LookupResult.HIT:
            hits += 1
        chunks = self.manager.prepare_load(keys[:hits], request).chunk_ids if hits else []
        assert [self.places[chunk] for chunk in chunks] == keys[:hits]
        self.num_hits += hits
        return hits

    def store(self, keys: list[bytes], request: ReqContext, *, well: bool = True) -> bool:
        out = self.manager.prepare_store(keys, request)
        if out is None:
            return False
        for key in out.evicted_keys:
            (place,) = [place for place, held in self.places.items() if held == key]
            del self.places[place]
        for key, chunk in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            assert chunk not in self.places, "a chunk that is held was given out"
            self.places[chunk] = key
        self.manager.complete_store(out.keys_to_store, request, well)
        if not well:
            self.places = {p: k for p, k in self.places.items() if k not in out.keys_to_store}
        return True

    def serve(self, keys: list[bytes]) -> int:
        request = self.begin(keys)
        hits = self.load(keys, request)
        self.manager.complete_load(keys[:hits], request)
        self.store(keys[hits:], request)
        self.manager.on_request_finished(request)
        return hits


def chain(number: int, length: int, groups: int = 1) -> list[bytes]:
    return [
        make_offload_key(number.to_bytes(4, "big") + at.to_bytes(28, "big"), at % groups)
        for at in range(length)
    ]


def test_a_conversation_loses_its_end_first():
    life = Life(open_manager())
    for number in range(5):
        assert life.serve(chain(number, 8)) == 0
    found = [life.serve(chain(number, 8)) for number in (4, 3, 2)]
    assert found == [8, 8, 8]
    life = Life(open_manager(12))
    life.serve(chain(1, 8))
    life.serve(chain(2, 6))  # two of the first chain must go: its last ones
    request = life.begin(chain(1, 8))
    assert life.load(chain(1, 8), request) == 6


def test_chunks_in_use_and_of_the_store_itself_stay():
    life = Life(open_manager(8))
    first, second = chain(1, 6), chain(2, 2)
    life.serve(first)
    life.serve(second)
    reading = life.begin(first)
    assert life.load(first, reading) == 6
    other = life.begin(chain(3, 3))
    assert not life.store(chain(3, 3), other), "only two are idle: all of them stay"
    assert [life.manager.lookup(key, other) for key in second] == [LookupResult.HIT] * 2
    assert life.store(chain(3, 2), other)
    life.manager.complete_load(first, reading)
    assert life.store(chain(4, 3), other)
    assert life.load(first, life.begin(first)) == 3


@pytest.mark.parametrize("groups", [1, 2])
def test_random_lives(groups: int):
    chooser = random.Random()
    life = Life(open_manager())
    in_use: list[tuple[ReqContext, list[bytes]]] = []
    for _ in range(600):
        keys = chain(chooser.randrange(12), chooser.randrange(1, 9), groups)
        action = chooser.random()
        if action < 0.5:
            life.serve(keys)
        elif action < 0.7:
            request = life.begin(keys)
            in_use.append((request, keys[: life.load(keys, request)]))
        elif action < 0.8:
            life.store(keys, life.begin(keys), well=False)
        elif in_use:
            request, keys = in_use.pop(chooser.randrange(len(in_use)))
            life.manager.complete_load(keys, request)
            life.manager.on_request_finished(request)
        life.manager._policy._pool.check_integrity()
        assert len(life.places) <= CHUNKS
    assert life.num_hits > 100


def test_what_returns_is_kept_where_lru_drops_it(monkeypatch):
    """Conversations that return among ones that never do: the reason to have a policy at all."""
    now, hits = [0.0], {}
    with_time = partial(Pool, clock=lambda: now[0])
    monkeypatch.setattr("kvferry.connectors.vllm.policy.Pool", with_time)
    for policy in ("KvferryPolicy", "lru"):
        life, once = Life(open_manager(64, policy)), 1000
        for turn in range(400):
            now[0] += 5.0
            if turn % 4 == 0:
                life.serve(chain(turn // 4 % 6, 8))
            else:
                once += 1
                life.serve(chain(once, 8))
        hits[policy] = life.num_hits
    assert hits["KvferryPolicy"] > hits["lru"]


def test_a_reset_and_a_wrong_setting(monkeypatch):
    life = Life(open_manager())
    life.serve(chain(1, 8))
    life.manager.reset_cache()
    life.places.clear()
    assert life.serve(chain(1, 8)) == 0
    assert life.serve(chain(1, 8)) == 8
    monkeypatch.setenv("KVFERRY_POLICY", "lur")
    with pytest.raises(ConfigError, match="lru"):
        open_manager()
