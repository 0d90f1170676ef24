"""Which policies estimate the rows that a step leaves out, and so know their error."""

from __future__ import annotations

from typing import Any

from pariskv_core import ParisKV


def tells_errors(policy: Any) -> bool:
    """Whether a step by this policy estimates rows, and so can tell its error."""
    if not isinstance(policy, ParisKV) or policy.group_rule != "attention_mass":
        return False
    blocks = policy.scorer == "sign_norm" and policy.block > 0
    return policy.tail == "sample" or (policy.tail == "own" and blocks)
