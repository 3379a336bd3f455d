"""A serving loop over paged KV that offloads blocks with the library: admit, compute, finish.

::

    admit     take cached device blocks, allocate the rest, load those that kvferry has
    compute   one forward pass over the requests that wait for no load
    finish    store the request's full blocks, and free them once they are copied
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.api import attach
from kvferry.config import Config
from kvferry.core.identity import Namespace, chain
from kvferry.core.keys import Key, Keys
from kvferry.core.lifecycle import Closing
from kvferry.errors import InputError, IntegrityError
from kvferry.ferry import Ferry
from kvferry.tickets import Hit, Ticket
from kvferry.tools.demo.model import BLOCK_TOKENS, Decoder, Floats, Span
from kvferry.tools.demo.workload import Turn

IDLE_SECONDS = 0.0005
STEP_TOKENS = 256
"""Most tokens per forward pass. A longer prompt is computed in chunks."""


class BlockPool:
    """The device blocks: reference counts, and the index from key to block.

    A free block keeps its content and its key until it is allocated again, so the free blocks are
    the device's prefix cache, oldest first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.index: dict[Key, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_holders = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks

    def allocate(self, count: int) -> list[int]:
        """Take the ``count`` oldest free blocks and forget their content."""
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            key, self._keys[block] = self._keys[block], None
            if key is not None:
                del self.index[key]
            self._num_holders[block] = 1
        return blocks

    def acquire(self, keys: Keys) -> list[int]:
        """Take a reference to the blocks of the leading keys, up to the first miss."""
        blocks = []
        for key in keys:
            if key not in self.index:
                break
            blocks.append(self.index[key])
            self._num_holders[blocks[-1]] += 1
            self.free.pop(blocks[-1], None)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. Of blocks passed in order, the last is reused first."""
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                self.free[block] = None
                if self._keys[block] is None:  # it caches nothing: reuse it first
                    self.free.move_to_end(block, last=False)

    def publish(self, blocks: Sequence[int], keys: Keys) -> None:
        """Index referenced blocks by their keys. A key that is indexed already keeps its block."""
        for block, key in zip(blocks, keys, strict=True):
            if key not in self.index:
                self.index[key], self._keys[block] = block, key

    def check_integrity(self) -> None:
        """Check that all blocks are free and that the index and the blocks' keys agree."""
        if any(self._num_holders) or len(self.free) != len(self._num_holders):
            raise IntegrityError(f"{len(self.free)} of {len(self._num_holders)} blocks are free")
        if self.index != {key: at for at, key in enumerate(self._keys) if key is not None}:
            raise IntegrityError("the index and the keys of the blocks differ")


@dataclass(eq=False)
class ServedRequest:
    """A prompt, its generated tokens, and the table of the blocks with its KV.

    ::

        tokens   | prompt ................ | generated ... |
        computed | on device | loaded | computed here |    ^ next token to feed
        table    | b0 | b1 | b2 | ...                 |
    """

    id: str
    prompt: Sequence[int]
    max_new_tokens: int
    arrival: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    hit: Hit | None = None
    """The prompt's blocks that kvferry has, until they are loaded."""

    num_computed: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    first_token_at: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.prompt) or self.max_new_tokens < 1:
            raise InputError(f"request {self.id} needs a prompt and at least 1 token to generate")
        self.tokens = [int(token) for token in self.prompt]

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + self.max_new_tokens

    def turn(self) -> Turn:
        """Return the answer and the figures of a finished request."""
        seconds = self.first_token_at - self.arrival
        found = (self.device_tokens, self.host_tokens)
        return Turn(self.id, self.generated, len(self.prompt), *found, seconds)

    def span(self, most: int) -> Span:
        """Return at most ``most`` of its next tokens to compute."""
        tokens = self.tokens[self.num_computed : self.num_computed + most]
        return Span(np.array(tokens), self.num_computed, np.array(self.table))


class Engine(Closing):
    """Continuous batching over one device.

    Owns the KV tensors, the device blocks and the requests. Leaves host memory and lower tiers to
    ``ferry``. A request is admitted once the device has blocks for all its tokens, so that no
    request is ever preempted.
    """

    def __init__(
        self, decoder: Decoder, num_blocks: int, settings: dict[str, Any] | None = None
    ) -> None:
        """``settings`` are kvferry's. With None it serves without kvferry."""
        shape = decoder.shape
        self.decoder = decoder
        self.kv: list[Floats] = [
            np.zeros(shape.kv_shape(num_blocks), np.float32) for _ in range(shape.num_layers)
        ]
        self.pool = BlockPool(num_blocks)
        self.most_tokens = min(shape.max_tokens, num_blocks * BLOCK_TOKENS)
        model, revision = "kvferry-demo", repr(shape)
        self.ferry: Ferry | None = None
        self.namespace = Namespace(
            model=model,
            revision=revision,
            dtype="float32",
            layout="paged",
            geometry="none",
            block_tokens=BLOCK_TOKENS,
        )
        if settings is not None:
            config = Config.from_dict({"block_tokens": BLOCK_TOKENS, **settings})
            self.ferry = attach(self.kv, model=model, revision=revision, config=config)
            self.namespace = self.ferry.namespace
        self._waiting: deque[ServedRequest] = deque()
        self._admitted: list[ServedRequest] = []
        self._loads: dict[Ticket, ServedRequest] = {}
        self._stores: dict[Ticket, list[int]] = {}
        """Device blocks of each store in flight."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._admitted)

    def submit(self, request: ServedRequest) -> None:
        """Queue a request. Requests are admitted in the order of their arrival."""
        if request.most_tokens > self.most_tokens:
            raise InputError(
                f"request {request.id} may grow to {request.most_tokens} tokens; the model and "
                f"{len(self.kv[0])} device blocks of {BLOCK_TOKENS} hold {self.most_tokens}"
            )
        self._waiting.append(request)

    def step(self) -> list[ServedRequest]:
        """Do one step. Returns the requests that finished in it."""
        while self._waiting and self._admit(self._waiting[0]):
            self._admitted.append(self._waiting.popleft())
        if self.ferry:
            self._load(self.ferry)
        work, budget = [], STEP_TOKENS
        for request in self._admitted:
            if request.hit is None and budget:
                work.append((request, request.span(budget)))
                budget -= len(work[-1][1].tokens)
        if self.ferry:
            self._poll(self.ferry, IDLE_SECONDS if self.has_work and not work else 0.0)
        tokens = self.decoder.forward([span for _, span in work], self.kv)
        finished = []
        for (request, span), token in zip(work, tokens, strict=True):
            request.num_computed += len(span.tokens)
            if request.num_computed < len(request.tokens):
                continue  # a chunk before the prompt's end has no next token
            request.tokens.append(token)
            request.first_token_at = request.first_token_at or time.perf_counter()
            if len(request.tokens) == request.most_tokens:
                self._finish(request)
                finished.append(request)
        return finished

    def run(self) -> None:
        """Step until every request is done and every copy has ended."""
        while self.has_work:
            self.step()
        while self.ferry and self._stores:
            self._poll(self.ferry, IDLE_SECONDS)

    def keys(self, tokens: Sequence[int]) -> Keys:
        """Return one key per full block of these tokens."""
        return chain(self.namespace, tokens)

    def close(self) -> None:
        """End kvferry's copies. Safe to call twice."""
        if self.ferry:
            self.ferry.close()

    def _admit(self, request: ServedRequest) -> bool:
        """Give a request its blocks. Returns False if too few are free yet."""
        # The last token is always computed, because its logits give the next token.
        keys = self.keys(request.prompt[:-1])
        cached = self.pool.acquire(keys)
        num_new = -(-request.most_tokens // BLOCK_TOKENS) - len(cached)
        if num_new > len(self.pool.free):
            self.pool.release(cached)
            return False
        request.table = cached + self.pool.allocate(num_new)
        request.num_computed = request.device_tokens = len(cached) * BLOCK_TOKENS
        if self.ferry:
            request.hit = self.ferry.match(keys, on_device=len(cached))
        return True

    def _load(self, ferry: Ferry) -> None:
        """Start the loads of hits that wait for no promotion any more."""
        for request in self._admitted:
            if request.hit is None or request in self._loads.values():
                continue
            hit = request.hit = ferry.await_hit(request.hit, 0)
            if len(hit):
                blocks = request.table[hit.on_device : hit.on_device + len(hit)]
                self._loads[ferry.load(hit, blocks)] = request
            elif not hit.is_pending:
                request.hit = None

    def _poll(self, ferry: Ferry, seconds: float) -> None:
        """Handle the copies that ended. Blocks of a failed load are computed instead."""
        for done in ferry.poll(seconds):
            if done in self._stores:
                self.pool.release(self._stores.pop(done))
                continue
            request = self._loads.pop(done)
            request.hit = None
            if done.ok:
                request.host_tokens = done.num_blocks * BLOCK_TOKENS
                request.num_computed += request.host_tokens

    def _finish(self, request: ServedRequest) -> None:
        self._admitted.remove(request)
        keys = self.keys(request.tokens[: request.num_computed])
        full, rest = request.table[: len(keys)], request.table[len(keys) :]
        self.pool.publish(full, keys)
        self.pool.release(rest)
        if self.ferry and full:
            self._stores[self.ferry.store(keys, full)] = full
        else:
            self.pool.release(full)
