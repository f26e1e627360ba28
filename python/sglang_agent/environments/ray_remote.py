"""Environments on a Ray cluster: each lives in an actor, each job is an actor call.

Only where the work happens changes. Jobs still pass the run's own action scheduler
first, so the limit on jobs and their order hold for the whole cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import ray  # type: ignore[import-not-found, unused-ignore]
from ray.exceptions import RayError  # type: ignore[import-not-found, unused-ignore]

from sglang_agent.environments import registry
from sglang_agent.environments.base import (
    Environment,
    EnvironmentFailure,
    GradingEnvironment,
    RetryLater,
    UserEnvironment,
    UserTurn,
)
from sglang_agent.environments.blocking import run_blocking
from sglang_agent.environments.config import parse
from sglang_agent.records import Message, Operation, OperationResult, ToolDefinition


class RayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a ``ray`` environment.

    ``environment`` is the one to run, with its ``type``. ``address`` is the cluster's
    (``auto``: the one that is configured here; absent: one is started on this machine
    for the run). ``cpus`` and ``resources`` are what Ray reserves for each actor.
    """

    environment: dict[str, Any]
    address: str | None = None
    cpus: float = 0.0
    resources: dict[str, float] = {}

    def __post_init__(self) -> None:
        if not isinstance(self.environment.get("type"), str):
            raise ValueError("environment: must have a type")
        if self.cpus < 0:
            raise ValueError(f"cpus: {self.cpus:g}; must be 0 or more")


class Host:
    """The actor: one environment, and answers that survive the way back.

    Exceptions of ours are sent as data, because Ray wraps what an actor raises.
    """

    def __init__(self, config: dict[str, Any], sample_id: str) -> None:
        self._environment = registry.create(config["type"], config, sample_id)

    async def open(self) -> tuple[str, Any]:
        """The tools and, for each, the server it counts against."""
        return await _answer(self._open())

    async def run(self, operations: list[Operation]) -> tuple[str, Any]:
        return await _answer(self._environment.run(operations))

    async def score(self, messages: list[Message]) -> tuple[str, Any]:
        assert isinstance(self._environment, GradingEnvironment)
        return await _answer(self._environment.score(messages))

    async def next_user_turn(self) -> tuple[str, Any]:
        assert isinstance(self._environment, UserEnvironment)
        return await _answer(self._environment.next_user_turn())

    async def close(self) -> None:
        await self._environment.close()

    async def _open(self) -> tuple[list[ToolDefinition], dict[str, str | None]]:
        tools = list(await self._environment.open())
        names = [tool["function"]["name"] for tool in tools]
        return tools, {
            name: self._environment.server_of([Operation("", name, {})])
            for name in names
        }


class RayEnvironment:
    """The near end of a :class:`Host`."""

    def __init__(self, config: RayConfig, sample_id: str) -> None:
        self._config = config
        self._sample_id = sample_id
        self._actor: Any = None
        self._servers: dict[str, str | None] = {}

    async def open(self) -> Sequence[ToolDefinition]:
        """Connect to the cluster, place the actor, open the environment there."""
        await _connect(self._config.address)
        self._actor = await run_blocking(self._place)
        tools, self._servers = await self._call("open")
        found: list[ToolDefinition] = tools
        return found

    def server_of(self, operations: Sequence[Operation]) -> str | None:
        """As the environment said when it was opened."""
        names = [o.name for o in operations if o.name in self._servers]
        return self._servers[names[0]] if names else None

    async def run(self, operations: Sequence[Operation]) -> Sequence[OperationResult]:
        """Run the job where the environment is."""
        results: list[OperationResult] = await self._call("run", list(operations))
        return results

    async def close(self) -> None:
        """Close the environment and end its actor."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            with contextlib.suppress(RayError):
                await actor.close.remote()
        finally:
            ray.kill(actor)

    def _place(self) -> Any:
        options = {
            "num_cpus": self._config.cpus,
            "resources": self._config.resources or None,
        }
        host = ray.remote(Host).options(**options)
        return host.remote(self._config.environment, self._sample_id)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._actor is None:
            raise EnvironmentFailure("ray: the environment is closed")
        answer = getattr(self._actor, method).remote(*arguments)
        try:
            kind, value = await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except RayError as error:
            first = str(error).strip().splitlines()[0]
            raise EnvironmentFailure(f"ray: {type(error).__name__}: {first}") from error
        if kind == "later":
            raise RetryLater(*value)
        if kind == "failed":
            raise EnvironmentFailure(value)
        return value


class _Grading(RayEnvironment):
    async def score(self, messages: Sequence[Message]) -> float:
        return float(await self._call("score", list(messages)))


class _User(RayEnvironment):
    async def next_user_turn(self) -> UserTurn | None:
        turn: UserTurn | None = await self._call("next_user_turn")
        return turn


class _GradingUser(_Grading, _User):
    pass


# By whether the environment grades, and whether it has a user.
_NEAR_ENDS: dict[tuple[bool, bool], type[RayEnvironment]] = {
    (False, False): RayEnvironment,
    (True, False): _Grading,
    (False, True): _User,
    (True, True): _GradingUser,
}


class RayFactory:
    """Makes near ends that can do what the environment behind them can."""

    def create(self, config: Mapping[str, Any], sample_id: str) -> Environment:
        """Check the settings of both; the inner one is built here only for that."""
        settings = parse(config, RayConfig)
        kind = settings.environment["type"]
        inner = registry.create(kind, settings.environment, sample_id)
        grading = isinstance(inner, GradingEnvironment)
        user = isinstance(inner, UserEnvironment)
        return _NEAR_ENDS[grading, user](settings, sample_id)


FACTORY = RayFactory()


class _Connection:
    """The run's connection to a cluster, held by a thread of its own.

    A cluster that is started here dies with the thread that started it (Linux ends
    such children with their parent thread), so that thread waits for the end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, address: str | None) -> bool:
        """Connect unless there is a connection; whether this call made it."""
        with self._lock:
            if ray.is_initialized():
                return False
            ready: Future[None] = Future()
            self._closing.clear()
            self._thread = threading.Thread(
                target=self._hold, args=(address, ready), name="ray", daemon=True
            )
            self._thread.start()
            ready.result()
            return True

    def close(self) -> None:
        """Disconnect, and end a cluster that was started here."""
        with self._lock:
            self._closing.set()
            if self._thread is not None:
                self._thread.join()

    def _hold(self, address: str | None, ready: Future[None]) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if address is None:
            quiet["include_dashboard"] = False
        try:
            ray.init(address=address, **quiet)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        self._closing.wait()
        ray.shutdown()


_CONNECTION = _Connection()


async def _connect(address: str | None) -> None:
    if ray.is_initialized():
        return
    try:
        made = await run_blocking(_CONNECTION.open, address)
    except Exception as error:
        raise EnvironmentFailure(f"ray: cannot connect: {error}") from error
    if made:
        registry.on_close(_disconnect)


async def _disconnect() -> None:
    await run_blocking(_CONNECTION.close)


async def _answer(work: Any) -> tuple[str, Any]:
    try:
        return "ok", await work
    except RetryLater as later:
        return "later", (later.delay_s, later.reason)
    except EnvironmentFailure as error:
        return "failed", str(error)
