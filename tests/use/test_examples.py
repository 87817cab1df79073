"""Every script of examples/ helps, refuses, runs tiny, and writes what it says."""

import importlib
import json
import math
import re
import shlex
import warnings
from pathlib import Path

import numpy as np
import pytest

from use.scripts import SCRIPTS

FOLDER = Path(__file__).resolve().parents[2] / "examples"


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


def page_with_all_tables(folder):
    """A page with places for all tables of the docs."""
    page, root = folder / "page.md", FOLDER.parent
    texts = [root / "README.md", *root.glob("docs/**/*.md")]
    texts = "".join(path.read_text() for path in texts)
    marks = "".join(
        f"<!-- table of {name}: begin -->\nold\n<!-- table of {name}: end -->\n"
        for name in set(re.findall("table of (.*): begin", texts))
    )
    page.write_text(f"above\n{marks}below\n")
    return page


def test_every_example_has_a_row():
    """Benchmarks are started by `test_benchmarks.py`, and some of them run here."""
    examples = {path.stem for path in FOLDER.glob("*.py")} - {"shared", "loaders"}
    assert {f"examples.{name}" for name in examples} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_refusals_come_before_the_work(script, tmp_path, capsys):
    """Numbers that are too small, and a file in the place of a folder."""
    module = importlib.import_module(script)
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

RANGES = dict.fromkeys(("accuracy", "auroc", "coverage", "ece"), (0, 1))
RANGES |= dict.fromkeys(("rmse", "log_loss"), (0, math.inf))
RANGES |= dict.fromkeys(("log_score", "log_likelihood"), (-math.inf, math.inf))


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


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_tiny_run_writes_what_it_says(script, tmp_path, monkeypatch, capsys):
    """Scores are possible."""
    monkeypatch.delenv("CI", raising=False)  # there progress bars are off
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    module, row = importlib.import_module(script), SCRIPTS[script]
    of_benchmark = "benchmarks" in script
    output = tmp_path / "new" / ("out.json" if of_benchmark else "")
    page = page_with_all_tables(tmp_path)
    options = ["--output", output]
    has_tables = hasattr(module.parse(shlex.split(row.options)), "docs")
    options += ["--docs", page] if has_tables else []
    with warnings.catch_warnings():
        for entry in row.warnings:
            action, _, message = entry.partition(":")
            warnings.filterwarnings(action, message)
        result = run(script, *options)
    assert row.says in capsys.readouterr().out
    for name, value in scores_of(result):
        low, high = RANGES.get(name, (None, None))
        possible = low is None or (math.isfinite(value) and low <= value <= high)
        assert possible, (name, value)
    written = list((tmp_path / "new").glob("*.json"))
    assert (output in written) or not of_benchmark
    for path in written:
        expected = json.dumps(result, default=lambda value: np.asarray(value).tolist())
        expected, contents = json.loads(expected), json.loads(path.read_text())
        shared = set(contents) & set(expected) if isinstance(expected, dict) else ()
        assert all(contents[key] == expected[key] for key in shared)
    pictures = [path.stat().st_size for path in (tmp_path / "new").glob("*.png")]
    assert written or pictures
    assert min(pictures, default=math.inf) > 10_000
    text = page.read_text()
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert (text.count("\nold\n") < text.count(": begin")) == has_tables
    if row.check:
        row.check(result)


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
