"""Several requests: they come and go between steps and do not disturb each other."""

from __future__ import annotations

from outboard.testing.conformance.suite import Suite, contract, plural

__all__ = ["BatchingChecks"]


class BatchingChecks(Suite):
    """Continuous batching, more requests than places, and what `scheduler_stats` says meanwhile."""

    def test_requests_join_between_steps(self) -> None:
        records = []
        for index in range(4):
            records.append(self.add(index))
            self.harness.step()
        self.settle()
        for index, record in enumerate(records):
            contract(
                record.finish_reason in ("stop", "length"),
                "A request that is added while others run is served like any other.",
                f"request {index} ended with {record.finish_reason!r} ({record.error})",
            )

    def test_requests_leave_without_disturbing_others(self) -> None:
        leaving, staying = self.add(0), self.add(1)
        self.harness.step()
        self.harness.abort(leaving.request.request_id)
        late = self.add(2)
        self.settle()
        for record in (staying, late):
            contract(
                record.finish_reason in ("stop", "length"),
                "Requests are independent: what ends one leaves the others alone.",
                f"after an abort of another, a request ended with {record.finish_reason!r} ({record.error})",
            )

    def test_each_request_gets_its_own_count(self) -> None:
        self.needs_limit("max_tokens")
        limits = [1 + index % 6 for index in range(self.many)]
        records = [self.add(index, max_tokens=limit) for index, limit in enumerate(limits)]
        self.settle()
        for limit, record in zip(limits, records, strict=True):
            count = len(record.tokens)
            contract(
                count == limit if record.finish_reason == "length" else count <= limit,
                "In a batch each request keeps its own max_tokens.",
                f"{plural(count, 'token')} of {limit}, then {record.finish_reason!r}",
            )

    def test_more_requests_than_places(self) -> None:
        records = [self.add(index) for index in range(self.many)]
        self.settle()
        served = sum(record.finish_reason in ("stop", "length") for record in records)
        contract(
            served == len(records),
            "More requests than the engine runs at once must wait, not fail.",
            f"{served} of {len(records)} were served",
        )

    def test_no_more_run_than_max_num_seqs(self) -> None:
        places = self.info.max_num_seqs
        if places is None:
            self.skip("info() tells no max_num_seqs")
        if self.harness.engine.scheduler_stats() is None:
            self.skip("the engine has no scheduler_stats() of its own")
        for index in range(self.many):
            self.add(index)
        most = 0
        for _ in range(self.max_steps):
            if not self.harness.engine.has_work():
                break
            self.harness.step()
            most = max(most, self.harness.stats().running)
        contract(
            most <= places,
            f"No more requests run at once than info().max_num_seqs={places} says.",
            f"scheduler_stats() had {most} running",
        )

    def test_stats_are_sane_at_every_step(self) -> None:
        added = self.many
        for index in range(added):
            self.add(index)
        self._check_stats(added)
        for _ in range(self.max_steps):
            if not self.harness.engine.has_work():
                break
            self.harness.step()
            self._check_stats(added)
        self.settle()

    def _check_stats(self, added: int) -> None:
        stats = self.harness.stats()
        contract(
            type(stats.waiting) is int and type(stats.running) is int,
            "waiting and running of scheduler_stats() are plain ints.",
            f"{stats!r}",
        )
        contract(
            stats.waiting >= 0 and stats.running >= 0 and stats.waiting + stats.running <= added,
            f"waiting and running of scheduler_stats() are 0 or more, and no more together than the {added} requests.",
            f"{stats!r}",
        )
        contract(0 <= stats.kv_cache_usage <= 1, "kv_cache_usage is a share, 0 to 1.", f"{stats.kv_cache_usage!r}")
