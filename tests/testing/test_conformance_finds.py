"""The kit proved: each broken engine fails the check of the point that it breaks; each check fails for some engine."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import ClassVar

import broken_engines as broken
import msgspec
import pytest

from outboard import EngineCore, EngineCoreRequest
from outboard.testing import EngineConformance

pytest_plugins = ("pytester",)

# (engine, check, what the failure says)
CASES: list[tuple[Callable[[], EngineCore], str, str]] = [
    (broken.AlwaysBusy, "a_new_engine_has_no_work", "True with no request"),
    (broken.NeverBusy, "a_request_is_work", "False after add_request"),
    (broken.LosesWhenAsked, "has_work_changes_nothing", "only look"),
    (broken.NeverEnds, "a_request_ends", r"after 200 steps; 1 requests have not ended: 'request-0' \(200 tokens\)"),
    (broken.AlwaysBusy, "a_request_ends", "after 200 steps; all requests have ended"),
    (broken.EndsWithoutReason, "a_request_ends", "request-0 has no finish reason, after 1 step"),
    (broken.EndsWithNothing, "a_request_ends", "it ended with neither"),
    (broken.FailsAll, "a_request_ends", "out of order"),
    (broken.EndsTwice, "nothing_comes_after_the_end", "3 outputs for request-0, request-1, request-2"),
    (broken.SpeaksAfterAborts, "nothing_comes_after_an_abort", "for request-0, request-1"),
    (broken.SchedulesLate, "queue_time_is_told_before_the_first_output", "it came after"),
    (broken.ReusesItsBuffer, "outputs_can_be_sent_and_do_not_change", "changed after it was handed over"),
    (broken.NeverEnds, "outputs_can_be_sent_and_do_not_change", "not after 200 steps"),
    (broken.UnsendableResult, "outputs_can_be_sent_and_do_not_change", "builtins.object cannot be sent"),
    (broken.OneTooMany, "max_tokens_is_the_limit", "gets no more tokens. Seen: 2"),
    (broken.OneTooFew, "max_tokens_is_the_limit", "exactly so many tokens. Seen: 1"),
    (broken.FailsAll, "max_tokens_is_the_limit", "'error' after 0 tokens"),
    (broken.OneLimitForAll, "max_tokens_is_each_request_s_own", "no more tokens"),
    (broken.IgnoresStops, "a_stop_token_ends_the_completion", "before its end"),
    (broken.NamesNoStop, "a_stop_token_ends_the_completion", "stop_reason None"),
    (broken.IgnoresMinTokens, "no_stop_counts_before_min_tokens", "1 token, then 'stop'"),
    (broken.NumpyTokens, "ids_are_plain_ints", "numpy.int64 among"),
    (broken.NumpyStopReason, "ids_are_plain_ints", "numpy.int32"),
    (broken.OutsideTheVocabulary, "ids_are_in_the_vocabulary", "0 to 255"),
    (broken.LogprobsOfAnotherToken, "logprobs_have_one_entry_a_token", "for token"),
    (broken.TwoLogprobsAToken, "logprobs_have_one_entry_a_token", "16 for 8 tokens"),
    (broken.NumpyLogprobs, "logprobs_have_one_entry_a_token", "plain float"),
    (broken.FailsWhoJoins, "requests_join_between_steps", "busy"),
    (broken.AbortTakesOthersAlong, "requests_leave_without_disturbing_others", "no finish reason"),
    (broken.AbortFailsOthers, "requests_leave_without_disturbing_others", "'error' .lost."),
    (broken.NumpyStats, "stats_are_sane_at_every_step", "plain ints"),
    (broken.OneLimitForAll, "each_request_gets_its_own_count", "its own max_tokens"),
    (broken.FailsBeyondPlaces, "more_requests_than_places", "3 of 7 were served"),
    (broken.RunsTooMany, "no_more_run_than_max_num_seqs", "3 running"),
    (broken.NegativeStats, "stats_are_sane_at_every_step", "waiting=-1"),
    (broken.CountsTwice, "stats_are_sane_at_every_step", "no more together"),
    (broken.UsageAsPercentage, "stats_are_sane_at_every_step", "100.0"),
    (broken.UsageNeverFalls, "stats_are_sane_at_every_step", "kv_cache_usage=1.0"),
    (broken.AbortOfUnknownRaises, "aborting_an_unknown_request_is_no_error", "KeyError"),
    (broken.AbortOfNothingRaises, "aborting_nothing_is_no_error", "IndexError"),
    (broken.AbortForgetsTheWaiting, "aborting_a_waiting_request", "waiting=1"),
    (broken.AbortIgnoresTheRunning, "aborting_a_running_request", "7 outputs for request-0"),
    (broken.AbortReachesTheFirstAlone, "a_mixed_abort_reaches_all", "outputs? for request-"),
    (broken.AbortOfUnknownRaises, "aborting_a_finished_request", "KeyError"),
    (broken.AbortOfUnknownRaises, "aborting_twice", "KeyError"),
    (broken.AbortBreaksTheEngine, "after_an_abort_the_engine_serves_others", "broken"),
    (broken.AbortLosesAPlace, "aborts_give_their_places_back", "after 200 steps"),
    (broken.RefusesByAnyError, "an_empty_request", "KeyError"),
    (broken.ChecksNothing, "an_empty_request", "step.. raised IndexError"),
    (broken.FailsWithoutAWord, "an_empty_request", "error=None"),
    (broken.RefusalsStayInside, "an_empty_request", "step.. raised IndexError"),
    (broken.RefusesByAnyError, "ids_outside_the_vocabulary", "KeyError"),
    (broken.ForgetsTheModelsLength, "a_prompt_as_long_as_the_model_allows_is_refused", "leaves no room"),
    (broken.ForgetsTheModelsLength, "a_completion_ends_at_the_model_s_length", "61 and 39"),
    (broken.RefusalFailsAll, "refusals_beside_others", "doomed"),
    (broken.NumpyInfo, "info_is_sane", "int64"),
    (broken.InfoOfNoLength, "info_is_sane", "max_model_len"),
    (broken.InfoAsADict, "info_is_sane", "returns an EngineInfo"),
    (broken.InfoWithoutAName, "info_is_sane", "model is a str"),
    (broken.ChangingInfo, "info_can_be_sent", "the same each time"),
    (broken.UnsendableInfo, "info_can_be_sent", "msgpack"),
    (broken.UnresolvableUtility, "utilities_can_be_described", r"price\(\).*Decimal"),
    (broken.CoroutineUtility, "utilities_can_be_described", "plain function"),
    (broken.FaultyShutdown, "shutdown_with_requests_in_flight", "still busy"),
    (broken.ShutdownAfterAnIdleStepOnly, "shutdown_with_requests_in_flight", "left work"),
    (broken.SleepsUnnoticed, "it_wakes_up_as_it_was", r"is_sleeping\(\) is True. Seen: False"),
    (broken.NeverWakes, "it_wakes_up_as_it_was", "Seen: True"),
    (broken.WakesWithNoPlaces, "it_wakes_up_as_it_was", "after 200 steps"),
    (broken.CannotReset, "the_prefix_cache_can_be_reset", "UnsupportedError. Seen: NotImplementedError"),
    (broken.ResetsSilently, "the_prefix_cache_can_be_reset", "Seen: None"),
    (broken.with_tokenizer(broken.LossyTokenizer), "the_tokenizer_gives_texts_back", "the quick"),
    (broken.with_tokenizer(broken.MixingTokenizer), "the_tokenizer_decodes_batches", "in order"),
    (broken.with_tokenizer(broken.NeedsASequenceTokenizer), "the_tokenizer_decodes_batches", r"decode\(\[\]\)"),
    (broken.with_tokenizer(broken.NeedsATokenTokenizer), "the_tokenizer_decodes_batches", r"decode\(\[\[\]\]\)"),
    (broken.with_tokenizer(broken.ShiftedTokenizer), "the_tokenizer_gives_plain_ids", "within info"),
    (broken.with_tokenizer(broken.NoLengthTokenizer), "no_token_is_longer_than_it_says", "at least 1"),
    (broken.with_tokenizer(broken.WordTokenizer), "no_token_is_longer_than_it_says", "20 characters in 4 tokens"),
    (broken.with_tokenizer(broken.NumpyTokenizer), "the_tokenizer_gives_plain_ids", "list of int64"),
    (broken.with_tokenizer(broken.StrangeEndTokenizer), "the_end_of_sequence_is_in_the_vocabulary", "256"),
    (broken.with_tokenizer(broken.ModestTokenizer), "no_token_is_longer_than_it_says", r"tokens \[7\]"),
]


def suite_of(engine: Callable[[], EngineCore], *, language_model: bool = True) -> type[EngineConformance]:
    class Suite(EngineConformance):
        is_language_model: ClassVar[bool] = language_model
        max_steps: ClassVar[int] = 200

        def make_engine(self) -> EngineCore:
            return engine()

    return Suite


def check(suite_class: type[EngineConformance], name: str) -> EngineConformance:
    """Runs one check as pytest does, but for the shutdown of the engine."""
    suite = suite_class()
    suite.setup_method()
    try:
        getattr(suite, f"test_{name}")()
    finally:
        suite.teardown_method()
    return suite


def checks() -> list[str]:
    return [name.removeprefix("test_") for name in dir(EngineConformance) if name.startswith("test_")]


@pytest.mark.parametrize(
    ("engine", "name", "message"), CASES, ids=[f"{engine.__name__}-{name}" for engine, name, _ in CASES]
)
def test_a_broken_engine_is_found(engine: Callable[[], EngineCore], name: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(suite_of(engine), name)


@pytest.mark.parametrize("name", checks())
def test_an_engine_that_keeps_the_contract_passes(name: str) -> None:
    try:
        check(suite_of(broken.ManyUtilities), name)
    except unittest.SkipTest as skipped:
        assert name == "odd_inputs", skipped


def test_odd_inputs_of_an_engine_that_is_no_language_model() -> None:
    class Suite(suite_of(broken.NeedsALargeInput, language_model=False)):  # type: ignore[misc]
        def make_request(self, index: int) -> EngineCoreRequest:
            request: EngineCoreRequest = EngineConformance.make_request(self, index)
            return msgspec.structs.replace(request, inputs={"image": 1})

    with pytest.raises(AssertionError, match=r"refused by InvalidRequestError.*KeyError"):
        check(Suite, "odd_inputs")
    check(Suite, "a_request_ends")


def test_every_check_finds_something() -> None:
    by_themselves = {"odd_inputs"}  # above
    assert {name for _, name, _ in CASES} | by_themselves == set(checks())


def test_what_a_request_of_the_author_s_is_refused_with_is_shown() -> None:
    class Suite(suite_of(broken.Good)):  # type: ignore[misc]
        def make_request(self, index: int) -> EngineCoreRequest:
            return EngineCoreRequest(request_id="")

    with pytest.raises(AssertionError, match="request 0 was refused: a prompt of 0 tokens"):
        check(Suite, "a_request_ends")


def test_without_make_engine_the_author_is_told() -> None:
    class Suite(EngineConformance):
        pass

    with pytest.raises(NotImplementedError, match="define make_engine"):
        Suite().setup_method()


def test_one_engine_serves_a_class() -> None:
    made: list[EngineCore] = []

    def make() -> EngineCore:
        made.append(broken.Good())
        return made[-1]

    suite = suite_of(make)
    for name in ("a_request_ends", "more_requests_than_places", "aborting_a_running_request"):
        check(suite, name)
    assert len(made) == 1
    check(suite, "shutdown_with_requests_in_flight")
    assert len(made) == 2
    assert not made[0].has_work()
    suite.teardown_class()


def test_a_class_and_one_that_inherits_from_it_have_an_engine_each() -> None:
    parent = suite_of(broken.Good)

    class Child(parent):  # type: ignore[misc, valid-type]
        pass

    engines = {id(check(suite, "a_request_ends").harness.engine) for suite in (parent, Child, parent, Child)}
    assert len(engines) == 2


def test_an_engine_that_cannot_be_emptied_is_given_up() -> None:
    made: list[EngineCore] = []

    def make() -> EngineCore:
        made.append(broken.Good() if made else broken.AlwaysBusy())
        return made[-1]

    suite = suite_of(make)
    with pytest.raises(AssertionError, match="True with no request"):
        check(suite, "a_new_engine_has_no_work")
    check(suite, "a_new_engine_has_no_work")
    assert len(made) == 2


def test_a_class_of_three_lines(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from outboard.engines.echo import EchoEngine
        from outboard.testing import EngineConformance

        class TestMyEngine(EngineConformance):
            def make_engine(self):
                return EchoEngine(max_num_seqs=2)

        class TestClosed(EngineConformance):
            def make_engine(self):
                engine = EchoEngine()
                engine.shutdown = lambda: print("closed once")
                return engine
        """
    )
    result = pytester.runpytest_inprocess(
        "-q", "-s", "-p", "no:cacheprovider", "-k", "TestMyEngine or has_work_changes"
    )
    outcomes = result.parseoutcomes()
    assert outcomes.keys() <= {"passed", "skipped", "deselected"}
    assert outcomes["passed"] + outcomes["skipped"] == len(checks()) + 1
    assert outcomes["passed"] > outcomes["skipped"]
    assert result.stdout.str().count("closed once") == 1
