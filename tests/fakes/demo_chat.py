"""A chat served by one engine of the demo, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.tools.demo.engine import Engine, ServedRequest
from kvferry.tools.demo.workload import Chat, Dialogue


def serve(
    engine: Engine, chat: Chat, on_finish: Callable[[ServedRequest], None] | None = None
) -> dict[str, list[int]]:
    """Serve all turns of a chat with one engine. Returns the answers by request id."""
    dialogue = Dialogue(chat)
    answers: dict[str, list[int]] = {}
    while not dialogue.is_over:
        while (question := dialogue.ask()) is not None:
            engine.submit(ServedRequest(**question))
        for request in engine.step():
            dialogue.answered(request.id, request.generated)
            answers[request.id] = request.generated
            if on_finish:
                on_finish(request)
    engine.run()
    return answers
