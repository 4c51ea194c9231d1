"""Keeps a library from changing the stack on which a thread takes its signals."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["same_signal_stack"]


class _SignalStack(ctypes.Structure):
    """`stack_t`."""

    _fields_ = (("ss_sp", ctypes.c_void_p), ("ss_flags", ctypes.c_int), ("ss_size", ctypes.c_size_t))


@contextmanager
def same_signal_stack() -> Iterator[None]:
    """The block may give this thread another signal stack (sigaltstack(2)); behind it, it has the same as before.

    OpenVINO's CPU plugin brings one for whatever thread loads it, and frees it when it is unloaded. If another thread
    does that, freed memory remains the first one's signal stack, and the next signal of the process, such as Ctrl-C,
    ends it: Python takes all signals on that stack.
    """
    libc = ctypes.CDLL(None)
    before = _SignalStack()
    known = libc.sigaltstack(None, ctypes.byref(before)) == 0
    try:
        yield
    finally:
        if known:
            libc.sigaltstack(ctypes.byref(before), None)
