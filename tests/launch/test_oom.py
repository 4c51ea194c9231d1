"""Out-of-memory kills, told from the kernel's counters as they look in each of the places where they may be."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_scripts import System

from outboard.launch import process as module
from outboard.launch.oom import OomWatch
from outboard.launch.process import EngineProcess

ENGINE = 4_000_000  # a process id that no machine gives out by itself

V2 = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
VMSTAT = "nr_free_pages 100\noom_kill {}\npgfault 7\n"


class Machine:
    """A machine's /proc and control groups, in files.

    Args:
        version: of the control groups.
        root: where the mount begins, as a container sees it.
    """

    def __init__(self, path: Path, version: int = 2, root: str = "/") -> None:
        self.proc = path / "proc"
        self._mount = path / "cgroup"
        self._version = version
        self._root = root
        (self.proc / "self").mkdir(parents=True)
        kind = "- cgroup2 cgroup2 rw\n" if version == 2 else "- cgroup cgroup rw,memory\n"
        mounts = f"22 1 8:1 / / rw - ext4 /dev/root rw\n31 22 0:27 / {path}/cpu rw - cgroup cgroup rw,cpu\n"
        (self.proc / "self" / "mountinfo").write_text(f"{mounts}32 22 0:28 {root} {self._mount} rw,nosuid {kind}")
        self.join(os.getpid(), "/front")

    def join(self, pid: int, group: str) -> None:
        """Puts a process into a group."""
        (self.proc / str(pid)).mkdir(exist_ok=True)
        line = f"0::{group}" if self._version == 2 else f"5:cpu:/elsewhere\n4:memory:{group}\n0::/"
        (self.proc / str(pid) / "cgroup").write_text(f"{line}\n")

    def kills(self, group: str, count: int) -> None:
        """Sets a group's counter."""
        path = self._mount / group.removeprefix(self._root.rstrip("/")).strip("/")
        path.mkdir(parents=True, exist_ok=True)
        name, text = ("memory.events", V2) if self._version == 2 else ("memory.oom_control", V1)
        (path / name).write_text(text.format(count))

    def kills_anywhere(self, count: int) -> None:
        """Sets the machine's counter."""
        (self.proc / "vmstat").write_text(VMSTAT.format(count))


@pytest.fixture(params=[(1, "/"), (2, "/"), (1, "/front"), (2, "/front")], ids=str)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(tmp_path, *request.param)


def test_a_kill_in_our_own_group(machine: Machine) -> None:
    machine.kills("/front", 5)
    watch = OomWatch(machine.proc)
    assert watch.verdict() == ""
    machine.kills("/front", 6)
    assert watch.verdict().startswith(
        "the kernel's out-of-memory killer struck in this control group meanwhile (1 time); it needs less memory"
    )
    machine.kills("/front", 8)
    assert "(3 times)" in watch.verdict()


def test_a_kill_in_the_engines_group_only(machine: Machine) -> None:
    machine.join(ENGINE, "/front/engine")
    machine.kills("/front", 0)
    machine.kills("/front/engine", 2)
    watch = OomWatch(machine.proc)
    watch.add(ENGINE)
    machine.kills("/front/engine", 3)
    assert "(1 time)" in watch.verdict()


def test_a_victim_that_two_groups_count_is_one(machine: Machine) -> None:
    machine.join(ENGINE, "/front/engine")
    machine.kills("/front", 1)
    machine.kills("/front/engine", 0)
    watch = OomWatch(machine.proc)
    watch.add(ENGINE)
    watch.add(ENGINE)
    machine.kills("/front", 2)
    machine.kills("/front/engine", 1)
    assert "(1 time)" in watch.verdict()


def test_where_no_group_counts_the_machine_does(machine: Machine) -> None:
    machine.kills_anywhere(9)
    watch = OomWatch(machine.proc)
    assert watch.verdict() == ""
    machine.kills_anywhere(11)
    assert "struck on this machine meanwhile (2 times)" in watch.verdict()


def test_what_other_groups_do_is_not_told(machine: Machine) -> None:
    machine.kills("/front", 0)
    machine.kills_anywhere(0)
    watch = OomWatch(machine.proc)
    machine.kills_anywhere(1)
    assert watch.verdict() == ""


def test_a_group_that_has_gone_says_nothing(machine: Machine, tmp_path: Path) -> None:
    machine.kills("/front", 1)
    watch = OomWatch(machine.proc)
    for path in (tmp_path / "cgroup").rglob("memory.*"):
        path.unlink()
    assert watch.verdict() == ""


@pytest.mark.parametrize(
    "text", [None, "", "\n\n", "nonsense", "0::", "::::", "4:memory", "oom_kill x", "1 2 3 - \n", "- cgroup2"]
)
@pytest.mark.parametrize("name", ["self/mountinfo", "{pid}/cgroup", "vmstat"])
def test_files_that_are_missing_or_make_no_sense(tmp_path: Path, name: str, text: str | None) -> None:
    machine = Machine(tmp_path)
    path = machine.proc / name.format(pid=os.getpid())
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    assert OomWatch(machine.proc).verdict() == ""


def test_no_proc_at_all(tmp_path: Path) -> None:
    watch = OomWatch(tmp_path)
    watch.add(1)
    assert watch.verdict() == ""


def test_the_real_machine_has_a_counter() -> None:
    """Whichever it is: the names of fields and files are the kernel's."""
    watch = OomWatch()
    assert watch._groups or watch._machine is not None
    assert watch.verdict() == ""


# --- in the death report ---


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the out-of-memory kills of this process's group, where engine processes look."""
    machine = Machine(tmp_path / "machine")
    machine.kills("/front", 0)
    monkeypatch.setattr(module, "OomWatch", lambda: OomWatch(machine.proc))
    return lambda count: machine.kills("/front", count)


PAUSE = "tell(os.getpid()); signal.pause()"


def killed(process: EngineProcess, by: int) -> str:
    assert process.engine_pid is not None
    os.kill(process.engine_pid, by)
    assert process.wait(5) == -by
    return process.death("running").reason


def test_the_death_of_an_engine_that_ran_out_of_memory(
    start: Callable[..., EngineProcess], system: System, tmp_path: Path, counter: Callable[[int], None]
) -> None:
    process = start(PAUSE)
    pid = system.told(tmp_path / "told")
    counter(1)
    reason = killed(process, signal.SIGKILL)
    assert reason == (
        f"Engine core rank 0 (pid {pid}) died while running: killed by SIGKILL; the kernel's out-of-memory killer "
        "struck in this control group meanwhile (1 time); it needs less memory (a smaller model, fewer ranks), or a "
        "higher limit."
    )
    counter(2)  # what comes later was not its death
    assert process.death("running").reason == reason


@pytest.mark.parametrize(("by", "times"), [(signal.SIGKILL, 0), (signal.SIGTERM, 1)])
def test_the_death_of_an_engine_that_somebody_killed(
    start: Callable[..., EngineProcess],
    system: System,
    tmp_path: Path,
    counter: Callable[[int], None],
    by: int,
    times: int,
) -> None:
    process = start(PAUSE)
    system.told(tmp_path / "told")
    counter(times)
    assert killed(process, by).endswith(f"killed by {signal.Signals(by).name}.")


def test_the_death_of_an_engine_that_we_killed(
    start: Callable[..., EngineProcess], system: System, tmp_path: Path, counter: Callable[[int], None]
) -> None:
    process = start(PAUSE)
    system.told(tmp_path / "told")
    counter(1)
    assert process.end(5) == -signal.SIGKILL
    assert process.death("stopping").reason.endswith("killed by SIGKILL.")


def test_the_group_of_the_engine_is_known_from_its_hello(
    start: Callable[..., EngineProcess], system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path / "machine")
    machine.kills("/front", 0)
    machine.kills("/engine", 0)
    monkeypatch.setattr(module, "OomWatch", lambda: OomWatch(machine.proc))
    process = start(PAUSE)
    pid = system.told(tmp_path / "told")
    machine.join(pid, "/engine")
    process.identify(pid, pid)
    machine.kills("/engine", 1)
    assert "(1 time)" in killed(process, signal.SIGKILL)
