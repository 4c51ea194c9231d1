"""The faults: how each kind is brought about, and what must come of it at once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import psutil
import zmq

from chaos.engines import no_memory
from chaos.front_end import GONE, REPLACED, stream
from chaos.ledger import Ledger, Request
from chaos.plan import RequestPlan, Strike
from chaos.side import Side, until
from outboard import AsyncLLM, AsyncMPClient, EngineDeadError, EngineGroup, EngineState, OutboardError
from outboard.protocol.messages import EngineCoreDead, EngineCoreOutputs, ErrorReport, UtilityOutput

__all__ = ["Striker"]

# What must come at once gets this long; the machine may be busy with other things.
_AT_ONCE = 4.0
_PROCESS = 20.0
# Most bytes that a request is flooded with at once.
_MOST = 6_000_000


class Striker:
    """Strikes, once a side has started.

    Args:
        side: what is struck.
        group: where others can join; None: the engine cores are the side's own.
        script: the file that `ChaosEngine` follows when it starts.
    """

    def __init__(self, side: Side, group: EngineGroup | None, script: Path) -> None:
        self._side = side
        self._ledger: Ledger = side.ledger
        self._plan = side.plan
        self._group = group
        self._script = script
        self._index = 0
        self._baits = 0
        self.tasks: list[asyncio.Task[Any]] = []  # to be waited for; some last longer than their strike

    async def strike(self, strike: Strike) -> None:
        """Injects a fault, where there is still something to be struck."""
        await asyncio.sleep(strike.delay)
        if not await self._side.ready():
            if not self._side.gone:
                self._ledger.violate("hung", f"not ready before {strike.kind!r}, but {self._side.state}")
            return
        name = "_" + re.sub(r"[ -]", "_", strike.kind.replace(",", "")).lower()
        ledger = self._ledger
        ledger.deaths += self._plan.deaths_of(strike.kind)
        act: Callable[[dict[str, Any]], Awaitable[bool | None]] = getattr(self, name)
        struck: bool | None = True
        try:
            struck = await act(strike.params)
        except (OutboardError, psutil.Error) as error:
            # The engine core may have died before; it may not have died of nothing.
            if not ledger.deaths:
                ledger.violate("ending", f"{strike.kind!r} raised {type(error).__name__}: {error}")
        if struck is not False:
            ledger.struck[strike.kind] += 1

    # --- deaths ---

    async def _kill_the_engine_core(self, params: dict[str, Any]) -> None:
        incarnation = self._incarnation
        self._side.engine.kill()
        await self._noticed(incarnation)

    async def _kill_it_as_it_comes_back(self, params: dict[str, Any]) -> None:
        incarnation = self._incarnation
        self._side.engine.kill()
        await self._noticed(incarnation)
        if await self._side.ready():
            self._side.engine.kill()
            await self._noticed(incarnation + 1)

    async def _kill_the_warden(self, params: dict[str, Any]) -> None:
        incarnation = self._incarnation
        warden = self._side.engine.parent()
        assert warden is not None and warden.pid != os.getpid()
        warden.kill()
        await self._noticed(incarnation)

    async def _die_in_a_step(self, params: dict[str, Any]) -> None:
        self._ledger.tracebacks = True
        incarnation = self._incarnation
        await self._side.call("die_next", params["way"])
        self._bait()
        await self._noticed(incarnation)

    async def _die_in_a_utility(self, params: dict[str, Any]) -> None:
        self._ledger.tracebacks = True
        incarnation = self._incarnation
        try:
            await self._side.call("die", params["way"])
        except EngineDeadError:
            await self._noticed(incarnation)
        except OutboardError:
            if params["way"] != "exception":
                raise

    async def _die_in_start_up(self, params: dict[str, Any]) -> None:
        self._ledger.tracebacks = True
        self._script.write_text(json.dumps([["die", params["way"]]] * params["times"]))
        await self._kill_the_engine_core(params)

    async def _start_slowly(self, params: dict[str, Any]) -> None:
        self._script.write_text(json.dumps([["sleep", 2 * params["short"]]]))
        await self._kill_the_engine_core(params)

    async def _noticed(self, incarnation: int) -> None:
        """The client must hear of the death, and what waits for that engine core must not wait on."""

        def heard() -> bool:
            bad = (EngineState.READY, EngineState.STALLED)
            return self._side.gone or self._incarnation != incarnation or self._side.state not in bad

        if not await until(heard, _AT_ONCE):
            self._ledger.violate("hung", f"the death of incarnation {incarnation} was not noticed")

    @property
    def _incarnation(self) -> int:
        return self._side.client.engine_status[0].incarnation

    # --- hangs ---

    async def _stop_for_a_moment(self, params: dict[str, Any]) -> None:
        engine = self._side.engine
        engine.suspend()
        await asyncio.sleep(params["short"])
        engine.resume()

    async def _stop_for_too_long(self, params: dict[str, Any]) -> None:
        engine = self._side.engine
        incarnation = self._incarnation
        engine.suspend()
        try:
            await self._stalls(incarnation, self._bait())
        finally:
            if engine.is_running():
                engine.resume()
        await self._comes_back(incarnation)

    async def _hang_in_a_step_for_a_moment(self, params: dict[str, Any]) -> None:
        kind = "sleep" if params["hang"] == "gil" else params["hang"]  # which lasts whole seconds
        await self._side.call("hang_next", kind, params["short"])
        self._bait()

    async def _hang_in_a_step_for_too_long(self, params: dict[str, Any]) -> None:
        incarnation = self._incarnation
        await self._side.call("hang_next", params["hang"], params["long"])
        await self._stalls(incarnation, self._bait())
        await self._comes_back(incarnation)

    async def _hang_in_a_utility(self, params: dict[str, Any]) -> None:
        incarnation = self._incarnation
        call = asyncio.create_task(self._side.call("hang", params["hang"], params["long"]))
        self._later(call)
        await self._stalls(incarnation, call)
        await self._comes_back(incarnation)

    async def _stalls(self, incarnation: int, waiter: asyncio.Task[Any]) -> None:
        """It must be told of within the stall timeout, while somebody waits."""
        bound = self._plan.config.faults.stall_timeout + _AT_ONCE
        told = await until(
            lambda: (incarnation, EngineState.STALLED) in self._ledger.states or waiter.done() or self._side.gone, bound
        )
        if not told:
            self._ledger.violate("hung", f"the stall of incarnation {incarnation} was not told of within {bound:g} s")

    async def _comes_back(self, incarnation: int) -> None:
        if self._plan.config.faults.stall_action == "restart":
            await self._noticed(incarnation)
        elif not await until(lambda: self._side.gone or self._side.state is EngineState.READY, 10):
            self._ledger.violate("hung", f"it is {self._side.state} after its stall")

    # --- what the engine core sends ---

    async def _results_that_cannot_be_sent(self, params: dict[str, Any]) -> None:
        self._ledger.garbage = True
        await self._side.call("garbage_outputs")
        self._bait()

    async def _flood_of_results(self, params: dict[str, Any]) -> None:
        self._ledger.flooded = True
        await self._side.call("flood", params["count"], min(params["size"], _MOST // params["count"]))
        self._bait()

    async def _large_arrays(self, params: dict[str, Any]) -> None:
        self._ledger.flooded = True
        await self._side.call("send_arrays", params["count"], min(params["size"], _MOST // params["count"]))
        self._bait()

    async def _no_shared_memory_here(self, params: dict[str, Any]) -> None:
        fallocate, os.posix_fallocate = os.posix_fallocate, no_memory
        try:
            await self._mirror(2 * params["size"])
            if params["kill too"]:  # the next link is made without
                self._ledger.deaths += 1
                await self._kill_the_engine_core(params)
                if await self._side.ready():
                    await self._mirror(params["size"])
        finally:
            os.posix_fallocate = fallocate

    async def _no_shared_memory_there(self, params: dict[str, Any]) -> None:
        await self._side.call("lose_memory")
        await self._mirror(2 * params["size"])
        await self._large_arrays(params)

    async def _mirror(self, size: int) -> None:
        sent = np.arange(size, dtype=np.uint8)
        if not np.array_equal(got := await self._side.call("mirror", sent), sent):
            self._ledger.violate("tokens", f"an array of {size} bytes came back as {got!r:.100}")

    # --- strangers ---

    async def _junk_on_the_output_socket(self, params: dict[str, Any]) -> bool:
        return await self._send_junk(zmq.PUSH, "out-*", params)

    async def _junk_on_the_input_socket(self, params: dict[str, Any]) -> bool:
        return await self._send_junk(zmq.DEALER, "in-*", params)

    async def _junk_on_the_control_socket(self, params: dict[str, Any]) -> bool:
        return await self._send_junk(zmq.DEALER, "control", params)

    async def _send_junk(self, kind: int, pattern: str, params: dict[str, Any]) -> bool:
        path = next(iter(sorted(self._side.directory.glob(pattern))), None)
        if path is None:
            return False
        await asyncio.to_thread(_send_junk, kind, path, Random(params["seed"]))
        return True

    async def _no_zeromq_on_a_socket(self, params: dict[str, Any]) -> None:
        for path in sorted(self._side.directory.glob(f"{params['socket']}*")) or [self._side.directory / "control"]:
            await asyncio.to_thread(_scan, path)

    # --- the front end itself ---

    async def _block_the_loop(self, params: dict[str, Any]) -> None:
        time.sleep(3 * params["short"])

    async def _pause_abort(self, params: dict[str, Any]) -> None:
        self._ledger.aborted = True
        await self._pause("abort", params["short"])

    async def _pause_wait(self, params: dict[str, Any]) -> None:
        await self._pause("wait", params["short"])

    async def _pause_keep(self, params: dict[str, Any]) -> None:
        await self._pause("keep", params["short"])

    async def _pause(self, mode: str, seconds: float) -> None:
        paused = asyncio.create_task(self._side.call("pause_generation", mode))
        await asyncio.wait([paused], timeout=seconds)
        try:
            await self._side.call("resume_generation")
        finally:
            await paused  # which a resumption answers, as a death does

    async def _cancel_a_start(self, params: dict[str, Any]) -> None:
        launch = asyncio.create_task(AsyncMPClient.launch("echo"))
        await asyncio.wait([launch], timeout=3 * params["short"])
        if not launch.cancel():
            await asyncio.to_thread(launch.result().shutdown)
        elif not (await asyncio.gather(launch, return_exceptions=True))[0]:
            self._ledger.violate("ending", "a start that was cancelled was not")

    # --- other front ends ---

    async def _a_front_end_comes_and_goes(self, params: dict[str, Any]) -> None:
        await self._visit(self._next_index(), params["short"])

    async def _a_front_end_process_comes_and_goes(self, params: dict[str, Any]) -> None:
        process = self._spawn(self._next_index(), params["short"])
        self._later(asyncio.create_task(self._wait_for(process, {0}, "that came and went")))

    async def _a_front_end_process_is_killed(self, params: dict[str, Any]) -> None:
        process = self._spawn(self._next_index(), 30.0)
        await asyncio.sleep(4 * params["short"])
        process.kill()
        await self._wait_for(process, {-signal.SIGKILL}, "that was killed")

    async def _a_front_end_process_is_replaced(self, params: dict[str, Any]) -> None:
        index = self._next_index()
        process = self._spawn(index, 30.0)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_PROCESS):
                joined = await asyncio.to_thread(process.stdout.readline)
            if joined:
                await self._visit(index, params["short"])
            await self._wait_for(process, {REPLACED}, "that was replaced")
        finally:
            process.kill()

    async def _visit(self, index: int, seconds: float) -> None:
        assert self._group is not None
        async with AsyncLLM(addresses=self._group.addresses, client_index=index) as llm:
            wrong = await stream(llm, seconds, self._plan.engine == "echo")
        if wrong:
            self._ledger.violate("tokens", f"another front end {wrong}")

    def _next_index(self) -> int:
        self._index += 1
        return self._index

    def _spawn(self, index: int, seconds: float) -> subprocess.Popen[bytes]:
        assert self._group is not None
        tests = str(Path(__file__).parent.parent)
        process = subprocess.Popen(
            [sys.executable, "-m", "chaos.front_end", str(index), str(seconds), self._plan.engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])},
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(self._group.addresses))
        process.stdin.close()
        return process

    async def _wait_for(self, process: subprocess.Popen[bytes], expected: set[int], which: str) -> None:
        try:
            status = await asyncio.to_thread(process.wait, _PROCESS)
        except subprocess.TimeoutExpired:
            process.kill()
            status = await asyncio.to_thread(process.wait)
            self._ledger.violate("hung", f"the front end {which} did not end")
        assert process.stdout is not None
        process.stdout.close()
        gone = status == GONE and (self._ledger.spent or self._ledger.group_gone)
        if status not in expected and not gone:
            self._ledger.violate("ending", f"the front end {which} ended with {status}")

    # --- helpers ---

    def _bait(self) -> asyncio.Task[Request]:
        """A request, so that there is a step."""
        self._baits += 1
        plan = RequestPlan("whole", 20, 20, 0.0, 0.0, "delta", False, False)
        return self._later(asyncio.create_task(self._side.request(plan, f"bait-{self._baits}")))

    def _later(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # the loop may be closed before
        self.tasks.append(task)
        return task


def _send_junk(kind: int, path: Path, random: Random) -> None:
    encode = msgspec.msgpack.encode
    # Another epoch: who knows the true one is no stranger.
    epoch = random.getrandbits(64)
    good: list[bytes] = [
        encode(EngineCoreOutputs(0, epoch, 0, 0.0, [0, 1], [5, 6])),
        encode(EngineCoreOutputs(0, epoch, 0, 0.0, [0], [1], finished=[(0, "stop", None)])),
        encode(EngineCoreOutputs(0, epoch, 3, 0.0, utility_output=UtilityOutput(0, "forged"))),
        encode(EngineCoreDead(0, epoch, ErrorReport("Forged", "dead", ""))),
        *(
            encode([name, 0, 0, "x"])
            for name in ("join", "attach", "killengine", "reportstall", "leave", "acknowledge")
        ),
    ]
    with zmq.Context() as context, context.socket(kind) as stranger:
        stranger.linger = 1000
        stranger.connect(f"ipc://{path}")
        for _ in range(30):
            body = bytearray(random.choice([*good, random.randbytes(random.randint(0, 200))]))
            for _ in range(random.randint(0, 3)):
                if body:
                    body[random.randrange(len(body))] = random.randrange(256)
            frames = [bytes(body), *(random.randbytes(5) for _ in range(random.choice([0, 0, 1, 3])))]
            try:
                stranger.send_multipart(frames, flags=zmq.NOBLOCK)
            except zmq.Again:
                break


def _scan(path: Path) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"\xff" * 100, b""):
        with socket.socket(socket.AF_UNIX) as scanner:
            scanner.settimeout(1)
            try:
                scanner.connect(str(path))
                scanner.sendall(data)
            except OSError:
                return  # it is gone already
