"The same corpus written in every format is read alike; whatever is wrong in one stays in the list with its fault."

import gzip
import io
import json
import pickle
import random
import re
import shutil
import sys
import tarfile
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import soundfile
from toy import tone_speech

from zipformer_recipes import sources
from zipformer_recipes.core import DataError, DiskFullError, ToolError
from zipformer_recipes.sources import ACCEPTED, SOURCE_KINDS, Fault, Utterance, is_dropped, read_source, recognise

RATE = 8000
TEXTS = ["ONE", "TWO THREE", "FOUR FIVE STAR", "POUND", "ONE TWO", "STAR STAR THREE FOUR"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    "Six flac files with id, text, split, speaker and seconds; ids as LibriSpeech has them."
    folder, rows = tmp_path_factory.mktemp("corpus"), []
    for i, text in enumerate(TEXTS):
        name = f"{10 + i}-7-000{i}"
        samples = tone_speech(text, RATE, i)
        soundfile.write(folder / f"{name}.flac", samples, RATE)
        split = ("train", "train", "train", "dev", "test", "test")[i]
        rows.append({"id": name, "audio": str(folder / f"{name}.flac"), "text": text, "split": split,
                     "speaker": str(10 + i), "seconds": len(samples) / RATE})  # fmt: skip
    return rows


def write_text(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def put(row, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(row["audio"], path)
    return path


def lines(rows, pattern):
    return "".join(pattern.format(**row) + "\n" for row in rows)


def by_split(rows):
    return {split: [r for r in rows if r["split"] == split] for split in ("train", "dev", "test")}


def as_csv(rows, folder):
    head = "id,audio,text,split,speaker\n"
    return write_text(folder / "all.csv", head + lines(rows, '{id},{audio},"{text}",{split},{speaker}'))


def as_tsv_folder(rows, folder):
    "Common Voice: a table a split, paths relative to clips."
    for split, some in by_split(rows).items():
        head = "client_id\tpath\tsentence\tid\n"
        write_text(folder / f"{split}.tsv", head + lines(some, "{speaker}\t{id}.flac\t{text}\t{id}"))
        for row in some:
            put(row, folder / "clips" / f"{row['id']}.flac")
    write_text(folder / "validated.tsv", head + lines(rows, "{speaker}\t{id}.flac\t{text}\t{id}"))
    write_text(folder / "reported.tsv", "sentence\treason\n")
    return folder


def as_jsonl_gz(rows, folder):
    text = "".join(json.dumps({k: r[k] for k in ("id", "audio", "text", "split", "speaker")}) + "\n" for r in rows)
    folder.mkdir(exist_ok=True)
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder / "all.jsonl.gz"


def as_three_tables(rows, folder):
    paths = {s: write_text(folder / f"part_{s}.csv", "id,audio,text\n" + lines(some, "{id},{audio},{text}"))
             for s, some in by_split(rows).items()}  # fmt: skip
    return ",".join(f"{split}={path}" for split, path in paths.items())


def as_folder(rows, folder):
    for row in rows:
        put(row, folder / f"{row['id']}.flac")
        write_text(folder / f"{row['id']}.txt", row["text"] + "\n")
    return folder


def as_kaldi(rows, folder):
    for split, some in by_split(rows).items():
        where = folder / split
        write_text(where / "wav.scp", lines(some[:1], "{id} flac -d -c -s {audio} |") + lines(some[1:], "{id} {audio}"))
        write_text(where / "text", lines(some, "{id} {text}"))
        write_text(where / "utt2spk", lines(some, "{id} {speaker}"))
        write_text(where / "spk2gender", lines(some, "{speaker} f"))
        write_text(where / "utt2dur", lines(some, "{id} {seconds}"))
    return folder


def as_kaldi_segments(rows, folder):
    "All in one long recording."
    import numpy as np

    parts = [soundfile.read(row["audio"])[0] for row in rows]
    folder.mkdir(exist_ok=True)
    soundfile.write(folder / "long.wav", np.concatenate(parts), RATE)
    at, out = 0, ""
    for row, part in zip(rows, parts, strict=True):
        out += f"{row['id']} long {at / RATE:.6f} {(at + len(part)) / RATE:.6f}\n"
        at += len(part)
    write_text(folder / "segments", out)
    write_text(folder / "wav.scp", "long long.wav\n")
    write_text(folder / "text", lines(rows, "{id} {text}"))
    return folder


def lhotse_pair(rows):
    from lhotse import Recording, RecordingSet, SupervisionSegment, SupervisionSet

    recordings = RecordingSet.from_recordings(Recording.from_file(r["audio"], recording_id=r["id"]) for r in rows)
    supervisions = SupervisionSet.from_segments(
        SupervisionSegment(r["id"], r["id"], 0.0, recordings[r["id"]].duration, text=r["text"], speaker=r["speaker"])
        for r in rows
    )
    return recordings, supervisions


def lhotse_cuts(rows):
    from lhotse import CutSet

    return CutSet.from_manifests(*lhotse_pair(rows)).to_eager()


def as_manifests(rows, folder):
    folder.mkdir(exist_ok=True)
    for split, some in by_split(rows).items():
        recordings, supervisions = lhotse_pair(some)
        recordings.to_file(folder / f"toy_recordings_{split}.jsonl.gz")
        supervisions.to_file(folder / f"toy_supervisions_{split}.jsonl.gz")
    return folder


def as_cuts(rows, folder):
    "icefall's names, a noise set beside them."
    folder.mkdir(exist_ok=True)
    for split, some in by_split(rows).items():
        name = {"train": "train-clean-100", "dev": "dev-clean", "test": "test-other"}[split]
        lhotse_cuts(some).to_file(folder / f"librispeech_cuts_{name}.jsonl.gz")
    lhotse_cuts(rows[:1]).drop_supervisions().to_file(folder / "musan_cuts.jsonl.gz")
    return folder


def as_resampled_cuts(rows, folder):
    folder.mkdir(exist_ok=True)
    lhotse_cuts(rows).resample(16000).to_file(folder / "cuts.jsonl")
    return folder / "cuts.jsonl"


def as_shar(rows, folder):
    for split, some in by_split(rows).items():
        (folder / split).mkdir(parents=True)
        lhotse_cuts(some).to_shar(folder / split, fields={"recording": "flac"}, shard_size=2, verbose=False)
    return folder


def as_webdataset(rows, folder):
    from lhotse.dataset.webdataset import export_to_webdataset

    folder.mkdir(exist_ok=True)
    for split, some in by_split(rows).items():
        export_to_webdataset(lhotse_cuts(some), str(folder / f"{split}.tar"), verbose=False, fault_tolerant=False)
    return folder


def write_tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def audio_bytes(row):
    return Path(row["audio"]).read_bytes()


def as_plain_tar(rows, folder):
    members = []
    for r in rows:
        members += [(f"{r['id']}.flac", audio_bytes(r)), (f"{r['id']}.json", json.dumps({"text": r["text"]}).encode())]
    return write_tar(folder / "shard-0.tar", members)


def nemo_row(row):
    return {"id": row["id"], "audio_filepath": row["audio"], "duration": row["seconds"], "text": row["text"]}


def as_nemo(rows, folder):
    return write_text(folder / "manifest.json", "".join(json.dumps(nemo_row(r)) + "\n" for r in rows))


def as_nemo_tarred(rows, folder):
    write_tar(folder / "audio_0.tar", [(f"{r['id']}.flac", audio_bytes(r)) for r in rows[:3]])
    write_tar(folder / "audio_1.tar", [(f"{r['id']}.flac", audio_bytes(r)) for r in rows[3:]])
    made = [nemo_row(r) | {"audio_filepath": f"{r['id']}.flac", "shard_id": i // 3} for i, r in enumerate(rows)]
    write_text(folder / "tarred_audio_manifest.json", "".join(json.dumps(row) + "\n" for row in made))
    return folder


def hub_rows(rows, audio):
    return [{"id": r["id"], "audio": audio(r), "sentence": r["text"]} for r in rows]


def as_parquet(rows, folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder.mkdir(exist_ok=True)
    for split, some in by_split(rows).items():
        name = {"dev": "validation"}.get(split, split)
        table = pyarrow.Table.from_pylist(hub_rows(some, lambda r: {"bytes": audio_bytes(r), "path": "x.wav"}))
        parquet.write_table(table, folder / f"{name}-00000-of-00001.parquet")
    return folder


def as_arrow(rows, folder):
    "As save_to_disk of the datasets package leaves it: a folder a split, a stream in it; here with paths."
    pyarrow = pytest.importorskip("pyarrow")
    for split, some in by_split(rows).items():
        table = pyarrow.Table.from_pylist(hub_rows(some, lambda r: {"bytes": None, "path": r["audio"]}))
        where = folder / {"dev": "validation"}.get(split, split)
        where.mkdir(parents=True)
        with pyarrow.OSFile(str(where / "data-00000-of-00001.arrow"), "wb") as file:
            with pyarrow.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table)
        write_text(where / "state.json", "{}")
    return folder


def as_librispeech(rows, folder):
    for row in rows:
        part = {"train": "train-clean-100", "dev": "dev-clean", "test": "test-other"}[row["split"]]
        speaker, chapter, _ = row["id"].split("-")
        where = folder / "LibriSpeech" / part / speaker / chapter
        put(row, where / f"{row['id']}.flac")
        write_text(where / f"{speaker}-{chapter}.trans.txt", f"{row['id']} {row['text']}\n")
    write_text(folder / "LibriSpeech" / "README.TXT", "LibriSpeech\n")
    return folder


def as_aishell(rows, folder):
    root = folder / "data_aishell"
    for row in rows:
        where = root / "wav" / row["split"] / f"S{row['speaker']}" / f"{row['id']}.wav"
        where.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(where, *soundfile.read(row["audio"]))
    write_text(root / "transcript" / "aishell_transcript_v0.8.txt", lines(rows, "{id} {text}"))
    return folder


def giga_entries(rows):
    tags = {"train": ["{XL}", "{S}"], "dev": ["{DEV}"], "test": ["{TEST}"]}
    return [{"aid": f"A{r['id']}", "path": f"audio/{r['id']}.flac", "duration": r["seconds"], "sample_rate": RATE,
             "channels": 1, "segments": [{"sid": r["id"], "begin_time": 0.0, "end_time": r["seconds"],
             "speaker": r["speaker"], "text_tn": r["text"], "subsets": tags[r["split"]]}]} for r in rows]  # fmt: skip


def as_gigaspeech(rows, folder):
    for row in rows:
        put(row, folder / "audio" / f"{row['id']}.flac")
    whole = {"dataset": "GigaSpeech", "audios": giga_entries(rows)}
    write_text(folder / "GigaSpeech.json", json.dumps(whole, indent=1))
    return f"gigaspeech:{folder}?subset=S"


def as_recipe(rows, folder):
    "LJSpeech's layout, through lhotse's recipe."
    for row in rows:
        (folder / "wavs").mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / "wavs" / f"{row['id']}.wav", *soundfile.read(row["audio"]))
    write_text(folder / "metadata.csv", lines(rows, "{id}|{text}|{text}"))
    return f"ljspeech:{folder}"


FORMATS = {name[3:]: f for name, f in globals().copy().items() if name.startswith("as_")}
KINDS = {"csv": "table", "tsv_folder": "table", "jsonl_gz": "table", "three_tables": "table", "kaldi_segments": "kaldi",
         "resampled_cuts": "cuts", "plain_tar": "webdataset", "nemo_tarred": "nemo", "arrow": "parquet"}  # fmt: skip
NO_SPLIT = {"folder", "kaldi_segments", "resampled_cuts", "plain_tar", "nemo", "nemo_tarred", "recipe"}
NO_SPEAKER = NO_SPLIT - {"resampled_cuts"} | {"three_tables", "parquet", "arrow"}


def seconds_of(utterance):
    length = soundfile.info(utterance.audio).duration
    return (length if utterance.end is None else utterance.end) - utterance.start


@pytest.mark.parametrize("form", FORMATS)
def test_D1_every_format_is_read_alike(form, corpus, tmp_path):
    source = FORMATS[form](corpus, tmp_path / "data")
    if form != "three_tables":
        assert recognise(source) == KINDS.get(form, form)
    utterances, report = read_source(source, extract_dir=str(tmp_path / "kept"))
    found = {u.id: u for u in utterances}
    assert len(utterances) == report["records"] == len(corpus) and set(found) == {r["id"] for r in corpus}
    assert report["faults"] == {} and report["dropped"] == 0 and report["files"]
    for row in corpus:
        u = found[row["id"]]
        assert u.text == row["text"] and u.where and u.recording is None
        assert seconds_of(u) == pytest.approx(row["seconds"], abs=1e-6)
        assert u.declared is None or form == "kaldi_segments" or u.declared == pytest.approx(row["seconds"])
        assert u.split == ("" if form in NO_SPLIT else row["split"])
        assert form in NO_SPEAKER or u.speaker.lstrip("S") == row["speaker"]
    if form in ("shar", "webdataset", "plain_tar", "nemo_tarred", "parquet"):
        assert all(Path(u.audio).is_relative_to(tmp_path / "kept") for u in utterances)
        samples = soundfile.read(found[corpus[2]["id"]].audio)[0]
        assert abs(samples - soundfile.read(corpus[2]["audio"])[0]).max() < 1e-4


def test_every_kind_has_a_test():
    assert {KINDS.get(form, form) for form in FORMATS} == set(ACCEPTED) == set(sources.READERS)


def test_D1_usual_names_are_recognised_and_said(corpus, tmp_path):
    _, report = read_source(as_tsv_folder(corpus, tmp_path / "cv"))
    assert report["aliases"] == {"client_id": "speaker", "path": "audio", "sentence": "text"}
    assert report["ignored"] == {"validated.tsv": "its name is no split",
                                 "reported.tsv": "no columns for audio and text"}  # fmt: skip
    assert report["splits"] == {"train": 3, "dev": 1, "test": 2}


def test_D1_other_names_by_mapping(tmp_path):
    table = write_text(tmp_path / "a.csv", "sound_id,words,who,path\n1.wav,ONE,s1,wrong.wav\n")
    (u,), report = read_source(table, columns="audio=sound_id,text=words,speaker=who")
    assert (Path(u.audio).name, u.text, u.speaker) == ("1.wav", "ONE", "s1") and report["aliases"]["who"] == "speaker"
    with pytest.raises(DataError, match="sound_id") as error:
        read_source(table)
    assert "no column for text" in error.value.what and "words" in error.value.what
    with pytest.raises(DataError, match="did you mean sound_id"):
        read_source(table, columns="audio=soundid")
    with pytest.raises(DataError, match="did you mean audio"):
        read_source(table, columns="adio=sound_id")


@pytest.mark.parametrize("line, detail", [
    ('{"audio": "a.wav", "text": "X", "start": "soon"}', "time in seconds"),
    ('{"audio": "a.wav", "text": "X", "start": -1}', "start is -1"),
    ('{"audio": "a.wav", "text": "X", "duration": NaN}', "nan"),
    ('{"audio": "a.wav", "text": "X", "start": 2, "end": 1}', "not after"),
    ('{"audio": "a.wav", "text": ["X"]}', "list"),
    ('{"audio": "a.wav"}', "no text"),
    ('{"text": "X"}', "no audio"),
    ('{"audio": "a.wav", "text": "X", "channel": "left"}', "left"),
    ('{"audio": "a.wav", ', "no JSON"),
    ("[1, 2]", "list"),
])  # fmt: skip
def test_D11_a_bad_line_is_a_fault_with_its_place(line, detail, tmp_path):
    good = '{"audio": "g.wav", "text": "GOOD"}\n'
    utterances, report = read_source(write_text(tmp_path / "a.jsonl", good + line + "\n" + good))
    assert [is_dropped(u) for u in utterances] == [False, True, False] and report["faults"] == {"record_unreadable": 1}
    assert utterances[1].where.endswith("a.jsonl:2") and detail in utterances[1].faults[0].detail


def test_D11_an_open_quote_costs_one_line(tmp_path):
    rows = [f'{i}.wav,"TEXT, {i}"' for i in range(60)]
    rows[10] = '10.wav,"TEXT'
    rows[30] = "30.wav"
    rows[31] = '31.wav,"TWO\nLINES"'
    utterances, _ = read_source(write_text(tmp_path / "a.csv", "audio,text\n" + "\n".join(rows) + "\n"))
    assert [i for i, u in enumerate(utterances) if u.faults] == [10, 30] and len(utterances) == 60
    assert utterances[31].text == "TWO\nLINES" and utterances[40].where.endswith(":43")


def test_random_dirt_conserves_the_records(tmp_path):
    "Whatever is done to the lines of a table: as many records as lines, and the good ones whole."
    rng = random.Random(7)
    dirt = ["", "x", "a,b,c,d", '"', "\x00", '{"', "a.wav", ',,"', '"a.wav"x,y', 'a.wav,"b"c']
    for trial in range(50):
        rows, bad = [f"{i}.wav,TEXT {i}" for i in range(40)], set(rng.sample(range(40), 8))
        for i in bad:
            rows[i] = rng.choice(dirt[1:])
        utterances, _ = read_source(write_text(tmp_path / f"{trial}.csv", "audio,text\n" + "\n".join(rows) + "\n"))
        assert len(utterances) == 40
        assert [(Path(u.audio).name, u.text) for u in utterances if not u.faults] == [
            (f"{i}.wav", f"TEXT {i}") for i in range(40) if i not in bad]  # fmt: skip


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.tar", "a.parquet", "cuts.jsonl.gz", "wav.scp", "what.bin"])
def test_D13_lfs_pointers_name_the_command(name, tmp_path):
    write_text(tmp_path / name, "version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 99\n")
    with pytest.raises(DataError, match="git lfs pull"):
        read_source(tmp_path / name)


def test_D13_an_lfs_pointer_inside_a_folder(tmp_path, corpus):
    as_cuts(corpus, tmp_path / "fbank")
    name = "librispeech_cuts_dev-clean.jsonl.gz"
    write_text(tmp_path / "fbank" / name, "version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 99\n")
    with pytest.raises(DataError, match="git lfs pull") as error:
        read_source(tmp_path / "fbank")
    assert error.value.where.endswith(name)


def test_other_encodings_are_refused_and_one_bad_line_is_not(tmp_path):
    text = "audio,text\na.wav,zwölf\nb.wav,fünf\n"
    for encoding in ("latin1", "utf-16"):
        path = tmp_path / f"{encoding}.csv"
        path.write_bytes(text.encode(encoding))
        with pytest.raises(DataError, match="iconv"):
            read_source(path)
    (tmp_path / "one.csv").write_bytes(b"\xef\xbb\xbf" + text.encode() + b"c.wav,f\xfcnf\nd.wav,elf\n")
    utterances, _ = read_source(tmp_path / "one.csv")
    assert [u.text for u in utterances] == ["zwölf", "fünf", "", "elf"] and "UTF-8" in utterances[2].faults[0].detail


def test_splits_have_many_names_and_unknown_ones_are_faults(tmp_path):
    words = ["train", "Valid", "validation", "dev", "eval", "TEST", "", "heldout", "B"]
    rows = [f"{i}.wav,X,{word}" for i, word in enumerate(words)]
    table = write_text(tmp_path / "a.csv", "\n".join(["audio,text,split", *rows]))
    utterances, report = read_source(table, split_names="heldout=dev")
    assert [u.split for u in utterances[:8]] == ["train", "dev", "dev", "dev", "dev", "test", "", "dev"]
    assert report["faults"] == {"split_unknown": 1} and "split_names" in utterances[8].faults[0].remedy
    assert utterances[8].text == "X"
    with pytest.raises(DataError, match="did you mean test"):
        read_source(table, split_names="heldout=tests")


@pytest.mark.parametrize("name, split", [
    ("train-clean-100", "train"), ("dev-other", "dev"), ("test_net", "test"), ("validation-00000-of-00002", "dev"),
    ("cuts_XL", "train"), ("eval2000", "dev"), ("cv_tr_test", "test"), ("tr", ""), ("contest", ""),
    ("latest", ""), ("s", "")])  # fmt: skip
def test_split_names(name, split):
    assert sources.split_of_name(name) == split


def test_a_folder_keeps_what_has_no_partner(tmp_path, corpus):
    as_folder(corpus[:3], tmp_path / "a")
    (tmp_path / "a" / f"{corpus[0]['id']}.txt").unlink()
    (tmp_path / "a" / f"{corpus[1]['id']}.flac").unlink()
    write_text(tmp_path / "a" / "README.txt", "made by us")
    utterances, report = read_source(tmp_path / "a")
    assert report["faults"] == {"text_empty": 1, "audio_missing": 1} and report["records"] == 3
    assert report["ignored"] == {"README.txt": "no audio of this name"}
    assert [u.text for u in utterances if not u.faults] == [corpus[2]["text"]]


def test_stray_tables_do_not_hide_a_folder(tmp_path, corpus):
    as_folder(corpus, tmp_path / "a")
    write_text(tmp_path / "a" / "config.json", '{"rate": 8000}')
    write_text(tmp_path / "a" / "durations.csv", "id,seconds\n")
    assert recognise(tmp_path / "a") == "folder" and read_source(tmp_path / "a")[1]["records"] == 6
    as_tsv_folder(corpus, tmp_path / "b")
    write_text(tmp_path / "b" / "train_stats.json", '{"hours": 1}')
    _, report = read_source(tmp_path / "b")
    assert report["records"] == 6 and report["ignored"]["train_stats.json"] == "no columns for audio and text"


def test_a_folder_names_its_splits_and_pairs_parallel_trees(tmp_path, corpus):
    for row in corpus:
        put(row, tmp_path / row["split"] / "wav" / f"{row['id']}.flac")
        write_text(tmp_path / row["split"] / "txt" / f"{row['id']}.trn", f"{row['text']} ({row['id']})\n")
    utterances, report = read_source(tmp_path)
    assert report["faults"] == {}
    assert {(u.text, u.split) for u in utterances} == {(r["text"], r["split"]) for r in corpus}


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_delimiters_and_compression(mark, tmp_path):
    rows = [["audio", "text", "speaker"], ["a.wav", "ONE", "s"], ["b.wav", "TWO", "t"]]
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress("\n".join(map(mark.join, rows)).encode()))
    utterances, report = read_source(tmp_path / "a.csv.gz")
    assert [(u.text, u.speaker) for u in utterances] == [("ONE", "s"), ("TWO", "t")] and report["kind"] == "table"


def test_one_part_of_librispeech(tmp_path, corpus):
    as_librispeech(corpus, tmp_path)
    utterances, report = read_source(tmp_path / "LibriSpeech" / "train-clean-100")
    assert report["kind"] == "librispeech" and report["splits"] == {"train": 3} and len(utterances) == 3


def test_a_lost_pointer_among_tables_is_not_passed_over(tmp_path, corpus):
    as_tsv_folder(corpus, tmp_path)
    write_text(tmp_path / "train.tsv", "version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 99\n")
    with pytest.raises(DataError, match="git lfs pull"):
        read_source(tmp_path)


def test_samples_of_a_tar_with_dots_in_their_names(tmp_path, corpus):
    members = [(f"talk.{i}.{end}", data) for i in range(2) for end, data in
               (("flac", audio_bytes(corpus[i])), ("txt", corpus[i]["text"].encode()))]  # fmt: skip
    utterances, _ = read_source(write_tar(tmp_path / "a.tar", members), extract_dir=str(tmp_path))
    assert [u.text for u in utterances] == [row["text"] for row in corpus[:2]]


def test_shar_with_features_and_without_audio(tmp_path, corpus):
    from lhotse import Fbank, FbankConfig

    extractor = Fbank(FbankConfig(num_mel_bins=80, sampling_rate=RATE, high_freq=-400.0))
    cuts = lhotse_cuts(corpus).compute_and_store_features(extractor, tmp_path / "feats", progress_bar=False).to_eager()
    for name, fields in (("both", {"recording": "wav", "features": "lilcom"}), ("features", {"features": "lilcom"})):
        (tmp_path / name).mkdir()
        cuts.to_shar(tmp_path / name, fields=fields, verbose=False, warn_unused_fields=False)
    utterances, report = read_source(tmp_path / "both", extract_dir=str(tmp_path / "kept"))
    assert report["faults"] == {} and [seconds_of(u) for u in utterances] == [r["seconds"] for r in corpus]
    utterances, report = read_source(tmp_path / "features", extract_dir=str(tmp_path / "kept"))
    assert len(utterances) == 6 and report["faults"] == {} and utterances[0].audio == corpus[0]["audio"]


def test_links_are_followed_once(tmp_path, corpus):
    as_folder(corpus, tmp_path / "real")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "up").symlink_to(tmp_path / "a")
    _, report = read_source(tmp_path / "a")
    assert report["records"] == 6 and report["splits"] == {"train": 6}


def test_optional_keys_of_json_rows(tmp_path):
    rows = [{"audio": "a.wav", "text": "ONE"}, {"audio": "b.wav", "text": "TWO", "who": "s"}]
    table = write_text(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert [u.speaker for u in read_source(table, columns="speaker=who")[0]] == ["", "s"]
    with pytest.raises(DataError, match="did you mean who"):
        read_source(table, columns="speaker=whom")


def test_no_source_is_an_error():
    for source in ("", " ", "train="):
        with pytest.raises(DataError):
            read_source(source)


def test_no_command_of_wav_scp_is_ever_run(tmp_path, monkeypatch):
    import os
    import subprocess

    def ran(*args, **kwargs):
        raise AssertionError("a command was run")

    for owner, name in ((subprocess, "Popen"), (subprocess, "run"), (os, "system"), (os, "popen")):
        monkeypatch.setattr(owner, name, ran)
    mark = tmp_path / "mark"
    entries = ["a.wav", "flac -dc b.flac |", f"touch {mark} |", f"cat c.wav; touch {mark} |",
               f"sox $(touch {mark}) -t wav - |", "sox d.wav -t wav - trim 0 1 |", "ffmpeg -ss 3 -i e.mp3 -f wav - |",
               "raw.ark:77", "sox 'f.wav -t wav - |"]  # fmt: skip
    write_text(tmp_path / "d" / "wav.scp", "".join(f"u{i} {entry}\n" for i, entry in enumerate(entries)))
    write_text(tmp_path / "d" / "text", "".join(f"u{i} TEXT\n" for i in range(len(entries))))
    utterances, report = read_source(tmp_path / "d")
    assert [is_dropped(u) for u in utterances] == [False, False] + [True] * 7 and not mark.exists()
    assert all("wav.scp" in u.faults[0].remedy and u.text == "TEXT" for u in utterances[2:])


@pytest.mark.parametrize("command, found", [
    ("sph2pipe -f wav -p -c 2 /a/b.sph |", ("/a/b.sph", 1)), ("/opt/sph2pipe -f wav b.sph |", ("b.sph", None)),
    ("flac -dcs 'a b.flac' |", ("a b.flac", None)), ("sox x.mp3 -r 16k -b 16 -t wav - remix 2 |", ("x.mp3", 1)),
    ("sox -t sph x.sph -t wav - rate 16k |", ("x.sph", None)), ("cat x.wav", ("x.wav", None)),
    ("ffmpeg -nostdin -i x.m4a -ar 16000 -f wav pipe:1 |", ("x.m4a", None))])  # fmt: skip
def test_plain_decoders_are_seen_through(command, found):
    assert sources.plain_file_of_pipe(command) == found


@pytest.mark.parametrize("command", [
    "cat $HOME/a.wav |", "cat a*.wav>b.wav |", "flac -dc --skip=3 a.flac |", "sox a.wav b.wav -t wav - |", "|", "",
    "ffmpeg -i a.mp3 b.wav |", "sph2pipe -t 1:2 a.sph |", "sox -v 2 a.wav -t wav - |", "sox a.wav -t wav - remix 1,2 |",
    "gunzip -c a.wav.gz |", "sph2pipe -c two a.sph |", "sox 'a.wav |"])  # fmt: skip
def test_commands_that_do_more_are_refused(command):
    with pytest.raises(ValueError):
        sources.plain_file_of_pipe(command)


def test_D8_a_supervision_outside_its_cut_is_dropped(corpus, tmp_path):
    cut = lhotse_cuts(corpus[:1])[0].to_dict()
    for start in (-3.0, 9.0):
        cut["supervisions"][0] |= {"start": start, "duration": 1.0}
        write_text(tmp_path / "cuts.jsonl", json.dumps(cut) + "\n")
        (u,), report = read_source(tmp_path / "cuts.jsonl")
        assert is_dropped(u) and report["faults"]["past_end"] == 1 and report["dropped"] == 1


def test_kaldi_paths_are_relative_to_the_recipe(tmp_path, corpus):
    put(corpus[0], tmp_path / "egs" / "wavs" / "a.flac")
    write_text(tmp_path / "egs" / "data" / "train" / "wav.scp", "a wavs/a.flac\n")
    write_text(tmp_path / "egs" / "data" / "train" / "text", "a\tONE TWO\nb TWO\n")
    utterances, report = read_source(tmp_path / "egs" / "data" / "train")
    assert Path(utterances[0].audio).is_file() and report["faults"] == {"audio_missing": 1}
    assert utterances[0].text == "ONE TWO"


def test_D8_late_none_several_and_past_the_end(corpus, tmp_path):
    from lhotse import CutSet
    from lhotse.utils import fastcopy

    cuts = list(lhotse_cuts(corpus))
    sup = cuts[3].supervisions[0]
    half = sup.duration / 2
    halves = [fastcopy(sup, id=f"{sup.id}-{i}", start=i * half, duration=half) for i in range(2)]
    made = [
        cuts[0],
        fastcopy(cuts[1], supervisions=[]),
        fastcopy(cuts[2], supervisions=[cuts[2].supervisions[0].trim(cuts[2].duration - 0.25).with_offset(0.25)]),
        fastcopy(cuts[3], supervisions=halves),
        fastcopy(cuts[4], supervisions=[fastcopy(cuts[4].supervisions[0], duration=cuts[4].duration + 0.5)]),
        fastcopy(cuts[5], supervisions=[fastcopy(cuts[5].supervisions[0], start=0.0015)]),
    ]
    CutSet.from_cuts(made).to_file(tmp_path / "cuts.jsonl.gz")
    utterances, report = read_source(tmp_path / "cuts.jsonl.gz")
    assert report["faults"] == {"no_supervision": 1, "late_start": 1, "several_supervisions": 2, "past_end": 1}
    assert report["records"] == 7 and report["dropped"] == 1 and report["faults"].keys() <= SOURCE_KINDS.keys()
    late, first, second, past, near = utterances[2:]
    assert late.start == 0.25 and seconds_of(late) == pytest.approx(cuts[2].duration - 0.25)
    assert (first.end, second.start) == (pytest.approx(half), pytest.approx(half)) and late.faults[0].action == "trim"
    assert seconds_of(past) == pytest.approx(cuts[4].duration) and past.faults[0].seconds == pytest.approx(0.5)
    assert near.faults == [] and utterances[1].faults[0].action == "drop"
    assert utterances[1].faults[0].seconds == pytest.approx(cuts[1].duration)


def test_D8_mixed_and_padded_cuts_are_faults(corpus, tmp_path):
    from lhotse import CutSet

    cuts = list(lhotse_cuts(corpus[:2]))
    CutSet.from_cuts([cuts[0].pad(duration=9.0), cuts[0].mix(cuts[1]), cuts[1]]).to_file(tmp_path / "cuts.jsonl")
    utterances, report = read_source(tmp_path / "cuts.jsonl")
    assert [is_dropped(u) for u in utterances] == [True, True, False] and "MixedCut" in utterances[0].faults[0].detail


def test_features_stay_where_they_fit(corpus, tmp_path):
    "icefall's data/fbank with features: read from elsewhere, they load; of another span or size they are left out."
    from lhotse import CutSet, Fbank, FbankConfig
    from lhotse.utils import fastcopy

    where = tmp_path / "egs" / "data" / "fbank"
    where.mkdir(parents=True)
    made = {}
    for bins in (80, 40):
        extractor = Fbank(FbankConfig(num_mel_bins=bins, sampling_rate=RATE, high_freq=-400.0))
        cuts = lhotse_cuts(corpus).compute_and_store_features(extractor, where / f"feats_{bins}", progress_bar=False)
        made[bins] = list(cuts)
    rows = [json.loads(json.dumps(cut.to_dict())) for cut in (*made[80][:2], made[40][2])]
    late = fastcopy(made[80][3], supervisions=[fastcopy(made[80][3].supervisions[0], start=0.2)])
    rows += [late.to_dict(), made[80][4].to_dict()]
    for row in rows:  # as icefall writes them: relative to the recipe's folder
        row["features"]["storage_path"] = re.sub(".*/data/", "data/", str(row["features"]["storage_path"]))
    rows[4]["features"]["storage_path"] = "data/fbank/gone.lca"
    write_text(where / "cuts_train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    utterances, report = read_source(where)
    assert report["splits"] == {"train": 5} and report["faults"]["features_unusable"] == 3
    assert [u.features is not None for u in utterances] == [True, True, False, False, False]
    assert not any(is_dropped(u) for u in utterances)
    assert utterances[0].features.load().shape == (made[80][0].num_frames, 80)
    assert CutSet.from_cuts(made[80][:1])[0].load_features().tolist() == utterances[0].features.load().tolist()


def test_a_recording_that_is_no_plain_file_is_kept(corpus, tmp_path):
    cut = lhotse_cuts(corpus[:1])[0].perturb_speed(1.1)
    write_text(tmp_path / "cuts.jsonl", json.dumps(cut.to_dict()) + "\n")
    (u,), _ = read_source(tmp_path / "cuts.jsonl")
    assert u.audio == "" and u.recording.load_audio().shape == (1, cut.num_samples)
    assert u.declared == pytest.approx(corpus[0]["seconds"] / 1.1, abs=1e-3)


def test_channels_point_into_the_file(tmp_path):
    from lhotse import MonoCut, Recording, SupervisionSegment

    soundfile.write(tmp_path / "two.wav", [[0.1, 0.2]] * 8000, 8000)
    cut = Recording.from_file(tmp_path / "two.wav").to_cut()
    sup = SupervisionSegment("u", "two", 0.0, 1.0, channel=1, text="X")
    mono = MonoCut("c", 0.0, 1.0, 1, [sup], recording=cut.recording)
    write_text(tmp_path / "cuts.jsonl", json.dumps(mono.to_dict()) + "\n")
    (u,), _ = read_source(tmp_path / "cuts.jsonl")
    assert u.channel == 1 and u.recording is None and Path(u.audio).name == "two.wav"


def test_D8_parts_that_contain_one_another(corpus, tmp_path):
    where = tmp_path / "fbank"
    where.mkdir()
    for i, name in enumerate(("S", "XL", "XL_raw", "DEV", "TEST")):
        lhotse_cuts(corpus[i : i + 1]).to_file(where / f"gigaspeech_cuts_{name}.jsonl.gz")
    utterances, report = read_source(where)
    assert report["splits"] == {"train": 1, "dev": 1, "test": 1}
    assert set(report["ignored"]) == {"S", "gigaspeech_cuts_XL_raw.jsonl.gz"}
    assert corpus[1]["id"] in {u.id for u in utterances}
    chosen, report = read_source(f"{where}?subset=S")
    assert {u.id for u in chosen} == {corpus[i]["id"] for i in (0, 3, 4)}
    assert report["ignored"]["XL"] == "another subset was asked for"
    with pytest.raises(DataError, match="did you mean"):
        read_source(f"{where}?subset=SX")
    with pytest.raises(DataError, match="did you mean subset"):
        read_source(f"{where}?subsets=S")


def damaged(path, keep=0.6):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def test_D11_torn_files_are_faults_and_the_rest_is_read(corpus, tmp_path):
    kept = str(tmp_path / "kept")
    cuts = as_cuts(corpus, tmp_path / "cuts")
    damaged(cuts / "librispeech_cuts_train-clean-100.jsonl.gz")
    utterances, report = read_source(cuts)
    assert report["faults"] == {"record_unreadable": 1} and report["splits"]["test"] == 2
    tar = as_plain_tar(corpus, tmp_path / "tar")
    damaged(tar)
    utterances, report = read_source(tar, extract_dir=kept)
    assert report["faults"]["record_unreadable"] >= 1 and 1 <= sum(not u.faults for u in utterances) < 6
    shar = as_shar(corpus, tmp_path / "shar")
    damaged(shar / "test" / "recording.000000.tar", 0.3)
    _, report = read_source(shar, extract_dir=kept)
    assert report["faults"]["audio_missing"] >= 1 and report["splits"]["train"] == 3
    hub = as_parquet(corpus, tmp_path / "hub")
    damaged(hub / "test-00000-of-00001.parquet")
    _, report = read_source(hub, extract_dir=kept)
    assert report["faults"] == {"record_unreadable": 1} and report["splits"]["train"] == 3


def test_pickles_run_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "mark",)

    contents = [pickle.dumps(Evil()), pickle.dumps({"id": 1}), b"no", b"", pickle.dumps([1])]
    write_tar(tmp_path / "a.tar", [(f"{i}.data", content) for i, content in enumerate(contents)])
    utterances, _ = read_source(tmp_path / "a.tar", extract_dir=str(tmp_path))
    assert len(utterances) == 5 and all(map(is_dropped, utterances)) and not (tmp_path / "mark").exists()


def test_tar_names_do_not_leave_the_folder(corpus, tmp_path):
    write_tar(tmp_path / "in" / "a.tar", [("../../evil.flac", audio_bytes(corpus[0])), ("../../evil.txt", b"ONE")])
    (u,), _ = read_source(tmp_path / "in" / "a.tar", extract_dir=str(tmp_path / "kept"))
    assert Path(u.audio).resolve().is_relative_to(tmp_path / "kept") and not list(tmp_path.glob("evil*"))


def test_extraction_continues_and_writes_nothing_twice(corpus, tmp_path):
    hub, kept = as_parquet(corpus, tmp_path / "hub"), tmp_path / "kept"
    first, _ = read_source(hub, extract_dir=str(kept))
    stamps = {p: p.stat().st_mtime_ns for p in kept.rglob("*.flac")}
    assert len(stamps) == 6
    gone, torn = sorted(stamps)[:2]
    gone.unlink()
    damaged(torn)
    again, _ = read_source(hub, extract_dir=str(kept))
    assert [u.audio for u in again] == [u.audio for u in first]
    after = {p: p.stat().st_mtime_ns for p in kept.rglob("*.flac")}
    assert after.keys() == stamps.keys() and [p for p in after if after[p] != stamps[p]] == [gone, torn]
    assert {p.read_bytes() for p in after} == {audio_bytes(row) for row in corpus}
    assert not list(kept.rglob("*.part"))


def test_a_full_disk_says_so(corpus, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sources.os, "replace", full)
    with pytest.raises(DiskFullError, match="extract_dir"):
        read_source(as_parquet(corpus, tmp_path / "hub"), extract_dir=str(tmp_path / "kept"))
    assert not [p for p in (tmp_path / "kept").rglob("*") if p.is_file()]


def test_without_pyarrow_the_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ToolError, match="pip install pyarrow"):
        read_source(tmp_path / "a.parquet")


def by_lhotse(parts):
    return {s.id: (s.text, s.speaker, s.duration) for part in parts.values() for s in part["supervisions"]}


def test_librispeech_equals_lhotse_and_loses_nothing(corpus, tmp_path):
    "lhotse's recipe reads the same; a missing file, which it skips, stays in our list for the checks."
    from lhotse.recipes import prepare_librispeech

    root = as_librispeech(corpus, tmp_path) / "LibriSpeech"
    theirs = by_lhotse(prepare_librispeech(root))
    ours, _ = read_source(tmp_path)
    assert {u.id: (u.text, u.speaker, seconds_of(u)) for u in ours} == theirs
    first, second = [u for u in ours if u.split == "train"][:2]
    Path(first.audio).unlink()
    put(corpus[0], Path(second.audio).with_name("99-7-0001.flac"))
    again, report = read_source(f"librispeech:{tmp_path}?subset=train-clean-100")
    assert report["splits"]["train"] == 4 and report["faults"] == {"text_empty": 1}


def test_aishell_equals_lhotse(corpus, tmp_path):
    from lhotse.recipes import prepare_aishell

    as_aishell(corpus, tmp_path)
    theirs = by_lhotse(prepare_aishell(tmp_path))
    ours, _ = read_source(tmp_path)
    assert {u.id: (u.text.replace(" ", ""), u.speaker, seconds_of(u)) for u in ours} == theirs
    text = lines(corpus[1:], "{id} {text}") + "x X\n"
    write_text(tmp_path / "data_aishell/transcript/aishell_transcript_v0.8.txt", text)
    assert read_source(tmp_path)[1]["faults"] == {"text_empty": 1, "audio_missing": 1}


def test_gigaspeech_equals_lhotse(corpus, tmp_path):
    from lhotse.recipes.gigaspeech import parse_utterance

    as_gigaspeech(corpus, tmp_path)
    entries = json.loads((tmp_path / "GigaSpeech.json").read_text())["audios"]
    theirs = {s.id: (s.text, s.speaker, s.duration) for entry in entries for s in parse_utterance(entry, tmp_path)[1]}
    ours, _ = read_source(tmp_path)
    assert {u.id: (u.text, u.speaker, pytest.approx(seconds_of(u))) for u in ours} == theirs and len(ours) == 6
    with pytest.raises(DataError, match="did you mean"):
        read_source(f"gigaspeech:{tmp_path}?subset=XXL")
    text = (tmp_path / "GigaSpeech.json").read_text()
    write_text(tmp_path / "GigaSpeech.json", text[: len(text) // 2])
    with pytest.raises(DataError, match="cut off"):
        read_source(tmp_path)


def test_gigaspeech_metadata_is_streamed(tmp_path):
    "A list of any length costs a few megabytes, elements across the pieces read included."
    entry = {"aid": "A", "path": "a.opus", "duration": 9, "note": "x" * 5000, "segments": []}
    with open(tmp_path / "GigaSpeech.json", "w") as file:
        file.write('{"metadata": {}, "audios": [')
        file.write(", ".join(json.dumps(entry | {"n": i}) for i in range(4000)) + "]}")
    tracemalloc.start()
    assert [e["n"] for e in sources.stream_list(tmp_path / "GigaSpeech.json", "audios")] == list(range(4000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "GigaSpeech.json").stat().st_size > 20e6 and peak < 10e6


def test_a_recipe_that_fails_or_does_not_exist(tmp_path, corpus):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="recipe ljspeech failed"):
        read_source(f"ljspeech:{tmp_path / 'empty'}")
    with pytest.raises(DataError, match="did you mean ljspeech"):
        read_source(f"ljspech:{tmp_path / 'empty'}")
    with pytest.raises(DataError, match="no option"):
        read_source(f"ljspeech:{tmp_path / 'empty'}?language=en")
    with pytest.raises(DataError, match="whole number"):
        read_source(f"radio:{tmp_path / 'empty'}?num_jobs=many")
    with pytest.raises(DataError, match="also needs transcript_dir"):
        read_source(f"heroico:{tmp_path / 'empty'}")
    source = as_recipe(corpus, tmp_path / "lj")
    (tmp_path / "lj" / "wavs" / f"{corpus[0]['id']}.wav").unlink()
    _, report = read_source(source)
    assert report["records"] == 5 and any(corpus[0]["id"] in note for note in report["notes"])


def test_paths_and_kinds_nobody_knows(tmp_path):
    write_text(tmp_path / "recordings.csv", "audio,text\na.wav,X\n")
    for wrong, match in ((tmp_path / "recording.csv", "did you mean.*recordings.csv"),
                         ("https://x.example/a.csv", "nothing is fetched"),
                         (tmp_path / "no" / "where", "nothing at this path")):  # fmt: skip
        with pytest.raises(DataError, match=match):
            read_source(wrong)
    write_text(tmp_path / "pictures" / "a.png", "x")
    with pytest.raises(DataError, match="1 .png") as error:
        recognise(tmp_path / "pictures")
    assert all(text in error.value.remedy for text in ACCEPTED.values())
    with pytest.raises(DataError, match="did you mean table"):
        read_source(tmp_path / "recordings.csv", kind="tabel")
    with pytest.raises(DataError, match="not one record"):
        read_source(write_text(tmp_path / "none.csv", "audio,text\n"))
    with pytest.raises(DataError, match="empty"):
        read_source(write_text(tmp_path / "void.csv", ""))


def test_a_million_lines_fit(tmp_path):
    "At most 1.5 kB an utterance, measured on twenty thousand; no dict for each object."
    row = {"audio": "wavs/speaker-1234/chapter-5678/utterance-0000000.wav", "speaker": "speaker-1234",
           "text": "a sentence of ten words or so " * 4, "duration": 12.34}  # fmt: skip
    rows = (row | {"id": f"speaker-1234-5678-{i:07d}"} for i in range(20000))
    write_text(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    tracemalloc.start()
    utterances, _ = read_source(tmp_path / "a.jsonl")
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(utterances) == 20000 and held / 20000 < 1500
    assert not hasattr(utterances[0], "__dict__") and pickle.loads(pickle.dumps(utterances[0])) == utterances[0]


def test_types_are_as_the_other_chapters_know_them():
    import dataclasses

    names = {f.name: f.default for f in dataclasses.fields(Utterance)}
    assert list(names)[:3] == ["id", "audio", "text"] and names["start"] == 0.0 and names["end"] is None
    assert [f.name for f in dataclasses.fields(Fault)] == ["id", "kind", "action", "seconds", "detail", "remedy"]
    assert Counter(map(bool, SOURCE_KINDS.values())) == {True: len(SOURCE_KINDS)}
