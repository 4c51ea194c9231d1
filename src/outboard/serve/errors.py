"""Errors as the API tells them: OpenAI's body and status for each of Outboard's."""

from __future__ import annotations

import msgspec

from outboard.errors import (
    ClientClosedError,
    EngineDeadError,
    EngineRestartingError,
    EngineStalledError,
    InvalidRequestError,
    OutboardError,
    PromptTooLongError,
    RequestFailedError,
    SlowReaderError,
)
from outboard.serve.limits import LimitError

__all__ = ["ApiError", "to_api_error"]

_RETRY_AFTER = 1  # seconds; a restart takes about as long as loading does, which nobody here knows


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for the person who meets it.
        type: OpenAI's: "invalid_request_error", "rate_limit_error" or "server_error".
        code: what exactly, for programs; default "invalid_value" with status 400.
        param: the field that is to blame.
        retry_after: seconds after which it is worth another try.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = "invalid_value" if code is None and status == 400 else code
        self.param = param
        self.retry_after = retry_after

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Those that the answer has on account of it."""
        if self.retry_after is not None:
            return [(b"retry-after", b"%d" % self.retry_after)]
        if self.status == 401:
            return [(b"www-authenticate", b"Bearer")]
        # OpenAI's clients try again after every 5xx and 408 unless they are told not to.
        return [(b"x-should-retry", b"false")] if self.status >= 500 else []

    @property
    def body(self) -> bytes:
        """As JSON."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def to_api_error(error: Exception) -> ApiError:
    """What the API says of an exception. Of an engine core's death it has the cause, not the stderr."""
    match error:
        case ApiError():
            return error
        case LimitError():
            return ApiError(429, str(error), "rate_limit_error", error.code, retry_after=_RETRY_AFTER)
        case PromptTooLongError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case InvalidRequestError():
            return ApiError(400, str(error), code="invalid_request")
        case ClientClosedError():
            return ApiError(
                503, "the server is shutting down", "server_error", "shutting_down", retry_after=_RETRY_AFTER
            )
        case EngineDeadError():
            code = "engine_died" if error.retryable else "engine_dead"
            retry_after = _RETRY_AFTER if error.retryable else None
            return ApiError(503, error.reason, "server_error", code, retry_after=retry_after)
        case EngineRestartingError():
            return ApiError(503, str(error), "server_error", "engine_restarting", retry_after=_RETRY_AFTER)
        case EngineStalledError():
            return ApiError(503, _first_line(error), "server_error", "engine_stalled", retry_after=_RETRY_AFTER)
        case SlowReaderError():
            return ApiError(500, str(error), "server_error", "slow_reader")
        case RequestFailedError():
            return ApiError(500, str(error), "server_error", "request_failed")
        case OutboardError():
            return ApiError(500, _first_line(error), "server_error", "internal_error")
        case _:
            return ApiError(500, "internal error; the server's log has it", "server_error", "internal_error")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
