"""How the warden ends a tree of processes, and removes a tree of files.

Imported by `warden.py`, which runs outside the package, so it imports nothing of Outboard.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal

KILL_BOUND = 30.0  # seconds for the killed to go; a process with much memory, or a GPU, needs some


def end_tree(engine: int) -> dict[int, int]:
    """Kill the engine's group, then all children and whatever is adopted, until none is left.

    Call it in a subreaper. Returns the exit codes by process id. `engine` may be 0 if it is not known.
    """
    codes: dict[int, int] = {}
    deadline = time.monotonic() + KILL_BOUND
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    if engine > 1:
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
                codes[found[0]] = os.waitstatus_to_exitcode(found[1])
            # The killed leave their own children to us, so each death is a reason to look again.
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
    except ChildProcessError:
        pass
    return codes


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


def list_dir(path: str | int) -> list[str]:
    return os.listdir(path)  # noqa: PTH208 - pathlib takes as long to import as Python to start


def read_file(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123
        return file.read()
