"""Measures what the lossy wire codecs cost in answers: the demo model, disaggregated, with and without each codec.

    .venv/bin/python -m bench.kv_codec_loss [--prompts 12] [--tokens 48] [--json bench/results/kv_codec_loss.json]

Every prompt goes through a prefill worker, so all of its KV is coded once. Tokens are greedy: the figures are how
many are the same as without a codec up to the first that differs, and how far the log probability of those moves.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from rich.console import Console

from baton.bench.rows import Row, table, to_json
from baton.evaluate.paths import agreeing_tokens
from baton.evaluate.served import ServerSubject
from baton.evaluate.subject import Continuation
from baton.launch.fleet import Fleet

TEXT = (
    "The night train left the station with nine minutes of delay, and nobody on the platform could say why. "
    "A clerk walked along the carriages, counting lamps. Two children argued about the moon. In the last "
    "compartment an old man opened a notebook and began to write down the names of rivers, from the sea "
    "upwards, as if the train might follow them home. Rain came over the hills and then thought better of it. "
)


def prompts(count: int) -> list[str]:
    """Texts of growing length, each beginning elsewhere."""
    return [(TEXT * 4)[31 * i : 31 * i + 300 + 60 * i] for i in range(count)]


def answers(codec: str, texts: list[str], tokens: int) -> list[Continuation]:
    """Greedy completions with log probabilities, from a cluster of its own."""
    worker, router = {"kv_codec": codec}, {"local_prefill_max_tokens": 0, "policy": "round_robin"}
    with Fleet(cluster={"prefill": 1, "decode": 1}, worker=worker, router=router) as fleet:
        served = ServerSubject(fleet.url, fleet.name)
        return served.answers([served.encode(text) for text in texts], tokens, to_the_end=True)


def moves(exact: Continuation, coded: Continuation) -> Iterator[float]:
    """Returns by how much log probabilities differ where the tokens agree."""
    for at in range(agreeing_tokens(exact.tokens, coded.tokens)):
        yield abs(exact.logprobs[at] - coded.logprobs[at])


def rows(codec: str, pairs: list[tuple[Continuation, Continuation]], tokens: int) -> Iterator[Row]:
    """Yields the rows on how the codec changed the answers."""
    agree = [agreeing_tokens(a.tokens, b.tokens) for a, b in pairs]
    moved = [move for a, b in pairs for move in moves(a, b)]
    yield Row(f"{codec} on the wire: answers that are equal", sum(n == tokens for n in agree) / len(pairs), "")
    yield Row(f"{codec}: tokens before the first difference", mean(agree) / tokens, "")
    yield Row(f"{codec}: |change of log p|, mean", mean(moved), "nats")
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
    for codec in ("int8", "fp8", "int4"):
        coded = answers(codec, texts, given.tokens)
        found += rows(codec, list(zip(exact, coded, strict=True)), given.tokens)
    Console(highlight=False, width=150).print(table(found))
    if given.json:
        given.json.write_text(to_json(found) + "\n")


if __name__ == "__main__":
    main()
