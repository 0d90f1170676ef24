"""The backend under the name that vLLM has for the one of CPUs."""

from __future__ import annotations

from .backend import Backend


class CpuBackend(Backend):
    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"
