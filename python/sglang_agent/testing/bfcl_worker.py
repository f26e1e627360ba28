"""A stub worker that gives the right answers to BFCL multi-turn tasks.

It answers every request of the user with the calls that the data set holds as right,
so that whole trajectories run without a model and are scored 1.
"""

from __future__ import annotations

import math
from typing import Any

import orjson
from aiohttp import web

from sglang_agent.environments import bfcl_data
from sglang_agent.environments.bfcl import STEPS_PER_TURN, make_methods
from sglang_agent.testing.stub_worker import LABEL_HEADER, StubWorker

Call = tuple[str, dict[str, Any]]


def right_steps(entry: bfcl_data.Entry) -> list[list[list[Call]]]:
    """The right calls of a task by user turn and step, as names and arguments.

    A step is one call, or a few where a turn needs more calls than it may have steps.
    """
    methods = make_methods(entry)
    truth = bfcl_data.ground_truth(entry.category)[entry.id]
    return [
        _in_steps([bfcl_data.parse_call(text, methods) for text in turn])
        for turn in truth
    ]


def _in_steps(calls: list[Call]) -> list[list[Call]]:
    size = max(math.ceil(len(calls) / STEPS_PER_TURN), 1)
    return [calls[place : place + size] for place in range(0, len(calls), size)]


class BfclWorker(StubWorker):
    """Answers from the ground truth; the label says which task is asking."""

    async def _begin(
        self, request: web.Request
    ) -> tuple[dict[str, Any], web.StreamResponse | None]:
        body, failure = await super()._begin(request)
        sample, _, _ = request.headers.get(LABEL_HEADER, "").rpartition("-")
        return {**body, "sample": sample}, failure

    def _message(self, body: dict[str, Any]) -> dict[str, Any]:
        messages = body["messages"]
        asked = [place for place, m in enumerate(messages) if m["role"] == "user"]
        made = sum(m["role"] == "assistant" for m in messages[asked[-1] :])
        steps = right_steps(bfcl_data.entry(body["sample"]))[len(asked) - 1]
        if made == len(steps):
            return {"role": "assistant", "content": "Done."}
        calls = [
            {
                "id": f"call-{made}-{place}",
                "type": "function",
                "function": {"name": name, "arguments": orjson.dumps(known).decode()},
            }
            for place, (name, known) in enumerate(steps[made])
        ]
        return {"role": "assistant", "content": None, "tool_calls": calls}
