"""``python -m sglang_agent run`` end to end against a stub server."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_agent.__main__ import main
from sglang_agent.environments.base import Environment
from sglang_agent.journal import read
from sglang_agent.labels import make_label
from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Outcome,
    ToolDefinition,
)
from sglang_agent.testing.stub_worker import StubWorker
from sglang_agent.trace import read_trace

from .run_support import (
    StubKind,
    arguments,
    registered,
    serving,
    start_client,
    write_tasks,
)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second a run and has tests of its own."""
    monkeypatch.setattr("sglang_agent.report.files.write_plots", lambda *_: [])


@pytest.mark.parametrize("order", ["fcfs", "caas", "depth"])
def test_a_batch_leaves_journal_trace_and_report(
    order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 12)
    out = tmp_path / "run"
    worker = StubWorker(tool_turns=3)
    with serving(worker) as url, registered(StubKind()) as kind:
        code = main(arguments(tasks, url, out, "--job-order", order))
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "12 samples, CS=4 (given), CE=2 (given)" in shown.splitlines()[0]

    records = read_trace(out)
    assert len(records) == 12
    assert {r.outcome for r in records} == {Outcome.COMPLETED}
    for record in records:
        kinds = [type(stage) for stage in record.stages]
        assert kinds == [InferenceStage, EnvironmentStage] * 3 + [InferenceStage]
        assert record.submitted_s <= record.admitted_s <= record.ended_s
    assert kind.peak <= 2
    assert sorted(kind.opened) == sorted(kind.closed)
    # Every turn of a sample carried the sample's label.
    assert Counter(worker.labels.values()) == {4: 12}
    assert set(worker.labels) == {record.label for record in records}

    report = json.loads((out / "report.json").read_text())
    assert report["samples"] == 12
    assert report["completed"] == 12
    assert json.loads((out / "config.json").read_text())["job_order"] == order
    assert len(read(out / "journal.jsonl").samples) == 12


def test_the_same_command_again_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 5)
    worker = StubWorker()
    with serving(worker) as url, registered(StubKind()):
        command = arguments(tasks, url, tmp_path / "run")
        assert main(command) == 0
        served = worker.served
        capsys.readouterr()
        assert main(command) == 0
    assert worker.served == served
    assert "5 done before, 0 to run" in capsys.readouterr().out


def test_identity_is_content_not_position(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 6)
    with serving(StubWorker()) as url, registered(StubKind()) as kind:
        command = arguments(tasks, url, tmp_path / "run")
        assert main(command) == 0
        lines = tasks.read_text().splitlines()
        changed = lines[2].replace("task 2", "another task 2")
        tasks.write_text("\n".join([lines[5], lines[0], changed, lines[3]]))
        kind.opened.clear()
        assert main(command) == 0
    assert kind.opened == ["s-002"]
    assert {r.sample_id for r in read_trace(tmp_path / "run")} == {
        "s-000",
        "s-002",
        "s-003",
        "s-005",
    }


@pytest.mark.slow
def test_killed_and_started_again_each_sample_once(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 100)
    out = tmp_path / "run"
    with serving(StubWorker(delay_s=0.03)) as url:
        command = arguments(tasks, url, out)
        client = start_client(command)
        assert client.stdout is not None
        done = 0
        for line in client.stdout:
            done += line.startswith("done ")
            if done == 60:
                client.send_signal(signal.SIGKILL)
                break
        announced = {m[1] for m in re.finditer(r"done (\S+):", client.stdout.read())}
        client.wait()
        client.stdout.close()
        kept = read(out / "journal.jsonl")
        # What was reported as done is complete on disk.
        assert len(kept.samples) >= 60
        assert announced <= {r.sample_id for r in kept.samples.values()}

        second = start_client(command)
        text, _ = second.communicate(timeout=60)
        assert second.returncode == 0, text
    ran = [m[1] for m in re.finditer(r"^done (\S+):", text, re.MULTILINE)]
    assert len(ran) == 100 - len(kept.samples)
    after = read(out / "journal.jsonl")
    assert Counter(r.sample_id for r in after.samples.values()) == Counter(
        f"s-{index:03d}" for index in range(100)
    )
    assert len(read_trace(out)) == 100
    report = json.loads((out / "report.json").read_text())
    assert report["samples"] == 100
    assert report["resumed"]


def choices_by_sample(worker: StubWorker) -> dict[str, list[str]]:
    """What each sample asked with, in order; samples are told apart by first message."""
    found: dict[str, list[str]] = {}
    for request in worker.requests:
        first = request["messages"][0]["content"]
        found.setdefault(first, []).append(request["tool_choice"])
    return found


def test_final_answer_turn_completes_at_max_turns(tmp_path: Path) -> None:
    limits = {"max_turns": 3, "final_answer_turn": True}
    tasks = write_tasks(tmp_path / "tasks.jsonl", 2, limits=limits)
    worker = StubWorker()
    with serving(worker) as url, registered(StubKind()):
        code = main(
            arguments(tasks, url, tmp_path / "run", "--tool-choice", "required")
        )
    assert code == 0
    # "none" would take the tools out of the prompt, and its cached prefix with them.
    asked = choices_by_sample(worker)
    assert list(asked.values()) == [["required", "required", "auto"]] * 2
    assert all(request["tools"] for request in worker.requests)


def test_a_call_in_the_final_turn_is_refused_and_an_answer_asked_for(
    tmp_path: Path,
) -> None:
    limits = {"max_turns": 3, "final_answer_turn": True}
    tasks = write_tasks(tmp_path / "tasks.jsonl", 2, limits=limits)
    worker, kind = StubWorker(tool_turns=99), StubKind()
    with serving(worker) as url, registered(kind):
        code = main(arguments(tasks, url, tmp_path / "run", "--tool-choice", "auto"))
    assert code == 0
    asked = choices_by_sample(worker)
    assert list(asked.values()) == [["auto", "auto", "auto", "none"]] * 2
    assert kind.jobs == 4  # the calls of the final turns were not run
    for record in read_trace(tmp_path / "run"):
        assert record.outcome is Outcome.COMPLETED
        refusal = record.stages[-2]
        assert isinstance(refusal, EnvironmentStage)
        assert not refusal.operations
        assert [m["tool_call_id"] for m in refusal.response or ()] == ["call-2"]
        answer = record.stages[-1]
        assert isinstance(answer, InferenceStage)
        assert answer.message == {
            "role": "assistant",
            "content": "answer after 3 turns",
        }


def test_a_refused_call_leaves_the_context_as_it_was_sent(tmp_path: Path) -> None:
    limits = {"max_turns": 1, "final_answer_turn": True}
    tasks = write_tasks(tmp_path / "tasks.jsonl", 1, limits=limits)
    worker = StubWorker(tool_turns=99)
    with serving(worker) as url, registered(StubKind()):
        assert main(arguments(tasks, url, tmp_path / "run")) == 0
    first, last = worker.requests
    sent = len(first["messages"])
    assert last["messages"][:sent] == first["messages"]
    assert [m["role"] for m in last["messages"][sent:]] == ["assistant", "tool"]
    assert last["tools"] == first["tools"]


def test_max_turns_without_an_answer_is_a_budget_failure(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 1, limits={"max_turns": 2})
    with serving(StubWorker(tool_turns=9)) as url, registered(StubKind()):
        code = main(arguments(tasks, url, tmp_path / "run"))
    assert code == 1
    (record,) = read_trace(tmp_path / "run")
    assert record.outcome is Outcome.BUDGET
    assert record.error == "max_turns 2 reached after 2 turns"


BAD_LINES = {
    "not json": ("{", "JSON is malformed|truncated"),
    "unknown field": ('{"id": "x", "messages": [{"role": "user"}], "tool": 1}', "tool"),
    "no messages": ('{"id": "x", "messages": []}', "messages: .*at least one"),
    "bad limit": (
        '{"id": "x", "messages": [{"role": "user"}], "limits": {"max_turns": 0}}',
        r"limits.max_turns: 0; must be >= 1",
    ),
    "unknown environment": (
        '{"id":"x","messages":[{"role":"user"}],"environment":{"type":"nowhere"}}',
        "environment.type: 'nowhere' is unknown",
    ),
    "id twice": (
        '{"id": "s-000", "messages": [{"role": "user"}]}',
        r"id: 's-000' is also on line 1",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_broken_line_is_named(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, message = BAD_LINES[case]
    with registered(StubKind()):
        tasks = write_tasks(tmp_path / "tasks.jsonl", 2)
        tasks.write_text(tasks.read_text() + line + "\n")
        code = main(arguments(tasks, "http://127.0.0.1:1", tmp_path / "run"))
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1
    assert f"{tasks}:3: " in error
    assert re.search(message, error)
    assert not (tmp_path / "run").exists()


BAD_FLAGS = {
    "CE 0": (["--env-concurrency", "0"], r"--env-concurrency: 0; must be .* >= 1"),
    "CS 0": (["--sample-concurrency", "0"], "--sample-concurrency: 0"),
    "CS text": (["--sample-concurrency", "many"], "must be auto or a whole number"),
    "limit": (["--limit", "0"], "--limit: 0"),
    "order": (["--job-order", "lifo"], "--job-order: invalid choice: 'lifo'"),
    "band": (["--caas-band-s", "0"], "--caas-band-s: 0; must be a number > 0"),
    "server limit": (["--server-limit", "a"], "must be NAME=JOBS"),
    "tool choice": (["--tool-choice", "maybe"], "must be one of auto, required, none"),
    "auto": (["--sample-concurrency", "auto"], "reports no hybrid_capacity"),
    "class": (["--retry-failed", "bad"], "must be one of environment, inference"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_a_bad_flag_is_one_line_and_exit_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, message = BAD_FLAGS[case]
    tasks = write_tasks(tmp_path / "tasks.jsonl", 1)
    with serving(StubWorker()) as url, registered(StubKind()):
        try:
            code = main(arguments(tasks, url, tmp_path / "run", *flags))
        except SystemExit as leaving:  # argparse leaves by itself
            code = int(leaving.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert not (tmp_path / "run").exists()


def test_nobody_at_the_base_url(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 1)
    with registered(StubKind()):
        code = main(arguments(tasks, "http://127.0.0.1:1", tmp_path / "run"))
    error = capsys.readouterr().err
    assert code == 2
    assert re.match(r"error: --base-url: http://127.0.0.1:1; must be a server", error)
    assert error.count("\n") == 1


def test_auto_sums_the_reference_concurrency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 1)
    info = {"hybrid_capacity": {"reference_concurrency": 7}}
    with serving(StubWorker(server_info=info)) as url, registered(StubKind()):
        command = arguments(
            tasks, url, tmp_path / "run", "--sample-concurrency", "auto"
        )
        assert main(command) == 0
    assert "CS=7 (auto: reference concurrency)" in capsys.readouterr().out


def test_another_model_needs_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 1)
    with serving(StubWorker()) as url, registered(StubKind()):
        assert main(arguments(tasks, url, tmp_path / "run")) == 0
        code = main(arguments(tasks, url, tmp_path / "run", "--model", "other"))
    assert code == 2
    assert "was made with model 'stub', not 'other'" in capsys.readouterr().err


def test_labels_are_valid_unique_and_stable() -> None:
    label = make_label("täsk 1 " + "x" * 200, "key-1")
    assert label == make_label("täsk 1 " + "x" * 200, "key-1")
    assert label != make_label("täsk 1 " + "x" * 200, "key-2")
    assert len(label) <= 128
    assert re.fullmatch(r"[\x21-\x7e]+", label)


def test_a_default_env_concurrency_is_finite_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 1)
    with serving(StubWorker()) as url, registered(StubKind()):
        command = arguments(tasks, url, tmp_path / "run")
        at = command.index("--env-concurrency")
        assert main(command[:at] + command[at + 2 :]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert re.match(r"1 samples, CS=4 \(given\), CE=\d+ \(2 per CPU core\)", first)


def test_help_tells_counts_from_concurrency(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "how many samples, not how many at once: --limit SAMPLES" in text
    assert "both limits hold for the whole run, over all tasks:" in text
    assert not re.search(r"(^|\s)-n\b", text)


def test_the_library_needs_nothing_but_python() -> None:
    code = (
        "import sglang_agent, sys;"
        "print(sorted({'aiohttp', 'msgspec', 'orjson', 'rich', 'sglang'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_environments_are_not_all_started_at_once(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 12)
    starting, peak = [0], [0]

    class SlowStart(StubKind):
        def create(self, config: Mapping[str, Any], sample_id: str) -> Environment:
            environment = super().create(config, sample_id)
            begin = environment.open

            async def slow() -> Sequence[ToolDefinition]:
                starting[0] += 1
                peak[0] = max(peak[0], starting[0])
                await asyncio.sleep(0.01)
                starting[0] -= 1
                return await begin()

            environment.open = slow  # type: ignore[method-assign]
            return environment

    with serving(StubWorker()) as url, registered(SlowStart()):
        flags = ("--sample-concurrency", "12")
        assert main(arguments(tasks, url, tmp_path / "run", *flags)) == 0
    assert peak == [2]


def test_a_disk_that_refuses_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 3)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with serving(StubWorker()) as url, registered(StubKind()):
        monkeypatch.setattr("sglang_agent.journal.Journal._write", full)
        assert main(arguments(tasks, url, tmp_path / "run")) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
