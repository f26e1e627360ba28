"""Traces, workloads, cost models and settings of the simulator."""

import argparse
import statistics

import msgspec
import pytest

from sglang_agent.commands import simulate as simulate_command
from sglang_agent.errors import UsageError
from sglang_agent.records import InferenceStage, TrajectoryRecord
from sglang_agent.report import build_report
from sglang_agent.simulate.advice import advice, describe, safe_concurrency
from sglang_agent.simulate.capacity import balanced_ratio, capacity
from sglang_agent.simulate.cost_model import load_deployment, names
from sglang_agent.simulate.heatmap import render_text, write_png
from sglang_agent.simulate.script import mean_final_context, script_of, text_of
from sglang_agent.simulate.settings import SimulationSettings
from sglang_agent.simulate.sweep import Point, grid, parse_axes
from sglang_agent.simulate.workloads import WORKLOADS, generate
from sglang_agent.trace import write_trace

from .batches import SMALL, make_trace

H20 = "h20-tp4-ling-3.0-flash"


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_meet_the_published_marginals(name: str) -> None:
    workload = WORKLOADS[name]
    scripts = [script_of(record) for record in generate(name)]
    turns = [turn for script in scripts for turn in script.turns]
    assert len(scripts) == workload.trajectories
    assert len(turns) == workload.requests
    assert sum(t.output.length + 1 for t in turns) == workload.output_tokens
    mean = mean_final_context(scripts)
    assert mean == pytest.approx(workload.final_context_tokens, rel=1e-4)


@pytest.mark.parametrize("name", ["mcp_atlas", "swe_live"])
def test_environment_times_meet_their_mean(name: str) -> None:
    jobs = [
        turn.job.duration_s
        for record in generate(name, seed=1)
        for turn in script_of(record).turns
        if turn.job
    ]
    assert statistics.fmean(jobs) == pytest.approx(WORKLOADS[name].environment_mean_s)
    assert statistics.median(jobs) < 0.8 * statistics.fmean(jobs)


@pytest.mark.parametrize("seed", [0, 1])
def test_one_chain_is_far_deeper_than_the_others_and_fits_the_model(seed: int) -> None:
    workload = WORKLOADS["mcp_atlas"]
    scripts = [script_of(record) for record in generate("mcp_atlas", seed=seed)]
    place = round(workload.longest_place * len(scripts))
    depths = [len(script.turns) for script in scripts]
    assert depths[place] == workload.longest_turns
    assert 1.5 * max(depths[:place] + depths[place + 1 :]) < depths[place]
    longest = max(script.final_context_tokens for script in scripts)
    assert longest < load_deployment(H20).context_length_tokens


@pytest.mark.parametrize(
    ("name", "ratio", "concurrency"),
    [("swe", 0.09, 98), ("bfcl", 2.26, 859), ("widesearch", 0.10, 112)],
)
def test_the_shipped_deployment_gives_the_published_capacity(
    name: str, ratio: float, concurrency: int
) -> None:
    deployment = load_deployment(H20)
    context = WORKLOADS[name].final_context_tokens
    balanced = balanced_ratio(deployment, context)
    assert balanced == pytest.approx(ratio, rel=0.05)
    found = capacity(deployment, balanced, context)
    assert found.kv_trajectories == pytest.approx(found.state_trajectories)
    # One budget meets swe and bfcl; the 98 published for widesearch asks for less.
    assert found.reference_concurrency == pytest.approx(concurrency, abs=1)


def test_the_first_response_of_widesearch_is_long() -> None:
    """The prompt is short enough for its shared part to be more than 30% of it."""
    for record in generate("widesearch"):
        first, second = (
            s for s in record.stages if isinstance(s, InferenceStage) and s.turn <= 2
        )
        assert record.shared_tokens > 0.3 * first.input_tokens
        grown = second.input_tokens - first.input_tokens - first.output_tokens
        assert grown > WORKLOADS["widesearch"].first_response_tokens > 10_000


def test_equal_seeds_give_equal_traces() -> None:
    assert generate("swe", scale=0.1, seed=3) == generate("swe", scale=0.1, seed=3)
    assert generate("swe", scale=0.1, seed=3) != generate("swe", scale=0.1, seed=4)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_scaled_workload_is_like_the_whole_one(name: str) -> None:
    whole, part = generate(name), generate(name, scale=1 / 8)
    kept = {record.label for record in part}
    assert [record for record in whole if record.label in kept] == part
    for measure in (_turns, _input_tokens):
        expected = sum(map(measure, whole))
        if WORKLOADS[name].longest_turns:  # the one exception is left out
            expected -= max(map(measure, whole))
        assert sum(map(measure, part)) * len(whole) / len(part) == pytest.approx(
            expected, rel=0.06
        )


def _turns(record: TrajectoryRecord) -> int:
    return sum(isinstance(stage, InferenceStage) for stage in record.stages)


def _input_tokens(record: TrajectoryRecord) -> int:
    return sum(s.input_tokens for s in record.stages if isinstance(s, InferenceStage))


@pytest.mark.parametrize(("name", "scale"), [("nope", 1.0), ("swe", 0.0), ("swe", 1.5)])
def test_bad_workloads_are_named(name: str, scale: float) -> None:
    with pytest.raises(UsageError, match=r"workload|scale"):
        generate(name, scale=scale)


def test_a_scaled_deployment_keeps_time_and_capacity_in_proportion() -> None:
    whole = load_deployment(H20)
    part = whole.scaled(1 / 8)
    assert part.cache_bytes * 8 == whole.cache_bytes
    assert part.passes.pass_s == whole.passes.pass_s
    # Turns are as long as before, and leave as many states: a chunk stays whole.
    assert part.chunked_prefill_tokens == whole.chunked_prefill_tokens
    # An eighth of the tokens, and a decode pass of an eighth of the batch, take as long.
    assert part.passes.prefill_token_s == pytest.approx(
        8 * whole.passes.prefill_token_s
    )
    # The queue is an eighth as long; that it is ordered less often, the worker knows.
    assert part.passes.waiting_token_s == pytest.approx(
        8 * whole.passes.waiting_token_s
    )
    cost = SimulationSettings(deployment=part, sample_concurrency=1).worker_config()
    assert cost["cost"]["scale"] == 1 / 8
    context = 70_000
    of_part, of_whole = (capacity(d, 0.1, context) for d in (part, whole))
    assert of_part.trajectories * 8 == pytest.approx(of_whole.trajectories)


def test_every_shipped_cost_model_can_be_read() -> None:
    assert H20 in names()
    for name in names():
        deployment = load_deployment(name)
        assert deployment.name == name
        assert deployment.fit, "it must say where its figures come from"


def test_an_unknown_cost_model_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=H20):
        load_deployment("nothing")


def test_a_broken_cost_model_names_file_and_field(tmp_path) -> None:
    content = msgspec.to_builtins(SMALL)
    content["passes"]["pass_s"] = 0
    file = tmp_path / "model.json"
    file.write_bytes(msgspec.json.encode(content))
    with pytest.raises(UsageError, match=r"model\.json.*pass_s must be > 0"):
        load_deployment(str(file))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_concurrency", 0),
        ("workers", 0),
        ("ratio", -1.0),
        ("env_concurrency", 0),
        ("time_limit_s", 0.0),
        ("max_new_tokens", 0),
    ],
)
def test_bad_settings_are_named(field: str, value: float) -> None:
    good = {"deployment": SMALL, "sample_concurrency": 1}
    with pytest.raises(UsageError, match=field):
        SimulationSettings(**{**good, field: value})


def test_a_script_follows_the_recorded_counts() -> None:
    record = make_trace(1, 3, first=100, grow=10, shared=40, output=lambda i, k: 5)[0]
    script = script_of(record)
    (head,) = script.turns[0].restart or []
    assert head.length == 40
    assert [turn.added.length for turn in script.turns] == [60, 10, 10]
    assert [turn.output.length for turn in script.turns] == [4, 4, 4]
    assert [t.restart is None for t in script.turns] == [False, True, True]
    assert script.final_context_tokens == 100 + 2 * 10 + 3 * 5


def test_a_context_that_shrinks_starts_anew() -> None:
    record = make_trace(1, 3, first=100, grow=10, shared=40)[0]
    stages = [
        msgspec.structs.replace(s, input_tokens=90)
        if isinstance(s, InferenceStage) and s.turn == 3
        else s
        for s in record.stages
    ]
    script = script_of(msgspec.structs.replace(record, stages=stages))
    (head,) = script.turns[2].restart or []
    assert head.length == 40
    assert script.turns[2].added.length == 50


def test_a_prompt_shorter_than_the_shared_part_is_all_shared() -> None:
    """As when the last turn is asked without tools."""
    record = make_trace(1, 1, first=30, shared=40)[0]
    (turn,) = script_of(record).turns
    assert turn.restart is not None
    assert [s.length for s in (*turn.restart, turn.added)] == [30, 0]


def test_messages_tell_what_trajectories_share() -> None:
    system = {"role": "system", "content": "You repair code. " * 20}
    record = make_trace(1, 1, first=400)[0]
    heads = []
    for task in ("first task", "another task"):
        own = {"role": "user", "content": task}
        changed = msgspec.structs.replace(
            record, shared_tokens=None, initial_messages=[system, own]
        )
        heads += script_of(changed).turns[0].restart or []
    assert heads[0].seed == heads[1].seed
    assert 200 < heads[0].length < 400


def test_text_shares_prefixes_as_the_tokens_do() -> None:
    script = script_of(make_trace(1, 2)[0])
    first = [script.turns[0].added, script.turns[0].output]
    longer = [*first, script.turns[1].added]
    assert text_of(longer).startswith(text_of(first))
    other = script_of(make_trace(2, 1)[1])
    assert not text_of([other.turns[0].added]).startswith(text_of(first)[:16])


def test_axes_are_read_and_crossed() -> None:
    ratios = {"profile": 0.1, "default": 0.9}
    axes = parse_axes(["ratio=profile,0.9", "sample-concurrency=10,16"], ratios)
    assert axes["ratio"] == parse_axes(["ratio=0.1,default"], ratios)["ratio"]
    assert list(grid(axes)) == [
        {"ratio": 0.1, "sample_concurrency": 10},
        {"ratio": 0.1, "sample_concurrency": 16},
        {"ratio": 0.9, "sample_concurrency": 10},
        {"ratio": 0.9, "sample_concurrency": 16},
    ]


@pytest.mark.parametrize("word", ["colour=red", "ratio", "ratio=a", "workers=1.5"])
def test_bad_axes_are_named(word: str) -> None:
    with pytest.raises(UsageError, match=f"sweep: '{word}'"):
        parse_axes([word], {"profile": 0.1})


def test_a_bad_ratio_is_told_what_is_allowed() -> None:
    with pytest.raises(UsageError, match=r"'ratio=best'; allowed: numbers, profile$"):
        parse_axes(["ratio=best"], {"profile": 0.1})
    with pytest.raises(UsageError, match=r"'workers=profile'; allowed: numbers$"):
        parse_axes(["workers=profile"], {"profile": 0.1})


def make_point(
    concurrency: int, minutes: float, prefill: int, over: bool = False
) -> Point:
    report = msgspec.structs.replace(
        build_report([], {}), makespan_s=60 * minutes, new_prefill_tokens=prefill
    )
    return Point({"ratio": 0.1, "sample_concurrency": concurrency}, over, report, [])


def test_advice_names_the_safe_concurrency_and_the_factor() -> None:
    points = [make_point(10, 30.0, 1000), make_point(16, 28.0, 3400)]
    settings = SimulationSettings(deployment=SMALL, sample_concurrency=10)
    lines = "\n".join(advice(points, settings))
    assert "safe value 10" in lines
    assert "16: 3,400 (3.40x)" in lines
    assert "--mamba-full-memory-ratio 0.1" in lines
    assert "--sample-concurrency 16" in lines  # the shorter batch is still recommended


def test_a_scaled_batch_keeps_its_counts_in_proportion() -> None:
    whole = SimulationSettings(
        deployment=SMALL,
        sample_concurrency=100,
        schedule_policy="routing-prefix",
        routing_prefix_capacity=40,
    )
    part = whole.scaled(1 / 8)
    assert part.deployment == SMALL.scaled(1 / 8)
    assert (part.sample_concurrency, part.routing_prefix_capacity) == (12, 5)
    flag = ["--routing-prefix-capacity", "5"]
    assert part.worker_config()["server_args"][-2:] == flag
    fcfs = msgspec.structs.replace(part, schedule_policy="fcfs")
    assert "--routing-prefix-capacity" not in fcfs.worker_config()["server_args"]


def test_the_flags_to_paste_are_those_of_the_whole_deployment(tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, make_trace(16, 2))
    axes = ["sample-concurrency=16", "routing-prefix-capacity=24"]
    parser = argparse.ArgumentParser()
    simulate_command.add_arguments(parser)
    args = parser.parse_args([str(trace), "--scale", "1/8", "--sweep", *axes])
    _, whole, _ = simulate_command.read(args)
    (varied,) = grid(parse_axes(axes, {}))
    point = make_point(16, 30.0, 1000)._replace(varied=varied)
    lines = "\n".join(advice([point], whole))
    assert "--sample-concurrency 16" in lines
    assert "--routing-prefix-capacity 24" not in lines  # fcfs has no use for it
    tried = msgspec.structs.replace(whole, schedule_policy="routing-prefix")
    assert "--routing-prefix-capacity 24" in "\n".join(advice([point], tried))


@pytest.mark.parametrize("policy", ["lbch", "bounded_consistent_hashing"])
def test_a_swept_load_factor_is_a_flag_of_the_gateway(policy: str) -> None:
    settings = SimulationSettings(
        deployment=SMALL, sample_concurrency=4, router_policy=policy
    )
    (varied,) = grid(parse_axes(["lbch-load-factor=1.1"], {}))
    point = make_point(4, 30.0, 1000)._replace(varied=varied)
    assert f"gateway flags: --policy {policy} --lbch-load-factor 1.1" in advice(
        [point], settings
    )
    other = msgspec.structs.replace(settings, router_policy="round_robin")
    assert "gateway flags: --policy round_robin" in advice([point], other)


def test_a_ratio_that_was_derived_is_shown_with_four_digits() -> None:
    report = msgspec.structs.replace(build_report([], {}), makespan_s=60.0)
    point = Point({"ratio": 0.0913751234567}, False, report, [])
    assert describe(point.varied) == "ratio=0.09138"
    swept = point._replace(varied={**point.varied, "sample_concurrency": 10})
    assert "safe value" in safe_concurrency([swept])[0]
    assert "at ratio=0.09138:" in safe_concurrency([swept])[0]
    assert "\n0.09138 " in render_text([point], lambda _: False)


def test_a_cell_that_ran_out_of_time_is_neither_best_nor_safe() -> None:
    points = [make_point(10, 30.0, 1000), make_point(16, 5.0, 900, over=True)]
    settings = SimulationSettings(deployment=SMALL, sample_concurrency=10)
    lines = "\n".join(advice(points, settings))
    assert "best: ratio=0.1 sample-concurrency=10" in lines
    assert "safe value 10" in lines


def test_the_map_marks_the_model_and_the_best(tmp_path) -> None:
    points = [make_point(10, 30.0, 1000), make_point(16, 28.0, 1000)]
    points.append(make_point(20, 0.0, 0, over=True))
    text = render_text(points, lambda p: p.varied["sample_concurrency"] == 10)
    assert "30.0*" in text
    assert "28.0<" in text
    assert "TO" in text
    write_png(points, lambda _: False, tmp_path / "map.png", "test")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
