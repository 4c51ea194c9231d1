"""The engine-core process: `python -m outboard.engine`, started by a warden (launch/warden.py).

    HELLO -> INIT -> import and construct the engine -> READY -> busy loop -> shutdown

The main thread runs the busy loop, the input thread receives and decodes. Where to connect comes by the environment,
what to run by the INIT message.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from types import FrameType
from typing import Any

import msgspec

from outboard._version import __version__
from outboard.config import TransportConfig
from outboard.engine.calls import has_typed_result
from outboard.engine.core import EngineCore, utility_methods
from outboard.engine.incoming import Incoming
from outboard.engine.loader import IMPORTING_ENGINE, bind_options, load_engine_class
from outboard.engine.loop import BusyLoop, Stop
from outboard.engine.outgoing import error_report
from outboard.protocol.codec import MsgpackDecoder, MsgpackEncoder, check_size
from outboard.protocol.environment import REPORT_FD, ChildEnvironment
from outboard.protocol.messages import (
    PROTOCOL_VERSION,
    EngineCoreDead,
    EngineCoreOutputs,
    Failed,
    Hello,
    Init,
    Ready,
    Refused,
)
from outboard.protocol.report import ReportPage
from outboard.protocol.shm_pair import SharedMemory
from outboard.protocol.tensors import Buffer
from outboard.transport.sockets import ControlClient, InputReceiver, OutputSender, ZmqContext, make_context

__all__ = ["main"]

# How long the last outputs may take to leave when the process ends, in milliseconds.
_LINGER_MS = 1000

logger = logging.getLogger("outboard.engine")


def main() -> int:
    """Runs an engine core until its front end stops it; the exit status: 0 after a stop, 1 after an error."""
    faulthandler.enable()  # a native crash then leaves a Python traceback in the stderr tail
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    environment = ChildEnvironment.take_from(os.environ)
    report = ReportPage.from_fd(int(os.environ.pop(REPORT_FD)))
    signal.signal(signal.SIGTERM, _exit_at_once)
    context = make_context()
    control = ControlClient(context, environment.control_address)
    token = environment.session_token
    encode = msgspec.msgpack.Encoder().encode
    try:
        init = _say_hello(control, environment)
        try:
            engine = _construct(init)
            typed = [name for name in utility_methods(engine) if has_typed_result(getattr(engine, name))]
            ready = encode(Ready(token, engine.info(), typed))
        except Exception as error:
            report.write_report(error_report(error))
            control.send(encode(Failed(token, error_report(error))))
            return 1
        return _serve(engine, init, context, control, ready, report)
    finally:
        control.close()
        context.term()


def _exit_at_once(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _say_hello(control: ControlClient, who: ChildEnvironment) -> Init:
    hello = Hello(
        PROTOCOL_VERSION, __version__, who.session_token, who.rank, who.incarnation, os.getpid(), os.getpgrp()
    )
    control.send(msgspec.msgpack.encode(hello))
    answer: Init | Refused = MsgpackDecoder[Init | Refused](Init | Refused).decode(control.receive())
    if isinstance(answer, Refused):
        raise SystemExit(f"outboard: this engine core was refused: {answer.reason}")
    return answer


def _construct(init: Init) -> EngineCore:
    sys.path[:] = list(dict.fromkeys([*init.sys_path, *sys.path]))
    os.environ[IMPORTING_ENGINE] = init.engine
    try:
        engine_class = load_engine_class(init.engine)
    finally:
        del os.environ[IMPORTING_ENGINE]
    return engine_class(**bind_options(engine_class, init.options))


def _serve(
    engine: EngineCore, init: Init, context: ZmqContext, control: ControlClient, ready: bytes, report: ReportPage
) -> int:
    limits = TransportConfig(high_water_mark=init.high_water_mark, max_message_bytes=init.max_message_bytes)
    inbox: SimpleQueue[Any] = SimpleQueue()
    receiver = InputReceiver(context, init.input_address, init.identity, limits)
    memory = SharedMemory.join(init.arena)
    encoder = MsgpackEncoder(init.inline_bytes, init.shared_memory_bytes, memory.pool)
    port = _Port(OutputSender(context, init.output_address, limits), encoder, init.max_message_bytes)
    incoming = Incoming(init.epoch, memory.reader)
    threading.Thread(target=_receive, args=(receiver, inbox, incoming), name="outboard-input", daemon=True).start()
    loop = BusyLoop(engine, inbox, port, rank=init.rank, epoch=init.epoch)
    signal.signal(signal.SIGTERM, lambda signum, frame: inbox.put(Stop()))
    # What start-up made stays for ever: the garbage collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    control.send(ready)
    try:
        return _run(engine, loop, init, port, report)
    finally:
        port.close()


def _run(engine: EngineCore, loop: BusyLoop, init: Init, port: _Port, report: ReportPage) -> int:
    status = 0
    try:
        loop.run()
    except Exception as error:
        logger.exception("the engine core failed")
        report.write_report(error_report(error))
        port.send(port.encode(EngineCoreDead(init.rank, init.epoch, error_report(error))))
        status = 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is stopping already
    try:
        engine.shutdown()
    except Exception as error:
        logger.exception("shutdown of the engine failed")
        if status == 0:
            report.write_report(error_report(error))
        status = 1
    return status


class _Port:
    """The busy loop's way out: encoder and PUSH socket. What is encoded and not sent is encoded again later."""

    def __init__(self, sender: OutputSender, encoder: MsgpackEncoder, max_message_bytes: int) -> None:
        self._sender = sender
        self._max_message_bytes = max_message_bytes
        self._encoder = encoder
        self._unsent: Buffer | None = None
        self.writable = sender.writable

    def encode(self, message: EngineCoreOutputs | EngineCoreDead) -> Sequence[Buffer]:
        if self._unsent is not None:
            self._encoder.give_back(self._unsent)
            self._unsent = None
        frames = self._encoder.encode(message)
        self._unsent = frames[0]
        if len(frames) > 1 or len(frames[0]) > self._max_message_bytes:
            check_size(frames, self._max_message_bytes)
        return frames

    def send(self, frames: Sequence[Buffer]) -> bool:
        if not self._sender.send(frames):
            return False
        self._unsent = None
        return True

    def close(self) -> None:
        self._sender.close(_LINGER_MS)


def _receive(receiver: InputReceiver, inbox: SimpleQueue[Any], incoming: Incoming) -> None:
    """The input thread: receives and decodes until the context is terminated."""
    while (frames := receiver.receive()) is not None:
        item = incoming.decode(frames)
        if item is not None:
            inbox.put(item)
        del frames, item  # their arrays must not be held until the next message comes
