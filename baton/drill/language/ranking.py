"""Documents that simulated clients have ranked by how well they answer a query, and the scores that these must get.

The model is asked for each document, in a prompt of Qwen3-Reranker's form, whether it answers the query. A score is
the probability of "yes" beside "no", which the paced engine takes from a hash. Shares no code with the router's or
the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import xxhash

from baton.drill.language.oracle import Sight, digest_of

# Words that are one token each if they are alone.
WORDS = {"yes": 700, "no": 701, "<|im_start|>": 702}
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
THOUGHT = "<think>\n\n</think>\n\n"
CLOSE = 1e-6  # by which a score may differ, by rounding


class Ranking(msgspec.Struct, frozen=True):
    """Asks for ``documents`` in the order of their scores, or with ``scores`` for these in the documents'."""

    query: str
    documents: tuple[str, ...]
    scores: bool = False
    top: int = 0  # documents that are told; 0: all
    document_tokens: int = 0  # tokens after which a document is cut; 0: none is

    def prompt_of(self, at: int) -> tuple[int, ...]:
        """Returns the token ids of the prompt that asks for document number ``at``."""
        document = self.documents[at].encode()
        if self.document_tokens and not self.scores:
            document = document[: self.document_tokens]
        head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
        asks = f"<Instruct>: {INSTRUCTION}\n<Query>: {self.query}\n<Document>: "
        tail = f"<|im_end|>\n<|im_start|>assistant\n{THOUGHT}"
        return tuple(head.encode() + asks.encode() + document + tail.encode())

    def wanted(self, sight: Sight) -> list[float]:
        """Returns the score of each document, by the model's ``sight``."""
        return [score(self.prompt_of(at), sight) for at in range(len(self.documents))]


def score(prompt: Sequence[int], sight: Sight) -> float:
    """Returns the probability of "yes" beside "no" after ``prompt``."""
    number = digest_of(prompt, sight).to_bytes(8, "little")
    yes, no = (
        xxhash.xxh3_64_intdigest(number + WORDS[word].to_bytes(8, "little")) % 1000 / -100 for word in ("yes", "no")
    )
    return 1.0 / (1.0 + math.exp(no - yes))
