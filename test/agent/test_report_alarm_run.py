"""A run says while it goes on that the cache has stopped to help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_agent.__main__ import main
from sglang_agent.testing.stub_worker import StubWorker

from .run_support import StubKind, arguments, registered, serving, write_tasks


class Forgetful(StubWorker):
    """Reports no cached tokens once it has served so many requests."""

    def _usage(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        usage = super()._usage(messages)
        if self.served > 60:
            usage["prompt_tokens_details"] = {"cached_tokens": 0}
        return usage


@pytest.mark.parametrize(("kind", "alarms"), [(Forgetful, 1), (StubWorker, 0)])
@pytest.mark.slow
def test_the_alarm_is_raised_once_and_kept(
    kind: type[StubWorker],
    alarms: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", 30)
    with registered(StubKind()), serving(kind(tool_turns=5)) as url:
        assert main(arguments(tasks, url, tmp_path / "run")) == 0
    output = capsys.readouterr().out.replace("\n", " ")
    live, _, final = output.partition("makespan")
    assert live.count("cache reuse has stopped") == alarms
    assert final.count("cache reuse has stopped") == alarms
