"""The HTTP side of both clients: label, retries, time limits, aborts.

Everything that leaves for a model goes through :meth:`HttpTransport.post`, which is
the one place that attaches the label.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec
import orjson
from yarl import URL

from sglang_agent.backoff import Backoff
from sglang_agent.clock import Clock, RealClock
from sglang_agent.inference import InferenceFailure, TurnRequest
from sglang_agent.labels import routing_headers

T = TypeVar("T")

WORKER_HEADER = "x-smg-routed-worker-id"
ABORT_LIMIT_S = 5.0
# What a second attempt may cure; any other 4xx would fail the same way again.
RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the transport; times in seconds.

    ``request_timeout_s`` bounds one attempt, None for no bound. ``max_retries`` counts
    attempts after the first.
    """

    base_url: str
    request_timeout_s: float | None = None
    connect_timeout_s: float = 10.0
    max_retries: int = 3
    retry_base_s: float = 1.0
    retry_max_s: float = 30.0
    api_key: str | None = None
    seed: int = 0


class Retryable(Exception):
    """An attempt failed in a way that another attempt may cure."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Refused(Retryable):
    """The server answered that it will not serve the attempt now: nothing runs."""


class HttpTransport:
    """A connection pool without a hidden cap, shared by all samples of a run."""

    def __init__(self, settings: HttpSettings, clock: Clock | None = None) -> None:
        self.settings = settings
        self.clock: Clock = clock or RealClock()
        self._backoff = Backoff(
            settings.retry_base_s, settings.retry_max_s, settings.seed
        )
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    def post(
        self, path: str, body: Mapping[str, Any], label: str | None = None
    ) -> aiohttp.client._RequestContextManager:
        """Send ``body``; the label is the given one or the running sample's."""
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self.settings.base_url + path)
        return self._open_session().post(
            url,
            data=orjson.dumps(body),
            headers=routing_headers(label),
        )

    async def call(self, path: str, body: Mapping[str, Any]) -> Any:
        """Ask something besides a turn (a judge, a summary) and return its JSON.

        Runs inside a sample and carries its label; retried like a turn. Raises
        :class:`InferenceFailure`.
        """

        async def attempt(number: int) -> Any:
            del number
            async with self.opened(self.post(path, body)) as response:
                return orjson.loads(await response.read())

        answer, _ = await self.with_retries(path, attempt)
        return answer

    async def with_retries(
        self, what: str, attempt: Callable[[int], Awaitable[T]]
    ) -> tuple[T, int]:
        """Call ``attempt(n)`` until it succeeds; return its result and n, from 1.

        Raises :class:`InferenceFailure` when it raised anything but
        :class:`Retryable`, or that once too often.
        """
        number = 1
        while True:
            try:
                return await attempt(number), number
            except Retryable as error:
                if number > self.settings.max_retries:
                    raise InferenceFailure(
                        f"{what}: {error} (attempt {number} of {number})"
                    ) from error
                delay_s = self._backoff.delay_s(number, error.retry_after_s)
            await self.clock.sleep(delay_s)
            number += 1

    async def ask_turn(
        self, request: TurnRequest, attempt: Callable[[str], Awaitable[T]]
    ) -> tuple[T, int]:
        """Call ``attempt(request id)`` until it succeeds; return how many it took.

        The turn keeps its id over all attempts, and an attempt that is given up, for
        whatever reason, is aborted at its worker. Raises :class:`InferenceFailure`.
        """

        async def one(number: int) -> T:
            rid = f"{request.turn_id}/{number}"
            try:
                return await attempt(rid)
            except (InferenceFailure, Refused):
                raise  # there was an answer: nothing is running there
            except BaseException:
                self.abort(rid, request.label)
                raise

        return await self.with_retries(request.turn_id, one)

    @asynccontextmanager
    async def opened(
        self, request: aiohttp.client._RequestContextManager
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Check the status, and sort transport errors by whether a retry may help."""
        try:
            async with request as response:
                await _check_status(response)
                yield response
        except TimeoutError as error:
            raise Retryable(f"{self.settings.base_url}: no answer in time") from error
        except orjson.JSONDecodeError as error:
            raise InferenceFailure(
                f"{self.settings.base_url}: the answer is no JSON"
            ) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise Retryable(f"{self.settings.base_url}: {_text(error)}") from error
        except aiohttp.ClientError as error:
            raise InferenceFailure(
                f"{self.settings.base_url}: {_text(error)}"
            ) from error

    def abort(self, rid: str, label: str) -> None:
        """Tell the worker to stop request ``rid``; returns at once, never raises."""
        task = asyncio.get_running_loop().create_task(self._abort(rid, label))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Let pending aborts go out, then close all connections."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_LIMIT_S)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _abort(self, rid: str, label: str) -> None:
        try:
            async with (
                asyncio.timeout(ABORT_LIMIT_S),
                self.post("/abort_request", {"rid": rid}, label) as response,
            ):
                await response.read()
        except (aiohttp.ClientError, TimeoutError):
            pass  # a worker that is gone generates nothing either

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            settings = self.settings
            headers = {"content-type": "application/json"}
            if settings.api_key is not None:
                headers["authorization"] = f"Bearer {settings.api_key}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),
                timeout=aiohttp.ClientTimeout(
                    total=settings.request_timeout_s,
                    sock_connect=settings.connect_timeout_s,
                ),
                headers=headers,
                # Looking for cookies costs more than the rest of a request's head.
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=2**18,
            )
        return self._session


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    detail = _detail(await response.read())
    reason = f"{response.url.path}: HTTP {response.status}{detail}"
    if response.status in RETRYABLE_STATUS:
        raise Refused(reason, _retry_after_s(response))
    raise InferenceFailure(reason)


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # the HTTP-date form; our own backoff is as good
        return 0.0


def _detail(body: bytes) -> str:
    """Return the server's own message, shortened; it may be any JSON or none."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message") if isinstance(error, dict) else error
    return f": {str(message)[:300]}" if message else ""


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
