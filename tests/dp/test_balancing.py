"""Load estimates and policies."""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboard.client.routing import Balanced
from outboard.dp.balancing import (
    POLICIES,
    BalancingPolicy,
    LeastLoaded,
    PowerOfTwo,
    PrefixAffine,
    RoundRobin,
    make_policy,
)
from outboard.dp.coordinator_state import LoadReport, Publication
from outboard.dp.load import LoadTable
from outboard.errors import ConfigError
from outboard.protocol.messages import EngineCoreRequest

REQUEST = EngineCoreRequest(request_id="r")


def prompt(*tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest(request_id="r", prompt_token_ids=array("i", tokens))


def published(table: LoadTable, sequence: int, *loads: tuple[int, int, float], **by_client: dict[int, int]) -> bool:
    """Loads of ranks 0, 1, ... as (waiting, running, KV cache usage)."""
    reports = [
        LoadReport(rank, 0, sequence, *load, by_client.get(f"rank{rank}", {})) for rank, load in enumerate(loads)
    ]
    return table.published(Publication(0, sequence, 0, reports))


def send(policy: BalancingPolicy, table: LoadTable, count: int) -> list[int]:
    ranks = []
    for _ in range(count):
        rank = policy.choose(table, REQUEST)
        table.sent(rank)
        ranks.append(rank)
    return ranks


# --- the table ---


def test_own_requests_count_for_all_front_ends() -> None:
    table = LoadTable([0, 1], client_index=1, client_count=3)
    table.sent(1)
    assert table.loads == [0, 3]
    assert table.in_flight(1) == 1
    table.ended(1)
    assert table.loads == [0, 0]


def test_a_report_counts_where_it_is_more() -> None:
    table = LoadTable([0, 1], client_count=2)
    table.sent(0)
    published(table, 1, (2, 5, 0.0), (0, 1, 0.0))
    assert table.loads == [7, 1]


def test_what_was_sent_after_a_report_counts_on_top_for_all_front_ends() -> None:
    table = LoadTable([0], client_count=2)
    published(table, 1, (0, 10, 0.0))
    table.sent(0)
    assert table.loads == [12]
    table.ended(0)
    assert table.loads == [10]


def test_what_ended_after_a_report_is_taken_off_once() -> None:
    table = LoadTable([0], client_count=2)
    table.sent(0)
    published(table, 1, (0, 10, 0.0))
    table.ended(0)
    assert table.loads == [9]


def test_a_report_that_says_whose_requests_it_counts_is_exact_however_late() -> None:
    table = LoadTable([0], client_index=1, client_count=2)
    for _ in range(3):
        table.sent(0)
    published(table, 1, (0, 6, 0.0), rank0={0: 6})  # from before the three
    assert table.loads == [6 + 3 * 2]
    published(table, 2, (0, 9, 0.0), rank0={0: 6, 1: 3})
    assert table.loads == [9]


def test_the_only_front_end_knows_better_than_a_report() -> None:
    table = LoadTable([0, 1])
    table.sent(0)
    published(table, 1, (0, 0, 0.0), (5, 9, 0.0))
    assert table.loads == [1, 0]


def test_late_and_repeated_news_is_void() -> None:
    table = LoadTable([0], client_count=2)
    assert published(table, 2, (0, 8, 0.0))
    table.sent(0)
    assert not published(table, 2, (0, 8, 0.0))
    assert not published(table, 1, (0, 0, 0.0))
    assert table.loads == [10]


def test_the_same_report_in_a_new_publication_does_not_count_later_requests_as_included() -> None:
    table = LoadTable([0], client_count=2)
    old = LoadReport(0, 0, 1, 0, 8)
    table.published(Publication(0, 1, 0, [old]))
    table.sent(0)
    assert table.published(Publication(0, 2, 0, [old]))
    assert table.loads == [10]


def test_a_restarted_coordinator_is_heard() -> None:
    table = LoadTable([0], client_count=2)
    table.published(Publication(0, 99, 0, [LoadReport(0, 0, 1, 0, 8)]))
    assert table.published(Publication(1, 1, 0, [LoadReport(0, 0, 2, 0, 4)]))
    assert table.loads == [4]


def test_a_queue_behind_a_full_kv_cache_makes_a_rank_look_busier() -> None:
    table = LoadTable([0, 1], client_count=2)
    published(table, 1, (5, 10, 0.98), (0, 20, 0.5))
    assert table.loads[0] > table.loads[1]
    assert LeastLoaded().choose(table, REQUEST) == 1


def test_equally_full_kv_caches_tell_nothing() -> None:
    table = LoadTable([0, 1], client_count=2)
    published(table, 1, (5, 10, 0.98), (0, 20, 0.98))
    assert table.loads == [15, 20]


def test_a_rank_that_leaves_is_not_chosen_and_its_requests_are_still_counted() -> None:
    table = LoadTable([0, 1])
    for rank in (0, 1, 1):
        table.sent(rank)
    table.set_available([0, 2])
    assert table.ranks == (0, 2)
    assert table.loads == [1, 0]
    assert table.in_flight(1) == 2
    table.ended(1)
    table.set_available([0, 1, 2])
    assert table.loads == [1, 1, 0]
    assert table.own == [1, 1, 0]


def test_a_rank_that_was_started_again_has_no_load_but_own_requests() -> None:
    table = LoadTable([0], client_count=2)
    published(table, 5, (9, 9, 1.0))
    table.sent(0)
    table.forget(0)
    assert table.loads == [2]
    table.published(Publication(0, 6, 0, [LoadReport(0, 1, 1, 0, 3)]))
    assert table.loads == [3]


def test_what_is_published_of_a_rank_that_came_again_is_not_of_the_one_that_left() -> None:
    table = LoadTable([0, 1], client_count=2)
    published(table, 1, (0, 1, 0.0), (9, 9, 1.0))
    table.set_available([0])
    table.forget(1, 0)
    published(table, 2, (0, 1, 0.0), (9, 9, 1.0))  # the coordinator does not know yet
    table.set_available([0, 1])
    published(table, 3, (0, 1, 0.0), (8, 9, 1.0))
    assert table.loads == [1, 0]
    table.published(Publication(0, 4, 0, [LoadReport(0, 0, 4, 0, 1), LoadReport(1, 1, 1, 0, 3)]))
    assert table.loads == [1, 3]
    table.forget(1, 0)  # late news are no harm
    table.published(Publication(0, 5, 0, [LoadReport(1, 1, 2, 0, 4)]))
    assert table.loads == [1, 4]


def test_loads_of_ranks_that_are_not_known_yet_or_any_more_change_nothing() -> None:
    table = LoadTable([0], client_count=2)
    published(table, 1, (0, 2, 0.0), (50, 9, 1.0), (50, 9, 1.0))
    assert (table.ranks, table.loads, list(table._entries)) == ((0,), [2], [0])
    table.set_available([0, 1])
    assert table.loads == [2, 0]
    published(table, 2, (0, 2, 0.0), (0, 5, 0.0), (50, 9, 1.0))
    assert table.loads == [2, 5]


def test_nothing_is_kept_of_a_rank_that_is_gone() -> None:
    table = LoadTable([0, 1])
    table.sent(1)
    table.set_available([0])
    table.ended(1)
    assert table.in_flight(1) == 0
    assert list(table._entries) == [0]


def test_a_wrong_client_index_is_refused() -> None:
    with pytest.raises(ValueError, match="client_index"):
        LoadTable([0], client_index=1)


@given(st.data(), st.integers(1, 3))
def test_the_columns_are_what_the_counts_say(data: st.DataObject, clients: int) -> None:
    """Whatever is sent, ends, is published, joins and leaves."""
    table = LoadTable(range(3), client_count=clients)
    own: Counter[int] = Counter()
    for sequence in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["sent", "ended", "published", "available", "forget"])):
            case "sent" if table.ranks:
                rank = data.draw(st.sampled_from(table.ranks))
                table.sent(rank)
                own[rank] += 1
            case "ended" if +own:
                rank = data.draw(st.sampled_from(sorted(+own)))
                table.ended(rank)
                own[rank] -= 1
            case "published":
                load = st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 1))
                published(table, sequence, *data.draw(st.lists(load, max_size=4)))
            case "available":
                table.set_available(data.draw(st.sets(st.integers(0, 4))))
            case "forget":
                table.forget(data.draw(st.integers(0, 4)), data.draw(st.integers(-1, 1)))
        assert table.own == [own[rank] for rank in table.ranks]
        assert table.loads == [table._estimate(table._entries[rank]) for rank in table.ranks]
        assert all(load >= count * clients for load, count in zip(table.loads, table.own, strict=True))
        assert all(table.in_flight(rank) == own[rank] for rank in range(5))


# --- policies ---


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_by_name(name: str) -> None:
    policy = make_policy(name)
    table = LoadTable([3, 5, 9])
    assert {policy.choose(table, REQUEST) for _ in range(100)} <= {3, 5, 9}
    assert make_policy(name) is not policy
    assert make_policy(policy) is policy


@pytest.mark.parametrize("name", POLICIES)
def test_no_rank_to_choose_from(name: str) -> None:
    with pytest.raises(LookupError, match="no rank"):
        make_policy(name).choose(LoadTable(), REQUEST)


@pytest.mark.parametrize("name", POLICIES)
def test_one_rank_to_choose_from(name: str) -> None:
    assert make_policy(name).choose(LoadTable([7]), REQUEST) == 7


@pytest.mark.parametrize("name", POLICIES)
def test_membership_may_change_between_choices(name: str) -> None:
    policy = make_policy(name)
    table = LoadTable(range(8))
    send(policy, table, 20)
    for ranks in ([1, 2], [2], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [9]):
        table.set_available(ranks)
        assert set(send(policy, table, 20)) <= set(ranks)


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="least_loaded, round_robin"):
        make_policy("best")
    with pytest.raises(ConfigError, match="choose"):
        make_policy(object())  # type: ignore[arg-type]


def test_least_loaded_rotates_ties() -> None:
    assert send(LeastLoaded(), LoadTable(range(4)), 8) == [0, 1, 2, 3, 0, 1, 2, 3]
    table = LoadTable(range(4))
    policy = LeastLoaded()
    assert [policy.choose(table, REQUEST) for _ in range(5)] == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("policy", [LeastLoaded, RoundRobin])
def test_front_ends_begin_at_different_ranks(policy: type[LeastLoaded]) -> None:
    firsts = [send(policy(), LoadTable(range(4), client_index=i, client_count=4), 1)[0] for i in range(4)]
    assert firsts == [0, 1, 2, 3]


def test_front_ends_make_nothing_of_differences_that_they_would_make_worse_together() -> None:
    table = LoadTable(range(4), client_index=0, client_count=3)
    published(table, 1, (0, 100, 0.0), (0, 101, 0.0), (0, 99, 0.0), (0, 100, 0.0))
    assert send(LeastLoaded(), table, 4) == [0, 1, 2, 3]


def test_a_rank_that_others_load_is_spared() -> None:
    table = LoadTable(range(2), client_count=2)
    published(table, 1, (0, 40, 0.0), (0, 0, 0.0))
    assert Counter(send(LeastLoaded(), table, 20)) == {1: 20}
    assert set(send(LeastLoaded(), table, 2)) == {0, 1}


def test_round_robin_does_not_look_at_loads() -> None:
    table = LoadTable(range(3))
    for _ in range(10):
        table.sent(0)
    assert send(RoundRobin(), table, 6) == [0, 1, 2, 0, 1, 2]


def test_power_of_two_never_takes_the_busier_of_two_and_draws_all_pairs() -> None:
    table = LoadTable(range(3))
    table.sent(0)
    policy = PowerOfTwo(Random(4))
    chosen = Counter(policy.choose(table, REQUEST) for _ in range(3000))
    assert set(chosen) == {1, 2}
    assert abs(chosen[1] - chosen[2]) < 300
    again = PowerOfTwo(Random(4))
    assert Counter(again.choose(table, REQUEST) for _ in range(3000)) == chosen


# --- prefix affinity ---


def test_the_same_beginning_goes_to_the_same_rank() -> None:
    policy = PrefixAffine(block_tokens=4)
    table = LoadTable(range(4))
    first = policy.choose(table, prompt(1, 2, 3, 4, 5))
    assert all(policy.choose(table, prompt(1, 2, 3, 4, n)) == first for n in range(20))
    assert (policy.hits, policy.misses) == (20, 1)
    assert policy.hit_rate == pytest.approx(20 / 21)


def test_prompts_may_be_any_sequence() -> None:
    numpy = pytest.importorskip("numpy")
    policy = PrefixAffine(block_tokens=4)
    table = LoadTable(range(4))
    tokens = [1, 2, 3, 4, 5]
    for sequence in (tokens, tuple(tokens), array("i", tokens), numpy.array(tokens, dtype="int32")):
        policy.choose(table, EngineCoreRequest(request_id="r", prompt_token_ids=sequence))
    assert (policy.hits, policy.misses) == (3, 1)


def test_the_longest_known_beginning_counts() -> None:
    policy = PrefixAffine(block_tokens=2)
    table = LoadTable(range(3))
    system, first, second = (1, 1), (2, 2), (3, 3)
    a = policy.choose(table, prompt(*system, *first))
    table.set_available([rank for rank in range(3) if rank != a])
    b = policy.choose(table, prompt(*system, *second))
    table.set_available(range(3))
    assert a != b
    for _ in range(5):
        assert policy.choose(table, prompt(*system, *first, 9, 9)) == a
        assert policy.choose(table, prompt(*system, *second, 9, 9)) == b


def test_a_prompt_shorter_than_a_block_goes_where_there_is_least_to_do() -> None:
    policy = PrefixAffine(block_tokens=4)
    table = LoadTable(range(4))
    assert [policy.choose(table, prompt(1, 2, 3)) for _ in range(4)] == [0, 1, 2, 3]
    assert policy.hit_rate == 0


def test_affinity_ends_where_the_imbalance_reaches_its_bound() -> None:
    policy = PrefixAffine(block_tokens=2, max_imbalance=5)
    table = LoadTable(range(4))
    for _ in range(400):
        table.sent(policy.choose(table, prompt(1, 1)))
        assert max(table.loads) - min(table.loads) <= 5
    assert policy.hit_rate > 0.9


def test_a_beginning_known_on_several_ranks_goes_to_the_least_loaded_of_them() -> None:
    policy = PrefixAffine(block_tokens=2, max_imbalance=3)
    table = LoadTable(range(2))
    for _ in range(4):
        table.sent(policy.choose(table, prompt(1, 1)))
    assert table.loads == [3, 1]
    table.sent(policy.choose(table, prompt(1, 1)))
    assert table.loads == [3, 2]
    assert policy.misses == 2


def test_a_beginning_on_a_rank_that_left_is_learned_anew() -> None:
    policy = PrefixAffine(block_tokens=2)
    table = LoadTable([0, 1])
    assert policy.choose(table, prompt(1, 1)) == 0
    table.set_available([1])
    assert policy.choose(table, prompt(1, 1)) == 1
    assert policy.misses == 2


def test_a_rank_with_an_empty_cache_is_forgotten() -> None:
    policy = PrefixAffine(block_tokens=2)
    table = LoadTable([0, 1])
    policy.choose(table, prompt(1, 1))
    policy.forget(0)
    policy.choose(table, prompt(1, 1))
    assert policy.misses == 2
    assert len(policy._known) == 1


def test_a_rank_that_left_and_came_again_has_an_empty_cache() -> None:
    policy = PrefixAffine(block_tokens=2)
    routing = Balanced(LoadTable([0, 1]), policy)
    assert routing.choose(prompt(1, 1)) == 0
    assert routing.choose(prompt(2, 2)) == 1
    routing.set_available([0])
    routing.forget(1, 0)
    routing.set_available([0, 1])
    assert policy.hits == 0
    routing.choose(prompt(2, 2))
    assert policy.hits == 0
    assert routing.choose(prompt(1, 1)) == 0
    assert policy.hits == 1


def test_what_is_remembered_is_bounded_and_the_least_recently_used_goes_first() -> None:
    policy = PrefixAffine(block_tokens=1, max_blocks=1, capacity=3)
    table = LoadTable([0])
    for token in (1, 2, 3, 1, 4):
        policy.choose(table, prompt(token))
    assert len(policy._known) == 3
    before = policy.hits
    policy.choose(table, prompt(1))
    assert policy.hits == before + 1
    policy.choose(table, prompt(2))
    assert policy.hits == before + 1


@pytest.mark.parametrize("option", ["block_tokens", "max_blocks", "capacity"])
def test_options_below_one_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        PrefixAffine(**{option: 0})


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.integers(2, 8))
def test_any_policy_on_any_membership(seed: int, ranks: int) -> None:
    rng = Random(seed)
    table = LoadTable(range(ranks), client_count=2)
    policies = [make_policy(name) for name in POLICIES]
    for _ in range(50):
        table.set_available(rng.sample(range(ranks), rng.randint(1, ranks)))
        for policy in policies:
            tokens = rng.choices(range(3), k=64)
            rank = policy.choose(table, prompt(*tokens))
            assert rank in table.ranks
            table.sent(rank)
