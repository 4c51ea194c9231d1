"""The controls that an engine may have: it does what they say, or raises `UnsupportedError`."""

from __future__ import annotations

from typing import Any

from outboard.errors import UnsupportedError
from outboard.testing.conformance.suite import Suite, contract

__all__ = ["ControlChecks"]


class ControlChecks(Suite):
    """`sleep`, `wake_up`, `is_sleeping`, `reset_prefix_cache`."""

    def test_it_wakes_up_as_it_was(self) -> None:
        harness = self.harness
        self._control("sleep", 1)
        contract(harness.call("is_sleeping") is True, "After sleep(), is_sleeping() is True.", "False")
        self._control("wake_up", None)
        contract(harness.call("is_sleeping") is False, "After wake_up(None), is_sleeping() is False.", "True")
        self.serves_another("sleep() and wake_up()")

    def test_the_prefix_cache_can_be_reset(self) -> None:
        self.add(0)
        self.settle()
        done = self._control("reset_prefix_cache")
        contract(type(done) is bool, "reset_prefix_cache() returns whether it did.", repr(done))
        self.serves_another("reset_prefix_cache()")

    def _control(self, name: str, *args: Any) -> Any:
        try:
            return self.harness.call(name, *args)
        except UnsupportedError as error:
            self.skip(str(error))
        except Exception as error:
            contract(
                False,
                f"{name}() does it, or raises UnsupportedError.",
                f"{type(error).__name__}: {error}",
            )
