"""The demo's batch over real engines: whole, replayed, and killed in the middle."""

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from .conftest import Product

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


def command(product: Product, folder: Path, tasks: int) -> list[str]:
    """The client's command line for a batch in ``folder``."""
    options = product.demo.parse(
        ["--sample-concurrency", "6", "--env-concurrency", "2"]
    )
    path = product.demo.make_tasks(folder, tasks)
    result: list[str] = product.demo.client_command(
        path, folder, product.url, product.recipe, options
    )
    return result


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a JSON-lines file that may still be written."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [json.loads(row) for row in whole.splitlines()]


def samples(journal: Path) -> list[str]:
    """Names of the samples that are durably done, in journal order."""
    rows = [row for row in lines(journal) if row["type"] == "sample"]
    return [row["record"]["sample_id"] for row in rows]


def turns_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The inference stages of a trace's line."""
    return [stage for stage in row["stages"] if stage["stage"] == "inference"]


@pytest.fixture(scope="module")
def batch(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of eight samples that went well."""
    folder = tmp_path_factory.mktemp("batch")
    done = subprocess.run(command(product, folder, 8), check=False, timeout=600)

    assert done.returncode == 0

    return folder


def replayed(
    product: Product, batch: Path, folder: Path, api: str
) -> list[dict[str, Any]]:
    """The trace of a replay with jobs that take no time."""
    words = [sys.executable, "-m", "sglang_agent", "replay", str(batch)]
    words += ["--base-url", product.url, "--api", api, "--output", str(folder)]
    words += ["--sample-concurrency", "8", "--time-scale", "0"]
    done = subprocess.run(words, check=False, timeout=600)

    assert done.returncode == 0

    return lines(folder / "trace.jsonl")


def test_a_batch_runs_through_every_part(batch: Path) -> None:
    """All samples complete, and the schedulers saw the label of every request."""
    report = json.loads((batch / "report.json").read_text())
    trace = lines(batch / "trace.jsonl")
    turns = [turn for row in trace for turn in turns_of(row)]
    jobs = [s for row in trace for s in row["stages"] if s["stage"] == "environment"]

    assert {"completed"} == {row["outcome"] for row in trace}
    assert len({row["label"] for row in trace}) == 8
    assert jobs
    assert all(job["error"] is None for job in jobs)
    assert len({turn["worker"] for turn in turns}) == 2
    assert any(turn["cached_tokens"] for turn in turns)
    assert (batch / "plots").is_dir()
    assert report["makespan_s"] > 0

    seen = report["run"]["routing_prefix"].values()

    assert len(seen) == 2
    assert len(turns) <= sum(worker["labelled"] for worker in seen)
    assert sum(worker["unlabelled"] for worker in seen) == 0


def test_a_replay_is_token_exact(product: Product, batch: Path, tmp_path: Path) -> None:
    """Every prompt and every answer has the recorded length; the prefix is reused."""
    trace = lines(batch / "trace.jsonl")
    again = replayed(product, batch, tmp_path / "replay", "generate")

    assert [row["label"] for row in again] == [row["label"] for row in trace]
    for before, after in zip(trace, again, strict=True):
        asked = [
            [(turn["input_tokens"], turn["output_tokens"]) for turn in turns_of(row)]
            for row in (before, after)
        ]

        assert asked[0] == asked[1]

    turns = [turn for row in again for turn in turns_of(row)]

    assert len({turn["worker"] for turn in turns}) == 2
    assert any(turn["cached_tokens"] for turn in turns)
    assert all(turn["first_token_s"] for turn in turns)


def test_a_chat_replay_says_the_same_and_hears_as_much(
    product: Product, batch: Path, tmp_path: Path
) -> None:
    """The first prompts are the recorded ones, and every answer is as long."""
    trace = lines(batch / "trace.jsonl")
    again = replayed(product, batch, tmp_path / "replay", "chat")
    for before, after in zip(trace, again, strict=True):
        old, new = turns_of(before), turns_of(after)

        assert [t["output_tokens"] for t in new] == [t["output_tokens"] for t in old]
        assert new[0]["input_tokens"] == old[0]["input_tokens"]
        assert all(a["input_tokens"] < b["input_tokens"] for a, b in pairwise(new))
    # One trajectory may spill to the other worker; all of them do not.
    later = [turn for row in again for turn in turns_of(row)[1:]]
    assert any(turn["cached_tokens"] for turn in later)


def test_kill_9_in_the_middle_loses_and_repeats_nothing(
    product: Product, tmp_path: Path
) -> None:
    """The same command finishes what was not done; every sample is there once."""
    words = command(product, tmp_path, 12)
    journal = tmp_path / "journal.jsonl"
    client = subprocess.Popen(words)
    limit = time.monotonic() + 300
    while len(samples(journal)) < 3:
        assert client.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)
    client.kill()
    client.wait()
    before = samples(journal)

    assert 3 <= len(before) < 12

    done = subprocess.run(words, check=False, timeout=600)

    assert done.returncode == 0

    after = samples(journal)

    assert 12 == len(after) == len(set(after))
    assert before == after[: len(before)]
    assert len(lines(tmp_path / "trace.jsonl")) == 12
