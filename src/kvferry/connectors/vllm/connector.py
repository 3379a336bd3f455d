"""The connector class that vLLM calls: passes each hook to the scheduler side or worker side."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.outputs import KVConnectorOutput

from kvferry.config import Config
from kvferry.connectors.common.messages import RankShape, StepOrders, StepReceipts
from kvferry.connectors.common.session import SchedulerSession
from kvferry.connectors.common.worker import WorkerSession
from kvferry.connectors.vllm import setup
from kvferry.connectors.vllm.control import (
    before_forced_resets,
    falls_asleep,
    has_peer,
    weights_of_caller,
)
from kvferry.connectors.vllm.engine import VllmEngine
from kvferry.connectors.vllm.geometry import kv_cache_of
from kvferry.connectors.vllm.metrics import FerryMetrics, FerryStats
from kvferry.connectors.vllm.versions import require_fit
from kvferry.settings.tiers import DISK
from kvferry.types import HOST

# The messages are plain data; vLLM checks that they are instances of its own classes.
KVConnectorMetadata.register(StepOrders)
KVConnectorHandshakeMetadata.register(RankShape)
KVConnectorWorkerMetadata.register(StepReceipts)

# Whether a connector can report failed loads by request: then vLLM recovers with several groups.
_RECOMPUTES_REQUESTS = "failed_recving" in KVConnectorOutput.__dataclass_fields__

# Whether vLLM says when it gives device memory back, and when it has memory again.
_RESTORES = hasattr(KVConnectorBase_V1, "restore_kv_caches")

log = logging.getLogger("vllm.kvferry")

_NONE_FINISHED = (None, None)


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's connector: translates its hooks for one of the two sessions, which decide all."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        require_fit(vllm.__version__, KvferryConnector)
        super().__init__(vllm_config, role, kv_cache_config)
        # A failed load must not fail a request that can be computed. vLLM reads this setting after
        # it has made the connector.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        # Takes precedence over the environment, and that over ``KVFERRY_CONFIG``.
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = Config.load(overrides=given, source="kv_connector_extra_config")
        _log_to_vllm(config.log_level)
        layers = setup.support_of(
            vllm_config, kv_cache_config, recomputes_requests=_RECOMPUTES_REQUESTS
        )
        # Only one of the two is set; two names, so that no hook needs to check which.
        self._session: SchedulerSession
        self._worker: WorkerSession
        self._is_scheduler = role == KVConnectorRole.SCHEDULER
        self._by_request = not layers.fails_by_block
        self._group_ids = layers.group_ids
        if self._is_scheduler:
            facts = setup.setup_of(vllm_config, kv_cache_config, config, layers)
            for words in setup.vain_settings(vllm_config, config, layers, vllm.__version__):
                log.warning("kvferry: %s", words)
            self._namespace = setup.namespace_of(vllm_config, kv_cache_config)
            self._session = SchedulerSession(facts)
        else:
            groups = kv_cache_config.kv_cache_groups
            self._groups = [groups[number].layer_names for number in self._group_ids]
            self._num_blocks = kv_cache_config.num_blocks
            parallel = vllm_config.parallel_config
            self._shares_answer = parallel.world_size > parallel.tensor_parallel_size
            self._worker = WorkerSession(
                place=setup.place_of(vllm_config, kv_cache_config),
                config=config,
                contents=setup.contents_of(vllm_config, kv_cache_config),
                find_weights=weights_of_caller,
                broadcast=_broadcast,
                refusal=layers.refusal,
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return setup.preferred_layout()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that was not stored is only a miss

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return True  # makes a block one run of bytes; read by vLLM up to 0.27

    # -- in the workers -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(lambda: kv_cache_of(kv_caches, self._groups, self._num_blocks))

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """Register one tensor that holds all layers; such a vLLM has only one group then."""
        self.register_kv_caches({names[0]: kv_cache for names in self._groups})

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    def unregister_kv_caches(self) -> None:
        self._worker.unregister()

    def restore_kv_caches(self) -> None:
        self._worker.restore()

    def get_handshake_metadata(self) -> Any:
        """Return this rank's shape; None if vLLM would lose it, and the first step sends it.

        A ``MultiConnector`` passes on only one answer, which others may need. And vLLM keeps only
        one for each tensor-parallel rank: it drops other context- or pipeline-parallel ranks'.
        """
        self._worker.note_started()
        if self._shares_answer or has_peer(KvferryConnector, "get_handshake_metadata"):
            return None
        return self._worker.introduce()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.begin(self._orders)

    def bind_connector_metadata(self, connector_metadata: StepOrders) -> None:
        """Prepare for a step's forward pass; vLLM may call ``start_load_kv`` after the pass."""
        super().bind_connector_metadata(connector_metadata)
        self._orders, worker = connector_metadata, self._worker
        if connector_metadata.is_quiet and not worker.is_busy:
            return  # as in most steps, and there are many
        if worker.layerwise is not None and connector_metadata.computes:
            worker.layerwise.begin_forward(_mode_of_step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer's KV: a load may be reported to vLLM before all of it has landed."""
        layerwise = self._worker.layerwise
        if layerwise is not None and layerwise.listens:
            layerwise.before_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Note the end of a layer; stores nothing, as whole blocks are stored after the pass."""
        layerwise = self._worker.layerwise
        if layerwise is not None and layerwise.listens:
            layerwise.after_layer(layer_name)

    def wait_for_save(self) -> None:
        worker, layerwise = self._worker, self._worker.layerwise
        if worker.is_busy or (layerwise is not None and layerwise.listens):
            worker.after_forward()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        worker = self._worker
        if not (worker.is_busy or worker.finished.arrived):
            return _NONE_FINISHED  # no allocation
        worker.poll()
        return None, worker.finished.take("arrived") or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Do the same as ``get_finished``, for a vLLM that wants failures in the same answer."""
        results = super().get_transfer_results(finished_req_ids)
        failed = self._worker.finished.take("failed")
        if self._by_request:
            results.failed_recving = failed
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        finished = self._worker.finished
        invalid = finished.take("invalid") if finished.invalid else set()
        return invalid if not self._by_request else set()

    def build_connector_worker_meta(self) -> Any:
        return self._worker.take_receipts()

    # -- in the scheduler -----------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._bind(kv_cache_manager.block_pool, kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._bind(gpu_block_pool)

    def _bind(self, pool: Any, manager: Any = None) -> None:
        before_forced_resets(pool, self._session.give_back)
        groups, ids = self._session.setup.groups, self._group_ids
        self._session.bind(lambda: VllmEngine(groups, self._namespace, pool, manager, ids))

    def set_xfer_handshake_metadata(self, metadata: dict[Any, Any]) -> None:
        shapes = [shape for shape in metadata.values() if isinstance(shape, RankShape)]
        self._session.meet_ranks(shapes)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self.set_xfer_handshake_metadata(metadata)

    def on_new_request(self, request: Any) -> None:
        if not getattr(request, "skip_reading_prefix_cache", False):
            self._session.expect(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        found = self._session.match(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        served = self._served
        self._session.allocated(
            request, lambda: served(blocks.get_block_ids()), num_external_tokens
        )

    def _served(self, tables: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return those of vLLM's block tables whose groups are stored and loaded."""
        return [tables[number] for number in self._group_ids]

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """Return a hit's tokens by the kind of tier that had them, for vLLM's own statistics."""
        found: Counter[Any] = Counter()
        if num_external_tokens:
            by_tier = self._session.hit_sources(request.request_id, num_external_tokens)
            for tier, count in by_tier.items():
                found[_SOURCES.get(tier, base.CacheHitSource.EXTERNAL_UNSPECIFIED)] += count
        return dict(found)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return self._session.orders(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.total_num_scheduled_tokens,
            new=bool(scheduler_output.scheduled_new_reqs),
            preempted=scheduler_output.preempted_req_ids or (),
        )

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReceipts):
            self._session.take(report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._session.finished(request, (block_ids,))
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._session.finished(request, self._served(block_ids))
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._session.has_work

    def has_pending_block_frees(self) -> bool:
        return self._session.frees_soon()

    def reset_cache(self) -> bool | None:
        session = self._session
        return session.sleep() if _RESTORES and falls_asleep() else session.reset()

    def take_events(self) -> Iterable[Any]:
        return self._session.take_events()

    # -- on both sides --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Any:
        data = self._session.take_stats() if self._is_scheduler else None
        return FerryStats(data=data) if data is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return FerryStats(data=data) if data is not None else FerryStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        return FerryMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        (self._session if self._is_scheduler else self._worker).close()


def _log_to_vllm(threshold: str) -> None:
    """Send kvferry's log lines from level ``threshold`` up to the handlers of vLLM's logger."""
    ours = logging.getLogger("kvferry")
    ours.setLevel(threshold.upper())
    if not ours.handlers:
        ours.handlers = list(logging.getLogger("vllm").handlers)
        ours.propagate = False


def _broadcast(sent: Any) -> Any:
    """Return the first rank's object on every rank of the tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().broadcast_object(sent, src=0)


def _mode_of_step() -> str:
    """Return the current step's CUDA graph mode; empty if no layer calls us, or if unknown."""
    if not is_forward_context_available():
        return ""
    context = get_forward_context()
    mode = getattr(context.cudagraph_runtime_mode, "name", "")
    return "" if mode == "FULL" or context.attn_metadata is None else str(mode)


_SOURCES: dict[str, Any] = {}
"""vLLM's constant for each tier, if it has any; shared stores count as unspecified."""

if hasattr(base, "CacheHitSource"):
    KvferryConnector._cache_hit_source = base.CacheHitSource.HOST
    _SOURCES |= {HOST: base.CacheHitSource.HOST, DISK: base.CacheHitSource.DISK}
