"""The demo's batch over real engines: whole, and killed in the middle."""

import json
import subprocess
import time
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


def test_a_batch_runs_through_every_part(product: Product, tmp_path: Path) -> None:
    """All samples complete, and the schedulers saw the label of every request."""
    done = subprocess.run(command(product, tmp_path, 8), check=False, timeout=600)

    assert done.returncode == 0

    report = json.loads((tmp_path / "report.json").read_text())
    trace = lines(tmp_path / "trace.jsonl")
    turns = [s for row in trace for s in row["stages"] if s["stage"] == "inference"]
    jobs = [s for row in trace for s in row["stages"] if s["stage"] == "environment"]

    assert {"completed"} == {row["outcome"] for row in trace}
    assert len({row["label"] for row in trace}) == 8
    assert jobs
    assert all(job["error"] is None for job in jobs)
    assert len({turn["worker"] for turn in turns}) == 2
    assert any(turn["cached_tokens"] for turn in turns)
    assert (tmp_path / "plots").is_dir()
    assert report["makespan_s"] > 0

    seen = report["run"]["routing_prefix"].values()

    assert len(seen) == 2
    assert len(turns) <= sum(worker["labelled"] for worker in seen)
    assert sum(worker["unlabelled"] for worker in seen) == 0


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
