"""The site: links, tables of contents, references, examples, and that it builds without a warning."""

import ast
import builtins
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import numpyro_bnn

core = pytest.mark.core
ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NAME = "numpyro_bnn"
PAGES = sorted(DOCS.rglob("*.md"))
MARKDOWN = [ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES]
SOURCES = sorted((ROOT / NAME).rglob("*.py"))
ROOMS = sorted(module.name for module in pkgutil.iter_modules(numpyro_bnn.__path__) if module.name[0] != "_")


def label(path):
    return str(path.relative_to(ROOT))


def prose(text):
    """The page without its blocks of code, which may hold what looks like a link or a heading."""
    return re.sub(r"^(```+|~~~+)(?!\{).*?^\1\s*$", "", text, flags=re.M | re.S)


# --------------------------------------------------------------------------------------------------- links

LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(text):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+\s+(.*?)\s*$", prose(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path, text):
    """Links of a page to files that are not there, or to headings that their page does not have."""
    for match in LINK.finditer(prose(text)):
        target = (path.parent / unquote(match[1])).resolve() if match[1] else path
        if not target.is_file():
            yield f"{match[0]}: no such file"
        elif match[2] and match[2] not in anchors(target.read_text()):
            yield f"{match[0]}: no such heading"


@core
@pytest.mark.parametrize("path", MARKDOWN, ids=label)
def test_links_resolve(path):
    assert list(broken_links(path, path.read_text())) == []


@core
def test_broken_links_are_seen():
    text = "# A title: `x`\n[a](models.md) [b](absent.md)\n[c](#a-title-x) [d](models.md#absent) [e](https://a.b)\n"
    found = list(broken_links(DOCS / "page.md", text + "```bash\n[f](gone.md)\n```\n"))
    assert found[0] == "](absent.md): no such file"
    assert found[-1] == "](models.md#absent): no such heading"
    assert "a-title-x" in anchors(text)


# ------------------------------------------------------------------------------------------ tables of contents


def entries(path):
    """Pages that the tables of contents of a page name."""
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", path.read_text(), flags=re.M | re.S):
        lines = [line.strip() for line in block.splitlines() if line.strip() and not line.startswith(":")]
        yield from ((path.parent / f"{line}.md").resolve() for line in lines)


@core
def test_every_page_is_in_one_table_of_contents():
    named = [entry for page in PAGES for entry in entries(page)]
    assert sorted(named) == [page for page in PAGES if page != DOCS / "index.md"]


@core
def test_files_on_the_way_are_files_of_the_package():
    """The table of contributing.md that `docs/make_ways.py` writes: as many files as it says, and all there."""
    text = (DOCS / "contributing.md").read_text()
    table = text.partition("files of ways: begin -->\n")[2].partition("<!--")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == 5
    for _, count, listed in rows:
        assert len(listed.split(", ")) == int(count)
        assert [name for name in listed.split(", ") if not (ROOT / NAME / name).is_file()] == []


# ------------------------------------------------------------------------------------------------- references

ROLE = re.compile(r":(class|func|meth|attr|mod|data|obj|exc):`~?([\w.]+)`")
MYST_ROLE = re.compile(r"\{py:(\w+)\}`~?([\w.]+)`")


@core
@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_in_the_reference(room):
    page = (DOCS / "api" / f"{room}.md").read_text()
    assert f".. automodule:: {NAME}.{room}\n   :members:" in page


def found(dotted, *spaces):
    """Whether a dotted name can be reached from one of the namespaces, or imported."""
    first, *rest = dotted.split(".")
    for space in spaces:
        if hasattr(space, first):
            value = getattr(space, first)
            for part in rest:
                value = getattr(value, part, None)
            return value is not None
    for cut in range(len(first.split(".")) + len(rest), 0, -1):
        try:
            value = importlib.import_module(".".join(dotted.split(".")[:cut]))
        except ImportError:
            continue
        for part in dotted.split(".")[cut:]:
            value = getattr(value, part, None)
        return value is not None
    return False


def docstrings(tree):
    """(docstring, names of the classes around it) of every module, class and function."""

    def visit(node, classes):
        text = ast.get_docstring(node)
        inside = [*classes, node.name] if isinstance(node, ast.ClassDef) else classes
        if text:
            yield text, inside
        for child in ast.walk(node) if isinstance(node, ast.FunctionDef) else ast.iter_child_nodes(node):
            if child is not node and isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield from visit(child, inside)

    yield from visit(tree, [])


def unknown_names(path):
    """References in the docstrings of a file to names that do not exist."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    room = importlib.import_module(".".join(parts[:2]).removesuffix(".__init__"))
    for text, classes in docstrings(ast.parse(path.read_text())):
        own = [getattr(module, name) for name in classes if hasattr(module, name)]
        for role, name in ROLE.findall(text):
            if not found(name, *own, module, room, numpyro_bnn, builtins):
                yield f":{role}:`{name}`"


@core
@pytest.mark.parametrize("path", [path for path in SOURCES if path.stem != "__main__"], ids=label)
def test_references_of_docstrings_exist(path):
    assert list(unknown_names(path)) == []


@core
@pytest.mark.parametrize("path", MARKDOWN, ids=label)
def test_references_of_pages_exist(path):
    assert [name for _, name in MYST_ROLE.findall(path.read_text()) if not found(name)] == []


@core
def test_unknown_references_are_seen():
    assert found("numpyro_bnn.infer.SGLD.dynamics")
    assert not found("numpyro_bnn.infer.SGLDD")
    assert not found("infer.SGLDD", numpyro_bnn)
    tree = ast.parse('class A:\n    """x :meth:`f`"""\n    def f(self):\n        """y"""\n')
    assert list(docstrings(tree)) == [("x :meth:`f`", ["A"]), ("y", ["A"])]


# --------------------------------------------------------------------------------------------------- evidence

FIGURE = re.compile(r"(?<![\w.])-?\d+\.\d{2,}(?!\w)")


def sections(text):
    """(title, text) of each section."""
    parts = re.split(r"^## (.*)$", text, flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))


@core
@pytest.mark.parametrize("section", sections((DOCS / "choosing.md").read_text()), ids=lambda s: s[0])
def test_figures_of_choosing_stand_on_the_pages_it_cites(section):
    cited = "".join((DOCS / match[1]).read_text() for match in LINK.finditer(section[1]))
    standing = set(FIGURE.findall(cited))
    assert [figure for figure in FIGURE.findall(section[1]) if figure not in standing] == []


# --------------------------------------------------------------------------------------------------- examples

EXAMPLES = sorted(
    path.stem for path in (ROOT / "examples").glob("*.py") if path.stem not in ("shared", "loaders", "__init__")
)
ONE_FIGURE, ALL_FIGURES = 150_000, 1_500_000  # bytes


def runs():
    """RUNS and `command_of` of docs/make_examples.py."""
    names = {"__file__": str(DOCS / "make_examples.py"), "__name__": "make_examples"}
    exec((DOCS / "make_examples.py").read_text(), names)
    return names["RUNS"], names["command_of"]


@core
def test_every_example_has_a_page():
    assert sorted(path.stem for path in (DOCS / "examples").glob("*.md")) == sorted([*EXAMPLES, "index"])
    assert sorted(runs()[0]) == EXAMPLES


@core
@pytest.mark.parametrize("name", EXAMPLES)
def test_page_of_example_shows_a_run_of_it(name):
    """Of the command that the table holds, which the script understands, with a figure at least."""
    assert f"```{{example}} {name}\n```" in (DOCS / "examples" / f"{name}.md").read_text()
    table, command_of = runs()
    first, *printed = (DOCS / "figures" / f"{name}.txt").read_text().splitlines()
    assert first == f"$ {command_of(name)}"
    assert len(printed) > 3
    importlib.import_module(f"examples.{name}").parse(table[name].split())
    sizes = [png.stat().st_size for png in (DOCS / "figures").glob(f"{name}*.png")]
    assert sizes
    assert max(sizes) < ONE_FIGURE


@core
def test_figures_are_small_and_belong_to_an_example():
    files = list((DOCS / "figures").iterdir())
    assert sum(path.stat().st_size for path in files) < ALL_FIGURES
    others = [path.name for path in files if not path.name.startswith(tuple(EXAMPLES))]
    assert others == ["uci.png"]  # drawn with the tables of the evidence


# -------------------------------------------------------------------------------------------------------- site


ELSEWHERE = {"numpyro_bnn.infer.schedules"}  # the page of `sgmcmc` shows this module, under its own name


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path):
    """As `make docs` does, which needs the extra `docs`; equations are MathML, so TeX that is wrong is a warning."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", tmp_path / "doctrees", DOCS, tmp_path / "html"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        assert (tmp_path / "html" / page.relative_to(DOCS)).with_suffix(".html").is_file()
    for room in ROOMS:
        reference = (tmp_path / "html" / "api" / f"{room}.html").read_text()
        module = importlib.import_module(f"{NAME}.{room}")
        own = [name for name in module.__all__ if f"{NAME}.{room}.{name}" not in ELSEWHERE]
        names = [f"{NAME}.{room}.{name}" for name in own]
        absent = [
            name for name in names if f'id="{name}"' not in reference and f'id="module-{name}"' not in reference
        ]
        assert absent == []
    assert "<math" in (tmp_path / "html" / "api" / "infer.html").read_text()
    sources = "".join(path.read_text() for path in (tmp_path / "html" / "examples").glob("*.html"))
    assert sources.count("<img") >= len(EXAMPLES)
