"""Tests block hashes: golden vectors made by another program, and the laws of a chain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.layout import prefix
from baton.protos.errors import InvalidRequest

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "block_hashes.json").read_text())["cases"]
ROOT = prefix.root("f" * 64, "float32")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_hashes_equal_the_golden_vectors(case: dict) -> None:
    root = prefix.root(case["fingerprint"], case["fidelity"], case["adapter"], bytes.fromhex(case["salt"]))
    hashes = [block.hex() for block in prefix.chain(root, case["token_ids"])]
    assert (root.hex(), hashes) == (case["root"], case["chain"])


@pytest.mark.parametrize("seed", ["0", "1"])
def test_hashes_are_the_same_in_another_process_whatever_its_hash_seed(seed: str) -> None:
    code = "from baton.kv.layout import prefix\n"
    code += "print(prefix.chain(prefix.root('f'*64, 'float32'), range(40))[-1].hex())"
    said = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == prefix.chain(ROOT, range(40))[-1].hex()


@given(TOKENS)
def test_a_chain_grown_token_by_token_equals_the_one_hashed_at_once(tokens: list[int]) -> None:
    chain = prefix.Chain(ROOT)
    filled = chain.extend(tokens)
    assert chain.hashes == filled == prefix.block_hashes(ROOT, tokens)


@given(TOKENS, st.integers(0, 70))
def test_a_chain_may_start_from_any_prefix(tokens: list[int], cut: int) -> None:
    chain = prefix.Chain(ROOT, tokens[:cut])
    chain.extend(tokens[cut:])
    assert chain.hashes == prefix.block_hashes(ROOT, tokens)


@given(TOKENS, TOKENS)
def test_two_prompts_share_hashes_exactly_as_far_as_they_share_blocks(a: list[int], b: list[int]) -> None:
    shared = 0
    while (
        shared < min(len(a), len(b)) // 16
        and a[shared * 16 : shared * 16 + 16] == b[shared * 16 : shared * 16 + 16]
    ):
        shared += 1
    ours, theirs = prefix.block_hashes(ROOT, a), prefix.block_hashes(ROOT, b)
    assert ours[:shared] == theirs[:shared]
    assert not set(ours[shared:]) & set(theirs[shared:])


def test_a_tail_never_answers_for_a_full_block_or_a_longer_tail() -> None:
    tails = {prefix.chain(ROOT, [0] * count)[0] for count in range(1, 17)}
    assert len(tails) == 16


def test_weights_fidelity_adapter_and_tenant_each_root_another_chain() -> None:
    roots = {
        prefix.root("a", "b"),
        prefix.root("ab", ""),
        prefix.root("a", "", "b"),
        prefix.root("a", "", "", b"b"),
        prefix.root("", "ab"),
    }
    assert len(roots) == 5


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5])
def test_a_token_id_that_is_no_u32_is_refused_by_name(bad: float) -> None:
    with pytest.raises(InvalidRequest, match="token ids") as caught:
        prefix.chain(ROOT, [bad])  # type: ignore[list-item]
    assert caught.value.param == "token_ids"
