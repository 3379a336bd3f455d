"""Weight digests: sums over the first words of tensors, computed on a stream of their own.

Different digests prove that tensors have changed; equal ones do not prove that they have not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_WORDS = 1 << 21
"""Words digested per tensor: 4 MiB in bfloat16, which a data-centre GPU reads in microseconds."""


class WeightDigests:
    """Computes digests on a stream of its own. Owns that stream and no tensor."""

    def __init__(self, device: Any) -> None:
        import torch

        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._point: Any = None

    def mark(self) -> None:
        """Make digests begun from now on wait for the work queued so far, but for no later work."""
        import torch

        if self._stream is not None:
            self._point = torch.cuda.current_stream(self._stream.device).record_event()

    def begin(self, tensors: Sequence[Any]) -> PendingDigests:
        """Start computing one digest per tensor and return at once."""
        import torch

        # Engines use tensor subclasses for weights; their Python hooks would run at every call.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if self._stream is None:
                return PendingDigests(_stacked(tensors), None)
            with torch.cuda.stream(self._stream):
                if self._point is not None:
                    self._stream.wait_event(self._point)
                on_device = _stacked(tensors)
                host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
                host.copy_(on_device, non_blocking=True)
                return PendingDigests(host, self._stream.record_event(), on_device)


class PendingDigests:
    """Digests that are still being computed."""

    def __init__(self, values: Any, done: Any, keep_alive: Any = None) -> None:
        self._values = values
        self._done = done
        self._keep_alive = keep_alive

    @property
    def is_done(self) -> bool:
        """Whether :meth:`result` returns at once."""
        return self._done is None or bool(self._done.query())

    def result(self) -> tuple[int, ...]:
        """Wait for the digests and return one number per tensor."""
        if self._done is not None:
            self._done.synchronize()
        return tuple(self._values.tolist())


def _stacked(tensors: Sequence[Any]) -> Any:
    import torch

    return torch.stack([_words(tensor).sum(dtype=torch.int64) for tensor in tensors])


def _words(tensor: Any) -> Any:
    """View a tensor's memory, from its first element on, as integers of the same element size."""
    import torch

    size = tensor.element_size()
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    storage, first = tensor.untyped_storage(), tensor.storage_offset()
    count = min(tensor.numel(), storage.nbytes() // size - first, MOST_WORDS)
    empty = torch.empty(0, dtype=dtype, device=tensor.device)
    return empty.set_(storage, first, (count,), (1,))
