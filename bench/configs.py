"""Configs from one flat dictionary of settings, as tables of experiments have them."""

from __future__ import annotations

from typing import Any

import pariskv_core as pk

_POLICY = {name for name in dir(pk.ParisKV) if not name.startswith("_")} - {"replace"}


def make(**fields: Any) -> pk.Config:
    """A Config whose policy has the settings among `fields` that are ParisKV's."""
    own = {name: fields.pop(name) for name in _POLICY if name in fields}
    return pk.Config(**fields, policy=pk.ParisKV(**own))
