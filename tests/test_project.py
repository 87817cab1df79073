"""The structure of the project: who imports whom, what is documented, what lies in the tree, what runs as shown."""

import ast
import doctest
import importlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from faults.planted import read_faults

from numpyro_bnn.moments import registry

pytestmark = pytest.mark.core

ROOT = Path(__file__).resolve().parent.parent
NAME = "numpyro_bnn"
FILES = sorted((ROOT / NAME).rglob("*.py"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [module_name(path) for path in FILES if path.stem != "__main__"]

# ------------------------------------------------------------------------------------------------- imports

# Room -> the other rooms it may import. Modules called _* at the top may be imported by every room, and import
# only one another. The package's own __init__ and __main__ may import anything.
ROOMS = {
    "estimators": {
        "results",
        "metrics",
        "models",
        "networks",
        "infer",
        "guides",
        "symmetry",
        "program",
        "priors",
        "nn",
        "datasets",
    },
    "plots": {"results", "metrics"},
    "results": {"runs", "program", "infinite", "networks", "priors", "nn", "metrics"},
    "runs": {"infer", "guides", "program"},
    "metrics": set(),
    "guides": {"program", "moments", "priors", "nn"},
    "infer": {"program", "sgmcmc", "symmetry"},
    "models": {"program", "networks", "priors", "nn"},
    "networks": {"nn", "priors"},
    "priors": {"nn"},
    "symmetry": {"program", "nn"},
    "program": set(),
    "moments": set(),
    "sgmcmc": set(),
    "infinite": {"nn", "priors"},
    "nn": set(),
    "datasets": set(),
}
# Third-party package -> the only room that may import it: one file (or room) at each border.
BORDERS = {"arviz": "_arviz", "xarray": "_arviz", "matplotlib": "plots", "sklearn": "estimators"}
# Rooms that are pure functions of arrays.
WITHOUT_NUMPYRO = {"sgmcmc", "moments"}
IMPORT_CALLS = ("__import__", "import_module", "importlib.import_module")


def imports_of(source, module, is_package):
    """Every absolute module name that the source imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            yield from [str(node.args[0].value)] if ast.unparse(node.func) in IMPORT_CALLS else []


def import_faults(source, module, is_package=False):
    """What is wrong with the imports of one module, as sentences."""
    room = [*module.split("."), ""][1]
    if room in ("", "__main__"):
        return []
    if not room.startswith("_") and room not in ROOMS:
        return [f"room {room!r} is unknown: add a row to ROOMS that says which rooms it may import"]
    faults = []
    for imported in imports_of(source, module, is_package):
        top, _, rest = imported.partition(".")
        target = rest.split(".")[0]
        if BORDERS.get(top, room) != room:
            faults.append(f"{imported}: only {BORDERS[top]} may import {top}")
        elif top == "numpyro" and room in WITHOUT_NUMPYRO:
            faults.append(f"{imported}: {room} knows no NumPyro")
        elif top == NAME and target not in (room, "__version__") and not target.startswith("_"):
            allowed = ROOMS.get(room, set())
            if target not in allowed:
                faults.append(f"{imported}: {room} may import {sorted(allowed) or 'no other room'} and _* modules")
    return faults


def faults_of_files(faults):
    """The faults that a function finds in each file of the package; files without any are left out."""
    found = {str(path.relative_to(ROOT)): list(faults(path)) for path in FILES}
    return {name: lacks for name, lacks in found.items() if lacks}


def test_imports_point_down_only():
    assert (
        faults_of_files(lambda path: import_faults(path.read_text(), module_name(path), path.stem == "__init__"))
        == {}
    )


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("attic.a", "", "room 'attic' is unknown"),
        ("nn.a", "import numpyro_bnn.priors", "nn may import no other room"),
        ("nn.a", "from numpyro_bnn import priors", "nn may import no other room"),
        ("nn.a", "import numpyro_bnn", "nn may import no other room"),
        ("nn.a", "from ..priors import Normal", "nn may import no other room"),
        ("nn.a", "def f():\n    from numpyro_bnn.results import fit", "nn may import no other room"),
        ("nn.a", "import importlib\nimportlib.import_module('numpyro_bnn.priors')", "nn may import no other room"),
        ("_checks", "from numpyro_bnn.nn import Dense", "_checks may import no other room"),
        ("results.export", "from arviz import summary", "only _arviz may import arviz"),
        ("results.export", "import xarray as xr", "only _arviz may import xarray"),
        ("metrics.scores", "import matplotlib.pyplot as plt", "only plots may import matplotlib"),
        ("nn.a", "def f():\n    import sklearn.datasets", "only estimators may import sklearn"),
        ("sgmcmc.engine", "from numpyro.util import fori_collect", "sgmcmc knows no NumPyro"),
    ],
)
def test_wrong_imports_are_seen(module, source, fault):
    assert any(fault in found for found in import_faults(source, f"{NAME}.{module}"))


def test_right_imports_pass():
    source = "from numpyro_bnn import _checks, __version__\nfrom .base import A\nfrom ..nn import B\nimport numpyro"
    assert import_faults(source, f"{NAME}.priors.a") == []
    assert import_faults("from . import base", f"{NAME}.priors", is_package=True) == []
    assert import_faults("import numpyro_bnn.plots", NAME, is_package=True) == []


def circle(below):
    """The names that import one another, given the set that each imports; empty if there is no circle."""
    left = dict(below)
    while lowest := [name for name, names in left.items() if not names & left.keys()]:
        for name in lowest:
            del left[name]
    return sorted(left)


def imported_files(sources):
    """Module -> the modules of ours it imports, type-only imports and those inside functions included.

    A room's ``__init__`` stands for what it re-exports; its submodules may not import it.
    """
    below = {}
    for module, (source, is_package) in sources.items():
        names = set()
        for imported in imports_of(source, module, is_package):
            while imported not in sources and "." in imported:
                imported = imported.rpartition(".")[0]
            names.add(imported)
        below[module] = names & sources.keys() - {module, NAME}
    return below


def test_rooms_have_no_circle():
    assert circle(ROOMS) == []


def test_files_have_no_circle():
    sources = {module_name(path): (path.read_text(), path.stem == "__init__") for path in FILES}
    assert circle(imported_files(sources)) == []


def test_circles_are_seen():
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from numpyro_bnn.nn.a import A"
    sources = {f"{NAME}.nn.a": ("from numpyro_bnn.nn.b import B", False), f"{NAME}.nn.b": (typed, False)}
    assert circle(imported_files(sources)) == [f"{NAME}.nn.a", f"{NAME}.nn.b"]
    inside = {f"{NAME}.nn.a": ("def f():\n    from . import b", False), f"{NAME}.nn.b": ("import numpyro", False)}
    assert imported_files(inside) == {f"{NAME}.nn.a": {f"{NAME}.nn.b"}, f"{NAME}.nn.b": set()}
    assert circle(imported_files(inside)) == []


PROBE = """
import importlib, json, sys, warnings
import jax, numpy, numpyro, numpyro.infer.autoguide
optional = ("sklearn", "flax", "equinox", "blackjax", "flowjax")
slow = ("arviz", "xarray", "pandas", "scipy.stats", "scipy.optimize", "optax", "matplotlib")
for name in optional + slow:
    sys.modules[name] = None                                      # an import of it now fails
def state():
    found = {key: repr(value) for key, value in jax.config.values.items()}
    found["warning filters"] = repr(warnings.filters)
    found["numpy.random"] = repr(numpy.random.get_state())
    found["numpy error state"] = repr(numpy.geterr())
    return found
before = state()
for module in sys.argv[1:]:
    importlib.import_module(module)
after = state()
changed = sorted(key for key in before if before[key] != after[key])
jax.config.update("jax_num_cpu_devices", 3)                       # refused once a backend has started
print(json.dumps({"changed": changed, "devices": jax.local_device_count("cpu")}))
"""


def test_import_is_quick_changes_nothing_global_and_needs_no_optional_package():
    """A user may still choose platform, devices and precision after importing this package."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    modules = [module for module in MODULES if module.split(".")[1:2] not in (["plots"], ["estimators"])]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *modules], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"changed": [], "devices": 3}


# ------------------------------------------------------------------------------------------- documentation

# Exported name -> the exported name whose example shows it: types that users receive rather than build.
EXAMPLE_ELSEWHERE = {"networks.RandomNetwork": "networks.random_network", "nn.ForwardContext": "nn.Layer"}


def exports():
    """(room, name) for every name that a room, or the package itself, offers."""
    rooms = {".".join(module.split(".")[:2]) for module in MODULES}
    for room in sorted(rooms):
        if not room.split(".")[-1].startswith("_"):
            for name in getattr(importlib.import_module(room), "__all__", []):
                yield room, name


def needs_docstring(value):
    ours = str(getattr(value, "__module__", "")).split(".")[0] == NAME
    return ours and (inspect.isclass(value) or inspect.isroutine(value) or hasattr(value, "__wrapped__"))


NO_EXAMPLE = "no example (>>>) in the docstring"


def doc_faults(value):
    """What the docstring of a class or function lacks; named tuples are shown by the functions that return them."""
    doc = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    generated = inspect.isclass(value) and str(doc).startswith(f"{value.__name__}(")  # NamedTuple, dataclass
    if not doc or generated:
        return ["no docstring"]
    named_tuple = inspect.isclass(value) and issubclass(value, tuple) and hasattr(value, "_fields")
    return [] if ">>>" in doc or named_tuple else [NO_EXAMPLE]


def module_faults(path):
    """What a file does not say of itself, or says wrongly."""
    module = importlib.import_module(module_name(path))
    names = getattr(module, "__all__", [])
    if not ast.get_docstring(ast.parse(path.read_text())):
        yield "no module docstring"
    if module_name(path).count(".") < 2 and not path.stem.startswith("_") and "__all__" not in vars(module):
        yield "a room that does not say what it offers (__all__)"
    yield from (f"__all__ lists {name}, which does not exist" for name in names if not hasattr(module, name))
    if len(set(names)) != len(names):
        yield "__all__ lists a name twice"


def test_modules_say_what_they_are_and_offer():
    assert faults_of_files(module_faults) == {}


def test_everything_exported_has_an_example():
    found = {}
    for room, name in exports():
        value = getattr(importlib.import_module(room), name)
        if needs_docstring(value):
            found[f"{room}.{name}".removeprefix(f"{NAME}.")] = doc_faults(value)
    faults = {name: lacks for name, lacks in found.items() if lacks}
    for name, shown_by in EXAMPLE_ELSEWHERE.items():
        assert faults.pop(name, None) == [NO_EXAMPLE], f"{name} is gone, undocumented, or has its own example by now"
        assert found.get(shown_by) == [], f"{name} is to be shown by {shown_by}, which has no example"
    assert not faults, "\n".join(f"{name}: {lacks[0]}" for name, lacks in faults.items())


def test_missing_examples_are_seen():
    def bare():
        pass

    def described():
        """Do it."""

    def shown():
        """Do it.

        >>> 1 + 1
        2
        """

    class Child(str):
        pass

    class Pair(NamedTuple):
        left: int

    class Result(NamedTuple):
        """What came out."""

        left: int

    assert [doc_faults(value) for value in (bare, Child, Pair)] == [["no docstring"]] * 3
    assert doc_faults(Result) == []
    assert doc_faults(described) == [NO_EXAMPLE]
    assert doc_faults(shown) == []


@pytest.fixture
def shown_code(tmp_path, monkeypatch):
    """A folder with the examples alone, no window, and settings of JAX and rules of moments as they were."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    before = dict(jax.config.values)
    rules = dict(registry.RULES)
    yield
    # An example that registers a rule shows how; other tests in this process go on with the package's own.
    registry.RULES.clear()
    registry.RULES.update(rules)
    after = dict(jax.config.values)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
    for key in before:
        if before[key] != after[key]:
            jax.config.update(key, before[key])
    assert after == before, "an example changed the settings of JAX"


INFERENCE = re.compile(r"\b(MCMC|SVI)\(|\.run\(|\bfit\(|to_inference_data\(")


def by_cost(paths, label):
    """Parameters of tests that run what files show: those that sample or fit are slow, but for the README."""
    for path in paths:
        lines = path.read_text().splitlines()
        shown = [line for line in lines if path.suffix == ".md" or line.lstrip().startswith((">>>", "..."))]
        slow = INFERENCE.search("\n".join(shown)) and path.name != "README.md"
        yield pytest.param(path, id=label(path), marks=[pytest.mark.slow] if slow else [])


@pytest.mark.usefixtures("shown_code")
@pytest.mark.parametrize("path", list(by_cost([path for path in FILES if path.stem != "__main__"], module_name)))
def test_docstring_examples(path):
    """Examples see the names of their module, and nothing that another docstring defined."""
    name = module_name(path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report = io.StringIO()
    for test in doctest.DocTestFinder().find(importlib.import_module(name), name):
        runner.run(test, out=report.write)
    assert runner.summarize(verbose=False).failed == 0, report.getvalue()


# ------------------------------------------------------------------------------------------------ markdown

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "howto").glob("*.md"))]
FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>```+|~~~+)\s*(?P<language>[\w.+-]*)")
LEFT_OUT = re.compile(r"<!--\s*not executed:\s*(?P<reason>.*?)\s*-->$")
UNSEEN = {"py", "python3", "pycon", "Python"}


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
        assert fence["language"] not in UNSEEN, f"line {start + 1}: write ```python, so that the block is run"
        if fence["language"] == "python":
            skip = LEFT_OUT.search(above)
            assert not skip or skip["reason"], f"line {start + 1}: say why the block is not executed"
            yield start + 1, textwrap.dedent("\n".join(lines[start + 1 : end])), skip and skip["reason"]
        above, start = "", end + 1


# How healthy a chain of a few hundred draws is differs by machine, as its rounding does.
@pytest.mark.filterwarnings("ignore::numpyro_bnn.metrics.HealthWarning")
@pytest.mark.usefixtures("shown_code")
@pytest.mark.parametrize("page", list(by_cost(PAGES, lambda page: page.name)))
def test_blocks_of_page_run(page):
    """The blocks of one page share their names, in the order of the page."""
    names = {"__name__": "__main__"}
    for line, code, reason in python_blocks(page.read_text()):
        if reason is None:  # the leading newlines make a traceback show the line of the page
            exec(compile("\n" * line + code + "\n", str(page), "exec"), names)


def test_readme_shows_code():
    assert any(reason is None for _, _, reason in python_blocks((ROOT / "README.md").read_text()))


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
    assert list(python_blocks(page)) == [
        (2, "a = 1", None),
        (10, "b", "needs an accelerator"),
        (14, "if c:\n    c = 2", None),
    ]


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("```python\na = 1", "never closed"),
        ("```py\na = 1\n```", "write ```python"),
        ("<!-- not executed: -->\n```python\na = 1\n```", "say why"),
    ],
)
def test_wrong_blocks_are_seen(page, fault):
    with pytest.raises(AssertionError, match=fault):
        list(python_blocks(page))


# ------------------------------------------------------------------------------------------------ the tree

TOP = {
    "pyproject.toml",
    "README.md",
    NAME,
    "tests",
    "examples",
    "docs",
    "Makefile",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
}
LOCK = re.compile(
    r"(\.lock|[-.]lock\.(json|ya?ml|toml)|pylock.*\.toml|requirements.*\.txt|constraints.*\.txt)$", re.I
)
# Written so that no pattern matches its own text.
ADDRESSES = re.compile(
    r"https?://files\.|/sim[p]le/|index[-_]url|find[-_]links|python[h]osted|pypi\.org"
    r"|(?<![\w.])/(?:home|root|work)/",
    re.I,
)


def project_files():
    """Files that git tracks or would track; outside a git checkout, all but caches and hidden folders."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        paths = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        paths = [p for p in paths if p.parts[0] in TOP and "__pycache__" not in p.parts]
    return [path for path in paths if (ROOT / path).is_file()]


def test_only_known_entries_at_the_top():
    found = {path.parts[0] for path in project_files()}
    assert {name for name in found if name not in TOP and not name.startswith(".")} == set()
    assert {"pyproject.toml", "README.md", NAME, "tests"} <= found


def test_no_lock_file():
    assert [str(path) for path in project_files() if LOCK.search(path.name)] == []


def test_no_address_of_a_registry_or_of_a_machine():
    found = {}
    for path in project_files():
        text = (ROOT / path).read_bytes().decode(errors="replace")
        if hits := [f"line {text.count(chr(10), 0, hit.start()) + 1}: {hit[0]}" for hit in ADDRESSES.finditer(text)]:
            found[str(path)] = hits
    assert found == {}


@pytest.mark.parametrize("name", ["uv.lock", "poetry.lock", "package-lock.json", "conda-lock.yml", "pylock.toml"])
def test_lock_files_are_seen(name):
    assert LOCK.search(name)
    assert not LOCK.search("block.py")


@pytest.mark.parametrize(
    "parts",
    [("https:", "", "files.host/x"), ("host", "simple", "numpy"), (" ", "home", "me"), ("--index-", "url")],
    ids=["download", "registry", "machine", "option"],
)
def test_addresses_are_seen(parts):
    assert ADDRESSES.search("".join(parts) if len(parts) == 2 else "/".join(parts))
    assert not ADDRESSES.search("see https://arxiv.org/abs/1505.05424, network/work/, a simple/plain case")


# --------------------------------------------------------------------------------------------------- sizes

FILE_LINES, FUNCTION_LINES = 400, 60
BUDGET = {"lines": 24_000, "files": 130}
# Rooms that came after the budget was set: the package with them has a limit of its own.
LATER_ROOMS = (
    "estimators",
    "guides/laplace",
    "infer/ensemble",
    "infer/linear_blocks",
    "infer/linear_fit",
    "priors/pretrained",
    "program/rows",
    "results/folder",
    "runs",
)
BUDGET_WITH_LATER_ROOMS = {"lines": 30_000, "files": 160, "public names": 200}
# Longer files that are one thing.
ONE_THING: set[str] = set()


def long_functions(source, limit=FUNCTION_LINES):
    """Functions longer than the limit, their docstring not counted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            if lines > limit:
                yield f"{node.name}: {lines} lines"


def size_faults(path):
    """What is too long in a file."""
    source = path.read_text()
    name, lines = str(path.relative_to(ROOT / NAME)), len(source.splitlines())
    if (lines > FILE_LINES) != (name in ONE_THING):
        yield f"{lines} lines: ask which two things this file is, and list it in ONE_THING if it is one"
    yield from long_functions(source)


def test_files_and_functions_stay_short():
    assert faults_of_files(size_faults) == {}


def test_the_package_stays_small():
    """What is added is paid for by what goes."""
    names = [name for room, name in exports() if not inspect.ismodule(getattr(importlib.import_module(room), name))]
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    found = {"lines": sum(lines.values()), "files": len(FILES), "public names": len(names)}
    assert {what: size for what, size in found.items() if size > BUDGET_WITH_LATER_ROOMS[what]} == {}

    later = [path for path in FILES if str(path.relative_to(ROOT / NAME)).startswith(LATER_ROOMS)]
    found = {"lines": found["lines"] - sum(lines[path] for path in later), "files": len(FILES) - len(later)}
    assert {what: size for what, size in found.items() if size > BUDGET[what]} == {}


def test_long_functions_are_seen():
    documented = 'def f():\n    """One.\n\n    Two.\n    """\n    a = 1\n    return a\n'
    assert list(long_functions(documented, limit=3)) == []
    assert list(long_functions(documented, limit=2)) == ["f: 3 lines"]
    assert list(long_functions(f"class A:\n{textwrap.indent(documented, '    ')}", limit=2)) == ["f: 3 lines"]


# -- planted faults ---------------------------------------------------------------------------------


def test_planted_faults_fit_the_code():
    """Each fault of `make faults` changes one place of a file that exists, and names tests that exist."""
    faults = read_faults()
    assert len(faults) >= 100
    assert len({(fault.file, fault.sound, fault.fault) for fault in faults}) == len(faults)
    for fault in faults:
        sound = (ROOT / fault.file).read_text()
        assert fault.planted_in(sound) != sound
        assert fault.tests
        for test in fault.tests:
            file, _, function = test.partition("::")
            defined = f"def {function.partition('[')[0]}(" if function else ""
            assert defined in (ROOT / file).read_text(), test
