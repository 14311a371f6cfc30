"""Facts of this machine against the system's own tools; probes that end in every way; a budget that holds."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from zipformer_recipes import env_facts as ef

BAD = {  # how a child ends: its code, the status, what the error says
    "abort": ("import os; os.abort()", "crash", "SIGABRT"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "crash", "SIGSEGV"),
    "realtime": ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)", "crash", "3[0-9]|SIGRT"),
    "raise": ("raise ValueError('no luck')", "error", "^ValueError: no luck$"),
    "two lines": ("raise ImportError('built for 1\\nYou use 2')", "error", "^ImportError: built for 1 You use 2$"),
    "chain": ("try: {}['x']\nexcept KeyError: raise OSError('the last')", "error", "^OSError: the last$"),
    "c++": ("import os; os.write(2, b'terminate called after\\n  what():  CUDA error\\n#0 frame\\n'); os.abort()",
            "crash", r"^SIGABRT: what\(\): CUDA error$"),
    "exit": ("import sys; sys.exit(7)", "error", "^exit status 7$"),
    "hang": ("import time; time.sleep(60)", "hang", "within 1 s"),
    "deaf": ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", "hang", "1 s"),
    "silent": ("import os, time; os.close(1); os.close(2); time.sleep(60)", "hang", "within 1 s"),
    "grandchild": ("import subprocess, time; subprocess.Popen(['sleep', '61']); time.sleep(60)", "hang", "1 s"),
    "2 MB": ("import sys; sys.stdout.write('x' * 2_000_000); sys.exit(1)", "error", "^x{300,400}$"),
    "endless": ("while True: print('x' * 9999)", "noise", "more than 20 MB"),
    "hungry": ("x = []\nwhile True: x.append(bytearray(10_000_000))", "memory", "more than 300 MB"),
    "half JSON": ("import sys; open(sys.argv[2], 'w').write('{\"a\": 1, ')", "error", "not whole"),
    "a list": ("import sys; open(sys.argv[2], 'w').write('[1]')", "error", "no dictionary"),
    "not text": ("import sys; open(sys.argv[2], 'wb').write(b'\\xff\\xfe')", "error", "not whole"),
}  # fmt: skip
# what a child process does instead of a probe: tell prepared facts, and hang or die where it is told to
FAKE = """
import json, os, sys, time
name, out, words = sys.argv[1], sys.argv[2], sys.argv[3:]
facts, hangs, dies, settings = json.loads(os.environ['FAKE'])
json.dump(facts.get(name, {}), open(out, 'w'))
if name in hangs and not (settings and settings in os.environ): time.sleep(600)
if name in dies and (name != 'all_reduce' or words[0] == '1'): os.abort()
"""


@pytest.fixture
def fake(monkeypatch):
    "Children that only pretend: fake(facts, hangs, dies, settings that cure a hang)."

    def use(facts=None, hangs=(), dies=(), settings=""):
        monkeypatch.setattr(ef, "CHILD", FAKE)
        monkeypatch.setenv("FAKE", json.dumps([facts or {}, list(hangs), list(dies), settings]))

    return use


def on_path(monkeypatch, *folders):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [*folders, os.environ.get("PYTHONPATH", "")])).strip(":"))


# ---- children


@pytest.mark.parametrize("how", BAD)
def test_a_probe_that_ends_badly_is_a_finding(how):
    code, status, error = BAD[how]
    facts = ef.run_probe(how, code=code, timeout=1 if status == "hang" else 20, memory_mb=300)
    assert facts["status"] == status and re.search(error, facts["error"]) and len(facts["error"]) <= 500


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("waits", ["", "; time.sleep(60)"])
def test_nothing_is_left_running(session, waits):
    "Not even a grandchild that left the group, whether the child hangs or ends well."
    tag = f"61.{os.getpid()}"
    code = f"import subprocess, time; subprocess.Popen(['sleep', '{tag}'], start_new_session={session}){waits}"
    facts = ef.run_probe("x", code=code, timeout=1)
    assert facts["status"] == ("hang" if waits else "ok")
    end = time.monotonic() + 5
    while left := [p.pid for p in psutil.process_iter(["cmdline"]) if tag in (p.info["cmdline"] or [])]:
        assert time.monotonic() < end, left


def test_facts_before_the_end_are_kept():
    code = ("import os, sys; from zipformer_recipes.env_facts import child, probe\n"
            "@probe\ndef p():\n    yield {'first': 1}\n    os.abort()\nchild('p', sys.argv[2])")  # fmt: skip
    facts = ef.run_probe("p", code=code)
    assert facts["first"] == 1 and facts["status"] == "crash"


def test_a_probe_that_is_unknown_or_cannot_start_is_a_finding(monkeypatch):
    assert "KeyError" in ef.run_probe("no_such_probe")["error"]
    facts = ef.run_probe("package", "json", python="/no/such/python")
    assert facts["status"] == "error" and facts["error"].startswith("FileNotFoundError")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ef.tempfile, "TemporaryDirectory", full)
    assert "No space left" in ef.run_probe("package", "json")["error"]


def test_a_process_that_even_the_kernel_cannot_end_does_not_stop_the_doctor():
    class Stuck:
        pid, stdout, returncode = 2**30, None, None

        def poll(self):
            return None

        def wait(self, timeout=None):
            raise subprocess.TimeoutExpired("x", timeout)

    assert ef.watch(Stuck(), 0.2, 100.0) == "hang"


def test_ctrl_c_ends_the_child(monkeypatch):
    def interrupt(pid):
        raise KeyboardInterrupt

    monkeypatch.setattr(ef, "resident_mb", interrupt)
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with pytest.raises(KeyboardInterrupt):
        ef.watch(process, 30, 1000)
    assert process.returncode == -9


def test_a_child_leaves_no_core_and_no_temporary_file():
    code = ("import resource, tempfile, time; time.sleep(0.5)\n"
            "raise ValueError((resource.getrlimit(resource.RLIMIT_CORE)[0], tempfile.mkdtemp()))")  # fmt: skip
    core, folder = re.search(r"\((-?\d+), '(.+)'\)", ef.run_probe("x", code=code)["error"]).groups()
    assert core == "0" and not Path(folder).exists()


def test_shared_pages_count_once():
    code = ("import os, time; x = bytearray(os.urandom(1 << 20) * 100)\n"
            "for _ in range(4): os.fork() or time.sleep(60)\ntime.sleep(60)")  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        end = time.monotonic() + 20
        while len(psutil.Process(process.pid).children()) < 4 and time.monotonic() < end:
            time.sleep(0.05)
        assert 100 < ef.resident_mb(process.pid) < 250
    finally:
        os.killpg(process.pid, 9)
        process.wait()


# ---- the budget


def test_without_a_second_left_a_probe_is_not_started(tmp_path):
    mark = tmp_path / "ran"
    facts = ef.run_probe("x", code=f"open({str(mark)!r}, 'w')", until=time.monotonic() + 0.9)
    assert facts == {"status": "skipped", "error": "no time left"} and not mark.exists()


def test_a_probe_cut_short_by_the_budget_is_no_hang():
    code = "import sys, time; open(sys.argv[2], 'w').write('{\"a\": 1}'); time.sleep(60)"
    facts = ef.run_probe("x", code=code, timeout=30, until=time.monotonic() + 1.5)
    assert facts == {"a": 1, "status": "skipped", "error": "no time left"}
    assert ef.run_probe("x", code=code, timeout=1, until=time.monotonic() + 30)["status"] == "hang"


@pytest.fixture
def hanging_k2(tmp_path, monkeypatch):
    "A k2 whose import does not come back, and a torch that costs no time."
    (tmp_path / "k2").mkdir()
    (tmp_path / "k2" / "__init__.py").write_text("import time; time.sleep(600)")
    (tmp_path / "torch.py").write_text("__version__ = '2.7.1'\nclass version: cuda = '12.6'")
    on_path(monkeypatch, tmp_path)


CARDS = {"torch_build": {"version": "2.7.1", "devices": 2, "cuda_available": True, "p2p": {"0-1": False}},
         "nvidia": {"driver": "560.35.03", "gpus": [{"index": 0}, {"index": 1}], "links": {"0-1": "PHB"}}}  # fmt: skip


def test_a_hanging_k2_and_a_hanging_nccl_leave_a_whole_snapshot(tmp_path, monkeypatch, fake, hanging_k2):
    fake(CARDS, hangs=["all_reduce"])
    for name in ("k2", "all_reduce"):
        monkeypatch.setitem(ef.LIMITS, name, 2.0)
    s = ef.snapshot_of(tmp_path, budget=40)
    assert s["k2"]["status"] == s["packages"]["k2"]["status"] == s["collectives"]["status"] == "hang"
    assert s["k2"]["torch"] == "2.7.1" and s["k2"]["python"] and "build" in s["k2"]
    assert [a["settings"] for a in s["collectives"]["attempts"]] == list(ef.TRIES)
    assert s["collectives"]["settings"] == {} and s["collectives"]["error"] == "no answer within 2 s"
    assert s["loader"]["status"] == "ok" and s["seconds"] < 40 and s["skipped"] == [] and s["troubles"] == {}
    assert s["gpu"]["p2p"] == {"0-1": False} and "p2p" not in s["torch"] and len(s["gpus"]) == 2


def test_what_there_is_no_time_for_is_skipped_not_failed(tmp_path, fake, hanging_k2):
    fake(CARDS, hangs=["all_reduce"])
    s = ef.snapshot_of(tmp_path, budget=6)
    assert s["seconds"] < 6 + 5 and list(s["seconds_of"]) == list(ef.PHASES) and s["troubles"] == {}
    assert s["disk"]["status"] == s["torch"]["status"] == "ok" and s["system"]["cpus"] >= 1
    for part in ("k2", "gpu", "collectives", "audio", "loader"):
        assert s[part]["status"] == "skipped" and s[part]["error"] == "no time left", part
    assert {"k2", "gpu", "collectives", "audio", "loader", "packages.scipy"} <= set(s["skipped"]) and "disk" in s


def test_a_fault_of_the_doctor_hides_no_other_fact(tmp_path, monkeypatch, fake):
    fake()

    def wrong():
        raise PermissionError("/proc is not for you")

    monkeypatch.setattr(ef, "system_facts", wrong)
    s = ef.snapshot_of(tmp_path)
    assert s["troubles"] == {"system": "PermissionError: /proc is not for you"}
    assert s["packages"]["numpy"]["status"] == s["loader"]["status"] == "ok" and "cpus" not in s["system"]


def test_the_budget_is_larger_with_cards(monkeypatch, tmp_path, fake):
    fake()
    seen = []
    monkeypatch.setattr(ef, "PHASES", {"x": lambda facts, ask: seen.append(ask.until - time.monotonic()) or {}})
    for cards in (0, 2):
        monkeypatch.setattr(ef, "cards_on_bus", lambda n=cards: n)
        ef.snapshot_of(tmp_path)
    assert [round(s) for s in seen] == [55, 110]


# ---- nobody's name


HOMES = os.sep + "home"


@pytest.fixture
def person(monkeypatch):
    for name, value in {"HOME": f"{HOMES}/annika", "USER": "annika", "LOGNAME": "annika"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setattr(ef.socket, "gethostname", lambda: "lab-seven.example.org")


SAID = {
    f"{HOMES}/annika/venv/lib": "~/venv/lib",
    f"no file {HOMES}/annika": "no file ~",
    f"file://{HOMES}/annika/x": "file://~/x",
    f"{HOMES}/annikas/x": f"{HOMES}/<user>/x",
    f"/mnt{HOMES}/annika/x": f"/mnt{HOMES}/<user>/x",
    "/data/annika_runs (annika)": "/data/<user>_runs (<user>)",
    "annikadb": "annikadb",
    "lab-seven.example.org refused, lab-seven too": "<host> refused, <host> too",
    f"{HOMES}/someone else": f"{HOMES}/<user> else",
    "/opt/homepage": "/opt/homepage",
}


@pytest.mark.parametrize("text", SAID)
def test_names_are_taken_out(person, text):
    assert ef.scrub(text) == SAID[text]


def test_scrub_goes_everywhere_and_changes_nothing_else(person):
    value = {"annika": [1, None, 2.5, True, ("annika", {"x": "on lab-seven"})]}
    assert ef.scrub(value) == {"annika": [1, None, 2.5, True, ["<user>", {"x": "on <host>"}]]}


@pytest.mark.parametrize("user", ["root", "ubuntu", "debian", "ed"])
def test_accounts_of_images_and_short_names_are_words_of_the_facts(person, monkeypatch, user):
    monkeypatch.setenv("USER", user)
    monkeypatch.setenv("LOGNAME", user)
    monkeypatch.setattr(ef.socket, "gethostname", lambda: "pc")
    assert ef.scrub(f"{user} on a pc, id {user}") == f"{user} on a pc, id {user}"


def test_a_snapshot_names_nobody(person, tmp_path, monkeypatch, fake):
    own = tmp_path / "home" / "annika"
    (own / "here").mkdir(parents=True)
    (own / "here" / "lilcom.py").write_text("raise ImportError(__file__ + ' of annika on lab-seven')")
    monkeypatch.setenv("HOME", str(own))
    on_path(monkeypatch, own / "here")
    monkeypatch.setattr(ef, "PHASES", {k: ef.PHASES[k] for k in ("system", "disk", "python", "packages")})
    s = ef.snapshot_of(own)
    assert s["packages"]["lilcom"]["file"] == "~/here/lilcom.py" and s["packages"]["lilcom"]["origin"] == "PYTHONPATH"
    assert s["packages"]["lilcom"]["error"] == "ImportError: ~/here/lilcom.py of <user> on <host>"
    assert not re.search("annika|lab-seven", json.dumps(s))


# ---- the system against its own tools


def tool(*words) -> str:
    if not shutil.which(words[0]):
        pytest.skip(f"no {words[0]} here")
    return subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout


def test_cpus_are_those_of_lscpu():
    assert ef.system_facts()["host_cpus"] == int(re.search(r"(?m)^CPU\(s\):\s+(\d+)", tool("lscpu"))[1])


def test_memory_and_swap_are_those_of_free():
    said = {line.split()[0]: [int(n) for n in line.split()[1:]] for line in tool("free", "-b").splitlines()[1:]}
    s = ef.system_facts()
    assert s["host_memory_gb"] == pytest.approx(said["Mem:"][0] / 1e9, rel=1e-3)
    assert s["swap_gb"] == pytest.approx(said["Swap:"][0] / 1e9, rel=1e-3)
    assert abs(s["swap_used_gb"] - said["Swap:"][1] / 1e9) < 0.5 and s["memory_gb"] <= s["host_memory_gb"]


def test_kernel_and_limits_are_those_of_the_shell():
    s = ef.system_facts()
    assert s["kernel"] == tool("uname", "-r").strip() and s["arch"] == tool("uname", "-m").strip()
    assert str(s["open_files"]).replace("-1", "unlimited") == tool("sh", "-c", "ulimit -n").strip()
    assert s["host_cpus"] == int(tool("getconf", "_NPROCESSORS_ONLN"))


def test_disk_facts_are_those_of_df(tmp_path):
    facts = ef.run_probe("disk", str(tmp_path / "not" / "yet"), "4")
    free, kind = tool("df", "--output=avail,fstype", "-B1", str(tmp_path)).split()[-2:]
    assert abs(facts["free_gb"] - int(free) / 1e9) < 1 and facts["kind"] == kind
    assert facts["status"] == "ok" and facts["read_mb_s"] > 0 and facts["random_reads_s"] > 0
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_written_still_tells_its_space(monkeypatch):
    facts = ef.run_probe("disk", "/proc")
    assert facts["status"] == "error" and "free_gb" in facts and facts["kind"] == "proc"


CGROUPS = {
    "v2, the one above": ({"proc/self/cgroup": "0::/a/b", "a/memory.max": "4000000000", "a/b/memory.max": "max"}, 4.0),
    "v2, its own": ({"proc/self/cgroup": "0::/a/b", "a/memory.max": "4000000000", "a/b/memory.max": "3000000000"}, 3.0),
    "v2, the container's root": ({"proc/self/cgroup": "0::/", "memory.max": "2000000000"}, 2.0),
    "v2, a path of the host": ({"proc/self/cgroup": "0::/docker/12", "memory.max": "2000000000"}, 2.0),
    "v2, none": ({"proc/self/cgroup": "0::/a", "a/memory.max": "max"}, None),
    "v1": ({"proc/self/cgroup": "5:cpu:/x\n4:memory:/box/in", "memory/box/memory.limit_in_bytes": "1000000000",
            "memory/memory.limit_in_bytes": "9223372036854771712"}, 1.0),
    "v1, none": ({"proc/self/cgroup": "4:memory:/", "memory/memory.limit_in_bytes": "9223372036854771712"}, None),
    "both": ({"proc/self/cgroup": "4:cpu,memory:/v\n0::/w", "memory/v/memory.limit_in_bytes": "5000000000",
              "unified/w/memory.max": "4500000000"}, 4.5),
    "nothing to read": ({}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CGROUPS)
def test_the_smallest_limit_of_all_cgroups_counts(tmp_path, name):
    texts, limit = CGROUPS[name]
    for file, text in texts.items():
        path = tmp_path / ("" if file.startswith("proc") else "sys/fs/cgroup") / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert ef.cgroup_memory_gb(tmp_path) == limit


@pytest.mark.parametrize("says, fact", [("echo yes", True), ("echo no", False), ("exit 1", None), ("sleep 9", None)])
def test_what_timedatectl_says_about_the_clock(tmp_path, monkeypatch, says, fact):
    (tmp_path / "timedatectl").write_text(f"#!/bin/sh\n{says}\n")
    (tmp_path / "timedatectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert ef.ntp_synchronized(timeout=1.0) is fact


def test_without_timedatectl_nothing_is_said_about_the_clock(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ef.ntp_synchronized() is None


def test_another_clock_of_the_file_server_shows(tmp_path, monkeypatch):
    assert abs(ef.clock_skew(tmp_path)) < 1
    real = time.time
    monkeypatch.setattr(ef.time, "time", lambda: real() - 100)
    assert ef.clock_skew(tmp_path) == pytest.approx(100, abs=1)


# ---- Python and packages


def test_packages_are_those_of_pip(real):
    said = json.loads(tool(sys.executable, "-m", "pip", "list", "--format=json"))
    listed, found = {p["name"].lower(): p["version"] for p in said}, real["packages"]
    assert list(found) == list(ef.PACKAGES)
    for name, facts in found.items():
        expected = listed.get(ef.DISTRIBUTION.get(name, name).lower())
        assert (facts["version"] or "").split("+")[0] == (expected or "").split("+")[0], name
        assert (facts["status"] == "missing") == (expected is None), name
        assert facts["status"] == "missing" or facts["origin"] != "other" and facts["copies"], name


ORIGINS = ("PYTHONPATH", "current folder", "user site", "other", "editable", "editable, old way")


@pytest.mark.parametrize("origin", ORIGINS)
def test_where_a_package_comes_from(tmp_path, monkeypatch, origin):
    place = tmp_path / "place"
    place.mkdir()
    if origin == "current folder":
        monkeypatch.setattr(ef.sys, "path", ["", *sys.path])
        monkeypatch.chdir(place)
    if origin == "PYTHONPATH":
        on_path(monkeypatch, place)
    if origin == "user site":
        monkeypatch.setattr(ef.site, "getusersitepackages", lambda: str(place))
    if origin == "editable, old way":
        (tmp_path / "site-packages").mkdir()
        (tmp_path / "site-packages" / "easy-install.pth").write_text(f"{place}\n")
        monkeypatch.setattr(ef.sys, "path", [*sys.path, str(tmp_path / "site-packages")])
    if origin == "editable":
        record = tmp_path / "thing_here-1.dist-info"
        record.mkdir()
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: thing_here\nVersion: 1\n")
        (record / "direct_url.json").write_text(json.dumps({"url": f"file://{place}", "dir_info": {"editable": True}}))
        monkeypatch.setattr(ef.sys, "path", [*sys.path, str(tmp_path)])
        assert ef.origin_of("thing_here", str(tmp_path / "elsewhere" / "thing_here.py")) == "other"
    for file in ("thing_here.py", "thing_here/__init__.py"):
        assert ef.origin_of("thing_here", str(place / file)) == origin.partition(",")[0]


def test_two_copies_of_a_package_are_seen_and_the_first_is_imported(tmp_path, monkeypatch):
    for n in "ab":
        (tmp_path / n / "twice").mkdir(parents=True)
        (tmp_path / n / "twice" / "__init__.py").write_text(f"__version__ = '{n}'")
    on_path(monkeypatch, tmp_path / "a", tmp_path / "b")
    facts = ef.run_probe("package", "twice")
    assert len(facts["copies"]) == 2 and facts["status"] == "ok" and facts["version"] == "a"
    assert facts["origin"] == "PYTHONPATH" and facts["file"].endswith("a/twice/__init__.py")


def test_a_package_that_does_not_load_says_why_and_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "broken_here.py").write_text("import no_such_library_of_mine")
    (tmp_path / "dead_here.py").write_text("import os; os.abort()")
    (tmp_path / "only_a_folder").mkdir()
    on_path(monkeypatch, tmp_path)
    found = ef.package_facts(("broken_here", "dead_here", "only_a_folder", "json"))
    assert "No module named 'no_such_library_of_mine'" in found["broken_here"]["error"]
    assert found["dead_here"]["status"] == "crash" and found["dead_here"]["file"].endswith("dead_here.py")
    assert [f["status"] for f in found.values()] == ["error", "crash", "missing", "ok"]


def test_a_package_that_another_probe_imported_is_not_imported_again(tmp_path, monkeypatch):
    (tmp_path / "dead_here.py").write_text("import os; os.abort()")
    on_path(monkeypatch, tmp_path)
    found = ef.package_facts(("dead_here",), tried={"dead_here": {"status": "hang", "error": "no answer"}})
    assert found["dead_here"]["status"] == "hang" and found["dead_here"]["error"] == "no answer"
    assert found["dead_here"]["copies"]


def test_conflicts_with_constraints(tmp_path):
    pins = "# pins\nPyYAML==0.1 # old\nno-such-thing==1\nnot a pin\nnumpy==0.1 ; python_version < '3'\n"
    (tmp_path / "c.txt").write_text(pins)
    assert [(c["name"], c["want"]) for c in ef.conflicts_with(tmp_path / "c.txt")] == [("PyYAML", "0.1")]
    assert ef.conflicts_with(tmp_path / "none.txt") == []


# ---- torch, GPUs, ranks


def test_an_abort_on_the_second_card_keeps_the_first(fake):
    fake({"gpu_ops": {"trying": "cuda:1", "ops": {"cuda:0": "ok"}}}, dies=["gpu_ops"])
    assert ef.ops_facts() == {"cuda:0": "ok", "cuda:1": "SIGABRT"}
    fake({}, dies=["gpu_ops"])
    assert ef.ops_facts() == {"torch": "SIGABRT"}


def test_products_are_compared_with_the_cpu(monkeypatch):
    import torch

    assert ef._product_error(torch, "cpu", "float32") == ef._product_error(torch, "cpu", "float16") == ""
    real = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: real(a, b) * (1.1 if a.dtype == torch.float16 else 1))
    steps = list(ef.gpu_ops("cpu", "meta"))
    assert re.fullmatch("float16 product is off by 0.1", steps[1]["ops"]["cpu"]) and steps[3]["ops"]["meta"] != "ok"


def test_cards_are_counted_without_a_driver(tmp_path):
    cards = (("0x10de", "0x030000"), ("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x1002", "0x030000"))
    for i, (vendor, kind) in enumerate(cards):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "vendor").write_text(vendor + "\n")
        (tmp_path / str(i) / "class").write_text(kind + "\n")
    assert ef.cards_on_bus(tmp_path) == 2 and ef.cards_on_bus(tmp_path / "none") == 0


NVML = '''
import os
class NVMLError(Exception): pass
class NVMLError_LibraryNotFound(NVMLError): pass
class NVMLError_NotSupported(NVMLError): pass
class Memory: total, free = 24 * 2**30, 23 * 2**30
class Process:
    def __init__(self, pid, used): self.pid, self.usedGpuMemory = pid, used
def no(*_): raise NVMLError_NotSupported("Not Supported")
NVML_NVLINK_MAX_LINKS = 4
def nvmlInit():
    if MODE == "no driver": raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
nvmlSystemGetDriverVersion = lambda: b"560.35.03"
nvmlDeviceGetCount = lambda: 2
nvmlDeviceGetHandleByIndex = lambda i: i
def nvmlDeviceGetName(h):
    if MODE == "dies" and h == 1: os.abort()
    return f"card {h}"
nvmlDeviceGetMemoryInfo = lambda h: Memory
nvmlDeviceGetCudaComputeCapability = lambda h: (8, 9)
nvmlDeviceGetComputeRunningProcesses = lambda h: [Process(os.getpid(), 1), Process(7, None), Process(8, 2**30)]
nvmlDeviceGetPersistenceMode = lambda h: 0
nvmlDeviceGetEnforcedPowerLimit = lambda h: 425000
nvmlDeviceGetTemperature = lambda h, sensor: 34
nvmlDeviceGetNvLinkState = lambda h, i: 1 if i < 2 else 0 if i == 2 else no()
nvmlDeviceGetEccMode = lambda h: [0, 1]
nvmlDeviceGetMigMode = nvmlDeviceGetTotalEccErrors = no
nvmlDeviceGetTopologyCommonAncestor = lambda a, b: 30
'''  # fmt: skip


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    def use(mode):
        text = NVML if mode != "no module" else "raise ModuleNotFoundError(\"No module named 'pynvml'\", name='pynvml')"
        (tmp_path / "pynvml.py").write_text(f"MODE = {mode!r}\n{text}")
        on_path(monkeypatch, tmp_path)

    return use


def test_cards_are_read_and_what_they_lack_is_none(nvml):
    nvml("well")
    gpu, cards = ef.gpu_facts()
    assert gpu["status"] == "ok" and gpu["driver"] == "560.35.03" and gpu["links"] == {"0-1": "PHB"} and len(cards) == 2
    want = {"index": 1, "name": "card 1", "memory_gb": 24, "free_gb": 23, "capability": "8.9", "power_limit_w": 425,
            "persistence": False, "temperature_c": 34, "nvlinks": 2, "ecc_mode": False, "mig": None, "ecc_errors": None,
            "pcie_width": None, "power_w": None,
            "processes": [{"pid": 7, "memory_gb": 0}, {"pid": 8, "memory_gb": 1}]}  # fmt: skip
    assert {k: cards[1][k] for k in want} == want


def test_a_driver_that_dies_at_the_second_card_keeps_the_first(nvml):
    nvml("dies")
    gpu, cards = ef.gpu_facts()
    assert gpu["status"] == "crash" and [c["name"] for c in cards] == ["card 0"] and gpu["driver"]


@pytest.mark.parametrize("mode, on_bus, status, error", [
    ("no driver", 0, "missing", ""), ("no driver", 2, "error", "LibraryNotFound"),
    ("no module", 0, "error", "No module named 'pynvml'"), ("no module", 2, "error", "No module named 'pynvml'"),
])  # fmt: skip
def test_without_driver_or_module(nvml, monkeypatch, mode, on_bus, status, error):
    nvml(mode)
    monkeypatch.setattr(ef, "cards_on_bus", lambda: on_bus)
    gpu, cards = ef.gpu_facts()
    assert cards == [] and gpu["on_bus"] == on_bus and gpu["status"] == status and error in gpu.get("error", "")


def test_what_nccl_needs_to_work_is_found(fake):
    fake({"all_reduce": {"times_ms": {"1 kB": 1.0}}}, hangs=["all_reduce"], settings="NCCL_SHM_DISABLE")
    found = ef.collective_facts(2, timeout=1)
    assert found["status"] == "ok" and found["settings"] == ef.TRIES[2] and found["times_ms"] == {"1 kB": 1.0}
    assert [a["status"] for a in found["attempts"]] == ["hang", "hang", "ok"] and found["world"] == 2


def test_the_rank_that_dies_is_told_not_the_one_that_waits(fake):
    fake(dies=["all_reduce"])
    found = ef.collective_facts(4)
    assert found["status"] == "crash" and found["error"] == "SIGABRT"
    assert found["backend"] == "nccl" and found["world"] == 2
    assert found["settings"] == {} and len(found["attempts"]) == 3


def test_a_budget_that_ends_between_tries_keeps_what_was_seen(fake):
    fake(hangs=["all_reduce"])
    found = ef.collective_facts(2, timeout=1, until=time.monotonic() + 1.9)
    assert found["status"] == "hang" and [a["status"] for a in found["attempts"]] == ["hang"]


# ---- audio and loader


def test_the_codec_at_which_the_process_died_is_told(fake):
    fake({"audio": {"wav": {"ok": True}, "flac": {"ok": True}}}, dies=["audio"])
    assert ef.audio_facts() == {"wav": {"ok": True}, "flac": {"ok": True}, "mp3": {"ok": False, "error": "SIGABRT"}}


@pytest.fixture
def files(tmp_path):
    import soundfile

    noise = np.random.default_rng(1).normal(0, 0.1, (8000 * 30, 2)).astype("float32")
    soundfile.write(tmp_path / "long.wav", noise, 8000)
    soundfile.write(tmp_path / "stereo.flac", noise[:16000], 16000)
    soundfile.write(tmp_path / "empty.wav", noise[:0], 8000)
    soundfile.write(tmp_path / "short.wav", noise[:10], 8000)
    (tmp_path / "cut.wav").write_bytes((tmp_path / "long.wav").read_bytes()[:30])
    (tmp_path / "text.mp3").write_text("no audio")
    return tmp_path


def test_files_that_cannot_be_read_are_left_out(files, tmp_path):
    good, note = ef.usable_files(str(files), tmp_path)
    assert sorted(p.name for p in good) == ["long.wav", "short.wav", "stereo.flac"]
    assert note == {"source": "corpus", "files": 3, "unreadable": 3}
    items = [ef.Features(good)[i] for i in range(3)]
    shapes = {path.name: (tuple(feats.shape), seconds) for path, (feats, seconds) in zip(good, items, strict=True)}
    assert shapes == {"long.wav": ((1998, 80), 20.0), "stereo.flac": ((98, 80), 1.0), "short.wav": ((0, 80), 0.0)}


def test_the_loader_takes_a_folder_a_list_and_a_sequence(files):
    assert ef.loader_facts(files, 0)["files"] == 3
    (files / "list.txt").write_text("long.wav\n\nno such.wav\n" + f"{files}/stereo.flac\n")
    facts = ef.loader_facts(str(files / "list.txt"), 1)
    assert (facts["source"], facts["files"], facts["unreadable"]) == ("corpus", 2, 1)
    assert list(facts["rates"]) == ["0", "1"] and facts["status"] == "ok"
    assert ef.loader_facts([files / "cut.wav", files / "text.mp3"], 0) | {"rates": 0} == {
        "source": "tones", "files": 60, "unreadable": 2, "rates": 0, "knee": 0, "status": "ok"}  # fmt: skip


def test_a_file_that_vanishes_during_the_trial_ends_nothing(files):
    (files / "cut.wav").unlink()
    assert ef.loading_rate([files / "cut.wav", files / "long.wav"], 0, 0.1) > 0


def test_how_many_workers_are_tried(monkeypatch, tmp_path):
    rates = {0: 10, 1: 9, 2: 18, 4: 30, 6: 31}
    monkeypatch.setattr(ef, "loading_rate", lambda files, workers, seconds: rates[workers])
    assert list(ef.loader("", "6"))[-1]["rates"] == {str(n): r for n, r in rates.items()}
    assert list(ef.loader("", "6"))[-1]["knee"] == 4


# ---- k2


def test_the_expected_loss_is_that_of_the_loss_chapter():
    import torch

    from zipformer_recipes.loss import rnnt_loss_simple

    am, lm = (torch.sin(torch.arange(n * 4, dtype=torch.float32) * 1.7).reshape(1, n, 4) for n in (5, 3))
    ours = rnnt_loss_simple(lm=lm, am=am, symbols=torch.tensor([[1, 2]]), termination_symbol=0, reduction="sum")
    assert ef.EXPECTED_LOSS == pytest.approx(ours.item(), rel=1e-6)


TORCH = "__version__ = '2.7.1+cu126'\nclass version: cuda = '12.6'\n"
BUILT = 'k2_torch_version = "2.6.0+cu118"\nk2_torch_cuda_version = "11.8"\n'


@pytest.fixture
def k2_of(tmp_path, monkeypatch):
    "k2_of(text of its __init__): facts of a made-up k2 for another torch, CUDA and Python, beside a made-up torch."

    def look(text):
        (tmp_path / "k2").mkdir()
        (tmp_path / "torch.py").write_text(TORCH)
        (tmp_path / "k2" / "torch_version.py").write_text(BUILT)
        (tmp_path / "_k2.cpython-39-x86_64-linux-gnu.so").write_bytes(b"")
        if text is not None:
            (tmp_path / "k2" / "__init__.py").write_text(text)
        on_path(monkeypatch, tmp_path)
        return ef.k2_facts()

    return look


K2 = {
    "refuses": ("raise ImportError('built using PyTorch 2.6.0\\nBut you use 2.7.1')", "error", "2.6.0 But you use"),
    "no library": ("raise ImportError('libcudart.so.11.0: cannot open shared object file')", "error", "libcudart"),
    "dies": ("import os; os.abort()", "crash", "SIGABRT"),
    "leaves": ("raise SystemExit(0)", "error", "ended before"),
}


@pytest.mark.parametrize("how", K2)
def test_what_k2_was_built_for_is_known_though_it_does_not_load(k2_of, how):
    code, status, error = K2[how]
    facts = k2_of(code)
    assert facts["build"] == {"torch": "2.6.0+cu118", "cuda": "11.8", "python": "3.9"}
    assert facts["torch"] == "2.7.1+cu126" and facts["torch_cuda"] == "12.6"
    assert facts["status"] == status and error in facts.get("error", "") and "loss" not in facts
    assert ("found_at" in facts) == (how == "no library") and facts["file"].endswith("k2/__init__.py")


def test_a_bare_folder_named_k2_is_no_k2(k2_of):
    assert k2_of(None) == {"status": "missing"}


def test_a_loss_that_differs_is_told():
    assert [ef._loss_said(x) for x in (5.31199, "RuntimeError: no kernel")] == ["ok", "RuntimeError: no kernel"]
    assert ef._loss_said(5.4) == "5.40000, the torch loss says 5.31199" and ef._loss_said(float("nan")) != "ok"


def test_a_library_is_found_beside_the_packages(tmp_path, monkeypatch):
    (tmp_path / "site-packages" / "nvidia" / "cuda" / "lib").mkdir(parents=True)
    (tmp_path / "site-packages" / "nvidia" / "cuda" / "lib" / "libmine.so.12").touch()
    monkeypatch.setattr(ef.sys, "path", [str(tmp_path / "site-packages")])
    assert ef.copies_of_library("libmine.so.12") == [ef.without_home(str(tmp_path / "site-packages/nvidia/cuda/lib"))]


# ---- everything, once


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return ef.snapshot_of(tmp_path_factory.mktemp("data"), Path(__file__).resolve().parents[1] / "constraints.txt")


def test_a_real_snapshot(real):
    assert real["schema"] == ef.SCHEMA and real["troubles"] == {} and json.loads(json.dumps(real)) == real
    assert list(real["seconds_of"]) == list(ef.PHASES)
    assert real["seconds"] == pytest.approx(sum(real["seconds_of"].values()), abs=1)
    assert real["seconds"] < ef.BUDGET[1] + 5 and real["skipped"] == []
    assert abs(real["system"]["clock_skew_s"]) < 1 and "clock_skew_s" not in real["disk"]
    assert real["packages"]["torch"]["status"] == "ok" and set(real["audio"]) == set(ef.CODECS)
    assert real["collectives"]["status"] == ("skipped" if real["torch"]["devices"] == 1 else "ok")
    assert real["loader"]["status"] == "ok" and real["loader"]["files"] == 60


# ---- the real k2 (fetched: choose with -m k2)


def python39() -> str:
    "A Python 3.9 that runs, or ''."
    for path in filter(None, [shutil.which("python3.9"), *Path.home().glob(".pyenv/versions/3.9*/bin/python3.9")]):
        done = subprocess.run([path, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True)
        if done.stdout.strip() == "(3, 9)":
            return str(path)
    return ""


@pytest.fixture(scope="module")
def k2_python(tmp_path_factory):
    "An interpreter with k2 1.23.4 and torch 1.13.1."
    if own := os.environ.get("ZIPFORMER_RECIPES_K2_PYTHON"):
        return own
    if not (python := python39()):
        pytest.skip("no Python 3.9, the last one with a k2 wheel on the package index")
    cache = os.environ.get("ZIPFORMER_RECIPES_CACHE")
    place = Path(cache) / "k2-venv" if cache else tmp_path_factory.mktemp("k2") / "venv"
    if not (place / "ready").exists():
        subprocess.run([python, "-m", "venv", "--clear", str(place)], check=True)
        subprocess.run([place / "bin" / "pip", "install", "-q", "k2==1.23.4", "torch==1.13.1", "numpy<2"], check=True)
        (place / "ready").touch()
    return str(place / "bin" / "python")


@pytest.mark.k2
def test_a_real_k2_computes_our_loss(k2_python):
    from zipformer_recipes.env_rules import STACKS, judge

    facts = ef.k2_facts(python=k2_python, timeout=120)
    assert facts["status"] == "ok" and facts["version"] == "1.23.4" and facts["loss"]["cpu"] == "ok", facts
    build = facts["build"]
    assert build["torch"].startswith("1.13.1") and build["python"] == "3.9" and "sm_86" in build["archs"]
    snapshot = {"k2": facts, "torch": {"version": facts["torch"], "cuda": facts["torch_cuda"]},
                "python": {"version": facts["python"]}}  # fmt: skip
    found = {f.id: f.status for f in judge(snapshot, STACKS["cpu"]) if f.id.startswith("k2.")}
    assert {"k2.import", "k2.match", "k2.loss"} <= set(found) and set(found.values()) == {"ok"}
    wrong = judge(snapshot | {"torch": {"version": "2.7.1+cu126", "cuda": "12.6"}}, STACKS["cpu"])
    assert any(f.id == "k2.match" and f.status == "failure" for f in wrong)
