"""The two commands of the README, as a user runs them: smoke size always, demo size with -m slow."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

BIN = Path(sys.executable).parent
needs_apt = pytest.mark.skipif(not shutil.which("apt-get"), reason="the embedded corpus comes by apt-get, not here")


def book(run_dir, *words, profile="smoke"):
    command = [BIN / "zipformer-recipes", "book", "run", "--profile", profile, "--run-dir", run_dir, *words]
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=1800, env=env)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("smoke") / "run"
    return run_dir, book(run_dir)


@needs_apt
def test_one_command_runs_every_stage(smoke):
    run_dir, done = smoke
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for stage in ("env", "data", "finetune", "evaluate"):
        assert json.loads((run_dir / f"{stage}.json").read_text())
    wer = json.loads((run_dir / "evaluate.json").read_text())["wer"]
    assert set(wer) == {"zero-shot", "fine-tuned", "fine-tuned+mux"}
    assert all(set(sets) == {"target_test", "source_test"} for sets in wer.values())
    for words in ("zero-shot", "fine-tuned", "executed notebooks", "plots", "site"):
        assert words in done.stdout
    assert list((run_dir / "plots").glob("*.png"))


@needs_apt
def test_every_cell_of_every_stage_ran(smoke):
    run_dir, _ = smoke
    notebooks = sorted((run_dir / "notebooks").glob("*.ipynb"))
    assert [p.stem for p in notebooks] == ["01_env", "03_data", "07_finetune", "08_evaluate"]
    for path in notebooks:
        code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
        assert {c.metadata.papermill.status for c in code} == {"completed"}


@needs_apt
def test_a_second_run_reuses_what_is_there(smoke):
    run_dir, _ = smoke
    before = (run_dir / "exp" / "final.pt").stat().st_mtime_ns
    again = book(run_dir)
    assert again.returncode == 0 and (run_dir / "exp" / "final.pt").stat().st_mtime_ns == before


@needs_apt
def test_a_mistyped_parameter_is_refused_before_anything_runs(tmp_path):
    done = book(tmp_path / "run", "-p", "num_epoch=3")
    assert done.returncode == 2 and "num_epochs" in done.stderr and not (tmp_path / "run").exists()


@needs_apt
@pytest.mark.slow
def test_the_demo_meets_its_numbers(tmp_path):
    done = book(tmp_path / "run", profile="demo")
    assert done.returncode == 0, done.stderr[-3000:]
    wer = json.loads((tmp_path / "run" / "evaluate.json").read_text())["wer"]
    before, after = (wer[m]["target_test"]["wer"] for m in ("zero-shot", "fine-tuned"))
    assert after <= 0.5 * before and wer["zero-shot"]["source_test"]["wer"] < wer["fine-tuned"]["source_test"]["wer"]
