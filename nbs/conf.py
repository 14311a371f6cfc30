"""Sphinx settings of the site. The notebooks beside this file are its pages, shown with their stored outputs."""

import importlib
import json
import re
import sys
from pathlib import Path

PACKAGE = "zipformer_recipes"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "Zipformer Recipes"
author = "Zipformer Recipes authors"
copyright = "2026, Zipformer Recipes authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx-mathjax-offline"]
exclude_patterns = ["_*", "runs", "**/.ipynb_checkpoints", "**/README.md"]

html_theme = "sphinx_book_theme"
html_title = project
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # summaries are fetched, which a browser refuses for files
html_context = {"default_mode": "auto"}
html_theme_options = {"use_download_button": False, "show_toc_level": 2, "navbar_persistent": []}

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_inherit_docstrings = False
autodoc_default_options = {"members": True, "undoc-members": True}

# What a directive at the head of a cell means for the page
HIDDEN = {"default_exp": "remove-cell", "hide": "remove-cell"}
HIDDEN |= {"hide_input": "remove-input", "hide_output": "remove-output"}
DIRECTIVE = re.compile(r"\s*#\s*\|\s*(?P<name>[\w-]+)(?:\s*:)?\s*(?P<value>.*?)\s*")
CODE_NAME = re.compile(r"(?<![`}\w])`(?P<name>[A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
CHAPTERS = "```{toctree}\n:glob:\n:hidden:\n:caption: Chapters\n\n[0-9]*\n```"


def symbols():
    """Short name -> full name of everything exported, from nbdev's index; ambiguous names are left out."""
    index = importlib.import_module(f"{PACKAGE}._modidx").d["syms"]
    pairs = [(full.removeprefix(f"{module}."), full) for module, names in index.items() for full in names]
    shorts = [short for short, _ in pairs]
    modules = {module.rpartition(".")[2] for module in index}
    return {
        short: full
        for short, full in pairs
        if shorts.count(short) == 1 and short not in modules and not short.rpartition(".")[2].startswith("_")
    }


def link_names(text, known):
    """`name` in prose becomes a link to its API entry."""

    def link(found):
        name = found["name"]
        return f"{{py:obj}}`{name} <{known[name]}>`" if name in known else found[0]

    return CODE_NAME.sub(link, text)


def read_directives(cell):
    """Takes the directive lines off a code cell, tags it accordingly, gives the name behind default_exp."""
    lines, module = "".join(cell["source"]).split("\n"), None
    tags = cell["metadata"].setdefault("tags", [])
    while lines and (found := DIRECTIVE.fullmatch(lines[0])):
        lines.pop(0)
        module = found["value"] if found["name"] == "default_exp" else module
        if found["name"] in HIDDEN:
            tags.append(HIDDEN[found["name"]])
    cell["source"] = "\n".join(lines).strip("\n")
    return module


def prose(cell_id, text):
    return {"cell_type": "markdown", "id": cell_id, "metadata": {}, "source": text}


def notebook_page(app, docname, source):
    """Before a notebook is parsed: directives acted on, names linked, the module's API put at its end."""
    if not str(app.env.doc2path(docname)).endswith(".ipynb"):
        return
    notebook, known, module = json.loads(source[0]), symbols(), None
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = link_names("".join(cell["source"]), known)
        elif cell["cell_type"] == "code":
            module = read_directives(cell) or module
    if module:
        name = f"{PACKAGE}.{module}"
        notebook["cells"].append(prose("api", f"## API of `{name}`\n\n```{{eval-rst}}\n.. automodule:: {name}\n```"))
    if docname == "index":
        notebook["cells"].append(prose("chapters", CHAPTERS))
    source[0] = json.dumps(notebook)


def plain_line(line):
    """One line of a docstring with everything escaped but its `names`."""
    parts = re.split("`+", line)
    if len(parts) % 2 == 0:
        parts = [line.replace("`", "'")]
    escaped = [re.sub(r"([*|\\]|_\b)", r"\\\1", part) for part in parts[::2]]
    names = [f"``{name}``" for name in parts[1::2]] + [""]
    return "".join(text + name for text, name in zip(escaped, names, strict=True))


def plain_text(lines):
    """Docstrings here are plain text with `names`: nothing else in them is markup, and line breaks stay."""
    lines = [plain_line(line) for line in lines]
    head = lines.index("") if "" in lines else len(lines)
    return lines[:head] + [f"| {line}" if line.strip() else line for line in lines[head:]]


def argument_notes(app, what, name, obj, options, lines):
    """The docstring as plain text, then the comments behind arguments as fields of the API entry."""
    from fastcore.docments import docments

    if getattr(obj, "__module__", getattr(obj, "__name__", "")).startswith(PACKAGE):
        lines[:] = plain_text(lines)
    if what not in ("function", "method", "class"):
        return
    try:
        notes = docments(obj, full=True)
    except Exception:  # an object whose source cannot be read has no comments
        return
    notes = {arg: note["docment"] for arg, note in notes.items() if isinstance(note, dict) and note.get("docment")}
    fields = [f":returns: {note}" if arg == "return" else f":param {arg}: {note}" for arg, note in notes.items()]
    lines += ["", *fields, ""] if fields else []


def setup(app):
    app.connect("source-read", notebook_page)
    app.connect("autodoc-process-docstring", argument_notes)
    return {"parallel_read_safe": True}
