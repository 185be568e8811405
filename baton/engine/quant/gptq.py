"""Reads GPTQ checkpoints (https://arxiv.org/abs/2210.17323), as AutoGPTQ and GPTQModel write them: 2, 3, 4 or 8
bits.

Knows nothing of models. Per linear layer: qweight int32 (k x bits / 32, n), inputs packed from the low bits up,
those of 3 bits across words; scales (groups, n); qzeros int32 (groups, n x bits / 32), zero - 1 ("gptq") or zero
("gptq_v2"); g_idx (k,), each input's group. If g_idx isn't in order (desc_act), the inputs of a group are put side
by side, and activations are put into the same order before they are multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.engine.quant import LEAST_GROUP, Reader, Tensors, declared_group, packed_words, require_group
from baton.kernels.linear.integers import Integers

BITS = (2, 3, 4, 8)  # bits of a weight that GPTQ's files may have


def reader(model: ModelConfig, tensors: Tensors) -> Reader:
    """Returns a reader of the checkpoint's GPTQ weights. Raises CheckpointError naming a setting that isn't
    supported.
    """
    settings = model.fields["quantization_config"]
    bits, form = settings.get("bits"), settings.get("checkpoint_format", "gptq")
    if bits not in BITS:
        raise model.error("quantization_config.bits", f"is {bits!r}; GPTQ with 2, 3, 4 or 8 bits is known")
    if form not in ("gptq", "gptq_v2"):
        raise model.error("quantization_config.checkpoint_format", f"is {form!r}; gptq and gptq_v2 are known")
    group = declared_group(model, "group_size", settings.get("group_size"))
    # ``dynamic`` gives some layers settings of their own
    return GptqReader(tensors, bits, 0 if form == "gptq_v2" else 1, 0 if settings.get("dynamic") else group)


class GptqReader:
    """Reads a checkpoint's GPTQ weights of ``bits`` bits; implements ``Reader``. ``offset`` is added to stored
    zeros; ``group`` is the declared group size, 0 for none.
    """

    def __init__(self, tensors: Tensors, bits: int, offset: int, group: int) -> None:
        self._tensors, self._bits, self._offset, self._group = tensors, bits, offset, group
        self._names = set(tensors.names())

    def read(self, name: str, shape: tuple[int, ...]) -> Integers | None:
        """Returns the weight ``name`` of ``shape`` (n, k); None if it isn't quantized. Raises CheckpointError if
        its tensors don't fit.
        """
        base = name.removesuffix(".weight")
        if f"{base}.qweight" not in self._names:
            return None
        n, k = shape
        q = unpack(packed_words(self._tensors, f"{base}.qweight").T, self._bits).T  # (k, n)
        if q.shape != (k, n):
            problem = f"is packed for {tuple(q.T.shape)} by {self._bits} bits, config.json asks for {shape}"
            raise self._tensors.error(f"{base}.qweight", problem)
        scales = self._tensors.tensor(f"{base}.scales").float()
        if scales.dim() != 2 or scales.shape[1] != n:
            raise self._tensors.error(f"{base}.scales", f"has shape {tuple(scales.shape)}; (groups, {n}) is known")
        require_group(self._tensors, f"{base}.scales", k, len(scales), self._group)
        zeros = self._zeros(packed_words(self._tensors, f"{base}.qzeros"))[:, :n]  # (groups, n)
        if zeros.shape != scales.shape:
            problem = f"is packed for {tuple(zeros.shape)}, its scales are {tuple(scales.shape)}"
            raise self._tensors.error(f"{base}.qzeros", problem)
        return self._ordered(base, q.T, scales, zeros)

    def _ordered(self, base: str, q: Tensor, scales: Tensor, zeros: Tensor) -> Integers:
        """Returns the weight with the inputs of a group side by side; that of an act-order layer has ``order``."""
        order = input_order(self._tensors, f"{base}.g_idx", q.shape[1], len(scales))
        found = integers(q if order is None else q[:, order], self._bits, scales.T, zeros.T)
        if found is None:
            size = -(-q.shape[1] // len(scales))
            problem = f"has groups of {size} inputs; multiples of {LEAST_GROUP} are known"
            raise self._tensors.error(f"{base}.scales", problem)
        return found._replace(order=order)

    def _zeros(self, packed: Tensor) -> Tensor:
        """Returns the zeros (groups, n), from 0 up.

        Writers that store zero - 1 subtract from whole words, so that a zero of 0 borrows from its neighbour; with
        3 bits they subtract from each number (GPTQModel's convert_gptq_v2_to_v1_format).
        """
        if 32 % self._bits:
            return (unpack(packed, self._bits) + self._offset) & ((1 << self._bits) - 1)
        ones = sum(self._offset << at for at in range(0, 32, self._bits))
        return unpack(packed + ones, self._bits)


def input_order(tensors: Tensors, name: str, k: int, count: int) -> Tensor | None:
    """Returns the ``k`` inputs with those of a group side by side, (k,) int32, where tensor ``name`` has each
    input's group of ``count``. Returns None if they are in order, or it isn't there.

    Raises CheckpointError unless each group has as many.
    """
    if name not in tensors.names():
        return None
    found, size = tensors.tensor(name).long(), -(-k // count)
    plain = torch.arange(k) // size
    if found.shape != plain.shape or not torch.equal(found.sort().values, plain):
        problem = f"doesn't put {k} inputs into {count} groups of {size}; quantize the model again"
        raise tensors.error(name, problem)
    return None if torch.equal(found, plain) else found.argsort(stable=True).int()


def integers(q: Tensor, bits: int, scales: Tensor, zeros: Tensor) -> Integers | None:
    """Returns the weight of ``q`` (n, k), counted from 0 up, with ``scales`` and ``zeros`` (n, groups), as
    ``Integers`` around 0.

    Returns None if the group size isn't a multiple of LEAST_GROUP. There are ``mins`` unless all zeros are in the
    middle.
    """
    half, kept = 1 << (bits - 1), 8 if bits == 8 else 4
    group = -(-q.shape[1] // scales.shape[1])
    if group % LEAST_GROUP and scales.shape[1] > 1:
        return None
    mins = None if bool((zeros == half).all()) else scales * (zeros - half)
    group = 0 if scales.shape[1] == 1 else group
    return Integers((q - half).to(torch.int8), kept, group, scales.contiguous(), mins)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Returns the numbers of ``bits`` bits in ``packed`` (rows, columns) int32, low bits first, as (rows, columns x
    32 / bits) int32.
    """
    if 32 % bits:
        ones = ((packed[..., None] >> torch.arange(32, dtype=torch.int32)) & 1).flatten(-2)
        places = torch.arange(bits, dtype=torch.int32)
        return (ones.unflatten(-1, (-1, bits)) << places).sum(-1, dtype=torch.int32)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)
