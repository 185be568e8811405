"""Paced clusters and what they must answer: the oracle needs no cluster."""

from pathlib import Path

from baton.cost.profiles import load_profile
from baton.engine.backends.paced.runner import paced_answer
from baton.protos.nouns import Sampling

SLOW = """
about = "Slow enough that a test can act in each phase; its times are chosen, not measured"
kv_bytes_per_token = {kv}
model_kv_bytes_per_token = {kv}
pages = 1024
vocab_size = 4096
max_model_len = 16384
prefill_chunk = 64

[step]
fixed = {fixed}
prefill_token = {prefill}
prefill_pair = 0.0
decode_sequence = 0.0
decode_context_token = 0.0

[transfer]
fixed = 0.0005
per_byte = 1e-9
"""


def slow_profile(folder: Path, fixed: float = 0.01, prefill: float = 0.0003, kv: int = 16384) -> str:
    """Writes a profile and returns its path; ``fixed`` is a decode step in seconds, ``prefill`` the seconds per
    prompt token.
    """
    path = folder / "slow.toml"
    path.write_text(SLOW.format(fixed=fixed, prefill=prefill, kv=kv))
    return str(path)


class Oracle:
    """Computes what a paced cluster of ``profile`` answers."""

    def __init__(self, profile: str):
        self._profile = load_profile(profile)

    def answer(self, prompt: list[int], max_tokens: int, choice: int = 0, **sampling) -> list[int]:
        """Greedy unless told otherwise."""
        fields = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | sampling
        return paced_answer(
            prompt,
            Sampling(**fields),
            choice,
            kv_bytes_per_token=self._profile.kv_bytes_per_token,
            vocab_size=self._profile.vocab_size,
            max_model_len=self._profile.max_model_len,
        )

    def prompt(self, seed: int, length: int, shared: int = 0) -> list[int]:
        """Returns token ids; prompts with the same ``shared`` above 0 begin with the same half."""
        vocab = self._profile.vocab_size
        head = [(shared * 31 + i * 7) % vocab for i in range(length // 2)] if shared else []
        return head + [(seed * 7919 + i * 104729) % vocab for i in range(length - len(head))]
