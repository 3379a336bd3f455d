"""The live page: cards, notes and tables of a view, drawn by a browser.

The page is read-only and offline: some files of this package and one JSON document. It shows all
text as text, never as markup. A content security policy lets it connect to its own server only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files

from kvferry.core.lifecycle import Closing
from kvferry.errors import UnreachableError
from kvferry.telemetry.http import LOOPBACK, HttpServer, Reply
from kvferry.tools.top.view import FormattedView, Watch

_FILES = {
    (): ("index.html", "text/html; charset=utf-8"),
    ("page.js",): ("page.js", "text/javascript; charset=utf-8"),
    ("page.css",): ("page.css", "text/css; charset=utf-8"),
    ("icon.svg",): ("icon.svg", "image/svg+xml"),
}


class PageServer(Closing):
    """Serves the view of a ``Watch`` to any number of browsers. Owns its HTTP server.

    It reads the endpoint when a browser asks, at most once per interval.
    """

    def __init__(
        self,
        watch: Watch,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        interval: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = watch
        self._interval = interval
        self._clock = clock
        self._looking = threading.Lock()
        self._looked_at = float("-inf")
        self._latest: dict[str, object] = {"interval": interval, "error": ""}
        folder = files("kvferry.tools.top") / "page"
        self._pages = {
            path: Reply((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()
        }
        self._server = HttpServer(self._answer, host=host, port=port)

    @property
    def url(self) -> str:
        return self._server.url

    def _answer(self, path: tuple[str, ...]) -> Reply | None:
        if path == ("view.json",):
            return Reply.json(self._look())
        return self._pages.get(path)

    def _look(self) -> dict[str, object]:
        """Return the latest view. If it is old, one thread renews it and the others do not wait."""
        if not self._looking.acquire(blocking=False):
            return self._latest  # an endpoint may take seconds to fail
        try:
            now = self._clock()
            if now - self._looked_at < self._interval * 0.9:
                return self._latest
            self._looked_at = now
            view = self._watch.look()
            self._latest = {
                "interval": self._interval,
                "error": "",
                "view": asdict(view),
                "shown": asdict(FormattedView.of(view)),
            }
        except UnreachableError as error:
            self._latest = {**self._latest, "error": str(error)}
        finally:
            self._looking.release()
        return self._latest

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        self._server.close()
