"""OpenTelemetry: one trace per request across all processes, and the metrics, both by OTLP. Without an endpoint nothing
of it is imported but this file, and whoever makes spans holds None."""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from services.common.errors import ConfigurationError
from services.common.settings import OrcaSettings

if TYPE_CHECKING:
    from services.common.telemetry.tracing import Tracing

SAMPLED = "01"


def is_sampled(traceparent: str) -> bool:
    """Whether a W3C trace context asks for its spans to be kept."""
    return traceparent.endswith("-" + SAMPLED)


def configure(settings: OrcaSettings, service: str, name: str, registry: CollectorRegistry) -> "Tracing | None":
    """Start to export traces, and what `registry` holds; None if there is nowhere to send them to. service: router,
    scheduler or worker; name: this process's. Raises ConfigurationError."""
    if not settings.otlp_endpoint:
        return None
    try:
        from services.common.telemetry.tracing import Tracing
    except ImportError as error:
        raise ConfigurationError(f"--otlp-endpoint needs the 'otel' extra: {error}") from None
    return Tracing(settings.otlp_endpoint, service, name, registry)
