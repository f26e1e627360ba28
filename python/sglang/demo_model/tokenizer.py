"""Byte-level BPE tokenizer and ChatML-like template of the tiny model."""

import json
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS = (END_OF_TEXT, TURN, END_OF_TURN)

_VOCABULARY = 768
# Space, tab, line feed and carriage return as the byte alphabet writes them.
_BLANK = frozenset("ĠĉĊč")


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def chat_template(default_system: str | None = None) -> str:
    """The template, with a system message for conversations that have none."""
    template = _resource("chat_template.jinja")
    if default_system is None:
        return template
    return f"{{%- set default_system = {json.dumps(default_system)} -%}}\n{template}"


def closes_string(token: str) -> bool:
    """Whether a token ends a JSON string, and what it stands in, at once."""
    return token.startswith('"') and set(token) <= set('"}],')


def is_blank(token: str) -> bool:
    """Whether a token, in the byte alphabet of the tokenizer, is white space only."""
    return bool(token) and set(token) <= _BLANK


def is_number(token: str) -> bool:
    """Whether a token holds digits only."""
    return token.isdecimal()


def train_tokenizer() -> Tokenizer:
    """A tokenizer trained on our own sentences; the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(t, special=True) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_resource("sentences.txt").splitlines(), trainer)
    return tokenizer


def write_tokenizer(folder: Path, context: int) -> Tokenizer:
    """Write ``tokenizer.json``, its config and the chat template into ``folder``."""
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / TEMPLATE_FILE).write_text(chat_template(), encoding="utf-8")
    return tokenizer
