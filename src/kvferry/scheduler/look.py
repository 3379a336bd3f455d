"""One look at a request: what of it is where, and what stopped it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.keys import Keys
from kvferry.types import Key, SlotArray

Present = list[npt.NDArray[np.bool_]]
"""Per group, which blocks of a request can be read."""


class Missing(NamedTuple):
    """A block that no hit can do without, and that is not here: its first token, its key.

    One that ``is_coming`` was on its way in when it was looked for.
    """

    group: int
    token: int
    key: Key
    is_coming: bool = False


@dataclass(eq=False, slots=True)
class Look:
    """One look at a request: how far the host alone reaches, and how far with the levels below.

    ``slots`` are those that the host's hit reads, by group; ``blocks`` are their places in the
    request, ``asked`` their keys in the pool. ``missing`` stopped that hit; None where nothing did
    but the cap. ``host`` and ``everywhere`` say block by block what is there; None where nobody had
    to know.
    """

    keys: Keys
    computed_tokens: int
    max_tokens: int
    host_tokens: int
    all_tokens: int
    slots: tuple[SlotArray | None, ...]
    blocks: tuple[range, ...]
    asked: tuple[Keys, ...]
    missing: Missing | None
    host: Present | None = None
    everywhere: Present | None = None
