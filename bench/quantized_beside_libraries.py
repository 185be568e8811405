"""Measures what checkpoints lose that `baton quantize` makes, beside those that the original libraries make.

    python -m bench.quantized_beside_libraries [--rows nf4,gptq] [--env gptqmodel=/path/to/env] [--work FOLDER]

Of the held-out text every second document is judged, the others are what both sides calibrate on, as the same rows
of tokens. Each library runs in an environment of its own (``bench.peers.environments``, made on first use). All
checkpoints are judged by this engine, so that what differs is the weights alone. Checkpoints and losses that
``--work`` has already are kept. Knows nothing of how weights are rounded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from baton.bench.rows import Row, table, to_json
from baton.engine.config import EngineConfig
from baton.evaluate.intervals import ratio_interval
from baton.evaluate.local import LocalSubject
from baton.evaluate.loss import bits
from baton.evaluate.text import cut, read_documents
from baton.quantize.calibration import read_samples
from baton.quantize.run import quantize
from baton.quantize.schemes import Recipe, needs_text
from baton.quantize.source import Source
from bench.peers.environments import python_of

DEMO = Path(__file__).parents[1] / "models" / "demo"
SIDE = Path(__file__).parent / "peers" / "quantizers_side.py"
SAMPLES, TOKENS = 128, 512
NEAR = 1.1  # times what the library's checkpoint adds to the loss; so much ours may add
NOTHING = 0.01  # percent of the loss, below which a share of what is added says nothing
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "generation_config.json")


class Pair(NamedTuple):
    """One method, as this project and as a library has it."""

    recipe: Recipe
    environment: str  # of bench.peers.environments
    maker: str  # of bench/peers/quantizers_side.py


PAIRS = (
    Pair(Recipe("nf4"), "bitsandbytes", "bitsandbytes_nf4"),
    Pair(Recipe("rtn"), "llmcompressor", "compressor_rtn"),
    Pair(Recipe("fp8"), "llmcompressor", "compressor_fp8"),
    Pair(Recipe("mxfp4"), "llmcompressor", "compressor_mxfp4"),
    Pair(Recipe("smoothquant"), "llmcompressor", "compressor_smoothquant"),
    Pair(Recipe("gptq"), "llmcompressor", "compressor_gptq"),
    Pair(Recipe("gptq"), "gptqmodel", "gptqmodel_gptq"),
    Pair(Recipe("awq", symmetric=False), "llmcompressor", "compressor_awq"),
    Pair(Recipe("awq", symmetric=False), "autoawq", "autoawq_awq"),
)


class Work:
    """The folder that holds the texts, the checkpoints of both sides and their losses."""

    def __init__(self, folder: Path, model: Path, environments: dict[str, Path], samples: int = SAMPLES) -> None:
        self._folder, self._model, self._environments = folder, model, environments
        folder.mkdir(parents=True, exist_ok=True)
        texts = read_documents(model / "heldout.txt")
        self._judged = texts[0::2]
        (folder / "calibration.txt").write_text("\f".join(texts[1::2]))
        self._samples = read_samples(model, str(folder / "calibration.txt"), samples, TOKENS)
        (folder / "samples.json").write_text(json.dumps(self._samples))

    def rows(self, pair: Pair) -> Iterator[Row]:
        """Yields what both checkpoints of a pair add to the loss, and how much ours adds of what theirs does."""
        ours, theirs = self._own(pair.recipe), self._library(pair)
        method, version = pair.recipe.method, json.loads((theirs / "made_by.json").read_text())
        plain, own, other = (self._bits(path) for path in (self._model, ours, theirs))
        added, of = (100 * (sum(found) / sum(plain) - 1) for found in (own, other))
        yield self._row(f"{method}: by {version}", other, plain)
        yield self._row(f"{method}: by baton quantize", own, plain)
        if of > NOTHING:
            yield Row(f"{method}: ours of theirs", added / of, "x", target=NEAR, ceiling=True)
        else:
            yield Row(f"{method}: ours less theirs", added - of, "%", target=NOTHING, ceiling=True)

    def _row(self, name: str, found: list[float], plain: list[float]) -> Row:
        low, high = (100 * (end - 1) for end in ratio_interval(found, plain))
        return Row(name, 100 * (sum(found) / sum(plain) - 1), "%", low=low, high=high)

    def _own(self, recipe: Recipe) -> Path:
        out, recipe = self._folder / f"own_{recipe.method}", recipe.checked()
        if not (out / "config.json").exists():
            quantize(Source(str(self._model)), recipe, self._samples if needs_text(recipe) else (), out)
        return out

    def _library(self, pair: Pair) -> Path:
        out = self._folder / pair.maker
        if not (out / "made_by.json").exists():
            shutil.rmtree(out, ignore_errors=True)
            python = self._environments.get(pair.environment) or python_of(pair.environment)
            command = [python, SIDE, pair.maker, self._model, self._folder / "samples.json", out]
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            done = subprocess.run(
                [str(part) for part in command], check=True, env=environment, stdout=subprocess.PIPE, text=True
            )
            for path in (path for pattern in TOKENIZER for path in self._model.glob(pattern)):
                shutil.copyfile(path, out / path.name)
            (out / "made_by.json").write_text(json.dumps(done.stdout.strip().splitlines()[-1]))
        return out

    def _bits(self, model: Path) -> list[float]:
        """Returns the negative log-likelihood of each judged document, in bits."""
        kept = self._folder / f"{model.name}.bits.json"
        if not kept.exists():
            with tempfile.TemporaryDirectory() as cache:
                local = LocalSubject(EngineConfig(str(model), threads=torch.get_num_threads(), cache_dir=cache))
                kept.write_text(json.dumps(bits(local, cut(self._judged, local.encode))))
        found: list[float] = json.loads(kept.read_text())
        return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--rows", help="methods, by commas; all unless told")
    parser.add_argument("--env", action="append", default=[], help="NAME=FOLDER of an environment that is there")
    parser.add_argument("--work", type=Path, default=Path("build/quantized_beside_libraries"))
    parser.add_argument("--samples", type=int, default=SAMPLES, help="calibration rows; each number wants a --work")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    named = dict(text.split("=", 1) for text in args.env)
    environments = {name: Path(folder) / "bin" / "python" for name, folder in named.items()}
    work = Work(args.work, args.model, environments, args.samples)
    wanted = args.rows.split(",") if args.rows else {pair.recipe.method for pair in PAIRS}
    found = [row for pair in PAIRS if pair.recipe.method in wanted for row in work.rows(pair)]
    Console(highlight=False, width=150).print(table(found))
    if args.json:
        args.json.write_text(to_json(found) + "\n")


if __name__ == "__main__":
    main()
