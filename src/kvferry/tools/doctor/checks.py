"""The checks of the doctor: functions that return findings. ``examine`` runs them all.

The checks see the machine through ``Environment``, which a test can replace.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from glob import glob
from importlib import metadata

from kvferry.config import DISK_KEY_ENV, Config
from kvferry.connectors.vllm import CONNECTOR_NAME
from kvferry.connectors.vllm.versions import is_newer, refusal, seeds_are_fixed
from kvferry.core.quantities import GiB, MiB, rounded_size
from kvferry.errors import ConfigError, DriverError, install
from kvferry.hostmem.limits import Machine, find_placement, read_text, size_for
from kvferry.settings.kinds import AUTO
from kvferry.settings.tiers import DISK, REMOTE, TierSpec
from kvferry.tiers.contract import TierSetup
from kvferry.tiers.movers import open_tier
from kvferry.tools.doctor.drive import (
    MOST_BYTES,
    DriveSpeed,
    file_system,
    measure_drive,
    nearest_directory,
)
from kvferry.transfer.driver import BatchForm, DeviceIdentity, Driver, Priority

_PLUGINS = "vllm.general_plugins"
_RELEASE = re.compile(r"Kernel Module\b.*?(\d+\.\d+(?:\.\d+)?)")
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
_LEAST_SHM = 1 * GiB

_WAKE_BYTES = 32 * MiB
_WAKE_COPIES = 24


class Grade(Enum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"  # it works, but slower or with less than it could
    FAIL = "fail"  # it will not work as configured


@dataclass(frozen=True)
class Finding:
    """One line of the report. A finding that is not ok has a remedy."""

    name: str
    grade: Grade
    words: str
    remedy: str = ""


def ok(name: str, words: str) -> Finding:
    return Finding(name, Grade.OK, words)


def warn(name: str, words: str, remedy: str) -> Finding:
    return Finding(name, Grade.WARN, words, remedy)


def fail(name: str, words: str, remedy: str) -> Finding:
    return Finding(name, Grade.FAIL, words, remedy)


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``speed`` (GT/s) and ``width`` are its link's under load, 0 if a guest hides it."""

    identity: DeviceIdentity
    batch_form: BatchForm
    speed: float = 0
    width: float = 0
    max_speed: float = 0
    max_width: float = 0


def inspect_gpu(device: int) -> Gpu:
    """Open the driver, wake the link with a few copies, and read its speed."""
    driver = Driver.open(device)
    try:
        identity = driver.identity()
        # The driver may write the domain with eight digits, the kernel uses four.
        domain, _, rest = identity.pci_bus_id.lower().partition(":")
        folder = f"/sys/bus/pci/devices/{domain[-4:]}:{rest}"
        names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
        with driver.current():
            link = _under_load(driver, lambda: [_read_number(f"{folder}/{name}") for name in names])
        return Gpu(identity, driver.batch_form, *link)
    finally:
        driver.close()


def _under_load(driver: Driver, look: Callable[[], list[float]]) -> list[float]:
    """Call ``look`` while copies run, because an idle GPU lowers the speed of its link."""
    stream = driver.create_stream(Priority.LOW)
    host = driver.alloc_host(_WAKE_BYTES)
    device = driver.alloc_device(_WAKE_BYTES)
    try:
        driver.copy_async(device, host, _WAKE_BYTES, stream)
        driver.synchronize_stream(stream)  # long enough for the link to reach full speed
        for _ in range(_WAKE_COPIES):
            driver.copy_async(device, host, _WAKE_BYTES, stream)
        return look()
    finally:
        driver.synchronize_stream(stream)
        driver.free_device(device)
        driver.free_host(host)
        driver.destroy_stream(stream)


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def disk_usage(path: str) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


def _read_number(path: str) -> float:
    """Return the number at a file's start, as in "32.0 GT/s PCIe", or 0 if it is unknown."""
    found = re.match(r"[\d.]+", read_text(path) or "")
    return float(found[0]) if found and found[0] != "255" else 0.0


@dataclass(frozen=True)
class Environment:
    """Functions that examine the machine. Each call looks again.

    ``gpu`` raises OSError or DriverError without a GPU. ``cards`` returns the device files of GPUs.
    ``package`` returns a package's version, ``plugins`` the names under an entry point. ``room``
    returns the total and free bytes of a file system. ``drive`` measures a directory's drive.
    """

    machine: Machine = field(default_factory=Machine)
    gpu: Callable[[], Gpu] = lambda: inspect_gpu(0)
    cards: Callable[[], list[str]] = lambda: sorted(glob("/dev/nvidia[0-9]*"))
    package: Callable[[str], str | None] = package_version
    plugins: Callable[[str], tuple[str, ...]] = lambda group: tuple(
        sorted({entry.name for entry in metadata.entry_points(group=group)})
    )
    room: Callable[[str], tuple[int, int] | None] = disk_usage
    drive: Callable[[str], DriveSpeed] = measure_drive
    processors: Callable[[], frozenset[int]] = lambda: frozenset(os.sched_getaffinity(0))
    config: Callable[[Mapping[str, str]], Config] = lambda env: Config.load(env=env)


def examine(env: Environment) -> list[Finding]:
    """Run all checks. An exception in a check becomes a finding."""
    settings, config = check_settings(env)
    findings = [settings]
    checks: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
        ("gpu", lambda: check_gpu(env)),
        ("host memory", lambda: check_memory(env, config)),
        ("disk", lambda: check_disk(env, config)),
        ("tiers", lambda: check_tiers(config)),
        ("vllm", lambda: check_vllm(env, config)),
    )
    for name, check in checks:
        try:
            findings.extend(check())
        except Exception as error:  # a strange machine must not hide the other findings
            remedy = "report this with the output of kvferry doctor --json"
            findings.append(
                warn(name, f"could not be checked: {type(error).__name__}: {error}", remedy)
            )
    return findings


def check_settings(env: Environment) -> tuple[Finding, Config]:
    """Read the settings. Returns the defaults if they are refused."""
    try:
        config = env.config(env.machine.env)
    except ConfigError as error:
        remedy = "correct the file or the variable; kvferry config shows them all"
        return fail("settings", str(error), remedy), Config()
    return ok("settings", "all can be read; kvferry config shows them"), config


def check_vllm(env: Environment, config: Config) -> Iterator[Finding]:
    """Check that vLLM would load the connector, and that the connector supports this version."""
    version = env.package("vllm")
    if version is None:
        yield ok("vllm", "not installed; the library works without it")
        return
    words, _, remedy = refusal(version).partition("; ")
    if words:
        yield fail("vllm", words, remedy)
    elif is_newer(version):
        words = f"{version} is newer than the tested versions; kvferry checks its hooks at start"
        yield warn("vllm", words, 'look for "kvferry is in service" in vLLM\'s log')
    else:
        yield ok("vllm", version)
    yield _connector(env)
    yield _hash_seed(env, version, config)


def _connector(env: Environment) -> Finding:
    if CONNECTOR_NAME not in env.plugins(_PLUGINS):
        return fail(
            "connector",
            "kvferry is not among vLLM's plugins: its entry point is not installed",
            "install kvferry with pip into vLLM's environment; with a source tree on PYTHONPATH, "
            'set "kv_connector": "KvferryConnector" and "kv_connector_module_path": '
            '"kvferry.connectors.vllm.connector"',
        )
    allowed = env.machine.env.get("VLLM_PLUGINS")
    if allowed is not None and CONNECTOR_NAME not in allowed.split(","):
        words = f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading kvferry"
        return fail("connector", words, f"unset VLLM_PLUGINS, or add {CONNECTOR_NAME} to it")
    return ok("connector", "vLLM finds it")


def _hash_seed(env: Environment, version: str, config: Config) -> Finding:
    """Check PYTHONHASHSEED. vLLM takes any text, and without one may draw its own ``NONE_HASH``."""
    seed = env.machine.env.get("PYTHONHASHSEED")
    if seed is not None:
        return ok("hash seed", f"PYTHONHASHSEED={seed}")
    if seeds_are_fixed(version):
        return ok("hash seed", "not needed, unless --prefix-caching-hash-algo is xxhash")
    words = "PYTHONHASHSEED is not set, so this vLLM names blocks differently in every process: "
    if config.disk:
        words += "after a restart it finds no block on disk"
        return fail("hash seed", words, "export PYTHONHASHSEED=0 for the server")
    words += "routers that follow the events of several servers find no equal blocks"
    return warn("hash seed", words, "export PYTHONHASHSEED=0 if there are several servers")


def check_gpu(env: Environment) -> Iterator[Finding]:
    """Check the card, its driver and link, and the packages that copy on it."""
    try:
        gpu = env.gpu()
    except (OSError, DriverError) as error:
        yield _no_gpu(env, str(error))
        return
    yield ok("gpu", gpu.identity.name)
    release = _RELEASE.search(env.machine.read("/proc/driver/nvidia/version") or "")
    newest = f"{gpu.identity.driver_version // 1000}.{gpu.identity.driver_version % 1000 // 10}"
    yield ok("driver", f"{f'{release[1]}, ' if release else ''}for CUDA up to {newest}")
    if gpu.batch_form is BatchForm.ABSENT:
        yield warn(
            "batch copy",
            "this driver has no cuMemcpyBatchAsync: the dma path copies segment by segment",
            "update the driver to one for CUDA 12.8 or newer (570 on Linux); the kernel and "
            "staged paths work without it",
        )
    else:
        yield ok("batch copy", "found")
    yield _link(gpu)
    yield _numa(env, gpu)
    yield from _packages(env, gpu)


def _no_gpu(env: Environment, error: str) -> Finding:
    cards = env.cards()
    if cards:
        return fail(
            "gpu",
            f"{', '.join(cards)} exists, but its driver cannot be used: {error}",
            "in a container, start it with the GPU's runtime (docker run --gpus all, Kubernetes "
            "resources.limits nvidia.com/gpu); else install the driver of the card",
        )
    return warn(
        "gpu",
        f"none found ({error})",
        "not needed for the demo or for CPU tensors; to serve a model, run this on its machine",
    )


def _link(gpu: Gpu) -> Finding:
    if not (gpu.speed and gpu.width and gpu.max_speed and gpu.max_width):
        return ok("link", "unknown, as usual in a guest; bench/copy_paths.py measures it")
    now = f"{gpu.speed:g} GT/s x{gpu.width:g}"
    most = f"{gpu.max_speed:g} GT/s x{gpu.max_width:g}"
    if now == most:
        return ok("link", f"{now}, its maximum")
    remedy = (
        "look for a limit on the link's generation in the firmware's settings, for a riser or "
        "switch of an older generation, and for corrected errors in dmesg"
    )
    if gpu.width < gpu.max_width:
        remedy = (
            "reseat the card, or move it to a slot with all lanes; look for slot bifurcation in "
            "the firmware's settings"
        )
    return warn("link", f"{now} while copying, but the card supports {most}", remedy)


def _numa(env: Environment, gpu: Gpu) -> Finding:
    placement = find_placement(gpu.identity.pci_bus_id, env.machine.read)
    node = placement.node
    if node is None or not placement.cpus or env.processors() & placement.cpus:
        return ok("numa", placement.words)
    return warn(
        "numa",
        f"this process runs on no processor of the GPU's node {node}: copies cross nodes",
        f"start the engine near its GPU: numactl --cpunodebind={node} --membind={node}, or a "
        "Kubernetes topology manager policy of single-numa-node",
    )


def _packages(env: Environment, gpu: Gpu) -> Iterator[Finding]:
    torch, triton = env.package("torch"), env.package("triton")
    if torch is None:
        yield fail("torch", "not installed", install("gpu"))
    elif "+cpu" in torch:
        remedy = "install the build for your driver, see https://pytorch.org/get-started"
        yield fail("torch", f"{torch} is a build without GPU support", remedy)
    else:
        yield ok("torch", torch)
    if triton is None:
        words = "not installed: small segments copy at a fraction of the link's speed"
        yield warn("triton", words, install("gpu"))
    else:
        yield ok("triton", triton)


def check_memory(env: Environment, config: Config) -> Iterator[Finding]:
    """Check the size of host memory against the machine's limits."""
    num_ranks = env.machine.num_ranks_here()
    size: int | None = None
    limits = env.machine.limits()
    try:
        size = size_for(config.host, env.machine, num_ranks=num_ranks)
    except ConfigError as error:
        words, _, remedy = str(error).partition(" Remedy: ")
        yield fail("host memory", words, remedy or "give a size that fits, such as host = 8GiB")
    else:
        auto = " (auto)" if config.host is AUTO else ""
        each = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
        if limits:
            yield ok("host memory", f"{rounded_size(size)}{auto}{each} fits")
        else:
            words = (
                f"{rounded_size(size)}{each} are needed, and the machine's memory is unknown here"
            )
            remedy = "let the process read /proc/meminfo and its cgroup, or check it yourself"
            yield warn("host memory", words, remedy)
    for limit in [limit for limit in limits if limit.name.startswith("the container")][:1]:
        yield ok("container", f"{rounded_size(limit.left)} left of {rounded_size(limit.total)}")
    yield _shm(env)
    huge = env.machine.read(_THP)
    if huge is None:
        yield ok("huge pages", "unknown: this kernel does not report them")
    elif "[never]" in huge:
        words = "off: host memory takes about twice as long to become ready"
        yield warn("huge pages", words, f"echo madvise > {_THP}")
    else:
        yield ok("huge pages", huge[huge.find("[") + 1 : huge.find("]")])


def _shm(env: Environment) -> Finding:
    room = env.room("/dev/shm")
    remedy = "docker run --shm-size=2g (or --ipc=host); in Kubernetes mount an emptyDir with "
    remedy += "medium: Memory at /dev/shm"
    if room is None:
        return fail("/dev/shm", "cannot be used: engines with several processes need it", remedy)
    words = f"{rounded_size(room[1])} free of {rounded_size(room[0])}"
    if room[1] >= _LEAST_SHM:
        return ok("/dev/shm", words)
    return warn("/dev/shm", f"{words}: engines with several processes need more", remedy)


_FAR = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "fuse.sshfs", "lustre", "glusterfs")
_MEMORY = ("is memory: its blocks take memory and end with the machine", "name a drive's directory")
_OTHER = "is on another machine: its locks and syncs may be unreliable"
_UNFIT = {
    "tmpfs": _MEMORY,
    "ramfs": _MEMORY,
    "overlay": (
        "is the container's own layer: slow, and gone with the container",
        "mount a volume: docker run -v, or a Kubernetes volume as in deploy/kubernetes",
    ),
    **dict.fromkeys(_FAR, (_OTHER, "name a directory on a local drive")),
}
"""For each unfit type of file system, why it is unfit, and the remedy."""

_SLOW = 500 * MiB
"""Bytes per second. Computing a block is often faster than reading it from a slower drive."""

_BLOCK_BYTES = 4096
"""Block size to open a tier with. The real size is known only to an engine."""

_CLOSE_SECONDS = 1.0


def check_disk(env: Environment, config: Config) -> Iterator[Finding]:
    """Check each directory of the disk, its key, and its packages."""
    if not config.disk:
        return
    for directory in config.disk:
        name = f"disk {directory}"
        here = nearest_directory(directory)
        kind = (
            file_system(here, env.machine.read("/proc/self/mountinfo") or "")
            or "unknown file system"
        )
        if here != directory:
            words = f"does not exist yet; it would be made in {here} ({kind})"
            yield warn(name, words, "mount the drive first, or do nothing if this place is right")
        elif kind in _UNFIT:
            words, remedy = _UNFIT[kind]
            yield warn(name, f"{kind} {words}", remedy)
        else:
            yield ok(name, kind)
        room = env.room(here)
        yield _space(f"{name}: space", config, room)
        if room is not None and room[1] >= config.disk_keep_free + 2 * MOST_BYTES:
            yield _speed(f"{name}: drive", here, env.drive(here))
    yield _key(env, config)
    if env.package("xxhash") is None:
        yield fail("disk checksums", "the package xxhash is not installed", install("disk"))
    else:
        yield ok("disk checksums", "xxh3-128")


def _space(name: str, config: Config, room: tuple[int, int] | None) -> Finding:
    if room is None:
        return fail(name, "cannot be read", "make the directory readable")
    share = config.disk_size // len(config.disk)
    usable, keep = room[1] - config.disk_keep_free, rounded_size(config.disk_keep_free)
    words = f"{rounded_size(room[1])} free of {rounded_size(room[0])}"
    if usable <= 0:
        words += f", and disk_keep_free is {keep}: no more blocks can be stored here"
        return fail(name, words, "make room, or lower disk_keep_free")
    if usable < share:
        return warn(
            name,
            f"{words}; disk_size is {rounded_size(share)} here, disk_keep_free {keep}",
            f"fine if kvferry's own blocks take the rest; else set disk_size to "
            f"{rounded_size(usable * len(config.disk))} or less",
        )
    return ok(name, f"{words}; up to {rounded_size(share)} will be used")


def _speed(name: str, here: str, facts: DriveSpeed) -> Finding:
    if facts.error or facts.read_rate is None or facts.write_rate is None:
        return fail(
            name,
            f"a file in {here} could not be written and read: {facts.error}",
            "let the user of the engine write there; check the drive (dmesg)",
        )
    read, write = rounded_size(int(facts.read_rate)), rounded_size(int(facts.write_rate))
    words = f"{read}/s read, {write}/s written"
    if not facts.is_direct:
        words += ", through the page cache: this file system has no direct I/O"
        return warn(name, words, "fine for a trial; to serve, use ext4 or xfs on a local drive")
    if facts.read_rate < _SLOW:
        remedy = "use NVMe: a GPU computes most prompts faster than this drive reads them"
        return warn(name, words, remedy)
    return ok(name, words)


def _key(env: Environment, config: Config) -> Finding:
    name = "disk encryption"
    try:
        key = config.disk_key(env.machine.env)
    except ConfigError as error:
        return fail(name, str(error), "correct the key, or leave it out")
    if key is None:
        return ok(name, "off: prompts can be read from the drive")
    if env.package("cryptography") is None:
        words = "a key is given, but the package cryptography is not installed"
        return fail(name, words, install("disk-encryption"))
    where = "disk_key_file" if config.disk_key_file is not None else DISK_KEY_ENV
    return ok(name, f"on, AES-GCM with the key of {where}")


def check_tiers(config: Config) -> Iterator[Finding]:
    """Open each tier that the settings name, and close it again."""
    for spec in config.all_tiers:
        if spec.kind != DISK:
            yield _check(spec, config)


def _check(spec: TierSpec, config: Config) -> Finding:
    name = f"tier {spec.name}"
    setup = TierSetup(
        spec.name,
        _BLOCK_BYTES,
        options=spec.options,
        shared_namespace=bytes(32),  # of no server
        config=config,
    )
    setting = REMOTE if spec.kind == REMOTE else "tiers"
    try:
        tier = open_tier(spec, setup)
    except ConfigError as error:
        return fail(name, str(error), f"correct the setting {setting}, or leave the tier out")
    ailment, num_places = tier.ailment, tier.num_places
    refusal = getattr(tier, "refusal_to_write", "")
    tier.close(_CLOSE_SECONDS)
    if ailment and spec.kind == REMOTE:
        return fail(
            name,
            f"{spec}: cannot be used: {ailment}",
            "correct the address, its credentials or the server (docs: A store that servers share);"
            " a server starts without it and uses it once it answers",
        )
    if refusal and config.remote_mode != "read-only":
        return warn(
            name,
            f"{spec}: can be read, but takes no blocks: {refusal}",
            "make room or allow writes there, or set remote_mode = read-only",
        )
    if ailment:
        return warn(name, f"{spec}: cannot be used now: {ailment}", "repair it, or leave it out")
    kind = "finds blocks by their keys" if num_places is None else "has places for blocks"
    return ok(name, f"{spec}: can be opened, {kind}")
