"""The report as a table for people."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_agent.report.model import Report, Spread


def render_text(report: Report, width: int | None = None, color: bool = False) -> str:
    """The report as text, ``width`` columns wide (default: the terminal's, or 100)."""
    out = StringIO()
    console = Console(
        file=out, width=width or 100, force_terminal=color, highlight=False
    )
    console.print(Group(*_parts(report)))
    return out.getvalue()


def _parts(report: Report) -> Iterable[RenderableType]:
    yield _summary(report)
    if report.workers:
        yield _workers(report)
    if report.by_server:
        yield _servers(report)
    if report.tail:
        yield _tail(report)
    for line in scheduler_lines(report):
        yield Text(line)
    for line in report.warnings:
        yield Text(f"warning: {line}", style="bold yellow")


def scheduler_lines(report: Report) -> list[str]:
    """What the workers' schedulers saw of the trajectory labels."""
    return [
        f"worker {worker}: scheduler saw {counts.get('labelled', 0)} labelled, "
        f"{counts.get('unlabelled', 0)} unlabelled requests"
        for worker, counts in report.run.get("routing_prefix", {}).items()
    ]


def _summary(report: Report) -> Table:
    table = Table(title="Batch", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in summary_rows(report):
        table.add_row(name, Text(value))
    return table


def summary_rows(report: Report) -> list[tuple[str, str]]:
    """The headline figures, as (name, text) pairs."""
    rows = [
        ("makespan", _makespan(report)),
        ("t90 / t95 / t100", _seconds(report.t90_s, report.t95_s, report.t100_s)),
        ("L5 / L10", _seconds(report.l5_s, report.l10_s)),
        ("samples", _samples(report)),
        ("limits", _limits(report)),
        ("turns", _turns(report)),
        ("tokens in / out", f"{report.input_tokens:,} / {report.output_tokens:,}"),
        ("reuse", _reuse(report)),
        ("mean in flight", _in_flight(report)),
        ("inference", _spread(report.inference_s)),
        ("opening", _spread(report.opening_s)),
        ("job queue", _spread(report.queue_s)),
        ("job service", _spread(report.service_s)),
        ("imbalance", _imbalance(report)),
    ]
    if report.scores.scored:
        scores = report.scores
        text = (
            f"mean {scores.mean:.4g} over {scores.scored}, {scores.unscored} unscored"
        )
        rows.insert(4, ("score", text))
    return [row for row in rows if row[1]]


def _makespan(report: Report) -> str:
    text = _seconds(report.makespan_s)
    if report.resumed and report.attempts:
        parts = report.attempts
        text += (
            f" (resumed: {parts.count} attempts, {parts.active_s:.1f} s at work, "
            f"{parts.gap_s:.1f} s between, {parts.wall_s:.1f} s in all)"
        )
    return text


def _samples(report: Report) -> str:
    failed = sum(report.failed.values())
    text = f"{report.completed} completed, {failed} failed"
    if failed:
        classes = ", ".join(f"{name} {n}" for name, n in report.failed.items())
        text += f" ({classes})"
    return text


def _limits(report: Report) -> str:
    """Both limits as set, with what was reached, and how often they were changed."""
    settings = report.run.get("settings", {})
    if "sample_concurrency" not in settings:
        return ""
    text = (
        f"CS {settings['sample_concurrency']} (peak {report.active_samples.peak}), "
        f"CE {settings['env_concurrency']} (peak {report.running_jobs.peak}), "
        f"job order {settings['job_order']}"
    )
    changes = len(report.run.get("changes", ()))
    return f"{text}; changed {changes} times while running" if changes else text


def _turns(report: Report) -> str:
    each = report.turns_per_trajectory
    return f"{report.turns} (median {each.p50:g}, most {each.max:g} a trajectory)"


def _reuse(report: Report) -> str:
    if report.reuse is None:
        return ""
    return f"{report.reuse:.1%}, new prefill {report.new_prefill_tokens:,} tokens"


def _in_flight(report: Report) -> str:
    kinds = {
        "inference": report.inflight_inference,
        "jobs running": report.running_jobs,
        "waiting": report.waiting_jobs,
        "samples": report.active_samples,
    }
    return ", ".join(
        f"{kind} {c.mean:.2f} (peak {c.peak})" for kind, c in kinds.items()
    )


def _imbalance(report: Report) -> str:
    values = {"requests β": report.beta, "output tokens γ": report.gamma}
    return ", ".join(f"{k} {v:.1%}" for k, v in values.items() if v is not None)


def _spread(values: Spread) -> str:
    if not values.count:
        return ""
    return (
        f"mean {values.mean:.3g} s, p50 {values.p50:.3g}, p90 {values.p90:.3g}, "
        f"p99 {values.p99:.3g}, max {values.max:.3g}"
    )


def _seconds(*values: float) -> str:
    return " / ".join(f"{value:.1f}" for value in values) + " s"


def _workers(report: Report) -> Table:
    table = Table(title="Workers")
    for heading in ("worker", "requests", "share", "output tokens", "reuse", "mean s"):
        table.add_column(heading, justify="left" if heading == "worker" else "right")
    for worker in report.workers:
        reuse = "" if worker.reuse is None else f"{worker.reuse:.1%}"
        table.add_row(
            worker.worker,
            str(worker.requests),
            f"{worker.request_share:.1%}",
            f"{worker.output_tokens:,}",
            reuse,
            f"{worker.inference_s.mean:.3g}",
        )
    return table


def _servers(report: Report) -> Table:
    table = Table(title="Environment jobs")
    headings = (
        "server",
        "jobs",
        "failed",
        "queue mean s",
        "p90",
        "service mean s",
        "p90",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for server in report.by_server:
        times = [
            f"{value:.3g}"
            for spread in (server.queue_s, server.service_s)
            for value in (spread.mean, spread.p90)
        ]
        table.add_row(server.server, str(server.jobs), str(server.failed), *times)
    return table


def _tail(report: Report) -> Table:
    table = Table(title="Who ended last, and why")
    for heading in ("sample", "ended at s", "turns", "why"):
        table.add_column(heading)
    for sample in report.tail:
        table.add_row(
            Text(sample.sample_id),
            f"{sample.ended_s:.1f}",
            str(sample.turns),
            Text(sample.why),
        )
    return table
