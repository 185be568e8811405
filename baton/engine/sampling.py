"""Turns logits into tokens: penalties, biases, bans, the draw, and logprobs. Each costs only where it is asked for.

Knows nothing of models or pages. Logprobs are those of the raw logits. Order of edits: repetition penalty (prompt
and outputs), frequency and presence penalties (outputs), logit_bias, masks, bans; then temperature, top_k, top_p,
min_p. Randomness is one uniform number per draw, keyed by (seed, choice, position): a handoff carries no state, and
a draw doesn't depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.plan import SampledToken, SampleSpec
from baton.kernels.sample.reference import probabilities
from baton.kernels.speculative_accept.cpu import speculative_accept
from baton.kernels.speculative_accept.reference import Rejection
from baton.protos.errors import BatonError
from baton.protos.nouns import TokenLogprob, TokenLogprobs

# Below this temperature the likeliest token is taken, because dividing logits by it would overflow.
COLDEST = 1e-5
# XORed to the seed, because the numbers that judge a draft must differ from those that it was drawn with.
ACCEPT, REDRAW = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F

Draw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def choose(
    logits: Tensor, seqs: Sequence[int], specs: Sequence[SampleSpec], draw: Draw
) -> tuple[SampledToken, ...]:
    """Returns the next token of each row of ``logits`` (rows, vocab) float32, whose sequence is ``seqs[row]``.

    ``draw`` samples from (rows, vocab) logits, given columns of temperature, top_k, top_p, min_p and uniform
    numbers. Raises BatonError if a row has no finite logit left.
    """
    edited = _edited(logits, specs)
    best, tokens = edited.max(-1)
    _require_finite(best, seqs)
    random = [row for row, spec in enumerate(specs) if spec.sampling.temperature >= COLDEST]
    if random:
        tokens[random] = _drawn(edited, random, specs, draw)
    for row in (row for row in random if specs[row].drafted is not None):
        tokens[row] = _judged(edited[row].cpu(), specs[row])
    found = tokens.tolist()
    likelihoods = _likelihoods(logits, tokens, specs)
    return tuple(
        SampledToken(seq, token, likelihoods.get(row), _spread(edited[row], specs[row]))
        for row, (seq, token) in enumerate(zip(seqs, found, strict=True))
    )


def spread_of(row: Tensor, spec: SampleSpec) -> Tensor:
    """Returns the probabilities (vocab,) float32 with which ``spec`` draws from ``row``, logits after all edits;
    one-hot for greedy decoding.
    """
    sampling = spec.sampling
    if sampling.temperature < COLDEST:
        return torch.zeros_like(row).index_fill_(0, row.argmax(), 1.0)
    asked = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return probabilities(row[None], *(torch.tensor([value]) for value in asked))[0]


def _spread(row: Tensor, spec: SampleSpec) -> NDArray[np.float32] | None:
    if not spec.spread:
        return None
    found: NDArray[np.float32] = spread_of(row.cpu(), spec).numpy()
    return found


def _judged(row: Tensor, spec: SampleSpec) -> int:
    """Returns the drafted token if rejection sampling accepts it, else a draw from where the target's probabilities
    exceed the draft's.

    Its uniform numbers differ from the position's own, which the draft may have been drawn with.
    """
    drafted = spec.drafted
    assert drafted is not None
    accept, draw = (uniform(spec.sampling.seed ^ other, spec.choice, spec.position) for other in (ACCEPT, REDRAW))
    by = Rejection(
        spread_of(row, spec).log().expand(2, -1),
        None if drafted.spread is None else torch.from_numpy(drafted.spread)[None],
        torch.tensor([accept], dtype=torch.float64),
        torch.tensor([draw, draw], dtype=torch.float64),
        temperature=1.0,
    )
    stands, instead = speculative_accept(torch.tensor([drafted.token]), by)
    return drafted.token if stands else instead


def uniform(seed: int, choice: int, position: int) -> float:
    """Returns the random number in [0, 1) for the token at ``position`` of answer ``choice``: 53 bits of XXH3-64
    over the three arguments as u64 LE.
    """
    key = b"".join((n % 2**64).to_bytes(8, "little") for n in (seed, choice, position))
    return (xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def _edited(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    rows = [
        r
        for r, s in enumerate(specs)
        if s.banned or s.allowed is not None or s.sampling.logit_bias or s.sampling.penalised
    ]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        _edit(logits[row], specs[row])
    return logits


def _edit(row: Tensor, spec: SampleSpec) -> None:
    """Applies the edits of ``spec`` to one row (vocab,) in place."""
    sampling = spec.sampling
    if sampling.penalised:
        _penalise(row, spec)
    if sampling.logit_bias:
        known = {token: bias for token, bias in sampling.logit_bias.items() if 0 <= token < len(row)}
        row[_ids(known, row)] += torch.tensor(list(known.values()), dtype=row.dtype, device=row.device)
    if spec.allowed is not None:
        row.masked_fill_(torch.from_numpy(~spec.allowed(len(row))).to(row.device), -torch.inf)
    if spec.banned:
        row[_ids([token for token in spec.banned if 0 <= token < len(row)], row)] = -torch.inf


def _penalise(row: Tensor, spec: SampleSpec) -> None:
    sampling = spec.sampling
    if sampling.repetition_penalty != 1.0:
        seen = _ids(set(spec.history), row)
        values = row[seen]
        row[seen] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    if sampling.frequency_penalty or sampling.presence_penalty:
        outputs = _ids(spec.history[spec.prompt_tokens :], row)
        counts = torch.bincount(outputs, minlength=len(row))
        row -= counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty


def _drawn(logits: Tensor, rows: list[int], specs: Sequence[SampleSpec], draw: Draw) -> Tensor:
    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    asked = [specs[row] for row in rows]
    return draw(
        logits[rows],
        column([s.sampling.temperature for s in asked]),
        column([s.sampling.top_k for s in asked], torch.int64),
        column([s.sampling.top_p for s in asked]),
        column([s.sampling.min_p for s in asked]),
        column([uniform(s.sampling.seed, s.choice, s.position) for s in asked], torch.float64),
    )


def score(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Returns the logprob of each of ``tokens`` under its row of ``logits`` (tokens, vocab) float32, with those of
    the ``top`` likeliest tokens.
    """
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    return tuple(_ranked(logits, chosen, [top] * len(tokens)))


def _likelihoods(logits: Tensor, tokens: Tensor, specs: Sequence[SampleSpec]) -> dict[int, TokenLogprobs]:
    """Returns the logprobs of the rows that asked for them, by row."""
    rows = [row for row, spec in enumerate(specs) if spec.sampling.logprobs is not None]
    if not rows:
        return {}
    tops = [specs[row].sampling.logprobs or 0 for row in rows]
    found = dict(zip(rows, _ranked(logits[rows], tokens[rows], tops), strict=True))
    for row in rows:
        if named := specs[row].sampling.logprob_token_ids:
            each = score(logits[row].expand(len(named), -1), named, 0)
            found[row] = TokenLogprobs(found[row].chosen, tuple(likelihood.chosen for likelihood in each))
    return found


def _ranked(logits: Tensor, chosen: Tensor, tops: list[int]) -> Iterator[TokenLogprobs]:
    """Yields the logprob and rank of each row's chosen token, with as many likeliest tokens as ``tops`` says for
    the row.
    """
    logprobs = torch.log_softmax(logits, -1)
    own = logprobs.gather(1, chosen[:, None])
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    values, ids = logprobs.topk(min(max(tops), logprobs.shape[1]), -1)
    lists = zip(chosen.tolist(), own.squeeze(1).tolist(), ranks, ids.tolist(), values.tolist(), tops, strict=True)
    for token, logprob, rank, likeliest, likely, top in lists:
        yield _likelihood(token, logprob, rank, likeliest[:top], likely)


def _likelihood(token: int, logprob: float, rank: int, top: list[int], likely: list[float]) -> TokenLogprobs:
    alternatives = (TokenLogprob(t, p, r + 1) for r, (t, p) in enumerate(zip(top, likely, strict=False)))
    return TokenLogprobs(TokenLogprob(token, logprob, rank), tuple(alternatives))


def _require_finite(best: Tensor, seqs: Sequence[int]) -> None:
    if bool(torch.isfinite(best).all()):
        return
    bad = [seq for seq, fine in zip(seqs, torch.isfinite(best).tolist(), strict=True) if not fine]
    raise BatonError(f"sequences {bad} have no finite logit to choose from")


def _ids(tokens: Sequence[int] | set[int] | dict[int, float], row: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=row.device)
