"""A subject that is a checkpoint in this process, run by the engine itself.

A prompt is read in chunks whose attention takes K and V from the pages, so that with narrow KV each token is
affected by the rounding of all before it. If a prompt's end selects which of its pages are kept, the first half of
a text that is only scored counts as its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from baton.engine.checkpoints.hub import locate
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner, SampledToken, SampleSpec, SequenceStep, StepPlan, StepResult
from baton.evaluate.attended_pages import AttendedPages
from baton.evaluate.subject import TOP, Continuation, Ids, TokenScore, text_before
from baton.evaluate.tokenizers import tokenizer_of
from baton.kv.layout.state import state_pages
from baton.protos.errors import InvalidRequest
from baton.protos.nouns import BLOCK_TOKENS, Sampling, TokenLogprobs

BATCH = 16  # sequences that decode together
CHUNK = 1024  # tokens that are read at once
LOGITS = 1 << 25  # float32 logits of one chunk at most: 128 MiB


class _Lease(NamedTuple):
    """Holds the pages of one sequence: of its blocks, and for two recurrent states if the model has any."""

    pages: list[int]
    states: list[int]


class LocalSubject:
    """Implements ``Subject`` with an engine in this process."""

    def __init__(self, config: EngineConfig, name: str = "") -> None:
        self.name = name or config.model
        self._tokenizer = tokenizer_of(locate(config.model))
        self._runner = load_runner(config)
        self.context = self._runner.spec.max_model_len
        self._chunk = max(BLOCK_TOKENS, min(CHUNK, LOGITS // self._runner.spec.vocab_size))
        self._pages = 0
        self._memory = bytearray()

    @property
    def runner(self) -> Runner:
        """Returns the engine's runner."""
        return self._runner

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of ``text`` as a prompt, with those that the tokenizer puts before it."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        return found

    def token_text(self, token: int) -> str:
        """Returns the text of one token id."""
        found: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return found

    def text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text of ``tokens``, without special ones."""
        found: str = self._tokenizer.decode(tokens)
        return found

    def scores(self, prompts: Sequence[Ids], top: int = 0) -> Iterator[list[TokenScore]]:
        """Yields, for each prompt, the log-likelihoods of its tokens from the second on, with ``top`` alternatives
        each.

        Raises InvalidRequest for a prompt longer than the context.
        """
        for prompt in prompts:
            self._require_room(prompt, 0)
            lease = self._lease(1, len(prompt))[0]
            yield [_scored(found) for found in self._read(prompt, lease, top)]

    def answers(
        self, prompts: Sequence[Ids], tokens: int, stop: Sequence[str] = (), to_the_end: bool = False
    ) -> list[Continuation]:
        """Returns a greedy continuation of each prompt, ``BATCH`` of them at a time, of at most ``tokens`` tokens.

        It ends before the first of the ``stop`` strings; with ``to_the_end`` it does not end at end tokens. Raises
        InvalidRequest if a prompt and its answer exceed the context.
        """
        found: list[Continuation] = []
        ends = frozenset() if to_the_end else frozenset(self._runner.spec.eos_token_ids)
        for at in range(0, len(prompts), BATCH):
            some = prompts[at : at + BATCH]
            leased = self._lease(len(some), max(map(len, some)) + tokens)
            goings = [
                _Going(self, i, p, lease, tokens, stop, ends)
                for i, (p, lease) in enumerate(zip(some, leased, strict=True))
            ]
            found += self._continue(goings)
        return found

    def sampled(self, prompts: Sequence[Ids], tokens: int, temperature: float, seed: int) -> list[list[int]]:
        """Returns a sampled continuation of each prompt, ``tokens`` ids long, which may contain end tokens."""
        drawn = Sampling(temperature=temperature, max_tokens=tokens, seed=seed)
        leased = self._lease(len(prompts), max(map(len, prompts)) + tokens)
        goings = [
            _Going(self, i, p, lease, tokens, (), frozenset(), msgspec.structs.replace(drawn, seed=seed + i))
            for i, (p, lease) in enumerate(zip(prompts, leased, strict=True))
        ]
        self._continue(goings)
        return [going.found for going in goings]

    def _continue(self, goings: list[_Going]) -> list[Continuation]:
        for going in goings:
            self._require_room(going.prompt, going.tokens)
            going.take(self._first(going))
        while live := [going for going in goings if not going.done]:
            steps = tuple(going.step() for going in live)
            result = self._runner.run(StepPlan(steps))
            for going, step, sampled in zip(live, steps, result.sampled, strict=True):
                going.kept.saw(step, result)
                going.take(sampled)
        return [going.answer() for going in goings]

    def _first(self, going: _Going) -> SampledToken:
        """Prefills the prompt and returns the first token of the answer."""
        prompt, start = going.prompt, 0
        while True:
            end = going.kept.cut(start, min(start + self._chunk, len(prompt)))
            asked = going.spec() if end == len(prompt) else None
            step = SequenceStep(going.seq, prompt[start:end], start, going.kept.pages, asked, is_prefill=True)
            result = self._run(step, going.kept)
            if asked is not None:
                return result.sampled[0]
            start = end

    def _run(self, step: SequenceStep, kept: AttendedPages) -> StepResult:
        step = kept.marked(step)
        result = self._runner.run(StepPlan((step,)))
        kept.saw(step, result)
        return result

    def _read(self, prompt: Ids, lease: _Lease, top: int) -> Iterator[TokenLogprobs]:
        start, kept = 0, AttendedPages(self._runner.spec.layout, len(prompt) // 2, *lease)
        while start < len(prompt) - 1:
            end = kept.cut(start, min(start + self._chunk, len(prompt) - 1))
            part, targets = prompt[start:end], prompt[start + 1 : end + 1]
            step = SequenceStep(0, part, start, kept.pages, is_prefill=True, targets=targets, score_top=top)
            yield from self._run(step, kept).scored[0]
            start = end

    def _lease(self, sequences: int, tokens: int) -> list[_Lease]:
        each, states = -(-tokens // BLOCK_TOKENS), 2 * state_pages(self._runner.spec.layout)
        if self._pages < sequences * (each + states):
            self._pages = sequences * (each + states)
            self._memory = bytearray(self._pages * self._runner.spec.layout.page_bytes)
            self._runner.bind(memoryview(self._memory), self._pages)
        begins = range(0, sequences * (each + states), each + states)
        return [_Lease([*range(at, at + each)], [*range(at + each, at + each + states)]) for at in begins]

    def _require_room(self, prompt: Ids, tokens: int) -> None:
        if len(prompt) + tokens > self.context:
            text = f"{self.name}: {len(prompt)} tokens and {tokens} more don't fit a context of {self.context}"
            raise InvalidRequest(text, "prompt")


class _Going:
    """One answer in progress."""

    def __init__(
        self, local: LocalSubject, seq: int, prompt: Ids, lease: _Lease, tokens: int, stop: Sequence[str],
        ends: frozenset[int], sampling: Sampling | None = None,
    ) -> None:  # fmt: skip
        self.seq, self.prompt, self.tokens = seq, prompt, tokens
        self.kept = AttendedPages(local.runner.spec.layout, len(prompt), *lease)
        self._local, self._stop, self._ends = local, stop, ends
        self._sampling = sampling or Sampling(temperature=0.0, max_tokens=tokens, logprobs=0)
        self.found: list[int] = []
        self._logprobs: list[float] = []
        self.done = False

    def spec(self) -> SampleSpec:
        """Returns how to sample the next token."""
        history = [*self.prompt, *self.found]
        return SampleSpec(self._sampling, 0, len(history), history, len(self.prompt))

    def step(self) -> SequenceStep:
        """Returns the step of the last token."""
        start = len(self.prompt) + len(self.found) - 1
        return self.kept.marked(SequenceStep(self.seq, self.found[-1:], start, self.kept.pages, self.spec()))

    def take(self, sampled: SampledToken) -> None:
        """Adds the next token, or ends the answer with it."""
        if sampled.token_id in self._ends:
            self.done = True
            return
        self.found.append(sampled.token_id)
        if sampled.logprobs is not None:
            self._logprobs.append(sampled.logprobs.chosen.logprob)
        self.done = len(self.found) >= self.tokens or any(s in self._text() for s in self._stop)

    def answer(self) -> Continuation:
        """Returns the continuation so far, its text up to the first stop string."""
        return Continuation(text_before(self._text(), self._stop), tuple(self.found), tuple(self._logprobs))

    def _text(self) -> str:
        return self._local.text_of(self.found)


def _scored(found: TokenLogprobs) -> TokenScore:
    return TokenScore(found.chosen.logprob, {option.token_id: option.logprob for option in found.top[:TOP]})
