"""Seeds whatever a test draws at random, so that a red test is red again. Knows nothing of what is drawn.

Every test begins with Python's, numpy's and torch's global generators seeded by its own name and the run's seed.
The run's seed is 0, so two runs draw the same; ``BATON_TEST_SEED=7`` draws other numbers, and
``BATON_TEST_SEED=random`` new ones in each run. The header of the run and the report of each failed test name the
seed that repeats it.
"""

from __future__ import annotations

import os
import random
import sys
import zlib

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

ENV = "BATON_TEST_SEED"
EXAMPLES = 40  # of each property, because the same ones are drawn in every run


def run_seed() -> int:
    """Returns the seed of this run; the processes of one parallel run agree on it."""
    asked = os.environ.get(ENV, "0")
    if asked == "random":
        asked = os.environ[ENV] = str(random.SystemRandom().randrange(1 << 31))
    return int(asked)


def test_seed(name: str) -> int:
    """Returns the seed of the test ``name``, a 32-bit number that doesn't depend on which tests ran before."""
    return zlib.crc32(f"{run_seed()} {name}".encode())


def seed_all(seed: int) -> None:
    """Seeds the global generators of Python, and of numpy and torch where a test has loaded them."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def choose_examples() -> None:
    """Has Hypothesis draw the same examples in every run, unless another seed is asked for.

    They are ``EXAMPLES`` where a test asks for no number, and Hypothesis's own number with another seed. No example
    has a deadline, and none is too slow to draw, because a busy machine would decide which test fails.
    """
    same = run_seed() == 0
    number = {"max_examples": EXAMPLES} if same else {}
    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("baton", derandomize=same, print_blob=True, **patient, **number)
    settings.load_profile("baton")
    if same:
        _draw_no_constants_of_ours()


def _draw_no_constants_of_ours() -> None:
    """Has Hypothesis leave out the constants that it finds in our sources, as another seed doesn't.

    Which ones it knows depends on what has been imported, so that a test would draw other examples alone than after
    others. Reading all sources for them also takes each process a second of CPU, and several in a fresh clone.
    """
    if hasattr(providers, "_get_local_constants"):  # it is no part of the API
        providers._get_local_constants = lambda: providers._local_constants
