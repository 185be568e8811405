"""Decodes by captured graphs on a card that torch serves. The card is the CPU here; a graph is the list of its ops,
which are computed again on the same memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from baton.engine.backends.cuda import op_trials
from baton.engine.backends.cuda.gpu import Gpu
from baton.engine.backends.torch import decode_graphs, kept_choices
from baton.engine.backends.torch.decode_graphs import KIND, DecodeGraphs
from baton.engine.backends.torch.decode_inputs import DecodeSize
from baton.engine.backends.torch.graph_trial import try_graphs
from baton.engine.backends.torch.runner import TorchRunner
from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.models import program_for
from baton.engine.plan import ModelSpec, SampleSpec, SequenceStep, StepPlan
from baton.engine.program.config import ModelConfig
from baton.kernels.abi.build import CACHE_ENV
from baton.kv.layout.page import layout_for
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver
from tests.engine.backends.torch.fake_graphs import Run, capture
from tests.thorough import later

SMALL = {"num_hidden_layers": 2, "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
PROMPTS = [[5, 17, 90, 3, 44, 61, 7], [int(i * 7 % 199) for i in range(50)], [9] * 16]
CONTEXT, PAGES = 256, 40
L4 = Gpu("NVIDIA L4", (8, 9), (13, 0), 24 << 30)
NEWER = dataclasses.replace(L4, driver=(13, 1))
GREEDY = SampleSpec(Sampling(temperature=0.0), 0, 1, [0], 1)


class Model:
    def __init__(self, directory: Path, kind: str, **changes: object) -> None:
        directory = make(directory, kind, **(SMALL | changes))
        self.program = program_for(ModelConfig.read(directory))
        self.weights = dict(Checkpoint(directory).weights(self.program.weights, torch.float32, "cpu"))
        layout = layout_for("float32", self.program.groups)
        self.spec = ModelSpec("", layout, CONTEXT, self.program.vocab_size, ())

    def runner(self, made: Callable[[Run], Run] | None = capture) -> TorchRunner:
        return TorchRunner(self.spec, self.program, self.weights, card="cpu", capture=made)

    def graphs(self, sequences: int = 4, made: Callable[[Run], Run] = capture) -> tuple[TorchRunner, DecodeGraphs]:
        runner = self.runner(made)
        runner.bind(memoryview(bytearray(PAGES * self.spec.layout.page_bytes)), PAGES)
        runner.warm(sequences, 64)
        assert runner.graphs is not None
        return runner, runner.graphs


@pytest.fixture(scope="module", params=["llama2", "gemma2", later("qwen3")])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    changes = {"sliding_window": 24} if request.param == "gemma2" else {}
    return Model(tmp_path_factory.mktemp(request.param), request.param, **changes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("llama"), "llama2")


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 1.0, 9.0)


def timed(monkeypatch: pytest.MonkeyPatch, graph: float, ops: float) -> None:
    calls: list[int] = []

    def microseconds(call: Callable[[], object], device: str) -> float:
        calls.append(1)
        return (graph, ops)[(len(calls) - 1) % 2]

    monkeypatch.setattr(op_trials, "_microseconds", microseconds)


def test_decodes_by_graph_answer_as_by_their_ops_while_pages_fill_and_sequences_leave(model: Model) -> None:
    asked = Sampling(temperature=0.0, max_tokens=40, logprobs=1)
    plain, card = Driver(model.runner(None), pages=PAGES, chunk=16), Driver(model.runner(), pages=PAGES, chunk=16)
    assert isinstance(card.runner, TorchRunner)
    card.runner.warm(4, 64)
    replayed = counted(card.runner.graphs)
    assert card.answer(PROMPTS, asked) == plain.answer(PROMPTS, asked)
    assert len(replayed) >= 39, "every step of decodes alone"
    for key in range(len(PROMPTS)):
        ours, ops = ([one.chosen.logprob for one in driver.logprobs[key]] for driver in (card, plain))
        assert ours == pytest.approx(ops, abs=1e-4)
    assert bytes(card.buffer) != bytes(len(card.buffer)), "rows are back in the host's pages"


def counted(graphs: DecodeGraphs | None) -> list[DecodeSize]:
    """The sizes of steps that a graph runs from now on."""
    assert graphs is not None
    found: list[DecodeSize] = []
    for size, graph in graphs._graphs.items():

        def replay(size: DecodeSize = size, run: Run = graph.replay) -> None:
            found.append(size)
            run()

        graphs._graphs[size] = decode_graphs.DecodeGraph(graph.inputs, replay)
    return found


def test_a_step_takes_the_smallest_graph_that_holds_it(llama: Model) -> None:
    runner, graphs = llama.graphs()
    assert graphs.captured == tuple(DecodeSize(rows, blocks) for rows in (1, 2, 4) for blocks in (8, 16))
    replayed = counted(graphs)
    for count, start in ((1, 0), (2, 127), (3, 128), (4, 200)):
        runner.run(decodes(count, start))
    assert replayed == [(1, 8), (2, 8), (4, 16), (4, 16)]


def decodes(count: int, start: int, **other: object) -> StepPlan:
    table = list(range(16))
    items = [SequenceStep(seq, [seq + 1], start, table, GREEDY) for seq in range(count)]
    return StepPlan(tuple(msgspec.structs.replace(item, **other) for item in items))


def test_what_is_more_than_decodes_or_fits_no_graph_is_run_op_by_op(llama: Model) -> None:
    runner, graphs = llama.graphs(2)
    replayed = counted(graphs)
    runner.run(decodes(3, 5))
    runner.run(decodes(1, 5, pool=True))
    runner.run(decodes(1, 5, targets=[3]))
    runner.run(decodes(1, 5, sample=None))
    runner.run(decodes(1, 5, verify=(GREEDY,), tokens=[1, 2]))
    assert replayed == []
    runner.run(decodes(1, 5))
    assert len(replayed) == 1


def test_sequences_of_unequal_length_are_not_padded_to_read_far_more_than_they_hold(
    llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, graphs = llama.graphs()
    replayed = counted(graphs)
    page = llama.spec.layout.page_bytes
    monkeypatch.setattr(decode_graphs, "IDLE_BYTES", 20 * page)
    long = decodes(4, 250).items  # of 16 pages each
    short = msgspec.structs.replace(long[0], start=3)
    runner.run(StepPlan((long[0], short, short, short)))
    assert replayed == []
    runner.run(StepPlan((long[0], long[1], long[2], short)))
    assert replayed == [(4, 16)]


def test_rows_of_no_sequence_write_to_the_spare_page_alone(llama: Model) -> None:
    runner, _ = llama.graphs()
    assert runner._mirror is not None
    before = runner._mirror.memory.clone()
    runner.run(decodes(3, 20))  # three rows of a graph of four
    changed = (runner._mirror.memory != before).any(1).nonzero()[:, 0].tolist()
    assert set(changed) <= {0, 1, PAGES}, "the first was brought from the host, the second written"


def test_a_capture_that_fails_leaves_its_ops_to_be_launched_one_by_one(
    llama: Model, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(run: Run) -> Run:
        raise RuntimeError("operation not permitted when stream is capturing")

    runner, graphs = llama.graphs(made=fails)
    assert (graphs.captured, graphs.why[:14]) == ((), "RuntimeError: ")
    assert "launched op by op: RuntimeError: operation not permitted" in caplog.text
    assert len(runner.run(decodes(2, 5)).sampled) == 2


def test_a_graph_that_reads_what_was_there_at_its_capture_is_not_used(llama: Model) -> None:
    def frozen(run: Run) -> Run:
        run()
        return lambda: None

    _, graphs = llama.graphs(made=frozen)
    assert graphs.captured == ()
    assert graphs.why == "decode step of 1 rows, up to 128 tokens: the graph's result isn't that of its ops"


def test_a_graph_that_is_slower_is_not_used(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 9.0, 1.0)
    _, graphs = llama.graphs()
    assert (graphs.captured, len(graphs.trials)) == ((), 3)


def test_sizes_for_which_memory_is_lacking_are_left_out(llama: Model) -> None:
    made: list[int] = []

    def full(run: Run) -> Run:
        made.append(1)
        if len(made) > 2:
            raise torch.OutOfMemoryError("8 bytes are free")
        return capture(run)

    runner, graphs = llama.graphs(made=full)
    assert graphs.captured == ((1, 8), (2, 8))
    assert len(runner.run(decodes(4, 5)).sampled) == 4


def test_a_card_that_a_capture_left_unusable_ends_the_start(llama: Model) -> None:
    def faults(run: Run) -> Run:
        raise ConfigError("unusable", "device")

    with pytest.raises(ConfigError, match="unusable"):
        llama.graphs(made=faults)


def test_pages_that_are_bound_anew_have_no_graphs_of_the_old_ones(llama: Model) -> None:
    runner, _ = llama.graphs()
    runner.bind(memoryview(bytearray(PAGES * llama.spec.layout.page_bytes)), PAGES)
    assert runner.graphs is None


def test_models_of_experts_are_not_captured_because_their_routing_waits(tmp_path: Path) -> None:
    experts = Model(tmp_path / "experts", "mixtral")
    runner = experts.runner()
    runner.bind(memoryview(bytearray(PAGES * experts.spec.layout.page_bytes)), PAGES)
    runner.warm(2, 16)
    assert runner.graphs is None


def test_the_choice_is_kept_with_its_figures_and_the_newest_is_told(
    llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    _, graphs = llama.graphs()
    assert graphs.choice.told == "decode steps: graph (graph 3 us, op by op 27 us)"
    timed(monkeypatch, 9.0, 1.0)
    slower = llama.graphs()[1].choice
    assert slower.told == "decode steps: op by op (graph 27 us, op by op 3 us), because it is faster"
    assert kept_choices.keep(L4, KIND, "one model", [graphs.choice])
    assert kept_choices.newest(L4, KIND) == kept_choices.kept(L4, KIND, "one model") == (graphs.choice,)
    assert kept_choices.kept(L4, KIND, "another") == kept_choices.newest(NEWER, KIND) == ()
    kept_choices.forget(L4, KIND)
    assert kept_choices.newest(L4, KIND) == ()


def test_one_layer_is_tried_for_the_doctor() -> None:
    assert try_graphs("cpu", capture, (4, 2, 16)).told.startswith("decode steps of one layer: graph (graph 5 us, ")
