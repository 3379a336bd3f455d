"""Everything the checks know about the machine comes through here, so a test can be any machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata

from kvferry.config import Config
from kvferry.core.quantities import GiB, MiB, format_size
from kvferry.errors import ConfigError
from kvferry.hostmem.limits import Machine, size_for
from kvferry.settings.kinds import AUTO
from kvferry.tools.doctor.drive import DriveFacts, look_at_drive
from kvferry.tools.doctor.finding import Finding, fail, ok, warn
from kvferry.tools.doctor.reach import look_at_reach
from kvferry.transfer.driver.base import BatchForm, DeviceIdentity, Driver, Priority
from kvferry.transfer.driver.opening import open_driver
from kvferry.transfer.planner.profile import load_profile, profile_file

_WAKE_BYTES = 32 * MiB
_WAKE_COPIES = 24


@dataclass(frozen=True)
class Gpu:
    """One card as its driver describes it. ``speed`` and ``width`` are the link's under load.

    None where the kernel does not say (guests often hide it).
    """

    identity: DeviceIdentity
    batch_form: BatchForm
    speed: str | None = None
    width: str | None = None
    max_speed: str | None = None
    max_width: str | None = None
    is_cuda: bool = True


@dataclass(frozen=True)
class Environment:
    """How the machine is asked. Owns nothing; every answer is read anew.

    ``gpu`` raises OSError or DriverError where there is none. ``package`` answers a package's
    version, ``plugins`` the names under an entry point, ``room`` the total and free bytes of a
    file system, each None where there is none. ``drive`` measures the drive under a directory,
    ``reach`` says by which way a child reaches our memory (empty: by none).
    """

    machine: Machine = field(default_factory=Machine)
    python: tuple[int, int] = (sys.version_info[0], sys.version_info[1])
    gpu: Callable[[], Gpu] = lambda: look_at_gpu(0)
    cards: Callable[[], tuple[str, ...]] = lambda: find_cards()
    package: Callable[[str], str | None] = lambda name: package_version(name)
    plugins: Callable[[str], tuple[str, ...]] = lambda group: plugin_names(group)
    room: Callable[[str], tuple[int, int] | None] = lambda path: room_of(path)
    drive: Callable[[str], DriveFacts] = lambda directory: look_at_drive(directory)
    reach: Callable[[], str] = lambda: look_at_reach()
    processors: Callable[[], frozenset[int]] = lambda: frozenset(os.sched_getaffinity(0))
    has_profile: Callable[[DeviceIdentity, Collection[str]], bool] = lambda gpu, paths: (
        load_profile(profile_file(gpu, paths), paths) is not None
    )
    config: Callable[[Mapping[str, str]], Config] = lambda env: Config.load(env=env)

    @property
    def env(self) -> Mapping[str, str]:
        return self.machine.env

    def read(self, path: str) -> str | None:
        """A file's text, or None where it cannot be read."""
        return self.machine.read(path)


def look_at_gpu(device: int) -> Gpu:
    """Open the driver, wake the link with a few copies, and read what it rose to."""
    driver = open_driver(device)
    try:
        identity = driver.identity()
        folder = f"/sys/bus/pci/devices/{_sysfs_name(identity.pci_bus_id)}"
        names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
        with driver.current():
            speed, width, max_speed, max_width = _copying(
                driver, lambda: [_said(f"{folder}/{name}") for name in names]
            )
        return Gpu(
            identity=identity,
            batch_form=driver.batch_form,
            speed=speed,
            width=width,
            max_speed=max_speed,
            max_width=max_width,
            is_cuda=type(driver).__name__ == "CudaDriver",
        )
    finally:
        driver.close()


def _copying(driver: Driver, look: Callable[[], list[str | None]]) -> list[str | None]:
    """Look while copies run: an idle card lowers its link, which says nothing about its health."""
    stream = driver.create_stream(Priority.LOW)
    host = driver.alloc_host(_WAKE_BYTES)
    device = driver.alloc_device(_WAKE_BYTES)
    try:
        driver.copy_async(device, host, _WAKE_BYTES, stream)
        driver.synchronize_stream(stream)  # long enough for the link to rise
        for _ in range(_WAKE_COPIES):
            driver.copy_async(device, host, _WAKE_BYTES, stream)
        return look()
    finally:
        driver.synchronize_stream(stream)
        driver.free_device(device)
        driver.free_host(host)
        driver.destroy_stream(stream)


def find_cards() -> tuple[str, ...]:
    """Device files of GPUs, whether or not a driver can be loaded for them."""
    try:
        names = os.listdir("/dev")
    except OSError:
        return ()
    nvidia = {name for name in names if name.startswith("nvidia") and name[6:].isdigit()}
    return tuple(sorted(f"/dev/{name}" for name in nvidia | ({"kfd"} & set(names))))


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def plugin_names(group: str) -> tuple[str, ...]:
    return tuple(sorted({entry.name for entry in metadata.entry_points(group=group)}))


def room_of(path: str) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


def _said(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read().strip()
    except OSError:
        return None
    return None if not text or text.lower().startswith("unknown") or text in ("0", "255") else text


def _sysfs_name(bus_id: str) -> str:
    """The driver may write the domain with eight digits, the kernel uses four."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


# ------------------------------------------------------------------------------------------------
# Host memory: how much there is, what limits it, and how fast it can be made ready.

_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
_LEAST_SHM = 1 * GiB


def check_memory(env: Environment, config: Config) -> Iterator[Finding]:
    """Whether what the settings ask for can be had."""
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
                f"{_shown(size)}{each} are asked for, and nothing here says how much there is",
                "let the process read /proc/meminfo and its cgroup, or make sure of it yourself",
            )
    yield from _container(env)
    asked = config.host if isinstance(config.host, int) else size
    yield _memlock(env, config, asked)
    yield _shm(env)
    yield _huge_pages(env)


def _container(env: Environment) -> Iterator[Finding]:
    for limit in env.machine.limits():
        if limit.name.startswith("the container"):
            yield ok("container", f"{_shown(limit.left)} left of {_shown(limit.total)}")
            return


def _memlock(env: Environment, config: Config, asked: int | None) -> Finding:
    """``asked`` is None where it was left to us, and we could not tell either."""
    limit = env.machine.memlock()
    if limit is None:
        return ok("locked memory", "no limit")
    if config.host_pin == "never":
        return ok("locked memory", f"at most {_shown(limit)}; none is asked for")
    if asked is not None and limit >= asked:
        return ok("locked memory", f"at most {_shown(limit)}, which is enough")
    size = "nobody knows how much" if asked is None else _shown(asked)
    # Not a failure even where pinning is required: CUDA does not count what it pins.
    return warn(
        "locked memory",
        f"at most {_shown(limit)} may be locked, {size} are asked for; CUDA does not count "
        "what it pins, other drivers may",
        "if pinning fails: ulimit -l unlimited; docker run --ulimit memlock=-1; systemd "
        "LimitMEMLOCK=infinity; in Kubernetes add the capability IPC_LOCK",
    )


def _shm(env: Environment) -> Finding:
    room = env.room("/dev/shm")
    remedy = "docker run --shm-size=2g (or --ipc=host); in Kubernetes mount an emptyDir with "
    remedy += "medium: Memory at /dev/shm"
    if room is None:
        return fail("/dev/shm", "cannot be used: engines with several processes need it", remedy)
    total, free = room
    if free < _LEAST_SHM:
        return warn(
            "/dev/shm",
            f"{_shown(free)} free of {_shown(total)}: engines with several processes need more",
            remedy,
        )
    return ok("/dev/shm", f"{_shown(free)} free of {_shown(total)}")


def _huge_pages(env: Environment) -> Finding:
    text = env.read(_THP)
    if text is None:
        return ok("huge pages", "this kernel does not say")
    if "[never]" in text:
        return warn(
            "huge pages",
            "off: host memory takes about twice as long to become ready",
            f"echo madvise > {_THP}",
        )
    return ok("huge pages", text[text.find("[") + 1 : text.find("]")])


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / GiB:.1f} GiB" if num_bytes >= GiB else format_size(num_bytes)
