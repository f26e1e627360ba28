"""The capacity model equals the engine: its own sizing code, real schedulers, configs.

One process imports SGLang and forks a child for every question (hybrid_probe.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .hybrid_families import DENSE, FAMILIES
from .hybrid_overlay import capacity

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROBE = Path(__file__).with_name("hybrid_probe.py")
MIB, GIB = 1 << 20, 1 << 30

# Half of 64 MiB of virtual memory, whatever the machine has free.
BUDGET = 32 * MIB
MEAN_CONTEXT = 2500.0
RATIOS = (0.3, 0.9, 3.0)
CONV_DTYPES = ("bfloat16", "float32")
STRATEGIES = ("no_buffer", "extra_buffer")

CELLS = [
    (ratio, dtype, strategy)
    for ratio in (*RATIOS, "profile")
    for dtype in CONV_DTYPES
    for strategy in STRATEGIES
]

# Deployments of Kimi-Linear that no CPU runs, sized by the engine's own code.
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tp": {"tp_size": 8},
    "dcp": {"tp_size": 8, "dcp_size": 8},
    "pages": {"page_size": 64, "tp_size": 4},
    "dp-attention": {"tp_size": 8, "attn_dp_size": 4, "max_running_requests": 256},
    "pipeline": {"pp_size": 2, "tp_size": 4},
    "no-radix-cache": {"disable_radix_cache": True},
    "no-overlap": {"disable_overlap_schedule": True},
    "lazy": {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
    "bfloat16-state": {"mamba_ssm_dtype": "bfloat16"},
    "fp8-kv": {"kv_cache_dtype": "fp8_e4m3"},
    "speculation": {"speculative_algorithm": "NGRAM", "tp_size": 4}
    | {"speculative_num_draft_tokens": 12, "max_running_requests": 64},
    "speculation-default-cap": {"speculative_algorithm": "NGRAM"}
    | {"speculative_num_draft_tokens": 4},
}


def cell_name(cell: tuple[object, ...]) -> str:
    return "-".join(str(part) for part in cell)


def engine_flags(model: Path, ratio: object, strategy: str, profile: str) -> list[str]:
    flags = ["--model-path", str(model), "--load-format", "dummy"]
    flags += ["--mem-fraction-static", "0.5", "--skip-tokenizer-init"]
    flags += ["--log-level", "error", "--mamba-radix-cache-strategy", strategy]
    if ratio == "profile":
        return [*flags, "--hybrid-workload-profile", profile]
    return [*flags, "--mamba-full-memory-ratio", str(ratio)]


def planner_flags(model: Path, dtype: str, strategy: str) -> list[str]:
    flags = ["--model-path", str(model), "--cache-memory", str(BUDGET)]
    flags += ["--mean-final-context", str(MEAN_CONTEXT), "--mamba-conv-dtype", dtype]
    flags += ["--dtype", "float32", "--disable-overlap-schedule"]
    return [*flags, "--mamba-radix-cache-strategy", strategy]


class Folder:
    """Input files of the probe."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def model(self, name: str, config: dict[str, Any]) -> Path:
        folder = self.path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def profile(self, **changes: object) -> str:
        fields = {
            "version": 1,
            "name": "agents",
            "trajectories": 40,
            "final_context_tokens": {"mean": MEAN_CONTEXT},
            "forked_share": 0.0,
        }
        path = self.path / f"profile{len(list(self.path.iterdir()))}.json"
        path.write_text(json.dumps(fields | changes))
        return str(path)


def jobs(folder: Folder, tiny: Path) -> dict[str, Any]:
    profile = folder.profile()
    kimi = folder.model("kimi", FAMILIES["kimi-linear-48b"].config)
    dense = folder.model("dense", DENSE)
    env = {"SGLANG_CPU_MEMORY_BYTES": str(2 * BUDGET)}
    base = engine_flags(tiny, "profile", "no_buffer", profile)
    result: dict[str, Any] = {}
    for ratio, dtype, strategy in CELLS:
        result[f"boot {cell_name((ratio, dtype, strategy))}"] = {
            "kind": "boot",
            "argv": engine_flags(tiny, ratio, strategy, profile),
            "env": env | {"SGLANG_MAMBA_CONV_DTYPE": dtype},
        }
    for dtype in CONV_DTYPES:
        for strategy in STRATEGIES:
            argv = planner_flags(tiny, dtype, strategy)
            result[f"plan {dtype}-{strategy}"] = {"kind": "plan", "argv": argv}
    for name, flags in BOOTS.items():
        result[f"boot {name}"] = {"kind": "boot", "argv": [*base, *flags], "env": env}
    for name, family in FAMILIES.items():
        model = kimi if name == "kimi-linear-48b" else folder.model(name, family.config)
        argv = ["--model-path", str(model), *MEMORY]
        result[f"family {name}"] = {"kind": "plan", "argv": argv}
    for name, fields in DEPLOYMENTS.items():
        deployment = {"model_path": str(kimi), **fields}
        result |= sizing_jobs(name, deployment)
    result |= refusals(folder, tiny, dense)
    return result


MEMORY = ["--cache-memory-gb", "40", "--mean-final-context", "60000"]
SIZED_RATIOS = (0.05, 0.9, 4.0)

# Beside a profile, what else may decide the split.
BOOTS = {
    "explicit-ratio": ["--mamba-full-memory-ratio", "0.7"],
    "explicit-slots": ["--max-mamba-cache-size", "90"],
    "capped-tokens": ["--max-total-tokens", "20000"],
    "label-capacity": ["--schedule-policy", "routing-prefix"],
    "no-radix-cache": ["--disable-radix-cache", "--max-running-requests", "16"],
}


def sizing_jobs(name: str, deployment: dict[str, Any]) -> dict[str, Any]:
    result = {
        f"size {name} {ratio}": {
            "kind": "size",
            "deployment": deployment,
            "budget": 40 * GIB,
            "ratio": ratio,
            # The stage with the most full-attention layers decides.
            "stage": deployment.get("pp_size", 1) - 1,
        }
        for ratio in SIZED_RATIOS
    }
    argv = list(MEMORY)
    for field, value in deployment.items():
        flag = "--" + field.replace("_", "-")
        argv += [flag] if value is True else [flag, str(value)]
    return result | {f"sized {name}": {"kind": "plan", "argv": argv}}


def refusals(folder: Folder, tiny: Path, dense: Path) -> dict[str, Any]:
    def server(model: Path, profile: str, **extra: object) -> dict[str, Any]:
        argv = engine_flags(model, "profile", "auto", profile)
        return {"kind": "refuse", "argv": argv, **extra}

    good = folder.profile()
    empty = folder.path / "empty"
    empty.mkdir()
    return {
        "refuse version": server(tiny, folder.profile(version=2)),
        "refuse mean": server(tiny, folder.profile(final_context_tokens={"mean": -3})),
        "refuse dense": server(dense, good),
        "refuse dense-api": server(dense, good, api=True),
        "refuse nothing": server(tiny, good),
        "refuse blank": server(tiny, ""),
        "refuse blank-ratio": {
            "kind": "refuse",
            "argv": engine_flags(tiny, "", "auto", good),
        },
        "plan dense": {"kind": "plan", "argv": ["--model-path", str(dense), *MEMORY]},
        "plan empty": {"kind": "plan", "argv": ["--model-path", str(empty), *MEMORY]},
    }


@pytest.fixture(scope="module")
def answers(
    tiny_ling: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("probe")
    questions, results = folder / "jobs.json", folder / "answers.json"
    questions.write_text(json.dumps(jobs(Folder(folder), tiny_ling)))
    done = subprocess.run(
        [sys.executable, str(PROBE), str(questions), str(results)],
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(results.read_text())
    failed = {k: v["traceback"] for k, v in found.items() if "traceback" in v}
    assert not failed, failed
    return found


def costs_of(plan: dict[str, Any], **changes: Any) -> Any:
    """The unit costs that a plan was made with."""
    fields = {
        "kv_bytes_per_row": round(plan["kv_bytes_per_token"]),
        "state_bytes_per_slot": plan["state_bytes_per_slot"],
        "state_slots_per_request": plan["state_slots_per_request"],
    }
    return capacity.UnitCosts(**(fields | changes))


# --- a real engine on the CPU ----------------------------------------------


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_prediction_equals_a_real_scheduler_to_the_unit(
    cell: tuple[Any, str, str], answers: dict[str, Any]
):
    """Slots, tokens and running requests; ratios given and derived."""
    ratio, dtype, strategy = cell
    engine = answers[f"boot {cell_name(cell)}"]
    plan = answers[f"plan {dtype}-{strategy}"]["plan"]
    if ratio == "profile":
        ratio = plan["ratio"]
    unit = costs_of(plan)
    pools = capacity.size_pools(BUDGET, ratio, unit)
    running = capacity.request_limit(pools, unit, context_length=32768)

    assert engine["ratio_in_use"] == ratio
    assert engine["state_slots"] == pools.state_slots
    assert engine["kv_tokens"] == pools.kv_tokens
    assert engine["max_running_requests"] == running
    assert engine["state_bytes_per_slot"] == plan["state_bytes_per_slot"]


@pytest.mark.parametrize("dtype", CONV_DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_profile_given_to_the_server_runs_the_plan(
    dtype: str, strategy: str, answers: dict[str, Any]
):
    """What the planner prints is what /server_info then says."""
    plan = answers[f"plan {dtype}-{strategy}"]["plan"]
    report = answers[f"boot profile-{dtype}-{strategy}"]["report"]

    assert report["ratio_origin"] == "profile"
    assert report["workload_profile"] == "agents"
    for ours, theirs in {
        "ratio": "ratio",
        "kv_tokens": "kv_tokens",
        "state_slots": "state_slots",
        "kv_bytes_per_token": "kv_bytes_per_token",
        "state_bytes_per_slot": "state_bytes_per_slot",
        "state_slots_per_request": "state_slots_per_request",
        "kv_bytes_per_trajectory": "kv_bytes_per_trajectory",
        "state_bytes_per_trajectory": "state_bytes_per_trajectory",
        "reference_concurrency": "reference_concurrency",
        "max_running_requests": "max_running_requests",
    }.items():
        assert report[theirs] == plan[ours], ours


def test_without_a_profile_the_report_says_what_it_knows(answers: dict[str, Any]):
    """Costs and pools, but no reference concurrency."""
    report = answers["boot 0.9-float32-no_buffer"]["report"]

    assert report["ratio_origin"] == "flag"
    assert report["state_slots"] == 251
    assert report["kv_bytes_per_token"] == 160
    assert report["reference_concurrency"] is None
    assert report["kv_capacity"] is None
    assert report["workload_profile"] is None


def test_the_internal_state_carries_the_report(answers: dict[str, Any]):
    """One per DP rank, as /server_info shows them."""
    boot = answers["boot profile-float32-no_buffer"]

    assert boot["internal_state"] == boot["report"]


def test_an_explicit_ratio_wins_and_is_reported(answers: dict[str, Any]):
    """The profile still gives the reference concurrency."""
    boot = answers["boot explicit-ratio"]
    report = boot["report"]

    assert boot["ratio_in_use"] == report["ratio"] == 0.7
    assert report["ratio_origin"] == "flag"
    assert report["reference_concurrency"] == min(
        report["kv_tokens"] // 2500, report["state_slots"] // 3
    )


def test_explicit_slots_win_over_any_ratio(answers: dict[str, Any]):
    """90 slots are 30 requests, and the memory left is KV cache."""
    report = answers["boot explicit-slots"]["report"]

    assert report["ratio_origin"] == "max_mamba_cache_size"
    assert (report["state_slots"], report["reference_concurrency"]) == (90, 30)
    assert report["kv_tokens"] == (BUDGET - 91 * report["state_bytes_per_slot"]) // 160
    assert report["binding_pool"] == "state"
    assert report["ratio"] == pytest.approx(
        91 * report["state_bytes_per_slot"] / (report["kv_tokens"] * 160), rel=1e-5
    )


def test_the_reference_concurrency_is_that_of_the_pools_as_sized(
    answers: dict[str, Any],
):
    """20,000 tokens hold 8 trajectories, whatever the budget would have held."""
    report = answers["boot capped-tokens"]["report"]

    assert report["kv_tokens"] == 20_000
    assert report["reference_concurrency"] == 8
    assert report["binding_pool"] == "kv"


def test_without_a_radix_cache_the_running_requests_fix_the_slots(
    answers: dict[str, Any],
):
    """One slot each; the ratio is not read."""
    report = answers["boot no-radix-cache"]["report"]

    assert report["ratio_origin"] == "max_running_requests"
    assert (report["state_slots"], report["state_slots_per_request"]) == (16, 1)


def test_the_label_capacity_follows_the_reference_concurrency(
    answers: dict[str, Any],
):
    """Where the scheduling policy is there and nobody gave a number."""
    boot = answers["boot label-capacity"]

    assert boot["label_capacity"] == 2 * boot["report"]["reference_concurrency"]


# --- deployments that no CPU runs ------------------------------------------


@pytest.mark.parametrize("ratio", SIZED_RATIOS)
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_sizing_equals_the_engine_s_own_code(
    name: str, ratio: float, answers: dict[str, Any]
):
    """TP, PP, DP attention, DCP, pages, dtypes, strategies, speculation."""
    fields = DEPLOYMENTS[name]
    plan = answers[f"sized {name}"]["plan"]
    draft_tokens = fields.get("speculative_num_draft_tokens", 0)
    cap = fields.get("max_running_requests", 48 if draft_tokens else None)
    rank_cap = None if cap is None else max(1, cap // fields.get("attn_dp_size", 1))
    dcp = fields.get("dcp_size", 1)
    unit = costs_of(
        plan,
        kv_bytes_per_row=round(plan["kv_bytes_per_token"] * dcp),
        tokens_per_row=dcp,
        page_size=fields.get("page_size", 1),
        draft_tokens=draft_tokens,
        scratch_bytes_per_draft_token=plan["state_bytes_per_slot"],
        draft_request_cap=rank_cap,
    )
    pools = capacity.size_pools(40 * GIB, ratio, unit)

    assert answers[f"size {name} {ratio}"] == {
        "kv_tokens": pools.kv_tokens,
        "state_slots": pools.state_slots,
        "max_running_requests": capacity.request_limit(
            pools, unit, context_length=1048576, requested=rank_cap
        ),
    }


SLOTS = {
    "plain": 5,
    "no-radix-cache": 1,
    "no-overlap": 3,
    "lazy": 4,
    "pipeline": 4,
}


@pytest.mark.parametrize("name", SLOTS)
def test_slots_per_request_follow_the_cache_strategy(
    name: str, answers: dict[str, Any]
):
    """S_state of each; PP drops the overlap after the strategy is chosen."""
    assert answers[f"sized {name}"]["plan"]["state_slots_per_request"] == SLOTS[name]


def test_shards_divide_states_and_dcp_divides_kv(answers: dict[str, Any]):
    """Latent KV is replicated over TP; only DCP splits it."""
    plain, tp, dcp = (answers[f"sized {n}"]["plan"] for n in ("plain", "tp", "dcp"))

    assert tp["state_bytes_per_slot"] == plain["state_bytes_per_slot"] / 8
    assert tp["kv_bytes_per_token"] == plain["kv_bytes_per_token"]
    assert dcp["kv_bytes_per_token"] == plain["kv_bytes_per_token"] / 8
    assert dcp["ratio"] == pytest.approx(8 * tp["ratio"], rel=1e-5)


def test_pipeline_stages_size_by_the_largest(answers: dict[str, Any]):
    """27 layers in two stages: 10 and 10 KDA, 3 and 4 attention layers."""
    plan = answers["sized pipeline"]["plan"]
    kimi = FAMILIES["kimi-linear-48b"]

    assert plan["kv_bytes_per_token"] == kimi.kv_bytes_per_token * 4 / 7
    assert plan["state_bytes_per_slot"] == kimi.state_bytes_per_slot / 4 * 10 / 20


def test_dp_ranks_add_up(answers: dict[str, Any]):
    """Sizes are a rank's; the reference concurrency is the server's."""
    plan = answers["sized dp-attention"]["plan"]
    rank = min(
        plan["kv_tokens"] // 60_000,
        plan["state_slots"] // plan["state_slots_per_request"],
    )

    assert plan["reference_concurrency"] == 4 * rank


# --- public families -------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_unit_costs_of_public_families(name: str, answers: dict[str, Any]):
    """Against numbers multiplied by hand."""
    answer = answers[f"family {name}"]

    assert answer["code"] == 0, answer["stderr"]
    assert answer["plan"]["kv_bytes_per_token"] == FAMILIES[name].kv_bytes_per_token
    assert answer["plan"]["state_bytes_per_slot"] == FAMILIES[name].state_bytes_per_slot


# --- refusals --------------------------------------------------------------

REFUSALS = {
    "refuse version": "version is 2; it must be 1",
    "refuse mean": "final_context_tokens.mean is -3; it must be a finite number of",
    "refuse dense": "model is 'LlamaForCausalLM'; it must be a hybrid one, with "
    "recurrent state and full attention, this one has nothing to split",
    "refuse blank": "path is ''; it must be the path of a workload profile",
    "refuse blank-ratio": "--mamba-full-memory-ratio: invalid",
    "plan dense": "model is 'LlamaForCausalLM'; it must be a hybrid one",
    "plan empty": "it must be a folder with a config.json",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_ends_with_one_line_before_anything_is_loaded(
    name: str, answers: dict[str, Any]
):
    """Exit code 2, the field and its value."""
    answer = answers[name]
    lines = [line for line in answer["stderr"].splitlines() if "error:" in line]

    assert answer["code"] == 2
    assert len(lines) == 1
    assert REFUSALS[name] in lines[0]


def test_the_python_api_gets_an_exception(answers: dict[str, Any]):
    """A library must not end its caller's process."""
    answer = answers["refuse dense-api"]

    assert answer["code"] == "ValueError"
    assert "nothing to split" in answer["stderr"]


def test_a_good_profile_is_not_refused(answers: dict[str, Any]):
    """The control."""
    assert answers["refuse nothing"]["code"] is None
