"""The connection of the inputs ends, or what goes by it makes no sense, while both sides live."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import time

import pytest

from outboard import (
    AsyncMPClient,
    EngineConfig,
    EngineCoreRequest,
    EngineDeadError,
    SamplingParams,
    SyncMPClient,
    TransportConfig,
    launch_engines,
)
from outboard.client import link
from outboard.client.base import MPClient
from outboard.transport.unix_inputs import UnixInputSender
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left", "as_configured", "impatient")

UNIX = TransportConfig(sockets="unix", max_message_bytes=1 << 20)
MOCK = EngineConfig(engine="mock", options={"step_ms": 1.0}, transport=UNIX)
GIVEN_UP = "the engine core has closed its connection, and goes on"

JUNK = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "too large a body": struct.pack("<QQ", (1 << 20) + 1, 0),
    "too large a frame": struct.pack("<QQQ", 5, 1, 2**40) + bytes(5),
    "too many frames": struct.pack("<QQ", 5, 2**63) + bytes(100),
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_END_TOLD", 0.3)


def raw(client: MPClient) -> socket.socket:
    """The socket of a client's inputs."""
    inputs = client._membership.links[0].inputs
    assert isinstance(inputs, UnixInputSender) and inputs._socket is not None
    return inputs._socket


def request(name: str = "r", count: int = 1_000_000) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=count, detokenize=False)
    return EngineCoreRequest(request_id=name, prompt_token_ids=[1], sampling_params=params)


async def tokens(client: AsyncMPClient, name: str, count: int) -> int:
    """How many tokens a request of its own brings."""
    client.add_request(request(name, count))
    got = 0
    while True:
        for output in (await client.get_output_async()).outputs:
            if output.request_id == name:
                got += len(output.new_token_ids)
                if output.finish_reason is not None:
                    return got


@pytest.mark.parametrize("data", JUNK.values(), ids=JUNK)
def test_a_client_that_sends_junk_is_given_up_alone(run: Run, capfd: pytest.CaptureFixture[str], data: bytes) -> None:
    """It finds that out, and does not wait for ever; others are served on."""

    async def main(addresses: object) -> None:
        broken = await AsyncMPClient.launch(addresses=addresses, client_index=0)  # type: ignore[arg-type]
        fine = await AsyncMPClient.launch(addresses=addresses, client_index=1)  # type: ignore[arg-type]
        try:
            broken.add_request(request())
            await broken.get_output_async()
            raw(broken).send(data)
            started = time.monotonic()
            with pytest.raises(EngineDeadError, match=GIVEN_UP):
                while True:
                    await broken.get_output_async()
            assert 0.25 < time.monotonic() - started < 5
            with pytest.raises(EngineDeadError, match=GIVEN_UP):
                await broken.call_utility_async("is_paused")
            assert await tokens(fine, "a", 50) == 50
            await asyncio.to_thread(broken.shutdown)
            broken = await AsyncMPClient.launch(addresses=addresses, client_index=0)  # type: ignore[arg-type]
            assert await tokens(broken, "b", 50) == 50
            assert await tokens(fine, "c", 50) == 50
        finally:
            await asyncio.to_thread(broken.shutdown)
            await asyncio.to_thread(fine.shutdown)

    with launch_engines(MOCK) as group:
        run(main(group.addresses))
    logged = [line for line in capfd.readouterr().err.splitlines() if "broken connection" in line]
    assert len(logged) == 1


def test_an_owner_has_an_engine_core_killed_that_is_deaf_to_it(run: Run) -> None:
    async def main() -> None:
        client = await AsyncMPClient.launch(MOCK)
        try:
            client.add_request(request())
            await client.get_output_async()
            raw(client).send(JUNK["http"])
            with pytest.raises(EngineDeadError, match=GIVEN_UP) as called:  # it is never answered
                await client.call_utility_async("is_paused")
            assert called.value.exit_code == -signal.SIGKILL
            with pytest.raises(EngineDeadError, match=GIVEN_UP):
                while True:
                    await client.get_output_async()
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())


def test_a_blocking_client_gives_up_too() -> None:
    client = SyncMPClient(MOCK)
    try:
        client.add_request(request())
        client.get_output(10)
        raw(client).send(JUNK["too large a body"])
        deadline = time.monotonic() + 10
        with pytest.raises(EngineDeadError, match=GIVEN_UP):
            while time.monotonic() < deadline:
                client.get_output(10)
                client.abort_requests(["unknown"])
    finally:
        client.shutdown()


def test_a_client_whose_end_was_shut(run: Run) -> None:
    """The engine core reads an end, and cannot be told anything more."""

    async def main() -> None:
        client = await AsyncMPClient.launch(MOCK)
        try:
            client.add_request(request())
            await client.get_output_async()
            raw(client).shutdown(socket.SHUT_WR)
            with pytest.raises(EngineDeadError, match=GIVEN_UP):
                while True:
                    await client.get_output_async()
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())
