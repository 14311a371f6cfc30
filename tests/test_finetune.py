"""The loop: ranks, accumulation, determinism, resuming at an epoch, and every refusal."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toy import ARCH, fixed_batches, write_model, write_run
from zipformer.modules import scaling

from zipformer_recipes import finetune
from zipformer_recipes.batches import load_cuts
from zipformer_recipes.checkpoint import save_checkpoint
from zipformer_recipes.core import CheckpointError, ConfigError, DataError, RecipeError, save_json
from zipformer_recipes.model import build_model, load_checkpoint, resolve_arch

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("toy"), count=40)


def weights(path) -> dict:
    return torch.load(path, weights_only=True)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def run(*command, env=None, cwd=None):
    return subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture(scope="module")
def trained(cfg, tmp_path_factory):
    "Four epochs in one go."
    exp = tmp_path_factory.mktemp("whole")
    finetune.train(cfg.replace(exp_dir=str(exp), num_epochs=4))
    return exp


def test_two_ranks_end_equal_and_match_one_rank_with_doubled_accumulation(cfg, tmp_path):
    save_json(tmp_path / "cfg.json", cfg.replace(world_size=2).to_dict())
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"]
    launcher.append(f"--master_port={finetune.free_port()}")
    for name, how in (("two", launcher), ("one", [])):
        words = [sys.executable, *how, HERE / "ddp_worker.py", tmp_path / "cfg.json", tmp_path / name]
        done = run(*words, env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-2000:]
    first, second, single = (weights(tmp_path / n) for n in ("two-0.pt", "two-1.pt", "one-0.pt"))
    assert same(first["model"], second["model"]) and same(first["grads"], second["grads"])
    scale = max(float(g.abs().max()) for g in single["grads"].values())
    assert first["grads"].keys() == single["grads"].keys() and scale > 0
    assert all(torch.allclose(first["grads"][k], g, rtol=1e-4, atol=1e-6 * scale) for k, g in single["grads"].items())
    start = load_checkpoint(cfg.finetune_ckpt).state
    moved, apart = (flat(single["model"], other) for other in (start, first["model"]))
    assert moved.norm() > 0 and apart.norm() / moved.norm() < 1e-3


def flat(a: dict, b: dict) -> torch.Tensor:
    return torch.cat([(a[k] - b[k]).flatten() for k in a if a[k].is_floating_point()])


def test_accumulated_gradient_is_that_of_the_joined_batch(cfg, monkeypatch):
    t = finetune.make_trainer(cfg)
    t.wrapped.eval()
    monkeypatch.setattr(scaling, "random", SimpleNamespace(random=lambda: 1.0))  # Whiten and Balancer draw also here
    cuts = [c for c in load_cuts(cfg.path("data") / "target_train_cuts.jsonl.gz")]
    length = max({c.num_frames for c in cuts}, key=[c.num_frames for c in cuts].count)
    equal = [c for c in cuts if c.num_frames == length][:4]
    assert len(equal) == 4
    joined, parts = (
        fixed_batches([equal]),
        fixed_batches([equal[:1], equal[1:]]),
    )
    found = []
    monkeypatch.setattr(
        finetune,
        "take_step",
        lambda t: found.append([p.grad.clone() for p in t.model.parameters() if p.grad is not None]) or {},
    )
    for batches in (joined, parts):
        t.optimizer.zero_grad()
        finetune.train_update(t, batches)
    scale = max(float(g.abs().max()) for g in found[0])
    assert len(found[0]) == len(found[1]) > 50
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5 * scale) for a, b in zip(*found, strict=True))


def test_same_seed_same_weights_and_another_seed_others(cfg, trained, tmp_path):
    for name, seed in (("again", cfg.seed), ("other", 7)):
        finetune.train(cfg.replace(exp_dir=str(tmp_path / name), num_epochs=4, seed=seed))
    assert same(weights(trained / "final.pt")["model"], weights(tmp_path / "again" / "final.pt")["model"])
    assert not same(weights(trained / "final.pt")["model"], weights(tmp_path / "other" / "final.pt")["model"])


def test_start_epoch_continues_as_if_nothing_had_happened(cfg, trained, tmp_path):
    finetune.train(cfg.replace(exp_dir=str(tmp_path), num_epochs=2))
    finetune.train(cfg.replace(exp_dir=str(tmp_path), num_epochs=4, start_epoch=3))
    whole, parts = weights(trained / "epoch-4.pt"), weights(tmp_path / "epoch-4.pt")
    assert same(whole["model"], parts["model"]) and same(whole["model_avg"], parts["model_avg"])
    assert whole["batch_idx_train"] == parts["batch_idx_train"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["epoch"] for r in rows if r["kind"] == "valid"] == [0, 1, 2, 3, 4]


def test_what_a_run_leaves_behind(cfg, trained):
    train, valid = finetune.read_metrics(trained)
    assert {
        "loss",
        "simple",
        "pruned",
        "ctc",
        "lr",
        "grad_norm",
        "grad_scale",
        "audio_s_per_s",
        "padding_share",
        "memory_mb",
    } <= set(train[0])
    assert [r["epoch"] for r in valid] == [0, 1, 2, 3, 4] and valid[-1]["loss"] < valid[0]["loss"]
    assert all((trained / f"epoch-{n}.pt").exists() for n in (1, 2, 3, 4)) and not list(trained.glob(".*tmp"))
    final = weights(trained / "final.pt")
    assert final["arch"]["encoder_dim"] == ARCH["encoder_dim"] and final["chosen"]


def test_the_line_of_the_guide_works_as_it_stands(cfg, tmp_path):
    "guide-facts A10, under torchrun with two ranks, on whatever device is here."
    shutil.copytree(cfg.path("data"), tmp_path / "data/fbank")
    shutil.copytree(Path(cfg.finetune_ckpt).parent, tmp_path / "pretrained")
    (tmp_path / "data/lang_bpe_500").mkdir()
    shutil.copy(cfg.bpe_model, tmp_path / "data/lang_bpe_500/bpe.model")
    for kind, name in (("train", "target_train"), ("dev", "target_dev"), ("test", "target_test")):
        (tmp_path / f"data/fbank/{name}_cuts.jsonl.gz").rename(tmp_path / f"data/fbank/gigaspeech_cuts_{kind}.jsonl.gz")
    line = """--world-size 2 --num-epochs 20 --start-epoch 1 --manifest-dir data/fbank
        --exp-dir zipformer/exp_giga_finetune --use-fp16 1 --base-lr 0.0045 --bpe-model data/lang_bpe_500/bpe.model
        --do-finetune 1 --use-mux 0 --finetune-ckpt pretrained/pretrained.pt --max-duration 1200
        --accum-grad-steps 2 --warmup-steps 5000 --num-workers 16""".split()
    done = run(
        BIN / "torchrun",
        "--nproc_per_node=2",
        "-m",
        "zipformer_recipes.finetune",
        *line,
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    exp = tmp_path / "zipformer/exp_giga_finetune"
    assert (exp / "epoch-20.pt").exists() and (exp / "final.pt").exists()
    assert "warm-up of 5000 updates" in done.stdout
    if not torch.cuda.is_available():
        assert "computing in float32 instead" in done.stdout


def test_without_a_launcher_it_starts_its_own_two_ranks(cfg, tmp_path):
    small = cfg.replace(world_size=2, exp_dir=str(tmp_path / "exp"), num_epochs=1)
    done = run(
        *finetune.command_of(small)[:1],
        "-m",
        "zipformer_recipes.finetune",
        "--profile",
        tmp_path / "exp" / "settings.yaml",
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    assert (tmp_path / "exp" / "log" / "rank-1.log").exists() and (tmp_path / "exp" / "epoch-1.pt").exists()


def test_launcher_and_world_size_must_agree(cfg, tmp_path):
    done = run(
        sys.executable,
        "-m",
        "zipformer_recipes.finetune",
        "--world-size",
        "1",
        "--exp-dir",
        tmp_path / "exp",
        env={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    )
    assert (
        done.returncode == 2
        and "the launcher started 2 ranks, --world-size says 1" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_a_mistyped_option_names_the_nearest():
    done = run(sys.executable, "-m", "zipformer_recipes.finetune", "--max-duratoin", "100")
    assert done.returncode == 2 and "--max-duration" in done.stderr and "Traceback" not in done.stderr


def test_a_failing_run_shows_its_own_error(cfg, tmp_path):
    broken = tmp_path / "broken.pt"
    broken.write_bytes(Path(cfg.finetune_ckpt).read_bytes()[:1000])
    with pytest.raises(RecipeError, match="CheckpointError"):
        finetune.run(cfg.replace(finetune_ckpt=str(broken), run_dir=str(tmp_path), manifest_dir=str(cfg.path("data"))))
    assert "CheckpointError" in (tmp_path / "exp/log/train.log").read_text() and not list(
        (tmp_path / "exp").glob("epoch-*.pt")
    )


def test_another_vocabulary_or_architecture_is_refused(cfg, tmp_path):
    other = build_model(resolve_arch(ARCH), 99)
    save_checkpoint(tmp_path / "vocab.pt", model=other.state_dict(), arch=other.arch, vocab_size=99)
    with pytest.raises(CheckpointError, match="99"):
        finetune.make_trainer(cfg.replace(finetune_ckpt=str(tmp_path / "vocab.pt")))
    with pytest.raises(CheckpointError, match="encoder_dim"):
        finetune.make_trainer(cfg.replace(encoder_dim="32,64"))


def test_init_modules_keeps_a_new_head_for_another_vocabulary(cfg, tmp_path):
    other = build_model(resolve_arch(ARCH), 99)
    save_checkpoint(tmp_path / "vocab.pt", model=other.state_dict(), arch=other.arch, vocab_size=99)
    t = finetune.make_trainer(
        cfg.replace(finetune_ckpt=str(tmp_path / "vocab.pt"), init_modules="encoder_embed,encoder")
    )
    assert t.model.vocab_size == 24 and torch.equal(t.model.encoder_embed.out.weight, other.encoder_embed.out.weight)


def test_manifests_of_any_name_and_a_missing_one(cfg, tmp_path):
    shutil.copytree(cfg.path("data"), tmp_path / "fbank")
    (tmp_path / "fbank/target_train_cuts.jsonl.gz").rename(tmp_path / "fbank/mine.jsonl.gz")
    moved = cfg.replace(manifest_dir=str(tmp_path / "fbank"))
    with pytest.raises(DataError, match="mine.jsonl.gz"):
        finetune.training_sets(moved, finetune.find_tokenizer(moved))
    assert (
        len(finetune.training_sets(moved.replace(train_cuts="mine.jsonl.gz"), finetune.find_tokenizer(moved))["train"])
        == 24
    )


def test_gradients_that_are_not_finite_are_skipped_and_then_stop(cfg):
    t = finetune.make_trainer(cfg)
    cuts = load_cuts(cfg.path("data") / "target_train_cuts.jsonl.gz")
    batch = fixed_batches([list(cuts)[:4]])[0]
    batch["inputs"] = torch.full_like(batch["inputs"], float("nan"))
    before = {k: v.clone() for k, v in t.model.state_dict().items()}
    for _ in range(finetune.MAX_SKIPPED - 1):
        assert finetune.train_update(t, [batch])["finite"] is False
    assert all(torch.equal(before[k], v) for k, v in t.model.state_dict().items())
    with pytest.raises(RecipeError, match="in a row"):
        finetune.train_update(t, [batch])


def test_learning_rates_of_parts_and_freezing(cfg):
    t = finetune.make_trainer(cfg.replace(lr_scales="encoder.=0.5,encoder_embed=0", base_lr=0.02))
    cuts = load_cuts(cfg.path("data") / "target_train_cuts.jsonl.gz")
    before = {k: v.clone() for k, v in t.model.state_dict().items()}
    finetune.train_update(t, [fixed_batches([list(cuts)[:4]])[0]])
    after = t.model.state_dict()
    assert torch.equal(before["encoder_embed.out.weight"], after["encoder_embed.out.weight"])
    assert not torch.equal(before["joiner.output_linear.weight"], after["joiner.output_linear.weight"])
    assert sorted(g["lr"] for g in t.optimizer.param_groups) == pytest.approx([0.01, 0.02])
    with pytest.raises(ConfigError, match="no parameter begins"):
        finetune.make_trainer(cfg.replace(lr_scales="encodr=0.5"))


def test_mixing_trains_on_both_and_the_target_ends_the_epoch(cfg, tmp_path):
    shutil.copytree(cfg.path("data"), tmp_path / "fbank")
    shutil.copy(tmp_path / "fbank/target_test_cuts.jsonl.gz", tmp_path / "fbank/source_train_cuts.jsonl.gz")
    mixed = cfg.replace(
        manifest_dir=str(tmp_path / "fbank"), use_mux=True, mux_hours_ratio=0.2, exp_dir=str(tmp_path / "exp_mux")
    )
    t = finetune.make_trainer(mixed)
    sets = finetune.training_sets(mixed, t.tokenizer)
    data = finetune.epoch_plan(t, sets)
    ids = [i for step in range(len(data)) for i in data.ids(step)]
    target, source = {c.id for c in sets["train"]}, {c.id for c in sets["source"]}
    assert target <= set(ids) and set(ids) & source and len(ids) == len(set(ids))


def test_schedules_of_a_pretrained_model_are_not_restarted(cfg):
    t = finetune.make_trainer(cfg)
    assert finetune.current_batch_count(t) == 100_000
    assert finetune.current_batch_count(finetune.make_trainer(cfg.replace(do_finetune=False, model="tiny"))) == 0


def test_precision_on_this_device(cfg):
    assert finetune.precision_of(cfg.replace(use_bf16=True), torch.device("cpu"))[0] is torch.bfloat16
    assert finetune.precision_of(cfg.replace(use_fp16=True), torch.device("cuda", 0))[0] is torch.float16


def test_bfloat16_trains_on_a_cpu(cfg, tmp_path):
    "The backward pass too: the package's own functions restore autocast on CUDA only."
    finetune.train(cfg.replace(use_bf16=True, exp_dir=str(tmp_path), num_epochs=1))
    train, _ = finetune.read_metrics(tmp_path)
    assert train and all(r["finite"] for r in train)
    assert weights(tmp_path / "final.pt")["model"]["encoder_embed.out.weight"].dtype is torch.float32


def test_training_from_nothing_learns_too(cfg, tmp_path):
    new = cfg.replace(
        do_finetune=False, model="mini", exp_dir=str(tmp_path), num_epochs=2, batch_count_start=20000, **ARCH
    )
    finetune.train(new)
    _, valid = finetune.read_metrics(tmp_path)
    assert valid[-1]["loss"] < valid[0]["loss"]


def test_a_model_made_elsewhere_starts_a_run(tmp_path, cfg):
    "A bare state dict with DDP prefixes and a config beside it."
    made = write_model(tmp_path / "there")
    state = weights(made)
    torch.save(
        {"model": {"module." + k: v for k, v in state["model"].items()}, "arch": state["arch"]},
        tmp_path / "there" / "ddp.pt",
    )
    assert finetune.make_trainer(cfg.replace(finetune_ckpt=str(tmp_path / "there" / "ddp.pt"))).model.vocab_size == 24


def test_foreign_objects_in_a_checkpoint_need_a_word_of_trust(cfg, tmp_path):
    path = tmp_path / "foreign.pt"
    torch.save(torch.load(cfg.finetune_ckpt, weights_only=True) | {"extra": write_model}, path)
    settings = cfg.replace(finetune_ckpt=str(path), bpe_model=str(Path(cfg.finetune_ckpt).parent / "bpe.model"))
    with pytest.raises(CheckpointError, match="--trust-checkpoint 1"):
        finetune.make_trainer(settings)
    assert finetune.make_trainer(settings.replace(trust_checkpoint=True)).model.vocab_size == 24
