"""What is known of a server before its ranks are heard. Read once, then frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry import reach
from kvferry.config import Config
from kvferry.identity import Namespace
from kvferry.policy import policy_named
from kvferry.vllm import translate
from kvferry.vllm.translate import Support


@dataclass(frozen=True)
class Setup:
    """One server's scheduler side in our words.

    ``namespace`` is for hash blocks of one token: how many vLLM's have its block pool says.
    ``told_tokens`` are those of a block of the first group, by which vLLM is told of failed loads.
    ``engine_here`` counts the engines of a data-parallel server on this host. vLLM names blocks by
    ``hash_algorithm``. Where it ``splits_batches``, two halves of one run at the same time.
    """

    config: Config
    support: Support
    num_ranks: int
    namespace: Namespace
    told_tokens: int
    uses_drafts: bool
    has_listeners: bool
    engine_here: int
    hash_algorithm: str = "sha256"
    splits_batches: bool = False

    @property
    def groups(self) -> tuple[reach.Group, ...]:
        return self.support.groups

    @property
    def is_full(self) -> bool:
        """Whether no block is given up while its request runs."""
        return all(isinstance(group, reach.FullAttention) for group in self.groups)

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, config: Config, support: Support) -> Setup:
        for policy in (config.policy, config.level_policy):
            policy_named(policy)  # refused now, like any other setting, not once ranks are up
        parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
        return cls(
            config=config,
            support=support,
            num_ranks=int(parallel.world_size),
            namespace=translate.namespace_of(vllm_config, kv_cache_config, 1),
            told_tokens=int(groups[0].kv_cache_spec.block_size) if groups else 1,
            uses_drafts=translate.uses_draft_layers(vllm_config),
            has_listeners=translate.wants_events(vllm_config),
            engine_here=int(parallel.data_parallel_rank_local or 0),
            hash_algorithm=translate.hash_algorithm(vllm_config),
            splits_batches=translate.splits_batches(vllm_config),
        )
