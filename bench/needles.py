"""Needles found by depth, for each way of keeping less KV, by a checkpoint made by hand that copies what it finds.

    .venv/bin/python -m bench.needles [--tokens 1024 4096] [--sinks 64] [--window 1024] [--budget 512]

The demo model finds no needle with any KV, so it can't tell. This one has a single layer: a question's query meets
the keys of marked tokens alone, in the dimensions that turn slowest, and what it finds is copied to the head. It
finds a needle wherever attention still reaches, whatever the hay. So what is counted is what a fidelity leaves in
reach, and whether rounding hides it. A needle is one marked token among ``--tokens`` others. Where a prompt's end
chooses what is kept, the question is either in the prompt already and asked again, or comes behind it alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner, SampleSpec, SequenceStep, StepPlan
from baton.evaluate.attended_pages import AttendedPages
from baton.kv.layout.bridge import Bridge, land, with_codec
from baton.kv.layout.selection import observed_of
from baton.protos.nouns import BLOCK_TOKENS, Sampling

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
EACH = 4  # needles for each depth
WORDS, MARKED = 400, 100  # tokens of the vocabulary, the last of which are needles but for the question
CODE, HEAD = 32, 64  # numbers that tell a token, and of a head
HIDDEN = 2 * CODE + 4
QUESTION = WORDS - 1
CHUNK = 512

Spoil = Callable[[Runner, bytearray], None]


def make(folder: Path) -> Path:
    """Writes the checkpoint and returns ``folder``."""
    draw = torch.Generator().manual_seed(7)
    codes = torch.where(torch.rand(WORDS, CODE, generator=draw) < 0.5, -1.0, 1.0)
    embed = torch.zeros(WORDS, HIDDEN)
    embed[:, :CODE] = codes
    embed[WORDS - MARKED : QUESTION, 2 * CODE] = 6.0
    embed[QUESTION, 2 * CODE + 1] = 6.0
    slowest = HEAD // 2 - 1
    q, k, v, o = (torch.zeros(shape) for shape in ((HEAD, HIDDEN), (HEAD, HIDDEN), (HEAD, HIDDEN), (HIDDEN, HEAD)))
    q[slowest, 2 * CODE + 1] = k[slowest, 2 * CODE] = 6.0
    v[:CODE, :CODE] = torch.eye(CODE)
    o[CODE : 2 * CODE, :CODE] = 8 * torch.eye(CODE)
    head = torch.zeros(WORDS, HIDDEN)
    head[:, CODE : 2 * CODE] = codes
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    save_file(
        {
            "model.embed_tokens.weight": embed,
            "lm_head.weight": head,
            "model.norm.weight": torch.ones(HIDDEN),
            "model.layers.0.input_layernorm.weight": torch.ones(HIDDEN),
            "model.layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN),
            **{f"{attention}.{n}_proj.weight": w for n, w in (("q", q), ("k", k), ("v", v), ("o", o))},
            **{f"{mlp}.{name}_proj.weight": torch.zeros(4, HIDDEN) for name in ("gate", "up")},
            f"{mlp}.down_proj.weight": torch.zeros(HIDDEN, 4),
        },
        folder / "model.safetensors",
    )
    fields = {
        "model_type": "llama",
        "vocab_size": WORDS,
        "hidden_size": HIDDEN,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e9,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def coded(codec: str) -> Spoil:
    """Returns what brings all pages through a wire codec, as a handoff does."""

    def spoil(runner: Runner, memory: bytearray) -> None:
        layout = with_codec(runner.spec.layout, codec)
        made, size = Bridge(runner.spec.layout, layout), layout.page_bytes
        for at in range(0, len(memory), size):
            page = memoryview(memory)[at : at + size]
            land(made.convert(page), page, layout)

    return spoil


def finds(
    runner: Runner, tokens: int, depth: float, seed: int, spoil: Spoil | None = None, twice: bool = False
) -> bool:
    """Returns whether the model names the needle at ``depth`` of ``tokens``, when it is asked behind the prompt.

    With ``twice`` the prompt ends with the question, too.
    """
    draw = random.Random(seed)
    hay, needle = draw.choices(range(WORDS - MARKED), k=tokens), draw.randrange(WORDS - MARKED, QUESTION)
    hay[round(depth * (tokens - 1))] = needle
    hay += [QUESTION] if twice else []
    pages, layout, start = -(-(len(hay) + 1) // BLOCK_TOKENS), runner.spec.layout, 0
    memory, kept = bytearray(pages * layout.page_bytes), AttendedPages(layout, len(hay), list(range(pages)))
    runner.bind(memoryview(memory), pages)
    while start < len(hay):
        end = kept.cut(start, min(start + CHUNK, len(hay)))
        step = kept.marked(SequenceStep(1, hay[start:end], start, kept.pages, is_prefill=True))
        kept.saw(step, runner.run(StepPlan((step,))))
        start = end
    if spoil is not None:
        spoil(runner, memory)
    asked = SampleSpec(Sampling(temperature=0.0), 0, len(hay) + 1, [*hay, QUESTION], len(hay) + 1)
    step = kept.marked(SequenceStep(1, [QUESTION], len(hay), kept.pages, asked))
    (found,) = runner.run(StepPlan((step,))).sampled
    return found.token_id == needle


def shares(runner: Runner, tokens: int, spoil: Spoil | None = None, twice: bool = False) -> list[float]:
    """The share of needles found at each of ``DEPTHS``."""
    return [sum(finds(runner, tokens, depth, n, spoil, twice) for n in range(EACH)) / EACH for depth in DEPTHS]


def ways(folder: Path, selections: Sequence[str]) -> Iterator[tuple[str, Runner, Spoil | None]]:
    """Each way of keeping KV, with a runner."""
    for stored in ("float32", "int8", "fp8"):
        config = EngineConfig(str(folder), threads=1, kv_cache_dtype=stored)  # type: ignore[arg-type]
        yield f"stored as {stored}", load_runner(config), None
    for selection in selections:
        yield selection, load_runner(EngineConfig(str(folder), threads=1, kv_selection=selection)), None
    for codec in ("int8", "int4"):
        yield f"{codec} on the wire", load_runner(EngineConfig(str(folder), threads=1)), coded(codec)


def found(lengths: list[int], selections: Sequence[str]) -> Table:
    """Returns a row for each way and length, a column for each depth."""
    shown = Table("KV", "tokens", *(f"depth {depth:.0%}" for depth in DEPTHS), box=None)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        for name, runner, spoil in ways(Path(folder), selections):
            observed = observed_of(runner.spec.layout) is not None
            for tokens, twice in itertools.product(lengths, (True, False) if observed else (False,)):
                asked = f"{name}{', asked in the prompt too' if twice else ''}"
                found = shares(runner, tokens, spoil, twice)
                shown.add_row(asked, f"{tokens:,}", *(f"{share:.0%}" for share in found))
    return shown


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--sinks", type=int, default=64)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=512)
    args = parser.parse_args()
    selections = tuple(f"{name}:{args.budget},window:64" for name in ("snapkv", "h2o"))
    selections = f"sinks:{args.sinks},window:{args.window}", *selections
    Console(width=120).print(found(args.tokens, selections))


if __name__ == "__main__":
    main()
