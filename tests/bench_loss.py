"""How much faster the pruned loss is than torchaudio's full one: a benchmark, not a test.

python tests/bench_loss.py [--threads 1] [--repeats 5]

Both sides run in turn in one process, forward and backward, in float32 on the CPU; torchaudio's kernel uses one thread
whatever it is given. On a machine that has other work, trust CPU time with one thread. Two comparisons:
losses alone    full: the gradient of rnnt_loss with respect to given logits (B, T, S+1, V).
                pruned: the four steps from lm (B, S+1, V) and am (B, T, V) for the simple loss, and two more of these
                whose pruned halves are added to give the logits; the gradient with respect to all four.
with the joint  full and pruned both make their logits as linear(tanh(sum)) of a decoder side (B, S+1, 512) and an
                encoder side (B, T, 512); the gradient with respect to both and to the linear layer. The pruned side has
                the simple loss too.
"""

import argparse
import statistics
import time
import warnings

import torch
import torchaudio

from zipformer_recipes.loss import do_rnnt_pruning, get_rnnt_prune_ranges, rnnt_loss_pruned, rnnt_loss_smoothed

B, T, S, V, R, JOINER = 4, 250, 50, 500, 5, 512


def leaf(*shape):
    "Random input that wants a gradient."
    return torch.randn(*shape, requires_grad=True)


def full_loss(logits, symbols, boundary):
    "torchaudio's loss on all positions."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lengths = boundary[:, 3].int(), boundary[:, 2].int()
        return torchaudio.functional.rnnt_loss(logits, symbols.int(), *lengths, blank=0, reduction="sum")


def pruned_losses(lm, am, lm_side, am_side, joint, symbols, boundary):
    "The four steps; `joint` makes logits of the two pruned sides."
    simple, used = rnnt_loss_smoothed(lm, am, symbols, 0, 0.25, 0.0, boundary, reduction="sum", return_grad=True)
    ranges = get_rnnt_prune_ranges(*used, boundary, R)
    am_pruned, lm_pruned = do_rnnt_pruning(am_side, lm_side, ranges)
    return 0.5 * simple + rnnt_loss_pruned(joint(am_pruned + lm_pruned), symbols, ranges, 0, boundary, reduction="sum")


def seconds(loss, inputs):
    "Wall time and CPU time of one forward and backward pass."
    for x in inputs:
        x.grad = None
    start = time.perf_counter(), time.process_time()
    loss().backward()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def comparisons():
    "Name -> (full, its inputs, pruned, its inputs)."
    symbols, boundary = torch.randint(1, V, (B, S)), torch.tensor([[0, 0, S, T]] * B)
    lm, am, lm_v, am_v = leaf(B, S + 1, V), leaf(B, T, V), leaf(B, S + 1, V), leaf(B, T, V)
    logits, output = leaf(B, T, S + 1, V), torch.nn.Linear(JOINER, V)
    lm_side, am_side = leaf(B, S + 1, JOINER), leaf(B, T, JOINER)

    def joint(x):
        return output(torch.tanh(x))

    rest = (symbols, boundary)
    sides = [lm_side, am_side, *output.parameters()]
    return {
        "losses alone": (
            lambda: full_loss(logits, *rest),
            [logits],
            lambda: pruned_losses(lm, am, lm_v, am_v, lambda x: x, *rest),
            [lm, am, lm_v, am_v],
        ),
        "with the joint": (
            lambda: full_loss(joint(am_side[:, :, None] + lm_side[:, None]), *rest),
            sides,
            lambda: pruned_losses(lm, am, lm_side, am_side, joint, *rest),
            [lm, am, *sides],
        ),
    }


def main():
    parser = argparse.ArgumentParser(description="pruned loss against torchaudio's full loss")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"B {B}, T {T}, S {S}, V {V}, R {R}; torch {torch.__version__}, CPU threads {args.threads}, ", end="")
    print(f"median of {args.repeats}")
    for name, (full, full_inputs, pruned, pruned_inputs) in comparisons().items():
        seconds(pruned, pruned_inputs)  # warm-up
        times = [(*seconds(full, full_inputs), *seconds(pruned, pruned_inputs)) for _ in range(args.repeats)]
        wall, cpu, wall_pruned, cpu_pruned = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        for kind, slow, fast in (("wall", wall, wall_pruned), ("CPU", cpu, cpu_pruned)):
            line = f"{name}, {kind} time"
            print(f"{line:25s} torchaudio {slow:6.0f} ms   four steps {fast:6.1f} ms   1/{slow / fast:.1f}")


if __name__ == "__main__":
    main()
