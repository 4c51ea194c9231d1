"""What must hold whatever dies first: nothing is left, nothing blocks, nothing lies about how it ended."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_scripts import PRELUDE, System

from outboard.launch.process import EngineProcess

Start = Callable[..., EngineProcess]

# Children of every kind: plain, in a session of its own, double-forked, double-forked in a session of its own.
FAMILY = """
def child(double, session):
    r, w = os.pipe()
    if os.fork() == 0:
        if session: os.setsid()
        if double and os.fork(): os._exit(0)
        os.write(w, b"%d" % os.getpid())
        signal.pause()
    os.close(w)
    return int(os.read(r, 20))
tell([os.getpid()] + [child(d, s) for d in (False, True) for s in (False, True)])
"""

OWNER = """
import os, signal, sys
from pathlib import Path
from outboard.launch.process import EngineProcess
session, engine, told, mode = sys.argv[1:]
if mode == "ignores SIGCHLD":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
process = EngineProcess.start(os.environ, Path(session), [sys.executable, "-I", "-S", "-c", engine, told])
if mode == "forked copy":
    copy = os.fork()
    if copy == 0:
        signal.pause()
    print(copy, flush=True)
if mode == "SIGINT":
    signal.signal(signal.SIGINT, lambda *_: print("SIGINT", flush=True))
if mode.startswith(("ignores", "closed")):
    Path(told + ".owner").write_text(f"{process.wait(10)} {process.report.read_stderr_tail()}")
else:
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a front end of its own, in a process group of its own, with an engine core that runs the script."""
    session = tmp_path / "session"
    (session / "deeper").mkdir(parents=True)
    (session / "deeper" / "file").touch()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (session / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "owner.py").write_text(OWNER)
    with contextlib.ExitStack() as stack:

        def start(script: str, mode: str = "", redirect: str = "") -> subprocess.Popen[str]:
            arguments = [tmp_path / "owner.py", session, PRELUDE + script, tmp_path / "told", mode]
            process = subprocess.Popen(
                ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


@contextlib.contextmanager
def stderr_into_pipe() -> Iterator[int]:
    """Our stderr is a pipe inside, which nobody reads unless the test does. Gives the reading end."""
    reader, writer = os.pipe()
    saved = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield reader
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(reader)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 7),
        ("os._exit(255)", 255),
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 3)", -signal.SIGRTMIN - 3),
    ],
)
def test_the_exit_status_is_the_engines(start: Start, script: str, code: int) -> None:
    process = start(script)
    assert process.wait(5) == code
    assert process.report.read_exit_code() == code


def test_there_is_no_second_core_dump(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    monkeypatch.chdir(tmp_path)
    resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))
    try:
        process = start("os.abort()")
        result = os.waitid(os.P_PID, process.warden_pid, os.WEXITED | os.WNOWAIT)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)
    assert (result.si_status, result.si_code) == (signal.SIGABRT, os.CLD_KILLED)


def test_an_engine_killed_from_outside(start: Start, system: System, tmp_path: Path) -> None:
    process = start("tell(os.getpid()); signal.pause()")
    pid = system.told(tmp_path / "told")
    assert process.engine_pid == process.pgid == pid
    os.kill(pid, signal.SIGKILL)
    assert process.wait(5) == -signal.SIGKILL


def test_descendants_do_not_outlive_the_engine(start: Start, system: System, tmp_path: Path) -> None:
    process = start(FAMILY + "sys.exit(3)")
    assert process.wait(5) == 3
    family = system.told(tmp_path / "told")
    assert len(family) == 5
    assert not any(system.alive(pid) for pid in family)


@pytest.mark.parametrize("native", [False, True], ids=["", "GIL held"])
@pytest.mark.parametrize("mode", ["", "forked copy"])
def test_nothing_outlives_a_killed_owner(owner: Start, system: System, tmp_path: Path, mode: str, native: bool) -> None:
    waiting = "import ctypes; ctypes.PyDLL(None).sleep(1000)" if native else "signal.pause()"
    process = owner(FAMILY + waiting, mode)
    copy = int(process.stdout.readline()) if mode else None
    assert process.stdout.readline() == "up\n"
    family = system.told(tmp_path / "told")
    assert all(system.alive(pid) for pid in family)
    process.kill()
    try:
        system.eventually(lambda: not any(system.alive(pid) for pid in family))
        system.eventually(lambda: not (tmp_path / "session").exists())
        assert copy is None or system.alive(copy)
    finally:
        if copy is not None:
            os.kill(copy, signal.SIGKILL)
    assert (tmp_path / "precious" / "file").exists()


def test_an_owner_that_just_exits(owner: Start, system: System, tmp_path: Path) -> None:
    process = owner(FAMILY + "signal.pause()")
    family = system.told(tmp_path / "told")
    process.stdin.close()
    assert process.wait(5) == 0
    system.eventually(lambda: not any(system.alive(pid) for pid in family))
    system.eventually(lambda: not (tmp_path / "session").exists())


def test_an_owner_that_is_gone_before_the_warden_looks(system: System, tmp_path: Path) -> None:
    warden = Path(sys.modules[EngineProcess.__module__].__file__).with_name("warden.py")
    reader, writer = os.pipe()
    (tmp_path / "session").mkdir()
    not_our_parent = str(os.getppid())
    command = ["sh", "-c", f"touch {tmp_path}/started"]
    argv = [
        sys.executable,
        "-I",
        "-S",
        warden,
        not_our_parent,
        str(reader),
        "0",
        "mark",
        tmp_path / "session",
        *command,
    ]
    assert subprocess.run(argv, pass_fds=[reader], timeout=5).returncode == 0
    os.close(reader)
    os.close(writer)
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "session").exists()


def test_a_living_owner_keeps_its_session_directory(start: Start, system: System, tmp_path: Path) -> None:
    process = start(FAMILY + "signal.pause()")
    family = system.told(tmp_path / "told")
    process.kill()
    assert process.wait(5) == -signal.SIGKILL
    assert not any(system.alive(pid) for pid in family)
    assert (tmp_path / "session").exists()


def test_the_warden_is_killed(start: Start, system: System, tmp_path: Path) -> None:
    process = start("os.fork(); tell([os.getpid(), os.getpgid(0)]); signal.pause()")
    system.told(tmp_path / "told")
    group = process.pgid
    os.kill(process.warden_pid, signal.SIGKILL)
    assert process.wait(5) == -signal.SIGKILL
    system.eventually(lambda: not members(system, group))


def test_the_warden_is_killed_while_nobody_looks(owner: Start, system: System, tmp_path: Path) -> None:
    owner("tell([os.getpid(), os.getppid()]); signal.pause()")
    engine, warden = system.told(tmp_path / "told")
    os.kill(warden, signal.SIGKILL)
    system.eventually(lambda: not system.alive(engine))


def members(system: System, group: int) -> list[int]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    found = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == group and system.alive(pid):
                found.append(pid)
    return found


def test_the_adopted_are_reaped_while_the_engine_runs(start: Start, system: System, tmp_path: Path) -> None:
    process = start("""
for _ in range(3):
    if os.fork() == 0:
        os.fork()
        os._exit(0)
    os.wait()
tell(os.getpid())
signal.pause()
""")
    engine = system.told(tmp_path / "told")
    keeper = system.parent(engine)
    system.eventually(lambda: system.children_of(keeper) == [engine])
    assert system.children_of(process.warden_pid) == [keeper]


# --- signals ---


def test_sigterm_reaches_the_engine_only(start: Start, system: System, tmp_path: Path) -> None:
    process = start("""
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
tell(1)
while True: signal.pause()
""")
    system.told(tmp_path / "told")
    for ignored in (signal.SIGINT, signal.SIGHUP):
        os.kill(process.warden_pid, ignored)
    process.terminate()
    assert process.wait(5) == 0


def test_sigterm_at_any_moment_of_the_start(start: Start, system: System) -> None:
    for milliseconds in range(0, 50, 2):
        process = start("signal.pause()")
        process.wait(milliseconds / 1000)
        process.terminate()
        assert process.wait(5) == -signal.SIGTERM


def test_ctrl_c_does_not_reach_the_engine(owner: Start, system: System, tmp_path: Path) -> None:
    process = owner("signal.signal(signal.SIGINT, signal.SIG_DFL); tell(os.getpid()); signal.pause()", "SIGINT")
    engine = system.told(tmp_path / "told")
    assert process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n"
    assert system.alive(engine)
    assert os.getsid(engine) != os.getsid(process.pid)


def test_the_engine_starts_with_default_signals(start: Start, system: System, tmp_path: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        process = start("tell(open('/proc/self/status').read()); signal.pause()")
        status = system.told(tmp_path / "told")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGUSR2, before)
    masks = dict(re.findall(r"Sig(Blk|Ign):\s+(\w+)", status))
    pythons_own = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    assert int(masks["Blk"], 16) == 0
    of_libc = 1 << 31 | 1 << 32  # signals 32 and 33 are the C library's own, inherited as they come
    assert int(masks["Ign"], 16) & ~of_libc == pythons_own
    assert process.poll() is None


def test_sigchld_ignored_by_the_owner(owner: Start, tmp_path: Path) -> None:
    assert owner("sys.exit(7)", "ignores SIGCHLD").wait(10) == 0
    assert (tmp_path / "told.owner").read_text().split() == ["7"]


# --- what the engine inherits ---


def test_the_engine_holds_no_descriptor_of_ours(start: Start, system: System, tmp_path: Path) -> None:
    ours = os.pipe()
    os.set_inheritable(ours[1], True)
    try:
        process = start("tell(os.getpid()); signal.pause()")
        fds = Path(f"/proc/{system.told(tmp_path / 'told')}/fd")
        held = {int(entry.name): str(entry.readlink()) for entry in fds.iterdir()}
    finally:
        for fd in ours:
            os.close(fd)
    assert set(held) == {0, 1, 2, process.report.fd}
    assert held[0] == "/dev/null"
    assert held[1] == held[2]
    assert held[1].startswith("pipe:")
    assert "outboard-report" in held[process.report.fd]


def test_the_environment_is_passed_unchanged(start: Start, system: System, tmp_path: Path) -> None:
    env = {"LC_ALL": "", "LANG": "C", "NAME": "a=b \u00e9"}
    process = start("tell(os.getpid()); signal.pause()", env)
    environ = Path(f"/proc/{system.told(tmp_path / 'told')}/environ").read_bytes().rstrip(b"\0").split(b"\0")
    wanted = {**env, "OUTBOARD_REPORT_FD": str(process.report.fd), "OUTBOARD_ENGINE": process._mark}
    assert sorted(environ) == sorted(f"{name}={value}".encode() for name, value in wanted.items())


def test_an_engine_under_another_one_carries_both_marks(start: Start, system: System, tmp_path: Path) -> None:
    process = start("tell(os.environ['OUTBOARD_ENGINE'].split()); signal.pause()", {"OUTBOARD_ENGINE": "outer"})
    assert system.told(tmp_path / "told") == ["outer", process._mark]


def test_an_owner_with_no_stdio(owner: Start, tmp_path: Path) -> None:
    assert owner("print('hello'); sys.exit(7)", "closed", "<&- >&- 2>&-").wait(10) == 0
    assert (tmp_path / "told.owner").read_text().split() == ["7", "hello"]


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with stderr_into_pipe():
        process = EngineProcess.start({}, tmp_path, ["/does/not/exist"])
        assert process.wait(5) == 127
    assert "cannot run /does/not/exist" in process.report.read_stderr_tail()
    process.close()


# --- stderr ---

TEN_MEGABYTES = """
line = b"x" * 99 + b"\\n"
for _ in range(1000):
    os.write(2, line * 100)
os.write(2, b"the end\\n")
"""


def test_stdout_goes_to_stderr(start: Start) -> None:
    with stderr_into_pipe() as reader:
        process = start("os.write(1, b'printed\\n'); os.write(2, b'logged\\n')")
        assert process.wait(5) == 0
        assert os.read(reader, 100) == b"printed\nlogged\n"
    assert process.report.read_stderr_tail() == "printed\nlogged\n"


def test_a_stderr_that_nobody_reads_does_not_block(start: Start) -> None:
    with stderr_into_pipe():
        process = start(TEN_MEGABYTES)
        assert process.wait(10) == 0
    tail = process.report.read_stderr_tail(1 << 20)
    assert len(tail) > (64 << 10) - 200
    assert set(tail.splitlines()[:-1]) == {"x" * 99}
    assert tail.endswith("\nthe end\n")


def test_a_stderr_that_is_read_late_tells_what_is_missing(start: Start, system: System, tmp_path: Path) -> None:
    with stderr_into_pipe() as reader:
        process = start(TEN_MEGABYTES + "tell(1); signal.pause()")
        system.told(tmp_path / "told")
        system.eventually(lambda: process.report.read_stderr_tail().endswith("the end\n"))
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.warden_pid}/status").read_text())
        assert os.get_blocking(2)
        shown = b""
        while not shown.endswith(b"the end\n"):
            shown += os.read(reader, 1 << 16)
    assert int(peak[1]) < 40 << 10
    kept, *markers = re.split(rb"^\[outboard: (\d+) bytes of engine stderr not shown\]\n", shown, flags=re.MULTILINE)
    kept += b"".join(markers[1::2])
    dropped = [int(number) for number in markers[::2]]
    assert dropped
    # A marker that comes in the middle of a line ends it first, by one byte more than the engine has written.
    added = len(kept) + sum(dropped) - (1000 * 100 * 100 + len("the end\n"))
    assert 0 <= added <= len(dropped)
    assert {line.strip(b"x") for line in kept.splitlines()} == {b"", b"the end"}


def test_a_stderr_that_is_closed_stops_the_copy_only(start: Start) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    saved = os.dup(2)
    os.dup2(writer, 2)
    try:
        process = start(TEN_MEGABYTES + "sys.exit(7)")
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(writer)
    assert process.wait(10) == 7
    assert process.report.read_stderr_tail().endswith("the end\n")


def test_the_tail_is_kept_current(start: Start, system: System) -> None:
    process = start("""
os.write(2, b"one\\n")
os.close(1); os.write(2, b"two"); os.close(2)
signal.pause()
""")
    system.eventually(lambda: process.report.read_stderr_tail() == "one\ntwo", 1.0)
    used = cpu_ticks(process.warden_pid)
    assert process.wait(0.3) is None
    assert cpu_ticks(process.warden_pid) - used < 5, "the warden must not spin on a pipe that has ended"


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def test_a_warden_that_cannot_list_its_children_searches_for_them() -> None:
    directory = Path(sys.modules[EngineProcess.__module__].__file__).parent
    code = """
import os, signal, sys
sys.path.append(sys.argv[1])
import warden_tree as warden
read = warden.read_file
def read_file(path):
    if path.endswith("children"):
        raise FileNotFoundError(path)
    return read(path)
listed = [os.fork() or signal.pause()]
assert warden.children() == listed
warden.read_file = read_file
assert warden.children() == listed
assert warden.end_tree(listed[0]) == {listed[0]: -signal.SIGKILL}
"""
    subprocess.run([sys.executable, "-I", "-S", "-c", code, directory], check=True, timeout=10)
