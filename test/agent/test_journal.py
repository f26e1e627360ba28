"""The journal: durable, append-only, tolerant of a torn end, totals over attempts."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_agent.journal import Journal, JournalError, attempt_times, read
from sglang_agent.records import InferenceStage, Outcome, TrajectoryRecord
from sglang_agent.report import build_report


def record(name: str, content: str = "", **more: object) -> TrajectoryRecord:
    stage = InferenceStage(
        1, 10, 5, 0, 0.0, None, 1.0, message={"role": "assistant", "content": content}
    )
    fields = {
        "label": name,
        "sample_id": name,
        "submitted_s": 0.0,
        "admitted_s": 0.0,
        "ended_s": 1.0,
        "outcome": Outcome.COMPLETED,
        "stages": [stage],
        **more,
    }
    return TrajectoryRecord(**fields)  # type: ignore[arg-type]


async def write(
    path: Path,
    records: list[TrajectoryRecord],
    active: Callable[[], float] = lambda: 1.0,
) -> None:
    async with Journal(path, read(path), active) as journal:
        async with asyncio.TaskGroup() as group:
            for item in records:
                group.create_task(journal.add_sample(f"key-{item.sample_id}", item))
        await journal.add_end("done")


async def test_what_was_added_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    await write(path, [record(f"s{n}") for n in range(50)])
    history = read(path)
    assert history.samples == {f"key-s{n}": record(f"s{n}") for n in range(50)}
    assert history.attempts[0].ended == "done"
    assert history.torn_bytes == 0


async def test_a_large_text_and_an_error_class_survive(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    text = "line of output é\n" * 750_000  # 12 MB
    failed = record("bad", outcome=Outcome.ENVIRONMENT, error="box: gone")
    await write(path, [record("long", text), failed])
    samples = read(path).samples
    stage = samples["key-long"].stages[0]
    assert isinstance(stage, InferenceStage)
    assert stage.message is not None
    assert stage.message["content"] == text
    assert samples["key-bad"] == failed


@pytest.mark.parametrize("cut", [1, 2, 30, 200])
async def test_a_torn_last_row_is_cut_and_the_rest_stays(
    cut: int, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    await write(path, [record("a")])
    whole = path.read_bytes()
    async with Journal(path, read(path), lambda: 1.0) as journal:
        await journal.add_sample("key-b", record("b", "é" * 100))
    with path.open("ab") as file:
        file.truncate(path.stat().st_size - cut)
    torn = read(path)
    assert set(torn.samples) == {"key-a"}
    assert torn.torn_bytes > 0
    await write(path, [record("b")])
    assert path.read_bytes().startswith(whole)
    after = read(path)
    assert set(after.samples) == {"key-a", "key-b"}
    assert after.torn_bytes == 0


@settings(deadline=None, max_examples=25)
@given(keep=st.integers(0, 3000))
def test_a_journal_cut_anywhere_keeps_its_whole_lines(
    keep: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "journal.jsonl"
    asyncio.run(write(path, [record(f"s{n}") for n in range(6)]))
    data = path.read_bytes()[:keep]
    path.write_bytes(data)
    whole = data[: data.rfind(b"\n") + 1]
    history = read(path)
    assert history.whole_bytes == len(whole)
    assert len(history.samples) == whole.count(b'"type":"sample"')


def test_a_broken_complete_line_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    asyncio.run(write(path, [record("a")]))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{broken}\n", *lines[1:]]))
    with pytest.raises(JournalError, match=r"journal.jsonl:2: "):
        read(path)


async def test_totals_over_attempts_leave_the_gap_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    await write(path, [record("a")], lambda: 30.0)
    await write(path, [record("b")], lambda: 20.0)
    history = read(path)
    first, second = history.attempts
    second.started_unix_s = first.started_unix_s + 30.0 + 3600.0
    totals = build_report(
        list(history.samples.values()), {"attempts": attempt_times(history)}
    )
    assert totals.resumed
    assert totals.output_tokens == 10
    assert totals.attempts is not None
    assert totals.attempts.active_s == pytest.approx(50.0)
    assert totals.attempts.gap_s == pytest.approx(3600.0)
    assert totals.attempts.wall_s == pytest.approx(3650.0)


async def test_a_full_disk_fails_the_waiter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    async with Journal(path, read(path), lambda: 1.0) as journal:
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="no space left"):
            await journal.add_sample("key", record("a"))
        monkeypatch.undo()
        await journal.add_sample("key", record("a"))
    assert set(read(path).samples) == {"key"}
