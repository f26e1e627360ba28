"""What a user sees while a batch runs: a live panel, or plain lines without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sglang_agent.actions import ActionScheduler
from sglang_agent.admission import AdmissionGate
from sglang_agent.records import TrajectoryRecord
from sglang_agent.state import BatchState, Stage

HOLDING_SAMPLES_SHOWN = 5
PLAIN_INTERVAL_S = 10.0


class View(Protocol):
    """Shows a running batch. ``line`` may be called from any thread."""

    def line(self, text: str) -> None:
        """Show one line that stays."""

    def done(self, record: TrajectoryRecord) -> None:
        """Show that a sample is finished; its record is on disk by now."""

    async def run(self) -> None:
        """Show progress until cancelled."""


class Facts:
    """Reads the figures of a running batch from the gates and the state."""

    def __init__(
        self,
        state: BatchState,
        admission: AdmissionGate,
        actions: ActionScheduler,
        lag_s: Callable[[], float],
    ) -> None:
        self.state = state
        self.admission = admission
        self.actions = actions
        self.lag_s = lag_s

    def done(self) -> str:
        state = self.state
        done = state.restored + state.finished
        failed = state.finished - state.outcomes["completed"]
        parts = [f"{done}/{state.total} done"]
        if state.restored:
            parts.append(f"{state.restored} from before")
        if failed:
            parts.append(f"{failed} failed")
        return ", ".join(parts)

    def samples(self) -> str:
        gate = self.admission.statistics()
        text = f"{gate.running} active (CS {gate.capacity}), {gate.waiting} waiting"
        return text + (", admission paused" if gate.paused else "")

    def inference(self) -> str:
        state = self.state
        elapsed_s = max(state.clock.now() - state.started_s, 1e-9)
        rate = state.turns / elapsed_s
        return (
            f"{state.count(Stage.INFERENCE)} in flight,"
            f" {state.turns} turns, {rate:.1f} turns/s"
        )

    def jobs(self) -> str:
        gate = self.actions.statistics()
        text = f"{gate.running} running (CE {gate.capacity}), {gate.waiting} waiting"
        servers = [
            f"{name} {use.running}+{use.waiting}"
            for name, use in gate.by_server.items()
        ]
        if servers:
            text += f" [{', '.join(servers)}]"
        if gate.abandoned:
            text += f", {gate.abandoned} abandoned"
        return text + (", jobs paused" if gate.paused else "")

    def eta(self) -> str:
        eta_s = self.state.eta_s()
        return "ETA unknown" if eta_s is None else f"ETA {clock_text(eta_s)}"

    def elapsed(self) -> str:
        return clock_text(self.state.clock.now() - self.state.started_s)

    def lag(self) -> str:
        return f"loop lag {self.lag_s() * 1000:.0f} ms"

    def holding(self) -> list[str]:
        """Name the samples that the batch waits for most."""
        now_s = self.state.clock.now()
        return [
            f"{s.sample_id}: {s.stage.value} for {now_s - s.since_s:.1f} s"
            f" after {s.turns} turns"
            for s in self.state.oldest(HOLDING_SAMPLES_SHOWN)
        ]


def clock_text(seconds: float) -> str:
    """Write a duration as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def done_line(record: TrajectoryRecord) -> str:
    turns = sum(1 for stage in record.stages if hasattr(stage, "input_tokens"))
    took_s = record.ended_s - record.admitted_s
    text = f"done {record.sample_id}: {record.outcome.value}, {turns} turns"
    text += f", {took_s:.1f} s"
    return text + (f" ({record.error})" if record.error else "")


class PlainView:
    """One line per finished sample and one of state now and then."""

    def __init__(
        self, facts: Facts, console: Console, interval_s: float = PLAIN_INTERVAL_S
    ) -> None:
        self._facts = facts
        self._console = console
        self._interval_s = interval_s

    def line(self, text: str) -> None:
        # Past the console's rendering, which costs more than all else of a sample.
        self._console.file.write(f"{text}\n")
        self._console.file.flush()

    def done(self, record: TrajectoryRecord) -> None:
        self.line(done_line(record))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self.line(self.status())

    def status(self) -> str:
        facts = self._facts
        parts = (facts.done(), facts.samples(), facts.inference(), facts.jobs())
        return f"{facts.elapsed()}: " + "; ".join((*parts, facts.eta(), facts.lag()))


class LiveView:
    """A panel that is redrawn in place; failures stay above it."""

    def __init__(self, facts: Facts, console: Console, interval_s: float = 0.25):
        self._facts = facts
        self._console = console
        self._interval_s = interval_s

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def done(self, record: TrajectoryRecord) -> None:
        if record.error is not None:
            self.line(done_line(record))

    async def run(self) -> None:
        with Live(
            self.render(), console=self._console, auto_refresh=False, transient=True
        ) as live:
            while True:
                await asyncio.sleep(self._interval_s)
                live.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        facts, state = self._facts, self._facts.state
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold")
        rows.add_column()
        for name, text in (
            ("samples", facts.samples()),
            ("inference", facts.inference()),
            ("environment", facts.jobs()),
            ("time", f"{facts.elapsed()}, {facts.eta()}, {facts.lag()}"),
        ):
            rows.add_row(name, Text(text))
        for index, text in enumerate(facts.holding()):
            rows.add_row("" if index else "longest", Text(text))
        done = state.restored + state.finished
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=max(state.total, 1), completed=done, width=40),
            Text(facts.done(), style="bold"),
        )
        return Group(head, rows)


def make_view(facts: Facts, console: Console, plain: bool) -> View:
    """Choose by what the output is; ``plain`` forces lines."""
    if plain or not console.is_terminal:
        return PlainView(facts, console)
    return LiveView(facts, console)
