"""llama.cpp decoding given answers, plainly and with its prompt look-up: runs in its own environment.

Asked on stdin for texts of (prompt, answer); says on stdout the seconds of each, without and with look-up. What the
model chooses is the given answer. The KV of rejected drafts is taken out as llama-cpp-python does.
"""

import json
import sys
import time

import llama_cpp as llama
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from llama_cpp_side import Model


class Scripted(Model):
    """A context whose choices are given."""

    def feed_tokens(self, tokens, start):
        """Computes ``tokens`` from position ``start`` on, the logits of all of them wanted."""
        self.batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            self.batch.token[at], self.batch.pos[at] = token, start + at
            self.batch.n_seq_id[at], self.batch.seq_id[at][0], self.batch.logits[at] = 1, 0, True
        if llama.llama_decode(self.context, self.batch) != 0:
            raise SystemExit("llama_decode failed")
        llama.llama_get_logits_ith(self.context, len(tokens) - 1)[0]

    def answered(self, prompt, answer, count, propose):
        """Seconds of ``count`` tokens of ``answer`` behind ``prompt``."""
        self.clear()
        self.feed_tokens(prompt, 0)
        text, given, began = [*prompt, answer[0]], 1, time.perf_counter()
        while given <= count:
            drafts = propose(text)
            self.feed_tokens([text[-1], *drafts], len(text) - 1)
            stood = 0
            while stood < len(drafts) and drafts[stood] == answer[given + stood]:
                stood += 1
            text += answer[given : given + stood + 1]
            given += stood + 1
            if stood < len(drafts):
                llama.llama_memory_seq_rm(llama.llama_get_memory(self.context), 0, len(text) - 1, -1)
        return (time.perf_counter() - began) * count / (given - 1)


def main():
    path, threads = sys.argv[1], int(sys.argv[2])
    asked = json.loads(sys.stdin.read())
    model, look_up = Scripted(path, threads, 1, 2048), LlamaPromptLookupDecoding(num_pred_tokens=10)

    def nothing(text):
        return []

    def found(text):
        return [int(token) for token in look_up(np.array(text, dtype=np.intc))]

    def both(prompt, answer):
        return [model.answered(prompt, answer, asked["tokens"], way) for way in (nothing, found)]

    print(json.dumps([both(prompt, answer) for prompt, answer in asked["texts"]]))


if __name__ == "__main__":
    main()
