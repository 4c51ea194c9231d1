"""Who may ask: API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

__all__ = ["Keys"]

_SCHEME = b"bearer "


class Keys:
    """API keys.

    Args:
        keys: empty: everybody may ask.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def find(self, authorization: bytes) -> int | None:
        """Index of the key in an `Authorization` header; -1 where it is none of them; None where none is needed.

        All keys are compared, by digests of one length: the time tells nothing of them.
        """
        if not self._digests:
            return None
        shown = authorization[len(_SCHEME) :].strip() if authorization[: len(_SCHEME)].lower() == _SCHEME else b""
        digest = hashlib.sha256(shown).digest()
        found = -1
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = index
        return found
