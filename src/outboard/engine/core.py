"""`EngineCore`: the one class that an engine author writes. Nothing here knows of processes or sockets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from outboard.engine.batch import OutputBatch
from outboard.engine.calls import convert_arguments
from outboard.errors import UnsupportedError, UtilityNotFoundError
from outboard.protocol.messages import EngineCoreRequest, EngineInfo, SchedulerStats

__all__ = ["EngineCore", "OutputBatch", "ParallelState", "Tokenizer", "no_such_utility", "utility", "utility_methods"]

F = TypeVar("F", bound=Callable[..., Any])

_UTILITY_MARK = "__outboard_utility__"
NO_DUMMY_BATCH = (
    "{} has `lockstep = True` but no `execute_dummy_batch()`: define it, so that a rank without work can take part in "
    "a step; it must do whatever of a step the other ranks wait for, such as every collective operation"
)


class Tokenizer(Protocol):
    """What a front end needs to turn text into tokens and back. Called in the front end, never in the engine core.

    Attributes:
        eos_token_ids: tokens that end a completion.
        max_token_chars: the most characters that one token can stand for; bounds a prompt before it is encoded.
    """

    eos_token_ids: Sequence[int]
    max_token_chars: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        """The texts of several sequences at once; bytes that are no whole character yet show as U+FFFD."""
        ...

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> str: ...


def utility(method: F) -> F:
    """Marks a method of an `EngineCore` as callable from a client. No other method can be called from outside."""
    setattr(method, _UTILITY_MARK, True)
    return method


def no_such_utility(engine: EngineCore, method: str, others: Iterable[str] = ()) -> str:
    """What to say of a utility method that does not exist: those of the engine that do, and `others`."""
    there = ", ".join(sorted({*utility_methods(engine), *others}))
    return f"{type(engine).__name__} has no utility method {method!r}; it has: {there}"


def utility_methods(engine: EngineCore | type[EngineCore]) -> Iterable[str]:
    """Names of an engine's `@utility` methods, sorted."""
    cls = engine if isinstance(engine, type) else type(engine)
    return sorted(name for name in dir(cls) if getattr(getattr(cls, name, None), _UTILITY_MARK, False))


class ParallelState(msgspec.Struct, frozen=True):
    """An engine core's place among the ranks that it steps together with.

    Attributes:
        rank, size: its rank, and how many there are.
        version: rises whenever they are started anew.
        rendezvous: a path that all of them, and nobody else, are given, in a private directory: for a socket or a file
            by which they meet. "": there is one rank.
        joining: the others run already. The constructor loads the model and meets nobody; `reinitialize` follows.
    """

    rank: int = 0
    size: int = 1
    version: int = 0
    rendezvous: str = ""
    joining: bool = False


class EngineCore(ABC):
    """An inference engine that can take one step at a time. Synchronous; every method is called from one thread.

    The constructor's keyword arguments are the engine's options: their names, annotations and defaults are what
    `outboard engines` lists and what `EngineConfig.options` is checked against. It loads the model; when it returns,
    the engine is ready. Import heavy libraries there, not at the top of the module.

    Attributes:
        lockstep: True where the ranks of a data-parallel group must step together: while any of them has work, those
            that have none take dummy steps.
        parallel: its place among the ranks; known when the constructor is called.
        cpu_bound: True where it computes on CPUs: several ranks on one host then get a share of them each, unless
            `RankOptions.cpus` says otherwise.
    """

    lockstep: ClassVar[bool] = False
    cpu_bound: ClassVar[bool] = False
    parallel: ParallelState = ParallelState()

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Takes a request in; it is worked on by later steps.

        One that an earlier engine core had begun is resumed here: the last `num_output_tokens` of its prompt are what
        it has said already. An engine that then goes on exactly as the other would have says so in
        `EngineInfo.exact_resume`; any other may take it all for a prompt.

        Raises:
            InvalidRequestError: the request cannot be served; it alone fails, with this message. So it does with any
                other exception.
        """

    @abstractmethod
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Drops these requests and frees what they hold. Unknown ids are no error."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether `step` should be called. With no work the process sleeps until something arrives."""

    @abstractmethod
    def step(self, outputs: OutputBatch) -> None:
        """One step, such as one forward pass; puts what it produced into `outputs`.

        An exception here ends the engine core: its state is unknown. A request that fails alone is ended with
        `outputs.add(request_id, finish_reason="error", error=...)`.
        """

    def execute_dummy_batch(self) -> None:
        """One step with nothing in it, so that ranks that have work can take theirs; for `lockstep`.

        It must do whatever of a `step` the other ranks wait for, such as every collective operation.
        """
        raise NotImplementedError(NO_DUMMY_BATCH.format(type(self).__name__))

    def reinitialize(self, state: ParallelState) -> None:
        """The group of a `lockstep` engine has another size: takes this place in it, and keeps all requests.

        Called on every rank, old and new, between two steps, with nobody in a step. It may wait for the other ranks
        to be called, too, but not for ever: ranks may die meanwhile. Default: raises `UnsupportedError`; such an engine
        cannot be scaled, and the attempt is refused before anything is started.

        Raises:
            Exception: the ranks did not come together. The old size is then tried again, by another call.
        """
        raise self._unsupported("cannot be scaled: it has no reinitialize()")

    def info(self) -> EngineInfo:
        """What to tell the front end once the engine is ready. Default: nothing."""
        return EngineInfo()

    def scheduler_stats(self) -> SchedulerStats | None:
        """Load, read after steps. Default None: the number of open requests counts as running."""
        return None

    def progress(self) -> None:  # noqa: B027 - there is nothing to override
        """A sign of life, for a step or another method that takes long: call it now and then, from any thread.

        Without one an engine core counts as hanging after `FaultConfig.stall_timeout`. It costs 0.2 us. In an
        engine-core process the busy loop puts the real one in the place of this, which does nothing.
        """

    # --- controls; the busy loop does the pausing around them ---

    @utility
    def reset_prefix_cache(self) -> bool:
        """Forgets what the prefix cache holds; whether it did. Default: raises `UnsupportedError`."""
        raise self._unsupported("has no prefix cache to reset")

    @utility
    def sleep(self, level: int = 1) -> None:
        """Gives memory back until `wake_up`; no step is taken meanwhile. Default: raises `UnsupportedError`.

        Args:
            level: 1: weights may be kept elsewhere; 2: they may be dropped.
        """
        raise self._unsupported("cannot sleep")

    @utility
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes memory again after `sleep`. Default: raises `UnsupportedError`.

        Args:
            tags: what to wake, such as "weights" or "kv_cache"; None: all.
        """
        raise self._unsupported("cannot sleep, so it cannot wake up")

    @utility
    def is_sleeping(self) -> bool:
        """Whether it sleeps, in part or whole. Default: False."""
        return False

    @utility
    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any] | Future[list[Any]]:
        """Calls a `@utility` method on every worker of the engine; one result a worker.

        Default: an engine without workers has one, itself; `timeout` then has nothing to bound.
        """
        if method not in utility_methods(self):
            raise UtilityNotFoundError(no_such_utility(self, method))
        function = getattr(self, method)
        args, kwargs = convert_arguments(function, list(args), kwargs or {})
        result = function(*args, **kwargs)
        return _in_list(result) if isinstance(result, Future) else [result]

    def _unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{type(self).__name__} {what}")

    def shutdown(self) -> None:  # noqa: B027 - overriding it is optional
        """Frees what the engine holds; called once, at the end, with all requests aborted. Default: nothing."""

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> Tokenizer | None:
        """The tokenizer for these options, built in the front end, in a thread; must not load weights.

        Default None: prompts must be token ids, and outputs have no text.
        """
        return None


def _in_list(result: Future[Any]) -> Future[list[Any]]:
    """A future of a list with that result in it."""
    wrapped: Future[list[Any]] = Future()

    def done(result: Future[Any]) -> None:
        try:
            wrapped.set_result([result.result()])
        except BaseException as error:  # CancelledError too: whatever ended it is the caller's
            wrapped.set_exception(error)

    result.add_done_callback(done)
    return wrapped
