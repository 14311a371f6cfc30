"""Normaliser, token lists and coverage: what a transcript becomes, and every refusal on the way to token ids."""

import json
import pickle
import random
import re
import shutil
import warnings
from importlib.resources import files
from pathlib import Path

import pytest

from zipformer_recipes import corpus
from zipformer_recipes import text as tx
from zipformer_recipes.core import DataError

SHIPPED = files("zipformer_recipes").joinpath("pretrained", "bpe.model")
HEAD = ("<blk> 0", "<sos/eos> 1", "<unk> 2")
FEW = ["PRESS THE POUND KEY", "PRESS STAR", "THE KEY IS LOCKED"] * 10
apt = pytest.mark.skipif(not shutil.which("apt-get"), reason="the embedded corpus comes by apt-get, which is not here")


def token_list(folder, *pieces, name="tokens.txt", head=HEAD):
    lines = [*head, *(f"{p} {i}" for i, p in enumerate(pieces, len(head)))]
    Path(folder, name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Path(folder, name)


def bilingual(folder):
    shutil.copy(SHIPPED, folder / "bpe.model")
    return token_list(folder, *"今天我们用好", *tx.Tokenizer(SHIPPED).pieces[3:], "#0", "#1")


# ---- normaliser


def test_every_spelling_rule():
    pairs = {
        "Please press 1, 2 or *.": "PLEASE PRESS ONE TWO OR STAR",
        "dial 500 now": "DIAL FIVE HUNDRED NOW",
        "8500": "EIGHT FIVE ZERO ZERO",
        "A.M.": "A M",
        "o'clock": "O'CLOCK",
        "De-activated.": "DEACTIVATED",
        "Call-Forward on Busy.": "CALL FORWARD ON BUSY",
        "press # to enter": "PRESS POUND TO ENTER",
        "3D audio": "THREE D AUDIO",
        "...": "",
        "12": "TWELVE",
        "21": "TWENTY ONE",
    }
    english = tx.preset("english")
    assert {k: tx.spoken_text(k) for k in pairs} == pairs == {k: english(k) for k in pairs}


@apt
def test_english_is_spoken_text_on_every_line_of_the_embedded_corpora():
    import gzip

    root = corpus.fetch_packages(corpus.TARGET_PACKAGES, corpus.cache_folder())
    lines = gzip.decompress(next(root.rglob("core-sounds-en.txt.gz")).read_bytes()).decode().splitlines()
    said = [line.partition(": ")[2] for line in lines if line[:1] != ";"]
    said = [re.sub(r" \[.\]", "", s.strip()) for s in said if not tx.tags_of(s)]  # as `parse_transcripts` does
    said += corpus.source_sentences(2000)
    english = tx.preset("english")
    assert len(said) > 2500 and [(s, english(s)) for s in said] == [(s, tx.spoken_text(s)) for s in said]


def test_english_is_spoken_text_on_random_sentences_and_english_lower_its_lower_case():
    rng, english, lower = random.Random(5), tx.preset("english"), tx.preset("english_lower")
    words = "Press the KEY o'clock re-record on-line 7 45 500 4242 * # a.m. 3D thru USB don't -- ' 28.8 h.323".split()
    for _ in range(2000):
        line = "".join(rng.choice(words) + rng.choice([" ", ", ", ". ", "! ", "; ", ' "', " ("]) for _ in range(8))
        assert english(line) == tx.spoken_text(line)
        assert lower(line) == tx.spoken_text(line).lower()


FRAGMENTS = "1 23 456 1,000 3.5 2024 年 50% $5.50 21st ip usb pbx A.M. re- -un thru & AT&T * # @ ' ’ - . , ! ( ) [ ]"
FRAGMENTS += " < > { } <NOISE> [laughter] {um} 今天 ， 。 Ｋ é İ ß ŉ ﬁ"
FRAGMENTS = [*FRAGMENTS.split(), " ", "\t"]


@pytest.mark.parametrize("name", tx.PRESETS)
def test_normalising_twice_changes_nothing(name):
    rng, normalizer = random.Random(name), tx.preset(name)
    texts = ["".join(rng.choices(FRAGMENTS, k=8)) for _ in range(2500)]
    plane = [chr(c) for c in range(0x10000) if not 0xD800 <= c < 0xE000]
    texts += [" ".join(f"x{c}1{c}" for c in plane[i : i + 40]) for i in range(0, len(plane), 40)]
    once = [normalizer(t) for t in texts]
    assert [normalizer(t) for t in once] == once
    assert all(t == t.strip() and "  " not in t for t in once)


def test_D7_tags_and_spoken_punctuation_never_reach_the_tokens():
    english = tx.preset("english")
    giga = "AS THEY SAY <COMMA> FAMOUS LAST WORDS <PERIOD> REALLY <QUESTIONMARK> YES <EXCLAMATIONPOINT>"
    assert english(giga) == "AS THEY SAY FAMOUS LAST WORDS REALLY YES"
    for name in set(tx.PRESETS) - {"raw"}:
        normalizer = tx.preset(name)
        assert [normalizer(t) for t in ("<SIL>", "<MUSIC>", "<NOISE>", "<OTHER>", "[laughter] {um}")] == [""] * 5
    assert tx.tags_of("<sil> 3 < 4 > 2 at [@] [1] (note)") == ["<SIL>"]
    kept = tx.Normalizer({"steps": [{"step": "remove_tags", "keep": ["<unk>"]}, "blanks"]})
    assert kept("a <UNK> b <noise> <unk>") == "a <UNK> b <unk>"


def test_letters_of_other_scripts_are_never_dropped_silently():
    for text in ("привет мир", "你好", "straße", "مرحبا", "नमस्ते"):
        for name in tx.PRESETS:
            said = tx.preset(name)(text)
            assert len(re.sub(r"\s", "", said)) >= len(re.sub(r"\s", "", text)), name
    assert tx.preset("english")("дай café") == "ДАЙ CAFE"


def test_english_amounts():
    english = tx.preset("english")
    pairs = {
        "$1": "ONE DOLLAR",
        "$5.50": "FIVE DOLLARS AND FIFTY CENTS",
        "£0.01": "ZERO POUNDS AND ONE PENNY",
        "$2.5 million": "TWO POINT FIVE MILLION DOLLARS",
        "1,234,567": "ONE MILLION TWO HUNDRED THIRTY FOUR THOUSAND FIVE HUNDRED SIXTY SEVEN",
        "1,000.5": "ONE THOUSAND POINT FIVE",
        "the 1st, 2nd, 3rd and 112th": "THE FIRST SECOND THIRD AND ONE HUNDRED TWELFTH",
        "1.6.1": "ONE POINT SIX POINT ONE",
        "1,2,3": "ONE TWO THREE",
        "100%": "ONE HUNDRED PERCENT",
        "AT&T": "AT AND T",
    }
    assert {k: english(k) for k in pairs} == pairs
    assert tx.preset("english", read="year")("in 1984, 365 of 2005") == (
        "IN NINETEEN EIGHTY FOUR THREE HUNDRED SIXTY FIVE OF TWO THOUSAND FIVE"
    )


def test_chinese_numbers_read_back_to_themselves():
    digits, units = {c: i for i, c in enumerate("零一二三四五六七八九")}, {"十": 10, "百": 100, "千": 1000}

    def value(said):  # an independent reader
        for name, size in (("亿", 10**8), ("万", 10**4)):
            if name in said:
                high, low = said.split(name, 1)
                return value(high) * size + (value(low) if low else 0)
        total, last = 0, None
        for c in said:
            if c in units:
                total, last = total + (1 if last is None else last) * units[c], None
            else:
                last = digits[c] or None
        return total + (last or 0)

    rng = random.Random(1)
    numbers = [*range(1200), 10**4, 10050, 100015, 10**8 + 1, *(rng.randrange(10**11) for _ in range(300))]
    assert [value(tx.chinese_cardinal(n)) for n in numbers] == numbers
    assert not [n for n in numbers if "零零" in tx.chinese_cardinal(n)]
    usual = {10: "十", 15: "十五", 110: "一百一十", 10010: "一万零一十", 120000: "十二万"}
    assert {n: tx.chinese_cardinal(n) for n in usual} == usual


def test_chinese_and_mixed_text():
    chinese, amount, mixed = tx.preset("chinese"), tx.preset("chinese", read="amount"), tx.preset("mixed")
    assert chinese("今天 是 ２０２４年，天 气 好！") == "今天是二零二四年天气好"
    assert amount("２０２４年 15 号 1,005 元 50%") == "二零二四年十五号一千零五元百分之五十"
    assert amount("电话13800138000，代码007") == "电话一三八零零一三八零零零代码零零七"
    assert chinese("ｉｃｅｆａｌｌ 很 好 new york") == "ICEFALL很好NEW YORK"
    assert mixed("今天hello  world，好") == "今 天 HELLO WORLD 好"
    assert mixed("3 days") == "THREE DAYS" and mixed("3天") == "三 天"
    assert tx.preset("mixed", cjk="join")("今天 hello") == "今天HELLO"


def test_a_normaliser_survives_json_and_says_what_it_is(tmp_path):
    for name in tx.PRESETS:
        first = tx.preset(name)
        again = tx.Normalizer.load(first.save(tmp_path / "n.json"))
        assert again == first == tx.Normalizer(json.loads(json.dumps(first.to_dict()))) and name in repr(again)
        assert all(set(s) == {"step", *tx._options_of(s["step"])} for s in first.to_dict()["steps"]), "every option"
        assert pickle.loads(pickle.dumps(first))("<NOISE> a 12") == first("<NOISE> a 12"), "for loader workers"
    first.to_dict()["steps"].clear()
    assert first.spec["steps"] and not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize(
    "spec,match",
    [
        ("inglish", "did you mean english"),
        ({"steps": ["chnge_case"]}, "did you mean change_case"),
        ({"steps": [{"step": "blanks", "cjkk": "join"}]}, "did you mean cjk"),
        ({"steps": [{"step": "blanks", "cjk": "joined"}]}, "choose join"),
        ({"steps": [{"step": "say_words", "words": ["a"]}]}, "words cannot be"),
        ({"steps": [{"step": "say_words", "words": {"a": 1}}]}, "words cannot be"),
        ({"steps": [{"step": "remove_tags", "keep": 1}]}, "keep cannot be"),
        ({"steps": [{"step": "fold_accents", "to": "x"}]}, "its options: none"),
        ({"steps": [3]}, "no step None"),
        ({"steps": "blanks"}, "no list of steps"),
        ({"step": ["blanks"]}, "no list of steps"),
        ({"steps": [], "rules": 99}, "rules 99"),
        ({"steps": [], "nme": 1}, "unknown entries"),
        (7, "no list of steps"),
    ],
)
def test_an_unknown_name_in_a_specification_is_refused(spec, match):
    with pytest.raises(DataError, match=match):
        tx.Normalizer(spec)


def test_options_of_a_preset_are_checked():
    with pytest.raises(DataError, match="did you mean read"):
        tx.preset("english", reed="year")
    with pytest.raises(DataError, match="takes read='yaer'"):
        tx.preset("english", read="yaer")
    assert tx.preset("english", words={"um": ""})("um, thru") == "THROUGH"


def test_replacements_that_undo_each_other_are_found():
    normalizer = tx.Normalizer({"steps": [{"step": "say_words", "words": {"a": "b", "b": "a"}}]})
    with pytest.raises(DataError, match="never comes to rest"):
        normalizer("a")


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "n.json").write_text('{"steps": ["blank')
    with pytest.raises(DataError, match="n.json"):
        tx.Normalizer.load(tmp_path / "n.json")
    (tmp_path / "n.json").write_text('["blanks"]')
    with pytest.raises(DataError, match="n.json"):
        tx.Normalizer.load(tmp_path / "n.json")


def test_explain_lists_the_steps_that_changed_something():
    normalizer = tx.preset("english")
    steps = normalizer.explain("It’s <NOISE> 5")
    assert [s for s, *_ in steps] == [
        "plain_quotes", "remove_tags", "change_case", "say_numbers", "drop_punctuation", "change_case",
    ]  # fmt: skip
    assert all(a[2] == b[1] for a, b in zip(steps, steps[1:], strict=False)) and steps[-1][2] == "IT'S FIVE"
    assert normalizer.explain("IT'S FIVE") == []
    assert normalizer.explain("ip/usb")[-1][2] == normalizer("ip/usb") == "I P U S B"


# ---- token lists


def test_the_shipped_tokenizer():
    tokenizer = tx.Tokenizer(SHIPPED)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.unk_id, tokenizer.pieces[0]) == ("unigram", 160, 2, "<blk>")
    for text in FEW[:3]:
        ids = tokenizer.encode(text)
        assert ids == tokenizer.sp.encode(text) == [i for _, i in tokenizer.surfaces(text)]
        assert tokenizer.decode(ids) == text
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode("PRESS") == tokenizer.encode("PRESS") and Path(again.path) == Path(SHIPPED)


@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char"])
def test_training_twice_gives_the_same_bytes_and_round_trips(tmp_path, model_type):
    one = tx.train_tokenizer(FEW, tmp_path / "a" / "bpe.model", 22, model_type)
    two = tx.train_tokenizer(iter(FEW), tmp_path / "b.model", 22, model_type)
    assert one.path.read_bytes() == two.path.read_bytes() and one.kind == model_type
    assert one.pieces[:3] == ["<blk>", "<sos/eos>", "<unk>"] and one.unk_id == 2
    assert all(one.decode(one.encode(t)) == t for t in FEW) and one.unknown_share(FEW) == 0


def test_vocabulary_too_large_for_little_text_becomes_the_largest_that_can_be_made(tmp_path):
    "icefall issue 1531, sentencepiece issues 605 and 730."
    with pytest.warns(UserWarning, match="23 pieces instead of 500"):
        assert tx.train_tokenizer(FEW, tmp_path / "bpe.model", 500).vocab_size == 23 == tx.feasible_vocab(FEW, 500)
    with pytest.warns(UserWarning, match="every character needs one"):
        assert tx.train_tokenizer(FEW, tmp_path / "bpe.model", 4).vocab_size == 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tx.train_tokenizer(FEW, tmp_path / "bpe.model", 21).vocab_size == 21 == tx.feasible_vocab(FEW, 21)
    assert [tx.feasible_vocab(FEW, n, "bpe") for n in (74, 75)] == [74, 74]
    assert tx.feasible_vocab(["a"], 100) == 5
    assert [tx.feasible_vocab(FEW, n, "char") for n in (5, 20, 500)] == [20] * 3, "no character is dropped silently"


def test_no_text_and_unknown_types_are_refused(tmp_path):
    for texts in ([], [""], ["  "]):
        with pytest.raises(DataError, match="no text"):
            tx.train_tokenizer(texts, tmp_path / "bpe.model")
        with pytest.raises(DataError, match="no text"):
            tx.train_characters(texts, tmp_path / "tokens.txt")
    with pytest.raises(DataError, match="no model type"):
        tx.train_tokenizer(FEW, tmp_path / "bpe.model", 20, "words")
    assert not list(tmp_path.iterdir())


def test_texts_sentencepiece_leaves_out_are_said(tmp_path):
    with pytest.warns(UserWarning, match="1 texts of more than 4192 bytes"):
        tx.train_tokenizer([*FEW, "KEY " * 1100], tmp_path / "bpe.model", 21)


def test_characters_for_chinese(tmp_path):
    texts = ["今天天气好", "天气NEW", "你好"]
    tokenizer = tx.train_characters(texts, tmp_path / "tokens.txt")
    assert tokenizer.kind == "char" and tokenizer.path == tmp_path / "tokens.txt" and tokenizer.sp is None
    assert tokenizer.pieces[:6] == ["<blk>", "<sos/eos>", "<unk>", "天", "好", "气"], "by count, then code point"
    assert all(tokenizer.decode(tokenizer.encode(t)) in (t, t.replace("NEW", " NEW")) for t in texts)
    assert tokenizer.encode("今 天") == tokenizer.encode("今天"), "blanks are no tokens, as in icefall"
    assert tokenizer.encode("龙") == [2] and "\u2047" in tokenizer.decode([2])
    assert tx.train_characters(texts, tmp_path / "t2.txt", least=2).vocab_size == 6
    same = tx.train_characters(texts, tmp_path / "t3.txt").path.read_bytes()
    assert same == (tmp_path / "tokens.txt").read_bytes()


def test_a_list_with_a_piece_for_the_blank_keeps_the_words(tmp_path):
    tokenizer = tx.load_tokenizer(token_list(tmp_path, "<space>", *"HELO"))
    assert tokenizer.encode("HE LO") == [4, 5, 3, 6, 7] and tokenizer.decode([4, 5, 3, 6, 7]) == "HE LO"


def test_F1_a_bilingual_list_beside_an_english_model(tmp_path):
    path, english = bilingual(tmp_path), tx.Tokenizer(SHIPPED)
    mixed, text = tx.preset("mixed"), "今 天 PRESS THE KEY 好"
    for where in (path, tmp_path):
        tokenizer = tx.load_tokenizer(where)
        assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.path) == ("char+bpe", 166, path), "no #0, #1"
        ids = tokenizer.encode(text)
        assert mixed(tokenizer.decode(ids)) == text and tokenizer.unknown_share([text]) == 0
        assert ids[:2] == [3, 4] and [i - 6 for i in ids[2:-1]] == english.encode("PRESS THE KEY")
        assert tokenizer.encode("龙 press")[0] == 2
    with pytest.raises(IndexError, match="token 166"):
        tokenizer.decode([166])
    with pytest.raises(IndexError, match="token -1"):
        tokenizer.decode([-1])
    with pytest.warns(UserWarning, match="160 pieces but tokens.txt beside it 166"):
        assert tx.load_tokenizer(tmp_path / "bpe.model").vocab_size == 160
    for content in ("version https://git-lfs.github.com/spec/v1\n", "not a list\n"):
        path.write_text(content)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert tx.load_tokenizer(tmp_path / "bpe.model").vocab_size == 160, "what lies beside does not matter then"


def test_F2_a_list_in_another_order_decides(tmp_path):
    shutil.copy(SHIPPED, tmp_path / "bpe.model")
    english = tx.Tokenizer(SHIPPED)
    same = tx.load_tokenizer(token_list(tmp_path, *english.pieces[3:], "#0").parent)
    assert same.encode(FEW[0]) == english.encode(FEW[0]) and same.path.name == "bpe.model" and same.ids is None
    turned = tx.load_tokenizer(token_list(tmp_path, *english.pieces[:2:-1]).parent)
    assert turned.encode(FEW[0]) != english.encode(FEW[0]) and turned.decode(turned.encode(FEW[0])) == FEW[0]
    assert turned.kind == "unigram" and turned.path.name == "tokens.txt"


def test_byte_level_models(tmp_path):
    chars = "今天我们用好训练模型点开会了北京欢迎你来到这里学习说话声音识别中文汉字数据时间电脑手机"
    lines = [tx.to_bytes(a + b + " HELLO WORLD") for a, b in zip(chars, chars[1:], strict=False)]
    made = tx.train_tokenizer(lines, tmp_path / "bbpe.model", 78)
    tokenizer = tx.load_tokenizer(tmp_path)
    assert made.kind == tokenizer.kind == "bbpe"
    assert tokenizer.decode(tokenizer.encode("今天 HELLO")) == "今 天 HELLO"
    assert tokenizer.unknown_share([chars]) == 0 and tx.normalizer_for(tokenizer, ["hello"])[0]("你hello") == "你 HELLO"
    for text in ("héllo", "今天", "a\u2047b"):
        assert tx.from_bytes(tx.to_bytes(text)) == tx.blanks(text, cjk="split")
    assert tx.from_bytes(tx.to_bytes("今天")[1:]) == " 天"


@pytest.mark.parametrize(
    "lines,match",
    [
        ([], "empty"),
        (["", " "], "empty"),
        (["#0 0"], "empty"),
        ([*HEAD, "你 3", "好 3"], "3 is in the list twice"),
        ([*HEAD, "你 3", "你 4"], "'你' is in the list twice"),
        ([*HEAD, "你 4"], "id 3 is missing"),
        (["<unk> 0", "<blk> 1"], "piece 0 is '<unk>', not blank"),
        ([*HEAD, "你"], "line 4 is '你'"),
        ([*HEAD, "你 x"], "line 4"),
        (["<blk> 0", "你 1"], "no <unk>"),
        ([*HEAD, "▁THE 3", "E 4"], "put the bpe.model"),
        ([*HEAD, "AA 3", "AE 4"], "put the bpe.model"),
    ],
)
def test_a_damaged_list_is_refused(tmp_path, lines, match):
    (tmp_path / "tokens.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=match) as error:
        tx.load_tokenizer(tmp_path / "tokens.txt")
    assert "tokens.txt" in error.value.where and error.value.remedy


def test_odd_but_valid_lists_are_read(tmp_path):
    text = "\ufeff<blk>\t0\r\n<sos/eos>\t1\r\n<unk>\t2\r\n# 3\r\n 4\r\n你 5\r\n#0 6\r\n"
    (tmp_path / "tokens.txt").write_bytes(text.encode())
    assert tx.read_token_list(tmp_path / "tokens.txt") == ["<blk>", "<sos/eos>", "<unk>", "#", "", "你"]
    (tmp_path / "latin.txt").write_bytes("<blk> 0\né 1\n".encode("latin-1"))
    with pytest.raises(DataError, match="UTF-8"):
        tx.read_token_list(tmp_path / "latin.txt")


def test_D13_lfs_pointers_are_recognised_in_every_file(tmp_path):
    for name in ("bpe.model", "tokens.txt"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 244853\n")
        with pytest.raises(DataError, match="git lfs pull|Git LFS pointer"):
            tx.Tokenizer(tmp_path / name)
    with pytest.raises(DataError, match="git lfs pull"):
        tx.Tokenizer(tmp_path / "bpe.model")


def test_missing_files_and_folders_without_a_tokenizer(tmp_path):
    (tmp_path / "bpe.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match="not a sentencepiece model"):
        tx.Tokenizer(tmp_path / "bpe.model")
    with pytest.raises(DataError, match="did you mean bpe.model"):
        tx.Tokenizer(tmp_path / "bpe.modl")
    (tmp_path / "sub").mkdir()
    with pytest.raises(DataError, match="neither tokens.txt"):
        tx.Tokenizer(tmp_path / "sub")
    for name in ("unigram_500.model", "unigram_2000.model"):
        shutil.copy(SHIPPED, tmp_path / "sub" / name)
    with pytest.raises(DataError, match="unigram_2000.model, unigram_500.model"):
        tx.Tokenizer(tmp_path / "sub")
    (tmp_path / "sub" / "unigram_2000.model").unlink()
    assert tx.Tokenizer(tmp_path / "sub").vocab_size == 160


def test_a_model_without_blank_is_refused(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(FEW), model_prefix=str(tmp_path / "m"), vocab_size=22, minloglevel=2
    )
    with pytest.raises(DataError, match="not blank"):
        tx.Tokenizer(tmp_path / "m.model")


def test_a_list_and_a_model_of_different_models_are_refused(tmp_path):
    shutil.copy(SHIPPED, tmp_path / "bpe.model")
    token_list(tmp_path, *"今天我们用好")
    with pytest.raises(DataError, match="different models"):
        tx.Tokenizer(tmp_path)


# ---- coverage


def test_D7_lower_case_text_against_an_upper_case_model():
    tokenizer, texts = tx.Tokenizer(SHIPPED), [t.lower() for t in FEW]
    report = tx.coverage(tokenizer, texts)
    assert report["unknown_share"] == 0.5, "a word is one piece for its start and one <unk>"
    assert report["unknown_share_upper"] == 0 and report["unknown_share_lower"] == 0.5
    assert report["unknown_characters"]["e"] == "".join(texts).count("e") and report["unknown_examples"]["e"] in texts
    with pytest.raises(DataError, match="50.0% of the tokens are unknown") as error:
        tx.check_coverage(report, where="train")
    assert error.value.where == "train" and "upper case" in error.value.remedy
    normalizer, chosen = tx.normalizer_for(tokenizer, texts)
    assert chosen["preset"] == "english" and (chosen["unknown_before"], chosen["unknown_after"]) == (0.5, 0)
    tx.check_coverage(tx.coverage(tokenizer, map(normalizer, texts)))


def test_D7_the_limit_is_half_a_percent():
    tokenizer = tx.Tokenizer(SHIPPED)
    texts = ["THE KEY"] * 298 + ["THE Ω"]
    report = tx.coverage(tokenizer, texts)
    assert 0 < report["unknown_share"] < 0.005 and tx.check_coverage(report) is report
    with pytest.raises(DataError, match="limit 0.1%.*Ω"):
        tx.check_coverage(report, limit=0.001)
    with pytest.raises(DataError):
        tx.check_coverage(tx.coverage(tokenizer, [*texts, *["Ω"] * 3]))


@pytest.mark.parametrize(
    "text,remedy",
    [
        ("press the key", "upper case"),
        ("PRESS 1 2 3", "says numbers"),
        ("PRESS <NOISE> KEY", "remove_tags"),
        ("PRESS, PLEASE!", "drop_punctuation"),
        ("нажмите", "CYRILLIC"),
        ("你好", "CJK"),
    ],
)
def test_D7_the_remedy_names_the_cause(text, remedy):
    with pytest.raises(DataError) as error:
        tx.check_coverage(tx.coverage(tx.Tokenizer(SHIPPED), [text]))
    assert remedy in error.value.remedy


def test_blank_in_a_text_and_no_tokens_are_refused():
    tokenizer = tx.Tokenizer(SHIPPED)
    assert 0 in tokenizer.encode("PRESS <blk>"), "sentencepiece takes the literal for the token"
    with pytest.raises(DataError, match="holds <blk>"):
        tx.check_coverage(tx.coverage(tokenizer, ["PRESS <blk>"]))
    for texts in ([], ["", " "]):
        with pytest.raises(DataError, match="no tokens"):
            tx.check_coverage(tx.coverage(tokenizer, texts))


def test_counts_of_a_report_add_up(tmp_path):
    tokenizer = tx.load_tokenizer(bilingual(tmp_path))
    texts = ["今 天 THE KEY 7", "", "龙 <SIL> [laughter]"]
    report = tx.coverage(tokenizer, texts, durations=[1.0, 0.5, 2.5])
    assert sum(report["piece_counts"]) == report["tokens"] == sum(len(tokenizer.encode(t)) for t in texts)
    assert report["piece_counts"][2] / report["tokens"] == report["unknown_share"] == tokenizer.unknown_share(texts)
    assert report["tokens_per_second"] == report["tokens"] / 4 and report["words"] == 8
    assert (report["texts"], report["empty_texts"], report["texts_with_digits"]) == (3, 1, 1)
    assert report["tags"] == {"<SIL>": 1, "[LAUGHTER]": 1} and report["unknown_characters"]["龙"] == 1
    assert report["pieces_total"] == 166 - 3 and 0 < report["pieces_used"] < 20
    assert json.loads(json.dumps(report)) == report
    shown = tx.coverage_table(report)
    assert "`龙` 1" in shown and "tokens per second" in shown and {line[0] for line in shown.split("\n")} == {"|"}
    with pytest.raises(DataError, match="2 durations for 3 texts"):
        tx.coverage(tokenizer, texts, durations=[1.0, 2.0])


def test_the_normaliser_follows_the_alphabet_of_the_list(tmp_path):
    lists = {
        "english": [*"ABCDEFG"],
        "english_lower": [*"abcdefg"],
        "chinese": [*"今天我们用好ABC"],
        "plain_lower": [*"abcdéàñ"],
        "plain_upper": [*"ABCDÉÀÑ"],
        "plain": [*"אבגד"],
        "raw": [*"ABCabc"],
    }
    for name, pieces in lists.items():
        normalizer, report = tx.normalizer_for(tx.load_tokenizer(token_list(tmp_path, *pieces)), ["<NOISE>", "Ab 1"])
        assert (normalizer.name, report["preset"]) == (name, name)
        assert report["emptied"] == (name != "raw")
    with_digits, report = tx.normalizer_for(tx.load_tokenizer(token_list(tmp_path, *"ABCDEF0123456789")), ["room 12"])
    assert with_digits("room 12") == "ROOM 12" and "digits" in report["why"]
    lower = tx.normalizer_for(tx.load_tokenizer(token_list(tmp_path, *"今天abcdef")), [])[0]
    assert lower("今天 ABC") == "今天abc" and lower == tx.Normalizer(lower.to_dict())
