"""Start-up that fails, by every way, and engines given in every way."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from faulty import DyingEngine
from outboard import AsyncLLM, AsyncMPClient, EngineConfig, EngineStartupError, EngineStartupTimeout, FaultConfig
from support import children

pytestmark = pytest.mark.usefixtures("nothing_left")


def start(engine: Any, options: dict[str, Any] | None = None, **faults: Any) -> None:
    config = EngineConfig(engine=engine, options=options or {}, faults=FaultConfig(**faults))
    AsyncMPClient(config).shutdown()


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("exception", 1, "RuntimeError: boom"),
        ("_exit", 7, "exit code 7"),
        ("sigkill", -signal.SIGKILL, "SIGKILL"),
        ("sigsegv", -signal.SIGSEGV, "SIGSEGV"),
        ("abort", -signal.SIGABRT, "SIGABRT"),
    ],
)
def test_death_before_ready(how: str, code: int, text: str) -> None:
    with pytest.raises(EngineStartupError) as caught:
        start(DyingEngine, {"when": "init", "how": how})
    told = time.monotonic()
    error = caught.value
    died = re.search(r"about to die by \w+ at ([\d.]+)", error.stderr_tail)
    assert died is not None
    assert told - float(died[1]) < 2
    assert (error.rank, error.phase, error.exit_code, error.incarnation) == (0, "start-up", code, 0)
    assert error.pid is not None
    assert str(error.pid) in error.reason
    assert text in error.reason
    assert f"about to die by {how}" in error.stderr_tail
    if how == "exception":
        assert "in die" in error.remote_traceback
        assert "in die" in str(error)


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("os._exit(9)", 9, "exit code 9"),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, "SIGKILL"),
        ("sys.exit('no way')", 1, "no way"),
        ("os._exit(0)", 0, "exit code 0"),
    ],
)
def test_death_before_hello(how: str, code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last_words = tmp_path / "last_words"
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
        import os, sys, time
        if "OUTBOARD_SESSION_TOKEN" in os.environ:
            with open({str(last_words)!r}, "w") as file:
                file.write(f"{{os.getpid()}} {{time.monotonic()}}")
            {how}
        """)
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(EngineStartupError) as caught:
        start("echo")
    told = time.monotonic()
    error = caught.value
    pid, died = last_words.read_text().split()
    assert told - float(died) < 2
    assert (error.rank, error.pid, error.incarnation) == (0, int(pid), 0)
    assert (error.phase, error.exit_code) == ("start-up", code)
    assert pid in error.reason
    assert text in str(error)


def test_an_import_error_in_the_child_comes_with_its_traceback(tmp_path: Path) -> None:
    engine = tmp_path / "broken.py"
    engine.write_text("import no_such_library_anywhere\n")
    with pytest.raises(EngineStartupError, match="no_such_library_anywhere") as caught:
        start(f"{engine}:Engine")
    assert caught.value.remote_type == "ModuleNotFoundError"
    assert "broken.py" in caught.value.remote_traceback


def test_a_start_that_takes_too_long_names_the_phase_and_kills_grandchildren(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    engine = tmp_path / "slow.py"
    engine.write_text(
        textwrap.dedent(f"""
        import subprocess, time
        from outboard.engines.echo import EchoEngine
        class Slow(EchoEngine):
            def __init__(self):
                child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
                open({str(pid_file)!r}, "w").write(str(child.pid))
                time.sleep(1000)
        """)
    )
    with pytest.raises(
        EngineStartupTimeout, match=r"not ready within 1\.5 s: the engine was being loaded.*startup_timeout"
    ):
        start(f"{engine}:Slow", startup_timeout=1.5)
    grandchild = int(pid_file.read_text())
    deadline = time.monotonic() + 5
    while psutil.pid_exists(grandchild) and psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_class_from_a_script_without_and_with_its_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    body = """
        import asyncio
        from outboard import AsyncLLM, SamplingParams
        from outboard.engines.echo import EchoEngine

        class Shout(EchoEngine):
            def info(self):
                info = super().info()
                return type(info)(max_model_len=info.max_model_len, vocab_size=256, model="shout")

        async def main():
            async with AsyncLLM(Shout) as llm:
                async for output in llm.generate("hello", SamplingParams(output_kind="final_only")):
                    print(llm.engine_info.model, output.outputs[0].text)
    """
    script.write_text(textwrap.dedent(body) + '\nif __name__ == "__main__":\n    asyncio.run(main())\n')
    good = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=30, check=False)
    assert (good.returncode, good.stdout, good.stderr) == (0, "shout hello\n", "")
    script.write_text(textwrap.dedent(body) + "\nasyncio.run(main())\n")
    bad = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=30, check=False)
    assert bad.returncode == 1
    assert 'if __name__ == "__main__":' in bad.stderr


def test_an_engine_that_prints_does_not_touch_our_stdout(tmp_path: Path) -> None:
    engine = tmp_path / "noisy.py"
    engine.write_text(
        textwrap.dedent("""
        import os, sys
        from outboard.engines.echo import EchoEngine
        class Noisy(EchoEngine):
            def step(self, outputs):
                print("noise"); os.system("echo more noise"); super().step(outputs)
        """)
    )
    command = [sys.executable, "-m", "outboard.cli.main", "generate", "ab", "--engine", f"{engine}:Noisy", "--json"]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv = {command[2:]!r}; from outboard.cli.main import run; run()"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert result.stdout.startswith("{")
    assert result.stdout.count("\n") == 1
    assert "noise" in result.stderr


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("hold_gil", [False, True])
def test_sigkill_of_the_front_end_leaves_nothing(busy: bool, hold_gil: bool, short_tmp: Path) -> None:
    script = f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from faulty import DyingEngine
        from outboard import AsyncLLM, SamplingParams
        async def main():
            llm = AsyncLLM(DyingEngine, options={{"step": -5, "step_ms": 1.0}})
            await llm.start()
            if {busy}:
                stream = llm.generate([1], SamplingParams(max_tokens=100000, output_kind="delta"))
                await anext(stream)
            if {hold_gil}:
                call = asyncio.ensure_future(llm.client.call_utility_async("hold_gil", 1000))
                await asyncio.sleep(0.1)
            print(llm.client.core_engines[0].pid, flush=True)
            await asyncio.sleep(1000)
        asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    tree = children()
    assert pid in [process.pid for process in tree]
    assert list(short_tmp.iterdir())
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    _, alive = psutil.wait_procs(tree, timeout=5)
    assert not alive
    deadline = time.monotonic() + 5
    while list(short_tmp.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_exit_without_shutdown_is_quiet_and_leaves_nothing(short_tmp: Path) -> None:
    script = """
        import asyncio
        from outboard import AsyncLLM
        async def main():
            global llm
            llm = AsyncLLM("echo")
            async for output in llm.generate("abc"):
                break
        asyncio.run(main())
    """
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_two_clients_in_two_runs(short_tmp: Path) -> None:
    async def main() -> str:
        async with AsyncLLM("echo") as llm:
            return [output async for output in llm.generate("abc")][-1].outputs[0].text

    assert asyncio.run(main()) == asyncio.run(main()) == "abc"


def test_the_session_directory_is_private_and_the_token_is_in_no_argument(short_tmp: Path) -> None:
    client = AsyncMPClient("echo")
    try:
        (session,) = short_tmp.iterdir()
        assert session.stat().st_mode & 0o777 == 0o700
        assert session.stat().st_uid == os.getuid()
        assert client._resources.group is not None
        token = client._resources.group.addresses.session_token
        for child in children():
            assert token not in " ".join(child.cmdline())
        engine = psutil.Process(client.core_engines[0].pid)
        assert not [connection for connection in engine.net_connections("inet")]
    finally:
        client.shutdown()
