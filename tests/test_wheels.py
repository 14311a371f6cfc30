"""Which k2 wheel: names, pages, platforms, and the nearest misses."""

import http.server
import threading

import pytest

from zipformer_recipes import k2_wheels as kw
from zipformer_recipes.core import ConfigError, DataError

LINUX = "manylinux_2_27_x86_64.manylinux_2_28_x86_64"
NAMES = [
    f"k2-1.24.4.dev{date}+{build}.torch{torch}-{py}-{py}-{tag}.whl"
    for date, torch, builds in (
        ("20250606", "2.7.1", ("cuda12.8", "cuda12.6", "cuda11.8", "cpu")),
        ("20250807", "2.8.0", ("cuda12.9", "cuda12.8", "cuda12.6", "cpu")),
        ("20250715", "2.7.1", ("cuda12.6",)),
        ("20260626", "2.12.1", ("rocm7.2", "rocm7.1")),
    )
    for build in builds
    for py in ("cp311", "cp312", "cp313")
    for tag in ((LINUX,) if build != "cpu" else ("manylinux_2_27_x86_64", "macosx_11_0_arm64", "win_amd64"))
]
OLD = "k2-1.23.4.dev20230224+cuda11.7.torch1.13.0-cp37-cp37m-linux_x86_64.whl"
AMD = f"k2-1.24.4.dev20260626+rocm7.2.torch2.12.1-cp312-cp312-{LINUX}.whl"


def listed(names) -> str:
    where = "https://example.org/w/"
    links = [f'<p><a class="x" href="{where}{n.replace("+", "%2B")}">{n}</a></p>\n' for n in names]
    return f"<html><body><h1>k2</h1>{''.join(links)}<a href='other-1.0-py3-none-any.whl'>other</a></body></html>"


@pytest.fixture(scope="module")
def page() -> str:
    return listed([*NAMES, OLD])


@pytest.fixture
def site(tmp_path):
    "A folder that is served; asked: the paths that were requested; moved: path -> other address."

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *given):
            super().__init__(*given, directory=str(tmp_path))

        def log_message(self, *given):
            pass

        def do_GET(self):
            served.asked.append(self.path)
            if self.path in served.moved:
                self.send_response(302)
                self.send_header("Location", served.moved[self.path])
                self.send_header("Content-Length", "0")
                return self.end_headers()
            super().do_GET()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.asked, served.moved, served.folder = [], {}, tmp_path
        served.base = f"http://127.0.0.1:{served.server_port}"
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()


# names


def test_every_name_is_read_once(page):
    wheels = kw.wheels_of_page(page)
    assert [w.name for w in wheels] == [*NAMES, OLD] and wheels[-1].python == "cp37"
    assert {w.cuda for w in wheels} == {"12.9", "12.8", "12.6", "11.8", "11.7", ""}
    assert {w.build for w in wheels if not w.cuda} == {"cpu", "rocm7.1", "rocm7.2"}
    assert all(w.url == f"https://example.org/w/{w.name.replace('+', '%2B')}" for w in wheels)


def test_names_without_links_are_read_too():
    wheels = kw.wheels_of_page("<pre>" + "\n".join(NAMES) + "</pre>")
    assert [w.name for w in wheels] == NAMES and {w.url for w in wheels} == {""}


def test_links_are_found_however_they_are_written():
    name = NAMES[0].replace("+", "%2B")
    for link in (f'href="{name}"', f"HREF = '{name}'", f"href={name}", f'href="/w/{name}?download=1#sha"'):
        (wheel,) = kw.wheels_of_page(f"<a {link}>here</a>", "https://example.org/w/2.7.1.html")
        assert wheel.url == f"https://example.org/w/{name}"
    assert kw.wheels_of_page(f'<a href="https://[/{name}">', "https://example.org/w/2.7.1.html") == []


def test_a_rocm_build_is_read():
    wheel = kw.parse_wheel(AMD)
    assert (wheel.rocm, wheel.cuda, wheel.build, wheel.torch) == ("7.2", "", "rocm7.2", "2.12.1")
    assert kw.parse_wheel(NAMES[0]).rocm == kw.parse_wheel(NAMES[9]).rocm == ""


@pytest.mark.parametrize(
    "name",
    [
        "torch-2.7.1-cp312-cp312-linux_x86_64.whl",
        "k2-1.23.4-py3.11-none-any.whl",
        "k2-1.24.4+cuda12.6.torch2.7.1-cp312-cp312-linux_x86_64.whl",
        "k2-1.24.4.dev20250807+xpu1.0.torch2.8.0-cp312-cp312-linux_x86_64.whl",
        "k2-1.24.4.dev20250807+cuda12.6.torch2.8.0-cp314-cp314t-linux_x86_64.whl",
        "k2-1.24.4.dev20250807+cuda12.6.torch2.8.0-cp312-cp311-linux_x86_64.whl",
        "k2-1.24.4.dev" + "9" * 5000 + "+cpu.torch2.8.0-cp312-cp312-linux_x86_64.whl",
        NAMES[0] + "\n",
        NAMES[0] + ".metadata",
        "x" + NAMES[0],
        "",
    ],
)
def test_other_names_are_passed_over(name):
    assert kw.parse_wheel(name) is None


def test_pages_made_to_be_slow_are_read():
    for text in ("<" * 400_000, "k2-1" * 100_000, "href" * 100_000, "href='" * 100_000, "href " + " " * 400_000):
        assert kw.wheels_of_page(text) == []


# reading


def test_a_saved_page_is_read_by_path_and_by_address(tmp_path, page):
    (tmp_path / "a b.html").write_text(page)
    by_path = kw.read_page(str(tmp_path / "a b.html"))
    assert by_path == kw.read_page((tmp_path / "a b.html").as_uri()) == kw.read_page(tmp_path / "a b.html")
    assert len(by_path) == len(NAMES) + 1


def test_pages_that_do_not_come(tmp_path, site):
    for place in (str(tmp_path / "no.html"), "file:///no/such.html", str(tmp_path), "", "ftp://example.org/a.html"):
        with pytest.raises(DataError, match="no such page"):
            kw.read_page(place)
    for place in ("http://127.0.0.1:9/cuda.html", "http://[/", "http://"):
        with pytest.raises(DataError, match="did not come"):
            kw.read_page(place, timeout=1)
    with pytest.raises(DataError, match="answered 404"):
        kw.read_page(f"{site.base}/none.html")


def test_a_file_without_the_right_to_read_it(tmp_path, monkeypatch):
    (tmp_path / "a.html").write_text("x")
    monkeypatch.setattr(kw.Path, "open", lambda *a: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        kw.read_page(str(tmp_path / "a.html"))


@pytest.mark.parametrize("data", [b"", bytes(range(256)) * 40, b"\xff\xfe" + "k2".encode("utf-16-le"), b"<p>hello</p>"])
def test_a_page_without_a_wheel_says_what_to_do(tmp_path, site, data):
    (tmp_path / "x.html").write_bytes(data)
    for place in (str(tmp_path / "x.html"), f"{site.base}/x.html"):
        with pytest.raises(DataError, match="names no k2 wheel") as caught:
            kw.read_page(place)
        assert "for your torch" in caught.value.remedy and caught.value.where == place


def test_undecodable_bytes_cost_only_themselves(tmp_path):
    (tmp_path / "x.html").write_bytes(b"\xff\x80 caf\xe9 " + OLD.encode() + b"\0\xc3")
    assert [w.name for w in kw.read_page(str(tmp_path / "x.html"))] == [OLD]


def test_a_large_page_is_refused_and_not_read_whole(tmp_path, site):
    (tmp_path / "x.html").write_bytes(OLD.encode().ljust(5_000_000))
    for place in (str(tmp_path / "x.html"), f"{site.base}/x.html"):
        assert len(kw.read_page(place)) == 1
    (tmp_path / "x.html").write_bytes(OLD.encode().ljust(5_000_001))
    for place in (str(tmp_path / "x.html"), f"{site.base}/x.html"):
        with pytest.raises(DataError, match="larger than 5 MB"):
            kw.read_page(place)


def test_an_overview_leads_to_its_pages(site, page):
    (site.folder / "cuda.html").write_text(
        '<a href="installation/pre-compiled-cuda-wheels-linux/2.7.1.html">2.7.1</a>'
        '<a href="installation/pre-compiled-cuda-wheels-linux/2.7.1.html#x">2.7.1</a><a href="faq.html">faq</a>'
    )
    inner = site.folder / "installation" / "pre-compiled-cuda-wheels-linux"
    inner.mkdir(parents=True)
    (inner / "2.7.1.html").write_text(page + '<a href="9.9.9.html">next</a>')
    assert len(kw.read_page(f"{site.base}/cuda.html")) == len(NAMES) + 1
    assert site.asked == ["/cuda.html", "/installation/pre-compiled-cuda-wheels-linux/2.7.1.html"]


def test_an_overview_is_left_only_downwards(site, page):
    (site.folder / "k2").mkdir()
    (site.folder / "k2" / "2.7.1.html").write_text(listed([OLD]))
    (site.folder / "2.8.0.html").write_text(page)
    away = [
        f"http://localhost:{site.server_port}/k2/1.0.0.html",
        "https://elsewhere.example/k2/1.0.0.html",
        "//elsewhere.example/k2/1.0.0.html",
        "file:///k2/1.0.0.html",
        "../2.8.0.html",
        "..\\2.8.0.html",
        "/2.8.0.html",
        "/k2-other/2.8.0.html",
        "/k2/%2E%2e/2.8.0.html",
        "/k2/%2e%2e%5c2.8.0.html",
        f"{site.base}/k2/../2.8.0.html",
    ]
    (site.folder / "k2" / "index.html").write_text("".join(f'<a href="{a}">' for a in [*away, "2.7.1.html"]))
    assert [w.name for w in kw.read_page(f"{site.base}/k2/index.html")] == [OLD]
    assert site.asked == ["/k2/index.html", "/k2/2.7.1.html"]


def test_a_page_below_may_not_lead_away(site, page):
    (site.folder / "index.html").write_text('<a href="2.7.1.html">')
    (site.folder / "other.html").write_text(page)
    site.moved["/2.7.1.html"] = "/other.html"
    with pytest.raises(DataError, match="answered 302") as caught:
        kw.read_page(f"{site.base}/index.html")
    assert "/other.html" not in site.asked and caught.value.where == f"{site.base}/2.7.1.html"


def test_a_page_with_wheels_is_no_overview(site, page):
    (site.folder / "2.7.1.html").write_text(page + '<a href="2.8.0.html">another torch, in the side bar</a>')
    assert len(kw.read_page(f"{site.base}/2.7.1.html")) == len(NAMES) + 1 and site.asked == ["/2.7.1.html"]


def test_a_moved_page_is_found_and_its_links_belong_to_its_new_place(site):
    (site.folder / "new").mkdir()
    (site.folder / "new" / "index.html").write_text('<a href="2.7.1.html">')
    (site.folder / "new" / "2.7.1.html").write_text(f'<a href="{OLD}">')
    site.moved |= {"/old.html": "/older.html", "/older.html": f"{site.base}/new/index.html", "/ring.html": "/ring.html"}
    (wheel,) = kw.read_page(f"{site.base}/old.html")
    assert wheel.url == f"{site.base}/new/{OLD}"
    with pytest.raises(DataError, match="answered 302"):
        kw.read_page(f"{site.base}/ring.html")
    assert site.asked.count("/ring.html") == 4


def test_a_redirect_to_a_file_is_refused(site, page):
    (site.folder / "x.html").write_text(page)
    site.moved["/go.html"] = (site.folder / "x.html").as_uri()
    with pytest.raises(DataError, match="did not come"):
        kw.read_page(f"{site.base}/go.html")


@pytest.mark.parametrize("count", [100, 101])
def test_at_most_a_hundred_pages(site, count):
    names = [f"2.{n}.0.html" for n in range(count)]
    for name in names:
        (site.folder / name).write_text(OLD)
    (site.folder / "index.html").write_text("".join(f'<a href="{n}">' for n in names))
    if count == 100:
        assert len(kw.read_page(f"{site.base}/index.html")) == 1 and len(site.asked) == 101
        return
    with pytest.raises(DataError, match="101 pages of wheels, more than 100"):
        kw.read_page(f"{site.base}/index.html")
    assert len(site.asked) == 1


# matching


@pytest.mark.parametrize(
    "tag,machine,fits",
    [
        ("manylinux_2_28_x86_64", {}, True),
        ("manylinux_2_36_x86_64", {}, True),
        ("manylinux_2_37_x86_64", {}, False),
        ("manylinux2014_x86_64", {"glibc": (2, 17)}, True),
        ("manylinux2014_x86_64", {"glibc": (2, 16)}, False),
        ("manylinux1_x86_64", {}, True),
        ("manylinux_3_0_x86_64", {}, False),
        ("manylinux_x86_64", {}, False),
        ("musllinux_1_2_x86_64", {}, False),
        ("linux_x86_64", {}, True),
        ("linux_aarch64", {}, False),
        ("linux_aarch64", {"arch": "aarch64"}, True),
        ("any", {}, False),
        ("", {}, False),
        ("win_amd64", {"system": "win", "arch": "AMD64"}, True),
        ("win_amd64", {"system": "win", "arch": "arm64"}, False),
        ("win_amd64", {}, False),
        ("macosx_11_0_arm64", {"system": "macosx", "arch": "arm64"}, True),
        ("macosx_11_0_arm64", {"system": "macosx"}, False),
        ("macosx_11_0_universal2", {"system": "macosx", "arch": "arm64"}, True),
        ("manylinux_2_28_x86_64", {"system": "macosx"}, False),
    ],
)
def test_platforms(tag, machine, fits):
    assert kw.platform_fits(tag, kw.Machine("3.12", "2.7.1", **machine)) is fits


def test_the_newest_fitting_wheel_wins(page):
    best, near = kw.resolve(kw.wheels_of_page(page), kw.Machine("3.12.7", "2.7.1+cu126", "12.6"))
    assert best.name == f"k2-1.24.4.dev20250715+cuda12.6.torch2.7.1-cp312-cp312-{LINUX}.whl"
    assert "%2B" in best.url and near and all(wrong for _, wrong in near)


def test_newer_is_a_matter_of_numbers():
    names = [f"k2-{v}.dev{d}+cpu.torch2.0.0-cp312-cp312-linux_x86_64.whl" for v, d in
             (("1.9", 20260101), ("1.24.4", 20240101), ("1.24.10", 20230101), ("1.24.4", 20250101))]
    found = [(w.version, w.date) for w in kw.newest_first([kw.parse_wheel(n) for n in names])]
    assert found == [("1.24.10", 20230101), ("1.24.4", 20250101), ("1.24.4", 20240101), ("1.9", 20260101)]


@pytest.mark.parametrize(
    "machine,name",
    [
        (kw.Machine("3.11.2", "2.7.1"), "cpu.torch2.7.1-cp311-cp311-manylinux_2_27_x86_64"),
        (kw.Machine("3.12", "2.8.0", "", "macosx", "arm64"), "cpu.torch2.8.0-cp312-cp312-macosx_11_0_arm64"),
        (kw.Machine("3.13", "2.8.0", "", "win", "amd64"), "cpu.torch2.8.0-cp313-cp313-win_amd64"),
        (kw.Machine("3.7", "1.13.0", "11.7"), "cuda11.7.torch1.13.0-cp37-cp37m-linux_x86_64"),
        (kw.Machine("3.12", "2.12.1+rocm7.1"), "rocm7.1.torch2.12.1-cp312-cp312-manylinux"),
    ],
)
def test_each_kind_of_machine_gets_its_wheel(page, machine, name):
    assert name in kw.resolve(kw.wheels_of_page(page), machine)[0].name


def test_a_rocm_build_fits_neither_a_cuda_nor_a_cpu_machine(page):
    wheels, amd = kw.wheels_of_page(page), kw.parse_wheel(AMD)
    for cuda, here in (("12.6", "CUDA 12.6"), ("", "the CPU only")):
        machine = kw.Machine("3.12", "2.12.1", cuda)
        assert kw.misfits(amd, machine) == {"rocm": f"built for AMD cards with ROCm 7.2, here {here}"}
        best, near = kw.resolve(wheels, machine)
        assert best is None and not any(w.rocm for w, _ in near), "a wheel for other cards is no near miss"
        assert not kw.explain(wheels, machine).startswith("pip")
        assert "ROCm 7.2" in kw.explain([amd], machine)
    cpu = kw.parse_wheel("k2-1.24.4.dev20260626+cpu.torch2.12.1-cp312-cp312-linux_x86_64.whl")
    assert set(kw.misfits(cpu, kw.Machine("3.12", "2.12.1+rocm7.2"))) == {"rocm"}
    assert set(kw.misfits(cpu, kw.Machine("3.12", "2.12.1", "12.6"))) == {"cuda"}


def test_near_misses_say_which_component_is_wrong(page):
    wheels = kw.wheels_of_page(page)
    best, near = kw.resolve(wheels, kw.Machine("3.12", "2.7.1", "12.4"))
    assert best is None and set(near[0][1]) == {"cuda"} and "here CUDA 12.4" in near[0][1]["cuda"]
    best, near = kw.resolve(wheels, kw.Machine("3.10", "2.7.1", "12.6"))
    assert best is None and set(near[0][1]) == {"python"} and near[0][0].python == "cp311"
    old = kw.Machine("3.12", "2.7.1", "12.6", glibc=(2, 17))
    alike = next(w for w in wheels if (w.torch, w.cuda, w.python) == ("2.7.1", "12.6", "cp312"))
    assert kw.resolve(wheels, old)[0] is None
    assert set(kw.misfits(alike, old)) == {"platform"} and "C library 2.17" in kw.misfits(alike, old)["platform"]
    assert kw.resolve(wheels, kw.Machine("3.12", "2.7.1", "12.6", arch="aarch64"))[0] is None
    assert kw.resolve(wheels, old)[1][0][0].name == OLD, "its plain linux tag installs with any C library"


def test_the_nearest_versions_come_first_and_the_hopeless_last(page):
    wheels = kw.wheels_of_page(page)
    machine = kw.Machine("3.12", "2.8.0", "12.5")
    assert [w.cuda for w, _ in kw.resolve(wheels, machine)[1][:4]] == ["12.6", "12.8", "12.9", ""]
    near = kw.resolve(wheels, machine, misses=500)[1]
    hopeless = [not wrong.keys().isdisjoint({"platform", "rocm"}) for _, wrong in near]
    assert len(near) == len(wheels) and hopeless == sorted(hopeless) and True in hopeless and False in hopeless
    assert len(kw.resolve(wheels, machine, misses=2)[1]) == 2 and kw.resolve([], machine) == (None, [])


def test_a_torch_built_from_source_is_no_crash(page):
    best, near = kw.resolve(kw.wheels_of_page(page), kw.Machine("3.12", "2.9.0a0+git1234abc", "12.6"))
    assert best is None and near[0][0].torch == "2.8.0"


# names of k2's real pages: day, builds, torch, Pythons
REAL = [
    ("20250807", "cuda12.9 cuda12.8 cuda12.6", "2.8.0", (39, 310, 311, 312, 313)),
    ("20251118", "cuda12.9 cuda12.8 cuda12.6", "2.9.1", (310, 311, 312, 313, 314)),
    ("20260423", "cuda13.0 cuda12.9 cuda12.8", "2.11.0", (310, 311, 312, 313, 314)),
    ("20260626", "cuda12.6 rocm7.2", "2.12.1", (312, 314)),
    ("20260625", "cuda12.6", "2.12.1", (310, 311, 313)),
]


@pytest.mark.parametrize(
    "torch,chosen,near",
    [
        ("2.8.0", "20250807+cuda12.6.torch2.8.0-cp312", [("2.8.0", "cuda12.6", f"cp{n}") for n in (311, 313)]),
        ("2.7.1", None, [(t, "cuda12.6", "cp312") for t in ("2.8.0", "2.9.1", "2.12.1")]),
        ("2.11.0", None, [("2.11.0", f"cuda{n}", "cp312") for n in ("12.8", "12.9", "13.0")]),
        ("2.12.1", "20260626+cuda12.6.torch2.12.1-cp312", [("2.12.1", "cuda12.6", "cp311")]),
    ],
)
def test_real_pages(torch, chosen, near):
    names = [f"k2-1.24.4.dev{day}+{build}.torch{made_for}-cp{py}-cp{py}-{LINUX}.whl"
             for day, builds, made_for, pythons in REAL for build in builds.split() for py in pythons]
    best, found = kw.resolve(kw.wheels_of_page("\n".join(names)), kw.Machine("3.12", torch, "12.6"))
    assert (best is None) if chosen is None else (chosen in best.name)
    assert [(w.torch, w.build, w.python) for w, _ in found[: len(near)]] == near
    assert all(len(wrong) == 1 for _, wrong in found[: len(near)])


# answers


def test_offline_the_name_is_given():
    text = kw.explain([], kw.Machine("3.12.7", "2.7.1+cu126", "12.6"))
    assert "k2-*+cuda12.6.torch2.7.1-cp312-cp312-*x86_64.whl" in text and "no name on it could be read" in text
    assert "k2-*+cpu.torch2.7.1-cp311" in kw.explain([], kw.Machine("3.11", "2.7.1"))


@pytest.mark.parametrize(
    "machine,end",
    [
        (kw.Machine("3.12", "2.12.1+rocm7.2"), "+rocm7.2.torch2.12.1-cp312-cp312-*x86_64.whl"),
        (kw.Machine("3.12", "2.6.0", "", "win", "AMD64"), "+cpu.torch2.6.0-cp312-cp312-win_amd64.whl"),
        (kw.Machine("3.12", "2.6.0", "", "win"), "+cpu.torch2.6.0-cp312-cp312-win_amd64.whl"),
        (kw.Machine("3.12", "2.6.0", "", "macosx", "arm64"), "+cpu.torch2.6.0-cp312-cp312-macosx_*_arm64.whl"),
    ],
)
def test_the_pattern_of_the_name(machine, end):
    assert kw.name_pattern(machine) == f"k2-*{end}"


def test_the_answer_is_a_command(page):
    machine = kw.Machine("3.12", "2.7.1", "12.6")
    name = f"k2-1.24.4.dev20250715+cuda12.6.torch2.7.1-cp312-cp312-{LINUX}.whl"
    link = f"https://example.org/w/{name.replace('+', '%2B')}"
    assert kw.explain(kw.wheels_of_page(page), machine) == f"pip install --no-deps {link}"
    text = kw.explain(kw.wheels_of_page("\n".join(NAMES)), machine)
    assert text.startswith("download") and text.endswith(f"pip install --no-deps ./{name}")


def test_a_page_cannot_put_words_into_the_command():
    for trick in ("$(touch&#32;boo)", "&#39;;touch&#32;boo;&#39;", "&#39;", ";touch&#10;"):
        (wheel,) = kw.wheels_of_page(f'<a href="https://x.example/{trick}/{NAMES[3]}">')
        text = kw.explain([wheel], kw.Machine(f"3.{wheel.python[3:]}", wheel.torch, wheel.cuda))
        words = list(kw.shlex.shlex(text, posix=True, punctuation_chars=True))
        assert words == ["pip", "install", "--no-deps", wheel.url]


def test_no_match_lists_the_nearest(page):
    text = kw.explain(kw.wheels_of_page(page), kw.Machine("3.12", "2.7.1", "12.4"))
    assert f"{len(NAMES) + 1} wheels, none named k2-*+cuda12.4.torch2.7.1-cp312" in text
    assert text.count(".whl\n") == 5 and "cuda: built for CUDA 12.6, here CUDA 12.4" in text


def test_a_system_without_wheels():
    for ask in (lambda m: kw.explain([], m), kw.name_pattern):
        with pytest.raises(ConfigError, match="no k2 wheels exist for freebsd"):
            ask(kw.Machine("3.12", "2.7.1", system="freebsd"))
