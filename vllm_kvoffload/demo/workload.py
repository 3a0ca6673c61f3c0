"""The demo's requests: steps of one or more requests, all made from the packaged text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_kvoffload.demo import prompts
from vllm_kvoffload.demo.client import Request

SHORT, LONG, PAIR, CHAT, AGAIN = "short", "long", "pair", "chat", "again"
"""Keys of the steps; they are also the names of their requests, the pair's with -1 and -2."""


@dataclass(frozen=True)
class Scale:
    """Sizes of a demo, in tokens where not said otherwise.

    The device budget is such that, without offload, the pair needs nearly all of it: the long prompt's
    blocks are gone when it is asked again.
    """

    long_tokens: int
    pair_tokens: int
    answer_tokens: int
    chat_characters: int
    max_model_len: int
    device_bytes: int
    topk_buffer_size: int = 512


FULL = Scale(4000, 5000, 64, 3000, 8192, 48 << 20)
QUICK = Scale(1500, 1800, 16, 1000, 4096, 20 << 20)
ASCEND = Scale(900, 1000, 16, 600, 2560, 72 << 20, 2048)
ASCEND_QUICK = Scale(300, 400, 8, 300, 1024, 60 << 20, 2048)
"""For an emulated NPU, which computes slowly. Prompts stay below the model's top-k."""


@dataclass(frozen=True)
class DemoStep:
    """Requests that are sent together; the next step waits for all of them."""

    key: str
    title: str
    requests: tuple[Request, ...]

    @property
    def output_tokens(self) -> int:
        """Maximum tokens of its answers together."""
        return sum(request.max_tokens for request in self.requests)


def steps(scale: Scale, encode: prompts.Encoder, decode: Callable[[list[int]], str]) -> list[DemoStep]:
    """The demo's steps in order. `encode` and `decode` are the served model's tokenizer."""

    def essay(tokens: int, seed: int) -> str:
        return decode(prompts.token_prompt(encode, tokens, seed))

    answer = scale.answer_tokens
    long = essay(scale.long_tokens, seed=1)
    pair = tuple(
        Request(f"{PAIR}-{seed - 1}", essay(scale.pair_tokens, seed), answer, stream=True) for seed in (2, 3)
    )
    follow_up = f"{long}\n\n{prompts.QUESTIONS[1]}\n\n"
    return [
        DemoStep(SHORT, "a short question", (Request(SHORT, prompts.QUESTIONS[0], answer),)),
        DemoStep(LONG, "a long prompt, streamed", (Request(LONG, long, answer, stream=True),)),
        DemoStep(PAIR, "two long prompts at once, streamed", pair),
        DemoStep(
            CHAT,
            "a chat about the text",
            (Request(CHAT, prompts.chat(3, scale.chat_characters, seed=4), answer),),
        ),
        DemoStep(
            AGAIN, "the first long prompt and a question", (Request(AGAIN, follow_up, answer, stream=True),)
        ),
    ]
