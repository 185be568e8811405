"""Prompts and scores of Qwen3-Reranker for a query and a document (https://arxiv.org/abs/2506.05176).

Knows nothing of workers. The model answers "yes" or "no", and the probability of "yes" is the document's score. A
prompt's beginning, the pair and the prompt's end are tokenized separately, so that equal queries share cached
blocks.
"""

from __future__ import annotations

import math

import msgspec

from baton.protos.errors import ContextTooLong, InvalidRequest
from baton.protos.nouns import TokenLogprobs
from baton.router.text.model import TextModel

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TURN = "<|im_start|>"


class TokenLimits(msgspec.Struct, frozen=True):
    """Limits the tokens of a prompt, and of the document in it (None: as many as fit).

    ``query`` names the request's field of the query, for errors.
    """

    prompt: int
    document: int | None = None
    query: str = "query"


class JudgePrompt(msgspec.Struct, frozen=True):
    """Holds the token ids before and after a pair, and those of the answers "yes" and "no"."""

    before: tuple[int, ...]
    behind: tuple[int, ...]
    yes: int
    no: int

    async def prompt(self, text: TextModel, asked: tuple[str, str], document: str, most: TokenLimits) -> list[int]:
        """Returns the prompt's token ids for ``asked``, (instruction, query), and a document, whose end is cut to
        fit ``most``.

        Raises ContextTooLong if instruction and query leave no room for the document.
        """
        instruction, query = asked
        question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
        document = await text.beginning(document, most.prompt if most.document is None else most.document)
        ids = await text.encode(question + document, add_special_tokens=False)
        room = most.prompt - len(self.before) - len(self.behind)
        if len(ids) > room or most.document is not None:
            asks = len(await text.encode(question, add_special_tokens=False))
            if asks >= room:
                told = f"the query and its instruction take {asks} tokens, and {max(room, 0)} are there"
                raise ContextTooLong(f"{told} for them and a document: shorten it", most.query)
            room = min(room, asks + (room if most.document is None else most.document))
        return [*self.before, *ids[:room], *self.behind]

    def score(self, found: TokenLogprobs) -> float:
        """Returns the probability of "yes" among "yes" and "no", from the logprobs in ``found.top``."""
        by_id = {each.token_id: each.logprob for each in found.top}
        return 1.0 / (1.0 + math.exp(min(by_id[self.no] - by_id[self.yes], 700.0)))


def judge_of(text: TextModel, model: str) -> JudgePrompt:
    """Returns the prompt frame for ``model``.

    Raises InvalidRequest if its tokenizer lacks single tokens for "yes" and "no".
    """

    def ids(of: str) -> list[int]:
        return text.tokenizer.encode(of, add_special_tokens=False)

    missing = [word for word in ("yes", "no", TURN) if len(ids(word)) != 1]
    if missing:
        why = f"{', '.join(missing)} should be one token of its tokenizer: serve a Qwen3-Reranker"
        raise InvalidRequest(f"model {model!r} is no reranker: {why}", "model")
    [yes], [no] = ids("yes"), ids("no")
    return JudgePrompt(tuple(ids(BEFORE)), tuple(ids(BEHIND)), yes, no)
