"""How the data part behaves at scale and against its peers, as ratios of one run. `bench_data.py [cuts | peers]`

1. A manifest of a million cuts (10,000 h, metadata only) is written, indexed, validated, planned for two ranks, and a
   first batch is made: seconds and peak memory of each step, in a fresh process.
2. Loader batches per second and padding against lhotse's `DynamicBucketingSampler` with icefall's settings, the same
   stored features.
3. The same features read from jsonl.gz (random access) and from Shar (sequential tar files).
"""

import gzip
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from lhotse import CutSet, LilcomChunkyWriter, MonoCut, SupervisionSegment
from lhotse.dataset import DynamicBucketingSampler, K2SpeechRecognitionDataset
from lhotse.dataset.input_strategies import PrecomputedFeatures
from lhotse.dataset.iterable_dataset import IterableDatasetWrapper
from lhotse.features.base import Features

from zipformer_recipes import batches
from zipformer_recipes.model import shipped_folder

warnings.filterwarnings("ignore")
WORDS = "PLEASE ENTER THE NUMBER OF YOUR ACCOUNT AND PRESS POUND OR STAY ON LINE FOR AN OPERATOR".split()


def manifest_rows(count, seed=0):
    "Cuts of 2 to 70 s, 36 s in the mean, with 2 to 3 words a second."
    rng = random.Random(seed)
    for i in range(count):
        s = round(min(70.0, max(2.0, rng.gauss(36, 12))), 2)
        text = " ".join(rng.choices(WORDS, k=int(s * rng.uniform(2, 3))))
        sup = {"id": f"m{i:07d}", "recording_id": f"r{i}", "start": 0.0, "duration": s, "channel": 0, "text": text}
        feats = {"type": "kaldi-fbank", "num_frames": round(s * 100), "num_features": 80, "frame_shift": 0.01,
                 "sampling_rate": 16000, "start": 0, "duration": s, "storage_type": "lilcom_chunky",
                 "storage_path": f"feats-{i // 1000:05d}.lca", "storage_key": f"{i},100", "channels": 0,
                 "recording_id": f"r{i}"}  # fmt: skip
        yield {"id": f"m{i:07d}", "start": 0.0, "duration": s, "channel": 0, "supervisions": [sup],
               "features": feats, "type": "MonoCut"}  # fmt: skip


def step(name, began, rows):
    rows.append((name, time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    print(f"{name:48} {rows[-1][1]:8.2f} s   peak {rows[-1][2]:6.0f} MB", flush=True)
    return time.perf_counter()


def scale(path, first_time):
    "In a process of its own: open, count tokens, plan, dry-run, first batch."
    from zipformer_recipes.data import Tokenizer as load_tokenizer

    rows, t = [], time.perf_counter()
    cuts = batches.open_cuts(path)
    t = step("index and open" if first_time else "open", t, rows)
    kept, gone = batches.usable(cuts, load_tokenizer(shipped_folder() / "bpe.model"), longest=80.0)
    t = step(f"validate ({len(kept)} usable, {sum(n for n, *_ in gone.values())} not)", t, rows)
    batches.check_plan(batches.dry_run(kept.seconds, 1200, world_size=2))
    t = step("dry run for two ranks", t, rows)
    data = batches.Batches(kept, batches.plan_epoch(kept.seconds, 1200, 0, 2), 1, strategy=Zeros())
    t = step("plan of the epoch", t, rows)
    where = len(data) // 2
    batch = next(batches.loader_of(data, start=where))
    step(f"first batch from step {where} of {len(data)} ({batch['inputs'].shape[0]} cuts)", t, rows)


class Zeros(PrecomputedFeatures):
    "Features that need no files: the manifest is metadata only."

    def __call__(self, cuts, *args):
        lens = torch.tensor([c.num_frames for c in cuts], dtype=torch.int32)
        return torch.zeros(len(lens), int(lens.max()), 80), lens


def stored(folder, count):
    "Cuts with stored random features, half of them shorter than 6 s."
    rng, made = np.random.default_rng(0), []
    with LilcomChunkyWriter(str(folder / "feats")) as writer:
        for i in range(count):
            frames = int(100 * np.clip(rng.gamma(3, 2.5), 1, 25))
            seconds = frames / 100
            cut = MonoCut(f"s{i}", 0, seconds, 0)
            cut.supervisions = [SupervisionSegment(f"s{i}", f"s{i}", 0, seconds, text="ONE TWO")]
            values = rng.standard_normal((frames, 80)).astype("f4") * 3 - 10
            key = writer.write(f"s{i}", values)
            cut.features = Features(type="kaldi-fbank", num_frames=frames, num_features=80, frame_shift=0.01,
                                    sampling_rate=16000, start=0, duration=seconds, channels=0,
                                    storage_type="lilcom_chunky", storage_path=str(folder / "feats.lca"),
                                    storage_key=key, recording_id=f"s{i}")  # fmt: skip
            made.append(cut)
    return made


def run(loader):
    "Audio-seconds, batches and seconds of going through a loader once."
    began, audio, count, padded = time.perf_counter(), 0.0, 0, 0.0
    for batch in loader:
        lens = batch["supervisions"]["num_frames"].float()
        audio, count, padded = audio + lens.sum().item() / 100, count + 1, padded + lens.max().item() * len(lens) / 100
    return audio, count, padded, time.perf_counter() - began


def peers(count=4000, limit=200, workers=1):
    folder = Path(tempfile.mkdtemp())
    path = batches.write_cuts(folder / "x_cuts.jsonl.gz", stored(folder, count))
    plain = [c for c in batches.load_cuts(path)]
    total = sum(c.duration for c in plain)
    cuts = batches.open_cuts(path)
    ours = batches.Batches(cuts, batches.plan_epoch(cuts.seconds, limit))
    sampler = DynamicBucketingSampler(CutSet.from_cuts(plain), max_duration=limit, num_buckets=30, shuffle=True,
                                      drop_last=True, buffer_size=60000, shuffle_buffer_size=150000)  # fmt: skip
    theirs = torch.utils.data.DataLoader(
        K2SpeechRecognitionDataset(input_strategy=PrecomputedFeatures()), sampler=sampler, batch_size=None,
        num_workers=workers, persistent_workers=False)  # fmt: skip
    (folder / "shar").mkdir()
    CutSet.from_cuts(plain).to_shar(folder / "shar", {"features": "lilcom"}, shard_size=500)

    def shar_sampler():
        return DynamicBucketingSampler(
            CutSet.from_shar(in_dir=folder / "shar", shuffle_shards=True, seed=0, stateful_shuffle=False),
            max_duration=limit, num_buckets=30, shuffle=True, drop_last=True, buffer_size=60000)  # fmt: skip

    def shar():
        data = IterableDatasetWrapper(K2SpeechRecognitionDataset(input_strategy=PrecomputedFeatures()), shar_sampler())
        return torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers)

    names = {
        "plan, jsonl.gz": lambda: batches.loader_of(ours, num_workers=workers),
        "DynamicBucketingSampler, icefall's settings": lambda: theirs,
        "DynamicBucketingSampler over Shar": shar,
    }
    best = {}
    for _ in range(3):
        for name, make in names.items():
            got = run(make())
            best[name] = min(best.get(name, got), got, key=lambda g: g[3] / g[0])
    base = best["DynamicBucketingSampler, icefall's settings"]
    print(f"{count} cuts, {total / 3600:.1f} h, max_duration {limit} s, {workers} worker(s); x: against the second")
    for name, (audio, n, padded, seconds) in best.items():
        rate, per = (audio / seconds) / (base[0] / base[3]), (n / seconds) / (base[1] / base[3])
        print(f"{name:46} used {audio / total:6.1%}  padding {1 - audio / padded:5.1%}  {n} batches"
              f"  batches/s x{per:.2f}  audio/s x{rate:.2f}", flush=True)  # fmt: skip
    shutil.rmtree(folder)


def main():
    if sys.argv[1:2] == ["scale"]:
        return scale(Path(sys.argv[2]), sys.argv[3] == "1")
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["peers"]:
        return peers()
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    folder = Path(tempfile.mkdtemp())
    path, began = folder / "big_cuts.jsonl.gz", time.perf_counter()
    hours = 0.0
    with gzip.open(path, "wt", compresslevel=1) as opened:  # one piece, as lhotse and icefall write it
        for row in manifest_rows(count):
            hours += row["duration"] / 3600
            opened.write(json.dumps(row) + "\n")
    print(f"{count} cuts, {hours:.0f} h, written in {time.perf_counter() - began:.0f} s")
    for first_time in ("1", "0"):
        print("first time" if first_time == "1" else "second time")
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, __file__, "scale", str(path), first_time], check=True, env=env)
    shutil.rmtree(folder)
    peers()


if __name__ == "__main__":
    main()
