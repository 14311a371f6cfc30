"""A language small enough to learn in seconds: each word is a tone. Makes audio, cuts, a tokenizer and a checkpoint."""

import csv
import random
from pathlib import Path

import numpy as np
import soundfile
import torch

WORDS = {"ONE": 300, "TWO": 500, "THREE": 800, "FOUR": 1200, "FIVE": 1700, "STAR": 2300, "POUND": 3000}
ARCH = dict(
    num_encoder_layers="1,1",
    downsampling_factor="1,2",
    encoder_dim="32,48",
    feedforward_dim="48,64",
    num_heads="2,2",
    encoder_unmasked_dim="32,32",
    cnn_module_kernel="15,15",
    query_head_dim="12",
    value_head_dim="8",
    pos_head_dim="4",
    pos_dim=16,
    decoder_dim=32,
    joiner_dim=32,
    embed_channels="4,8,8",
)


def tone_speech(text: str, rate: int = 8000, seed: int = 0) -> np.ndarray:
    "0.3 s of its tone for every word, with a little noise."
    rng, t = np.random.default_rng(seed), np.arange(int(0.3 * rate)) / rate
    parts = [
        np.concatenate([0.4 * np.sin(2 * np.pi * WORDS[w] * t) * np.hanning(len(t)), np.zeros(rate // 20)])
        for w in text.split()
    ]
    return (np.concatenate(parts) + 0.01 * rng.standard_normal(sum(map(len, parts)))).astype("float32")


def write_corpus(folder: Path, count: int = 24, seed: int = 1, words: int = 0) -> Path:
    "CSV with audio, text and split; `words` of 0 draws two to four."
    rng, rows = random.Random(seed), []
    (folder / "wav").mkdir(parents=True, exist_ok=True)
    for i in range(count):
        text = " ".join(rng.choices(list(WORDS), k=words or rng.randint(2, 4)))
        soundfile.write(folder / "wav" / f"{i}.wav", tone_speech(text, seed=i), 8000)
        rows.append(
            {"audio": f"wav/{i}.wav", "text": text.lower(), "split": ("train", "train", "train", "dev", "test")[i % 5]}
        )
    with open(folder / "corpus.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, ["audio", "text", "split"])
        writer.writeheader()
        writer.writerows(rows)
    return folder / "corpus.csv"


def write_model(folder: Path, seed: int = 0) -> Path:
    "`pretrained.pt` with its architecture, random weights, and `bpe.model`, in a folder."
    from zipformer_recipes.checkpoint import save_checkpoint
    from zipformer_recipes.data import train_tokenizer
    from zipformer_recipes.model import build_model, resolve_arch

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([" ".join(WORDS)] * 20 + list(WORDS) * 5, folder / "bpe.model", 24)
    torch.manual_seed(seed)
    model = build_model(resolve_arch(ARCH), tokenizer.vocab_size)
    return save_checkpoint(
        folder / "pretrained.pt", model=model.state_dict(), arch=model.arch, vocab_size=tokenizer.vocab_size
    )


def write_run(folder: Path, count: int = 24, words: int = 0):
    "A prepared run of the toy language; its settings."
    from zipformer_recipes.core import RunConfig
    from zipformer_recipes.data import prepare

    csv_path, ckpt = write_corpus(folder / "corpus", count, words=words), write_model(folder / "pretrained")
    cfg = RunConfig.from_profile(
        "smoke",
        run_dir=str(folder / "run"),
        source=str(csv_path),
        policy="text_in_two_splits=keep",  # seven words: sentences repeat by design
        source_hours=0,
        max_utts=0,
        bpe_model=str(ckpt.parent / "bpe.model"),
        finetune_ckpt=str(ckpt),
        num_epochs=2,
        max_duration=8,
        base_lr=0.02,
        tensorboard=False,
        eval_sets="target_test",
    )
    prepare(cfg)
    return cfg


def fixed_batches(groups) -> list:
    "Batches of exactly these groups of cuts with stored features, as the loader gives them."
    from zipformer_recipes.batches import Batches, InMemory, Plan, loader_of

    groups = [list(group) for group in groups]
    sizes = np.cumsum([0] + [len(group) for group in groups])
    grid = np.arange(len(groups)).reshape(-1, 1)
    plan = Plan(np.arange(sizes[-1]), sizes, grid, np.zeros(0, "i8"))
    return list(loader_of(Batches(InMemory(cut for group in groups for cut in group), plan)))
