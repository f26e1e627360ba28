"""The workload profile from each kind of source, and what it says of forks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_agent.__main__ import main
from sglang_agent.errors import UsageError
from sglang_agent.profile import Contexts, Turn, advice, build_profile, follow
from sglang_agent.profile_sources import read_sources
from sglang_agent.records import Outcome
from sglang_agent.trace import write_trace

from .report_data import inference, job, trajectory


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows)
    )
    return path


def test_our_own_run(tmp_path: Path) -> None:
    stages = [
        inference(1, 0, 1, input_tokens=100, output_tokens=20),
        job(1, 1, 2, 5),
        inference(2, 5, 6, input_tokens=150, output_tokens=30),
    ]
    records = [
        trajectory("a", stages, 6.0),
        trajectory("b", stages[:1], 1.0, outcome=Outcome.BUDGET),
        trajectory("c", stages[:1], 1.0, outcome=Outcome.ENVIRONMENT),
        trajectory("d", [], 1.0),
    ]
    write_trace(tmp_path / "trace.jsonl", records)
    with (tmp_path / "trace.jsonl").open("ab") as file:
        file.write(b"{torn")
    source = read_sources([tmp_path])
    assert [bad.number for bad in source.bad] == [5]
    profile = build_profile("run", source.trajectories, incomplete=source.incomplete)
    assert (profile.trajectories, profile.incomplete_trajectories) == (2, 2)
    assert profile.final_context_tokens.mean == (180 + 120) / 2
    assert profile.turns.max == 2
    assert profile.output_tokens_per_turn is not None
    assert profile.output_tokens_per_turn.max == 30
    assert profile.environment_seconds is not None
    assert profile.environment_seconds.mean == 3.0
    assert profile.forked_share == 0.0
    assert profile.states_per_path == 1


def test_agentic_trace_file(tmp_path: Path) -> None:
    def turn(tokens: object) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "x"}], "prompt_tokens": tokens}

    path = tmp_path / "agentic.json"
    conversations = [
        [turn(100), turn(250)],
        [turn(100), {"messages": [], "prompt_tokens": 9}],
        [turn("many")],
        [],
    ]
    path.write_text(json.dumps({"metadata": {}, "conversations": conversations}))
    source = read_sources([path])
    profile = build_profile("t", source.trajectories)
    assert profile.final_context_tokens.mean == (250 + 100) / 2
    assert profile.output_tokens_per_turn is None
    assert [bad.number for bad in source.bad] == [3, 4]
    assert "prompt_tokens is 'many'" in str(source.bad[0])


@pytest.mark.parametrize(
    ("row", "context"),
    [
        ({"usage": {"prompt_tokens": 90, "completion_tokens": 10}}, 100),
        (
            {
                "usage": {
                    "input_tokens": 5,
                    "cache_read_input_tokens": 80,
                    "cache_creation_input_tokens": 5,
                    "output_tokens": 10,
                }
            },
            100,
        ),
        ({"input_tokens": 70, "output_tokens": 30}, 100),
        ({"prompt_tokens": 100}, 100),
    ],
)
def test_spellings_of_usage(tmp_path: Path, row: dict[str, Any], context: int) -> None:
    path = lines(tmp_path / "log.jsonl", [{"session_id": "s", **row}])
    [trajectory] = read_sources([path]).trajectories
    assert trajectory.turns[-1].context_tokens == context


def test_bad_rows_are_named_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"trajectory_id": "a", "input_tokens": 10, "output_tokens": 1}
    rows = [
        good,
        "{torn",
        {"trajectory_id": "a", "input_tokens": -5},
        {"input_tokens": 5},
        {**good, "environment_seconds": -1},
        {"trajectory_id": "a"},
        "",
        {**good, "input_tokens": 20},
        "[1]",
        {**good, "usage": 3},
    ]
    path = lines(tmp_path / "log.jsonl", rows)
    output = tmp_path / "profile.json"
    assert main(["profile", str(path), "-o", str(output)]) == 0
    shown = capsys.readouterr()
    named = [line.split(":")[2] for line in shown.err.splitlines()]
    assert named == ["2", "3", "4", "5", "6", "9", "10"]
    assert "input_tokens is -5" in shown.err
    assert "none of the fields trajectory_id" in shown.err
    profile = json.loads(output.read_text())
    assert profile["skipped_lines"] == 7
    assert profile["final_context_tokens"]["mean"] == 21
    assert "7 lines were left out" in shown.out


def test_nothing_to_measure_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "log.jsonl", ["{"])
    output = tmp_path / "profile.json"
    assert main(["profile", str(path), "-o", str(output)]) == 2
    assert "no complete trajectory" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"conversations": 3}'])
def test_a_json_file_that_is_no_trace(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"x\.json: no"):
        read_sources([path])


def test_lines_in_order_of_their_turn_and_by_a_named_field(tmp_path: Path) -> None:
    rows = [
        {"who": "a", "turn": 2, "input_tokens": 50},
        {"who": "b", "turn": 1, "input_tokens": 7},
        {"who": "a", "turn": 1, "input_tokens": 20},
    ]
    path = lines(tmp_path / "log.jsonl", rows)
    a, b = read_sources([path], "who").trajectories
    assert [turn.input_tokens for turn in a.turns] == [20, 50]
    assert b.id == "b"
    assert len(read_sources([path]).bad) == 3


def grown(*lengths: int) -> list[Turn]:
    return [Turn(length, 10) for length in lengths]


def test_forks_are_measured_and_the_advice_says_what_to_do() -> None:
    """Three of ten trajectories go back from turn 4 to turn 2's context."""
    straight = Contexts("s", grown(100, 200, 300, 400))
    forked = Contexts("f", grown(100, 200, 300, 215))
    profile = build_profile("t", [straight] * 7 + [forked] * 3)
    assert profile.forked_share == pytest.approx(0.3)
    assert profile.shrunk_share == pytest.approx(0.3)
    assert profile.states_per_path == 2
    [fork, shrunk] = advice(profile)
    assert "30.0% of the trajectories go on from an earlier turn" in fork
    assert "--mamba-max-states-per-path 1 keeps only the newest state" in fork
    assert "consider 2" in fork
    assert "shorter context" in shrunk
    assert advice(build_profile("t", [straight])) == []


def test_compaction_below_every_earlier_turn_is_no_fork() -> None:
    path = follow(grown(100, 200, 300, 40))
    assert (path.returns, path.shrinks) == (0, 1)


def messages(*digests: int, tokens: int) -> Turn:
    return Turn(tokens, 10, messages=digests)


def test_with_messages_a_fork_and_a_rewrite_are_told_apart() -> None:
    first, second = messages(1, tokens=10), messages(1, 2, 3, tokens=30)
    onward = messages(1, 2, 3, 4, 5, tokens=50)
    fork = messages(1, 9, 9, 9, 9, 9, tokens=90)
    rewritten = messages(7, 8, tokens=20)
    again = onward
    assert follow([first, second, onward]).returns == 0
    assert follow([first, second, onward, fork]) == follow([first, second, fork])
    assert follow([first, second, fork]).returns == 1
    assert follow([first, second, onward, rewritten]).returns == 0
    assert follow([first, second, onward, again]).returns == 1


@given(st.lists(st.integers(1, 1000), min_size=1))
def test_contexts_that_only_grow_never_fork(steps: list[int]) -> None:
    turns, length = [], 0
    for step in steps:
        length += step
        turns.append(Turn(length, 3))
        length += 3
    path = follow(turns)
    assert (path.returns, path.shrinks) == (0, 0)
