"""Describes XLM-RoBERTa (https://arxiv.org/abs/1911.02116): multilingual RoBERTa, such as BGE-M3 and its reranker.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models.roberta import program

__all__ = ["program"]
