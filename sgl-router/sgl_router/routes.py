"""Which paths are inference and which are the gateway's own."""

from __future__ import annotations

from dataclasses import dataclass

INFERENCE_PATHS = (
    "/generate",
    "/encode",
    "/classify",
    "/tokenize",
    "/detokenize",
    "/rerank",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/rerank",
    "/v1/score",
    "/v1/tokenize",
    "/v1/detokenize",
)
"""Paths passed to a worker under their own name in metrics; other /v1/ paths share one."""

CONTROL_PATHS = (
    "/",
    "/health",
    "/liveness",
    "/readiness",
    "/health_generate",
    "/metrics",
    "/v1/models",
    "/workers",
    "/get_loads",
    "/flush_cache",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/get_model_info",
)
"""Paths that the gateway answers itself."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a path goes; ``name`` is what metrics and logs call it."""

    name: str
    control: bool


OTHER_INFERENCE = Route("/v1/other", control=False)
WORKERS = Route("/workers/{id}", control=True)
UNKNOWN = Route("other", control=True)


class Routes:
    """Finds the route of a path; the number of distinct names is fixed."""

    def __init__(self) -> None:
        routes = [Route(path, control=False) for path in INFERENCE_PATHS]
        routes += [Route(path, control=True) for path in CONTROL_PATHS]
        self._exact = {route.name.encode(): route for route in routes}

    def find(self, path: bytes) -> Route:
        """The route of ``path`` (without a query)."""
        route = self._exact.get(path)
        if route is not None:
            return route
        if path.startswith(b"/workers/"):
            return WORKERS
        if path.startswith(b"/v1/"):
            return OTHER_INFERENCE
        return UNKNOWN
