"""The order of cached pages, held against an OrderedDict."""

from __future__ import annotations

import random
from collections import OrderedDict

from baton.kv.pages.lru import PageOrder


def test_pages_come_out_in_the_order_in_which_they_were_added():
    order = PageOrder(8)
    order.add([5, 3, 7])
    order.add([0])
    assert list(order) == [5, 3, 7, 0]
    assert order.take(2) == [5, 3]
    assert list(order) == [7, 0]
    assert len(order) == 2


def test_a_page_that_was_removed_or_taken_is_not_there_and_may_come_again():
    order = PageOrder(4)
    order.add([0, 1, 2, 3])
    order.remove([1, 3])
    order.take(1)
    assert [page in order for page in range(4)] == [False, False, True, False]
    order.add([3, 0])
    assert list(order) == [2, 3, 0]


def test_an_empty_order_stays_usable():
    order = PageOrder(2)
    order.add([])
    assert order.take(0) == []
    assert list(order) == []
    order.add([1])
    assert order.take(1) == [1]
    order.add([1, 0])
    assert list(order) == [1, 0]


def test_any_run_of_changes_leaves_what_an_ordered_dict_would_hold():
    rng, order, model = random.Random(7), PageOrder(40), OrderedDict()
    for _ in range(3000):
        outside = [page for page in range(40) if page not in model]
        what = rng.randrange(3)
        if what == 0:
            pages = rng.sample(outside, rng.randint(0, len(outside)))
            order.add(pages)
            model.update(dict.fromkeys(pages))
        elif what == 1:
            count = rng.randint(0, len(model))
            assert order.take(count) == [model.popitem(last=False)[0] for _ in range(count)]
        else:
            pages = rng.sample(list(model), rng.randint(0, len(model)))
            order.remove(pages)
            for page in pages:
                del model[page]
        assert (list(order), len(order)) == (list(model), len(model))
        assert all((page in order) == (page in model) for page in range(40))
