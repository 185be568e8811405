"""Defines torch.ops.baton.speculative_accept, for one sequence. Knows nothing of who drafted."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.abi.torch_library import define, require
from baton.kernels.speculative_accept.cpu import speculative_accept as accepted
from baton.kernels.speculative_accept.reference import Rejection

SCHEMA = (
    "speculative_accept(Tensor tokens, Tensor? chosen, Tensor? target, Tensor? proposed, Tensor? accept, "
    "Tensor? draw, float temperature) -> Tensor"
)


def _fake(tokens: Tensor, *rest: object) -> Tensor:
    chosen, target, proposed, accept, draw, _ = rest
    both = all(isinstance(t, Tensor) for t in (target, accept, draw))
    require(isinstance(chosen, Tensor) != both, "speculative_accept takes chosen, or target with accept and draw")
    require(tokens.dim() == 1, "speculative_accept: tokens are (count,)")
    count = tokens.shape[0]
    if isinstance(target, Tensor) and not isinstance(chosen, Tensor):
        require(target.dim() == 2 and target.shape[0] == count + 1, f"target is ({count + 1}, vocab)")
        _require_shape("proposed", proposed, (count, target.shape[1]))
        _require_shape("accept", accept, (count,))
        _require_shape("draw", draw, (count + 1,))
    _require_shape("chosen", chosen, (count + 1,))
    return tokens.new_empty((2,), dtype=torch.int64)


def _require_shape(name: str, value: object, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless ``value`` has shape ``shape`` or is absent."""
    require(not isinstance(value, Tensor) or value.shape == shape, f"speculative_accept: {name} is {shape}")


@define(SCHEMA, _fake)
def speculative_accept(
    tokens: Tensor,
    chosen: Tensor | None,
    target: Tensor | None,
    proposed: Tensor | None,
    accept: Tensor | None,
    draw: Tensor | None,
    temperature: float,
) -> Tensor:
    """Returns (2,): the number of accepted drafts, and the token after them, -1 without a finite logit.

    Takes the target's choices ``chosen``, or the parts of a ``Rejection``. Raises ValueError for arguments that
    don't fit.
    """
    _fake(tokens, chosen, target, proposed, accept, draw, temperature)
    if chosen is not None:
        return torch.tensor(accepted(tokens, chosen))
    assert target is not None
    assert accept is not None
    assert draw is not None
    return torch.tensor(accepted(tokens, Rejection(target, proposed, accept, draw, temperature)))
