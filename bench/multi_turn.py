"""A conversation of many turns: is the time to first token flat, because only the new suffix is computed?

    .venv/bin/python -m bench.multi_turn [--turns 30] [--url http://…] [--plot docs/figures/multi_turn.svg]
        [--user 256 --answer 64 --serve "--device paced:h100-llama3-8b"]

Each turn sends the whole conversation so far (earlier prompts *and answers*) and some new tokens. Beside it, every
few turns, a prompt of the same length that nobody has seen is asked: what the turn would cost without reuse.
Without --url a cluster is started: `baton serve` with one prefill and one decode worker, and --serve's flags.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import httpx
from rich.console import Console

from baton.bench.rows import Row, median, table

PORT, READY_S = 8741, 120.0
IDS = (300, 1500)  # ordinary tokens of the demo model
COLD_EVERY = 3
SETTLE_S = 0.7  # a beat, so that the index knows of the turn before
FLAT = 1.5
COMPUTED_FLAT = 1.3  # a block's rounding; unlike time it doesn't depend on what else the machine does


class Turn(NamedTuple):
    """Holds one question: its length, how many of its tokens were cached, seconds to the first token, and the
    answer.
    """

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    answer: list[int]

    @property
    def computed_tokens(self) -> int:
        """Returns how many of the prompt's tokens no worker had cached."""
        return self.prompt_tokens - self.cached_tokens


def ask(client: httpx.Client, prompt: list[int], max_tokens: int) -> Turn:
    """Asks for one streamed completion of ``prompt``."""
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, first, answer, cached = time.perf_counter(), 0.0, list[int](), 0
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {}
            for choice in chunk.get("choices", ()):
                first = first or time.perf_counter()
                answer += choice.get("token_ids") or []
            cached = (chunk.get("usage") or {}).get("prompt_tokens_details", {}).get("cached_tokens", cached)
    return Turn(len(prompt), cached, first - began, answer)


def conversation(url: str, turns: int, user: int, answer: int, seed: int = 7) -> Iterator[tuple[Turn, Turn | None]]:
    """Each turn, and the same length cold where that was asked too."""
    rng, said = random.Random(seed), list[int]()
    with httpx.Client(base_url=url, timeout=120) as client:
        for number in range(turns):
            said += [rng.randrange(*IDS) for _ in range(user)]
            cold = None
            if number % COLD_EVERY == 0:
                cold = ask(client, [rng.randrange(*IDS) for _ in said], 1)
            turn = ask(client, said, answer)
            said += turn.answer
            time.sleep(SETTLE_S)
            yield turn, cold


def rows(pairs: list[tuple[Turn, Turn | None]]) -> list[Row]:
    """Late turns against early ones, and against no reuse."""
    third = max(1, len(pairs) // 3)
    early = median([t.ttft_s for t, _ in pairs[1 : 1 + third]])
    late = median([t.ttft_s for t, _ in pairs[-third:]])
    first_computed = median([t.computed_tokens for t, _ in pairs[1 : 1 + third]])
    last_computed = median([t.computed_tokens for t, _ in pairs[-third:]])
    last = pairs[-1][0]
    cold = [c.ttft_s for _, c in pairs if c is not None][-1]
    return [
        Row(f"time to first token, turns 2-{1 + third}", early * 1e3, "ms"),
        Row(
            f"time to first token, last {third} turns",
            late * 1e3,
            "ms",
            "early",
            late / early,
            0.0,
            FLAT,
            ceiling=True,
        ),
        Row("the same length cold, at the end", cold * 1e3, "ms"),
        Row(f"found of the last turn's {last.prompt_tokens} tokens", last.cached_tokens, "tokens"),
        Row(
            f"tokens computed a turn, last {third} turns",
            last_computed,
            "tokens",
            "early",
            last_computed / max(first_computed, 1),
            0.0,
            COMPUTED_FLAT,
            ceiling=True,
        ),
    ]


def plot(pairs: list[tuple[Turn, Turn | None]], title: str, target: Path) -> None:
    """Time to first token over the turn's number."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([i + 1 for i in range(len(pairs))], [t.ttft_s * 1e3 for t, _ in pairs], "C0o-", label="conversation")
    cold = [(i + 1, c.ttft_s * 1e3) for i, (_, c) in enumerate(pairs) if c is not None]
    axes.plot(*zip(*cold, strict=True), "C1s--", label="same length, nothing cached")
    axes.set(xlabel="turn", ylabel="time to first token, ms", ylim=(0, None), title=title)
    axes.legend()
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


@contextmanager
def served(flags: str) -> Iterator[str]:
    """A cluster of its own."""
    ports = ["--port", str(PORT), "--grpc-port", str(PORT + 1)]
    baton = str(Path(sys.executable).parent / "baton")
    command = [baton, "serve", *ports, *shlex.split(flags)]
    cluster = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        url, deadline = f"http://127.0.0.1:{PORT}", time.monotonic() + READY_S
        while not _ready(url):
            if cluster.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the cluster isn't ready: exit code {cluster.poll()}")
            time.sleep(0.1)
        yield url
    finally:
        cluster.send_signal(signal.SIGINT)
        cluster.wait(30)


def _ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> None:
    """Measures, prints the table and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--user", type=int, default=40, help="new tokens of each turn")
    parser.add_argument("--answer", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--url", default="")
    parser.add_argument("--serve", default="--prefill 1 --decode 1", help="flags of the cluster that is started")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    with nullcontext(args.url) if args.url else served(args.serve) as url:
        pairs = list(conversation(url, args.turns, args.user, args.answer))
    Console(width=120).print(table(rows(pairs)))
    if args.plot:
        plot(pairs, f"{args.turns} turns of {args.user} + {args.answer} tokens ({args.serve})", args.plot)


if __name__ == "__main__":
    main()
