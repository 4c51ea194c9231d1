"""A call-back of one request that aborts another, both just being sent anew: the other was sent all the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outboard import EngineConfig, EngineCoreRequest, EngineDeadError, SamplingParams
from outboard.client.delivery import Delivery
from outboard.client.journal import Journal
from outboard.client.moves import Moves
from outboard.client.pending import PendingTable
from outboard.protocol.messages import EngineCoreOutputs


class _AbortsAll(Delivery):
    """Aborts everything else as soon as anything ends."""

    moves: Moves
    pending: PendingTable

    def deliver(self, message: EngineCoreOutputs) -> None:
        self.moves.waiting_room.abort(list(self.pending.request_ids))

    def end(self, cause: EngineDeadError) -> None:
        raise AssertionError("nothing ends")


def test_what_is_aborted_while_others_are_sent_is_not_sent() -> None:
    pending = PendingTable(Journal("resume", 1))
    delivery = _AbortsAll()
    moves = Moves(pending, delivery, 0, EngineConfig(engine="mock"))
    delivery.moves, delivery.pending = moves, pending

    params = SamplingParams(max_tokens=1)

    def hold(name: str) -> int:
        return moves.hold(EngineCoreRequest(request_id=name, prompt_token_ids=[1], sampling_params=params))

    complete = hold("complete")
    pending.journal.note(EngineCoreOutputs(0, 0, 0, 0.0, [complete], [97]))  # type: ignore[union-attr]
    hold("another")
    sent: list[int] = []
    sender: Any = SimpleNamespace(send_request=lambda request, handle: sent.append(handle))
    link: Any = SimpleNamespace(sender=sender, status=SimpleNamespace(rank=0), epoch=0)
    moves.send_waiting(lambda request: link)
    assert sent == []
    assert not pending
