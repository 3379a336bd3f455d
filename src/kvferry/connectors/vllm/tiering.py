"""kvferry's disk and shared store as a secondary tier of vLLM's own OffloadingConnector.

::

    "secondary_tiers": [{"type": "KvferryTier", "module_path": "kvferry.connectors.vllm.tiering",
                         "disk": "/mnt/nvme/kvferry", "disk_size": "500GiB"}]
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvferry.config import Config
from kvferry.connectors.common.storage import Storage, StorageJob, hashed_keys
from kvferry.core.identity import Namespace, store_fingerprint
from kvferry.core.keys import Keys
from kvferry.errors import ConfigError
from kvferry.tiers.contract import TierSetup
from kvferry.types import TierName

log = logging.getLogger(__name__)

_PERSON = b"kvferry vllm\0\0\0\0"


class KvferryTier(SecondaryTierManager):  # type: ignore[misc]
    """Translates vLLM's tier interface to :class:`Storage`. Runs in vLLM's scheduler process.

    Owns the storage. The primary tier's memory belongs to vLLM. One chunk of vLLM is one block.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        revision: str = "",
        **settings: Any,
    ) -> None:
        """Open the tiers; ConfigError if a setting is wrong or none names a tier.

        ``revision`` says which weights the server runs; it must change with them. All other options
        are kvferry's settings for disks and shared stores.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings.pop("locality", None)
        config = Config.load(overrides=settings, source=f"secondary_tiers: {tier_type}")
        if not (config.disk or config.remote):
            raise ConfigError(f"secondary_tiers: {tier_type} needs disk or remote")
        if not revision:
            log.warning(
                "secondary_tiers: %s has no revision: blocks that older weights of %s left behind "
                "would be loaded. Give a revision that changes with the weights.",
                tier_type,
                offloading_spec.config.model.name,
            )
        rows = np.asarray(primary_kv_view)
        self._address, self._pitch = rows.ctypes.data, rows.strides[0]
        setup = _setup(offloading_spec, revision, self._pitch)
        self._storage = Storage(config, setup, [self._pitch], primary_kv_view)
        self._jobs: dict[StorageJob, TransferJob] = {}
        self._to_ask: dict[OffloadKey, None] = {}

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return HIT or MISS, or RETRY until a shared store has answered."""
        found = self._storage.lookup(_keys([key]), ask=False)
        if found.ready[0]:
            return LookupResult.HIT
        if found.unknown[0]:
            self._to_ask[key] = None
            return LookupResult.RETRY
        return LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask the shared store for all keys of this step at once."""
        if self._to_ask:
            self._storage.lookup(_keys(self._to_ask))
            self._to_ask.clear()

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start to copy chunks down; skip chunks that the tiers have already."""
        self._submit(self._storage.store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start to copy chunks up into the primary tier."""
        self._submit(self._storage.load, job_metadata)

    def _submit(self, verb: Any, job: TransferJob) -> None:
        chunks = np.asarray(job.chunk_ids, dtype=np.int64)
        begun = verb(_keys(job.keys), (self._address + chunks * self._pitch)[:, None])
        self._jobs[begun] = job

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended; for a partly failed load, with the chunks it loaded."""
        results = []
        self._storage.poll()
        for done in [each for each in self._jobs if each.is_done]:
            job = self._jobs.pop(done)
            came = None
            if job.is_promotion and done.ok.any() and not done.ok.all():
                came = tuple(key for key, ok in zip(job.keys, done.ok.tolist(), strict=True) if ok)
            results.append(
                JobResult(job.job_id, bool(done.ok.all()), came, done.seconds, done.num_bytes)
            )
        return results

    def has_pending_work(self) -> bool:
        """Whether vLLM must keep stepping for jobs and answers to arrive."""
        return self._storage.is_busy or bool(self._to_ask)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note that these chunks were used; the first of them is evicted last."""
        self._storage.touch(_keys(reversed(list(keys))))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return an empty context: this tier needs nothing for single requests."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until no copy touches the primary tier; each tier's deadlines bound the wait."""
        self._storage.drain()

    def shutdown(self) -> None:
        """Finish the copies under way and close the tiers."""
        self._storage.close()


def _keys(keys: Iterable[OffloadKey]) -> Keys:
    return hashed_keys(keys, _PERSON)


def _setup(spec: OffloadingSpec, revision: str, chunk_bytes: int) -> TierSetup:
    """Return all that decides a chunk's bytes: model, weights, dtypes, layout and sharding."""
    config = spec.config
    parallel = config.parallel
    engines = parallel.data_parallel_size if parallel.data_parallel_rank_local is None else 1
    namespace = Namespace(
        model=config.model.name,
        revision=revision,
        dtype=config.model.dtype,
        layout=f"vllm tiering {config.kv_cache_layout} {config.canonical_layout}",
        geometry={
            "groups": [[g.tokens_per_block, list(g.layer_names)] for g in config.groups],
            "world": [
                parallel.world_size,
                parallel.tp_size,
                parallel.pp_size,
                parallel.pcp_size,
                parallel.dcp_size,
            ],
            "replicated": spec.replicated_layout,
            "chunk": [config.cache.blocks_per_chunk, chunk_bytes],
        },
        block_tokens=config.cache.tokens_per_hash,
    )
    families = tuple(store_fingerprint(namespace, engine) for engine in range(engines))
    return TierSetup(
        TierName(""),
        chunk_bytes,
        num_ranks_here=engines,
        namespace=store_fingerprint(namespace, parallel.data_parallel_index, chunk_bytes),
        family=store_fingerprint(namespace, parallel.data_parallel_index),
        families=families if engines > 1 else (),
        label=config.model.name,
        shared_namespace=store_fingerprint(namespace, chunk_bytes),
    )
