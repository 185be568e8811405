"""Spells names of a causal model's tensors and modules as files of larger models, or of ones without a head, do.

Knows nothing of files. A program's names are those of the causal model, such as
"model.layers.0.self_attn.q_proj"; inside one that also sees images (Gemma 3) the same module is
"model.language_model.layers.0.self_attn.q_proj".
"""

from __future__ import annotations

PREFIX, HEAD = "model.", "lm_head"
OTHER_PREFIXES = ("", "model.language_model.", "language_model.model.")  # of files, in place of PREFIX
OTHER_HEAD = "language_model.lm_head"


def spellings(name: str) -> tuple[str, ...]:
    """Returns a causal model's name of a tensor or module, and then the others that it may have in files."""
    if name.startswith(PREFIX):
        return name, *(f"{at}{name.removeprefix(PREFIX)}" for at in OTHER_PREFIXES)
    return (name, f"{OTHER_HEAD}{name.removeprefix(HEAD)}") if name.startswith(HEAD) else (name,)


def causal_names(found: str) -> tuple[str, ...]:
    """Returns the causal model's names that ``found``, a tensor's or module's name in a file, may be spellings of;
    ``found`` itself is the first.
    """
    names = [f"{PREFIX}{found.removeprefix(at)}" for at in OTHER_PREFIXES if found.startswith(at)]
    head = [f"{HEAD}{found.removeprefix(OTHER_HEAD)}"] if found.startswith(OTHER_HEAD) else []
    return found, *names, *head
