"""The engine-core process: `python -m outboard.engine`, started by a warden (launch/warden.py).

    HELLO -> INIT -> import and construct the engine -> READY -> serve front ends as they come and go -> shutdown

The main thread runs the busy loop, the input thread receives and decodes. Where to connect comes by the environment,
what to run by the INIT message, whom to serve by the control channel.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
from queue import SimpleQueue
from types import FrameType
from typing import Any

import msgspec

from outboard._version import __version__
from outboard.dp.rank_waves import RankWaves
from outboard.dp.step_sync import StepSync, ZmqStepSync
from outboard.engine.calls import has_typed_result
from outboard.engine.core import NO_DUMMY_BATCH, EngineCore, ParallelState, utility_methods
from outboard.engine.cpus import share_of, use_cpus
from outboard.engine.events import Stop
from outboard.engine.input import InputThread
from outboard.engine.loader import IMPORTING_ENGINE, bind_options, load_engine_class
from outboard.engine.lockstep import LockstepLoop
from outboard.engine.lockstep_place import LockstepPlace
from outboard.engine.loop import BusyLoop
from outboard.engine.mailbox import Mailbox
from outboard.engine.outgoing import error_report
from outboard.engine.stacks import STACK_SIGNAL, dump_stacks_on_signal
from outboard.errors import ConfigError
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.environment import REPORT_FD, ChildEnvironment
from outboard.protocol.messages import PROTOCOL_VERSION, Failed, Hello, Init, Ready, Refused
from outboard.protocol.progress import ProgressPage
from outboard.protocol.report import ReportPage
from outboard.transport.curve import SessionKeys
from outboard.transport.sockets import ControlClient, ZmqContext, make_context

__all__ = ["main"]

_ACROSS_HOSTS = (
    "ranks of {} step together, which they can on one host only: give them all to the head, by "
    "NetworkConfig(local_ranks=...), or run with no network"
)

# How long the last outputs may take to leave when the process ends, in milliseconds.
_LINGER_MS = 1000

logger = logging.getLogger("outboard.engine")


def main() -> int:
    """Runs an engine core until its launcher stops it; the exit status: 0 after a stop, 1 after an error."""
    faulthandler.enable()  # a native crash then leaves a Python traceback in the stderr tail
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    environment = ChildEnvironment.take_from(os.environ)
    report = ReportPage.from_fd(int(os.environ.pop(REPORT_FD)))
    signal.signal(signal.SIGTERM, _exit_at_once)
    context = make_context(msgspec.json.decode(environment.keys, type=SessionKeys) if environment.keys else None)
    control = ControlClient(context, environment.control_address)
    control_is_ours = True
    try:
        init = _say_hello(control, environment)
        page = ProgressPage()
        try:
            engine = _construct(init, environment)
            ready = _ready(engine, page, environment.session_token)
        except Exception as error:
            report.write_report(error_report(error))
            control.send(msgspec.msgpack.encode(Failed(environment.session_token, error_report(error))))
            return 1
        inbox: SimpleQueue[Any] = SimpleQueue()
        interrupt = os.eventfd(0, os.EFD_CLOEXEC)
        mailbox = Mailbox()
        loop = _make_loop(engine, inbox, page, init, environment, context, interrupt, mailbox)

        def stop(signum: int, frame: FrameType | None) -> None:
            inbox.put(Stop())
            os.eventfd_write(interrupt, 1)

        signal.signal(signal.SIGTERM, stop)
        # What start-up made stays for ever: the garbage collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        control.send(ready)
        InputThread(context, control, inbox, init, environment.session_token, mailbox).start()
        control_is_ours = False
        try:
            return _run(engine, loop, report)
        finally:
            loop.close(_LINGER_MS)
    finally:
        if control_is_ours:
            control.close()
        context.term()  # ends the input thread, which closes the control channel


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


def _construct(init: Init, environment: ChildEnvironment) -> EngineCore:
    paths = init.sys_path or [path for path in environment.search_path.split(os.pathsep) if path]
    sys.path[:] = list(dict.fromkeys([*paths, *sys.path]))
    os.environ[IMPORTING_ENGINE] = init.engine
    try:
        engine_class = load_engine_class(init.engine)
    finally:
        del os.environ[IMPORTING_ENGINE]
    if init.cpus:
        use_cpus(init.cpus)
    elif engine_class.cpu_bound and init.data_parallel_size > 1:
        place, places = (
            (environment.place, environment.places) if environment.places else (init.rank, init.data_parallel_size)
        )
        use_cpus(share_of(sorted(os.sched_getaffinity(0)), place, places))
    if engine_class.lockstep and _is_elastic(init):
        if init.across_hosts:
            raise ConfigError(_ACROSS_HOSTS.format(engine_class.__name__))
        if engine_class.execute_dummy_batch is EngineCore.execute_dummy_batch:
            raise ConfigError(NO_DUMMY_BATCH.format(engine_class.__name__))
        engine_class.parallel = ParallelState(
            init.rank, init.data_parallel_size, init.group, init.rendezvous, init.joining
        )
    return engine_class(**bind_options(engine_class, init.options))


def _make_loop(
    engine: EngineCore,
    inbox: SimpleQueue[Any],
    page: ProgressPage,
    init: Init,
    environment: ChildEnvironment,
    context: ZmqContext,
    interrupt: int,
    mailbox: Mailbox,
) -> BusyLoop:
    token = environment.session_token
    if not engine.lockstep or not _is_elastic(init):
        return BusyLoop(engine, inbox, page, rank=init.rank, incarnation=init.incarnation, say=mailbox.put, token=token)
    waves = RankWaves(
        init.rank,
        init.data_parallel_size,
        group=init.group,
        coordinator=init.first_coordinator,
        sync_interval=init.dp_sync_interval,
        at_rest=init.joining,
    )

    def make_sync(rank: int, size: int, address: str) -> StepSync:
        timeout = init.dp_sync_timeout
        return ZmqStepSync(context, address, token, rank, size, timeout=timeout, interrupt_fd=interrupt)

    sync = None if init.joining else make_sync(init.rank, init.data_parallel_size, init.step_sync_address)
    place = LockstepPlace(waves, sync, init.dp_sync_interval, make_sync)
    return LockstepLoop(engine, inbox, page, place=place, incarnation=init.incarnation, say=mailbox.put, token=token)


def _is_elastic(init: Init) -> bool:
    """Whether there are several ranks, or may come to be."""
    return init.elastic or init.data_parallel_size > 1


def _ready(engine: EngineCore, page: ProgressPage, session_token: str) -> bytes:
    typed = [name for name in utility_methods(engine) if has_typed_result(getattr(engine, name))]
    ready = Ready(
        session_token,
        engine.info(),
        typed,
        page.fd,
        dump_stacks_on_signal(),
        STACK_SIGNAL,
        engine.lockstep,
        type(engine).reinitialize is not EngineCore.reinitialize,
    )
    return msgspec.msgpack.encode(ready)


def _run(engine: EngineCore, loop: BusyLoop, report: ReportPage) -> int:
    status = 0
    try:
        loop.run()
    except Exception as error:
        logger.exception("the engine core failed")
        report.write_report(error_report(error))
        loop.report_death(error_report(error))
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
