"""Manifests, plans, loaders: every cut used, every rank equal, every failure named."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from lhotse import CutSet, Fbank, FbankConfig, LilcomChunkyWriter, MonoCut, Recording, SupervisionSegment
from toy import tone_speech

from zipformer_recipes import batches
from zipformer_recipes.core import DataError
from zipformer_recipes.env_facts import free_port
from zipformer_recipes.features import spec_augment

RATE = 16000


def durations(count, low=1.0, high=15.0, seed=0):
    return np.random.default_rng(seed).uniform(low, high, count)


def bare(name, seconds, text="ONE TWO"):
    return MonoCut(name, 0, seconds, 0, supervisions=[SupervisionSegment(name, name, 0, seconds, text=text)])


def cuts_with_audio(folder: Path, count: int = 6) -> list:
    made = []
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    for i in range(count):
        path = folder / "audio" / f"u{i}.wav"
        soundfile.write(path, tone_speech("ONE TWO THREE"[: 3 + 4 * (i % 2)], RATE, seed=i), RATE)
        rec = Recording.from_file(path)
        sup = SupervisionSegment(f"u{i}", rec.id, 0, rec.duration, text="ONE")
        made.append(MonoCut(f"u{i}", 0, rec.duration, 0, [sup], recording=rec))
    return made


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    "Twelve cuts with stored features, and their manifest."
    folder = tmp_path_factory.mktemp("stored")
    fbank = Fbank(FbankConfig(num_mel_bins=80, sampling_rate=RATE))
    with LilcomChunkyWriter(str(folder / "feats")) as writer:
        made = [c.compute_and_store_features(fbank, writer) for c in cuts_with_audio(folder, 12)]
    return batches.write_cuts(folder / "x_cuts.jsonl.gz", made)


class Letters:
    path = "letters"

    def encode(self, text):
        return list(text.replace(" ", ""))


# manifests


def test_what_is_written_is_read_by_us_and_by_lhotse_alike(stored):
    ours, theirs = list(batches.open_cuts(stored)), list(CutSet.from_file(stored))
    assert [c.id for c in ours] == [c.id for c in theirs] == [f"u{i}" for i in range(12)]
    assert [c.duration for c in ours] == [c.duration for c in theirs]
    assert not any(os.path.isabs(c.features.storage_path) for c in theirs), "paths are relative in the file"
    assert ours[3].load_features().shape == (ours[3].num_frames, 80)


@pytest.mark.parametrize("name", ["a_cuts.jsonl", "a_cuts.jsonl.gz"])
def test_manifests_of_others_are_indexed_once(tmp_path, name):
    CutSet.from_cuts(bare(f"c{i}", 1 + i % 5) for i in range(150)).to_file(tmp_path / name)
    cuts = batches.open_cuts(tmp_path / name)
    assert [c.id for c in cuts] == [f"c{i}" for i in range(150)] and cuts[149].id == cuts[-1].id
    first = cuts.path.stat().st_mtime_ns
    assert batches.open_cuts(tmp_path / name).path.stat().st_mtime_ns == first
    CutSet.from_cuts(bare(f"d{i}", 1.0) for i in range(3)).to_file(tmp_path / name)
    assert [c.id for c in batches.open_cuts(tmp_path / name)] == ["d0", "d1", "d2"], "an edited original is noticed"


def test_a_manifest_in_a_read_only_place_is_indexed_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZIPFORMER_RECIPES_CACHE", str(tmp_path / "cache"))
    CutSet.from_cuts([bare("a", 1.0)]).to_file(tmp_path / "a_cuts.jsonl.gz")
    real = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: Path(p) != tmp_path and real(p, mode))
    assert batches.open_cuts(tmp_path / "a_cuts.jsonl.gz").path.is_relative_to(tmp_path / "cache")


def test_a_damaged_index_is_made_again_and_a_damaged_manifest_is_named(tmp_path, stored):
    shutil.copytree(stored.parent, tmp_path / "c")
    path = tmp_path / "c" / stored.name
    index = batches.index_path(path)
    index.write_bytes(index.read_bytes()[:100])
    assert len(batches.open_cuts(path)) == 12
    CutSet.from_cuts(bare(f"c{i}", 1.0) for i in range(500)).to_file(tmp_path / "b_cuts.jsonl.gz")
    whole = (tmp_path / "b_cuts.jsonl.gz").read_bytes()
    (tmp_path / "b_cuts.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="b_cuts.jsonl.gz, after line"):
        batches.open_cuts(tmp_path / "b_cuts.jsonl.gz")
    (tmp_path / "d_cuts.jsonl").write_text('{"id": "a", "duration": 1}\n{"id": \n')
    with pytest.raises(DataError, match="after line 2"):
        batches.open_cuts(tmp_path / "d_cuts.jsonl")


def test_D13_a_manifest_that_is_a_git_lfs_pointer(tmp_path):
    (tmp_path / "x_cuts.jsonl.gz").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(DataError, match="git lfs pull"):
        batches.open_cuts(tmp_path / "x_cuts.jsonl.gz")


def test_an_empty_manifest_and_a_mistyped_one(tmp_path, stored):
    with gzip.open(tmp_path / "e_cuts.jsonl.gz", "wb"):
        pass
    with pytest.raises(DataError, match="empty"):
        batches.open_cuts(tmp_path / "e_cuts.jsonl.gz")
    with pytest.raises(DataError, match="did you mean x_cuts.jsonl.gz"):
        batches.open_cuts(stored.with_name("x_cust.jsonl.gz"))


def test_mixed_cuts_have_their_length_and_text_from_metadata(tmp_path):
    first, second = cuts_with_audio(tmp_path, 2)
    cut = first.append(second)
    CutSet.from_cuts([cut]).to_file(tmp_path / "m_cuts.jsonl.gz")
    cuts = batches.open_cuts(tmp_path / "m_cuts.jsonl.gz")
    assert cuts.seconds[0] == pytest.approx(cut.duration) == pytest.approx(first.duration + second.duration)
    assert batches.text_of(cuts.row(0)) == "ONE ONE"
    assert len(cuts[0].supervisions) == 2


def test_a_full_disk_leaves_the_old_manifest(tmp_path, monkeypatch):
    from zipformer_recipes.core import DiskFullError

    path = batches.write_cuts(tmp_path / "x_cuts.jsonl.gz", [bare("a", 1.0)])

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batches.Packer, "flush", full)
    with pytest.raises(DiskFullError):
        batches.write_cuts(path, [bare("b", 1.0)])
    assert batches.open_cuts(path)[0].id == "a" and not list(tmp_path.glob("*.tmp"))


# D12


def test_D12_everything_moves_together(tmp_path):
    batches.write_cuts(tmp_path / "a" / "data" / "x_cuts.jsonl.gz", cuts_with_audio(tmp_path / "a"))
    shutil.move(tmp_path / "a", tmp_path / "b")
    cuts = batches.open_cuts(tmp_path / "b" / "data" / "x_cuts.jsonl.gz")
    assert batches.check_paths(cuts) == 6 and cuts[0].load_audio().size


def test_D12_the_manifests_move_alone(tmp_path):
    batches.write_cuts(tmp_path / "a" / "data" / "x_cuts.jsonl.gz", cuts_with_audio(tmp_path / "a"))
    shutil.move(tmp_path / "a" / "data", tmp_path / "elsewhere")
    cuts = batches.open_cuts(tmp_path / "elsewhere" / "x_cuts.jsonl.gz")
    assert batches.check_paths(cuts) == 6, "the recorded absolute root still holds"


def test_D12_the_audio_moves_alone(tmp_path):
    batches.write_cuts(tmp_path / "a" / "data" / "x_cuts.jsonl.gz", cuts_with_audio(tmp_path / "a"))
    shutil.move(tmp_path / "a" / "audio", tmp_path / "new")
    path = tmp_path / "a" / "data" / "x_cuts.jsonl.gz"
    with pytest.raises(DataError, match="--audio-root"):
        batches.check_paths(batches.open_cuts(path))
    assert batches.check_paths(batches.open_cuts(path, audio_root=str(tmp_path / "new"))) == 6


def test_D12_paths_of_an_icefall_recipe_count_from_its_folder(tmp_path, stored):
    "icefall stores `data/fbank/...`, relative to the folder the recipe was run in."
    fbank = tmp_path / "egs" / "data" / "fbank"
    shutil.copytree(stored.parent, fbank)
    made = list(batches.open_cuts(stored))
    for cut in made:
        cut.features.storage_path = "data/fbank/" + Path(cut.features.storage_path).name
    CutSet.from_cuts(made).to_file(fbank / "gigaspeech_cuts_train.jsonl.gz")
    cuts = batches.open_cuts(fbank / "gigaspeech_cuts_train.jsonl.gz")
    assert cuts[5].load_features().shape[1] == 80 and batches.check_paths(cuts) == 12


# the plan


@pytest.mark.parametrize("count,limit", [(300, 300), (1000, 300), (1000, 600), (3000, 600)])
@pytest.mark.parametrize("buckets", [0, 1, 2, 5, 10, 30])
def test_D2_every_cut_is_used_once_whatever_the_settings(count, limit, buckets):
    "With fixed settings and incomplete batches dropped these sets are used to 0-97 %."
    seconds = durations(count)
    plan = batches.plan_epoch(seconds, limit, buckets, world_size=2)
    assert sorted(plan.order) == list(range(count)) and plan.grid.shape[1] == 2
    assert sorted(plan.grid.ravel()) == list(range(len(plan.bounds) - 1))
    assert batches.padding_of(plan, seconds)[1].max() <= limit


def test_D2_what_the_plain_sampler_does_with_the_same_set():
    from lhotse.dataset import DynamicBucketingSampler

    cuts = CutSet.from_cuts(bare(f"c{i}", s) for i, s in enumerate(durations(1000)))
    used = [
        c
        for rank in range(2)
        for b in DynamicBucketingSampler(
            cuts, max_duration=600, num_buckets=30, shuffle=True, drop_last=True, world_size=2, rank=rank
        )
        for c in b
    ]
    assert len(used) < 300, "the failure this plan is made for is gone: say so in the chapter"


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_all_ranks_get_equal_counts_of_like_batches(world):
    seconds = durations(997)
    plan = batches.plan_epoch(seconds, 120, world_size=world)
    _, padded = batches.padding_of(plan, seconds)
    step = padded[plan.grid]
    assert sorted(plan.order) == list(range(997)) and np.median(1 - step.min(1) / step.max(1)) < 0.12


def test_fewer_cuts_than_ranks_is_refused_and_just_enough_is_not():
    assert batches.plan_epoch(durations(4), 600, world_size=4).grid.shape == (1, 4)
    with pytest.raises(DataError, match="3 cuts cannot be shared among 4 ranks"):
        batches.plan_epoch(durations(3), 600, world_size=4)


def test_M2_no_batch_is_larger_than_max_duration_and_long_cuts_are_counted():
    seconds = np.concatenate([durations(200, 1, 15), [60.0, 61.0]])
    seen = batches.dry_run(seconds, 20)
    assert seen["largest_batch_s"] <= 20 and seen["left_out"] == 2 and seen["used_cuts"] == 200
    with pytest.raises(DataError, match="2 cuts are longer than max_duration 20 s"):
        batches.check_plan(seen)
    with pytest.raises(DataError, match="no cut is as short"):
        batches.plan_epoch(np.array([60.0]), 20)


def test_plans_differ_by_seed_and_epoch_and_are_otherwise_the_same():
    seconds, key = durations(300), lambda p: (p.order.tolist(), p.grid.tolist())
    base = key(batches.plan_epoch(seconds, 60, seed=1, epoch=2))
    assert base == key(batches.plan_epoch(seconds, 60, seed=1, epoch=2))
    assert base != key(batches.plan_epoch(seconds, 60, seed=1, epoch=3))
    assert base != key(batches.plan_epoch(seconds, 60, seed=2, epoch=2))
    still = [key(batches.plan_epoch(seconds, 60, shuffle=False, epoch=e)) for e in (1, 2)]
    assert still[0] == still[1]


def test_the_dry_run_counts_what_a_replay_counts():
    seconds = durations(500)
    seen, plan = batches.dry_run(seconds, 100, 5, 2, 3), batches.plan_epoch(seconds, 100, 5, 2)
    audio = [[seconds[plan.batch(s, r)] for s in range(len(plan))] for r in range(2)]
    padded = [b.max() * len(b) for rank in audio for b in rank]
    assert seen["batches_per_rank"] == [len(a) for a in audio] and seen["updates_per_epoch"] == -(-len(plan) // 3)
    assert np.isclose(seen["padding_share"], 1 - seconds.sum() / sum(padded))
    assert np.isclose(sum(seen["hours_per_rank"]), seconds.sum() / 3600)
    assert "100.0%" in batches.dry_run_table(seen)


def test_padding_is_small_for_small_sets_too():
    assert batches.dry_run(durations(1000), 300)["padding_share"] < 0.13
    assert batches.dry_run(durations(3000), 300)["padding_share"] < 0.08


def test_positions_are_a_slice():
    plan = batches.plan_epoch(durations(400), 60, world_size=2)
    whole = [plan.batch(s, 1).tolist() for s in range(len(plan))]
    assert whole[:7] + [plan.batch(s, 1).tolist() for s in range(7, len(plan))] == whole


# mixing


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5])
def test_F7_mixing_is_by_hours_and_goes_through_all_source_speech(share):
    target, source = durations(100, 1, 3), durations(500, 8, 15, seed=3)
    seen = batches.mix_report(target, source, share)
    assert abs(seen["share"] - share) < 0.06 and "target set" in seen["ends_the_epoch"]
    wanted = target.sum() * share / (1 - share)
    heard, epochs = set(), int(np.ceil(source.sum() / wanted))
    for epoch in range(1, epochs + 1):
        heard |= set(batches.mix_positions(source, wanted, epoch=epoch).tolist())
    assert heard == set(range(500))


def test_a_small_source_set_is_repeated():
    source = np.full(10, 2.0)
    drawn = batches.mix_positions(source, 50.0)
    assert np.isclose(source[drawn].sum(), 50, atol=4) and len(set(drawn)) == 10


def test_a_mixed_epoch_holds_the_target_whole_and_another_part_of_the_source():
    target = batches.InMemory(bare(f"t{i}", 2.0) for i in range(30))
    source = batches.InMemory(bare(f"s{i}", 5.0) for i in range(40))
    mixes = [[c.id for c in batches.mixed(target, source, 0.25, 1, e)] for e in (1, 1, 2)]
    assert mixes[0] == mixes[1] != mixes[2] and {f"t{i}" for i in range(30)} <= set(mixes[2])


# what can be trained on


def test_D3_more_tokens_than_encoder_frames_by_the_exact_formula():
    # 1.0 s: 100 frames, 23 at the encoder; 0.91 s (speed 1.1): 91 frames, 21
    sets = {23: (1.0, True), 24: (1.0, False), 21: (0.91, True), 22: (0.91, False)}
    for tokens, (seconds, fits) in sets.items():
        kept, gone = batches.usable(batches.InMemory([bare("a", seconds, "X" * tokens)]), Letters())
        assert (len(kept) == 1) is fits and ("more tokens than frames" in gone) is not fits


def test_D4_almost_empty_recordings_and_texts_are_left_out_and_counted():
    cuts = batches.InMemory([bare("a", 0.05, "X"), bare("b", 2.0, ""), bare("c", 40.0), bare("d", 2.0)])
    kept, gone = batches.usable(cuts, Letters())
    assert [c.id for c in kept] == ["d"] and {k: v[2] for k, v in gone.items()} == {
        "too short": ["a"],
        "no text": ["b"],
        "too long": ["c"],
    }


def test_token_counts_are_kept_beside_the_manifest_and_belong_to_one_tokenizer(tmp_path):
    path = batches.write_cuts(tmp_path / "x_cuts.jsonl.gz", [bare("a", 2.0, "ONE"), bare("b", 2.0, "TWO TWO")])
    assert batches.count_tokens(batches.open_cuts(path), Letters()).tolist() == [3, 6]

    class Words(Letters):
        path = "words"

        def __repr__(self):
            return "words"

        def encode(self, text):
            return text.split()

    assert batches.count_tokens(batches.open_cuts(path), Words()).tolist() == [1, 2]
    assert len(list(tmp_path.glob("*.tokens-*"))) == 2
    assert batches.count_tokens(batches.Subset(batches.open_cuts(path), [1]), Words()).tolist() == [2]


# the loader


def inputs(data, **options):
    return [b["inputs"] for b in batches.loader_of(data, **options)]


def test_workers_resume_and_the_callers_randomness_change_nothing(stored):
    cuts = batches.open_cuts(stored)
    plan = batches.plan_epoch(cuts.seconds, 2.5)

    def data(epoch=1):
        return batches.Batches(cuts, plan, transforms=[spec_augment()], seed=5, epoch=epoch)

    torch.manual_seed(1), random.seed(1)
    alone = inputs(data())
    state = torch.rand(1), random.random()
    torch.manual_seed(1), random.seed(1)
    assert state == (torch.rand(1), random.random()), "making batches draws nothing from the caller's streams"
    torch.manual_seed(99)
    for other in (inputs(data(), num_workers=2), inputs(data(), num_workers=1)):
        assert len(other) == len(alone) > 2 and all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))
    rest = inputs(data(), start=2, num_workers=1)
    assert all(torch.equal(a, b) for a, b in zip(alone[2:], rest, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(alone, inputs(data(2)), strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_D11_a_cut_that_cannot_be_loaded_is_named_with_its_reason(tmp_path, stored, workers):
    shutil.copytree(stored.parent, tmp_path / "c")
    cuts = batches.InMemory(batches.open_cuts(tmp_path / "c" / stored.name))
    cuts.cuts[7].features.storage_path = str(tmp_path / "gone.lca")
    data = batches.Batches(cuts, batches.plan_epoch(cuts.seconds, 2.5), rank=0)
    with pytest.raises(DataError, match="cut u7 cannot be loaded.*gone.lca"):
        list(batches.loader_of(data, num_workers=workers))


def kill_self(cut, epoch):
    if cut.id == "u3":
        os.kill(os.getpid(), signal.SIGKILL)
    return cut


def test_D4_a_worker_that_dies_is_an_error_with_ids_not_a_hang(stored):
    cuts = batches.open_cuts(stored)
    data = batches.Batches(cuts, batches.plan_epoch(cuts.seconds, 2.5), change=kill_self)
    began = time.monotonic()
    with pytest.raises(DataError, match="a loader worker died.*u3"):
        list(batches.loader_of(data, num_workers=2))
    assert time.monotonic() - began < 60


def test_loader_errors_reach_the_screen_from_every_rank(tmp_path, stored):
    "Two ranks as torchrun starts them; the second one has the bad cut."
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\n"
        "import torch.distributed as dist\n"
        "from zipformer_recipes import batches\n"
        "from zipformer_recipes.core import exit_code\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "cuts = batches.InMemory(batches.open_cuts(sys.argv[1]))\n"
        "plan = batches.plan_epoch(cuts.seconds, 2.5, world_size=2)\n"
        "bad = int(plan.batch(1, 1)[0])\n"
        "cuts.cuts[bad].features.storage_path = 'gone.lca'\n"
        "def main(argv):\n"
        "    for batch in batches.loader_of(batches.Batches(cuts, plan, rank), num_workers=1):\n"
        "        dist.barrier()\n"
        "raise SystemExit(exit_code(main))\n"
    )
    port = f"--master_port={free_port()}"
    words = [sys.executable, "-m", "torch.distributed.run", "--master_addr=127.0.0.1", port]
    words += ["--nproc_per_node=2", str(script), str(stored)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "DataError: cut u" in done.stderr and "gone.lca" in done.stderr and "rank 1" in done.stderr


def test_S2_limits_are_raised_or_said():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        seen = batches.loader_limits(4, 1e6)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == seen["open_files"] and seen["num_workers"] == 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    few = batches.loader_limits(4, 1e6, wanted_files=1000)
    assert few["sharing"] == "file_system" and "1000 files" in few["remarks"][0]
    small = batches.loader_limits(8, 1e15)
    assert small["num_workers"] == 0 and "--shm-size" in small["remarks"][-1]


def test_best_workers_is_the_smallest_good_one(stored):
    rows = [{"workers": w, "audio_s_per_s": v} for w, v in ((0, 50), (1, 97), (2, 100), (4, 90))]
    assert batches.best_workers(rows) == 1
    cuts = batches.open_cuts(stored)
    seen = batches.measure_workers(batches.Batches(cuts, batches.plan_epoch(cuts.seconds, 2.0)), (0, 1), 3)
    assert [r["workers"] for r in seen] == [0, 1] and all(r["audio_s_per_s"] > 0 for r in seen)


# scale


def test_a_hundred_thousand_cuts_open_without_being_read(tmp_path):
    "Structure, not time: opening touches the index and a few cuts, a batch touches only its own."
    rng = random.Random(0)

    def rows():
        for i in range(100_000):
            s = round(rng.uniform(2, 20), 2)
            sup = {"id": f"m{i}", "recording_id": "r", "start": 0.0, "duration": s, "channel": 0, "text": "ONE TWO"}
            yield {"id": f"m{i}", "start": 0.0, "duration": s, "channel": 0, "supervisions": [sup], "type": "MonoCut"}

    path = batches.write_lines(tmp_path / "big_cuts.jsonl.gz", rows())
    cuts, read = batches.open_cuts(path), []
    real = os.pread
    try:
        batches.os.pread = lambda fd, n, at: read.append(at) or real(fd, n, at)
        plan = batches.plan_epoch(cuts.seconds, 600, world_size=2)
        batch = cuts.take(plan.batch(len(plan) // 2, 1))
    finally:
        batches.os.pread = real
    assert sorted(plan.order) == list(range(100_000)) and len(read) <= len(batch) + 1
    assert abs(sum(c.duration for c in batch) - cuts.seconds[plan.batch(len(plan) // 2, 1)].sum()) < 1e-6
    assert json.loads(gzip.open(path).readline())["id"] == "m0"
