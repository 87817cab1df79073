"""The pages: their code runs, links and references lead somewhere, the site builds."""

import ast
import builtins
import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import json
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import unquote

import jax
import pytest
from options import parameters

import numpyro_bnn
from numpyro_bnn.moments.registry import RULES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAME = "numpyro_bnn"
README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))
MARKDOWN = [README, ROOT / "CHANGELOG.md", *PAGES]
SOURCES = [
    path for path in sorted((ROOT / NAME).rglob("*.py")) if path.stem != "__main__"
]
ROOMS = sorted(
    module.name
    for module in pkgutil.iter_modules(numpyro_bnn.__path__)
    if module.name[0] != "_"
)


def label(path):
    return str(path.relative_to(ROOT))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return importlib.import_module(
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    )


def reached(value, names):
    """The attribute of an attribute, or None."""
    for name in names:
        value = getattr(value, name, None)
    return value


# -- code that pages and docstrings show -----------------------------------------------

FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>```+|~~~+)\s*(?P<language>[\w.+-]*)")
LATER = "executed by make test-all"
MARK = re.compile(rf"<!--\s*(?P<way>not executed|{LATER}):\s*(?P<reason>.*?)\s*-->$")
OVERLOOKED = {"py", "python3", "pycon", "Python"}


def python_blocks(text):
    """(number of the line before the code, code, ``MARK`` that keeps it from running or
    None) of every block.
    """
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
        assert fence["language"] not in OVERLOOKED, (
            f"line {start + 1}: write ```python, so that the block is run"
        )
        if fence["language"] == "python":
            mark = MARK.search(above)
            assert not mark or mark["reason"], (
                f"line {start + 1}: say why the block is not executed"
            )
            yield (
                start + 1,
                textwrap.dedent("\n".join(lines[start + 1 : end])),
                mark and mark["way"],
            )
        above, start = "", end + 1


@pytest.fixture
def shown_code(tmp_path, monkeypatch):
    """A folder with the examples alone, no window, and unchanged settings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    before = dict(jax.config.values)
    rules = dict(RULES)
    yield
    # An example that registers a rule shows how; other tests in this process go on with
    # the package's own.
    RULES.clear()
    RULES.update(rules)
    after = dict(jax.config.values)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
    for key in before:
        if before[key] != after[key]:
            jax.config.update(key, before[key])
    assert after == before, "an example changed the settings of JAX"


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.usefixtures("shown_code")
@pytest.mark.parametrize("room", [NAME, *ROOMS])
def test_examples_of_docstrings_run(room):
    """Examples see the names of their module alone."""
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner, report = doctest.DocTestRunner(optionflags=options), io.StringIO()
    for path in SOURCES:
        parts = path.relative_to(ROOT / NAME).with_suffix("").parts
        of_room = parts[0] if parts[0] in ROOMS else NAME
        extra = path.stem == "skpro" and importlib.util.find_spec("skpro") is None
        if of_room == room and ">>>" in path.read_text() and not extra:
            module = module_of(path)
            for test in doctest.DocTestFinder().find(module, module.__name__):
                runner.run(test, out=report.write)
    assert runner.summarize(verbose=False).failed == 0, report.getvalue()


def run_blocks(page, ways):
    """The blocks of one page share their names, in the order of the page."""
    names = {"__name__": "__main__"}
    for line, code, way in python_blocks(page.read_text()):
        if way in ways:
            # the leading newlines make a traceback show the line of the page
            exec(compile("\n" * line + code + "\n", str(page), "exec"), names)
    return names


# How healthy a chain of a few hundred draws is differs by machine, as its rounding
# does.
UNHEALTHY = pytest.mark.filterwarnings("ignore::numpyro_bnn.metrics.HealthWarning")


@UNHEALTHY
@pytest.mark.core
@pytest.mark.usefixtures("shown_code")
def test_blocks_of_the_readme_run():
    """What `make test-all` runs, the test below, has names at least that exist."""
    later = [code for _, code, way in python_blocks(README.read_text()) if way == LATER]
    used = re.findall(r"\bbnn((?:\.\w+)+)", "\n".join(later))
    assert used
    assert [
        name for name in used if reached(numpyro_bnn, name[1:].split(".")) is None
    ] == []
    assert len(run_blocks(README, {None})) > 5


@UNHEALTHY
@pytest.mark.slow
@pytest.mark.core
@pytest.mark.usefixtures("shown_code")
@pytest.mark.parametrize(
    "page",
    [README, *sorted(DOCS.glob("*.md")), *sorted((DOCS / "howto").glob("*.md"))],
    ids=label,
)
def test_blocks_of_page_run(page):
    run_blocks(page, {None, LATER})


# -- what pages say, links and tables of contents --------------------------------------

LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def prose(text):
    """The page without its blocks of code, which may look like links."""
    block = re.compile(r"^(```+|~~~+)(\{)?.*?^\1\s*$", flags=re.M | re.S)
    return block.sub(lambda found: found[0] if found[2] else "", text)


def anchors(text):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+\s+(.*?)\s*$", prose(text), flags=re.M)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


def broken_links(path, text):
    """Links of a page to files or headings that are not there."""
    for match in LINK.finditer(prose(text)):
        target = (path.parent / unquote(match[1])).resolve() if match[1] else path
        if not target.is_file():
            yield f"{match[0]}: no such file"
        elif match[2] and match[2] not in anchors(target.read_text()):
            yield f"{match[0]}: no such heading"


def test_links_resolve():
    broken = {
        label(path): list(broken_links(path, path.read_text())) for path in MARKDOWN
    }
    assert {name: links for name, links in broken.items() if links} == {}


def entries(path):
    """Pages that the tables of contents of a page name."""
    for block in re.findall(
        r"^```\{toctree\}\n(.*?)^```", path.read_text(), flags=re.M | re.S
    ):
        lines = [
            line.strip()
            for line in block.splitlines()
            if line.strip() and not line.startswith(":")
        ]
        yield from ((path.parent / f"{line}.md").resolve() for line in lines)


def test_every_page_is_in_one_table_of_contents():
    named = [entry for page in PAGES for entry in entries(page)]
    assert sorted(named) == [page for page in PAGES if page != DOCS / "index.md"]


# -- length ----------------------------------------------------------------------------

# Words by layer, as the table of contents of the site names them: everything but what
# scripts write, the API and the changes. Whoever adds a paragraph removes another.
MOST_WORDS = {"Use": 15_500, "Understand": 6_900, "Evidence": 3_250, "Reference": 2_350}
PAGE_WORDS = 1_200  # of a page of the layer "Understand"
NUMBERS, SEMICOLONS = 2, 4  # per 100 words, per 1,000 words of prose
MADE = re.compile(
    r"<!-- (\w+) of (.*?): begin -->.*?<!-- \1 of \2: end -->", flags=re.S
)
NOT_COUNTED = {"changelog.md", "what_works.md"}


def pages_by_layer():
    """The README and the pages of the site, by the caption above them."""
    index = (DOCS / "index.md").read_text()
    toctrees = re.findall(
        r"^```\{toctree\}\n:caption: (\w+)\n(.*?)^```", index, re.M | re.S
    )
    layers = {"Use": [README, DOCS / "index.md"]}
    for caption, lines in toctrees:
        pages = layers.setdefault(caption, [])
        for name in re.findall(r"^\w\S*$", lines, flags=re.M):
            page = DOCS / f"{name}.md"
            pages += [page, *entries(page)]
    return {
        caption: [
            page
            for page in pages
            if page.name not in NOT_COUNTED and "api" not in page.parts
        ]
        for caption, pages in layers.items()
    }


def words(text):
    """Code included, but not the signs of Markdown between them."""
    return [word for word in text.split() if re.search(r"[^\W_]", word)]


def read_aloud(text):
    """Prose: without code, tables, links and comments."""
    block = re.compile(r"^(```+|~~~+).*?^\1\s*$", flags=re.M | re.S)
    lines = [line for line in block.sub("", text).splitlines() if line[:1] != "|"]
    spoken = re.sub(r"<!--.*?-->|`[^`]*`", "code", "\n".join(lines), flags=re.S)
    return re.sub(r"\]\([^)]*\)", "]", spoken)


def numbers(spoken):
    return re.findall(r"(?<![\w.])[-+]?\d[\d,.]*%?(?!\w)", spoken)


def test_pages_keep_to_their_number_of_words():
    layers = pages_by_layer()
    assert set(layers) == set(MOST_WORDS)
    assert sum(MOST_WORDS.values()) <= 28_000
    counts = {}
    for layer, pages in layers.items():
        texts = {page: MADE.sub("", page.read_text()) for page in pages}
        lengths = {label(page): len(words(text)) for page, text in texts.items()}
        counts[layer] = sum(lengths.values())
        spoken = {page: read_aloud(text) for page, text in texts.items()}
        prose_words = sum(len(words(text)) for text in spoken.values())
        semicolons = sum(text.count(";") for text in spoken.values())
        assert 1000 * semicolons <= SEMICOLONS * prose_words, layer
        if layer == "Understand":
            long = {page: n for page, n in lengths.items() if n > PAGE_WORDS}
            assert long == {}
        if layer == "Use":
            dense = {}
            for page, text in spoken.items():
                count = len(numbers(text))
                if count > 2 and 100 * count > NUMBERS * len(words(text)):
                    dense[label(page)] = numbers(text)
            assert dense == {}
    over = {layer: n for layer, n in counts.items() if n > MOST_WORDS[layer]}
    assert over == {}


# -- references ------------------------------------------------------------------------

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|obj|exc):`~?([\w.]+)`")
MYST_ROLE = re.compile(r"\{py:\w+\}`~?([\w.]+)`")


def exists(dotted, *spaces):
    """Whether a dotted name can be reached from one of the namespaces, or imported."""
    names = dotted.split(".")
    if any(reached(space, names) is not None for space in spaces):
        return True
    for cut in range(len(names), 0, -1):
        try:
            module = importlib.import_module(".".join(names[:cut]))
        except ImportError:
            continue
        return reached(module, names[cut:]) is not None
    return False


def unknown_names(path):
    """References to names that file, classes, room and package lack."""
    if path.stem == "skpro" and importlib.util.find_spec("skpro") is None:
        return []
    module = module_of(path)
    room = importlib.import_module(".".join(module.__name__.split(".")[:2]))
    text = path.read_text()
    classes = [
        getattr(module, node.name, None)
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    ]
    return [
        name
        for name in ROLE.findall(text)
        if not exists(name, *classes, module, room, numpyro_bnn, builtins)
    ]


INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
OF_A_ROOM = re.compile(
    rf"(?<![\w./`])(?:bnn\.)?((?:{'|'.join(ROOMS)})(?:\.[A-Za-z]\w*)+)"
)
OF_THE_PACKAGE = re.compile(r"(?<![\w.])bnn\.(\w+(?:\.\w+)*)")
FORMER = [ROOT / "CHANGELOG.md", DOCS / "migration.md"]  # they have former names


def shown_names(text):
    """Names of this package in the inline code of a page, as `infer.SGLD`."""
    for code in INLINE.findall(prose(text)):
        yield from OF_A_ROOM.findall(code)
        yield from OF_THE_PACKAGE.findall(code)


def test_names_in_the_prose_of_pages_exist():
    """Also those in tables of what to write in the place of another package's names."""
    gone = {}
    for path in set(MARKDOWN) - set(FORMER):
        names = set(shown_names(path.read_text()))
        missing = [name for name in sorted(names) if not exists(f"{NAME}.{name}")]
        if missing:
            gone[label(path)] = missing
    assert gone == {}


def unknown_keywords(parsed, names):
    """Keywords in code that a call of this package does not take."""
    for call in ast.walk(parsed):
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        first, *rest = name.split(".")
        called = reached(names.get(first), rest)
        ours = str(getattr(called, "__module__", "")).startswith(NAME)
        if not (ours and callable(called)):
            continue
        known = parameters(called)
        passed_on = any(option.kind is option.VAR_KEYWORD for option in known.values())
        if passed_on and not isinstance(called, type):
            continue
        keywords = {keyword.arg for keyword in call.keywords} - {None}
        yield from (f"{name}({word}=)" for word in sorted(keywords - set(known)))


def test_keywords_in_the_prose_of_pages_exist():
    unknown, names = {}, vars(numpyro_bnn) | {"bnn": numpyro_bnn}
    for path in set(MARKDOWN) - set(FORMER):
        for code in INLINE.findall(prose(path.read_text())):
            with contextlib.suppress(SyntaxError):
                if wrong := list(unknown_keywords(ast.parse(code), names)):
                    unknown[f"{label(path)}: {code}"] = wrong
    assert unknown == {}
    code = "priors.Normal(1.0, bias=2.0, bias_scale=0.1)"
    wrong = list(unknown_keywords(ast.parse(code), names))
    assert wrong == ["priors.Normal(bias=)"]


def imports_of_package(parsed):
    """What a script has of the package, also in functions: name -> value, or None."""
    imported = {}
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            packages = [alias for alias in node.names if alias.name == NAME]
            imported |= {alias.asname or NAME: numpyro_bnn for alias in packages}
        elif isinstance(node, ast.ImportFrom) and node.module.startswith(NAME):
            room = importlib.import_module(node.module)
            for alias in node.names:
                imported[alias.asname or alias.name] = getattr(room, alias.name, None)
    return imported


def test_names_and_keywords_in_scripts_exist():
    """Most benchmarks are not run by tests: their calls of this package are read."""
    unknown = {}
    for path in (ROOT / "examples").rglob("*.py"):
        parsed = ast.parse(path.read_text())
        names = imports_of_package(parsed)
        unknown |= {name: label(path) for name in names if names[name] is None}
        unknown |= {word: label(path) for word in unknown_keywords(parsed, names)}
        attributes = [n for n in ast.walk(parsed) if isinstance(n, ast.Attribute)]
        for name in {ast.unparse(node) for node in attributes}:
            first, *rest = name.split(".")
            value = names.get(first)
            is_room = inspect.ismodule(value) and value.__name__.startswith(NAME)
            if is_room and "(" not in name and reached(value, rest) is None:
                unknown[name] = label(path)
    assert unknown == {}


def test_references_exist():
    unknown = {label(path): unknown_names(path) for path in SOURCES}
    for path in MARKDOWN:
        unknown[label(path)] = [
            name for name in MYST_ROLE.findall(path.read_text()) if not exists(name)
        ]
    assert {name: names for name, names in unknown.items() if names} == {}
    assert exists("numpyro_bnn.infer.SGLD.dynamics")
    assert not exists("infer.SGLDD", numpyro_bnn)


def test_every_room_is_in_the_reference():
    for room in ROOMS:
        page = (DOCS / "api" / f"{room}.md").read_text()
        assert f".. automodule:: {NAME}.{room}\n   :members:" in page, room


# -- pages of examples, and the site ---------------------------------------------------

EXAMPLES = sorted(
    path.stem
    for path in (ROOT / "examples").glob("*.py")
    if path.stem not in ("shared", "loaders", "__init__")
)
ONE_FIGURE, ALL_FIGURES, ALL_NOTEBOOKS = 150_000, 1_500_000, 1_000_000  # bytes


def script_of_docs(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_page_of_each_example_shows_a_run_of_it():
    """Of the command in the table, which the script understands."""
    assert sorted(path.stem for path in (DOCS / "examples").glob("*.md")) == sorted(
        [*EXAMPLES, "index"]
    )
    made = script_of_docs("make_examples")
    assert sorted(made.RUNS) == EXAMPLES
    for name in EXAMPLES:
        assert (
            f"```{{example}} {name}\n```"
            in (DOCS / "examples" / f"{name}.md").read_text()
        )
        first, *printed = (DOCS / "figures" / f"{name}.txt").read_text().splitlines()
        assert first == f"$ {made.command_of(name)}"
        assert len(printed) > 3
        importlib.import_module(f"examples.{name}").parse(made.RUNS[name].split())
        assert list((DOCS / "figures").glob(f"{name}*.png"))
    sizes = [path.stat().st_size for path in (DOCS / "figures").iterdir()]
    assert max(sizes) < ONE_FIGURE
    assert sum(sizes) < ALL_FIGURES


def test_notebooks_are_their_pages_and_were_run(monkeypatch):
    """Where this fails: `python docs/make_notebooks.py`."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = script_of_docs("make_notebooks")
    pages = {Path(page).name: page for page in made.PAGES}
    texts = {path.stem: path.read_text() for path in made.NOTEBOOKS.glob("*.ipynb")}
    assert set(texts) == set(pages)
    assert sum(map(len, texts.values())) < ALL_NOTEBOOKS
    for name, text in texts.items():
        cells = json.loads(text)["cells"]
        assert [(cell["cell_type"], cell["source"]) for cell in cells] == [
            (cell["cell_type"], cell["source"]) for cell in made.cells_of(pages[name])
        ], f"make the notebook {name} again"
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        counts = [cell["execution_count"] for cell in code]
        assert counts == [*range(1, len(code) + 1)]
        outputs = [output for cell in code for output in cell["outputs"]]
        printed = "".join(output.get("text", "") for output in outputs)
        assert printed
        assert re.findall(r"(?<![\w:/])/\w+/", printed) == [], "a folder is shown"
        texts_of_cells = "\n\n".join(
            cell["source"] for cell in cells if cell["cell_type"] == "markdown"
        )
        notebook = made.NOTEBOOKS / f"{name}.ipynb"
        assert list(broken_links(notebook, texts_of_cells)) == []


# the page of `sgmcmc` shows this module, under its own name
ELSEWHERE = {"numpyro_bnn.infer.schedules"}


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path):
    """As `make docs` does, which needs the extra `docs`."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    command += ["-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert built.returncode == 0, built.stderr
    for page in PAGES:
        assert (
            (tmp_path / "html" / page.relative_to(DOCS)).with_suffix(".html").is_file()
        )
    for room in ROOMS:
        reference = (tmp_path / "html" / "api" / f"{room}.html").read_text()
        names = [
            f"{NAME}.{room}.{name}"
            for name in importlib.import_module(f"{NAME}.{room}").__all__
        ]
        shown = {
            name
            for name in names
            if f'id="{name}"' in reference or f'id="module-{name}"' in reference
        }
        assert set(names) - shown - ELSEWHERE == set()
    assert "<math" in (tmp_path / "html" / "api" / "infer.html").read_text()
    sources = "".join(
        path.read_text() for path in (tmp_path / "html" / "examples").glob("*.html")
    )
    assert sources.count("<img") >= len(EXAMPLES)
