"""Tests that files written piece by piece are what safetensors reads, with each tensor aligned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from baton.quantize.tensor_file import DTYPES, PiecewiseTensor, whole, write_tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_back(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randn(3, 5).to(dtype)
    write_tensors(tmp_path / "a.safetensors", {"odd": whole(torch.ones(3, dtype=torch.uint8)), "x": whole(tensor)})
    found = load_file(tmp_path / "a.safetensors")
    assert (found["x"].dtype, found["x"].shape) == (dtype, tensor.shape)
    assert torch.equal(found["x"].view(torch.uint8), tensor.view(torch.uint8))
    assert found["odd"].tolist() == [1, 1, 1]


def test_pieces_are_taken_one_by_one_and_make_up_the_tensor(tmp_path: Path) -> None:
    tensor, held = torch.randn(10, 4), list[int]()

    def pieces() -> Iterator[Tensor]:
        for at in range(0, 10, 3):
            held.append(at)
            yield tensor[at : at + 3]

    path = tmp_path / "a.safetensors"
    write_tensors(path, {"t": whole(tensor.T), "x": PiecewiseTensor(tensor.dtype, (10, 4), pieces())})
    assert held == [0, 3, 6, 9]
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("x"), tensor)
        assert torch.equal(file.get_tensor("t"), tensor.T)
        assert file.metadata() == {"format": "pt"}


def test_pieces_that_do_not_make_up_the_shape_are_our_own_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="x: its pieces have 16 bytes, its shape 32"):
        write_tensors(tmp_path / "a", {"x": PiecewiseTensor(torch.float32, (2, 4), [torch.zeros(1, 4)])})
