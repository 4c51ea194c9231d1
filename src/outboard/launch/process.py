"""The front end's handle of one engine-core process, which runs under its warden."""

from __future__ import annotations

import _thread
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar, overload

from outboard.errors import EngineDeadError, signal_name
from outboard.launch.marked import kill_marked
from outboard.launch.oom import OomWatch
from outboard.protocol.environment import REPORT_FD
from outboard.protocol.messages import ErrorReport, Ready
from outboard.protocol.report import ReportPage, above_stdio

__all__ = ["EngineProcess", "death_error", "describe_exit", "died"]

_E = TypeVar("_E", bound=EngineDeadError)

_WARDEN = Path(__file__).with_name("warden.py")
_KILL_BOUND = 10.0  # seconds for the warden to kill its tree; freeing much memory takes some
_FORCE_BOUND = 2.0  # seconds for a warden that did not, once it is killed itself
_DIED = {"start-up": "died during start-up", "running": "died while running", "stopping": "died while stopping"}


class EngineProcess:
    """One engine-core process and its warden. Made by `start`.

    All methods may be called again, from any thread; only `abandon` from a finalizer. In a forked copy of the process
    that started it, the engine can be asked about; what would end it does nothing.

    Attributes:
        report: what the engine core leaves behind; readable until `close`.
        warden_pid: process id of the warden, our child: of its guard, which has the keeper as its child, which has the
            engine core as its own (see warden.py).
    """

    def __init__(self, warden_pid: int, pidfd: int, owner_fd: int, report: ReportPage, mark: str) -> None:
        self.report = report
        self.warden_pid = warden_pid
        self._mark = mark
        self._oom = OomWatch()
        self._oom_verdict = ""
        self._creator = os.getpid()
        self._lock = threading.Lock()  # guards the next two
        self._pidfd = pidfd
        self._exit_code: int | None = None
        self._identity: tuple[int, int] | None = None
        # `pop` gives each of these to exactly one caller, with no lock: `abandon` may interrupt a holder of the lock.
        self._owner_fds = [owner_fd]
        self._right_to_release = [True]

    @classmethod
    def start(cls, env: Mapping[str, str], session_dir: Path, argv: Sequence[str] | None = None) -> Self:
        """Start an engine core under a warden. Returns at once.

        Args:
            env: its whole environment; OUTBOARD_REPORT_FD and OUTBOARD_ENGINE are added.
            session_dir: the warden removes it if this process is gone before the engine core is.
            argv: the program to run in place of `outboard.engine`.

        Raises OSError if no process or descriptor is to be had.
        """
        command = [sys.executable, "-P", "-m", "outboard.engine"] if argv is None else list(argv)
        with ExitStack() as undo, ExitStack() as done:
            report = ReportPage.create()
            undo.callback(report.close)
            ours, theirs = (above_stdio(end.detach()) for end in socket.socketpair())
            undo.callback(os.close, ours)
            done.callback(os.close, theirs)
            numbers = map(str, (os.getpid(), theirs, report.fd))
            mark = secrets.token_hex(8)
            warden = subprocess.Popen(
                [sys.executable, "-I", "-S", _WARDEN, *numbers, mark, session_dir.absolute(), *command],
                env={**env, REPORT_FD: str(report.fd)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs, report.fd),
                start_new_session=True,
            )
            pidfd = os.pidfd_open(warden.pid)
            undo.pop_all()
        # Reaping is ours, by pidfd: a `Popen` that still waited for it would warn when it is collected.
        warden.returncode = 0
        return cls(warden.pid, pidfd, ours, report, mark)

    # --- who it is ---

    @property
    def node(self) -> str:
        """It runs on this host."""
        return ""

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once all is over: engine, descendants, report. -1 after `close`."""
        return self._pidfd

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine core: from its HELLO, before that as the warden knows it."""
        return self._identity[0] if self._identity else self.report.read_engine_pid()

    @property
    def pgid(self) -> int | None:
        """Process group of the engine core; it is not the warden's."""
        return self._identity[1] if self._identity else self.report.read_engine_pid()

    def identify(self, pid: int, pgid: int) -> None:
        """Note what the engine core says of itself in its HELLO."""
        self._identity = (pid, pgid)
        self._oom.add(pid)

    def watch(self, pid: int, ready: Ready) -> None:
        """Nothing is to be done: front ends read its progress page by themselves."""

    # --- how it ends ---

    def poll(self) -> int | None:
        """Exit code of the engine core: 0 or more, or minus the signal that ended it; None until all is over."""
        with self._lock:
            if self._exit_code is None and _readable(self._pidfd, 0):
                self._exit_code = self._reap()
            return self._exit_code

    def wait(self, timeout: float | None = None) -> int | None:
        """Block until it is over, at most `timeout` seconds. Returns as `poll` does."""
        with self._lock:
            if self._exit_code is not None:
                return self._exit_code
            pidfd = os.dup(self._pidfd)  # another thread may close the original meanwhile
        try:
            _readable(pidfd, timeout)
        finally:
            os.close(pidfd)
        return self.poll()

    def terminate(self) -> None:
        """Ask the engine core for a clean stop, by SIGTERM through the warden."""
        self._signal_warden(signal.SIGTERM)

    def kill(self, force: bool = False) -> None:
        """Have the warden kill the engine core and all its descendants. Does not wait.

        A warden that somebody has stopped goes on, one that is stuck otherwise does not; then nothing happens.

        Args:
            force: kill the warden as well, the engine's group, and what of its descendants can still be found. For a
                warden that has not obeyed a plain `kill` for some seconds: `sentinel` then becomes readable at once.
        """
        if self._forked():
            return
        self.release()
        self._signal_warden(signal.SIGCONT)
        if force:
            self._kill_family()
            self._signal_warden(signal.SIGKILL)
        self.poll()  # if the warden is gone, what it left is killed there

    def end(self, timeout: float = _KILL_BOUND) -> int:
        """Kill it all, wait until it is over, and return the exit code. Raises RuntimeError in a forked copy.

        A warden that has not done so after `timeout` seconds is killed too. Takes at most 2 s longer than `timeout`,
        even if a process hangs in a driver, say, where the system cannot end it: the exit code is then that of the
        SIGKILL it will obey.
        """
        self._refuse_in_copy()
        self.kill()
        code = self.wait(timeout)
        if code is None:
            self.kill(force=True)
            code = self.wait(_FORCE_BOUND)
        with self._lock:
            code = self._exit_code = -signal.SIGKILL if code is None else code
        return code

    def stop(self, timeout: float) -> int:
        """Ask for a clean stop, and `end` what has not ended after `timeout` seconds. Returns the exit code.

        Takes at most 12 s longer than `timeout`. Raises RuntimeError in a forked copy.
        """
        self._refuse_in_copy()
        self.terminate()
        code = self.wait(timeout)
        return self.end(_KILL_BOUND) if code is None else code

    def close(self) -> None:
        """Release the descriptors. What has not ended is abandoned. Take `sentinel` off the event loop before."""
        if self.poll() is None:
            self.abandon()
        elif self._may_release():
            self._release()

    def abandon(self) -> None:
        """Have all ended and released in the background. For finalizers: takes no lock and never blocks."""
        if self._forked():
            return
        self.release()
        if self._may_release():
            try:
                _thread.start_new_thread(self._finish, ())
            except RuntimeError:
                pass  # the interpreter is on its way out; init reaps the warden

    def release(self) -> None:
        """As `kill`, for finalizers: takes no lock. Leaves the descriptors to `abandon`."""
        if not self._forked():
            self._release_owner_fd()

    def _forked(self) -> bool:
        return os.getpid() != self._creator

    def _refuse_in_copy(self) -> None:
        if self._forked():
            raise RuntimeError("this engine core belongs to the process that started it, not to a forked copy")

    def _may_release(self) -> bool:
        try:
            return self._right_to_release.pop()
        except IndexError:
            return False

    def _finish(self) -> None:
        self.end(_KILL_BOUND)
        self._release()

    def _release(self) -> None:
        self._release_owner_fd()
        with self._lock:
            os.close(self._pidfd)
            self._pidfd = -1
        self.report.close()

    def _release_owner_fd(self) -> None:
        """Tell the warden to end it: by a byte, since a forked copy of us keeps its side from seeing the end."""
        try:
            owner = socket.socket(fileno=self._owner_fds.pop())
        except IndexError:
            return
        with owner:
            try:
                owner.send(b"k", socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            except OSError:
                pass  # the warden is gone

    def _signal_warden(self, number: int) -> None:
        with self._lock:
            if self._exit_code is None and not self._forked():
                try:
                    signal.pidfd_send_signal(self._pidfd, number)
                except ProcessLookupError:
                    pass  # it is over, and not reaped yet

    def _reap(self) -> int:
        seen = self.report.read_exit_code()
        if seen is None and not self._forked():
            # The warden was killed. PDEATHSIG took the engine; the rest may be left to us.
            self._kill_family()
        try:
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            result = None  # a wait for any child came first, SIGCHLD is ignored, or this is a forked copy
        if result is None:
            code = -signal.SIGKILL if seen is None else seen
        else:
            code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        if code == -signal.SIGKILL and self._owner_fds:  # it was not we who wanted it
            self._oom_verdict = self._oom.verdict()
        return code

    def _kill_family(self) -> None:
        """Kill what can be found of the engine core and its descendants with no help of the warden."""
        kill_marked(self._mark)
        pgid = self.pgid
        if pgid is not None and pgid > 1 and pgid != os.getpgrp():
            try:
                os.killpg(pgid, signal.SIGKILL)
            except OSError:
                pass

    # --- what to say of it ---

    @property
    def oom_verdict(self) -> str:
        """What is known of the kernel's out-of-memory killer, once it has ended; "": nothing."""
        return self._oom_verdict

    @overload
    def death(self, phase: str, *, reason: str | None = None, **facts: Any) -> EngineDeadError: ...

    @overload
    def death(self, phase: str, cls: type[_E], reason: str | None = None, **facts: Any) -> _E: ...

    def death(
        self,
        phase: str,
        cls: type[EngineDeadError] = EngineDeadError,
        reason: str | None = None,
        rank: int = 0,
        incarnation: int = 0,
        **facts: Any,
    ) -> EngineDeadError:
        """The error that says how this engine core ended; never blocks, so `wait` before.

        Args:
            phase: "start-up", "running" or "stopping".
            cls: the class to build.
            reason: the whole first line, in place of the one that says who died, when and of what.
            rank, incarnation, facts: attributes of the error that the caller knows, or knows better.
        """
        known: dict[str, Any] = {"rank": rank, "incarnation": incarnation, "phase": phase, "pid": self.engine_pid}
        known |= {"exit_code": self.poll(), "stderr_tail": self.report.read_stderr_tail()}
        report = self.report.read_report() or ErrorReport("", "", "")
        known |= {f"remote_{name}": getattr(report, name) for name in ("type", "message", "traceback")}
        known |= facts
        return death_error(cls, reason, known, self._oom_verdict)


def death_error(cls: type[_E], reason: str | None, known: dict[str, Any], verdict: str, node: str = "") -> _E:
    """The error that says how an engine core ended.

    Args:
        cls: the class to build.
        reason: its whole first line; None: made of the rest.
        known: attributes of the error.
        verdict: what is known of the kernel's out-of-memory killer.
        node: where it ran; "": here.
    """
    if reason is None:
        cause = "; ".join(filter(None, [describe_exit(known["exit_code"]), verdict]))
        if known["remote_type"]:
            exit_ = "" if known["exit_code"] is None else f" ({cause})"
            first_line = known["remote_message"].partition("\n")[0]
            cause = f"{known['remote_type'].removeprefix('builtins.')}: {first_line}{exit_}"
        reason = died(known, cause, node)
    return cls(reason, **known)


def died(known: dict[str, Any], cause: str, node: str = "") -> str:
    """Who died, when and of what: the first line of a death report."""
    where = "" if known["pid"] is None else f"pid {known['pid']}"
    where = " ".join(filter(None, [where, node and f"on node {node}"]))
    who = f"rank {known['rank']} ({where})" if where else f"rank {known['rank']}"
    return f"Engine core {who} {_DIED[known['phase']]}: {cause}."


def describe_exit(exit_code: int | None) -> str:
    """Such as "exit code 7", "killed by SIGKILL"."""
    if exit_code is None:
        return "exit code unknown"
    name = signal_name(exit_code)
    return f"exit code {exit_code}" if name is None else f"killed by {name}"


def _readable(fd: int, timeout: float | None) -> bool:
    """Whether the descriptor is readable, or becomes so within `timeout` seconds."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if timeout is None else max(timeout, 0.0) * 1000))
