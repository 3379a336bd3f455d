"""Recurrent states on the CPU: what vLLM does with Triton kernels there too, in plain torch.

Which block a state lies in, which hash it has and when it is copied stay vLLM's own decisions.
"""

from __future__ import annotations

import ctypes
from typing import Any


def allow() -> None:
    """For this process, for good. Harmless to models without recurrent layers."""
    from vllm.v1.worker import mamba_utils

    mamba_utils.batch_memcpy = _copy_states
    try:
        from vllm.model_executor.layers.mamba import mamba_mixer2
        from vllm.model_executor.layers.mamba.ops import ssd_checkpoint, ssd_combined
    except ImportError:
        return  # a vLLM without states inside a prefill
    if ssd_combined._mamba_chunk_scan_combined_fwd is not _scan:
        _scan.whole = ssd_combined._mamba_chunk_scan_combined_fwd  # type: ignore[attr-defined]
        ssd_combined._mamba_chunk_scan_combined_fwd = _scan
    mamba_mixer2.store_prefill_checkpoint = _keep_states
    ssd_checkpoint.store_prefill_checkpoint = _keep_states


def _copy_states(sources: Any, targets: Any, sizes: Any) -> None:
    for source, target, size in zip(
        sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
    ):
        ctypes.memmove(target, source, size)


def _scan(x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, out: Any, **more: Any) -> Any:  # noqa: N803
    """The CPU's kernel, chunk by chunk where the states between them are asked for."""
    import torch

    whole: Any = _scan.whole  # type: ignore[attr-defined]
    if not more.get("return_intermediate_states"):
        return whole(x, dt, A, B, C, chunk_size, out, **more)
    ends, owners = more["cu_chunk_seqlens"].tolist(), more["seq_idx"].tolist()
    first = more["initial_states"]
    states: list[Any] = []
    for chunk, owner in enumerate(owners):
        here = slice(ends[chunk], ends[chunk + 1])
        before = states[-1] if chunk and owners[chunk - 1] == owner else None
        if before is None and first is not None:
            before = first[owner : owner + 1]
        part = {
            **more,
            "initial_states": before,
            "return_intermediate_states": False,
            "cu_seqlens": torch.tensor([0, here.stop - here.start], dtype=torch.int32),
        }
        states.append(whole(x[here], dt[here], A, B[here], C[here], chunk_size, out[here], **part))
    return torch.cat(states)


def _keep_states(
    checkpoint: Any,
    chunk_idx: Any,
    x: Any,
    conv_state: Any,
    chunk_states: Any,
    ssm_state: Any,
    query_start_loc: Any,
    *,
    state_len: int,
) -> None:
    starts = query_start_loc.tolist()
    for row, offset in enumerate(checkpoint.checkpoint_offsets.tolist()[: len(chunk_idx)]):
        if offset:
            block, end = int(checkpoint.state_indices[row]), starts[row] + offset
            ssm_state[block] = chunk_states[int(chunk_idx[row])].to(ssm_state.dtype)
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
