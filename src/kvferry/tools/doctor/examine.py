"""All checks in the order people read them. One that breaks is a finding, not the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvferry.tools.doctor.disk import check_disk, check_tiers
from kvferry.tools.doctor.finding import Finding, warn
from kvferry.tools.doctor.gpu import check_gpu
from kvferry.tools.doctor.machine import Environment, check_memory
from kvferry.tools.doctor.software import check_python, check_settings, check_vllm


def examine(env: Environment) -> list[Finding]:
    """Look at everything."""
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
        except Exception as error:  # a strange machine must not hide what else there is to say
            findings.append(
                warn(
                    name,
                    f"could not be looked at: {type(error).__name__}: {error}",
                    "report this with the output of kvferry doctor --json",
                )
            )
    return findings
