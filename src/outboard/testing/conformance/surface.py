"""What an engine shows of itself: its information, its utilities, its end."""

from __future__ import annotations

import inspect
import typing

import msgspec

from outboard.engine.core import utility_methods
from outboard.protocol.messages import EngineInfo
from outboard.testing.conformance.suite import Suite, contract
from outboard.testing.harness import EngineHarness

__all__ = ["SurfaceChecks"]


class SurfaceChecks(Suite):
    """`info`, `@utility` methods, `shutdown`."""

    def test_info_is_sane(self) -> None:
        info = self.info
        contract(isinstance(info, EngineInfo), "info() returns an EngineInfo.", f"{info!r}")
        for name, least in (("max_model_len", 2), ("vocab_size", 1), ("max_num_seqs", 1)):
            value = getattr(info, name)
            contract(
                value is None or (type(value) is int and value >= least),
                f"info().{name} is None or a plain int of at least {least}.",
                f"{value!r} ({type(value).__name__})",
            )
        contract(isinstance(info.model, str), "info().model is a str.", f"{info.model!r}")

    def test_info_can_be_sent(self) -> None:
        try:
            back = msgspec.msgpack.decode(msgspec.msgpack.encode(self.info), type=EngineInfo)
        except (TypeError, ValueError, OverflowError) as error:
            contract(False, "info() holds msgpack values only: it is sent with READY.", str(error))
        else:
            contract(back == self.info, "info() arrives as it was sent, and is the same each time.", f"{back!r}")

    def test_utilities_can_be_described(self) -> None:
        engine = self.harness.engine
        for name in utility_methods(engine):
            method = getattr(engine, name)
            try:
                inspect.signature(method)
                typing.get_type_hints(method)
            except Exception as error:
                contract(
                    False,
                    f"The annotations of @utility {name}() can be resolved: arguments are converted by them.",
                    f"{type(error).__name__}: {error}",
                )
            contract(
                not inspect.iscoroutinefunction(method) and not inspect.isgeneratorfunction(method),
                "A @utility method is a plain function; one that needs time returns a concurrent.futures.Future.",
                f"{name}() is a coroutine or generator function",
            )

    def test_shutdown_with_requests_in_flight(self) -> None:
        harness = EngineHarness(self.make_engine())
        for index in range(3):
            request = self.make_request(index)
            request.request_id = f"request-{index}"
            harness.add_request(request)
        harness.step()
        try:
            harness.shutdown()
        except Exception as error:
            contract(
                False,
                "shutdown() works at any time; all requests have been aborted before.",
                f"{type(error).__name__}: {error}",
            )
