"""One llama.cpp model that measures when told: runs in its own environment, which has no part of Baton.

Token ids are drawn anew each time, so that no cache helps. Flash attention is on; the
KV cache is f16.
"""

import ctypes
import random
import sys

import llama_cpp as llama
from answering import answer, clock

VOCABULARY = 31000  # below the special tokens


class Model:
    """A context that holds ``sequences`` of ``length`` tokens each."""

    def __init__(self, path, threads, sequences, length):
        llama.llama_backend_init()
        settings = llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(path.encode(), settings)
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp doesn't load it")
        wanted = llama.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = (sequences + 1) * length, 2048, 512
        wanted.n_seq_max, wanted.n_threads, wanted.n_threads_batch = sequences, threads, threads
        wanted.kv_unified = True
        wanted.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = llama.llama_init_from_model(self.model, wanted)
        if not self.context:
            raise SystemExit("llama.cpp makes no context")
        self.batch = llama.llama_batch_init(2048, 0, 1)
        self.rng = random.Random(0)

    def clear(self):
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def feed(self, rows):
        """``rows`` of (sequence, position, whether its logits are wanted)."""
        self.batch.n_tokens = len(rows)
        for at, (sequence, position, wanted) in enumerate(rows):
            self.batch.token[at] = self.rng.randrange(VOCABULARY)
            self.batch.pos[at] = position
            self.batch.n_seq_id[at] = 1
            self.batch.seq_id[at][0] = sequence
            self.batch.logits[at] = wanted
        began = clock()
        if llama.llama_decode(self.context, self.batch) != 0:
            raise SystemExit("llama_decode failed")
        logits = llama.llama_get_logits_ith(self.context, len(rows) - 1)
        ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))[0]
        return clock() - began

    def prompt(self, length):
        self.clear()
        return self.read(0, length)

    def read(self, sequence, length):
        return self.feed([(sequence, at, at == length - 1) for at in range(length)])

    def decode(self, batch, context, steps):
        self.clear()
        for sequence in range(batch):
            self.read(sequence, context)
        took = [self.feed([(s, context + step, True) for s in range(batch)]) for step in range(steps + 1)]
        return sum(took[1:]) / steps


def main():
    path, threads, sequences, length = sys.argv[1], *(int(value) for value in sys.argv[2:5])
    model = Model(path, threads, sequences, length)
    answer(model, version=llama.__version__, system=llama.llama_print_system_info().decode())


if __name__ == "__main__":
    main()
