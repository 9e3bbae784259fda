"""One tree of errors, one table. HTTP answers and metric labels are looked up from the classes here.

OrcaError
|-- InvalidRequest          400  the caller must change something
|   |-- ContextLengthError  400
|   |-- Unauthenticated     401
|   |-- BodyTooLarge        413
|   |-- RequestTimeout      408
|   |-- ModelNotFound       404
|   |-- StreamNotFound      404
|   |-- NotFound            404
|   |-- Conflict            409
|   `-- KeyReused           422
|-- Overloaded              429  try again later
|-- Unavailable             503  nothing here can serve it now
|   `-- StreamInterrupted   503  another router goes on with it
|-- GenerationFailed        500  it was accepted, then failed
|-- DeadlineExceeded        504  it did not end within the time that its caller gave
`-- ConfigurationError           a process cannot start: one line, exit code 2
"""

from typing import ClassVar


class OrcaError(Exception):
    """Base of all errors that a user may see. The message is for the user."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(OrcaError):
    status, kind, code = 400, "invalid_request_error", "invalid_request"


class ContextLengthError(InvalidRequest):
    code = "context_length_exceeded"


class Unauthenticated(InvalidRequest):
    status, code = 401, "invalid_api_key"


class BodyTooLarge(InvalidRequest):
    status, code = 413, "body_too_large"


class RequestTimeout(InvalidRequest):
    status, code = 408, "request_timeout"


class ModelNotFound(InvalidRequest):
    status, code = 404, "model_not_found"


class StreamNotFound(InvalidRequest):
    status, code = 404, "stream_not_found"


class NotFound(InvalidRequest):
    status, code = 404, "not_found"


class Conflict(InvalidRequest):
    status, code = 409, "conflict"


class KeyReused(InvalidRequest):
    status, code = 422, "idempotency_key_reused"


class Overloaded(OrcaError):
    status, kind, code = 429, "rate_limit_error", "overloaded"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(OrcaError):
    status, kind, code = 503, "server_error", "unavailable"


class StreamInterrupted(Unavailable):
    code = "stream_interrupted"


class GenerationFailed(OrcaError):
    status, kind, code = 500, "server_error", "generation_failed"


class DeadlineExceeded(OrcaError):
    status, kind, code = 504, "server_error", "deadline_exceeded"


class ConfigurationError(OrcaError):
    code = "configuration"
