"""Pages leased and bytes shipped for one long prompt, with and without a window: the real loops and pools.

    .venv/bin/python -m bench.windows [--window 4096 | --selection snapkv:1024 | --mixed gpt-oss-20b
                                       | --hybrid qwen3-next-80b | --sharing gemma-3n-e4b] [--prompt N]

Sizes are Mistral 7B's (32 layers, 8 KV heads of 128, bfloat16), 2 MiB per block of 16 tokens, or those of a model
that mixes layers with a window and without, whose layers with a window then have pages of their own. A hybrid is
held against a model whose layers all are its attention. A model whose last layers read the K and V of others is
held against one whose layers all have their own. Nothing is computed: the engines are stand-ins that choose token
0, because only pages and blocks are counted.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console

from baton.bench.rows import Row, table
from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.backends.paced.runner import PacedRunner
from baton.engine.plan import SampledToken, SequenceStep, StepPlan, StepResult
from baton.engine.steps.parts import EngineParts
from baton.kv.layout.page import layout_for
from baton.kv.layout.selection import ALL, marked, parsed
from baton.kv.layout.state import state_pages
from baton.kv.layout.tables import by_window, table_count
from baton.kv.pages.pool import PagePool
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, KvLayout, LayerGroup, Sampling, StatePlane

MIB = 1 << 20
STATES = 16  # for which a pool has room beside its blocks
DECODE = ("held by the decode worker as the answer begins", "held at most while it is written")


class Tape(list[Any]):
    """Is the engine's end of a channel that only remembers."""

    def send(self, message: Any) -> None:
        """Remembers ``message``."""
        self.append(message)

    def poll(self, timeout_s: float) -> list[Any]:
        """Returns [], because nobody asks this engine from outside."""
        return []

    def of(self, kind: type) -> list[Any]:
        """Returns the messages of ``kind``."""
        return [message for message in self if isinstance(message, kind)]


class Counting(PacedRunner):
    """Chooses token 0 of every sequence, without a look at its KV."""

    pool: PagePool
    most = 0  # pages leased at once in a step

    def run(self, plan: StepPlan) -> StepResult:
        """Returns token 0 for each item that asks for one."""
        self.most = max(self.most, self.pool.snapshot_counts().leased)
        sampled = tuple(SampledToken(item.seq, 0) for item in plan.items if item.sample)
        evenly = {item.seq: np.ones(_observed(item), np.float32) for item in plan.items if item.watch}
        return StepResult(sampled, 0.0, observed=evenly)


def _observed(item: SequenceStep) -> tuple[int, ...]:
    """The shape of what is observed of an item: by run before its watched tokens, or by each of these and run."""
    end = item.start + len(item.tokens) - 16 * (item.gap[1] - item.gap[0])
    return (len(item.tokens), -(-end // 16)) if item.watch_rows else ((item.watch or 0) // 16,)


def mistral(window: int = 0, selection: str = ALL) -> KvLayout:
    """Returns Mistral 7B's layout with ``window``, or with what is selected."""
    group = LayerGroup("window" if window else "full", ("k", "v"), 32, 8, 128, window)
    return layout_for("bfloat16", (group,), fidelity=marked("bfloat16", parsed(selection)))


# Layers that see all, layers with a window, KV heads, numbers of a head, tokens of the window.
MIXED = {
    "gemma-3-27b": (10, 52, 16, 128, 1024),
    "gemma-3-4b": (5, 29, 4, 256, 1024),
    "gpt-oss-20b": (12, 12, 8, 64, 128),
    "gpt-oss-120b": (18, 18, 8, 64, 128),
}


# Models whose last layers read the K and V of others: sizes as above, of all layers, and of those with K and V.
SHARING = {"gemma-3n-e4b": ((7, 28), (4, 16), 2, 256, 512), "gemma-3n-e2b": ((6, 24), (4, 16), 2, 256, 512)}


class Hybrid(NamedTuple):
    """Holds the sizes of a model of which ``attention`` of ``layers`` layers have K and V, the others a state."""

    layers: int
    attention: int
    kv_heads: int
    head_dim: int
    states: tuple[StatePlane, ...]

    def layout(self, dense: bool) -> KvLayout:
        """Returns the model's layout, or that of a model with as many layers that all attend."""
        layers, states = (self.layers, ()) if dense else (self.attention, self.states)
        return layout_for("bfloat16", layers, self.kv_heads, self.head_dim, states=states)


HYBRIDS = {
    "qwen3-next-80b": Hybrid(
        48, 12, 2, 256, (StatePlane("conv", 36, (8192, 3)), StatePlane("delta", 36, (32, 128, 128)))
    ),
    "bamba-9b": Hybrid(32, 3, 8, 128, (StatePlane("conv", 29, (8448, 3)), StatePlane("ssm", 29, (128, 64, 128)))),
}


def mixed(name: str) -> KvLayout:
    """Returns the layout of a model of ``MIXED`` whose pages hold blocks of all layers."""
    return _mixed(*MIXED[name])


def sharing(name: str, shared: bool) -> KvLayout:
    """Returns the layout of a model of ``SHARING``, in which layers with a window have pages of their own; unless
    ``shared``, that of such a model whose layers all have K and V.
    """
    every, owners, heads, head_dim, window = SHARING[name]
    return by_window(_mixed(*(owners if shared else every), heads, head_dim, window))


def _mixed(whole: int, windowed: int, heads: int, head_dim: int, window: int) -> KvLayout:
    full = LayerGroup("full", ("k", "v"), whole, heads, head_dim)
    return layout_for("bfloat16", (full, LayerGroup("window", ("k", "v"), windowed, heads, head_dim, window)))


def counting(layout: KvLayout, prompt: int, pages: int) -> Counting:
    """Returns a runner of ``layout`` with a pool of ``pages`` pages."""
    runner = Counting(
        "m", kv_bytes_per_token=16, vocab_size=8, max_model_len=2 * prompt, step_seconds=lambda s: 0.0
    )
    runner.spec = msgspec.structs.replace(runner.spec, layout=layout)
    runner.pool = PagePool(pages)
    return runner


def parts(runner: Counting) -> EngineParts:
    """Returns an engine of ``runner``."""
    return EngineParts.around(runner, runner.pool, Tape(), lambda: 0.0)


def measured(layout: KvLayout, prompt: int, answer: int) -> tuple[int, int, int, int]:
    """Returns (pages shipped, the most that the prefill worker leases, decode pages leased as the answer begins,
    the most of them while it is written).
    """
    pages = 2 * (prompt + answer) // 16 * table_count(layout) + STATES * state_pages(layout)
    ids = itertools.count(1)
    prefill, decode = counting(layout, prompt, pages), counting(layout, prompt, pages)
    reader = PrefillLoop(parts(prefill), chunk_tokens=512)
    writer = DecodeLoop(parts(decode), DecodeLimits(), lambda n: next(ids).to_bytes(n, "big"))
    sampling = Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
    request = EngineRequest("r", (1,) * prompt, prompt, sampling, 0)
    writer.turn([ch.Admit(1, request, False, 30.0)])
    (admitted,) = writer.channel.of(ch.Admitted)  # type: ignore[attr-defined]
    reader.turn([ch.Prefill(1, request, admitted.held_blocks, tuple(range(*admitted.unseen)))])
    while reader.turn([]):
        pass
    told: Tape = reader.channel  # type: ignore[assignment]
    shipped = [block.index for ready in told.of(ch.BlocksReady) for block in ready.blocks]
    (done,) = told.of(ch.PrefillDone)
    came = ch.BlocksReceived(1, 1, tuple(shipped))
    writer.turn([ch.ReceiveOpened(1, 1), came, ch.Commit(1, 1, done.first, 0), ch.ReceiveClosed(1, 1)])
    first = writer.pool.snapshot_counts().leased
    while writer.turn([]):
        pass
    return len(shipped), prefill.most, first, max(first, decode.most)


def rows(whole: KvLayout, less: KvLayout, prompts: list[int], answer: int) -> list[Row]:
    """Returns what is shipped and held for each prompt with either layout."""
    made = list[Row]()
    for prompt in prompts:
        before, after = measured(whole, prompt, answer), measured(less, prompt, answer)
        names = ("shipped", "held at most by the prefill worker", *DECODE)
        for name, many, few in zip(names, before, after, strict=True):
            now, then = few * less.page_bytes / MIB, many * whole.page_bytes / MIB
            made.append(Row(f"{prompt:,} tokens: {name}", now, "MiB", f"{then:,.0f}", now / then))
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--selection", default=ALL)
    parser.add_argument("--mixed", choices=MIXED)
    parser.add_argument("--hybrid", choices=HYBRIDS)
    parser.add_argument("--sharing", choices=SHARING)
    parser.add_argument("--prompt", type=int, nargs="+", default=[8192, 32_768])
    parser.add_argument("--answer", type=int, default=256)
    args = parser.parse_args()
    if args.hybrid:
        whole, less = (HYBRIDS[args.hybrid].layout(dense) for dense in (True, False))
    elif args.sharing:
        whole, less = (sharing(args.sharing, shared) for shared in (False, True))
    elif args.mixed:
        whole = mixed(args.mixed)
        less = by_window(whole)
    else:
        whole, less = mistral(), mistral(args.window if args.selection == ALL else 0, args.selection)
    Console(width=120).print(table(rows(whole, less, args.prompt, args.answer)))
