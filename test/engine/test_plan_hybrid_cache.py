"""The planner's command line with raw numbers: plans, advice, refusals, --check."""

from __future__ import annotations

import argparse
import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from .hybrid_overlay import plan_check, plan_hybrid_cache, workload_profile

RAW = (
    *("--kv-bytes-per-token", "70KiB"),
    *("--state-bytes-per-slot", "40MiB"),
    *("--state-slots-per-request", "5"),
)
LONG = ("--mean-final-context", "60000", "--cache-memory-gb", "40")

Planned = Callable[..., dict[str, Any]]
Profile = Callable[..., str]


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Planned:
    """Run the planner with ``--json`` and raw costs; its answer."""

    def run(*args: str) -> dict[str, Any]:
        assert plan_hybrid_cache.main([*RAW, *args, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the planner for people; its text."""

    def run(*args: str) -> str:
        assert plan_hybrid_cache.main([*RAW, *args]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the planner where it must refuse; the one line it says."""

    def run(*args: str) -> str:
        with pytest.raises(SystemExit) as stop:
            plan_hybrid_cache.main(args)
        output = capsys.readouterr()
        assert stop.value.code == 2
        assert output.out == ""
        assert output.err.count("\n") == 1
        return output.err

    return run


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    """Write a profile, good unless changed; ``None`` leaves a field out."""

    def write(**changes: object) -> str:
        fields = {
            "version": 1,
            "name": "swe",
            "trajectories": 289,
            "final_context_tokens": {"mean": 60_000.0, "p90": 9e4, "max": 131_072},
            "forked_share": 0.0,
        }
        fields = {k: v for k, v in (fields | changes).items() if v is not None}
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(fields))
        return str(path)

    return write


# --- plans -----------------------------------------------------------------


def test_a_plan_beside_what_the_default_would_give(planned: Planned):
    """Users who leave 0.9 find half of their memory in states that never fill."""
    answer = planned(*LONG)

    assert answer["ratio"] == pytest.approx(0.0488, abs=0.0005)
    assert answer["reference_concurrency"] == 9
    assert answer["reference_concurrency_continuous"] == pytest.approx(9.52, abs=0.01)
    assert answer["default_ratio"] == 0.9
    assert answer["default_concurrency"] == 5
    assert answer["binding_pool_at_default"] == "kv"
    assert answer["flags"] == [
        *("--mamba-full-memory-ratio", "0.0487619"),
        *("--mamba-max-states-per-path", "1"),
    ]
    assert answer["warnings"] == []


def test_the_text_names_the_binding_pool_and_ends_with_flags_to_paste(
    printed: Callable[..., str],
):
    """The same for people."""
    text = printed(*LONG, "--workers", "3")

    assert (
        "reference concurrency: 9.52, so 9 whole trajectories a worker, 27 on 3" in text
    )
    assert "at the default 0.9: 5; the KV cache limits it" in text
    assert text.splitlines()[-1] == (
        "flags: --mamba-full-memory-ratio 0.0487619 --mamba-max-states-per-path 1"
    )


def test_longer_contexts_lower_ratio_and_concurrency(planned: Planned):
    """200,000 tokens: two trajectories."""
    answer = planned("--mean-final-context", "200000", "--cache-memory-gb", "40")

    assert answer["ratio"] == pytest.approx(0.0146, abs=0.0001)
    assert answer["reference_concurrency"] == 2


def test_a_target_sets_the_ratio_and_warns_that_contexts_will_not_fit(
    planned: Planned,
):
    """64 requests of 200,000 tokens leave 6,436 KV tokens each."""
    answer = planned(
        *("--mean-final-context", "200000", "--cache-memory-gb", "40"),
        *("--target-concurrency", "64"),
    )

    assert answer["ratio"] == pytest.approx(0.4545, abs=0.0001)
    assert answer["kv_tokens_per_trajectory"] == pytest.approx(6436, abs=1)
    assert "leaves 6,436 KV tokens a trajectory, far below" in answer["warnings"][0]


def test_the_ratio_advised_for_a_target_really_lets_it_run(planned: Planned):
    """The padding slot costs a request at the continuous ratio."""
    target = (*LONG, "--target-concurrency", "64")
    warning = planned(*target)["warnings"][-1]
    ratio = warning.split("--mamba-full-memory-ratio ")[1].split()[0]
    unit = plan_hybrid_cache.UnitCosts(
        kv_bytes_per_row=70 << 10,
        state_bytes_per_slot=40 << 20,
        state_slots_per_request=5,
    )
    size_pools = plan_hybrid_cache.make_plan.__globals__["size_pools"]

    assert "leaves room for 63 of 64" in warning
    assert size_pools(40 << 30, float(ratio), unit).state_slots // 5 == 64


def test_draft_tokens_add_a_cost_of_their_own(planned: Planned):
    """They change the footprint of a request, not its slots."""
    answer = planned(*LONG, "--speculative-num-draft-tokens", "12")

    assert answer["state_slots_per_request"] == 5
    assert answer["draft_state_bytes_per_request"] == 480 << 20
    assert answer["state_bytes_per_trajectory"] == 680 << 20


def test_short_contexts_under_speculation_want_slots_not_a_ratio(planned: Planned):
    """The engine's ratio counts draft states for requests that never run."""
    answer = planned(
        *("--mean-final-context", "1000", "--cache-memory-gb", "40"),
        *("--speculative-num-draft-tokens", "12", "--max-running-requests", "8"),
    )

    # (40 GiB - 8 x 480 MiB) / (200 MiB + 1000 x 70 KiB)
    assert "use --max-mamba-cache-size 690 instead" in answer["warnings"][-1]
    assert answer["ratio"] == pytest.approx(99)


def test_dp_ranks_and_workers_multiply(planned: Planned):
    """Sizes are those of one rank; concurrency is the worker's."""
    answer = planned(*LONG, "--attn-dp-size", "2", "--workers", "3")

    assert answer["reference_concurrency"] == 18
    assert answer["aggregate_reference_concurrency"] == 54


def test_unified_memory_makes_the_ratio_informational(planned: Planned):
    """The reference concurrency of equation 7 is still worth knowing."""
    answer = planned(*LONG, "--enable-unified-memory")

    assert answer["reference_concurrency"] == 9
    assert "--enable-unified-memory" in answer["flags"]
    assert any("ratio is informational" in warning for warning in answer["warnings"])


def test_gpu_memory_less_weights_is_the_budget(planned: Planned):
    """mem_fraction_static x GPU - weights."""
    answer = planned(
        *("--mean-final-context", "60000", "--gpu-memory-gb", "96"),
        *("--weights", "41.6GiB", "--mem-fraction-static", "0.85"),
    )

    assert answer["cache_bytes"] == 40 << 30


def test_too_little_state_for_one_request_names_the_least_ratio(planned: Planned):
    """4 slots cannot serve a request that reserves 5."""
    small = ("--mean-final-context", "1000000", "--cache-memory-gb", "60")
    answer = planned(*small)
    advice = answer["warnings"][0]
    ratio = float(advice.split("--mamba-full-memory-ratio ")[1].split()[0])
    enough = planned(*small, "--target-concurrency", "1")

    assert answer["reference_concurrency"] == 0
    assert "leaves 3 state slots, less than the 5 of one request" in advice
    assert ratio == pytest.approx(6 * 40 / (60 * 1024 - 6 * 40), rel=1e-3)
    assert enough["state_slots"] == 4  # the padding slot again


# --- profiles --------------------------------------------------------------


def test_a_profile_gives_the_context(planned: Planned, profile: Profile):
    """The mean at the last turn is L_kv."""
    answer = planned("--workload-profile", profile(), "--cache-memory-gb", "40")

    assert answer["mean_final_context_tokens"] == 60_000
    assert answer["reference_concurrency"] == 9
    assert answer["reference_concurrency_at_p90"] == 571_684 // 90_000
    assert answer["warnings"] == []


def test_forks_ask_for_more_states_along_a_path(planned: Planned, profile: Profile):
    """A cap of 1 keeps only tails, so a fork from an earlier turn starts cold."""
    forked = (
        "--workload-profile",
        profile(forked_share=0.3),
        "--cache-memory-gb",
        "40",
    )
    warning = planned(*forked)["warnings"][0]

    assert warning.startswith("30% of the trajectories fork")
    assert "cap of 1 state per path keeps only tails" in warning
    assert "--mamba-max-states-per-path 4 or -1" in warning
    assert planned(*forked, "--mamba-max-states-per-path", "4")["warnings"] == []


def test_the_cap_advised_is_the_profile_s(planned: Planned, profile: Profile):
    """Where the profile measured how far back forks go."""
    path = profile(forked_share=0.3, states_per_path=6)
    warning = planned("--workload-profile", path, "--cache-memory-gb", "40")[
        "warnings"
    ][0]

    assert "--mamba-max-states-per-path 6 or -1" in warning


def test_few_trajectories_are_called_few(planned: Planned, profile: Profile):
    """A mean over 12 is a guess."""
    answer = planned(
        "--workload-profile", profile(trajectories=12), "--cache-memory-gb", "40"
    )

    assert "holds only 12 trajectories" in answer["warnings"][0]


BAD_PROFILES = {
    "version": (2, "version is 2; it must be 1"),
    "trajectories": (0, "trajectories is 0; it must be a whole number above 0"),
    "forked_share": (1.5, "forked_share is 1.5; it must be a share between 0 and 1"),
    "final_context_tokens": ({}, "final_context_tokens is {}; it must be an object"),
}
BAD_MEANS = {
    0: "final_context_tokens.mean is 0; it must be a finite number of tokens above 0",
    -5: "final_context_tokens.mean is -5",
    math.nan: "final_context_tokens.mean is nan",
    math.inf: "final_context_tokens.mean is inf",
    "": "final_context_tokens.mean is ''",
    True: "final_context_tokens.mean is True",
}


@pytest.mark.parametrize("field", BAD_PROFILES)
@pytest.mark.parametrize("missing", [False, True])
def test_a_bad_profile_field_is_named_with_its_value(
    field: str, missing: bool, profile: Profile, refused: Callable[..., str]
):
    """Missing fields too: nothing falls back silently."""
    value, message = BAD_PROFILES[field]
    path = profile(**{field: None if missing else value})
    line = refused(*RAW, "--workload-profile", path, "--cache-memory-gb", "40")

    assert path in line
    assert f"{field} is missing" in line if missing else message in line


@pytest.mark.parametrize("mean", BAD_MEANS)
def test_a_bad_mean_is_named_with_its_value(
    mean: object, profile: Profile, refused: Callable[..., str]
):
    """The one number that everything rests on."""
    path = profile(final_context_tokens={"mean": mean, "p50": 4.0})
    line = refused(*RAW, "--workload-profile", path, "--cache-memory-gb", "40")

    assert BAD_MEANS[mean] in line


def test_a_maximum_below_the_mean_is_refused(
    profile: Profile, refused: Callable[..., str]
):
    """One of the two must be wrong."""
    path = profile(final_context_tokens={"mean": 10.0, "max": 5.0})
    line = refused(*RAW, "--workload-profile", path, "--cache-memory-gb", "40")

    assert "final_context_tokens.max is 5.0; it must be at least the mean, 10" in line


@pytest.mark.parametrize("text", ["", "[1]", "not json", "{"])
def test_a_file_that_is_no_profile_is_refused(
    text: str, tmp_path: Path, refused: Callable[..., str]
):
    """Content that is no JSON object."""
    path = tmp_path / "p.json"
    path.write_text(text)
    line = refused(*RAW, "--workload-profile", str(path), "--cache-memory-gb", "40")

    assert "content is" in line
    assert "it must be a JSON object" in line


def test_a_profile_that_is_not_there_is_refused(refused: Callable[..., str]):
    """The reason is the system's own."""
    line = refused(
        *RAW, "--workload-profile", "/nowhere.json", "--cache-memory-gb", "1"
    )

    assert "/nowhere.json: file is 'No such file or directory'" in line


def test_a_server_s_command_line_ends_at_a_bad_profile(
    profile: Profile, capsys: pytest.CaptureFixture[str]
):
    """One line and status 2, before anything is loaded; without the flag, nothing."""
    parser = argparse.ArgumentParser(prog="sglang serve")

    def check(path: str | None) -> None:
        args = argparse.Namespace(hybrid_workload_profile=path)
        workload_profile.exit_on_bad_profile(parser, args)

    check(None)
    check(profile())
    with pytest.raises(SystemExit) as stop:
        check(profile(version=2))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("sglang serve: error: --hybrid-workload-profile: ")
    assert error.endswith("version is 2; it must be 1\n")
    assert error.count("\n") == 1


# --- bad command lines -----------------------------------------------------

BAD_ARGUMENTS = {
    "no workload": ((*RAW, "--cache-memory-gb", "40"), "--workload-profile is missing"),
    "no memory": ((*RAW, *LONG[:2]), "--cache-memory-gb is missing"),
    "no costs": (LONG, "--model-path is missing"),
    "part of the costs": ((*RAW[:4], *LONG), "--state-slots-per-request is missing"),
    "no weights": (
        (*RAW, *LONG[:2], "--gpu-memory-gb", "96"),
        "--weights-gb is missing",
    ),
    "heavy weights": (
        (*RAW, *LONG[:2], "--gpu-memory-gb", "10", "--weights-gb", "9"),
        "--weights-gb is 9.0; it must be below 8.50 GiB",
    ),
    "two workloads": (
        (*RAW, *LONG, "--workload-profile", "p.json"),
        "--mean-final-context is 60000.0; it must be left out with a profile",
    ),
    "model and costs": ((*RAW, *LONG, "--model-path", "m"), "--kv-bytes-per-token is"),
    "blank ratio of bytes": ((*RAW, *LONG, "--cache-memory", ""), "--cache-memory: "),
    "NaN context": ((*RAW, "--mean-final-context", "nan"), "'nan' is not a finite"),
    "negative memory": ((*RAW, *LONG[:2], "--cache-memory-gb", "-1"), "'-1' is not"),
    "unknown unit": ((*RAW, *LONG, "--cache-memory", "4GB"), "--cache-memory: "),
    "zero workers": (
        (*RAW, *LONG, "--workers", "0"),
        "'0' is not a whole number above",
    ),
    "too many": (
        (*RAW, *LONG, "--target-concurrency", "205"),
        "target concurrency is 205; it must be at most 204 with this budget",
    ),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_bad_command_line_gets_one_line(name: str, refused: Callable[..., str]):
    """Field, value, what is allowed; exit code 2; nothing on stdout."""
    args, message = BAD_ARGUMENTS[name]

    assert message in refused(*args)


@pytest.mark.parametrize(("cap", "allowed"), [("-1", True), ("7", True)])
def test_caps_of_states_per_path(cap: str, allowed: bool, planned: Planned):
    """Both spellings of the engine: all, or a number."""
    assert planned(*LONG, "--mamba-max-states-per-path", cap)["flags"][-1] == cap


@pytest.mark.parametrize("cap", ["0", "-2", "", "one"])
def test_caps_that_keep_nothing_are_refused(cap: str, refused: Callable[..., str]):
    """With the reason."""
    line = refused(*RAW, *LONG, f"--mamba-max-states-per-path={cap}")

    assert f"{cap!r} is not allowed: -1 keeps all states" in line


# --- check -----------------------------------------------------------------

REPORT = {
    "ratio": 0.0487619,
    "ratio_origin": "profile",
    "workload_profile": "swe",
    "mean_final_context_tokens": 60_000.0,
    "kv_bytes_per_token": 71_680.0,
    "state_bytes_per_slot": 40 << 20,
    "state_slots_per_request": 5,
    "draft_state_bytes_per_request": 0,
    "kv_tokens": 571_684,
    "state_slots": 46,
    "reference_concurrency": 9,
    "max_running_requests": 9,
}
IDLE_METRICS = (
    'sglang:num_running_reqs{tp_rank="0"} 0.0\nsglang:mamba_usage{a="b"} 0.1\n'
)


@pytest.fixture
def server() -> Iterator[Callable[..., str]]:
    """A server that answers /server_info and /metrics; its URL."""
    running: list[HTTPServer] = []

    def start(info: dict[str, Any], metrics: str | None = IDLE_METRICS) -> str:
        pages = {"/server_info": json.dumps(info), "/metrics": metrics}
        httpd = HTTPServer(("127.0.0.1", 0), _handler(pages))
        threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
        running.append(httpd)
        return f"http://127.0.0.1:{httpd.server_port}"

    yield start
    for httpd in running:
        httpd.shutdown()
        httpd.server_close()


def _handler(pages: dict[str, str | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write((page or "").encode())

        def log_message(self, *args: object) -> None:
            pass

    return Handler


def test_reserve_and_use_of_slots_are_told_apart():
    """A gauge of 0.80 over 40 slots with 8 running: 4 each, 8 idle, cap unchanged."""
    state = plan_check.server_state(
        {"internal_states": [{"hybrid_capacity": REPORT | {"state_slots": 40}}]},
        {"sglang:num_running_reqs": 8.0, "sglang:mamba_usage": 0.8},
        "http://worker",
    )
    capped = plan_check.ServerState(
        **{f: getattr(state, f) for f in type(state).__dataclass_fields__}
        | {"max_running_requests": 8}
    )

    assert plan_check.describe_server(capped)[-1] == (
        "use: 8 running requests hold 32 of 40 slots, 4.0 a request; 5 are reserved "
        "for each, so the cap of 8 leaves 8 slots idle (they can keep states of turns "
        "between requests)"
    )


def test_a_server_that_runs_its_plan(
    server: Callable[..., str], capsys: pytest.CaptureFixture[str]
):
    """Costs, pools and workload are the server's own; nothing else is needed."""
    url = server({"hybrid_capacity": REPORT, "internal_states": [{}]})

    assert plan_hybrid_cache.main(["--check", url]) == 0
    output = capsys.readouterr().out
    assert (
        "server: ratio 0.04876 (profile), 571,684 KV tokens, 46 state slots" in output
    )
    assert "use: no request is running just now" in output
    assert output.endswith("runs as planned\n")


def test_a_server_that_departs_from_the_plan(
    server: Callable[..., str], capsys: pytest.CaptureFixture[str]
):
    """Exit code 1, and every figure that differs."""
    report = REPORT | {"ratio": 0.9, "ratio_origin": "default"}
    url = server({"hybrid_capacity": report}, metrics=None)

    assert plan_hybrid_cache.main(["--check", url]) == 1
    output = capsys.readouterr().out
    assert "differs: ratio: planned 0.0487619, the server runs 0.9" in output
    assert "exports no metrics" in output


def test_a_stock_server_is_read_too(
    server: Callable[..., str], capsys: pytest.CaptureFixture[str]
):
    """It reports pools, but neither costs nor a workload."""
    state = {
        "max_mamba_cache_size": 257,
        "effective_max_running_requests_per_dp": 51,
        "mamba_full_memory_ratio": 0.9,
    }
    url = server({"max_total_num_tokens": 1_167_552, "internal_states": [state]})

    assert plan_hybrid_cache.main(["--check", url]) == 0
    assert "257 state slots, max_running_requests 51" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("info", "message"),
    [({"internal_states": [{}]}, "this server has no recurrent-state pool")],
)
def test_a_dense_server_has_nothing_to_check(
    info: dict[str, Any],
    message: str,
    server: Callable[..., str],
    refused: Callable[..., str],
):
    """One line."""
    assert message in refused("--check", server(info))


def test_no_server_is_one_line(refused: Callable[..., str]):
    """With the URL and the reason."""
    line = refused("--check", "http://127.0.0.1:1")

    assert "http://127.0.0.1:1/server_info: " in line
    assert "refused" in line
