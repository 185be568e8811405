"""Measures what loading an adapter of 16 MB costs the time between tokens of a model that several ranks share.

Knows nothing of clusters. Ranks are real processes with a thread each, which load a checkpoint of random weights
that is written before. Rounds with and without loads take turns, as in ``bench.adapters``.

    python -m bench.rank_adapters [--size 150M] [--tp 2] [--batch 16] [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file

from baton.bench.engine.models import CONTEXT, SIZES
from baton.bench.rows import table
from baton.engine.backends.ranks.runner import RankRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.evaluate.workload import Workload
from baton.kernels.lora.structs import MOST_RANK
from baton.kv.memory.host_pages import PageMemory
from baton.protos.nouns import AdapterLimits
from bench.adapters import (
    TARGETS,
    Bench,
    Loading,
    beside_loads,
    linear_places,
    of_size,
    random_adapter,
    rank_for,
    write,
)

RANK = 16  # of the adapter that the steps' sequences are on


def checkpoint(folder: Path, size: str) -> Path:
    """Writes a random Llama of ``size`` in bf16 and returns its folder."""
    fields = {"model_type": "llama", "max_position_embeddings": CONTEXT, **SIZES[size]}
    torch.manual_seed(0)
    tensors = {}
    for weight in program_for(ModelConfig(folder, fields, ())).weights:
        for name, shape in zip(weight.sources, weight.shapes, strict=True):
            tensors[name] = (torch.randn(shape) * 0.02 if len(shape) == 2 else torch.ones(shape)).bfloat16()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    return folder


class RankBench(Bench):
    """The model on ranks, and steps of a batch whose sequences are on one adapter."""

    def __init__(self, model: Path, tp: int, batch: int) -> None:
        limits = AdapterLimits(2, 1 << 30, MOST_RANK)
        runner = load_runner(EngineConfig(str(model), threads=tp, tp=tp, adapters=limits))
        assert isinstance(runner, RankRunner)
        assert runner.adapters is not None
        self.runner = self.ranks = runner
        self.base = runner.adapters.base
        sites = [site for name, site in self.base.sites.items() if name.rpartition(".")[2] in TARGETS["all"]]
        self.work, self.batch, self._turn = Workload(runner, batch), batch, 0
        memory = PageMemory.create(self.work.pages, runner.spec.layout.page_bytes)
        runner.bind(memory.view(), memory.pages)
        runner.open_pages(memory.fd, memory.bytes)  # the ranks begin to listen
        runner.adapters.hold("a0", random_adapter(sites, RANK))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="150M")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        bench = RankBench(checkpoint(folder / "model", args.size), args.tp, args.batch)
        assert bench.runner.adapters is not None
        places = linear_places(bench.base)
        sized = Loading(bench.runner.adapters, write(folder / "sized", places, rank_for(bench.base)))
        rows = [*beside_loads(bench, of_size(sized), args.rounds), *sized.close(sized.size)]
        bench.ranks.leave()
    Console().print(f"{args.size} bf16, tp {args.tp}, adapters of rank {RANK} beside all, batch {args.batch}")
    Console().print(table(rows))


if __name__ == "__main__":
    main()
