"""Features equal to the runtime's, lengths that agree, storage that survives interruptions, seeded augmentation."""

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from lhotse import CutSet, Fbank, FbankConfig, Recording
from lhotse.audio import AudioSource
from toy import tone_speech

from zipformer_recipes import features as F
from zipformer_recipes.core import ConfigError, DataError, DiskFullError, ToolError
from zipformer_recipes.sources import Utterance

TEXTS = ("ONE TWO THREE", "FOUR STAR", "POUND ONE FIVE TWO", "THREE THREE", "TWO", "FIVE STAR FOUR")


def write_audio(folder: Path, count: int = 6, rate: int = 8000) -> list[Utterance]:
    "Tone speech of odd lengths, one file each."
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for i in range(count):
        samples = tone_speech(TEXTS[i % len(TEXTS)], rate=rate, seed=i)
        soundfile.write(folder / f"u{i}.wav", samples[: len(samples) - 37 * i], rate)
        found.append(Utterance(f"u{i}", str(folder / f"u{i}.wav"), TEXTS[i % len(TEXTS)]))
    return found


def pretend_cuts(folder: Path, count: int) -> list:
    "Many cuts of a few files."
    cuts = F.cuts_of(write_audio(folder))
    return [dataclasses.replace(cuts[i % len(cuts)], id=f"c{i}") for i in range(count)]


def stamps(folder: Path) -> dict:
    return {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.glob("*_feats-*")}


def all_features(cuts) -> dict:
    return {c.id: c.load_features() for c in cuts}


@pytest.fixture(scope="module")
def utterances(tmp_path_factory):
    return write_audio(tmp_path_factory.mktemp("audio"))


@pytest.fixture
def cuts(utterances):
    return F.cuts_of(utterances)


SIGNALS = {
    "noise": lambda rng: 0.1 * rng.standard_normal(48000),
    "odd length": lambda rng: 0.1 * rng.standard_normal(47999),
    "loud": lambda rng: np.clip(rng.standard_normal(16000), -1, 1),
    "quiet": lambda rng: 1e-4 * rng.standard_normal(16000),
    "silence": lambda rng: np.zeros(16000),
    "offset": lambda rng: 0.3 + 0.01 * rng.standard_normal(16000),
    "speech": lambda rng: tone_speech("ONE TWO STAR", rate=16000),
    "short": lambda rng: 0.1 * rng.standard_normal(100),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_X1_features_are_the_runtimes(name):
    "As near to kaldi-native-fbank as float32 allows: the runtime's own rounding is the yardstick."
    samples = SIGNALS[name](np.random.default_rng(0)).astype("float32")
    ours, runtime, exact = F.extractor().extract(samples, 16000), F.runtime_features(samples), F.exact_features(samples)
    gap = F.deviation(ours, runtime)
    assert gap["mean"] < 1e-4 and gap["beyond 1e-4"] < 0.02 and gap["max"] < 1e-2
    assert F.deviation(ours, exact)["mean"] <= 2 * F.deviation(runtime, exact)["mean"] + 1e-6
    loud = runtime > runtime.max(1, keepdims=True) - 4.6  # within 20 dB of the frame's loudest bin
    assert np.abs(ours - runtime)[loud].max() < 2e-4


def test_X1_wrong_settings_are_not_near():
    "The comparison can fail: another cut-off and snipped edges are found."
    samples = SIGNALS["noise"](np.random.default_rng(0)).astype("float32")
    other = Fbank(FbankConfig(num_filters=80, high_freq=0.0)).extract(samples, 16000)
    assert F.deviation(F.extractor().extract(samples, 16000), other)["mean"] > 0.1
    with pytest.raises(DataError, match="edge snipping"):
        F.deviation(F.runtime_features(samples), F.runtime_features(samples)[1:-1])


def test_X1_sixteen_bit_scale_is_refused():
    samples = (3000 * np.random.default_rng(0).standard_normal(16000)).astype("float32")
    for wrong in (samples, samples.astype("int16")):
        with pytest.raises(DataError, match="16-bit scale"):
            F.extractor().extract(wrong, 16000)


def test_models_trained_on_lhotse_features_hear_the_same(cuts):
    theirs = Fbank(FbankConfig(num_mel_bins=80, sampling_rate=16000))
    for cut in cuts:
        audio = cut.load_audio()
        assert F.deviation(F.extractor().extract(audio, 16000), theirs.extract(audio, 16000))["max"] < 1 / 64


def test_a_batch_is_its_utterances(cuts):
    bank, audio = F.extractor(), [torch.from_numpy(c.load_audio()) for c in cuts]
    alone = [bank.extract(a, 16000) for a in audio]
    assert all(torch.equal(a, b) for a, b in zip(alone, bank.extract_batch(audio, 16000), strict=True))
    padded = torch.nn.utils.rnn.pad_sequence([a[0] for a in audio], batch_first=True)
    cut_off = bank.extract_batch(padded, 16000, lengths=[a.shape[1] for a in audio])
    assert all(torch.equal(a, b) for a, b in zip(alone, cut_off, strict=True))
    assert bank.extract_batch(padded.numpy(), 16000).shape[0] == len(audio)
    assert bank.extract_batch(padded[:1].numpy(), 16000).ndim == 3 and bank.extract_batch(padded[0], 16000).ndim == 2


def test_long_audio_in_pieces_is_the_whole():
    samples = torch.from_numpy(SIGNALS["noise"](np.random.default_rng(1)).astype("float32"))
    whole, pieces = F.log_mel(samples, F.extractor(), 10**6), F.log_mel(samples, F.extractor(), 7)
    assert (whole - pieces).abs().max() < 1e-3 and whole.shape == pieces.shape


@pytest.mark.parametrize("shape,why", [((79,), "too short"), ((0,), "too short"), ((2, 800), "2 channels")])
def test_what_has_no_features_is_refused(shape, why):
    with pytest.raises(DataError, match=why):
        F.extractor().extract(np.zeros(shape, "float32"), 16000)
    with pytest.raises(DataError, match="resample"):
        F.extractor().extract(np.zeros(16000, "float32"), 8000)


def test_D6_mixed_rates_and_channels(tmp_path):
    for rate in (8000, 16000, 22050, 44100):
        soundfile.write(tmp_path / f"{rate}.wav", tone_speech("ONE TWO", rate=rate), rate)
    pair = np.stack([tone_speech("ONE", rate=16000), tone_speech("STAR", rate=16000)], 1)
    soundfile.write(tmp_path / "pair.wav", pair, 16000)
    rates = F.cuts_of([Utterance(str(r), str(tmp_path / f"{r}.wav"), "ONE TWO") for r in (8000, 16000, 22050, 44100)])
    assert {c.sampling_rate for c in rates} == {16000}
    pitch = [F.extractor().extract(c.load_audio(), 16000)[10].argmax() for c in rates]
    assert max(pitch) - min(pitch) <= 1  # the same tone whatever the rate
    chosen = [F.cuts_of([Utterance("a", str(tmp_path / "pair.wav"), "X", channel=c)])[0].load_audio() for c in (0, 1)]
    assert np.abs(chosen[0][0] - pair[:, 0]).max() < 1e-3 and np.abs(chosen[1][0] - pair[:, 1]).max() < 1e-3
    mixed = F.cuts_of([Utterance("a", str(tmp_path / "pair.wav"), "X")], channel="mix")
    assert np.abs(mixed[0].load_audio()[0] - pair.mean(1)).max() < 1e-3
    stored, failed = F.store_features([*rates, *mixed], tmp_path / "fbank", "x")
    assert failed == [] and all(c.load_features().shape[1] == 80 for c in stored)
    with pytest.raises(DataError, match=r"channel 2 of \[0, 1\]"):
        F.cuts_of([Utterance("a", str(tmp_path / "pair.wav"), "X", channel=2)])


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 48000])
def test_D9_frames_lengths_and_supervisions_agree(tmp_path, rate):
    "For many lengths, spans and speeds: samples loaded, frames computed and lengths declared are the same."
    rng = np.random.default_rng(rate)
    soundfile.write(tmp_path / "a.wav", 0.1 * rng.standard_normal(3 * rate + 17), rate)
    spans = [(round(a, 4), round(a + d, 4)) for a, d in zip(rng.uniform(0, 1, 8), rng.uniform(0.1, 2, 8), strict=True)]
    some = [Utterance(f"s{i}", str(tmp_path / "a.wav"), "X", a, b) for i, (a, b) in enumerate(spans)]
    some.append(Utterance("all", str(tmp_path / "a.wav"), "X"))
    for cut in F.speed_copies(F.cuts_of(some), "0.9,1.1"):
        frames, samples = F.extractor().extract(cut.load_audio(), 16000), cut.load_audio().shape[1]
        assert samples == cut.num_samples == round(cut.duration * 16000)
        assert len(frames) == (samples + 80) // 160 and abs(len(frames) - cut.duration * 100) <= 0.5 + 1e-6
        assert len(cut.supervisions) == 1 and cut.supervisions[0].start == 0
        assert cut.supervisions[0].duration == cut.duration and cut.end <= cut.recording.duration + 1e-9


def test_D9_a_supervision_is_fitted_to_its_cut(cuts):
    off = cuts[0].map_supervisions(lambda s: dataclasses.replace(s, start=0.02, duration=cuts[0].duration - 0.03))
    fitted = F.one_supervision(off)
    assert (fitted.supervisions[0].start, fitted.supervisions[0].duration) == (0, cuts[0].duration)
    assert off.supervisions[0].start == 0.02
    for wrong in ([], off.supervisions * 2):
        with pytest.raises(DataError, match=f"has {len(wrong)} supervisions"):
            F.one_supervision(dataclasses.replace(off, supervisions=wrong))


def test_D9_nothing_left_of_a_span_is_refused(utterances):
    for start, end in ((1.0, 1.0), (50.0, 51.0), (1.0, 0.5)):
        with pytest.raises(DataError, match="nothing between"):
            F.cuts_of([dataclasses.replace(utterances[0], start=start, end=end, where="list.csv:7")])
    late = F.cuts_of([dataclasses.replace(utterances[0], start=0.5, end=99.0)])[0]
    assert late.end == late.recording.duration


def test_cuts_keep_what_the_utterance_says(utterances, monkeypatch):
    told = dataclasses.replace(utterances[0], speaker="anna", language="English", id="x")
    monkeypatch.chdir(Path(told.audio).parent)
    cut = F.cuts_of([dataclasses.replace(told, audio=Path(told.audio).name)], prefix="corpus-")[0]
    assert cut.id == cut.supervisions[0].id == "corpus-x" and Path(cut.recording.sources[0].source).is_absolute()
    assert (cut.supervisions[0].speaker, cut.supervisions[0].language) == ("anna", "English")
    known = {told.audio: Recording.from_file(told.audio)}
    monkeypatch.setattr(F.Recording, "from_file", lambda *a, **k: pytest.fail("opened again"))
    assert F.cuts_of([told], facts=known)[0].duration == cut.duration


def test_audio_that_cannot_be_opened_names_the_record(tmp_path):
    with pytest.raises(DataError, match="cannot be opened") as found:
        F.cuts_of([Utterance("a", str(tmp_path / "no.wav"), "X", where="list.csv:3")])
    assert found.value.where == "list.csv:3"


def test_prepared_features_pass_through(cuts, tmp_path):
    "Features of a prepared set, with no audio behind them, are kept and never computed again."
    stored, _ = F.store_features(cuts, tmp_path, "x")
    alone = F.cuts_of([Utterance(c.id, "", "TEXT", features=c.features) for c in stored])
    assert all(np.array_equal(a.load_features(), b.load_features()) for a, b in zip(alone, stored, strict=True))
    again, failed = F.store_features(alone, tmp_path / "other", "x")
    assert failed == [] and not list((tmp_path / "other").iterdir()) and again == alone
    with pytest.raises(DataError, match="no audio"):
        F.speed_copies(alone, "0.9")
    wrong = dataclasses.replace(stored[0].features, num_frames=7)
    with pytest.raises(DataError, match="7 frames"):
        F.cuts_of([Utterance("a", "", "TEXT", features=wrong)])


def test_speed_ids_and_factors(cuts):
    copies = F.speed_copies(cuts, "1.1, 0.9,1.0")
    assert [c.id for c in copies[len(cuts) :: len(cuts)]] == ["u0_sp0.9", "u0_sp1.1"] and len(copies) == 3 * len(cuts)
    assert F.speed_copies(cuts, "") == cuts
    for wrong in ("fast", "0", "-1", "0.9;1.1", "nan"):
        with pytest.raises(ConfigError, match="speed_perturb"):
            F.speed_copies(cuts, wrong)


def test_changing_the_speed_keeps_the_originals_features(cuts, tmp_path):
    "lhotse detaches them, on the original too; the control shows that it still does."
    stored, _ = F.store_features(cuts, tmp_path, "x")
    copies = F.speed_copies(stored, "0.9")
    assert all(c.has_features for c in copies[: len(cuts)]) and not any(c.has_features for c in copies[len(cuts) :])
    for change in (F.Augmentation(volume_prob=1), F.Augmentation(reverb_prob=1)):
        heard = F.augment_cut(stored[0], change, 0, 0, rirs=F.simulate_rirs(1))
        assert stored[0].has_features and not heard.has_features
    stored[0].perturb_speed(0.9)
    assert not stored[0].has_features


@pytest.fixture(scope="module")
def noise_dir(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("noise"), np.random.default_rng(0)
    (folder / "deep").mkdir()
    soundfile.write(folder / "long.wav", 0.2 * rng.standard_normal(16000 * 6), 16000)
    soundfile.write(folder / "deep" / "short.flac", 0.2 * rng.standard_normal((2000, 2)), 8000)
    (folder / "README.txt").write_text("not audio")
    return folder


def test_noise_has_the_level_asked_for(cuts, noise_dir):
    noises = F.noise_cuts(noise_dir)
    assert [n.id for n in noises] == ["deep/short.flac", "long.wav"] and {n.sampling_rate for n in noises} == {16000}
    clean = cuts[2].load_audio()
    for noise in noises:
        for level in (5.0, 10.0, 20.0):
            noisy = F.with_noise(cuts[2], [noise], F.stream_of(1), (level, level))
            added = noisy.load_audio() - clean
            assert abs(10 * np.log10((clean**2).mean() / (added**2).mean()) - level) < 1.0
            assert (added[0, -1600:] ** 2).mean() > 0.2 * (added**2).mean()  # to the very end
            assert (noisy.id, noisy.duration, len(noisy.supervisions)) == (cuts[2].id, cuts[2].duration, 1)


def test_a_noise_folder_that_is_missing_empty_or_damaged(tmp_path):
    with pytest.raises(DataError, match="no such noise folder"):
        F.noise_cuts(tmp_path / "musan")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no audio"):
        F.noise_cuts(tmp_path / "empty")
    (tmp_path / "empty" / "bad.wav").write_bytes(b"RIFFxxxx")
    with pytest.raises(DataError, match=r"1 of 1 noise files cannot be read: bad.wav"):
        F.noise_cuts(tmp_path / "empty")
    with pytest.raises(ConfigError, match="noise or rooms"):
        F.augment_cut(None, F.Augmentation(noise_prob=0.5), 0, 0)


def test_augmentation_depends_on_seed_epoch_and_id_alone(cuts, noise_dir):
    noises, rooms = F.noise_cuts(noise_dir), F.simulate_rirs(3, seed=1)
    everything = F.Augmentation(volume_prob=1, reverb_prob=1, noise_prob=1)

    def heard(cut, seed, epoch):
        return F.augment_cut(cut, everything, seed, epoch, noises, rooms).load_audio()

    first = heard(cuts[0], 1, 1)
    torch.manual_seed(5), np.random.seed(5)
    heard(cuts[1], 1, 1)
    assert np.array_equal(first, heard(cuts[0], 1, 1)) and first.shape[1] == cuts[0].num_samples
    renamed = dataclasses.replace(cuts[0], id="other")
    for other in (heard(cuts[0], 2, 1), heard(cuts[0], 1, 2), heard(renamed, 1, 1)):
        assert not np.allclose(first, other)
    off = F.augment_cut(cuts[0], F.Augmentation(), 1, 1)
    assert np.array_equal(off.load_audio(), cuts[0].load_audio())


@pytest.mark.parametrize("engine", ["fast", "image"])
def test_rooms_are_the_same_for_a_seed_and_last(engine, cuts):
    if engine == "image":
        pytest.importorskip("pyroomacoustics")
    torch.manual_seed(1)
    rooms = F.simulate_rirs(3, seed=4, engine=engine)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = F.simulate_rirs(3, seed=4, engine=engine)
    assert torch.equal(state, torch.get_rng_state())  # nobody else's stream is touched
    sounds = [r.load_audio()[0] for r in rooms]
    assert all(np.array_equal(a, b.load_audio()[0]) for a, b in zip(sounds, again, strict=True))
    assert len({len(s) for s in sounds}) > 1 and all(np.abs(s).max() > 0.85 for s in sounds)
    wet = cuts[0].reverb_rir(rooms[0], affix_id=False).load_audio()
    dry = cuts[0].load_audio()
    assert wet.shape == dry.shape and 0.9 < np.linalg.norm(wet) / np.linalg.norm(dry) < 1.1
    with pytest.raises(ConfigError, match="fast or image"):
        F.simulate_rirs(1, engine="optix")


def test_spec_augment_hides_at_most_what_it_says():
    torch.manual_seed(0)
    plain = torch.rand(4, 500, 80) + 5
    segments = torch.tensor([[i, 0, 500] for i in range(4)], dtype=torch.int32)
    hidden = F.spec_augment()(plain.clone(), supervision_segments=segments)
    same_row = (hidden - hidden[:, :, :1]).abs().amax(2) < 1e-6  # a masked frame is one value
    assert 0 < same_row.float().mean() <= 0.16 and hidden.shape == plain.shape


def test_storing_again_computes_nothing(cuts, tmp_path):
    many = F.speed_copies(cuts, "0.9,1.1")
    first, failed = F.store_features(many, tmp_path, "x", max_seconds=6)
    before = stamps(tmp_path)
    second, _ = F.store_features(many, tmp_path, "x", max_seconds=6)
    assert failed == [] and len(before) > 6 and stamps(tmp_path) == before
    assert [c.id for c in first] == [c.id for c in many] == [c.id for c in second]
    for cut in first:
        gap = np.abs(cut.load_features() - F.extractor().extract(cut.load_audio(), 16000)).max()
        assert gap < 1 / 64 + 1e-3 and cut.features.num_frames == cut.num_frames and cut.features.type == "kaldi-fbank"
    stored = CutSet.from_cuts(first)
    stored.to_file(tmp_path / "cuts.jsonl.gz")
    assert [c.load_features().shape for c in CutSet.from_file(tmp_path / "cuts.jsonl.gz")] == [
        c.load_features().shape for c in first
    ]


def test_only_changed_shards_are_redone(tmp_path):
    many = pretend_cuts(tmp_path / "audio", 60)
    F.store_features(many, tmp_path / "f", "x", max_seconds=8)
    before = stamps(tmp_path / "f")
    texts = [c.map_supervisions(lambda s: dataclasses.replace(s, text="OTHER")) for c in many]
    relabelled, _ = F.store_features(texts, tmp_path / "f", "x", max_seconds=8)
    assert stamps(tmp_path / "f") == before and relabelled[0].supervisions[0].text == "OTHER"
    F.store_features(many[:40], tmp_path / "f", "x", max_seconds=8)
    after = stamps(tmp_path / "f")
    assert len(after) < len(before) and sum(before[n] != after[n] for n in after) <= 2
    longer = [dataclasses.replace(many[0], duration=many[0].duration - 0.05), *many[1:40]]
    F.store_features([F.one_supervision(c) for c in longer], tmp_path / "f", "x", max_seconds=8)
    final = stamps(tmp_path / "f")
    assert final["x_feats-00000.lca"] != after["x_feats-00000.lca"]
    assert sum(final[n] == after.get(n) for n in final) >= len(final) - 4


def test_changed_audio_is_computed_again_and_a_moved_corpus_is_not(tmp_path):
    utterances = write_audio(tmp_path / "a")
    F.store_features(F.cuts_of(utterances), tmp_path / "f", "x")
    before = stamps(tmp_path / "f")
    (tmp_path / "a").rename(tmp_path / "b")
    moved = [dataclasses.replace(u, audio=u.audio.replace("/a/", "/b/")) for u in utterances]
    F.store_features(F.cuts_of(moved), tmp_path / "f", "x")
    assert stamps(tmp_path / "f") == before
    samples, rate = soundfile.read(moved[0].audio)
    soundfile.write(moved[0].audio, samples * 0.5, rate)
    F.store_features(F.cuts_of(moved), tmp_path / "f", "x")
    assert stamps(tmp_path / "f") != before


def test_a_manifest_read_back_has_the_same_digest(cuts, tmp_path):
    "Transforms come back from a file as plain dicts."
    many = F.speed_copies(cuts, "0.9")
    CutSet.from_cuts(many).to_file(tmp_path / "c.jsonl.gz")
    back = list(CutSet.from_file(tmp_path / "c.jsonl.gz"))
    assert [s.digest for s in F.shards_of(many, tmp_path, "x")] == [s.digest for s in F.shards_of(back, tmp_path, "x")]


def damage(shard, how):
    if how == "archive cut":
        shard.archive.write_bytes(shard.archive.read_bytes()[:-1])
    elif how == "archive gone":
        shard.archive.unlink()
    elif how == "manifest cut":
        shard.manifest.write_bytes(shard.manifest.read_bytes()[:-20])
    elif how == "manifest empty":
        shard.manifest.write_bytes(b"")
    elif how == "manifest of others":
        shard.manifest.write_bytes(__import__("gzip").compress(b'{"digest": "0"}\n'))


@pytest.mark.parametrize("how", ["archive cut", "archive gone", "manifest cut", "manifest empty", "manifest of others"])
def test_a_damaged_shard_is_never_taken_for_a_whole_one(cuts, tmp_path, how):
    whole = all_features(F.store_features(cuts, tmp_path, "x", max_seconds=3)[0])
    shards = F.shards_of(cuts, tmp_path, "x", 3)
    damage(shards[1], how)
    assert F.read_shard(shards[1]) is None and F.read_shard(shards[0]) is not None
    kept = stamps(tmp_path)["x_feats-00000.lca"]
    again = all_features(F.store_features(cuts, tmp_path, "x", max_seconds=3)[0])
    assert stamps(tmp_path)["x_feats-00000.lca"] == kept
    assert all(np.array_equal(whole[i], again[i]) for i in whole)


def bad_cuts(folder: Path) -> dict:
    "One cut for each thing that can go wrong with audio after its manifest was made."
    made = {}
    for name in ("missing", "cut short", "nan", "garbage", "too short"):
        path = folder / f"{name}.wav"
        samples = np.full(16000, np.nan) if name == "nan" else 0.1 * np.ones(79 if name == "too short" else 16000)
        soundfile.write(path, samples, 16000, subtype="FLOAT")
        made[name] = F.cuts_of([Utterance(name, str(path), "X")])[0]
    (folder / "missing.wav").unlink()
    (folder / "cut short.wav").write_bytes((folder / "cut short.wav").read_bytes()[:20000])
    (folder / "garbage.wav").write_bytes(b"\0" * 5000)
    return made


def test_the_worst_cuts_become_entries_and_the_rest_is_stored(cuts, tmp_path):
    bad = bad_cuts(tmp_path)
    mixed = [x for pair in zip(cuts, bad.values(), strict=False) for x in pair] + cuts[5:]
    stored, failed = F.store_features(mixed, tmp_path / "f", "x")
    assert [c.id for c in stored] == [c.id for c in cuts] and all(c.load_features().size for c in stored)
    reasons = dict(failed)
    assert set(reasons) == set(bad) and all(": " in why for why in reasons.values())
    assert reasons["nan"].startswith("DataError: NaN or infinite") and "too short" in reasons["too short"]
    soundfile.write(tmp_path / "missing.wav", 0.1 * np.ones(16000), 16000)
    stored, failed = F.store_features(mixed, tmp_path / "f", "x")
    assert "missing" in [c.id for c in stored] and "missing" not in dict(failed)
    stored, failed = F.store_features([bad["nan"]], tmp_path / "f", "only")
    assert stored == [] and len(failed) == 1


def test_a_cut_that_failed_for_a_moment_is_tried_again(cuts, tmp_path, monkeypatch):
    "A network disk that was away leaves no trace in the file's size or time."
    real = F.feature_row

    def away(cut, bank, writer):
        if cut.id == "u2":
            raise OSError(5, "Input/output error")
        return real(cut, bank, writer)

    monkeypatch.setattr(F, "feature_row", away)
    stored, failed = F.store_features(cuts, tmp_path, "x")
    assert failed == [("u2", "OSError: [Errno 5] Input/output error")] and len(stored) == len(cuts) - 1
    monkeypatch.undo()
    stored, failed = F.store_features(cuts, tmp_path, "x")
    assert failed == [] and len(stored) == len(cuts)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_shard_that_stops_leaves_no_part_and_no_manifest(cuts, tmp_path, monkeypatch, error):
    def stop(*args):
        raise error

    monkeypatch.setattr(F, "feature_row", stop)
    with pytest.raises((KeyboardInterrupt, DiskFullError)):
        F.store_shard(F.shards_of(cuts, tmp_path, "x")[0])
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_goes_even_when_all_is_done(cuts, tmp_path):
    F.store_features(cuts, tmp_path, "x")
    for name in (".x_feats-00007.123.part.lca", ".x_feats-00007.jsonl.gz.1234abcd.tmp", ".y_feats-00000.1.part.lca"):
        (tmp_path / name).write_bytes(b"half")
    F.store_features(cuts, tmp_path, "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".y_feats-00000.1.part.lca",
        "x_feats-00000.jsonl.gz",
        "x_feats-00000.lca",
    ]


def test_two_cuts_of_one_id_keep_their_own_features(cuts, tmp_path):
    twins = [dataclasses.replace(cuts[0], id="same"), dataclasses.replace(cuts[2], id="same")]
    stored, _ = F.store_features(twins, tmp_path, "x")
    expected = [len(F.extractor().extract(c.load_audio(), 16000)) for c in twins]
    assert [c.load_features().shape[0] for c in stored] == expected and expected[0] != expected[1]


def test_D15_one_thread_and_the_callers_count_comes_back(cuts, tmp_path, monkeypatch):
    seen, real = [], F.feature_row
    monkeypatch.setattr(F, "feature_row", lambda *a: (seen.append(torch.get_num_threads()), real(*a))[1])
    torch.set_num_threads(2)
    try:
        F.store_features(cuts, tmp_path, "x")
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_D15_the_estimate_is_near_what_is_written(cuts, tmp_path):
    many = F.speed_copies(cuts, "0.9,1.1")
    size = F.estimate(many)
    F.store_features(many, tmp_path, "x")
    assert 0.8 < size["bytes"] / (tmp_path / "x_feats-00000.lca").stat().st_size < 1.25
    assert F.estimate([])["bytes"] == 0


def test_D15_a_full_disk_is_found_before_the_work(cuts, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(F.shutil, "disk_usage", lambda p: usage(10**9, 10**9, 1_000_000))
    monkeypatch.setattr(F, "store_shard", lambda *a: pytest.fail("work was begun"))
    with pytest.raises(DiskFullError, match="features need"):
        F.store_features(cuts, tmp_path, "x")
    assert not list(tmp_path.iterdir())


def test_D15_nothing_to_do_needs_no_space(cuts, tmp_path, monkeypatch):
    F.store_features(cuts, tmp_path, "x")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(F.shutil, "disk_usage", lambda p: usage(10**9, 10**9, 0))
    assert len(F.store_features(cuts, tmp_path, "x")[0]) == len(cuts)


def test_D15_the_disk_fills_up_in_the_middle(cuts, tmp_path, monkeypatch):
    real, calls = F.LilcomChunkyWriter.write, []

    def write(self, key, value):
        calls.append(key)
        if len(calls) > 4:
            raise OSError(28, "No space left on device")
        return real(self, key, value)

    monkeypatch.setattr(F.LilcomChunkyWriter, "write", write)
    with pytest.raises(DiskFullError, match="no space left") as found:
        F.store_features(cuts, tmp_path, "x", max_seconds=3)
    assert "finished shards are kept" in found.value.remedy
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names and not [n for n in names if "part" in n or "tmp" in n]
    monkeypatch.undo()
    before = stamps(tmp_path)
    stored, failed = F.store_features(cuts, tmp_path, "x", max_seconds=3)
    assert len(stored) == len(cuts) and failed == [] and all(stamps(tmp_path)[n] == v for n, v in before.items())


SCRIPT = """
import sys, time
from lhotse import CutSet
from zipformer_recipes import features as F
real = F.feature_row
F.feature_row = lambda *a: (time.sleep(0.03), real(*a))[1]
F.store_features(CutSet.from_file(sys.argv[1]), sys.argv[2], "x", jobs=int(sys.argv[3]), max_seconds=5)
"""


def start(cuts, tmp_path, jobs):
    CutSet.from_cuts(cuts).to_file(tmp_path / "cuts.jsonl.gz")
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "cuts.jsonl.gz"), str(tmp_path / "f"), str(jobs)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_until(condition, seconds=40):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_D15_killed_in_the_middle_it_continues(tmp_path, how):
    "First part + rest = all; the shards that were done are not touched; nothing is left behind."
    many, folder = pretend_cuts(tmp_path / "audio", 80), tmp_path / "f"
    process = start(many, tmp_path, 1)
    try:
        wait_until(lambda: len(list(folder.glob("x_feats-*.jsonl.gz"))) >= 3 and F.begun_files(folder, "x"))
    finally:
        process.send_signal(how)
        process.wait(20)
    before = stamps(folder)
    done = [s for s in F.shards_of(many, folder, "x", 5) if F.read_shard(s)]
    assert 3 <= len(done) < len(F.shards_of(many, folder, "x", 5))
    assert bool(F.begun_files(folder, "x")) == (how == signal.SIGKILL)
    stored, failed = F.store_features(many, folder, "x", max_seconds=5)
    assert failed == [] and len(stored) == 80 and F.begun_files(folder, "x") == []
    for shard in done:
        assert stamps(folder)[shard.archive.name] == before[shard.archive.name]
    whole = all_features(F.store_features(many, tmp_path / "whole", "x", max_seconds=5)[0])
    assert all(np.array_equal(whole[i], f) for i, f in all_features(stored).items())


def test_D15_workers_end_with_the_process_that_asked(tmp_path):
    import psutil

    process = start(pretend_cuts(tmp_path / "audio", 1500), tmp_path, 2)
    children = []
    try:
        wait_until(lambda: list((tmp_path / "f").glob("x_feats-*.jsonl.gz")))
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait(20)
    assert children
    _, alive = psutil.wait_procs(children, timeout=20)
    for child in alive:
        child.kill()
    assert not alive


def test_D15_a_worker_that_hangs_is_ended_with_advice(cuts, tmp_path):
    "Audio that never arrives: a pipe nobody writes to."
    os.mkfifo(tmp_path / "pipe.wav")
    recording = Recording("pipe", [AudioSource("file", [0], str(tmp_path / "pipe.wav"))], 16000, 16000, 1.0)
    waiting = F.cuts_of([Utterance("pipe", "", "X", recording=recording)])
    shards = F.shards_of([*waiting, *cuts], tmp_path, "x", 2)
    with pytest.raises(ToolError, match="no feature was written for 4 s") as found:
        list(F.run_here(shards, tmp_path, "x", 2, stall=4))
    assert "jobs=1" in found.value.remedy and multiprocessing.active_children() == []


class Bomb:
    "Ends the process that unpickles it, as the kernel ends one that takes too much memory."

    def __reduce__(self):
        return os._exit, (1,)


def test_D15_a_worker_that_dies_is_a_typed_error(tmp_path):
    shard = F.Shard([Bomb()], "", tmp_path / "a.lca", tmp_path / "a.jsonl.gz")
    with pytest.raises(ToolError, match="a worker process died") as found:
        list(F.run_here([shard], tmp_path, "x", 2))
    assert "fewer jobs" in found.value.remedy and multiprocessing.active_children() == []


def test_progress_counts_as_life():
    "Files that grow keep the wait going; files that stand still end it."
    future, grown = Future(), []

    def sizes(folder, name):
        grown.append(len(grown))
        return grown[-1:] if len(grown) < 30 else [30]

    original, F.sizes_of = F.sizes_of, sizes
    try:
        with pytest.raises(ToolError, match="1 shards are open"):
            list(F.wait_for({future: None}, "f", "x", stall=0.3))
    finally:
        F.sizes_of = original
    assert len(grown) > 30


def test_processes_give_the_same_as_one(cuts, tmp_path):
    alone = all_features(F.store_features(cuts, tmp_path / "a", "x", max_seconds=3)[0])
    spread = all_features(F.store_features(cuts, tmp_path / "b", "x", jobs=2, max_seconds=3)[0])
    assert alone.keys() == spread.keys() and all(np.array_equal(alone[i], spread[i]) for i in alone)
    assert stamps(tmp_path / "a").keys() == stamps(tmp_path / "b").keys()
    one, two = (sorted((tmp_path / d).glob("*.lca")) for d in "ab")
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]


def test_dask_with_two_workers(cuts, tmp_path):
    distributed = pytest.importorskip("distributed")
    many = [*F.speed_copies(cuts, "0.9,1.1"), *bad_cuts(tmp_path).values()]
    here = F.store_features(many, tmp_path / "here", "x", max_seconds=5)
    settings = dict(n_workers=2, threads_per_worker=1, dashboard_address=None, processes=True)
    with distributed.LocalCluster(**settings) as cluster, distributed.Client(cluster) as client:
        there = F.store_features(many, tmp_path / "there", "x", client=client, max_seconds=5)
        before = stamps(tmp_path / "there")
        F.store_features(cuts, tmp_path / "named", "x", client=cluster.scheduler_address, max_seconds=5)
    assert [i for i, _ in there[1]] == [i for i, _ in here[1]] and len(there[1]) == 5
    one, two = all_features(here[0]), all_features(there[0])
    assert one.keys() == two.keys() and all(np.array_equal(one[i], two[i]) for i in one)
    good = F.store_features(F.speed_copies(cuts, "0.9,1.1")[:4], tmp_path / "there", "y", max_seconds=5)
    assert len(good[0]) == 4 and all(stamps(tmp_path / "there")[n] == v for n, v in before.items())
    assert len(list((tmp_path / "named").glob("*.lca"))) > 1


def test_dask_that_does_not_answer_is_a_typed_error(cuts, tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")

    def refuse(*args, **kwargs):
        raise OSError("Timed out trying to connect")

    monkeypatch.setattr(distributed, "Client", refuse)
    with pytest.raises(ToolError, match="no Dask scheduler answers"):
        F.store_features(cuts, tmp_path, "x", client="tcp://127.0.0.1:9")


def test_both_strategies_give_a_model_the_same(cuts, tmp_path):
    stored = CutSet.from_cuts(F.store_features(cuts, tmp_path, "x")[0])
    (a, a_lens), (b, b_lens) = F.input_strategy(on_the_fly=True)(stored), F.input_strategy()(stored)
    assert torch.equal(a_lens.int(), b_lens.int()) and a.shape == b.shape
    assert all((x[:n] - y[:n]).abs().max() < 1 / 64 + 1e-3 for x, y, n in zip(a, b, a_lens, strict=True))


def test_the_benchmark_has_all_three(cuts):
    pytest.importorskip("kaldi_native_fbank")
    rows = F.benchmark(cuts, rounds=2)
    assert [r["extractor"] for r in rows] == ["ours", "lhotse", "kaldi-native-fbank"] and rows[1]["ratio"] == 1
    assert all(r["s/s"] > 0 for r in rows) and json.dumps(rows)


def test_progress_speaks_of_hours():
    line = F.hours_line("train", 1800, 3600, 60)
    assert "0.500/1.000 h (50 %)" in line and "0.008 h/s" in line and "60 s left" in line
    assert "left" not in F.hours_line("train", 0, 3600, 0) and "100 %" in F.hours_line("x", 0, 0, 1)
