"""Where an engine core dumps its Python stack when it is asked to, also while native code holds the GIL."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal

__all__ = ["STACK_SIGNAL", "dump_stacks_on_signal"]

# No system library and no runtime that engines are known to use takes this one.
STACK_SIGNAL = signal.SIGRTMIN + 6


def dump_stacks_on_signal() -> int:
    """From now on `STACK_SIGNAL` writes the busy loop's stack to the end of a file in memory; its descriptor.

    Whoever asks opens it through /proc, notes its size, sends the signal, and reads on from there a moment later.
    Only the main thread's stack, which runs the loop and takes the signal: to read those of threads that run meanwhile
    crashes now and then.
    """
    fd = os.memfd_create("outboard-stacks", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False, chain=False)
    return fd
