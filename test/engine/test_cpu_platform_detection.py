"""When the CPU platform is in charge, and how large its virtual device is."""

import threading
import tomllib
from collections.abc import Callable, Mapping
from types import ModuleType

import pytest

from .conftest import ROOT

Load = Callable[[str], ModuleType]


def devices(*present: str) -> Mapping[str, Callable[[], bool]]:
    names = ("cuda", "xpu", "npu", "hpu", "musa", "mps")
    return {name: lambda name=name: name in present for name in names}


def is_active(
    cpu_module: Load,
    environ: Mapping[str, str],
    *present: str,
    platforms: tuple[str, ...] = ("cpu_reference",),
) -> bool:
    detection = cpu_module("detection")
    active: bool = detection.is_active(
        environ, probes=devices(*present), platforms=platforms
    )
    return active


def test_it_serves_where_nothing_else_could(cpu_module: Load) -> None:
    assert is_active(cpu_module, {})


@pytest.mark.parametrize("device", ["cuda", "xpu", "npu", "hpu", "musa", "mps"])
def test_any_accelerator_keeps_it_out(cpu_module: Load, device: str) -> None:
    assert not is_active(cpu_module, {}, device)


def test_every_device_of_sglang_is_probed(cpu_module: Load) -> None:
    assert set(cpu_module("detection").PROBES) == set(devices())


def test_sglangs_own_cpu_engine_keeps_it_out(cpu_module: Load) -> None:
    assert not is_active(cpu_module, {"SGLANG_USE_CPU_ENGINE": "1"})
    assert is_active(cpu_module, {"SGLANG_USE_CPU_ENGINE": "0"})


def test_another_platform_plugin_keeps_it_out(cpu_module: Load) -> None:
    assert not is_active(cpu_module, {}, platforms=("cpu_reference", "vendor"))


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_naming_it_overrules_everything(cpu_module: Load, device: str) -> None:
    named = {"SGLANG_PLATFORM": "cpu_reference", "SGLANG_USE_CPU_ENGINE": "1"}
    assert is_active(cpu_module, named, device, platforms=("cpu_reference", "vendor"))


def test_naming_another_platform_keeps_it_out(cpu_module: Load) -> None:
    assert not is_active(cpu_module, {"SGLANG_PLATFORM": "vendor"})


def test_probes_stop_at_the_first_device_found(cpu_module: Load) -> None:
    def never() -> bool:
        raise AssertionError("probed after a device was found")

    probes = {"cuda": lambda: True, "xpu": never}
    assert cpu_module("detection").find_accelerator(probes) == "cuda"


def test_probes_ask_torch_as_sglang_does(
    cpu_module: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    detection = cpu_module("detection")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert detection.find_accelerator() == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert detection.find_accelerator() == "xpu"


def test_memory_default_and_value(cpu_module: Load) -> None:
    memory = cpu_module("memory")
    assert memory.device_bytes({}) == 1 << 30
    assert memory.device_bytes({"SGLANG_CPU_MEMORY_BYTES": "1000"}) == 1000


@pytest.mark.parametrize("text", ["", "0", "-5", "2GiB", "1.5"])
def test_memory_names_a_bad_value(cpu_module: Load, text: str) -> None:
    with pytest.raises(ValueError, match=f"SGLANG_CPU_MEMORY_BYTES: '{text}' is not"):
        cpu_module("memory").device_bytes({"SGLANG_CPU_MEMORY_BYTES": text})


def test_only_the_decision_is_loaded_by_sglang() -> None:
    """The entry point names this file alone: elsewhere nothing else is imported."""
    pin = tomllib.loads((ROOT / "upstream.toml").read_text())
    target = pin["entry-points"]["sglang.srt.platforms"]["cpu_reference"]
    assert target.endswith(".cpu_reference.detection:activate")
    assert "sglang.srt.plugins" not in pin["entry-points"]


def test_elsewhere_it_declines(
    cpu_module: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    detection = cpu_module("detection")
    monkeypatch.setenv("SGLANG_PLATFORM", "vendor")
    assert detection.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "cpu_reference")
    assert detection.activate().endswith(".platform.CpuReferencePlatform")


def test_children_are_forked_only_from_a_single_thread(cpu_module: Load) -> None:
    launch = cpu_module("launch")
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not launch.can_fork()
    finally:
        stop.set()
        thread.join()
