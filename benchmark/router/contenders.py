"""The gateways that are compared: how each is installed, started, and named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RIVALS = {"smg": "1.13.0", "sglang-router": "0.3.2"}
"""Wheels from the package index; each brings a program called smg, so each lives alone."""
DEBIAN = ("haproxy", "nginx-light")


Command = Callable[[int, Sequence[int], Path], list[str]]
"""Gives an argument list from the port, the workers' ports and a work folder."""


@dataclass(frozen=True)
class Contender:
    """One gateway; no command means none in between."""

    name: str
    command: Command | None
    version: Callable[[], str]


class Missing(Exception):
    """A contender that is not installed; the message says which and how to get it."""


def worker_urls(ports: Sequence[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in ports]


COMPILED = ROOT / "build/bench-router/compiled"
"""Where the compiled build of the gateway lies."""


def ours(package: Path) -> Command:
    """The gateway of this repository with everything on: metrics, logs, limits."""

    def command(port: int, workers: Sequence[int], folder: Path) -> list[str]:
        if not (package / "sgl_router").is_dir():
            raise Missing(f"{package} is missing; run with --install")
        return [
            "env", f"PYTHONPATH={package}", sys.executable,
            "-m", "sgl_router.launch_router", "--port", str(port),
            "--prometheus-port", str(port + 1), "--policy", "lbch",
            "--max-concurrent-requests", "100000",
            "--health-check-interval-secs", "60", "--worker-urls", *worker_urls(workers),
        ]  # fmt: skip

    return command


def compile_ours() -> None:
    """Build this checkout's gateway with its data path compiled."""
    source, built = COMPILED.with_name("source"), COMPILED.with_name("built")
    for folder in (source, built):
        shutil.rmtree(folder, ignore_errors=True)
    left_out = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "sgl-router", source, ignore=left_out)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation"]
    command += ["--no-deps", "--target", str(built), str(source)]
    environment = os.environ | {"SGL_ROUTER_COMPILE": "1"}
    subprocess.run(command, check=True, env=environment)
    shutil.rmtree(COMPILED, ignore_errors=True)
    built.rename(COMPILED)


def smg(*options: str) -> Command:
    """The shepherd model gateway, hashing on the same header."""

    def command(port: int, workers: Sequence[int], folder: Path) -> list[str]:
        return [
            rival("smg", "smg"), "launch", "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-port", str(port + 1), "--policy", "consistent_hashing",
            "--log-level", "warn", *options, "--worker-urls", *worker_urls(workers),
        ]  # fmt: skip

    return command


def sglang_router(port: int, workers: Sequence[int], folder: Path) -> list[str]:
    """SGLang's older router with its default policy."""
    return [
        rival("sglang-router", "python"), "-m", "sglang_router.launch_router", "--host", "127.0.0.1",
        "--port", str(port), "--prometheus-port", str(port + 1), "--policy",
        "cache_aware", "--log-level", "warn", "--worker-urls", *worker_urls(workers),
    ]  # fmt: skip


HAPROXY = """\
global
  nbthread 1
  maxconn 4000
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  option http-keep-alive
  option http-no-delay
frontend in
  bind 127.0.0.1:{port}
  default_backend workers
backend workers
  balance hdr(x-smg-routing-key)
  hash-type consistent
  hash-balance-factor 125
  http-reuse always
  option abortonclose
{servers}
"""


def haproxy(port: int, workers: Sequence[int], folder: Path) -> list[str]:
    """HAProxy with one thread and its own bounded consistent hashing."""
    servers = "\n".join(f"  server w{p} 127.0.0.1:{p}" for p in workers)
    config = folder / "haproxy.cfg"
    config.write_text(HAPROXY.format(port=port, servers=servers))
    return [program("haproxy"), "-f", str(config)]


NGINX = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx.err;
events {{ worker_connections 20000; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  client_max_body_size 0;
  keepalive_requests 1000000000;
  upstream workers {{
    hash $http_x_smg_routing_key consistent;
{servers}
    keepalive 512;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://workers;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_request_buffering off;
    }}
  }}
}}
"""


def nginx(port: int, workers: Sequence[int], folder: Path) -> list[str]:
    """nginx with one worker process and a consistent hash of the header."""
    servers = "\n".join(f"    server 127.0.0.1:{p};" for p in workers)
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(port=port, servers=servers, folder=folder))
    return [program("nginx"), "-c", str(config), "-p", str(folder)]


def venv_folder(wheel: str) -> Path:
    """Where a rival from the package index lives; never our own environment."""
    return ROOT / f"build/bench-router/venv-{wheel}"


def rival(wheel: str, name: str) -> str:
    """A program of a rival's environment."""
    path = venv_folder(wheel) / "bin" / name
    if not path.exists():
        raise Missing(f"{path} is missing; run with --install")
    return str(path)


def program(name: str) -> str:
    """A program of the system."""
    found = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
    if found is None:
        raise Missing(f"{name} is missing; run with --install, as root on Debian")
    return found


def install() -> None:
    """Fetch what is missing: wheels into their own environment, the rest by apt."""
    compile_ours()
    for wheel, version in RIVALS.items():
        folder = venv_folder(wheel)
        if not (folder / "bin/smg").exists():
            venv.create(folder, with_pip=True)
            command = [folder / "bin/pip", "install", "-q", f"{wheel}=={version}"]
            subprocess.run(command, check=True)
    for name, package in zip(("haproxy", "nginx"), DEBIAN, strict=True):
        try:
            program(name)
        except Missing:
            subprocess.run(["apt-get", "install", "-y", "-qq", package], check=True)


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return (done.stdout or done.stderr).strip().splitlines()[0]


def _wheel_version(name: str) -> Callable[[], str]:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return lambda: _output(rival(name, "python"), "-c", code)


def _our_version() -> str:
    return _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")


CONTENDERS = (
    Contender("direct", None, lambda: "no proxy"),
    Contender("ours", ours(ROOT / "sgl-router"), _our_version),
    Contender("ours compiled", ours(COMPILED), _our_version),
    Contender("smg", smg(), _wheel_version("smg")),
    Contender(
        "smg streaming",
        smg("--disable-retries", "--max-buffered-request-bytes", "0"),
        _wheel_version("smg"),
    ),
    Contender("sglang-router", sglang_router, _wheel_version("sglang-router")),
    Contender("haproxy", haproxy, lambda: _output(program("haproxy"), "-v")),
    Contender("nginx", nginx, lambda: _output(program("nginx"), "-v")),
)
