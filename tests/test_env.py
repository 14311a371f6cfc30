"""The doctor: each failure is found in its snapshot, a healthy machine is healthy, what is found reaches the run."""

import copy
import csv
import getpass
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml

from zipformer_recipes import env, finetune
from zipformer_recipes import env_rules as rules
from zipformer_recipes.core import ConfigError, DataError, RecipeError, RunConfig, load_json, save_json

FOLDER = Path(__file__).parent / "snapshots"
CASES = yaml.safe_load((FOLDER / "cases.yaml").read_text())
REFERENCE = rules.STACKS["reference"]


def healthy() -> dict:
    return json.loads((FOLDER / "healthy.json").read_text())


def snapshot(name: str) -> dict:
    "The healthy machine with the facts of a case."
    s = healthy()
    for path, value in CASES[name]["facts"].items():
        *way, last = (int(k) if k.isdigit() else k for k in path.split("."))
        at = s
        for key in way:
            at = at[key]
        if value is None and isinstance(at, list):
            del at[last]
        else:
            at[last] = copy.deepcopy(value)
    return s


@pytest.fixture
def recorded(tmp_path):
    "Writes a snapshot and gives the words that judge it."

    def words(s, *more):
        path = save_json(tmp_path / "s.json", s)
        return ["--snapshot", str(path), "--profile", "dual-4090d", "--run-dir", str(tmp_path / "run"), *more]

    return words


# rules


def test_a_healthy_machine_is_healthy():
    found = rules.judge(healthy(), REFERENCE)
    assert [f for f in found if f.status != "ok"] == [] and rules.exit_status(found) == 0
    assert len(found) > 45 and all(f.why and not f.remedy for f in found)


@pytest.mark.parametrize("name", CASES)
def test_each_failure_is_found_with_its_remedy(name):
    id, status, remedy = CASES[name]["finding"]
    found = rules.judge(snapshot(name), REFERENCE)
    mine = [f for f in found if f.id == id and f.status != "ok"]
    assert mine, [f for f in found if f.status != "ok"]
    assert mine[0].status == status and re.search(remedy, mine[0].remedy), mine
    assert mine[0].found and mine[0].why and CASES[name]["source"]


def test_there_are_enough_cases_and_each_changes_the_verdict():
    assert len(CASES) >= 50
    assert all(rules.worst(rules.judge(snapshot(n), REFERENCE)) != "ok" for n in CASES)


def test_every_rule_that_can_fail_has_a_case():
    "Advice is never wrong; everything else must be seen to fail once."
    seen = {f.id for n in CASES for f in rules.judge(snapshot(n), REFERENCE) if f.status != "ok"}
    silent = {id for id, _, _ in rules.RULES} - seen
    assert silent <= {"advice.workers", "advice.threads", "advice.features"}, silent


def test_no_case_raises_a_false_alarm():
    "Besides its own finding a case may only bring those that follow from the same facts."
    follow = {"k2", "gpu", "system", "packages", "lhotse", "torch", "disk", "collectives", "audio", "python", "doctor"}
    for name in CASES:
        bad = [f.id for f in rules.judge(snapshot(name), REFERENCE) if f.status != "ok"]
        assert len(bad) <= 4 and {b.split(".")[0] for b in bad} <= follow, (name, bad)
        assert not any("could not be judged" in f.found for f in rules.judge(snapshot(name), REFERENCE))


@pytest.mark.parametrize(
    "broken",
    [{}, {"system": None}, {"gpus": [{"index": 0, "name": "x"}]}, {"packages": {"torch": {}}}]
    + [{"k2": {"status": "ok"}}],
)
def test_missing_facts_never_end_the_judgement(broken):
    for stack in rules.STACKS.values():
        found = rules.judge(broken, stack)
        assert all(f.status in rules.STATUSES and "could not be judged" not in f.found for f in found)


def test_any_fact_may_be_missing():
    "Each single fact taken away: no rule stumbles, and none turns silence into an alarm of its own kind."
    for area, facts in healthy().items():
        for key in facts if isinstance(facts, dict) else []:
            s = healthy()
            s[area][key] = None
            assert not any("could not be judged" in f.found for f in rules.judge(s, REFERENCE)), (area, key)


def test_strange_facts_become_a_warning_of_their_rule():
    strange = {"gpus": [{"index": 0, "name": "x", "capability": "banana"}], "torch": {"archs": ["sm_90"]}}
    found = [f for f in rules.judge(strange, REFERENCE) if f.id == "gpu.arch"]
    assert found[0].status == "warning" and "could not be judged" in found[0].found and "--record" in found[0].remedy


def test_failures_of_gpu_or_k2_stop_only_those_who_need_them():
    found = rules.judge(snapshot("k2_crash") | {"gpus": []}, rules.STACKS["cpu"])
    assert any(f.id == "k2.import" and f.status == "failure" for f in found)
    assert not rules.needed_failures(found, rules.STACKS["cpu"])
    crash = rules.judge(snapshot("k2_crash"), REFERENCE)
    assert not rules.needed_failures(crash, REFERENCE)  # the torch loss takes over
    insists = RunConfig.from_profile("dual-4090d", loss_impl="k2")
    assert [f.id for f in rules.needed_failures(crash, env.wanted_of(insists, 2))] == ["k2.import"]
    assert rules.needed_failures(rules.judge(snapshot("driver_too_old"), REFERENCE), REFERENCE)


def test_an_unknown_stack_names_the_nearest():
    with pytest.raises(ConfigError, match="reference"):
        rules.stack_of("refrence")


@pytest.mark.parametrize(
    ("have", "want", "parts", "same"),
    [("2.7.1+cu126", "2.7.1", 3, True), ("2.7.10", "2.7.1", 3, False), ("12.6.3", "12.6", 2, True)]
    + [("3.12.7", "3.12.1", 2, True), ("3.11.7", "3.12.1", 2, False), (None, "2.7.1", 3, False)],
)
def test_versions_are_compared_by_component(have, want, parts, same):
    assert rules.same_version(have, want, parts) is same


# what a run needs


def own_corpus(tmp_path, rows=30, seconds=20.0):
    soundfile.write(tmp_path / "a.wav", np.zeros(int(8000 * seconds), dtype=np.float32), 8000)
    with open(tmp_path / "c.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["audio", "text"])
        writer.writerows([["a.wav", "one"]] * rows + [["gone.wav", "two"]])
    return str(tmp_path / "c.csv")


def test_the_disk_needed_follows_from_the_corpus(tmp_path):
    small, large = (own_corpus(tmp_path, rows) and RunConfig(source=str(tmp_path / "c.csv")) for rows in (30, 30))
    assert 30 * 20 / 3600 <= env.corpus_hours(small) <= 31 * 20 / 3600
    before = env.disk_need(small)
    own_corpus(tmp_path, 30_000)
    assert env.corpus_hours(large) > 100 and env.disk_need(large) > before + 10


def test_checkpoints_count_too(tmp_path):
    (tmp_path / "pretrained.pt").write_bytes(b"0" * 4_000_000)
    cfg = RunConfig(finetune_ckpt=str(tmp_path / "pretrained.pt"), num_epochs=10, source_hours=0)
    more = cfg.replace(num_epochs=10_000, keep_last_k=5_000)
    assert env.disk_need(more) - env.disk_need(cfg) == pytest.approx(16 * 1e6 * 4_990 / 1e9, abs=0.2)


def test_audio_that_is_not_there_is_no_error(tmp_path):
    assert env.audio_files(RunConfig(source=str(tmp_path / "none.csv"))) == []
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    assert env.audio_files(RunConfig(source=str(tmp_path / "binary.csv"))) == []
    assert len(env.audio_files(RunConfig(source=own_corpus(tmp_path, 3)))) == 3
    assert env.audio_files(RunConfig(cache_dir=str(tmp_path / "empty"))) == []


def test_a_profile_says_what_it_needs():
    of = {n: env.wanted_of(RunConfig.from_profile(n)) for n in ("smoke", "demo", "single-gpu", "dual-4090d")}
    assert [(w.name, w.gpus) for w in of.values()] == [("cpu", 0), ("cpu", 0), ("installed", 1), ("reference", 2)]
    assert of["dual-4090d"].disk_gb >= 200 and of["smoke"].disk_gb < 3
    assert env.wanted_of(RunConfig(wanted="cpu", use_fp16=True)).gpus == 0
    assert env.wanted_of(RunConfig(), gpus=1).name == "installed"


# the command


@pytest.mark.parametrize(("name", "code"), [("driver_too_old", 2), ("pcie_x4", 1)])
def test_the_command_judges_a_recorded_snapshot(name, code, recorded, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert env.main(recorded(snapshot(name), "--json", str(out))) == code
    assert CASES[name]["finding"][0] in capsys.readouterr().out
    said = load_json(out)
    assert said["status"] == ("failure" if code == 2 else "warning") and "snapshot" not in said
    assert load_json(tmp_path / "run" / "env.json")["snapshot"] == snapshot(name)


def test_a_healthy_snapshot_ends_with_zero(recorded, capsys):
    assert env.main(recorded(healthy())) == 0
    assert "0 warnings, 0 failures" in capsys.readouterr().out


def test_all_shows_what_is_in_order_too(recorded, capsys):
    env.main(recorded(healthy(), "--all"))
    assert "system.kernel" in capsys.readouterr().out
    env.main(recorded(healthy()))
    assert "system.kernel" not in capsys.readouterr().out


def test_the_wheel_that_fits_is_named(recorded, tmp_path, capsys):
    page = tmp_path / "page.html"
    wheel = "k2-1.24.4.dev20250807+cuda12.6.torch2.7.1-cp312-cp312-manylinux_2_28_x86_64.whl"
    page.write_text(f"<a href='https://example.org/{wheel.replace('+', '%2B')}'>{wheel}</a>")
    env.main(recorded(snapshot("no_k2"), "--wheels", str(page)))
    assert "pip install" in (said := capsys.readouterr().out) and "cuda12.6.torch2.7.1-cp312" in said
    with pytest.raises(DataError):
        env.main(recorded(snapshot("no_k2"), "--wheels", str(tmp_path / "none.html")))


def test_markup_in_facts_is_shown_as_it_is(recorded, capsys):
    s = healthy() | {"k2": {"status": "error", "error": "[red]odd[/nothing] text"}}
    assert env.main(recorded(s)) == 2
    assert "[red]odd" in capsys.readouterr().out


def test_files_that_are_no_snapshots_are_refused(tmp_path):
    bad = {"{}": "no snapshot", '{"schema": 99}': "schema 99", "{": "x.json", "[1]": "no snapshot"}
    for text, words in bad.items():
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(DataError, match=words):
            env.read_snapshot(str(tmp_path / "x.json"))
    with pytest.raises(DataError):
        env.read_snapshot(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["--recrod", "x"], "--record"), (["--num-epoch", "3"], "--num-epochs"), (["--wanted", "refrence"], "reference")]
    + [(["--profile", "demmo"], "demo"), (["stray"], "option"), (["--world-size", "two"], "whole number")],
)
def test_mistakes_name_what_was_meant(words, meant, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "zipformer_recipes.env", *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and meant in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_help_tells_the_exit_status(capsys):
    with pytest.raises(SystemExit) as end:
        env.main(["--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and all(f"--{name}" in said for name in env.OWN) and "Exit status" in said


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    "The doctor on this machine, by the command, recorded."
    folder = tmp_path_factory.mktemp("live")
    words = ["--profile", "smoke", "--run-dir", "run", "--record", "facts.json", "--json", "out.json", "--all"]
    command = [Path(sys.executable).parent / "zipformer-recipes", "env", *words]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=folder, timeout=300)
    return folder, done


def test_the_doctor_looks_at_this_machine(live):
    folder, done = live
    out, facts = load_json(folder / "out.json"), load_json(folder / "facts.json")
    assert done.returncode == ("ok", "warning", "failure").index(out["status"]), done.stderr
    assert out["stops"] == [], [f for f in out["findings"] if f["id"] in out["stops"]]
    assert not any("could not be judged" in f["found"] for f in out["findings"])
    assert load_json(folder / "run" / "env.json")["snapshot"] == facts
    assert facts["python"]["version"] == platform.python_version()
    assert facts["packages"]["torch"]["status"] == facts["packages"]["lhotse"]["status"] == "ok"
    assert facts["collectives"]["status"] in ("ok", "skipped") and facts["audio"]["wav"]["ok"]
    assert "[1m" not in done.stdout and "system.kernel" in done.stdout


def test_the_whole_look_keeps_to_its_time(live):
    "The limit is the doctor's own: probes that do not fit into it are not started, and named."
    facts = load_json(live[0] / "facts.json")
    assert facts["seconds"] < (115 if facts["gpu"]["on_bus"] else 60)


def test_nobody_is_named_in_a_recorded_snapshot(live):
    text = (live[0] / "facts.json").read_text()
    user, host, home = getpass.getuser(), platform.node(), str(Path.home())
    assert len(home) < 3 or home not in text
    for name in (n for n in (user, host) if len(n) > 2 and n != "root"):
        assert not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)


# what is found reaches the run


def test_the_stage_stops_with_every_remedy(tmp_path):
    cfg = RunConfig.from_profile("dual-4090d", run_dir=str(tmp_path))
    s = snapshot("driver_too_old")
    s["system"]["shm_gb"] = 0.06
    with pytest.raises(RecipeError, match="gpu.driver") as stop:
        env.stop_if_unfit(env.verify(cfg, s))
    assert "560.28.03" in str(stop.value) and "--shm-size" in str(stop.value)
    env.stop_if_unfit(env.verify(cfg, snapshot("pcie_x4")))
    env.stop_if_unfit(env.verify(cfg, snapshot("k2_crash")))
    assert load_json(tmp_path / "env.json")["status"] == "failure"


def test_what_works_only_with_a_setting_reaches_the_ranks(tmp_path, monkeypatch):
    cfg = RunConfig.from_profile("dual-4090d", run_dir=str(tmp_path))
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    env.verify(cfg, snapshot("p2p_broken"))
    assert finetune.on_this_machine(cfg) == cfg and os.environ["NCCL_P2P_DISABLE"] == "1"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")  # the user's own word counts more
    finetune.on_this_machine(cfg)
    assert os.environ["NCCL_P2P_DISABLE"] == "0"


def test_a_broken_k2_is_left_alone(tmp_path):
    cfg = RunConfig.from_profile("dual-4090d", run_dir=str(tmp_path))
    env.verify(cfg, snapshot("k2_crash"))
    assert finetune.on_this_machine(cfg).loss_impl == "torch"
    assert finetune.on_this_machine(cfg.replace(loss_impl="k2")).loss_impl == "k2"
    env.verify(cfg, healthy())
    assert finetune.on_this_machine(cfg) == cfg


def test_no_other_variable_comes_from_a_report(tmp_path, monkeypatch):
    cfg = RunConfig(run_dir=str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    save_json(tmp_path / "env.json", {"settings": {"environment": {"LD_PRELOAD": "x.so"}, "loss_impl": ""}})
    finetune.on_this_machine(cfg)
    assert "LD_PRELOAD" not in os.environ
    (tmp_path / "env.json").write_text("{half")
    with pytest.raises(DataError):
        finetune.on_this_machine(cfg)


# the picture and the table


@pytest.mark.parametrize("cards", [0, 1, 2, 8])
def test_any_number_of_cards_is_drawn(cards, tmp_path):
    s = healthy()
    s["gpus"] = [s["gpus"][0] | {"index": i} for i in range(cards)]
    env.plot_machine(s).savefig(tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5_000
    env.plot_machine({}).savefig(tmp_path / "empty.png")


def test_the_table_has_a_row_for_each_finding():
    found = [vars(f) for f in rules.judge(snapshot("small_shm"), REFERENCE)]
    bad = [f for f in found if f["status"] != "ok"]
    assert env.table_of(found).row_count == len(found) + len(bad)
    assert env.table_of(found, everything=False).row_count == 2 * len(bad)


def test_the_chapter_shows_table_and_pictures():
    cells = json.loads((Path(__file__).parents[1] / "nbs" / "01_env.ipynb").read_text())["cells"]
    shown = [o.get("data", {}) for c in cells for o in c.get("outputs", [])]
    assert sum("image/png" in d for d in shown) == 2 and sum("text/html" in d for d in shown) >= 2
