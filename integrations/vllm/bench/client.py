"""Requests to a server of vLLM's, streamed, and when their tokens came."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

_LONGEST_LINE = 1 << 22  # bytes


@dataclass
class Answer:
    """begin: seconds of a clock; times: of each token on it."""

    begin: float
    prompt: int
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.times[0] - self.begin

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()[:16]


class Client:
    def __init__(self, port: int, model: str = "m") -> None:
        self._port = port
        self._model = model

    async def ask(self, prompt: list[int], tokens: int) -> Answer:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        text = json.dumps(body).encode()
        answer = Answer(time.perf_counter(), len(prompt))
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=_LONGEST_LINE)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        )
        writer.write(head.encode() + text)
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {(await reader.read())[-500:]!r}")
        while line := await reader.readline():  # lines between are sizes of chunks
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            now = time.perf_counter()
            for choice in event["choices"]:
                new = choice.get("token_ids") or []
                answer.tokens += new
                answer.times += [now] * len(new)
        writer.close()
        if len(answer.tokens) != tokens:
            raise RuntimeError(f"expected {tokens} tokens, got {len(answer.tokens)}")
        return answer


async def at_once(
    asks: Iterable[Callable[[], Awaitable[Answer]]], most: int = 1 << 30
) -> list[Answer]:
    """All of these, so many at a time, in order."""
    room = asyncio.Semaphore(most)

    async def one(ask: Callable[[], Awaitable[Answer]]) -> Answer:
        async with room:
            return await ask()

    return list(await asyncio.gather(*(one(ask) for ask in asks)))


async def when_due(
    asks: Iterable[tuple[float, Callable[[], Awaitable[Answer]]]],
) -> list[Answer]:
    """Each so many seconds from now."""

    async def one(wait: float, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        await asyncio.sleep(wait)
        return await ask()

    return list(await asyncio.gather(*(one(wait, ask) for wait, ask in asks)))
