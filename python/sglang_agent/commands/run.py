"""``run``: a batch of agent tasks, resumable, in the shortest wall time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_agent import policies

if TYPE_CHECKING:
    from sglang_agent.config import RunSettings
    from sglang_agent.inference.workers import Worker

NAME = "run"
HELP = "run a batch of agent tasks; the same command again resumes it"

EXECUTORS = ("local", "ray")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tasks", type=Path, help="tasks file: JSON lines, one a sample")
    parser.add_argument(
        "--base-url", required=True, help="gateway or worker, http://..."
    )
    parser.add_argument("--output", type=Path, required=True, help="the run's folder")
    parser.add_argument("--model", help="model name (default: the one that is served)")
    _add_count_arguments(parser)
    _add_concurrency_arguments(parser)
    _add_request_arguments(parser)
    _add_limit_arguments(parser)
    parser.add_argument(
        "--plain", action="store_true", help="plain lines instead of the live panel"
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        help="serve Prometheus metrics here; 0 takes a free port (default: do not)",
    )
    parser.add_argument(
        "--metrics-host", default="127.0.0.1", help="address for it (default 127.0.0.1)"
    )


def _add_count_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how many samples, not how many at once")
    group.add_argument(
        "--limit", type=int, metavar="SAMPLES", help="run only the first SAMPLES tasks"
    )
    group.add_argument(
        "--retry-failed",
        nargs="*",
        metavar="CLASS",
        help="run samples again whose earlier end was one of these failure classes"
        " (none named: any failure)",
    )


def _add_concurrency_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "how many at once; both limits hold for the whole run, over all tasks"
    )
    group.add_argument(
        "--sample-concurrency",
        "--max-concurrent",
        default="auto",
        metavar="auto|CS",
        help="samples active at once; auto sums the workers' reference concurrency"
        " (default auto)",
    )
    group.add_argument(
        "--env-concurrency",
        type=int,
        metavar="CE",
        help="environment jobs running at once (default: 2 per CPU core)",
    )
    group.add_argument(
        "--server-limit",
        action="append",
        default=[],
        metavar="NAME=JOBS[,RATE/s]",
        help="further limit of one environment server: jobs at once, starts per second",
    )
    group.add_argument(
        "--job-order",
        choices=policies.names(),
        default="caas",
        help="order of waiting environment jobs (default caas)",
    )
    group.add_argument(
        "--caas-band-s", type=float, default=30.0, help="arrival band B, s (default 30)"
    )
    group.add_argument(
        "--caas-duration-bucket-s",
        type=float,
        default=1.0,
        help="bucket of the mean turn duration, s (default 1)",
    )
    _add_executor_arguments(group)


def _add_executor_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--env-executor",
        choices=EXECUTORS,
        default="local",
        help="where environments live: in this process's machine, or in actors on a Ray"
        " cluster under the same limits and order (default local)",
    )
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="of the cluster; auto: the one configured here (default: start one here)",
    )


def _add_request_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--tool-choice", help="auto, required or none; a task's own wins (default auto)"
    )
    group.add_argument("--temperature", type=float, help="default: the server's")
    group.add_argument("--top-p", type=float, help="default: the server's")
    group.add_argument(
        "--stream",
        action="store_true",
        help="stream answers, to know first-token times",
    )
    group.add_argument(
        "--max-retries",
        type=int,
        default=3,
        help="attempts after the first for a request that may still succeed (default 3)",
    )
    group.add_argument(
        "--retry-base-s", type=float, default=1.0, help="first backoff, s (default 1)"
    )
    group.add_argument(
        "--sample-retries",
        type=int,
        default=0,
        help="starts after the first for a sample that failed by its environment or"
        " inference (default 0)",
    )
    group.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the API key"
    )
    group.add_argument(
        "--seed", type=int, default=0, help="of backoff jitter (default 0)"
    )


def _add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits; a task's own win")
    group.add_argument("--max-turns", type=int, help="inference turns of a sample")
    group.add_argument("--max-output-tokens", type=int, help="tokens of one answer")
    group.add_argument(
        "--request-timeout-s",
        type=float,
        help="one attempt of a request (default none)",
    )
    group.add_argument(
        "--sample-timeout-s", type=float, help="a sample from admission (default none)"
    )
    group.add_argument(
        "--env-timeout-s",
        type=float,
        default=300.0,
        help="one tool call, queueing not counted (default 300)",
    )
    group.add_argument(
        "--env-queue-timeout-s",
        type=float,
        help="a job's wait for a slot (default none)",
    )
    group.add_argument(
        "--grace-s",
        type=float,
        default=10.0,
        help="time to obey a cancellation or to close (default 10)",
    )
    group.add_argument(
        "--stall-warning-s",
        type=float,
        default=120.0,
        help="warn when nothing moved for so long (default 120)",
    )


def run(args: argparse.Namespace) -> int:
    """Check everything, then run; raises UsageError before anything is written."""
    import asyncio

    from sglang_agent.garbage import rare_collections

    with rare_collections():
        return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from sglang_agent import config, tasks
    from sglang_agent.errors import UsageError
    from sglang_agent.inference import workers
    from sglang_agent.launch import Run, plan_task, split_done
    from sglang_agent.runfolder import RunFolder

    if args.limit is not None:
        config.at_least_one("--limit", args.limit)
    base_url = config.parse_base_url(args.base_url)
    api_key = _api_key(args.api_key_env)
    retry_failed = _failure_classes(args.retry_failed)
    found_tasks = tasks.load(args.tasks)[: args.limit]
    found_workers = await workers.discover(base_url)
    model = args.model or await workers.find_model(base_url)
    settings = _settings(args, base_url, model, found_workers, retry_failed)
    with RunFolder(args.output) as folder:
        folder.check_content(settings)
        history = folder.history()
        plans = [plan_task(task, settings) for task in found_tasks]
        todo, done = split_done(plans, history, retry_failed)
        console = Console()
        if history.torn_bytes:
            console.print(
                f"warning: {folder.journal}: the last record is torn"
                f" ({history.torn_bytes} bytes); its sample runs again",
                markup=False,
                highlight=False,
            )
        run = Run(
            settings=settings,
            folder=folder,
            history=history,
            todo=todo,
            records=done,
            console=console,
            plain=args.plain,
            workers=found_workers,
            api_key=api_key,
        )
        try:
            return await run.execute()
        except OSError as error:
            raise UsageError(f"--output: {args.output}; {error.strerror}") from error


def _settings(
    args: argparse.Namespace,
    base_url: str,
    model: str,
    found: list[Worker],
    retry_failed: list[str],
) -> RunSettings:
    from sglang_agent import config

    samples, samples_origin = _sample_concurrency(args.sample_concurrency, found)
    jobs, jobs_origin = args.env_concurrency, "given"
    if jobs is None:
        jobs, jobs_origin = config.default_env_concurrency(), "2 per CPU core"
    sampling = {
        name: value
        for name, value in (("temperature", args.temperature), ("top_p", args.top_p))
        if value is not None
    }
    for flag, value in (
        ("--max-turns", args.max_turns),
        ("--max-output-tokens", args.max_output_tokens),
    ):
        if value is not None:
            config.at_least_one(flag, value)
    return config.check(
        config.RunSettings(
            tasks=str(args.tasks),
            output=str(args.output),
            base_url=base_url,
            content=config.ContentSettings(
                model=model,
                tool_choice=args.tool_choice,
                max_turns=args.max_turns,
                max_output_tokens=args.max_output_tokens,
                sampling=sampling,
            ),
            sample_concurrency=samples,
            sample_concurrency_origin=samples_origin,
            env_concurrency=jobs,
            env_concurrency_origin=jobs_origin,
            job_order=args.job_order,
            caas_band_s=args.caas_band_s,
            caas_duration_bucket_s=args.caas_duration_bucket_s,
            server_limits=config.parse_server_limits(args.server_limit),
            limit=args.limit,
            stream=args.stream,
            max_retries=args.max_retries,
            retry_base_s=args.retry_base_s,
            sample_retries=args.sample_retries,
            retry_failed=retry_failed,
            request_timeout_s=args.request_timeout_s,
            sample_timeout_s=args.sample_timeout_s,
            env_queue_timeout_s=args.env_queue_timeout_s,
            env_timeout_s=args.env_timeout_s,
            env_executor=_executor(args.env_executor),
            ray_address=args.ray_address,
            grace_s=args.grace_s,
            stall_warning_s=args.stall_warning_s,
            metrics_host=args.metrics_host,
            metrics_port=args.metrics_port,
            seed=args.seed,
        )
    )


def _sample_concurrency(text: str, found: list[Worker]) -> tuple[int, str]:
    from sglang_agent.errors import UsageError
    from sglang_agent.inference import workers

    if text == "auto":
        return workers.reference_concurrency(found), "auto: reference concurrency"
    try:
        return int(text), "given"
    except ValueError:
        raise UsageError(
            f"--sample-concurrency: {text!r}; must be auto or a whole number >= 1"
        ) from None


def _executor(name: str) -> str:
    from sglang_agent.environments import registry
    from sglang_agent.errors import UsageError

    if name != "local":
        try:
            registry.require(name)
        except ValueError as error:
            raise UsageError(f"--env-executor: {error}") from error
    return name


def _failure_classes(names: list[str] | None) -> list[str]:
    from sglang_agent.errors import UsageError
    from sglang_agent.records import Outcome

    known = [outcome.value for outcome in Outcome if outcome is not Outcome.COMPLETED]
    if names is None:
        return []
    for name in names:
        if name not in known:
            raise UsageError(
                f"--retry-failed: {name!r}; must be one of {', '.join(known)}"
            )
    return names or known


def _api_key(variable: str | None) -> str | None:
    import os

    from sglang_agent.errors import UsageError

    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UsageError(f"--api-key-env: {variable}; is not set or empty")
    return os.environ[variable]
