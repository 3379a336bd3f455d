"""A busy engine to look at: the playground serves chats until Ctrl-C, with metrics.

::

    python -m kvferry.tools.demo.watched    # then, in another terminal:
    kvferry top
    kvferry top --web
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
from kvferry.tools.demo.engine import Engine, Limits, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape, limit_matrix_threads
from kvferry.tools.demo.workload import Chat, serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--host-bytes", type=int, default=24 << 20)
    arguments = parser.parse_args()
    limit_matrix_threads(1)
    shape = ModelShape()
    end = time.monotonic() + arguments.seconds
    with (
        Runner(Decoder(shape), num_blocks=96) as runner,
        Offloader(runner, host_bytes=arguments.host_bytes) as offloader,
        Endpoint(offloader.source(), port=arguments.port) as endpoint,
    ):
        print(f"{endpoint.url}metrics", flush=True)
        engine = Engine(runner, limits=Limits(), offloader=offloader)
        for seed in itertools.count():
            if time.monotonic() >= end:
                break
            chat = Chat(num_conversations=24, num_turns=4, vocab=shape.vocab, seed=seed)
            serve(engine, chat)  # more than host memory holds, so some of it is dropped
        engine.drain()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            main()
        except ConfigError as error:  # the port is taken
            sys.exit(f"Error: {error} (--port)")
