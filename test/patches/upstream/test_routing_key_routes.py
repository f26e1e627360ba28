"""Unit tests for the routing key: from header or body, single and batched."""

import asyncio
import unittest
from types import SimpleNamespace

from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
)
from sglang.srt.entrypoints.routing_key import apply_header
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


class TestRoutingKey(CustomTestCase):
    def apply(self, headers, key):
        obj = GenerateReqInput(text="x", routing_key=key)
        apply_header(obj, SimpleNamespace(headers=headers))
        return obj.routing_key

    def test_the_header_wins_over_the_body(self):
        self.assertEqual(self.apply({"x-smg-routing-key": "h"}, "b"), "h")
        self.assertEqual(self.apply({"x-smg-routing-key": ""}, "b"), "b")
        self.assertEqual(self.apply({}, "b"), "b")
        self.assertIsNone(self.apply({}, None))

    def test_a_request_may_come_without_headers(self):
        for request in (None, SimpleNamespace()):
            obj = GenerateReqInput(text="x", routing_key="b")
            apply_header(obj, request)
            self.assertEqual(obj.routing_key, "b")

    def test_every_request_of_a_batch_keeps_the_key(self):
        batches = (
            GenerateReqInput(text=["a", "b"], routing_key="k"),
            EmbeddingReqInput(text=["a", "b"], routing_key="k"),
            EmbeddingReqInput(
                text=[["a", "b"], ["c", "d"]],
                routing_key="k",
                is_cross_encoder_request=True,
            ),
        )
        for batch in batches:
            batch.normalize_batch_and_arguments()
            self.assertEqual([batch[i].routing_key for i in (0, 1)], ["k", "k"])

    def test_the_openai_style_bodies_take_the_key(self):
        messages = [{"role": "user", "content": "x"}]
        bodies = (
            ChatCompletionRequest(messages=messages, routing_key="k"),
            CompletionRequest(prompt="x", routing_key="k"),
            ResponsesRequest(input="x", routing_key="k"),
            AnthropicMessagesRequest(
                model="m", messages=messages, max_tokens=1, routing_key="k"
            ),
        )
        for body in bodies:
            self.assertEqual(body.routing_key, "k")
            self.assertEqual(body.pd_routing_kwargs()["routing_key"], "k")

    def test_the_offline_engine_takes_the_key(self):
        taken = []

        async def generate_request(obj, _request):
            taken.append(obj.routing_key)
            yield {}

        engine = Engine.__new__(Engine)
        engine.tokenizer_manager = SimpleNamespace(generate_request=generate_request)
        engine._resolve_routed_dp_rank = lambda *args, **kwargs: None
        engine.loop = asyncio.new_event_loop()
        self.addCleanup(engine.loop.close)

        engine.generate("x", routing_key="k")

        engine.loop.run_until_complete(engine.loop.shutdown_asyncgens())
        self.assertEqual(taken, ["k"])


if __name__ == "__main__":
    unittest.main()
