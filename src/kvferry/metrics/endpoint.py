"""The endpoint of one process: ``/metrics`` for Prometheus, ``/explain`` for people."""

from __future__ import annotations

from http import HTTPStatus

from kvferry.closing import Closing
from kvferry.metrics import DEFAULT_PORT
from kvferry.metrics.http import LOOPBACK, HttpServer, Reply
from kvferry.metrics.http_messages import Orders
from kvferry.metrics.source import Source
from kvferry.metrics.text import CONTENT_TYPE, exposition

_WELCOME = """kvferry
/metrics          for Prometheus
/explain          the latest requests
/explain/REQUEST  why a request hit or missed, and what was copied for it
"""


class Endpoint(Closing):
    """Serves what a source knows, and lets orders through its door. Owns its server and no more."""

    def __init__(
        self,
        source: Source,
        *,
        host: str = LOOPBACK,
        port: int = DEFAULT_PORT,
        door: Orders | None = None,
    ) -> None:
        """``port`` 0 takes any that is free; ``url`` says which. A ``door`` takes orders."""
        self._source = source
        self._door = door
        self._server = HttpServer(self._answer, host=host, port=port, orders=door)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def port(self) -> int:
        return self._server.port

    def _answer(self, path: tuple[str, ...]) -> Reply | None:
        match path:
            case ():
                return Reply(_WELCOME.encode())
            case ("metrics",):
                return Reply(exposition(self._source.snapshot()), CONTENT_TYPE)
            case ("explain",):
                source = self._source
                return Reply.json({"requests": source.recent(), "levels_away": source.away()})
            case ("explain", request_id):
                found = self._source.explain(request_id)
                if found is None:
                    words = f"nothing is remembered of request {request_id!r}"
                    return Reply.json({"error": words}, HTTPStatus.NOT_FOUND)
                return Reply.json(found)
            case _:
                return None

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        if self._door is not None:
            self._door.close()
        self._server.close()
