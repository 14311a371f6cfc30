"""Every kind of problem is found, answered as the policy says, and nothing is lost on the way."""

import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import soundfile

from zipformer_recipes.checks import (
    KINDS,
    Limits,
    Scan,
    assign_splits,
    check,
    encoder_frames,
    fault_table,
    header_frames,
    leaked_tags,
    parse_policy,
    plot_checks,
    scan_audio,
    scan_key,
    scan_many,
    split_of,
    split_speakers,
)
from zipformer_recipes.core import ConfigError, DataError, RecipeError
from zipformer_recipes.sources import Fault, Utterance

OPEN = Limits(max_removed=1, max_unknown=1, max_overflow=1)
WORDS = "ALPHA BRAVO DELTA ECHO GOLF HOTEL INDIA JULIET LIMA OSCAR".split()
SENTENCES = [" ".join(words) for words in itertools.permutations(WORDS, 3)][::3]
LETTERS = {c: i + 3 for i, c in enumerate(" ABCDEFGHIJKLMNOPQRSTUVWXYZ'")}


def encode(text):
    return [LETTERS.get(c, 2) for c in text]


def noise(seconds, seed=0, rate=16000, gain=0.1):
    return (gain * np.random.default_rng(seed).standard_normal(round(seconds * rate))).astype("float32")


class Corpus:
    "Makes files and utterances below a folder; every utterance has its own sound and sentence."

    def __init__(self, folder):
        self.folder, self.count = folder, 0

    def utt(self, samples=None, rate=16000, name="", data=None, audio=None, options=None, **facts):
        i = self.count = self.count + 1
        path = self.folder / (name or f"{i}.wav")
        if data is not None:
            path.write_bytes(data)
        elif audio is None:
            samples = noise(2, i, rate) if samples is None else samples
            soundfile.write(path, samples, rate, **(options or {}))
        facts = {"id": f"u{i}", "audio": str(audio or path), "text": SENTENCES[i % len(SENTENCES)]} | facts
        return Utterance(**{"split": "train"} | facts)


@pytest.fixture
def corpus(tmp_path):
    return Corpus(tmp_path)


def run(utts, limits=OPEN, **options):
    return check(utts, limits, **{"encode": encode, "jobs": 0} | options)


def kinds(result):
    return {(fault.kind, fault.action) for fault in result.faults}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def half_flac(c):
    whole = c.utt(noise(10), name="whole.flac")
    return (c.folder / "whole.flac").read_bytes()[:150000] if whole else b""


def half_wav(c, name="whole.wav"):
    c.utt(noise(2), name=name, options={"format": "NIST" if name.endswith("sph") else "WAV"})
    return (c.folder / name).read_bytes()[:40000]


def reader(c, kind, action):
    return [c.utt(faults=[Fault("", kind, action, 0.0, "found by the reader", "")])]


CASES = {  # name -> (expected kind, its action, corpus -> utterances)
    "missing": ("audio_missing", "drop", lambda c: [c.utt(audio="nowhere.wav")]),
    "no path": ("audio_missing", "drop", lambda c: [Utterance("x", "", "ALPHA")]),
    "random bytes": ("audio_unreadable", "drop", lambda c: [c.utt(data=bytes(range(1, 256)) * 9)]),
    "random m4a": ("audio_unreadable", "drop", lambda c: [c.utt(name="x.m4a", data=b"\0\0\0 ftypM4A " * 9)]),
    "a page": ("audio_unreadable", "drop", lambda c: [c.utt(data=b"<!DOCTYPE html><html>404</html>")]),
    "a folder": ("audio_unreadable", "drop", lambda c: [c.utt(audio=c.folder)]),
    "text for audio": ("audio_unreadable", "drop", lambda c: [c.utt(data=b"hello")]),
    "zero bytes": ("audio_empty", "drop", lambda c: [c.utt(data=b"")]),
    "zero samples": ("audio_empty", "drop", lambda c: [c.utt(np.zeros(0, "float32"))]),
    "pointer": ("lfs_pointer", "drop", lambda c: [c.utt(data=POINTER)]),
    "half a flac": ("audio_truncated", "drop", lambda c: [c.utt(name="h.flac", data=half_flac(c))]),
    "half a wav": ("audio_truncated", "drop", lambda c: [c.utt(data=half_wav(c))]),
    "half a sphere file": ("audio_truncated", "drop", lambda c: [c.utt(name="h.sph", data=half_wav(c, "w.sph"))]),
    "declared a little off": ("length_differs", "repair", lambda c: [c.utt(declared=2.08)]),
    "declared far off": ("length_wrong", "drop", lambda c: [c.utt(declared=3.0)]),
    "span after the end": ("length_wrong", "drop", lambda c: [c.utt(start=5.0, end=6.0)]),
    "span far past the end": ("length_wrong", "drop", lambda c: [c.utt(start=0.0, end=9.0)]),
    "span is no number": ("length_wrong", "drop", lambda c: [c.utt(start=float("nan"), end=2.0)]),
    "span past the end": ("past_end", "trim", lambda c: [c.utt(start=0.0, end=2.05)]),
    "span before the start": ("past_end", "trim", lambda c: [c.utt(start=-0.05, end=1.5)]),
    "8 kHz": ("rate_differs", "resample", lambda c: [c.utt(rate=8000)]),
    "44.1 kHz": ("rate_differs", "resample", lambda c: [c.utt(rate=44100)]),
    "stereo": ("channels_several", "repair", lambda c: [c.utt(noise(4).reshape(-1, 2))]),
    "channel 3 of 1": ("channel_missing", "drop", lambda c: [c.utt(channel=3)]),
    "silence": ("silent", "drop", lambda c: [c.utt(np.zeros(32000, "float32"))]),
    "an offset is no sound": ("silent", "drop", lambda c: [c.utt(np.full(32000, 0.3, "float32"))]),
    "clipped": ("clipped", "keep", lambda c: [c.utt(np.clip(noise(2, gain=2.0), -1, 1))]),
    "offset": ("dc_offset", "keep", lambda c: [c.utt(noise(2) + 0.3)]),
    "no text": ("text_empty", "drop", lambda c: [c.utt(text="  ")]),
    "text is None": ("no_supervision", "drop", lambda c: [c.utt(text=None)]),
    "only a tag": ("text_no_words", "drop", lambda c: [c.utt(text="<noise>")]),
    "only punctuation": ("text_no_words", "drop", lambda c: [c.utt(text="...?!")]),
    "a tag": ("tags_left", "repair", lambda c: [c.utt(text="ALPHA <SIL> BRAVO")]),
    "digits": ("digits_left", "keep", lambda c: [c.utt(text="ALPHA 7")]),
    "lower case": ("wrong_case", "repair", lambda c: [c.utt(text="alpha bravo")]),
    "unknown": ("unknown_characters", "keep", lambda c: [c.utt(text="ALPHA 好")]),
    "more tokens than frames": ("tokens_exceed_frames", "drop", lambda c: [c.utt(noise(0.5))]),
    "0.1 s": ("too_short", "drop", lambda c: [c.utt(noise(0.1), text="A")]),
    "a span of zero": ("too_short", "drop", lambda c: [c.utt(start=1.0, end=1.0)]),
    "31 s": ("too_long", "drop", lambda c: [c.utt(noise(31))]),
    "an id twice": ("id_duplicate", "repair", lambda c: [c.utt(id="x"), c.utt(id="x")]),
    "the same file twice": ("audio_duplicate", "drop", lambda c: [(u := c.utt()), dataclasses.replace(u, id="b")]),
    "two texts": ("audio_two_texts", "drop", lambda c: [(u := c.utt()), dataclasses.replace(u, id="b", text="GOLF")]),
    "text twice": (
        "text_in_two_splits",
        "drop",
        lambda c: [c.utt(text="GOLF"), c.utt(text="GOLF", split="test")],
    ),
    "speaker twice": (
        "speaker_in_two_splits",
        "keep",
        lambda c: [c.utt(speaker="ann"), c.utt(speaker="ann", split="dev")],
    ),
    "reader: late": ("late_start", "trim", lambda c: reader(c, "late_start", "trim")),
    "reader: several": ("several_supervisions", "split", lambda c: reader(c, "several_supervisions", "split")),
    "reader: none": ("no_supervision", "drop", lambda c: reader(c, "no_supervision", "drop")),
    "reader: features": ("features_unusable", "repair", lambda c: reader(c, "features_unusable", "repair")),
    "reader: split": ("split_unknown", "drop", lambda c: reader(c, "split_unknown", "drop")),
    "reader: bad line": ("record_unreadable", "drop", lambda c: reader(c, "record_unreadable", "drop")),
    "NaN": (
        "not_finite",
        "drop",
        lambda c: [c.utt(np.where(np.arange(32000) == 9, np.nan, noise(2)), options={"subtype": "FLOAT"})],
    ),
}


def test_there_is_a_case_for_every_kind():
    assert {kind for kind, *_ in CASES.values()} == set(KINDS)


@pytest.mark.parametrize("name", CASES)
def test_D11_each_kind_is_found_and_the_others_go_on(name, corpus):
    kind, action, make = CASES[name]
    good = [corpus.utt() for _ in range(3)]
    bad = make(corpus)
    result = run([*good[:2], *bad, good[2]], folder=corpus.folder / "out")
    assert (kind, action) in kinds(result)
    assert {u.id for u in good} <= {u.id for u in result.kept}
    gone = len(good) + len(bad) - len(result.kept)
    lines = [json.loads(line) for line in (corpus.folder / "out/quarantine.jsonl").read_text().splitlines()]
    assert len(lines) == gone and (gone > 0) == (action == "drop")
    for fault in (f for line in lines for f in line["faults"] if f["kind"] == kind):
        assert fault["action"] == action and (fault["remedy"] or name.startswith("reader"))
    if action != "drop":
        repairs = [json.loads(line) for line in (corpus.folder / "out/repairs.jsonl").read_text().splitlines()]
        assert any(f["kind"] == kind for line in repairs for f in line["faults"])
    if action == "drop":
        with pytest.raises(DataError) as refused:
            run(bad, dataclasses.replace(OPEN, max_removed=0.05))
        assert kind in str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_can_be_refused(kind, corpus):
    make = next(make for k, _, make in CASES.values() if k == kind)
    utts = [corpus.utt(), *make(corpus)]
    with pytest.raises(DataError, match=f"refuses.*{kind}"):
        run(utts, policy=f"{kind}=refuse", folder=corpus.folder / "out")
    assert kind in (corpus.folder / "out/quarantine.jsonl").read_text()


@pytest.mark.parametrize("kind", [k for k, kind in KINDS.items() if "keep" in kind.possible])
def test_what_may_be_kept_is_kept(kind, corpus):
    make = next(make for k, _, make in CASES.values() if k == kind)
    utts = make(corpus)
    result = run(utts, policy={kind: "keep"})
    assert len(result.kept) == len(utts) and (kind, "keep") in kinds(result)


@pytest.mark.parametrize("kind", [k for k, kind in KINDS.items() if kind.action != "drop" and "drop" in kind.possible])
def test_what_is_repaired_may_be_dropped(kind, corpus):
    make = next(make for k, _, make in CASES.values() if k == kind)
    utts = [corpus.utt(), *make(corpus)]
    result = run(utts, policy={kind: "drop"})
    assert len(result.kept) < len(utts) and (kind, "drop") in kinds(result)


@pytest.mark.parametrize(
    "policy, word",
    [("silence=drop", "silent"), ("audio_missing=keep", "drop, refuse"), ("silent", "drop"), ("x=drop", "kinds are")],
)
def test_policies_that_cannot_be(policy, word):
    with pytest.raises(ConfigError, match=word):
        parse_policy(policy)


@pytest.mark.parametrize("wrong", [{"channels": "both"}, {"min_seconds": 9, "max_seconds": 1}, {"speeds": ()}])
def test_limits_that_cannot_be(wrong):
    with pytest.raises(ConfigError):
        Limits(**wrong)


def test_D3_frames_at_the_highest_speed(corpus):
    assert encoder_frames(1.0) == 23 and encoder_frames(1.0, 1.1) == 21
    utts = [corpus.utt(noise(1.0, i), text="A" * i) for i in (21, 22, 23)]
    assert [u.text for u in run(utts).kept] == ["A" * 21]
    slow = dataclasses.replace(OPEN, speeds=(1.0,))
    assert len(run(utts, slow).kept) == 3
    assert len(run(utts, dataclasses.replace(slow, ctc=True)).kept) == 0


def test_D3_more_than_one_percent_is_a_tokenizer_problem(corpus):
    utts = [corpus.utt() for _ in range(30)] + [corpus.utt(noise(0.5))]
    with pytest.raises(DataError, match="more tokens than encoder frames: tokenizer or alignment"):
        run(utts, Limits())
    assert len(run(utts, Limits(max_overflow=0.05)).kept) == 30


def test_D4_no_encoder_frame_cannot_be_kept(corpus):
    utts = [corpus.utt(noise(0.05), text="A"), corpus.utt(noise(0.15), text="A")]
    result = run(utts, policy="too_short=keep")
    assert [u.id for u in result.kept] == ["u2"]


def test_D5_hours_lost_are_in_the_table_and_on_the_histogram(corpus):
    utts = [corpus.utt() for _ in range(20)] + [corpus.utt(noise(25, 99))]
    with pytest.raises(DataError, match="of the hours are set aside") as refused:
        run(utts, Limits(max_seconds=20))
    assert "too_long | drop | 1 | 0.0069" in str(refused.value)
    report = run(utts, dataclasses.replace(OPEN, max_seconds=20)).report
    assert sum(report["histograms"]["seconds"]["kept"]) == 20
    assert sum(report["histograms"]["seconds"]["removed"]) == 1 and report["percentiles"]["50 %"] == 2.0
    lines = [line.get_xdata()[0] for line in plot_checks(report).axes[0].lines]
    assert lines == [0.2, 20]
    assert len(run(utts, Limits()).kept) == 21


def test_D6_rates_and_channels_are_counted_and_facts_are_kept(corpus):
    utts = [corpus.utt(rate=8000), corpus.utt(), corpus.utt(noise(12).reshape(-1, 2), 44100)]
    result = run(utts)
    assert {k: v["utterances"] for k, v in result.report["rates"].items()} == {"16000": 1, "44100": 1, "8000": 1}
    assert {k: v["utterances"] for k, v in result.report["channels"].items()} == {"1": 2, "2": 1}
    assert [f.rate for f in result.facts] == [8000, 16000, 44100] and result.kept[2].channel == 0
    assert [round(f.seconds, 3) for f in result.facts] == [2.0, 2.0, round(96000 / 44100, 3)]


def test_D6_split_makes_utterances_and_mix_keeps_none_silent(corpus):
    left, right = noise(2, 1), noise(2, 2)
    stereo = corpus.utt(np.stack([left, right], axis=1))
    doubled = corpus.utt(np.stack([left, left], axis=1)[::-1])
    dead = corpus.utt(np.stack([noise(2, 3), np.zeros(32000)], axis=1))
    cancelled = corpus.utt(np.stack([noise(2, 4), -noise(2, 4)], axis=1))
    split = run([stereo, doubled, dead], dataclasses.replace(OPEN, channels="split"))
    assert [(u.id, u.channel) for u in split.kept] == [("u1-ch0", 0), ("u1-ch1", 1), ("u2-ch0", 0), ("u3-ch0", 0)]
    assert split.report["total"]["made by splits"]["utterances"] == 3
    assert {f.id for f in split.faults if f.kind == "channels_several"} == {
        f"u{i}-ch{c}" for i in (1, 2, 3) for c in (0, 1)
    }
    assert {("audio_duplicate", "drop"), ("silent", "drop")} <= kinds(split)
    mix = run([stereo, cancelled], dataclasses.replace(OPEN, channels="mix"))
    assert [(u.id, u.channel) for u in mix.kept] == [("u1", None)] and ("silent", "drop") in kinds(mix)
    chosen = run([dataclasses.replace(dead, channel=1), dataclasses.replace(stereo, channel=1)])
    assert [u.id for u in chosen.kept] == ["u1"] and ("channels_several", "repair") not in kinds(chosen)


def test_D7_lower_case_against_an_upper_case_tokenizer_is_folded_with_notice(corpus):
    result = run([corpus.utt(text="alpha bravo"), corpus.utt()])
    assert result.kept[0].text == "ALPHA BRAVO" and result.report["unknown_share"] == 0
    fault = next(f for f in result.faults if f.kind == "wrong_case")
    assert "'alpha bravo' becomes 'ALPHA BRAVO'" in fault.detail
    kept = run([corpus.utt(text="alpha bravo")], policy="wrong_case=keep")
    assert kept.kept[0].text == "alpha bravo" and kept.report["unknown_share"] > 0.9


def test_D7_more_than_half_a_percent_unknown_stops(corpus):
    utts = [corpus.utt() for _ in range(5)] + [corpus.utt(text="НОЧЬ")]
    with pytest.raises(DataError, match="of the tokens are unknown to the tokenizer") as refused:
        run(utts, Limits())
    assert all(c in str(refused.value) for c in "НОЧЬ")
    assert len(run(utts, Limits(max_unknown=0.1)).kept) == 6


def test_D7_the_tokenizer_says_which_token_is_unknown(corpus):
    class Tokenizer:
        unk_id = 0

        def encode(self, text):
            return [0 if c == "Q" else 2 for c in text]

    utts = [corpus.utt(text="ALPHA Q"), corpus.utt(text="ALPHA BRAVO")]
    assert [f.id for f in run(utts, encode=Tokenizer().encode).faults] == ["u1"]
    assert len(run(utts, encode=Tokenizer().encode, unk_id=2).faults) == 2


def test_D7_names_of_tags_leak(corpus):
    def strip_brackets(text):
        return " ".join("".join(c if c.isalpha() else " " for c in text).upper().split())

    utts = [corpus.utt(text="yes <COMMA> no"), corpus.utt(text="a comma here"), corpus.utt(text="<SIL>")]
    result = run(utts, normalize=strip_brackets)
    assert [u.text for u in result.kept] == ["YES NO", "A COMMA HERE"]
    assert {("tags_left", "repair"), ("text_no_words", "drop")} <= kinds(result)


def test_D7_a_word_that_is_also_a_tag_is_no_leak():
    assert leaked_tags("a comma <COMMA>", "A COMMA") == []
    assert leaked_tags("a comma <COMMA>", "A COMMA COMMA") == ["COMMA"]


def test_a_normaliser_that_fails_for_one_text_does_not_end_the_pass(corpus):
    def normalize(text):
        return text if "GOLF" not in text else [][0]

    result = run([corpus.utt(text="ALPHA"), corpus.utt(text="GOLF")], normalize=normalize)
    assert [u.text for u in result.kept] == ["ALPHA"] and ("record_unreadable", "drop") in kinds(result)


def test_D8_spans_of_one_recording_share_a_decode_and_end_inside(corpus, monkeypatch):
    import zipformer_recipes.checks as module

    opened = Counter()
    real = module.scan_file
    monkeypatch.setattr(module, "scan_file", lambda path, *rest: opened.update([path]) or real(path, *rest))
    whole = corpus.utt(noise(10))
    spans = [(0.0, 3.0), (3.0, 6.0), (6.0, None), (6.0, 10.1)]
    utts = [dataclasses.replace(whole, id=f"s{i}", start=a, end=b, text=SENTENCES[i]) for i, (a, b) in enumerate(spans)]
    result = run(utts[:3] + [dataclasses.replace(utts[3], text=utts[2].text)])
    assert list(opened.values()) == [1]
    assert [f.seconds for f in result.facts] == [3.0, 3.0, 4.0] and result.facts[0].audio_seconds == 10.0
    assert {("past_end", "trim"), ("audio_duplicate", "drop")} == kinds(result)


def test_D8_features_that_start_elsewhere_are_made_again(corpus):
    def features(start):
        return type("F", (), {"start": start, "duration": 2.0, "sampling_rate": 16000, "storage_path": __file__})()

    utts = [corpus.utt(features=features(0.0)), corpus.utt(features=features(0.5))]
    utts.append(corpus.utt(audio="gone.wav", features=features(0.0)))
    result = run(utts)
    assert [u.features is None for u in result.kept] == [False, True, False] and ("late_start", "trim") in kinds(result)
    assert result.facts[2].form == "features" and result.facts[2].seconds == 2.0


def test_D10_lengths_come_from_samples(corpus):
    exact, rounded = corpus.utt(declared=2.0), corpus.utt(declared=2.02)
    off = corpus.utt(declared=2.08)
    result = run([exact, rounded, off])
    assert [f.seconds for f in result.facts] == [2.0] * 3 and [u.declared for u in result.kept] == [2.0] * 3
    assert [f.id for f in result.faults] == ["u3"] and rounded.declared == 2.02
    assert result.report["total"]["trimmed"]["hours"] == pytest.approx(0.1 / 3600, abs=1e-6)


def test_D10_a_truncated_file_keeps_what_lies_before_the_cut(corpus):
    data = half_flac(corpus)
    real = scan_audio(corpus.folder / "whole.flac").seconds
    (corpus.folder / "cut.flac").write_bytes(data)
    have = scan_audio(corpus.folder / "cut.flac").seconds
    assert real == 10 and 2 < have < 9
    spans = [(0, 2), (have - 1, 9.5), (9, None)]
    utts = [corpus.utt(audio=corpus.folder / "cut.flac", start=start, end=end) for start, end in spans]
    result = run(utts)
    assert len(result.kept) == 1 and kinds(result) == {("audio_truncated", "drop")}
    trimmed = run(utts, policy="audio_truncated=trim")
    assert [u.end for u in trimmed.kept] == [2, pytest.approx(have)]
    assert result.quarantined[0].faults[0].detail.startswith("the header says 10.00 s")


def test_D10_headers_of_streams_do_not_count(tmp_path):
    soundfile.write(tmp_path / "a.wav", noise(1), 16000)
    data = bytearray((tmp_path / "a.wav").read_bytes())
    place = data.index(b"data") + 4
    for size, expected in ((0xFFFFFFFF, 0), (0x7FFFFFFF, 0), (64000, 32000)):
        data[place : place + 4] = size.to_bytes(4, "little")
        (tmp_path / "b.wav").write_bytes(data)
        assert header_frames(tmp_path / "b.wav") == expected
    assert header_frames(tmp_path / "a.wav") == 16000


@pytest.mark.parametrize("form, name", [("FLAC", "a.flac"), ("MP3", "a.mp3"), ("OGG", "a.ogg"), ("NIST", "a.sph")])
def test_formats(form, name, tmp_path):
    soundfile.write(tmp_path / name, noise(3), 16000, format=form)
    scan = scan_audio(tmp_path / name)
    assert not scan.kind and scan.seconds == pytest.approx(3.0, abs=0.05) and form in scan.form
    assert scan.levels[0]["0"].rms == pytest.approx(0.1, rel=0.1)


def test_content_is_the_same_in_wav_and_flac_and_in_one_block_or_many(tmp_path, monkeypatch):
    import zipformer_recipes.checks as module

    samples = (noise(3) * 20000).astype("int16")
    soundfile.write(tmp_path / "a.wav", samples, 16000)
    soundfile.write(tmp_path / "a.flac", samples, 16000)
    first = scan_audio(tmp_path / "a.wav", [(0.5, 2.5, None)]).levels
    monkeypatch.setattr(module, "BLOCK_SECONDS", 1)
    assert scan_audio(tmp_path / "a.flac", [(0.5, 2.5, None)]).levels == first
    assert first[0]["0"].frames == 32000


def test_a_lhotse_recording_is_scanned_like_its_file(corpus):
    from lhotse import Recording

    plain = corpus.utt()
    recording = Recording.from_file(plain.audio)
    memory = recording.move_to_memory()
    utts = [plain] + [dataclasses.replace(plain, id=r, recording=x) for r, x in (("f", recording), ("m", memory))]
    scans = [scan_audio(u.recording or u.audio) for u in utts]
    assert scans[0].levels == scans[1].levels == scans[2].levels and scan_key(recording) and scan_key(memory)
    broken = dataclasses.replace(memory, num_samples=memory.num_samples + 16000, duration=memory.duration + 1)
    assert scan_audio(broken).kind == "audio_truncated"
    assert [u.id for u in run(utts).kept] == ["u1"]


def test_D10_a_recording_manifest_that_is_a_little_off_is_mended(corpus):
    from lhotse import Recording

    def off(seconds, **facts):
        utt = corpus.utt()
        recording = Recording.from_file(utt.audio)
        samples = round((2 + seconds) * 16000)
        utt.recording = dataclasses.replace(recording, num_samples=samples, duration=samples / 16000, **facts)
        return utt

    result = run([off(0.0), off(0.08), off(-0.01), off(1.0), off(0.0, sampling_rate=8000)])
    assert [u.id for u in result.kept] == ["u1", "u2", "u3", "u5"]
    assert [u.recording.load_audio().shape for u in result.kept] == [(1, 32000)] * 4
    assert kinds(result) == {("length_differs", "repair"), ("length_wrong", "drop")}


def test_one_bad_span_does_not_cost_the_others(corpus):
    whole = corpus.utt(noise(6))
    spans = [(0.0, 2.0), (float("nan"), 3.0), (2.0, float("inf")), (4.0, 6.0), (-9.0, -3.0)]
    utts = [dataclasses.replace(whole, id=f"s{i}", start=a, end=b, text=SENTENCES[i]) for i, (a, b) in enumerate(spans)]
    result = run(utts)
    assert [u.id for u in result.kept] == ["s0", "s3"] and result.report["total"]["kept"]["hours"] > 0


def test_D14_doubles_leave_the_test_set_alone(corpus):
    samples = noise(2, 7)
    soundfile.write(corpus.folder / "copy.flac", (samples * 32767).astype("int16"), 16000)
    held = corpus.utt((samples * 32767).astype("int16"), text="GOLF ECHO", split="test")
    copy = corpus.utt(audio=corpus.folder / "copy.flac", text="GOLF ECHO")
    again = corpus.utt(text="GOLF ECHO")
    result = run([copy, again, held])
    assert [u.id for u in result.kept] == [held.id]
    assert kinds(result) == {("audio_duplicate", "drop"), ("text_in_two_splits", "drop")}
    kept = run([copy, again, held], policy="audio_duplicate=keep,text_in_two_splits=keep")
    assert len(kept.kept) == 3
    headers = run([held, dataclasses.replace(held, id="b"), copy], full=False, policy="text_in_two_splits=keep")
    assert [u.id for u in headers.kept] == [held.id, copy.id], "without decoding only the same file is the same"


def test_D14_ids_become_unique_and_the_fault_follows(corpus):
    utts = [corpus.utt(id="a"), corpus.utt(id="a", rate=8000), corpus.utt(id="a-2"), corpus.utt(id="a")]
    result = run(utts)
    assert [u.id for u in result.kept] == ["a", "a-3", "a-2", "a-4"]
    assert ("a-3", "rate_differs") in {(f.id, f.kind) for f in result.faults}
    assert [u.id for u in utts] == ["a", "a", "a-2", "a"]


def test_D14_splits_of_the_embedded_corpus_stay():
    assert Counter(split_of(f"SENTENCE {i}") for i in range(10000)) == {"train": 7423, "dev": 815, "test": 1762}
    assert [split_of(t) for t in ("HELLO", "AGENT ALREADY LOGGED ON", "ACTIVATED")] == ["train"] * 3


@pytest.mark.parametrize("seed", range(5))
def test_D14_assigned_splits_share_no_speaker_or_no_sentence(seed):
    rng = random.Random(seed)
    known = [Utterance(f"{i}", "", f"T{rng.randrange(99)}", speaker=f"s{rng.randrange(9)}") for i in range(300)]
    known[0].split = "test"
    assign_splits(known, seed)
    by_speaker = {(u.speaker, u.split) for u in known}
    assert len(by_speaker) == len({u.speaker for u in known}) and {u.split for u in known} == {"train", "dev", "test"}
    unknown = [Utterance(f"{i}", "", f"T{rng.randrange(99)}") for i in range(300)]
    unknown[5].split = "dev"
    assign_splits(unknown, seed)
    assert len({(u.text, u.split) for u in unknown}) == len({u.text for u in unknown})


@pytest.mark.parametrize("counts", [[1, 1, 1], [1000, 1, 1], [5] * 4, [100] * 50, list(range(1, 30))])
def test_D14_speakers_fill_every_split(counts):
    chosen = split_speakers({f"s{i}": n for i, n in enumerate(counts)})
    hours = Counter()
    for i, n in enumerate(counts):
        hours[chosen[f"s{i}"]] += n
    assert len(chosen) == len(counts) and set(hours) == {"train", "dev", "test"}
    assert hours["train"] >= max(counts) and hours["test"] <= max(0.4 * sum(counts), max(counts))


def test_a_second_scan_reads_only_what_changed(corpus, monkeypatch):
    import zipformer_recipes.checks as module

    utts, out = [corpus.utt() for _ in range(5)] + [corpus.utt(data=b"x" * 99)], corpus.folder / "out"
    first = run(utts, folder=out)
    seen, real = [], module.scan_audio
    monkeypatch.setattr(module, "scan_audio", lambda audio, *rest: seen.append(audio) or real(audio, *rest))
    again = run(utts, folder=out)
    assert seen == [utts[5].audio] and fault_table(again.report) == fault_table(first.report)
    assert again.facts == first.facts
    soundfile.write(utts[1].audio, noise(1, 50), 16000)
    utts[2].end = 1.5
    seen.clear()
    assert run(utts, folder=out).facts[1].seconds == 1.0
    assert set(seen) == {utts[1].audio, utts[2].audio, utts[5].audio}
    seen.clear()
    run(utts, dataclasses.replace(OPEN, channels="mix"), folder=out)
    assert len(seen) == 6


def test_an_interrupted_scan_goes_on(corpus, monkeypatch):
    import zipformer_recipes.checks as module

    utts, out, real, seen = [corpus.utt() for _ in range(6)], corpus.folder / "out", module.scan_audio, []

    def stops(audio, *rest):
        if len(seen) == 4:
            raise KeyboardInterrupt
        seen.append(audio)
        return real(audio, *rest)

    monkeypatch.setattr(module, "scan_audio", stops)
    with pytest.raises(KeyboardInterrupt):
        run(utts, folder=out)
    lines = (out / "scan.jsonl").read_bytes()
    (out / "scan.jsonl").write_bytes(lines[:-20])
    seen.clear()
    assert len(run(utts, folder=out).kept) == 6
    assert len(seen) == 3, "four were done, the last line is torn"
    monkeypatch.undo()
    assert run(utts, folder=out).report["scan"]["remembered"] == 6


class Killer:
    "Audio whose decoder ends its process, or hangs."

    sampling_rate, num_samples, channel_ids, sources = 16000, 32000, [0], ()

    def __init__(self, hang=False):
        self.hang = hang

    def load_audio(self):
        if self.hang:
            time.sleep(600)
        os._exit(11)


def test_D11_a_crashing_and_a_hanging_decoder_cost_one_file_each(corpus):
    utts = [corpus.utt() for _ in range(20)]
    utts[3].recording, utts[17].recording = Killer(), Killer(hang=True)
    limits = dataclasses.replace(OPEN, stall=4.0)
    result = run(utts, limits, jobs=2)
    assert {u.id for u in utts} - {u.id for u in result.kept} == {utts[3].id, utts[17].id}
    assert kinds(result) == {("audio_unreadable", "drop")} and "died" in result.faults[0].detail


def test_processes_give_what_one_process_gives(corpus):
    utts = [corpus.utt(rate=rate) for rate in (8000, 16000) * 10] + [corpus.utt(data=b"")]
    here, there = run(utts, jobs=0), run(utts, jobs=2)
    assert here.facts == there.facts and here.faults == there.faults
    rows = list(scan_many([], OPEN))
    assert rows == []


def test_D11_a_record_the_reader_gave_up_has_its_one_fault_and_its_hours(corpus):
    lost = Utterance("t.csv:7", "", "", where="t.csv:7")
    lost.faults = [Fault("t.csv:7", "no_supervision", "drop", 36.0, "a cut without supervision", "")]
    torn = Utterance("t.csv:8", "", "", where="t.csv:8")
    torn.faults = [Fault("t.csv:8", "record_unreadable", "drop", 0.0, "3 cells of 4", "")]
    result = run([corpus.utt(), lost, torn])
    assert [(f.id, f.kind) for f in result.faults] == [("t.csv:7", "no_supervision"), ("t.csv:8", "record_unreadable")]
    assert result.report["total"]["set aside"] == {"utterances": 2, "hours": 0.01}


def test_a_script_without_guard_is_told_so(tmp_path):
    soundfile.write(tmp_path / "a.wav", noise(1), 16000)
    script = tmp_path / "script.py"
    script.write_text(
        "from zipformer_recipes.checks import Limits, scan_many\n"
        "list(scan_many([('a.wav', [(0.0, None, None)])], Limits(), jobs=1))\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and 'if __name__ == "__main__"' in done.stderr.splitlines()[-1]


def test_decoding_processes_do_not_load_torch():
    code = "import sys, zipformer_recipes.checks; print('torch' in sys.modules, 'lhotse' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_under_random_dirt(seed, tmp_path):
    rng, corpus = random.Random(seed), Corpus(tmp_path)
    utts = []
    for _ in range(25):
        utts += rng.choice(list(CASES.values()))[2](corpus) if rng.random() < 0.7 else [corpus.utt()]
    rng.shuffle(utts)
    for utt in utts:
        if rng.random() < 0.3:
            utt.declared = rng.choice([1.0, 2.0, 2.05, 30.0])
        if rng.random() < 0.2:
            utt.split = rng.choice(["", "dev", "test"])
    possible = {name: rng.choice(kind.possible[:-1]) for name, kind in KINDS.items()}
    possible.pop("channels_several")
    found = [Fault(f"line{i}", "record_unreadable", "drop", 1.5, "", "") for i in range(seed)]
    limits = dataclasses.replace(OPEN, channels=rng.choice(["first", "mix", "split"]))
    result = run(utts, limits, policy=possible, found=found, folder=tmp_path / "out", full=seed % 3 > 0)
    total = result.report["total"]
    made = total["made by splits"]["utterances"]
    assert len(result.kept) + len(result.quarantined) + seed == len(utts) + seed + made
    assert len(result.kept) == len(result.facts) == total["kept"]["utterances"]
    assert len({u.id for u in result.kept} | {i.utt.id for i in result.quarantined}) == len(utts) + made
    assert sum(f.seconds for f in result.facts) / 3600 == pytest.approx(total["kept"]["hours"], abs=1e-6)
    assert all(u.text and (u.end or 99) > u.start >= 0 and u.split for u in result.kept)
    lines = (tmp_path / "out/quarantine.jsonl").read_text().splitlines()
    assert len(lines) == len(result.quarantined) + seed
    assert all(any(f["action"] == "drop" for f in json.loads(line)["faults"]) for line in lines)
    ids = {u.id for u in result.kept} | {i.utt.id for i in result.quarantined} | {f.id for f in found}
    assert {f.id for f in result.faults} <= ids
    json.dumps(result.report)
    clean = [dataclasses.replace(u, faults=[]) for u in result.kept]
    assert len(run(clean, limits, policy=possible, full=seed % 3 > 0).kept) == len(clean), "what is kept is kept again"


def test_a_repair_that_is_not_booked_is_noticed(corpus, monkeypatch):
    import zipformer_recipes.checks as module

    monkeypatch.setattr(module, "set_end", lambda item, start, end: setattr(item, "seconds", end - start))
    with pytest.raises(DataError, match="hours are neither kept nor set aside"):
        run([corpus.utt(start=0.0, end=2.05)])


def test_an_empty_corpus_is_no_crash():
    result = run([])
    assert result.kept == [] and result.report["total"]["in"]["utterances"] == 0
    assert issubclass(DataError, RecipeError) and Scan().seconds == 0.0
