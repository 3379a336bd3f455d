"""A kvferry endpoint that says whatever a test wants it to say."""

from __future__ import annotations

from http import HTTPStatus

from kvferry.cache.slots import PoolCounts
from kvferry.telemetry.catalog import CONTENT_TYPE, Snapshot, exposition
from kvferry.telemetry.http import HttpServer, Reply
from kvferry.telemetry.stats import SchedulerStats, Traffic


def stats(*, queries: int = 0, moved: int = 0, tier: str = "disk") -> SchedulerStats:
    """A plausible moment in the life of a scheduler, after so many queries and copies."""
    traffic = {
        ("device", "host", "staged"): Traffic(moved, 50_000_000 * moved, 0.001 * moved),
        ("host", "device", "kernel"): Traffic(moved, 100_000_000 * moved, 0.002 * moved),
    }
    return SchedulerStats(
        pool=PoolCounts(free=300, cached=600, leased=100, total=1000, evicted=42),
        tiers={tier: PoolCounts(free=4000, cached=6000, leased=0, total=10000, evicted=0)},
        queries=queries,
        asked_tokens=1000 * queries,
        hit_tokens=750 * queries,
        promoted_tokens=0,
        expired_hits=1,
        shed_stores=2,
        verdicts={"load_faster": 5 * queries, "compute_faster": queries},
        missed={"evicted": 3 * queries, "never_stored": queries, "nothing_missed": queries},
        in_flight=3,
        landed=2 * moved,
        failed=1,
        overdue=0,
        stale_receipts=0,
        traffic=traffic,
        queued=4,
        bytes_in_flight=123_000_000,
        leases={"host": 7},
        bandwidth=50e9,
        prefill_rate=20_000.0,
    )


class FakeEndpoint:
    """Serves ``text`` under /metrics and ``requests`` under /explain; both may be changed."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.show(snapshot or Snapshot(stats(queries=10, moved=10), "1.2.3", {"host": 1_000_000}))
        self.requests: list[dict[str, object]] | None = []
        self.tiers_away: dict[str, str] = {}
        self.paths: list[tuple[str, ...]] = []
        self._server = HttpServer(self._answer)
        self.url = self._server.url

    def show(self, snapshot: Snapshot) -> None:
        self.text = exposition(snapshot).decode()

    def show_as_vllm(self, snapshot: Snapshot) -> None:
        """As on vLLM's endpoint: prefixed, with vLLM's labels, between vLLM's own metrics."""
        lines = ["# TYPE vllm:num_requests_running gauge", 'vllm:num_requests_running{a="b"} 3']
        for line in exposition(snapshot).decode().splitlines():
            if line.startswith("#"):
                continue
            name, _, rest = line.partition("{")
            if rest:
                line = f'{name}{{engine="0",model_name="m",{rest}'
            else:
                name, value = line.split()
                line = f'{name}{{engine="0",model_name="m"}} {value}'
            lines += [f"vllm:{line}", f"vllm:{line}".replace('engine="0"', 'engine="1"')]
        self.text = "\n".join(lines) + "\n"
        self.requests = None

    def _answer(self, path: tuple[str, ...]) -> Reply | None:
        self.paths.append(path)
        if path == ("metrics",):
            return Reply(self.text.encode(), CONTENT_TYPE)
        if path == ("explain",) and self.requests is not None:
            return Reply.json({"requests": self.requests, "tiers_away": self.tiers_away})
        if path and path[0] == "explain" and self.requests is not None:
            return Reply.json({"error": "nothing is remembered"}, HTTPStatus.NOT_FOUND)
        return None

    def close(self) -> None:
        self._server.close()
