"""Decoding, counting and the evaluate stage, on tiny models and made-up cuts; see nbs/08_evaluate.ipynb."""
import ast
import json
import random
from pathlib import Path
from types import SimpleNamespace

import kaldialign
import numpy as np
import pytest
import torch
from lhotse import CutSet, Features, MonoCut, NumpyFilesWriter, SupervisionSegment
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from zipformer.modules.model import Decoder, Joiner

from zipformer_recipes import evaluate as ev
from zipformer_recipes.core import CheckpointError, ConfigError, DataError, RunConfig, exit_code, load_json, read_report
from zipformer_recipes.model import build_model

ARCH = dict(num_encoder_layers="1,1", downsampling_factor="1,2", encoder_dim="32,32", feedforward_dim="32,32",
            num_heads="2,2", encoder_unmasked_dim="32,32", cnn_module_kernel="15,15", query_head_dim="8",
            value_head_dim="4", pos_head_dim="2", pos_dim=16, decoder_dim=16, joiner_dim=16, embed_channels="4,8,8")
WORDS = ["", "ALPHA", "BRAVO", "DELTA", "ECHO", "GOLF", "HOTEL", "KILO", "LIMA", "MIKE"]


class WordTokenizer:
    "Token i is the word WORDS[i]; 0 is blank."
    vocab_size = len(WORDS)

    def decode(self, ids):
        return " ".join(WORDS[i] for i in ids)


class ReadingModel(torch.nn.Module):
    "Finds one-hot tokens in every fourth feature frame: decoding is right only if frames, lengths and ids are kept."

    def __init__(self):
        super().__init__()
        n = len(WORDS)
        self.decoder, self.joiner = Decoder(n, 8, 0, 2), Joiner(n, 8, n, n)
        self.ctc_output = torch.nn.Identity()
        for layer, on in ((self.joiner.encoder_proj, 1), (self.joiner.decoder_proj, 0), (self.joiner.output_linear, 1)):
            layer.weight.data = on * torch.eye(n)[:, : layer.weight.shape[1]]
            layer.bias.data.zero_()

    def forward_encoder(self, x, x_lens):
        return x[:, ::4, : len(WORDS)], (x_lens + 3) // 4


def made_cut(folder, cut_id, words, text=None, frames=None, values=None):
    "A cut whose stored features spell `words`, each word once on a frame, blank between."
    feats = np.full((frames or 8 * len(words) + 4, 80), -5.0, dtype=np.float32)
    feats[::4, 0] = 2.0
    for k, word in enumerate(words):
        feats[8 * k + 4, [0, WORDS.index(word)]] = -5.0, 2.0
    feats = feats if values is None else np.full_like(feats, values)
    writer = NumpyFilesWriter(folder / "feats")
    duration = len(feats) / 100
    stored = Features(type="fbank", num_frames=len(feats), num_features=80, frame_shift=0.01, sampling_rate=16000,
                      start=0, duration=duration, storage_type=writer.name, storage_path=str(writer.storage_path),
                      storage_key=writer.write(f"{cut_id}-feats", feats), recording_id=cut_id, channels=0)
    text = " ".join(words) if text is None else text
    supervision = SupervisionSegment(id=cut_id, recording_id=cut_id, start=0, duration=duration, text=text)
    return MonoCut(id=cut_id, start=0, duration=duration, channel=0, features=stored, supervisions=[supervision])


@pytest.fixture
def cuts(tmp_path):
    rng = random.Random(3)
    return [made_cut(tmp_path, f"cut-{i}", rng.choices(WORDS[1:], k=rng.randint(1, 12))) for i in range(9)]


def random_transducer(seed, context_size=2, vocab=12):
    "Random decoder and joiner, loud enough that the context decides, with blank about every second time."
    torch.manual_seed(seed)
    model = SimpleNamespace(decoder=Decoder(vocab, 16, 0, context_size).eval(), joiner=Joiner(20, 16, 24, vocab).eval())
    for layer in (model.joiner.encoder_proj, model.joiner.decoder_proj):
        layer.weight.data = torch.randn_like(layer.weight)
    model.joiner.output_linear.weight.data = torch.randn_like(model.joiner.output_linear.weight)
    model.joiner.output_linear.bias.data[0] += 6.0
    return model


def plain_greedy(model, encoder_out, max_sym_per_frame):
    "The textbook loop for one utterance, joiner called on unprojected inputs; encoder_out is (T, C)."
    size = model.decoder.context_size
    said = [-1] * (size - 1) + [0]
    for frame in encoder_out:
        for _ in range(max_sym_per_frame):
            decoder_out = model.decoder(torch.tensor([said[-size:]]), need_pad=False)
            token = int(model.joiner(frame[None, None], decoder_out).argmax())
            if token == 0:
                break
            said.append(token)
    return said[size:]


@pytest.mark.parametrize("context_size, max_sym", [(2, 1), (1, 1), (3, 3)])
def test_greedy_batch_equals_plain_loop(context_size, max_sym):
    model = random_transducer(5, context_size)
    lens = torch.tensor([7, 30, 1, 18, 30])
    encoder_out = torch.randn(5, 30, 20)
    with torch.no_grad():
        plain = [plain_greedy(model, row[:n], max_sym) for row, n in zip(encoder_out, lens.tolist(), strict=True)]
    assert ev.greedy_search_batch(model, encoder_out, lens, max_sym) == plain
    emitted = sum(map(len, plain))
    assert 10 < emitted < max_sym * int(lens.sum()), "the case must have both blanks and tokens"
    order = [3, 1, 4, 0, 2]
    assert ev.greedy_search_batch(model, encoder_out[order], lens[order], max_sym) == [plain[i] for i in order]


def test_greedy_needs_the_context():
    "A decoder that forbids repeating the last token: the search must feed its own output back."
    model = random_transducer(0, context_size=1, vocab=4)
    decoder, joiner = model.decoder, model.joiner
    decoder.embedding.weight.data = torch.eye(4, 16)
    joiner.decoder_proj.weight.data = torch.eye(24, 16) * 5
    joiner.encoder_proj.weight.data.zero_()
    for layer in (joiner.decoder_proj, joiner.encoder_proj):
        layer.bias.data.zero_()
    joiner.output_linear.weight.data = torch.zeros(4, 24)
    for last, following in ((0, 1), (1, 2), (2, 3), (3, 1)):  # after `last` say `following`
        joiner.output_linear.weight.data[following, last] = 10
    joiner.output_linear.bias.data.zero_()
    assert ev.greedy_search_batch(model, torch.zeros(1, 6, 20), torch.tensor([6])) == [[1, 2, 3, 1, 2, 3]]


def test_ctc_greedy_merges_then_drops_blank():
    scores = torch.nn.functional.one_hot(torch.tensor([[1, 1, 0, 1, 2, 2], [0, 3, 3, 3, 1, 1]]), 4).float()
    model = SimpleNamespace(ctc_output=torch.nn.Identity())
    assert ev.ctc_greedy_search(model, scores, torch.tensor([6, 4])) == [[1, 1, 2], [3]]


def test_duration_batches_hold_the_padded_limit():
    durations = np.random.default_rng(1).uniform(0.5, 14, 200).tolist() + [100.0]
    batches = ev.duration_batches(durations, 40.0)
    assert sorted(i for b in batches for i in b) == list(range(201))
    assert all(len(b) == 1 or len(b) * max(durations[i] for i in b) <= 40.0 for b in batches)
    padded = sum(len(b) * max(durations[i] for i in b) for b in batches)
    assert padded < 1.1 * sum(durations)


@pytest.mark.parametrize("method", ["greedy_search", "ctc_greedy_search"])
@pytest.mark.parametrize("max_duration", [0.1, 1.5, 100.0])
def test_decode_cuts_keeps_ids_and_order(cuts, method, max_duration):
    model = ReadingModel().train()
    texts, spent = ev.decode_cuts(model, WordTokenizer(), cuts, max_duration, method)
    assert list(texts) == [c.id for c in cuts]
    assert texts == {c.id: c.supervisions[0].text for c in cuts}
    assert model.training and 0 < spent["model"] <= spent["total"] and spent["audio"] == sum(c.duration for c in cuts)


def test_decode_cuts_of_a_zipformer_then_train(cuts, tmp_path):
    "Odd lengths, padding, and no trace of decoding left in a model that goes on training."
    torch.manual_seed(0)
    model = build_model(ARCH, len(WORDS)).train()
    model.joiner.output_linear.weight.data *= 20
    short = made_cut(tmp_path, "short", [], text="X", frames=3)
    texts, _ = ev.decode_cuts(model, WordTokenizer(), [*cuts, short], 2.0)
    assert len(texts) == 10 and any(texts.values()) and model.training
    alone = ev.padding_effect(model, WordTokenizer(), cuts, n=4)
    assert alone["utterances"] == 3 and 0 <= alone["changed"] <= 3
    x, x_lens = ev.pad_features([ev.read_features(c) for c in cuts])
    assert x.shape == (9, int(x_lens.max()), 80)
    assert torch.allclose(x[int(x_lens.argmin()), -1], torch.tensor(1e-10).log())
    losses = model.forward_encoder(x, x_lens)[0].sum()
    losses.backward()  # fails if decoding left inference tensors in the model's caches
    assert model.encoder_embed.conv[0].weight.grad is not None


def test_bad_cuts_are_typed_errors(cuts, tmp_path):
    model, tokenizer = ReadingModel(), WordTokenizer()
    bare = MonoCut(id="bare", start=0, duration=1, channel=0, supervisions=cuts[0].supervisions)
    silent = made_cut(tmp_path, "silent", ["ALPHA"])
    silent.supervisions = []
    lost = made_cut(tmp_path, "lost", ["ALPHA"])
    Path(lost.features.storage_path, lost.features.storage_key).unlink()
    broken = made_cut(tmp_path, "broken", ["ALPHA"], values=np.nan)
    for bad, words in [([], "no cuts"), ([cuts[0], cuts[0]], "more than once: cut-0"), ([bare], "no features: bare"),
                       ([silent], "one supervision: silent"), ([*cuts, lost], "lost cannot be read"),
                       ([broken], "not finite")]:
        with pytest.raises(DataError, match=words) as caught:
            ev.decode_cuts(model, tokenizer, bad)
        assert caught.value.remedy
    for method in ("greedy_serach", "beam"):
        with pytest.raises(ConfigError, match="unknown decoding method") as caught:
            ev.decode_cuts(model, tokenizer, cuts, method=method)
        assert "greedy_search" in caught.value.remedy
    model.ctc_output = None
    with pytest.raises(ConfigError, match="lacks"):
        ev.decode_cuts(model, tokenizer, cuts, method="ctc_greedy_search")


def fewest_errors(ref, hyp):
    "Levenshtein distance over words, row by row."
    row = list(range(len(hyp) + 1))
    for i, r in enumerate(ref, 1):
        row, above = [i], row
        for j, h in enumerate(hyp, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (r != h)))
    return row[-1]


def test_counts_are_minimal_and_add_up():
    rng = random.Random(0)
    refs = {f"u{i}": " ".join(rng.choices(WORDS[1:5], k=rng.randint(0, 9))) for i in range(60)}
    hyps = {i: " ".join(rng.choices(WORDS[1:5], k=rng.randint(0, 9))) for i in refs}
    total, rows = ev.wer_counts(refs, hyps)
    for row in rows:
        ref, hyp = refs[row["id"]].split(), hyps[row["id"]].split()
        pairs = ev.align(ref, hyp)
        assert [r for r, _ in pairs if r] == ref and [h for _, h in pairs if h] == hyp
        assert row["errors"] == row["sub"] + row["del"] + row["ins"] == fewest_errors(ref, hyp)
        assert row["words"] + row["ins"] - row["del"] == len(hyp)
    assert total["errors"] == sum(row["errors"] for row in rows)
    assert total["words"] == sum(len(ref.split()) for ref in refs.values())
    assert total["wer"] == round(100 * total["errors"] / total["words"], 2)


def test_corpus_level_and_normaliser():
    refs, hyps = ["TWENTY ONE", "IT'S ME HERE NOW"], ["twenty-one", "It’s me, here."]
    assert ev.wer_counts(refs, hyps)[0] == {"sub": 0, "del": 1, "ins": 0, "errors": 1, "words": 6, "wer": 16.67}
    assert ev.wer_counts(refs, hyps, str.split)[0]["errors"] == 6
    assert ev.align("A * B", "A B") == [("A", "A"), ("*", ""), ("B", "B")]  # icefall's gap sign as a word


def test_counts_refuse_what_has_no_rate():
    with pytest.raises(DataError, match="2 ids.*a, b"):
        ev.wer_counts({"a": "X"}, {"b": "X"})
    with pytest.raises(DataError, match="no words"):
        ev.wer_counts({"a": "", "b": " ... "}, {"a": "X", "b": ""})
    assert ev.wer_counts({"a": "", "b": "X"}, {"a": "Y", "b": "X"})[0]["wer"] == 100.0


def test_bootstrap_interval():
    rng = random.Random(1)
    refs = [" ".join(rng.choices(WORDS[1:], k=rng.randint(1, 12))) for _ in range(120)]
    hyps = [" ".join(w for w in ref.split() if rng.random() > 0.2) for ref in refs]
    total, rows = ev.wer_counts(refs, hyps)
    low, high = ev.bootstrap_interval(rows, seed=1)
    assert (low, high) == ev.bootstrap_interval(rows, seed=1) != ev.bootstrap_interval(rows, seed=2)
    assert low < total["wer"] < high
    other = kaldialign.bootstrap_wer_ci([r.split() for r in refs], [h.split() for h in hyps], replications=2000)
    assert abs(low - 100 * other["ci95min"]) < 1 and abs(high - 100 * other["ci95max"]) < 1
    assert ev.bootstrap_interval(ev.wer_counts(refs, refs)[1]) == (0.0, 0.0)


@pytest.mark.parametrize("hyp, word", [("", "streaming"), ("ALPHA", "deletions"), ("ALPHA BRAVO ECHO", None),
                                       ("ALPHA X BRAVO Y DELTA Z", "insertions")])
def test_diagnose_names_a_cause(hyp, word):
    refs = ["ALPHA BRAVO DELTA"] * 5
    found = ev.diagnose(ev.wer_counts(refs, [hyp] * 5)[1])
    assert (word in found["hint"]) if word else found["hint"] == ""
    some = ev.diagnose(ev.wer_counts(refs, [""] + refs[1:])[1])
    assert some["empty"] == 0.2 and "not converged" in some["hint"]


def test_worst_utterances_are_shown_aligned():
    refs = {"a": "ALPHA BRAVO", "b": "ALPHA", "c": "DELTA ECHO GOLF", "d": "KILO"}
    hyps = {"a": "ALPHA BRAVO", "b": "LIMA MIKE", "c": "ECHO GOLFS", "d": ""}
    worst = ev.worst_utterances(ev.wer_counts(refs, hyps)[1], 2)
    assert [row["id"] for row in worst] == ["b", "c"]
    assert ev.show_aligned(worst[1]).splitlines() == [
        "c: words 3, errors 2", "  ref DELTA ECHO GOLF", "  hyp ***   ECHO GOLFS", "      D          S"]


def test_icefall_files(tmp_path):
    refs = {"u2": "ALPHA BRAVO DELTA", "u1": "ECHO GOLF ALPHA"}
    hyps = {"u2": "ALPHA KILO DELTA MIKE", "u1": "ECHO ALPHA"}
    _, rows = ev.wer_counts(refs, hyps)
    recogs, errs = ev.write_icefall_files(tmp_path / "fine-tuned", "target_test", rows)
    lines = recogs.read_text(encoding="utf-8").splitlines()
    assert [line.split(":\t")[0] for line in lines] == ["u1", "u1", "u2", "u2"]
    assert ast.literal_eval(lines[2].split("ref=")[1]) == refs["u2"].split()
    assert ast.literal_eval(lines[3].split("hyp=")[1]) == hyps["u2"].split()
    assert errs.read_text(encoding="utf-8") == """\
%WER = 50.00
Errors: 1 insertions, 1 deletions, 1 substitutions, over 6 reference words (4 correct)
Search below for sections starting with PER-UTT DETAILS:, SUBSTITUTIONS:, DELETIONS:, INSERTIONS:, PER-WORD STATS:

PER-UTT DETAILS: corr or (ref->hyp)\x20\x20
u1:\tECHO (GOLF->*) ALPHA
u2:\tALPHA (BRAVO->KILO) DELTA (*->MIKE)

SUBSTITUTIONS: count ref -> hyp
1   BRAVO -> KILO

DELETIONS: count ref
1   GOLF

INSERTIONS: count hyp
1   MIKE

PER-WORD STATS: word  corr tot_errs count_in_ref count_in_hyp
MIKE   0 1 0 1
KILO   0 1 0 1
GOLF   0 1 1 0
BRAVO   0 1 1 0
ECHO   1 0 1 1
DELTA   1 0 1 1
ALPHA   2 0 2 2
"""


def test_find_models(tmp_path):
    cfg = RunConfig.from_profile("smoke", run_dir=tmp_path)
    assert ev.find_models(cfg) == {"zero-shot": ""}
    for folder in ("exp", "exp_mux"):
        (tmp_path / folder).mkdir()
        with pytest.raises(CheckpointError, match="no file"):
            ev.find_models(cfg)
        (tmp_path / folder / "final.pt").touch()
    assert list(ev.find_models(cfg)) == ["zero-shot", "fine-tuned", "fine-tuned+mux"]
    one = str(tmp_path / "exp" / "final.pt")
    assert ev.find_models(cfg.replace(checkpoints=f"a={one}, {one}")) == {"a": one, "final": one}
    cases = [("a=nowhere.pt", CheckpointError), (f"a={one},a={one}", ConfigError), (f"x/y={one}", ConfigError)]
    for wrong, error in cases:
        with pytest.raises(error):
            ev.find_models(cfg.replace(checkpoints=wrong))


def test_find_sets(tmp_path):
    cfg = RunConfig.from_profile("smoke", run_dir=tmp_path)
    with pytest.raises(DataError, match="no cuts file") as caught:
        ev.find_sets(cfg)
    assert "data stage" in caught.value.remedy
    (tmp_path / "data").mkdir()
    for name in ("target_test_cuts.jsonl.gz", "source_test_cuts.jsonl.gz", "prompts.jsonl.gz"):
        (tmp_path / "data" / name).touch()
    assert list(ev.find_sets(cfg)) == ["target_test", "source_test"]
    prompts = tmp_path / "data" / "prompts.jsonl.gz"
    own = ev.find_sets(cfg.replace(eval_sets=f"target_test,mine={prompts}", test_cuts=prompts.name))
    assert own == {"target_test": prompts, "mine": prompts}
    with pytest.raises(DataError) as caught:
        ev.find_sets(cfg.replace(eval_sets="traget_test"))
    assert "target_test" in caught.value.remedy


def train_tokenizer(text, prefix, size):
    "A tokenizer of exactly `size` tokens, blank first; returns `size`."
    SentencePieceTrainer.train(input=str(text), model_prefix=str(prefix), vocab_size=size, model_type="bpe", unk_id=2,
                               bos_id=-1, eos_id=-1, user_defined_symbols="<blk>,<sos/eos>", minloglevel=2)
    return SentencePieceProcessor(model_file=f"{prefix}.model").get_piece_size()


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    "A run folder with tokenizer, two test sets and two untrained models."
    run = tmp_path_factory.mktemp("run")
    (run / "data").mkdir()
    (run / "text").write_text("\n".join(WORDS[1:] * 3))
    vocab = train_tokenizer(run / "text", run / "data" / "bpe", 30)
    rng = random.Random(5)
    for name, count in (("target_test", 4), ("source_test", 3)):
        made = [made_cut(run, f"{name}-{i}", rng.choices(WORDS[1:], k=8 * (i + 1))) for i in range(count)]
        CutSet.from_cuts(made).to_file(run / "data" / f"{name}_cuts.jsonl.gz")
    for seed, folder in enumerate(("exp", "exp_mux")):
        torch.manual_seed(seed)
        (run / folder).mkdir()
        model = build_model(ARCH, vocab)
        model.joiner.output_linear.weight.data *= 20
        torch.save({"model": model.state_dict(), "arch": model.arch}, run / folder / "final.pt")
    return run


def tiny_config(run):
    return RunConfig.from_profile("smoke", run_dir=run, finetune_ckpt=run / "exp" / "final.pt", eval_max_duration=5)


def test_run_scores_every_model_on_every_set(tiny_run, capsys):
    report = ev.run(tiny_config(tiny_run))
    assert list(report["wer"]) == ["zero-shot", "fine-tuned", "fine-tuned+mux"]
    zero, tuned = report["wer"]["zero-shot"]["target_test"], report["wer"]["fine-tuned"]["target_test"]
    same = ("wer", "sub", "del", "ins", "errors", "words", "ci95")
    assert [zero[k] for k in same] == [tuned[k] for k in same]  # the same file
    assert zero["errors"] == zero["sub"] + zero["del"] + zero["ins"] and zero["words"] == 80
    assert {"ci95", "seconds", "rtf", "rtf_total", "empty", "hint", "wer_raw", "padding", "by_length"} <= set(zero)
    assert 0 < zero["rtf"] <= zero["rtf_total"]
    assert report["rtf"]["fine-tuned"]["device"] and report["rtf"]["fine-tuned"]["threads"] >= 1
    saved = read_report(tiny_run, "evaluate")
    assert saved["wer"] == json.loads(json.dumps(report["wer"])) == load_json(tiny_run / "eval" / "results.json")
    for model in report["wer"]:
        errs = (tiny_run / "eval" / model / "errs-source_test.txt").read_text(encoding="utf-8")
        assert errs.startswith(f"%WER = {report['wer'][model]['source_test']['wer']:.2f}\n")
    assert (tiny_run / "eval" / "wer.png").read_bytes()[:4] == b"\x89PNG"
    out = capsys.readouterr().out
    assert "fine-tuned+mux on source_test: %WER" in out and len(report["worst"]["zero-shot"]["target_test"]) == 4
    table = ev.wer_table(report["wer"]).splitlines()
    assert len(table) == 7 and len({len(line) for line in table}) == 1


def test_run_remembers_where_it_started(tiny_run):
    (tiny_run / "run.json").write_text(json.dumps({"config": tiny_config(tiny_run).to_dict()}))
    try:
        filled = ev.of_the_run(RunConfig.from_profile("demo", run_dir=tiny_run))
        assert filled.finetune_ckpt == str(tiny_run / "exp" / "final.pt") and filled.profile == "demo"
        assert ev.of_the_run(filled.replace(finetune_ckpt="other.pt")).finetune_ckpt == "other.pt"
    finally:
        (tiny_run / "run.json").unlink()


def test_bad_checkpoints_are_typed_errors(tiny_run, tmp_path):
    good = torch.load(tiny_run / "exp" / "final.pt", weights_only=True)
    other = build_model(ARCH, 17)
    torch.save({"model": other.state_dict(), "arch": other.arch}, tmp_path / "vocabulary.pt")
    torch.save({"model": good["model"], "arch": good["arch"] | {"encoder_dim": "32,48"}}, tmp_path / "architecture.pt")
    (tmp_path / "own").mkdir()
    (tmp_path / "text").write_text("\n".join(w.lower() for w in WORDS[1:] * 3))
    train_tokenizer(tmp_path / "text", tmp_path / "own" / "bpe", len(good["model"]["decoder.embedding.weight"]))
    torch.save(good, tmp_path / "own" / "tokens.pt")
    whole = (tiny_run / "exp" / "final.pt").read_bytes()
    (tmp_path / "truncated.pt").write_bytes(whole[: len(whole) // 2])
    says = {"vocabulary": "17 tokens", "architecture": "disagree", "truncated": "cut off"}
    for name, words in (says | {"own/tokens": "tokens differ"}).items():
        with pytest.raises(CheckpointError, match=words) as caught:
            ev.run(tiny_config(tiny_run).replace(checkpoints=f"bad={tmp_path}/{name}.pt"))
        assert caught.value.remedy and str(tmp_path) in caught.value.where


def test_empty_set_stops_before_decoding(tiny_run, tmp_path):
    import gzip
    with gzip.open(tmp_path / "none.jsonl.gz", "wb"):
        pass
    with pytest.raises(DataError):
        ev.run(tiny_config(tiny_run).replace(eval_sets=f"none={tmp_path}/none.jsonl.gz"))


def test_streaming_model_reads_the_whole_utterance(tiny_run, tmp_path):
    "A causal model draws its chunk size at random when it has several; two decodes must agree."
    vocab = len(torch.load(tiny_run / "exp" / "final.pt", weights_only=True)["model"]["decoder.embedding.weight"])
    model = build_model(ARCH | {"causal": True}, vocab)
    torch.save({"model": model.state_dict(), "arch": model.arch}, tmp_path / "causal.pt")
    bpe = tiny_run / "data" / "bpe.model"
    assert ev.load_model(tmp_path / "causal.pt", bpe, chunk_size="16,32,64,-1").encoder.chunk_size == (-1,)
    loaded = ev.load_model(tmp_path / "causal.pt", bpe, chunk_size="16")
    assert loaded.encoder.chunk_size == (16,) and len(loaded.encoder.left_context_frames) == 1


def test_command_line(tiny_run, capsys):
    argv = ["--run-dir", str(tiny_run), "--checkpoints", f"one={tiny_run}/exp/final.pt", "--eval-sets", "source_test"]
    assert exit_code(ev.main, argv) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["one", "source_test"]
    assert exit_code(ev.main, [*argv, "--decoding-methd", "greedy_search"]) == 2
    assert "--decoding-method" in capsys.readouterr().err


def test_notebook_runs_on_another_folder(tiny_run, tmp_path, monkeypatch):
    "papermill with another run_dir: every cell, also those that need a run, ends."
    import papermill
    monkeypatch.setenv("IN_TEST", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own backend puts figures into the notebook
    notebook = Path(__file__).parents[1] / "nbs" / "08_evaluate.ipynb"
    parameters = dict(profile="smoke", run_dir=str(tiny_run), checkpoints=f"last={tiny_run / 'exp' / 'final.pt'}",
                      eval_sets="target_test", decoding_method="ctc_greedy_search")
    known = papermill.inspect_notebook(str(notebook))  # a second = in a line, comment included, hides a parameter
    assert set(parameters) <= set(known) and all(p["help"] for p in known.values())
    done = papermill.execute_notebook(str(notebook), str(tmp_path / "out.ipynb"), parameters=parameters,
                                      kernel_name="python3", cwd=str(notebook.parent), progress_bar=False)
    assert read_report(tiny_run, "evaluate")["decoding"]["method"] == "ctc_greedy_search"
    pictures = [o for c in done.cells if c.cell_type == "code" for o in c.outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 4


def test_the_stored_seeds_are_of_one_recipe_and_their_spread_is_counted():
    from importlib.resources import files

    rows = load_json(files("zipformer_recipes") / "texts" / "seeds.json")
    assert len({r["seed"] for r in rows}) == len(rows) >= 3 and len({r["epochs"] for r in rows}) == 1
    spread = {(r["model"], r["set"]): r for r in ev.seed_spread(rows)}
    mixed = spread["fine-tuned+mux", "target_test"]
    assert mixed["runs"] == len(rows) and mixed["lowest"] <= mixed["mean"] <= mixed["highest"]
    zero = spread["zero-shot", "source_test"]
    assert zero["lowest"] == zero["highest"], "the same file each time"
