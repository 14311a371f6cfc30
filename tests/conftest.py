"""Shared by all tests: markers, and threads that suit a small machine."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

MARKERS = {
    "slow": "minutes to hours: the whole demo; choose it with -m slow",
    "gpu": "needs a CUDA device",
    "k2": "needs the k2 package, and fetches it where it is missing; choose it with -m k2",
}
CHOSEN = ("slow", "k2")  # markers that run only when named


def pytest_configure(config):
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("markexpr") or ""
    for item in items:
        for name in CHOSEN:
            if item.get_closest_marker(name) and name not in chosen:
                item.add_marker(pytest.mark.skip(reason=f"{name}: choose it with -m {name}"))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch  # here: other tests need not wait for it

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
