"""Plan the cache of a hybrid model for a workload of agent trajectories.

Prints the ratio of recurrent state to KV cache at which both hold equally many
trajectories, how many that are, what the default ratio would give, and the flags
to paste. Needs no GPU. See docs/hybrid-cache.md.

    python -m sglang.plan_hybrid_cache --model-path DIR --tp-size 4 \\
        --workload-profile profile.json --cache-memory-gb 40
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from sglang.srt.mem_cache.hybrid_capacity import CapacityError, UnitCosts
from sglang.srt.mem_cache.hybrid_plan import (
    Plan,
    Question,
    Workload,
    make_plan,
    plan_as_json,
    plan_as_text,
)
from sglang.srt.mem_cache.hybrid_plan_check import (
    CheckError,
    ServerState,
    compare,
    describe_server,
    read_server,
    require_costs,
)
from sglang.srt.mem_cache.hybrid_workload_profile import (
    ProfileError,
    load_workload_profile,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hybrid_model_costs import ModelCosts

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

# What the server keeps of the GPU unless --mem-fraction-static says otherwise; its
# own choice depends on the GPU and lies around this.
_MEM_FRACTION = 0.85

_DTYPES = ("bfloat16", "float16", "float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; 0, or 1 if ``--check`` finds a server that departs from it."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _require_one_source(args)
        if args.check is not None:
            return _check(args)
        _print_plan(args, *_plan(args, None))
    except (CapacityError, ProfileError, CheckError) as error:
        parser.error(str(error))
    return 0


# --------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage, which has more flags than help here."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m sglang.plan_hybrid_cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_workload(parser.add_argument_group("workload (one of these)"))
    _add_memory(parser.add_argument_group("memory of one GPU"))
    _add_raw_costs(parser.add_argument_group("raw costs, instead of --model-path"))
    _add_deployment(
        parser.add_argument_group("model and launch flags, as for the server")
    )
    _add_goal(parser.add_argument_group("goal and output"))
    return parser


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workload-profile",
        metavar="FILE",
        help="profile of past trajectories (python -m sglang_agent profile)",
    )
    group.add_argument(
        "--mean-final-context",
        type=_positive,
        metavar="TOKENS",
        help="mean context at the last turn of a trajectory, instead of a profile",
    )


def _add_memory(group: argparse._ArgumentGroup) -> None:
    def pair(name: str, help: str) -> None:
        dest = name.replace("-", "_")
        group.add_argument(
            f"--{name}", dest=dest, type=_size, metavar="SIZE", help=f"{help}: 40GiB"
        )
        group.add_argument(
            f"--{name}-gb", dest=dest, type=_gib, metavar="X", help=f"{help}, in GiB"
        )

    pair("cache-memory", "memory for KV cache and recurrent state together")
    pair("gpu-memory", "memory of the GPU; needs --weights too")
    pair("weights", "memory of the GPU that weights take")
    group.add_argument(
        "--mem-fraction-static",
        type=_fraction,
        default=_MEM_FRACTION,
        metavar="F",
        help="with --gpu-memory: share of it for weights and cache (default: %(default)s)",
    )


def _add_raw_costs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-bytes-per-token",
        type=_size,
        metavar="SIZE",
        help="KV cache of one token on one GPU, all layers: 70KiB",
    )
    group.add_argument(
        "--state-bytes-per-slot",
        type=_size,
        metavar="SIZE",
        help="recurrent state of one slot on one GPU, all layers: 40MiB",
    )
    group.add_argument(
        "--state-slots-per-request",
        type=_count,
        metavar="N",
        help="state slots the server reserves for a request: 1 without radix cache, 3 "
        "for no_buffer, 4 or 5 for extra_buffer without or with overlap",
    )


def _add_deployment(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model-path", "--model", metavar="DIR", help="folder with the config.json")
    for name, what in (
        ("tp-size", "tensor parallel width"),
        ("pp-size", "pipeline stages"),
        ("attn-dp-size", "attention data parallel ranks, each with its own cache"),
        ("dcp-size", "decode context parallel width"),
        ("page-size", "tokens in a KV page"),
    ):
        add(
            f"--{name}",
            type=_count,
            default=1,
            metavar="N",
            help=f"{what} (default: 1)",
        )
    add("--dtype", default="auto", help="model dtype (default: the config's)")
    add(
        "--kv-cache-dtype", default="auto", help="KV cache dtype (default: the model's)"
    )
    add(
        "--mamba-ssm-dtype", choices=_DTYPES, help="state dtype (default: the config's)"
    )
    add(
        "--mamba-conv-dtype",
        choices=_DTYPES,
        default="bfloat16",
        help="convolution window dtype, SGLANG_MAMBA_CONV_DTYPE of the server "
        "(default: %(default)s)",
    )
    add(
        "--mamba-radix-cache-strategy",
        choices=("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"),
        default="auto",
    )
    add("--context-length", type=_count, metavar="TOKENS")
    add("--max-running-requests", type=_count, metavar="N")
    add("--speculative-algorithm", metavar="NAME")
    add("--speculative-num-draft-tokens", type=_count, metavar="N")
    add("--speculative-draft-model-path", metavar="DIR")
    for name in (
        "disable-overlap-schedule",
        "disable-radix-cache",
        "trust-remote-code",
    ):
        add(f"--{name}", action="store_true")
    add(
        "--enable-unified-memory",
        action="store_true",
        help="one buffer for both caches: the ratio is then informational",
    )


def _add_goal(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers",
        type=_count,
        default=1,
        metavar="W",
        help="equal workers behind the gateway (default: 1)",
    )
    group.add_argument(
        "--target-concurrency",
        type=_count,
        metavar="N",
        help="size the state pool for N requests instead of balancing the pools",
    )
    group.add_argument(
        "--mamba-max-states-per-path",
        type=_states_per_path,
        default=1,
        metavar="N",
        help="states kept along one path: 1 or more, -1 for all (default: 1)",
    )
    group.add_argument(
        "--check",
        metavar="URL",
        help="say what this running server does, and where it departs from the plan",
    )
    group.add_argument("--json", action="store_true", help="print JSON")


def _positive(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _fraction(text: str) -> float:
    if (value := _positive(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return value


def _states_per_path(text: str) -> int:
    if text == "-1" or (text.isdigit() and int(text) >= 1):
        return int(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not allowed: -1 keeps all states, 1 or more caps them, and 0 "
        "would keep none to resume from"
    )


def _size(text: str) -> int:
    number = text.rstrip("KMGiB").strip()
    unit = text[len(text.rstrip("KMGiB")) :]
    if unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 40GiB or 512MiB")
    return round(_positive(number) * _UNITS[unit])


def _gib(text: str) -> int:
    return round(_positive(text) * _UNITS["GiB"])


for _type, _name in ((_positive, "number"), (_size, "size"), (_gib, "size in GiB")):
    _type.__name__ = _name  # what argparse calls it in "invalid ... value"


# --------------------------------------------------------------------------
# From arguments to a plan
# --------------------------------------------------------------------------

_RAW = ("kv_bytes_per_token", "state_bytes_per_slot", "state_slots_per_request")


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def _require_one_source(args: argparse.Namespace) -> None:
    given = [_flag(dest) for dest in _RAW if getattr(args, dest) is not None]
    if args.model_path is not None and given:
        raise CapacityError(
            given[0], getattr(args, _RAW[0]), "left out with --model-path"
        )
    if args.workload_profile is not None and args.mean_final_context is not None:
        raise CapacityError(
            "--mean-final-context", args.mean_final_context, "left out with a profile"
        )
    if args.cache_memory is not None and args.gpu_memory is not None:
        raise CapacityError(
            "--gpu-memory", args.gpu_memory, "left out with --cache-memory"
        )


def _plan(args: argparse.Namespace, server: ServerState | None) -> tuple[Plan, str]:
    """The plan, and a line about the model it is for."""
    workload = _workload(args, server)
    model = None if args.model_path is None else _model_costs(args)
    costs = _raw_costs(args, server) if model is None else model.costs
    cap = args.max_running_requests
    if model is not None:
        cap = _deployment(args).request_cap_per_rank
    question = Question(
        costs=costs,
        workload=workload,
        budget=_budget(args, server),
        workers=args.workers,
        dp_ranks=args.attn_dp_size,
        target_concurrency=args.target_concurrency,
        max_states_per_path=args.mamba_max_states_per_path,
        unified_memory=args.enable_unified_memory,
        radix_cache=not args.disable_radix_cache,
        request_cap_per_rank=cap,
        context_length=None if model is None else model.context_length,
    )
    return make_plan(question), "" if model is None else _model_line(args, model)


def _workload(args: argparse.Namespace, server: ServerState | None) -> Workload:
    if args.workload_profile is not None:
        profile = load_workload_profile(args.workload_profile)
        return Workload(
            mean_final_context=profile.mean_final_context,
            name=profile.name,
            trajectories=profile.trajectories,
            p90_final_context=profile.p90_final_context,
            forked_share=profile.forked_share,
            states_per_path=profile.states_per_path,
        )
    if args.mean_final_context is not None:
        return Workload(mean_final_context=args.mean_final_context)
    if server is not None and server.mean_final_context is not None:
        return Workload(
            mean_final_context=server.mean_final_context, name="the server's"
        )
    raise _missing("--workload-profile", "a profile, or --mean-final-context given")


def _raw_costs(args: argparse.Namespace, server: ServerState | None) -> UnitCosts:
    values = {dest: getattr(args, dest) for dest in _RAW}
    absent = [dest for dest, value in values.items() if value is None]
    if server is not None and len(absent) == len(_RAW):
        return _server_costs(server, args.check)
    if len(absent) == len(_RAW):
        raise _missing(
            "--model-path", "a folder with a config.json, or raw costs given"
        )
    if absent:
        raise _missing(_flag(absent[0]), "given with the other raw costs")
    return UnitCosts(
        kv_bytes_per_row=values["kv_bytes_per_token"] * args.dcp_size,
        state_bytes_per_slot=values["state_bytes_per_slot"],
        state_slots_per_request=values["state_slots_per_request"],
        draft_tokens=args.speculative_num_draft_tokens or 0,
        scratch_bytes_per_draft_token=values["state_bytes_per_slot"],
        draft_request_cap=args.max_running_requests,
        page_size=args.page_size,
        tokens_per_row=args.dcp_size,
    )


def _server_costs(server: ServerState, url: str) -> UnitCosts:
    require_costs(server, url)
    return UnitCosts(
        kv_bytes_per_row=round(server.kv_bytes_per_token or 0),
        state_bytes_per_slot=server.state_bytes_per_slot or 0,
        state_slots_per_request=server.state_slots_per_request or 0,
        draft_tokens=1 if server.draft_state_bytes_per_request else 0,
        scratch_bytes_per_draft_token=server.draft_state_bytes_per_request,
        draft_request_cap=server.max_running_requests,
    )


def _budget(args: argparse.Namespace, server: ServerState | None) -> int:
    if args.cache_memory is not None:
        return int(args.cache_memory)
    if args.gpu_memory is None:
        if server is not None and server.cache_bytes is not None:
            return server.cache_bytes
        raise _missing(
            "--cache-memory-gb", "given, or --gpu-memory-gb with --weights-gb"
        )
    if args.weights is None:
        raise _missing("--weights-gb", "given with --gpu-memory-gb")
    budget: int = int(args.gpu_memory * args.mem_fraction_static) - args.weights
    if budget <= 0:
        static = args.gpu_memory * args.mem_fraction_static / _UNITS["GiB"]
        raise CapacityError(
            "--weights-gb", args.weights / _UNITS["GiB"], f"below {static:.2f} GiB"
        )
    return budget


def _missing(flag: str, allowed: str) -> CapacityError:
    return CapacityError(flag, None, allowed)


def _deployment(args: argparse.Namespace) -> Any:
    from sglang.srt.mem_cache.hybrid_model_costs import Deployment

    names = Deployment.__dataclass_fields__
    return Deployment(**{name: getattr(args, name) for name in names})


def _model_costs(args: argparse.Namespace) -> ModelCosts:
    # Seconds of imports, and their remarks about a machine without a GPU.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from sglang.srt.mem_cache.hybrid_model_costs import read_model_costs

    return read_model_costs(_deployment(args))


def _model_line(args: argparse.Namespace, model: ModelCosts) -> str:
    overlap = "overlap" if model.overlap else "no overlap"
    return (
        f"model        {model.architecture}, TP {args.tp_size}, PP {args.pp_size}, "
        f"DP {args.attn_dp_size}, DCP {args.dcp_size}, {model.kv_cache_dtype} KV, "
        f"{model.cache_strategy}, {overlap}"
    )


def _print_plan(args: argparse.Namespace, plan: Plan, model_line: str) -> None:
    if args.json:
        _write(json.dumps(plan_as_json(plan), indent=2))
        return
    if model_line:
        _write(model_line)
    _write(plan_as_text(plan))


def _check(args: argparse.Namespace) -> int:
    server = read_server(args.check)
    lines = describe_server(server)
    wants_plan = args.workload_profile or args.mean_final_context or args.model_path
    if not wants_plan and server.mean_final_context is None:
        _write("\n".join(lines))
        return 0
    plan, model_line = _plan(args, server)
    differences = compare(plan, server)
    if args.json:
        result = plan_as_json(plan) | {"server": lines, "differences": differences}
        _write(json.dumps(result, indent=2))
    else:
        _print_plan(args, plan, model_line)
        verdict = [f"differs: {line}" for line in differences] or ["runs as planned"]
        _write("\n".join(["", *lines, *verdict]))
    return 1 if differences else 0


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
