"""Every script of examples/ helps, refuses what it cannot use before working, runs
tiny, and writes what it says.
"""

import contextlib
import importlib
import io
import json
import math
import re
import shlex
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from use.scripts import SCRIPTS

FOLDER = Path(__file__).resolve().parents[2] / "examples"
PARTS = (
    "shared",
    "loaders",
    "annealing",
    "boosting",
    "peers",
    "uci_gap",
    "uci_table",
    "__main__",
)  # of scripts


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Scripts set the number of devices, and may find a data folder."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.delenv("NUMPYRO_BNN_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def main_of(script):
    return importlib.import_module(script).main


def run(script, *options):
    """Run a script tiny; ``options`` follow those of the table."""
    return main_of(script)([*shlex.split(SCRIPTS[script].options), *map(str, options)])


def page_with(folder, *names):
    """A page with places for tables; by default for all tables of the docs."""
    page = folder / "page.md"
    texts = "".join(
        path.read_text()
        for path in [FOLDER.parent / "README.md", *FOLDER.parent.glob("docs/**/*.md")]
    )
    names = names or set(re.findall("table of (.*): begin", texts))
    marks = "".join(
        f"<!-- table of {name}: begin -->\nold\n<!-- table of {name}: end -->\n"
        for name in names
    )
    page.write_text(f"above\n{marks}below\n")
    return page


def test_every_script_has_a_row():
    paths = [
        path.relative_to(FOLDER.parent)
        for path in FOLDER.rglob("*.py")
        if path.stem not in PARTS
    ]
    assert {".".join(path.with_suffix("").parts) for path in paths} == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_refusals_come_before_the_work(script, tmp_path, monkeypatch, capsys):
    """Numbers that are too small, and a file in the place of a folder."""
    module = importlib.import_module(script)
    for name in ("load_data", "fit_network", "compare", "compare_steps", "learn_set"):
        if hasattr(module, name):
            monkeypatch.setattr(
                module, name, lambda *_, **__: pytest.fail("work has begun")
            )
    for options in SCRIPTS[script].refused:
        with pytest.raises(SystemExit, match="2"):
            run(script, *options.split())
        assert "must be at least" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    assert "--output" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    with pytest.raises((SystemExit, OSError)) as stopped:
        run(script, "--output", tmp_path / "file" / "deeper" / "out")
    assert stopped.value.args[0]


# -- tiny runs -------------------------------------------------------------------------

FINITE = (-math.inf, math.inf)
RANGES = dict.fromkeys(("accuracy", "auroc", "coverage", "ece"), (0, 1))
RANGES |= {
    "rmse": (0, math.inf),
    "log_score": FINITE,
    "log_likelihood": FINITE,
    "log_loss": (0, math.inf),
}


def scores_of(value, name=""):
    """(name, number) of all numbers of a result, named by key or field."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        for key, part in value.items():
            yield from scores_of(part, key)
    elif isinstance(value, list | tuple | np.ndarray):
        for part in value:
            yield from scores_of(part, name)
    elif isinstance(value, int | float | np.number):
        yield name, float(value)


def check_run(script, tmp_path, *options):
    """Run a script: scores are possible, and what it wrote and printed is what its row
    and its result say.
    """
    module, row = importlib.import_module(script), SCRIPTS[script]
    of_benchmark = "benchmarks" in script
    output = tmp_path / "new" / ("out.json" if of_benchmark else "")
    page = page_with(tmp_path)
    options = [*options, "--output", output]
    tables = hasattr(
        module.parse([*shlex.split(row.options), *map(str, options)]), "docs"
    )
    printed, errors = io.StringIO(), io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        for entry in row.warnings:
            action, _, message = entry.partition(":")
            warnings.filterwarnings(action, message)
        result = run(script, *options, *(["--docs", page] if tables else []))
    text = page.read_text()
    about = {"result": result, "output": output, "page": text}
    finished = SimpleNamespace(
        **about, printed=printed.getvalue(), errors=errors.getvalue()
    )
    assert row.says in finished.printed
    for name, value in scores_of(result):
        low, high = RANGES.get(name, (None, None))
        assert low is None or (math.isfinite(value) and low <= value <= high), (
            name,
            value,
        )
    written = list((tmp_path / "new").glob("*.json"))
    assert (output in written) or not of_benchmark
    for path in written:
        expected = json.loads(
            json.dumps(result, default=lambda value: np.asarray(value).tolist())
        )
        found = json.loads(path.read_text())
        shared = [
            key for key in found if isinstance(expected, dict) and key in expected
        ]
        assert all(found[key] == expected[key] for key in shared)
    pictures = [path.stat().st_size for path in (tmp_path / "new").glob("*.png")]
    assert written or pictures
    assert min(pictures, default=math.inf) > 10_000
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert (text.count("\nold\n") < text.count(": begin")) == tables
    if row.check:
        row.check(finished)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [name for name, row in SCRIPTS.items() if row.runs and not row.needs_data]
)
def test_a_tiny_run_writes_what_it_says(script, tmp_path, monkeypatch):
    monkeypatch.delenv("CI", raising=False)  # there progress bars are off
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    check_run(script, tmp_path)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [name for name, row in SCRIPTS.items() if row.runs and row.needs_data]
)
def test_a_tiny_run_on_benchmark_data_writes_what_it_says(
    script, tmp_path, data_folder
):
    check_run(script, tmp_path, "--data", data_folder)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["mixing", "minibatches"])
def test_a_second_run_keeps_the_rows_of_the_first(script, tmp_path):
    name, path = f"examples.benchmarks.{script}", tmp_path / "out.json"
    run(name, "--output", path)
    first = json.loads(path.read_text())["rows"]
    run(name, "--output", path)
    assert json.loads(path.read_text())["rows"] == first


@pytest.mark.slow
def test_memory_is_set_by_the_draws_alone():
    """Compiled memory does not grow with the steps, in all or per draw."""
    memory = importlib.import_module("examples.benchmarks.sgld_step").measure_memory(
        640
    )
    short, long, longest = memory["temporary_bytes_by_steps"].values()
    assert longest <= 1.1 * short
    assert long <= 1.1 * short
    few, same, double = memory["kept_bytes"].values()
    assert few == same
    assert 1.8 * few < double < 2.2 * few


# -- UCI -------------------------------------------------------------------------------

UCI = "examples.benchmarks.uci"


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:to_inference_data.* checks failed"
)  # so little effort is not enough
@pytest.mark.parametrize(
    ("name", "head", "methods"),
    [
        ("recipe", "hetero", ["members", "recipe"]),
        ("mixed recipe", "tails", ["members mixed", "recipe mixed"]),
        ("mclmc", "hetero", ["deep ensemble", "MCLMC"]),
        ("nuts", "hetero", ["NUTS + OrbitMoves"]),
        ("variational", "hetero", ["AutoMeanField", "AutoCoupling"]),
    ],
)
def test_uci_runs_every_kind_of_method(name, head, methods, tmp_path, data_folder):
    options = (
        "--data",
        data_folder,
        "--output",
        tmp_path / "uci.jsonl",
        "--heads",
        head,
        "--effort",
        0.01,
    )
    lines = run(UCI, *options, "--methods", name)
    assert [line["method"] for line in lines] == methods
    for line in lines:
        assert line["rmse"] > 0
        assert np.isfinite(line["log_likelihood"])
        assert 0 <= line["coverage"] <= 1


@pytest.mark.data
@pytest.mark.slow
def test_uci_goes_on_where_it_was_interrupted(tmp_path, data_folder):
    names = [f"uci_{score}" for score in ("rmse", "log_likelihood", "cost", "summary")]
    path, page = tmp_path / "new" / "uci.jsonl", page_with(tmp_path, *names)
    options = (
        "--data",
        data_folder,
        "--output",
        path,
        "--docs",
        page,
        "--effort",
        0.05,
    )
    first = run(UCI, *options, "--methods", "adf")
    assert [(line["method"], line["head"]) for line in first] == [("AutoADF", "homo")]
    # A line that was cut is computed again; whole ones are not.
    path.write_text(path.read_text() + '\n{"set": "yacht", "split": 0, "run": "nn')
    second = run(UCI, *options, "--methods", "adf", "nngp")
    assert second[0] == first[0]
    assert [line["method"] for line in second] == ["AutoADF", "NNGP"]
    assert run(UCI, *options, "--methods", "none") == second
    text = page.read_text()
    assert "\nold\n" not in text
    assert text.count("| yacht |") == 3  # heads of two tables, a row of the third
    assert "-1.647 ± 0.022" in text
