"""The warden: a process between a front end (the owner) and one engine core, which must not outlive it.

    python -I -S warden.py OWNER_PID OWNER_FD REPORT_FD SESSION_DIR COMMAND...

It forks before all else; the child half becomes the engine core. The other half waits for one of three:

* the owner's pidfd: the owner is gone;
* OWNER_FD: a byte, the owner wants an end; closed with no byte, the owner is gone. It alone would not do: a forked
  copy of the owner keeps it open;
* the engine's pidfd: the engine has ended.

On each it kills whatever is left of the engine, and ends as the engine did: the same exit code, or the same signal. As
a subreaper it inherits what the engine's children leave behind, so nothing escapes by a double fork or a session of
its own. If the warden itself is killed, PDEATHSIG ends the engine.

It runs as a program of its own, with no site-packages: of Outboard it imports the file beside it, and little else.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import time

TYPE_CHECKING = False  # `typing` takes longer to import than all the rest; so does what `signal` adds to `_signal`
if TYPE_CHECKING:
    import signal
    from typing import NoReturn

    from outboard.launch.warden_output import EngineOutput, number, store
else:
    import _signal as signal

    sys.path.append(os.path.dirname(__file__))  # noqa: PTH120 - last, so that it hides nothing of the standard library
    from warden_output import EngineOutput, number, store

STATUS_OFFSET = 8  # on the report page, behind the engine's pid: 1 once it has ended, its exit code
KILL_BOUND = 30.0  # seconds for the killed to go; a process with much memory, or a GPU, needs some

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


def main(owner_pid: int, owner_fd: int, report_fd: int, session_dir: str, command: list[str]) -> NoReturn:
    """Start the command, watch over it, end as it did."""
    fill_stdio()
    # Until the handlers are there signals wait; a SIGTERM that came in between would be lost on the engine.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        owner_pidfd = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        owner_pidfd = -1
    # As long as the owner is our parent, its number cannot have gone to another process.
    if owner_pidfd < 0 or os.getppid() != owner_pid:
        remove_tree(session_dir)
        os._exit(0)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # an inherited "ignore" would hide how the engine ended
    engine, source = start_engine(command, owner_fd)
    engine_pidfd = os.pidfd_open(engine)
    store(report_fd, number(engine), 0)
    output = EngineOutput(source, report_fd)

    wake_fd = set_handlers(engine, engine_pidfd)
    watch(output, wake_fd, (owner_pidfd, owner_fd, engine_pidfd))

    code = end_tree(engine)
    if owner_gone(owner_pidfd, owner_fd):
        remove_tree(session_dir)
    output.finish()
    store(report_fd, number(1) + number(code), STATUS_OFFSET)
    exit_like(code)


def start_engine(command: list[str], owner_fd: int) -> tuple[int, int]:
    """Fork, and make the child the engine. Returns its pid and the reading end of its stdout and stderr."""
    source, sink = os.pipe()
    warden = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            become_engine(command, owner_fd, sink, warden)
        except BaseException as error:
            os.write(2, f"outboard: cannot run {command[0]}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(127)
    os.close(sink)
    try:
        os.setpgid(pid, pid)  # here as well as there: the group exists for whichever half comes first
    except OSError:
        pass
    return pid, source


def become_engine(command: list[str], owner_fd: int, sink: int, warden: int) -> NoReturn:
    os.dup2(sink, 1)  # a library that prints must not write into the owner's stdout
    os.dup2(sink, 2)
    os.setpgid(0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != warden:
        os._exit(1)
    os.close(owner_fd)  # inheritable, as the report page is; all the rest closes by itself
    for number_ in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number_, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execvpe(command[0], command, original_environment())


def set_handlers(engine: int, engine_pidfd: int) -> int:
    """SIGTERM goes on to the engine; adopted processes that end are reaped; what a terminal sends is ignored.

    Returns a descriptor to poll. A signal that comes just before the poll does not interrupt it, and Python runs the
    handler only afterwards: the descriptor ends the poll.
    """
    wake_fd, signal_fd = os.pipe()
    os.set_blocking(signal_fd, False)
    signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)

    def forward(*_: object) -> None:
        try:
            signal.pidfd_send_signal(engine_pidfd, signal.SIGTERM)
        except ProcessLookupError:
            pass

    def reap(*_: object) -> None:
        try:
            while info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if info.si_pid == engine:  # stays a zombie until its group has been killed by its number
                    return
                os.waitpid(info.si_pid, 0)
        except ChildProcessError:
            pass

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGCHLD, reap)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return wake_fd


def watch(output: EngineOutput, wake_fd: int, ends: tuple[int, ...]) -> None:
    """Pass the engine's output on until one of these descriptors says that it is over."""
    poller = select.poll()
    for fd in (*ends, output.source, wake_fd):
        poller.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll(output.timeout())}
        if output.source in ready:
            output.read()
            if not output.open:
                poller.unregister(output.source)
        if wake_fd in ready:
            os.read(wake_fd, 4096)
        output.flush()
        if not ready.isdisjoint(ends):
            return


def end_tree(engine: int) -> int:
    """Kill the engine's group, then whatever is adopted, until no child is left. Returns the engine's exit code."""
    code = -signal.SIGKILL
    deadline = time.monotonic() + KILL_BOUND
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        os.killpg(engine, signal.SIGKILL)
    except OSError:
        pass
    try:
        while time.monotonic() < deadline:
            for pid in children():
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:  # it runs as someone else
                    pass
            while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if found[0] == engine:
                    code = os.waitstatus_to_exitcode(found[1])
            # The killed leave their own children to us, so each death is a reason to look again.
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
    except ChildProcessError:
        pass
    return code


def children() -> list[int]:
    me = os.getpid()
    try:
        return [int(pid) for pid in read_file(f"/proc/self/task/{me}/children").split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [int(pid) for pid in list_dir("/proc") if pid.isdigit() and parent_of(pid) == me]


def parent_of(pid: str) -> int:
    try:
        return int(read_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
    except OSError:
        return -1


def owner_gone(owner_pidfd: int, owner_fd: int) -> bool:
    """Whether the owner has ended, as against asked for an end."""
    poller = select.poll()
    for fd in (owner_pidfd, owner_fd):
        poller.register(fd, select.POLLIN)
    ready = {fd for fd, _ in poller.poll(0)}
    return owner_pidfd in ready or (owner_fd in ready and not os.read(owner_fd, 1))


def remove_tree(path: str, parent: int | None = None) -> None:
    """Remove a directory with what is in it. Follows no link; several wardens may do the same at once."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError:
        return
    for name in list_dir(fd):
        try:
            os.unlink(name, dir_fd=fd)
        except OSError:
            remove_tree(name, fd)
    os.close(fd)
    try:
        os.rmdir(path, dir_fd=parent)
    except OSError:
        pass


def exit_like(code: int) -> NoReturn:
    if code < 0:
        prctl(PR_SET_DUMPABLE, 0)  # the engine has dumped core already; RLIMIT_CORE does not hold for piped dumps
        try:
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
            os.kill(os.getpid(), -code)
        except (OSError, ValueError):
            pass
    os._exit(code if code >= 0 else 128 - code)


def original_environment() -> dict[bytes, bytes]:
    """The environment as we were given it: in the C locale Python adds LC_CTYPE to its own."""
    try:
        entries = read_file("/proc/self/environ").split(b"\0")
    except OSError:
        return dict(os.environb)
    return {name: value for name, separator, value in (entry.partition(b"=") for entry in entries) if separator}


def fill_stdio() -> None:
    """Give 0, 1 and 2 to /dev/null where they are closed: nothing else may get these numbers."""
    while (fd := os.open("/dev/null", os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def list_dir(path: str | int) -> list[str]:
    return os.listdir(path)  # noqa: PTH208 - pathlib takes as long to import as Python to start


def read_file(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123
        return file.read()


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
