"""Long texts that every Python installation carries.

They differ a little between versions of Python, so a capture names its text by the SHA-256 of what
was read.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from pariskv_core.cli.document import documentation

_CODE_BYTES = 300_000


def code() -> str:
    """The sources of asyncio, file after file."""
    files = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    sources = b"".join(b"\n" + file.read_bytes() for file in files if file.stat().st_size > 0)
    return sources[:_CODE_BYTES].decode("utf-8", "replace")


# Any of them can be read by `--text`. What text of another structure does to a method is seen here.
TEXTS = {"documentation": documentation, "code": code}
