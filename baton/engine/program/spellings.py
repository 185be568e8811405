"""Spells names of a causal model's tensors and modules as files of larger models, or of ones without a head, do.

Knows nothing of files. A program's names are those of the causal model, such as
"model.layers.0.self_attn.q_proj"; inside one that also sees images (Gemma 3) the same module is
"model.language_model.layers.0.self_attn.q_proj". Transformers 5 gives some modules other names than checkpoints
have, and adapters that are trained with it have those.
"""

from __future__ import annotations

PREFIX, HEAD = "model.", "lm_head"
OTHER_PREFIXES = ("", "model.language_model.", "language_model.model.")  # of files, in place of PREFIX
OTHER_HEAD = "language_model.lm_head"
# Parts of checkpoints' names, each with what transformers 5 calls the module instead (its conversion_mapping.py).
MODULES = (
    ("backbone.", "model."),  # Nemotron-H
    (".block_sparse_moe.gate", ".mlp.gate"),  # Mixtral, MiniMax-M2
    (".block_sparse_moe.gate", ".mlp.router"),  # Phi-3.5-MoE
    (".block_sparse_moe.router.layer", ".block_sparse_moe.router"),  # Granite
)


def spellings(name: str) -> tuple[str, ...]:
    """Returns a causal model's name of a tensor or module, and then the others that it may have in files."""
    names = (name, *(name.replace(part, module) for part, module in MODULES if part in name))
    if name.startswith(HEAD):
        return name, f"{OTHER_HEAD}{name.removeprefix(HEAD)}"
    ends = [one.removeprefix(PREFIX) for one in names if one.startswith(PREFIX)]
    return *names, *(f"{at}{end}" for end in ends for at in OTHER_PREFIXES)


def causal_names(found: str) -> tuple[str, ...]:
    """Returns the causal model's names that ``found``, a tensor's or module's name in a file, may be spellings of;
    ``found`` itself is the first.
    """
    names = [found, *(f"{PREFIX}{found.removeprefix(at)}" for at in OTHER_PREFIXES if found.startswith(at))]
    parts = [name.replace(module, part) for name in names for part, module in MODULES if module in name]
    head = [f"{HEAD}{found.removeprefix(OTHER_HEAD)}"] if found.startswith(OTHER_HEAD) else []
    return *names, *parts, *head
