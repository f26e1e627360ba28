"""The images and the compose set-up, as far as they can be checked without an engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from .deploy_files import (
    DASHBOARD,
    DOCKER,
    ROOT,
    exported_names,
    metric_names,
    queries,
    read_yaml,
)

COMPOSE = read_yaml("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = [name for name in SERVICES if name.startswith("worker-")]
OURS = [name for name, service in SERVICES.items() if "build" in service]
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
EXACT = re.compile(r"\$\{[A-Z_]+:-[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*\}")


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, rest) of each line of a Dockerfile, continuations joined."""
    text = (DOCKER / name).read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    words = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(word[0], word[1]) for word in words]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_run_the_one_install_script_and_not_as_root(name: str) -> None:
    found = instructions(name)
    runs = [rest for word, rest in found if word == "RUN"]
    assert sum("docker/install.sh" in run for run in runs) == 1
    assert not any("pip install" in run for run in runs)
    assert [rest for word, rest in found if word == "USER"] == ["10001"]
    after = found[[word for word, _ in found].index("USER") :]
    assert not {"RUN", "COPY", "ADD"} & {word for word, _ in after}
    entry = [rest for word, rest in found if word == "ENTRYPOINT"]
    assert json.loads(entry[0]) == ["/opt/makespan/docker/entrypoint.sh"]


def test_the_gpu_image_has_no_base_but_a_digest() -> None:
    assert instructions("Dockerfile")[:2] == [
        ("ARG", "SGLANG_IMAGE_DIGEST"),
        ("FROM", "lmsysorg/sglang@${SGLANG_IMAGE_DIGEST}"),
    ]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_is_what_the_scripts_read(name: str) -> None:
    ignore = (DOCKER / f"{name}.dockerignore").read_text("utf-8").splitlines()
    assert "*" in ignore
    for path in (line[1:] for line in ignore if line.startswith("!")):
        assert (ROOT / path).exists(), path
    text = (DOCKER / "install.sh").read_text("utf-8")
    for part in ("setup.py", "requirements", "python", "sgl-router"):
        assert part in text
        assert f"!{part}" in ignore


def tool(name: str) -> Path:
    """A program of scripts/tools.txt, which ``make setup`` puts beside Python."""
    return Path(sys.executable).parent / name


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_has_nothing_to_say(name: str) -> None:
    command = [tool("hadolint"), DOCKER / name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_hadolint_can_object(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("FROM debian:latest\n")
    command = [tool("hadolint"), file]
    assert subprocess.run(command, capture_output=True).returncode == 1


@pytest.mark.parametrize("name", ["install.sh", "entrypoint.sh", "pin-images.sh"])
def test_scripts_parse_and_stop_at_the_first_failure(name: str) -> None:
    script = DOCKER / name
    subprocess.run(["bash", "-n", script], check=True)
    assert "\nset -euo pipefail\n" in script.read_text("utf-8")
    assert os.access(script, os.X_OK)


def test_shellcheck_has_nothing_to_say() -> None:
    command = [tool("shellcheck"), *sorted(DOCKER.glob("*.sh"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_foreign_image_is_named_exactly() -> None:
    images = [SERVICES[name]["image"] for name in SERVICES if name not in OURS]
    images.append(SERVICES["worker-0"]["build"]["args"]["PYTHON_IMAGE"])
    assert len(images) == 3
    for image in images:
        assert EXACT.fullmatch(image), image
    python = next(r for w, r in instructions("Dockerfile.cpu") if w == "ARG")
    assert python.split("=")[1] in images[-1]


def test_ports_are_published_on_loopback_unless_told_otherwise() -> None:
    published = [p for s in SERVICES.values() for p in s.get("ports", [])]
    assert len(published) == 3
    assert all(port.startswith("${BIND:-127.0.0.1}:") for port in published)
    assert not any("ports" in SERVICES[worker] for worker in WORKERS)


def test_no_service_is_privileged_and_servers_have_health_checks() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service
        if name != "batch":
            assert service["healthcheck"]["test"][0] == "CMD", name


def test_health_checks_generate_no_tokens() -> None:
    """/health generates one token unless this variable is false; /readiness none."""
    for worker in WORKERS:
        environment = SERVICES[worker]["environment"]
        assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
        assert SERVICES[worker]["healthcheck"]["test"][-1] == "/health"
    assert SERVICES["gateway"]["healthcheck"]["test"][-1] == "/readiness"
    for name in DOCKERFILES:
        text = (DOCKER / name).read_text("utf-8")
        assert "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false" in text


def test_profiles_start_as_many_workers_as_they_say() -> None:
    def started(profile: str) -> int:
        profiles = [SERVICES[worker].get("profiles") for worker in WORKERS]
        return sum(p is None or profile in p for p in profiles)

    assert [f"worker-{n}" for n in range(8)] == WORKERS
    assert [started(p) for p in ("", "four", "eight")] == [2, 4, 8]
    assert SERVICES["gateway"]["environment"]["WORKERS"] == "${WORKERS:-2}"


def test_prometheus_looks_at_every_part() -> None:
    jobs = {
        job["job_name"]: job for job in read_yaml("prometheus.yaml")["scrape_configs"]
    }
    assert jobs["worker"]["dns_sd_configs"][0]["names"] == WORKERS
    assert jobs["gateway"]["static_configs"][0]["targets"] == ["gateway:29000"]
    assert jobs["batch"]["dns_sd_configs"][0]["names"] == ["batch"]
    entry = (DOCKER / "entrypoint.sh").read_text("utf-8")
    assert f"--metrics-port {jobs['batch']['dns_sd_configs'][0]['port']}" in entry
    assert "--prometheus-port 29000" in entry


def test_the_entrypoint_gets_every_variable_it_reads() -> None:
    text = (DOCKER / "entrypoint.sh").read_text("utf-8")
    functions = dict(re.findall(r"^(\w+)\(\) \{\n(.*?)^\}", text, re.M | re.S))
    for role in ("worker", "gateway", "batch"):
        used = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", functions[role]))
        used |= set(re.findall(r"need ([A-Z]+)", functions[role]))
        name = "worker-0" if role == "worker" else role
        assert SERVICES[name]["command"] == [role]
        assert used <= set(SERVICES[name]["environment"]), role


def test_the_entrypoint_refuses_what_it_does_not_know() -> None:
    for words, reason in (
        (["server"], "role server: unknown; allowed: worker, gateway, batch"),
        (["worker"], "MODEL: not set; name a model folder or hub id"),
        (["gateway"], "WORKERS: not set"),
    ):
        done = subprocess.run(
            [DOCKER / "entrypoint.sh", *words],
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"]},
        )
        assert done.returncode == 2
        assert reason in done.stderr


def test_the_gpu_file_gives_each_worker_devices_of_its_own() -> None:
    services = read_yaml("compose.gpu.yaml")["services"]
    assert set(services) == {*WORKERS, "gateway", "batch"}
    devices = {
        services[name]["environment"]["CUDA_VISIBLE_DEVICES"] for name in WORKERS
    }
    assert devices == {f"${{WORKER_{n}_GPUS:-{n}}}" for n in range(8)}
    for name in WORKERS:
        (request,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert request["capabilities"] == ["gpu"]


def compose(*files: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """What docker compose makes of the files; it needs no Docker for that."""
    chosen = [word for name in files for word in ("--file", str(DOCKER / name))]
    return subprocess.run(
        [tool("docker-compose"), *chosen, "config", "--format", "json"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"} | settings,
    )


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs/operating.md").read_text("utf-8")
    for name in ("compose.yaml", "compose.gpu.yaml"):
        text = (DOCKER / name).read_text("utf-8")
        settings = set(re.findall(r"\$\{([A-Z0-9_]+)", text))
        shown = {re.sub("^WORKER_[0-7]_GPUS$", "WORKER_0_GPUS", s) for s in settings}
        assert shown
        assert not {setting for setting in shown if f"`{setting}`" not in page}


DIGEST = "sha256:" + "0" * 64


def test_docker_compose_accepts_the_files_and_keeps_to_loopback() -> None:
    done = compose("compose.yaml")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    services = json.loads(done.stdout)["services"]
    assert set(services) >= {"worker-0", "worker-1", "gateway", "prometheus", "grafana"}
    published = [p for s in services.values() for p in s.get("ports", [])]
    assert {(p["host_ip"], p["published"]) for p in published} == {
        ("127.0.0.1", "30000"),
        ("127.0.0.1", "9090"),
        ("127.0.0.1", "3000"),
    }


def test_docker_compose_starts_the_workers_of_a_profile() -> None:
    done = compose("compose.yaml", COMPOSE_PROFILES="eight", WORKERS="8")
    services = json.loads(done.stdout)["services"]
    assert sum(name.startswith("worker-") for name in services) == 8
    assert services["gateway"]["environment"]["WORKERS"] == "8"


def test_docker_compose_with_gpus_needs_a_digest() -> None:
    both = ("compose.yaml", "compose.gpu.yaml")
    refused = compose(*both)
    assert refused.returncode != 0
    assert "run docker/pin-images.sh" in refused.stderr
    done = compose(*both, SGLANG_IMAGE_DIGEST=DIGEST, API_KEY="k", WORKER_1_GPUS="2,3")
    assert done.returncode == 0, done.stderr
    worker = json.loads(done.stdout)["services"]["worker-1"]
    assert worker["build"]["args"]["SGLANG_IMAGE_DIGEST"] == DIGEST
    assert worker["environment"]["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert worker["environment"]["API_KEY"] == "k"
    assert worker["healthcheck"]["test"][-1] == "/health"


def pin_images(folder: Path, docker: str) -> subprocess.CompletedProcess[str]:
    """docker/pin-images.sh of a copy in ``folder``, with a stand-in for docker."""
    (folder / "docker").mkdir(exist_ok=True)
    for path in (DOCKER / "pin-images.sh", DOCKER / "compose.yaml"):
        shutil.copy(path, folder / "docker")
    shutil.copy(ROOT / "upstream.toml", folder)
    stand_in = folder / "bin/docker"
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text(f"#!/bin/sh\n{docker}\n")
    stand_in.chmod(0o755)
    return subprocess.run(
        [folder / "docker/pin-images.sh"],
        capture_output=True,
        text=True,
        env={"PATH": f"{stand_in.parent}:{os.environ['PATH']}"},
    )


def test_images_are_pinned_to_what_the_registry_says(tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    settings = tmp_path / "docker/.env"
    settings.write_text("MODEL=mine\nGRAFANA_IMAGE=old\n")
    answer = f'test "$1 $2 $3" = "buildx imagetools inspect" && echo {DIGEST}'
    for _ in range(2):  # the second time changes nothing
        assert pin_images(tmp_path, answer).returncode == 0
        lines = settings.read_text("utf-8").split()
        named = [line for line in lines if line.endswith(f"@{DIGEST}")]
        assert [line.split("=")[0] for line in named] == [
            "PYTHON_IMAGE",
            "PROMETHEUS_IMAGE",
            "GRAFANA_IMAGE",
        ]
        assert lines[3:] == [f"SGLANG_IMAGE_DIGEST={DIGEST}", "MODEL=mine"]


@pytest.mark.parametrize("docker", ["exit 1", "exit 0", "echo no such manifest"])
def test_no_digest_leaves_the_settings_alone(tmp_path: Path, docker: str) -> None:
    assert pin_images(tmp_path, docker).returncode != 0
    assert not (tmp_path / "docker/.env").exists()


def test_the_dashboard_is_provisioned_and_has_its_source() -> None:
    board = json.loads(DASHBOARD.read_text("utf-8"))
    (source,) = read_yaml("grafana/provisioning/datasources/prometheus.yaml")[
        "datasources"
    ]
    (provider,) = read_yaml("grafana/provisioning/dashboards/dashboards.yaml")[
        "providers"
    ]
    mounts = SERVICES["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in mounts
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == source["uid"]
            assert panel["description"]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("sum by (a, b) (rate(x_total[5m]))", {"x_total"}),
        ('a:b{c="d"} / on (e) clamp_min(avg(f), 1)', {"a:b", "f"}),
        ("histogram_quantile(0.95, sum by (le) (rate(h_bucket[5m])))", {"h_bucket"}),
    ],
)
def test_metric_names_of_a_query(query: str, names: set[str]) -> None:
    assert metric_names(query) == names


def test_names_of_an_exposition() -> None:
    page = '# TYPE h histogram\nh_bucket{le="1"} 2\n# TYPE c_total counter\nonly 1\n'
    expected = {"h", "h_bucket", "h_sum", "h_count", "c_total", "only"}
    assert exported_names(page) == expected


def test_the_dashboard_covers_what_a_batch_is_about() -> None:
    used = set().union(*(metric_names(query) for _, query in queries()))
    for prefix in (
        "sglang_agent_samples_",
        "sglang_agent_env_jobs_waiting",
        "smg_worker_requests_active",
        "sglang:routing_prefix_admitted_",
        "sglang:cached_tokens_total",
        "sglang:mamba_usage",
    ):
        assert any(name.startswith(prefix) for name in used), prefix


def test_the_gateway_exports_what_the_dashboard_asks_of_it() -> None:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(2)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        port, metrics = (str(probe.getsockname()[1]) for probe in probes)
    command = [sys.executable, "-m", "sgl_router.launch_router", "--port", port]
    process = subprocess.Popen(
        [*command, "--prometheus-port", metrics], stderr=subprocess.DEVNULL
    )
    try:
        page = _page(f"http://127.0.0.1:{metrics}/metrics", process)
    finally:
        process.terminate()
        process.wait(timeout=30)
    used = set().union(*(metric_names(query) for _, query in queries()))
    assert {n for n in used if n.startswith("smg_")} <= exported_names(page)


def _page(url: str, process: subprocess.Popen[bytes]) -> str:
    while process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url) as response:
            text: str = response.read().decode()
            return text
        time.sleep(0.05)
    raise AssertionError(f"the gateway ended with {process.returncode}")


def test_no_label_of_a_trajectory_can_be_a_metric_label() -> None:
    for title, query in queries():
        for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
            allowed = {"worker", "branch", "source", "error_type", "outcome", "le"}
            assert {word.strip() for word in group.split(",")} <= allowed, title
