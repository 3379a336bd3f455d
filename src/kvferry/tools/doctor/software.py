"""Python, the settings, and vLLM with our connector in it."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.config import Config
from kvferry.connectors.vllm import CONNECTOR_NAME
from kvferry.connectors.vllm.versions import Standing, refusal, seeds_are_fixed, standing
from kvferry.errors import ConfigError
from kvferry.tools.doctor.finding import Finding, fail, ok, warn
from kvferry.tools.doctor.machine import Environment

_OLDEST, _NEWEST = (3, 10), (3, 14)
_PLUGINS = "vllm.general_plugins"


def check_python(env: Environment) -> Finding:
    version = ".".join(map(str, env.python))
    if not _OLDEST <= env.python <= _NEWEST:
        return fail("python", f"{version} is not supported", "use Python 3.10 to 3.14")
    return ok("python", version)


def check_settings(env: Environment) -> tuple[Finding, Config]:
    """What the environment and a configuration file say; the defaults where that is refused."""
    try:
        config = env.config(env.env)
    except ConfigError as error:
        remedy = "correct the file or the variable; kvferry config shows them all"
        return fail("settings", str(error), remedy), Config()
    return ok("settings", "all can be read; kvferry config shows them"), config


def check_vllm(env: Environment, config: Config) -> Iterator[Finding]:
    """Whether vLLM would load our connector, and whether that connector knows this vLLM."""
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
            f"{version} is newer than what kvferry was tested with: it serves if vLLM's hooks for "
            "connectors have not changed, which it looks at when vLLM starts",
            'look for "kvferry is in service" in vLLM\'s log',
        )
    return ok("vllm", version)


def _connector(env: Environment) -> Finding:
    if CONNECTOR_NAME not in env.plugins(_PLUGINS):
        return fail(
            "connector",
            "kvferry is not among vLLM's plugins: its entry point is not installed",
            "install kvferry with pip into vLLM's environment; with a source tree on PYTHONPATH, "
            'say "kv_connector": "KvferryConnector" and "kv_connector_module_path": '
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
    """vLLM takes any text for a seed, and without one makes its own: see its ``NONE_HASH``."""
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
            "PYTHONHASHSEED is not set, and this vLLM then names the same blocks differently in "
            "every process: after a restart it finds nothing of what is on disk",
            "export PYTHONHASHSEED=0 for the server",
        )
    return warn(
        "hash seed",
        "PYTHONHASHSEED is not set, and this vLLM then names the same blocks differently in every "
        "process: routers that follow the events of several servers find no two blocks alike",
        "export PYTHONHASHSEED=0 for every server; a single one works without",
    )
