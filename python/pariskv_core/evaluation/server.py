"""A running server with OpenAI's completions: vLLM, llama-server, and others like them."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pariskv_core._failures import CannotRunError

_TRIES = 4  # of a request that a busy server refuses, or whose connection breaks
_BUSY = (429, 502, 503)
_ASK = 10  # seconds for what is no answer of a model
_LONGEST_REASON = 300
_PORTS = {"http": 80, "https": 443}

Job = TypeVar("Job")
Found = TypeVar("Found")


class Completion(NamedTuple):
    text: str
    tokens: int
    seconds: float
    error: dict[str, float] | None = None  # mean_error, worst_error, searched_tokens


class _Refused(Exception):
    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


@dataclass(frozen=True)
class Server:
    url: str  # without /v1
    model: str
    context: int  # tokens that it takes; 0: it does not say
    patience: float  # seconds that an answer may take

    @staticmethod
    def at(url: str, model: str | None, patience: float) -> Server:
        """Asks which models it serves. model: the one to use; None: the only one."""
        url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise CannotRunError(
                f"--server: expected an address like http://localhost:8000, got {url}"
            )
        try:
            found = _asked(url, "GET", "/v1/models", None, _ASK)
            models = {str(each["id"]): each for each in found["data"]}
        except (OSError, http.client.HTTPException) as reason:
            said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise CannotRunError(f"--server: no server answers at {url}: {said}") from None
        except (_Refused, KeyError, TypeError, ValueError) as reason:
            raise CannotRunError(
                f"--server: {url}/v1/models is not the list of a server with OpenAI's "
                f"completions: {str(reason)[:_LONGEST_REASON]}"
            ) from None
        if model is None and len(models) != 1:
            raise CannotRunError(
                f"--served-model: expected one of the models at {url}: {', '.join(models)}"
            )
        name = model or next(iter(models))
        if name not in models:
            raise CannotRunError(
                f"--served-model: the server at {url} serves {', '.join(models)}, not {name}"
            )
        context = int(models[name].get("max_model_len") or 0) or _slot(url)
        return Server(url, name, context, patience)

    def complete(self, ids: Sequence[int], most: int) -> Completion:
        """The likeliest tokens. Tokens are sent, so that no server adds its own to the prompt."""
        asked = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": most,
            "temperature": 0,
            "stream": False,
        }
        begin = time.perf_counter()
        found = self._insisted(json.dumps(asked))
        try:
            text = str(found["choices"][0]["text"])
        except (KeyError, IndexError, TypeError):
            raise CannotRunError(
                f"the server at {self.url} answers without a text: "
                f"{json.dumps(found)[:_LONGEST_REASON]}"
            ) from None
        tokens = int((found.get("usage") or {}).get("completion_tokens") or 0)
        # Where the engine's plugin for vLLM puts it: no other server has such a part.
        error = (found.get("kv_transfer_params") or {}).get("pariskv")
        return Completion(text, tokens, time.perf_counter() - begin, error)

    def _insisted(self, body: str) -> Any:
        for left in range(_TRIES - 1, -1, -1):
            try:
                return _asked(self.url, "POST", "/v1/completions", body, self.patience)
            except TimeoutError:
                raise CannotRunError(
                    f"the server at {self.url} has not answered in {self.patience:g} s; give it "
                    "fewer --requests at once, or more --patience"
                ) from None
            except _Refused as reason:
                if reason.status not in _BUSY or left == 0:
                    raise CannotRunError(
                        f"the server at {self.url} refuses a prompt ({reason.status}): {reason}"
                    ) from None
            except (OSError, http.client.HTTPException, ValueError) as reason:
                if left == 0:
                    said = str(reason) or type(reason).__name__
                    raise CannotRunError(
                        f"the server at {self.url} is gone: {said}; the same command goes on "
                        "where it stopped"
                    ) from None
            time.sleep(2.0 ** (_TRIES - 1 - left) / 4)
        raise AssertionError


def _asked(url: str, method: str, path: str, body: str | None, patience: float) -> Any:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    port = parts.port or _PORTS[parts.scheme]
    with contextlib.closing(kind(parts.hostname or "", port, timeout=patience)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request(method, parts.path + path, body, headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    if response.status != 200:
        raise _Refused(response.status, _reason(text))
    return json.loads(text)


def _reason(text: str) -> str:
    """What a server says is wrong: a message inside an object, or whatever it sent."""
    try:
        found = json.loads(text)
        found = found.get("error", found)
        said = str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        said = text
    return " ".join(said.split())[:_LONGEST_REASON]


def _slot(url: str) -> int:
    """Tokens of one of llama-server's slots; 0: another server."""
    try:
        found = _asked(url, "GET", "/props", None, _ASK)
        return int(found["default_generation_settings"]["n_ctx"])
    except (_Refused, OSError, http.client.HTTPException, KeyError, TypeError, ValueError):
        return 0


@dataclass(frozen=True)
class _Done(Generic[Job, Found]):
    job: Job
    found: Found | None
    failure: BaseException | None


def at_once(
    jobs: Iterable[Job], count: int, ask: Callable[[Job], Found]
) -> Iterator[tuple[Job, Found]]:
    """Answers as they come, of `count` requests at a time. Jobs are taken as requests begin.

    Threads do not keep the program from ending: Ctrl-C leaves the requests that run.
    """
    source, results = iter(jobs), queue.Queue[_Done[Job, Found]]()

    def run(job: Job) -> None:
        try:
            results.put(_Done(job, ask(job), None))
        except BaseException as reason:
            results.put(_Done(job, None, reason))

    running = 0
    for job in source:
        threading.Thread(target=run, args=(job,), daemon=True).start()
        running += 1
        if running == count:
            yield _taken(results)
            running -= 1
    for _ in range(running):
        yield _taken(results)


def _taken(results: queue.Queue[_Done[Job, Found]]) -> tuple[Job, Found]:
    done = results.get()
    if done.failure is not None:
        raise done.failure
    assert done.found is not None
    return done.job, done.found
