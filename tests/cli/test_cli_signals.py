"""SIGINT and SIGTERM to the real command, at every stage of its life; what it says, how it ends, what it leaves."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

OUTBOARD = str(Path(sys.executable).with_name("outboard"))
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
ALPHABET = "abcdefghijklmnopqrstuvwxyz"  # what `mock` says


STARTED: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def no_command_left(nothing_left: None) -> Iterator[None]:
    """A test that fails leaves no process to the next one."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.wait()


class Output:
    """What a command writes to one descriptor, read by a thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._data = b""
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # the terminal has no other end any more
                data = b""
            with self._news:
                self._data += data
                self._news.notify_all()
            if not data:
                return

    def wait_for(self, text: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: text in self.text, 20), f"no {text!r} in {self.text!r}"

    @property
    def text(self) -> str:
        return self._data.decode(errors="replace")

    def end(self) -> str:
        self._thread.join(10)
        assert not self._thread.is_alive(), "somebody holds the other end still"
        os.close(self._fd)
        return self.text


class Command:
    """`outboard generate` as a process, with all the processes that belong to it."""

    def __init__(self, *args: str, **popen: Any) -> None:
        self.process = subprocess.Popen(
            [OUTBOARD, "generate", "ab", *args], **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
        )
        self.family: list[psutil.Process] = []
        STARTED.append(self.process)

    def streams(self, stdout: bool = True) -> Command:
        if stdout:
            assert self.process.stdout is not None
            self.out = Output(os.dup(self.process.stdout.fileno()))
            self.process.stdout.close()
        assert self.process.stderr is not None
        self.err = Output(os.dup(self.process.stderr.fileno()))
        self.process.stderr.close()
        return self

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def engine(self) -> psutil.Process:
        """The engine core: the child of the warden, which is our only child."""
        warden = psutil.Process(self.process.pid).children()[0]
        engine = warden.children()[0]
        self.family = [warden, engine]
        return engine

    def status(self, timeout: float = 20) -> int:
        """Its exit status, as soon as it has ended and nothing is left of it."""
        status = self.process.wait(timeout)
        _, alive = psutil.wait_procs(self.family, timeout=5)
        assert not alive
        return status


def mock(max_tokens: int, *args: str, **popen: Any) -> Command:
    options = ["--engine", "mock", "--option", "step_ms=20", "--max-tokens", str(max_tokens)]
    return Command(*options, *args, **popen)


def of_file(path: Path, code: str, *args: str) -> Command:
    """A command with an engine of its own, `Engine`."""
    path.write_text(
        "import os, signal, sys, time\nfrom outboard.engines.mock import MockEngine\n" + textwrap.dedent(code)
    )
    return Command("--engine", f"{path}:Engine", *args)


def assert_quiet(stderr: str) -> None:
    for word in ("Traceback", "died", "Exception", "ERROR", "WARNING"):
        assert word not in stderr, stderr


@BOTH
@pytest.mark.parametrize("module", ["typer", "outboard.errors", "asyncio", "outboard.cli.generate"])
def test_while_modules_are_imported(number: signal.Signals, module: str) -> None:
    command = mock(5, env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}).streams()
    command.err.wait_for(f" {module}\n")
    command.send(number)
    assert command.status(5) == 128 + number
    assert command.out.end() == ""
    stderr = command.err.end()
    assert "outboard.launch.warden" not in stderr
    assert_quiet("".join(line for line in stderr.splitlines(True) if not line.startswith("import time:")))


@BOTH
def test_during_start_up(number: signal.Signals, tmp_path: Path) -> None:
    code = """
    class Engine(MockEngine):
        def __init__(self):
            print("loading", file=sys.stderr, flush=True)
            time.sleep(1000)
    """
    command = of_file(tmp_path / "slow_start.py", code).streams()
    command.err.wait_for("loading")
    command.engine()
    began = time.monotonic()
    command.send(number)
    assert command.status(10) == 128 + number
    assert time.monotonic() - began < 5
    assert command.out.end() == ""
    assert command.err.end() == "loading\n"


@BOTH
def test_the_answer_comes_to_its_end(number: signal.Signals) -> None:
    command = mock(52).streams()
    command.out.wait_for("abc")
    command.engine()
    command.send(number)
    assert command.status() == 0
    assert command.out.end() == ALPHABET * 2 + "\n"
    told, summary = command.err.end().splitlines()
    again = "Ctrl-C" if number is signal.SIGINT else "SIGTERM"
    assert told == f"outboard: finishing; {again} again stops at once"
    assert "finish reason length" in summary


@BOTH
def test_an_answer_that_takes_too_long_is_cut(number: signal.Signals) -> None:
    command = mock(100_000, "--shutdown-timeout", "0.5").streams()
    command.out.wait_for("abc")
    command.engine()
    command.send(number)
    assert command.status(10) == 3
    assert ALPHABET in command.out.end()
    stderr = command.err.end()
    assert "finish reason abort" in stderr
    assert_quiet(stderr)


@BOTH
def test_a_second_signal_ends_it_at_once(number: signal.Signals) -> None:
    command = mock(100_000).streams()
    command.out.wait_for("abc")
    command.engine()
    command.send(signal.SIGINT)
    command.err.wait_for("finishing")
    began = time.monotonic()
    command.send(number)
    assert command.status(8) == 128 + number
    assert time.monotonic() - began < 5
    assert command.out.end().startswith(ALPHABET[:3])
    stderr = command.err.end()
    assert stderr.count("\n") == 1
    assert_quiet(stderr)


def test_a_second_signal_kills_an_engine_that_does_not_stop(tmp_path: Path) -> None:
    code = """
    class Engine(MockEngine):
        def shutdown(self):
            print("stopping", file=sys.stderr, flush=True)
            time.sleep(1000)
    """
    command = of_file(tmp_path / "slow_stop.py", code, "--max-tokens", "3", "--shutdown-timeout", "100").streams()
    command.err.wait_for("stopping")  # it answered, and is being shut down
    command.engine()
    command.send(signal.SIGTERM)
    command.err.wait_for("finishing")
    command.send(signal.SIGTERM)
    assert command.status(8) == 143
    assert_quiet(command.err.end())


@BOTH
def test_a_death_while_it_drains(number: signal.Signals) -> None:
    command = mock(100_000).streams()
    command.out.wait_for("abc")
    engine = command.engine()
    command.send(number)
    command.err.wait_for("finishing")
    engine.kill()
    assert command.status(10) == 1
    stderr = command.err.end()
    assert stderr.count("died while running: killed by SIGKILL") == 1
    assert "Traceback" not in stderr


@BOTH
def test_a_signal_after_a_death(number: signal.Signals) -> None:
    command = mock(100_000).streams()
    command.out.wait_for("abc")
    engine = command.engine()
    engine.kill()
    command.send(number)
    assert command.status(10) == 1
    stderr = command.err.end()
    assert stderr.count("died while running: killed by SIGKILL") == 1
    assert "Traceback" not in stderr


def test_nobody_reads_what_it_writes() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    command = Command("--engine", "mock", "--max-tokens", "1000000", stdout=writer).streams(stdout=False)
    full = select.poll()
    full.register(writer, select.POLLOUT)
    process, before, deadline = psutil.Process(command.process.pid), None, time.monotonic() + 20
    while (now := process.cpu_times()[:2]) != before or full.poll(0):  # it stands still once a write blocks
        before = now
        assert time.monotonic() < deadline
        time.sleep(0.3)
    command.engine()
    command.send(signal.SIGINT)
    command.send(signal.SIGTERM)
    assert command.status(10) == 143
    os.close(reader)
    os.close(writer)
    assert_quiet(command.err.end())


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, code: str, path: Path, *args: str) -> None:
        self._master, slave = pty.openpty()
        path.write_text("import os, signal\nfrom outboard.engines.mock import MockEngine\n" + textwrap.dedent(code))
        self.command = Command(
            *("--engine", f"{path}:Engine", "--option", "step_ms=20", *args),
            **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.screen = Output(self._master)

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")


TELLS_OF_SIGINT = """
class Engine(MockEngine):
    def __init__(self, step_ms: float = 0.0, marker: str = ""):
        super().__init__(step_ms=step_ms)
        signal.signal(signal.SIGINT, lambda *_: open(marker, "w").close())
"""


def test_ctrl_c_at_a_terminal_reaches_the_command_alone(tmp_path: Path) -> None:
    marker = tmp_path / "sigint"
    args = ("--option", f"marker={marker}", "--max-tokens", "78")
    terminal = Terminal(TELLS_OF_SIGINT, tmp_path / "engine.py", *args)
    terminal.screen.wait_for("abc")
    engine = terminal.command.engine()
    assert os.getpgid(engine.pid) == engine.pid
    assert os.getsid(engine.pid) != terminal.command.process.pid == os.getsid(terminal.command.process.pid)
    terminal.press_ctrl_c()
    terminal.screen.wait_for("outboard: finishing; Ctrl-C again stops at once")
    assert terminal.command.status() == 0
    screen = terminal.screen.end()
    assert "78 tokens" in screen
    assert "finish reason length" in screen
    assert_quiet(screen)
    assert not marker.exists()


def test_ctrl_c_twice_at_a_terminal(tmp_path: Path) -> None:
    marker = tmp_path / "sigint"
    terminal = Terminal(
        TELLS_OF_SIGINT, tmp_path / "engine.py", "--option", f"marker={marker}", "--max-tokens", "100000"
    )
    terminal.screen.wait_for("abc")
    terminal.command.engine()
    terminal.press_ctrl_c()
    terminal.screen.wait_for("finishing")
    terminal.press_ctrl_c()
    assert terminal.command.status(8) == 130
    assert_quiet(terminal.screen.end())
    assert not marker.exists()
