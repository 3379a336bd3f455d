"""Tiny models with random weights, made on the spot: wrong KV changes what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 256 + 2  # every byte, and two special tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
)

# Large initial weights: with the usual 0.02 every prompt yields the same token and no test could
# tell a right block from a wrong one.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": False,
}


SEED = 20260807


def make_llama(folder: Path, kv_heads: int = 2, seed: int = SEED) -> Path:
    """Full attention in every layer: one group."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {**_SHAPE, "num_key_value_heads": kv_heads}
    return _save(folder, LlamaForCausalLM, LlamaConfig(**shape), seed)


def make_gemma(folder: Path) -> Path:
    """Sliding windows of 64 tokens in five layers of six, full attention in the last: groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    shape = {**_SHAPE, "num_hidden_layers": 6}
    config = Gemma3TextConfig(
        **shape, sliding_window=64, sliding_window_pattern=6, query_pre_attn_scalar=32
    )
    return _save(folder, Gemma3ForCausalLM, config)


def make_granite(folder: Path) -> Path:
    """Mamba2, whose layers keep a state, and full attention in turn: two groups."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    shape = {**_SHAPE, "hidden_size": 128}
    config = GraniteMoeHybridConfig(
        **shape,
        **_STATES,
        shared_intermediate_size=128,
        num_local_experts=0,
        num_experts_per_tok=0,
        pad_token_id=256,
        position_embedding_type="rope",
        layer_types=["mamba", "attention", "mamba", "attention"],
    )
    return _save(folder, GraniteMoeHybridForCausalLM, config)


def make_mamba(folder: Path) -> Path:
    """Mamba2 in every layer: one group, and no attention at all."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    names = ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id")
    config = Mamba2Config(
        **{name: _SHAPE[name] for name in names},
        initializer_range=_SHAPE["initializer_range"],
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=1,
        expand=2,
        chunk_size=32,
    )
    return _save(folder, Mamba2ForCausalLM, config)


# So small that a block of states is no larger than one of 32 tokens' keys and values.
_STATES: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}


def _save(folder: Path, model_class: Any, config: Any, seed: int = SEED) -> Path:
    import torch

    torch.manual_seed(seed)
    model_class(config).to(torch.float32).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    """One token per byte."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary |= {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )
