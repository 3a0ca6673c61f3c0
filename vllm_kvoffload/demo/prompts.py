"""Prompts of any length made from the packaged text, for demos, benchmarks and end-to-end tests.

All functions are deterministic by seed and need no tokenizer library: the caller passes the encoder.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from vllm_kvoffload.demo.text import load_text

Encoder = Callable[[str], Sequence[int]]
"""Text to token ids, without added control tokens."""

QUESTIONS = (
    "Which rows should stay in device memory, and which may leave it?",
    "Why has every hit to be marked before the first victim is chosen?",
    "What does a lease protect against that a long time-out does not?",
    "How would you show that an offloaded model produces the same tokens?",
    "What is gained when several layers share one choice?",
    "When does prefill have time to spare for transfers, and when does decode?",
    "What happens to a row when its request is preempted?",
    "Which numbers would you report, and under which conditions were they measured?",
)
"""Questions about the packaged text, for chats."""


def paragraphs() -> list[str]:
    """The packaged text's paragraphs in order; headings are not paragraphs."""
    blocks = (block.strip() for block in load_text().split("\n\n"))
    return [block for block in blocks if len(block) > 80]


def token_prompt(encode: Encoder, tokens: int, seed: int = 0) -> list[int]:
    """A prompt of exactly `tokens` token ids: paragraphs in an order drawn from `seed`, as often as needed.

    Different seeds give prompts without a common prefix beyond chance. Raises ValueError when `tokens` < 1.
    """
    if tokens < 1:
        raise ValueError(f"tokens: at least 1 is needed, got {tokens}")
    ids: list[int] = []
    for paragraph in _endless(seed):
        ids.extend(encode(paragraph + "\n\n"))
        if len(ids) >= tokens:
            break
    return ids[:tokens]


def prompts_with_prefix(
    encode: Encoder, count: int, prefix_tokens: int, tokens: int, seed: int = 0
) -> list[list[int]]:
    """`count` prompts of `tokens` ids each, whose first `prefix_tokens` ids are the same.

    Raises ValueError unless 0 <= prefix_tokens < tokens.
    """
    if not 0 <= prefix_tokens < tokens:
        raise ValueError(f"prefix_tokens: {prefix_tokens} must lie in 0..{tokens - 1}")
    prefix = token_prompt(encode, prefix_tokens, seed) if prefix_tokens else []
    rest = tokens - prefix_tokens
    return [prefix + token_prompt(encode, rest, seed + 1 + index) for index in range(count)]


def chat(turn: int, characters: int, seed: int = 0) -> list[dict[str, str]]:
    """OpenAI-style messages: about `characters` of text and question number `turn`."""
    material = ""
    for paragraph in _endless(seed):
        material += paragraph + "\n\n"
        if len(material) >= characters:
            break
    return [
        {"role": "system", "content": "Answer from the text you are given."},
        {"role": "user", "content": material[:characters] + "\n\n" + QUESTIONS[turn % len(QUESTIONS)]},
    ]


def _endless(seed: int) -> Iterator[str]:
    """Paragraphs without end: one shuffled pass after another."""
    generator = random.Random(seed)
    pool = paragraphs()
    while True:
        generator.shuffle(pool)
        yield from pool
