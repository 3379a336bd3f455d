"""The KV tensors an engine hands over: looked at once, before anything is copied by address."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.device.layout import GroupLayout, describe
from kvferry.device.layout.tensor_view import TensorView, named_tensors, view_of
from kvferry.errors import LayoutError

Place = tuple[str, int]
"""A kind of device and its number."""

_ORDINARY: Place = ("cpu", 0)
_MAPS = "/proc/self/maps"


@dataclass(frozen=True)
class AttachedTensors:
    """Tensors of one group, all on one device, whose bytes may be read and written.

    Holds them, because copies go by address: they must live as long as anything may be copied.
    """

    tensors: Mapping[str, Any]
    layout: GroupLayout
    place: Place

    @classmethod
    def of(cls, kv: Mapping[str, Any] | Sequence[Any], block_axis: int) -> AttachedTensors:
        """LayoutError, with the tensor's name, for memory that cannot be copied from and to."""
        tensors = named_tensors(kv)
        views = [_own_view(tensor, name) for name, tensor in tensors.items()]
        layout = describe(tensors, block_axis=block_axis)
        place = _common_place(tensors)
        if place == _ORDINARY:
            _require_writable(views)
        return cls(tensors, layout, place)

    @property
    def dtype(self) -> str:
        """What the bytes mean, of all tensors: one name, or one for each where they differ."""
        names = [str(tensor.dtype) for tensor in self.tensors.values()]
        return names[0] if len(set(names)) == 1 else json.dumps(names)

    @property
    def gpu(self) -> int | None:
        """The GPU they are on; None for ordinary memory."""
        return None if self.place == _ORDINARY else self.place[1]


def _own_view(tensor: Any, name: str) -> TensorView:
    if isinstance(tensor, TensorView):
        raise LayoutError(f"{name} is a view without a dtype; give the tensor itself")
    return view_of(tensor, name)


def _common_place(tensors: Mapping[str, Any]) -> Place:
    first, *_ = names = list(tensors)
    places = {name: _place(tensors[name]) for name in names}
    for name, place in places.items():
        if place != places[first]:
            raise LayoutError(
                f"{name} is on {_words(place)}, {first} on {_words(places[first])}; the tensors of "
                "one ferry must be on one device"
            )
    if places[first][0] not in ("cpu", "cuda"):
        raise LayoutError(f"{first} is on {_words(places[first])}; kvferry copies to CUDA and CPU")
    return places[first]


def _place(tensor: Any) -> Place:
    kind = getattr(getattr(tensor, "device", None), "type", None)  # numpy's device is a word
    return _ORDINARY if kind in (None, "cpu") else (str(kind), tensor.device.index or 0)


def _words(place: Place) -> str:
    return "the CPU" if place == _ORDINARY else f"{place[0]}:{place[1]}"


def _require_writable(views: Iterable[TensorView]) -> None:
    """A tensor may lie in pages that it does not know to be read-only; writing there is the end."""
    try:
        with open(_MAPS, encoding="ascii", errors="replace") as lines:
            maps = [_mapping(line) for line in lines]
    except OSError:  # no such file here: then nobody can say
        return
    starts = [start for start, _, _ in maps]
    for view in views:
        at, end = view.extent
        while at < end:
            number = bisect_right(starts, at) - 1
            _, stop, writable = maps[number] if number >= 0 else (0, 0, False)
            if at >= stop or not writable:
                raise LayoutError(
                    f"{view.name} lies in memory that is read-only for this process (address "
                    f"{at:#x}); blocks could never be loaded into it"
                )
            at = stop


def _mapping(line: str) -> tuple[int, int, bool]:
    """From where to where, and whether it may be written; the kernel sorts them by address."""
    span, rights = line.split(maxsplit=2)[:2]
    start, stop = span.split("-")
    return int(start, 16), int(stop, 16), "w" in rights
