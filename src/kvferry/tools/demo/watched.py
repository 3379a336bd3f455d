"""A busy engine with metrics, for ``kvferry top``. It serves chats until Ctrl-C.

::

    python -m kvferry.tools.demo.watched    # then, in another terminal:
    kvferry top
    kvferry explain
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time

from kvferry.errors import ConfigError
from kvferry.telemetry import DEFAULT_PORT
from kvferry.telemetry.endpoint import Endpoint
from kvferry.tools.demo.engine import Engine, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape, limit_matrix_threads
from kvferry.tools.demo.workload import Chat, serve


def main() -> None:
    """Serve until the time is over."""
    parser = argparse.ArgumentParser(description="A busy engine with metrics, for kvferry top.")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--host-bytes", type=int, default=24 << 20)
    arguments = parser.parse_args()
    limit_matrix_threads(1)
    end = time.monotonic() + arguments.seconds
    with (
        Runner(Decoder(ModelShape()), num_blocks=96) as runner,
        Offloader(runner, host_bytes=arguments.host_bytes) as offloader,
        Endpoint(offloader.source(), port=arguments.port) as endpoint,
    ):
        print(f"{endpoint.url}metrics", flush=True)
        engine = Engine(runner, offloader=offloader)
        for seed in itertools.count():
            if time.monotonic() >= end:
                break
            # More conversations than host memory holds, so that blocks are evicted.
            serve(engine, Chat(num_conversations=24, num_turns=4, seed=seed))
        engine.drain()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            main()
        except ConfigError as error:  # the port is taken
            sys.exit(f"Error: {error} (--port)")
