"""The card, its driver, its link, and what copies blocks on it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvferry.errors import DriverError
from kvferry.hostmem.numa import find_placement, parse_list
from kvferry.settings.copy_paths import path_names
from kvferry.tools.doctor.finding import Finding, fail, ok, warn
from kvferry.tools.doctor.machine import Environment, Gpu
from kvferry.transfer.driver.base import BatchForm

_RELEASE = re.compile(r"Kernel Module\b.*?(\d+\.\d+(?:\.\d+)?)")
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}
"""By gigatransfers per second and lane."""


def check_gpu(env: Environment) -> Iterator[Finding]:
    """The card and all that hangs on it."""
    try:
        gpu = env.gpu()
    except (OSError, DriverError) as error:
        yield _without(env, str(error))
        return
    yield ok("gpu", gpu.identity.name)
    yield ok("driver", _driver_words(env, gpu))
    yield from _batch(gpu)
    yield _link(gpu)
    yield _numa(env, gpu)
    yield _torch(env)
    yield _triton(env, gpu)
    yield _profile(env, gpu)


def _without(env: Environment, error: str) -> Finding:
    cards = env.cards()
    if cards:
        return fail(
            "gpu",
            f"{', '.join(cards)} is there, but its driver cannot be used: {error}",
            "in a container, start it with the GPU's runtime (docker run --gpus all, Kubernetes "
            "resources.limits nvidia.com/gpu); else install the driver that belongs to the card",
        )
    return warn(
        "gpu",
        f"none found ({error})",
        "nothing to do to try the playground or the library on CPU tensors; to serve a model, run "
        "this on the machine with the GPU",
    )


def _driver_words(env: Environment, gpu: Gpu) -> str:
    version = gpu.identity.driver_version
    if not gpu.is_cuda:
        return f"HIP {version}"
    release = _RELEASE.search(env.read("/proc/driver/nvidia/version") or "")
    words = f"for CUDA up to {version // 1000}.{version % 1000 // 10}"
    return f"{release[1]}, {words}" if release else words


def _batch(gpu: Gpu) -> Iterator[Finding]:
    if gpu.batch_form is not BatchForm.ABSENT:
        form = "eight" if gpu.batch_form is BatchForm.WITHOUT_FAIL_INDEX else "nine"
        yield ok("batch copy", f"found, the form with {form} arguments")
        return
    yield warn(
        "batch copy",
        "this driver has no cuMemcpyBatchAsync: the dma path copies segment by segment",
        "update the driver to one for CUDA 12.8 or newer (570 on Linux); kernel and staged paths "
        "work without",
    )


def _link(gpu: Gpu) -> Finding:
    if not (gpu.speed and gpu.width and gpu.max_speed and gpu.max_width):
        return ok("link", "the kernel does not say (usual in guests); bench/copy_paths.py measures")
    now, most = _link_words(gpu.speed, gpu.width), _link_words(gpu.max_speed, gpu.max_width)
    if _number(gpu.width) < _number(gpu.max_width):
        return warn(
            "link",
            f"{now} where the card could have {most}: copies take "
            f"{_number(gpu.max_width) / _number(gpu.width):.0f} times as long",
            "reseat the card, or move it to a slot with all lanes; look for slot bifurcation in "
            "the firmware's settings",
        )
    if _number(gpu.speed) < _number(gpu.max_speed):
        return warn(
            "link",
            f"{now} while copying, where the card could have {most}",
            "look for a limit on the link's generation in the firmware's settings, for a riser or "
            "switch of an older generation, and for corrected errors in dmesg",
        )
    return ok("link", f"{now}, all it can have")


def _link_words(speed: str, width: str) -> str:
    generation = _GENERATIONS.get(_number(speed))
    return f"PCIe generation {generation} x{width}" if generation else f"{speed} x{width}"


def _numa(env: Environment, gpu: Gpu) -> Finding:
    placement = find_placement(gpu.identity.pci_bus_id, env.read)
    if placement.node is None or not placement.cpus:
        return ok("numa", placement.words)
    here = env.processors()
    if here & placement.cpus:
        return ok("numa", placement.words)
    distance = _distance(env, placement.node, here)
    far = f" (distance {distance}, its own is 10)" if distance else ""
    return warn(
        "numa",
        f"this process runs on none of the processors of node {placement.node}, where the GPU "
        f"is{far}: every copy goes by way of another node",
        f"start the engine near its GPU: numactl --cpunodebind={placement.node} "
        f"--membind={placement.node}, or a Kubernetes topology manager policy of single-numa-node",
    )


def _distance(env: Environment, node: int, processors: frozenset[int]) -> int:
    """From a node's memory to these processors, the farthest of them; 0 where it is not said."""
    nodes = parse_list(env.read("/sys/devices/system/node/online") or "")
    distances = (env.read(f"/sys/devices/system/node/node{node}/distance") or "").split()
    far = 0
    for other, words in zip(nodes, distances, strict=False):  # offline nodes have no column
        cpus = parse_list(env.read(f"/sys/devices/system/node/node{other}/cpulist") or "")
        if words.isdigit() and processors & frozenset(cpus):
            far = max(far, int(words))
    return far


def _torch(env: Environment) -> Finding:
    version = env.package("torch")
    if version is None:
        return fail("torch", "not installed", "pip install 'kvferry[gpu]'")
    if "+cpu" in version:
        return fail(
            "torch",
            f"{version} is a build without GPU support",
            "install the build for your driver, see https://pytorch.org/get-started",
        )
    return ok("torch", version)


def _triton(env: Environment, gpu: Gpu) -> Finding:
    version = env.package("triton")
    if version is None and gpu.is_cuda:
        return warn(
            "triton",
            "not installed: no kernel and staged paths, small segments copy at a fraction of the "
            "link's speed",
            "pip install 'kvferry[gpu]'",
        )
    return ok("triton", version or "not used on this kind of card")


def _profile(env: Environment, gpu: Gpu) -> Finding:
    with_kernels = gpu.is_cuda and env.package("triton") is not None
    if env.has_profile(gpu.identity, path_names(with_kernels=with_kernels)):
        return ok("calibration", "this machine has been measured")
    return warn(
        "calibration",
        "this machine has not been measured: the first start takes a second or two longer",
        "kvferry calibrate, on an idle GPU",
    )


def _number(text: str) -> float:
    """The number a text begins with, as in "32.0 GT/s PCIe"; 0 if none."""
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return 0.0
