"""The command: what it refuses in one line, and how it starts and stops."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from router_harness import Seen, StubWorker, Wire, bench, parse_head, until

from sgl_router.config import TlsSettings, build_parser, parse_settings

COMMAND = [sys.executable, "-m", "sgl_router.launch_router"]


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_settings(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "lbhc"], "--policy: invalid choice: 'lbhc' (choose from 'lbch'"),
        (["--lbch-load-factor", "0.9"], "load factor: 0.9 is not allowed"),
        (["--lbch-load-factor", "nan"], "load factor: nan is not allowed"),
        (["--lbch-balance-abs-threshold", "-1"], "threshold: -1.0 is not allowed"),
        (["--worker-urls", "localhost:1"], "worker url: 'localhost:1' is not allowed"),
        (["--worker-urls", "http://a:1", "http://a:1/"], "given more than once"),
        (["--routing-key-headers"], "--routing-key-headers: empty"),
        (["--routing-key-headers", ""], "--routing-key-headers: '' is not allowed"),
        (["--routing-key-headers", "a b"], "--routing-key-headers: 'a b'"),
        (["--port", "70000"], "--port: '70000' is not allowed"),
        (["--queue-size", "-1"], "--queue-size: '-1' is not allowed"),
        (["--retry-jitter-factor", "2"], "give a number, 0 to 1"),
        (["--tls-cert-path", "x"], "--tls-cert-path: give it together with"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_bad_arguments_are_one_line_and_code_2(capsys, arguments, said):
    assert said in refused(capsys, *arguments)


def test_every_option_says_its_default_and_help():
    for action in build_parser()._actions:
        assert action.help, action.option_strings


def test_defaults_listen_on_loopback_only():
    settings = parse_settings([])
    assert settings.host == "127.0.0.1"
    assert (settings.port, settings.prometheus_port) == (30000, 29000)
    assert settings.routing_key_headers == ("x-smg-routing-key", "x-session-id")


async def test_policy_options_reach_the_policy():
    settings = parse_settings(["--policy", "cache_aware", "--cache-threshold", "0.7"])
    assert settings.make_policy().cache_threshold == 0.7
    settings = parse_settings(
        ["--lbch-load-factor", "2", "--lbch-balance-abs-threshold", "3"]
    )
    policy = settings.make_policy()
    assert (policy.load_factor, policy.balance_abs_threshold) == (2.0, 3.0)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=30
    )


def test_port_in_use_and_unreachable_worker_are_one_line_each():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        in_use = run("--port", port, "--prometheus-port", "0")
    assert in_use.returncode == 2
    assert (
        f"--port: cannot listen on 127.0.0.1:{port}: Address already in use"
        in in_use.stderr
    )
    url = f"http://127.0.0.1:{port}"  # nobody listens there any more
    down = run("--port", "0", "--prometheus-port", "0", "--worker-urls", url,
               "--worker-startup-timeout-secs", "0")  # fmt: skip
    assert down.returncode == 2
    assert f"{url} is unreachable (connection refused)" in down.stderr
    assert len(in_use.stderr.splitlines()) == len(down.stderr.splitlines()) == 1


async def test_process_serves_logs_without_prompts_and_stops_on_sigterm():
    worker = StubWorker()
    await worker.start()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--port", "0", "--prometheus-port", "0", "--log-json",
        "--worker-urls", worker.url, "http://127.0.0.1:1",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    seen: list[dict] = []

    async def line(holding: str) -> dict:
        while True:
            async with asyncio.timeout(20):
                seen.append(json.loads(await process.stderr.readline()))
            if holding in json.dumps(seen[-1]):
                return seen[-1]

    up = await line("gateway on")
    port = int(re.search(r"127\.0\.0\.1:(\d+)", up["message"])[1])
    metrics_port = int(re.search(r"metrics on port (\d+)", up["message"])[1])
    assert "x-smg-routing-key, x-session-id" in up["message"]
    await line(f"{worker.url} is up")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer sesame\r\n"
        b'x-smg-routing-key: q"7\r\nContent-Length: 12\r\n\r\nsecretprompt'
    )
    await reader.readuntil(b"secretprompt")
    entry = await line('"event": "request"')
    assert (entry["status"], entry["label"], entry["worker"]) == (
        200,
        'q"7',
        worker.url,
    )
    scraper, scraping = await asyncio.open_connection("127.0.0.1", metrics_port)
    scraping.write(b"GET /metrics HTTP/1.1\r\nHost: g\r\n\r\n")
    await scraper.readuntil(b"smg_worker_pool_size 2.0")  # and stays connected
    process.send_signal(signal.SIGTERM)
    seen += [json.loads(rest) for rest in (await process.stderr.read()).splitlines()]
    assert await asyncio.wait_for(process.wait(), 10) == 0
    writer.close()
    scraping.close()
    told = json.dumps(seen)
    assert "127.0.0.1:1 is unreachable (connection refused)" in told
    assert "secretprompt" not in told
    assert "sesame" not in told
    await worker.stop()


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.slow
async def test_two_thousand_open_streams_fit_in_150_mb():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    release = asyncio.Event()

    async def answer(seen: Seen, wire: Wire) -> None:
        await wire.start_chunked()
        await wire.chunk(b"data: 1\n\n")
        await release.wait()
        await wire.end_chunked()

    worker = StubWorker()
    worker.answer = answer
    await worker.start()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--port", "0", "--prometheus-port", "0", "--worker-urls", worker.url,
        "--disable-access-log", stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    told = await process.stderr.readline()
    port = int(re.search(rb"127\.0\.0\.1:(\d+)", told)[1])
    await process.stderr.readuntil(b"is up\n")
    body = b"p" * 2000
    request = b"POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 2000\r\n\r\n"
    clients = []
    for _ in range(2000):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request + body)
        await reader.readuntil(b"data: 1\n\n")
        clients.append((reader, writer))
    assert resident_bytes(process.pid) < 150 * 2**20
    release.set()
    for reader, writer in clients:
        await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    process.terminate()
    await process.communicate()
    assert process.returncode == 0
    await worker.stop()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1 and its key."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(cert_path), str(key_path)


class TlsWorker(StubWorker):
    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


async def test_tls_on_both_legs(certificate):
    cert, key = certificate
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(cert, key)
    worker = TlsWorker()
    await worker.start(ssl=serving)
    tls = TlsSettings(cert_path=cert, key_path=key, ca_cert_paths=(cert,))

    async def stream(seen: Seen, wire: Wire) -> None:
        await wire.start_chunked()
        for start in range(0, len(seen.body), 50_000):
            await wire.chunk(seen.body[start : start + 50_000])
        await wire.end_chunked()

    async with bench([worker], tls=tls) as made:
        trusting = ssl.create_default_context(cafile=cert)
        worker.answer = stream
        client = await made.client(ssl=trusting)
        body = b"s" * 700_000
        for _ in range(2):
            await client.post(body, "x-smg-routing-key: a")
            reply = await client.reply()
            assert (reply.status, reply.body) == (200, body)
        client.writer.close()
        await made.settled()


async def test_worker_with_an_unknown_certificate_gets_nothing(certificate):
    cert, key = certificate
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(cert, key)
    worker = TlsWorker()
    worker.healthy = False  # not expected to come up
    await worker.start(ssl=serving)
    async with bench([worker]) as made:
        (registered,) = made.gateway.pool
        await until(lambda: registered.health_checks["failure"] > 0)
        assert (await made.ask()).status == 503
        assert worker.probes == 0


def test_parse_head_of_the_harness_keeps_order():
    seen = parse_head(b"GET /x HTTP/1.1\r\nA: 1\r\nB: 2\r\n\r\n")
    assert seen.headers == [("A", "1"), ("B", "2")]
