"""Joules where the platform tells, nothing where it doesn't."""

from baton.worker.figures.energy import Energy


def package(folder, name, energy, wraps_at=None):
    (folder / name).mkdir()
    (folder / name / "energy_uj").write_text(str(energy))
    if wraps_at:
        (folder / name / "max_energy_range_uj").write_text(str(wraps_at))
    return folder / name / "energy_uj"


def test_a_platform_that_tells_nothing_has_no_energy(tmp_path):
    assert Energy(tmp_path, gpus=list).joules() == {}


def test_packages_add_up_and_their_parts_do_not_count_twice(tmp_path):
    first = package(tmp_path, "intel-rapl:0", 1_000_000)
    second = package(tmp_path, "intel-rapl:1", 5_000_000)
    package(tmp_path, "intel-rapl:0:0", 700_000)
    energy = Energy(tmp_path, gpus=list)
    first.write_text("3000000")
    second.write_text("5500000")
    assert energy.joules() == {"rapl": 2.5}


def test_a_counter_that_wraps_goes_on(tmp_path):
    counter = package(tmp_path, "intel-rapl:0", 9_000_000, wraps_at=10_000_000)
    energy = Energy(tmp_path, gpus=list)
    counter.write_text("1000000")
    assert energy.joules() == {"rapl": 2.0}


def test_gpus_count_beside_processors(tmp_path):
    levels = iter([10.0, 14.0])
    assert Energy(tmp_path, gpus=lambda: [lambda: next(levels)]).joules() == {"nvml": 4.0}
