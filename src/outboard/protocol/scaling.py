"""The control channel, the part that changes the number of ranks; dp/elastic.py has the order, and why.

front end     Scale, CommitScale, AbortScale -> launcher   ScaleProgress or ScaleRefused
launcher      Members           -> front ends, coordinator  acknowledged, as every EngineStatus is
launcher      Quiesce, Reconfigure, ResumeRank, DrainRank -> engine cores
engine core   Quiet, Reconfigured, Drained    -> launcher
"""

from __future__ import annotations

from enum import Enum

import msgspec

__all__ = [
    "AbortScale",
    "CommitScale",
    "DrainRank",
    "Drained",
    "Members",
    "Quiesce",
    "Quiet",
    "Reconfigure",
    "Reconfigured",
    "ResumeRank",
    "Scale",
    "ScaleProgress",
    "ScaleRefused",
    "ScaleState",
]


class ScaleState(Enum):
    """Where a change of size is.

    PREPARING -> READY -> COMMITTING -> DRAINING -> DONE      (DRAINING only on the way down)
    any before the new size is announced -> ROLLING_BACK -> ROLLED_BACK
    """

    PREPARING = "preparing"
    READY = "ready"
    COMMITTING = "committing"
    DRAINING = "draining"
    DONE = "done"
    ROLLING_BACK = "rolling back"
    ROLLED_BACK = "rolled back"


class Scale(msgspec.Struct, array_like=True, tag="scale"):
    """A front end wants another number of ranks. `call` is its own number for this, and names it from now on.

    Attributes:
        timeout: seconds for the start of new ranks, and again for the commit.
        drain: seconds that ranks which leave get to end their requests.
        commit: whether to go on by itself once all is ready; else `CommitScale` does.
    """

    call: int
    new_size: int
    timeout: float
    drain: float
    commit: bool = True


class CommitScale(msgspec.Struct, array_like=True, tag="commit_scale"):
    """What was prepared is to be done now."""

    call: int


class AbortScale(msgspec.Struct, array_like=True, tag="abort_scale"):
    """Whoever wanted it has changed its mind. Too late once the new size is announced; then it goes on."""

    call: int


class ScaleRefused(msgspec.Struct, array_like=True, tag="scale_refused"):
    """Answer to one of the above; `error` is the name of a class in errors.py."""

    call: int
    error: str
    reason: str


class ScaleProgress(msgspec.Struct, array_like=True, tag="scale_progress", frozen=True):
    """How far a change of size has come; to all front ends, with every change of it.

    Attributes:
        client_index, call: whose `Scale` it is; the index is -1 where an `EngineGroup` was asked.
        old_size, new_size: numbers of ranks.
        state: where it is.
        ranks: by rank, what it is at: those that come, leave, or are reconfigured.
        reason: why it is rolled back, or what was lost on the way forward; "" where all went well.
    """

    client_index: int
    call: int
    old_size: int
    new_size: int
    state: ScaleState
    ranks: dict[int, str] = {}
    reason: str = ""


class Members(msgspec.Struct, array_like=True, tag="members"):
    """Ranks below `size` get requests from now on; others are on their way in or out.

    `version` counts with those of `EngineStatus`. A front end sends LEAVE to every rank from `size` on that it is
    attached to, behind the last request that it sent it.
    """

    version: int
    size: int


class Quiesce(msgspec.Struct, array_like=True, tag="quiesce"):
    """A lockstep rank is to come to rest with its group, and to take no step before `ResumeRank`; answer: `Quiet`."""

    version: int


class Quiet(msgspec.Struct, array_like=True, tag="quiet"):
    """The rank rests, as do all of its group: no message but those of the launcher wakes any."""

    session_token: str
    rank: int
    version: int


class Reconfigure(msgspec.Struct, array_like=True, tag="reconfigure"):
    """The group has another size; answer: `Reconfigured`, and RECONFIGURE_FINISHED to every front end.

    The rest is for ranks that step together, and as in `Init`: they become a new incarnation of their group.
    """

    version: int
    size: int
    group: int = 0
    first_coordinator: int = 0
    step_sync_address: str = ""
    rendezvous: str = ""


class Reconfigured(msgspec.Struct, array_like=True, tag="reconfigured"):
    """It is done; or `error` says why the rank cannot, which waits for what it is told next."""

    session_token: str
    rank: int
    version: int
    error: str = ""


class ResumeRank(msgspec.Struct, array_like=True, tag="resume_rank"):
    """Ends `Quiesce`. A pause that somebody asked for is another matter, and holds on."""

    version: int


class DrainRank(msgspec.Struct, array_like=True, tag="drain_rank"):
    """This rank leaves: it is to say `Drained` once every front end has said LEAVE, or has gone, and it is empty."""

    version: int


class Drained(msgspec.Struct, array_like=True, tag="drained"):
    """No request and no call is left, and none will come. On SIGTERM it then says SHUTDOWN_COMPLETE and ends."""

    session_token: str
    rank: int
    version: int
