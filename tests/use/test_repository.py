"""The structure of the project: imports, documentation, the tree, the tests."""

import ast
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
import registry
from exceptions import PRIVATE
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.mcmc import MCMCKernel
from truth.cells import GROUPS

import numpyro_bnn
from numpyro_bnn import guides, infer, nn, priors, symmetry

ROOT = Path(__file__).resolve().parents[2]
NAME = "numpyro_bnn"
FILES = sorted((ROOT / NAME).rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [module_name(path) for path in FILES if path.stem != "__main__"]


@cache
def tree(path):
    return ast.parse(path.read_text())


def faults_of_files(faults):
    """The faults that a function finds in each file of the package."""
    faults_by_file = {str(path.relative_to(ROOT)): list(faults(path)) for path in FILES}
    return {name: lacks for name, lacks in faults_by_file.items() if lacks}


# -- imports ---------------------------------------------------------------------------

# Room -> the other rooms it may import. Modules called _* at the top may be imported by
# every room, and import only one another. The package's own __init__ and __main__ may
# import anything.
ROOMS = {
    "estimators": """results metrics models networks infer guides symmetry program
        priors nn datasets""",
    "plots": "results metrics",
    "results": "runs program infinite networks priors nn metrics",
    "runs": "infer guides program",
    "metrics": "",
    "guides": "program networks moments priors nn metrics",
    "infer": "program sgmcmc symmetry",
    "models": "program networks priors nn",
    "networks": "nn priors",
    "priors": "nn",
    "symmetry": "program nn",
    "program": "",
    "moments": "",
    "sgmcmc": "",
    "infinite": "nn priors",
    "nn": "",
    "datasets": "",
}
# Third-party package -> the only room that may import it: one file (or room) at each
# border.
BORDERS = {
    "arviz": "_arviz",
    "xarray": "_arviz",
    "matplotlib": "plots",
    "sklearn": "estimators",
    "skpro": "estimators",
    "blackjax": "infer",
}
# Rooms that are pure functions of arrays.
WITHOUT_NUMPYRO = {"sgmcmc", "moments", "_jaxprs"}


def imports_of(path):
    """Every absolute module name that a file imports anywhere."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write the whole name of {node.module}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            name = node.args[0]
            yield from [str(name.value)] if isinstance(name, ast.Constant) else []


def import_faults(path):
    """What is wrong with the imports of a file, as sentences."""
    room = [*module_name(path).split("."), ""][1]
    if room in ("", "__main__"):
        return
    if not room.startswith("_") and room not in ROOMS:
        yield f"room {room!r} is unknown: add it to ROOMS"
    for imported in imports_of(path):
        top, _, rest = imported.partition(".")
        target = rest.split(".")[0]
        allowed = (room, "__version__", *ROOMS.get(room, "").split())
        if BORDERS.get(top, room) != room:
            yield f"{imported}: only {BORDERS[top]} may import {top}"
        elif top == "numpyro" and room in WITHOUT_NUMPYRO:
            yield f"{imported}: {room} knows no NumPyro"
        elif top == NAME and target not in allowed and not target.startswith("_"):
            yield f"{imported}: {room} may import {allowed} and _* modules"


def test_imports_point_down_only():
    assert faults_of_files(import_faults) == {}


def imported_files():
    """Module -> the modules of ours it imports, type-only imports and those inside
    functions included.

    A room's ``__init__`` stands for what it re-exports; its submodules may not import
    it.
    """
    paths, below = {module_name(path): path for path in FILES}, {}
    for module, path in paths.items():
        names = set()
        for imported in imports_of(path):
            while imported not in paths and "." in imported:
                imported = imported.rpartition(".")[0]
            names.add(imported)
        below[module] = names & paths.keys() - {module, NAME}
    return below


def test_imports_have_no_circle():
    TopologicalSorter(imported_files()).prepare()  # an error names the circle


PROBE = """
import importlib, json, sys, warnings
import jax, numpy, numpyro, numpyro.infer.autoguide
optional = ("sklearn", "flax", "equinox", "blackjax", "flowjax")
slow = ("arviz", "xarray", "pandas", "scipy.stats", "scipy.optimize", "optax")
slow += ("matplotlib",)
for name in optional + slow:
    sys.modules[name] = None  # an import of it now fails
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
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend has started
print(json.dumps({"changed": changed, "devices": jax.local_device_count("cpu")}))
"""


def test_import_is_quick_changes_nothing_global_and_needs_no_optional_package():
    """A user may still choose platform, devices and precision afterwards."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    modules = [
        module
        for module in MODULES
        if module.split(".")[1:2] not in (["plots"], ["estimators"])
    ]
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", PROBE, *modules], **options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"changed": [], "devices": 3}


# -- documentation ---------------------------------------------------------------------

# Exported name -> the exported name whose example shows it: types that users receive
# rather than build.
EXAMPLE_ELSEWHERE = {
    "networks.RandomNetwork": "networks.random_network",
    "nn.ForwardContext": "nn.Layer",
}
NO_EXAMPLE = "no example (>>>) in the docstring"


def exports():
    """(room, name) for every name that a room, or the package itself, offers."""
    rooms = {".".join(module.split(".")[:2]) for module in MODULES}
    for room in sorted(rooms):
        if not room.split(".")[-1].startswith("_"):
            for name in getattr(importlib.import_module(room), "__all__", []):
                yield room, name


def needs_docstring(value):
    ours = str(getattr(value, "__module__", "")).split(".")[0] == NAME
    return ours and (
        inspect.isclass(value)
        or inspect.isroutine(value)
        or hasattr(value, "__wrapped__")
    )


def doc_faults(value):
    """What the docstring of a class or function lacks."""
    doc = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    # NamedTuple, dataclass
    generated = inspect.isclass(value) and str(doc).startswith(f"{value.__name__}(")
    if not doc or generated:
        return ["no docstring"]
    named_tuple = (
        inspect.isclass(value)
        and issubclass(value, tuple)
        and hasattr(value, "_fields")
    )
    return [] if ">>>" in doc or named_tuple else [NO_EXAMPLE]


def test_everything_exported_has_an_example():
    lacks = {}
    for room, name in exports():
        value = getattr(importlib.import_module(room), name)
        if needs_docstring(value):
            lacks[f"{room}.{name}".removeprefix(f"{NAME}.")] = doc_faults(value)
    for name, shown_by in EXAMPLE_ELSEWHERE.items():
        assert lacks.pop(name, None) == [NO_EXAMPLE], (
            f"{name} is gone, undocumented, or has its own example by now"
        )
        assert lacks.get(shown_by) == [], (
            f"{name} is to be shown by {shown_by}, which has no example"
        )
    assert {name: faults for name, faults in lacks.items() if faults} == {}


# -- the tree --------------------------------------------------------------------------

LOCK = re.compile(
    r"(\.lock|[-.]lock\.(json|ya?ml|toml)|pylock.*\.toml|(requirements|constraints).*\.txt)$",
    re.I,
)
# Written so that no pattern matches its own text.
ADDRESSES = re.compile(
    r"https?://files\.|/sim[p]le/|index[-_]url|find[-_]links|python[h]osted|pypi\.org"
    r"|(?<![\w.])/(?:home|root|work)/",
    re.I,
)


def project_files():
    """Files that git tracks or would track; outside of a git checkout, none."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    return [
        Path(name)
        for name in listed.stdout.split("\0")
        if name and (ROOT / name).is_file()
    ]


def test_no_lock_file_and_no_address_of_a_registry_or_of_a_machine():
    assert [str(path) for path in project_files() if LOCK.search(path.name)] == []
    found = {}
    for path in project_files():
        text = (ROOT / path).read_bytes().decode(errors="replace")
        if hits := [
            f"line {text.count(chr(10), 0, hit.start()) + 1}: {hit[0]}"
            for hit in ADDRESSES.finditer(text)
        ]:
            found[str(path)] = hits
    assert found == {}


# -- what is installed -----------------------------------------------------------------


def test_extras_that_texts_name_exist_and_all_has_every_feature():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*FILES, *(ROOT / "examples").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    texts += [ROOT / "README.md", ROOT / "pyproject.toml"]
    named = set()
    for path in texts:
        lists = re.findall(r"(?:numpyro[_-]bnn|\s\"\.)\[([a-z, ]+)\]", path.read_text())
        named.update(name.strip() for names in lists for name in names.split(","))
    assert {"plots", "estimators", "runs"} <= named <= set(extras)
    (everything,) = extras["all"]
    features = set(extras) - {"all", "examples", "notebooks"}
    features -= {"benchmarks", "docs", "test", "dev"}
    assert set(everything.partition("[")[2].rstrip("]").split(",")) == features
    assert not re.search("h5|matplotlib|scikit", " ".join(project["dependencies"]))
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {numpyro_bnn.__version__}\n" in citation


def test_data_that_ship_have_their_license():
    """In `examples/data`; the package itself has no files but code and its marker."""
    folder = ROOT / "examples" / "data"
    about = (folder / "README.md").read_text()
    sections = re.split(r"^(?=`)", about, flags=re.M)[1:]
    named = {re.match("`(.*?)`", text)[1]: text for text in sections}
    assert set(named) == {path.name for path in folder.iterdir()} - {"README.md"}
    for text in named.values():
        assert {"Source", "License", "Changes"} <= set(
            re.findall(r"^- (\w+):", text, re.M)
        )
    others = {
        path.name
        for path in (ROOT / NAME).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert others == {"py.typed"}


# -- weight ----------------------------------------------------------------------------

# of code, without comments and docstrings: wrapping and good names cost nothing
MAX_TOKENS = 309_460
MAX_ANY = 690  # annotations that say nothing; shared names of types are in `_types`
FUNCTION_LINES, PUBLIC_NAMES = 95, 200  # of the longest function at 88 columns


def code_tokens(source):
    """Number of tokens of code."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    skipped = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            skipped.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    kinds = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type in kinds and token.start[0] not in skipped for token in tokens
    )


def long_functions(module_tree):
    """Functions longer than the limit, their docstring not counted."""
    for node in ast.walk(module_tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{node.name}: {lines} lines"


def test_the_package_gets_no_heavier():
    assert sum(code_tokens(path.read_text()) for path in FILES) <= MAX_TOKENS
    assert faults_of_files(lambda path: long_functions(tree(path))) == {}
    nodes = [node for path in FILES for node in ast.walk(tree(path))]
    assert 0 < sum(isinstance(n, ast.Name) and n.id == "Any" for n in nodes) <= MAX_ANY
    names = [
        name
        for room, name in exports()
        if not inspect.ismodule(getattr(importlib.import_module(room), name))
    ]
    assert len(names) <= PUBLIC_NAMES


# -- tests -----------------------------------------------------------------------------

# rooms whose parts contributors build with, submodules included
CONTRIBUTORS = {"sgmcmc", "moments", "program"}


def private_names(module_tree):
    """Names that a test imports although no room lists them in ``__all__``."""
    for node in ast.walk(module_tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            root, _, rest = module.partition(".")
            if root != NAME:
                continue
            whole = ".".join(part for part in (module, name) if part)
            public = not any(
                part.startswith("_") and part != "__version__"
                for part in whole.split(".")
            )
            room = importlib.import_module(".".join(module.split(".")[:2]))
            listed = rest.count(".") == 0 and (
                name in getattr(room, "__all__", []) or f"{NAME}.{name}" in sys.modules
            )
            if not public or not (
                listed or rest.split(".")[0] in CONTRIBUTORS or not name
            ):
                yield whole


def test_tests_use_public_names():
    """Other names break when code moves."""
    used = {
        str(path.relative_to(ROOT)): list(private_names(tree(path)))
        for path in TEST_FILES
    }
    names = {name for names in used.values() for name in names}
    assert {
        file: names for file, names in used.items() if set(names) - PRIVATE.keys()
    } == {}
    assert PRIVATE.keys() - names == set()
    assert len(PRIVATE) < 12


def class_of(make):
    """The class behind a factory of a registry."""
    return getattr(make, "func", make).__name__


class Kind(NamedTuple):
    """What users extend: its room, its base class, its table in `tests/registry.py`
    with the classes that have rows there, and the pages that say when to use which.
    """

    room: object
    base: type
    table: str
    rows: set[str]
    pages: tuple[str, ...]


def kinds():
    kernels = {class_of(usual) for usual in registry.USUAL.values()}
    kernels |= {word for name in registry.WRAPPERS for word in name.split()}
    made = {class_of(row.make) for row in registry.GUIDES.values()}
    drawn = {type(row.prior).__name__ for row in registry.PRIORS.values()}
    layers = {type(row.layer).__name__ for row in registry.LAYERS.values()}
    moved = {type(row.symmetry).__name__ for row in registry.SYMMETRIES.values()}
    fits = ("guides", "laplace", "adf")
    return {
        "kernel": Kind(infer, MCMCKernel, "KERNELS", kernels, ("kernels",)),
        "guide": Kind(guides, AutoGuide, "GUIDES", made, fits),
        "prior": Kind(priors, priors.Prior, "PRIORS", drawn, ("models",)),
        "layer": Kind(nn, nn.Layer, "LAYERS", layers, ("models",)),
        "symmetry": Kind(
            symmetry, symmetry.Symmetry, "SYMMETRIES", moved, ("symmetries",)
        ),
    }


# Base classes that users extend, and priors of given values, which
# `contracts/test_pretrained.py` holds.
WITHOUT_ROW = {"SGMCMCKernel", "Prior", "Layer", "Symmetry", "Fixed", "Learned"}
# AutoLaplace is no approximation of the evidence by draws: `theory/test_laplace.py` has
# its exact answers.
WITHOUT_TRUTH = {"AutoLaplace"}


@pytest.mark.parametrize("name", ["kernel", "guide", "prior", "layer", "symmetry"])
def test_every_public_class_has_its_row(name):
    """The row brings every contract."""
    kind = kinds()[name]
    classes = set()
    for public in set(kind.room.__all__) - WITHOUT_ROW:
        value = getattr(kind.room, public)
        if isinstance(value, type) and issubclass(value, kind.base):
            classes.add(public)
    texts = [(ROOT / "docs" / f"{page}.md").read_text() for page in kind.pages]
    documented = set(re.findall(r"\w+", " ".join(texts)))
    missing = {
        f"{kind.table} of tests/registry.py": classes - kind.rows,
        f"docs/{kind.pages[0]}.md": classes - documented,
    }
    if name in ("kernel", "guide"):
        ways = {way for table in GROUPS.values() for way in table}
        words = {word.strip(",") for way in ways for word in way.split()}
        missing["tests/truth/ways.py"] = classes - words - WITHOUT_TRUTH
    assert {place: who for place, who in missing.items() if who} == {}


def test_every_test_file_belongs_to_a_room():
    """CI runs the slow tests of the rooms that a change concerns."""
    spec = importlib.util.spec_from_file_location(
        "changed_tests", ROOT / ".ci" / "changed_tests.py"
    )
    changed_tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed_tests)
    rooms = {
        path.relative_to(ROOT / NAME).parts[0].removesuffix(".py") for path in FILES
    }
    with_tests = {room.split("/")[0] for room in changed_tests.TESTS}
    assert {room for room in rooms if room[0] != "_"} == with_tests - {"_jaxprs"}
    patterns = [
        pattern for patterns in changed_tests.TESTS.values() for pattern in patterns
    ]
    matched = {pattern: set((ROOT / "tests").glob(pattern)) for pattern in patterns}
    assert [pattern for pattern, files in matched.items() if not files] == []
    about_a_room = {
        path
        for path in TEST_FILES
        if path.parent.name != "use" and path.name.startswith("test_")
    }
    assert about_a_room - set().union(*matched.values()) == set()


COLLECTION_COST = 5.0  # times what importing NumPyro, ArviZ and the package takes


def test_importing_the_tests_is_cheap_and_computes_nothing(pytestconfig):
    """As `conftest.py` measured it in this worker, which has collected the files that
    it was asked to run. Seconds differ by a factor of five between a busy machine whose
    libraries were never imported and a quiet one; the ratio does not.
    """
    measured = pytestconfig.pluginmanager.get_plugin("processor_seconds")
    assert measured.computed == ""
    seconds = sum(measured.collection.values())
    assert 0 < seconds < COLLECTION_COST * measured.libraries, (
        measured.collection.most_common(5)
    )


@pytest.fixture
def faults(monkeypatch):
    """The modules of tests/faults."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "faults"))
    return importlib.import_module("mutations"), importlib.import_module("chosen")


@pytest.mark.slow
def test_chosen_faults_have_their_place(faults):
    """A function that moved takes its faults along: mend the row, or delete it."""
    mutations, chosen = faults
    places = {fault.key for fault in mutations.all_faults()}
    assert chosen.IMPORTANT.keys() - places == set()
    assert chosen.HARMLESS.keys() - places == set()
    assert 40 <= len(chosen.IMPORTANT) <= 60
