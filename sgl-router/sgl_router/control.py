"""The gateway's own routes: a small ASGI app off the data path."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sgl_router import metrics
from sgl_router.exchange import no_worker
from sgl_router.gateway import Gateway
from sgl_router.probes import parse_report
from sgl_router.workers import Worker, WorkerError, parse_worker_url

FAN_OUT_TIMEOUT_S = 30.0
"""Longest wait for one worker's answer to a request sent to all."""

FAN_OUT_PATHS = (
    "/flush_cache",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
)
"""POST routes that are sent on to every worker."""

WORKER_INFO_PATHS = (
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/get_model_info",
)
"""GET routes answered by one worker."""


def control_app(gateway: Gateway, session: aiohttp.ClientSession) -> Starlette:
    """The app behind every route that is not inference."""
    control = _Control(gateway, session)
    routes = [
        Route("/health", control.health),
        Route("/health_generate", control.readiness),
        Route("/liveness", control.health),
        Route("/readiness", control.readiness),
        Route("/metrics", control.metrics),
        Route("/v1/models", control.models),
        Route("/get_loads", control.loads),
        Route("/workers", control.list_workers, methods=["GET"]),
        Route("/workers", control.add_worker, methods=["POST"]),
        Route("/workers/{worker_id}", control.get_worker, methods=["GET"]),
        Route("/workers/{worker_id}", control.remove_worker, methods=["DELETE"]),
    ]
    routes += [Route(path, control.fan_out, methods=["POST"]) for path in FAN_OUT_PATHS]
    routes += [Route(path, control.worker_info) for path in WORKER_INFO_PATHS]
    return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})


async def unknown(request: Request, error: Exception) -> Response:
    """No such route, or not with this method."""
    status = getattr(error, "status_code", 404)
    message = f"{request.method} is not served on this path"
    return _error(status, "not_found", message)


def metrics_app(gateway: Gateway) -> Starlette:
    """The app on the Prometheus port."""

    async def scrape(request: Request) -> Response:
        return PlainTextResponse(metrics.render(gateway))

    return Starlette(routes=[Route("/metrics", scrape)])


def describe(
    worker: Worker, now_s: float, home_shares: Mapping[str, float]
) -> dict[str, Any]:
    """One worker as ``GET /workers`` shows it; ``home_shares`` are the policy's."""
    report = worker.report
    return {
        "id": worker.id,
        "url": worker.url,
        "model_id": report.models[0].get("id") if report.models else None,
        "worker_type": "regular",
        "connection_mode": "http",
        "runtime_type": "sglang",
        "status": _status(worker),
        "is_healthy": worker.healthy,
        "draining": worker.draining,
        "load": worker.in_flight,
        "circuit_breaker": str(worker.breaker.state(now_s)),
        "reference_concurrency": report.reference_concurrency,
        "max_running_requests": report.max_running_requests,
        "home_share": home_shares.get(worker.url),
    }


def _status(worker: Worker) -> str:
    if worker.draining:
        return "draining"
    return "ready" if worker.healthy else "not_ready"


class _Control:
    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self._gateway = gateway
        self._session = session

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("OK")

    async def readiness(self, request: Request) -> Response:
        gateway = self._gateway
        healthy = len(gateway.pool.loads)
        ready = gateway.ready and healthy > 0
        body = {
            "status": "ready" if ready else "not ready",
            "healthy_workers": healthy,
            "total_workers": len(gateway.pool),
        }
        return JSONResponse(body, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(metrics.render(self._gateway))

    async def models(self, request: Request) -> Response:
        pool = self._gateway.pool
        known = [
            model for worker in pool.by_url.values() for model in worker.report.models
        ]
        if known:
            return _model_list(known)
        if not pool.loads:
            return self._unavailable()
        return await self._models_for(request)

    async def _models_for(self, request: Request) -> Response:
        """Models of workers that show them only to clients with their key."""
        workers = tuple(self._gateway.pool.by_url.values())
        answers = await self._ask_all(workers, "GET", request, b"")
        shown = [body for status, body in answers if status == 200]
        if not shown:
            status, body = answers[0]
            return Response(body, status, media_type="application/json")
        return _model_list(model for body in shown for model in parse_models(body))

    async def loads(self, request: Request) -> Response:
        return JSONResponse(
            {
                "workers": [
                    {
                        "worker": worker.url,
                        "load": worker.in_flight,
                        "status": _status(worker),
                        "reference_concurrency": worker.report.reference_concurrency,
                        "max_running_requests": worker.report.max_running_requests,
                    }
                    for worker in self._gateway.pool
                ]
            }
        )

    async def list_workers(self, request: Request) -> Response:
        gateway = self._gateway
        shares = gateway.pool.policy.home_shares()
        now_s = gateway.now_s()
        workers = [describe(worker, now_s, shares) for worker in gateway.pool]
        stats = {
            "healthy_count": sum(worker["is_healthy"] for worker in workers),
            "total_load": sum(worker["load"] for worker in workers),
        }
        return JSONResponse({"workers": workers, "total": len(workers), "stats": stats})

    async def get_worker(self, request: Request) -> Response:
        worker = self._gateway.pool.get(request.path_params["worker_id"])
        if worker is None:
            return _not_found(request)
        shares = self._gateway.pool.policy.home_shares()
        return JSONResponse(describe(worker, self._gateway.now_s(), shares))

    async def add_worker(self, request: Request) -> Response:
        if (refused := self._unauthorized(request)) is not None:
            return refused
        try:
            given = await request.json()
        except ValueError:
            return _error(400, "bad_request", "body: not JSON")
        if not isinstance(given, dict) or not isinstance(given.get("url"), str):
            return _error(400, "bad_request", "url: missing; give http://HOST:PORT")
        api_key = given.get("api_key")
        if api_key is not None and not isinstance(api_key, str):
            return _error(400, "bad_request", "api_key: give a string")
        try:
            url = parse_worker_url(given["url"])
            worker = self._gateway.add_worker(url, api_key)
        except WorkerError as error:
            status = 409 if "already" in str(error) else 400
            return _error(status, "bad_worker", str(error))
        return JSONResponse(_accepted(worker), 202)

    async def remove_worker(self, request: Request) -> Response:
        if (refused := self._unauthorized(request)) is not None:
            return refused
        worker = self._gateway.pool.get(request.path_params["worker_id"])
        if worker is None:
            return _not_found(request)
        self._gateway.pool.remove(worker)
        return JSONResponse(_accepted(worker), 202)

    async def worker_info(self, request: Request) -> Response:
        """One healthy worker's answer, as it came."""
        gateway = self._gateway
        url = next(iter(gateway.pool.loads), None)
        if url is None:
            return self._unavailable()
        status, body = await self._ask(gateway.pool.by_url[url], "GET", request, b"")
        return Response(body, status, media_type="application/json")

    async def fan_out(self, request: Request) -> Response:
        """Send the request to every worker, draining ones included."""
        if (refused := self._unauthorized(request)) is not None:
            return refused
        body = await request.body()
        workers = tuple(self._gateway.pool)
        if not workers:
            return self._unavailable()
        answers = await self._ask_all(workers, "POST", request, body)
        results = [
            {"worker": worker.url, "status": status, "body": _readable(answer)}
            for worker, (status, answer) in zip(workers, answers, strict=True)
        ]
        failed = [result for result in results if result["status"] != 200]
        return JSONResponse(
            {"success": not failed, "workers": results}, 502 if failed else 200
        )

    async def _ask_all(
        self, workers: Sequence[Worker], method: str, request: Request, body: bytes
    ) -> list[tuple[int, bytes]]:
        """Every worker's answer, in their order."""
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._ask(worker, method, request, body))
                for worker in workers
            ]
        return [task.result() for task in asked]

    async def _ask(
        self, worker: Worker, method: str, request: Request, body: bytes
    ) -> tuple[int, bytes]:
        headers = {
            name: request.headers[name]
            for name in ("authorization", "content-type", "x-smg-routing-key")
            if name in request.headers
        }
        target = worker.url + request.url.path
        if request.url.query:
            target += f"?{request.url.query}"
        backend_key = self._gateway.settings.api_key
        if backend_key and "authorization" not in headers:
            headers["authorization"] = f"Bearer {backend_key}"
        try:
            async with asyncio.timeout(FAN_OUT_TIMEOUT_S):
                async with self._session.request(
                    method,
                    target,
                    data=body,
                    headers=headers,
                    ssl=worker.backend.tls or True,
                ) as answer:
                    return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            return 502, str(error).encode()

    def _unauthorized(self, request: Request) -> Response | None:
        key = self._gateway.settings.control_plane_api_key
        given = request.headers.get("authorization", "")
        if key is None or hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return None
        return _error(401, "unauthorized", "authorization: control-plane key needed")

    def _unavailable(self) -> Response:
        error = no_worker(len(self._gateway.pool))
        return _error(error.status, error.code, str(error), {"retry-after": "1"})


def _accepted(worker: Worker) -> dict[str, str]:
    return {
        "status": "accepted",
        "worker_id": worker.id,
        "url": worker.url,
        "location": f"/workers/{worker.id}",
    }


def _model_list(models: Iterable[dict[str, object]]) -> Response:
    """Each model once, as OpenAI lists them."""
    by_id: dict[object, dict[str, object]] = {}
    for model in models:
        by_id.setdefault(model.get("id"), model)
    return JSONResponse({"object": "list", "data": list(by_id.values())})


def parse_models(body: bytes) -> tuple[dict[str, object], ...]:
    """The models in a worker's answer; none when it is not a model list."""
    try:
        return parse_report(None, json.loads(body)).models
    except ValueError:
        return ()


def _readable(body: bytes) -> str:
    return body[:2000].decode("utf-8", "replace")


def _not_found(request: Request) -> Response:
    worker_id = request.path_params["worker_id"]
    return _error(
        404, "worker_not_found", f"worker id: {worker_id!r} is not registered"
    )


def _error(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> Response:
    detail = {"message": message, "type": code, "code": status}
    return JSONResponse({"type": "error", "error": detail}, status, headers)
