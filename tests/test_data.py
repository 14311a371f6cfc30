"""The data stage as a user meets it: one call, anything in, everything counted, everything repeatable."""

import csv
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from lhotse import CutSet, Fbank, FbankConfig, LilcomChunkyWriter, MonoCut, Recording, SupervisionSegment
from toy import WORDS, tone_speech, write_corpus, write_model, write_run

from zipformer_recipes import data, finetune
from zipformer_recipes.batches import load_cuts, loader_of, open_cuts
from zipformer_recipes.core import ConfigError, DataError, RunConfig, RunFolderError, read_report
from zipformer_recipes.text import Normalizer

NUMBERS = dict(zip(WORDS, (1, 2, 3, 4, 5, 6, 7), strict=True))


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def settings(folder, model, source, **more):
    own = dict(run_dir=str(folder / "run"), source=str(source), source_hours=0, finetune_ckpt=str(model))
    own |= {"max_duration": 8, "bpe_model": str(model.parent / "bpe.model"), "policy": "text_in_two_splits=keep"}
    return RunConfig.from_profile("demo", **own | {"world_size": 1, "max_utts": 0} | more)


def manifest(cfg, split):
    return cfg.path("data") / f"target_{split}_cuts.jsonl.gz"


# the stage


def test_the_stage_report_counts_everything(cfg):
    report = read_report(cfg.run_dir, "data")
    counts = {n: s["utterances"] for n, s in report["sets"].items()}
    assert counts == {"target_train": 15, "target_dev": 5, "target_test": 4}
    total = report["checks"]["total"]
    assert total["in"]["utterances"] == total["kept"]["utterances"] + total["set aside"]["utterances"] == 24
    assert report["unknown_share"] == 0 and report["dry_run"]["used_share"] > 0.999 and report["quarantined"] == []
    assert report["workers"]["best"] in [r["workers"] for r in report["workers"]["measured"]]
    assert {"bpe.model", "normalizer.json", "checks.json", "quarantine.jsonl"} <= set(os.listdir(cfg.path("data")))


def test_a_second_run_computes_nothing_again_and_gives_the_same(cfg):
    stored = sorted(cfg.path("data").glob("*.lca"))
    before = [(p, p.stat().st_mtime_ns) for p in stored]
    first = manifest(cfg, "train").read_bytes()
    data.prepare(cfg)
    assert [(p, p.stat().st_mtime_ns) for p in stored] == before and manifest(cfg, "train").read_bytes() == first


def test_two_runs_of_the_same_settings_are_equal(tmp_path, model):
    source, made = write_corpus(tmp_path / "c"), []
    for name in ("a", "b"):
        own = settings(tmp_path / name, model, source)
        data.prepare(own)
        made.append((manifest(own, "train").read_bytes(), load_cuts(manifest(own, "train"))[3].load_features()))
    assert made[0][0] == made[1][0] and np.array_equal(made[0][1], made[1][1])


def test_the_command_takes_source_and_columns(tmp_path, model):
    write_corpus(tmp_path / "c")
    rows = list(csv.DictReader(open(tmp_path / "c" / "corpus.csv")))
    with open(tmp_path / "c" / "other.tsv", "w", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerows([["clip", "said", "part"], *([r["audio"], r["text"], r["split"]] for r in rows)])
    words = [sys.executable, "-m", "zipformer_recipes.data", "--source", str(tmp_path / "c" / "other.tsv")]
    words += ["--columns", "audio=clip,text=said,split=part", "--run-dir", str(tmp_path / "run"), "--source-hours", "0"]
    words += ["--bpe-model", str(model.parent / "bpe.model"), "--max-duration", "8", "--world-size", "1"]
    done = subprocess.run([*words, "--policy", "text_in_two_splits=keep"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "target_train" in done.stdout and "quarantined 0" in done.stdout
    done = subprocess.run([*words, "--policy", "text_in_two_split=keep"], capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean text_in_two_splits" in done.stderr


def test_other_settings_in_a_prepared_folder_are_refused(cfg):
    with pytest.raises(RunFolderError, match="source"):
        data.prepare(cfg.replace(source="other.csv"))


def test_a_refused_stage_binds_nothing(tmp_path, model):
    "After a refusal the settings may be changed in the same folder."
    path = write_corpus(tmp_path / "c", 30)
    for i in range(4):
        (tmp_path / "c" / "wav" / f"{5 * i}.wav").unlink()
    own = settings(tmp_path, model, path)
    with pytest.raises(DataError, match="13.3 % of the utterances are set aside"):
        data.prepare(own)
    assert not (tmp_path / "run" / "data.json").exists()
    assert len((own.path("data") / "quarantine.jsonl").read_text().splitlines()) == 4
    report = data.prepare(own.replace(max_removed=0.2, min_seconds=0.1))
    assert report["sets"]["target_train"]["utterances"] == 14 and len(report["quarantined"]) == 4


def test_an_empty_set_is_named_and_a_missing_one_is_made(tmp_path, model):
    path = write_corpus(tmp_path / "c", 60)
    text = path.read_text().replace(",dev", ",train").replace(",test", ",train")
    path.write_text(text)
    report = data.prepare(settings(tmp_path, model, path))
    assert "there was no dev and test set" in report["remarks"][0] and min(
        s["utterances"] for s in report["sets"].values()
    )
    path.write_text(text.replace(",train", ",dev"))
    with pytest.raises(DataError, match="train and test would be empty"):
        data.prepare(settings(tmp_path / "b", model, path))


# D1 to D15: the whole stage


@pytest.mark.parametrize("shape", ["jsonl", "folder", "kaldi", "nemo", "cuts"])
def test_D1_any_shape_of_the_same_corpus_gives_the_same_cuts(tmp_path, model, shape):
    path = write_corpus(tmp_path / "c")
    rows = list(csv.DictReader(open(path)))
    for r in rows:
        r["audio"] = str(tmp_path / "c" / r["audio"])
    base = settings(tmp_path / "csv", model, path)
    data.prepare(base)
    own = settings(tmp_path / shape, model, written_as(shape, rows, tmp_path / shape))
    data.prepare(own)
    for split in ("train", "dev", "test"):
        ours, theirs = load_cuts(manifest(base, split)), load_cuts(manifest(own, split))
        assert sorted(c.supervisions[0].text for c in ours) == sorted(c.supervisions[0].text for c in theirs)
        assert sorted(c.duration for c in ours) == sorted(c.duration for c in theirs)


def written_as(shape, rows, folder):
    "The rows of a CSV in another shape; what to give as source."
    folder.mkdir(parents=True, exist_ok=True)
    parts = {s: [r for r in rows if r["split"] == s] for s in ("train", "dev", "test")}
    if shape == "jsonl":
        (folder / "all.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return folder / "all.jsonl"
    if shape == "folder":
        for split, some in parts.items():
            (folder / "audio" / split).mkdir(parents=True)
            for r in some:
                shutil.copy(r["audio"], folder / "audio" / split)
                (folder / "audio" / split / Path(r["audio"]).name).with_suffix(".txt").write_text(r["text"])
        return ",".join(f"{s}={folder / 'audio' / s}" for s in parts)
    for split, some in parts.items():
        if shape == "kaldi":
            (folder / "data" / split).mkdir(parents=True)
            ids = [f"{split}-{i:03d}" for i in range(len(some))]
            for name, key in (("wav.scp", "audio"), ("text", "text")):
                lines = [f"{i} {r[key]}\n" for i, r in zip(ids, some, strict=True)]
                (folder / "data" / split / name).write_text("".join(lines))
        if shape == "nemo":
            lines = [{"audio_filepath": r["audio"], "duration": 1.0, "text": r["text"]} for r in some]
            for line in lines:
                line["duration"] = soundfile.info(line["audio_filepath"]).duration
            (folder / f"{split}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if shape == "cuts":
            made = []
            for r in some:
                rec = Recording.from_file(r["audio"])
                sup = SupervisionSegment(rec.id, rec.id, 0, rec.duration, text=r["text"])
                made.append(MonoCut(rec.id, 0, rec.duration, 0, [sup], recording=rec))
            CutSet.from_cuts(made).to_file(folder / f"mine_cuts_{split}.jsonl.gz")
    if shape == "nemo":
        return ",".join(f"{s}={folder / s}.json" for s in parts)
    return folder / "data" if shape == "kaldi" else folder


def test_D2_the_stage_says_what_an_epoch_uses_and_refuses_a_fraction(tmp_path, model):
    path = write_corpus(tmp_path / "c", 40, words=4)
    with pytest.raises(DataError, match="would be trained on|as short as max_duration"):
        data.prepare(settings(tmp_path, model, path, max_duration=1.0))
    seen = data.prepare(settings(tmp_path, model, path, max_duration=8, world_size=2))["dry_run"]
    assert len(set(seen["batches_per_rank"])) == 1 and seen["used_share"] == pytest.approx(1)


def test_D3_tokens_are_compared_with_frames_at_the_fastest_speed(tmp_path, model):
    path = write_corpus(tmp_path / "c", 100, words=4)
    tokens = data.Tokenizer(model.parent / "bpe.model")
    text = " ".join(list(WORDS) * 3)
    count, frames = len(tokens.encode(text)), None
    for n in range(8, 2000):  # just enough frames at speed 1, too few at 1.1
        if ((n - 7) // 2 + 1) // 2 == count:
            frames = n
            break
    soundfile.write(tmp_path / "c" / "wav" / "tight.wav", tone_speech(text, 16000)[: frames * 160], 16000)
    with open(path, "a") as file:
        file.write(f"wav/tight.wav,{text.lower()},train\n")
    plain = data.prepare(settings(tmp_path / "a", model, path))
    assert plain["quarantined"] == []
    fast = data.prepare(settings(tmp_path / "b", model, path, speed_perturb="0.9,1.1"))
    assert [r["reason"] for r in fast["quarantined"]] == ["tokens_exceed_frames"]


def test_D5_thresholds_are_settings_and_what_they_remove_is_counted(tmp_path, model):
    path = write_corpus(tmp_path / "c", 60)
    with pytest.raises(DataError, match="too_long"):
        data.prepare(settings(tmp_path, model, path, max_seconds=1.0))
    report = data.prepare(settings(tmp_path / "b", model, path, max_seconds=1.0, max_removed=0.9))
    removed = report["checks"]["kinds"]["too_long"]["drop"]
    assert removed["utterances"] > 5 and removed["hours"] > 0
    assert max(c.duration for c in load_cuts(manifest(settings(tmp_path / "b", model, path), "train"))) <= 1.0


def test_D6_mixed_rates_and_stereo_become_one(tmp_path, model):
    path, rng = write_corpus(tmp_path / "c"), random.Random(0)
    rows = list(csv.DictReader(open(path)))
    for i in range(24):
        rate = rng.choice((8000, 16000, 44100))
        x = tone_speech(rows[i]["text"].upper(), rate, seed=i)
        soundfile.write(tmp_path / "c" / "wav" / f"{i}.wav", np.stack([x, 0.2 * x], 1) if i % 3 else x, rate)
    own = settings(tmp_path, model, path, policy="text_in_two_splits=keep,audio_duplicate=keep,audio_two_texts=keep")
    report = data.prepare(own)
    assert len(report["checks"]["rates"]) == 3 and set(report["checks"]["channels"]) == {"1", "2"}
    cuts = load_cuts(manifest(own, "train"))
    assert {c.sampling_rate for c in cuts} == {16000} and all(c.load_audio().shape[0] == 1 for c in cuts)


def test_D7_lower_case_and_digits_are_written_as_the_tokenizer_needs(tmp_path, model):
    path = write_corpus(tmp_path / "c")
    text = path.read_text()
    for word, number in NUMBERS.items():
        if number <= 5:
            text = text.replace(word.lower(), str(number))
    path.write_text(text)
    own = settings(tmp_path, model, path)
    report = data.prepare(own)
    assert report["text"]["unknown_before"] > 0.3 and report["unknown_share"] == 0
    assert all(set(c.supervisions[0].text.split()) <= set(WORDS) for c in load_cuts(manifest(own, "train")))
    saved = Normalizer.load(own.path("data") / "normalizer.json")
    assert saved("one 2, star!") == "ONE TWO STAR"


def test_D7_text_of_another_language_is_refused(tmp_path, model):
    path = write_corpus(tmp_path / "c")
    path.write_text(path.read_text().replace("one", "раз").replace("two", "два"))
    with pytest.raises(DataError, match="unknown to the tokenizer"):
        data.prepare(settings(tmp_path, model, path))


def test_D9_durations_are_those_of_the_samples(cfg):
    for cut in load_cuts(manifest(cfg, "train")):
        assert cut.load_audio().shape[1] == round(cut.duration * 16000) == cut.num_samples
        assert cut.supervisions[0].duration == cut.duration and cut.supervisions[0].start == 0
        assert cut.load_features().shape == (cut.num_frames, 80)


def test_D11_bad_files_are_set_aside_and_the_rest_goes_on(tmp_path, model):
    path = write_corpus(tmp_path / "c", 100)
    wav = tmp_path / "c" / "wav"
    (wav / "0.wav").unlink()
    (wav / "1.wav").write_bytes(b"RIFF not audio")
    (wav / "5.wav").write_bytes(b"")
    (wav / "6.wav").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    own = settings(tmp_path, model, path)
    report = data.prepare(own)
    reasons = {r["reason"] for r in report["quarantined"]}
    assert reasons == {"audio_missing", "audio_unreadable", "audio_empty", "lfs_pointer"}
    assert sum(s["utterances"] for s in report["sets"].values()) == 96
    rows = [json.loads(line) for line in (own.path("data") / "quarantine.jsonl").read_text().splitlines()]
    assert all(f["remedy"] for r in rows for f in r["faults"]) and all(r["where"] for r in rows)


def test_D12_the_prepared_folder_survives_a_move(tmp_path, model):
    own = settings(tmp_path / "a", model, write_corpus(tmp_path / "a" / "c"))
    data.prepare(own)
    shutil.move(tmp_path / "a", tmp_path / "b")
    cuts = open_cuts(tmp_path / "b" / "run" / "data" / "target_train_cuts.jsonl.gz")
    assert cuts[0].load_features().shape[1] == 80 and cuts[0].load_audio().size


def test_D13_a_tokenizer_that_is_a_git_lfs_pointer(tmp_path, model):
    pointer = tmp_path / "bpe.model"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    own = settings(tmp_path, model, write_corpus(tmp_path / "c"), bpe_model=str(pointer))
    with pytest.raises(DataError, match="git lfs pull"):
        data.prepare(own)


def test_D14_what_two_splits_share_leaves_training(tmp_path, model):
    path = write_corpus(tmp_path / "c", 100)
    rows = list(csv.DictReader(open(path)))
    held = {r["text"] for r in rows if r["split"] != "train"}
    overlap = [r for r in rows if r["split"] == "train" and r["text"] in held]
    assert overlap
    own = settings(tmp_path, model, path, policy="", max_removed=0.9)
    report = data.prepare(own)
    assert sum("text_in_two_splits" in r["reason"] for r in report["quarantined"]) >= len(overlap)
    texts = {s: {c.supervisions[0].text for c in load_cuts(manifest(own, s))} for s in ("train", "dev", "test")}
    assert not texts["train"] & (texts["dev"] | texts["test"])


def test_D15_features_that_do_not_fit_are_refused_before_the_work(tmp_path, model, monkeypatch):
    from zipformer_recipes.core import DiskFullError

    own = settings(tmp_path, model, write_corpus(tmp_path / "c"))
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda p: real(p)._replace(free=1000))
    with pytest.raises(DiskFullError, match="are free"):
        data.prepare(own)
    assert not list(own.path("data").glob("*.lca")) and not list(own.path("data").glob("*cuts.jsonl.gz"))


def test_M2_a_long_cut_cannot_make_a_batch_larger_than_the_limit(tmp_path, model):
    path = write_corpus(tmp_path / "c", 100)
    soundfile.write(tmp_path / "c" / "wav" / "long.wav", tone_speech("ONE TWO " * 10), 8000)
    with open(path, "a") as file:
        file.write("wav/long.wav," + "one two " * 10 + ",train\n")
    own = settings(tmp_path, model, path, max_duration=5, max_removed=0.1)
    with pytest.raises(DataError, match="1 cuts are longer than max_duration 5 s"):
        data.prepare(own)
    assert data.prepare(own.replace(max_seconds=5.0))["dry_run"]["largest_batch_s"] <= 5


# tokenizers


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char"])
def test_a_new_tokenizer_is_as_large_as_the_text_allows(tmp_path, model, kind):
    path = write_corpus(tmp_path / "c", 60)
    own = settings(tmp_path, model, path, bpe_model="", train_tokenizer=kind, vocab_size=5000)
    report = data.prepare(own)
    tokenizer = finetune.find_tokenizer(own)
    assert tokenizer.pieces[0] == "<blk>" and tokenizer.vocab_size == report["text"]["vocab_size"] < 100
    assert (own.path("data") / ("tokens.txt" if kind == "char" else "bpe.model")).is_file()
    text = load_cuts(manifest(own, "train"))[0].supervisions[0].text
    assert tokenizer.decode(tokenizer.encode(text)).replace(" ", "") == text.replace(" ", "")


def test_chinese_text_gets_characters(tmp_path, model):
    path = write_corpus(tmp_path / "c", 60)
    text = path.read_text()
    for word, sign in zip(WORDS, "一二三四五星井", strict=True):
        text = text.replace(word.lower(), sign)
    path.write_text(text)
    own = settings(tmp_path, model, path, bpe_model="", train_tokenizer="char")
    report = data.prepare(own)
    cuts = load_cuts(manifest(own, "train"))
    assert report["text"]["preset"] == "chinese" and report["unknown_share"] == 0
    assert all(" " not in c.supervisions[0].text for c in cuts)


# augmentation


def noise_folder(folder):
    (folder / "deep").mkdir(parents=True)
    rng = np.random.default_rng(0)
    soundfile.write(folder / "deep" / "n.wav", rng.standard_normal(32000).astype("f4") * 0.1, 16000)
    return folder


def test_speed_copies_are_made_for_training_only(tmp_path, model):
    own = settings(tmp_path, model, write_corpus(tmp_path / "c"), speed_perturb="0.9,1.1")
    sets = data.prepare(own)["sets"]
    assert sets["target_train"]["utterances"] == 45 and sets["target_dev"]["utterances"] == 5
    cuts = {c.id: c for c in load_cuts(manifest(own, "train"))}
    one = next(i for i in cuts if i + "_sp0.9" in cuts)
    assert cuts[one + "_sp0.9"].duration > cuts[one].duration > cuts[one + "_sp1.1"].duration


def test_noise_and_rooms_change_every_epoch_and_repeat_with_the_seed(tmp_path, model):
    own = settings(tmp_path, model, write_corpus(tmp_path / "c"), features="fly", reverb_share=1.0, volume_perturb=1.0,
                   noise_dir=str(noise_folder(tmp_path / "n")), noise_share=1.0, enable_spec_aug=False)  # fmt: skip
    data.prepare(own)
    cuts = open_cuts(manifest(own, "train"))
    assert "features" not in cuts.row(0) and open_cuts(manifest(own, "dev")).row(0)["features"]
    plan = data.plan_epoch(cuts.seconds, 8)

    def inputs(epoch, workers=0, train=True):
        made = data.batches_of(own, cuts, plan, epoch=epoch, train=train, change=data.change_of(own))
        return next(loader_of(made, num_workers=workers))["inputs"]

    assert torch.equal(inputs(1), inputs(1, workers=1)) and not torch.equal(inputs(1), inputs(2))
    clean = inputs(1, train=False)
    assert clean.shape == inputs(1).shape and (clean - inputs(1)).abs().mean() > 0.1


def test_sound_cannot_be_changed_in_stored_features(tmp_path, model):
    path = write_corpus(tmp_path / "c")
    for more in ({"noise_dir": str(noise_folder(tmp_path / "n"))}, {"reverb_share": 0.5}, {"volume_perturb": 0.5}):
        with pytest.raises(ConfigError, match="--features fly"):
            data.prepare(settings(tmp_path, model, path, **more))
    with pytest.raises(DataError, match="no such noise folder"):
        data.prepare(settings(tmp_path, model, path, features="fly", noise_dir=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="noise_snr"):
        more = {"features": "fly", "noise_dir": str(tmp_path / "n"), "noise_snr": "loud"}
        data.prepare(settings(tmp_path, model, path, **more))


# names and folders of others


def test_icefall_names_are_written_and_read(tmp_path, model):
    own = settings(tmp_path, model, write_corpus(tmp_path / "c"), manifest_prefix="gigaspeech_")
    data.prepare(own)
    for split in ("train", "dev", "test"):
        assert (own.path("data") / f"gigaspeech_cuts_{split}.jsonl.gz").is_file()
    sets = finetune.training_sets(own, finetune.find_tokenizer(own))
    assert len(sets["train"]) == 15 and len(sets["valid"]) == 5


def test_a_data_fbank_of_icefall_just_works(tmp_path, model):
    "Cuts and lilcom features as lhotse writes them, paths counted from the recipe's folder, no file of ours."
    fbank = tmp_path / "egs" / "data" / "fbank"
    fbank.mkdir(parents=True)
    write_corpus(tmp_path / "c")
    for split in ("train", "dev", "test"):
        made = []
        with LilcomChunkyWriter(str(fbank / f"gigaspeech_feats_{split}")) as writer:
            for row in csv.DictReader(open(tmp_path / "c" / "corpus.csv")):
                if row["split"] == split:
                    rec = Recording.from_file(tmp_path / "c" / row["audio"]).resample(16000)
                    sup = SupervisionSegment(rec.id, rec.id, 0, rec.duration, text=row["text"].upper())
                    cut = MonoCut(rec.id, 0, rec.duration, 0, [sup], recording=rec)
                    made.append(cut.compute_and_store_features(Fbank(FbankConfig(num_mel_bins=80)), writer))
        for cut in made:
            cut.features.storage_path = f"data/fbank/{Path(cut.features.storage_path).name}"
        CutSet.from_cuts(made).to_file(fbank / f"gigaspeech_cuts_{split}.jsonl.gz")
    own = settings(tmp_path, model, "", manifest_dir=str(fbank))
    sets = finetune.training_sets(own, finetune.find_tokenizer(own))
    assert len(sets["train"]) == 15 and len(sets["valid"]) == 5
    t = finetune.make_trainer(own)
    batch = next(loader_of(finetune.epoch_plan(t, sets)))
    assert batch["inputs"].shape[2] == 80
    assert np.isfinite(finetune.train_update(t, [batch])["loss"])


# interruption


def test_an_interrupted_preparation_goes_on(tmp_path, model):
    "Killed in the middle of the features: nothing half-written is taken for whole, nothing finished is made again."
    path = write_corpus(tmp_path / "c", 80, words=4)
    own = settings(tmp_path, model, path)
    script = tmp_path / "go.py"
    script.write_text(
        "import sys, time\n"
        "from zipformer_recipes import data, features\n"
        "from zipformer_recipes.core import RunConfig\n"
        "real = features.store_shard\n"
        "def slow(shard, *rest):\n"
        "    done = real(shard, *rest)\n"
        "    time.sleep(0.4)\n"
        "    return done\n"
        "features.store_shard = slow\n"
        "store = data.store_features\n"
        "data.store_features = lambda *a: store(*a, max_seconds=10)\n"
        "if __name__ == '__main__':\n"
        "    data.prepare(RunConfig.from_profile('demo', **eval(sys.argv[1])))\n"
    )
    words = [sys.executable, str(script), repr({k: v for k, v in own.to_dict().items() if k != "profile"})]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(own.path("data").glob("target_train_feats-00002.jsonl.gz")):
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = {p: p.stat().st_mtime_ns for p in own.path("data").glob("*.jsonl.gz")}
    assert len(done) >= 3 and not manifest(own, "train").exists()
    again = subprocess.run(words, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-2000:]
    assert all(p.stat().st_mtime_ns == t for p, t in done.items())
    assert len(load_cuts(manifest(own, "train"))) == 48 and not list(own.path("data").glob("*part*"))
