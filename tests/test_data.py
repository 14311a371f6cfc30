"""Cuts, features and batches: the silent failures of this tool chain, each made loud."""

import random

import pytest
import torch
from lhotse import CutSet, MonoCut, SupervisionSegment
from toy import WORDS, write_model, write_run

from zipformer_recipes import data
from zipformer_recipes.core import DataError, DiskFullError, RunFolderError, read_report


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("toy"))


def bare_cuts(count: int, low: float = 1, high: float = 15, seed: int = 0) -> CutSet:
    rng = random.Random(seed)
    return CutSet.from_cuts(
        MonoCut(id=f"c{i}", start=0, duration=round(rng.uniform(low, high), 2), channel=0) for i in range(count)
    )


@pytest.mark.parametrize("count,max_duration", [(300, 300), (1000, 300), (1000, 600), (3000, 600)])
def test_no_audio_is_lost_where_fixed_settings_lose_most(count, max_duration):
    "User-pain D2: with 30 buckets and incomplete batches dropped these sets are used to 0-72 %."
    cuts = bare_cuts(count)
    seen = data.dry_run(cuts, max_duration, world_size=2)
    assert (
        seen["used_share"] > 0.999
        and len(set(seen["batches_per_rank"])) == 1
        and seen["largest_batch_s"] <= max_duration
    )
    assert seen["padding_share"] < 0.35


def test_the_same_seed_gives_the_same_batches_and_another_seed_others():
    cuts = bare_cuts(200)
    plans = [[[c.id for c in b] for b in data.sampler_of(cuts, 100, seed=s)] for s in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_mixing_is_by_hours_not_by_cuts():
    target, source = bare_cuts(100, 1, 3), bare_cuts(500, 8, 15, seed=3).map(lambda c: c.with_id("s" + c.id))
    mixed = list(data.mix_cuts(target, source, 0.25, seed=1))
    hours = {k: sum(c.duration for c in mixed if c.id.startswith(k)) for k in ("c", "s")}
    assert 0.24 < hours["s"] / (hours["c"] + hours["s"]) < 0.29
    assert {c.id for c in target} <= {c.id for c in mixed}
    assert [c.id for c in mixed] != [c.id for c in data.mix_cuts(target, source, 0.25, seed=2)]


def test_the_stage_report_counts_everything(cfg):
    report = read_report(cfg.run_dir, "data")
    assert {n: s["utterances"] for n, s in report["sets"].items()} == {
        "target_train": 15,
        "target_dev": 5,
        "target_test": 4,
    }
    assert report["unknown_share"] == 0 and report["dry_run"]["used_share"] > 0.999 and report["quarantined"] == []


def test_features_are_the_deployed_ones(cfg):
    "Equal to kaldi-native-fbank with the runtime's settings (user-pain X1)."
    import kaldi_native_fbank as knf

    cut = data.load_cuts(cfg.path("data") / "target_test_cuts.jsonl.gz")[0]
    options = knf.FbankOptions()
    options.frame_opts.dither, options.frame_opts.snip_edges, options.mel_opts.num_bins, options.mel_opts.high_freq = (
        0,
        False,
        80,
        -400,
    )
    theirs = knf.OnlineFbank(options)
    theirs.accept_waveform(16000, cut.load_audio()[0].tolist())
    theirs.input_finished()
    ours = torch.from_numpy(data.extractor().extract(cut.load_audio(), 16000))
    reference = torch.stack([torch.from_numpy(theirs.get_frame(i).copy()) for i in range(theirs.num_frames_ready)])
    assert ours.shape == reference.shape == (round(cut.duration * 100), 80)
    assert (ours - reference).abs().mean() < 1e-3
    stored = torch.from_numpy(cut.load_features())
    assert (stored - ours).abs().max() < 0.2  # lilcom keeps about 1/16 of a nat


def test_a_second_run_reuses_what_is_there(cfg):
    path = cfg.path("data") / "target_train_feats.lca"
    before = path.stat().st_mtime_ns
    data.prepare(cfg)
    assert path.stat().st_mtime_ns == before


def test_the_folder_survives_a_move(cfg, tmp_path):
    import shutil

    shutil.copytree(cfg.path("data"), tmp_path / "moved")
    assert data.load_cuts(tmp_path / "moved" / "target_dev_cuts.jsonl.gz")[0].load_features().shape[1] == 80


def test_other_settings_in_the_same_folder_are_refused(cfg):
    with pytest.raises(RunFolderError, match="corpus"):
        data.prepare(cfg.replace(corpus="other.csv"))


def test_text_in_another_case_is_refused(cfg, tmp_path):
    tokenizer = data.Tokenizer(write_model(tmp_path).parent / "bpe.model")
    cuts = CutSet.from_cuts(
        [MonoCut("a", 0, 1.0, 0, supervisions=[SupervisionSegment("a", "a", 0, 1.0, text="one two")])]
    )
    with pytest.raises(DataError, match="<unk>"):
        data.check_text({"x": cuts}, tokenizer)


def test_more_tokens_than_frames_goes_to_quarantine_and_many_stop_the_stage(cfg, tmp_path):
    tokenizer = data.Tokenizer(cfg.path("data") / "bpe.model")
    text = " ".join(list(WORDS) * 9)
    bad = MonoCut("bad", 0, 0.5, 0, supervisions=[SupervisionSegment("b", "b", 0, 0.5, text=text)])
    fault = data.fault_of(bad, tokenizer)
    assert "11 encoder frames" in fault
    good = [
        MonoCut(f"g{i}", 0, 2.0, 0, supervisions=[SupervisionSegment("g", "g", 0, 2.0, text="ONE")]) for i in range(30)
    ]
    assert len(data.usable_cuts(CutSet.from_cuts([*good, bad]), tokenizer, tmp_path, "x")) == 30
    assert "bad" in (tmp_path / "quarantine.jsonl").read_text()
    with pytest.raises(DataError, match="cannot be trained on"):
        data.usable_cuts(CutSet.from_cuts([*good[:3], bad]), tokenizer, tmp_path, "x")


def test_a_missing_manifest_names_the_nearest(cfg):
    with pytest.raises(DataError, match="did you mean target_train_cuts"):
        data.load_cuts(cfg.path("data") / "target_trian_cuts.jsonl.gz")


def test_an_lfs_pointer_is_recognised(tmp_path):
    (tmp_path / "bpe.model").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(DataError, match="git lfs pull"):
        data.Tokenizer(tmp_path / "bpe.model")


def test_a_full_disk_leaves_the_old_features(cfg, monkeypatch):
    from lhotse import LilcomChunkyWriter

    cuts = data.load_cuts(cfg.path("data") / "target_dev_cuts.jsonl.gz")
    before = (cfg.path("data") / "target_dev_feats.lca").read_bytes()

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LilcomChunkyWriter, "write", full)
    changed = CutSet.from_cuts(c.drop_features().with_id(c.id + "x") for c in cuts)
    with pytest.raises(DiskFullError):
        data.store_features(changed, cfg.path("data"), "target_dev")
    assert (cfg.path("data") / "target_dev_feats.lca").read_bytes() == before and not list(
        cfg.path("data").glob("*.part*")
    )
    assert len(data.load_cuts(cfg.path("data") / "target_dev_cuts.jsonl.gz")) == 5
