"""What goes over a coordinator's socket, beside waves (waves.py) and loads (coordinator_state.py).

Every peer has a DEALER, which says first who it is and shows the session's token. A rank has two: by one it listens, in
its input thread, by the other its busy loop speaks; it speaks only once it is known to listen.

    rank         ListenAsRank    -> coordinator    Joined
    rank         SpeakAsRank, RankReport, LoadReport, AskControl  -> coordinator
    coordinator  StartWave, SetControl -> rank
    front end    JoinAsFrontEnd, FirstRequest -> coordinator
    coordinator  Publication -> front ends
"""

from __future__ import annotations

import msgspec

__all__ = ["AskControl", "JoinAsFrontEnd", "Joined", "ListenAsRank", "SpeakAsRank"]


class ListenAsRank(msgspec.Struct, array_like=True, tag="listen_as_rank", frozen=True):
    """What is for this rank is to be sent here."""

    session_token: str
    rank: int
    incarnation: int


class Joined(msgspec.Struct, array_like=True, tag="joined", frozen=True):
    """Answer to `ListenAsRank`, with the coordinator's incarnation."""

    coordinator: int


class SpeakAsRank(msgspec.Struct, array_like=True, tag="speak_as_rank", frozen=True):
    """What comes from here is this rank's."""

    session_token: str
    rank: int
    incarnation: int


class JoinAsFrontEnd(msgspec.Struct, array_like=True, tag="join_as_front_end", frozen=True):
    """Publications are to be sent here; to an earlier front end with this index no more."""

    session_token: str
    client_index: int


class AskControl(msgspec.Struct, array_like=True, tag="ask_control", frozen=True):
    """A rank was asked to have its group paused, or resumed.

    `control` is the last pause or resume that it knows of. Where there has been a later one, this is void: the rank
    hears of that one, and asks again if it is still called for.
    """

    group: int
    control: int
    paused: bool
