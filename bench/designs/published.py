"""A published design, rebuilt as a baseline: one descriptor per program.

Below 28 KiB per segment, host to GPU, a Triton kernel on 12 multiprocessors reads one descriptor
after another; everything else is one batch copy by the DMA engines. Needs torch and Triton.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.transfer.driver import IN_STREAM_ORDER, Driver
from kvferry.transfer.job import CopyJob, Direction
from kvferry.transfer.paths.contract import Path
from kvferry.transfer.paths.direct import DmaPath, descriptors

NUM_PROGRAMS = 12
MAX_KERNEL_SEGMENT = 28 * 1024
MIN_DESCRIPTORS = 16


@triton.jit
def copy_descriptors(descriptors, count, WORDS: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, WORDS)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        target = tl.load(descriptors + number).to(tl.pointer_type(tl.int64))
        source = tl.load(descriptors + count + number).to(tl.pointer_type(tl.int64))
        words = tl.load(descriptors + 2 * count + number) // 8
        for start in range(0, words, WORDS):
            live = start + lane < words
            data = tl.load(source + start + lane, mask=live, other=0)
            tl.store(target + start + lane, data, mask=live)


class PublishedPath(Path):
    """Owns nothing between jobs: descriptors are built, pinned and shipped for every one."""

    name = "published"
    HOW = (
        "a Triton kernel that takes one descriptor per program on 12 multiprocessors for host to "
        "GPU below 28 KiB, one batch call otherwise"
    )

    def __init__(self, driver: Driver) -> None:
        self._dma = DmaPath(driver)

    def enqueue(self, job: CopyJob, stream: int, ready: int) -> None:
        segment = int(job.layout.sizes.max())
        count = len(job.device_blocks) * job.layout.num_segments
        small = segment < MAX_KERNEL_SEGMENT and count >= MIN_DESCRIPTORS
        if job.direction is not Direction.LOAD or not small:
            # It lets a load's source be read at any time: CU_MEMCPY_SRC_ACCESS_ORDER_ANY.
            IN_STREAM_ORDER[0] = 3 if job.direction is Direction.LOAD else 1
            self._dma.enqueue(job, stream, ready)
            IN_STREAM_ORDER[0] = 1
            return
        external: Any = torch.cuda.ExternalStream(stream)
        with torch.cuda.stream(external):
            packed = np.concatenate(descriptors(job)).view(np.int64)
            on_device = torch.from_numpy(packed).pin_memory().to("cuda", non_blocking=True)
            words = triton.next_power_of_2(segment // 8)
            copy_descriptors[(min(NUM_PROGRAMS, count),)](on_device, count, WORDS=words)
