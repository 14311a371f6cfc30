"""Every GPU fact against nvidia-smi and torch, within two minutes: `python tests/test_env_gpu.py`, or `pytest -m gpu`.

The comparison itself is tested on stored text, on any machine."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from zipformer_recipes import env_facts as ef

SECONDS = 110  # for all probes
FIELDS = {  # fact: field of nvidia-smi, its value there as ours, by how much the two may differ
    "name": ("name", str, 0),
    "driver": ("driver_version", str, 0),
    "capability": ("compute_cap", str, 0),
    "memory_gb": ("memory.total", lambda mib: float(mib) / 1024, 0.5),
    "free_gb": ("memory.free", lambda mib: float(mib) / 1024, 4),  # something may start in between
    "power_limit_w": ("enforced.power.limit", float, 1),
    "power_default_w": ("power.default_limit", float, 1),
    "power_w": ("power.draw", float, 1000),
    "temperature_c": ("temperature.gpu", float, 15),
    "persistence": ("persistence_mode", lambda word: word == "Enabled", 0),
    "ecc_mode": ("ecc.mode.current", lambda word: word == "Enabled", 0),
    "ecc_errors": ("ecc.errors.uncorrected.volatile.total", int, 0),
    "mig": ("mig.mode.current", lambda word: word == "Enabled", 0),
    "pcie_gen": ("pcie.link.gen.current", int, 6),  # falls when the card is idle
    "pcie_gen_max": ("pcie.link.gen.max", int, 0),
    "pcie_width": ("pcie.link.width.current", int, 0),
    "pcie_width_max": ("pcie.link.width.max", int, 0),
}


def value_of(text: str, convert):
    "A field of nvidia-smi as our value; None where it says nothing."
    text = text.strip()
    return None if not text or text == "N/A" or text.startswith("[") else convert(text)


def cards_of(text: str, facts: list) -> list:
    "Cards of nvidia-smi's CSV, each a dict of these facts; lines that are no card are left out."
    rows = [row for line in text.splitlines() if len(row := line.split(", ")) == len(facts)]
    return [{f: value_of(v, FIELDS[f][1]) for f, v in zip(facts, row, strict=True)} for row in rows]


def links_of(text: str) -> int:
    "Active links in the output of `nvidia-smi nvlink -s`."
    return len(re.findall(r"(?m)^\s*Link \d+: [\d.]+ GB/s", text))


def ways_of(text: str) -> dict:
    "Pairs of cards in the output of `nvidia-smi topo -m`, as i-j: PIX, PXB, PHB, NODE, SYS or NV and a number."
    rows = re.findall(r"(?m)^GPU(\d+)\s(.*)$", re.sub(r"\x1b\[[\d;]*m", "", text))
    words = {int(i): row.split()[: len(rows)] for i, row in rows if "X" in row.split()}
    return {f"{i}-{j}": words[i][j] for i in words for j in words if i < j}


def agree(ours, theirs, tolerance) -> bool:
    "Whether two values are the same fact; None is a value."
    if isinstance(ours, float | int) and isinstance(theirs, float | int) and tolerance:
        return abs(ours - theirs) <= tolerance
    return ours == theirs


def compared(ours: list, theirs: list) -> list:
    "Rows (fact, ours, theirs, whether they agree) of all cards; a fact that nvidia-smi was not asked for is left out."
    rows = [("cards", len(ours), len(theirs), len(ours) == len(theirs))]
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        for fact, value in other.items():
            rows.append((f"GPU {i} {fact}", mine.get(fact), value, agree(mine.get(fact), value, FIELDS[fact][2])))
    return rows


def said(*words) -> str:
    "Output of nvidia-smi, '' when it fails."
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=20)
        return done.stdout if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""


def asked(facts: list) -> list:
    "Cards as nvidia-smi sees them; a field that this one does not know is not asked for."
    query = "--query-gpu={}", "--format=csv,noheader,nounits"
    if text := said(query[0].format(",".join(FIELDS[f][0] for f in facts)), query[1]):
        return cards_of(text, facts)
    known = [f for f in facts if said(query[0].format(FIELDS[f][0]), query[1])]
    return cards_of(said(query[0].format(",".join(FIELDS[f][0] for f in known)), query[1]), known) if known else []


def torch_rows(torch_facts: dict, gpu: dict, cards: list) -> list:
    "Rows of what torch says, here and in a child; torch may see fewer cards than the driver (CUDA_VISIBLE_DEVICES)."
    import torch

    count = torch.cuda.device_count()
    rows = [("torch devices", torch_facts.get("devices"), count, torch_facts.get("devices") == count)]
    if count == len(cards):
        for i, card in enumerate(cards):
            theirs = torch.cuda.get_device_name(i), "{}.{}".format(*torch.cuda.get_device_capability(i))
            ours = card["name"], card["capability"]
            rows.append((f"GPU {i} name, capability", ours, theirs, ours == theirs))
    pairs = {f"{i}-{j}": torch.cuda.can_device_access_peer(i, j) for i in range(count) for j in range(i + 1, count)}
    return [*rows, ("p2p", torch_facts.get("p2p", {}), pairs, torch_facts.get("p2p", {}) == pairs)]


def working_rows(count: int, until: float) -> list:
    "Rows of what must work: products on every card, ranks that talk, k2's loss where there is a k2."
    ops, talk, k2 = ef.ops_facts(until=until), ef.collective_facts(count, until=until), ef.k2_facts(until=until)
    devices, want = [f"cuda:{i}" for i in range(count)], "ok" if count > 1 else "skipped"
    rows = [(f"product on {d}", ops.get(d, "nothing"), "ok", ops.get(d) == "ok") for d in devices]
    said = talk["status"], talk.get("error", ""), talk.get("times_ms", ""), talk.get("settings", "")
    rows.append((f"ranks, {talk['backend']}", said, want, talk["status"] == want))
    if k2["status"] == "missing":
        return [*rows, ("k2", "missing", "(not installed)", True)]
    loss = k2.get("loss", {k2["status"]: k2.get("error")})
    return rows + [(f"k2 loss on {d}", v, "ok", v == "ok") for d, v in loss.items()]


def table() -> list:
    "All rows of this machine."
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    until = time.monotonic() + SECONDS
    gpu, cards = ef.gpu_facts(until=until)
    torch_facts = ef.run_probe("torch_build", until=until)
    probes = ("nvidia", gpu), ("torch", torch_facts)
    rows = [(f"probe {name}", facts["status"], "ok", facts["status"] == "ok") for name, facts in probes]
    rows += compared([card | {"driver": gpu.get("driver")} for card in cards], asked(list(FIELDS)))
    for i, card in enumerate(cards):
        links = links_of(said("nvlink", "-s", "-i", str(i)))
        rows.append((f"GPU {i} nvlinks", card["nvlinks"], links, (card["nvlinks"] or 0) == links))
    ways = ways_of(said("topo", "-m"))  # a pair with NVLink has another name there
    for pair, kind in gpu.get("links", {}).items():
        rows.append((f"link {pair}", kind, ways.get(pair), ways.get(pair, kind).startswith(("NV", kind))))
    rows += torch_rows(torch_facts, gpu, cards)
    return rows + working_rows(torch_facts.get("devices", 0), until)


def main() -> int:
    "Print the table; 0 when all rows agree."
    if not shutil.which("nvidia-smi"):
        print("no nvidia-smi here: no driver, nothing to compare with")
        return 1
    rows = table()
    for fact, ours, theirs, good in rows:
        print(f"{'ok  ' if good else 'BAD '} {fact:30} {ours!s:34} {theirs!s}")
    return 0 if all(row[3] for row in rows) else 1


@pytest.mark.gpu
def test_gpu_facts_are_those_of_nvidia_smi_and_torch():
    assert [row for row in table() if not row[3]] == []


# ---- the comparison, on stored text

ASKED = ["name", "driver", "capability", "memory_gb", "power_limit_w", "temperature_c", "persistence", "ecc_mode",
         "ecc_errors", "mig", "pcie_gen_max", "pcie_width"]  # fmt: skip
TWO = """NVIDIA GeForce RTX 4090 D, 560.35.03, 8.9, 24564, 425.00, 34, Enabled, Disabled, [N/A], [N/A], 4, 16
NVIDIA GeForce RTX 4090 D, 560.35.03, 8.9, 24564, 425.00, 71, Disabled, Disabled, [N/A], [N/A], 4, 8
"""
ONE = "NVIDIA H200, 570.124.06, 9.0, 143771, 700.00, 28, Enabled, Enabled, 0, Disabled, 5, 16\n"
OURS = {"name": "NVIDIA H200", "driver": "570.124.06", "capability": "9.0", "memory_gb": 140.4, "power_limit_w": 700.0,
        "temperature_c": 30, "persistence": True, "ecc_mode": True, "ecc_errors": 0, "mig": False, "pcie_gen_max": 5,
        "pcie_width": 16}  # fmt: skip
NVLINK = """GPU 0: NVIDIA H200 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
\t Link 2: <inactive>
"""


TOPO = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPHB\tNV18\tPIX\t0-31\t0\t\tN/A
GPU1\tPHB\t X \tSYS\tPIX\t0-31\t0\t\tN/A
GPU2\tNV18\tSYS\t X \tPIX\t0-31\t0\t\tN/A
NIC0\tPIX\tPIX\tPIX\t X
"""


def test_stored_text_becomes_facts():
    first, second = cards_of(TWO, ASKED)
    assert first["memory_gb"] == pytest.approx(23.99, abs=0.01) and first["mig"] is None and first["ecc_mode"] is False
    assert (first["persistence"], second["persistence"], second["pcie_width"]) == (True, False, 8)
    assert cards_of("", ASKED) == [] and cards_of("No devices were found\n", ASKED) == []
    assert links_of(NVLINK) == 2 and links_of("") == 0
    assert ways_of(TOPO) == {"0-1": "PHB", "0-2": "NV18", "1-2": "SYS"} and ways_of("") == {}


@pytest.mark.parametrize("text", ["", "N/A", "[N/A]", " [Not Supported]", "[Unknown Error]"])
def test_what_nvidia_smi_does_not_say_is_none(text):
    assert value_of(text, int) is None


def test_the_same_facts_agree():
    assert all(row[3] for row in compared([OURS], cards_of(ONE, ASKED)))


@pytest.mark.parametrize("fact, value", [
    ("name", "NVIDIA H100"), ("driver", "570.124"), ("memory_gb", 139.0), ("power_limit_w", 600.0),
    ("temperature_c", 60), ("persistence", False), ("ecc_mode", None), ("ecc_errors", 1), ("mig", None),
    ("pcie_width", 8), ("capability", "8.9"),
])  # fmt: skip
def test_a_fact_that_differs_is_seen(fact, value):
    wrong = [row for row in compared([OURS | {fact: value}], cards_of(ONE, ASKED)) if not row[3]]
    assert [row[0] for row in wrong] == [f"GPU 0 {fact}"] and wrong[0][1] == value


def test_a_card_more_or_less_is_seen():
    assert compared([OURS], cards_of(TWO, ASKED))[0] == ("cards", 1, 2, False)
    assert compared([], [])[0][3]


def test_an_older_nvidia_smi_is_asked_for_what_it_knows(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\ncase $1 in *compute_cap*|*mig*) echo 'Field \"x\" is not a valid field to query.'; exit 2;;\n"
        "*name,driver_version) echo 'NVIDIA A100, 450.80.02';; *) echo 'something';; esac\n")  # fmt: skip
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert asked(["name", "driver", "capability", "mig"]) == [{"name": "NVIDIA A100", "driver": "450.80.02"}]


def test_a_fake_machine_with_two_cards_fills_the_table(tmp_path, monkeypatch, capsys):
    "All of the script but torch's own eyes: two pretended cards of which one has lost half of its lanes."
    cards = [row | {"nvlinks": None} for row in cards_of(TWO, ASKED)]
    cards[1]["pcie_width"] = 16
    driver = {"status": "ok", "driver": "560.35.03", "links": {"0-1": "PHB"}}
    monkeypatch.setattr(ef, "gpu_facts", lambda until: (driver, cards))
    monkeypatch.setattr(ef, "run_probe", lambda name, until: {"status": "ok", "devices": 2, "p2p": {"0-1": False}})
    monkeypatch.setattr(ef, "ops_facts", lambda until: {"cuda:0": "ok", "cuda:1": "ok"})
    monkeypatch.setattr(ef, "collective_facts", lambda count, until: {"status": "ok", "backend": "nccl"})
    monkeypatch.setattr(ef, "k2_facts", lambda until: {"status": "ok", "loss": {"cpu": "ok", "cuda:1": "nan"}})
    monkeypatch.setattr(sys.modules[__name__], "torch_rows", lambda *_: [])
    monkeypatch.setattr(sys.modules[__name__], "asked", lambda facts: cards_of(TWO, ASKED))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert main() == 1
    bad = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BAD")]
    assert len(bad) == 2 and "GPU 1 pcie_width" in bad[0] and "k2 loss on cuda:1" in bad[1]


if __name__ == "__main__":
    sys.exit(main())
