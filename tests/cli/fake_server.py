"""A server with OpenAI's completions that answers by rule, in threads of the test."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer:
    """
    says        the text of every answer
    seen        requests that were answered
    refuses     status codes of the next requests, each once
    hold_after  so many answers, then none: `held` is set when one waits
    together    answers wait until so many requests are under way
    """

    def __init__(self, context: int = 0) -> None:
        self.says = "x"
        self.seen: list[dict[str, Any]] = []
        self.refuses: list[int] = []
        self.hold_after: int | None = None
        self.held = threading.Event()
        self.together = 1
        self._context = context
        self._lock = threading.Condition()
        self._under_way = 0
        self._ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.refuses:
            return self.refuses.pop(0), {"error": "no such luck"}
        if self.hold_after is not None and len(self.seen) >= self.hold_after:
            self.held.set()
            self._ended.wait(60)
        with self._lock:
            self._under_way += 1
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._under_way % self.together == 0, timeout=20)
            self.seen.append(asked)
        return 200, {"choices": [{"text": self.says}], "usage": {"completion_tokens": 1}}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                model = {"id": "tiny", "max_model_len": fake._context or None}
                if self.path == "/v1/models":
                    self._send(200, {"data": [model]})
                else:
                    self._send(404, {"error": "nothing here"})

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                self._send(*fake._answer(json.loads(self.rfile.read(length))))

            def _send(self, status: int, what: dict[str, Any]) -> None:
                body = json.dumps(what).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:  # who asked was killed
                    pass

            def log_message(self, *_: object) -> None: ...

        return Handler
