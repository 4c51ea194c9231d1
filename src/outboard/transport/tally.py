"""Who came to a socket that listens by TCP, and who was turned away; no sockets here.

ZeroMQ tells of each connection when it is accepted and when it ends, and of each handshake whether it succeeded, but
not whose that was; nor does it tell of what is no handshake at all, such as a request of HTTP. So a success that may
be one of several connections' is kept as such until it is clear whose it was.
"""

from __future__ import annotations

__all__ = ["Tally"]


class Tally:
    """Counts the connections of one socket.

    Args:
        handshake: seconds after which a connection with no handshake is closed; one that is open for longer has had
            one.

    Attributes:
        came: connections whose handshake succeeded.
        gone: whether one of those has ended, as far as that is certain.
        wrong_key: handshakes that were refused for the key.
    """

    def __init__(self, handshake: float) -> None:
        self._handshake = handshake
        self._open: dict[int, float] = {}  # by descriptor, when it was accepted: those of whom nothing is known yet
        self._peers: set[int] = set()
        self._failed = False  # a handshake has, and the next connection to end is its
        self._unclear = 0  # successes of connections that were open and are not known as peers
        self._ended = 0  # connections that ended while there were such
        self._refused = 0
        self.came = 0
        self.gone = False
        self.wrong_key = 0

    def accepted(self, fd: int, now: float) -> None:
        """A connection was accepted."""
        self._open[fd] = now

    def succeeded(self, now: float) -> None:
        """A handshake succeeded."""
        self.came += 1
        self._unclear += 1
        self._settle(now)

    def failed(self, wrong_key: bool) -> None:
        """A handshake failed; that its connection ends is told next."""
        self.wrong_key += wrong_key
        self._failed = True

    def ended(self, fd: int, now: float) -> None:
        """A connection has ended."""
        failed, self._failed = self._failed, False
        if fd in self._peers:
            self._peers.discard(fd)
            self.gone = True
        elif self._open.pop(fd, None) is not None:
            if failed or not self._unclear:
                self._refused += 1
            else:
                self._ended += 1
        self._settle(now)

    def refused(self, now: float) -> int:
        """How many connections were none of ours; never too many, and exact once all handshakes are over."""
        self._settle(now)
        return self._refused + max(0, self._ended - self._unclear)

    def _settle(self, now: float) -> None:
        """Finds out whose the successes were, as far as that is clear."""
        if not self._unclear:
            return
        if self._unclear == len(self._open) + self._ended:  # all of them
            self.gone = self.gone or self._ended > 0
            self._peers.update(self._open)
            self._open.clear()
            self._unclear = self._ended = 0
            return
        for fd, since in list(self._open.items()):
            if self._unclear and now - since > self._handshake:
                del self._open[fd]
                self._peers.add(fd)
                self._unclear -= 1
        if not self._unclear:
            self._refused += self._ended
            self._ended = 0
        elif not self._open:
            self._refused += self._ended - self._unclear
            self.gone = True
            self._unclear = self._ended = 0
