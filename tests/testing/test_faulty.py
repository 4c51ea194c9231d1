"""Each fault of the faulty engine, in a process of its own where it ends one."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from typing import Any, get_args

import pytest

from outboard import AsyncMPClient, EngineConfig, EngineDeadError, EngineStartupError, SamplingParams, UtilityError
from outboard.engine.loader import bind_options, load_engine_class
from outboard.protocol.codec import MsgpackEncoder
from outboard.testing import EngineHarness, FaultyEngine
from outboard.testing.faults import Way, hang
from outboard.testing.faulty import Phase
from support import Run

# What runs all phases in order, then says so.
ALL_PHASES = """
import sys
from outboard import SamplingParams
from outboard.testing import EngineHarness, FaultyEngine
engine = FaultyEngine(**{options!r})
harness = EngineHarness(engine)
engine.info()
harness.add([1], SamplingParams(max_tokens=5))
harness.abort("nobody")
for _ in range(3):
    harness.step()
    print("step", flush=True)
harness.stats()
harness.call("ping")
harness.shutdown()
print("survived")
"""

STATUS = {"exception": 1, "sys_exit": 7, "_exit": 7, "sigkill": -9, "sigsegv": -11, "abort": -6}
PHASES = [phase for phase in get_args(Phase) if phase != "never"]


def run_phases(**options: Any) -> subprocess.CompletedProcess[str]:
    code = ALL_PHASES.format(options=options)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("way", get_args(Way))
def test_every_way_to_die(way: str) -> None:
    result = run_phases(die_in="step", way=way, at_step=2)
    assert result.returncode == STATUS[way]
    assert f"about to die by {way}" in result.stderr
    assert result.stdout == "step\n"
    assert ("RuntimeError: boom" in result.stderr) == (way == "exception")


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_to_die_in(phase: Phase) -> None:
    def use_all() -> None:
        engine = FaultyEngine(die_in=phase)
        harness = EngineHarness(engine)
        engine.info()
        refused = harness[harness.add([1])].exception
        if refused is not None:  # the harness takes it for a refusal, as the busy loop does
            raise refused
        harness.abort("nobody")
        harness.step()
        harness.stats()
        harness.call("ping")
        harness.shutdown()

    with pytest.raises(RuntimeError, match="boom") as caught:
        use_all()
    assert phase.replace("constructor", "__init__").replace("utility", "ping") in [
        entry.name for entry in caught.traceback
    ]


def test_without_faults_it_is_mock() -> None:
    assert run_phases().stdout == "step\n" * 3 + "survived\n"
    harness = EngineHarness(FaultyEngine(tokens_per_step=2))
    name = harness.add([1], SamplingParams(max_tokens=3))
    assert harness.run_until_idle()[name].tokens == list(b"abc")
    assert harness.call("ping") == "pong"


@pytest.mark.parametrize("phase", PHASES)
def test_it_hangs_and_goes_on(phase: Phase) -> None:
    before = time.monotonic()
    assert run_phases(hang_in=phase, hang_seconds=0.2).stdout == "step\n" * 3 + "survived\n"
    assert time.monotonic() - before >= 0.2


def test_it_hangs_before_it_dies() -> None:
    before = time.monotonic()
    with pytest.raises(RuntimeError, match="boom"):
        FaultyEngine(die_in="constructor", hang_in="constructor", hang_seconds=0.1)
    assert time.monotonic() - before >= 0.1


@pytest.mark.parametrize("kind", ["sleep", "spin", "gil"])
def test_what_other_threads_do_meanwhile(kind: Any) -> None:
    stamps = [time.monotonic()]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.001):
            stamps.append(time.monotonic())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        while len(stamps) < 3:
            stop.wait(0.001)
        hang(kind, 1.0)
    finally:
        stop.set()
        thread.join()
    pause = max(later - earlier for earlier, later in itertools.pairwise(stamps))
    assert (pause > 0.8) == (kind == "gil")


def test_utilities_that_do_not_end_the_engine() -> None:
    harness = EngineHarness(FaultyEngine())
    assert not harness.call("never").done()
    with pytest.raises(TypeError):
        MsgpackEncoder(1000).encode(harness.call("garbage"))
    assert harness.call("allocate", 1000) == 1000
    assert harness.call("allocate", 500) == 1500
    assert harness.call("allocate", 0) == 0
    before = time.monotonic()
    harness.call("hang", "spin", 0.05)
    assert time.monotonic() - before >= 0.05
    with pytest.raises(RuntimeError, match="boom"):
        harness.call("die", "exception")
    with pytest.raises(UtilityError, match="boredom"):
        harness.call("die", "boredom")


def test_flood_and_garbage_go_to_the_open_requests() -> None:
    harness = EngineHarness(FaultyEngine())
    first, second = (harness.add([1], SamplingParams(max_tokens=9)) for _ in range(2))
    harness.call("flood", 3, 100)
    harness.step()
    assert harness[first].results == harness[second].results == [bytes(100)] * 3
    harness.call("garbage_outputs")
    harness.step()
    assert type(harness[first].results[-1]) is object
    harness.run_until_idle()
    assert len(harness[first].results) == 4
    assert harness[first].tokens == list(b"abcdefghi")


def test_noise(capfd: pytest.CaptureFixture[str]) -> None:
    harness = EngineHarness(FaultyEngine(noise=200))
    harness.add([1], SamplingParams(max_tokens=2))
    harness.run_until_idle()
    noise = capfd.readouterr().err
    assert len(noise) == 3 * 200
    assert [len(line) for line in noise.splitlines()[:3]] == [79, 79, 39]
    harness.call("make_noise", 160)
    assert capfd.readouterr().err == ("x" * 79 + "\n") * 2


def test_a_slow_start() -> None:
    before = time.monotonic()
    FaultyEngine(slow_start=0.1)
    assert time.monotonic() - before >= 0.1


def test_options_by_reference_are_checked() -> None:
    engine = load_engine_class("outboard.testing:FaultyEngine")
    assert engine is FaultyEngine
    assert bind_options(engine, {"at_step": "3"}) == {"at_step": 3}
    for option, value in (("die_in", "heaven"), ("way", "boredom"), ("hang_kind", "up")):
        with pytest.raises(ValueError, match=f"{option}.*{value}"):
            bind_options(engine, {option: value})


def test_in_a_process(nothing_left: None, run: Run) -> None:
    async def main() -> None:
        config = EngineConfig(engine="outboard.testing:FaultyEngine", options={"die_in": "utility", "way": "sigkill"})
        client = await AsyncMPClient.launch(config)
        try:
            with pytest.raises(EngineDeadError) as caught:
                await client.call_utility_async("ping", timeout=10.0)
            assert caught.value.signal == "SIGKILL"
        finally:
            client.shutdown()
        config = EngineConfig(engine=FaultyEngine, options={"die_in": "constructor"})
        with pytest.raises(EngineStartupError, match="boom"):
            await AsyncMPClient.launch(config)

    run(main())
