"""A demo server as a program: reads questions as lines of JSON and answers each with a line.

::

    python -m kvferry.tools.demo.server

The first line on standard input is the :class:`ServerSetup`. Every further line is a question, or
``{"finish": true}``: then the server waits for its transfers and reports. It ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import sys
import threading
import time
from dataclasses import asdict
from typing import TextIO

from kvferry.config import Config
from kvferry.errors import KvferryError, TransferError
from kvferry.tools.demo.blocks import ServedRequest
from kvferry.tools.demo.engine import Engine, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ServerSetup, limit_matrix_threads
from kvferry.types import DEVICE, HOST

_IDLE_SECONDS = 0.02
"""Pause of an idle server before it looks for finished copies again."""

_STORE_SECONDS = 30.0
"""Longest wait for the shared store, on a busy machine."""


Lines = queue.SimpleQueue[str | None]
"""The lines of the input, then None for its end."""


def serve_lines(setup: ServerSetup, source: TextIO) -> None:
    """Answer every question until the lines end. Questions in progress then have no answer."""
    limit_matrix_threads(1)
    lines: Lines = queue.SimpleQueue()
    decoder, config = Decoder(setup.shape), Config.from_dict(setup.settings)
    with (
        Runner(decoder, num_blocks=setup.device_blocks, block_tokens=setup.block_tokens) as runner,
        Offloader(runner, host_bytes=setup.host_bytes, config=config) as offloader,
    ):
        engine = Engine(runner, offloader=offloader)
        _wait_for_store(engine, offloader, source)
        # Not before: a thread that waits for input would stand in the way of a refusal.
        threading.Thread(target=_listen, args=(source, lines), daemon=True).start()
        while True:
            for line in _arrived(lines, 0 if engine.has_work else _IDLE_SECONDS):
                if line is None:
                    return
                question = json.loads(line)
                if "finish" in question:
                    engine.drain()
                    _say(offloader)
                else:
                    engine.submit(ServedRequest(**question, arrival=engine.clock()))
            for request in engine.step():
                _say(offloader, request)


def _wait_for_store(engine: Engine, offloader: Offloader, source: TextIO) -> None:
    """Wait until all tiers can be used, or the input ends.

    A server without its shared store would compute everything and show no saving.
    """
    gone = select.poll()
    gone.register(source, 0)  # reports the end of the input only
    end = time.monotonic() + _STORE_SECONDS
    engine.step()
    while (ailment := _ailment(offloader)) and not gone.poll(0):
        if time.monotonic() > end:
            raise TransferError(
                f"the shared store did not become available in {_STORE_SECONDS:g} seconds: "
                f"{ailment}"
            )
        time.sleep(_IDLE_SECONDS)
        engine.step()


def _ailment(offloader: Offloader) -> str:
    return "; ".join(filter(None, offloader.stats().ailments.values()))


def _arrived(lines: Lines, seconds: float) -> list[str | None]:
    """The lines that have arrived. Waits ``seconds`` for the first."""
    found = []
    with contextlib.suppress(queue.Empty):
        found.append(lines.get(timeout=seconds) if seconds else lines.get_nowait())
        while True:
            found.append(lines.get_nowait())
    return found


def _say(offloader: Offloader, request: ServedRequest | None = None) -> None:
    stats = offloader.stats()
    lower = {r: n for r, n in stats.bytes_moved.items() if DEVICE not in r}
    answer = {
        "turn": None if request is None else asdict(request.turn()),
        "restored_blocks": sum(stats.restored.values()),
        "read_bytes": sum(n for (_, dst), n in lower.items() if dst == HOST),
        "written_bytes": sum(n for (src, _), n in lower.items() if src == HOST),
        "ailment": _ailment(offloader),
    }
    print(json.dumps(answer), flush=True)


def _listen(source: TextIO, lines: Lines) -> None:
    for line in source:
        lines.put(line)
    lines.put(None)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            serve_lines(ServerSetup.unpack(sys.stdin.readline()), sys.stdin)
        except KvferryError as error:
            sys.exit(f"Error: {error}")
