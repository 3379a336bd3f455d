"""Why a copy took its path, told long after it was made."""

from __future__ import annotations

from functools import partial

from kvferry.device.job import Direction
from kvferry.device.planning.path_choices import PathChoices
from kvferry.scheduler.journal import Copy
from kvferry.types import DEVICE, HOST

_ONLY = {
    "cpu": "cpu: for KV tensors in ordinary memory there is no other path.",
    "tier": "tier: between host memory and the tiers below it there is no other path.",
}


def why_path(copy: Copy, choices: PathChoices | None, *, num_sharing: int = 1) -> str:
    """In words; empty where it cannot be said.

    ``choices`` are the rank's, None where it has none to make. ``num_sharing`` ranks have one host
    memory: each stores its part of a transfer, and chose the path for that part.
    """
    for path in copy.paths:
        if path in _ONLY:
            return _ONLY[path]
        if choices is not None and path in choices.paths and {copy.src, copy.dst} == {DEVICE, HOST}:
            return _chosen(copy, path, choices, num_sharing)
    return ""


def _chosen(copy: Copy, path: str, choices: PathChoices, num_sharing: int) -> str:
    why = partial(choices.why, busy=copy.beside_model, num_runs=copy.num_runs)
    if copy.dst == DEVICE:
        return why(Direction.LOAD, copy.group, copy.num_blocks, path)
    least, rest = divmod(copy.num_blocks, num_sharing)
    parts = sorted({least + (rest > 0), least} - {0}, reverse=True)
    told = (why(Direction.STORE, copy.group, part, path) for part in parts)
    return next(filter(None, told), "")
