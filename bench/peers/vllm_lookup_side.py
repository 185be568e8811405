"""vLLM decoding given answers, plainly and with its n-gram look-up: runs in its own environment.

Asked on stdin for texts of (prompt, answer); says on stdout the seconds of each. What the model chooses is the
given answer: its own choice is computed and replaced, in the sampler's place. ``ngram`` as second argument asks for
the look-up with the numbers of vLLM's own documentation. Reading the prompt isn't counted.
"""

import json
import os
import sys
import time

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
CONTEXT = 1024


class Scripted:
    """Stands where the runner samples, for one request at a time."""

    def __init__(self):
        self.answer, self._sample = [], GPUModelRunner._sample
        self.steps = 0

    def sample(self, runner, logits, drafts):
        """Returns what the runner chose, its tokens replaced by the answer's."""
        found = self._sample(runner, logits, drafts)
        (request,) = runner.requests.values()
        at, wide, self.steps = len(request.output_token_ids), found.sampled_token_ids.shape[1], self.steps + 1
        stood = 0
        for token in [] if drafts is None else drafts.draft_token_ids.tolist():
            if token != self.answer[at + stood]:
                break
            stood += 1
        chosen = self.answer[at : at + stood + 1]
        row = chosen + [-1] * (wide - len(chosen))
        found.sampled_token_ids = torch.tensor([row], dtype=found.sampled_token_ids.dtype)
        return found


def main():
    path, way = sys.argv[1:3]
    asked, script = json.loads(sys.stdin.read()), Scripted()
    GPUModelRunner._sample = lambda runner, logits, drafts: script.sample(runner, logits, drafts)
    model = LLM(
        path,
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=1,
        enable_prefix_caching=False,
        async_scheduling=False,
        speculative_config=NGRAM if way == "ngram" else None,
    )

    def seconds(prompt, answer, count):
        script.answer = answer
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        began = time.perf_counter()
        (found,) = model.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        took = time.perf_counter() - began
        assert list(found.outputs[0].token_ids) == answer[:count]
        return took

    def decoding(prompt, answer):
        return seconds(prompt, answer, asked["tokens"] + 1) - seconds(prompt, answer, 1)

    decoding(*asked["texts"][0])
    print(json.dumps([decoding(prompt, answer) for prompt, answer in asked["texts"]]))


if __name__ == "__main__":
    main()
