"""Utility calls: the busy loop has them done, and answered, here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from outboard.engine.calls import convert_arguments
from outboard.engine.client import Client
from outboard.engine.core import EngineCore, no_such_utility, utility_methods
from outboard.engine.events import BadCall, DeferredResult
from outboard.engine.outgoing import error_report
from outboard.errors import ProtocolError, UtilityNotFoundError
from outboard.protocol.messages import UtilityCall, UtilityOutput

__all__ = ["UtilityCalls"]

# Answers wait for other calls that are there already, where those took less than this last time, seconds; and at most
# so many of them.
_QUICK = 0.0005
_ANSWERS_AT_ONCE = 32


class UtilityCalls:
    """Belongs to the busy loop. An answer leaves behind all outputs so far.

    Answers to many calls at once leave together: that saves system calls, and wake-ups of the client.

    Args:
        engine: whose utility methods can be called.
        controls: those of the busy loop, by name; they go before the engine's own.
        inbox: gets deferred results.

    Attributes:
        methods: all that can be called, by name.
    """

    def __init__(self, engine: EngineCore, controls: Mapping[str, Callable[..., Any]], inbox: SimpleQueue[Any]) -> None:
        self._engine = engine
        self._controls = controls
        self._inbox = inbox
        self._quick: set[str] = set()  # methods that took next to no time when they were last called
        self._answered: dict[int, Client] = {}  # those with answers that were not tried to send yet, by epoch
        self.methods = {**{name: getattr(engine, name) for name in utility_methods(engine)}, **controls}

    def call(self, client: Client, call: UtilityCall) -> None:
        """Calls a method; answers now, or once the future that it returned is done."""
        method = self.methods.get(call.method)
        started = time.monotonic()
        self._quick.discard(call.method)
        try:
            if method is None:
                raise UtilityNotFoundError(no_such_utility(self._engine, call.method, self._controls))
            args, kwargs = convert_arguments(method, call.args, call.kwargs)
            result = method(*args, **kwargs)
        except Exception as error:
            self.answer(client, UtilityOutput(call.call_id, error=error_report(error)))
            return
        if time.monotonic() - started < _QUICK:
            self._quick.add(call.method)
        if isinstance(result, Future):
            client.deferred_calls += 1
            epoch = client.epoch
            result.add_done_callback(lambda future: self._inbox.put(DeferredResult(epoch, call.call_id, future)))
        else:
            self.answer(client, UtilityOutput(call.call_id, result))

    def refuse(self, client: Client, item: BadCall) -> None:
        """Answers what is no valid call."""
        self.answer(client, UtilityOutput(item.call_id, error=error_report(ProtocolError(item.reason))))

    def answer_deferred(self, client: Client, deferred: DeferredResult) -> None:
        """Answers with what has become of the future."""
        client.deferred_calls -= 1
        try:
            answer = UtilityOutput(deferred.call_id, deferred.future.result(timeout=0))
        except BaseException as error:  # CancelledError too: whatever ended the future is the caller's
            answer = UtilityOutput(deferred.call_id, error=error_report(error))
        self.answer(client, answer)

    def answer(self, client: Client, answer: UtilityOutput) -> None:
        """Has this sent, now or with the next."""
        client.outgoing.answer(answer)
        self._answered[client.epoch] = client
        if client.outgoing.answers >= _ANSWERS_AT_ONCE:
            self.send()

    def send_before(self, item: Any) -> None:
        """Sends what was answered, unless this is a call that will be answered in no time."""
        if self._answered and not (type(item) is UtilityCall and item.method in self._quick):
            self.send()

    def send(self) -> None:
        """Sends what was answered, or keeps it with the outputs."""
        if self._answered:
            now = time.monotonic()
            for client in self._answered.values():
                client.outgoing.flush(now)
            self._answered.clear()

    def forget(self, client: Client) -> None:
        """This client has left."""
        self._answered.pop(client.epoch, None)
