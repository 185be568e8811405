"""Answers prompts by vLLM from several checkpoints: runs in vLLM's environment, which has no part of Baton.

    python vllm_side.py PROMPTS.json OUT.json CHECKPOINT…

PROMPTS.json holds rows of token ids. OUT.json gets each prompt's likeliest tokens, pairs of id and log-probability,
by checkpoint; of one that vLLM refuses, what it says.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

TOP = 5


def answers(checkpoint, rows):
    model = LLM(checkpoint, dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=8)
    asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=TOP)
    found = model.generate([{"prompt_token_ids": row} for row in rows], asked)
    return [[[i, one.logprob] for i, one in answer.outputs[0].logprobs[0].items()] for answer in found]


def main():
    prompts, out, *checkpoints = sys.argv[1:]
    rows = json.loads(Path(prompts).read_text())
    found = {}
    for checkpoint in checkpoints:
        try:
            found[checkpoint] = answers(checkpoint, rows)
        except Exception as error:
            found[checkpoint] = str(error)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
