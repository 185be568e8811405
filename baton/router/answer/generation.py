"""One client call, before and after validation: what an API surface hands to the service, and what ``stream``
opens.

Knows nothing of REST, gRPC or how either is checked.
"""

from __future__ import annotations

import msgspec

from baton.protos.json import Json
from baton.protos.nouns import Sampling
from baton.router.request.context import RequestContext
from baton.router.request.request import RouterRequest
from baton.router.request.weights import WeightsPin
from baton.router.text.catalog import ModelEntry


class GenerationOptions(msgspec.Struct, frozen=True):
    """Holds what a client wants generated; values are not yet checked.

    ``sampling`` holds the sampling fields that were given; ``n`` answers per prompt; ``default_max_tokens`` applies
    without a max_tokens, None: fill the context; ``names`` maps our field names to the client's, for errors.
    ``continues``: the answer's text continues the prompt's, with no chat turn between them. ``prompt_only``: the
    one generated token is not wanted. ``context`` lacks what the caller's headers say. ``prediction`` is the text
    that the client expects as answer.
    """

    sampling: Json
    n: int = 1
    stops: tuple[str, ...] = ()
    default_max_tokens: int | None = None
    names: dict[str, str] = {}
    include_stop: bool = False
    skip_special: bool = True
    continues: bool = True
    bad_words: tuple[str, ...] = ()
    prompt_only: bool = False
    context: RequestContext = RequestContext()
    prediction: str = ""


class Generation(msgspec.Struct, frozen=True):
    """Describes a validated call, every default filled in.

    ``samplings[i]`` is for ``prompts[i]`` (token ids); each gets ``options.n`` answers. ``context`` includes the
    caller's headers, ``arrived`` is on the router's monotonic clock, ``prediction`` are token ids of the expected
    answer.
    """

    request_id: str
    entry: ModelEntry
    options: GenerationOptions
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    arrived: float = 0.0
    context: RequestContext = RequestContext()
    prediction: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Returns the number of tokens of all prompts, each prompt counted once whatever ``n`` is."""
        return sum(map(len, self.prompts))

    def requests(self) -> list[RouterRequest]:
        """Returns one RouterRequest per prompt, sharing a pin: all are answered on the same version of the
        weights.
        """
        pin, n = WeightsPin(), self.options.n
        return [
            RouterRequest(
                self.request_of(i),
                self.entry.model_id,
                prompt,
                self.samplings[i],
                n,
                self.context,
                self.prediction,
                pin,
            )
            for i, prompt in enumerate(self.prompts)
        ]

    def request_of(self, prompt: int) -> str:
        """Returns the request id of prompt number ``prompt``: the call's own, suffixed with the number if there are
        several.
        """
        return self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{prompt}"
