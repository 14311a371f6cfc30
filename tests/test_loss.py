"""The pruned transducer loss against k2's numbers, torchaudio, a path sum with plain loops, and numeric derivatives."""

import itertools
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torchaudio
from torch.utils._python_dispatch import TorchDispatchMode

from zipformer_recipes import loss as L
from zipformer_recipes.core import ConfigError, DataError, ToolError

GOLDEN = np.load(Path(__file__).parent / "golden/rnnt_k2.npz")
TYPES = ("regular", "modified", "constrained")


def random_batch(seed=0, B=3, T=9, S=4, V=6, dtype=torch.float64, begins=True):
    "lm, am, symbols and a boundary whose rows differ."
    g = torch.Generator().manual_seed(seed)
    lm, am = (torch.randn(B, n, V, generator=g, dtype=dtype) * 2 for n in (S + 1, T))
    symbols = torch.randint(1, V, (B, S), generator=g)
    late = [[0, 0, S, T], [1, 2, S, T - 1], [0, 1, S - 2, T - 3]]
    rows = late if begins else [[0, 0, S, T], [0, 0, S - 1, T - 2], [0, 0, 1, T]]
    return lm, am, symbols, torch.tensor(rows[:B])


def joint(am, lm, seed=0):
    "Logits of a small joint on all positions."
    w = torch.randn(lm.shape[2], lm.shape[2], generator=torch.Generator().manual_seed(seed), dtype=lm.dtype)
    return torch.tanh(am[:, :, None] + lm[:, None]) @ w


def path_sums(logp, symbols, boundary, rnnt_type, penalty=0.0):
    "Log probability of each row with one Python step per node, differentiable; logp (B, T, S+1, V)."
    totals = []
    for b, (s0, t0, s1, t1) in enumerate(boundary.tolist()):
        node = {(s0, t0): logp.new_zeros(())}
        for t, s in itertools.product(range(t0, t1 + 1), range(s0, s1 + 1)):
            ways = [node[s, t]] if (s, t) in node else []
            if t > t0 and (s, t - 1) in node:
                ways.append(node[s, t - 1] + logp[b, t - 1, s, 0])
            at = t if rnnt_type == "regular" else t - 1
            if s > s0 and (s - 1, at) in node and t0 <= at < t1:
                arc = logp[b, at, s - 1, symbols[b, s - 1]] + penalty * ((t1 - 1) / 2 - at)
                ways.append(node[s - 1, at] + arc + (logp[b, at, s, 0] if rnnt_type == "constrained" else 0))
            if ways:
                node[s, t] = torch.stack(ways).logsumexp(0)
        totals.append(node.get((s1, t1), logp.new_tensor(-torch.inf)))
    return torch.stack(totals)


def smoothed_by_hand(lm, am, lm_scale, am_scale):
    "The three parts of the simple loss, all of (B, T, S+1, V)."
    both = (am[:, :, None] + lm[:, None]).log_softmax(-1)
    unigram = lm.softmax(-1).mean((0, 1)).log()
    lm_part, am_part = lm.log_softmax(-1)[:, None], (am + unigram).log_softmax(-1)[:, :, None]
    return (1 - lm_scale - am_scale) * both + lm_scale * lm_part + am_scale * am_part


# ---------------------------------------------------------------- k2


def golden_case(i):
    return {k[4:]: torch.from_numpy(np.asarray(GOLDEN[k])) for k in GOLDEN.files if k.startswith(f"c{i:02d}/")}


def same(found, c, name, atol):
    assert found.shape == c[name].shape, name
    torch.testing.assert_close(found, c[name], rtol=1e-5, atol=atol, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("i", range(int(GOLDEN["num_cases"])))
def test_golden(i):
    c = golden_case(i)
    lm, am = c["lm"].requires_grad_(), c["am"].requires_grad_()
    kinds = dict(rnnt_type=TYPES[c["rnnt_type"]], reduction=("none", "sum", "mean")[c["reduction"]])
    how = dict(boundary=c["boundary"], delay_penalty=round(c["delay_penalty"].item(), 6), **kinds)
    blank, scales = int(c["termination_symbol"]), (c["lm_only_scale"].item(), c["am_only_scale"].item())
    simple, used = L.rnnt_loss_smoothed(lm, am, c["symbols"], blank, *scales, **how, return_grad=True)
    same(simple, c, "simple_loss", 1e-4)
    for name, x in zip(("px_grad", "py_grad"), used, strict=True):
        same(x, c, name, 5e-5)
    grads = torch.autograd.grad((simple * c["grad_out"]).sum(), (lm, am))
    for name, x in zip(("simple_lm_grad", "simple_am_grad"), grads, strict=True):
        same(x, c, name, 5e-5)

    logits = (torch.tanh(am[:, :, None] + lm[:, None]) @ c["joiner_w"]).detach().requires_grad_()
    full = L.rnnt_loss(logits, c["symbols"], blank, **how)
    same(full, c, "full_loss", 1e-4)
    if "full_logits_grad" in c:
        same(torch.autograd.grad((full * c["grad_out"]).sum(), logits)[0], c, "full_logits_grad", 5e-5)
    if "ranges" not in c:
        return
    ranges = L.get_rnnt_prune_ranges(*used, c["boundary"], int(c["s_range"]))
    assert torch.equal(ranges, c["ranges"])
    am_pruned, lm_pruned = L.do_rnnt_pruning(am, lm, ranges)
    same(am_pruned, c, "am_pruned", 0)
    same(lm_pruned, c, "lm_pruned", 0)
    logits = (torch.tanh(am_pruned + lm_pruned) @ c["joiner_w"]).detach().requires_grad_()
    same(logits, c, "pruned_logits", 5e-5)
    pruned = L.rnnt_loss_pruned(logits, c["symbols"], ranges, blank, **how)
    same(pruned, c, "pruned_loss", 1e-4)
    same(torch.autograd.grad((pruned * c["grad_out"]).sum(), logits)[0], c, "pruned_logits_grad", 5e-5)


# ---------------------------------------------------------------- other references


def test_equals_torchaudio():
    lm, am, symbols, boundary = random_batch(T=30, S=12, V=20, dtype=torch.float32, begins=False)
    logits = joint(am, lm).requires_grad_()
    ours = L.rnnt_loss(logits, symbols, 0, boundary, reduction="none")
    lengths = boundary[:, 3].int(), boundary[:, 2].int()
    theirs = torchaudio.functional.rnnt_loss(logits, symbols.int(), *lengths, blank=0, reduction="none")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    weight = torch.tensor([1.0, -0.5, 0.7])
    grads = [torch.autograd.grad(x @ weight, logits)[0] for x in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("penalty", (0.0, 0.2))
@pytest.mark.parametrize("scales", ((0.0, 0.0), (0.25, 0.0), (0.1, 0.3)))
@pytest.mark.parametrize("rnnt_type", TYPES)
def test_simple_loss_equals_path_sum(rnnt_type, scales, penalty):
    lm, am, symbols, boundary = random_batch(1)
    lm, am = lm.requires_grad_(), am.requires_grad_()
    how = dict(boundary=boundary, rnnt_type=rnnt_type, delay_penalty=penalty, reduction="none")
    ours = L.rnnt_loss_smoothed(lm, am, symbols, 0, *scales, **how)
    truth = -path_sums(smoothed_by_hand(lm, am, *scales), symbols, boundary, rnnt_type, penalty)
    torch.testing.assert_close(ours, truth)
    weight = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    grads = [torch.autograd.grad(x @ weight, (lm, am)) for x in (ours, truth)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("blank", (0, 5))
@pytest.mark.parametrize("rnnt_type", TYPES)
def test_full_and_pruned_equal_path_sum(rnnt_type, blank):
    lm, am, symbols, boundary = random_batch(2)
    symbols = symbols.clamp(max=4)
    logits = joint(am, lm).requires_grad_()
    how = dict(boundary=boundary, rnnt_type=rnnt_type, delay_penalty=0.1, reduction="none")
    logp = logits.log_softmax(-1)[..., [blank, 1, 2, 3, 4, 5 - blank]]
    begins = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
    ranges = (begins[:, None] + torch.arange(3)).expand(3, -1, -1)
    outside = torch.ones(9, 5, dtype=torch.bool).scatter_(1, ranges[0], False)[..., None]
    part = logits.gather(2, ranges[..., None].expand(-1, -1, -1, 6))
    ours = L.rnnt_loss(logits, symbols, blank, **how), L.rnnt_loss_pruned(part, symbols, ranges, blank, **how)
    truth = [-path_sums(x, symbols, boundary, rnnt_type, 0.1) for x in (logp, logp.masked_fill(outside, -1e3))]
    assert (ours[1] > ours[0] + 1e-3).any()
    for one, other in zip(ours, truth, strict=True):
        torch.testing.assert_close(one, other)
        grads = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (one, other)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_gradcheck(rnnt_type):
    lm, am, symbols, boundary = random_batch(3, B=2, T=5, S=2, V=3)
    boundary[1] = torch.tensor([1, 1, 2, 5])
    how = dict(boundary=boundary, rnnt_type=rnnt_type, delay_penalty=0.05, reduction="none")
    lm, am = lm.requires_grad_(), am.requires_grad_()
    target = dict(symbols=symbols, termination_symbol=0)
    simple = partial(L.rnnt_loss_smoothed, **target, lm_only_scale=0.2, am_only_scale=0.1, **how)
    assert torch.autograd.gradcheck(simple, (lm, am))
    _, used = simple(lm, am, return_grad=True)
    ranges = L.get_rnnt_prune_ranges(*used, boundary, 2)

    def pruned(am, lm):
        logits = torch.tanh(sum(L.do_rnnt_pruning(am, lm, ranges)))
        return L.rnnt_loss_pruned(logits, symbols, ranges, 0, **how)

    assert torch.autograd.gradcheck(pruned, (am, lm))
    full = partial(L.rnnt_loss, **target, **how)
    assert torch.autograd.gradcheck(full, joint(am, lm).detach().requires_grad_())


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_pruned_is_never_below_full_and_equal_without_pruning(rnnt_type):
    for seed in range(5):
        lm, am, symbols, boundary = random_batch(seed, T=14, S=6, V=8, begins=False)
        how = dict(boundary=boundary, rnnt_type=rnnt_type, reduction="none")
        _, used = L.rnnt_loss_simple(lm, am, symbols, 0, **how, return_grad=True)
        logits = joint(am, lm, seed)
        full = L.rnnt_loss(logits, symbols, 0, **how)
        for width in (2, 4, 7):
            ranges = L.get_rnnt_prune_ranges(*used, boundary, width)
            part = logits.gather(2, ranges[..., None].expand(-1, -1, -1, 8))
            pruned = L.rnnt_loss_pruned(part, symbols, ranges, 0, **how)
            assert (pruned > full - 1e-9).all()
        torch.testing.assert_close(pruned, full)


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_ranges_can_be_walked(rnnt_type):
    for seed, (T, S, width) in enumerate(((30, 12, 5), (12, 12, 3), (7, 12, 2), (40, 3, 5))):
        if rnnt_type != "regular" and S > T:
            continue
        lm, am, symbols, _ = random_batch(seed, B=2, T=T, S=S)
        boundary = torch.tensor([[0, 0, S, T], [0, 0, min(S, T - 2) - 1, T - 1]])
        _, used = L.rnnt_loss_simple(lm, am, symbols, 0, boundary, rnnt_type, return_grad=True)
        ranges = L.get_rnnt_prune_ranges(*used, boundary, width)
        R = ranges.shape[2]
        assert torch.equal(ranges, ranges[..., :1] + torch.arange(R))
        step = ranges[:, 1:, 0] - ranges[:, :-1, 0]
        assert (ranges[:, 0, 0] == 0).all()
        assert step.min() >= 0 and step.max() <= (R - 1 if rnnt_type == "regular" else 1)
        assert ranges.max() == S
        for b, (_, _, s_end, t_end) in enumerate(boundary.tolist()):
            assert s_end in ranges[b, t_end - 1]
        loss = L.rnnt_loss_pruned(torch.zeros(2, T, R, 6), symbols, ranges, 0, boundary, rnnt_type, reduction="none")
        assert loss.isfinite().all()


def test_width_grows_when_symbols_do_not_fit_and_stops_at_all():
    lm, am, symbols, _ = random_batch(B=1, T=3, S=10)
    boundary = torch.tensor([[0, 0, 10, 3]])
    _, used = L.rnnt_loss_simple(lm, am, symbols, 0, boundary, return_grad=True)
    assert L.get_rnnt_prune_ranges(*used, boundary, 2).shape[2] == 5  # trunc(9 / 3) + 2
    assert L.get_rnnt_prune_ranges(*used, boundary, 99).shape[2] == 11


def test_a_row_alone_equals_the_row_in_a_batch_whatever_its_padding_holds():
    lm, am, symbols, boundary = random_batch(4, begins=False)
    together = L.rnnt_loss_simple(lm, am, symbols, 0, boundary, reduction="none")
    for b, (_, _, s, t) in enumerate(boundary.tolist()):
        alone = L.rnnt_loss_simple(lm[[b], : s + 1], am[[b], :t], symbols[[b], :s], 0, reduction="none")
        torch.testing.assert_close(alone, together[[b]])
    other = am.clone()
    other[1, boundary[1, 3] :] = 99.0
    other.requires_grad_()
    loss = L.rnnt_loss_simple(lm, other, symbols, 0, boundary, reduction="none")
    torch.testing.assert_close(loss, together)
    loss.sum().backward()
    assert (other.grad[1, boundary[1, 3] :] == 0).all() and (other.grad[1, : boundary[1, 3]] != 0).any()


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_rows_without_symbols_or_batches_without_symbols(rnnt_type):
    lm, am, _, _ = random_batch(5, B=2, S=0)
    none, boundary = torch.zeros(2, 0, dtype=torch.int64), torch.tensor([[0, 0, 0, 9], [0, 0, 0, 1]])
    how = dict(boundary=boundary, rnnt_type=rnnt_type, reduction="none")
    loss, used = L.rnnt_loss_simple(lm, am, none, 0, **how, return_grad=True)
    blanks = (am + lm).log_softmax(-1)[..., 0]
    torch.testing.assert_close(loss, -torch.stack([blanks[0].sum(), blanks[1, 0]]))
    ranges = L.get_rnnt_prune_ranges(*used, boundary, 5)
    assert ranges.shape == (2, 9, 1)
    logits = sum(L.do_rnnt_pruning(am, lm, ranges))
    torch.testing.assert_close(L.rnnt_loss_pruned(logits, none, ranges, 0, **how), loss)


def test_a_row_without_any_path_is_infinite_and_leaves_the_others_alone():
    lm, am, symbols, _ = random_batch(6, B=2, T=6, S=4)
    boundary = torch.tensor([[0, 0, 4, 3], [0, 0, 4, 6]])  # four symbols on three frames, one each
    lm, am = lm.requires_grad_(), am.requires_grad_()
    loss = L.rnnt_loss_simple(lm, am, symbols, 0, boundary, "modified", reduction="none")
    assert loss[0] == torch.inf and loss[1].isfinite()
    loss[loss.isfinite()].sum().backward()
    for x in (lm, am):
        assert (x.grad[0] == 0).all() and x.grad.isfinite().all() and (x.grad[1] != 0).any()
    L.rnnt_loss_simple(lm, am, symbols, 0, boundary, "modified", reduction="sum").backward()
    assert lm.grad.isfinite().all()


def test_nan_stays_in_its_row():
    lm, am, symbols, _ = random_batch(7)
    am[1, 4, 2] = torch.nan
    loss, (px_grad, py_grad) = L.rnnt_loss_simple(lm, am, symbols, 0, reduction="none", return_grad=True)
    assert loss.isnan().tolist() == [False, True, False]
    assert px_grad[[0, 2]].isfinite().all() and py_grad[[0, 2]].isfinite().all() and py_grad[1].isnan().any()


def test_far_apart_scores_stay_finite():
    lm, am = torch.full((1, 3, 4), -500.0), torch.full((1, 5, 4), -500.0)
    lm[..., 0], am[..., 1] = 500.0, 500.0
    lm, am = lm.requires_grad_(), am.requires_grad_()
    loss = L.rnnt_loss_simple(lm, am, torch.ones(1, 2, dtype=torch.int64), 0)
    (loss * 65536).backward()
    assert loss.isfinite() and lm.grad.isfinite().all() and am.grad.isfinite().all()


def test_long_rows_are_exact_in_float32():
    lm, am, symbols, _ = random_batch(8, B=1, T=400, S=60, V=20)
    exact, used = L.rnnt_loss_simple(lm, am, symbols, 0, return_grad=True)
    single, used_single = L.rnnt_loss_simple(lm.float(), am.float(), symbols, 0, return_grad=True)
    assert abs(single - exact) < 1e-6 * exact
    for x, y in zip(used, used_single, strict=True):
        assert (x - y).abs().max() < 1e-5


def test_reductions_and_no_grad_agree():
    lm, am, symbols, boundary = random_batch(9)
    rows = L.rnnt_loss_simple(lm.requires_grad_(), am, symbols, 0, boundary, reduction="none")
    assert rows.shape == (3,)
    for name, value in (("sum", rows.sum()), ("mean", rows.mean())):
        with torch.no_grad():
            torch.testing.assert_close(L.rnnt_loss_simple(lm, am, symbols, 0, boundary, reduction=name), value.detach())


def test_no_boundary_is_the_whole_boundary():
    lm, am, symbols, _ = random_batch(10)
    whole = torch.tensor([[0, 0, 4, 9]] * 3)
    for rnnt_type, penalty in itertools.product(TYPES, (0.0, 0.1)):
        how = dict(rnnt_type=rnnt_type, delay_penalty=penalty, return_grad=True)
        one, other = (L.rnnt_loss_simple(lm, am, symbols, 0, boundary=b, **how) for b in (None, whole))
        torch.testing.assert_close(one, other)


def test_strided_inputs_and_repeated_backward():
    lm, am, symbols, boundary = random_batch(11, dtype=torch.float32)
    a = am.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    x = lm.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    loss = L.rnnt_loss_simple(x, a, symbols, 0, boundary)
    torch.testing.assert_close(loss, L.rnnt_loss_simple(lm, am, symbols, 0, boundary))
    once, twice = (torch.autograd.grad(loss, (x, a), retain_graph=True) for _ in range(2))
    assert all(torch.equal(g, h) for g, h in zip(once, twice, strict=True))


# ---------------------------------------------------------------- types, steps, errors


def test_autocast_changes_nothing():
    lm, am, symbols, boundary = random_batch(12, dtype=torch.float32)

    def run():
        inputs = lm.clone().requires_grad_(), am.clone().requires_grad_()
        loss, used = L.rnnt_loss_simple(*inputs, symbols, 0, boundary, return_grad=True)
        return loss, *used, *torch.autograd.grad(loss, inputs)

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        inside = run()
    assert inside[0].dtype == torch.float32
    assert all(torch.equal(x, y) for x, y in zip(plain, inside, strict=True))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision_logits_give_a_float32_loss_and_their_own_gradient(dtype):
    lm, am, symbols, boundary = random_batch(13, dtype=torch.float32)
    logits = joint(am, lm).to(dtype)
    half, single = logits.clone().requires_grad_(), logits.float().requires_grad_()
    losses = [L.rnnt_loss(x, symbols, 0, boundary) for x in (half, single)]
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(*losses)
    losses[0].backward()
    losses[1].backward()
    assert half.grad.dtype == dtype
    torch.testing.assert_close(half.grad, single.grad.to(dtype))


def test_second_derivative_is_refused():
    lm, am, symbols, boundary = random_batch(14)
    lm = lm.requires_grad_()
    logits = joint(am, lm)
    for loss in (L.rnnt_loss_simple(lm, am, symbols, 0, boundary), L.rnnt_loss(logits, symbols, 0, boundary)):
        with pytest.raises(NotImplementedError, match="second derivative"):
            torch.autograd.grad(loss, lm, create_graph=True)


class CountOperators(TorchDispatchMode):
    "How many torch operators run, views aside."

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_steps_grow_with_t_plus_s_not_with_t_times_s(rnnt_type):
    def operators(T, S):
        lm, am, symbols, _ = random_batch(B=1, T=T, S=S)
        with CountOperators() as counter:
            L.rnnt_loss_simple(lm, am, symbols, 0, rnnt_type=rnnt_type)
        return counter.count

    small, long, both = operators(20, 10), operators(40, 10), operators(40, 30)
    assert long - small == 2 * 20
    assert both - long == (2 * 20 if rnnt_type == "regular" else 0)


def test_same_numbers_every_time():
    lm, am, symbols, boundary = random_batch(15, T=60, S=20, V=50, dtype=torch.float32, begins=False)
    lm, am = lm.requires_grad_(), am.requires_grad_()

    def run():
        simple, used = L.rnnt_loss_smoothed(lm, am, symbols, 0, 0.25, 0.1, boundary, return_grad=True)
        ranges = L.get_rnnt_prune_ranges(*used, boundary, 5)
        logits = sum(L.do_rnnt_pruning(am, lm, ranges))
        loss = simple + L.rnnt_loss_pruned(logits, symbols, ranges, 0, boundary)
        return loss, ranges, *torch.autograd.grad(loss, (lm, am))

    assert all(torch.equal(x, y) for x, y in zip(run(), run(), strict=True))


def test_errors_say_what_and_where():
    lm, am, symbols, boundary = random_batch()
    with pytest.raises(ConfigError, match="did you mean constrained"):
        L.rnnt_loss_simple(lm, am, symbols, 0, rnnt_type="constraint")
    with pytest.raises(ConfigError, match="none, mean, sum"):
        L.rnnt_loss_simple(lm, am, symbols, 0, reduction="avg")
    with pytest.raises(DataError, match="only 0..5 exist"):
        L.rnnt_loss_simple(lm, am, symbols + 5, 0)
    with pytest.raises(DataError, match=r"symbols has shape \(3, 3\), not \(3, 4\)"):
        L.rnnt_loss_simple(lm, am, symbols[:, :3], 0)
    with pytest.raises(DataError, match="differ in rows or classes"):
        L.rnnt_loss_simple(lm[..., :4], am, symbols, 0)
    boundary[1, 3] = 10
    with pytest.raises(DataError, match="row 1 leaves the lattice"):
        L.rnnt_loss_simple(lm, am, symbols, 0, boundary)
    with pytest.raises(DataError, match="do not fit ranges"):
        L.rnnt_loss_pruned(am[:, :, None], symbols, torch.zeros(3, 9, 2, dtype=torch.int64), 0)
    with pytest.raises(ConfigError, match="keeps nothing"):
        L.get_rnnt_prune_ranges(torch.zeros(3, 4, 10), torch.zeros(3, 5, 9), boundary, 0)


# ---------------------------------------------------------------- which implementation


def fake_k2(torch_version=torch.__version__, cuda=torch.version.cuda or "", without=()):
    k2 = ModuleType("k2")
    k2.__version__ = "1.24.4"
    k2.torch_version = SimpleNamespace(k2_torch_version=torch_version, k2_torch_cuda_version=cuda)
    for name in set(L.LOSSES) - set(without):
        setattr(k2, name, lambda *args, **kwargs: "from k2")
    return k2


def test_backend_takes_a_matching_k2(monkeypatch):
    monkeypatch.setitem(sys.modules, "k2", fake_k2(torch.__version__.split("+")[0]))
    for impl in ("auto", "k2"):
        backend = L.loss_backend(impl)
        assert backend.name == "k2 1.24.4" and torch.__version__ in backend.why
        assert backend.rnnt_loss_pruned() == "from k2"
    assert L.loss_backend("torch").rnnt_loss_pruned is L.rnnt_loss_pruned


@pytest.mark.parametrize(
    "k2, why",
    (
        (fake_k2("1.13.1+cu117"), "built for torch 1.13.1"),
        (fake_k2(cuda="9.9") if torch.version.cuda else fake_k2("1.0"), "9.9" if torch.version.cuda else "1.0"),
        (fake_k2(without=["rnnt_loss_smoothed"]), "lacks rnnt_loss_smoothed"),
        (ModuleType("k2"), "does not say"),
        (None, "not installed"),
    ),
    ids=("torch", "cuda", "old", "unmarked", "absent"),
)
def test_backend_explains_why_k2_is_not_taken(monkeypatch, k2, why):
    monkeypatch.setitem(sys.modules, "k2", k2)
    backend = L.loss_backend()
    assert backend.name == "torch" and why in backend.why and backend.rnnt_loss is L.rnnt_loss
    with pytest.raises(ToolError, match=why):
        L.loss_backend("k2")


def test_backend_survives_a_k2_that_breaks_at_import(monkeypatch, tmp_path):
    (tmp_path / "k2.py").write_text("raise ImportError('_k2.so: undefined symbol')")
    monkeypatch.delitem(sys.modules, "k2", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    backend = L.loss_backend()
    assert backend.name == "torch" and "undefined symbol" in backend.why


def test_backend_refuses_unknown_names():
    with pytest.raises(ConfigError, match="auto, torch, k2"):
        L.loss_backend("numpy")


# ---------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_equals_cpu():
    lm, am, symbols, boundary = random_batch(16, T=40, S=15, V=30, dtype=torch.float32, begins=False)
    found = []
    for device in ("cpu", "cuda"):
        a, x = am.to(device).requires_grad_(), lm.to(device).requires_grad_()
        y, b = symbols.to(device), boundary.to(device)
        simple, used = L.rnnt_loss_smoothed(x, a, y, 0, 0.25, 0.0, b, return_grad=True)
        ranges = L.get_rnnt_prune_ranges(*used, b, 5)
        loss = simple + L.rnnt_loss_pruned(sum(L.do_rnnt_pruning(a, x, ranges)), y, ranges, 0, b)
        found.append([v.cpu() for v in (loss, ranges, *torch.autograd.grad(loss, (a, x)))])
    for cpu, gpu in zip(*found, strict=True):
        torch.testing.assert_close(cpu, gpu, rtol=1e-4, atol=1e-4)
