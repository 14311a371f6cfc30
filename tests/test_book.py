"""book: toy stage notebooks run by papermill; refusals, reuse, failures, the closing table, the console script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from rich.console import Console

from zipformer_recipes import book
from zipformer_recipes.core import ConfigError, RunConfig, RunFolderError, ToolError, open_run, write_report

PARAMETERS = 'profile = "smoke"\nrun_dir = ""\nextra: dict = {}\nseed = None  # random streams\n'
NOTE = "from pathlib import Path\nlog = Path(run_dir) / 'log.txt'\nlog.open('a').write('{name} ')\n"


def toy(folder, stem, *cells, parameters=PARAMETERS):
    name = stem.partition("_")[2]
    tagged = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    code = [nbformat.v4.new_code_cell(text) for text in (NOTE.replace("{name}", name), *cells)]
    nb = nbformat.v4.new_notebook(cells=[tagged, *code])
    nb.metadata["kernelspec"] = {"name": "python3", "display_name": "python3", "language": "python"}
    nbformat.write(nb, folder / f"{stem}.ipynb")


@pytest.fixture
def nbs(tmp_path):
    folder = tmp_path / "nbs"
    folder.mkdir()
    toy(folder, "03_data", "print('reading', seed)")
    toy(folder, "07_finetune", "assert extra.get('base_lr', 0) < 1, 'the rate is too high'")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), folder / "04_library.ipynb")
    return folder


@pytest.fixture
def command(nbs, tmp_path, monkeypatch):
    "`zipformer-recipes book run` on the toy notebooks."
    monkeypatch.setattr(book, "notebooks_folder", lambda: nbs)
    run_dir = tmp_path / "run"
    return lambda *words: book.main(["book", "run", "--profile", "smoke", "--run-dir", str(run_dir), *words])


@pytest.fixture
def no_kernel(monkeypatch):
    "Runs the cells of a toy stage in this process: for what does not depend on kernels."

    def execute(stage, parameters, output):
        first, *cells = nbformat.read(stage.path, as_version=4).cells
        space = {}
        exec(first.source, space)
        space.update(parameters)
        for cell in cells:
            exec(cell.source, space)
        nbformat.write(nbformat.read(stage.path, as_version=4), output)

    monkeypatch.setattr(book, "execute", execute)


def log(tmp_path):
    return (tmp_path / "run" / "log.txt").read_text().split()


def test_runs_in_order_reuses_and_repeats_only_what_a_setting_reaches(no_kernel, command, tmp_path, capsys):
    assert command("-p", "seed=7") == 0
    first = capsys.readouterr().out
    assert "reading 7" in first and "04_library" not in first
    assert log(tmp_path) == ["data", "finetune"]
    assert {"03_data.ipynb", "07_finetune.ipynb"} <= set(os.listdir(tmp_path / "run" / "notebooks"))

    assert command("-p", "seed=7") == 0
    second = capsys.readouterr().out
    assert log(tmp_path) == ["data", "finetune"] and second.count("reused, its settings are unchanged") == 2

    assert command("-p", "seed=7", "--base-lr", "0.5") == 0
    assert log(tmp_path) == ["data", "finetune", "finetune"]
    assert command("-p", "seed=8", "--base-lr", "0.5") == 0
    assert log(tmp_path)[3:] == ["data", "finetune"]


def test_changed_code_runs_again(no_kernel, command, nbs, tmp_path):
    assert command() == 0
    toy(nbs, "07_finetune", "print('new code')")
    assert command() == 0
    assert log(tmp_path) == ["data", "finetune", "finetune"]


def test_a_stage_depends_on_the_modules_it_uses_directly_or_not(tmp_path, monkeypatch):
    for name, text in {"a": "from .b import x", "b": "import zipformer_recipes.c", "c": "", "d": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(book.zipformer_recipes, "__file__", str(tmp_path / "__init__.py"))
    assert list(book.module_digests("from zipformer_recipes.a import y")) == ["a", "b", "c"]
    assert list(book.module_digests("from zipformer_recipes import d, c")) == ["c", "d"]


def test_a_lost_report_runs_again(no_kernel, command, nbs, tmp_path):
    toy(nbs, "03_data", "(Path(run_dir) / 'data.json').write_text('{}')")
    assert command() == 0
    (tmp_path / "run" / "data.json").unlink()
    assert command() == 0
    assert log(tmp_path).count("data") == 2


def test_a_failing_stage_ends_with_its_own_error(command, tmp_path, capfd):
    assert command("-p", "base_lr=5") == 2
    shown = capfd.readouterr()
    partial = tmp_path / "run" / "notebooks" / "07_finetune.ipynb"
    lines = shown.err.strip().splitlines()
    assert lines[-1] == "AssertionError: the rate is too high"
    assert str(partial) in shown.err and "--from finetune" in shown.err and "Traceback" not in shown.err
    saved = nbformat.read(partial, as_version=4)
    assert any(out.output_type == "error" for c in saved.cells for out in c.get("outputs", []))

    assert command("-p", "base_lr=0.5") == 0, "the same folder goes on after the repair"
    assert log(tmp_path) == ["data", "finetune", "finetune"]


def test_from_keeps_what_is_before_and_repeats_the_rest(no_kernel, command, tmp_path, capsys):
    with pytest.raises(RunFolderError, match="data has not been finished"):
        book.run_book("smoke", tmp_path / "run", from_stage="finetune", nbs=book.notebooks_folder())
    assert command() == 0
    assert command("--from", "finetune") == 0
    assert log(tmp_path) == ["data", "finetune", "finetune"]
    assert command("--from", "finetun") == 2
    assert "did you mean finetune?" in capsys.readouterr().err


def test_what_the_doctor_sees_is_looked_at_anew_and_changes_no_number(no_kernel, command, nbs, tmp_path, monkeypatch):
    toy(nbs, "01_env")
    assert command() == 0 and command() == 0
    assert log(tmp_path) == ["env", "data", "finetune"]
    assert command("-p", "wanted=cpu") == 0
    monkeypatch.setattr(book, "machine_now", lambda: ("another kernel", "driver 999", ["a card"]))
    assert command("-p", "wanted=cpu") == 0
    assert log(tmp_path)[3:] == ["env", "env"], "what was trained before stays as it is"
    book.marker_path(tmp_path / "run", book.find_stages(nbs)[0]).unlink()
    assert command("--from", "finetune", "-p", "wanted=cpu") == 0
    assert log(tmp_path)[5:] == ["env", "finetune"]


def test_what_was_trained_on_older_data_is_not_taken_for_new(no_kernel, command, tmp_path):
    assert command() == 0
    assert command("--from", "finetune", "-p", "seed=9") == 0
    assert command("-p", "seed=9") == 0
    assert log(tmp_path) == ["data", "finetune", "finetune", "data", "finetune"]


@pytest.mark.parametrize(
    "words, meant",
    [
        (["-p", "base_rl=1"], "did you mean base_lr?"), (["-p", "num_epochs=two"], "whole number"),
        (["-p", "seed"], "-p name=value"), (["--max-duratoin", "3"], "did you mean max_duration?"),
        (["--profile", "demmo"], "did you mean demo?"), (["--from", "fintune"], "did you mean finetune?"),
        (["stray"], "not an option"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_before_anything_runs(command, tmp_path, capsys, words, meant):
    assert command(*words) == 2
    shown = capsys.readouterr()
    assert meant in shown.err and "Traceback" not in shown.err
    assert not (tmp_path / "run").exists()


def test_another_runs_folder_is_refused_before_anything_runs(command, tmp_path, capsys):
    open_run(RunConfig.from_profile("smoke", run_dir=tmp_path / "run"))
    assert command("-p", "max_utts=3") == 2
    assert "max_utts" in capsys.readouterr().err and not (tmp_path / "run" / "log.txt").exists()


def test_a_setting_the_notebook_cannot_take_is_refused(nbs, tmp_path):
    toy(nbs, "08_evaluate", parameters='profile = "smoke"\nrun_dir = ""\n')
    with pytest.raises(ConfigError, match="evaluate does not take base_lr"):
        book.run_book("smoke", tmp_path / "run", {"base_lr": 0.1}, nbs=nbs)
    assert not (tmp_path / "run").exists()


def test_the_kernel_is_this_interpreter(nbs, tmp_path, monkeypatch, capsys):
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": ["false"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    toy(nbs, "03_data", "import os, sys\nprint(sys.executable, os.getcwd(), os.environ['IN_TEST'])")
    (nbs / "07_finetune.ipynb").unlink()
    book.run_book("smoke", tmp_path / "run", nbs=nbs)
    assert f"{sys.executable} {nbs} 1" in capsys.readouterr().out
    assert "IN_TEST" not in os.environ


def test_a_kernel_that_dies_is_a_stage_error(nbs, tmp_path):
    toy(nbs, "03_data", "import os\nos._exit(9)")
    with pytest.raises(book.StageError) as caught:
        book.run_book("smoke", tmp_path / "run", nbs=nbs)
    assert "DeadKernelError" in str(caught.value).splitlines()[-1] and "memory" in caught.value.remedy
    assert Path(caught.value.where).exists()


def test_relative_paths_mean_the_callers_folder(nbs, tmp_path, monkeypatch):
    (tmp_path / "c.csv").write_text("audio,text\n")
    monkeypatch.chdir(tmp_path)
    toy(nbs, "03_data", "assert Path(extra['source']).is_file(), extra")
    book.run_book("smoke", "run", {"source": "c.csv"}, nbs=nbs)
    assert log(tmp_path) == ["data", "finetune"]


def test_pictures_are_saved(nbs, tmp_path):
    draw = "import matplotlib.pyplot as plt\nfig, ax = plt.subplots(figsize=(1, 1))\nplt.show()"
    toy(nbs, "03_data", "%matplotlib inline\n" + draw)
    book.run_book("smoke", tmp_path / "run", nbs=nbs)
    saved = list((tmp_path / "run" / "plots").iterdir())
    assert [p.name for p in saved] == ["03_data-1.png"] and saved[0].read_bytes()[:4] == b"\x89PNG"


def test_notebooks_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(book.zipformer_recipes, "__file__", str(tmp_path / "pkg" / "__init__.py"))
    with pytest.raises(ToolError) as caught:
        book.notebooks_folder()
    assert "pip install -e" in caught.value.remedy


def test_closing_table(tmp_path, capsys):
    def row(target, source):
        return {"target_test": {"wer": target / 200, "errors": target, "words": 200},
                "source_test": {"wer": source / 400, "errors": source, "words": 400}}  # fmt: skip

    wer = {"zero-shot": row(160, 40), "fine-tuned": row(50, 100), "fine-tuned+mux": row(52, 44)}
    write_report(tmp_path, "evaluate", {"wer": wer})
    result = {"data": {"seconds": 3.2, "state": "reused"}, "finetune": {"seconds": 200.0, "state": "run"}}
    book.show_results(tmp_path, result, Console(width=100))
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "fine-tuned+mux" in line)
    assert "26.00 (52/200)" in line and "11.00 (44/400)" in line
    assert "80.00 (160/200)" in text and "all that ran" in text and "200" in text
    assert str(tmp_path / "notebooks") in text and str(tmp_path / "plots") in text and "site" in text


def test_closing_table_without_scores(tmp_path, capsys):
    book.show_results(tmp_path, {"data": {"seconds": 1.0, "state": "run"}}, Console(width=100))
    assert "data" in capsys.readouterr().out


def test_verbs(capsys, monkeypatch):
    assert book.main(["evalute"]) == 2 and "did you mean evaluate?" in capsys.readouterr().err
    assert book.main([]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in book.VERBS)
    monkeypatch.setitem(book.VERBS, "not_there", "x")
    assert book.main(["not_there"]) == 2 and "not part of this version" in capsys.readouterr().err
    assert book.book_main(["profiles"]) == 0 and "dual-4090d" in capsys.readouterr().out


def test_verbs_are_loaded_when_used():
    heavy = ("torch", "lhotse", "papermill")
    code = f"import sys, zipformer_recipes.book\nprint([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_console_script():
    script = Path(sys.executable).parent / "zipformer-recipes"
    if not script.exists():
        pytest.skip("the console script is not installed in this environment")
    done = subprocess.run([script, "bok", "run"], capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean book?" in done.stderr and "Traceback" not in done.stderr
    words = [sys.executable, "-m", "zipformer_recipes.book", "--version"]
    module = subprocess.run(words, capture_output=True, text=True)
    assert module.returncode == 0 and module.stdout.strip() == book.zipformer_recipes.__version__
