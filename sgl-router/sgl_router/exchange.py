"""One request and its answer: from admission to the last byte, retries included.

The count of the picked worker is taken at selection and given back exactly once, in
:meth:`Exchange._release`, whatever ends the attempt.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from sgl_router.prompt import prompt_text
from sgl_router.upstream import Backend, UpstreamConnection
from sgl_router.wire.body import JOIN_BYTES, BodyBytes, ChunkedBody, Framer, frame, rest
from sgl_router.wire.errors import MessageError
from sgl_router.wire.request import RequestHead
from sgl_router.wire.response import ResponseHead

if TYPE_CHECKING:
    from sgl_router.client import ClientConnection
    from sgl_router.gateway import Gateway
    from sgl_router.routes import Route
    from sgl_router.workers import Worker

RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
"""Answers after which another worker is asked."""

BUSY = frozenset({408, 429})
"""Answers that say nothing bad about a worker."""

CLIENT_GONE = 499
"""Status under which a request is counted whose client left first."""


class Exchange:
    """One request in the gateway.

    Attributes:
        head: the request's head.
        content_length: bytes of its body when it gave a length.
        client: the connection it came on.
        label: the trajectory label, None without a valid one.
        connection: what carries the attempt under way, once it has been sent.
        worker: the worker it is counted on now; None before selection and after release.
        retryable: whether the body can still be sent again from the start.
        request_complete: whether the body's last byte has arrived.
        status: the status sent to the client, or 499 when it left first.
    """

    __slots__ = (
        "_connecting",
        "_framer",
        "_held",
        "_held_bytes",
        "_pending_head",
        "_retry_timer",
        "_stale_retried",
        "_waits_for_body",
        "admitted",
        "answer_started",
        "answered_s",
        "attempts",
        "backend",
        "client",
        "connection",
        "content_length",
        "dechunk",
        "error_code",
        "finished",
        "gateway",
        "head",
        "id_line",
        "keep_client",
        "label",
        "label_source",
        "last_received_s",
        "received_bytes",
        "request_complete",
        "retryable",
        "route",
        "sent_bytes",
        "started_s",
        "status",
        "text",
        "tried",
        "worker",
        "worker_url",
    )

    def __init__(
        self,
        gateway: Gateway,
        client: ClientConnection,
        head: RequestHead,
        content_length: int | None,
        route: Route,
    ) -> None:
        self.gateway = gateway
        self.client = client
        self.head = head
        self.content_length = content_length
        self.route = route
        self.keep_client = head.keep_alive
        self.id_line = b"x-request-id: %b\r\n" % (
            head.request_id or gateway.next_request_id()
        )
        self.started_s = self.last_received_s = time.monotonic()
        self.answered_s = 0.0
        self.label: str | None = None
        self.label_source = "none"
        self.text: str | None = None
        self.backend: Backend
        self.worker: Worker | None = None
        self.worker_url = self.error_code = ""
        self.tried: tuple[str, ...] = ()
        self.attempts = self.status = self.received_bytes = self.sent_bytes = 0
        self.admitted = self.answer_started = self.finished = False
        self.dechunk = self.request_complete = False
        self.retryable = True
        self._held: list[BodyBytes] = []
        self._held_bytes = 0
        self._waits_for_body = self._stale_retried = False
        self._pending_head = b""
        self._framer: Framer | None = None
        self.connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._retry_timer: asyncio.TimerHandle | None = None

    @property
    def has_body(self) -> bool:
        """Whether body bytes follow the head."""
        return self.head.chunked or bool(self.content_length)

    @property
    def request_id(self) -> bytes:
        """The id that worker, client and log are given."""
        return self.id_line[len(b"x-request-id: ") : -2]

    # The request: its body comes in, perhaps in pieces, perhaps not at all.

    def begin(self, data: bytes, body_at: int) -> None:
        """Check the request, take its first body bytes, and start when possible.

        The body begins at ``body_at`` of ``data``.
        """
        gateway, head = self.gateway, self.head
        gateway.exchanges.add(self)
        length = self.content_length or 0
        try:
            if length > gateway.settings.max_payload_bytes:
                raise self._too_large()
            if not self.route.control:
                gateway.labels.read_head(self)
                if gateway.may_read_body:
                    self._waits_for_body = gateway.reads_body(self)
            if len(data) - body_at == length and not head.chunked:
                self._take_whole(rest(data, body_at))
            elif head.chunked:
                self._start_body(data[body_at:])
            else:
                self._start_body(rest(data, body_at))
        except MessageError as error:
            self.refuse(error)
            return
        if not self._waits_for_body or self.request_complete:
            self._enter()

    def _take_whole(self, body: BodyBytes) -> None:
        """The body has come with the head, as most do."""
        self.received_bytes = self._held_bytes = len(body)
        self._held.append(body)
        self.request_complete = True
        if self._waits_for_body:
            self._read_body(self._payload())

    def _start_body(self, data: BodyBytes) -> None:
        self._framer = frame(self.head.chunked, self.content_length)
        if self.head.expect_continue:
            self.client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._add_body(self._framer, data)

    def request_data(self, data: bytes) -> None:
        """Take body bytes; whatever follows the body is a pipelined request.

        Raises:
            MessageError: the framing is broken or the body is too large.
        """
        self.last_received_s = time.monotonic()
        if self._framer is None:
            self.client.pipelined(data)
            return
        was_complete = self.request_complete
        self._add_body(self._framer, data)
        if self._waits_for_body and self.request_complete and not was_complete:
            self._enter()

    def _add_body(self, framer: Framer, data: BodyBytes) -> None:
        used = framer.feed(data)
        if used < len(data):
            self.client.pipelined(bytes(data[used:]))
            data = data[:used]
        if data:
            self._take(data)
        if framer.done and not self.request_complete:
            self.request_complete = True
            if self._waits_for_body:
                self._read_body(self._payload())

    def _take(self, data: BodyBytes) -> None:
        """Pass bytes on, and hold them while they may be needed again."""
        self.received_bytes += len(data)
        settings = self.gateway.settings
        if self.received_bytes > settings.max_payload_bytes:
            raise self._too_large()
        connection = self.connection
        if connection is not None:
            connection.transport.write(data)
            if not self.retryable:
                return
        elif self.answer_started:
            return
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > settings.max_buffered_bytes and not self._waits_for_body:
            if connection is not None:
                self._drop_held()
            else:
                self.client.pause_reading()

    def _too_large(self) -> MessageError:
        limit = self.gateway.settings.max_payload_bytes
        return MessageError(413, "payload_too_large", f"body: more than {limit} bytes")

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0
        self.retryable = False

    def _payload(self) -> bytes:
        """The held body without its framing."""
        body = b"".join(self._held)
        if not self.head.chunked:
            return body
        spans: list[bytes] = []
        ChunkedBody().feed(body, spans)
        return b"".join(spans)

    def _read_body(self, body: bytes) -> None:
        """Derive what routing needs from the whole body."""
        self.gateway.labels.read_body(self, body)
        if self.gateway.pool.policy.needs_text:
            self.text = prompt_text(body)

    def resume_request(self) -> None:
        """The worker reads again: go on reading from the client."""
        self.client.resume_reading()

    # Attempts: select, connect, send.

    def _enter(self) -> None:
        if self.route.control:
            self.backend = self.gateway.control_backend
            self._connect()
        elif self.gateway.admission.enter(self):
            self.start()

    def start(self) -> None:
        """Admitted: make the first attempt."""
        self.admitted = True
        self._attempt()

    def _attempt(self) -> None:
        pool, target = self.gateway.pool, self.head.target_worker
        if target is None:
            worker = pool.select(self.label, self.tried, self.text)
        else:
            worker = self._select_target(target)
        if worker is None:
            self.refuse(no_worker(len(pool)))
            return
        self.worker = worker
        self.worker_url = worker.url
        self.backend = worker.backend
        self.attempts += 1
        self._connect()

    def _attempt_again(self) -> None:
        self._retry_timer = None
        self._attempt()

    def _select_target(self, target: bytes) -> Worker | None:
        """The worker that the client asks for, for one attempt only."""
        if self.tried or not target.isdigit():
            return None
        return self.gateway.pool.select_index(int(target[:9]))

    def _connect(self, *, fresh: bool = False) -> None:
        connection = None if fresh else self.backend.take()
        if connection is not None:
            self._send(connection)
        else:
            loop = asyncio.get_running_loop()
            self._connecting = loop.create_task(self._open(self.backend))

    async def _open(self, backend: Backend) -> None:
        connection: UpstreamConnection | None = None
        reason = ""
        try:
            async with asyncio.timeout(self.gateway.settings.connect_timeout_s):
                connection = await backend.open()
        except OSError as error:  # TimeoutError and ssl.SSLError among them
            reason = "timed out" if isinstance(error, TimeoutError) else str(error)
        if self._connecting is not asyncio.current_task():  # given up meanwhile
            if connection is not None:
                backend.give_back(connection, time.monotonic())
            return
        self._connecting = None
        if connection is not None:
            self._send(connection)
        else:
            self._attempt_failed("connect", f"connecting failed: {reason}")

    def _send(self, connection: UpstreamConnection) -> None:
        self.connection = connection
        connection.attach(self)
        if self.client.write_paused_s:
            connection.pause_reading()
        lines = self._request_lines()
        if self._held_bytes <= JOIN_BYTES:
            connection.transport.write(b"".join((*lines, *self._held)))
        else:
            connection.transport.writelines((b"".join(lines), *self._held))
        if self._held_bytes > self.gateway.settings.max_buffered_bytes:
            self._drop_held()
        if self.client.reading_paused:
            self.client.resume_reading()

    def _request_lines(self) -> tuple[bytes, ...]:
        """The head as the worker gets it, in pieces."""
        head, backend, label = self.head, self.backend, self.label
        return (
            head.start,
            backend.host_lines,
            head.lines,
            framing(head.chunked, self.content_length),
            b"x-smg-routing-key: %b\r\n" % label.encode() if label is not None else b"",
            self.id_line if head.request_id is None else b"",
            b"\r\n" if head.authorized else backend.auth_end,
        )

    # Endings of an attempt.

    def _attempt_failed(self, stage: str, message: str, status: int = 502) -> None:
        """The worker gave no usable answer and the client has seen nothing yet."""
        worker = self.worker
        self.connection = None
        if worker is not None:
            self.gateway.worker_failed(worker, stage)
            message = f"worker {worker.url}: {message}"
        if worker is not None and self._may_retry(worker):
            self._schedule_retry(worker)
            return
        self.gateway.counts.retries_exhausted += self.attempts > 1
        self.refuse(MessageError(status, f"worker_{stage}", message))

    def _may_retry(self, worker: Worker) -> bool:
        """Whether the request can be sent again and somebody else can take it."""
        return (
            self.retryable
            and self.attempts < self.gateway.settings.retry_max_attempts
            and self.head.target_worker is None
            and any(
                url != worker.url and url not in self.tried
                for url in self.gateway.pool.loads
            )
        )

    def _schedule_retry(self, worker: Worker) -> None:
        self.tried += (worker.url,)
        self._release()
        delay_s = self.gateway.backoff_s(self.attempts)
        loop = asyncio.get_running_loop()
        self._retry_timer = loop.call_later(delay_s, self._attempt_again)

    def connection_failed(
        self, connection: UpstreamConnection, *, answered: bool
    ) -> None:
        """The worker closed the connection before its answer's head was whole."""
        self.connection = None
        stale = connection.reused and not answered and not self._stale_retried
        if stale and self.retryable:  # it closed an idle connection as we picked it
            self._stale_retried = True
            self._connect(fresh=True)
            return
        self._attempt_failed("head", "closed the connection before answering")

    def answer_broken(self, reason: str) -> None:
        """The answer cannot be read to its end."""
        if not self.answer_started:
            self._attempt_failed("head", reason)
            return
        self.connection = None
        self.error_code = "worker_body"
        if self.worker is not None:
            self.gateway.worker_failed(self.worker, "body")
        self._finish(time.monotonic())
        self.client.abort()

    # The answer.

    def interim_answer(self, head: ResponseHead) -> None:
        """Pass a 1xx on, except the 100 that the gateway has given itself."""
        if head.status != 100 and not self.head.http_10:
            self.client.write(b"%b\r\n%b\r\n" % (head.start, head.lines))

    def answer_head(
        self, head: ResponseHead, length: int | None, until_close: bool
    ) -> None:
        """Take the answer's head: pass it on, or ask another worker."""
        worker = self.worker
        if worker is not None:
            self.gateway.worker_answered(worker, head.status)
            if head.status in RETRYABLE and self._asks_another(worker):
                return
        self.answer_started = True
        self.answered_s = time.monotonic()
        self.status = head.status
        self._held.clear()
        self.retryable = False
        if until_close or self.gateway.closing or self.client.has_pipelined:
            self.keep_client = False
        if head.chunked and self.head.http_10:
            self.dechunk = True
            self.keep_client = False
        self._pending_head = self._answer_head_bytes(head, length)

    def _asks_another(self, worker: Worker) -> bool:
        """Whether another worker is asked instead of passing a failure on."""
        connection = self.connection
        assert connection is not None
        if not self._may_retry(worker):
            self.gateway.counts.retries_exhausted += self.attempts > 1
            return False
        self.connection = None
        connection.detach()
        self._schedule_retry(worker)
        return True

    def _answer_head_bytes(self, head: ResponseHead, length: int | None) -> bytes:
        connection = b"\r\n"
        if not self.keep_client:
            connection = b"connection: close\r\n\r\n"
        elif self.head.http_10:
            connection = b"connection: keep-alive\r\n\r\n"
        bare = self.dechunk or head.status == 204
        return b"".join(
            (
                head.start,
                self.backend.routed_lines,
                head.lines,
                b"" if bare else framing(head.chunked, length),
                b"" if head.has_request_id else self.id_line,
                connection,
            )
        )

    def answer_bytes(self, data: BodyBytes) -> None:
        """Pass bytes of the answer's body on."""
        self.sent_bytes += len(data)
        client = self.client
        if client.closed:
            return
        if not self._pending_head:
            client.transport.write(data)
            return
        head, self._pending_head = self._pending_head, b""
        if len(data) <= JOIN_BYTES:
            client.transport.write(b"".join((head, data)))
        else:
            client.transport.writelines((head, data))

    def answer_end(self, data: BodyBytes) -> None:
        """Pass the answer's last bytes on and finish."""
        self.answer_bytes(data)
        now_s = time.monotonic()
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.recycle(self.request_complete, now_s)
        self._finish(now_s)
        self.client.exchange_done(self.keep_client and self.request_complete, now_s)

    def pause_answer(self) -> None:
        """The client reads too slowly: stop reading from the worker."""
        if self.connection is not None:
            self.connection.pause_reading()

    def resume_answer(self) -> None:
        """Undo :meth:`pause_answer`."""
        if self.connection is not None:
            self.connection.resume_reading()

    # Endings of the exchange.

    def refuse(self, error: MessageError) -> None:
        """Answer with an error of the gateway's own, or cut an answer under way."""
        if self.finished:
            return
        self.error_code = error.code
        if not self.answer_started:
            self.status = error.status
        self._drop_connection()
        now_s = time.monotonic()
        self._finish(now_s)
        if self.answer_started:
            self.client.abort()
            return
        keep = self.keep_client and self.request_complete and not self.gateway.closing
        self.client.write_error(error, self.head, self.request_id, keep)
        self.client.exchange_done(keep, now_s)

    def client_gone(self) -> None:
        """The client left: stop the worker's work and give the count back."""
        if self.finished:
            return
        self.error_code = self.error_code or "client_gone"
        self.status = CLIENT_GONE
        self._drop_connection()
        self._finish(time.monotonic())

    def check_time(self, now_s: float, stall_s: float) -> None:
        """End the exchange if a stage has taken too long."""
        if now_s - self.started_s >= self.gateway.settings.request_timeout_s:
            if self.worker is not None and not self.answer_started:
                self.gateway.worker_failed(self.worker, "timeout")
            self.refuse(MessageError(504, "request_timeout", "request: took too long"))
        elif not self.request_complete and not self.client.reading_paused:
            if now_s - self.last_received_s >= stall_s:
                text = "request body: no bytes for too long"
                self.refuse(MessageError(408, "body_stalled", text))
        elif (
            self.client.write_paused_s and now_s - self.client.write_paused_s >= stall_s
        ):
            self.error_code = "client_stalled"
            self.client.abort()

    def _drop_connection(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()
        self._connecting = None  # a connection under way goes to the pool
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None

    def _release(self) -> None:
        """Give the worker's count back; the only place that does."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.release()

    def _finish(self, now_s: float) -> None:
        self.finished = True
        self.gateway.exchanges.discard(self)
        self._release()
        self._held.clear()
        self.gateway.finished(self, now_s)


def framing(chunked: bool, length: int | None) -> bytes:
    """The header line that frames a body."""
    if length is not None:
        return b"content-length: %d\r\n" % length
    return b"transfer-encoding: chunked\r\n" if chunked else b""


def no_worker(registered: int) -> MessageError:
    """The answer when nobody may take a request: try again soon."""
    return MessageError(
        503,
        "no_available_workers",
        f"no worker is available ({registered} registered); try again",
    )
