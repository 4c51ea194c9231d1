"""An API process without a process, and an engine that the test plays."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from fake_connection import FakeConnection
from outboard.config import EngineConfig
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.errors import EngineDeadError
from outboard.frontend.outputs import CompletionOutput, RequestOutput
from outboard.observe.record import RequestRecord
from outboard.protocol.messages import EngineInfo
from outboard.serve.app import ApiApp
from outboard.serve.config import ServeConfig
from outboard.serve.limits import Admission, LimitsPage
from outboard.serve.service import Service


class _Engine:
    """An `AsyncLLM` as far as a service looks at it. Requests end only where the test lets them."""

    def __init__(self) -> None:
        self.config = EngineConfig(engine="mock")
        self.tokenizer = ByteTokenizer()
        self.engine_info = EngineInfo(model="m", max_model_len=100, vocab_size=256)
        self.client = SimpleNamespace(check_health=self._check, validate_alive=self._check)
        self.dead = False
        self.requests: list[Any] = []
        self.raises: Exception | None = None

    def _check(self) -> None:
        if self.dead:
            raise EngineDeadError("it died")

    async def submit(self, prompt: Any, params: Any, on_output: Any, request_id: str, on_text: Any) -> Any:
        if self.raises is not None:
            raise self.raises

        def abort() -> None:
            request.aborted = True

        request = SimpleNamespace(
            prompt=prompt,
            params=params,
            on_output=on_output,
            on_text=on_text,
            request_id=request_id,
            prompt_token_ids=[1, 2],
            num_generation_tokens=1,
            abort=abort,
            aborted=False,
        )
        self.requests.append(request)
        return request


class FakeServer:
    """An API process without a process.

    Args:
        config: fields of its `ServeConfig`.
    """

    def __init__(self, **config: Any) -> None:
        self.engine = _Engine()
        self.page, _ = LimitsPage.create(1, 2)
        self.config = ServeConfig(**config)
        admission = Admission(self.page, 0, self.config.max_waiting, self.config.max_concurrent_per_key)
        self.records: list[RequestRecord] = []
        self.service = Service(self.engine, self.config, admission, [self._broken, self.records.append])  # type: ignore[arg-type]
        self.app = ApiApp(self.service)

    def _broken(self, record: RequestRecord) -> None:
        raise RuntimeError("an observer that fails must not matter")

    def ask(
        self, path: str, body: Any, method: str = "POST", **headers: str
    ) -> tuple[FakeConnection, asyncio.Task[None]]:
        """Makes a request; its connection and task."""
        written = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        connection = FakeConnection(written, headers=given)
        connection.scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "method": method}
        return connection, asyncio.ensure_future(self.app(connection.scope, connection.receive, connection.send))

    def check_idle(self, records: int = 1) -> RequestRecord:
        """Nothing is left; the last record."""
        assert not self.page.counts.any() and not self.service.live
        assert len(self.records) == records
        return self.records[-1]


def give(request: Any, text: str, finish: Any = None) -> None:
    """An output of one token of a request."""
    request.on_output(RequestOutput("r", [CompletionOutput(0, text, [97], finish)], finish is not None))
