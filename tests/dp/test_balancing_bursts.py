"""Bursts and skewed lengths, simulated: what policies do when news is late, lost, repeated or absent."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from outboard.dp.balancing import LeastLoaded
from outboard.dp.coordinator_state import LoadReport, Publication
from outboard.dp.load import LoadTable
from outboard.dp.simulation import Arrival, News, make_arrivals, make_burst, simulate, simulate_ideal
from outboard.protocol.messages import EngineCoreRequest

NEWS = {
    "absent": News(period=inf),
    "1 s late": News(delay=1.0),
    "fresh": News(),
    "late, lost, repeated": News(delay=0.05, jitter=0.5, loss=0.4, repeats=0.4),
    "by client": News(by_client=True),
    "by client, late, lost, repeated": News(by_client=True, delay=0.05, jitter=0.5, loss=0.4, repeats=0.4),
}
each_news = pytest.mark.parametrize("news", NEWS.values(), ids=list(NEWS))


@each_news
@pytest.mark.parametrize("clients", [1, 2, 3])
@pytest.mark.parametrize("over", [0.0, 0.3, 1.5])
def test_a_burst_spreads_over_the_ranks(clients: int, over: float, news: News) -> None:
    """Nothing ends meanwhile. Front ends send in turn, at random, or one more than all others."""
    rng = Random(7)
    even = make_burst(400, clients=clients, over=over, tokens=10_000)
    shares = [2**-index for index in range(clients)]
    random = [Arrival(a.time, rng.randrange(clients), a.tokens) for a in even]
    skewed = [Arrival(a.time, rng.choices(range(clients), shares)[0], a.tokens) for a in even]
    for arrivals in (even, random, skewed):
        result = simulate("least_loaded", arrivals, ranks=4, slots=32, clients=clients, news=news, rng=rng)
        assert sum(result.sent) == 400
        assert max(result.sent) - min(result.sent) <= 2


@each_news
@pytest.mark.parametrize("clients", [1, 3])
def test_a_burst_into_ranks_at_work_evens_them_out(clients: int, news: News) -> None:
    rng = Random(11)
    before = make_arrivals(rng, count=600, ranks=4, slots=32, load=0.5, clients=clients)
    at = before[-1].time
    arrivals = before + make_burst(400, clients=clients, time=at, over=0.3, tokens=10_000)
    result = simulate("least_loaded", arrivals, ranks=4, slots=32, clients=clients, news=news, rng=rng)
    assert max(result.samples[-1][1]) - min(result.samples[-1][1]) <= (2 if clients == 1 else 8)


@pytest.mark.parametrize("after", [0, 1, 37, 100, 399])
def test_news_from_before_a_burst_in_its_middle_makes_nobody_forget(after: int) -> None:
    tables = [LoadTable(range(4), client_index=index, client_count=3) for index in range(3)]
    policies = [LeastLoaded() for _ in tables]
    request = EngineCoreRequest(request_id="r")
    sent = [0] * 4
    for number in range(400):
        if number == after:
            for table in tables:
                table.published(Publication(0, 1, 0, [LoadReport(rank, 0, 1, 0, rank % 2) for rank in range(4)]))
        index = number % 3
        rank = policies[index].choose(tables[index], request)
        tables[index].sent(rank)
        sent[rank] += 1
    assert max(sent) - min(sent) <= 2


def p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * len(times))]


@each_news
@pytest.mark.parametrize("clients", [1, pytest.param(3, marks=pytest.mark.no_cover)])  # to measure both takes long
def test_skewed_lengths_wait_little_longer_than_in_one_queue(clients: int, news: News) -> None:
    ideal: list[float] = []
    times: list[float] = []
    for seed in range(3):
        arrivals = make_arrivals(Random(seed), count=6000, ranks=4, slots=64, load=0.97, clients=clients)
        ideal += simulate_ideal(arrivals, ranks=4, slots=64)
        times += simulate("least_loaded", arrivals, ranks=4, slots=64, clients=clients, news=news).queue_times
    assert p99(ideal) > 0.2, "no queue to speak of"
    assert p99(times) <= 1.3 * p99(ideal)


def test_policies_that_look_at_loads_beat_one_that_does_not() -> None:
    arrivals = make_arrivals(Random(1), count=6000, ranks=4, slots=16, load=0.95)
    least, two, turns = (
        simulate(name, arrivals, ranks=4, slots=16) for name in ("least_loaded", "power_of_two", "round_robin")
    )
    assert least.mean_imbalance < two.mean_imbalance < turns.mean_imbalance
    assert least.queue_time(0.99) < turns.queue_time(0.99) / 2
    assert two.queue_time(0.99) < turns.queue_time(0.99) / 2


def test_prefix_affinity_finds_cached_prompts_and_stays_in_bounds() -> None:
    arrivals = make_arrivals(
        Random(2), count=4000, ranks=4, slots=16, load=0.7, prefixes=60, prefix_tokens=256, max_tokens=200
    )
    affine = simulate("prefix_affine", arrivals, ranks=4, slots=16, cache=20)
    least = simulate("least_loaded", arrivals, ranks=4, slots=16, cache=20)
    assert affine.hit_rate is not None and affine.hit_rate > 0.9
    assert least.hit_rate is None
    assert affine.cached > 1.2 * least.cached
    assert affine.max_imbalance <= least.max_imbalance + 10
    assert affine.queue_time(0.99) < 1.0


def test_every_request_is_served_once() -> None:
    arrivals = make_arrivals(Random(3), count=500, ranks=3, slots=2, load=1.2, clients=2)
    result = simulate("power_of_two", arrivals, ranks=3, slots=2, clients=2, news=NEWS["late, lost, repeated"])
    assert len(result.queue_times) == sum(result.sent) == 500
    assert min(result.queue_times) >= 0
    assert all(sum(lengths) <= 500 for _, lengths in result.samples)
