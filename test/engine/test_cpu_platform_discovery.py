"""SGLang's own discovery with our entry point installed and devices faked."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def platforms(monkeypatch: pytest.MonkeyPatch) -> Any:
    from sglang.srt import platforms

    for name in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    return platforms


def present() -> SimpleNamespace:
    return SimpleNamespace(is_available=lambda: True)


def fake(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Make torch report a device as it would where there is one."""
    if device in ("cuda", "rocm"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a device")
        version = "6.0" if device == "rocm" else None
        monkeypatch.setattr(torch.version, "hip", version)
    else:
        monkeypatch.setattr(torch, device, present(), raising=False)


def test_a_machine_without_any_device_gets_ours(platforms: Any) -> None:
    chosen = platforms._resolve_platform()
    assert type(chosen).__name__ == "CpuReferencePlatform"
    assert chosen.is_out_of_tree()
    assert chosen.get_device() == "cpu"
    assert chosen.get_default_attention_backend() == "torch_native"


@pytest.mark.parametrize("device", ["cuda", "rocm", "xpu", "npu", "mps"])
def test_a_device_gets_upstreams_platform_and_no_hook(
    platforms: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = dict(HookRegistry._hooks)
    fake(monkeypatch, device)
    chosen = platforms._resolve_platform()
    assert not chosen.is_out_of_tree()
    assert device in type(chosen).__name__.lower()
    assert dict(HookRegistry._hooks) == hooks


def test_upstreams_cpu_engine_is_left_alone(
    platforms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert type(platforms._resolve_platform()).__name__ == "CpuSRTPlatform"


def test_our_platform_can_be_named(
    platforms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, "cuda")
    monkeypatch.setenv("SGLANG_PLATFORM", "cpu_reference")
    assert type(platforms._resolve_platform()).__name__ == "CpuReferencePlatform"


def defined_names(source: Path) -> set[str]:
    """Functions, classes and their methods (dotted) of a module, without importing."""
    names = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_every_replaced_name_exists_upstream() -> None:
    """A moved function would otherwise only be logged, and fail when it is used."""
    import sglang
    from sglang.srt.hardware_backend.cpu_reference.hooks import REPLACEMENTS

    root = Path(sglang.__path__[0])
    for target in REPLACEMENTS:
        parts = target.split(".")[1:]
        for cut in (len(parts) - 1, len(parts) - 2):
            source = root.joinpath(*parts[:cut]).with_suffix(".py")
            if source.exists():
                break
        assert ".".join(parts[cut:]) in defined_names(source), target
