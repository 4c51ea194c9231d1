"""Shared memory between a client and one engine core, both directions, and how the two find out whether it works.

    client       makes an arena (shm.py); INIT says where it is
    engine core  opens it, and with that allows the client to use it; makes its own, and writes into the client's where
    client       opens that one after READY, and with that allows the engine core to use it

Whatever of this fails, large arrays travel by frames, and nobody else notices.
"""

from __future__ import annotations

import logging
from typing import Self

from outboard.protocol.shm import DATA, GRANULE, ArenaAddress, SlotPool, SlotReader

__all__ = ["SharedMemory"]

logger = logging.getLogger("outboard.protocol")


class SharedMemory:
    """Both directions between a client and one engine core, as one of the two sees them.

    Attributes:
        pool: for what this side sends; None: shared memory is off.
        reader: for what the peer sends; None: shared memory is off, or the client has not attached yet.
    """

    def __init__(self, pool: SlotPool | None = None, reader: SlotReader | None = None) -> None:
        self.pool = pool
        self.reader = reader

    @classmethod
    def offer(cls, limit: int) -> Self:
        """The client's side, before there is an engine core. `limit` is in bytes and for each direction; 0: off."""
        try:
            return cls(SlotPool(limit) if limit >= GRANULE else None)
        except (OSError, ValueError) as error:
            return cls._off(error)

    @property
    def address(self) -> ArenaAddress | None:
        """What the engine core must know to join."""
        return None if self.pool is None else self.pool.address

    @classmethod
    def join(cls, address: ArenaAddress | None) -> Self:
        """The engine core's side. Where it cannot open the client's arena, both directions are off."""
        if address is None:
            return cls()
        try:
            reader = SlotReader(address)
            pool = SlotPool(address.length - DATA)
        except (OSError, ValueError) as error:
            return cls._off(error)
        if pool.address is not None:
            reader.announce(pool.address)
        return cls(pool, reader)

    def attach(self, pid: int) -> None:
        """Opens the engine core's arena, once that process is ready; until then it sends by frames."""
        if self.pool is None:
            return
        fd, key, length = self.pool.peer
        if not length:
            return
        try:
            self.reader = SlotReader(ArenaAddress(pid, fd, key, length))
        except OSError as error:
            self._off(error)

    def close(self) -> None:
        """The end of the epoch: reclaims all slots. Views that are still held stay valid. Idempotent."""
        if self.pool is not None:
            self.pool.close()
        if self.reader is not None:
            self.reader.close()

    @classmethod
    def _off(cls, error: Exception) -> Self:
        logger.info("large arrays travel by frames, not by shared memory: %s", error)
        return cls()
