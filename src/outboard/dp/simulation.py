"""A simulation of ranks and front ends, to see what a policy does before requests depend on it.

    arrivals = make_arrivals(Random(1), count=5000, ranks=4, slots=16, load=0.9)
    result = simulate("least_loaded", arrivals, ranks=4, slots=16)
    print(result.queue_time(0.99), result.max_imbalance)

Discrete events: each rank works on up to `slots` requests at once, first come, first served, each for as long as its
tokens take; the others wait. Ranks report their load periodically, and each front end gets the reports late, or twice,
or not at all. `simulate_ideal` has one queue for all ranks: no rank idles while a request waits.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from random import Random

import msgspec

from outboard.dp.balancing import BalancingPolicy, make_policy
from outboard.dp.coordinator_state import LoadReport, Publication
from outboard.dp.load import LoadTable
from outboard.protocol.messages import EngineCoreRequest

__all__ = ["Arrival", "News", "Result", "make_arrivals", "make_burst", "simulate", "simulate_ideal"]

# Seconds that a token takes in a rank's step, and those that a token of the prompt takes if it is not cached.
TOKEN_TIME = 0.02
PROMPT_TOKEN_TIME = 0.0002


class Arrival(msgspec.Struct, frozen=True):
    """A request: when, at which front end, and how many tokens it will generate."""

    time: float
    client: int
    tokens: int
    prompt: tuple[int, ...] = ()


class News(msgspec.Struct, frozen=True, kw_only=True):
    """How front ends hear of the ranks' load. Times in seconds, shares from 0 to 1.

    Attributes:
        period: from one publication to the next; infinite: none at all.
        delay: from report to front end, the same for all.
        jitter: most that is added to the delay, drawn for each front end and publication.
        loss, repeats: shares of publications that a front end misses, or gets twice.
        by_client: whether ranks report whose requests they have.
    """

    period: float = 0.1
    delay: float = 0.001
    jitter: float = 0.0
    loss: float = 0.0
    repeats: float = 0.0
    by_client: bool = False


class Result(msgspec.Struct):
    """What came of it.

    Attributes:
        queue_times: seconds that each request waited for a slot, in the order of their start.
        samples: (time, requests of each rank, running and waiting), by `sample_period` while requests arrive.
        sent: requests that each rank got.
        cached: prompt tokens that some rank had cached, of `prompt_tokens`.
        hit_rate: as the policies report it; None if they do not.
    """

    queue_times: list[float]
    samples: list[tuple[float, list[int]]]
    sent: list[int]
    cached: int = 0
    prompt_tokens: int = 0
    hit_rate: float | None = None

    def queue_time(self, share: float) -> float:
        """The queue time that this share of requests does not exceed, seconds."""
        ordered = sorted(self.queue_times)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def max_imbalance(self) -> int:
        """Greatest difference between the busiest and the least busy rank at any sample."""
        return max((max(lengths) - min(lengths) for _, lengths in self.samples), default=0)

    @property
    def mean_imbalance(self) -> float:
        """Mean of that difference."""
        return sum(max(lengths) - min(lengths) for _, lengths in self.samples) / max(1, len(self.samples))


def make_arrivals(
    rng: Random,
    *,
    count: int,
    ranks: int,
    slots: int,
    load: float = 0.9,
    clients: int = 1,
    exponent: float = 1.2,
    max_tokens: int = 1000,
    prefixes: int = 0,
    prefix_tokens: int = 256,
) -> list[Arrival]:
    """Requests at random times, with lengths by Zipf's law: many short ones, few long ones.

    Args:
        load: share of all slots that is in use on average.
        exponent: a length of n tokens has a probability in proportion to n ** -exponent.
        prefixes: each prompt begins with one of so many beginnings, by Zipf's law again; 0: no prompts.
    """
    weights = list(accumulate(n**-exponent for n in range(1, max_tokens + 1)))
    lengths = rng.choices(range(1, max_tokens + 1), cum_weights=weights, k=count)
    rate = load * ranks * slots / (sum(lengths) / count * TOKEN_TIME)
    beginnings = [tuple(rng.choices(range(32000), k=prefix_tokens)) for _ in range(prefixes)]
    popular = list(accumulate(1 / n for n in range(1, prefixes + 1)))
    arrivals: list[Arrival] = []
    time = 0.0
    for tokens in lengths:
        time += rng.expovariate(rate)
        prompt = rng.choices(beginnings, cum_weights=popular)[0] + (len(arrivals),) if prefixes else ()
        arrivals.append(Arrival(time, rng.randrange(clients), tokens, prompt))
    return arrivals


def make_burst(
    count: int, *, clients: int = 1, time: float = 0.0, over: float = 0.0, tokens: int = 100
) -> list[Arrival]:
    """So many requests at once, or evenly over some seconds, spread over the front ends."""
    return [Arrival(time + over * n / count, n % clients, tokens) for n in range(count)]


class _Rank:
    """One rank: what it works on, what waits, and the beginnings that it has cached."""

    def __init__(self, slots: int, cache: int, clients: int) -> None:
        self.slots = slots
        self.running = 0
        self.waiting: deque[Arrival] = deque()
        self.by_client = [0] * clients
        self.sequence = 0
        self._cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._cache_size = cache

    def work(self, arrival: Arrival) -> tuple[float, int]:
        """Seconds that a request takes, and how many tokens of its prompt were cached."""
        beginning = arrival.prompt[:-1]
        cached = len(beginning) if beginning in self._cache else 0
        if beginning:
            self._cache[beginning] = None
            self._cache.move_to_end(beginning)
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return arrival.tokens * TOKEN_TIME + (len(arrival.prompt) - cached) * PROMPT_TOKEN_TIME, cached

    def report(self, rank: int, news: News) -> LoadReport:
        """What it tells the coordinator."""
        self.sequence += 1
        return LoadReport(
            rank,
            0,
            self.sequence,
            len(self.waiting),
            self.running,
            min(1.0, self.running / self.slots),
            dict(enumerate(self.by_client)) if news.by_client else {},
        )


def simulate(
    policy: str | Callable[[], BalancingPolicy],
    arrivals: Sequence[Arrival],
    *,
    ranks: int = 4,
    slots: int = 16,
    clients: int = 1,
    news: News | None = None,
    cache: int = 16,
    rng: Random | None = None,
    sample_period: float = 0.05,
) -> Result:
    """Runs all requests to their end.

    Args:
        policy: a name, or what makes a policy for each front end.
        arrivals: in order of time.
        slots: requests that a rank works on at once.
        news: how front ends hear of the ranks' load.
        cache: beginnings of prompts that a rank has cached, the least recently used is forgotten first.
        rng: for delays and losses.
        sample_period: seconds from one sample to the next.
    """
    news = news or News()
    random = (rng or Random(0)).random
    policies = [make_policy(policy) if isinstance(policy, str) else policy() for _ in range(clients)]
    tables = [LoadTable(range(ranks), client_index=index, client_count=clients) for index in range(clients)]
    servers = [_Rank(slots, cache, clients) for _ in range(ranks)]
    result = Result([], [], [0] * ranks)
    order = count()
    events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
    last = arrivals[-1].time
    publications = 0

    def at(time: float, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(events, (time, next(order), call, args))

    def arrive(now: float, number: int) -> None:
        if number + 1 < len(arrivals):
            at(arrivals[number + 1].time, arrive, number + 1)
        arrival = arrivals[number]
        table = tables[arrival.client]
        request = EngineCoreRequest(request_id="", prompt_token_ids=arrival.prompt)
        rank = policies[arrival.client].choose(table, request)
        table.sent(rank)
        result.sent[rank] += 1
        server = servers[rank]
        server.by_client[arrival.client] += 1
        if server.running < slots:
            start(now, rank, arrival)
        else:
            server.waiting.append(arrival)

    def start(now: float, rank: int, arrival: Arrival) -> None:
        server = servers[rank]
        server.running += 1
        result.queue_times.append(now - arrival.time)
        seconds, cached = server.work(arrival)
        result.cached += cached
        result.prompt_tokens += len(arrival.prompt)
        at(now + seconds, end, rank, arrival.client)

    def end(now: float, rank: int, client: int) -> None:
        server = servers[rank]
        server.running -= 1
        server.by_client[client] -= 1
        tables[client].ended(rank)
        if server.waiting:
            start(now, rank, server.waiting.popleft())

    def publish(now: float) -> None:
        nonlocal publications
        publications += 1
        loads = [server.report(rank, news) for rank, server in enumerate(servers)]
        publication = Publication(0, publications, 0, loads)
        for table in tables:
            for _ in range(0 if random() < news.loss else 2 if random() < news.repeats else 1):
                at(now + news.delay + random() * news.jitter, hear, table, publication)
        if now < last:
            at(now + news.period, publish)

    def hear(now: float, table: LoadTable, publication: Publication) -> None:
        table.published(publication)

    def sample(now: float) -> None:
        result.samples.append((now, [server.running + len(server.waiting) for server in servers]))
        if now < last:
            at(now + sample_period, sample)

    at(arrivals[0].time, arrive, 0)
    at(0.0, sample)
    if news.period < float("inf"):
        at(0.0, publish)
    while events:
        now, _, call, args = heapq.heappop(events)
        call(now, *args)
    rates = [rate for rate in (getattr(policy, "hit_rate", None) for policy in policies) if rate is not None]
    result.hit_rate = sum(rates) / len(rates) if rates else None
    return result


def simulate_ideal(arrivals: Sequence[Arrival], *, ranks: int = 4, slots: int = 16) -> list[float]:
    """Queue times if all slots of all ranks took from one queue, and prompts were free."""
    free = [0.0] * (ranks * slots)
    times = []
    for arrival in arrivals:
        start = max(arrival.time, free[0])
        heapq.heapreplace(free, start + arrival.tokens * TOKEN_TIME)
        times.append(start - arrival.time)
    return times
