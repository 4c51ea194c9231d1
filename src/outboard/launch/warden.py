"""The warden: two processes between a front end (the owner) and one engine core, which must not outlive it.

    python -I -S warden.py OWNER_PID OWNER_FD REPORT_FD MARK SESSION_DIR COMMAND...

    owner -> guard -> keeper -> engine core -> its children

It forks before all else. The child half, the keeper, forks again and that child becomes the engine core. It waits for
one of these:

* the owner's pidfd: the owner is gone;
* OWNER_FD: a byte, the owner wants an end; closed with no byte, the owner is gone. It alone would not do: a forked
  copy of the owner keeps it open;
* the engine's pidfd: the engine has ended;
* the guard's pidfd: somebody has killed the guard.

On each it kills whatever is left of the engine, and ends as the engine did: the same exit code, or the same signal. As
a subreaper it inherits what the engine's children leave behind, so nothing escapes by a double fork or a session of
its own.

The parent half, the guard, does nothing but wait for the keeper, and ends as it does. It is a subreaper as well: if the
keeper is killed, or stopped while an end is due, the guard inherits the engine (which PDEATHSIG has ended) and its
children, and does the keeper's work. So either of them may be killed, together with the owner or not. If both are, the
owner kills the engine's group, and what carries MARK in its environment (see `marked.py`). If all three are killed at
once, only PDEATHSIG is left: the engine ends; children of its own would go on, and the session directory stays until
the next front end starts (see `transport/session.py`).

It runs as a program of its own, with no site-packages: of Outboard it imports the files beside it, and little else.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys

TYPE_CHECKING = False  # `typing` takes longer to import than all the rest; so does what `signal` adds to `_signal`
if TYPE_CHECKING:
    import signal
    from typing import NoReturn

    from outboard.launch.warden_output import EngineOutput, load, number, store
    from outboard.launch.warden_tree import end_tree, read_file, remove_tree
else:
    import _signal as signal

    sys.path.append(os.path.dirname(__file__))  # noqa: PTH120 - last, so that it hides nothing of the standard library
    from warden_output import EngineOutput, load, number, store
    from warden_tree import end_tree, read_file, remove_tree

# On the report page: the engine's pid, 1 once it has ended, its exit code.
PID_OFFSET, STATUS_OFFSET, CODE_OFFSET = 0, 8, 16
KEEPER_GRACE = 2.0  # seconds for the keeper to end once the owner wants it or is gone; then the guard takes over

MARK = b"OUTBOARD_ENGINE"  # in the engine's environment, and so in that of all its descendants

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


def main(owner_pid: int, owner_fd: int, report_fd: int, mark: str, session_dir: str, command: list[str]) -> NoReturn:
    """Start the command, watch over it, end as it did."""
    fill_stdio()
    # Until the handlers are there signals wait; a SIGTERM that came in between would be lost on the engine.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        owner_pidfd = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        owner_pidfd = -1
    # As long as the owner is our parent, its number cannot have gone to another process.
    if owner_pidfd < 0 or os.getppid() != owner_pid:
        remove_tree(session_dir)
        os._exit(0)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # an inherited "ignore" would hide how the engine ended
    guard_pidfd = os.pidfd_open(os.getpid())
    keeper = os.fork()
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # the child does not inherit it
    if keeper == 0:
        os.setsid()  # who kills the guard's group does not mean the keeper
        keep(owner_pidfd, owner_fd, report_fd, mark, session_dir, command, guard_pidfd)
    guard(owner_pidfd, owner_fd, report_fd, session_dir, keeper)


def keep(
    owner_pidfd: int,
    owner_fd: int,
    report_fd: int,
    mark: str,
    session_dir: str,
    command: list[str],
    guard_pidfd: int,
) -> NoReturn:
    """The keeper: the engine's parent."""
    engine, source = start_engine(command, owner_fd, mark)
    engine_pidfd = os.pidfd_open(engine)
    store(report_fd, number(engine), PID_OFFSET)
    output = EngineOutput(source, report_fd)

    wake_fd = set_handlers(engine, engine_pidfd)
    watch((owner_pidfd, owner_fd, engine_pidfd, guard_pidfd), wake_fd, output)

    code = end_tree(engine).get(engine, -signal.SIGKILL)
    output.finish()
    store(report_fd, number(1) + number(code), STATUS_OFFSET)
    if ready([guard_pidfd], 0):
        keep_files(owner_pidfd, owner_fd, session_dir)
    elif owner_gone(owner_pidfd, owner_fd):
        remove_tree(session_dir)
        send(guard_pidfd, signal.SIGKILL)  # all is done; if somebody has stopped it, it would stay
    exit_like(code)


def guard(owner_pidfd: int, owner_fd: int, report_fd: int, session_dir: str, keeper: int) -> NoReturn:
    """The guard: the keeper's parent, and its stand-in."""
    keeper_pidfd = os.pidfd_open(keeper)
    wake_fd = set_handlers(keeper, keeper_pidfd)
    watch((owner_pidfd, owner_fd, keeper_pidfd), wake_fd)

    ended = ready([keeper_pidfd], KEEPER_GRACE)
    engine, over, code = (load(report_fd, offset) for offset in (PID_OFFSET, STATUS_OFFSET, CODE_OFFSET))
    if ended and over == 1:
        os.waitpid(keeper, 0)
    else:
        codes = end_tree(engine)
        code = codes.get(engine, codes.get(keeper, -signal.SIGKILL))
        store(report_fd, number(1) + number(code), STATUS_OFFSET)
        if os.fork() == 0:
            keep_files(owner_pidfd, owner_fd, session_dir)
            os._exit(0)
    if ready([owner_pidfd], 0):
        remove_tree(session_dir)
    exit_like(code)


def keep_files(owner_pidfd: int, owner_fd: int, session_dir: str) -> None:
    """Wait until the owner lets go of the engine core, and remove the directory if that is because it is gone.

    For a half whose other half was killed: who does that often means the owner as well, and an owner takes a moment to
    end. The owner does not wait for this.
    """
    ready([owner_pidfd, owner_fd], None)
    if owner_gone(owner_pidfd, owner_fd):
        remove_tree(session_dir)


def start_engine(command: list[str], owner_fd: int, mark: str) -> tuple[int, int]:
    """Fork, and make the child the engine. Returns its pid and the reading end of its stdout and stderr."""
    source, sink = os.pipe()
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            become_engine(command, owner_fd, sink, keeper, mark)
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


def become_engine(command: list[str], owner_fd: int, sink: int, keeper: int, mark: str) -> NoReturn:
    os.dup2(sink, 1)  # a library that prints must not write into the owner's stdout
    os.dup2(sink, 2)
    os.setpgid(0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
    os.close(owner_fd)  # inheritable, as the report page is; all the rest closes by itself
    for number_ in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number_, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    environment = original_environment()
    # An engine may be a descendant of another one; then it carries the marks of both.
    environment[MARK] = b" ".join(filter(None, [environment.get(MARK), mark.encode()]))
    os.execvpe(command[0], command, environment)


def set_handlers(child: int, child_pidfd: int) -> int:
    """SIGTERM goes on to the child; adopted processes that end are reaped; what a terminal sends is ignored.

    Returns a descriptor to poll. A signal that comes just before the poll does not interrupt it, and Python runs the
    handler only afterwards: the descriptor ends the poll.
    """
    wake_fd, signal_fd = os.pipe()
    os.set_blocking(signal_fd, False)
    signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)

    def forward(*_: object) -> None:
        send(child_pidfd, signal.SIGTERM)

    def reap(*_: object) -> None:
        try:
            while info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if info.si_pid == child:  # stays a zombie until its group has been killed by its number
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


def watch(ends: tuple[int, ...], wake_fd: int, output: EngineOutput | None = None) -> None:
    """Wait until one of these descriptors says that it is over; meanwhile pass the engine's output on."""
    poller = select.poll()
    for fd in (*ends, wake_fd):
        poller.register(fd, select.POLLIN)
    if output is not None:
        poller.register(output.source, select.POLLIN)
    while True:
        found = {fd for fd, _ in poller.poll(None if output is None else output.timeout())}
        if output is not None:
            if output.source in found:
                output.read()
                if not output.open:
                    poller.unregister(output.source)
            output.flush()
        if wake_fd in found:
            os.read(wake_fd, 4096)
        if not found.isdisjoint(ends):
            return


def ready(fds: list[int], seconds: float | None) -> set[int]:
    """Those of the descriptors that are readable, or the first that become so within this time."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(None if seconds is None else seconds * 1000)}


def send(pidfd: int, number_: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number_)
    except ProcessLookupError:
        pass


def owner_gone(owner_pidfd: int, owner_fd: int) -> bool:
    """Whether the owner has ended, as against asked for an end."""
    found = ready([owner_pidfd, owner_fd], 0)
    return owner_pidfd in found or (owner_fd in found and not os.read(owner_fd, 1))


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


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], sys.argv[6:])
