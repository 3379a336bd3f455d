"""One life of a playground server, in a process of its own: told what to serve, says what it did.

::

    python -m kvferry.tools.demo.life    a job as JSON on standard input; answers in lines of JSON

It ends when its job is done, on Ctrl-C, and when nobody reads its answers any more.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from kvferry.config import Config
from kvferry.errors import KvferryError
from kvferry.tools.demo.blocks import ServedRequest
from kvferry.tools.demo.engine import Engine, Limits, Offloader, Runner
from kvferry.tools.demo.model import Decoder, ModelShape, limit_matrix_threads
from kvferry.tools.demo.workload import Chat, serve


@dataclass(frozen=True)
class LifeJob:
    """What one life has to do: rounds ``first`` to ``last`` (not included) of the conversations.

    ``settings`` are kvferry's. ``histories`` has what was said in earlier lives.
    """

    chat: Chat
    shape: ModelShape
    device_blocks: int
    host_bytes: int
    block_tokens: int
    first: int
    last: int
    settings: dict[str, Any] = field(default_factory=dict)
    histories: list[list[int]] | None = None

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> LifeJob:
        told = json.loads(text)
        shape = told["shape"] | {"windows": tuple(told["shape"]["windows"])}
        return cls(**(told | {"chat": Chat(**told["chat"]), "shape": ModelShape(**shape)}))


def live(job: LifeJob) -> None:
    """Serve, and tell: a line for every turn, and one at the end."""
    limit_matrix_threads(1)
    histories = job.histories or [job.chat.opening(n) for n in range(job.chat.num_conversations)]
    config = Config.from_dict(job.settings)
    decoder = Decoder(job.shape)
    with (
        Runner(decoder, num_blocks=job.device_blocks, block_tokens=job.block_tokens) as runner,
        Offloader(runner, host_bytes=job.host_bytes, config=config) as offloader,
    ):
        engine = Engine(runner, limits=Limits(), offloader=offloader)
        restored = sum(offloader.stats().restored.values())
        rounds = range(job.first, job.last)
        serve(engine, job.chat, _tell, rounds=rounds, histories=histories)
        engine.drain()
        moved = offloader.stats().bytes_moved
        told = {
            "restored_blocks": restored,
            "read_bytes": sum(n for (src, _), n in moved.items() if src == "disk"),
            "written_bytes": sum(n for (_, dst), n in moved.items() if dst == "disk"),
            "prefill_tokens": engine.counts.num_prefill_tokens,
            "histories": histories,
        }
    _say({"end": told})


def _tell(request: ServedRequest) -> None:
    _say({"turn": request.told()})


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            live(LifeJob.unpack(sys.stdin.read()))
        except KvferryError as error:
            sys.exit(f"Error: {error}")
