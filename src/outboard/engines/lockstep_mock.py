"""`LockstepMockEngine`: a `mock` whose ranks must step together, as those of an expert-parallel model must."""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

from outboard.engine.core import OutputBatch, ParallelState
from outboard.engines.mock import MockEngine
from outboard.errors import EngineOptionError

__all__ = ["LockstepMockEngine"]

# How long to sleep while others are awaited, seconds: short at first, since they come at about the same time.
_FIRST_NAP, _LAST_NAP = 0.00005, 0.002


class LockstepMockEngine(MockEngine):
    """As `mock`; every step, real or dummy, waits until all ranks take that step.

    So it fails where ranks do not step together, which makes it a test of whatever is to see to that.

    Args:
        barrier_timeout: how long a step waits for the other ranks, seconds.
        options: those of `mock`.
    """

    lockstep = True

    def __init__(
        self,
        step_ms: float = 0.0,
        tokens_per_step: int = 1,
        max_num_seqs: int = 4096,
        vocab_size: int = 256,
        max_model_len: int | None = None,
        barrier_timeout: float = 20.0,
    ) -> None:
        super().__init__(step_ms, tokens_per_step, max_num_seqs, vocab_size, max_model_len)
        if not barrier_timeout > 0:
            raise EngineOptionError(f"barrier_timeout must be above 0, not {barrier_timeout}")
        self._barrier_timeout = barrier_timeout
        self._barrier: _Barrier | None = None
        if not self.parallel.joining:
            self._barrier = self._make_barrier(self.parallel)

    def step(self, outputs: OutputBatch) -> None:
        self._meet()
        super().step(outputs)

    def execute_dummy_batch(self) -> None:
        self._meet()

    def reinitialize(self, state: ParallelState) -> None:
        """As a collective operation would, it waits for all ranks.

        Raises:
            RuntimeError: some did not come within `barrier_timeout`.
        """
        if self._barrier is not None:
            self._barrier.close()
        self._barrier = self._make_barrier(state)
        self._meet()

    def _make_barrier(self, state: ParallelState) -> _Barrier | None:
        return _Barrier(state, self._barrier_timeout) if state.size > 1 else None

    def shutdown(self) -> None:
        super().shutdown()
        if self._barrier is not None:
            self._barrier.close()

    def _meet(self) -> None:
        if self._barrier is not None:
            self._barrier.meet()


class _Barrier:
    """Step counts of all ranks in a file that they share, 8 bytes each."""

    def __init__(self, state: ParallelState, timeout: float) -> None:
        self._state = state
        self._timeout = timeout
        fd = os.open(state.rendezvous, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, 8 * state.size)
            self._memory = mmap.mmap(fd, 8 * state.size)
        finally:
            os.close(fd)
        self._counts: Any = memoryview(self._memory).cast("q")
        self._steps = 0

    def meet(self) -> None:
        """Waits until all ranks take as many steps as this one.

        Raises:
            RuntimeError: some do not.
        """
        self._steps = step = self._steps + 1
        counts, rank = self._counts, self._state.rank
        counts[rank] = step
        deadline, nap = time.monotonic() + self._timeout, _FIRST_NAP
        while any(count < step for count in counts):
            if time.monotonic() > deadline:
                missing = [other for other, count in enumerate(counts) if count < step]
                raise RuntimeError(f"rank {rank} waited for step {step} of ranks {missing} for {self._timeout:g} s")
            time.sleep(nap)
            nap = min(nap * 1.5, _LAST_NAP)
        if step == 1 and rank == 0:
            os.unlink(self._state.rendezvous)  # noqa: PTH108 - all have it open

    def close(self) -> None:
        self._counts.release()
        self._memory.close()
