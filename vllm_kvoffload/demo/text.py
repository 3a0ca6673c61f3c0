"""The demo's text and the tokenizer trained on it.

The text ships inside the package, so a tokenizer can be trained in a second without any download and is the
same on every machine: byte-level BPE, every byte covered, ids 0..RESERVED-1 are control tokens.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib import resources
from pathlib import Path

SPECIAL_TOKENS = (
    "<|pad|>",
    "<|endoftext|>",
    "<|begin|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
PAD_ID, EOS_ID, BOS_ID, END_ID = 0, 1, 2, 6
RESERVED = 16
"""Number of control ids; those without a name above are `<|reserved_N|>`."""

CHAT_TEMPLATE = (
    "<|begin|>"
    "{%- for message in messages -%}"
    "{%- if message.role not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unsupported role: ' + message.role) -}}"
    "{%- endif -%}"
    "{{- '<|' + message.role + '|>\\n' -}}"
    "{%- if message.content is string -%}"
    "{{- message.content -}}"
    "{%- else -%}"
    "{%- for part in message.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)


@cache
def load_text() -> str:
    """The whole packaged essay, UTF-8, sections in file-name order."""
    folder = resources.files(__package__).joinpath("data")
    parts = sorted(
        (item for item in folder.iterdir() if item.name.endswith(".txt")), key=lambda item: item.name
    )
    if not parts:
        raise FileNotFoundError(
            f"the package {__package__} holds no data/*.txt: the installation is incomplete"
        )
    return "\n".join(item.read_text(encoding="utf-8") for item in parts)


def text_digest() -> str:
    """SHA-256 of the packaged text, hexadecimal."""
    return hashlib.sha256(load_text().encode()).hexdigest()


def control_tokens() -> list[str]:
    """The `RESERVED` control tokens in id order."""
    return [*SPECIAL_TOKENS, *(f"<|reserved_{i}|>" for i in range(len(SPECIAL_TOKENS), RESERVED))]


def write_tokenizer(directory: Path, vocab_size: int, model_max_length: int) -> None:
    """Train the tokenizer and write tokenizer.json and tokenizer_config.json (with the chat template).

    `vocab_size` counts the control tokens and all 256 bytes; every id below it can be decoded. Raises
    ValueError when the text is too small to fill the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=control_tokens(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(load_text().splitlines(keepends=True), trainer=trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size: the packaged text yields {tokenizer.get_vocab_size()} tokens, "
            f"{vocab_size} were asked for; ask for fewer"
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "additional_special_tokens": control_tokens()[BOS_ID + 1 :],
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
