"""Fixtures of the replay and simulation tests."""

from collections.abc import Iterator

import pytest

from sglang_agent.simulate.workers import WorkerPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """One import of SGLang for all virtual workers of the session."""
    # A folder called sglang in the current directory would win over the installed one.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("pool"))
        started = WorkerPool()
        started.__enter__()
    yield started
    started.__exit__(None, None, None)
