"""Many starts and stops in a row, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import warnings
from pathlib import Path

import pytest

from outboard import AsyncMPClient, EngineCoreRequest
from support import Run, children

pytestmark = pytest.mark.usefixtures("nothing_left")


def others() -> set[asyncio.Task[object]]:
    """All tasks on the loop but the test's own."""
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("count", [25, pytest.param(50, marks=pytest.mark.slow)])
def test_starts_and_stops_on_a_loop_leave_nothing(
    run: Run, count: int, short_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the loops of both kinds, 50 in the ordinary run."""

    async def some() -> None:
        tasks = others()
        for number in range(25):
            client = await AsyncMPClient.launch("echo")
            assert os.listdir(short_tmp)  # noqa: PTH208
            if number % 2:  # some are used, some are not
                await client.add_request_async(EngineCoreRequest(request_id="r", prompt_token_ids=[1, 2]))
                while not (await client.get_output_async()).finished:
                    pass
            if number % 3:
                client.shutdown()
            else:
                await asyncio.to_thread(client.shutdown)
            assert not children()
            assert not os.listdir(short_tmp)  # noqa: PTH208
            assert others() == tasks

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = threading.active_count()
        for _ in range(count // 25):  # the bound of `run` is for so many
            run(some())
        assert threading.active_count() <= before
    assert [str(warning.message) for warning in caught] == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
