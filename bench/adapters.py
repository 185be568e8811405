"""Measures what LoRA adapters cost a decode step beside the same steps of the base, and what loading one costs
meanwhile.

Knows nothing of clusters. Rounds of the base and of each number of adapters take turns, so that the machine's drift
falls on all; a ratio is of one round. A step has as many sequences as the batch, each on the next adapter in turn.

    python -m bench.adapters [--size 150M] [--scheme bf16] [--rank 16] [--targets qv|all] [--batch 16] [--rounds 9]
                             [--threads 0] [--only throughput|loads]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from baton.bench.engine.models import SIZES, random_runner
from baton.bench.engine.report import SCHEMES
from baton.bench.rows import Row, spread, table
from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.host import AdapterHost
from baton.engine.adapters.packed import PackedAdapter, PackedPart
from baton.engine.adapters.reading import AdapterReader, room
from baton.engine.adapters.table import AdapterTable
from baton.engine.adapters.tensors import FILE
from baton.engine.backends.native.adapters import NativeAdapters
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.backends.ranks.runner import RankRunner
from baton.engine.plan import StepPlan
from baton.engine.program.sites import Site
from baton.engine.steps.loop import READ_WAIT_S
from baton.evaluate.workload import Workload
from baton.kernels.abi import native
from baton.kernels.lora.structs import MOST_RANK, LoraStep, panelled
from baton.protos.channel import AdapterFailed, AdapterIs, AdapterPlace, LoadAdapter, UnloadAdapter
from baton.protos.nouns import AdapterLimits

COUNTS = {1: 0.9, 8: 0.8, 64: 0.7}  # adapters in use, and the share of the base's throughput that is wanted
MOST_SLOWER = 1.05  # wanted of the p99 between tokens while adapters are loaded, as a multiple of that without
TARGETS = {
    "qv": ("q_proj", "v_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
LOADED_BYTES = 16 << 20
MANY_TENSORS, EXPERTS, WIDTH = 36_864, 128, 64  # of an adapter beside each expert of a mixture: experts of a layer
ENDLESS = 1 << 30  # loads: more than a round has
OTHERS_SHARE, AGAIN = 0.06, 2  # of a core, that others may use beside a part of a round; how often it is repeated
TICKS = os.sysconf("SC_CLK_TCK")
BUSY_S = 6.0  # seconds of a round's steps with or without loads, because a p99 needs some hundreds of steps


def random_adapter(sites: Sequence[Site], rank: int) -> PackedAdapter:
    """Returns an adapter of bf16 matrices beside ``sites``, all of its numbers 2^-7."""
    parts, at = [], 0
    for site in sites:
        a, b = at, at + -(-2 * rank * site.inputs // 64) * 64
        parts.append(PackedPart(site, rank, 2.0, True, a, b))
        at = b + 2 * rank * panelled(site.outputs)
    memory = room(at)
    np.frombuffer(memory, np.uint16)[:] = 0x3C00
    return PackedAdapter(tuple(parts), memory)


class Bench:
    """A random Llama with adapters beside it, and steps of a batch on some of them."""

    def __init__(self, size: str, scheme: str, rank: int, targets: tuple[str, ...], batch: int) -> None:
        self.runner: NativeRunner | RankRunner = random_runner(size, scheme, "bf16", max_rank=MOST_RANK)[0]
        assert self.runner.adapters is not None
        self.base = self.runner.adapters.base
        self.sites = [site for name, site in self.base.sites.items() if name.rpartition(".")[2] in targets]
        for number in range(max(COUNTS)):
            self.runner.adapters.hold(f"a{number}", random_adapter(self.sites, rank))
        self.work, self.batch, self._turn = Workload(self.runner, batch), batch, 0

    def seconds(self, adapters: int) -> tuple[float, float]:
        """Returns a step's mean seconds with so many adapters in use, 0 for none, and its seconds of CPU."""
        plans = [self.on(plan, adapters) for plan in self.work.plans(self.batch)]
        self.runner.run(plans[0])
        began = time.process_time()
        taken = self.work.run_seconds(plans)
        return taken / len(plans), (time.process_time() - began) / len(plans)

    def on(self, plan: StepPlan, adapters: int) -> StepPlan:
        """Returns the step with its sequences on ``adapters`` adapters in turn."""
        if not adapters:
            return plan
        items = [msgspec.structs.replace(item, adapter=self._next(adapters)) for item in plan.items]
        return StepPlan(tuple(items))

    def _next(self, adapters: int) -> str:
        self._turn += 1
        return f"a{self._turn % adapters}"


def throughput(bench: Bench, rounds: int) -> list[Row]:
    """Tokens per second of the base, and of each number of adapters beside it."""
    wall: dict[int, list[float]] = {count: [] for count in (0, *COUNTS)}
    cpu: dict[int, list[float]] = {count: [] for count in (0, *COUNTS)}
    for _ in range(rounds):
        for count in wall:
            seconds, own = bench.seconds(count)
            wall[count].append(seconds)
            cpu[count].append(own)
    rows = [Row("base, no adapter", bench.batch / statistics.median(wall[0]), "tok/s")]
    for count, target in COUNTS.items():
        rows.append(_beside(wall, count, bench.batch, target))
    for count in COUNTS:
        row = _beside(cpu, count, bench.batch, 0)
        rows.append(msgspec.structs.replace(row, name=f"{row.name}, by CPU time", unit="tok/CPU s"))
    return rows


def _beside(found: dict[int, list[float]], count: int, batch: int, target: float) -> Row:
    ratios = [base / own for base, own in zip(found[0], found[count], strict=True)]
    name, speed = f"{count} adapter{'s' * (count > 1)}", batch / statistics.median(found[count])
    return Row(name, speed, "tok/s", "base", statistics.median(ratios), spread(ratios), target)


def loads(bench: Bench, folder: Path, rounds: int) -> list[Row]:
    """The 99th percentile of the time between tokens with one load, and with one after the other, beside none.

    Rounds of each take turns, so that the machine's drift falls on all; a ratio is of one round. An adapter of
    LOADED_BYTES is loaded to the model itself. One of MANY_TENSORS, which the model has no places for, is loaded to
    structs of their own beside it.
    """
    assert bench.runner.adapters is not None
    places = experts()
    many = NativeAdapters(AdapterBase(places, MOST_RANK, 1 << 30), 1 + len(places) // EXPERTS, LoraStep())
    sized = Loading(bench.runner.adapters, write(folder / "sized", linear_places(bench.base), rank_for(bench.base)))
    tensors = Loading(many, write(folder / "many", places, 1))
    cases = (*of_size(sized), (f"a load of {MANY_TENSORS} tensors", tensors, 1))
    rows = beside_loads(bench, cases, rounds)
    return [*rows, *sized.close(sized.size), *tensors.close(f"{MANY_TENSORS} tensors")]


def of_size(sized: Loading) -> tuple[Case, ...]:
    """Returns the cases of one load, and of one after the other."""
    return (
        (f"a load of {sized.size}", sized, 1),
        (f"loads of {sized.size} one after the other", sized, ENDLESS),
    )


def beside_loads(bench: Bench, cases: Sequence[Case], rounds: int) -> list[Row]:
    """Measures the p99 between tokens in rounds without loads and in those of each case, turn about.

    A part of a round in which others used more than OTHERS_SHARE of a core is measured anew, up to AGAIN times.
    """
    calm: list[float] = []
    again: list[float] = []  # without loads as well: how far two equal rounds are apart
    busy: dict[str, list[float]] = {}
    ranks = bench.runner.pids() if isinstance(bench.runner, RankRunner) else []
    others = Others([os.getpid(), *ranks])

    def alone() -> float:
        return _p99(between_tokens(bench, BUSY_S, lambda: None))

    def beside(loading: Loading, count: int) -> float:
        loading.begin(count)
        try:
            return _p99(between_tokens(bench, BUSY_S, loading.turn, loading.any))
        finally:
            loading.end()

    for _ in range(rounds):
        calm.append(others.absent(alone))
        for name, loading, count in cases:
            busy.setdefault(name, []).append(others.absent(partial(beside, loading, count), loading.pid))
        again.append(others.absent(alone))
    rows = [Row("p99 between tokens", 1e3 * statistics.median(calm), "ms")]
    rows += [_slower(f"p99 with {name}", found, calm, MOST_SLOWER) for name, found in busy.items()]
    rows.append(_slower("the same without loads once more", again, calm, 0))
    return [*rows, Row("parts of rounds beside others' work, that count", float(others.disturbed), "")]


class Others:
    """Tells what other processes than ``pids`` use of the machine's cores meanwhile."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.disturbed = 0  # measurements that count although others worked

    def absent(self, measure: Callable[[], float], *more: int) -> float:
        """Returns what ``measure`` does beside nobody, or at last beside others; ``more`` are ours, too."""
        pids = [*self._pids, *more]
        for _ in range(1 + AGAIN):
            began, before = time.perf_counter(), _busy_s() - sum(map(_cpu_s, pids))
            found = measure()
            used = _busy_s() - sum(map(_cpu_s, pids)) - before
            if used < OTHERS_SHARE * (time.perf_counter() - began):
                return found
        self.disturbed += 1
        return found


def _busy_s() -> float:
    """Returns the seconds that this machine's cores have worked since its start."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / TICKS


def _cpu_s(pid: int) -> float:
    """Returns the seconds of CPU time of process ``pid`` and its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def _p99(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 99))


def _slower(name: str, found: list[float], beside: list[float], target: float) -> Row:
    ratios = [one / other for one, other in zip(found, beside, strict=True)]
    value = 1e3 * statistics.median(found)
    return Row(name, value, "ms", "without", statistics.median(ratios), spread(ratios), target, ceiling=True)


Case = tuple[str, "Loading", int]  # a name, what is loaded, and how often in a round


class Loading:
    """Loads the adapter in ``directory`` again and again to ``host`` as an engine's loop does: it looks between two
    steps.
    """

    def __init__(self, host: AdapterHost, directory: Path) -> None:
        self._reader, self._place = AdapterReader(host.base), AdapterPlace("more", str(directory))
        self._reader.warm()
        self._table = AdapterTable(host, AdapterLimits(1, 1 << 34, MOST_RANK), self._reader.start)
        self.size = f"{(directory / FILE).stat().st_size / (1 << 20):.0f} MB"
        self._left = self._loaded = 0
        self._turns: list[
            float
        ] = []  # of the load in progress, seconds of this thread's CPU time between two steps
        self._taken: list[float] = []  # of each load, the sum of them
        self._longest: list[float] = []  # of each load

    @property
    def pid(self) -> int:
        """Returns the process that reads."""
        assert self._reader._server is not None
        return self._reader._server.pid

    def begin(self, count: int) -> None:
        """Begins the first of ``count`` loads."""
        self._left, self._loaded = count, 0
        self._begin()

    def _begin(self) -> None:
        self._left -= 1
        self._turns = []
        assert not list(self._table.load(LoadAdapter(1, self._place, False)))

    def turn(self) -> None:
        """Does what the loop does for the load between two steps, and begins the next load after its end."""
        if not self._table.reading:
            return
        began = time.thread_time()
        answers = list(self._table.turn())
        self._turns.append(time.thread_time() - began)
        for answer in answers:
            if isinstance(answer, AdapterFailed):
                raise RuntimeError(answer.error.message)
            if isinstance(answer, AdapterIs):
                self._ended(answer)

    def _ended(self, answer: AdapterIs) -> None:
        self._taken.append(sum(self._turns))
        self._longest.append(max(self._turns))
        self._loaded += 1
        for _ in self._table.unload(UnloadAdapter(2, answer.adapter.id)):
            pass
        if self._left > 0:
            self._begin()

    def any(self) -> bool:
        """Returns whether an adapter was loaded since ``begin``."""
        return self._loaded > 0

    def end(self) -> None:
        """Waits for the load that goes on, so that no other round has it."""
        self._left = 0
        while self._table.reading:
            time.sleep(READ_WAIT_S)
            self.turn()

    def close(self, what: str) -> list[Row]:
        """Ends the process that reads; returns what the loop's own work took in each load of ``what``."""
        self._reader.close()
        return [
            Row(f"of a load of {what}, the loop's own CPU time", 1e3 * statistics.median(self._taken), "ms"),
            Row("its longest piece between two steps", 1e3 * statistics.median(self._longest), "ms"),
        ]


def between_tokens(
    bench: Bench, seconds: float, turn: Callable[[], None], enough: Callable[[], bool] = lambda: True
) -> list[float]:
    """Seconds of each step and what is done before it, for ``seconds`` seconds and until there was ``enough``;
    sequences are on one adapter.
    """
    found: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not enough():
        for plan in [bench.on(plan, 1) for plan in bench.work.plans(bench.batch)]:
            began = time.perf_counter()
            turn()
            bench.runner.run(plan)
            found.append(time.perf_counter() - began)
    return found


def linear_places(base: AdapterBase) -> dict[str, Site]:
    """Returns the sites of the model's linear layers by module."""
    return {name: site for name, site in base.sites.items() if name.rpartition(".")[2] in TARGETS["all"]}


def rank_for(base: AdapterBase) -> int:
    """Returns the rank at which an adapter beside every linear layer has LOADED_BYTES in float32."""
    return max(1, LOADED_BYTES // (4 * sum(site.inputs + site.outputs for site in linear_places(base).values())))


def experts() -> dict[str, Site]:
    """Returns sites of as many small experts' matrices as MANY_TENSORS tensors stand beside."""
    places = (divmod(at, EXPERTS) for at in range(MANY_TENSORS // 2))
    return {f"layers.{number}.experts.{e}.w": Site(number, e * WIDTH, WIDTH, WIDTH) for number, e in places}


def write(directory: Path, places: Mapping[str, Site], rank: int) -> Path:
    """Writes a PEFT adapter beside ``places``, in float32, and returns its folder."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    tensors = {}
    for name, site in places.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, site.inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(site.outputs, rank)
    save_file(tensors, directory / FILE)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_bytes(msgspec.json.encode(config))
    return directory


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="150M")
    parser.add_argument("--scheme", choices=SCHEMES, default="bf16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=TARGETS, default="all")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--only", choices=("throughput", "loads"), default="")
    args = parser.parse_args()
    if args.threads:
        native.set_threads(args.threads)
    bench = Bench(args.size, args.scheme, args.rank, TARGETS[args.targets], args.batch)
    title = f"{args.size} {args.scheme}, adapters of rank {args.rank} beside {args.targets}, batch {args.batch}"
    rows = [] if args.only == "loads" else throughput(bench, args.rounds)
    if args.only != "throughput":
        with tempfile.TemporaryDirectory() as directory:
            rows += loads(bench, Path(directory), args.rounds)
    Console().print(title)
    Console().print(table(rows))


if __name__ == "__main__":
    main()
