"""A server of what the page at /ui asks for: figures that move, and a model whose answers the test writes."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["FILES", "Engine", "UiServer"]

FILES = Path(__file__).parents[2] / "src/outboard/serve/ui"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
STATES = ("STARTING", "READY", "STALLED", "RESTARTING", "DEAD", "STOPPED")
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0)


class Engine:
    """What is told of one rank."""

    def __init__(self, state: str = "READY", *, pid: int = 4000, incarnation: int = 1, restarts: int = 0) -> None:
        self.state = state
        self.pid = pid
        self.incarnation = incarnation
        self.restarts = restarts


class Histogram:
    """Counts that grow with time, around a middle that moves."""

    def __init__(self, name: str, middle: float) -> None:
        self.name = name
        self.middle = middle
        self.counts: Counter[float] = Counter()

    def add(self, count: int, now: float) -> None:
        middle = self.middle * (1.3 + math.sin(now / 9))
        for index in range(count):
            value = middle * (0.5 + 1.5 * index / max(1, count))
            self.counts[next((bound for bound in BOUNDS if value <= bound), math.inf)] += 1

    def lines(self) -> Iterator[str]:
        sum_of = 0
        for bound in (*BOUNDS, math.inf):
            sum_of += self.counts[bound]
            label = "+Inf" if bound == math.inf else str(bound)
            yield f'{self.name}_bucket{{model_name="stub",le="{label}"}} {sum_of}'
        yield f'{self.name}_count{{model_name="stub"}} {sum_of}'


class UiServer:
    """Listens on 127.0.0.1. A test sets `engines`, `key`, `pieces`, `hold` and `refusal`, and reads what was asked."""

    def __init__(self) -> None:
        self.engines = {"0": Engine(pid=4000), "1": Engine(pid=4001)}
        self.models = ["stub", "other"]
        self.key: str | None = None
        self.open_metrics = False  # /metrics needs no key
        self.pieces = ["Hal", "lö."]
        self.error: str | None = None  # an error event ends the answer
        self.refusal: tuple[int, str] | None = None  # instead of an answer
        self.pause = 0.0  # seconds between pieces
        self.hold = threading.Event()  # while it is clear, an answer waits after its pieces
        self.hold.set()
        self.ended_by_client = threading.Event()  # an answer that was held has lost its reader
        self.chats: list[dict[str, Any]] = []
        self.requests: Counter[str] = Counter()
        self.busy = True  # whether counters grow
        self._totals: Counter[str] = Counter()
        self._histograms = [
            Histogram("outboard:time_to_first_token_seconds", 0.06),
            Histogram("outboard:request_time_per_output_token_seconds", 0.012),
            Histogram("outboard:e2e_request_latency_seconds", 0.7),
        ]
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._port = 0
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen; on the port of before, if it has listened before."""
        self._server = _Server(("127.0.0.1", self._port), _Handler)
        self._server.of = self
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        """End all connections, and listen no more."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join(10)
        self._server.end_connections()
        self._server.server_close()
        self._server = self._thread = None

    def metrics(self) -> str:
        with self._lock:
            now = time.monotonic()
            passed, self._looked = now - self._looked, now
            return "\n".join(self._lines(now, passed if self.busy else 0.0)) + "\n"

    def _lines(self, now: float, passed: float) -> Iterator[str]:
        wave = 1.2 + math.sin(now / 7)
        requests = round(passed * 8 * wave)
        growth = {"prompt_tokens": 900 * wave * passed, "generation_tokens": 300 * wave * passed}
        for name, more in growth.items():
            self._totals[name] += round(more)
            yield f"# TYPE outboard:{name}_total counter"
            yield f'outboard:{name}_total{{model_name="stub"}} {self._totals[name]}'
        self._totals["stop"] += requests
        yield f'outboard:request_success_total{{finished_reason="stop",model_name="stub"}} {self._totals["stop"]}'
        yield 'outboard:request_success_total{finished_reason="length",model_name="stub"} 3'
        yield 'outboard:requests_refused_total{reason="a \\"quoted\\" } reason",model_name="stub"} 7'
        for histogram in self._histograms:
            histogram.add(requests, now)
            yield from histogram.lines()
        for rank, engine in self.engines.items():
            labels = f'engine="{rank}",model_name="stub"'
            serves = engine.state == "READY"
            self._totals[f"steps-{rank}"] += round(passed * 80 * wave) if serves else 0
            for state in STATES:
                yield f'outboard:engine_state{{{labels},state="{state}"}} {float(state == engine.state)}'
            for name, value in {
                "num_requests_running": round(6 * wave) if serves else 0,
                "num_requests_waiting": max(0, round(9 * (wave - 1.4))),
                "kv_cache_usage_perc": 0.35 * wave if serves else 0,
                "engine_pid": engine.pid,
                "engine_incarnation": engine.incarnation,
                "engine_last_step_age_seconds": 0.012 if serves else 42.5,
                "engine_steps_total": self._totals[f"steps-{rank}"],
                "engine_restarts_total": engine.restarts,
                "engine_stalls_total": 0,
            }.items():
                yield f"outboard:{name}{{{labels}}} {value}"


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    allow_reuse_address = True
    of: UiServer

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ending = threading.Event()
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        self.ending.set()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Browsers close connections as they like."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    disable_nagle_algorithm = True
    timeout = 20  # browsers open connections ahead, and may not use them

    def log_message(self, format: str, *args: Any) -> None:
        """Tests print nothing."""

    def do_GET(self) -> None:
        of = self.server.of
        of.requests[self.path] += 1
        if self.path.startswith("/ui/"):
            path = FILES / (self.path.removeprefix("/ui/") or "index.html")
            if path.parent == FILES and path.is_file():
                self._answer(200, TYPES[path.suffix], path.read_bytes())
            else:
                self._answer(404, "text/plain", b"not found")
        elif self._allowed():
            if self.path == "/metrics":
                self._answer(200, "text/plain; version=0.0.4; charset=utf-8", of.metrics().encode())
            elif self.path == "/v1/models":
                self._json(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in of.models]})
            else:
                self._answer(404, "text/plain", b"not found")

    def do_POST(self) -> None:
        of = self.server.of
        of.requests[self.path] += 1
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._allowed():
            return
        of.chats.append(json.loads(body))
        if of.refusal is not None:
            status, message = of.refusal
            self._json(status, {"error": {"message": message, "type": "overloaded", "param": None, "code": None}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for piece in of.pieces:
            self.server.ending.wait(of.pause)
            self._event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
        while not of.hold.wait(0.02):
            try:
                self.wfile.write(b": still here\n\n")
            except OSError:
                of.ended_by_client.set()
                return
            if self.server.ending.is_set():
                return
        if of.error is not None:
            self._event({"error": {"message": of.error}})
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2 * len(of.pieces)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _allowed(self) -> bool:
        key = self.server.of.key
        is_open = key is None or (self.path == "/metrics" and self.server.of.open_metrics)
        if is_open or self.headers["Authorization"] == f"Bearer {key}":
            return True
        self._json(401, {"error": {"message": "no valid API key", "type": "invalid_request_error"}})
        return False

    def _event(self, event: dict[str, Any]) -> None:
        """In pieces: an event, a character of several bytes and the end of a line may each come in two."""
        line = f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode()
        middle = next((place for place, byte in enumerate(line) if byte >= 0xC0), len(line) // 2) + 1
        for part in (line[:middle], line[middle:-3], line[-3:]):
            self.wfile.write(part)
            time.sleep(0.005)

    def _json(self, status: int, value: Any) -> None:
        self._answer(status, "application/json", json.dumps(value).encode())

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
