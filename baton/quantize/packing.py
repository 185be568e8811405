"""Packs small integers into int32 words and bytes, as checkpoint formats have them. Knows nothing of layers."""

from __future__ import annotations

import torch
from torch import Tensor


def words(numbers: Tensor, bits: int) -> Tensor:
    """Returns (rows, columns) integers of ``bits`` bits as (rows, columns x bits / 32) int32, from the low bits
    up.
    """
    per = 32 // bits
    found = torch.zeros(len(numbers), numbers.shape[1] // per, dtype=torch.int32)
    for place in range(per):
        found |= numbers[:, place::per].to(torch.int32) << (place * bits)
    return found


def nibbles(numbers: Tensor, high_first: bool) -> Tensor:
    """Returns (rows, columns) 4-bit integers as (rows, columns / 2) uint8, the first in the high or the low
    bits.
    """
    first, second = numbers.to(torch.uint8).view(len(numbers), -1, 2).unbind(-1)
    return (first << 4) | second if high_first else first | (second << 4)
