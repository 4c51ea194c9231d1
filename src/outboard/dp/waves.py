"""Waves: how the ranks of a lockstep group run together and rest together. The messages, and why they suffice.

The ranks of a lockstep group can only step all at once, so one that has nothing to do takes dummy steps as long as any
has work. The span from waking to resting is a wave; waves are numbered 0, 1, 2, ...

    IDLE(w) --work of its own, or StartWave(w)--> OPENING(w) --the opening reduction--> RUNNING(w) or IDLE(w + 1)
    RUNNING(w) --every `sync_interval` steps a reduction--> RUNNING(w) or IDLE(w + 1)

A reduction takes a `Vote` of every rank and gives all of them the same result: is there work anywhere, is the group
paused, is it to rest. What comes next follows from that result alone, so that no two ranks ever differ.

    rank        RankReport   -> coordinator   whenever it wakes or comes to rest, or meets a new coordinator
    coordinator StartWave    -> ranks         wakes those that rest while another does not
    coordinator SetControl   -> ranks         pauses and resumes the group
    front end   FirstRequest -> coordinator   a request goes to a group that rests; a hint, may be lost or repeated
    coordinator WaveState    -> front ends    may be late, lost or repeated

What has to hold, and what makes it hold:

* *A rank enters no step that another can never join.* A wave begins with a reduction, and nobody steps before it is
  complete. So whoever steps knows that all are in that wave, and a wave is left by reductions only.
* *A rank that waits in an opening reduction is joined.* It may hear nothing meanwhile, so nobody may have to ask it: it
  reports before it enters; the coordinator wakes the others and believes nothing but such reports. A coordinator that
  took over from another may have missed one. Until it has heard of every rank it wakes each that says it rests: at
  worst the opening reduction finds no work, and no step is taken.
* *A pause is one decision.* A `control` is one number, that of the pause or resume with its kind in the lowest bit. The
  greatest wins wherever two meet, in messages and in reductions: a pause or resume that reached but one rank reaches
  all. A paused rank does not wake by itself, but does when told: the others may be waiting for it.
* *A group restarts as one.* Every message names the group's incarnation; those of an earlier one are void.
* *A group rests for a change of its size by one decision, too.* Each rank is told by the launcher, and wakes for a
  reduction, in which all that have been told say so. Where all have, the wave is over, and no rank enters another
  reduction of this group until it is let go. Where some have not, the reduction counts as any other; the last one that
  is told wakes all again. So whoever rests knows that nobody waits for it, whatever is still on its way: a notice, a
  `StartWave`, another coordinator. Pauses are another matter, and go on meanwhile as ever.

Channels between rank and coordinator must be reliable and in order as long as both live, and a rank hears one
coordinator at a time: what an earlier one sent arrives before it reports to the next, or never. Requests carry no wave
number: a rank that has work wakes and says so, whatever its front end believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import msgspec

__all__ = [
    "FirstRequest",
    "Phase",
    "RankReport",
    "SetControl",
    "StartWave",
    "Vote",
    "WaveState",
    "combine",
    "is_paused",
    "make_control",
]


class Phase(IntEnum):
    """Where a rank is in its wave."""

    IDLE = 0
    OPENING = 1
    RUNNING = 2


def make_control(coordinator: int, number: int, paused: bool) -> int:
    """The `control` of a coordinator's `number`th pause or resume; greater than all of earlier coordinators.

    Numbers count from 1 and fit 30 bits, as does the coordinator's incarnation: a control fits a signed 64-bit
    integer. 0 is the control of a group that was never paused.
    """
    return (coordinator << 30 | number) << 1 | paused


def is_paused(control: int) -> bool:
    """Whether this control is a pause."""
    return bool(control & 1)


class Vote(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a rank puts into a reduction, and what comes out of it.

    Attributes:
        work: whether the rank has unfinished requests; then whether any rank has.
        control: the last pause or resume that it knows of; then the greatest.
        rest: the change of size for which it has been told to rest, by its version; 0: none. Then that of all ranks, 0
            where they differ.
    """

    work: bool
    control: int
    rest: int = 0


def combine(votes: Iterable[Vote]) -> Vote:
    """The reduction. A collective with MAX over 64-bit integers does the same: work, control, rest and -rest."""
    work, control, rests = False, 0, set()
    for vote in votes:
        work |= vote.work
        control = max(control, vote.control)
        rests.add(vote.rest)
    return Vote(work, control, rests.pop() if len(rests) == 1 else 0)


class RankReport(msgspec.Struct, array_like=True, tag="rank_report", frozen=True, gc=False):
    """Where one rank is. All of it, each time: a report makes every earlier one of that rank superfluous.

    Attributes:
        group: incarnation of the group.
        first_coordinator: incarnation of the coordinator that there was when the group was launched; that one has
            missed nothing of this group, any later one may have.
        size: how many ranks the group has; they are numbered from 0.
        wave: the wave it is in, or when it rests the one that comes next.
    """

    group: int
    first_coordinator: int
    size: int
    rank: int
    wave: int
    phase: Phase
    control: int


class StartWave(msgspec.Struct, array_like=True, tag="start_wave", frozen=True, gc=False):
    """START_DP_WAVE: a rank that rests before this wave is to join it. Void for a rank that is past it."""

    group: int
    wave: int


class SetControl(msgspec.Struct, array_like=True, tag="set_control", frozen=True, gc=False):
    """The group is paused or resumed; answered by a report."""

    group: int
    control: int


class FirstRequest(msgspec.Struct, array_like=True, tag="first_request", frozen=True, gc=False):
    """A front end has sent a request to a group that rests before this wave."""

    group: int
    wave: int


class WaveState(msgspec.Struct, array_like=True, tag="wave_state", frozen=True, gc=False):
    """What a coordinator knows of the group. `running`: some rank said that it is awake in this wave."""

    group: int
    wave: int
    running: bool
    paused: bool
