"""The commands, from files to files."""

import msgspec
import pytest

from sgl_router.policies.ring import HashRing
from sglang_agent.__main__ import main
from sglang_agent.records import InferenceStage
from sglang_agent.simulate.capacity import balanced_ratio, capacity
from sglang_agent.simulate.script import mean_final_context, script_of
from sglang_agent.trace import read_trace, write_trace

from .batches import SMALL, make_trace

ROOM = 10


@pytest.fixture
def trace_file(tmp_path):
    """20 trajectories whose contexts grow over 6 turns."""
    path = tmp_path / "trace.jsonl"
    write_trace(path, make_trace(20, 6, first=3000, grow=500, job_s=lambda i, k: 0.0))
    return path


@pytest.fixture
def model_file(tmp_path, trace_file):
    """A deployment with room for 10 of them, and the ratio that makes it so."""
    deployment = msgspec.structs.replace(SMALL, name="tight", state_bytes_per_slot=300)
    context = mean_final_context([script_of(r) for r in read_trace(trace_file)])
    ratio = balanced_ratio(deployment, context)
    of_one = capacity(deployment, ratio, context).trajectories
    deployment = msgspec.structs.replace(
        deployment, cache_bytes=deployment.cache_bytes * (ROOM + 0.2) / of_one
    )
    path = tmp_path / "tight.json"
    path.write_bytes(msgspec.json.encode(deployment))
    return path


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_sweep_tells_how_much_concurrency_the_cache_holds(
    trace_file, model_file, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["simulate", str(trace_file), "--cost-model", str(model_file)]
    folder = tmp_path / "out"
    arguments = ["--sweep", "sample-concurrency=10,16", "--output", str(folder)]
    assert main([*command, *arguments]) == 0
    said = capsys.readouterr().out
    assert "safe value 10" in said
    found = msgspec.json.decode((folder / "sweep.json").read_bytes())
    at_10, at_16 = (p["report"]["new_prefill_tokens"] for p in found["points"])
    assert at_16 > 1.25 * at_10
    assert f"16: {at_16:,} ({at_16 / at_10:.2f}x)" in said
    assert (folder / "sweep.png").exists()


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_one_simulation_leaves_what_a_live_run_leaves(
    trace_file, model_file, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["simulate", str(trace_file), "--cost-model", str(model_file)]
    folder = tmp_path / "out"
    arguments = ["--schedule-policy", "routing-prefix", "--output", str(folder)]
    assert main([*command, *arguments]) == 0
    assert "makespan" in capsys.readouterr().out
    report = msgspec.json.decode((folder / "report.json").read_bytes())
    assert report["completed"] == 20
    run = report["run"]
    assert run["simulated"] is True
    assert run["settings"]["sample_concurrency"] == ROOM
    assert run["settings"]["ratio"] == pytest.approx(run["pools"]["ratio"])
    assert len(read_trace(folder)) == 20


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_urls_of_the_workers_decide_who_serves_a_label(
    trace_file, model_file, capsys
) -> None:
    """As in the gateway: the same ring, so the same homes."""
    urls = ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
    command = ["simulate", str(trace_file), "--cost-model", str(model_file), "--json"]
    routing = ["--router-policy", "consistent_hashing", "--worker-urls", *urls]
    assert main([*command, *routing]) == 0
    report = msgspec.json.decode(capsys.readouterr().out)
    ring = HashRing(urls)
    turns = dict.fromkeys(urls, 0)
    for record in read_trace(trace_file):
        stages = [s for s in record.stages if isinstance(s, InferenceStage)]
        turns[ring.order(record.label)[0]] += len(stages)
    served = {share["worker"]: share["requests"] for share in report["workers"]}
    assert served == turns


def test_generate_writes_a_trace_that_can_be_read(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    assert main(["generate", "widesearch", "-o", str(path), "--scale", "1/20"]) == 0
    assert len(read_trace(path)) == 10


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--ratio", "much"], "--ratio must be"),
        (["--ratio=-1"], "--ratio must be"),
        (["--sample-concurrency", "many"], "--sample-concurrency must be"),
        (["--scale", "2"], "--scale must be"),
        (["--router-policy", "nearest"], "--router-policy"),
        (["--cost-model", "nothing"], "cost-model"),
        (["--workers", "0"], "workers must be >= 1, got 0"),
        (["--workers", "2", "--worker-urls", "a"], "worker_names must be 2 different"),
        (
            ["--worker-urls", "a", "a"],
            "worker_names must be 2 different ones, got a, a",
        ),
        (["--env-concurrency", "0"], "env_concurrency must be > 0"),
        (["--lbch-load-factor", "0.5"], "load factor: 0.5"),
        (["--sweep", "lbch-load-factor=1.25,0.5"], "load factor: 0.5"),
        (["--sweep", "workers=1,0"], "workers must be >= 1, got 0"),
        (["--sweep", "colour=red"], "sweep: 'colour=red'"),
        (["--python", "/nowhere/python"], "--python"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    trace_file, tmp_path, capsys, arguments, named
) -> None:
    folder = tmp_path / "out"
    code = main(["simulate", str(trace_file), *arguments, "--output", str(folder)])
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert not folder.exists()


def test_a_trace_that_is_not_there_is_named(tmp_path, capsys) -> None:
    assert main(["simulate", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
