"""The checks of the doctor: functions that return findings. ``examine`` runs them all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from kvferry.config import Config
from kvferry.connectors.vllm import CONNECTOR_NAME
from kvferry.connectors.vllm.versions import Standing, refusal, seeds_are_fixed, standing
from kvferry.core.quantities import GiB, MiB, format_size, rounded_size
from kvferry.errors import ConfigError, DriverError
from kvferry.hostmem.limits import find_placement, parse_list, size_for
from kvferry.settings.copy_paths import path_names
from kvferry.settings.kinds import AUTO
from kvferry.settings.tiers import DISK, KEY_ENV, REMOTE, DiskSettings, TierSpec
from kvferry.tiers.contract import TierSetup
from kvferry.tiers.movers import open_tier
from kvferry.tools.doctor.drive import MOST_BYTES, DriveFacts, file_system, nearest_directory
from kvferry.tools.doctor.machine import Environment, Finding, Gpu, fail, ok, warn
from kvferry.transfer.driver import BatchForm

_OLDEST, _NEWEST = (3, 10), (3, 14)
_PLUGINS = "vllm.general_plugins"
_RELEASE = re.compile(r"Kernel Module\b.*?(\d+\.\d+(?:\.\d+)?)")
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}
"""By gigatransfers per second and lane."""
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
_LEAST_SHM = 1 * GiB


def examine(env: Environment) -> list[Finding]:
    """Run all checks. A check that breaks is a finding, not the end."""
    settings, config = check_settings(env)
    findings = [check_python(env), settings]
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


def check_python(env: Environment) -> Finding:
    version = ".".join(map(str, env.python))
    if not _OLDEST <= env.python <= _NEWEST:
        return fail("python", f"{version} is not supported", "use Python 3.10 to 3.14")
    return ok("python", version)


def check_settings(env: Environment) -> tuple[Finding, Config]:
    """Read the settings. Returns the defaults if they are refused."""
    try:
        config = env.config(env.env)
    except ConfigError as error:
        remedy = "correct the file or the variable; kvferry config shows them all"
        return fail("settings", str(error), remedy), Config()
    return ok("settings", "all can be read; kvferry config shows them"), config


def check_vllm(env: Environment, config: Config) -> Iterator[Finding]:
    """Whether vLLM would load the connector, and whether the connector knows this vLLM."""
    version = env.package("vllm")
    if version is None:
        yield ok("vllm", "not installed; the library works without")
        return
    yield _version(version)
    yield _connector(env)
    yield _hash_seed(env, version, config)


def _version(version: str) -> Finding:
    known = standing(version)
    if known is Standing.REFUSED:
        words, _, remedy = refusal(version).partition("; ")
        return fail("vllm", words, remedy)
    if known is Standing.NEWER:
        return warn(
            "vllm",
            f"{version} is newer than the tested versions: kvferry serves if vLLM's hooks for "
            "connectors are unchanged, which it checks when vLLM starts",
            'look for "kvferry is in service" in vLLM\'s log',
        )
    return ok("vllm", version)


def _connector(env: Environment) -> Finding:
    if CONNECTOR_NAME not in env.plugins(_PLUGINS):
        return fail(
            "connector",
            "kvferry is not among vLLM's plugins: its entry point is not installed",
            "install kvferry with pip into vLLM's environment; with a source tree on PYTHONPATH, "
            'set "kv_connector": "KvferryConnector" and "kv_connector_module_path": '
            '"kvferry.connectors.vllm.connector"',
        )
    allowed = env.env.get("VLLM_PLUGINS")
    if allowed is not None and CONNECTOR_NAME not in allowed.split(","):
        return fail(
            "connector",
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading kvferry",
            f"unset VLLM_PLUGINS, or add {CONNECTOR_NAME} to it",
        )
    return ok("connector", "vLLM finds it")


def _hash_seed(env: Environment, version: str, config: Config) -> Finding:
    """vLLM takes any text as seed, and without one makes its own: see its ``NONE_HASH``."""
    seed = env.env.get("PYTHONHASHSEED")
    if seed is not None:
        return ok("hash seed", f"PYTHONHASHSEED={seed}, for every process alike")
    if seeds_are_fixed(version):
        return ok(
            "hash seed",
            "not needed: this vLLM names blocks alike in every process, unless you chose xxhash "
            "for --prefix-caching-hash-algo",
        )
    if config.disk:
        return fail(
            "hash seed",
            "PYTHONHASHSEED is not set, so this vLLM names the same blocks differently in every "
            "process: after a restart it finds no block on disk",
            "export PYTHONHASHSEED=0 for the server",
        )
    return warn(
        "hash seed",
        "PYTHONHASHSEED is not set, so this vLLM names the same blocks differently in every "
        "process: routers that follow the events of several servers find no equal blocks",
        "export PYTHONHASHSEED=0 for every server; a single one works without",
    )


def check_gpu(env: Environment) -> Iterator[Finding]:
    """Check the card, its driver and link, and the packages that copy on it."""
    try:
        gpu = env.gpu()
    except (OSError, DriverError) as error:
        yield _without(env, str(error))
        return
    yield ok("gpu", gpu.identity.name)
    yield ok("driver", _driver_words(env, gpu))
    yield _batch(gpu)
    yield _link(gpu)
    yield _numa(env, gpu)
    yield from _packages(env, gpu)


def _without(env: Environment, error: str) -> Finding:
    cards = env.cards()
    if cards:
        return fail(
            "gpu",
            f"{', '.join(cards)} is there, but its driver cannot be used: {error}",
            "in a container, start it with the GPU's runtime (docker run --gpus all, Kubernetes "
            "resources.limits nvidia.com/gpu); else install the driver that belongs to the card",
        )
    remedy = "nothing to do for the demo or the library on CPU tensors; to serve a model, run this "
    return warn("gpu", f"none found ({error})", f"{remedy}on the machine with the GPU")


def _driver_words(env: Environment, gpu: Gpu) -> str:
    version = gpu.identity.driver_version
    release = _RELEASE.search(env.read("/proc/driver/nvidia/version") or "")
    words = f"for CUDA up to {version // 1000}.{version % 1000 // 10}"
    return f"{release[1]}, {words}" if release else words


def _batch(gpu: Gpu) -> Finding:
    if gpu.batch_form is not BatchForm.ABSENT:
        form = "eight" if gpu.batch_form is BatchForm.WITHOUT_FAIL_INDEX else "nine"
        return ok("batch copy", f"found, the form with {form} arguments")
    return warn(
        "batch copy",
        "this driver has no cuMemcpyBatchAsync: the dma path copies segment by segment",
        "update the driver to one for CUDA 12.8 or newer (570 on Linux); kernel and staged paths "
        "work without",
    )


def _link(gpu: Gpu) -> Finding:
    if not (gpu.speed and gpu.width and gpu.max_speed and gpu.max_width):
        return ok("link", "unknown, as usual in a guest; bench/copy_paths.py measures it")
    now, most = _link_words(gpu.speed, gpu.width), _link_words(gpu.max_speed, gpu.max_width)
    if _number(gpu.width) < _number(gpu.max_width):
        times = _number(gpu.max_width) / _number(gpu.width)
        return warn(
            "link",
            f"{now}, but the card supports {most}: copies take {times:.0f} times as long",
            "reseat the card, or move it to a slot with all lanes; look for slot bifurcation in "
            "the firmware's settings",
        )
    if _number(gpu.speed) < _number(gpu.max_speed):
        return warn(
            "link",
            f"{now} while copying, but the card supports {most}",
            "look for a limit on the link's generation in the firmware's settings, for a riser or "
            "switch of an older generation, and for corrected errors in dmesg",
        )
    return ok("link", f"{now}, its maximum")


def _link_words(speed: str, width: str) -> str:
    generation = _GENERATIONS.get(_number(speed))
    return f"PCIe generation {generation} x{width}" if generation else f"{speed} x{width}"


def _numa(env: Environment, gpu: Gpu) -> Finding:
    placement = find_placement(gpu.identity.pci_bus_id, env.read)
    here, node = env.processors(), placement.node
    if node is None or not placement.cpus or here & placement.cpus:
        return ok("numa", placement.words)
    distance = _distance(env, node, here)
    far = f" (distance {distance}, its own is 10)" if distance else ""
    return warn(
        "numa",
        f"this process runs on no processor of the GPU's node {node}{far}: copies cross nodes",
        f"start the engine near its GPU: numactl --cpunodebind={node} --membind={node}, or a "
        "Kubernetes topology manager policy of single-numa-node",
    )


def _distance(env: Environment, node: int, processors: frozenset[int]) -> int:
    """The largest distance from a node's memory to these processors, or 0 if it is unknown."""
    nodes = parse_list(env.read("/sys/devices/system/node/online") or "")
    distances = (env.read(f"/sys/devices/system/node/node{node}/distance") or "").split()
    far = 0
    for other, words in zip(nodes, distances, strict=False):  # offline nodes have no column
        cpus = parse_list(env.read(f"/sys/devices/system/node/node{other}/cpulist") or "")
        if words.isdigit() and processors & frozenset(cpus):
            far = max(far, int(words))
    return far


def _packages(env: Environment, gpu: Gpu) -> Iterator[Finding]:
    torch, triton = env.package("torch"), env.package("triton")
    if torch is None:
        yield fail("torch", "not installed", "pip install 'kvferry[gpu]'")
    elif "+cpu" in torch:
        remedy = "install the build for your driver, see https://pytorch.org/get-started"
        yield fail("torch", f"{torch} is a build without GPU support", remedy)
    else:
        yield ok("torch", torch)
    if triton is None:
        yield warn(
            "triton",
            "not installed: no kernel and staged paths, small segments copy at a fraction of the "
            "link's speed",
            "pip install 'kvferry[gpu]'",
        )
    else:
        yield ok("triton", triton)
    if env.has_profile(gpu.identity, path_names(with_kernels=triton is not None)):
        yield ok("calibration", "this machine has been measured")
    else:
        yield warn(
            "calibration",
            "this machine has not been measured: the first start takes a second longer",
            "kvferry calibrate, on an idle GPU",
        )


def _number(text: str) -> float:
    """The number at the start of a text, as in "32.0 GT/s PCIe", else 0."""
    found = re.match(r"[\d.]+", text)
    return float(found[0]) if found else 0.0


def check_memory(env: Environment, config: Config) -> Iterator[Finding]:
    """Check the size of host memory against the machine's limits."""
    num_ranks = env.machine.num_ranks_here()
    size: int | None = None
    try:
        size = size_for(config.host, env.machine, num_ranks=num_ranks)
    except ConfigError as error:
        words, _, remedy = str(error).partition(" Remedy: ")
        yield fail("host memory", words, remedy or "give a size that fits, such as host = 8GiB")
    else:
        auto = " (auto)" if config.host is AUTO else ""
        each = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
        if env.machine.limits():
            yield ok("host memory", f"{_shown(size)}{auto}{each} fits")
        else:
            yield warn(
                "host memory",
                f"{_shown(size)}{each} are needed, and the machine's memory is unknown here",
                "let the process read /proc/meminfo and its cgroup, or make sure of it yourself",
            )
    limits = env.machine.limits()
    for limit in [limit for limit in limits if limit.name.startswith("the container")][:1]:
        yield ok("container", f"{_shown(limit.left)} left of {_shown(limit.total)}")
    yield _memlock(env, config, config.host if isinstance(config.host, int) else size)
    yield _shm(env)
    yield _huge_pages(env)


def _memlock(env: Environment, config: Config, asked: int | None) -> Finding:
    """Check the limit of locked memory. ``asked`` is None if the size is unknown."""
    limit = env.machine.memlock()
    if limit is None:
        return ok("locked memory", "no limit")
    if config.host_pin == "never":
        return ok("locked memory", f"at most {_shown(limit)}; none is needed")
    if asked is not None and limit >= asked:
        return ok("locked memory", f"at most {_shown(limit)}, which is enough")
    size = "an unknown size" if asked is None else _shown(asked)
    # Not a failure even if pinning is required: CUDA does not count pinned memory.
    return warn(
        "locked memory",
        f"at most {_shown(limit)} may be locked, and {size} is needed; CUDA does not count "
        "pinned memory, other drivers may",
        "if pinning fails: ulimit -l unlimited; docker run --ulimit memlock=-1; systemd "
        "LimitMEMLOCK=infinity; in Kubernetes add the capability IPC_LOCK",
    )


def _shm(env: Environment) -> Finding:
    room = env.room("/dev/shm")
    remedy = "docker run --shm-size=2g (or --ipc=host); in Kubernetes mount an emptyDir with "
    remedy += "medium: Memory at /dev/shm"
    if room is None:
        return fail("/dev/shm", "cannot be used: engines with several processes need it", remedy)
    words = f"{_shown(room[1])} free of {_shown(room[0])}"
    if room[1] >= _LEAST_SHM:
        return ok("/dev/shm", words)
    return warn("/dev/shm", f"{words}: engines with several processes need more", remedy)


def _huge_pages(env: Environment) -> Finding:
    text = env.read(_THP)
    if text is None:
        return ok("huge pages", "unknown: this kernel does not report them")
    if "[never]" in text:
        words = "off: host memory takes about twice as long to become ready"
        return warn("huge pages", words, f"echo madvise > {_THP}")
    return ok("huge pages", text[text.find("[") + 1 : text.find("]")])


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / GiB:.1f} GiB" if num_bytes >= GiB else format_size(num_bytes)


_FAR = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "fuse.sshfs", "lustre", "glusterfs")
_MEMORY = ("is memory: its blocks take memory and end with the machine", "name a drive's directory")
_UNFIT = {
    "tmpfs": _MEMORY,
    "ramfs": _MEMORY,
    "overlay": (
        "is the container's own layer: slow, and gone with the container",
        "mount a volume: docker run -v, or a Kubernetes volume as in deploy/kubernetes",
    ),
    **dict.fromkeys(
        _FAR,
        (
            "is on another machine: its locks and syncs may be unreliable",
            "name a directory on a local drive",
        ),
    ),
}
"""File systems that are unfit: why, and the remedy."""

_SLOW = 500 * MiB
"""Bytes per second. Computing is often faster than a slower drive."""

_BLOCK_BYTES = 4096
"""A small block. Only the engine knows its own size."""

_CLOSE_SECONDS = 1.0


def check_disk(env: Environment, config: Config) -> Iterator[Finding]:
    """Check each directory of the disk, its key, and its processes."""
    settings = config.disk_settings
    if settings is None:
        return
    for directory in settings.directories:
        yield from _directory(env, settings, directory)
    yield _key(env, settings)
    yield _checksums(env)
    yield _processes(env)


def _directory(env: Environment, settings: DiskSettings, directory: str) -> Iterator[Finding]:
    name = f"disk {directory}"
    here = nearest_directory(directory)
    kind = file_system(here, env.read("/proc/self/mountinfo") or "")
    yield _kind(name, directory, here, kind)
    room = env.room(here)
    yield _space(name, settings, room)
    if room is None or room[1] < settings.keep_free + 2 * MOST_BYTES:
        return
    yield _speed(name, here, env.drive(here))


def _kind(name: str, directory: str, here: str, kind: str) -> Finding:
    kind = kind or "a file system that the kernel does not name"
    if here != directory:
        return warn(
            name,
            f"it does not exist yet; it would be made in {here}, on {kind}",
            "mount the drive and make the directory, or do nothing if this place is right",
        )
    if kind in _UNFIT:
        words, remedy = _UNFIT[kind]
        return warn(name, f"{kind} {words}", remedy)
    return ok(name, f"on {kind}")


def _space(name: str, settings: DiskSettings, room: tuple[int, int] | None) -> Finding:
    name = f"{name}: space"
    if room is None:
        return fail(name, "it cannot be read", "make the directory readable")
    share = settings.size // len(settings.directories)
    usable = room[1] - settings.keep_free
    words = f"{rounded_size(room[1])} free of {rounded_size(room[0])}"
    if usable <= 0:
        return fail(
            name,
            f"{words}, and disk_keep_free is {rounded_size(settings.keep_free)}: no more blocks "
            "can be stored here",
            "make room, or lower disk_keep_free",
        )
    if usable < share:
        return warn(
            name,
            f"{words}; disk_size is {rounded_size(share)} here, disk_keep_free "
            f"{rounded_size(settings.keep_free)}",
            f"fine if kvferry's own blocks take the rest; else set disk_size to "
            f"{rounded_size(usable * len(settings.directories))} or less",
        )
    return ok(name, f"{words}; up to {rounded_size(share)} will be used")


def _speed(name: str, here: str, facts: DriveFacts) -> Finding:
    name = f"{name}: drive"
    if facts.error:
        return fail(
            name,
            f"a file in {here} could not be written and read: {facts.error}",
            "let the user of the engine write there; check the drive (dmesg)",
        )
    assert facts.read_rate is not None
    assert facts.write_rate is not None
    words = (
        f"{rounded_size(int(facts.read_rate))}/s read, {rounded_size(int(facts.write_rate))}/s "
        "written"
    )
    if not facts.is_direct:
        return warn(
            name,
            f"{words}, through the page cache: this file system has no direct I/O",
            "fine for a trial; to serve, use ext4 or xfs on a local drive",
        )
    if facts.read_rate < _SLOW:
        return warn(
            name,
            f"{words}, past the page cache",
            "a GPU computes most prompts faster than such a drive reads them: use NVMe",
        )
    return ok(name, f"{words}, past the page cache")


def _key(env: Environment, settings: DiskSettings) -> Finding:
    try:
        key = settings.read_key(env.env)
    except ConfigError as error:
        return fail("disk encryption", str(error), "correct the key, or leave it out")
    if key is None:
        return ok("disk encryption", "off: prompts can be read from the drive")
    if env.package("cryptography") is None:
        return fail(
            "disk encryption",
            "a key is given, but the package cryptography is not installed",
            "pip install 'kvferry[disk-encryption]'",
        )
    where = "disk_key_file" if settings.key_file is not None else KEY_ENV
    return ok("disk encryption", f"on, AES-GCM with the key of {where}")


def _checksums(env: Environment) -> Finding:
    if env.package("xxhash") is None:
        return fail(
            "disk checksums", "the package xxhash is not installed", "pip install 'kvferry[disk]'"
        )
    return ok("disk checksums", "xxh3-128")


def _processes(env: Environment) -> Finding:
    way = env.reach()
    if not way:
        return fail(
            "disk processes",
            "a process that the engine starts cannot reach its memory, so no block can be moved",
            "in a container, allow process_vm_readv and process_vm_writev (docker run "
            "--cap-add SYS_PTRACE), or mount /proc without hidepid",
        )
    if way != "process_vm":
        return warn(
            "disk processes",
            f"the engine's memory is reached through {way}: slower than process_vm_readv, which "
            "is forbidden here",
            "in a container, docker run --cap-add SYS_PTRACE, or a seccomp profile that allows it",
        )
    return ok("disk processes", "they reach the engine's memory by process_vm_readv")


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
        shared_namespace=bytes(32),  # no server uses it
        remote=config.remote_settings,
    )
    setting = REMOTE if spec.kind == REMOTE else "tiers"
    try:
        tier = open_tier(spec, setup)
    except ConfigError as error:
        return fail(name, str(error), f"correct the setting {setting}, or leave the tier out")
    ailment, num_places = tier.ailment, tier.num_places
    tier.close(_CLOSE_SECONDS)
    if ailment:
        return warn(name, f"{spec}: cannot be used now: {ailment}", "repair it, or leave it out")
    kind = "finds blocks by their keys" if num_places is None else "has places for blocks"
    return ok(name, f"{spec}: can be opened, {kind}")
