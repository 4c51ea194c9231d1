"""An engine that answers with what its grammar asks for, as far as a test can tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outboard.engine.core import EngineCore, OutputBatch, Tokenizer
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.protocol.messages import EngineCoreRequest, EngineInfo


class GrammarEngine(EngineCore):
    """Says, as JSON, what structure it was asked for."""

    def __init__(self) -> None:
        self._requests: list[EngineCoreRequest] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        self._requests.append(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._requests = [one for one in self._requests if one.request_id not in request_ids]

    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self, outputs: OutputBatch) -> None:
        requests, self._requests = self._requests, []
        for request in requests:
            text = json.dumps(request.sampling_params.structured_outputs)
            outputs.add(request.request_id, list(text.encode()), "stop")

    def info(self) -> EngineInfo:
        return EngineInfo(model="grammar", structured_outputs=True)

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> Tokenizer:
        return ByteTokenizer()
