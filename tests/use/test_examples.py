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
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from use.scripts import NOT_AT_THE_MODE, SCRIPTS

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
def test_image_chains_adds_methods_and_keeps_networks(tmp_path, monkeypatch):
    """Two methods, then two more in a second call, which trains nothing again."""
    module = importlib.import_module("examples.image_chains")
    page = page_with(tmp_path, "image_chains")
    options = ("--output", tmp_path / "out", "--docs", page)
    first = run("examples.image_chains", *options)["rows"]
    monkeypatch.setattr(module, "trained", lambda *_: pytest.fail("trained again"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", NOT_AT_THE_MODE.partition(":")[2])
        report = run(
            "examples.image_chains",
            *options,
            "--methods",
            "ensemble",
            "network",
            "last-layer-Laplace",
        )
    rows = report["rows"]
    assert rows[:2] == first
    assert [row["method"] for row in rows] == [
        "ensemble",
        "SGHMC",
        "network",
        "last-layer-Laplace",
    ]
    assert [(row["draws"], row["epochs"]) for row in rows] == [
        (2, 2),
        (4, 4),
        (1, 1),
        (4, 2),
    ]
    for row in rows:
        assert 0 <= row["accuracy"] <= 1
        assert row["path"][-1] == row["NLL"] <= row["NLL of a draw"]
    assert module.table(report) in page.read_text()
    assert (tmp_path / "out" / "image_chains.png").stat().st_size > 10_000


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


# -- benchmarks that start processes ---------------------------------------------------


def pretend_processes(monkeypatch, module, answer):
    """Replace the processes that a benchmark starts by the answer to their words;
    returns what was asked.
    """
    asked = []

    def started(words, env=None, **kwargs):
        asked.append((words, env))
        return subprocess.CompletedProcess(
            words, 0, f"noise\n{json.dumps(answer(len(asked)))}\n"
        )

    monkeypatch.setattr(module.subprocess, "run", started)
    return asked


def test_compilation_is_measured_with_and_without_a_cache(tmp_path, monkeypatch):
    """One process fills the cache that the next one reads."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    module = importlib.import_module("examples.benchmarks.compilation")
    module.environment([])  # Python may start a process to name the platform, once
    asked = pretend_processes(monkeypatch, module, lambda number: [number, 0.5])
    page = page_with(tmp_path, "compilation")
    report = run(
        "examples.benchmarks.compilation",
        "--output",
        tmp_path / "out.json",
        "--docs",
        page,
    )
    assert [row["first"] for row in report["rows"]] == [1, 2, 4, 6]
    assert [row["data_as_arguments"] for row in report["rows"]] == [False, True] * 2
    jobs = [json.loads(words[-1]) for words, _ in asked]
    assert [job["seeds"] for job in jobs] == [[0, 1], [0, 1]] + 2 * [[0, 1], [2, 3]]
    folders = [env.get("JAX_COMPILATION_CACHE_DIR") for _, env in asked]
    assert folders[:2] == [None, None]
    assert folders[2] == folders[3] != folders[4] == folders[5]
    assert "| NUTS | yes | no | 4.0 | 0.5 |" in page.read_text()


def test_first_draw_starts_a_process_for_each_way(tmp_path, monkeypatch):
    """Without a cache on disk; what one prints is read, and compared with NUTS."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    module = importlib.import_module("examples.benchmarks.first_draw")
    module.environment([])  # Python may start a process to name the platform, once
    phases = {"import": [0.25, 0], "other_data": [1.0, 1]}
    asked = pretend_processes(
        monkeypatch, module, lambda number: {**phases, "first": [4.0 / number, 30]}
    )
    path, page = tmp_path / "out.json", page_with(tmp_path, "first_draw")
    report = run("examples.benchmarks.first_draw", "--output", path, "--docs", page)
    assert json.loads(path.read_text()) == report
    assert [words[words.index("--job") + 1] for words, _ in asked] == [
        "NUTS",
        "AutoMeanField",
    ]
    assert not any("JAX_COMPILATION_CACHE_DIR" in env for _, env in asked)
    assert all(env["JAX_ENABLE_COMPILATION_CACHE"] == "false" for _, env in asked)
    assert (
        "| AutoMeanField | 0.25 | 2.00 (30) | 0.50 | 1.00 (1) |  |  |"
        in page.read_text()
    )


@pytest.mark.slow
def test_a_process_of_compilation_prints_its_seconds(capsys):
    job = {
        "kernel": "NUTS",
        "rows": 6,
        "width": 1,
        "num_chains": 1,
        "data_as_arguments": False,
        "seeds": [0],
    }
    importlib.import_module("examples.benchmarks.compilation").main(
        ["--job", json.dumps(job)]
    )
    (seconds,) = json.loads(capsys.readouterr().out)
    assert seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["SGLD, step size given", "AutoADF", "BlackJAX MCLMC"])
def test_a_process_of_first_draw_prints_its_phases(way, capsys):
    module = importlib.import_module("examples.benchmarks.first_draw")
    if way in module.BY_HAND:
        pytest.importorskip("blackjax")
    assert module.main(["--job", way, "--rows", "6", "--width", "1"]) is None
    phases = json.loads(capsys.readouterr().out)
    assert tuple(phases) == module.PHASES[: 3 if way in module.BY_HAND else 5]
    assert all(seconds >= 0 and programs >= 0 for seconds, programs in phases.values())
    assert phases["first"][0] > 0


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


@pytest.mark.data
@pytest.mark.slow
def test_uci_runs_splits_along_inputs(tmp_path, data_folder):
    options = (
        "--data",
        data_folder,
        "--output",
        tmp_path / "uci.jsonl",
        "--methods",
        "adf",
        "--effort",
        0.02,
    )
    first = run(UCI, *options, "--splits-of", "gap")
    assert [(line["splits_of"], line["split"]) for line in first] == [("gap", 0)]
    assert run(UCI, *options, "--splits-of", "gap") == first
    both = run(UCI, *options)  # the standard split with the same number is another job
    assert both[0] == first[0]
    assert "splits_of" not in both[1]
    assert both[0]["rmse"] != both[1]["rmse"]
    assert importlib.import_module(UCI).splits_of("wine", "tail") == ()


@pytest.mark.data
@pytest.mark.slow
def test_infinite_uci_compares_with_nuts(tmp_path, data_folder):
    path = tmp_path / "uci.json"
    nuts = tmp_path / "nuts.json"
    page = page_with(tmp_path, "infinite_uci")
    scores = {"rmse": [1.0, 3.0], "log_likelihood": [-1.0, -1.0]}
    nuts.write_text(json.dumps({"rows": [{"set": "yacht", "NUTS": scores}]}))
    options = ("--data", data_folder, "--output", path, "--docs", page, "--nuts", nuts)
    report = run("examples.benchmarks.infinite_uci", *options)
    assert "| 2.000 ± 1.000 |" in page.read_text()
    assert [row["variant"] for row in report["rows"]] == ["relu", "erf-ard"]
    assert page.read_text().count("| yacht |") == 2


@pytest.mark.data
@pytest.mark.slow
def test_estimators_on_random_rows_compare_two_networks(tmp_path, data_folder):
    options = ["--output", tmp_path / "rows.json", "--rows", 40, "--effort", 0.01]
    deep, shallow = run(
        "examples.benchmarks.estimators", "--data", data_folder, *options
    )["rows"]
    assert (deep["network"], shallow["network"]) == ("deep", "shallow")
    assert deep["rmse"] != shallow["rmse"]


@pytest.mark.parametrize("package", ["ngboost", "catboost"])
def test_absent_boosting_is_named(package, monkeypatch, tmp_path, data_folder):
    """They are in none of our extras, and are run only if they are named."""
    monkeypatch.setitem(sys.modules, package, None)
    assert package not in importlib.import_module(UCI).parse([]).methods
    options = (
        "--data",
        data_folder,
        "--output",
        tmp_path / "uci.jsonl",
        "--methods",
        package,
    )
    with pytest.raises(ImportError, match=f"pip install {package}"):
        run(UCI, *options)
