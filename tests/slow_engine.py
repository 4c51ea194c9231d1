"""`mock`, after a while."""

from __future__ import annotations

import time

from outboard.engines.mock import MockEngine


class SlowEngine(MockEngine):
    """Takes so many seconds to start."""

    def __init__(self, seconds: float = 2.0) -> None:
        super().__init__(step_ms=2.0, max_model_len=4096)
        time.sleep(seconds)
