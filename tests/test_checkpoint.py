"""Checkpoints: killed writes, full disks, averages, and resuming bit for bit."""

import errno
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from zipformer.modules.optim import Eden, ScaledAdam

from zipformer_recipes import checkpoint as c
from zipformer_recipes.core import CheckpointError, ConfigError, DiskFullError
from zipformer_recipes.model import MEDIUM, build_model, set_batch_count

ARCH = MEDIUM | dict(
    num_encoder_layers="1,1", downsampling_factor="1,2", encoder_dim="32,48", feedforward_dim="48,64", num_heads="4,4",
    encoder_unmasked_dim="32,32", cnn_module_kernel="15,15", query_head_dim="16", decoder_dim=32, joiner_dim=32,
    embed_channels="4,8,16", use_transducer=False)

KILLED = """
import os, signal, sys, torch
from zipformer_recipes.checkpoint import save_checkpoint
real = torch.save
def half(state, file):
    import io
    whole = io.BytesIO()
    real(state, whole)
    file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = half
save_checkpoint(sys.argv[1], model={"w": torch.zeros(50_000)}, batch_idx_train=2)
"""


def test_killed_inside_a_write_leaves_the_old_file_whole(tmp_path):
    path = c.save_checkpoint(tmp_path / "epoch-1.pt", model={"w": torch.ones(50_000)}, optimizer={"a": 1},
                             batch_idx_train=1)
    before = path.read_bytes()
    child = subprocess.run([sys.executable, "-c", KILLED, str(path)], capture_output=True, text=True,
                           cwd=Path(__file__).parents[1])
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert len(list(tmp_path.glob(".epoch-1.pt.*.tmp"))) == 1  # it died while writing, not before
    assert path.read_bytes() == before and c.load_training_state(path)["batch_idx_train"] == 1
    assert c.list_checkpoints(tmp_path) == [path]
    c.save_checkpoint(path, model={"w": torch.zeros(3)}, batch_idx_train=3)
    assert [p.name for p in tmp_path.iterdir()] == ["epoch-1.pt"]


@pytest.mark.parametrize("when", ["before", "during"])
def test_full_disk(tmp_path, monkeypatch, when):
    path = c.save_checkpoint(tmp_path / "epoch-1.pt", model={"w": torch.ones(9)}, batch_idx_train=1)
    if when == "before":
        monkeypatch.setattr(c.shutil, "disk_usage", lambda folder: SimpleNamespace(free=17_000_000))
    else:
        def write(state, file):
            file.write(b"x" * 100)
            raise OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(c.torch, "save", write)
    with pytest.raises(DiskFullError) as caught:
        c.save_checkpoint(path, model={"w": torch.ones(1_000_000)}, batch_idx_train=2)
    assert caught.value.remedy
    monkeypatch.undo()
    assert c.read_file(path)["batch_idx_train"] == 1 and [p.name for p in tmp_path.iterdir()] == ["epoch-1.pt"]


def test_objects_are_refused_with_their_place(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\['params'\]\['dirs'\]\[1\] is a pathlib"):
        c.save_checkpoint(tmp_path / "x.pt", params={"dirs": ["a", Path("b")]})
    with pytest.raises(CheckpointError, match="numpy"):
        c.save_checkpoint(tmp_path / "x.pt", best=np.float64(1))
    assert list(tmp_path.iterdir()) == []


def test_weights_alone_are_no_training_state(tmp_path):
    path = c.save_checkpoint(tmp_path / "pretrained.pt", model={"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="no training state") as caught:
        c.load_training_state(path)
    assert "--finetune-ckpt" in caught.value.remedy


def test_old_checkpoints_go_and_others_stay(tmp_path):
    for name in ("epoch-1", "epoch-2", "epoch-10", "best-dev-wer", "checkpoint-5", "epoch-last"):
        (tmp_path / f"{name}.pt").write_bytes(b"x")
    assert [p.name for p in c.remove_old_checkpoints(tmp_path, 2)] == ["epoch-1.pt"]
    assert [p.name for p in c.list_checkpoints(tmp_path)] == ["epoch-2.pt", "epoch-10.pt"]
    assert (tmp_path / "best-dev-wer.pt").exists() and len(c.list_checkpoints(tmp_path, "checkpoint")) == 1
    with pytest.raises(ConfigError):
        c.remove_old_checkpoints(tmp_path, 0)


def drift(model, steps, period, folder):
    "A random walk; returns all weights met at multiples of the period"
    average, met = c.new_average(model), []
    for n in range(1, steps + 1):
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight))
        if n % period == 0:
            met.append(model.weight.detach().double().clone())
            c.update_averaged_model(average, model, period, n)
        if n % 10 == 0 or n == steps:
            c.save_checkpoint(folder / f"checkpoint-{n}.pt", model=model.state_dict(), model_avg=average,
                              batch_idx_train=n, average_period=period)
    return average, torch.stack(met)


@pytest.mark.parametrize("period", [1, 5])
def test_running_mean_is_the_mean(tmp_path, period):
    torch.manual_seed(0)
    average, met = drift(torch.nn.Linear(3, 2, bias=False), 40, period, tmp_path)
    torch.testing.assert_close(average["weight"], met.mean(0), rtol=0, atol=1e-12)
    part = c.average_range(tmp_path / "checkpoint-10.pt", tmp_path / "checkpoint-40.pt")
    torch.testing.assert_close(part["weight"], met[10 // period:].mean(0).float())
    whole = c.average_range("", tmp_path / "checkpoint-40.pt")
    torch.testing.assert_close(whole["weight"], met.mean(0).float())


def test_both_ends_in_one_averaging_period(tmp_path):
    drift(torch.nn.Linear(3, 2, bias=False), 47, 20, tmp_path)
    with pytest.raises(CheckpointError, match="batches 40 and 40") as caught:
        c.average_range(tmp_path / "checkpoint-40.pt", tmp_path / "checkpoint-47.pt")
    assert "--average-period" in caught.value.remedy


def test_average_needs_a_full_period():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError):
        c.update_averaged_model(c.new_average(model), model, 10, 5)


def test_plain_average(tmp_path):
    paths = [c.save_checkpoint(tmp_path / f"epoch-{i}.pt", model={"module.w": torch.full((2,), float(i)),
                                                                  "module.n": torch.tensor(i)}) for i in (1, 2, 6)]
    mean = c.average_checkpoints(paths)
    assert mean["w"].tolist() == [3.0, 3.0] and mean["w"].dtype == torch.float32 and mean["n"].item() == 6
    odd = c.save_checkpoint(tmp_path / "odd.pt", model={"w": torch.ones(3), "n": torch.tensor(1)})
    with pytest.raises(CheckpointError, match="differ"):
        c.average_checkpoints([*paths, odd])
    with pytest.raises(CheckpointError, match="at least one"):
        c.average_checkpoints([])


def parts():
    torch.manual_seed(7)
    model = build_model(ARCH, 20).train()
    optimizer = ScaledAdam(model.named_parameters(), lr=0.03, clipping_scale=2.0)
    return model, c.new_average(model), optimizer, Eden(optimizer, lr_batches=50, lr_epochs=4)


def train(model, average, optimizer, scheduler, first, last):
    for step in range(first, last + 1):
        set_batch_count(model, 25_000)
        model(torch.randn(8, 120, 80), torch.full((8,), 120), [[3, 5], [7]] * 4)["ctc"].backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step_batch()
        c.update_averaged_model(average, model, 1, step)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    "A checkpoint after three steps, and the run that went on to six"
    random.seed(1), np.random.seed(1)
    run = parts()
    train(*run, 1, 3)
    state = c.gather_state(run[0], *run[1:], sampler_state={"cuts": 12}, params=dict(epoch=2, batch_idx_train=3))
    path = c.save_checkpoint(tmp_path_factory.mktemp("exp") / "epoch-1.pt", **state)
    train(*run, 4, 6)
    return path, run


@pytest.mark.parametrize("forget", ["", "rng", "hidden", "optimizer"])
def test_resumed_run_is_the_same_run(stopped, forget):
    path, (model, average, _, scheduler) = stopped
    random.seed(2), np.random.seed(2)
    again, state = parts(), c.load_training_state(path)
    if forget in ("rng", "hidden"):
        state["ranks"][0][forget] = dict(rng=c.rng_state(), hidden=c.hidden_state(again[0]))[forget]
    kept = c.restore_state(state, again[0], again[1], None if forget == "optimizer" else again[2], again[3])
    assert kept == dict(epoch=2, batch_idx_train=3, batch_in_epoch=0, sampler={"cuts": 12}, same_ranks=True)
    train(*again, kept["batch_idx_train"] + 1, 6)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again[0].parameters(), strict=True))
    assert same == (not forget)
    if not forget:
        assert all(torch.equal(average[k], v) for k, v in again[1].items())
        assert again[3].state_dict() == scheduler.state_dict()


def test_icefall_names_are_there(stopped):
    state = c.load_training_state(stopped[0])
    names = {"model", "model_avg", "optimizer", "scheduler", "grad_scaler", "sampler", "batch_idx_train", "epoch"}
    assert names <= set(state)
    assert state["arch"]["encoder_dim"] == "32,48" and state["model_avg"]["ctc_output.1.bias"].dtype == torch.float64


def test_missing_parts_and_other_models_change_nothing(stopped):
    state, fresh = c.load_training_state(stopped[0]), parts()
    before = {k: v.clone() for k, v in fresh[0].state_dict().items()}
    with pytest.raises(CheckpointError, match="no optimizer in it"):
        c.restore_state(state | dict(optimizer=None), *fresh)
    with pytest.raises(CheckpointError, match="do not fit the model"):
        c.restore_state(state, build_model(ARCH, 21), *fresh[1:])
    assert all(torch.equal(before[k], v) for k, v in fresh[0].state_dict().items())


def test_another_number_of_ranks_is_said(stopped):
    state = c.load_training_state(stopped[0])
    state["ranks"] = state["ranks"] * 2
    torch.manual_seed(11)
    before = torch.get_rng_state()
    assert c.restore_state(state, parts()[0])["same_ranks"] is False
    torch.manual_seed(11)
    assert torch.equal(before, torch.get_rng_state())


def test_position_must_be_given_and_nothing_overwritten():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="epoch"):
        c.gather_state(model, params=dict(batch_idx_train=1))
    with pytest.raises(CheckpointError, match="overwrite.*model"):
        c.gather_state(model, params=dict(epoch=1, batch_idx_train=1, model=1))


def test_grad_scaler_round_trip(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    position = dict(epoch=1, batch_idx_train=1)
    state = c.gather_state(model, optimizer=optimizer, scaler=scaler, params=position)
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    c.restore_state(c.load_training_state(c.save_checkpoint(tmp_path / "x.pt", **state)), model, scaler=other)
    assert other.get_scale() == 64.0
    off = torch.amp.GradScaler("cpu", enabled=False)
    state = c.gather_state(model, optimizer=optimizer, scaler=off, params=position)
    c.restore_state(c.load_training_state(c.save_checkpoint(tmp_path / "x.pt", **state)), model, scaler=off)


RANKS = """
import sys, random, torch, torch.distributed as dist
from zipformer_recipes import checkpoint as c
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
random.seed(rank), torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
state = c.gather_state(model, optimizer=optimizer, params=dict(epoch=1, batch_idx_train=1))
if rank == 0:
    c.save_checkpoint(f"{folder}/epoch-1.pt", **state)
dist.barrier()
expected = random.random(), float(torch.rand(()))
kept = c.restore_state(c.load_training_state(f"{folder}/epoch-1.pt"), model)
assert kept["same_ranks"] and (random.random(), float(torch.rand(()))) == expected
print("ok", rank)
"""


def test_each_rank_gets_its_own_streams_back(tmp_path):
    children = [subprocess.Popen([sys.executable, "-c", RANKS, str(rank), str(tmp_path)], stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) for rank in (0, 1)]
    try:
        outputs = [child.communicate(timeout=900) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [out.strip() for out, _ in outputs] == ["ok 0", "ok 1"], outputs
    state = c.load_training_state(tmp_path / "epoch-1.pt")
    assert len(state["ranks"]) == 2 and list(state["model"]) == ["weight", "bias"]
    assert not torch.equal(state["ranks"][0]["rng"]["torch"], state["ranks"][1]["rng"]["torch"])
