"""One validation and one precedence of the label, on every policy."""

from __future__ import annotations

import json

import pytest
from router_harness import bench

from sgl_router.label import parse_label
from sgl_router.policies import POLICIES
from sgl_router.prompt import body_label, content_label, prompt_text


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (b"a", "a"),
        (b"k" * 128, "k" * 128),
        (b"k" * 129, None),
        (b"", None),
        ("schlüssel".encode(), None),
        (b"two words", None),
        (b"tab\tbed", None),
        (b"\x7f", None),
        (b"~!", "~!"),
    ],
)
def test_labels_are_1_to_128_bytes_of_visible_ascii(value, label):
    assert parse_label(value) == label


async def test_label_goes_on_under_one_name():
    async with bench(1) as made:
        await made.ask(b"{}", "X-SMG-Routing-Key: one")
        await made.ask(b"{}", "X-Session-Id: two")
        first, second = made.workers[0].seen
        assert (first.label, second.label) == ("one", "two")
        assert second.header("x-session-id") == "two"
        assert made.gateway.labels.sources["header"] == 2


async def test_first_valid_header_of_the_list_wins():
    async with bench(1, routing_key_headers=("x-a", "x-b")) as made:
        await made.ask(b"{}", "x-b: second", "x-a: first")
        await made.ask(b"{}", "x-b: second", f"x-a: {'k' * 129}")
        await made.ask(b"{}", "x-smg-routing-key: not-listed")
        assert [seen.label for seen in made.workers[0].seen] == [
            "first",
            "second",
            None,
        ]


@pytest.mark.parametrize("value", ["", "k" * 129, "schl\xfcssel"])
async def test_invalid_labels_never_decide_and_are_counted(value):
    async with bench(2) as made:
        workers = {
            (await made.ask(b"{}", f"x-smg-routing-key: {value}")).worker
            for _ in range(4)
        }
        assert len(workers) == 2
        assert made.gateway.labels.sources["invalid"] == 4
        assert all(seen.label is None for w in made.workers for seen in w.seen)


async def test_missing_labels_are_counted_and_warned_of_once(caplog):
    async with bench(2) as made:
        for _ in range(4):
            await made.ask()
        assert made.gateway.labels.sources["none"] == 4
        assert made.gateway.pool.branches["unlabelled"] == 4
    assert caplog.text.count("without a valid routing key") == 1


async def test_required_label_missing_is_400_naming_the_headers():
    async with bench(1, require_routing_key=True) as made:
        reply = await made.ask()
        assert reply.status == 400
        assert "x-smg-routing-key, x-session-id" in reply.json["error"]["message"]
        assert (await made.ask(b"{}", "x-smg-routing-key: a")).status == 200
        client = await made.client()
        await client.send(b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n")
        assert (await client.reply()).status == 200
        await made.settled()


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_header_beats_body_on_every_policy(policy):
    body = json.dumps({"routing_key": "from-body", "text": "x"}).encode()
    async with bench(2, policy=policy, routing_key_from_body=True) as made:
        await made.ask(body, "x-smg-routing-key: from-header", path="/generate")
        await made.ask(body, path="/generate")
        seen = sorted(
            (seen for w in made.workers for seen in w.seen), key=lambda s: s.label or ""
        )
        assert [s.label for s in seen] == ["from-body", "from-header"]
        assert [s.body for s in seen] == [body, body]
        assert made.gateway.labels.sources == {"header": 1, "body": 1}


async def test_body_field_is_read_only_where_asked_for():
    body = json.dumps({"routing_key": "from-body"}).encode()
    async with bench(1, routing_key_from_body=True) as made:
        await made.ask(body)  # chat, not /generate
        assert made.workers[0].seen[0].label is None
    async with bench(1) as made:
        await made.ask(body, path="/generate")
        assert made.workers[0].seen[0].label is None


async def test_required_label_may_come_from_the_body():
    async with bench(1, routing_key_from_body=True, require_routing_key=True) as made:
        good = await made.ask(b'{"routing_key": "a"}', path="/generate")
        bad = await made.ask(b'{"routing_key": ""}', path="/generate")
        assert (good.status, bad.status) == (200, 400)
        await made.settled()


async def test_conversations_keep_their_worker_without_any_header():
    """A shared system prompt does not glue them together; off by default."""
    system = {"role": "system", "content": "be brief " * 250}

    def turn(conversation: int, turns: int) -> bytes:
        messages = [system]
        for i in range(turns + 1):
            messages.append(
                {"role": "user", "content": f"{conversation}: question {i}"}
            )
            messages.append({"role": "assistant", "content": "answer"})
        return json.dumps({"messages": messages[:-1]}).encode()

    async with bench(4, routing_key_from_content=True) as made:
        for conversation in range(8):
            workers = {
                (await made.ask(turn(conversation, turns))).worker for turns in range(5)
            }
            assert len(workers) == 1
        assert sum(bool(worker.seen) for worker in made.workers) > 1
        assert made.gateway.labels.sources["content"] == 40
    async with bench(4) as made:
        await made.ask(turn(0, 0))
        assert made.gateway.labels.sources["none"] == 1


async def test_label_does_not_depend_on_the_model():
    async with bench(3) as made:
        workers = [
            (
                await made.ask(
                    json.dumps({"model": m}).encode(), "x-smg-routing-key: a"
                )
            ).worker
            for m in "XYZX"
        ]
        assert len(set(workers)) == 1


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"\xff", b'{"routing_key": 7}', b"[" * 10_000]
)
def test_bodies_without_a_label_give_none(body):
    assert body_label(body) is None
    assert content_label(body) is None
    assert prompt_text(body) == ""


def test_prompt_text_reads_every_request_shape():
    assert prompt_text(b'{"prompt": "abc"}') == "abc"
    assert prompt_text(b'{"text": "abc"}') == "abc"
    assert prompt_text(b'{"input_ids": [1, 2]}') == "[1, 2]"
    assert "hello" in prompt_text(b'{"messages": [{"content": "hello"}]}')
