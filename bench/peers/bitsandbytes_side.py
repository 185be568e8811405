"""bitsandbytes' NF4 on a CPU, in transformers, which measures when told: runs in its own environment, which has no
part of Baton. It reads the checkpoint that `baton quantize --method nf4` wrote; it computes in bfloat16.
"""

import sys
from pathlib import Path

import bitsandbytes
import torch
import transformers
from answering import answer
from transformers_side import Model


class Packed(Model):
    """Asks the same of a model whose linear layers are bitsandbytes' own."""

    def __init__(self, path, threads):
        torch.set_num_threads(threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), dtype=torch.bfloat16, device_map="cpu"
        ).eval()


@torch.inference_mode()
def main():
    answer(Packed(Path(sys.argv[1]), int(sys.argv[2])), version=bitsandbytes.__version__)


if __name__ == "__main__":
    main()
