"""Eviction policies and their contract, admission, and the choice between loading and computing.

Pools own slots, claims and pins; a policy only orders cached blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from kvferry.cache.policies.contract import EvictionPolicy, EvictionPolicyMaker, Residents
from kvferry.core.quantities import find_factory
from kvferry.errors import ConfigError
from kvferry.settings.eviction import POLICIES, read_policy

_VERBS = ("insert", "use", "keep", "put_back", "take", "peek", "holds", "discard", "clear")


def policy_named(policy: str) -> EvictionPolicyMaker:
    """Return the maker of this policy: ``Pool(num_slots, policy_named(config.policy))``.

    Raises ConfigError, with the policy and the reason, where it cannot be found. The maker raises
    ConfigError where the policy cannot be made or breaks the contract.
    """
    policy = read_policy("policy", policy)
    make: Callable[[Residents], Any] = find_factory(
        POLICIES.get(policy, policy), what=f"policy: {policy}", where="scheduler runs"
    )

    def made(residents: Residents) -> EvictionPolicy:
        try:
            found = make(residents)
        except Exception as error:  # whatever a plugin's factory raises
            raise ConfigError(
                f"policy: {policy} could not be made: {type(error).__name__}: {error}"
            ) from error
        wrong = _what_is_wrong(found)
        if wrong:
            raise ConfigError(
                f"policy: {policy} gave {type(found).__name__}, which is no eviction policy: "
                f"{wrong} (see kvferry.engine.EvictionPolicy)"
            )
        return cast(EvictionPolicy, found)

    return made


def _what_is_wrong(policy: Any) -> str:
    """Say which methods of the contract an object lacks; empty if none."""
    lacking = [verb for verb in _VERBS if not callable(getattr(policy, verb, None))]
    return f"it lacks {', '.join(lacking)}" if lacking else ""
