"""What a way of serving a model costs in answers: loss, agreement, retrieval and exact match beside a reference.

``subject.py`` says what can be judged (a checkpoint in this process, or any OpenAI-compatible server); one file per
measure; ``evaluation.py`` puts them together. Knows nothing of how weights, KV or handoffs are rounded.
"""
