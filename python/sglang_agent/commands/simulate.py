"""``simulate``: a recorded batch in virtual time, with the real scheduler."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_agent import policies

if TYPE_CHECKING:
    from sglang_agent.records import TrajectoryRecord
    from sglang_agent.simulate.fleet import RoutingPolicy
    from sglang_agent.simulate.script import TrajectoryScript
    from sglang_agent.simulate.settings import SimulationSettings
    from sglang_agent.simulate.sweep import Point

NAME = "simulate"
HELP = "Replay a trace in virtual time: real schedulers, router and gates, no GPU."
DEFAULT_COST_MODEL = "h20-tp4-ling-3.0-flash"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="trace or run folder")
    engine = parser.add_argument_group("workers and gateway")
    engine.add_argument("--workers", type=int, metavar="W", help="default 1")
    engine.add_argument(
        "--worker-urls",
        nargs="+",
        default=[],
        metavar="URL",
        help="of your deployment, as the gateway has them: they decide which worker is "
        "a label's home (default: worker-0 and so on)",
    )
    engine.add_argument(
        "--schedule-policy", default="fcfs", help="of each worker (default fcfs)"
    )
    engine.add_argument(
        "--routing-prefix-capacity",
        type=int,
        metavar="N",
        help="labels that routing-prefix keeps (default: the engine's)",
    )
    engine.add_argument(
        "--router-policy", default="lbch", help="of the gateway (default lbch)"
    )
    engine.add_argument(
        "--lbch-load-factor", type=float, default=1.25, help="alpha (default 1.25)"
    )
    engine.add_argument(
        "--ratio",
        default="profile",
        metavar="R|profile|default",
        help="state to KV memory; profile balances both pools for this trace "
        "(equation 6), default is the engine's own (default profile)",
    )
    engine.add_argument(
        "--max-states-per-path", type=int, default=1, help="default 1; -1: no limit"
    )
    engine.add_argument(
        "--server-args", default="", help="further flags of sglang.launch_server"
    )
    client = parser.add_argument_group("agent client")
    client.add_argument(
        "--sample-concurrency",
        default="auto",
        metavar="auto|CS",
        help="auto: the reference concurrency of equation 8 (default auto)",
    )
    client.add_argument(
        "--env-concurrency", type=int, metavar="CE", help="default: no limit"
    )
    client.add_argument(
        "--job-order", choices=policies.names(), default="caas", help="default caas"
    )
    client.add_argument("--caas-band-s", type=float, default=30.0, help="default 30")
    client.add_argument(
        "--caas-duration-bucket-s", type=float, default=1.0, help="default 1"
    )
    client.add_argument(
        "--no-environment",
        action="store_true",
        help="skip environment stages: an inference-only replay",
    )
    client.add_argument(
        "--max-new-tokens",
        default="4096",
        metavar="N|exact",
        help="the clients' limit, which admission counts with; exact: ask for the "
        "recorded lengths, as replay does (default 4096)",
    )
    what = parser.add_argument_group("simulation")
    what.add_argument(
        "--cost-model",
        default=DEFAULT_COST_MODEL,
        metavar="NAME|FILE",
        help=f"durations and cache geometry of a worker (default {DEFAULT_COST_MODEL})",
    )
    what.add_argument(
        "--cache-memory-gb",
        type=float,
        metavar="GIB",
        help="cache budget of a worker (default: the cost model's)",
    )
    what.add_argument(
        "--scale",
        type=Fraction,
        default=Fraction(1),
        help="share of trajectories, concurrency and worker size, like 1/8 (default 1)",
    )
    what.add_argument(
        "--time-limit-hours", type=float, help="give a batch up after virtual hours"
    )
    what.add_argument(
        "--sweep",
        nargs="+",
        metavar="NAME=V1,V2",
        help="simulate every combination, for instance ratio=profile,0.9 "
        "sample-concurrency=50,100 schedule-policy=fcfs,routing-prefix",
    )
    what.add_argument("--parallel", type=int, help="cells at once (default: CPUs)")
    what.add_argument(
        "--python",
        default=sys.executable,
        help="interpreter that has the patched SGLang",
    )
    what.add_argument("--output", type=Path, metavar="DIR", help="where to write files")
    what.add_argument("--json", action="store_true", help="print JSON, not a table")


def run(args: argparse.Namespace) -> int:
    """Simulate once or sweep; raises UsageError for a bad setting."""
    import msgspec

    from sglang_agent.errors import UsageError
    from sglang_agent.simulate.capacity import DEFAULT_RATIO
    from sglang_agent.simulate.errors import SimulationError
    from sglang_agent.simulate.sweep import grid, parse_axes
    from sglang_agent.simulate.workers import WorkerPool

    scripts, settings, model = read(args)
    make = policy_factory()
    ratios = {"profile": model[0], "default": DEFAULT_RATIO}
    axes = parse_axes(args.sweep or [], ratios)
    cells = list(grid(axes))
    for varied in cells:  # so that a bad value does not end the sweep half-way
        make(msgspec.structs.replace(settings, **varied))
    try:
        with WorkerPool(args.python) as pool:
            if axes:
                return _sweep(args, scripts, settings, make, model, cells, pool)
            part = settings.scaled(float(args.scale))
            return _once(args, scripts, part, make, pool)
    except SimulationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except FileNotFoundError as error:
        raise UsageError(f"--python: {args.python}; {error.strerror}") from error


def read(
    args: argparse.Namespace,
) -> tuple[Sequence[TrajectoryScript], SimulationSettings, tuple[float, int]]:
    """The scripts, the settings, and the capacity model's (ratio, concurrency).

    The scripts are the share that ``--scale`` asks for, the rest is of the whole.
    """
    import msgspec

    from sglang_agent.errors import UsageError
    from sglang_agent.simulate.capacity import (
        DEFAULT_RATIO,
        balanced_ratio,
        capacity,
    )
    from sglang_agent.simulate.cost_model import load_deployment
    from sglang_agent.simulate.script import mean_final_context, script_of
    from sglang_agent.simulate.settings import SimulationSettings
    from sglang_agent.simulate.workloads import share_of
    from sglang_agent.trace import read_trace

    scale = float(args.scale)
    if not 0 < scale <= 1:
        raise UsageError(f"--scale must be > 0 and <= 1, got {args.scale}")
    records = read_trace(args.trace)
    if not records:
        raise UsageError(f"trace: {args.trace} holds no trajectory")
    scripts = [script_of(r) for r in records]
    deployment = load_deployment(args.cost_model)
    if args.cache_memory_gb is not None:
        budget = args.cache_memory_gb * 2**30
        deployment = msgspec.structs.replace(deployment, cache_bytes=budget)
    context = mean_final_context(scripts)
    balanced = balanced_ratio(deployment, context)
    ratio = _ratio(args.ratio, balanced)
    reference = capacity(
        deployment, ratio or DEFAULT_RATIO, context
    ).reference_concurrency
    workers = len(args.worker_urls) or 1 if args.workers is None else args.workers
    concurrency = _concurrency(args.sample_concurrency, reference * workers)
    settings = SimulationSettings(
        deployment=deployment,
        sample_concurrency=concurrency,
        workers=workers,
        worker_names=tuple(args.worker_urls),
        schedule_policy=args.schedule_policy,
        routing_prefix_capacity=args.routing_prefix_capacity,
        router_policy=args.router_policy,
        lbch_load_factor=args.lbch_load_factor,
        ratio=ratio,
        env_concurrency=args.env_concurrency,
        job_order=args.job_order,
        caas_band_s=args.caas_band_s,
        caas_duration_bucket_s=args.caas_duration_bucket_s,
        bypass_environment=args.no_environment,
        max_new_tokens=_max_new_tokens(args.max_new_tokens),
        time_limit_s=args.time_limit_hours and args.time_limit_hours * 3600,
        max_states_per_path=args.max_states_per_path,
        server_args=shlex.split(args.server_args),
    )
    best_reference = capacity(deployment, balanced, context).reference_concurrency
    model = (balanced, max(1, best_reference * workers))
    return [script_of(r) for r in share_of(records, scale)], settings, model


def _ratio(text: str, balanced: float) -> float | None:
    from sglang_agent.errors import UsageError

    if text == "default":
        return None
    if text == "profile":
        return balanced
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio < float("inf"):
        raise UsageError(
            f"--ratio must be a number > 0, profile or default, got {text!r}"
        )
    return ratio


def _concurrency(text: str, reference: int) -> int:
    from sglang_agent.errors import UsageError

    if text == "auto":
        return reference
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--sample-concurrency must be auto or >= 1, got {text!r}")
    return int(text)


def _max_new_tokens(text: str) -> int | None:
    from sglang_agent.errors import UsageError

    if text == "exact":
        return None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--max-new-tokens must be exact or >= 1, got {text!r}")
    return int(text)


def policy_factory() -> Callable[[SimulationSettings], RoutingPolicy]:
    """What makes the routing policy of given settings, with the options it knows.

    Raises UsageError without the gateway's policies, and the result does if a policy or
    an option is not allowed.
    """
    from sglang_agent.errors import UsageError

    try:
        from sgl_router.policies import PolicyError, make_policy, policy_options
    except ModuleNotFoundError as error:
        raise UsageError(
            "simulate needs the gateway's policies: install sglang-agent[simulate]"
        ) from error

    def make(settings: SimulationSettings) -> RoutingPolicy:
        name = settings.router_policy
        given = {"load_factor": settings.lbch_load_factor, **settings.router_options}
        try:
            make_policy(name)  # an unknown name has no options to ask for
            allowed = policy_options(name)
            options = {k: v for k, v in given.items() if k in allowed}
            return make_policy(name, settings.names, **options)
        except PolicyError as error:
            raise UsageError(f"--router-policy: {error}") from error

    return make


def _once(
    args: argparse.Namespace,
    scripts: Sequence[TrajectoryScript],
    settings: SimulationSettings,
    make: Callable[[SimulationSettings], RoutingPolicy],
    pool: Any,
) -> int:
    import msgspec

    from sglang_agent.report import build_report, render_text
    from sglang_agent.report.files import write_report
    from sglang_agent.simulate.batch import simulate
    from sglang_agent.trace import TRACE_NAME, write_trace

    result = simulate(
        scripts,
        settings,
        lambda _: make(settings),
        pool,
        _progress(len(scripts)),
    )
    report = build_report(
        result.records,
        {
            "workers": settings.names,
            "simulated": True,
            "timed_out": result.timed_out,
            "settings": msgspec.to_builtins(settings),
            "pools": msgspec.to_builtins(result.pools),
            "schedulers": msgspec.to_builtins(result.workers),
        },
    )
    if args.output is not None:
        write_report(report, result.records, args.output)
        write_trace(args.output / TRACE_NAME, result.records)
    print(msgspec.json.encode(report).decode() if args.json else render_text(report))
    if result.timed_out:
        print("the time limit ended the batch", file=sys.stderr)
    return int(report.completed < report.samples)


def _progress(trajectories: int) -> Callable[[TrajectoryRecord], None]:
    """Prints a line whenever another tenth of the trajectories is done."""
    step = max(1, trajectories // 10)
    done = 0

    def count(record: TrajectoryRecord) -> None:
        nonlocal done
        done += 1
        if done % step == 0:
            minutes = record.ended_s / 60
            print(
                f"{done}/{trajectories} trajectories, {minutes:.1f} virtual minutes",
                file=sys.stderr,
            )

    return count


def _sweep(
    args: argparse.Namespace,
    scripts: Sequence[TrajectoryScript],
    settings: SimulationSettings,
    make: Callable[[SimulationSettings], RoutingPolicy],
    model: tuple[float, int],
    cells: Sequence[dict[str, Any]],
    pool: Any,
) -> int:
    from sglang_agent.simulate.advice import advice, describe
    from sglang_agent.simulate.heatmap import render_text
    from sglang_agent.simulate.sweep import sweep

    done = 0

    def show(point: Point) -> None:
        nonlocal done
        done += 1
        minutes = point.report.makespan_s / 60
        end = "time limit" if point.timed_out else f"{minutes:.1f} min"
        print(f"[{done}/{len(cells)}] {describe(point.varied)}: {end}", file=sys.stderr)

    points = sweep(
        scripts,
        settings,
        cells,
        make,
        pool,
        scale=float(args.scale),
        parallel=args.parallel,
        on_point=show,
    )
    marked = _model_marker(points, model)
    lines = advice(points, settings)
    if args.output is not None:
        _write_sweep(args.output, points, lines, marked)
    if args.json:
        print(_sweep_json(points, lines).decode())
    else:
        print(render_text(points, marked), *lines, sep="\n")
    return 0


def _model_marker(
    points: Sequence[Point], model: tuple[float, int]
) -> Callable[[Point], bool]:
    """Marks the cells nearest to the capacity model's ratio and concurrency."""

    def distance(point: Point) -> tuple[float, float]:
        ratio = point.varied.get("ratio", model[0])
        concurrency = point.varied.get("sample_concurrency", model[1])
        return (abs(ratio / model[0] - 1), abs(concurrency / model[1] - 1))

    nearest = min(map(distance, points))
    return lambda point: distance(point) == nearest


def _sweep_json(points: Sequence[Point], lines: Sequence[str]) -> bytes:
    import msgspec

    content = {
        "simulated": True,
        "points": [point._asdict() for point in points],
        "advice": lines,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1)


def _write_sweep(
    folder: Path,
    points: Sequence[Point],
    lines: Sequence[str],
    marked: Callable[[Point], bool],
) -> None:
    from sglang_agent.errors import UsageError
    from sglang_agent.simulate.heatmap import write_png

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_bytes(_sweep_json(points, lines))
    try:
        write_png(points, marked, folder / "sweep.png", "sweep")
    except UsageError as error:
        print(f"no picture: {error}", file=sys.stderr)
