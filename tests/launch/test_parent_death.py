"""Nobody outlives the front end: who is killed, in what phase, and that within 5 s nothing is left of the engine core.

The owner is a front end with a real client, in a process of its own. Each of its engine cores has five workers: plain,
in a session of its own, double-forked, both, and both with an empty environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from engine_scripts import System

BOUND = 5.0

OWNER = """
import asyncio, contextlib, os, signal, sys, time
from outboard import AsyncLLM, SamplingParams
engine, told, row, count, mode = sys.argv[1:]

def block():
    open(told + ".blocked", "w").close()
    time.sleep(1000)

async def use(llm):
    if mode == "forked copy" and os.fork() == 0:
        with open(told + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(told + ".part", told + ".copy")
        while True:
            signal.pause()
    if row == "stderr":
        asyncio.get_running_loop().call_later(0.2, block)
    if row != "idle":
        try:
            async for _ in llm.generate("hello", SamplingParams(max_tokens=10)):
                pass
        except Exception as error:
            print(type(error).__name__, flush=True)
    await asyncio.sleep(1000)

async def main():
    async with contextlib.AsyncExitStack() as stack:
        llms = []
        for rank in range(int(count)):
            llm = AsyncLLM(engine, options={"told": f"{told}.{rank}", "row": row})
            llms.append(await stack.enter_async_context(llm))
        await asyncio.gather(*map(use, llms))

asyncio.run(main())
"""


class Scene:
    """A front end with its engine cores.

    Attributes:
        owner: the front end.
        families: for each engine core its process ids: its own, and those of its workers.
        guards, keepers: the two halves of each warden.
    """

    def __init__(self, system: System, owner: subprocess.Popen[bytes], families: list[list[int]], tmp: Path) -> None:
        self._system = system
        self._tmp = tmp
        self.owner = owner
        self.families = families
        self.keepers = [system.parent(family[0]) for family in families]
        self.guards = [system.parent(keeper) for keeper in self.keepers]
        assert {system.parent(guard) for guard in self.guards} == {owner.pid}
        assert self.files

    @property
    def files(self) -> list[Path]:
        """What is in its temporary directory: the session directories."""
        return list(self._tmp.iterdir())

    @property
    def everybody(self) -> list[int]:
        """All but the owner."""
        return [*self.guards, *self.keepers, *(pid for family in self.families for pid in family)]

    def kill(self, *roles: str) -> None:
        """Kills all of these, at once."""
        pids = {"owner": [self.owner.pid], "guard": self.guards, "keeper": self.keepers}
        for role in roles:
            for pid in pids[role]:
                os.kill(pid, signal.SIGKILL)

    def gone(self, pids: Sequence[int] | None = None, files: bool = True) -> None:
        """Waits until these have ended, or everybody has, and the session directory with them."""
        pids = self.everybody if pids is None else pids
        start = time.monotonic()
        self._system.eventually(lambda: not [pid for pid in pids if self._system.alive(pid)], BOUND)
        if files:
            self._system.eventually(lambda: not self.files, BOUND)
        print(f"nothing left after {(time.monotonic() - start) * 1000:.0f} ms")


@pytest.fixture
def scene(system: System, tmp_path: Path, short_tmp: Path) -> Iterator[Callable[..., Scene]]:
    """Starts the owner, and waits until all its engine cores are in the phase."""
    (tmp_path / "owner.py").write_text(OWNER)
    shared_memory = set(Path("/dev/shm").iterdir())
    scenes = []
    with contextlib.ExitStack() as stack:

        def make(row: str, count: int = 1, mode: str = "") -> Scene:
            engine = f"{Path(__file__).with_name('family_engine.py')}:FamilyEngine"
            told = tmp_path / "told"
            argv = [sys.executable, tmp_path / "owner.py", engine, told, row, str(count), mode]
            reader, writer = os.pipe()  # of the stderr nobody reads
            owner = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=writer)
            os.close(writer)
            stack.callback(os.close, reader)
            stack.enter_context(owner)
            stack.callback(owner.kill)
            told_by = [Path(f"{told}.{rank}") for rank in range(count)]
            signs = [*told_by, Path(f"{told}.blocked")] if row == "stderr" else told_by
            system.eventually(lambda: all(path.exists() for path in signs) or owner.poll() is not None, 30)
            assert owner.poll() is None, os.read(reader, 1 << 16).decode()
            scenes.append(Scene(system, owner, [system.told(path) for path in told_by], short_tmp))
            return scenes[-1]

        yield make
        for made in scenes:
            for pid in made.everybody:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert set(Path("/dev/shm").iterdir()) <= shared_memory


ROWS = ["idle", "start-up", "step", "native", "stderr"]
Make = Callable[..., Scene]


@pytest.mark.parametrize("row", ROWS)
def test_the_front_end_is_killed(scene: Make, row: str) -> None:
    made = scene(row)
    made.kill("owner")
    made.gone()


def test_the_front_end_of_four_engines_is_killed(scene: Make) -> None:
    made = scene("idle", 4)
    made.kill("owner")
    made.gone()


def test_the_front_end_is_killed_and_a_forked_copy_of_it_lives(scene: Make, system: System, tmp_path: Path) -> None:
    made = scene("idle", 1, "forked copy")
    copy = system.told(tmp_path / "told.copy")
    made.kill("owner")
    try:
        made.gone()
        assert system.alive(copy)
    finally:
        os.kill(copy, signal.SIGKILL)


@pytest.mark.parametrize("half", ["guard", "keeper"])
@pytest.mark.parametrize("row", ROWS)
def test_the_front_end_and_half_of_the_warden_are_killed_together(scene: Make, row: str, half: str) -> None:
    made = scene(row)
    made.kill(half, "owner")
    made.gone()


@pytest.mark.parametrize("half", ["guard", "keeper"])
def test_the_front_end_of_four_engines_and_half_of_each_warden_are_killed_together(scene: Make, half: str) -> None:
    made = scene("idle", 4)
    made.kill(half, "owner")
    made.gone()


@pytest.mark.parametrize("half", ["guard", "keeper"])
@pytest.mark.parametrize("row", ROWS)
def test_half_of_the_warden_is_killed_and_the_front_end_lives(scene: Make, row: str, half: str) -> None:
    made = scene(row)
    made.kill(half)
    everybody = [pid for pid in made.everybody if not (half == "guard" and pid in made.keepers)]  # see below
    made.gone(everybody, files=row == "start-up")


@pytest.mark.parametrize("half", ["guard", "keeper"])
def test_half_of_the_warden_is_killed_before_the_front_end(scene: Make, system: System, half: str) -> None:
    made = scene("idle")
    os.kill(made.owner.pid, signal.SIGSTOP)  # it does not see the death
    made.kill(half)
    made.gone(made.families[0], files=False)
    session = next(iter(made.files))
    with pytest.raises(AssertionError, match="did not happen"):
        system.eventually(lambda: not session.exists(), 0.3)  # its owner lives
    made.kill("owner")
    made.gone()


@pytest.mark.parametrize("row", ["idle", "start-up", "step", "native"])
def test_the_whole_warden_is_killed_and_the_front_end_lives(scene: Make, row: str) -> None:
    made = scene(row)
    made.kill("guard", "keeper")
    hidden = made.families[0][-1]  # no mark, no warden: nobody can know it
    made.gone([pid for pid in made.everybody if pid != hidden], files=row == "start-up")


def test_everybody_who_watches_is_killed(scene: Make, system: System) -> None:
    """The limit: what the kernel does by itself. The workers and the session directory stay."""
    made = scene("native")
    made.kill("guard", "keeper", "owner")
    made.gone([*made.guards, *made.keepers, made.families[0][0]], files=False)


@pytest.mark.parametrize("half", ["guard", "keeper"])
def test_half_of_the_warden_is_stopped_and_the_front_end_is_killed(scene: Make, half: str) -> None:
    made = scene("idle")
    for pid in made.guards if half == "guard" else made.keepers:
        os.kill(pid, signal.SIGSTOP)
    made.kill("owner")
    made.gone()


def test_a_stopped_engine_core_goes_with_the_front_end(scene: Make) -> None:
    made = scene("idle")
    for pid in made.families[0]:
        os.kill(pid, signal.SIGSTOP)
    made.kill("owner")
    made.gone()
