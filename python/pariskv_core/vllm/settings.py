"""Settings of the engine, from vLLM's own options.

--additional-config '{"pariskv": {...}}', or "kv_connector_extra_config" in --kv-transfer-config.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pariskv_core as pk
from pariskv_core._estimates import tells_errors

SECTION = "pariskv"  # of --additional-config
_POLICIES: dict[str, Callable[..., Any]] = {
    "pariskv": pk.ParisKV,
    "hardkv": pk.HardKV,
    "prkv": pk.PRKV,
}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True)
class Settings:
    """Fields of pk.Config under their names, and a few of the plugin's own.

    policy          a name, "pariskv", "hardkv" or "prkv", or {"name": ..., "top_k": ...}
    top_k, error    of ParisKV, as its own
    seed            the same; without one each sequence's tail is drawn by a secret
    dense_below     tokens, or "batch": a GPU decides by the batch of each step, as the kernels of
                    a server do anyway
    memory_budget   bytes, or as "60GB": on a GPU of its memory, on a CPU all there is
    host_budget     of host memory beside a GPU, of all ranks of this machine together
    report_error    each answer tells the error of its searches
    """

    policy: Any = None
    top_k: int | None = None
    error: float | None = None
    seed: int | None = None
    sink: int = -1
    local: int = -1
    update: int = -1
    dense_below: int | str = "batch"
    threads: int = 0
    memory_budget: int = 0
    host_budget: int = 0
    placement: str = "auto"
    row_cache: int = -1
    kv_dtype: str = "auto"
    report_error: bool = False

    def of_config(self) -> dict[str, Any]:
        """As keyword arguments of pk.Config; budgets and threads are a rank's, and not here."""
        names = ("sink", "local", "update", "dense_below", "placement", "row_cache", "kv_dtype")
        return {"policy": self._policy(), **{name: getattr(self, name) for name in names}}

    def _policy(self) -> Any:
        short = {
            name: getattr(self, name)
            for name in ("top_k", "error", "seed")
            if getattr(self, name) is not None
        }
        if self.policy is None or self.policy == "pariskv":
            return pk.ParisKV(**{"seed": None, **short})
        if short:
            raise ValueError(
                f"[vllm] {', '.join(short)}: expected it inside the policy that is given, as "
                '{"name": ..., "top_k": ...}'
            )
        if not isinstance(self.policy, str | Mapping):
            raise ValueError(f"[vllm] policy: expected {_listed(_POLICIES)}, got {self.policy}")
        fields = {"name": self.policy} if isinstance(self.policy, str) else dict(self.policy)
        name = str(fields.pop("name", "pariskv")).lower()
        if name not in _POLICIES:
            raise ValueError(f"[vllm] policy: expected {_listed(_POLICIES)}, got {name}")
        if name == "pariskv":
            fields.setdefault("seed", None)
        made = _POLICIES[name]
        known = [field for field in dir(made()) if isinstance(getattr(made, field), property)]
        strange = [field for field in fields if field not in known]
        if strange:
            raise ValueError(
                f"[vllm] policy: expected fields of {made.__name__}, {', '.join(known)}, "
                f"got {', '.join(strange)}"
            )
        try:
            return made(**fields)
        except TypeError:
            given = ", ".join(f"{field} {value!r}" for field, value in fields.items())
            raise ValueError(
                f"[vllm] policy: expected values of their types, got {given}"
            ) from None


def parse(*sources: Mapping[str, Any]) -> Settings:
    """Of several mappings; a name may be in one of them."""
    known = [field.name for field in dataclasses.fields(Settings)]
    found: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=3)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise ValueError(f"[vllm] settings: expected {', '.join(known)}, got {name}{hint}")
            if name in found:
                raise ValueError(f"[vllm] {name}: expected it once, got it in two places")
            found[name] = _size(name, value) if name.endswith("_budget") else value
    try:
        settings = Settings(**found)
        fields = settings.of_config()
        checked = {**fields, "threads": settings.threads}
        pk.Config(layers=1, query_heads=1, kv_heads=1, head_dim=64, **checked)
    except TypeError as reason:
        raise ValueError(f"[vllm] settings: expected values of their types: {reason}") from None
    policy = fields["policy"]
    if not isinstance(settings.report_error, bool):
        given = settings.report_error
        raise ValueError(f"[vllm] report_error: expected true or false, got {given}")
    if settings.report_error and not tells_errors(policy):
        raise ValueError(
            "[vllm] report_error: expected a policy that estimates its error: pariskv with tail "
            '"sample" and group_rule "attention_mass"'
        )
    if isinstance(policy, pk.HardKV) and policy.placement == "dropped":
        raise ValueError(
            '[vllm] policy: expected placement "host", got "dropped": requests that follow could '
            "not share rows that are gone"
        )
    return settings


def _size(name: str, value: Any) -> int:
    text = str(value).strip().upper().replace(" ", "")
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.endswith(unit)), "")
    try:
        size = int(float(text.removesuffix(unit)) * _UNITS.get(unit, 1))
        if not 0 <= size < 1 << 63:
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(f'[vllm] {name}: expected bytes, or as "60GB", got {value}') from None
    return size


def _listed(names: Mapping[str, Any]) -> str:
    return " or ".join(f'"{name}"' for name in names)
