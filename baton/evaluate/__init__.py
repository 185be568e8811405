"""Measures how much a way of serving a model changes its answers, beside a reference.

The measures are loss, agreement of tokens, retrieval from long contexts, and exact match of tasks. ``subject.py``
says what can be measured (a checkpoint in this process, or any OpenAI-compatible server); there is one file per
measure, and ``evaluation.py`` joins them. Knows nothing of how weights, KV or handoffs are rounded.
"""
