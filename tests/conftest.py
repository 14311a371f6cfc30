"""Shared by all tests: markers, and threads that suit a small machine."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

MARKERS = {
    "slow": "minutes to hours: the whole demo; choose it with -m slow",
    "gpu": "needs a CUDA device",
    "k2": "needs the k2 package",
}


def pytest_configure(config):
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("markexpr") or ""
    for item in items:
        if item.get_closest_marker("slow") and "slow" not in chosen:
            item.add_marker(pytest.mark.skip(reason="slow: choose it with -m slow"))
