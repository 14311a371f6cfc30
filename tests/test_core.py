"""core: settings, their errors, files that are never half written, run folders, progress."""

import dataclasses
import errno
import io
import json
import os
import pickle
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml

from zipformer_recipes import core
from zipformer_recipes.core import ConfigError, DataError, DiskFullError, RecipeError, RunConfig, RunFolderError

GUIDE = (
    "--world-size 2 --num-epochs 20 --start-epoch 1 --manifest-dir data/fbank --exp-dir zipformer/exp --use-fp16 1 "
    "--base-lr 0.0045 --bpe-model data/lang_bpe_500/bpe.model --do-finetune 1 --use-mux 0 "
    "--finetune-ckpt models/pretrained.pt --max-duration 1200 --accum-grad-steps 2 --warmup-steps 5000 --num-workers 16"
)


def test_errors_show_three_lines_and_survive_pickling():
    error = DataError("no text", "a.csv, line 3", "fill it in")
    assert [line.strip() for line in str(error).splitlines()] == [
        "no text", "where:  a.csv, line 3", "remedy: fill it in"]  # fmt: skip
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.what, copy.where, copy.remedy) == (DataError, error.what, error.where, error.remedy)
    assert str(RecipeError("alone")) == "alone"


@pytest.mark.parametrize(
    "typed, meant",
    [("max_duraton", "max_duration"), ("base-rl", "base_lr"), ("USE_FP61", "use_fp16"), ("num_epoch", "num_epochs")],
)
def test_nearest_name(typed, meant):
    assert core.nearest(typed, [f.name for f in dataclasses.fields(RunConfig)]) == meant
    with pytest.raises(ConfigError, match=meant):
        RunConfig.from_profile("demo", **{typed: 1})


def test_nothing_near_is_none():
    assert core.nearest("qqqqqq", ["base_lr", "seed"]) is None


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("use_fp16", "1", True), ("use_fp16", "false", False), ("use_fp16", 0, False), ("num_epochs", "7", 7),
        ("num_epochs", 7.0, 7), ("base_lr", "4.5e-3", 0.0045), ("max_duration", 300, 300.0), ("chunk_size", "16", "16"),
    ],
)  # fmt: skip
def test_values_take_the_type_of_their_field(name, value, expected):
    found = getattr(RunConfig.from_profile("smoke", **{name: value}), name)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    "name, value",
    [
        ("use_fp16", "maybe"), ("use_fp16", 2), ("num_epochs", "2.5"), ("num_epochs", True), ("num_epochs", "x"),
        ("base_lr", "fast"), ("base_lr", float("nan")), ("base_lr", 0), ("max_duration", -1), ("bpe_model", 3),
        ("world_size", 0), ("mux_hours_ratio", 1.0), ("source", ["a.csv"]),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        RunConfig.from_profile("smoke", **{name: value})


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="exclude"):
        RunConfig(use_fp16=True, use_bf16=True)
    with pytest.raises(ConfigError, match="use_transducer"):
        RunConfig(use_transducer=False, use_ctc=False)


def test_profile_then_override(tmp_path):
    shipped = {name: RunConfig.from_profile(name) for name in core.profile_names()}
    assert {"smoke", "demo", "single-gpu", "dual-4090d"} <= set(shipped)
    dual = shipped["dual-4090d"]
    assert (dual.world_size, dual.max_duration, dual.accum_grad_steps, dual.num_epochs) == (2, 1200.0, 2, 20)
    assert (dual.base_lr, dual.use_fp16, dual.num_workers) == (0.0045, True, 16)
    own = tmp_path / "mine.yaml"
    own.write_text(yaml.safe_dump({"base_lr": 0.02, "num_epochs": 3}))
    cfg = RunConfig.from_profile(str(own), num_epochs=5, base_lr=None)
    assert (cfg.base_lr, cfg.num_epochs, cfg.run_dir) == (0.02, 5, "runs/mine")


def test_bad_profiles(tmp_path):
    with pytest.raises(ConfigError, match="dual-4090d"):
        RunConfig.from_profile("dual-4090")
    for text in ("- a\n- b\n", "base_lr: [", "base_rl: 1\n"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError):
            RunConfig.from_profile(str(tmp_path / "bad.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.from_profile(str(tmp_path / "missing.yaml"))


def test_the_guides_line_is_read_word_for_word():
    cfg = core.parse_cli(GUIDE.split(), "finetune")
    assert (cfg.world_size, cfg.warmup_steps, cfg.num_workers) == (2, 5000, 16)
    assert cfg.use_fp16 and cfg.do_finetune and not cfg.use_mux
    assert cfg.path("exp").as_posix() == "zipformer/exp" and cfg.path("data").as_posix() == "data/fbank"


def test_command_line_forms():
    cfg = core.parse_cli(["--profile=smoke", "--use-mux", "--base-lr=0.01", "--lr-epochs", "3"])
    assert (cfg.profile, cfg.use_mux, cfg.base_lr, cfg.lr_epochs) == ("smoke", True, 0.01, 3.0)
    with pytest.raises(ConfigError) as caught:
        core.parse_cli(["--max-duratoin", "3"], "finetune")
    assert "--max-duration" in caught.value.remedy
    with pytest.raises(ConfigError, match="not an option"):
        core.parse_cli(["base_lr", "3"])


def test_help_lists_every_setting_with_its_note(capsys):
    with pytest.raises(SystemExit) as caught:
        core.parse_cli(["--help"], "finetune")
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 0
    for f in dataclasses.fields(RunConfig):
        line = next(line for line in lines if line.split()[:1] == [f"--{f.name.replace('_', '-')}"])
        assert len(line.split(None, 1)) == 2, f"{f.name} has no note"


def test_exit_codes(capsys):
    def fails(argv):
        raise ConfigError("bad", "here", "fix")

    def stopped(argv):
        raise KeyboardInterrupt

    assert (core.exit_code(fails, []), core.exit_code(stopped, []), core.exit_code(lambda argv: 0, [])) == (2, 130, 0)
    assert "remedy: fix" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        core.exit_code(lambda argv: 1 / 0, [])


def test_script_entry_runs_only_under_python_m():
    core.script_entry({"__name__": "__main__", "main": lambda argv: 1 / 0})
    core.script_entry({"__name__": "x", "__file__": "x.py", "__spec__": 1, "main": lambda argv: 1 / 0})
    with pytest.raises(SystemExit) as caught:
        core.script_entry({"__name__": "__main__", "__file__": "x.py", "__spec__": 1, "main": lambda argv: 3})
    assert caught.value.code == 3


def test_full_disk_leaves_the_old_file(tmp_path):
    path = core.save_json(tmp_path / "a.json", {"a": 1})

    def through_torch(file):
        class Full(io.RawIOBase):
            def writable(self):
                return True

            def write(self, data):
                raise OSError(errno.ENOSPC, "No space left on device")

        torch.save({"w": torch.zeros(3)}, Full())

    def direct(file):
        file.write(b"half")
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    for write in (through_torch, direct):
        with pytest.raises(DiskFullError) as caught:
            core.atomic_write(path, write)
        assert caught.value.remedy
    assert core.load_json(path) == {"a": 1} and os.listdir(tmp_path) == ["a.json"]


def test_other_errors_pass_and_clean_up(tmp_path):
    with pytest.raises(ZeroDivisionError):
        core.atomic_write(tmp_path / "a", lambda f: 1 / 0)
    assert os.listdir(tmp_path) == []


def test_kill_in_the_middle_of_a_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    code = (
        "import sys, time\nfrom zipformer_recipes.core import atomic_write\n"
        "def write(f):\n    f.write(b'n' * 100000)\n    f.flush()\n    print('half', flush=True)\n    time.sleep(60)\n"
        "atomic_write(sys.argv[1], write)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"half\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert path.read_bytes() == b"old"


def test_json_of_scientific_types(tmp_path):
    values = {"a": np.arange(2), "b": torch.tensor(1.5), "p": tmp_path, "s": {3, 1}, "ä": "ü"}
    core.save_json(tmp_path / "a.json", values)
    assert core.load_json(tmp_path / "a.json") == {"a": [0, 1], "b": 1.5, "p": str(tmp_path), "s": [1, 3], "ä": "ü"}
    with pytest.raises(TypeError):
        core.save_json(tmp_path / "b.json", {"x": object()})
    (tmp_path / "c.json").write_text('{"a": ')
    with pytest.raises(DataError, match="JSON"):
        core.load_json(tmp_path / "c.json")


def test_reports(tmp_path):
    assert core.write_report(tmp_path, "data", {"n": 1}) == tmp_path / "data.json"
    assert core.read_report(tmp_path, "data") == {"n": 1}
    with pytest.raises(RunFolderError, match="evaluate"):
        core.read_report(tmp_path, "evaluate")


def test_run_folder_belongs_to_its_data_and_model(tmp_path):
    corpus = tmp_path / "c.csv"
    corpus.write_text("audio,text\n")
    cfg = RunConfig.from_profile("smoke", run_dir=tmp_path / "run", source=corpus)
    core.open_run(cfg)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"] == cfg.to_dict() and record["versions"]["torch"] == core.versions()["torch"]
    assert record["seed"] == cfg.seed and record["inputs"]["source"] == core.file_digest(corpus)
    core.open_run(cfg.replace(base_lr=0.01, num_epochs=9, use_mux=True, start_epoch=2))
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(RunFolderError) as caught:
        core.open_run(cfg.replace(max_utts=3, causal=True))
    assert f"max_utts: {cfg.max_utts} before, 3 now" in caught.value.what and "causal" in caught.value.what
    assert "--run-dir" in caught.value.remedy
    corpus.write_text("audio,text\na.wav,A\n")
    with pytest.raises(RunFolderError, match="source: the file has changed"):
        core.open_run(cfg)
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_run_folder_compares_paths_not_spellings(tmp_path, monkeypatch):
    (tmp_path / "c.csv").write_text("audio,text\n")
    monkeypatch.chdir(tmp_path)
    cfg = RunConfig.from_profile("smoke", run_dir="run", source="c.csv")
    core.open_run(cfg)
    core.open_run(cfg.replace(source=str(tmp_path / "c.csv")))
    whole = core.absolute_paths(cfg.replace(train_cuts="giga_cuts_S.jsonl.gz"))
    assert whole.source == str(tmp_path / "c.csv") and whole.run_dir == str(tmp_path / "run")
    assert whole.train_cuts == "giga_cuts_S.jsonl.gz", "a name within manifest_dir stays a name"


def test_progress_prints_plain_lines_with_rate_and_time_left(capsys, monkeypatch):
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(core.time, "monotonic", lambda: next(clock))
    assert list(core.progress(iter(range(20)), "reading", total=20, unit="files")) == list(range(20))
    lines = capsys.readouterr().out.splitlines()
    assert 8 <= len(lines) <= 12 and lines[0] == "reading: 2/20 (10 %) files, 6 s, 0.3 files/s, 54 s left"
    assert lines[-1].startswith("reading: 20/20 (100 %) files")


def test_progress_without_total_and_empty(capsys):
    assert list(core.progress(iter("ab"), "x")) == ["a", "b"] and list(core.progress([], "y")) == []
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == ["x: 2 it", "y: 0 it"]


def test_seeds_repeat():
    def draw():
        core.seed_all(11)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draw() == draw()


def test_threads(tmp_path, monkeypatch):
    before = torch.get_num_threads()
    try:
        (tmp_path / "quota").write_text("200000 100000\n")
        (tmp_path / "none").write_text("max 100000\n")
        monkeypatch.setattr(core.os, "sched_getaffinity", lambda pid: set(range(8)))
        assert core.available_cores(tmp_path / "quota") == 2 and core.available_cores(tmp_path / "none") == 8
        monkeypatch.setattr(core, "available_cores", lambda: 8)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert core.set_threads() == torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert core.set_threads() == 1 and core.set_threads(3) == 3
    finally:
        torch.set_num_threads(before)


def test_lines_wait_for_time_to_pass(capsys):
    list(core.progress(range(1000), "fast"))
    assert len(capsys.readouterr().out.splitlines()) == 1
