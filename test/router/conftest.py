"""The gateway's tests run on the loop that the gateway runs on."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parent))

# A busy machine is no failure.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop for every async test in this folder."""
    return {"uvloop": uvloop.new_event_loop}
