"""Published figures side by side: the inputs are whole, and what the experiment rests on."""

import random
import tomllib

from baton.planner.score import Slo
from bench.published import DATA, attainment, distserve_low, kinds_of_lengths, late_alone, poisson, vllm_2023

SERVING = tomllib.loads(DATA.read_text(encoding="utf-8"))["distserve"]


def test_the_artifacts_lengths_fit_its_model_and_drawn_ones_are_cut_to_it():
    for _, lengths in (*kinds_of_lengths(SERVING, []), *kinds_of_lengths(SERVING, [0.5])):
        rng = random.Random(1)
        assert all(2 <= sum(lengths(rng)) <= SERVING["longest"] for _ in range(500))


def test_no_system_with_vllms_curve_can_have_its_published_share_in_time_at_the_artifacts_slo():
    _, lengths = next(kinds_of_lengths(SERVING, []))
    published = SERVING["table"][0][1] / 100
    assert late_alone(SERVING, lengths, SERVING["ttft_s"]) > 2 * (1 - published)
    assert late_alone(SERVING, lengths, 2.5) == 0


def test_a_run_is_of_so_many_requests_and_an_overloaded_system_keeps_fewer_slos():
    _, lengths = next(kinds_of_lengths(SERVING, []))
    slow, fast = ([poisson(lengths, rate, 1, 16, 50)] for rate in (1.0, 4.0))
    assert len(slow[0].requests) == 50
    slo = Slo(2.5, 0.1)
    assert attainment(vllm_2023(SERVING, True), slo, slow)[0] > attainment(vllm_2023(SERVING, True), slo, fast)[0]
    assert attainment(distserve_low(SERVING), slo, slow)[0] > 90
