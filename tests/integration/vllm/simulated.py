"""vLLM's own scheduler, coordinator and block pool around a model that checks what it reads.

The connector is the real one, on both sides. Every (tokens so far, group) has a value of its own.
The model writes it where vLLM's model runner would: at slots of a block table, into a ring, into
one state per so many tokens, into the running state, and for drafts too. What a request reads must
be the values of its own tokens, so a block in the wrong place, a refused draft or a state that was
written over cannot look right.
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

Tokens = list[int]

NUM_WORDS = 23
NAMES = [f"n{number}" for number in range(64)]
_MASK = (1 << 61) - 1


@dataclass(frozen=True)
class Shape:
    """A model: its groups of layers as vLLM's specs, the first ``block_tokens`` of them all.

    ``draft_groups`` are those of a draft model. ``rings`` names for each ring the group whose
    states are made of what it keeps.
    """

    name: str
    specs: tuple[Any, ...]
    block_tokens: int
    num_drafts: int = 0
    draft_groups: tuple[int, ...] = ()
    rings: dict[int, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    num_blocks: int = 80
    longest: int = 700
    dcp: int = 1
    """Ranks that share the tokens of every block in turn."""
    pcp: int = 1
    """Ranks that share the tokens of every prompt; each has the KV of all of them."""

    @property
    def num_ranks(self) -> int:
        return self.dcp * self.pcp


class _NoGrammars:
    """No request asks for structured output."""

    def accept_tokens(self, request: Any, tokens: Tokens) -> bool:
        return True

    def validate_tokens(self, request: Any, tokens: Tokens) -> Tokens:
        return tokens

    def should_advance(self, request: Any) -> bool:
        return False


def word_after(chained: int) -> int:
    """What the model says after these tokens."""
    return chained % NUM_WORDS


def chain(tokens: Sequence[int], before: Sequence[int] = (0,)) -> list[int]:
    """A value for each prefix, from the empty one on: ``before`` are those known already."""
    values = list(before)
    for token in tokens[len(values) - 1 :]:
        values.append(
            (values[-1] * 6364136223846793005 + token * 977 + 1442695040888963407) & _MASK
        )
    return values


@functools.lru_cache(maxsize=1)
def _base_config(model: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from kvferry.connectors.vllm import register

    register()
    return EngineArgs(
        model=str(model),
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=256,
        max_num_seqs=6,
        enforce_eager=True,
        async_scheduling=False,
        kv_transfer_config={"kv_connector": "kvferry", "kv_role": "kv_both"},
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    ).create_engine_config()


class Simulation:
    """One engine. Owns vLLM's scheduler, both sides of the connector, and the bytes."""

    def __init__(self, shape: Shape, model: Path, seed: int, **ferry: Any) -> None:
        self.shape = shape
        self.rng = random.Random(seed)
        self.saves_before_sampling = False
        self.config, self.cache = self._configs(model, ferry)
        self._start()
        self.tables: dict[str, list[list[int]]] = {}
        self.values: dict[str, list[int]] = {}
        self.running_state: dict[str, int] = {}
        self.accepted: dict[str, int] = {}
        self.replays: dict[str, tuple[int, int]] = {}
        self.num_came = self.num_drafts_refused = self.num_quiet = 0
        self.weights = 0
        """Every value follows from them, and from the tokens."""
        self.born: dict[str, int] = {}
        self.outputs: dict[str, Tokens] = {}
        self.stories = [[self.rng.randrange(NUM_WORDS) for _ in range(shape.longest)] for _ in "ab"]

    # -- vLLM and the connector -----------------------------------------------------------------

    def _configs(self, model: Path, ferry: dict[str, Any]) -> tuple[Any, Any]:
        from vllm.v1.core.kv_cache_utils import (
            resolve_cache_hit_alignment_tokens,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

        shape, config = self.shape, copy.deepcopy(_base_config(model))
        settings = {"host": "4MiB", "load_policy": "always", "metrics_port": "none"}
        config.kv_transfer_config.kv_connector_extra_config = {**settings, **ferry}
        parallel = config.parallel_config
        parallel.decode_context_parallel_size = parallel.tensor_parallel_size = shape.dcp
        parallel.prefill_context_parallel_size = shape.pcp
        parallel.world_size = shape.num_ranks
        speculative = config.speculative_config
        if shape.num_drafts:
            speculative.num_speculative_tokens = shape.num_drafts
            speculative.use_eagle = lambda: bool(shape.draft_groups)
            speculative.use_multi_module_mtp = lambda: False
        else:
            config.speculative_config = None
        cache = config.cache_config
        cache.block_size, cache.num_gpu_blocks = shape.block_tokens, shape.num_blocks
        if any(isinstance(spec, MambaSpec) for spec in shape.specs):
            cache.mamba_cache_mode = "align"
        for name, value in shape.options.items():
            setattr(cache, name, value)
        register_all_kvcache_specs(config)
        groups = [
            KVCacheGroupSpec([f"layer{g}"], spec, is_eagle_group=g in shape.draft_groups)
            for g, spec in enumerate(shape.specs)
        ]
        kv = KVCacheConfig(shape.num_blocks, [], groups)
        self.step_tokens, kv.hash_block_size = resolve_kv_cache_block_sizes(kv, config)
        kv.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            kv, config, self.step_tokens, kv.hash_block_size
        )
        kv.prefix_cache_retention_interval = getattr(cache, "prefix_cache_retention_interval", None)
        return config, kv

    def _start(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler

        from kvferry.connectors.vllm.connector import KvferryConnector

        hash_of = get_hash_fn_by_name("sha256")
        init_none_hash(hash_of)
        self.hasher = get_request_block_hasher(self.cache.hash_block_size, hash_of)
        with set_current_vllm_config(self.config):
            self.scheduler = Scheduler(
                vllm_config=self.config,
                kv_cache_config=self.cache,
                structured_output_manager=_NoGrammars(),
                block_size=self.step_tokens,
                hash_block_size=self.cache.hash_block_size,
            )
            self.workers = []
            for rank in range(self.shape.num_ranks):
                self.config.parallel_config.rank = rank
                worker = KvferryConnector(self.config, KVConnectorRole.WORKER, self.cache)
                self.workers.append(worker)
        self.connector = self.scheduler.connector
        self.total = KVOutputAggregator(self.shape.num_ranks)
        num_blocks, pcp, dcp = self.shape.num_blocks, self.shape.pcp, self.shape.dcp
        self.tensors = [
            torch.zeros(pcp, num_blocks, dcp, self._slots(spec), dtype=torch.int64)
            for spec in self.shape.specs
        ]
        self.copies = [tensor.numpy().reshape(pcp, num_blocks, -1) for tensor in self.tensors]
        self.memory = [copies[0] for copies in self.copies]
        told = {}
        for rank, worker in enumerate(self.workers):
            worker.register_kv_caches(
                {
                    f"layer{g}": each[rank // dcp, :, rank % dcp]
                    for g, each in enumerate(self.tensors)
                }
            )
            answer = worker.get_handshake_metadata()
            if answer is not None:  # vLLM's key: the last rank of several with one key wins
                told[0, rank % dcp] = answer
        self.connector.set_xfer_handshake_metadata_pp_aware(told)
        if self.connector._session.serving is None:
            self._meet()

    @property
    def serving(self) -> Any:
        session = self.connector._session
        assert session.serving is not None, session.idle_reason
        return session.serving

    @staticmethod
    def _slots(spec: Any) -> int:
        return 1 if hasattr(spec, "mamba_cache_mode") else spec.block_size // _per_state(spec)

    def _meet(self) -> None:
        """One step without requests: the ranks say what vLLM did not tell of them at the start."""
        from vllm.v1.outputs import ModelRunnerOutput

        todo = self.scheduler.schedule()
        for worker in self.workers:
            worker.bind_connector_metadata(pickle.loads(pickle.dumps(todo.kv_connector_metadata)))
            worker.start_load_kv(None)
        ends = [self._end(worker, todo) for worker in self.workers]
        outputs = [ModelRunnerOutput([], {}, [], kv_connector_output=end) for end in ends]
        self.scheduler.update_from_output(todo, self.total.aggregate(outputs, 0))
        assert self.connector._session.serving is not None, self.connector._session.idle_reason

    # -- requests -------------------------------------------------------------------------------

    def come(self, prompt: Tokens | None = None, max_tokens: int | None = None) -> str:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        rng, longest = self.rng, self.shape.longest
        if prompt is None:
            cut = rng.randrange(1, longest)
            tail = [rng.randrange(NUM_WORDS) for _ in range(rng.choice([0, 0, 5]))]
            prompt = [*rng.choice(self.stories)[:cut], *tail]
        max_tokens = max_tokens or rng.choice([1, 5, 40, 100])
        name = rng.choice([name for name in NAMES if name not in self.scheduler.requests])
        self.num_came += 1
        self.born[name] = self.weights
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, prompt, sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return name

    def turn(self, name: str) -> None:
        """The conversation goes on, or its answer becomes part of a story."""
        request = self.scheduler.requests[name]
        told = list(request.all_token_ids)
        if len(told) < self.shape.longest:
            self.stories.append(told + [self.rng.randrange(NUM_WORDS) for _ in range(7)])

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._forget(name)

    def replace_weights(self) -> None:
        """What was stored is of no more use, and what runs starts over."""
        done = self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert done
        self.weights += 1
        self.values.clear()

    def _forget(self, name: str) -> None:
        for known in (self.tables, self.values, self.running_state, self.accepted, self.replays):
            known.pop(name, None)

    # -- a step ---------------------------------------------------------------------------------

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        todo = self.scheduler.schedule()
        if not todo.num_scheduled_tokens:
            time.sleep(1e-3)  # a copy needs the processor
        orders = todo.kv_connector_metadata
        assert orders.epoch == self.serving.scheduler.epoch, "the ranks do not hear of a reset"
        self.num_quiet += orders.is_quiet
        self._update(todo)
        for worker in self.workers:
            worker.bind_connector_metadata(pickle.loads(pickle.dumps(orders)))
            worker.start_load_kv(None)
        names = list(todo.num_scheduled_tokens)
        sampled = [self._compute(name, todo) for name in names]
        if self.saves_before_sampling:
            for worker in self.workers:
                worker.wait_for_save()
                worker._worker._drain()  # a GPU would copy before it samples, too
        for name, words in zip(names, sampled, strict=True):
            self._keep_states(name, words, todo)
        places = {name: place for place, name in enumerate(names)}
        outputs = [
            ModelRunnerOutput(names, places, sampled, kv_connector_output=self._end(worker, todo))
            for worker in self.workers
        ]
        told = self.total.aggregate(outputs, 0)
        before = {name: self.scheduler.requests[name] for name in names}
        self.scheduler.update_from_output(todo, told)
        for name, request in before.items():
            if name not in self.scheduler.requests:
                self._check_output(request)
                self._forget(name)
        self._draft([name for name in names if name in self.scheduler.requests])

    def _end(self, worker: Any, todo: Any) -> Any:
        """One rank's answer."""
        from vllm.v1.outputs import KVConnectorOutput

        if not self.saves_before_sampling:
            worker.wait_for_save()
        results = worker.get_transfer_results(set(todo.finished_req_ids))
        output = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return output

    def _update(self, todo: Any) -> None:
        """The worker's block tables: they grow, but for requests that were preempted."""
        for new in todo.scheduled_new_reqs:
            self._enter(new.req_id, new.block_ids)
        cached = todo.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._enter(name, ids)
            elif ids is not None:
                for table, more in zip(self.tables[name], ids, strict=True):
                    table.extend(more)
        for block in todo.new_block_ids_to_zero or ():
            for spec, copies in zip(self.shape.specs, self.copies, strict=True):
                if not hasattr(spec, "mamba_cache_mode"):
                    copies[:, block] = 0
        for each in todo.kv_cache_block_copies or ():
            for copies in self.copies:
                copies[:, each.dst_block_id] = copies[:, each.src_block_id]

    def _enter(self, name: str, ids: Sequence[Sequence[int]]) -> None:
        self.tables[name] = [list(each) for each in ids]
        self.running_state.pop(name, None)
        self.accepted.pop(name, None)
        request = self.scheduler.requests[name]
        self.values.setdefault(name, [self.weights])
        start = int(getattr(request, "replay_start", 0))
        self.replays[name] = (
            (start, start + self.scheduler.prefix_replay_tokens) if start else (0, 0)
        )

    def _compute(self, name: str, todo: Any) -> Tokens:
        """Read, check and write the KV of one request; returns what it says."""
        request, count = self.scheduler.requests[name], todo.num_scheduled_tokens[name]
        drafts = todo.scheduled_spec_decode_tokens.get(name, [])
        end = request.num_computed_tokens  # vLLM has added this step's
        first = end - count
        told = list(request.all_token_ids)[: end - len(drafts)]
        values = self.values[name] = chain(told, self.values[name][: len(told) + 1])
        with_drafts = np.array(chain([*told, *drafts], values), dtype=np.int64)
        before = self.running_state.get(name)
        for g, spec in enumerate(self.shape.specs):
            table = self.tables[name][g]
            if hasattr(spec, "mamba_cache_mode"):
                self._run_states(name, g, before, range(first, end), len(drafts), with_drafts)
            elif g in self.shape.rings:
                self._run_ring(name, g, table[0], first, end, with_drafts)
            elif g not in self.shape.rings.values():
                self._run_tokens(name, g, spec, table, first, end, with_drafts)
        if end < request.num_tokens:
            return []
        return self._say(told, drafts, values)

    def _say(self, told: Tokens, drafts: Tokens, values: list[int]) -> Tokens:
        """The drafts that are what the model says itself, and one word more."""
        said: Tokens = []
        for draft in [*drafts, None]:
            word = word_after(chain([*told, *said], values)[-1])
            said.append(word)
            if word != draft:
                break
        self.num_drafts_refused += len(drafts) + 1 - len(said)
        return said

    def _run_tokens(
        self, name: str, g: int, spec: Any, table: list[int], first: int, end: int, values: Any
    ) -> None:
        """Attention: reads as far back as it reaches, writes a value per state."""
        per_state, copies = _per_state(spec), self.copies[g]
        size = spec.block_size * self.shape.dcp
        start, stop = self.replays[name]
        stop = min(stop, end)
        is_replay = first < stop
        reach = _first_read(spec, max(first, stop))
        if not getattr(spec, "prefix_cacheable", True):
            reach = max(reach, start)
        closed = range(-(-reach // per_state), (stop if is_replay else first) // per_state)
        if getattr(spec, "prefix_cacheable", True) or not is_replay:
            closed = self._visible(name, spec, closed)
            self._check(name, g, table, closed, size // per_state, per_state, values)
        if getattr(spec, "prefix_cacheable", True):
            first = max(first, stop)  # a replay leaves what is cached alone
        for state in range(first // per_state, end // per_state):
            block = table[state * per_state // size]
            place = self._place(g, state % (size // per_state))
            copies[:, block, place] = values[(state + 1) * per_state] + g

    def _visible(self, name: str, spec: Any, closed: range) -> Any:
        """Between the prompt and the window of what was said there may be a gap."""
        at = np.arange(closed.start, closed.stop)
        window = getattr(spec, "rswa_window", None)
        if window is None:
            return at
        num_prompt = self.scheduler.requests[name].num_prompt_tokens
        return at[(at < num_prompt) | (at > closed.stop - window)]

    def _place(self, g: int, at: Any) -> Any:
        """Where the state is in the memory of all ranks, which take states in turn."""
        dcp = self.shape.dcp
        return at % dcp * self.tensors[g].shape[3] + at // dcp

    def _check(
        self, name: str, g: int, table: list[int], at: Any, per_block: int, per: int, values: Any
    ) -> None:
        blocks = np.array(table, dtype=np.int64)[at // per_block]
        found = self.copies[g][:, blocks, self._place(g, at % per_block)]
        wrong = at[(found != values[(at + 1) * per] + g).any(axis=0)]
        assert not len(wrong), f"{name} reads other tokens' KV in group {g}: states {wrong[:5]}"
        assert blocks.all(), f"{name} reads the null block in group {g}"

    def _run_ring(self, name: str, g: int, block: int, first: int, end: int, values: Any) -> None:
        """Each token's key goes into the ring; a group that is whole becomes one state."""
        target = self.shape.rings[g]
        spec, ring = self.shape.specs[target], self.memory[g][block]
        per_state, size = _per_state(spec), spec.block_size
        _, stop = self.replays[name]
        table, memory = self.tables[name][target], self.memory[target]
        closed = np.arange(min(max(first, stop), end) // per_state)
        self._check(name, target, table, closed, size // per_state, per_state, values)
        for position in range(first, end):
            ring[position % len(ring)] = values[position + 1] + g
            if (position + 1) % per_state == 0 and position >= stop:
                keys = np.arange(position + 1 - per_state, position + 1)
                assert (ring[keys % len(ring)] == values[keys + 1] + g).all(), (
                    f"{name} closes a group at token {position} with keys that are not its own"
                )
                state = position // per_state
                slot = state % (size // per_state)
                memory[table[position // size], slot] = values[position + 1] + target

    # -- recurrent states, as vLLM's ``mamba_utils`` moves them ------------------------------------

    def _run_states(
        self, name: str, g: int, before: int | None, step: range, num_drafts: int, values: Any
    ) -> None:
        size, memory, table = self.shape.specs[g].block_size, self.memory[g], self.tables[name][g]
        first, end = step.start, step.stop
        before = (first - 1) // size if before is None else before
        now = self.running_state[name] = -(-end // size) - 1
        bias = self.accepted.get(name, 1) - 1
        if before not in (-1, now):
            memory[table[now]] = memory[table[before + bias]]
            bias = 0
        if first:
            assert memory[table[now + bias], 0] == values[first] + g, (
                f"{name} goes on from a state that is not that after token {first - 1}"
            )
        if num_drafts:
            for at in range(num_drafts + 1):
                memory[table[now + at]] = values[first + at + 1] + g
        else:
            memory[table[now]] = values[end] + g
            self._export(g, step, table, values)

    def _export(self, g: int, step: range, table: list[int], values: Any) -> None:
        """Some layers keep the state at the prompt's last boundary while they run past it."""
        from vllm.v1 import kv_cache_interface as specs

        spec, sizes = self.shape.specs[g], self.cache.hash_block_size
        if not spec.num_prefill_checkpoint_blocks:
            return
        drops = self.scheduler.use_eagle_block_drop
        at = specs.get_mamba_prefill_checkpoint_position(step.stop, sizes, drops)
        alignment = spec.prefill_checkpoint_alignment
        if specs.is_mamba_prefill_checkpoint_valid(
            step.start, step.stop, at, sizes, spec.block_size, alignment
        ):
            self.memory[g][table[-(-step.stop // spec.block_size) - 2]] = values[at] + g

    def _keep_states(self, name: str, words: Tokens, todo: Any) -> None:
        """After sampling: the state at the end of a block goes where that block's state belongs."""
        if name not in self.running_state:
            return
        num_drafts = len(todo.scheduled_spec_decode_tokens.get(name, []))
        end = self.scheduler.requests[name].num_computed_tokens - num_drafts
        accepted = self.accepted[name] = max(1, len(words))
        for g, spec in enumerate(self.shape.specs):
            if hasattr(spec, "mamba_cache_mode") and self.shape.num_drafts:
                size, table = spec.block_size, self.tables[name][g]
                aligned = (end + accepted - 1) // size * size
                if aligned >= end:
                    now, there = self.running_state[name], aligned // size - 1
                    self.memory[g][table[there]] = self.memory[g][table[now + aligned - end]]
                    if now == there:
                        self.accepted[name] = 1

    # -- drafts, and what was said --------------------------------------------------------------

    def _draft(self, names: list[str]) -> None:
        from vllm.v1.outputs import DraftTokenIds

        if not self.shape.num_drafts:
            return
        drafts = []
        for name in names:
            request, said = self.scheduler.requests[name], Tokens()
            told = list(request.all_token_ids)
            values = self.values[name]
            for _ in range(self.rng.randrange(self.shape.num_drafts + 1)):
                word = word_after(chain([*told, *said], values[: len(told) + 1])[-1])
                said.append(word if self.rng.random() < 0.6 else self.rng.randrange(NUM_WORDS))
            drafts.append(said if request.num_computed_tokens >= request.num_tokens - 1 else [])
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _check_output(self, request: Any) -> None:
        if self.born[request.request_id] != self.weights:
            return
        told = list(request.prompt_token_ids)
        values = chain(told, [self.weights])
        for word in request.output_token_ids:
            assert word == word_after(values[-1])
            told.append(word)
            values = chain(told, values)

    # -- the end --------------------------------------------------------------------------------

    def run(self, act: Callable[[], None] = lambda: None, most: int = 30_000) -> None:
        for _ in range(most):
            act()
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("requests wait for ever")

    @property
    def num_waiting(self) -> int:
        """Requests that have blocks, and wait for what is to be loaded into them."""
        tables = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        running = {request.request_id for request in self.scheduler.running}
        return len([name for name, blocks in tables.items() if blocks and name not in running])

    def rest(self) -> None:
        """Steps without requests, until the connector has nothing left to do."""
        for _ in range(100):
            self.step()
            if not self.connector.has_pending_push_work():
                return
        raise AssertionError("the connector has work for ever")

    def close(self) -> None:
        for side in (self.connector, *self.workers):
            side.shutdown()


def _per_state(spec: Any) -> int:
    per_state = getattr(spec, "tokens_per_state", 1)
    return per_state if isinstance(per_state, int) and per_state > 1 else 1


def _first_read(spec: Any, position: int) -> int:
    """The first token that the query at this position reads, by vLLM's description of the layer."""
    if not hasattr(spec, "attention_chunk_size") and hasattr(spec, "sliding_window"):
        return max(0, position - spec.sliding_window + 1)
    if not hasattr(spec, "non_causal") and hasattr(spec, "attention_chunk_size"):
        return position - position % spec.attention_chunk_size
    return 0
