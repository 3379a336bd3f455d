"""Reuse prompt prefixes across ``generate()`` calls of a Hugging Face model.

    pip install '.[gpu]' transformers
    python examples/transformers_generate.py        # a tiny model with random weights
    python examples/transformers_generate.py MODEL  # a model from a hub, on the GPU if there is one

Each call loads the longest prefix that an earlier call has stored, computes the rest, and stores
what is new. The answers are the same as without it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import kvferry

BLOCK = 16


class PrefixCache:
    """Owns a ferry and the blocks through which KV leaves and enters a model's cache."""

    def __init__(
        self, model: Any, *, revision: str, num_blocks: int = 256, **settings: Any
    ) -> None:
        """``revision`` tells these weights from others; ``settings`` are kvferry's."""
        config = model.config
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (num_blocks, 2, heads, BLOCK, size)
        options = {"dtype": model.dtype, "device": model.device}
        self.model = model
        self.blocks = [torch.zeros(shape, **options) for _ in range(config.num_hidden_layers)]
        self.ferry = kvferry.attach(
            self.blocks,
            model=config.name_or_path or "random weights",
            revision=revision,
            block_tokens=BLOCK,
            **settings,
        )

    def generate(self, tokens: torch.Tensor, **options: Any) -> tuple[torch.Tensor, int]:
        """The model's answer to one prompt, and how many of its tokens were loaded."""
        (prompt,) = tokens.tolist()
        cache = DynamicCache(config=self.model.config)
        num_loaded = self._load(prompt, cache) * BLOCK
        answer = self.model.generate(tokens, past_key_values=cache, **options)
        # The last token was generated, but its KV was never computed.
        self._store(answer[0, :-1].tolist(), cache, num_loaded // BLOCK)
        return answer, num_loaded

    def _load(self, prompt: list[int], cache: DynamicCache) -> int:
        """Fill the cache with the stored beginning of a prompt; returns its blocks."""
        usable = min((len(prompt) - 1) // BLOCK, len(self.blocks[0]))  # one token is computed
        hit = self.ferry.await_hit(self.ferry.match(self.ferry.keys(prompt)[:usable]))
        if not len(hit):
            self.ferry.release(hit)
            return 0
        done = self.ferry.wait(self.ferry.load(hit, list(range(len(hit)))))
        if not done.ok:
            return 0
        for layer, blocks in enumerate(self.blocks):
            kv = (
                blocks[: len(hit)].transpose(0, 1).transpose(1, 2)
            )  # 2, heads, blocks, tokens, size
            keys, values = kv.flatten(2, 3).unsqueeze(1)
            cache.update(keys, values, layer)
        return len(hit)

    def _store(self, tokens: list[int], cache: DynamicCache, first: int) -> None:
        """Store the full blocks of a conversation, from block ``first`` on."""
        keys = self.ferry.keys(tokens)
        count = min(len(keys) - first, len(self.blocks[0]))
        if count <= 0:
            return
        part = slice(first * BLOCK, (first + count) * BLOCK)
        for layer, blocks in enumerate(self.blocks):
            kept = cache.layers[layer]
            kv = torch.stack([kept.keys[0, :, part], kept.values[0, :, part]])
            blocks[:count] = kv.unflatten(2, (count, BLOCK)).transpose(1, 2).transpose(0, 1)
        self.ferry.wait(self.ferry.store(keys[: first + count], list(range(count)), first=first))

    def close(self) -> None:
        self.ferry.close()


def main() -> None:
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        name, revision = sys.argv[1], "main"
        model = AutoModelForCausalLM.from_pretrained(name, torch_dtype="auto", device_map="auto")
    else:
        revision = "random"
        shape = LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = LlamaForCausalLM(shape)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    turns = [torch.randint(1, 500, (1, length)) for length in (200, 60, 60)]
    prefixes = PrefixCache(model.eval(), revision=revision, host="64MiB")
    prompt = torch.empty((1, 0), dtype=torch.long)
    for turn in turns:
        prompt = torch.cat([prompt, turn], dim=1).to(model.device)
        began = time.perf_counter()
        answer, num_loaded = prefixes.generate(prompt, **options)
        took = time.perf_counter() - began
        assert torch.equal(answer, model.generate(prompt, **options)), "another answer"
        print(f"{prompt.shape[1]} tokens, {num_loaded} of them loaded, {took * 1000:.0f} ms")
        prompt = answer
    prefixes.close()
    print("The answers are those of the model alone.")


if __name__ == "__main__":
    main()
