"""Makes the prompts and scripted answers over which speculation is measured.

Knows nothing of models or drafts. Some answers repeat their prompt with edits, some repeat nothing, and in some
every pair of tokens was there before and says nothing of what follows.
"""

from __future__ import annotations

import random
from collections.abc import Callable

VOCAB, PROMPT, TOKENS = 32000, 256, 96  # tokens: of the vocabulary, of a prompt, of half an answer
LENGTH = 2 * TOKENS + 20  # tokens of an answer, with some that drafts may run ahead to
Scripts = dict[str, list[int]]  # token ids by a request's name


def texts(
    batch: int, seed: int, answer: Callable[[list[int], random.Random], list[int]]
) -> tuple[Scripts, Scripts]:
    """Returns ``batch`` prompts and the answers to them, by name."""
    rng = random.Random(seed)
    prompts = {f"{seed}-{at}": [rng.randrange(VOCAB) for _ in range(PROMPT)] for at in range(batch)}
    return prompts, {name: answer(prompt, rng) for name, prompt in prompts.items()}


def new(prompt: list[int], rng: random.Random, length: int = LENGTH) -> list[int]:
    """Returns an answer that repeats nothing."""
    return [rng.randrange(VOCAB) for _ in range(length)]


def copied(prompt: list[int], rng: random.Random, length: int = LENGTH) -> list[int]:
    """Returns the prompt's passages with an edit every 25 tokens or so, each some new tokens."""
    found, at = list[int](), rng.randrange(PROMPT // 2)
    while len(found) < length:
        if rng.random() < 0.04:
            found += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))]
            at = rng.randrange(PROMPT) if rng.random() < 0.3 else at + 2
        found.append(prompt[at % PROMPT])
        at += 1
    return found


def misleading(prompt: list[int], rng: random.Random, length: int = LENGTH) -> list[int]:
    """Returns tokens of a small alphabet: every pair was there before, and says nothing of what follows."""
    return [rng.randrange(16) for _ in range(length)]
