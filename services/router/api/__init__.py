"""The HTTP interface: wire models, routes, SSE framing, errors."""
