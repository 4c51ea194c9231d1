"""Whether the kernel's out-of-memory killer struck: by counters of the control groups, since it leaves no other trace.

A process that it kills ends by SIGKILL, as if by anybody. But the kernel counts its victims: for each control group
(`oom_kill` in memory.events, or in memory.oom_control of cgroup v1), and for the whole machine in /proc/vmstat, which
is asked where no group has a counter: the root group of cgroup v2 has none.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["OomWatch"]

_HINT = "it needs less memory (a smaller model, fewer ranks), or a higher limit"


class OomWatch:
    """Counts out-of-memory kills from now on, in this process's control group and in those added.

    Args:
        proc: where procfs is mounted.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._groups: dict[Path, int] = {}  # counter files of control groups, and where they stood
        self.add(os.getpid())
        self._machine = _read_count(proc / "vmstat")

    def add(self, pid: int) -> None:
        """Counts in the control group of this process as well."""
        for path in _counters(self._proc, pid):
            if path not in self._groups and (count := _read_count(path)) is not None:
                self._groups[path] = count

    def verdict(self) -> str:
        """What to say of a process that was killed, such as "the kernel's out-of-memory killer struck ..."; else ""."""
        where, counters = "in this control group", self._groups
        if not counters and self._machine is not None:
            where, counters = "on this machine", {self._proc / "vmstat": self._machine}
        # A group above another one counts the other's victims as well: the greatest, not the sum.
        times = max(((_read_count(path) or 0) - before for path, before in counters.items()), default=0)
        if times <= 0:
            return ""
        noun = "time" if times == 1 else "times"
        return f"the kernel's out-of-memory killer struck {where} meanwhile ({times} {noun}); {_HINT}"


def _counters(proc: Path, pid: int) -> list[Path]:
    """The files that count the out-of-memory kills in a process's control group; they may not exist."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
        mounts = (proc / "self" / "mountinfo").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    group: dict[str, str] = {}  # path of the group by version
    for line in lines:  # such as "0::/user.slice" (v2) or "4:memory:/user.slice" (v1)
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            group["cgroup2"] = path
        elif "memory" in controllers.split(","):
            group["cgroup"] = path
    found = []
    for line in mounts:  # id, parent, device, root, mount point, options, tags, "-", type, source, options
        fields, _, kind = line.partition(" - ")
        _, _, _, root, mount_point, *_ = [*fields.split(" "), *[""] * 5]
        version, _, options = [*kind.split(" "), "", "", ""][:3]
        if version not in group or (version == "cgroup" and "memory" not in options.split(",")):
            continue
        # In a container the mount may begin at the container's own group.
        path = group[version].removeprefix(root.rstrip("/")).strip("/")
        name = "memory.events" if version == "cgroup2" else "memory.oom_control"
        found.append(Path(mount_point) / path / name)
    return found


def _read_count(path: Path) -> int | None:
    """The `oom_kill` of a file with a name and a number in each line; None if there is none."""
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None
