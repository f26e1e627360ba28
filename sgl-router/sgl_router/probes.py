"""Health probes and what workers report about themselves; request counts stay alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine
from typing import Any

import aiohttp

from sgl_router.config import HealthSettings
from sgl_router.workers import Worker, WorkerReport

log = logging.getLogger(__name__)

REPORT_EVERY = 6
"""Probes between two readings of /server_info."""


class BackgroundTasks:
    """Tasks that run beside the gateway; the failure of one is loud and ends all."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._started = asyncio.Event()
        self._runner = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with self._group:
                self._started.set()
                await asyncio.Event().wait()
        except* Exception as failures:
            log.critical("a background task failed: %r", failures.exceptions[0])
            raise

    async def started(self) -> None:
        """Wait until tasks can be started."""
        await self._started.wait()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside the others."""
        self._group.create_task(work)

    async def stop(self) -> None:
        """Cancel all tasks and wait for their end."""
        self._runner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._runner


class Prober:
    """Probes every registered worker in a task of its own."""

    def __init__(
        self,
        settings: HealthSettings,
        session: aiohttp.ClientSession,
        api_key: str | None = None,
    ) -> None:
        self.settings = settings
        self._session = session
        self._tasks: BackgroundTasks | None = None
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._hurry: dict[Worker, asyncio.Event] = {}

    def begin(self, tasks: BackgroundTasks) -> None:
        """Run the probes among ``tasks`` from now on."""
        self._tasks = tasks

    def watch(self, worker: Worker) -> None:
        """Probe ``worker`` from now until it is removed."""
        assert self._tasks is not None
        if self.settings.disabled:
            worker.set_healthy(True)
        self._hurry[worker] = asyncio.Event()
        self._tasks.start(self._watch(worker))

    def hurry(self, worker: Worker) -> None:
        """Probe ``worker`` soon: a request has just failed on it."""
        event = self._hurry.get(worker)
        if event is not None:
            event.set()

    async def _watch(self, worker: Worker) -> None:
        try:
            await self._come_up(worker)
            await self._stay_up(worker)
        finally:
            self._hurry.pop(worker, None)

    async def _come_up(self, worker: Worker) -> None:
        """Wait for the first good probe, and say once that it is awaited."""
        settings = self.settings
        waited_s = 0.0
        said = gave_up = settings.disabled
        while worker.registered and not worker.healthy:
            failure = await self.probe(worker)
            if failure is None:
                await self.read_report(worker)
                worker.set_healthy(True)
                log.info("worker %s is up", worker.url)
                return
            if not said:
                said = True
                log.warning(
                    "worker %s is unreachable (%s); it gets no request until "
                    "GET %s answers 200",
                    worker.url,
                    failure,
                    settings.endpoint,
                )
            await asyncio.sleep(settings.startup_interval_s)
            waited_s += settings.startup_interval_s
            if waited_s >= settings.startup_timeout_s > 0 and not gave_up:
                gave_up = True
                log.error(
                    "worker %s did not come up within %g s (%s)",
                    worker.url,
                    settings.startup_timeout_s,
                    failure,
                )

    async def _stay_up(self, worker: Worker) -> None:
        failures = successes = rounds = 0
        if self.settings.disabled:
            await self.read_report(worker)
        while worker.registered:
            await self._pause(worker)
            if self.settings.disabled or not worker.registered:
                continue
            failure = await self.probe(worker)
            if failure is None:
                failures, successes = 0, successes + 1
                rounds += 1
                if rounds % REPORT_EVERY == 0:
                    await self.read_report(worker)
            else:
                failures, successes = failures + 1, 0
            self._judge(worker, failures, successes, failure)

    def _judge(
        self, worker: Worker, failures: int, successes: int, failure: str | None
    ) -> None:
        settings = self.settings
        if worker.healthy and failures >= settings.failure_threshold:
            log.warning(
                "worker %s is unhealthy: %d probes failed (%s)",
                worker.url,
                failures,
                failure,
            )
            worker.set_healthy(False)
        elif not worker.healthy and successes >= settings.success_threshold:
            log.info("worker %s is healthy again", worker.url)
            worker.set_healthy(True)

    async def _pause(self, worker: Worker) -> None:
        """Sleep until the next probe is due, or a failed request asks for one."""
        settings = self.settings
        event = self._hurry[worker]
        interval_s = settings.interval_s
        if not worker.healthy:
            interval_s = min(interval_s, settings.startup_interval_s)
        try:
            async with asyncio.timeout(interval_s):
                await event.wait()
        except TimeoutError:
            return
        event.clear()
        await asyncio.sleep(min(0.05, interval_s))  # a burst of failures is one hint

    async def probe(self, worker: Worker) -> str | None:
        """One probe: None when the worker is healthy, else why not."""
        failure: str | None = None
        try:
            await self._get(worker, self.settings.endpoint, json=False)
        except TimeoutError:
            failure = f"no answer within {self.settings.timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            failure = _reason(error)
        worker.health_checks["failure" if failure else "success"] += 1
        return failure

    async def read_report(self, worker: Worker) -> None:
        """Ask the worker for its limits and models; what it lacks stays None."""
        info: Any = None
        models: Any = None
        for path in ("/server_info", "/get_server_info"):
            info = info or await self._get_quietly(worker, path)
        models = await self._get_quietly(worker, "/v1/models")
        worker.report = parse_report(info, models)

    async def _get_quietly(self, worker: Worker, path: str) -> Any:
        try:
            return await self._get(worker, path, json=True)
        except (aiohttp.ClientError, OSError, ValueError):  # TimeoutError is an OSError
            return None

    async def _get(self, worker: Worker, path: str, *, json: bool) -> Any:
        async with asyncio.timeout(self.settings.timeout_s):
            async with self._session.get(
                worker.url + path, headers=self._headers, ssl=worker.backend.tls or True
            ) as answer:
                answer.raise_for_status()
                return await answer.json(content_type=None) if json else None


def _reason(error: Exception) -> str:
    """Why a probe failed, in a few words."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"status {error.status}"
    cause = getattr(error, "os_error", error)
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno).lower()
    return str(cause) or type(cause).__name__


def parse_report(info: Any, models: Any) -> WorkerReport:
    """Read what a worker's /server_info and /v1/models hold, whatever they lack.

    Each data-parallel rank reports its own state; their reference concurrencies and
    running limits add up.
    """
    report = WorkerReport()
    if isinstance(info, dict):
        states = [s for s in info.get("internal_states") or [] if isinstance(s, dict)]
        report.reference_concurrency = _reference_concurrency(info, states)
        limits = [
            _whole(s.get("effective_max_running_requests_per_dp")) for s in states
        ]
        report.max_running_requests = sum(filter(None, limits)) or _whole(
            info.get("max_running_requests")
        )
    if isinstance(models, dict) and isinstance(models.get("data"), list):
        report.models = tuple(m for m in models["data"] if isinstance(m, dict))
    return report


def _reference_concurrency(
    info: dict[str, Any], states: list[dict[str, Any]]
) -> int | None:
    found = [
        _whole(source["hybrid_capacity"].get("reference_concurrency"))
        for source in (info, *states)
        if isinstance(source.get("hybrid_capacity"), dict)
    ]
    if found and isinstance(info.get("hybrid_capacity"), dict):
        return found[0]
    known = [value for value in found if value is not None]
    return sum(known) if known else None


def _whole(value: Any) -> int | None:
    """A whole number of at least 0, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    return int(value)
