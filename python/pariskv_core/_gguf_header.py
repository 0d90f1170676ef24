"""The header of a GGUF file: what it says of the model. Nothing of the weights is read."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from ._failures import CannotRunError

MAGIC = b"GGUF"
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 24  # of a string or an array; a tokenizer's are far shorter


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def bytes(self, count: int) -> bytes:
        if count > _LONGEST:
            raise ValueError("a length that cannot be")
        found = self._file.read(count)
        if len(found) != count:
            raise ValueError("it is cut short")
        return found

    def number(self, kind: int) -> Any:
        code = _NUMBERS.get(kind)
        if code is None:
            raise ValueError(f"a value of unknown type {kind}")
        return struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.bytes(self.number(10)).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, count = self.number(4), self.number(10)
            if count > _LONGEST:
                raise ValueError("a length that cannot be")
            return [self.value(of) for _ in range(count)]
        return self.number(kind)


def fields(path: Path) -> dict[str, Any]:
    """Every key and value of the header."""
    with path.open("rb") as file:
        reader = _Reader(file)
        try:
            if reader.bytes(4) != MAGIC:
                raise ValueError("it does not begin with GGUF")
            version = reader.number(4)
            if version not in (2, 3):
                raise ValueError(f"version {version}, expected 2 or 3")
            reader.number(10)  # tensors
            count = reader.number(10)
            found = {}
            for _ in range(count):
                key = reader.string()
                found[key] = reader.value(reader.number(4))
            return found
        except (ValueError, RecursionError) as reason:
            raise CannotRunError(f"{path} is not a GGUF file that can be read: {reason}") from None
