"""What the lossy wire codecs cost in answers: the demo model, disaggregated, with and without each codec.

    .venv/bin/python -m bench.kv_codec_loss [--prompts 12] [--tokens 48] [--json bench/results/kv_codec_loss.json]

Every prompt goes through a prefill worker, so all of its KV is coded once. Tokens are greedy: the figures are how
many are the same as without a codec up to the first that differs, and how far the log probability of those moves.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from baton.console.bench.kv.rows import Row, table, to_json
from tests.e2e.fleet import Fleet

TEXT = (
    "The night train left the station with nine minutes of delay, and nobody on the platform could say why. "
    "A clerk walked along the carriages, counting lamps. Two children argued about the moon. In the last "
    "compartment an old man opened a notebook and began to write down the names of rivers, from the sea "
    "upwards, as if the train might follow them home. Rain came over the hills and then thought better of it. "
)


def prompts(count: int) -> list[str]:
    """Texts of growing length, each beginning elsewhere."""
    return [(TEXT * 4)[31 * i : 31 * i + 300 + 60 * i] for i in range(count)]


def answers(codec: str, texts: list[str], tokens: int) -> list[dict[str, Any]]:
    """Greedy completions with log probabilities, from a cluster of its own."""
    body = {"max_tokens": tokens, "temperature": 0, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    worker, router = {"kv_codec": codec}, {"local_prefill_max_tokens": 0, "policy": "round_robin"}
    with Fleet(prefill=1, decode=1, worker=worker, router=router) as fleet:
        found = []
        for text in texts:
            asked = body | {"model": fleet.model, "prompt": text}
            reply = httpx.post(fleet.url + "/v1/completions", json=asked, timeout=120)
            reply.raise_for_status()
            found.append(reply.json()["choices"][0])
        fleet.wait_for_baseline()
        return found


def same(first: list[int], second: list[int]) -> int:
    """How many leading tokens agree."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))


def moves(exact: dict[str, Any], coded: dict[str, Any]) -> Iterator[float]:
    """By how much log probabilities differ where the tokens agree."""
    for at in range(same(exact["token_ids"], coded["token_ids"])):
        yield abs(exact["logprobs"]["token_logprobs"][at] - coded["logprobs"]["token_logprobs"][at])


def rows(codec: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]], tokens: int) -> Iterator[Row]:
    """What the codec did to the answers."""
    agree = [same(a["token_ids"], b["token_ids"]) for a, b in pairs]
    moved = [move for a, b in pairs for move in moves(a, b)]
    yield Row(f"{codec} on the wire: answers that are equal", sum(n == tokens for n in agree) / len(pairs), "")
    yield Row(f"{codec}: tokens before the first difference", statistics.mean(agree) / tokens, "")
    yield Row(f"{codec}: |change of log p|, mean", statistics.mean(moved), "nats")
    yield Row(f"{codec}: |change of log p|, largest", max(moved), "nats")


def main() -> None:
    """Print four lines per codec."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    texts = prompts(given.prompts)
    exact = answers("none", texts, given.tokens)
    found: list[Row] = []
    for codec in ("int8", "fp8"):
        coded = answers(codec, texts, given.tokens)
        found += rows(codec, list(zip(exact, coded, strict=True)), given.tokens)
    Console(highlight=False, width=150).print(table(found))
    if given.json:
        given.json.write_text(to_json(found) + "\n")


if __name__ == "__main__":
    main()
