"""vLLM's scheduler hooks on a session, as the connector class has them, without vLLM."""

from __future__ import annotations

from typing import Any

from kvferry.connectors.common.contract import SessionSetup
from kvferry.connectors.common.session import SchedulerSession
from kvferry.connectors.vllm.engine import VllmEngine, step_of


class VllmHooks(SchedulerSession):
    """A session that takes what vLLM hands to its hooks."""

    def __init__(self, setup: SessionSetup, namespace: Any) -> None:
        super().__init__(setup)
        self._namespace = namespace

    def bind_manager(self, manager: Any) -> None:
        self.bind_block_pool(manager.block_pool, manager)

    def bind_block_pool(self, pool: Any, manager: Any = None) -> None:
        groups = self.setup.groups
        self.bind(lambda: VllmEngine(groups, self._namespace, pool, manager))

    def expect(self, request: Any) -> None:
        if not getattr(request, "skip_reading_prefix_cache", False):
            super().expect(request)

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        found = super().match(request, computed_tokens)
        return found, bool(found)

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = getattr(blocks, "get_block_ids", tuple)
        super().allocated(request, tables, num_external_tokens)

    def orders(self, step: Any) -> Any:
        return super().orders(step_of(step))

    def take(self, output: Any) -> None:
        if output.kv_connector_worker_meta is not None:
            super().take(output.kv_connector_worker_meta)
