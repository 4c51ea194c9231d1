"""`abort_requests`: never an error, whatever the request is doing, and it gives everything back."""

from __future__ import annotations

from outboard.testing.conformance.suite import Suite, contract
from outboard.testing.harness import RequestRecord

__all__ = ["AbortChecks"]


class AbortChecks(Suite):
    """Aborts of requests that are unknown, waiting, running, finished or aborted already."""

    def test_aborting_an_unknown_request_is_no_error(self) -> None:
        self._abort("unknown", "never-heard-of")
        self._all_dropped()

    def test_aborting_nothing_is_no_error(self) -> None:
        self._abort("no")
        self._all_dropped()

    def test_aborting_a_waiting_request(self) -> None:
        record = self.add(0)
        self._abort("waiting", record)
        self._all_dropped()

    def test_aborting_a_running_request(self) -> None:
        record = self.add(0)
        self.harness.step()
        self._abort("running", record)
        self._all_dropped()

    def test_aborting_a_finished_request(self) -> None:
        record = self.add(0)
        self.settle()
        self._abort("finished", record)
        self._all_dropped()

    def test_aborting_twice(self) -> None:
        record = self.add(0)
        self.harness.step()
        self._abort("running", record)
        self._abort("aborted", record)
        self._all_dropped()

    def test_a_mixed_abort_reaches_all(self) -> None:
        finished = self.add(0)
        self.settle()
        running = self.add(1)
        self.harness.step()
        waiting = self.add(2)
        self._abort("mixed", "never-heard-of", finished, waiting, running)
        self._all_dropped()

    def test_after_an_abort_the_engine_serves_others(self) -> None:
        record = self.add(1)
        self.harness.step()
        self._abort("running", record)
        self.serves_another("an abort")

    def test_aborts_give_their_places_back(self) -> None:
        for _ in range(3):
            records = [self.add(index) for index in range(self.many)]
            self.harness.step()
            self._abort("waiting and running", *records)
        self.serves_another("three full batches that were aborted")

    def _all_dropped(self) -> None:
        self.settle()
        self.no_strays("abort_requests() drops every request that it names; they are worked on no more.")

    def _abort(self, kind: str, *targets: RequestRecord | str) -> None:
        try:
            self.harness.abort(
                *[target if isinstance(target, str) else target.request.request_id for target in targets]
            )
        except Exception as error:
            contract(
                False,
                f"abort_requests() of {kind} requests is no error.",
                f"{type(error).__name__}: {error}",
            )
