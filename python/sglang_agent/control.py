"""Changing a run while it runs: limits and pauses, through a socket of its folder.

The socket is a Unix one that only its user can open; ``control.json`` in the run
folder says where it is. Every change is journalled and shown in the report.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
from aiohttp import web

from sglang_agent.actions import ActionScheduler
from sglang_agent.admission import AdmissionGate
from sglang_agent.errors import UsageError
from sglang_agent.gate import GateStatistics
from sglang_agent.runfolder import replace

CONTROL_NAME = "control.json"

Changed = Callable[[str, float | bool, float | bool], Awaitable[None]]
"""Hears of a setting's change: its name, the value before, the value after."""


class Wish(msgspec.Struct, forbid_unknown_fields=True):
    """What to change; None leaves a setting as it is."""

    sample_concurrency: int | None = None
    env_concurrency: int | None = None
    admission_paused: bool | None = None
    jobs_paused: bool | None = None


class Control:
    """The settings of a running batch that can be changed."""

    def __init__(
        self, admission: AdmissionGate, actions: ActionScheduler, changed: Changed
    ) -> None:
        self._admission = admission
        self._actions = actions
        self._changed = changed

    def status(self) -> dict[str, Any]:
        """Return the settings and what the gates hold."""
        return {
            "admission": _plain(self._admission.statistics()),
            "jobs": _plain(self._actions.statistics()),
            "running_jobs": [job._asdict() for job in self._actions.holders()],
        }

    async def apply(self, wish: Wish) -> None:
        """Change what is wished. Raises UsageError before anything is changed."""
        for name, value in (
            ("sample_concurrency", wish.sample_concurrency),
            ("env_concurrency", wish.env_concurrency),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{name}: {value}; must be a whole number >= 1")
        for gate, setting, attribute, value in (
            (
                self._admission,
                "sample_concurrency",
                "capacity",
                wish.sample_concurrency,
            ),
            (self._actions, "env_concurrency", "capacity", wish.env_concurrency),
            (self._admission, "admission_paused", "paused", wish.admission_paused),
            (self._actions, "jobs_paused", "paused", wish.jobs_paused),
        ):
            before = getattr(gate, attribute)
            if value is not None and value != before:
                setattr(gate, attribute, value)
                await self._changed(setting, before, value)


@contextlib.asynccontextmanager
async def serving(control: Control, folder: Path) -> AsyncIterator[None]:
    """Offer ``control`` on a socket named in ``folder`` while the body runs."""
    # A socket's path may have some 100 bytes, less than a run folder's can.
    with tempfile.TemporaryDirectory(prefix="sglang-agent-") as private:
        socket = Path(private) / "control"
        runner = web.AppRunner(_application(control), access_log=None)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(socket)).start()
            replace(folder / CONTROL_NAME, orjson.dumps({"socket": str(socket)}))
            yield
        finally:
            (folder / CONTROL_NAME).unlink(missing_ok=True)
            await runner.cleanup()


@contextlib.asynccontextmanager
async def serving_metrics(
    render: Callable[[], bytes], host: str, port: int
) -> AsyncIterator[int]:
    """Serve ``/metrics`` while the body runs; yields the port (0 takes a free one).

    Raises UsageError when the address cannot be used.
    """

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=render(), content_type="text/plain", charset="utf-8")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise UsageError(
                f"--metrics-port: {port}; {host} refuses it ({os.strerror(error.errno or 0)})"
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def ask(folder: Path, wish: Wish | None) -> dict[str, Any]:
    """Send a wish to the run in ``folder``; None only asks. Returns its status.

    Raises UsageError when nothing runs there or the wish is refused.
    """
    try:
        place = orjson.loads((folder / CONTROL_NAME).read_bytes())["socket"]
        connector = aiohttp.UnixConnector(place)
        async with aiohttp.ClientSession(connector=connector) as session:
            body = b"{}" if wish is None else msgspec.json.encode(wish)
            async with session.post("http://run/", data=body) as response:
                answer = orjson.loads(await response.read())
    except (OSError, aiohttp.ClientError) as error:
        raise UsageError(f"run: {folder}; nothing is running there") from error
    if "error" in answer:
        raise UsageError(answer["error"])
    status: dict[str, Any] = answer
    return status


def _application(control: Control) -> web.Application:
    async def change(request: web.Request) -> web.Response:
        try:
            await control.apply(msgspec.json.decode(await request.read(), type=Wish))
        except (UsageError, msgspec.MsgspecError) as error:
            return _json({"error": str(error)}, 400)
        return _json(control.status(), 200)

    app = web.Application()
    app.router.add_post("/", change)
    return app


def _plain(statistics: GateStatistics) -> dict[str, Any]:
    servers = {name: use._asdict() for name, use in statistics.by_server.items()}
    return {**statistics._asdict(), "by_server": servers}


def _json(body: Any, status: int) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), status=status, content_type="application/json"
    )
