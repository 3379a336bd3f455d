"""A playground server that is a process: takes turns from whoever started it, answers each.

::

    python -m kvferry.tools.demo.server    lines of JSON on standard input: first what it is,
                                           then turns; a line for each answer on standard output

It ends when its input does.
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from kvferry.config import Config
from kvferry.errors import KvferryError, TransferError
from kvferry.settings.tiers import REMOTE
from kvferry.tools.demo.blocks import ServedRequest
from kvferry.tools.demo.engine import Engine, Limits, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape, limit_matrix_threads
from kvferry.types import HOST

_IDLE_SECONDS = 0.02
"""How long an idle server waits for a turn before it looks after its copies again."""

_STORE_SECONDS = 30.0
"""How long a server waits for a store that it is to share, on a machine that is busy."""


@dataclass(frozen=True)
class ServerSetup:
    """What a server is. ``settings`` are kvferry's."""

    shape: ModelShape
    device_blocks: int
    host_bytes: int
    block_tokens: int
    settings: dict[str, Any] = field(default_factory=dict)

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> ServerSetup:
        told = json.loads(text)
        shape = told["shape"] | {"windows": tuple(told["shape"]["windows"])}
        return cls(**(told | {"shape": ModelShape(**shape)}))


Lines = queue.SimpleQueue[str | None]
"""What was said to the server; None: nobody will say anything any more."""


def serve_lines(setup: ServerSetup, source: TextIO) -> None:
    """Answer every turn, until the lines end; a turn under way then is not answered."""
    limit_matrix_threads(1)
    lines: Lines = queue.SimpleQueue()
    decoder = Decoder(setup.shape)
    config = Config.from_dict(setup.settings)
    with (
        Runner(decoder, num_blocks=setup.device_blocks, block_tokens=setup.block_tokens) as runner,
        Offloader(runner, host_bytes=setup.host_bytes, config=config) as offloader,
    ):
        engine = Engine(runner, limits=Limits(), offloader=offloader)
        _wait_for_store(engine, offloader, source)
        # Not before: a thread that waits for input would stand in the way of a refusal.
        threading.Thread(target=_listen, args=(source, lines), daemon=True).start()
        while True:
            for line in _arrived(lines, 0 if engine.has_work else _IDLE_SECONDS):
                if line is None:
                    return
                engine.submit(ServedRequest(**json.loads(line), arrival=engine.clock()))
            for request in engine.step():
                _tell(request, offloader)


def _wait_for_store(engine: Engine, offloader: Offloader, source: TextIO) -> None:
    """Until all that lies below can be used, or nobody speaks to us any more.

    Whoever served without it would compute what others have, and nobody would learn from that what
    sharing saves.
    """
    gone = select.poll()
    gone.register(source, 0)  # tells of nothing but the end
    end = time.monotonic() + _STORE_SECONDS
    engine.step()
    while (ailment := _ailment(offloader)) and not gone.poll(0):
        if time.monotonic() > end:
            raise TransferError(
                f"no store to share for {_STORE_SECONDS:g} seconds, and without one there is "
                f"nothing to show: {ailment}"
            )
        time.sleep(_IDLE_SECONDS)
        engine.step()


def _ailment(offloader: Offloader) -> str:
    return "; ".join(filter(None, offloader.stats().ailments.values()))


def _arrived(lines: Lines, seconds: float) -> Iterator[str | None]:
    """What has come; waits so long for the first."""
    with contextlib.suppress(queue.Empty):
        yield lines.get(timeout=seconds) if seconds else lines.get_nowait()
        while True:
            yield lines.get_nowait()


def _tell(request: ServedRequest, offloader: Offloader) -> None:
    stats = offloader.stats()
    _say(
        {
            "turn": request.told(),
            "read_bytes": stats.bytes_moved.get((REMOTE, HOST), 0),
            "ailment": _ailment(offloader),
        }
    )


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


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
