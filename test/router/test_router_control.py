"""The gateway's own routes: workers come, drain and go; requests to all; metrics."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from router_harness import Seen, StubWorker, Wire, bench, until

from sgl_router.probes import parse_report
from sgl_router.workers import WorkerError, parse_worker_url


async def call(made, method: str, path: str, body: object = None, **headers: str):
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            method, f"http://127.0.0.1:{made.port}{path}", json=body, headers=headers
        ) as answer,
    ):
        text = await answer.text()
        return answer.status, json.loads(text) if text[:1] in "{[" else text


async def hold(seen: Seen, wire: Wire) -> None:
    await seen.gone.wait()


async def test_health_and_readiness():
    stub = StubWorker()
    stub.healthy = False
    async with bench([stub]) as made:
        assert (await call(made, "GET", "/health"))[0] == 200
        assert (await call(made, "GET", "/liveness"))[0] == 200
        assert (await call(made, "GET", "/readiness"))[0] == 503
        stub.healthy = True
        await until(lambda: bool(made.gateway.pool.loads))
        status, body = await call(made, "GET", "/readiness")
        assert (status, body["healthy_workers"]) == (200, 1)


async def test_worker_list_carries_what_workers_report():
    stubs = [StubWorker(), StubWorker()]
    stubs[0].info = {
        "hybrid_capacity": {"reference_concurrency": 9},
        "internal_states": [{"effective_max_running_requests_per_dp": 16}],
        "data": [{"id": "the-model"}],
    }
    async with bench(stubs) as made:
        _, body = await call(made, "GET", "/workers")
        first, second = body["workers"]
        assert body["total"] == 2
        assert first["reference_concurrency"] == 9
        assert first["max_running_requests"] == 16
        assert first["model_id"] == "the-model"
        assert second["reference_concurrency"] is None
        assert first["home_share"] + second["home_share"] == pytest.approx(1.0)
        _, loads = await call(made, "GET", "/get_loads")
        assert [w["reference_concurrency"] for w in loads["workers"]] == [9, None]
        _, models = await call(made, "GET", "/v1/models")
        assert [model["id"] for model in models["data"]] == ["the-model"]
        assert (await call(made, "GET", f"/workers/{first['id']}"))[1] == first


async def test_models_of_keyed_workers_are_shown_to_who_has_the_key():
    workers = [StubWorker(), StubWorker()]
    for worker in workers:
        worker.key = "sesame"
        worker.info = {"data": [{"id": "the-model"}]}
    async with bench(workers) as made:
        status, _ = await call(made, "GET", "/v1/models")
        assert status == 401
        keyed = {"authorization": "Bearer sesame"}
        status, models = await call(made, "GET", "/v1/models", **keyed)
        assert (status, models["data"]) == (200, [{"id": "the-model"}])
        workers[1].key = "other"  # one that answers is enough
        status, models = await call(made, "GET", "/v1/models", **keyed)
        assert (status, models["data"]) == (200, [{"id": "the-model"}])
        # what one client may see is not remembered for the next
        assert (await call(made, "GET", "/v1/models"))[0] == 401


@pytest.mark.parametrize(
    ("info", "reference", "running"),
    [
        ({}, None, None),
        (None, None, None),
        ("text", None, None),
        ({"hybrid_capacity": None, "internal_states": [None]}, None, None),
        ({"hybrid_capacity": {"reference_concurrency": "9"}}, None, None),
        (
            {
                "internal_states": [
                    {"hybrid_capacity": {"reference_concurrency": 4}},
                    {"hybrid_capacity": {"reference_concurrency": 5}},
                ],
                "max_running_requests": 8,
            },
            9,
            8,
        ),
    ],
)
def test_reports_are_read_whatever_they_lack(info, reference, running):
    report = parse_report(info, None)
    assert report.reference_concurrency == reference
    assert report.max_running_requests == running


async def test_worker_is_added_at_run_time_and_takes_requests():
    late = StubWorker()
    await late.start()
    async with bench(1) as made:
        try:
            status, body = await call(made, "POST", "/workers", {"url": late.url + "/"})
            assert (status, body["url"]) == (202, late.url)
            await until(lambda: late.url in made.gateway.pool.loads)
            assert {(await made.ask()).worker for _ in range(4)} == {
                made.workers[0].url,
                late.url,
            }
            assert (await call(made, "POST", "/workers", {"url": late.url}))[0] == 409
        finally:
            await late.stop()


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"url": 7},
        {"url": "worker:1"},
        {"url": "http://h:1", "api_key": 1},
    ],
)
async def test_bad_worker_is_400_and_nothing_is_registered(body):
    async with bench(1) as made:
        status, answer = await call(made, "POST", "/workers", body)
        assert status == 400
        assert answer["error"]["message"]
        assert len(made.gateway.pool) == 1


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:1",
        "http://",
        "http://h:0",
        "http://h:x",
        "ftp://h",
        "http://h/p",
        "http://u@h",
    ],
)
def test_bad_worker_urls(url):
    with pytest.raises(WorkerError, match="worker url"):
        parse_worker_url(url)


async def test_removed_worker_drains_and_is_never_picked_again():
    async with bench(2) as made:
        worker = made.workers[0]
        worker.answer = hold
        label = made.label_at(0)
        clients = await made.hold(label, 2)
        (worker_id,) = [w.id for w in made.gateway.pool if w.url == worker.url]
        status, _ = await call(made, "DELETE", f"/workers/{worker_id}")
        assert status == 202
        for _ in range(5):
            reply = await made.ask(b"{}", f"x-smg-routing-key: {label}")
            assert reply.worker == made.workers[1].url
        _, shown = await call(made, "GET", f"/workers/{worker_id}")
        assert (shown["status"], shown["load"]) == ("draining", 2)
        for client in clients:
            client.leave()
        await until(lambda: not made.gateway.pool.draining)
        assert (await call(made, "GET", f"/workers/{worker_id}"))[0] == 404
        assert (await call(made, "DELETE", f"/workers/{worker_id}"))[0] == 404
        assert len(worker.seen) == 2


async def test_rolling_update_never_answers_404():
    """One worker goes, its successor is not up yet: 503 with Retry-After, then 200."""
    late = StubWorker()
    late.healthy = False
    await late.start()
    async with bench(1) as made:
        try:
            old = next(iter(made.gateway.pool))
            await call(made, "POST", "/workers", {"url": late.url})
            await call(made, "DELETE", f"/workers/{old.id}")
            reply = await made.ask()
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            late.healthy = True
            await until(lambda: bool(made.gateway.pool.loads))
            assert (await made.ask()).worker == late.url
        finally:
            await late.stop()


async def test_abort_reaches_the_worker_that_runs_the_request():
    aborted: list[str] = []

    async def answer(seen: Seen, wire: Wire) -> None:
        if seen.target == "/abort_request":
            aborted.append(json.loads(seen.body)["rid"])
            await wire.respond(b"")
        else:
            await hold(seen, wire)

    async with bench(2) as made:
        for worker in made.workers:
            worker.answer = answer
        (client,) = await made.hold("a")
        status, body = await call(made, "POST", "/abort_request", {"rid": "r1"})
        assert (status, body["success"]) == (200, True)
        assert aborted == ["r1", "r1"]
        client.leave()
        await made.settled()


async def test_requests_to_all_report_each_failure():
    async def refuse(seen: Seen, wire: Wire) -> None:
        await wire.respond(b"no", 400)

    async with bench(2) as made:
        made.workers[1].answer = refuse
        status, body = await call(made, "POST", "/flush_cache")
        assert status == 502
        assert [result["status"] for result in body["workers"]] == [200, 400]


async def test_unknown_paths_are_404_and_never_reach_a_worker():
    async with bench(1) as made:
        for method, path in (
            ("GET", "/nope"),
            ("POST", "/update_weights"),
            ("PUT", "/workers"),
        ):
            status, body = await call(made, method, path)
            assert status in (404, 405)
            assert body["error"]["type"] == "not_found"
        assert made.workers[0].seen == []


async def test_control_plane_key_guards_changes_only():
    async with bench(1, control_plane_api_key="secret") as made:
        assert (await call(made, "GET", "/workers"))[0] == 200
        assert (await call(made, "POST", "/flush_cache"))[0] == 401
        assert (await call(made, "DELETE", "/workers/worker-1"))[0] == 401
        key = {"authorization": "Bearer secret"}
        assert (await call(made, "POST", "/flush_cache", **key))[0] == 200


async def test_worker_key_is_sent_where_the_client_sends_none():
    async with bench(1, api_key="worker-key") as made:
        await made.ask()
        await made.ask(b"{}", "Authorization: Bearer mine")
        first, second = made.workers[0].seen
        assert first.header("authorization") == "Bearer worker-key"
        assert second.header("authorization") == "Bearer mine"


async def test_target_worker_header_picks_by_index():
    async with bench(3) as made:
        for index in (2, 0, 2):
            reply = await made.ask(b"{}", f"x-smg-target-worker: {index}")
            assert reply.worker == made.workers[index].url
        for bad in ("3", "-1", "x", "9" * 40):
            assert (await made.ask(b"{}", f"x-smg-target-worker: {bad}")).status == 503
        await made.settled()


async def scrape(made) -> list[str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{made.prometheus_port}/metrics") as answer,
    ):
        assert answer.status == 200
        return [line for line in (await answer.text()).splitlines() if line[0] != "#"]


def value(lines: list[str], name: str) -> float:
    (line,) = [line for line in lines if line.startswith(name + " ")]
    return float(line.split(" ")[1])


async def test_metrics_follow_requests():
    async with bench(1) as made:
        worker = made.workers[0]
        await made.ask(b"1234", "x-smg-routing-key: a")
        worker.answer = hold
        (client,) = await made.hold("a")
        lines = await scrape(made)
        url = worker.url
        branch = 'smg_bounded_consistent_hashing_policy_branch_total{branch="home"}'
        assert value(lines, branch) == 2
        assert value(lines, f'smg_worker_requests_active{{worker="{url}"}}') == 1
        assert value(lines, f'smg_worker_selection_total{{worker="{url}"}}') == 2
        assert value(lines, 'smg_routing_key_source_total{source="header"}') == 2
        assert (
            value(
                lines,
                'smg_http_responses_total{path="/v1/chat/completions",status_code="200"}',
            )
            == 1
        )
        name = 'smg_router_time_to_head_seconds_count{path="/v1/chat/completions"}'
        assert value(lines, name) == 1
        client.leave()
        await made.settled()
        lines = await scrape(made)
        assert value(lines, f'smg_worker_requests_active{{worker="{url}"}}') == 0
        assert (
            value(lines, 'smg_router_request_errors_total{error_type="client_gone"}')
            == 1
        )


async def test_series_do_not_grow_with_what_clients_choose():
    async def burst(made, start: int, count: int) -> None:
        client = await made.client()
        for i in range(start, start + count):
            body = json.dumps({"model": f"m{i}"}).encode()
            await client.post(body, f"x-smg-routing-key: k{i}", path=f"/v1/p{i}")
            await client.reply()
            await client.post(body, path=f"/p{i}")
            await client.reply()

    async with bench(2) as made:
        await burst(made, 0, 10)
        before = len(await scrape(made))
        await burst(made, 10, 300)
        assert len(await scrape(made)) == before


async def test_limit_queues_in_order_and_refuses_the_rest():
    release = asyncio.Event()
    order: list[str | None] = []

    async def answer(seen: Seen, wire: Wire) -> None:
        order.append(seen.label)
        await release.wait()
        await wire.respond(b"x")

    async with bench(1, max_concurrent_requests=1, queue_size=2) as made:
        made.workers[0].answer = answer
        clients = []
        for name in "abc":
            client = await made.client()
            await client.post(b"{}", f"x-smg-routing-key: {name}")
            clients.append(client)
            await until(lambda: len(made.gateway.exchanges) == len(clients))
        assert made.loads == [1]
        assert made.gateway.admission.waiting == 2
        refused = await made.ask()
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        release.set()
        assert [(await client.reply()).status for client in clients] == [200] * 3
        assert order == ["a", "b", "c"]
        await made.settled()
        assert (made.gateway.admission.running, made.gateway.admission.waiting) == (
            0,
            0,
        )


async def test_waiting_client_that_leaves_gives_its_place_up():
    async with bench(1, max_concurrent_requests=1) as made:
        made.workers[0].answer = hold
        (running,) = await made.hold("a")
        waiting = await made.client()
        await waiting.post()
        await until(lambda: made.gateway.admission.waiting == 1)
        waiting.leave()
        await until(lambda: made.gateway.admission.waiting == 0)
        running.leave()
        await made.settled()
        assert made.gateway.admission.running == 0


async def test_waiting_too_long_is_503():
    async with bench(1, max_concurrent_requests=1, queue_timeout_s=0.1) as made:
        made.workers[0].answer = hold
        (running,) = await made.hold("a")
        assert (await made.ask()).status == 503
        running.leave()
        await made.settled()


async def test_a_long_queue_is_refused_in_one_go_when_the_last_worker_goes():
    async with bench(1, max_concurrent_requests=1, queue_size=1000) as made:
        made.workers[0].answer = hold
        (running,) = await made.hold("a")
        clients = [await made.client() for _ in range(400)]
        for client in clients:
            await client.post()
        await until(lambda: made.gateway.admission.waiting == 400)
        made.gateway.pool.remove(next(iter(made.gateway.pool)))
        running.leave()
        assert {(await client.reply()).status for client in clients} == {503}
        await made.settled()
        assert made.gateway.admission.running == 0


async def test_rate_limit_spaces_requests():
    async with bench(1, rate_limit_per_s=20.0, max_concurrent_requests=2) as made:
        started = asyncio.get_running_loop().time()
        replies = await asyncio.gather(*(made.ask() for _ in range(6)))
        assert all(reply.status == 200 for reply in replies)
        assert asyncio.get_running_loop().time() - started >= 0.15
        assert made.gateway.admission.running == 0
