"""Ask a real smg gateway for the home worker of many labels and write them down.

The file is the reference of test/router/test_router_ring.py. smg is run with
``--policy consistent_hashing`` before stub workers on fixed loopback ports, because a
home depends on the workers' URLs. Usage::

    python benchmark/router/record_smg_homes.py --smg build/bench-router/venv-smg/bin/smg \
        --output test/router/data/smg_homes.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
from aiohttp import web

WORKER_PORTS = (21001, 21002, 21003, 21004, 21005)
LABELS = [f"trajectory-{i}" for i in range(200)] + ["~", "a" * 128, "x:y/z?#", "7"]


async def stub(port: int) -> web.AppRunner:
    """A worker that smg takes at once."""
    answers = {
        "/health": "",
        "/v1/models": {"object": "list", "data": [{"id": "stub"}]},
        "/server_info": {"model_path": "stub"},
        "/model_info": {"model_path": "stub"},
        "/v1/chat/completions": {"id": "0", "object": "chat.completion", "choices": []},
    }

    async def answer(request: web.Request) -> web.Response:
        found = answers.get(request.path)
        return web.json_response(found, status=404 if found is None else 200)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


async def ask(session: aiohttp.ClientSession, url: str, label: str) -> str:
    """The worker that answered a request with ``label``."""
    body = {"model": "stub", "messages": [{"role": "user", "content": "x"}]}
    async with session.post(
        f"{url}/v1/chat/completions", json=body, headers={"x-smg-routing-key": label}
    ) as answer:
        answer.raise_for_status()
        return answer.headers["x-smg-routed-worker-id"]


async def record(smg: str, port: int) -> dict[str, object]:
    """Homes of all labels (indices of workers) among two, three and five workers."""
    runners = [await stub(worker_port) for worker_port in WORKER_PORTS]
    sets = []
    for count in (2, 3, 5):
        workers = [f"http://127.0.0.1:{p}" for p in WORKER_PORTS[:count]]
        command = [
            smg, "launch", "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-port", str(port + 1), "--policy", "consistent_hashing",
            "--log-level", "error", "--worker-urls", *workers,
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(*command)
        try:
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{port}"
                await ready(session, url, count)
                homes = [
                    workers.index(await ask(session, url, label)) for label in LABELS
                ]
        finally:
            process.terminate()
            await process.wait()
        sets.append({"workers": workers, "homes": "".join(map(str, homes))})
    for runner in runners:
        await runner.cleanup()
    return {"labels": LABELS, "sets": sets}


async def ready(session: aiohttp.ClientSession, url: str, workers: int) -> None:
    """Wait until smg lists every worker as healthy."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            async with session.get(f"{url}/workers") as answer:
                listed = (await answer.json())["workers"]
            if sum(worker["is_healthy"] for worker in listed) == workers:
                return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.2)
    raise TimeoutError(f"smg did not take {workers} workers")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smg", required=True, help="the smg executable")
    parser.add_argument("--port", type=int, default=21100)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    python = Path(given.smg).with_name("python")
    version = subprocess.run(
        [python, "-c", "from importlib.metadata import version; print(version('smg'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    recorded = {"smg": version} | asyncio.run(record(given.smg, given.port))
    given.output.write_text(json.dumps(recorded, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
