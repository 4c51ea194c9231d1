"""Everything that takes bytes from outside, each with valid messages and with what its contract allows it to do."""

from __future__ import annotations

import copy
import os
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outboard.client.pending import PendingTable
from outboard.client.receiver import Counters, Receiver
from outboard.engine.incoming import Incoming
from outboard.engines import gguf
from outboard.errors import ModelFileError, ProtocolError
from outboard.launch.handshake import EngineHandshake, HandshakeState
from outboard.protocol.codec import MsgpackDecoder, MsgpackEncoder
from outboard.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    AddRequest,
    EngineCoreDead,
    EngineCoreOutputs,
    EngineCoreRequestType,
    EngineInfo,
    ErrorReport,
    Failed,
    Hello,
    Init,
    OutputExtras,
    Ready,
    Refused,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
)
from outboard.protocol.report import NUMBER, REPORT_OFFSET, TAIL_OFFSET, ReportPage
from outboard.protocol.sampling import SamplingParams
from outboard.protocol.shm import DATA, ArenaAddress, SlotPool, SlotReader, SlotRef
from outboard.transport.framing import Assembler, head_of
from sample_messages import encoded, structs

__all__ = ["TARGETS", "Frames", "Target"]

Frames = list[bytes]

TOKEN = "secret"
EPOCH = 2**63 + 5
PROMPT = array("i", range(20)).tobytes()
REPORT = ErrorReport("builtins.ValueError", "text", "traceback")


class Target(ABC):
    """Something that takes messages.

    Attributes:
        weight: its share of all messages.
        samples: valid ones.
        seeds: others that are worth mutating.
        values: interesting values to put into them.
    """

    samples: list[Frames]
    seeds: list[Frames]
    values: list[Any]

    def __init__(self) -> None:
        self.samples = []
        self.seeds = []
        self.values = []

    @abstractmethod
    def feed(self, frames: Frames) -> bool:
        """Hands one message over; whether it was accepted. Raises what the contract does not allow."""


class Slots:
    """A slot with an array in it, which is leased anew with each message, and encoders that use or avoid it."""

    def __init__(self) -> None:
        self.pool = SlotPool(1 << 20)
        assert self.pool.address is not None
        self.reader = SlotReader(self.pool.address)
        self.framing = MsgpackEncoder(64).encode
        self.leasing = MsgpackEncoder(64, 100, self.pool).encode
        self._words: list[tuple[int, int]] = []
        self.values: list[Any] = []

    def keep(self) -> None:
        """What is leased now will be again with each `renew`."""
        words = self.reader._arena[1]  # type: ignore[index]
        self._words = [(index, word) for index, word in enumerate(words) if word and index >= 16]
        for index, number in self._words:
            slot = index - 16
            self.values += [[slot, number, offset] for offset in (DATA, 0, -1, DATA - 1, DATA + (1 << 20), 2**63)]
            self.values += [[slot, number, DATA + (1 << 20) - 1], [slot, number + 1, DATA], [slot, 0, DATA]]
        self.values += [[place, 0, DATA] for place in (0, 1, -1, 1023, 1024, 2**63, -17)]

    def renew(self) -> None:
        words = self.reader._arena[1]  # type: ignore[index]
        for index, number in self._words:
            words[index] = number


def values() -> dict[str, Any]:
    """Arrays of each way to travel, among plain values."""
    return {
        "small": np.arange(3, dtype=np.float32),
        "large": np.arange(20, dtype=np.int64).reshape(4, 5),
        "none": None,
        "list": [1, "two", 3.0, b"four", np.zeros((0, 3)), np.array("text")],
    }


def plain(frames: Any) -> Frames:
    return [bytes(frame) for frame in frames]


# --- decoders --------------------------------------------------------------------------------------------------------


class Decoder(Target):
    """`MsgpackDecoder` of one type: `ProtocolError` only."""

    def __init__(self, type_: Any, *messages: Any, bodies: list[bytes] | None = None) -> None:
        super().__init__()
        slots = Slots()
        self.samples = [[body] for body in bodies or ()]
        for message in messages:
            self.samples.append(plain(slots.framing(message)))
            self.samples.append(plain(slots.leasing(message)))
        slots.keep()
        self.values = slots.values
        self._renew = slots.renew
        self._decode = MsgpackDecoder[Any](type_, slots.reader).decode

    def feed(self, frames: Frames) -> bool:
        self._renew()
        try:
            self._decode(frames[0] if frames else b"", frames[1:])
        except ProtocolError:
            return False
        return True


def outputs() -> list[Any]:
    extras = OutputExtras({0: [{1: -0.5, 2: -1.0}]}, {0: values(), 2: 5}, {2: "why"}, {0: 0.1}, {0: 3})
    ends: Any = [(0, "stop", 3), (2, "error", None), (1, "stop", "\n")]
    return [
        EngineCoreOutputs(0, EPOCH, 0, 1.5, [0, 1, 2], [7, 8, 9]),
        EngineCoreOutputs(0, EPOCH, 0, 1.5, [0, 1, 2], [7, 8], [2, 0, 0], ends, extras, SchedulerStats(1, 2, 0.5)),
        EngineCoreOutputs(0, EPOCH, 0, 1.5, utility_output=UtilityOutput(0, values())),
        EngineCoreOutputs(0, EPOCH, 0, 1.5, utility_output=UtilityOutput(1, error=REPORT)),
        EngineCoreOutputs(0, EPOCH, 0, 1.5, utility_output=UtilityOutput(-1, ["SCALE", 3])),
        EngineCoreDead(0, EPOCH, REPORT),
    ]


def inputs() -> dict[EngineCoreRequestType, list[Any]]:
    params = SamplingParams(max_tokens=5, stop=["a", "b"], stop_token_ids=[3], seed=5, logprobs=2, output_kind="delta")
    return {
        EngineCoreRequestType.ADD: [
            AddRequest(EPOCH, 5, "user's id", PROMPT, params),
            AddRequest(EPOCH, 6, "", b"", SamplingParams(), values(), 1, 2.5),
        ],
        EngineCoreRequestType.ABORT: [AbortRequests(EPOCH, [1, 2, 3])],
        EngineCoreRequestType.UTILITY: [UtilityCall(EPOCH, 3, "method", [values(), 1], {"x": values(), "y": 2})],
    }


def handshake() -> list[Any]:
    info = EngineInfo(max_model_len=77, vocab_size=5, model="m", extra={"x": [1, {"y": None}]})
    return [
        Hello(PROTOCOL_VERSION, "0.1", TOKEN, 1, 2, 100, 101),
        Ready(TOKEN, info, ["a", "b"]),
        Failed(TOKEN, REPORT),
    ]


class AllStructs(Target):
    """`MsgpackDecoder` of every struct there is."""

    def __init__(self) -> None:
        super().__init__()
        self._decoders: list[Callable[..., Any]] = []
        for number, struct_ in enumerate(structs()):
            self._decoders.append(MsgpackDecoder[Any](struct_).decode)
            self.samples += [[bytes([number]), body] for body in encoded(struct_)]

    def feed(self, frames: Frames) -> bool:
        which = frames[0][0] if frames and frames[0] else 0
        try:
            self._decoders[which % len(self._decoders)](*frames[1:2] or [b""], frames[2:])
        except ProtocolError:
            return False
        return True


# --- a client's and an engine core's way in --------------------------------------------------------------------------


class Listening:
    """A listener that looks at everything in what it is given, as front ends do."""

    needs_ids = True

    def deliver(self, message: EngineCoreOutputs) -> None:
        for output in message.outputs:
            repr(output)

    def on_engine_dead(self, rank: int, report: ErrorReport) -> None:
        pass

    def on_broken(self, rank: int, reason: str) -> None:
        self.broken = reason

    def on_notification(self, payload: tuple[str, int]) -> bool:
        return payload[1] > 1


class ReceiverTarget(Target):
    """`Receiver.on_message` never raises, and ends a call once. It may fail for good, with the calls that wait."""

    def __init__(self) -> None:
        super().__init__()
        slots = Slots()
        self.samples = [plain(encode(message)) for message in outputs() for encode in (slots.framing, slots.leasing)]
        odd = [
            EngineCoreOutputs(0, EPOCH, 0, 1.5, utility_output=UtilityOutput(-1, np.arange(length)))
            for length in (0, 3)
        ]
        self.seeds = [plain(slots.framing(message)) for message in odd]
        slots.keep()
        self.values = slots.values
        self._renew = slots.renew
        self._receiver = Receiver(PendingTable(), 0, EPOCH, Listening(), Counters())
        self._receiver.set_reader(slots.reader)

    def feed(self, frames: Frames) -> bool:
        self._renew()
        pending = PendingTable()
        for name in ("a", "b", "c"):
            pending.add_request(name)
        calls: list[Future[Any]] = [Future(), Future()]
        for call in calls:
            pending.add_call(call)
        listener, counters = Listening(), Counters()
        receiver = copy.copy(self._receiver)
        receiver._pending, receiver._listener, receiver._counters = pending, listener, counters
        receiver.on_message(frames[0] if frames else b"", frames[1:])
        if dict(map(reversed, pending.handles.items())) != pending.request_ids:  # type: ignore[arg-type]
            raise AssertionError("the tables of requests differ")
        if sum(call.done() for call in calls) + len(pending.utility_results) != 2:
            raise AssertionError("a call was lost")
        return not counters.dropped and not hasattr(listener, "broken")


class IncomingTarget(Target):
    """`Incoming.decode` never raises; what comes out of it is what the busy loop can take."""

    def __init__(self) -> None:
        super().__init__()
        slots = Slots()
        self.samples = [
            [kind.value, *plain(encode(message))]
            for kind, messages in inputs().items()
            for message in messages
            for encode in (slots.framing, slots.leasing)
        ]
        slots.keep()
        self.values = slots.values
        self._renew = slots.renew
        self._incoming = Incoming(EPOCH, slots.reader)

    def feed(self, frames: Frames) -> bool:
        self._renew()
        item = self._incoming.decode(frames)
        if isinstance(item, AddRequest):
            try:
                item.to_request()
            except ValueError:  # the busy loop refuses it then
                pass
        return item is not None


class StreamTarget(Target):
    """`Assembler`, with the bytes in pieces: `ProtocolError` only, and what comes out had been put in."""

    def __init__(self) -> None:
        super().__init__()
        slots = Slots()
        for message in outputs():
            for encode in (slots.framing, slots.leasing):
                frames = plain(encode(message))
                whole = head_of(frames) + b"".join(frames)
                self.samples += [[whole], [whole[:5], whole[5:40], whole[40:]], [whole * 2], [head_of(frames), *frames]]
        large = [b"x" * 70_000, b"", b"y" * 10]
        self.seeds = [[head_of(large), *large], [struct.pack("<QQ", 5, 2**16), bytes(2**19), b"12345"]]
        self.seeds += [[struct.pack("<QQ", *sizes), b"x"] for sizes in ((2**20, 0), (2**63, 1), (0, 2**16), (0, 2**63))]

    def feed(self, frames: Frames) -> bool:
        assembler = Assembler(1 << 20)
        came = taken = 0
        try:
            for piece in frames:
                rest = memoryview(piece)
                while (message := assembler.next()) is not None or rest:
                    if message is not None:
                        taken += sum(map(len, message[1]), len(message[0]))
                        continue
                    room = assembler.room()
                    count = min(len(room), len(rest))
                    if not count:
                        raise AssertionError("no room")
                    room[:count] = rest[:count]
                    assembler.came(count)
                    came += count
                    rest = rest[count:]
        except ProtocolError:
            return False
        if taken > came:
            raise AssertionError("more came out than was put in")
        return taken > 0


# --- the handshake ---------------------------------------------------------------------------------------------------


class HandshakeTarget(Target):
    """`EngineHandshake.receive` answers; the end of a handshake is its end."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = [[b"a", msgspec.msgpack.encode(message)] for message in handshake()]
        self.values = [TOKEN]
        self._init = msgspec.msgpack.decode(encoded(Init)[0], type=Init)
        self._init = msgspec.structs.replace(self._init, rank=1, incarnation=2)
        new = EngineHandshake(TOKEN, self._init)
        self._states = [copy.copy(new)]
        new.receive(b"a", self.samples[0][1:])
        self._states.append(copy.copy(new))
        new.receive(b"a", self.samples[1][1:])
        self._states.append(new)
        expected = [HandshakeState.WAITING_HELLO, HandshakeState.WAITING_READY, HandshakeState.READY]
        assert [state.state for state in self._states] == expected

    def feed(self, frames: Frames) -> bool:
        accepted = False
        for state in self._states:
            trial = copy.copy(state)
            answer = trial.receive(frames[0] if frames else b"", frames[1:])
            if answer is not None:
                msgspec.msgpack.decode(answer, type=Init | Refused)
            if trial.refused != state.refused and answer is None:
                raise AssertionError("refused without a reason")
            if state.state is HandshakeState.READY and trial.state is not HandshakeState.READY:
                raise AssertionError("READY was left")
            if trial.state is HandshakeState.READY and trial.hello is None:
                raise AssertionError("READY without HELLO")
            accepted = accepted or trial.refused == state.refused
        return accepted


# --- shared pages ----------------------------------------------------------------------------------------------------


class ReportTarget(Target):
    """The readers of a report page never raise."""

    def __init__(self) -> None:
        super().__init__()
        page = ReportPage.create()
        page.write_report(ErrorReport("a.B", "message", "trace\nback"))
        length = os.pread(page.fd, NUMBER, REPORT_OFFSET)
        body = os.pread(page.fd, int.from_bytes(length, "little"), REPORT_OFFSET + NUMBER)
        self.samples = [[struct.pack("<qqq", 77, 1, -9), body, b"some line\n" * 4]]
        nested = b"\x94\xa1a\xa1b\xa1c" + b"\x91" * 5000
        self.seeds = [[b"", nested, b"x" * (64 << 10)], [b"", body, b"x" * (64 << 10)]]
        self._page = page

    def feed(self, frames: Frames) -> bool:
        page = self._page
        numbers, *parts = frames or [b""]
        os.pwrite(page.fd, numbers[: 3 * NUMBER], 0)
        for number, (offset, data) in enumerate(zip((REPORT_OFFSET, TAIL_OFFSET), parts, strict=False)):
            # The length is that of the data, unless the page's first numbers have more to say.
            length = numbers[(3 + number) * NUMBER :][:NUMBER] or struct.pack("<q", len(data))
            os.pwrite(page.fd, length + data[: 64 << 10], offset)
        for size in (1, 30, 8192, 1 << 20):
            page.read_stderr_tail(size)
        page.read_exit_code()
        page.read_engine_pid()
        return page.read_report() is not None


class ArenaTarget(Target):
    """`SlotReader` opens no other file for an arena: `OSError` only. Of one that it opens, no slot is out of range."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = SlotPool(1 << 20)
        address = self._pool.address
        assert address is not None
        encode = msgspec.msgpack.Encoder().encode
        rest = [encode(SlotRef(0, 5, DATA)), encode(10)]
        self.samples = [[encode(address), *rest]]
        for size in (0, 1, 8, 100, 128, 4096, DATA, DATA + 8):  # other files, with the same key where there is room
            fd = os.memfd_create("fuzz", os.MFD_CLOEXEC)
            os.truncate(fd, size)
            os.pwrite(fd, struct.pack("<Q", address.key)[:size], 0)
            self.seeds.append([encode(ArenaAddress(os.getpid(), fd, address.key, size)), *rest])
        self._others = [os.open(name, os.O_RDONLY | os.O_CLOEXEC) for name in ("/proc/self/status", "/dev/null", "/")]
        self.seeds += [[encode(ArenaAddress(os.getpid(), fd, address.key, 0)), *rest] for fd in self._others]
        self.values = [address.fd, address.key, address.length, os.getpid()]

    def feed(self, frames: Frames) -> bool:
        try:
            first, second, third = frames
            place = msgspec.msgpack.decode(first, type=ArenaAddress)
            reference = msgspec.msgpack.decode(second, type=SlotRef)
            size = msgspec.msgpack.decode(third, type=int)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        if place.pid not in (os.getpid(), 0, -1, 2**31):  # not into other processes' files
            place = msgspec.structs.replace(place, pid=os.getpid())
        try:
            reader = SlotReader(place)
        except OSError:
            return False
        for number in (0, 5, reference.number):
            try:
                view = reader.open(msgspec.structs.replace(reference, number=number), abs(size))
            except ValueError:
                continue
            if view.nbytes:
                view[0], view[-1] = 1, 1
        reader.close()
        return True


# --- files -----------------------------------------------------------------------------------------------------------


class GGUFTarget(Target):
    """The reader of a model file's header: `ModelFileError` only."""

    def __init__(self) -> None:
        super().__init__()

        def text(value: str) -> bytes:
            return struct.pack("<Q", len(value)) + value.encode()

        def pair(key: str, kind: int, value: bytes) -> bytes:
            return text(key) + struct.pack("<I", kind) + value

        pairs = [
            pair("general.alignment", 4, struct.pack("<I", 32)),
            pair("general.name", 8, text("name")),
            pair("a.float", 6, struct.pack("<f", 0.5)),
            pair("a.double", 12, struct.pack("<d", 0.5)),
            pair("a.bool", 7, b"\1"),
            pair("tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("bc") + text("")),
            pair("scores", 9, struct.pack("<IQ", 6, 2) + bytes(8)),
            pair("nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 0, 2) + b"xy"),
        ]
        tensors = [
            text("one") + struct.pack("<IQQIQ", 2, 64, 32, 0, 0),
            text("two") + struct.pack("<IQIQ", 1, 256, 12, 8192),
        ]
        head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
        self.samples = [
            [head + b"".join(pairs) + b"".join(tensors)],
            [b"GGUF" + struct.pack("<IQQ", 2, 1, 1) + pairs[0] + tensors[0]],
            *([b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + one] for one in pairs),
        ]
        alignments = [
            *((8, text("32")), (4, struct.pack("<I", 0)), (5, struct.pack("<i", -32)), (7, b"\1"), (0, b"\x20")),
            *((6, struct.pack("<f", value)) for value in (0.0, 32.0, float("nan"), float("inf"), -0.5)),
            *((10, struct.pack("<Q", 2**64 - 1)), (11, struct.pack("<q", -(2**63)))),
        ]
        self.seeds = [
            *(
                [b"GGUF" + struct.pack("<IQQ", 3, 1, 1), pair("general.alignment", *value), tensors[0]]
                for value in alignments
            ),
            [
                b"GGUF" + struct.pack("<IQQ", 3, 1, 0),
                text("dims") + struct.pack("<I", 20_000) + b"\xff" * 160_000,
                b"\0" * 12,
            ],
        ]
        self._fd = os.memfd_create("fuzz.gguf", os.MFD_CLOEXEC)
        self._path = Path(f"/proc/self/fd/{self._fd}")

    def feed(self, frames: Frames) -> bool:
        data = b"".join(frames)
        os.ftruncate(self._fd, len(data))
        os.pwrite(self._fd, data, 0)
        try:
            header = gguf.read_header(self._path)
        except ModelFileError:
            return False
        if not isinstance(header.file_size, int) or header.file_size < 0:
            raise AssertionError(f"a file of {header.file_size} bytes")
        return True


TARGETS: dict[str, Any] = {}


def _add(name: str, weight: float, make: Callable[[], Target]) -> None:
    TARGETS[name] = _Entry(weight, make)


class _Entry:
    def __init__(self, weight: float, make: Callable[[], Target]) -> None:
        self.weight = weight
        self._make = make

    def __call__(self) -> Target:
        return self._make()


_add("EngineCoreOutputs", 4, lambda: Decoder(EngineCoreOutputs | EngineCoreDead, *outputs()))
_add("AddRequest", 3, lambda: Decoder(AddRequest, *inputs()[EngineCoreRequestType.ADD]))
_add("AbortRequests", 1, lambda: Decoder(AbortRequests, *inputs()[EngineCoreRequestType.ABORT]))
_add("UtilityCall", 2, lambda: Decoder(UtilityCall, *inputs()[EngineCoreRequestType.UTILITY]))
_add("Hello, Ready, Failed", 1, lambda: Decoder(Hello | Ready | Failed, *handshake()))
_add("Init, Refused", 1, lambda: Decoder(Init | Refused, Refused("no"), bodies=encoded(Init)))
_add("anything", 2, lambda: Decoder(Any, *outputs(), values()))
_add("all structs", 3, AllStructs)
_add("Receiver", 4, ReceiverTarget)
_add("Assembler", 2, StreamTarget)
_add("Incoming", 4, IncomingTarget)
_add("EngineHandshake", 2, HandshakeTarget)
_add("ReportPage", 1, ReportTarget)
_add("SlotReader", 1, ArenaTarget)
_add("GGUF", 2, GGUFTarget)
