"""Tests that what is paid to runs of tokens is what a softmax over all keys gives them, head by head."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.page_scores.native import add_row_scores
from baton.kernels.page_scores.reference import page_scores
from baton.kernels.paged_attention.stored import read_layer, write_layer
from baton.kernels.step.structs import KV_TYPES, PagedKv
from baton.kv.layout.page import layout_for
from tests.kernels.conftest import needs_native


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_each_run_gets_the_sum_of_its_tokens_probabilities(softcap: float) -> None:
    queries, tokens, heads, kv_heads = 5, 70, 4, 2
    q, keys = torch.randn(queries, heads, 8), torch.randn(tokens, kv_heads, 8)
    wanted = torch.zeros(4)
    for row in range(queries):
        seen = tokens - queries + row + 1
        for head in range(heads):
            scores = keys[:seen, head // 2] @ q[row, head] * 0.3
            paid = (softcap * torch.tanh(scores / softcap) if softcap else scores).softmax(0)
            wanted += paid[:64].view(4, 16).sum(1)
    assert torch.allclose(page_scores(q, keys, 0.3, softcap), wanted, atol=1e-5)
    assert float(wanted.sum()) < queries * heads


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "fp8_e4m3"])
def test_a_row_is_scored_natively_as_by_the_reference_from_keys_as_they_are_stored(dtype: str) -> None:
    heads, kv_heads, width, layers, count, tokens = 6, 3, 20, 2, 5, 70
    layout = layout_for(dtype, layers, kv_heads, width)
    memory, pages = torch.zeros(9, layout.page_bytes, dtype=torch.uint8), torch.tensor([7, 2, 0, 8, 5])
    at = pages.repeat_interleave(16), torch.arange(count * 16) % 16
    rows = torch.randn(count * 16, kv_heads, width)
    write_layer(memory, at, 1, layers, (rows, rows), dtype)
    keys = read_layer(memory, pages, 1, layers, kv_heads, width, dtype)[0][:tokens]
    offset = layout.page_bytes // layers
    kv = PagedKv(memory.data_ptr(), layout.page_bytes, offset, KV_TYPES[dtype], kv_heads, width)
    for softcap in (0.0, 2.0):
        q, scores = torch.randn(heads, width), torch.full((6,), 0.25)
        add_row_scores(kv, pages.int(), tokens, q, 0.3, softcap, scores)
        wanted = page_scores(q[None], keys, 0.3, softcap, every=True)
        assert torch.allclose(scores[:5], wanted + 0.25, atol=1e-5)
        assert float(scores[5]) == 0.25
        assert float(wanted.sum()) == pytest.approx(heads, rel=1e-5)
