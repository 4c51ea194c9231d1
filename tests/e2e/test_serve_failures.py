"""The server while something ends, hangs or misbehaves: every request has an answer, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving import OUTBOARD, Server, ask, events, eventually, serving
from support import ONE_LOOP, Run

MOCK = ("mock", "--option", "step_ms=2", "--option", "max_model_len=65536")
pytestmark = pytest.mark.no_cover  # servers are other processes

LONG = {"prompt": "x", "max_tokens": 60_000, "stream": True}
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class Asking(threading.Thread):
    """A request in a thread of its own."""

    def __init__(self, server: Server, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        super().__init__()
        self._ask = (server, body, headers)
        self.answer: tuple[int, dict[str, str], Any] | Exception | None = None
        self.start()

    def run(self) -> None:
        server, body, headers = self._ask
        try:
            self.answer = server.ask("POST", "/v1/completions", body, headers, timeout=60)
        except Exception as error:
            self.answer = error

    def result(self) -> tuple[int, dict[str, str], Any]:
        self.join(60)
        assert isinstance(self.answer, tuple), self.answer
        return self.answer


def wait_until_running(server: Server, count: int) -> None:
    eventually(lambda: sum(one["running"] for one in server.admin("GET", "/admin/engines")["engines"]) == count)


def test_an_engine_core_is_killed_and_comes_back() -> None:
    with serving(*MOCK, "--restart", "on-failure", admin=True) as server:
        streams = [Asking(server, LONG) for _ in range(8)]
        whole = Asking(server, {**LONG, "stream": False})
        wait_until_running(server, 9)
        lives = []
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        seen = set()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            lives.append(server.ask("GET", "/livez")[0])
            seen.add(server.ask("GET", "/readyz")[0])
            if seen == {503, 200} and server.ask("GET", "/readyz")[0] == 200:
                break
        assert seen == {503, 200}
        assert set(lives) == {200}
        for stream in streams:
            status, _, text = stream.result()
            assert status == 200
            *_, error, end = events(text)
            assert end == "[DONE]"
            assert error["error"]["code"] == "engine_died"
            assert "SIGKILL" in error["error"]["message"]
        status, headers, answer = whole.result()
        assert (status, answer["error"]["code"]) == (503, "engine_died")
        assert headers["retry-after"]
        status, _, answer = server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 3})
        assert (status, answer["choices"][0]["text"]) == (200, "abc")
        assert eventually(lambda: server.metric("engine_restarts_total") == 1)
        assert server.admin("POST", "/admin/engines/0/restart") == {"rank": 0, "incarnation": 1}
        eventually(lambda: server.metric("engine_restarts_total") == 2 and server.ask("GET", "/readyz")[0] == 200)


def test_more_requests_than_may_wait_for_a_restart() -> None:
    engine = str(Path(__file__).parents[1] / "slow_engine.py") + ":SlowEngine"
    with serving(engine, "--restart", "on-failure", "--max-queued", "1", admin=True) as server:
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        eventually(lambda: server.ask("GET", "/readyz")[0] == 503)
        waits = Asking(server, {"prompt": "x", "max_tokens": 3})
        eventually(lambda: server.metric("num_requests_without_token") == 1)
        status, headers, answer = server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 3})
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "engine_restarting", "1")
        status, _, answer = waits.result()
        assert (status, answer["choices"][0]["text"]) == (200, "abc")


def test_requests_that_resume() -> None:
    with serving(*MOCK, "--restart", "on-failure", "--in-flight", "resume", admin=True) as server:
        asking = [Asking(server, {"prompt": "x", "max_tokens": 600, "stream": True}) for _ in range(4)]
        wait_until_running(server, 4)
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        for one in asking:
            *chunks, end = events(one.result()[2])
            assert end == "[DONE]"
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert text == (ALPHABET * 24)[:600]


@pytest.mark.parametrize("arguments", [(), ("--restart", "on-failure", "--max-restarts", "1")])
def test_no_engine_core_is_left(arguments: tuple[str, ...]) -> None:
    with serving(*MOCK, *arguments) as server:
        tree = server.tree()
        for _ in range(2 if arguments else 1):
            pid = eventually(
                lambda: server.engine_pids() and server.ask("GET", "/readyz")[0] == 200 and server.engine_pids()
            )
            asking = Asking(server, LONG)
            os.kill(pid[0], signal.SIGKILL)
            asking.join(30)  # it has an answer, or its connection ends with the server
            assert not asking.is_alive()
        assert server.process.wait(30) == 1
        assert "killed by SIGKILL" in server.stderr()
        _, alive = psutil.wait_procs(tree, timeout=5)
        assert not alive


def test_a_hanging_engine_core_is_told_of() -> None:
    with serving(*MOCK, "--stall-timeout", "0.5", "--request-timeout", "3", admin=True) as server:
        asking = Asking(server, LONG)
        wait_until_running(server, 1)
        pid = server.engine_pids()[0]
        os.kill(pid, signal.SIGSTOP)
        try:
            assert eventually(lambda: server.ask("GET", "/readyz")[0] == 503)
            assert server.ask("GET", "/livez")[0] == 200
            assert eventually(lambda: server.metric("engine_state", state="STALLED") == 1)
            assert server.metric("engine_stalls_total") == 1
            *_, error, _ = events(asking.result()[2])
            assert error["error"]["code"] == "deadline_exceeded"
            status, _, answer = server.ask("POST", "/v1/completions", {"prompt": "x"}, {"x-request-timeout": "1"})
            assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        finally:
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: server.ask("GET", "/readyz")[0] == 200)


def test_an_api_process_is_killed() -> None:
    with serving(*MOCK, "--api-server-count", "2", admin=True) as server:
        before = server.api_pids()
        assert len(before) == 2
        for _ in range(4):
            Asking(server, {"prompt": "x", "max_tokens": 4}).result()
        eventually(lambda: server.metric("generation_tokens_total") == 16)
        os.kill(before[0], signal.SIGKILL)
        eventually(lambda: len(set(server.admin("GET", "/admin/engines")["api_processes"]) - {before[0]}) == 2)
        assert server.admin("GET", "/admin/engines")["api_restarts"] == 1
        for _ in range(8):
            assert Asking(server, {"prompt": "x", "max_tokens": 1}).result()[0] == 200
        eventually(lambda: server.metric("generation_tokens_total") == 24)  # those of the dead one count on


def test_a_rank_that_stays_dead_and_an_api_process_that_comes_back() -> None:
    with serving(*MOCK, "--data-parallel-size", "2", admin=True) as server:
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        eventually(lambda: server.metric("engine_state", state="DEAD") == 1)
        (before,) = server.api_pids()
        os.kill(before, signal.SIGKILL)
        eventually(lambda: server.api_pids() and server.api_pids() != [before], timeout=30)
        for _ in range(4):
            assert Asking(server, {"prompt": "x", "max_tokens": 1}).result()[0] == 200


def test_scaling_while_streams_run() -> None:
    arguments = ("--max-data-parallel-size", "3", "--api-server-count", "2")
    with serving(*MOCK, *arguments, admin=True) as server:
        asking = [Asking(server, {"prompt": "x", "max_tokens": 2000, "stream": True}) for _ in range(8)]
        wait_until_running(server, 8)
        assert server.admin("POST", "/admin/scale", {"data_parallel_size": 3}) == {"data_parallel_size": 3}
        asking += [Asking(server, {"prompt": "x", "max_tokens": 300, "stream": True}) for _ in range(8)]
        states = [one["state"] for one in server.admin("GET", "/admin/engines")["engines"]]
        assert states == ["ready"] * 3
        assert server.admin("POST", "/admin/scale", {"data_parallel_size": 9})[0] == 400
        down = {"data_parallel_size": 1, "drain_timeout": 20}
        assert server.admin("POST", "/admin/scale", down) == {"data_parallel_size": 1}
        for one in asking:
            *chunks, end = events(one.result()[2])
            assert end == "[DONE]"
            assert "error" not in chunks[-1]
        eventually(lambda: len(server.engine_pids()) == 1)
        assert "scale: DONE" in server.stderr()


def test_drain() -> None:
    with serving(*MOCK, "--shutdown-timeout", "20", admin=True) as server:
        asking = [Asking(server, {"prompt": "x", "max_tokens": 700, "stream": stream}) for stream in (True, False)]
        wait_until_running(server, 2)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: ask(server.admin_url, "GET", "/readyz")[0] == 503)  # administration is there to the end
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.stderr()
        assert events(asking[0].result()[2])[-2]["choices"][0]["finish_reason"] == "length"
        assert asking[1].result()[2]["usage"]["completion_tokens"] == 700


def test_drain_that_takes_too_long() -> None:
    with serving(*MOCK, "--shutdown-timeout", "0.5", admin=True) as server:
        streamed, whole = Asking(server, LONG), Asking(server, {**LONG, "stream": False})
        wait_until_running(server, 2)
        assert server.stop() == 3
        *_, error, end = events(streamed.result()[2])
        assert (error["error"]["code"], end) == ("shutting_down", "[DONE]")
        assert whole.result()[0] == 503


def test_a_second_signal() -> None:
    with serving(*MOCK, "--shutdown-timeout", "30", admin=True) as server:
        asking = Asking(server, LONG)
        wait_until_running(server, 1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 130
        assert time.monotonic() - began < 5
        asking.join(10)
        assert not asking.is_alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_starts(number: signal.Signals) -> None:
    server = Server(*MOCK)
    try:
        eventually(lambda: server.tree())
        time.sleep(0.3)
        server.process.send_signal(number)
        assert server.process.wait(20) == 128 + number
    finally:
        server.close()


def test_the_supervisor_is_killed() -> None:
    with serving(*MOCK, "--api-server-count", "2", "--data-parallel-size", "2", admin=True) as server:
        asking = Asking(server, LONG)
        wait_until_running(server, 1)
        tree, (host, port) = server.tree(), server.host_and_port
        server.process.kill()
        server.process.wait()
        _, alive = psutil.wait_procs(tree, timeout=5)
        assert not alive
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind((host, port))
            again.listen()
        asking.join(10)
        assert not asking.is_alive()


def test_a_port_in_use_and_an_engine_that_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([OUTBOARD, "serve", "mock", "--port", port], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in done.stderr
    command = [OUTBOARD, "serve", "mock", "--option", "step_ms=-1", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "step_ms must be at least 0" in done.stderr
    command = [OUTBOARD, "serve", "mock", "--port", "0", "--admin-host", "0.0.0.0", "--admin-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "would be open to other hosts" in done.stderr


def text_of(data: bytes) -> str:
    """A letter for each token that has come."""
    return b"".join(re.findall(rb'"text":"(\w*)"', data)).decode()


async def _stream(host: str, port: int, leave_after: int | None) -> str:
    """Reads a stream of 200 tokens; leaves after so many. On plain sockets: 500 are much for a real client."""
    body = b'{"prompt": "x", "max_tokens": 200, "stream": true}'
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        data = b""
        while True:
            part = await reader.read(1 << 16)
            assert part, "the stream ended early"
            data += part
            if leave_after is not None and len(text_of(data)) >= leave_after:
                return ""
            if b"data: [DONE]" in data[-100:]:
                break
    finally:
        writer.close()
    assert data.startswith(b"HTTP/1.1 200 OK\r\n")
    return text_of(data)


@ONE_LOOP
def test_many_streams_of_which_some_leave(run: Run) -> None:
    arguments = ("--api-server-count", "2", "--data-parallel-size", "2")
    draw = random.Random(7)
    leaving = set(draw.sample(range(500), 50))

    async def main(host: str, port: int) -> list[str]:
        jobs = [_stream(host, port, draw.randrange(1, 100) if i in leaving else None) for i in range(500)]
        return await asyncio.gather(*jobs)

    with serving("mock", "--option", "step_ms=20", *arguments, admin=True) as server:
        texts = run(main(*server.host_and_port))
        assert sum(text == "" for text in texts) == 50
        assert {text for text in texts if text} == {(ALPHABET * 8)[:200]}
        wait_until_running(server, 0)
        assert eventually(lambda: server.metric("request_success_total", finished_reason="length") == 450)
        assert eventually(lambda: server.metric("requests_failed_total", reason="client_disconnected") == 50)
        assert eventually(lambda: server.metric("num_requests_without_token") == 0)


def test_a_slow_reader_costs_its_own_connection_only() -> None:
    arguments = ("--slow-reader-timeout", "1", "--log-level", "info")
    with serving("mock", "--option", "step_ms=1", "--option", "tokens_per_step=400", *arguments, admin=True) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 10_000_000, "stream": True}).encode()
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(server.host_and_port)
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        wait_until_running(server, 1)
        other = Asking(server, {"prompt": "x", "max_tokens": 40_000, "stream": True})
        text = "".join(one["choices"][0]["text"] for one in events(other.result()[2])[:-1])
        assert text == (ALPHABET * 1539)[:40_000]
        wait_until_running(server, 0)
        assert server.metric("requests_failed_total", reason="slow_reader") == 1
        slow.close()


def test_slow_headers_and_idle_connections_stop_nobody() -> None:
    with serving(*MOCK) as server:
        address = server.host_and_port
        idle = []
        try:
            for _ in range(10_000):
                idle.append(socket.create_connection(address, timeout=10))
            for connection in idle[:50]:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: ")
            began = time.monotonic()
            status, _, answer = server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 5})
            assert (status, answer["choices"][0]["text"]) == (200, "abcde")
            assert time.monotonic() - began < 5
        finally:
            for connection in idle:
                connection.close()


def test_what_does_not_come_in_time_is_closed() -> None:
    with serving(*MOCK, "--receive-timeout", "1") as server:
        address = server.host_and_port
        silent = socket.create_connection(address, timeout=10)
        dripping = socket.create_connection(address, timeout=10)
        dripping.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: ")
        half = socket.create_connection(address, timeout=10)
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        assert server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        with silent, dripping, half:
            assert silent.recv(1024) == b""
            assert dripping.recv(1024) == b""
            answer = half.recv(65536)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"connection: close" in answer
