"""KV geometry: computes block layouts from the tensors that vLLM registers, by their strides.

vLLM hands over one view per layer, sometimes several (a state and its convolution). They may be in
one storage or in many, and layers of different groups may overlap in memory. All of them have an
axis that counts blocks; everything else inside a block is opaque::

    (blocks, 2, tokens, heads, size)      packed K and V
    (2, blocks, tokens, heads, size)      split K and V
    (blocks * n, ...)                     a kernel that works on n-ths of a block
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.connectors.common.worker import KvCache
from kvferry.errors import LayoutError
from kvferry.transfer.layout import GroupLayout, TensorView, describe, view_of


def kv_cache_of(
    kv_caches: Mapping[str, Any], groups: Sequence[Sequence[str]], num_blocks: int
) -> KvCache:
    """Return vLLM's KV cache for the worker side; LayoutError if a tensor is not understood."""
    first = next(iter(kv_caches.values()))
    device = (first[0] if isinstance(first, (list, tuple)) else first).device
    layouts = layouts_of(kv_caches, groups, num_blocks)
    return KvCache(layouts, device, groups[0], dict(kv_caches))


def layouts_of(
    kv_caches: Mapping[str, Any], groups: Sequence[Iterable[str]], num_blocks: int
) -> tuple[GroupLayout, ...]:
    """Return one layout per group, from the tensors of its layers.

    Leaves out layers without a tensor (they are on another rank), and repeated views (layers that
    share their KV).
    """
    layouts = []
    for number, names in enumerate(groups):
        views: dict[Any, TensorView] = {}
        for name in names:
            found = kv_caches.get(name, ())
            for part, tensor in enumerate(found if isinstance(found, (list, tuple)) else (found,)):
                view = _blocks_first(view_of(tensor, f"{name}[{part}]"), num_blocks)
                views.setdefault((view.address, view.shape, view.strides), view)
        if not views:
            raise LayoutError(f"group {number} has no KV tensor on this rank")
        by_name = {view.name: view for view in views.values()}
        layouts.append(describe(by_name, num_blocks=num_blocks, block_axis=0))
    return tuple(layouts)


def _blocks_first(view: TensorView, num_blocks: int) -> TensorView:
    """Return a view of the same bytes whose first axis counts ``num_blocks`` blocks.

    In vLLM's shapes the block axis comes before all axes inside a block, so it is the first axis
    that can count blocks. Only the K/V axis may precede it, which is ambiguous with two blocks.
    """
    axes = [a for a, extent in enumerate(view.shape) if extent and extent % num_blocks == 0]
    if not axes or (num_blocks <= 2 and len(axes) > 1):
        raise LayoutError(
            f"{view.name} of shape {view.shape} has no axis that clearly counts {num_blocks} blocks"
        )
    axis = axes[0]
    parts = view.shape[axis] // num_blocks
    shape = [num_blocks, parts, *(e for a, e in enumerate(view.shape) if a != axis)]
    step = view.strides[axis]
    strides = [step * parts, step, *(s for a, s in enumerate(view.strides) if a != axis)]
    return TensorView(view.name, view.address, tuple(shape), tuple(strides), view.itemsize)
