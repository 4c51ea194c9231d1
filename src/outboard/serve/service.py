"""What all endpoints of an API process share."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from outboard.engine.core import Tokenizer
from outboard.errors import EngineDeadError, OutboardError
from outboard.frontend.llm import AsyncLLM
from outboard.observe.record import OnRequest, RequestRecord
from outboard.serve.config import ServeConfig
from outboard.serve.errors import ApiError, to_api_error
from outboard.serve.exchange import Exchange
from outboard.serve.generation import Generation
from outboard.serve.keys import Keys
from outboard.serve.limits import Admission
from outboard.serve.logprobs import TokenTexts

__all__ = ["Service"]

logger = logging.getLogger("outboard.serve")


async def _nothing() -> bytes:
    return b""


class Service:
    """An engine, and the rules by which it is offered.

    Args:
        llm: the engine, started.
        config: the rules.
        admission: lets requests in.
        on_request: called with each request of the API once it has ended.
        render_metrics: makes the page for Prometheus.

    Attributes:
        draining: whether no more requests are taken.
        model: its name in the API.
        created: `time.time()` at which this began.
        live: requests that have not ended.
        cut: how many had to be ended while this drained.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServeConfig,
        admission: Admission,
        on_request: Sequence[OnRequest] = (),
        render_metrics: Callable[[], Awaitable[bytes]] = _nothing,
    ) -> None:
        self.llm = llm
        self.config = config
        self.admission = admission
        self.render_metrics = render_metrics
        self.draining = False
        self.token_texts = TokenTexts(llm.tokenizer)
        self.created = int(time.time())
        self.live: set[Generation] = set()
        self.cut = 0
        self._ended_tokens = 0
        self._on_request = on_request
        self._keys = Keys(config.api_keys)
        self.model = config.model_name(llm.config, llm.engine_info)

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's. Raises `ApiError` where it has none."""
        if self.llm.tokenizer is None:
            raise ApiError(400, "this engine has no tokenizer: it takes token ids alone", code="no_tokenizer")
        return self.llm.tokenizer

    @property
    def completion_tokens(self) -> int:
        """Tokens of all completions so far."""
        return self._ended_tokens + sum(one.completion_tokens for one in self.live)

    def check_key(self, exchange: Exchange) -> int | None:
        """Index of the API key that a request shows; None where none is needed. Raises `ApiError`."""
        key = self._keys.find(exchange.headers.get(b"authorization", b""))
        if key == -1:
            raise ApiError(401, "this server wants an API key, as Authorization: Bearer KEY", code="invalid_api_key")
        return key

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` for a model that is not here; without a name it is the one that is."""
        if name not in (None, "", self.model):
            raise ApiError(
                404, f"the model {name!r} does not exist here; {self.model!r} does", code="model_not_found",
                param="model",
            )  # fmt: skip

    def check_ready(self) -> None:
        """Raises `ApiError` where no request can be served now."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", "server_error", "shutting_down", retry_after=1)
        try:
            self.llm.client.check_health()
        except OutboardError as error:
            raise to_api_error(error) from None

    def check_taking(self) -> None:
        """Raises `ApiError` where a new request would be refused at once; one that can wait for a restart is not."""
        if self.draining:
            self.check_ready()
        try:
            self.llm.client.validate_alive()
        except EngineDeadError as error:
            raise to_api_error(error) from None

    def begin(self, generation: Generation) -> None:
        """A request has begun."""
        self.live.add(generation)

    def end(self, generation: Generation) -> None:
        """It has ended."""
        self.live.discard(generation)
        self._ended_tokens += generation.completion_tokens

    def cut_all(self) -> None:
        """Their time is over: ends all requests, each with an error that says so."""
        for generation in list(self.live):
            if generation.fail(ApiError(503, "the server is shutting down", "server_error", "shutting_down")):
                self.cut += 1

    def tell(self, record: RequestRecord) -> None:
        """Tells observers of a request that is over. What they raise is logged, and nothing else."""
        for on_request in self._on_request:
            try:
                on_request(record)
            except Exception:
                logger.exception("an observer of requests failed")
