"""The model on its device: paged KV tensors, and a compute stream for the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvferry.closing import Closing
from kvferry.device.engine.stream import Stream
from kvferry.errors import InputError
from kvferry.identity import Namespace
from kvferry.playground.model import KEY_TILE, Decoder, Floats, Span


class Runner(Closing):
    """Owns one device's KV tensors and its compute stream; leaves block tables to the engine."""

    def __init__(self, decoder: Decoder, *, num_blocks: int, block_tokens: int = 16) -> None:
        if num_blocks < 1:
            raise InputError(f"a device needs at least 1 block, got {num_blocks}")
        if block_tokens < 1 or KEY_TILE % block_tokens:
            raise InputError(f"block_tokens must divide {KEY_TILE}, got {block_tokens}")
        shape = decoder.shape.kv_shape(num_blocks, block_tokens)
        self.kv: list[Floats] = [np.zeros(shape, np.float32) for _ in decoder.layers]
        self.groups = decoder.shape.groups(block_tokens)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.max_tokens = decoder.shape.max_tokens
        self.compute = Stream("compute")
        self._decoder = decoder

    @property
    def namespace(self) -> Namespace:
        """What decides the bytes of these blocks besides the tokens."""
        shape = self._decoder.shape
        return Namespace(
            model="kvferry-playground",
            revision=str(shape.seed),
            dtype="float32",
            layout="block,kv,token,head,dim",
            geometry={name: getattr(shape, name) for name in shape.__dataclass_fields__},
            block_tokens=self.block_tokens,
        )

    def group_tensors(self) -> list[list[Floats]]:
        """The KV tensors of each group, in layer order."""
        by_group: list[list[Floats]] = [[] for _ in self.groups]
        for group, tensor in zip(self._decoder.shape.layer_groups, self.kv, strict=True):
            by_group[group].append(tensor)
        return by_group

    def submit(self, spans: Sequence[Span]) -> Callable[[], list[int]]:
        """Queue one forward pass; the answer waits for it and gives each span's next token."""
        tokens: list[int] = []
        self.compute.run(lambda: tokens.extend(self._decoder.forward(spans, self.kv)))

        def result() -> list[int]:
            self.compute.synchronize()
            return tokens

        return result

    def close(self) -> None:
        """Finish what was queued and end the compute stream. Safe to call twice."""
        self.compute.close()
