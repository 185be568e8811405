"""OpenVINO GenAI's continuous batching, which measures when told: runs in its own environment, which has no part
of Baton. It reads the GGUF file itself; all settings are its defaults (on this kind of CPU bf16 arithmetic and an
int8 KV cache), but for threads and for prefix caching, which is off.

Token ids are drawn anew each time.
"""

import random
import sys

import numpy as np
import openvino as ov
import openvino_genai as genai
from answering import answer, clock

VOCABULARY = 31000  # below the special tokens
CACHE_GB = 1


class Model:
    """A pipeline that is stepped by hand."""

    def __init__(self, path, threads, sequences, length):
        settings = genai.SchedulerConfig()
        settings.enable_prefix_caching = False
        settings.dynamic_split_fuse = False  # a prompt in one piece, decoding in steps of their own
        settings.max_num_batched_tokens = 2048
        settings.max_num_seqs = sequences
        settings.cache_size = CACHE_GB
        self.pipeline = genai.ContinuousBatchingPipeline(path, settings, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self.rng = random.Random(0)
        self.asked = 0

    def add(self, length, answer):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.apply_chat_template = answer, True, False
        ids = np.array([[self.rng.randrange(VOCABULARY) for _ in range(length)]], dtype=np.int64)
        self.asked += 1
        return self.pipeline.add_request(self.asked, ov.Tensor(ids), config)

    def step(self):
        began = clock()
        self.pipeline.step()
        return clock() - began

    def prompt(self, length):
        handle = self.add(length, 1)  # a handle that is let go of cancels its request
        took = self.step()
        assert handle.can_read(), "a prompt took more than one step"
        return took

    def decode(self, batch, context, steps):
        handles = [self.add(context - 1, 1000) for _ in range(batch)]
        while not all(handle.can_read() for handle in handles):
            self.step()
        took = [self.step() for _ in range(steps + 1)]
        for handle in handles:
            handle.cancel()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return sum(took[1:]) / steps


def main():
    path, threads, sequences, length = sys.argv[1], *(int(value) for value in sys.argv[2:5])
    model = Model(path, threads, sequences, length)
    answer(model, version=ov.__version__.split("-")[0])


if __name__ == "__main__":
    main()
