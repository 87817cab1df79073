"""The pages: their code runs as it stands, links and references lead somewhere, the site builds without a warning."""

import ast
import builtins
import doctest
import importlib
import io
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import unquote

import jax
import pytest

import numpyro_bnn
from numpyro_bnn.moments.registry import RULES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAME = "numpyro_bnn"
PAGES = sorted(DOCS.rglob("*.md"))
MARKDOWN = [ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES]
SOURCES = [path for path in sorted((ROOT / NAME).rglob("*.py")) if path.stem != "__main__"]
ROOMS = sorted(module.name for module in pkgutil.iter_modules(numpyro_bnn.__path__) if module.name[0] != "_")


def label(path):
    return str(path.relative_to(ROOT))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


# -- what pages say ----------------------------------------------------------------------------------------


def test_pages_say_which_calls_need_jax_arrays():
    """A model that indexes rows fails on NumPy arrays in NumPyro's own kernels, guides and `Predictive`."""
    silent = []
    for path in (ROOT / "README.md", *PAGES):
        text = path.read_text()
        theirs = any(call in text for call in ("(NUTS(model", "Predictive(model", "SVI(model"))
        if "net(x[i])" in text and theirs and "jnp.asarray(x)" not in text:
            silent.append(label(path))
    assert not silent


# -- code that pages and docstrings show -------------------------------------------------------------------

FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>```+|~~~+)\s*(?P<language>[\w.+-]*)")
LEFT_OUT = re.compile(r"<!--\s*not executed:\s*(?P<reason>.*?)\s*-->$")
OVERLOOKED = {"py", "python3", "pycon", "Python"}


def python_blocks(text):
    """(number of the line before the code, code, reason not to run it or None) of every ```python block."""
    lines = text.splitlines()
    above, start = "", 0
    while start < len(lines):
        fence = FENCE.match(lines[start])
        if not fence:
            above = lines[start].strip() or above
            start += 1
            continue
        end = start + 1
        while end < len(lines) and lines[end].strip() != fence["fence"]:
            end += 1
        assert end < len(lines), f"line {start + 1}: this block is never closed"
        assert fence["language"] not in OVERLOOKED, f"line {start + 1}: write ```python, so that the block is run"
        if fence["language"] == "python":
            skip = LEFT_OUT.search(above)
            assert not skip or skip["reason"], f"line {start + 1}: say why the block is not executed"
            yield start + 1, textwrap.dedent("\n".join(lines[start + 1 : end])), skip and skip["reason"]
        above, start = "", end + 1


def shown_by(paths):
    """Parameters of tests that run what files show: all are slow, but for the README."""
    for path in paths:
        yield pytest.param(path, id=label(path), marks=[] if path.name == "README.md" else [pytest.mark.slow])


@pytest.fixture
def shown_code(tmp_path, monkeypatch):
    """A folder with the examples alone, no window, and settings of JAX and rules of moments as they were."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    before = dict(jax.config.values)
    rules = dict(RULES)
    yield
    # An example that registers a rule shows how; other tests in this process go on with the package's own.
    RULES.clear()
    RULES.update(rules)
    after = dict(jax.config.values)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
    for key in before:
        if before[key] != after[key]:
            jax.config.update(key, before[key])
    assert after == before, "an example changed the settings of JAX"


@pytest.mark.core
@pytest.mark.usefixtures("shown_code")
@pytest.mark.parametrize("path", list(shown_by(SOURCES)))
def test_examples_of_docstrings_run(path):
    """Examples see the names of their module, and nothing that another docstring defined."""
    module = module_of(path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report = io.StringIO()
    for test in doctest.DocTestFinder().find(module, module.__name__):
        runner.run(test, out=report.write)
    assert runner.summarize(verbose=False).failed == 0, report.getvalue()


# How healthy a chain of a few hundred draws is differs by machine, as its rounding does.
@pytest.mark.core
@pytest.mark.filterwarnings("ignore::numpyro_bnn.metrics.HealthWarning")
@pytest.mark.usefixtures("shown_code")
@pytest.mark.parametrize(
    "page", list(shown_by([ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "howto").glob("*.md"))]))
)
def test_blocks_of_page_run(page):
    """The blocks of one page share their names, in the order of the page."""
    names = {"__name__": "__main__"}
    for line, code, reason in python_blocks(page.read_text()):
        if reason is None:  # the leading newlines make a traceback show the line of the page
            exec(compile("\n" * line + code + "\n", str(page), "exec"), names)
    assert page.name != "README.md" or len(names) > 5  # it shows code


def test_blocks_are_found():
    page = """text
        ```python
        a = 1
        ```
        ```bash
        python
        ```
        <!-- not executed: needs an accelerator -->

        ```python
        b
        ```
        - item
            ~~~python
            if c:
                c = 2
            ~~~
    """
    blocks = [(2, "a = 1", None), (10, "b", "needs an accelerator"), (14, "if c:\n    c = 2", None)]
    assert list(python_blocks(page)) == blocks
    wrong = {
        "never closed": "```python\na = 1",
        "write ```python": "```py\na = 1\n```",
        "say why": "<!-- not executed: -->\n```python\na = 1\n```",
    }
    for fault, text in wrong.items():
        with pytest.raises(AssertionError, match=fault):
            list(python_blocks(text))


# -- links and tables of contents ----------------------------------------------------------------------------

LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def prose(text):
    """The page without its blocks of code, which may hold what looks like a link or a heading."""
    return re.sub(r"^(```+|~~~+)(?!\{).*?^\1\s*$", "", text, flags=re.M | re.S)


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


def test_links_resolve():
    broken = {label(path): list(broken_links(path, path.read_text())) for path in MARKDOWN}
    assert {name: links for name, links in broken.items() if links} == {}
    text = "# A title: `x`\n[a](models.md) [b](absent.md)\n[c](#a-title-x) [d](models.md#absent) [e](https://a.b)\n"
    links = list(broken_links(DOCS / "page.md", text + "```bash\n[f](gone.md)\n```\n"))
    assert (links[0], links[-1]) == ("](absent.md): no such file", "](models.md#absent): no such heading")


def entries(path):
    """Pages that the tables of contents of a page name."""
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", path.read_text(), flags=re.M | re.S):
        lines = [line.strip() for line in block.splitlines() if line.strip() and not line.startswith(":")]
        yield from ((path.parent / f"{line}.md").resolve() for line in lines)


def test_every_page_is_in_one_table_of_contents():
    named = [entry for page in PAGES for entry in entries(page)]
    assert sorted(named) == [page for page in PAGES if page != DOCS / "index.md"]


def test_files_on_the_way_are_files_of_the_package():
    """The table of contributing.md that `docs/make_ways.py` writes: as many files as it says, and all there."""
    text = (DOCS / "contributing.md").read_text()
    table = text.partition("files of ways: begin -->\n")[2].partition("<!--")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == 5
    for _, count, listed in rows:
        assert len(listed.split(", ")) == int(count)
        assert [name for name in listed.split(", ") if not (ROOT / NAME / name).is_file()] == []


# -- references ----------------------------------------------------------------------------------------------

ROLE = re.compile(r":(class|func|meth|attr|mod|data|obj|exc):`~?([\w.]+)`")
MYST_ROLE = re.compile(r"\{py:(\w+)\}`~?([\w.]+)`")


def reached(value, names):
    """The attribute of an attribute, or None."""
    for name in names:
        value = getattr(value, name, None)
    return value


def exists(dotted, *spaces):
    """Whether a dotted name can be reached from one of the namespaces, or imported."""
    names = dotted.split(".")
    for space in spaces:
        if hasattr(space, names[0]):
            return reached(space, names) is not None
    for cut in range(len(names), 0, -1):
        try:
            module = importlib.import_module(".".join(names[:cut]))
        except ImportError:
            continue
        return reached(module, names[cut:]) is not None
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
    module = module_of(path)
    room = importlib.import_module(".".join(module.__name__.split(".")[:2]))
    for text, classes in docstrings(ast.parse(path.read_text())):
        around = [getattr(module, name) for name in classes if hasattr(module, name)]
        for role, name in ROLE.findall(text):
            if not exists(name, *around, module, room, numpyro_bnn, builtins):
                yield f":{role}:`{name}`"


def test_references_exist():
    unknown = {label(path): list(unknown_names(path)) for path in SOURCES}
    for path in MARKDOWN:
        unknown[label(path)] = [name for _, name in MYST_ROLE.findall(path.read_text()) if not exists(name)]
    assert {name: names for name, names in unknown.items() if names} == {}
    assert exists("numpyro_bnn.infer.SGLD.dynamics")
    assert not exists("numpyro_bnn.infer.SGLDD")
    assert not exists("infer.SGLDD", numpyro_bnn)
    tree = ast.parse('class A:\n    """x :meth:`f`"""\n    def f(self):\n        """y"""\n')
    assert list(docstrings(tree)) == [("x :meth:`f`", ["A"]), ("y", ["A"])]


def test_every_room_is_in_the_reference():
    for room in ROOMS:
        page = (DOCS / "api" / f"{room}.md").read_text()
        assert f".. automodule:: {NAME}.{room}\n   :members:" in page, room


def test_figures_of_choosing_stand_on_the_pages_it_cites():
    figure = re.compile(r"(?<![\w.])-?\d+\.\d{2,}(?!\w)")
    for section in re.split(r"^## .*$", (DOCS / "choosing.md").read_text(), flags=re.M)[1:]:
        cited = "".join((DOCS / match[1]).read_text() for match in LINK.finditer(section))
        assert set(figure.findall(section)) <= set(figure.findall(cited))


# -- pages of examples, and the site ---------------------------------------------------------------------------

EXAMPLES = sorted(
    path.stem for path in (ROOT / "examples").glob("*.py") if path.stem not in ("shared", "loaders", "__init__")
)
ONE_FIGURE, ALL_FIGURES = 150_000, 1_500_000  # bytes


def make_examples():
    """The names of docs/make_examples.py."""
    spec = importlib.util.spec_from_file_location("make_examples", DOCS / "make_examples.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_of_each_example_shows_a_run_of_it():
    """Of the command that the table holds, which the script understands, with a figure at least."""
    assert sorted(path.stem for path in (DOCS / "examples").glob("*.md")) == sorted([*EXAMPLES, "index"])
    made = make_examples()
    assert sorted(made.RUNS) == EXAMPLES
    for name in EXAMPLES:
        assert f"```{{example}} {name}\n```" in (DOCS / "examples" / f"{name}.md").read_text()
        first, *printed = (DOCS / "figures" / f"{name}.txt").read_text().splitlines()
        assert first == f"$ {made.command_of(name)}"
        assert len(printed) > 3
        importlib.import_module(f"examples.{name}").parse(made.RUNS[name].split())
        assert list((DOCS / "figures").glob(f"{name}*.png"))
    figures = list((DOCS / "figures").iterdir())
    assert max(path.stat().st_size for path in figures) < ONE_FIGURE
    assert sum(path.stat().st_size for path in figures) < ALL_FIGURES
    others = [path.name for path in figures if not path.name.startswith(tuple(EXAMPLES))]
    assert others == ["uci.png"]  # drawn with the tables of the evidence


ELSEWHERE = {"numpyro_bnn.infer.schedules"}  # the page of `sgmcmc` shows this module, under its own name


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path):
    """As `make docs` does, which needs the extra `docs`; equations are MathML, so TeX that is wrong is a warning."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    command += ["-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert built.returncode == 0, built.stderr
    for page in PAGES:
        assert (tmp_path / "html" / page.relative_to(DOCS)).with_suffix(".html").is_file()
    for room in ROOMS:
        reference = (tmp_path / "html" / "api" / f"{room}.html").read_text()
        names = [f"{NAME}.{room}.{name}" for name in importlib.import_module(f"{NAME}.{room}").__all__]
        shown = {name for name in names if f'id="{name}"' in reference or f'id="module-{name}"' in reference}
        assert set(names) - shown - ELSEWHERE == set()
    assert "<math" in (tmp_path / "html" / "api" / "infer.html").read_text()
    sources = "".join(path.read_text() for path in (tmp_path / "html" / "examples").glob("*.html"))
    assert sources.count("<img") >= len(EXAMPLES)
