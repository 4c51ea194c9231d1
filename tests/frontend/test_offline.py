"""`LLM`: many prompts, in order, without asyncio."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import time

import pytest

from faulty import CallableEngine, DyingEngine
from outboard import LLM, AsyncLLM, EngineDeadError, InvalidRequestError, SamplingParams, UnsupportedError

pytestmark = pytest.mark.usefixtures("nothing_left")

PARAMS = SamplingParams(max_tokens=50)


def test_outputs_come_in_order_and_a_failing_prompt_loses_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    with LLM("echo", options={"max_model_len": 40}) as llm:
        prompts = ["abc", "", "x" * 100, [1, 2], [{"role": "user", "content": "hi"}], [999], "last"]
        outputs = llm.generate(prompts, PARAMS)
        assert [output.finished for output in outputs] == [True] * 7
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["stop", "error", "error", "stop", "stop", "error", "stop"]
        assert outputs[0].outputs[0].text == "abc"
        assert "empty" in (outputs[1].outputs[0].error or "")
        assert "characters" in (outputs[2].outputs[0].error or "")
        assert outputs[3].outputs[0].token_ids == [1, 2]
        assert "hi" in outputs[4].outputs[0].text
        assert outputs[6].outputs[0].text == "last"
        bar = capfd.readouterr().err
        assert "7/7" in bar
        assert "tokens/s" in bar
        assert [o.outputs[0].text for o in llm.generate("one", PARAMS, use_tqdm=False)] == ["one"]
        assert capfd.readouterr().err == ""
        each = llm.generate(["abcdef", "abcdef"], [SamplingParams(max_tokens=n) for n in (2, 4)], use_tqdm=False)
        assert [o.outputs[0].text for o in each] == ["ab", "abcd"]
        with pytest.raises(ValueError, match="2 prompts"):
            llm.generate(["a", "b"], [PARAMS])
        assert llm.generate([], PARAMS, use_tqdm=False) == []


def test_chat_takes_one_conversation_or_many() -> None:
    with LLM("echo") as llm:
        one = [{"role": "user", "content": "hi"}]
        assert len(llm.chat(one, PARAMS, use_tqdm=False)) == 1
        both = llm.chat([one, [{"role": "user", "content": "ho"}]], PARAMS, use_tqdm=False)
        assert ["hi" in both[0].outputs[0].text, "ho" in both[1].outputs[0].text] == [True, True]


def test_many_prompts_and_completions() -> None:
    with LLM("echo", options={"max_num_seqs": 16}) as llm:
        outputs = llm.generate([[i % 256] * 5 for i in range(500)], SamplingParams(n=2), use_tqdm=False)
        assert [[c.token_ids for c in output.outputs] for output in outputs] == [
            [[i % 256] * 5] * 2 for i in range(500)
        ]


CTRL_C = """
from outboard import LLM, SamplingParams

with LLM("echo", options={"step_ms": 5.0}) as llm:
    llm.generate("warm", use_tqdm=False)
    print("ready", flush=True)
    try:
        llm.generate([[1] * 2000] * 10, SamplingParams(max_tokens=2000), use_tqdm=False)
    except KeyboardInterrupt:
        print(llm.generate("again", use_tqdm=False)[0].outputs[0].text, llm.get_stats()["requests"])
"""


def test_ctrl_c_aborts_and_the_engine_can_be_used_again() -> None:
    """In a process of its own: the signal goes to the whole process."""
    process = subprocess.Popen([sys.executable, "-c", CTRL_C], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)  # so that it is most likely in the middle; right or wrong, the outcome is the same
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "again 0\n")


def test_the_engines_death_is_one_error() -> None:
    with LLM(DyingEngine, options={"step": 5, "step_ms": 1.0}) as llm:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="boom"):
                llm.generate([[1]] * 20, SamplingParams(max_tokens=100), use_tqdm=False)


def test_controls_block_and_have_the_names_and_signatures_of_asyncllm() -> None:
    for name in ("pause_generation", "sleep", "wake_up", "start_profile", "collective_rpc", "get_stats"):
        theirs = inspect.signature(getattr(AsyncLLM, name))
        assert inspect.signature(getattr(LLM, name)) == theirs
    llm = LLM("echo")
    try:
        assert llm.is_paused() is False  # the first call starts the engine
        llm.pause_generation("wait")
        assert llm.is_paused() is True
        llm.resume_generation()
        assert llm.is_sleeping() is False
        for call in (llm.sleep, llm.wake_up, llm.reset_prefix_cache):
            with pytest.raises(UnsupportedError):
                call()
        assert llm.collective_rpc("is_sleeping") == [False]
        assert llm.client.engine_info.model == "echo"
    finally:
        llm.shutdown()
        llm.shutdown()


def test_an_engine_without_tokenizer_takes_token_ids() -> None:
    with LLM(CallableEngine) as llm:
        outputs = llm.generate(["text", [1]], PARAMS, use_tqdm=False)
        assert "no tokenizer" in (outputs[0].outputs[0].error or "")
        assert "takes no requests" in (outputs[1].outputs[0].error or "")


def test_dropping_it_leaves_nothing() -> None:
    LLM("echo").generate("abc", PARAMS, use_tqdm=False)
    with pytest.raises(InvalidRequestError):
        SamplingParams(max_tokens=0)
