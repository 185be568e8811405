"""Trees of drafts in one native step: every row's bits are those of its own path as a plain text."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.abilities import branches_of
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import SequenceStep
from baton.engine.speculate.tree import path_to, tree_of
from baton.engine.wide_pages import widened
from baton.kernels.abi import native
from baton.protos.errors import BatonError
from tests.conformance.checkpoints import make
from tests.kernels.branch_suite import spec, told, tree_item

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
PATHS = [[5, 6, 7, 8, 9], [5, 6, 40, 41, 42, 43], [50, 51], [5, 60, 61, 62, 63], [5, 6, 40, 70]]
SETTINGS = [
    *(("llama3", {"kv_cache_dtype": dtype}) for dtype in ("float32", "bf16", "int8", "fp8")),
    ("gemma3", {}),
    ("qwen3_moe", {}),
    ("llama4", {}),
    ("hunyuan_dense", {}),
    ("gemma3n", {"window_pages": "shared"}),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("branches")


def bound(home: Path, kind: str, **settings: str) -> NativeRunner:
    model = home / kind
    runner = load_runner(EngineConfig(str(model if model.exists() else make(model, kind)), threads=1, **settings))  # type: ignore[arg-type]
    assert isinstance(runner, NativeRunner)
    runner.bind(memoryview(bytearray(64 * runner.spec.layout.page_bytes)), 64)
    return runner


def tree(seq: int, root: int, start: int, pages: list[int], spare: list[int]) -> SequenceStep:
    """The item of PATHS' tree behind ``root``, which is at ``start``."""
    return tree_item(seq, root, start, pages, spare, PATHS)


@pytest.mark.parametrize("start", [13, 15, 16, 28])
@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_every_row_has_the_bits_of_its_own_path(
    home: Path, kind: str, settings: dict[str, str], start: int
) -> None:
    runner, prompt = bound(home, kind, **settings), [3 + at for at in range(start)]
    assert branches_of(runner)
    for seq in (0, 1):
        told(runner, SequenceStep(seq, prompt, 0, range(8 * seq, 8 * seq + 8)))
    neighbour = SequenceStep(9, [100, 101, 102], 0, [60])  # whose rows lie beside
    item = tree(0, 99, start, list(range(8)), list(range(20, 60)))
    rows = told(runner, neighbour, item)
    tokens, parents = tree_of(PATHS, 99)
    for node in range(-1, len(tokens)):
        path = [99, *(tokens[at] for at in path_to(node, parents))]
        [alone] = told(runner, SequenceStep(1, path, start, range(8, 16), spec(start + len(path))))
        assert rows[node + 1] == alone, node
    for draft_branch in item.draft_branches:  # whoever goes on with a branch's pages reads its own path's KV
        path = [tokens[at] for at in path_to(draft_branch.first + draft_branch.rows - 2, parents)]
        first, end = start // 16, start + 1 + len(path)
        pages = [*range(first), *draft_branch.pages]
        [behind] = told(runner, SequenceStep(0, [77], end, [*pages, 61], spec(end + 1)))
        told(runner, SequenceStep(1, [99, *path], start, range(8, 16)))
        [wanted] = told(runner, SequenceStep(1, [77], end, range(8, 16), spec(end + 1)))
        assert behind == wanted


@pytest.mark.parametrize(
    ("kind", "settings", "way", "value"),
    [("llama3", {}, "BATON_STEP", "ops"), *((*each, "BATON_CHECK_STEP", "1") for each in SETTINGS)],
)
def test_a_step_that_checks_itself_or_runs_op_by_op_computes_trees_too(
    home: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, str], way: str, value: str
) -> None:
    whole = bound(home, kind, **settings)
    monkeypatch.setenv(way, value)
    other, found = bound(home, kind, **settings), []
    for runner in (whole, other):
        told(runner, SequenceStep(0, list(range(3, 23)), 0, range(8)))
        found.append(told(runner, tree(0, 99, 20, list(range(8)), list(range(20, 60)))))
    assert found[0] == found[1]


def test_pages_that_are_not_there_are_refused_and_other_page_sizes_have_no_trees(home: Path) -> None:
    runner = bound(home, "llama3")
    item = tree(0, 99, 20, list(range(8)), [*range(20, 59), 64])
    with pytest.raises(BatonError, match="names a page outside 0 … 63"):
        told(runner, item)
    assert item.undrafted().draft_branches == ()
    assert not branches_of(widened(runner, 32))
