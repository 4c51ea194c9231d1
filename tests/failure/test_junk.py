"""Whoever gets at a socket, by accident or on purpose, ends nothing and touches nobody."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from outboard import AsyncLLM, EngineConfig, SamplingParams, TransportConfig
from outboard.config import Sockets
from outboard.protocol.messages import EngineCoreDead, EngineCoreOutputs, ErrorReport, UtilityOutput
from outboard.transport import inputs as inputs_module
from outboard.transport import outputs as outputs_module
from outboard.transport.framing import head_of, hello
from outboard.transport.unix_inputs import UnixInputSender
from outboard.transport.unix_outputs import UnixReader
from support import Run, children

pytestmark = pytest.mark.usefixtures("nothing_left", "as_configured")

ALPHABET = [97 + i % 26 for i in range(5000)]
encode = msgspec.msgpack.encode


def columns(epoch: int, **fields: Any) -> bytes:
    return encode(EngineCoreOutputs(0, epoch, 0, 0.0, **fields))


# What a stranger may send; each gets the true epoch only where it could not have guessed the rest.
JUNK: dict[str, Callable[[], list[bytes]]] = {
    "empty": lambda: [b""],
    "truncated": lambda: [columns(1, handles=[0, 1], tokens=[5, 6])[:-4]],
    "random": lambda: [random.Random(7).randbytes(200)],
    "another type": lambda: [encode({"not": "an array"})],
    "wrong field": lambda: [encode([0, 0, "epoch", "sequence", [], {}, None])],
    "missing frames": lambda: [columns(1, extras=None, utility_output=UtilityOutput(0, msgspec.msgpack.Ext(1, b"x")))],
    "extra frames": lambda: [columns(1), b"more", b"and more"],
    "another epoch": lambda: [columns(12345, handles=[0], tokens=[99])],
    "unknown call id": lambda: [columns(12345, utility_output=UtilityOutput(10**6, "forged"))],
    "unknown handle": lambda: [columns(12345, handles=[10**9], tokens=[1])],
    "columns that do not fit": lambda: [columns(12345, handles=[0, 1, 2], tokens=[1])],
    "a finish that was not": lambda: [columns(12345, handles=[0], tokens=[1], finished=[(0, "stop", None)])],
    "forged ENGINE_CORE_DEAD": lambda: [encode(EngineCoreDead(0, 12345, ErrorReport("Forged", "dead", "")))],
}


async def read(llm: AsyncLLM, count: int) -> list[int]:
    got: list[int] = []
    async for output in llm.generate([1], SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)):
        got += output.outputs[0].token_ids
    return got


def address_of(llm: AsyncLLM, prefix: str) -> str:
    """The one socket of this kind in the session's directory."""
    directory = Path(llm.client._resources.group.addresses.directory)  # type: ignore[union-attr]
    (path,) = directory.glob(f"{prefix}*")
    return f"ipc://{path}"


def test_thirteen_kinds_of_junk_on_the_output_socket_touch_none_of_twenty_streams(run: Run) -> None:
    """ZeroMQ lets anybody connect at any time."""

    async def main() -> None:
        config = EngineConfig(engine="mock", options={"step_ms": 2.0}, transport=TransportConfig(sockets="zmq"))
        async with AsyncLLM(config) as llm:
            streams = [asyncio.create_task(read(llm, 400)) for _ in range(20)]
            while llm.client.stats()["requests"] < 20:
                await asyncio.sleep(0.01)
            with zmq.Context() as context:
                stranger = context.socket(zmq.PUSH)
                stranger.connect(address_of(llm, "out-"))
                for make in JUNK.values():
                    stranger.send_multipart(make())
                stranger.close(linger=1000)
            assert await asyncio.gather(*streams) == [ALPHABET[:400]] * 20
            assert sum(llm.client.stats()["dropped"].values()) == len(JUNK) == 13
            await llm.check_health()

    run(main())


def test_thirteen_strangers_who_are_there_before_the_engine_core_touch_none_of_twenty_streams(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Unix socket can be connected to only until the engine core has."""
    strangers: list[socket.socket] = []

    def crowd(path: str) -> None:
        for make in JUNK.values():
            stranger = socket.socket(socket.AF_UNIX)
            strangers.append(stranger)
            stranger.connect(path)
            frames = make()
            stranger.sendall(hello(12345) + head_of(frames) + b"".join(frames))

    class CrowdedInputs(UnixInputSender):
        def __init__(self, path: str, *args: Any) -> None:
            super().__init__(path, *args)
            crowd(path)

    class CrowdedOutputs(UnixReader):
        def __init__(self, path: str, *args: Any) -> None:
            super().__init__(path, *args)
            crowd(path)

    monkeypatch.setattr(inputs_module, "UnixInputSender", CrowdedInputs)
    monkeypatch.setattr(outputs_module, "UnixReader", CrowdedOutputs)

    async def main() -> None:
        config = EngineConfig(engine="mock", options={"step_ms": 2.0}, transport=TransportConfig(sockets="unix"))
        async with AsyncLLM(config) as llm:
            streams = [asyncio.create_task(read(llm, 400)) for _ in range(20)]
            while llm.client.stats()["requests"] < 20:
                await asyncio.sleep(0.01)
            for stranger in strangers:
                with pytest.raises(OSError):
                    stranger.send(b"more")
                stranger.close()
            for prefix in ("in-", "out-"):
                with pytest.raises(ValueError, match="not enough values"):
                    address_of(llm, prefix)
            assert await asyncio.gather(*streams) == [ALPHABET[:400]] * 20
            assert llm.client.stats()["dropped"] == {"stranger": 2 * len(JUNK)}
            assert len(JUNK) == 13
            await llm.check_health()

    run(main())


@pytest.mark.parametrize(("prefix", "sockets"), [("in-", "zmq"), ("control", "unix"), ("control", "zmq")])
def test_junk_on_the_other_sockets(run: Run, prefix: str, sockets: Sockets) -> None:
    async def main() -> None:
        config = EngineConfig(engine="mock", options={"step_ms": 2.0}, transport=TransportConfig(sockets=sockets))
        async with AsyncLLM(config) as llm:
            streams = [asyncio.create_task(read(llm, 300)) for _ in range(20)]
            while llm.client.stats()["requests"] < 20:
                await asyncio.sleep(0.01)
            with zmq.Context() as context:
                stranger = context.socket(zmq.DEALER)
                stranger.connect(address_of(llm, prefix))
                for make in JUNK.values():
                    stranger.send_multipart(make())
                for name in ("Join", "Attach", "KillEngine", "ReportStall", "ClientAttached", "Leave", "Acknowledge"):
                    stranger.send(encode([name.lower(), 0, 0, "x"]))
                stranger.close(linger=1000)
            assert await asyncio.gather(*streams) == [ALPHABET[:300]] * 20
            await llm.check_health()

    run(main())


@pytest.mark.parametrize("sockets", ["unix", "zmq"])
def test_bytes_that_are_no_zeromq(run: Run, sockets: Sockets) -> None:
    """As a security scanner sends them to everything that listens."""

    async def main() -> None:
        config = EngineConfig(engine="mock", options={"step_ms": 2.0}, transport=TransportConfig(sockets=sockets))
        async with AsyncLLM(config) as llm:
            streams = [asyncio.create_task(read(llm, 300)) for _ in range(20)]
            while llm.client.stats()["requests"] < 20:
                await asyncio.sleep(0.01)
            for prefix in ("in-", "out-", "control") if sockets == "zmq" else ("control",):
                for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"\xff" * 100, b""):
                    with socket.socket(socket.AF_UNIX) as scanner:
                        scanner.connect(address_of(llm, prefix).removeprefix("ipc://"))
                        scanner.sendall(data)
            assert await asyncio.gather(*streams) == [ALPHABET[:300]] * 20

    run(main())


def test_sockets_are_private_and_nothing_listens_on_tcp(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM("mock") as llm:
            directory = Path(address_of(llm, "control").removeprefix("ipc://")).parent
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            assert directory.stat().st_uid == os.getuid()
            for process in [psutil.Process(), *children()]:
                assert not [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]

    run(main())


def test_only_utilities_can_be_called(run: Run) -> None:
    async def main() -> None:
        from outboard import UtilityNotFoundError

        async with AsyncLLM("faulty:CallableEngine") as llm:
            for name in ("not_a_utility", "__init__", "step", "shutdown", "add_request", "__class__", "calls"):
                with pytest.raises(UtilityNotFoundError, match=name):
                    await llm.client.call_utility_async(name)

    run(main())
