"""Settings of a router."""

from pydantic import Field

from services.common.settings import DEFAULT_MODEL, OrcaSettings


class BatchSettings(OrcaSettings):
    """Files and batches. `orca up` takes the same flags and hands them on."""

    max_file_bytes: int = Field(16 << 20, ge=1024, le=100 << 20, description="largest file at /v1/files")
    tenant_files: int = Field(1000, ge=1, le=10_000, description="most files of one tenant")
    tenant_file_bytes: int = Field(128 << 20, ge=0, description="most bytes of one tenant's files; 0 is no limit")
    tenant_batches: int = Field(1000, ge=1, le=10_000, description="most batches of one tenant, finished ones included")
    file_days: float = Field(7, ge=1, le=365, description="days that files and finished batches are kept")
    batch_in_flight: int = Field(8, ge=1, le=1000, description="most requests of one batch in the system at a time")


class AdmissionSettings(BatchSettings):
    """What may come in. `orca up` takes the same flags and hands them on."""

    max_requests: int = Field(1000, ge=1, description="most requests in the system; more are refused with 429")
    max_tokens: int = Field(0, ge=0, description="most tokens that all requests may come to hold; 0 is no limit")
    tenant_requests: int = Field(0, ge=0, description="most requests of one tenant in the system; 0 is no limit")
    tenant_tokens: int = Field(0, ge=0, description="most tokens of one tenant's requests in the system; 0 is no limit")
    api_keys: str = Field("", description="file of tenants and the digests of their API keys; `orca key` makes one")
    allow_anonymous: bool = Field(False, description="serve anybody, also on other addresses than loopback")
    request_timeout: float = Field(0, ge=0, le=86_400, description="seconds that a request may take; 0 is no limit")
    resume_window: int = Field(120, ge=1, description="seconds that a finished request's stream can be read again")
    idempotency_window: int = Field(
        600, ge=1, description="and a stored response, or one that came with an Idempotency-Key"
    )


class RouterSettings(AdmissionSettings):
    """The HTTP front: validates, tokenizes, enqueues, streams. Holds no state of its own."""

    name: str = Field("router-0", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="name of this router")
    model: str = Field(DEFAULT_MODEL, description="the model whose tokenizer and chat template are used")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="HTTP port")
    listen_fd: int = Field(-1, ge=-1, description="an open listening socket to take instead of host and port")
    max_body_bytes: int = Field(4 << 20, ge=1024, description="largest request body")
    keep_alive: float = Field(10.0, gt=0, description="seconds of silence before a comment is sent on a stream")
    drain: float = Field(30.0, ge=0, description="seconds that open streams get to finish on SIGTERM")
    fleet_metrics: str = Field("", description="ports of other processes whose /metrics are shown with ours, by comma")
