"""The life of one request: it is worked on, it ends once, and nothing comes after."""

from __future__ import annotations

from typing import Any

from outboard.protocol.codec import MsgpackEncoder
from outboard.testing.conformance.suite import Suite, contract, plural

__all__ = ["LifeChecks"]


class LifeChecks(Suite):
    """From `add_request` to the finish reason."""

    def test_a_new_engine_has_no_work(self) -> None:
        contract(
            not self.harness.engine.has_work(),
            "has_work() must be False before there is a request, else the process never sleeps.",
            "True with no request",
        )

    def test_a_request_is_work(self) -> None:
        self.add(0)
        contract(
            self.harness.engine.has_work(),
            "has_work() must be True once a request was added, else it is never worked on.",
            "False after add_request()",
        )

    def test_has_work_changes_nothing(self) -> None:
        self.add(0)
        answers = {self.harness.engine.has_work() for _ in range(100)}
        contract(answers == {True}, "has_work() must only look: it is asked before every step.", f"answers {answers}")
        self.settle()

    def test_a_request_ends(self) -> None:
        record = self.add(0)
        self.settle()
        contract(
            record.finish_reason in ("stop", "length"),
            'A request that is served ends with "stop" or "length".',
            f"{record.finish_reason!r}, error {record.error!r}",
        )
        contract(
            bool(record.tokens or record.results),
            "A request that is served produces tokens (token_ids=) or results (result=).",
            "it ended with neither",
        )

    def test_nothing_comes_after_the_end(self) -> None:
        for index in range(3):
            self.add(index)
        self.settle()
        self.no_strays("A request ends once; nothing is added to outputs for it afterwards.")

    def test_nothing_comes_after_an_abort(self) -> None:
        records = [self.add(index) for index in range(4)]
        self.harness.step()
        self.harness.abort(*[record.request.request_id for record in records[:2]])
        self.settle()
        self.no_strays("Nothing is added to outputs for a request after abort_requests() named it.")

    def test_queue_time_is_told_before_the_first_output(self) -> None:
        self.add(0)
        outputs = []
        for _ in range(self.max_steps):
            if not self.harness.engine.has_work():
                break
            outputs += self.harness.step()
        produced = [bool(output.new_token_ids) or output.result is not None for output in outputs]
        late = any(output.queue_time is not None and any(produced[:place]) for place, output in enumerate(outputs))
        contract(not late, "outputs.scheduled() comes before a request's first output.", "it came after")

    def test_outputs_can_be_sent_and_do_not_change(self) -> None:
        encoder = MsgpackEncoder(inline_bytes=1 << 30)
        record = self.add(0)
        sent: list[tuple[Any, bytes]] = []
        for _ in range(self.max_steps):
            if not self.harness.engine.has_work():
                break
            for output in self.harness.step():
                try:
                    sent.append((output.result, bytes(encoder.encode(output.result)[0])))
                except Exception as error:
                    contract(False, "A result is any value that msgpack can carry.", f"{type(error).__name__}: {error}")
        contract(record.finished, "A request ends.", f"not after {plural(self.max_steps, 'step')}")
        for number, (result, before) in enumerate(sent):
            contract(
                bytes(encoder.encode(result)[0]) == before,
                "A result is sent from where it lies, perhaps later: copy it, or make a new one each step.",
                f"the result of output {number} changed after it was handed over",
            )
