"""The embedded corpus and bring-your-own CSV: what goes in, what is left out, and every refusal."""

import os
import re
import shutil
from pathlib import Path

import pytest
import soundfile
from toy import tone_speech

from zipformer_recipes import corpus
from zipformer_recipes.checks import split_of
from zipformer_recipes.core import DataError, DiskFullError, ToolError

apt = pytest.mark.skipif(not shutil.which("apt-get"), reason="the embedded corpus comes by apt-get, which is not here")


def test_every_spelling_rule():
    pairs = {
        "Please press 1, 2 or *.": "PLEASE PRESS ONE TWO OR STAR",
        "dial 500 now": "DIAL FIVE HUNDRED NOW",
        "8500": "EIGHT FIVE ZERO ZERO",
        "A.M.": "A M",
        "o'clock": "O'CLOCK",
        "De-activated.": "DEACTIVATED",
        "Call-Forward on Busy.": "CALL FORWARD ON BUSY",
        "press # to enter": "PRESS POUND TO ENTER",
        "3D audio": "THREE D AUDIO",
        "...": "",
        "12": "TWELVE",
        "21": "TWENTY ONE",
    }
    assert {k: corpus.spoken_text(k) for k in pairs} == pairs


def test_tones_and_notes_are_left_out_with_a_reason():
    entries, left = corpus.parse_transcripts(
        "a: [tone]\nb: <beep>\nc: (5 seconds of silence)\nd: Hello (tone plays)\ne: ...\nf: at [@]\n"
    )
    assert entries == {"f": "AT"} and {r["id"] for r in left} == set("abcde") and all(r["reason"] for r in left)


def test_the_same_text_is_always_in_the_same_split():
    texts = corpus.source_sentences(300)
    assert {split_of(t) for t in texts} == {"train"} and texts == corpus.source_sentences(300)
    assert not set(texts) & set(corpus.source_sentences(100, "test"))


def test_forbidden_sentences_never_come_out():
    some = frozenset(corpus.source_sentences(50))
    assert not some & set(corpus.source_sentences(200, forbidden=some))


COMPLETE = "digit teen tens ordinal day month letter phonetic symbol number digits num2".split()  # nothing was chosen


@apt
def test_no_word_of_the_grammar_was_chosen_because_dev_or_test_has_it():
    said = {s: set() for s in ("train", "dev", "test")}
    for row in corpus.target_entries(corpus.cache_folder())[0]:
        said[row["split"]] |= set(row["text"].lower().split())
    classes, patterns, _ = corpus.load_grammar()
    classes = classes | {"patterns": [re.sub(r"\{\w+\}", " ", p) for p in patterns]}
    held = (said["dev"] | said["test"]) - said["train"] - set(classes["common"])
    chosen = {w for n, ws in classes.items() if n not in COMPLETE for m in ws for w in m.replace("-", " ").split()}
    whole = {w for n in COMPLETE for m in classes[n] for w in m.split()}
    assert len(classes["common"]) == 3862 and len(held) > 40, "the check has something to find"
    assert held & chosen <= whole


@apt
def test_embedded_corpus_is_whole_and_its_splits_are_disjoint():
    cache = corpus.cache_folder()
    rows, left = corpus.target_entries(cache)
    texts = {s: {r["text"] for r in rows if r["split"] == s} for s in ("train", "dev", "test")}
    assert len(rows) == 550 and sum("silence/" in r["id"] for r in left) == 10
    assert not texts["train"] & texts["test"] and not texts["dev"] & texts["test"] and not texts["train"] & texts["dev"]
    held = texts["dev"] | texts["test"]
    assert not held & set(corpus.source_sentences(3000, forbidden=frozenset(held)))
    shares = [sum(r["split"] == s for r in rows) / len(rows) for s in texts]
    assert abs(shares[0] - 0.75) < 0.02 and abs(shares[2] - 0.17) < 0.02


@apt
def test_synthetic_speech_is_the_same_twice_and_kept_in_the_cache(tmp_path):
    root = corpus.fetch_packages(corpus.VOICE_PACKAGES, corpus.cache_folder(), with_dependencies=True)
    for text in corpus.source_sentences(6):
        corpus.synthesize(text, tmp_path / "a.flac", root)
        corpus.synthesize(text, tmp_path / "b.flac", root)
        assert (tmp_path / "a.flac").read_bytes() == (tmp_path / "b.flac").read_bytes()
        assert soundfile.info(tmp_path / "a.flac").samplerate == 8000
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob("*.wav"))


def test_without_apt_the_way_out_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match="--source"):
        corpus.fetch_packages(corpus.TARGET_PACKAGES, tmp_path / "cache")


def test_without_flite_the_error_is_typed_and_nothing_is_left(tmp_path):
    with pytest.raises(ToolError, match="not installed"):
        corpus.synthesize("HELLO", tmp_path / "a.flac", tmp_path / "empty")
    assert not list(tmp_path.iterdir())


def test_a_damaged_download_is_removed_and_named(tmp_path):
    (tmp_path / "flite_2.deb").write_bytes(b"half")
    with pytest.raises(DataError, match="damaged"):
        corpus.checked_package(tmp_path, "flite", {"Size": "4", "SHA256": "00"})
    assert not list(tmp_path.iterdir())


def test_other_contents_than_measured_are_refused(monkeypatch):
    if not shutil.which("apt-get"):
        pytest.skip("no apt-get")
    monkeypatch.setattr(corpus, "TARGET_DIGEST", "0")
    with pytest.raises(DataError, match="not the one this book was measured on"):
        corpus.target_entries(corpus.cache_folder())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_a_typed_error(tmp_path, monkeypatch):
    real = soundfile.write

    def write(path, *args, **kwargs):
        return real("/dev/full", *args, **kwargs)

    monkeypatch.setattr(soundfile, "write", write)
    (tmp_path / "a.flac").write_bytes(b"old")
    with pytest.raises(DiskFullError):
        corpus.save_flac(tmp_path / "a.flac", tone_speech("ONE" * 1), 8000)
    assert Path(tmp_path, "a.flac").read_bytes() == b"old"
