"""Tries decodes by captured graphs on a card, for one layer of random weights with the attention of an 8B.

Knows nothing of checkpoints. Workers try their own models' at every start, because a graph is of one process.
"""

from __future__ import annotations

import msgspec
import torch

from baton.engine.backends.cuda.card_trials import HEADS, usual_attention
from baton.engine.backends.cuda.trial import one_layer, random_weights, spec_of
from baton.engine.backends.torch.capture import Capture
from baton.engine.backends.torch.dequantized import for_torch
from baton.engine.backends.torch.kept_choices import TriedWay
from baton.engine.backends.torch.runner import TorchRunner

SEQUENCES, CONTEXT = 16, 512  # decodes and tokens of a step at most
PAGES = 64


def try_graphs(device: str, capture: Capture, heads: tuple[int, int, int] = HEADS) -> TriedWay:
    """Returns whether decodes on ``device`` run by graphs, with what was measured. Raises ConfigError if that left
    the card unusable.
    """
    program = one_layer(usual_attention(*heads))
    weights = for_torch(program, random_weights(program, torch.bfloat16, 1), torch.bfloat16, device)
    spec = msgspec.structs.replace(spec_of(program, "bfloat16"), max_model_len=CONTEXT)
    runner = TorchRunner(spec, program, weights, card=device, capture=capture)
    runner.bind(memoryview(bytearray(PAGES * spec.layout.page_bytes)), PAGES)
    runner.warm(SEQUENCES, 1)
    assert runner.graphs is not None
    found = runner.graphs.choice
    return msgspec.structs.replace(found, op=f"{found.op} of one layer")
