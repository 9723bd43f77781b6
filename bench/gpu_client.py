# SPDX-License-Identifier: Apache-2.0
"""A client of an engine on this machine: one token as soon as there is one, and the same prompts
again and again, to compare."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from gpu_machine import wait_until

KEY = "secret"
PROMPTS = [[(7 * i + j) % 1000 + 3 for j in range(8)] for i in range(20)]
Answer = list[list[Any]]


def ask(port: int, model: str, prompt: list[int], count: int, limit_s: float = 60.0) -> Answer:
    """A greedy completion over HTTP, with the key: tokens with their log-probabilities."""
    body = {
        **{"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0},
        **{"logprobs": 0, "ignore_eos": True, "return_tokens_as_token_ids": True},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=limit_s) as answer:  # noqa: S310
        found = json.load(answer)["choices"][0]["logprobs"]
    pairs = zip(found["tokens"], found["token_logprobs"], strict=True)
    return [[token, logprob] for token, logprob in pairs]


def ask_all(port: int, model: str) -> list[Answer]:
    """Every prompt, one after the other, 16 tokens each."""
    return [ask(port, model, prompt, 16) for prompt in PROMPTS]


def wait_answer(
    port: int, model: str, limit_s: float, alive: Callable[[], bool] = lambda: True
) -> float | None:
    """Ask for one token until it comes; return when that was (monotonic), None when the limit is
    reached or who should answer is not alive."""

    def answered() -> float | None:
        if not alive():
            return -1.0
        try:
            ask(port, model, PROMPTS[0], 1, 10.0)
        except (OSError, urllib.error.URLError, ValueError):
            return None
        return time.monotonic()

    found = wait_until(answered, limit_s, 0.01)
    return None if found is None or found < 0 else float(found)


def compare(answers: list[Answer], first: list[Answer]) -> dict[str, int]:
    """Given the answers to all prompts now and at first, return how many are equal: their tokens,
    and their log-probabilities too."""
    pairs = list(zip(answers, first, strict=True))
    tokens = sum([t for t, _ in a] == [t for t, _ in b] for a, b in pairs)
    return {"of": len(pairs), "tokens": tokens, "logprobs": sum(a == b for a, b in pairs)}
