"""The way from a message to the readers, without a client: what it leaves for the garbage collector, and merging."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outboard import SamplingParams
from outboard.frontend.dispatcher import Dispatcher
from outboard.frontend.slot import Slot
from outboard.frontend.stream import RequestStream
from outboard.protocol.messages import EngineCoreOutputs, OutputExtras
from support import Run

STREAMS = 2000


class FrontEnd:
    """Gives each stream that begins a slot, under its own name as handle."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(asyncio.get_running_loop(), lambda handles: None, None, 1 << 20)

    async def submit_stream(self, stream: RequestStream) -> None:
        self.dispatcher.add(Slot(stream.state, 0, None), int(stream.request_id))

    def abort_slots(self, slots: Sequence[Slot]) -> None:
        self.dispatcher.abort(slots)

    def stream(self, number: int) -> RequestStream:
        params = SamplingParams(max_tokens=100, output_kind="delta", detokenize=False)
        return RequestStream(self, str(number), params, [1])

    def tell(self, handles: list[int], tokens: list[int], **more: Any) -> None:
        self.dispatcher.on_message(EngineCoreOutputs(0, 0, 0, 0.0, handles, tokens, **more))

    def say(self, handles: list[int], token: int, last: bool = False) -> None:
        ended = [(position, "length", None) for position in range(len(handles))] if last else None
        self.dispatcher.on_message(
            EngineCoreOutputs(0, 0, 0, 0.0, handles, [token] * len(handles), finished=ended)  # type: ignore[arg-type]
        )


def test_a_message_makes_nothing_that_the_garbage_collector_goes_through(run: Run) -> None:
    async def main() -> None:
        front_end = FrontEnd()
        handles = list(range(STREAMS))
        seen: dict[int, list[int]] = {number: [] for number in handles}

        async def read(number: int) -> None:
            async for output in front_end.stream(number):
                seen[number] += output.outputs[0].token_ids

        tasks = [asyncio.create_task(read(number)) for number in handles]
        await asyncio.sleep(0)
        front_end.say(handles, 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # all wait again
        gc.collect()
        gc.disable()
        try:
            before = gc.get_count()[0]
            front_end.say(handles, 2)
            made = gc.get_count()[0] - before
        finally:
            gc.enable()
        assert made < STREAMS / 20
        await asyncio.sleep(0)
        front_end.say(handles, 3, last=True)
        await asyncio.gather(*tasks)
        assert all(tokens == [1, 2, 3] for tokens in seen.values())

    run(main())


def test_tokens_merge_while_nobody_reads(run: Run) -> None:
    async def main() -> None:
        for count in range(1, 6):  # messages of one token, then the last
            front_end = FrontEnd()
            stream = front_end.stream(7)
            first = asyncio.create_task(stream.__anext__())
            await asyncio.sleep(0)
            front_end.say([7], 50)
            assert (await first).outputs[0].token_ids == [50]
            for token in range(count):
                front_end.say([7], token)
            assert [output.outputs[0].token_ids for output in [await stream.__anext__()]] == [list(range(count))]
            for token in range(count):
                front_end.say([7], token)
            front_end.say([7], 99, last=True)
            rest = [output async for output in stream]
            assert [output.outputs[0].token_ids for output in rest] == [[*range(count), 99]]
            assert rest[0].finished

    run(main())


def test_streams_come_and_go_between_messages_that_share_their_handles(run: Run) -> None:
    async def main() -> None:
        front_end = FrontEnd()
        handles = [0, 1, 2]  # one list, as a client gives it out while an engine core's requests stay the same
        streams = [front_end.stream(number) for number in handles]
        readers = [asyncio.create_task(streams[number].__anext__()) for number in (0, 1)]
        await asyncio.sleep(0)
        front_end.say(handles, 10)  # 2 has not begun
        for reader in readers:
            assert (await reader).outputs[0].token_ids == [10]
        late = asyncio.create_task(streams[2].__anext__())
        await asyncio.sleep(0)
        front_end.say(handles, 11)
        assert (await late).outputs[0].token_ids == [11]
        await streams[1].aclose()
        front_end.say(handles, 12)
        front_end.say(handles, 13, last=True)
        rest = [[output.outputs[0] async for output in stream][-1] for stream in streams]
        assert [output.token_ids for output in rest] == [[11, 12, 13], [11], [12, 13]]
        assert [output.finish_reason for output in rest] == ["length", "abort", "length"]

    run(main())


# (stream, how many tokens), and whether it is with log probabilities; a stream may occur several times in a message.
ROWS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 1, 1, 3]), st.booleans()), max_size=6)

# How the last message ends the streams; the fourth is there twice.
ENDS = [(0, "length", None), (1, "stop", None), (2, "length", None), (4, "stop", None)]


@given(st.lists(st.tuples(ROWS, st.booleans(), st.booleans()), max_size=5))
def test_every_token_comes_once_and_in_order_whatever_else_a_message_tells(
    messages: list[tuple[list[tuple[int, int, bool]], bool, bool]],
) -> None:
    """Each message: its rows, whether those with log probabilities have them, and whether readers run behind it."""

    async def main() -> None:
        front_end = FrontEnd()
        seen: dict[int, list[int]] = {number: [] for number in range(4)}
        seen_logprobs: dict[int, list[dict[int, float]]] = {number: [] for number in range(4)}
        ends: dict[int, Any] = {}

        async def read(number: int) -> None:
            async for output in front_end.stream(number):
                seen[number] += output.outputs[0].token_ids
                seen_logprobs[number] += output.outputs[0].logprobs or []
                ends[number] = output.outputs[0].finish_reason

        tasks = [asyncio.create_task(read(number)) for number in range(4)]
        await asyncio.sleep(0)
        expected: dict[int, list[int]] = {number: [] for number in range(4)}
        expected_logprobs: dict[int, list[dict[int, float]]] = {number: [] for number in range(4)}
        token = 0
        for rows, with_logprobs, readers_run in [*messages, ([(number, 1, False) for number in range(4)], False, True)]:
            tokens, logprobs = [], {}
            for position, (number, count, has) in enumerate(rows):
                mine = list(range(token, token + count))
                token += count
                tokens += mine
                expected[number] += mine
                if has and with_logprobs and count:
                    logprobs[position] = [{one: -0.5} for one in mine]
                    expected_logprobs[number] += logprobs[position]
            counts = [count for _, count, _ in rows]
            front_end.tell(
                [number for number, _, _ in rows],
                tokens,
                counts=None if set(counts) <= {1} else counts,
                extras=OutputExtras(logprobs=logprobs) if logprobs else None,
            )
            if readers_run:
                for _ in range(3):
                    await asyncio.sleep(0)
        front_end.tell([0, 1, 2, 3, 3], [-1, -1, -2], counts=[1, 0, 1, 0, 1], finished=ENDS)
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks)
        assert seen == {0: [*expected[0], -1], 1: expected[1], 2: [*expected[2], -1], 3: [*expected[3], -2]}
        assert seen_logprobs == expected_logprobs
        assert ends == {0: "length", 1: "stop", 2: "length", 3: "stop"}

    asyncio.run(main())
