"""A busy engine with metrics, for ``kvferry top`` and ``kvferry explain``. It serves until Ctrl-C.

::

    python -m kvferry.tools.demo.watched
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time

from kvferry.telemetry import DEFAULT_PORT
from kvferry.telemetry.endpoint import Endpoint
from kvferry.tools.demo.engine import Engine, Offloader, Runner, serve
from kvferry.tools.demo.model import Decoder, ModelShape, limit_matrix_threads
from kvferry.tools.demo.workload import Chat


def main() -> None:
    """Serve until the time is over."""
    parser = argparse.ArgumentParser(description="A busy engine with metrics, for kvferry top.")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    limit_matrix_threads(1)
    end = time.monotonic() + arguments.seconds
    with (
        Runner(Decoder(ModelShape()), num_blocks=96) as runner,
        Offloader(runner, host_bytes=24 << 20) as offloader,
        Endpoint(offloader.source(), port=arguments.port, last_port=arguments.port + 7) as endpoint,
    ):
        print(f"{endpoint.url}metrics", flush=True)
        engine = Engine(runner, offloader=offloader)
        # More conversations than host memory holds, so that blocks are evicted.
        chats = (Chat(num_conversations=24, num_turns=4, seed=n) for n in itertools.count())
        while time.monotonic() < end:
            serve(engine, next(chats))
        engine.drain()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
