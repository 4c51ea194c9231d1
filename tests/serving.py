"""A real server in a process of its own, for tests: `outboard serve`, and ways to ask it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

OUTBOARD = str(Path(sys.executable).with_name("outboard"))


class Server:
    """A running `outboard serve`.

    Attributes:
        process: of the supervisor.
        url: of the API, without a path.
        admin_url: of administration; "" without.
    """

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        command = [OUTBOARD, "serve", *arguments, "--port", "0", "--log-level", "info"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._stderr, text=True, env={**os.environ, **(env or {})}
        )
        self.url = self.admin_url = ""

    def wait_until_it_serves(self, admin: bool = False) -> None:
        """Reads where it is."""
        assert self.process.stdout is not None
        for prefix in ("serving", *(["administration"] if admin else [])):
            line = self.process.stdout.readline()
            if prefix not in line:
                raise RuntimeError(f"it did not start: {line!r}\n{self.stderr()}")
            address = line.partition("http://")[2].partition("/")[0]
            if prefix == "serving":
                self.url = f"http://{address}"
            else:
                self.admin_url = f"http://{address}"

    def stderr(self) -> str:
        """What it has written so far."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Of the API."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM, and its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def close(self) -> None:
        """Ends whatever is left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._stderr.close()

    # --- asking ---

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 30.0
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and the answer, as JSON where it is."""
        return ask(self.url, method, path, body, headers, timeout)

    def admin(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """As `ask`, of administration; the answer alone, with its status if that is not 200."""
        status, _, answer = ask(self.admin_url, method, path, body, headers, 60.0)
        return answer if status == 200 else (status, answer)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        _, _, page = self.ask("GET", "/metrics")
        total = 0.0
        for line in str(page).splitlines():
            head, _, value = line.rpartition(" ")
            series, _, rest = head.partition("{")
            if series == f"outboard:{name}" and all(f'{key}="{wanted}"' in rest for key, wanted in labels.items()):
                total += float(value)
        return total

    def engine_pids(self) -> list[int]:
        """Of the engine cores that run."""
        return self._pids("outboard.engine")

    def api_pids(self) -> list[int]:
        """Of the API processes that run."""
        return self._pids("outboard.serve.api_process")

    def tree(self) -> list[psutil.Process]:
        """All processes below the supervisor."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def _pids(self, module: str) -> list[int]:
        found = []
        for child in self.tree():
            try:
                command = child.cmdline()
            except psutil.Error:
                continue
            if command[-2:] == ["-m", module] and "warden.py" not in " ".join(command):
                found.append(child.pid)
        return found


def ask(
    url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 30.0
) -> tuple[int, dict[str, str], Any]:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout)
    try:
        data = body if isinstance(body, (bytes, str)) or body is None else json.dumps(body)
        connection.request(method, path, data, headers or {})
        answer = connection.getresponse()
        text = answer.read().decode()
        known = {name.lower(): value for name, value in answer.getheaders()}
        kind = known.get("content-type", "")
        return answer.status, known, json.loads(text) if kind.startswith("application/json") else text
    finally:
        connection.close()


def events(text: str) -> list[Any]:
    """What a stream of server-sent events said; the end is "[DONE]"."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextmanager
def serving(*arguments: str, admin: bool = False, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server, for the length of a block; it must not have ended by itself, and leaves nothing."""
    if admin:
        arguments = (*arguments, "--admin-port", "0")
    server = Server(*arguments, env=env)
    try:
        server.wait_until_it_serves(admin)
        tree = server.tree()
        yield server
        if server.process.poll() is None:
            status = server.stop()
            assert status == 0, f"exit status {status}\n{server.stderr()}"
        _, alive = psutil.wait_procs(tree, timeout=5)
        assert not alive, f"processes left: {alive}"
    finally:
        server.close()


def eventually(condition: Any, timeout: float = 20.0) -> Any:
    """Waits until this is true, and returns it; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not so within {timeout} s"
        time.sleep(0.02)
