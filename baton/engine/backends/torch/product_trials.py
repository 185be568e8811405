"""Tries torch's own products of quantized weights on a card beside products of the same weights dequantized.

Knows nothing of checkpoints. One weight of each form and shape is tried. What fails, is wrong or is slower is
dequantized, so no weight is refused. What a record takes is checked again at each start, without its times.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from baton.engine.backends.cuda.op_trials import OpTrial, compare_ops
from baton.engine.backends.torch.card_products import FORMS, Fp8Product, Int4Product, Int8Product
from baton.engine.backends.torch.kept_choices import TriedWay
from baton.kernels.linear.packed import PackedWeight
from baton.kernels.linear.reference import HeldWeight

log = logging.getLogger("baton.engine")

KIND = "products"  # of kept choices
DEQUANTIZED = "dequantized"
FASTER = "it is faster"  # the reason for dequantized products beside right ones
ROWS = (1, 64)  # of the products that are tried
Form = type[Int8Product] | type[Fp8Product] | type[Int4Product]


class ProductChooser:
    """Makes weights in the form that was found right and faster on ``device``; ``known`` is an earlier record."""

    def __init__(self, dtype: torch.dtype, device: str, known: Sequence[TriedWay] = ()) -> None:
        self._dtype, self._device = dtype, device
        self._known = {way.op: way for way in known}
        self.ways: dict[str, TriedWay] = {}
        self._passing = set[str]()  # ops for whose trial memory was lacking, which says nothing of the product
        self._right: dict[str, bool] = {}  # of products that aren't taken, for their time, by op

    @property
    def lasting(self) -> tuple[TriedWay, ...]:
        """Returns what was chosen and holds for later starts, too."""
        return tuple(way for op, way in self.ways.items() if op not in self._passing)

    def held(self, weight: PackedWeight, if_right: bool = False) -> HeldWeight | None:
        """Returns the weight for torch's own product; None if it is to be dequantized. ``if_right`` takes a product
        that is right, however slow.
        """
        form, way = _form_of(weight), self.way_of(weight)
        if form is None or way is None:
            return None
        takes = way.way == form.name or (if_right and self._is_right(form, weight, way))
        return form(weight, self._device) if takes else None

    def bytes_of(self, weight: PackedWeight) -> int | None:
        """Returns the bytes of the weight for torch's own product; None if it is to be dequantized."""
        way = self.way_of(weight)
        return form_bytes(weight) if way is not None and way.way == way.tried else None

    def way_of(self, weight: PackedWeight) -> TriedWay | None:
        """Returns what multiplies by ``weight``, tried now if no weight of its form and shape was; None if torch
        has no product of its form.
        """
        if (form := _form_of(weight)) is None:
            return None
        group = f", groups of {weight.group}" if weight.group else ""
        op = f"product by {weight.n} x {weight.k}{group} ({form.name})"
        if op not in self.ways:
            self.ways[op] = self._tried(op, form, weight)
            log.info("%s", self.ways[op].told)
        return self.ways[op]

    def _tried(self, op: str, form: Form, weight: PackedWeight) -> TriedWay:
        known = self._known.get(op)
        if known is not None and known.way == DEQUANTIZED:
            return known
        try:
            with torch.inference_mode():
                trials = tuple(self._trials(form, weight, timed=known is None))
        except Exception as error:  # a card without it, or whatever torch says on one that we don't know
            if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error):
                self._passing.add(op)
            failed = f"it failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            return TriedWay(op, DEQUANTIZED, form.name, form.name, failed)
        if not all(trial.right for trial in trials):
            return TriedWay(op, DEQUANTIZED, form.name, form.name, "its results are wrong on this card", trials)
        if known is not None:
            return known
        if sum(trial.own_us for trial in trials) > sum(trial.torch_us for trial in trials):
            return TriedWay(op, DEQUANTIZED, form.name, form.name, FASTER, trials)
        return TriedWay(op, form.name, DEQUANTIZED, form.name, "", trials)

    def _is_right(self, form: Form, weight: PackedWeight, way: TriedWay) -> bool:
        """Returns whether a product that isn't taken for its time alone is right today."""
        if way.why != FASTER:
            return False
        if way.op not in self._right:
            try:
                with torch.inference_mode():
                    self._right[way.op] = all(one.right for one in self._trials(form, weight, timed=False))
            except Exception:  # as in _tried
                self._right[way.op] = False
        return self._right[way.op]

    def _trials(self, form: Form, weight: PackedWeight, timed: bool) -> list[OpTrial]:
        held, wide = form(weight, self._device), weight.dequantized().to(self._device)
        plain, found = wide.to(self._dtype), list[OpTrial]()
        for rows in ROWS:
            x = torch.randn((rows, weight.k), device=self._device).to(self._dtype)
            wanted = F.linear(held.rounded(x.float()), wide)
            own, peer = (lambda x=x: held.product(x)), (lambda x=x: F.linear(x, plain))
            found.append(compare_ops(f"{rows} rows", own, peer, wanted, self._device, timed=timed))
        return found


def form_bytes(weight: PackedWeight) -> int:
    """Returns the bytes of the weight in the form of torch's own product; 0 if there is none."""
    form = _form_of(weight)
    return 0 if form is None else form.bytes_of(weight)


def _form_of(weight: PackedWeight) -> Form | None:
    return next((form for form in FORMS if form.takes(weight)), None)
