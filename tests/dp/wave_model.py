"""A whole lockstep group as one state machine: ranks, front ends, a coordinator, and what is on its way between them.

Channels, each first in, first out: front end -> rank, rank -> coordinator, coordinator -> rank are reliable while both
live. What a coordinator that died sent may still arrive, but not once the rank has reported to the next one: a rank
reads one coordinator's socket at a time. First-request notices and publications may be lost, repeated and late. The
launcher tells ranks to rest, once all have said that they do it changes the group's size, and lets them go. A rank that
has entered a collective (a reduction or a step) hears nothing until all ranks have entered it, and every rank leaves it
in its own time. Where `blocking` is off, it does hear while it waits in a reduction.

An action is a tuple. `actions` lists those that are possible, `apply` performs one and checks what must always hold.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import inf
from typing import Any, TypeVar

from outboard.dp.client_waves import ClientWaves
from outboard.dp.rank_waves import Next, RankWaves
from outboard.dp.wave_coordinator import WaveCoordinator
from outboard.dp.waves import FirstRequest, Phase, RankReport, SetControl, StartWave, Vote, WaveState, combine

Action = tuple[Any, ...]

# What happens by itself, sooner or later, and ends by itself: fairness is all that it needs.
PROGRESS = ("take", "enter", "leave", "collect", "go_on")


_T = TypeVar("_T")


def clone(value: _T) -> _T:
    """A shallow copy; `copy.copy` takes four times as long."""
    other: _T = object.__new__(type(value))
    other.__dict__.update(value.__dict__)
    return other


class Rank:
    """A rank, its work and the messages on their way to it."""

    def __init__(self, waves: RankWaves, coordinator: int) -> None:
        self.waves = waves
        self.coordinator = -1  # the one that it reports to
        self.work: tuple[tuple[int, int], ...] = ()  # (front end, steps to go)
        self.inbox: dict[str, tuple[Any, ...]] = {"launcher": (coordinator,)}
        self.entered = 0  # collectives
        self.left = 0
        self.votes: tuple[tuple[str, int, Vote], ...] = ()  # of the last two that it entered
        self.quiet = 0  # the change of size for which it said that it rests

    @property
    def busy(self) -> bool:
        return self.entered > self.left

    def clone(self) -> Rank:
        other = clone(self)
        other.waves = clone(self.waves)
        other.inbox = dict(self.inbox)
        return other

    def key(self, base: int) -> Hashable:
        inbox = tuple(sorted(self.inbox.items())) if self.inbox else ()
        votes = self.votes[-2:] if self.busy or self.entered > base else ()
        return (
            tuple(vars(self.waves).values()),
            self.coordinator,
            self.work,
            inbox,
            self.entered - base,
            self.left - base,
            votes,
            self.quiet,
        )


class FrontEnd:
    """A front end, the notices that it sent and the publications on their way to it."""

    def __init__(self) -> None:
        self.waves = ClientWaves(repeat_after=1.0)
        self.alive = True
        self.notices: tuple[FirstRequest, ...] = ()
        self.heard: tuple[tuple[tuple[int, int], WaveState], ...] = ()
        self.last_sent: tuple[int, WaveState] | None = None

    def clone(self) -> FrontEnd:
        other = clone(self)
        other.waves = clone(self.waves)
        return other

    def key(self) -> Hashable:
        waves = self.waves
        view = (waves.group, waves.current_wave, waves.engines_running, waves.paused, waves.next_due < inf)
        return view, self.alive, self.notices, tuple([state for _, state in self.heard]), self.last_sent


class World:
    """All of it. `broken` names what was found not to hold."""

    def __init__(
        self, size: int = 2, clients: int = 1, sync_interval: int = 1, steps: int = 1, blocking: bool = True
    ) -> None:
        self.size = size
        self.blocking = blocking
        self.sync_interval = sync_interval
        self.steps = steps  # that a request takes
        self.group = 0
        self.coordinator = WaveCoordinator(0)
        self.reports: list[tuple[RankReport, ...]] = [()] * size
        self.ranks: list[Rank] = []
        self.front_ends = [FrontEnd() for _ in range(clients)]
        self.publications = 0
        self.changes = 0  # of size
        self.resting = False  # whether ranks have been told to rest, and not been let go
        self.sizes: tuple[int, ...] = ()  # that the resting group is still to be given
        self._launch()

    def _launch(self) -> None:
        born = self.coordinator.incarnation
        self.ranks = [
            Rank(
                RankWaves(rank, self.size, group=self.group, coordinator=born, sync_interval=self.sync_interval),
                born,
            )
            for rank in range(self.size)
        ]

    def clone(self) -> World:
        other = clone(self)
        other.ranks = [rank.clone() for rank in self.ranks]
        other.front_ends = [front_end.clone() for front_end in self.front_ends]
        other.coordinator = coordinator = clone(self.coordinator)
        coordinator._reports = dict(coordinator._reports)
        coordinator._commanded = dict(coordinator._commanded)
        coordinator._told = set(coordinator._told)
        other.reports = list(self.reports)
        return other

    def key(self) -> Hashable:
        base = min(rank.left for rank in self.ranks)
        coordinator = self.coordinator
        return (
            tuple([rank.key(base) for rank in self.ranks]),
            tuple([front_end.key() for front_end in self.front_ends]),
            tuple(self.reports),
            coordinator.incarnation,
            coordinator._group,
            tuple(sorted(coordinator._reports.items())),
            coordinator._wave,
            coordinator._started,
            frozenset(coordinator._told),
            coordinator._control,
            coordinator._numbers,
            tuple(sorted(coordinator._commanded.items())),
            self.changes,
            self.resting,
            self.sizes,
        )

    # --- what can happen by itself ---

    def progress(self) -> Iterator[Action]:
        """Actions that must happen in the end, and that end."""
        for index, rank in enumerate(self.ranks):
            if rank.busy:
                if all(other.entered >= rank.entered for other in self.ranks):
                    yield "leave", index
                if self.blocking or rank.waves.next is not Next.REDUCE:
                    continue
            if rank.coordinator < 0:  # it does nothing before it has a coordinator to report to
                if "launcher" in rank.inbox:
                    yield "take", index, "launcher"
                continue
            for channel in rank.inbox:
                yield "take", index, channel
            if rank.waves.next is not Next.REST and not rank.busy:
                yield "enter", index
        for index, reports in enumerate(self.reports):
            if reports:
                yield "collect", index
        if self.resting and all((rank.quiet, rank.waves.group) == (self.changes, self.group) for rank in self.ranks):
            yield "go_on", -1

    def periodic(self) -> Iterator[Action]:
        """Actions that happen again and again."""
        state = self.coordinator.state
        for index, front_end in enumerate(self.front_ends):
            if front_end.notices:
                yield "notice", index
            if not front_end.alive:
                continue
            if state is not None and front_end.last_sent != (self.coordinator.incarnation, state):
                yield "publish", index
            if front_end.heard:
                yield "hear", index
            if front_end.waves.next_due < inf and not front_end.notices:
                yield "repeat", index

    # --- performing ---

    def apply(self, action: Action) -> None:
        getattr(self, "_" + action[0])(*action[1:])

    def _send(self, rank: Rank, channel: str, message: Any) -> None:
        rank.inbox[channel] = rank.inbox.get(channel, ()) + (message,)

    def _report(self, rank: Rank, report: RankReport | None) -> None:
        """To the coordinator that the rank knows; one that is dead gets nothing."""
        if report is not None and rank.coordinator == self.coordinator.incarnation:
            self.reports[report.rank] += (report,)

    def _to_ranks(self, messages: list[tuple[int, StartWave | SetControl]]) -> None:
        """Also those for ranks of an earlier group, which are to be ignored."""
        for index, message in messages:
            if index < self.size:
                self._send(self.ranks[index], "coordinator", message)

    def _take(self, index: int, channel: str) -> None:
        rank = self.ranks[index]
        message, *rest = rank.inbox[channel]
        if rest:
            rank.inbox[channel] = tuple(rest)
        else:
            del rank.inbox[channel]
        waves = rank.waves
        if isinstance(message, StartWave):
            self._report(rank, waves.start(message))
        elif isinstance(message, SetControl):
            self._report(rank, waves.set_control(message, bool(rank.work)))
        elif isinstance(message, int):
            rank.coordinator = message
            rank.inbox.pop("former", None)
            self._report(rank, waves.report())
        elif message[0] == "move":
            assert (waves.at_rest, rank.busy) == (True, False)
            _, size, group, coordinator = message
            rank.waves = waves = RankWaves(
                index,
                size,
                group=group,
                coordinator=coordinator,
                sync_interval=self.sync_interval,
                control=waves.control,
                at_rest=True,
            )
            self._report(rank, waves.report())
        elif message[0] == "rest":
            self._report(rank, waves.rest(message[1]))
        elif message[0] == "release":
            self._report(rank, waves.release(bool(rank.work)))
        elif message[0] == "add":
            rank.work += ((message[1], self.steps),)
        else:
            rank.work = tuple([(owner, steps) for owner, steps in rank.work if owner != message[1]])
        self._report(rank, waves.update(bool(rank.work)))

    def _enter(self, index: int) -> None:
        rank = self.ranks[index]
        waves = rank.waves
        kind = waves.next.name
        assert not waves.at_rest, "a rank that rests does something"
        vote = (kind, waves.wave, waves.vote(bool(rank.work)))
        rank.entered += 1
        rank.votes = rank.votes[-1:] + (vote,)
        for other in self.ranks:
            assert (other.waves.group, other.waves.wave) <= (waves.group, waves.wave), "a rank can never be joined"
            if other.entered >= rank.entered:
                assert self._vote(other, rank.entered)[:2] == vote[:2], "ranks are in different collectives"
        if kind == "STEP":
            assert not self.coordinator.pause_complete, "a step in a pause"
            joined = [other.waves.wave == waves.wave and other.waves.phase is not Phase.IDLE for other in self.ranks]
            assert all(joined), "a step before all have joined"

    @staticmethod
    def _vote(rank: Rank, number: int) -> tuple[str, int, Vote]:
        return rank.votes[number - rank.entered - 1]

    def _leave(self, index: int) -> None:
        rank = self.ranks[index]
        rank.left += 1
        if self._vote(rank, rank.left)[0] == "STEP":
            rank.work = tuple([(owner, steps - 1) for owner, steps in rank.work if steps > 1])
            rank.waves.stepped()
            return
        result = combine(self._vote(other, rank.left)[2] for other in self.ranks)
        self._report(rank, rank.waves.reduced(result, bool(rank.work)))
        if rank.waves.at_rest:
            rank.quiet = result.rest

    def _collect(self, index: int) -> None:
        report, *rest = self.reports[index]
        self.reports[index] = tuple(rest)
        self._to_ranks(self.coordinator.report(report))

    def _notice(self, index: int) -> None:
        front_end = self.front_ends[index]
        notice, *rest = front_end.notices
        front_end.notices = tuple(rest)
        self._to_ranks(self.coordinator.first_request(notice))

    def _publish(self, index: int) -> None:
        front_end = self.front_ends[index]
        state = self.coordinator.state
        assert state is not None
        self.publications += 1
        front_end.last_sent = (self.coordinator.incarnation, state)
        front_end.heard += (((self.coordinator.incarnation, self.publications), state),)

    def _hear(self, index: int) -> None:
        front_end = self.front_ends[index]
        (version, state), *rest = front_end.heard
        front_end.heard = tuple(rest)
        front_end.waves.published(version, state)

    def _repeat(self, index: int) -> None:
        front_end = self.front_ends[index]
        notice = front_end.waves.due(front_end.waves.next_due)
        assert notice is not None
        front_end.notices += (notice,)

    # --- what is done to it ---

    def _add(self, client: int, index: int) -> None:
        """A request alone."""
        self._send(self.ranks[index], f"client {client}", ("add", client))

    def _notify(self, wave: int) -> None:
        """A notice alone, from whomever."""
        self._to_ranks(self.coordinator.first_request(FirstRequest(self.group, wave)))

    def _request(self, client: int, index: int) -> None:
        front_end = self.front_ends[client]
        self._add(client, index)
        notice = front_end.waves.request_sent(0.0)
        if notice is not None:
            front_end.notices += (notice,)

    def _abort(self, client: int, index: int) -> None:
        self._send(self.ranks[index], f"client {client}", ("abort", client))

    def _lose_notice(self, index: int) -> None:
        self.front_ends[index].notices = self.front_ends[index].notices[1:]

    def _double_notice(self, index: int) -> None:
        self.front_ends[index].notices += self.front_ends[index].notices[-1:]

    def _lose_publication(self, index: int) -> None:
        self.front_ends[index].heard = self.front_ends[index].heard[1:]
        self.front_ends[index].last_sent = None  # it will be published again

    def _double_publication(self, index: int) -> None:
        self.front_ends[index].heard += self.front_ends[index].heard[:1]

    def _kill_front_end(self, client: int) -> None:
        front_end = self.front_ends[client]
        front_end.alive = False
        front_end.heard = ()
        for index in range(self.size):
            self._abort(client, index)

    def _new_front_end(self, client: int) -> None:
        notices = self.front_ends[client].notices
        self.front_ends[client] = FrontEnd()
        self.front_ends[client].notices = notices

    def _pause(self) -> None:
        self._to_ranks(self.coordinator.pause())

    def _resume(self) -> None:
        self._to_ranks(self.coordinator.resume())

    def _restart_coordinator(self, arriving: int) -> None:
        """Of what it sent to a rank, the first messages still arrive: `arriving` has two bits a rank, 3: all."""
        self.coordinator = WaveCoordinator(self.coordinator.incarnation + 1)
        self.reports = [()] * self.size
        for index, rank in enumerate(self.ranks):
            keep = arriving >> 2 * index & 3
            messages = rank.inbox.pop("coordinator", ())
            if messages := messages[: None if keep == 3 else keep]:
                rank.inbox["former"] = rank.inbox.pop("former", ()) + messages
            if rank.coordinator >= 0 or any(isinstance(said, int) for said in rank.inbox.get("launcher", ())):
                self._send(rank, "launcher", self.coordinator.incarnation)

    def _restart_group(self, size: int) -> None:
        """Reports of the old group may still arrive, its requests have ended."""
        self.group += 1
        self.reports = (self.reports + [()] * size)[: max(size, self.size)]
        self.size = size
        self.resting = False
        self._launch()

    def _quiesce(self, *sizes: int) -> None:
        """The group is to rest, to be given these sizes one after the other, and to be let go."""
        self.changes += 1
        self.resting = True
        self.sizes = sizes
        for rank in self.ranks:
            self._send(rank, "launcher", ("rest", self.changes))

    def _rest(self) -> None:
        self._quiesce()

    def _shrink(self) -> None:
        self._quiesce(self.size - 1)

    def _grow(self) -> None:
        self._quiesce(self.size + 1)

    def _let_go(self) -> None:
        """Also before all rest."""
        self.resting = False
        for rank in self.ranks:
            if rank.coordinator < 0:
                self._send(rank, "launcher", self.coordinator.incarnation)
            self._send(rank, "launcher", ("release",))

    def _go_on(self, index: int) -> None:
        """All ranks have said that they rest, or that they have taken their place in a group of another size."""
        assert all(rank.waves.next is Next.REST and not rank.busy for rank in self.ranks), "a rank does not rest"
        if not self.sizes:
            self._let_go()
            return
        size, *rest = self.sizes
        self.sizes = tuple(rest)
        self.group += 1
        self.reports = (self.reports + [()] * size)[: max(size, len(self.reports))]
        self.size = size
        entered = self.ranks[0].entered
        while len(self.ranks) < size:
            joining = Rank(RankWaves(len(self.ranks), size, sync_interval=self.sync_interval, at_rest=True), 0)
            joining.inbox.clear()
            joining.entered = joining.left = entered
            joining.quiet = self.changes
            self.ranks.append(joining)
        del self.ranks[size:]
        for rank in self.ranks:
            self._send(rank, "launcher", ("move", size, self.group, self.coordinator.incarnation))

    # --- what must come true ---

    def settle(self, bound: int = 10_000) -> int:
        """Everything on its way arrives, front ends hear what is published. Returns the number of actions."""
        for count in range(bound):
            action = next(self.progress(), None) or next(self.periodic(), None)
            if action is None:
                return count
            self.apply(action)
        raise AssertionError(f"no rest after {bound} actions")

    def check_rest(self) -> None:
        """To be called when nothing more happens by itself."""
        waves = {rank.waves.wave for rank in self.ranks}
        assert not any(rank.busy for rank in self.ranks), "a rank waits for ever"
        assert all(rank.waves.phase is Phase.IDLE for rank in self.ranks), "a rank did not come to rest"
        assert not any(rank.waves.at_rest for rank in self.ranks), "a rank was not let go"
        assert len(waves) == 1, "ranks rest in different waves"
        assert {rank.waves.control for rank in self.ranks} == {self.coordinator._control}
        if self.coordinator.paused:
            assert self.coordinator.pause_complete
        else:
            assert not any(rank.work for rank in self.ranks), "work is left"
        state = self.coordinator.state
        assert state == WaveState(self.group, waves.pop(), False, self.coordinator.paused)
        for front_end in self.front_ends:
            if front_end.alive:
                view = front_end.waves
                assert (view.group, view.current_wave, view.engines_running) == (state.group, state.wave, False)
                assert view.next_due == inf, "a front end still gives notice"
