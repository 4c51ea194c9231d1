"""The front end's handle: bounded, idempotent, from any thread, and it leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_scripts import System

from outboard.errors import EngineDeadError, EngineStartupError
from outboard.launch.process import EngineProcess, describe_exit

Start = Callable[..., EngineProcess]

PAUSE = "tell(os.getpid()); signal.pause()"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + PAUSE


def open_fds() -> set[str]:
    gc.collect()  # what earlier tests dropped must not be closed between two looks
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_stop_kills_what_ignores_sigterm(start: Start, system: System, tmp_path: Path) -> None:
    process = start(STUBBORN)
    pid = system.told(tmp_path / "told")
    before = time.monotonic()
    assert process.stop(0.2) == -signal.SIGKILL
    assert 0.2 <= time.monotonic() - before < 2.0
    assert not system.alive(pid)
    assert process.stop(0.2) == -signal.SIGKILL


def test_stop_waits_for_a_clean_end(start: Start, system: System, tmp_path: Path) -> None:
    process = start("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); tell(1)\nwhile True: signal.pause()")
    system.told(tmp_path / "told")
    assert process.stop(5) == 0


def test_stop_ends_a_stopped_engine_and_a_stopped_warden(start: Start, system: System, tmp_path: Path) -> None:
    process = start(PAUSE)
    pid = system.told(tmp_path / "told")
    os.kill(pid, signal.SIGSTOP)
    os.kill(process.warden_pid, signal.SIGSTOP)
    assert process.stop(0) == -signal.SIGKILL
    system.eventually(lambda: not system.alive(pid))
    assert not Path(f"/proc/{process.warden_pid}").exists()


def test_kill_does_not_depend_on_who_else_holds_the_pipe(start: Start, system: System, tmp_path: Path) -> None:
    process = start(STUBBORN)
    system.told(tmp_path / "told")
    copy = fork(signal.pause)
    try:
        process.kill()
        process.kill()
        assert process.wait(5) == -signal.SIGKILL
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)


def fork(function: Callable[[], object]) -> int:
    with warnings.catch_warnings(action="ignore") if sys.version_info >= (3, 12) else warnings.catch_warnings():
        pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    return pid


def test_a_forked_copy_can_ask_but_not_end(start: Start, system: System, tmp_path: Path) -> None:
    process = start(PAUSE)
    pid = system.told(tmp_path / "told")

    def in_copy() -> None:
        process.abandon()
        process.kill()
        process.terminate()
        process.close()
        with pytest.raises(RuntimeError):
            process.stop(0)
        (tmp_path / "copy").write_text(repr(process.poll()))

    os.waitpid(fork(in_copy), 0)
    assert (tmp_path / "copy").read_text() == "None"
    assert process.poll() is None
    assert system.alive(pid)
    os.kill(pid, signal.SIGKILL)
    assert process.wait(5) == -signal.SIGKILL


def test_a_forked_copy_sees_the_end(start: Start, system: System, tmp_path: Path) -> None:
    process = start("tell(os.getpid()); signal.pause()")
    pid = system.told(tmp_path / "told")
    copy = fork(lambda: (tmp_path / "copy").write_text(repr(process.wait(5))))
    os.kill(pid, signal.SIGTERM)
    os.waitpid(copy, 0)
    assert (tmp_path / "copy").read_text() == "-15"
    assert process.wait(5) == -signal.SIGTERM


def test_the_sentinel_wakes_an_event_loop(start: Start) -> None:
    async def ended(process: EngineProcess) -> int | None:
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        loop.add_reader(process.sentinel, event.set)
        await asyncio.wait_for(event.wait(), 5)
        loop.remove_reader(process.sentinel)
        return process.poll()

    assert asyncio.run(ended(start("sys.exit(7)"))) == 7


def test_wait_is_bounded_and_poll_does_not_block(start: Start, system: System, tmp_path: Path) -> None:
    process = start(PAUSE)
    system.told(tmp_path / "told")
    assert process.poll() is None
    assert process.wait(0.01) is None
    assert process.wait(0) is None
    assert process.wait(-1) is None


def test_many_threads_stop_and_close_the_same(start: Start, system: System, tmp_path: Path) -> None:
    before = open_fds()
    process = start(STUBBORN)
    system.told(tmp_path / "told")
    results = []

    def stop() -> None:
        results.append(process.stop(0.1))
        process.close()

    threads = [threading.Thread(target=stop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == [-signal.SIGKILL] * 8
    assert open_fds() == before


def test_after_close(start: Start) -> None:
    process = start("sys.exit(7)")
    assert process.wait(5) == 7
    process.close()
    process.close()
    process.kill()
    process.terminate()
    process.abandon()
    assert process.sentinel == -1
    assert process.poll() == process.wait(1) == process.stop(1) == 7


@pytest.mark.parametrize("how", ["abandon", "close"])
def test_abandon_leaves_nothing(start: Start, system: System, tmp_path: Path, how: str) -> None:
    before = open_fds()
    process = EngineProcess.start(os.environ, tmp_path, ["sleep", "100"])
    warden = process.warden_pid
    for _ in range(2):
        getattr(process, how)()
    del process
    gc.collect()
    system.eventually(lambda: not Path(f"/proc/{warden}").exists())
    system.eventually(lambda: open_fds() == before)


def test_abandon_takes_no_lock(start: Start, system: System, tmp_path: Path) -> None:
    process = start(PAUSE)
    pid = system.told(tmp_path / "told")
    with process._lock:
        process.abandon()
        system.eventually(lambda: not system.alive(pid))
    system.eventually(lambda: process.sentinel == -1)
    assert process.poll() == -signal.SIGKILL


def test_dropping_the_handle_of_a_running_engine_warns_of_nothing(system: System, tmp_path: Path) -> None:
    before = open_fds()
    process = EngineProcess.start(os.environ, tmp_path, ["sleep", "100"])
    process.abandon()
    del process
    gc.collect()  # warnings are errors, those of finalizers too
    system.eventually(lambda: open_fds() == before)


def test_fifty_starts_and_stops(system: System, tmp_path: Path) -> None:
    before = open_fds(), system.children()
    for turn in range(10):
        processes = [EngineProcess.start(os.environ, tmp_path, ["sleep", "100"]) for _ in range(5)]
        for process in processes:
            if turn % 2:
                system.eventually(lambda process=process: process.engine_pid)
            assert process.stop(5) == -signal.SIGTERM
            process.close()
    assert (open_fds(), system.children()) == before


def test_a_start_that_fails_leaks_nothing(tmp_path: Path) -> None:
    before = open_fds()
    with pytest.raises(ValueError, match="null byte"):
        EngineProcess.start({"NAME": "\0"}, tmp_path)
    assert open_fds() == before


def test_identify(start: Start, system: System, tmp_path: Path) -> None:
    process = start(PAUSE)
    system.told(tmp_path / "told")
    process.identify(1234567, 1234568)
    assert (process.engine_pid, process.pgid) == (1234567, 1234568)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit code 0"),
        (7, "exit code 7"),
        (-9, "killed by SIGKILL"),
        (-63, "killed by signal 63"),
        (None, "unknown"),
    ],
)
def test_describe_exit(code: int | None, text: str) -> None:
    assert describe_exit(code).endswith(text)


def test_the_death_of_an_engine_that_was_killed(start: Start) -> None:
    process = start("os.write(2, b'out of memory\\n'); os.kill(os.getpid(), 9)")
    process.wait(5)
    error = process.death("running", rank=2, incarnation=1)
    assert type(error) is EngineDeadError
    assert error.reason == f"Engine core rank 2 (pid {process.engine_pid}) died while running: killed by SIGKILL."
    assert (error.rank, error.incarnation, error.phase, error.exit_code) == (2, 1, "running", -9)
    assert error.stderr_tail == "out of memory\n"
    assert error.copy().reason == error.reason


def test_the_death_of_an_engine_that_raised(tmp_path: Path) -> None:
    script = """
import os, sys
from outboard.protocol.messages import ErrorReport
from outboard.protocol.report import ReportPage
page = ReportPage.from_fd(int(os.environ["OUTBOARD_REPORT_FD"]))
page.write_report(ErrorReport("builtins.RuntimeError", "boom\\nmore", "Traceback: boom"))
sys.exit(1)
"""
    process = EngineProcess.start(os.environ, tmp_path, [sys.executable, "-c", script])
    assert process.wait(10) == 1
    error = process.death("start-up", EngineStartupError, pid=5)
    assert isinstance(error, EngineStartupError)
    assert error.reason == "Engine core rank 0 (pid 5) died during start-up: RuntimeError: boom (exit code 1)."
    assert (error.remote_type, error.remote_traceback) == ("builtins.RuntimeError", "Traceback: boom")
    assert process.death("stopping", EngineStartupError, reason="It was slow.").reason == "It was slow."
    process.close()


def test_the_death_of_an_engine_that_is_not_over_yet(start: Start, system: System, tmp_path: Path) -> None:
    process = start(PAUSE)
    system.told(tmp_path / "told")
    error = process.death("running", remote_type="m.E", remote_message="x")
    assert error.exit_code is None
    assert error.reason.endswith("died while running: m.E: x.")
    assert process.death("stopping").reason.endswith("died while stopping: exit code unknown.")


# --- when the warden does not obey ---


def test_a_stopped_engine_is_killed_at_once(start: Start, system: System, tmp_path: Path) -> None:
    process = start(PAUSE)
    pid = system.told(tmp_path / "told")
    os.kill(pid, signal.SIGSTOP)
    before = time.monotonic()
    process.kill()
    assert process.wait(5) == -signal.SIGKILL
    assert time.monotonic() - before < 1.0
    assert not system.alive(pid)


@pytest.mark.parametrize("halves", [["guard"], ["keeper"], ["guard", "keeper"]], ids=" and ".join)
def test_kill_ends_what_a_stopped_warden_watches(
    start: Start, system: System, tmp_path: Path, halves: list[str]
) -> None:
    process = start(STUBBORN)
    pid = system.told(tmp_path / "told")
    pids = {"guard": process.warden_pid, "keeper": system.parent(pid)}
    for half in halves:
        os.kill(pids[half], signal.SIGSTOP)
    before = time.monotonic()
    process.kill()
    assert process.wait(5) == -signal.SIGKILL
    assert time.monotonic() - before < 4.0
    assert not [pid for pid in (pid, *pids.values()) if system.alive(pid)]


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped warden cannot be woken: what a tracer or a frozen control group does to it."""
    send = signal.pidfd_send_signal
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda fd, number: number == signal.SIGCONT or send(fd, number))


@pytest.mark.usefixtures("deaf")
def test_a_warden_that_cannot_be_woken_is_killed_by_force(start: Start, system: System, tmp_path: Path) -> None:
    process = start(STUBBORN)
    pid = system.told(tmp_path / "told")
    warden = [process.warden_pid, system.parent(pid)]
    for stopped in warden:
        os.kill(stopped, signal.SIGSTOP)
    process.kill()
    assert process.wait(0.2) is None
    process.kill(force=True)
    assert process.wait(2) == -signal.SIGKILL
    system.eventually(lambda: not system.alive(pid))
    os.kill(warden[1], signal.SIGCONT)
    system.eventually(lambda: not system.alive(warden[1]))


@pytest.mark.usefixtures("deaf")
def test_end_is_bounded(start: Start, system: System, tmp_path: Path) -> None:
    process = start(STUBBORN)
    pid = system.told(tmp_path / "told")
    keeper = system.parent(pid)
    for stopped in (process.warden_pid, keeper):
        os.kill(stopped, signal.SIGSTOP)
    before = time.monotonic()
    assert process.end(0.2) == -signal.SIGKILL
    assert 0.2 <= time.monotonic() - before < 2.0
    system.eventually(lambda: not system.alive(pid))
    os.kill(keeper, signal.SIGCONT)


def test_end_of_what_is_well(start: Start, system: System, tmp_path: Path) -> None:
    process = start(STUBBORN)
    pid = system.told(tmp_path / "told")
    assert process.end(5) == process.end(5) == -signal.SIGKILL
    assert not system.alive(pid)
