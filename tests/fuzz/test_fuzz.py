"""No message, however bad, crashes, hangs or fills up a decoder. `FUZZ_FRAMES` and `FUZZ_SEED` choose another run."""

from __future__ import annotations

import faulthandler
import json
import os
from pathlib import Path

import pytest

from fuzzing import Fuzzer, fuzz, quiet

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "count", [int(os.environ.get("FUZZ_FRAMES", "20000")), pytest.param(1_000_000, marks=pytest.mark.slow)]
)
def test_no_message_is_too_bad(count: int) -> None:
    faulthandler.cancel_dump_traceback_later()  # a million takes longer than that
    outcome = fuzz(count, int(os.environ.get("FUZZ_SEED", "0")))
    print(f"{outcome.frames} messages, {outcome.frames / outcome.seconds:.0f}/s, accepted: {outcome.accepted}")
    assert not outcome.finds, "\n".join(map(str, outcome.finds))
    assert outcome.frames >= 0.99 * count
    # It did look behind the first check of each decoder.
    assert all(outcome.accepted.values()), outcome.accepted


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_what_was_found_once(path: Path) -> None:
    """Each case: the target, the frames in hex, what it did."""
    case = json.loads(path.read_text())
    with quiet():
        find = Fuzzer(case["target"], 0).replay([bytes.fromhex(frame) for frame in case["frames"]])
    assert find is None, str(find)


def test_there_are_cases() -> None:
    assert CASES


@pytest.mark.parametrize(
    ("target", "attribute"), [("EngineCoreOutputs", "_decode"), ("Receiver", "_receiver"), ("Incoming", "_incoming")]
)
def test_the_fuzzer_sees_what_is_wrong(target: str, attribute: str) -> None:
    fuzzer = Fuzzer(target, 0)
    setattr(fuzzer._target, attribute, None)
    with quiet():
        accepted, finds = fuzzer.run(1000)
    assert len(finds) == 1
    assert accepted == 0
    assert "NoneType" in finds[0].what


def test_messages_depend_on_the_seed_alone() -> None:
    for name in ("all structs", "AbortRequests", "EngineHandshake", "GGUF"):
        one, two, other = (Fuzzer(name, seed)._mutator for seed in (1, 1, 2))
        first = [one.make() for _ in range(200)]
        assert first == [two.make() for _ in range(200)]
        assert first != [other.make() for _ in range(200)]
