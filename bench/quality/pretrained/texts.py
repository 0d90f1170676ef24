"""Long texts that every Python installation carries.

They differ a little between versions of Python, so a capture names its text by the SHA-256 of what
was read.
"""

from __future__ import annotations

from pariskv_core.cli.document import documentation

from quality import text

_CODE_BYTES = 300_000


def code() -> str:
    """The sources of asyncio, file after file."""
    zones = text.held_out_zones(_CODE_BYTES)
    first = next(zone for zone in zones if zone.name.startswith("asyncio"))
    source = first.text.tobytes().decode("utf-8", "replace")
    return source.replace(text.SEPARATOR.decode(), "\n")


TEXTS = {"documentation": documentation, "code": code}
