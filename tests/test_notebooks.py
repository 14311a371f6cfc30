"""Hygiene of the notebooks and of the modules made from them; holds for whichever chapters exist."""

import ast
import base64
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zipformer_recipes.book import assigned_names
from zipformer_recipes.core import RunConfig

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PACKAGE = ROOT / "zipformer_recipes"
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").glob("*.ipynb") if not p.name.startswith("_"))
MODULES = sorted(p.stem for p in PACKAGE.glob("*.py") if not p.stem.startswith("_"))
STAGES = {"env", "data", "finetune", "evaluate", "tuning", "resume", "profiling", "deploy"}  # as the design names them
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)

LARGEST = 200 * 1024  # bytes of one notebook
LONGEST = 40  # lines of one cell
REGISTRIES, FOLDERS = ("pypi", "pythonhosted", "debian", "npmjs"), ("work", "farm", "root", "home", "tmp")
HOSTS = re.compile("|".join(rf"\b{name}\.(?:org|com|io)\b" for name in REGISTRIES))
PLACES = re.compile("|".join(rf"(?<![\w.<>])/{name}/\w" for name in FOLDERS))


def cells_of(path, kind="code"):
    return [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def tagged(path):
    return [c for c in cells_of(path) if "parameters" in c["metadata"].get("tags", [])]


def module_of(path):
    "The module a notebook exports to, None for a page."
    found = re.search(r"^#\|\s*default_exp\s+(\w+)", "\n".join(map(source, cells_of(path))), re.MULTILINE)
    return found and found[1]


def test_there_is_a_book():
    assert {"00_core", "90_book", "index"} <= {p.stem for p in NOTEBOOKS}


def test_modules_are_in_sync_with_the_notebooks(tmp_path):
    shutil.copytree(ROOT / "nbs", tmp_path / "nbs", ignore=shutil.ignore_patterns(".*", "_*"))
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "pretrained"))
    shutil.copy(ROOT / "settings.ini", tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    subprocess.run([BIN / "nbdev_export"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    made = {p.name: p.read_bytes() for p in (tmp_path / PACKAGE.name).glob("*.py")}
    stored = {p.name: p.read_bytes() for p in PACKAGE.glob("*.py")}
    different = [name for name in made.keys() | stored.keys() if made.get(name) != stored.get(name)]
    assert not different, f"run make export: {different}"


@each_notebook
def test_clean(path):
    from nbdev.clean import clean_nb

    stored = json.loads(path.read_text(encoding="utf-8"))
    cleaned = json.loads(json.dumps(stored))
    clean_nb(cleaned, allowed_metadata_keys=["language_info"], allowed_cell_metadata_keys=["tags"])
    assert cleaned == stored, "run make export"
    assert stored["metadata"]["kernelspec"]["name"] == "python3"
    ids = [c["id"] for c in stored["cells"]]
    assert len(set(ids)) == len(ids), "two cells have one id"


@each_notebook
def test_size_and_cells(path):
    assert path.stat().st_size <= LARGEST
    assert not [source(c).splitlines()[:2] for c in cells_of(path) if len(source(c).splitlines()) > LONGEST]
    errors = [o["evalue"] for c in cells_of(path) for o in c["outputs"] if o["output_type"] == "error"]
    assert not errors


@each_notebook
def test_head(path):
    first = source(cells_of(path, "markdown")[0]).splitlines()
    assert first[0].startswith("# ") and any(line.startswith("> ") for line in first[1:4])
    if path.stem[:1].isdigit():
        assert module_of(path), "no default_exp cell"


@each_notebook
def test_outputs_are_stored(path):
    assert any(c["outputs"] for c in cells_of(path)), "execute the notebook and keep its outputs"
    for cell in cells_of(path):
        for output in cell["outputs"]:
            picture = output.get("data", {}).get("image/png")
            assert picture is None or base64.b64decode(picture)[:4] == b"\x89PNG"


@each_notebook
def test_parameters(path):
    name = path.stem.partition("_")[2]
    assert len(tagged(path)) == (1 if name in STAGES else 0)
    if name in STAGES:
        names = assigned_names(source(tagged(path)[0]))
        assert {"profile", "run_dir", "extra"} <= set(names)
        unknown = set(names) - {f.name for f in dataclasses.fields(RunConfig)} - {"extra"}
        assert not unknown, "a parameter that is no RunConfig setting"


@each_notebook
def test_no_cell_mixes_imports_and_work(path):
    "nbdev runs cells with imports on their own; a function may import inside itself."
    for cell in cells_of(path):
        text = re.sub(r"(?m)^[%!].*$", "", source(cell))
        kinds = {isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(text).body}
        assert kinds != {True, False}, source(cell)[:200]


@each_notebook
def test_no_export_from_inside_and_no_star_imports(path):
    for cell in cells_of(path):
        assert "nbdev_export(" not in source(cell) and not re.search(r"^from .* import \*", source(cell), re.MULTILINE)


def committed_files():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def texts():
    for path in committed_files():
        data = path.read_bytes()
        if b"\0" not in data[:8000]:
            yield path, data.decode("utf-8", errors="replace")


def test_no_registry_hosts():
    found = [f"{path.relative_to(ROOT)}: {hit[0]}" for path, text in texts() if (hit := HOSTS.search(text))]
    assert not found


def test_no_places_of_one_machine():
    "Nothing committed names a folder of the machine it was made on; stored outputs least of all."
    found = []
    for path, text in texts():
        if path.suffix == ".ipynb":
            notebook = json.loads(text)
            text = "\n".join(json.dumps(c.get("outputs", []), ensure_ascii=False) for c in notebook["cells"])
        hits = [hit for hit in PLACES.findall(text) if path.suffix == ".ipynb" or not hit.startswith("/t")]
        found += [f"{path.relative_to(ROOT)}: {hit}" for hit in hits]
    assert not found


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_alone(name):
    "An exported cell that needs a variable of its notebook fails only here."
    done = subprocess.run([sys.executable, "-c", f"import zipformer_recipes.{name}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def imports_of(name):
    for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 1 or module.startswith("zipformer_recipes."):
                yield module.removeprefix("zipformer_recipes.").partition(".")[0]


def test_a_module_imports_only_modules_above_it():
    # the parts of a chapter (01a, 01b) stand before the page that uses them (01)
    inside = sorted(NOTEBOOKS, key=lambda p: (p.stem[:2], not p.stem[2:3].isalpha(), p.stem))
    order = [module for path in inside if (module := module_of(path))]
    wrong = [
        f"{name} imports {other}"
        for i, name in enumerate(order)
        for other in imports_of(name)
        if other in order and order.index(other) >= i
    ]
    # the shipped tokenizer lies beside the shipped model; dev WER needs the search of a later chapter (no cycle)
    assert set(wrong) <= {"data imports model", "finetune imports evaluate"}
    assert "finetune" not in imports_of("evaluate") and "data" not in imports_of("model")


def test_every_exported_function_is_documented():
    bare = []
    for name in MODULES:
        for node in ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                bare += [] if ast.get_docstring(node) else [f"{name}.{node.name}"]
    assert not bare


def test_cells_of_library_notebooks_run():
    library = [p.stem for p in NOTEBOOKS if p.stem[0].isdigit() and not tagged(p)]
    words = [BIN / "nbdev_test", "--path", "nbs", "--file_re", rf"^({'|'.join(library)})\.ipynb$", "--n_workers", "2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
