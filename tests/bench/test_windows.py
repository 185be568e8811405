"""The count of pages and blocks with a window, small."""

from bench.windows import measured


def test_with_a_window_fewer_blocks_are_shipped_and_leased():
    assert measured(0, 512, 40) == (32, 33, 35)
    assert measured(64, 512, 40) == (4, 5, 7)


def test_with_sinks_beside_the_window_these_are_shipped_and_leased_too():
    assert measured(0, 512, 40, "sinks:32,window:64") == (7, 8, 10)
