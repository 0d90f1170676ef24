"""Configs from one flat dictionary of settings, as tables of experiments have them."""

from __future__ import annotations

from typing import Any

import pariskv_core as pk

_POLICY = tuple(pk.ParisKV().__getstate__())

# Codes of whole keys, and nothing of what is not selected.
WHOLE_KEYS: dict[str, Any] = {"block": 0, "tail": "none"}


def make(**fields: Any) -> pk.Config:
    """A Config whose policy has the settings among `fields` that are ParisKV's."""
    own = {name: fields.pop(name) for name in _POLICY if name in fields}
    return pk.Config(**fields, policy=pk.ParisKV(**own))
