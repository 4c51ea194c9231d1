"""Balancing policies in simulation: how long requests wait, how unequal the ranks' queues get, what a choice costs.

Each policy meets the same requests: random arrivals with lengths by Zipf's law, and with --burst so many at once in
their middle, over front ends that hear of the ranks' load every 100 ms: at once, late with losses and repeats, or
never. "one queue" is the ideal: no rank idles while a request waits.

    python -m benchmarks.balancing [--requests 20000] [--ranks 4] [--slots 64] [--clients 1 3] [--load 0.95]
                                   [--burst N] [--prefixes] [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import timeit
from math import inf
from random import Random
from typing import Any

from benchmarks.measure import show, write_json
from benchmarks.plots import add_outputs
from outboard.dp.balancing import POLICIES, make_policy
from outboard.dp.load import LoadTable
from outboard.dp.simulation import Arrival, News, Result, make_arrivals, make_burst, simulate, simulate_ideal
from outboard.protocol.messages import EngineCoreRequest

NEWS = {
    "in time": News(),
    "late, lost, repeated": News(delay=0.2, jitter=0.8, loss=0.3, repeats=0.3),
    "none": News(period=inf),
}


def make_workload(args: argparse.Namespace, clients: int) -> list[Arrival]:
    """Steady arrivals, and a burst in their middle."""
    arrivals = make_arrivals(
        Random(args.seed),
        count=args.requests,
        ranks=args.ranks,
        slots=args.slots,
        load=args.load,
        clients=clients,
        prefixes=200 if args.prefixes else 0,
    )
    burst = make_burst(args.burst, clients=clients, time=arrivals[len(arrivals) // 2].time)
    return sorted(arrivals + burst, key=lambda arrival: arrival.time)


def share_of(times: list[float], share: float) -> float:
    """The time that this share of them does not exceed."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def cost(name: str, ranks: int) -> float:
    """Microseconds of one choice, best of several runs."""
    policy = make_policy(name)
    table = LoadTable(range(ranks))
    request = EngineCoreRequest(request_id="", prompt_token_ids=list(range(1000)))
    number = 5000
    return min(timeit.repeat(lambda: policy.choose(table, request), number=number, repeat=7)) / number * 1e6


def measure(args: argparse.Namespace, clients: int) -> tuple[list[dict[str, Any]], dict[str, Result]]:
    """One row for each policy and kind of news; and the results with news in time, for the plot."""
    arrivals = make_workload(args, clients)
    ideal = simulate_ideal(arrivals, ranks=args.ranks, slots=args.slots)
    best = share_of(ideal, 0.99)
    rows: list[dict[str, Any]] = [{"policy": "one queue", "news": "", "p50": share_of(ideal, 0.5), "p99": best}]
    shown = {}
    for name in POLICIES:
        for kind, news in NEWS.items():
            result = simulate(name, arrivals, ranks=args.ranks, slots=args.slots, clients=clients, news=news)
            if kind == "in time":
                shown[name] = result
            rows.append(
                {
                    "policy": name,
                    "news": kind,
                    "p50": result.queue_time(0.5),
                    "p99": result.queue_time(0.99),
                    "to_ideal": result.queue_time(0.99) / best if best else None,
                    "max_imbalance": result.max_imbalance,
                    "mean_imbalance": result.mean_imbalance,
                    "cached": result.cached / result.prompt_tokens if result.prompt_tokens else None,
                    "hit_rate": result.hit_rate,
                }
            )
    return rows, shown


def plot(results: dict[str, Result], path: str) -> None:
    """Queue lengths of all ranks over time, one panel a policy. Needs matplotlib."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(len(results), 1, figsize=(9, 2 * len(results)), sharex=True, sharey=True)
    for axis, (name, result) in zip(axes, results.items(), strict=True):
        times = [time for time, _ in result.samples]
        for rank in range(len(result.sent)):
            axis.plot(times, [lengths[rank] for _, lengths in result.samples], linewidth=0.8, label=f"rank {rank}")
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_ylabel("requests")
    axes[0].legend(ncols=len(results), fontsize=8, frameon=False)
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def text(value: float | None, digits: int = 2) -> str:
    """A figure, or nothing."""
    return "" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balancing", description="Policies in simulation.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slots", type=int, default=64, help="requests that a rank works on at once")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--load", type=float, default=0.95, help="share of all slots in use on average")
    parser.add_argument("--burst", type=int, default=0, help="requests at once in the middle")
    parser.add_argument("--prefixes", action="store_true", help="prompts that share 200 beginnings")
    parser.add_argument("--seed", type=int, default=5)
    add_outputs(parser)
    args = parser.parse_args()
    measured: dict[str, Any] = {}
    for clients in args.clients:
        rows, shown = measure(args, clients)
        measured[f"clients={clients}"] = rows
        show(
            f"Front ends: {clients}; {args.ranks} ranks of {args.slots} slots, load {args.load:g}",
            ["policy", "news", "p50 queue s", "p99", "to one queue", "max imbalance", "mean", "cached", "hit rate"],
            [
                [
                    row["policy"], row["news"], text(row["p50"], 3), text(row["p99"], 3), text(row.get("to_ideal")),
                    text(row.get("max_imbalance"), 0), text(row.get("mean_imbalance"), 1), text(row.get("cached")),
                    text(row.get("hit_rate")),
                ]
                for row in rows
            ],
        )  # fmt: skip
        if args.plot and clients == args.clients[0]:
            plot(shown, args.plot)
    measured["cost_us"] = {name: {ranks: cost(name, ranks) for ranks in (2, 8, 64)} for name in POLICIES}
    show(
        "Cost of a choice, us (prompts of 1000 tokens)",
        ["policy", "2 ranks", "8 ranks", "64 ranks"],
        [[name, *(f"{value:.2f}" for value in costs.values())] for name, costs in measured["cost_us"].items()],
    )
    if args.json:
        write_json(args.json, measured)


if __name__ == "__main__":
    main()
