"""``calibrate``: a cost model for ``simulate`` from a real run's trace."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "calibrate"
HELP = "Fit the cost model of a worker to the request times of a real run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        type=Path,
        nargs="+",
        help="traces or folders of streamed runs of one deployment; two of different "
        "concurrency say more than one",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="cost model to write (JSON)"
    )
    parser.add_argument("--name", help="of the cost model (default: the file's name)")
    geometry = parser.add_argument_group(
        "cache of one worker; python -m sglang.plan_hybrid_cache and /server_info "
        "(hybrid_capacity) show these figures"
    )
    geometry.add_argument("--kv-bytes-per-token", type=float, required=True)
    geometry.add_argument("--state-bytes-per-slot", type=float, required=True)
    geometry.add_argument(
        "--cache-memory-gb", type=float, required=True, metavar="GIB", help="both pools"
    )
    geometry.add_argument(
        "--cache-strategy", choices=("no_buffer", "extra_buffer"), default="no_buffer"
    )
    geometry.add_argument("--page-size", type=int, default=1)
    geometry.add_argument("--chunked-prefill-tokens", type=int, default=8192)
    geometry.add_argument("--context-length-tokens", type=int, default=262_144)


def run(args: argparse.Namespace) -> int:
    """Write the cost model; raises UsageError when the trace says too little."""
    import msgspec

    from sglang_agent.errors import UsageError
    from sglang_agent.simulate.calibration import calibrate
    from sglang_agent.simulate.cost_model import Deployment
    from sglang_agent.trace import read_trace

    for flag in ("kv_bytes_per_token", "state_bytes_per_slot", "cache_memory_gb"):
        if not 0 < getattr(args, flag) < float("inf"):
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} must be > 0, got {getattr(args, flag):g}")
    found = calibrate(*map(read_trace, args.trace))
    source = ", ".join(trace.name for trace in args.trace)
    deployment = Deployment(
        name=args.name or args.output.stem,
        description=f"calibrated from {source}",
        passes=found.passes,
        request_overhead_s=found.overhead_s,
        kv_bytes_per_token=args.kv_bytes_per_token,
        state_bytes_per_slot=args.state_bytes_per_slot,
        cache_bytes=args.cache_memory_gb * 2**30,
        cache_strategy=args.cache_strategy,
        page_size=args.page_size,
        chunked_prefill_tokens=args.chunked_prefill_tokens,
        context_length_tokens=args.context_length_tokens,
        fit={
            "source": source,
            "requests": found.requests,
            "explained_variance": round(found.explained, 4),
        },
    )
    content = msgspec.json.format(msgspec.json.encode(deployment), indent=2)
    args.output.write_bytes(content + b"\n")
    print(
        f"{args.output}: {found.requests} requests, {found.explained:.1%} of the "
        "variance of their times explained; simulate the same to see the error "
        "of the makespan"
    )
    return 0
