"""Translates the tokenizer in a GGUF header into tokenizer.json.

Knows nothing of models' sizes. Two kinds are known: "gpt2", byte-level BPE with its merges, after splitting by the
rule that ``tokenizer.ggml.pre`` names; and "llama", SentencePiece's BPE, whose merges are derived from its pieces'
scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from baton.gguf_files.header import GgufHeader
from baton.protos.json import Json

UNKNOWN, CONTROL, USER = 2, 3, 4  # of tokenizer.ggml.token_type
SPACE = "\u2581"  # what SentencePiece writes for one
# Special tokens that end a turn or a text in the vocabularies read here. A header names one or two of them, often
# not the one that the chat template ends turns with; llama.cpp, too, ends answers at each of them.
ENDS = frozenset(
    f"<|{name}|>" for name in ("eot_id", "eom_id", "end_of_text", "im_end", "endoftext", "end", "end_of_turn")
)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3, QWEN2 = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"


class Cut(NamedTuple):
    """The way in which a text is split before BPE merges."""

    pattern: str = ""  # regular expression; "" for GPT-2's
    normalizer: Json | None = None  # applied first
    ignore_merges: bool = False  # whether a word in the vocabulary is a token as it is
    digits: bool = False  # whether each digit is split off
    begins: bool = False  # whether texts get a BOS token, unless the header says otherwise


CUTS = {
    "default": Cut(),
    "gpt-2": Cut(),
    "smollm": Cut(digits=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), Cut(LLAMA3, ignore_merges=True, begins=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Cut(QWEN2, {"type": "NFC"})),
}


class GgufText:
    """Makes tokenizer files out of a GGUF header. Raises CheckpointError naming the field."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.tokens = [str(token) for token in header.items("tokenizer.ggml.tokens")]
        self._kinds = header.items("tokenizer.ggml.token_type")

    def tokenizer(self) -> Json:
        """Returns the fields of tokenizer.json. Raises CheckpointError for an unknown kind of tokenizer."""
        kind = self._header.text("tokenizer.ggml.model")
        if kind not in ("gpt2", "llama"):
            raise self._unknown("tokenizer.ggml.model", kind, ("gpt2", "llama"))
        found = self._byte_level() if kind == "gpt2" else self._pieces()
        empty = {"version": "1.0", "truncation": None, "padding": None}
        return empty | found | {"added_tokens": self._added()}

    def settings(self) -> Json:
        """Returns the fields of tokenizer_config.json: the special tokens and the chat template."""
        named = {name: self._token(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        found = {f"{name}_token": text for name, text in named.items() if text is not None}
        template = self._header.value("tokenizer.chat_template")
        return found | ({"chat_template": template} if template else {})

    def ends(self) -> list[int]:
        """Returns the token ids that end an answer, without duplicates: those that the header names (eos, eot,
        eom), and special tokens with a text of ``ENDS``.
        """
        names = ("eos", "eot", "eom")
        named = [self._header.value(f"tokenizer.ggml.{name}_token_id") for name in names]
        special = [number for number, token in self._special() if token in ENDS]
        return list(dict.fromkeys(each for each in (*named, *special) if isinstance(each, int)))

    def _special(self) -> Iterator[tuple[int, str]]:
        """Yields the control and user tokens, each with its number."""
        for number, (token, kind) in enumerate(zip(self.tokens, self._kinds, strict=False)):
            if kind in (CONTROL, USER):
                yield number, token

    def _byte_level(self) -> Json:
        cut = self._cut()
        steps: list[Json] = [{"type": "Digits", "individual_digits": True}] if cut.digits else []
        if cut.pattern:
            split = {"type": "Split", "pattern": {"Regex": cut.pattern}, "behavior": "Isolated", "invert": False}
            steps.append(split)
        steps.append(_byte_steps(use_regex=not cut.pattern))
        merges = [str(merge).split(" ", 1) for merge in self._header.items("tokenizer.ggml.merges")]
        return {
            "normalizer": cut.normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": self._frame(cut.begins),
            "decoder": _byte_steps(use_regex=True),
            "model": self._model(merges, ignore_merges=cut.ignore_merges),
        }

    def _cut(self) -> Cut:
        name = self._header.text("tokenizer.ggml.pre", "default")
        if name not in CUTS:
            raise self._unknown("tokenizer.ggml.pre", name, tuple(CUTS))
        return CUTS[name]

    def _pieces(self) -> Json:
        leads = self._header.value("tokenizer.ggml.add_space_prefix", True)
        before = [{"type": "Prepend", "prepend": SPACE}] if leads else []
        behind = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if leads else []
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        model = self._model(self._merges(), byte_fallback=True, fuse_unk=True, unk_token=self._unknown_piece())
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*before, replaced]},
            "pre_tokenizer": None,
            "post_processor": self._frame(begins=True),
            "decoder": {
                "type": "Sequence",
                "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *behind],
            },
            "model": model,
        }

    def _merges(self) -> list[list[str]]:
        """Returns every pair of pieces that makes up another piece, those of the highest score first."""
        vocab = {token: number for number, token in enumerate(self.tokens)}
        scores = [float(str(score)) for score in self._header.items("tokenizer.ggml.scores")]
        if len(scores) != len(self.tokens):
            text = f"has {len(scores)} numbers for {len(self.tokens)} tokens: put the model's tokenizer.json beside"
            raise self._header.error("tokenizer.ggml.scores", f"{text} the file")
        found: list[tuple[float, int, int, list[str]]] = []
        for token, score in zip(self.tokens, scores, strict=True):
            for at in range(1, len(token)):
                left, right = vocab.get(token[:at]), vocab.get(token[at:])
                if left is not None and right is not None:
                    found.append((-score, left, right, [token[:at], token[at:]]))
        return [pair for *_, pair in sorted(found)]

    def _model(self, merges: list[list[str]], **own: object) -> Json:
        vocab = {token: number for number, token in enumerate(self.tokens)}
        return {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocab, "merges": merges, **own,
        }  # fmt: skip

    def _added(self) -> list[Json]:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": number, "content": token, **plain, "special": kind != USER}
            for number, (token, kind) in enumerate(zip(self.tokens, self._kinds, strict=False))
            if kind in (UNKNOWN, CONTROL, USER)
        ]

    def _frame(self, begins: bool) -> Json | None:
        """Returns the post-processor that puts BOS and EOS tokens around a text; None if there are none."""
        first = self._token("tokenizer.ggml.bos_token_id")
        last = self._token("tokenizer.ggml.eos_token_id")
        before = first if self._header.value("tokenizer.ggml.add_bos_token", begins) else None
        behind = last if self._header.value("tokenizer.ggml.add_eos_token", False) else None
        if before is None and behind is None:
            return None
        around = lambda which: [  # noqa: E731
            *([{"SpecialToken": {"id": before, "type_id": 0}}] if before else []),
            {"Sequence": {"id": which, "type_id": 0}},
            *([{"SpecialToken": {"id": behind, "type_id": 0}}] if behind else []),
        ]
        ids = {
            text: {"id": text, "ids": [self.tokens.index(text)], "tokens": [text]}
            for text in (before, behind)
            if text
        }
        pair = [*around("A"), *around("B")]
        return {"type": "TemplateProcessing", "single": around("A"), "pair": pair, "special_tokens": ids}

    def _token(self, field: str) -> str | None:
        number = self._header.value(field)
        return self.tokens[number] if isinstance(number, int) and 0 <= number < len(self.tokens) else None

    def _unknown_piece(self) -> str | None:
        return next((token for token, kind in zip(self.tokens, self._kinds, strict=False) if kind == UNKNOWN), None)

    def _unknown(self, field: str, found: str, known: tuple[str, ...]) -> Exception:
        remedy = "put the model's tokenizer.json beside the file"
        return self._header.error(field, f"is {found!r}; known are {', '.join(known)}: {remedy}")


def _byte_steps(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
