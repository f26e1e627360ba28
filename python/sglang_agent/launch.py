"""One attempt at a batch: what is left, the services, the views, the files.

``execute`` is the whole of ``python -m sglang_agent run`` after its flags are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console

from sglang_agent import tasks as task_file
from sglang_agent.actions import ActionScheduler
from sglang_agent.admission import AdmissionGate
from sglang_agent.backoff import Backoff
from sglang_agent.batch import run_batch
from sglang_agent.clock import RealClock
from sglang_agent.config import RunSettings
from sglang_agent.control import Control, serving, serving_metrics
from sglang_agent.conversation import ChatConversation, ConversationLimits
from sglang_agent.environments import registry
from sglang_agent.environments.base import Environment
from sglang_agent.garbage import collect_when_grown
from sglang_agent.gate import Gate
from sglang_agent.inference import workers
from sglang_agent.inference.chat import ChatClient
from sglang_agent.inference.http import HttpSettings, HttpTransport
from sglang_agent.inference.workers import Worker
from sglang_agent.jobs import JobLimits, JobRunner
from sglang_agent.journal import ChangeLine, History, Journal, attempt_times
from sglang_agent.labels import make_label
from sglang_agent.metrics import RunMetrics
from sglang_agent.progress import Facts, make_view
from sglang_agent.records import (
    InferenceStage,
    Outcome,
    ToolDefinition,
    TrajectoryRecord,
)
from sglang_agent.report import build_report, render_text
from sglang_agent.report.alarms import FlatReuse
from sglang_agent.report.files import REPORT_NAME, write_report
from sglang_agent.runfolder import RunFolder
from sglang_agent.sample import SamplePlan, Services
from sglang_agent.state import BatchState
from sglang_agent.tasks import Task
from sglang_agent.watch import LoopWatch, StallWatch

ALIVE_INTERVAL_S = 15.0

DONE, FAILED, INTERRUPTED = 0, 1, 130


def plan_task(task: Task, settings: RunSettings) -> SamplePlan:
    """Turn a line of the tasks file into something that can run."""
    content = settings.content
    key = task_file.identity(task, msgspec.to_builtins(content))
    label = make_label(task.id, key)
    limits = task.limits
    conversation_limits = ConversationLimits(
        max_turns=limits.max_turns or content.max_turns,
        max_output_tokens=limits.max_output_tokens or content.max_output_tokens,
        max_total_output_tokens=limits.max_total_output_tokens,
        max_context_tokens=limits.max_context_tokens,
        final_answer_turn=limits.final_answer_turn,
    )

    def converse(offered: Sequence[ToolDefinition]) -> ChatConversation:
        return ChatConversation(
            label,
            task.messages,
            offered if task.tools is None else task.tools,
            conversation_limits,
            tool_choice=task.tool_choice or content.tool_choice,
            sampling={**content.sampling, **task.sampling},
        )

    def environment() -> Environment:
        config = _placed(task.environment or {}, settings)
        return registry.create(config["type"], config, task.id)

    return SamplePlan(
        key=key,
        label=label,
        sample_id=task.id,
        environment=None if task.environment is None else environment,
        converse=converse,
        initial_messages=list(task.messages),
        job_limits=JobLimits(
            queue_timeout_s=settings.env_queue_timeout_s,
            operation_timeout_s=settings.env_timeout_s,
            tool_timeouts_s=limits.tool_timeouts_s,
        ),
        sample_timeout_s=limits.sample_timeout_s or settings.sample_timeout_s,
    )


def _placed(environment: dict[str, Any], settings: RunSettings) -> dict[str, Any]:
    """The environment where ``--env-executor`` wants it; a task's own word wins."""
    if settings.env_executor == "local" or environment["type"] == "ray":
        return environment
    return {
        "type": settings.env_executor,
        "environment": environment,
        "address": settings.ray_address,
    }


def split_done(
    plans: Sequence[SamplePlan], history: History, retry_failed: Sequence[str]
) -> tuple[list[SamplePlan], dict[str, TrajectoryRecord]]:
    """Return the plans still to run and the records of those that are not."""
    kept = {
        plan.key: history.samples[plan.key]
        for plan in plans
        if plan.key in history.samples
        and history.samples[plan.key].outcome.value not in retry_failed
    }
    return [plan for plan in plans if plan.key not in kept], kept


@dataclass
class Run:
    """One attempt: settings and everything that lives as long as it."""

    settings: RunSettings
    folder: RunFolder
    history: History
    todo: list[SamplePlan]
    records: dict[str, TrajectoryRecord]
    console: Console
    plain: bool
    workers: list[Worker]
    api_key: str | None = None
    clock: RealClock = field(default_factory=RealClock)

    def __post_init__(self) -> None:
        settings = self.settings
        self.started_s = self.clock.now()
        self.restored = len(self.records)
        self.state = BatchState(
            len(self.todo) + self.restored, self.restored, self.clock
        )
        self.admission = AdmissionGate(settings.sample_concurrency, clock=self.clock)
        self.actions = ActionScheduler(
            settings.env_concurrency,
            settings.job_order,
            band_s=settings.caas_band_s,
            duration_bucket_s=settings.caas_duration_bucket_s,
            servers=settings.server_limits,
            grace_s=settings.grace_s,
            clock=self.clock,
        )
        self.journal = Journal(self.folder.journal, self.history, self.active_s)

    def active_s(self) -> float:
        """Return how long this attempt has run, in seconds."""
        return self.clock.now() - self.started_s

    async def execute(self) -> int:
        """Run what is left and write the results; returns the exit code."""
        self.console.print(self.start_line(), markup=False, highlight=False)
        (self.folder.path / REPORT_NAME).unlink(missing_ok=True)
        self.folder.write_config(self.settings)
        interrupted = False
        if self.todo:
            async with self.journal:
                interrupted = await self._run_batch()
                await self.journal.add_end("interrupted" if interrupted else "done")
        records = list(self.records.values())
        self.folder.write_trace(records)
        if interrupted:
            self.console.print(
                f"interrupted: {len(records)} of {self.state.total} samples are kept;"
                " the same command goes on",
                markup=False,
                highlight=False,
            )
            return INTERRUPTED
        await self._report(records)
        failed = any(r.outcome is not Outcome.COMPLETED for r in records)
        return FAILED if failed else DONE

    def start_line(self) -> str:
        settings = self.settings
        text = (
            f"{self.state.total} samples,"
            f" CS={settings.sample_concurrency}"
            f" ({settings.sample_concurrency_origin}),"
            f" CE={settings.env_concurrency} ({settings.env_concurrency_origin}),"
            f" job order {settings.job_order}, model {settings.content.model},"
            f" {len(self.workers)} worker(s)"
        )
        if self.restored:
            text += f"; {self.restored} done before, {len(self.todo)} to run"
        return text

    async def _run_batch(self) -> bool:
        """Run the samples left; True when the user interrupted."""
        async with AsyncExitStack() as stack:
            services = await self._services(stack)
            await self._observe(stack)
            batch = asyncio.create_task(
                run_batch(self.todo, services, self.admission, self._sink)
            )
            with self._stopping_on_signals(batch) as stopped:
                try:
                    await batch
                except asyncio.CancelledError:
                    if not stopped:
                        raise
            return bool(stopped)

    async def _observe(self, stack: AsyncExitStack) -> None:
        """Start everything that looks on: view, watchdogs, metrics, control."""
        settings = self.settings
        loop_watch = LoopWatch(self._say)
        stall_watch = StallWatch(
            self.state,
            self.admission,
            self.actions,
            self._say,
            settings.stall_warning_s,
        )
        facts = Facts(self.state, self.admission, self.actions, loop_watch.lag_s)
        self._view = make_view(facts, self.console, self.plain)
        stack.enter_context(_logging_to(self._say))
        self._reuse = FlatReuse()
        self._metrics = RunMetrics(facts, loop_watch, stall_watch, self._reuse)
        if settings.metrics_port is not None:
            port = await stack.enter_async_context(
                serving_metrics(
                    self._metrics.render, settings.metrics_host, settings.metrics_port
                )
            )
            self._say(f"metrics: http://{settings.metrics_host}:{port}/metrics")
        control = Control(self.admission, self.actions, self._changed)
        await stack.enter_async_context(serving(control, self.folder.path))
        await stack.enter_async_context(loop_watch)
        for work in (
            self._view.run(),
            self._beat(),
            stall_watch.run(),
            collect_when_grown(),
        ):
            await stack.enter_async_context(_background(work))

    async def _services(self, stack: AsyncExitStack) -> Services:
        settings = self.settings
        transport = HttpTransport(
            HttpSettings(
                base_url=settings.base_url,
                request_timeout_s=settings.request_timeout_s,
                max_retries=settings.max_retries,
                retry_base_s=settings.retry_base_s,
                api_key=self.api_key,
                seed=settings.seed,
            ),
            self.clock,
        )
        client = ChatClient(transport, settings.content.model, stream=settings.stream)
        stack.push_async_callback(client.close)
        stack.push_async_callback(registry.close_shared)
        backoff = Backoff(settings.retry_base_s, 30.0, settings.seed)
        return Services(
            inference=client,
            jobs=JobRunner(self.actions, backoff),
            state=self.state,
            # Times go on from where the attempts before stopped, gaps left out.
            origin_s=self.started_s - self.history.active_s,
            # Hundreds of servers started together would starve each other.
            starts=Gate(settings.env_concurrency, clock=self.clock),
            close_timeout_s=settings.grace_s,
            sample_retries=settings.sample_retries,
            turn_done=self._watch_reuse,
        )

    def _watch_reuse(self, turn: InferenceStage) -> None:
        alarm = self._reuse.observe(turn)
        if alarm is not None:
            self._say(f"warning: {alarm}")

    async def _sink(self, plan: SamplePlan, record: TrajectoryRecord) -> None:
        await self.journal.add_sample(plan.key, record)
        self.records[plan.key] = record
        self._metrics.observe(record)
        self._view.done(record)

    def _say(self, text: str) -> None:
        self._view.line(text)

    async def _changed(
        self, setting: str, before: float | bool, after: float | bool
    ) -> None:
        at_s = self.history.active_s + self.active_s()
        self._say(f"{setting} changed from {before} to {after}")
        await self.journal.add_change(ChangeLine(setting, before, after, at_s))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_INTERVAL_S)
            await self.journal.add_alive()

    @contextlib.contextmanager
    def _stopping_on_signals(self, batch: asyncio.Task[None]) -> Iterator[list[int]]:
        """First signal: stop samples, close environments. Second: stop at once."""
        loop = asyncio.get_running_loop()
        received: list[int] = []

        def stop(number: int) -> None:
            received.append(number)
            if len(received) > 1:
                os._exit(INTERRUPTED)  # the journal needs no goodbye
            self._say("stopping: closing environments; once more to stop at once")
            batch.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            yield received
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _report(self, records: list[TrajectoryRecord]) -> None:
        report = build_report(records, await self._run_info())
        paths = write_report(report, records, self.folder.path)
        self.console.print(
            render_text(report, self.console.width), markup=False, highlight=False
        )
        self.console.print(
            f"run folder: {self.folder.path} ({len(paths)} report files)",
            markup=False,
            highlight=False,
        )

    async def _run_info(self) -> dict[str, Any]:
        history = self.folder.history()
        after = await workers.discover_quietly(self.settings.base_url)
        gate = self.actions.statistics()
        return {
            "settings": msgspec.to_builtins(self.settings),
            "attempts": attempt_times(history),
            "restored": self.restored,
            "changes": msgspec.to_builtins(history.changes),
            "workers": [worker.url for worker in self.workers],
            "routing_prefix": workers.counters_since(self.workers, after),
            "peak_active": self.admission.statistics().peak_running,
            "peak_jobs": gate.peak_running,
            "abandoned_jobs": [job._asdict() for job in self.actions.abandoned],
        }


class _Lines(logging.Handler):
    """Passes log records on as lines of the view."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextlib.contextmanager
def _logging_to(say: Callable[[str], None]) -> Iterator[None]:
    """Show what our modules log (never prompts or tool output) while a batch runs."""
    logger, handler = logging.getLogger("sglang_agent"), _Lines(say)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.asynccontextmanager
async def _background(work: Any) -> AsyncIterator[None]:
    """Keep a coroutine running beside the body; its own failure is raised."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
