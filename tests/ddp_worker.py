"""One rank of two, or one rank with two micro-batches per update; test_finetune.py compares gradients and weights."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from lhotse import CutSet
from toy import fixed_batches
from zipformer.modules import scaling

from zipformer_recipes import finetune
from zipformer_recipes.batches import load_cuts
from zipformer_recipes.core import RunConfig, load_json

UPDATES = 3
if __name__ == "__main__":
    cfg, out = RunConfig(**load_json(sys.argv[1])), Path(sys.argv[2])
    rank, device = finetune.start_ranks(cfg)
    world = dist.get_world_size() if dist.is_initialized() else 1
    t = finetune.make_trainer(cfg, rank, device)
    t.wrapped.eval()  # nothing random: what is compared is the arithmetic of the update
    scaling.random = SimpleNamespace(random=lambda: 1.0)  # Whiten and Balancer draw also in eval mode
    cuts = list(load_cuts(cfg.path("data") / "target_train_cuts.jsonl.gz"))
    pairs = [CutSet.from_cuts(cuts[i : i + 2]) for i in range(0, 4 * UPDATES, 2)]
    batches, grads, step = fixed_batches(pairs), [], finetune.take_step

    def record(t):
        grads.append({n: p.grad.clone() for n, p in t.model.named_parameters() if p.grad is not None})
        return step(t)

    finetune.take_step = record
    for u in range(UPDATES):
        finetune.train_update(t, batches[2 * u : 2 * u + 2] if world == 1 else [batches[2 * u + rank]])
    torch.save({"model": t.model.state_dict(), "grads": grads[0]}, out.with_name(f"{out.name}-{rank}.pt"))
    if dist.is_initialized():
        dist.destroy_process_group()
