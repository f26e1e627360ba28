"""``replay``: a recorded batch against real serving."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_agent import policies

if TYPE_CHECKING:
    from sglang_agent.records import TrajectoryRecord
    from sglang_agent.replay import ReplaySettings

NAME = "replay"
HELP = "Replay a trace against a server or gateway: same stages, real inference."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="trace or run folder")
    parser.add_argument(
        "--base-url", required=True, help="gateway or worker, http://..."
    )
    parser.add_argument("--output", type=Path, required=True, help="the run's folder")
    parser.add_argument(
        "--api",
        choices=("generate", "chat"),
        default="generate",
        help="generate: token-exact on SGLang; chat: any OpenAI-compatible server, the "
        "trace must hold messages (default generate)",
    )
    parser.add_argument("--model", help="for chat (default: the one that is served)")
    parser.add_argument("--limit", type=int, help="only the first trajectories")
    parser.add_argument(
        "--sample-concurrency",
        required=True,
        type=int,
        metavar="CS",
        help="active at once",
    )
    parser.add_argument(
        "--env-concurrency",
        type=int,
        metavar="CE",
        help="environment jobs at once (default: no limit)",
    )
    parser.add_argument(
        "--job-order", choices=policies.names(), default="caas", help="default caas"
    )
    parser.add_argument("--caas-band-s", type=float, default=30.0, help="default 30")
    parser.add_argument(
        "--caas-duration-bucket-s", type=float, default=1.0, help="default 1"
    )
    parser.add_argument(
        "--no-environment", action="store_true", help="environment jobs take no time"
    )
    parser.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        help="stretch recorded environment durations (default 1)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=256,
        help="ids below it stand for recorded tokens (default 256)",
    )
    parser.add_argument(
        "--no-flush", action="store_true", help="leave the servers' caches as they are"
    )
    parser.add_argument(
        "--warmup", type=int, default=1, help="requests before the flush (default 1)"
    )
    parser.add_argument("--request-timeout-s", type=float, help="default: none")


def run(args: argparse.Namespace) -> int:
    """Replay and report; raises UsageError before anything is written."""
    import asyncio

    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from sglang_agent import config
    from sglang_agent.inference import workers
    from sglang_agent.records import Outcome
    from sglang_agent.replay import replay
    from sglang_agent.report import build_report, render_text
    from sglang_agent.report.files import write_report
    from sglang_agent.runfolder import RunFolder
    from sglang_agent.trace import TRACE_NAME, read_trace, write_trace

    base_url = config.parse_base_url(args.base_url)
    if args.limit is not None:
        config.at_least_one("--limit", args.limit)
    records = read_trace(args.trace)[: args.limit]
    before = await workers.discover(base_url)
    model = args.model or ""
    if args.api == "chat" and not model:
        model = await workers.find_model(base_url)
    settings = _settings(args, base_url, model, len(records))
    with RunFolder(args.output) as folder:
        done = await replay(records, settings, _say)
        after = await workers.discover_quietly(base_url)
        info = {
            "replayed": str(args.trace),
            "workers": [worker.url for worker in before],
            "routing_prefix": workers.counters_since(before, after),
        }
        report = build_report(done, info)
        write_trace(folder.path / TRACE_NAME, done)
        write_report(report, done, folder.path)
    print(render_text(report))
    return int(any(record.outcome is not Outcome.COMPLETED for record in done))


def _say(record: TrajectoryRecord) -> None:
    print(f"{record.label}: {record.outcome}", file=sys.stderr)


def _settings(
    args: argparse.Namespace, base_url: str, model: str, trajectories: int
) -> ReplaySettings:
    from sglang_agent import config
    from sglang_agent.errors import UsageError
    from sglang_agent.replay import ReplaySettings
    from sglang_agent.replay.conversations import FIRST_TOKEN

    config.at_least_one("--sample-concurrency", args.sample_concurrency)
    if args.env_concurrency is not None:
        config.at_least_one("--env-concurrency", args.env_concurrency)
    for flag, value in (
        ("--caas-band-s", args.caas_band_s),
        ("--caas-duration-bucket-s", args.caas_duration_bucket_s),
        ("--request-timeout-s", args.request_timeout_s),
    ):
        config.above_zero(flag, value)
    if args.vocab_size <= FIRST_TOKEN:
        raise UsageError(
            f"--vocab-size: {args.vocab_size}; must be greater than {FIRST_TOKEN}"
        )
    if args.time_scale < 0 or args.warmup < 0:
        raise UsageError(
            f"--time-scale: {args.time_scale:g}, --warmup: {args.warmup}; "
            "must be 0 or more"
        )
    return ReplaySettings(
        base_url=base_url,
        sample_concurrency=args.sample_concurrency,
        env_concurrency=args.env_concurrency or max(trajectories, 1),
        job_order=args.job_order,
        caas_band_s=args.caas_band_s,
        caas_duration_bucket_s=args.caas_duration_bucket_s,
        api=args.api,
        model=model,
        vocab_size=args.vocab_size,
        bypass_environment=args.no_environment,
        time_scale=args.time_scale,
        flush=not args.no_flush,
        warmup=args.warmup,
        request_timeout_s=args.request_timeout_s,
    )
