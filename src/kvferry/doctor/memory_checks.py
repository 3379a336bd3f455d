"""Host memory: how much there is, what limits it, and how fast it can be made ready."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.config import Config
from kvferry.doctor.environment import Environment
from kvferry.doctor.finding import Finding, fail, ok, warn
from kvferry.errors import ConfigError
from kvferry.quantities import GiB, format_size
from kvferry.setting_kinds import AUTO
from kvferry.tiers.limits import size_for

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
