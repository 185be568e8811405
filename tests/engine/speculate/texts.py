"""A text as a speculator sees it, without a sequence around it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton.protos.nouns import EngineRequest, Sampling


@dataclass
class Written:
    """``tokens`` grows; the first ``prompt`` of them are the prompt."""

    seq: int
    tokens: list[int]
    prompt: int = 0
    prediction: tuple[int, ...] = ()
    tenant: bytes = b""
    draft_room: int = 99
    forced: tuple[int, ...] = ()
    request: EngineRequest = field(init=False)

    def __post_init__(self) -> None:
        self.request = EngineRequest(
            str(self.seq), (), self.prompt, Sampling(), tenant_salt=self.tenant, prediction=self.prediction
        )

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt


def greedy(seq: int, tokens: list[int]) -> Written:
    """A text whose likeliest tokens are wanted."""
    text = Written(seq, tokens)
    text.request = msgspec.structs.replace(text.request, sampling=Sampling(temperature=0.0))
    return text
