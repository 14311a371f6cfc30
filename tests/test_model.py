"""Model: golden numbers of icefall, strict loading, and files that must not get through."""

import json
import os
import pathlib
from pathlib import Path

import numpy as np
import pytest
import torch
from zipformer.modules import scaling

from zipformer_recipes import model as m
from zipformer_recipes.core import CheckpointError, ConfigError, RunConfig

GOLDEN = np.load(Path(__file__).parent / "golden" / "zipformer_icefall.npz")
OPTIONS = json.loads(str(GOLDEN["options"]))
TINY = m.resolve_arch(OPTIONS)


def golden_model(case):
    causal = case == "c1"
    arch = OPTIONS | dict(causal=causal, chunk_size="16", left_context_frames="64")
    model = m.build_model(arch, 20, loss_impl="torch")
    return model, {k[9:]: torch.from_numpy(GOLDEN[k]) for k in GOLDEN.files if k.startswith(f"{case}/state/")}


def save(path, **content):
    torch.save(content, path)
    return path


@pytest.fixture(scope="module")
def donor():
    torch.manual_seed(5)
    return m.build_model(TINY, 20)


@pytest.mark.parametrize("case", ["c0", "c1"])
def test_same_numbers_as_icefall(case):
    model, state = golden_model(case)
    m.init_from(model, m.Checkpoint(case, state, None, {}))
    model.eval()
    data = {n: torch.from_numpy(GOLDEN[f"{case}/{n}"]) for n in ("x", "x_lens", "tokens", "token_lens", "encoder_out")}
    y = [row[:n].tolist() for row, n in zip(data["tokens"], data["token_lens"], strict=True)]
    with torch.no_grad():
        encoder_out, lens = model.forward_encoder(data["x"].float(), data["x_lens"])
        losses = model.forward_losses(data["x"].float(), data["x_lens"], y, prune_range=3)
        log_probs = model.ctc_output(encoder_out)
    assert lens.tolist() == GOLDEN[f"{case}/encoder_out_lens"].tolist()
    torch.testing.assert_close(encoder_out, data["encoder_out"], rtol=0, atol=1e-4)
    torch.testing.assert_close(log_probs, torch.from_numpy(GOLDEN[f"{case}/ctc_log_probs"]), rtol=0, atol=1e-4)
    for name, value in losses.items():
        assert float(value) == pytest.approx(float(GOLDEN[f"{case}/{name}_loss"]), rel=1e-3), name


@pytest.mark.parametrize("case", ["c0", "c1"])
def test_architecture_of_golden_state(case):
    model, state = golden_model(case)
    found = m.infer_arch(state)
    assert m.arch_differences(found, model.arch) == {}
    assert found["causal"] == (case == "c1")


@pytest.mark.parametrize("name", list(m.PRESETS))
def test_architecture_survives_its_tensors(name):
    arch = m.resolve_arch(m.PRESETS[name] | dict(causal=name == "tiny"))
    assert m.infer_arch(m.build_model(arch, 30).state_dict()) == arch


def test_hint_settles_what_products_leave_open():
    arch = TINY | dict(pos_head_dim="2", num_heads="8,8,8", query_head_dim="8", value_head_dim="6")
    state = m.build_model(arch, 20).state_dict()
    assert m.arch_differences(m.infer_arch(state, arch), m.resolve_arch(arch)) == {}
    assert m.infer_arch(state)["num_heads"] == "4,4,4"  # the same products, read with 4 per head


def test_no_activation_is_compiled(donor):
    kinds = scaling.SwooshL | scaling.SwooshR | scaling.ActivationDropoutAndLinear
    used = [getattr(x, name) for x in donor.modules() if isinstance(x, kinds)
            for name in ("func", "forward_func", "backward_func") if hasattr(x, name)]
    assert len(used) > 10 and {f.func for f in used} == {m.swoosh, m.swoosh_and_slope}
    assert scaling.torch_compile.__name__ == "torch_compile"  # the package is left as it was


def test_compiled_activations_can_be_taken_back(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda x: function(x))
    other = m.build_model(TINY, 20)
    m.set_swoosh(other, compiled=True)
    assert not hasattr(other.encoder_embed.conv[3].func, "keywords")
    m.set_swoosh(other)
    assert other.encoder_embed.conv[3].func.keywords == dict(shift=1.0, offset=0.313261687)


@pytest.mark.parametrize("kind", ["SwooshL", "SwooshR"])
def test_activation_and_slope(kind):
    x = torch.linspace(-30, 30, 601, dtype=torch.float64, requires_grad=True)
    numbers = m.SWOOSH[kind]
    value, slope = m.swoosh_and_slope(x, **numbers)
    expected = torch.log1p(torch.exp(x - numbers["shift"])) - 0.08 * x - numbers["offset"]
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-8)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(gradient, slope, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: m.swoosh(x, **numbers), x[::40])
    assert m.swoosh(x.bfloat16(), **numbers).dtype == torch.bfloat16


def test_losses_per_utterance_sum_up(donor):
    donor.eval()
    x, lens, y = torch.randn(2, 80, 80), torch.tensor([80, 60]), [[3, 4], [5]]
    with torch.no_grad():
        total, each = donor(x, lens, y), donor(x, lens, y, reduction="none")
    for name in ("simple", "pruned", "ctc"):
        assert each[name].shape == (2,)
        assert float(each[name].sum()) == pytest.approx(float(total[name]), rel=1e-5)


@pytest.mark.parametrize("wrong, near", [("medum", "medium"), ({"encoder_dims": "1"}, "encoder_dim")])
def test_unknown_names_get_the_nearest(wrong, near):
    with pytest.raises(ConfigError, match=near):
        m.build_model(wrong, 10)


def test_stack_counts_must_agree():
    with pytest.raises(ConfigError, match="2 values for 3 stacks"):
        m.build_model(TINY | dict(num_heads="4,4"), 10)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "module.module."])
@pytest.mark.parametrize("key", ["model", "model_avg", "bare"])
def test_spellings_of_a_checkpoint(tmp_path, donor, prefix, key):
    state = {prefix + k: v for k, v in donor.state_dict().items()}
    torch.save(state if key == "bare" else {key: state, "epoch": 4}, tmp_path / "x.pt")
    other = m.build_model(TINY, 20)
    rows = m.init_from(other, tmp_path / "x.pt")
    assert {r["status"] for r in rows} == {"loaded"}
    assert all(torch.equal(a, b) for a, b in zip(donor.parameters(), other.parameters(), strict=True))


def test_key_chooses_between_last_and_average(tmp_path, donor):
    state = donor.state_dict()
    path = save(tmp_path / "x.pt", model=state, model_avg={k: v.double() + 1 for k, v in state.items()})
    name = "decoder.embedding.weight"
    assert torch.equal(m.load_checkpoint(path).state[name], state[name])
    assert torch.equal(m.load_checkpoint(path, key="model_avg").state[name], state[name].double() + 1)
    with pytest.raises(CheckpointError, match="no state dict under 'ema'"):
        m.load_checkpoint(path, key="ema")


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Call:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("kind", [Command, Call])
@pytest.mark.parametrize("trust", [False, True])
def test_code_in_a_pickle_never_runs(tmp_path, donor, kind, trust):
    path = save(tmp_path / "evil.pt", model=donor.state_dict(), x=kind(tmp_path / "was_run"))
    with pytest.raises(CheckpointError, match="posix|getattr|call reduce"):
        m.load_checkpoint(path, trust=trust)
    assert not (tmp_path / "was_run").exists()


def unknown_class():
    pass


def test_foreign_objects_are_named_and_can_be_left_out(tmp_path, donor):
    path = save(tmp_path / "x.pt", model=donor.state_dict(), extra=unknown_class, epoch=3)
    with pytest.raises(CheckpointError, match="test_model.unknown_class.*\n.*\n.*trust=True"):
        m.load_checkpoint(path)
    ckpt = m.load_checkpoint(path, trust=True)
    assert ckpt.meta == {"epoch": 3} and len(ckpt.state) == len(donor.state_dict())


def test_known_settings_objects_of_icefall_are_harmless(tmp_path, donor):
    from zipformer.utils import AttributeDict
    extra = dict(exp_dir=Path("exp"), params=AttributeDict(a=1), best=np.float64(1.5), num_encoder_layers="1,1,1")
    path = save(tmp_path / "epoch-1.pt", model=donor.state_dict(), **extra)
    ckpt = m.load_checkpoint(path)
    assert ckpt.meta == {"num_encoder_layers": "1,1,1"}


def test_icefall_options_in_the_file_are_the_architecture(tmp_path, donor):
    path = save(tmp_path / "epoch-1.pt", model=donor.state_dict(), **OPTIONS)
    ckpt = m.load_checkpoint(path)
    assert ckpt.arch["encoder_unmasked_dim"] == "32,32,32"
    assert m.arch_differences(m.checkpoint_arch(ckpt), TINY) == {}
    lying = save(tmp_path / "epoch-2.pt", model=donor.state_dict(), **(OPTIONS | dict(encoder_dim="32,48,96")))
    with pytest.raises(CheckpointError, match="encoder_dim: config 32,48,96, tensors 32,48,64"):
        m.checkpoint_arch(m.load_checkpoint(lying))


def damage(path, how):
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 255
    path.write_bytes({"cut": data[: len(data) // 2], "end": data[:-3], "empty": b"", "flip": bytes(flipped),
                      "text": b"hello, this is not a checkpoint", "half a head": data[:2],
                      "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"}[how])


@pytest.mark.parametrize("how, words", [
    ("cut", "cut off"), ("end", "cut off|damaged"), ("empty", "empty"), ("flip", "damaged: the checksum"),
    ("text", "not a file of tensors"), ("half a head", "cut off"), ("pointer", "git lfs pull")])
def test_broken_files(tmp_path, donor, how, words):
    path = save(tmp_path / "x.pt", model=donor.state_dict())
    damage(path, how)
    with pytest.raises(CheckpointError, match=words) as caught:
        m.load_checkpoint(path)
    assert str(path) in str(caught.value) and caught.value.remedy


def test_missing_file_and_torchscript(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        m.load_checkpoint(tmp_path / "nowhere.pt")
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "jit.pt")
    with pytest.raises(CheckpointError, match="export.py"):
        m.load_checkpoint(tmp_path / "jit.pt")


def test_other_network(tmp_path):
    path = save(tmp_path / "x.pt", model={"encoder.layer.0.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="not a Zipformer"):
        m.init_from(m.build_model(TINY, 20), path)


@pytest.mark.parametrize("change, words", [
    (dict(encoder_dim="32,48,80"), "encoder_dim: file 32,48,64, model 32,48,80"),
    (dict(num_encoder_layers="1,2,1"), "num_encoder_layers: file 1,1,1, model 1,2,1"),
    (dict(feedforward_dim="48,64,128"), "feedforward_dim"), (dict(causal=True), "causal: file False, model True"),
    (dict(downsampling_factor="1,2,2"), "downsampling_factor: file 1,2,4, model 1,2,2"),
    (dict(cnn_module_kernel="31,15,15"), "cnn_module_kernel"), (dict(decoder_dim=64), "decoder_dim: file 32, model 64"),
    (dict(embed_channels="8,16,48"), "embed_channels"), (dict(num_heads="8,4,4"), "num_heads"),
    (dict(downsampling_factor="1,2,4,2", num_encoder_layers="1,1,1,1", encoder_dim="32,48,64,48", num_heads="4,4,4,4",
          feedforward_dim="48,64,96,64", cnn_module_kernel="15,15,15,15", encoder_unmasked_dim="32"), "encoder_dim")])
def test_other_architecture_names_both_values(tmp_path, donor, change, words):
    path = save(tmp_path / "x.pt", model=donor.state_dict())
    other = m.build_model(TINY | change, 20)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=words) as caught:
        m.init_from(other, path)
    assert "--model pretrained" in caught.value.remedy
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())


def test_other_vocabulary_and_its_two_remedies(tmp_path, donor):
    path = save(tmp_path / "x.pt", model=donor.state_dict())
    other = m.build_model(TINY, 33)
    with pytest.raises(CheckpointError, match="20 tokens, the model 33") as caught:
        m.init_from(other, path)
    assert "--bpe-model" in caught.value.remedy and "--init-modules" in caught.value.remedy
    rows = m.init_from(other, path, init_modules="encoder_embed,encoder")
    assert {r["tensor"].split(".")[0] for r in rows if r["status"] == "loaded"} == {"encoder_embed", "encoder"}
    assert torch.equal(other.encoder_embed.out.weight, donor.encoder_embed.out.weight)
    with pytest.raises(CheckpointError, match="joiner.output_linear.*other shapes|other shapes.*joiner"):
        m.init_from(other, path, init_modules="encoder,joiner")


def test_init_modules_must_exist_and_be_whole(tmp_path, donor):
    state = donor.state_dict()
    gone = [k for k in state if k.startswith("joiner.encoder_proj")][0]
    path = save(tmp_path / "x.pt", model={k: v for k, v in state.items() if k != gone})
    with pytest.raises(CheckpointError, match="'encodr': no tensor"):
        m.init_from(m.build_model(TINY, 20), path, init_modules="encodr")
    with pytest.raises(CheckpointError, match=gone):
        m.init_from(m.build_model(TINY, 20), path, init_modules="encoder,joiner")


def test_gap_inside_a_module_is_refused(tmp_path, donor):
    state = dict(donor.state_dict())
    del state["encoder.encoders.2.encoder.layers.0.norm.bias"]
    with pytest.raises(CheckpointError, match="layers.0.norm.bias"):
        m.init_from(m.build_model(TINY, 20), save(tmp_path / "x.pt", model=state))


def test_whole_head_may_be_left_over_or_small_and_new(tmp_path):
    arch = m.PRESETS["mini"]
    without = m.build_model(arch | dict(use_ctc=False), 100)
    path = save(tmp_path / "x.pt", model=without.state_dict())
    rows = m.init_from(m.build_model(arch, 100), path)
    assert {r["status"] for r in rows if r["tensor"].startswith("ctc_output")} == {"new"}
    full = save(tmp_path / "y.pt", model=m.build_model(arch, 100).state_dict())
    rows = m.init_from(m.build_model(arch | dict(use_ctc=False), 100), full)
    assert {r["tensor"] for r in rows if r["status"] == "unused"} == {"ctc_output.1.weight", "ctc_output.1.bias"}


def test_less_than_99_percent_is_refused(tmp_path, donor):
    encoder = {k: v for k, v in donor.state_dict().items() if not k.startswith(("decoder", "joiner", "simple"))}
    with pytest.raises(CheckpointError, match=r"\d\d\.\d% of the model's parameters"):
        m.init_from(m.build_model(TINY, 20), save(tmp_path / "x.pt", model=encoder))


def test_pretrained_folder_round_trip(tmp_path, donor):
    (tmp_path / "bpe.model").write_bytes(b"tokens")
    m.save_pretrained(tmp_path / "mine", donor, tmp_path / "bpe.model", dict(hours=1.5), log="made by a test")
    model, tokenizer, meta = m.load_pretrained(tmp_path / "mine")
    assert Path(tokenizer).read_bytes() == b"tokens" and meta["hours"] == 1.5 and model.arch == donor.arch
    assert (tmp_path / "mine" / "log.txt").read_text() == "made by a test"
    assert all(torch.equal(a.half().float(), b) for a, b in zip(donor.parameters(), model.parameters(), strict=True))
    assert next(model.parameters()).dtype == torch.float32
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert config["vocab_size"] == 20 and config["parameters"] == sum(p.numel() for p in donor.parameters())


def test_pretrained_from_a_bare_file_and_icefall_layout(tmp_path, donor):
    (tmp_path / "exp").mkdir()
    (tmp_path / "data" / "lang_bpe_20").mkdir(parents=True)
    (tmp_path / "data" / "lang_bpe_20" / "bpe.model").write_bytes(b"tokens")
    model, tokenizer, _ = m.load_pretrained(save(tmp_path / "exp" / "pretrained.pt", model=donor.state_dict()))
    assert Path(tokenizer).read_bytes() == b"tokens"
    assert m.arch_differences(model.arch, TINY) == {}
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        m.load_pretrained(tmp_path / "nothing")


def test_settings_of_a_run_change_the_architecture():
    base = m.resolve_arch(TINY | dict(causal=True))
    assert m.arch_of(RunConfig(), base) == base
    assert m.arch_of(RunConfig(model="small")) == m.PRESETS["small"]
    changed = m.arch_of(RunConfig(decoder_dim=64, use_ctc=False), base)
    assert changed == base | dict(decoder_dim=64, use_ctc=False)


def test_schedules_follow_the_batch_count(donor):
    donor.train()
    m.set_batch_count(donor, 0)
    assert float(donor.encoder_embed.dropout.p) == pytest.approx(0.3)
    m.set_batch_count(torch.nn.DataParallel(donor), 50_000)
    assert float(donor.encoder_embed.dropout.p) == pytest.approx(0.1)
