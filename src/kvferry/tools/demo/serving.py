"""A demo server: answers questions until the router closes its connection.

::

    python -m kvferry.tools.demo.serving FD     ends when the other end of FD is closed
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection

from kvferry.errors import KvferryError, TransferError
from kvferry.tools.demo.engine import Engine, ServedRequest
from kvferry.tools.demo.model import Decoder
from kvferry.tools.demo.servers import ServerAnswer, ServerSetup
from kvferry.tools.demo.workload import Turn
from kvferry.types import DEVICE, HOST

_IDLE_SECONDS = 0.02
"""Seconds an idle server waits for a question before it polls its copies again."""

_STORE_SECONDS = 30.0
"""Most seconds to wait for the shared store. Enough on a busy machine."""


def serve_questions(setup: ServerSetup, router: Connection) -> None:
    """Answer every question. Raises EOFError once the router has closed its end."""
    with Engine(Decoder(setup.shape), setup.device_blocks, setup.settings) as engine:
        _wait_for_store(engine, router)
        router.send(_answer(engine))
        while True:
            while router.poll(0 if engine.has_work else _IDLE_SECONDS):
                question = router.recv()
                if question is None:
                    engine.run()
                    engine.pool.check_integrity()
                    router.send(_answer(engine))
                else:
                    engine.submit(ServedRequest(**question))
            for request in engine.step():
                router.send(_answer(engine, request.turn()))


def _wait_for_store(engine: Engine, router: Connection) -> None:
    """Wait until all tiers can be used.

    A server without its shared store would compute everything and show no saving.
    """
    end = time.monotonic() + _STORE_SECONDS
    while engine.ferry:
        engine.ferry.poll()
        ailment = "; ".join(filter(None, engine.ferry.stats().ailments.values()))
        if not ailment:
            return
        if time.monotonic() > end:
            raise TransferError(
                f"the shared store did not become available in {_STORE_SECONDS:g} seconds: "
                f"{ailment}"
            )
        if router.poll(_IDLE_SECONDS):
            router.recv()  # EOFError: the router sends nothing before we are ready


def _answer(engine: Engine, turn: Turn | None = None) -> ServerAnswer:
    if not engine.ferry:
        return ServerAnswer(turn)
    stats, moved = engine.ferry.stats(), Counter[str]()
    for route, num_bytes in stats.bytes_moved.items():
        src, dst = (name if name in (DEVICE, HOST) else "tiers" for name in route)
        moved[f"{src}->{dst}"] += num_bytes
    return ServerAnswer(turn, sum(stats.restored.values()), tuple(moved.items()))


def main() -> None:
    """Serve until the router closes its connection."""
    with Connection(int(sys.argv[1])) as router, suppress(EOFError, KeyboardInterrupt, OSError):
        try:
            serve_questions(router.recv(), router)
        except KvferryError as error:
            sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
