"""Computes what workers of several cards give, on paper and in the simulator: tensor, pipeline and expert parallel.

    python -m bench.wide_workers [--gpu h200] [--cards 8,64] [--models llama-3-70b,qwen3-235b-a22b]
        [--seconds 60] [--json FILE]

Nothing is measured. Inputs are the cards' data sheets (baton/planner/costs/hardware.toml: FLOP/s, bytes/s of
memory, of a node's links and of the network), the planner's shares of their peaks and its seconds of a collective
(baton/planner/costs/worker.py), the models' published sizes, and the constants below. A step follows the product's
ranks: by layers it is cut into parts of 64 rows or more, up to four per stage, and ends before the next one begins;
by experts each rank has some rows, their KV, all weights but the experts', and its share of these.

Printed are, of one worker: tokens of KV that it holds, an answer's seconds per token alone, a decode step of
SEQUENCES sequences per card, and a prompt's chunk; of all cards in the simulator: the highest rate of requests of
which 90% meet both SLOs, with the best of some ratios. The same figures on any machine.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from baton.planner.costs import worker as w
from baton.planner.costs.data_sheets import Accelerator, accelerators
from baton.planner.costs.model_shape import ModelShape, model_shape
from baton.planner.score import Slo
from baton.planner.simulator.cluster import ClusterScenario, SimSettings
from baton.planner.sweep import simulate
from baton.planner.traces.trace import Trace
from baton.protos.measurements import TransferCurve
from bench.published import poisson

NODE = 8  # cards that links join; between nodes there is the network
SEQUENCES, CONTEXT = 16, 4096  # of a decode step: per card, and tokens of each
CHUNK = 2048  # tokens of a prompt's step, per stage, or per card of a worker that shares rows
PROMPT, ANSWER = 4000, 400  # tokens of a simulated request
SLO = Slo(2.0, 0.05)
WANT, HALVINGS, SEED = 0.9, 6, 1  # of the search for the highest rate
RATIOS = 0.0, 0.25, 0.5  # shares of workers that read prompts; 0: each does both
PART_ROWS, PARTS_PER_STAGE = 64, 4  # engine/backends/ranks/dealing.py


class Experts(NamedTuple):
    """A layer's experts: how many there are, how many a token takes, and each one's inner size."""

    total: int
    chosen: int
    inner: int


# https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json; the dense inner size is that of no expert.
QWEN3_MOE = ModelShape("qwen3-235b-a22b", 94, 4096, 0, 64, 4, 128, 151936)
MIXTURES = {QWEN3_MOE.name: (QWEN3_MOE, Experts(128, 8, 1536))}
LAYOUTS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (1, 2, 1), (2, 2, 1), (4, 2, 1), (8, 2, 1), (1, 8, 1),
           (8, 4, 1), (1, 1, 8), (1, 1, 16), (1, 1, 32), (1, 1, 64))  # fmt: skip


class Layout(NamedTuple):
    """Says how many ranks of a worker share matrices, layers, or experts and rows."""

    tp: int
    pp: int
    ep: int

    @property
    def cards(self) -> int:
        return self.tp * self.pp * self.ep

    def __str__(self) -> str:
        return " ".join(f"{name}{n}" for name, n in zip(self._fields, self, strict=True) if n > 1) or "one card"


class Wide:
    """A worker of ``layout`` whose cards are of ``sheet``."""

    def __init__(self, shape: ModelShape, experts: Experts | None, sheet: Accelerator, layout: Layout) -> None:
        self.shape, self.experts, self.sheet, self.layout = shape, experts, sheet, layout
        self.bandwidth = sheet.memory_bytes_per_s * w.MEMORY_SHARE
        self.flops = sheet.flops * w.MATRIX_SHARE
        self.layers = shape.num_hidden_layers
        each = 0 if experts is None else 3 * shape.hidden_size * experts.inner * self.layers
        self.expert_values = 0 if experts is None else experts.total * each
        self.chosen_values = 0 if experts is None else experts.chosen * each
        self.plain_values = self.layers * shape.layer_weights

    @property
    def chunk(self) -> int:
        """Returns the tokens of a prompt's step."""
        return CHUNK * self.layout.ep * self.layout.pp

    @property
    def kv_tokens(self) -> int:
        """Returns the tokens of KV that the worker's cards hold; negative where the weights don't fit."""
        layout, shape = self.layout, self.shape
        plain = shape.weight_bytes * layout.ep  # every rank that shares rows has all of it
        held = plain + self.expert_values * shape.bytes_per_value + w.activation_bytes(shape, self.chunk)
        return int((layout.cards * self.sheet.memory * w.USABLE_MEMORY - held) / self._kv_bytes)

    @property
    def _kv_bytes(self) -> float:
        """Returns the bytes of a token's KV on all cards: one head is the least that a rank has."""
        return self.shape.kv_bytes_per_token * max(1.0, self.layout.tp / self.shape.num_key_value_heads)

    def costs(self, rows: int) -> w.WorkerCosts:
        """Returns the costs of steps of about ``rows`` rows, in the form that the simulator takes."""
        layout, shape, value = self.layout, self.shape, self.shape.bytes_per_value
        parts = max(1, min(PARTS_PER_STAGE * layout.pp, rows // PART_ROWS)) if layout.pp > 1 else 1
        turns = parts + layout.pp - 1  # of one stage's part each, until all parts have left the last one
        late, cards = turns / parts, layout.cards
        read = shape.weight_bytes * layout.ep + self._touched(rows) * self.expert_values * value
        heads = shape.num_attention_heads * shape.head_dim * self.layers
        collective, moved = self._collectives()
        return w.WorkerCosts(
            about=f"{shape.name} by {layout}",
            fixed=w.STEP_S + turns / layout.pp * (self.layers * w.LAYER_S + collective) + turns * w.REDUCE_S,
            weights=turns * read / cards / self.bandwidth,
            token=late * (2 * (self.plain_values + self.chosen_values) / cards / self.flops + moved / layout.pp),
            pair=late * 4 * heads / cards / (self.sheet.flops * w.ATTENTION_SHARE),
            sequence=w.SEQUENCE_S,
            context=late * self._kv_bytes / cards / self.bandwidth,
            kv_tokens=self.kv_tokens,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            transfer=TransferCurve(w.TRANSFER_S, 1 / (cards * self.sheet.network_bytes_per_s * w.NETWORK_SHARE)),
            accelerators=cards,
        )

    def _touched(self, rows: int) -> float:
        """Returns the share of experts that some of ``rows`` rows take, where each takes any as likely."""
        return 0.0 if self.experts is None else 1 - (1 - self.experts.chosen / self.experts.total) ** rows

    def _collectives(self) -> tuple[float, float]:
        """Returns the seconds of a step's collectives without data, and those per row of it.

        By columns two all-reduces of the hidden size per layer; by experts a row goes to its experts' ranks and
        back.
        """
        layout, value = self.layout, self.shape.hidden_size * self.shape.bytes_per_value
        link = self.sheet.link_bytes_per_s * w.LINK_SHARE
        latency = 2 * self.layers * min(NODE, max(layout.tp, layout.ep)) * w.REDUCE_S
        if layout.tp > 1:
            return latency, 2 * self.layers * 2 * (layout.tp - 1) / layout.tp * value / link
        if layout.ep == 1 or self.experts is None:
            return 0.0, 0.0
        away = max(0, layout.ep - NODE) / layout.ep  # of a row's experts, on other nodes
        near = (min(layout.ep, NODE) - 1) / layout.ep
        network = self.sheet.network_bytes_per_s * w.NETWORK_SHARE
        each = max(away / network, near / link)  # both at once
        return latency, 2 * self.layers * self.experts.chosen * value * each / layout.ep


def highest_rate(wide: Wide, workers: int, seconds: float) -> tuple[float, str]:
    """Returns the highest rate of requests that ``workers`` workers serve within the SLOs for so many seconds, and
    by which ratio.
    """
    ratios = sorted({int(workers * share) for share in RATIOS})
    batch = 8 * SEQUENCES * wide.layout.cards
    reads, writes = wide.costs(wide.chunk), wide.costs(SEQUENCES * wide.layout.cards)
    batch_rate = SEQUENCES * wide.layout.cards / writes.step_seconds(0, 0.0, batch // 8, CONTEXT * batch / 8)
    read_rate = wide.chunk / reads.step_seconds(wide.chunk, wide.chunk * CHUNK / 2, 0, 0.0)
    bound = 1.5 / (PROMPT / read_rate + ANSWER / batch_rate)  # requests per second of a worker
    best = 0.0, "none"
    for prefill in ratios:
        settings = SimSettings(prefill, workers - prefill, max_batch=batch, prefill_chunk=wide.chunk)
        low, high = best[0], bound * workers
        for _ in range(HALVINGS):
            rate = (low + high) / 2
            scenario = ClusterScenario(settings, reads, writes, requests(rate, seconds))
            kept = simulate(scenario, SLO).score.attainment >= WANT
            low, high = (rate, high) if kept else (low, rate)
        if low > best[0]:
            best = low, f"{prefill}P{workers - prefill}D" if prefill else "colocated"
    return best


def requests(rate: float, seconds: float) -> Trace:
    """Returns a Poisson trace of equal requests."""
    return poisson(lambda _: (PROMPT, ANSWER), rate, SEED, 512, seconds=seconds)


def rows_of(name: str, gpu: str, cards: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yields one row for each layout that ``cards`` cards can have and the model fits, with ``seconds`` seconds of
    traffic in the simulator; 0: without it.
    """
    shape, experts = MIXTURES[name] if name in MIXTURES else (model_shape(name), None)
    for layout in (Layout(*each) for each in LAYOUTS):
        wide = Wide(shape, experts, accelerators()[gpu], layout)
        if cards % layout.cards or (layout.ep > 1) > (experts is not None) or wide.kv_tokens < CONTEXT * SEQUENCES:
            continue
        workers, batch = cards // layout.cards, SEQUENCES * layout.cards
        step = wide.costs(batch).step_seconds(0, 0.0, batch, float(batch * CONTEXT))
        alone = wide.costs(1).step_seconds(0, 0.0, 1, float(CONTEXT))
        chunk = wide.costs(wide.chunk).step_seconds(wide.chunk, wide.chunk * CHUNK / 2, 0, 0.0)
        rate, ratio = highest_rate(wide, workers, seconds) if seconds else (math.nan, "")
        yield {
            "model": name, "cards": cards, "worker": str(layout), "workers": workers,
            "kv_tokens_per_card": wide.kv_tokens // layout.cards, "alone_ms": alone * 1e3, "step_ms": step * 1e3,
            "decode_tokens_per_card": batch / step / layout.cards,
            "prefill_tokens_per_card": wide.chunk / chunk / layout.cards, "requests_per_s": rate, "ratio": ratio,
        }  # fmt: skip


HEAD = ("worker", "workers", "KV tokens / card", "alone, ms", f"step of {SEQUENCES} / card, ms",
        "tok/s / card", "prefill tok/s / card", "requests/s", "by")  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [" | ".join(HEAD), "|".join("---" for _ in HEAD)]
    for row in rows:
        rate = f"{row['requests_per_s']:.1f}" if row["ratio"] else ""
        cells = (
            row["worker"], row["workers"], f"{row['kv_tokens_per_card']:,}", f"{row['alone_ms']:.1f}",
            f"{row['step_ms']:.1f}", f"{row['decode_tokens_per_card']:,.0f}",
            f"{row['prefill_tokens_per_card']:,.0f}", rate, row["ratio"],
        )  # fmt: skip
        lines.append(" | ".join(map(str, cells)))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    """Prints a table per model and number of cards, with its inputs, and writes JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200", choices=sorted(accelerators()))
    parser.add_argument("--cards", default="8,64")
    parser.add_argument("--models", default="llama-3-70b,qwen3-235b-a22b")
    parser.add_argument("--seconds", type=float, default=60.0, help="of simulated traffic; 0: paper alone")
    parser.add_argument("--json", default="")
    asked = parser.parse_args()
    sheet, found = accelerators()[asked.gpu], list[dict[str, Any]]()
    print(f"{asked.gpu}: {msgspec.to_builtins(sheet)}")
    shares = ("MATRIX_SHARE", "ATTENTION_SHARE", "MEMORY_SHARE", "LINK_SHARE", "NETWORK_SHARE", "USABLE_MEMORY")
    times = ("STEP_S", "LAYER_S", "REDUCE_S", "SEQUENCE_S", "TRANSFER_S")
    print({name: getattr(w, name) for name in (*shares, *times)})
    for name in asked.models.split(","):
        for cards in map(int, asked.cards.split(",")):
            rows = list(rows_of(name, asked.gpu, cards, asked.seconds))
            print(f"\n{name} on {cards} x {asked.gpu}\n\n{table(rows)}", flush=True)
            found += rows
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
