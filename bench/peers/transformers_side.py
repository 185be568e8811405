"""transformers in bf16, which measures when told: runs in its own environment, which has no part of Baton. It reads
the GGUF file itself; attention is torch's own (sdpa), the cache a DynamicCache.

Token ids are drawn anew each time.
"""

import sys
from pathlib import Path

import torch
import transformers
from answering import answer, clock

VOCABULARY = 31000  # below the special tokens


class Model:
    """A model and nothing else: no generate() around it."""

    def __init__(self, path, threads):
        torch.set_num_threads(threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.bfloat16
        ).eval()

    def feed(self, ids, cache):
        """Seconds of a forward pass that ends with the likeliest next tokens."""
        began = clock()
        found = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        found.logits[:, -1].argmax(-1)
        return clock() - began, found.past_key_values

    def prompt(self, length):
        return self.feed(torch.randint(VOCABULARY, (1, length)), None)[0]

    def decode(self, batch, context, steps):
        _, cache = self.feed(torch.randint(VOCABULARY, (batch, context)), None)
        took = []
        for _ in range(steps + 1):
            seconds, cache = self.feed(torch.randint(VOCABULARY, (batch, 1)), cache)
            took.append(seconds)
        return sum(took[1:]) / steps


@torch.inference_mode()
def main():
    answer(Model(Path(sys.argv[1]), int(sys.argv[2])), version=transformers.__version__)


if __name__ == "__main__":
    main()
