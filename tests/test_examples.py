"""Every script of examples/ runs, tiny, and returns and writes what it says."""

import importlib
import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import arviz as az
import jax
import numpy as np
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, Predictive
from scipy import stats

import numpyro_bnn as bnn
from examples.shared import observations_of_members
from numpyro_bnn import symmetry

FOLDER = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = [
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
    for path in sorted(FOLDER.rglob("*.py"))
    if path.name
    not in ("shared.py", "loaders.py", "annealing.py", "boosting.py", "uci_gap.py", "uci_table.py", "__main__.py")
]
SHORT = {
    "examples.demo": "--held-out 700 --effort 0.004",
    "examples.tabular": "--splits 2 --effort 0.004 --trees 3",
    "examples.minibatch": "--width 3 --batch-size 64 --num-warmup 10 --num-samples 12 --steps-per-draw 30"
    " --nuts-rows 40 --nuts-warmup 15 --num-chains 2 --test-rows 30",
    "examples.ensembles": "--sets energy --widths 3 --members 2 --optimizer-steps 600 --num-warmup 20"
    " --num-samples 12 --steps-per-draw 4 --nuts-warmup 6 --max-tree-depth 2",
    "examples.benchmarks.microcanonical": "--sets energy --nets 1x20 --methods MCLMC --gradients 1200"
    " --draws 12 --num-chains 2 --rounds 1 --steps 4",
    "examples.benchmarks.function_agreement": "--sets energy --methods MCLMC --gradients 600 --draws 6 --num-chains 4"
    " --max-tree-depth 3",
    "examples.symmetries": "--nets relu --ways moves quotient --width 3 --num-warmup 6 --num-samples 8"
    " --max-tree-depth 2",
    "examples.benchmarks.gradient_cost": "--repeats 1 --calls 2 --steps 2",
    "examples.benchmarks.collapse_cost": "--repeats 1 --calls 2 --rows 1000 --hidden 50 --outputs 1 3",
    "examples.benchmarks.mixing": "--sets energy --ways collapsed exchange smc --seconds 1 --num-chains 2"
    " --steps 3 --moves 4 --replicas 2 --leapfrogs 2 --particles 6 --mutations 1",
    "examples.benchmarks.compilation": "--kernels NUTS --rows 6 --width 1 --num-chains 1",
    "examples.benchmarks.first_draw": "--ways NUTS AutoMeanField --rows 6 --width 1",
    "examples.benchmarks.minibatches": "--rows 40 --gradients 300 --width 2 --batch-size 8 --num-chains 2"
    " --reference-gradients 6000",
    "examples.benchmarks.runs": "--rows 600 --rounds 1 --draws 2",
    "examples.benchmarks.scale": "--rows 60 --rounds 1 --draws 2",
    "examples.benchmarks.sgld_step": "--rounds 1 --steps 20 --run-rounds 1 --run-steps 40 --steps-per-draw 20"
    " --sizes 64 640",
    "examples.probabilistic_backpropagation": "--widths 4 3 --num-epochs 2 --nuts-rows 30 --nuts-warmup 10"
    " --nuts-samples 10",
    "examples.neal": "--num-warmup 4 --num-samples 6 --num-chains 2 --max-tree-depth 2",
    "examples.two_modes": "--num-warmup 4 --num-samples 8 --kept-draws 4 --num-chains 2 --num-moves 3"
    " --max-tree-depth 2",
    "examples.last_layer": "--width 2 --train-rows 30 --num-steps 5 --num-warmup 8 --num-samples 6 --max-tree-depth 2"
    " --steps-per-draw 5",
    "examples.lotka_volterra": "--data-sets 1 --num-warmup 6 --num-samples 6 --max-tree-depth 2",
    "examples.active_learning": "--seeds 2 --rounds 1 --width 2 --effort 0.02",
    "examples.bayesian_optimization": "--seeds 2 --start 4 --evaluations 6 --candidates 32 --width 2 --effort 0.02",
    "examples.nnx_module": "--splits 2 --width 2 --optimizer-steps 5 --num-warmup 8 --num-samples 8 --num-chains 2"
    " --steps-per-draw 3",
    "examples.groups": "--groups 4 --batch-size 10 --steps-per-draw 3 --num-warmup 8 --num-samples 6 --num-chains 2",
    "examples.unknown_digits": "--pairs 2 --train-rows 40 --width 3 --members 2 --optimizer-steps 20 --num-chains 2"
    " --num-warmup 8 --num-samples 6 --steps-per-draw 3",
    "examples.variational": "--width 3 --points 8 --num-steps 20 --num-particles 1 --num-warmup 8 --num-samples 8",
    "examples.image_classification": "--num-epochs 1 --batch-size 200 --members 2 --num-draws 4 --rounds 1"
    " --test-images 40",
    "examples.image_chains": "--methods ensemble SGHMC --num-epochs 1 --chain-epochs 1 --members 2 --chains 2"
    " --num-draws 2 --batch-size 200 --test-images 40 --foreign-images 30",
    "examples.benchmarks.variational_uci": "--sets yacht --splits 1 --width 3 --num-steps 20 --num-warmup 6"
    " --num-samples 6 --max-tree-depth 2",
    "examples.infinite_width": "--widths 2 4 --networks 20 --trained 2 --steps 2 --nuts-width 3 --nuts-warmup 5"
    " --nuts-samples 5",
    "examples.benchmarks.infinite_uci": "--sets yacht --variants relu erf-ard --splits 1 --max-steps 2",
    "examples.benchmarks.estimators": "--sets yacht --splits 1 --method mean_field --effort 0.01",
    "examples.benchmarks.classification": "--sets wine --splits 2 --effort 0.01",
    "examples.benchmarks.infinite_kernel": "--points 60 --depth 2 --block-size 25",
    "examples.benchmarks.adf_uci": "--sets boston --splits 2 --epochs 2 --width 5",
    "examples.benchmarks.laplace_uci": "--sets yacht --splits 1 --rounds 2 --steps 5 --widths 3",
    "examples.benchmarks.laplace_torch": "ours --structures diag --rows 8 --batch-size 4",
    "examples.benchmarks.adf_speed": "--rounds 1 --splits 2 --rows 30 --width 4",
    "examples.benchmarks.gradient_variance": "--batch-sizes 8 --width 3 --draws 4 --steps 2 --rounds 1 --calls 1"
    " --networks mlp",
    "examples.benchmarks.orbit_moves": "--nets ReLU --rounds 1 --rows 64 --width 3 --sweeps 3 --refreshes 2"
    " --transitions 1 --tree-depth 2 --draws 1 --steps-per-draw 2 --batches 8",
    "examples.benchmarks.hierarchical_hmc": "--sets boston --ways long persistent --num-chains 2"
    " --num-warmup 8 --num-samples 8 --num-steps 4",
    "examples.benchmarks.horseshoe": "--rows 12 --inputs 7 --num-chains 2 --num-warmup 10 --sweeps 12 --nuts-draws 8"
    " --max-tree-depth 2",
    "examples.benchmarks.uci": "--sets yacht --splits 1 --no-progress-bar",
    "examples.benchmarks.coupling_step": "--rounds 1 --steps 2 --widths 1 --particles 1 --num-flows 1 --hidden 2"
    " --rows 3",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Scripts set the number of devices through the environment, and may find a data folder there."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.delenv("NUMPYRO_BNN_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def run(script, *options):
    module = importlib.import_module(script)
    return module.main([*SHORT[script].split(), *map(str, options)])


def page_with(folder, *names):
    """A page with places for tables."""
    page = folder / "page.md"
    page.write_text("".join(f"<!-- table of {name}: begin -->\n<!-- table of {name}: end -->\n" for name in names))
    return page


def test_every_script_is_tested():
    assert set(SHORT) == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(script).main(["--help"])
    assert stopped.value.code == 0
    assert "--output" in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_unusable_output_is_refused_before_the_work(script, tmp_path, monkeypatch):
    """A file where a folder should be."""
    (tmp_path / "file").write_text("")
    module = importlib.import_module(script)
    for name in ("load_data", "fit_network", "compare", "compare_steps", "learn_set"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("work has begun"))
    with pytest.raises((SystemExit, OSError)) as stopped:
        run(script, "--output", tmp_path / "file" / "deeper" / "out")
    assert stopped.value.args[0]


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("examples.demo", ["--held-out", "1"]),
        ("examples.tabular", ["--splits", "0"]),
        ("examples.minibatch", ["--batch-size", "0"]),
        ("examples.benchmarks.runs", ["--rows", "0"]),
        ("examples.benchmarks.scale", ["--rounds", "0"]),
        ("examples.benchmarks.sgld_step", ["--rounds", "0"]),
        ("examples.benchmarks.sgld_step", ["--run-steps", "3"]),
        ("examples.benchmarks.sgld_step", ["--sizes", "3"]),
        ("examples.probabilistic_backpropagation", ["--widths", "3", "0"]),
        ("examples.probabilistic_backpropagation", ["--num-epochs", "0"]),
        ("examples.variational", ["--points", "3"]),
        ("examples.last_layer", ["--train-rows", "9"]),
        ("examples.lotka_volterra", ["--held-out", "0"]),
        ("examples.neal", ["--num-samples", "3"]),
        ("examples.nnx_module", ["--splits", "1"]),
        ("examples.bayesian_optimization", ["--evaluations", "3"]),
        ("examples.active_learning", ["--seeds", "1"]),
        ("examples.unknown_digits", ["--pairs", "1"]),
        ("examples.groups", ["--groups", "2"]),
        ("examples.benchmarks.variational_uci", ["--splits", "0"]),
        ("examples.image_classification", ["--num-epochs", "0"]),
        ("examples.image_chains", ["--members", "1"]),
        ("examples.benchmarks.adf_uci", ["--epochs", "0"]),
        ("examples.benchmarks.laplace_uci", ["--rounds", "0"]),
        ("examples.benchmarks.adf_speed", ["--rounds", "0"]),
        ("examples.symmetries", ["--num-chains", "1"]),
        ("examples.ensembles", ["--members", "1"]),
        ("examples.benchmarks.microcanonical", ["--gradients", "10"]),
        ("examples.benchmarks.function_agreement", ["--num-chains", "2"]),
        ("examples.benchmarks.mixing", ["--particles", "2"]),
        ("examples.infinite_width", ["--widths", "4", "0"]),
        ("examples.benchmarks.infinite_uci", ["--splits", "0"]),
        ("examples.benchmarks.estimators", ["--splits", "0"]),
        ("examples.benchmarks.classification", ["--splits", "0"]),
        ("examples.benchmarks.infinite_kernel", ["--points", "0"]),
        ("examples.benchmarks.gradient_variance", ["--draws", "1"]),
        ("examples.benchmarks.gradient_variance", ["--rounds", "0"]),
        ("examples.benchmarks.first_draw", ["--rows", "0"]),
        ("examples.benchmarks.minibatches", ["--gradients", "0"]),
        ("examples.benchmarks.orbit_moves", ["--tree-depth", "0"]),
        ("examples.benchmarks.orbit_moves", ["--batches", "65"]),
        ("examples.benchmarks.coupling_step", ["--widths", "3", "0"]),
        ("examples.benchmarks.horseshoe", ["--inputs", "5"]),
        ("examples.benchmarks.horseshoe", ["--sweeps", "3"]),
    ],
)
def test_wrong_numbers_are_refused(script, options, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(script, *options)
    assert stopped.value.code == 2
    assert "must be at least" in capsys.readouterr().err


def test_members_are_observed_several_times():
    """An interval of probability 0.9 needs 19 draws; the noise of each is new, the mean is that of its member."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 1))
    network = bnn.models.regression(bnn.nn.MLP([1, 1]))
    mcmc = MCMC(bnn.infer.SGLD(network, 1e-4, warm_start=0.5), num_warmup=4, num_samples=4, num_chains=2,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    mcmc.run(jax.random.key(0), x, x[:, 0] + rng.normal(size=20))
    y = observations_of_members(mcmc, {"x": x}, times=12)
    assert y.shape == (24, 20)
    assert len(np.unique(y)) == y.size
    members = bnn.to_inference_data(mcmc, {"x": x}, members=True)
    mean, sd = members["predictions"]["y_mean"].to_numpy()[:, 0], members["posterior"]["sigma"].to_numpy()[:, :1]
    scaled = (y.reshape(12, 2, 20) - mean) / sd
    assert abs(scaled.mean()) < 4 / 480**0.5  # fails for one seed in 16,000
    assert abs((scaled**2).mean() - 1) < 4 * (2 / 480) ** 0.5


def check_scores(rows):
    for row in rows:
        assert row.rmse > 0
        assert math.isfinite(row.log_score)
        assert 0 <= row.coverage <= 1
        assert row.seconds > 0


@pytest.mark.slow
def test_tabular(tmp_path, capsys):
    report = run("examples.tabular", "--output", tmp_path / "out")
    assert list(report["diabetes"]) == ["network", "boosting", "boosting, conformal"]
    for rows in report["diabetes"].values():
        assert len(rows) == 2
        assert all(row["interval_score"] >= row["width"] > 0 for row in rows)
    assert json.loads((tmp_path / "out" / "tabular.json").read_text()) == report
    assert "| diabetes | network |" in capsys.readouterr().out


def test_interval_score_is_smallest_for_the_true_quantiles():
    """Mean score of normal observations, for intervals of several kinds; that of the true ones is 2 phi(z) / .05."""
    from examples.tabular import interval_score

    y = stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)  # the distribution itself, without noise
    z = stats.norm.ppf(0.95)
    found = {ends: interval_score(np.float64(ends[0]), np.float64(ends[1]), y).mean() for ends in
             ((-z, z), (-z + 0.1, z), (-z, z + 0.1), (-z - 0.1, z + 0.1), (-z + 0.1, z + 0.1))}  # fmt: skip
    assert min(found, key=found.get) == (-z, z)
    assert found[-z, z] == pytest.approx(2 * stats.norm.pdf(z) / 0.05, rel=1e-3)


@pytest.mark.slow
def test_demo(tmp_path, capsys):
    report = run("examples.demo", "--output", tmp_path / "out")
    assert next(iter(report)) == "microcanonical chains"
    assert len(report) == 6
    for row in report.values():
        assert row["rmse"] > 0
        assert math.isfinite(row["log_likelihood"])
        assert 0 <= row["coverage"] <= 1
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"demo.nc", "demo.png"}
    saved = az.from_netcdf(tmp_path / "out" / "demo.nc")
    assert saved["predictions"]["y_mean"].sizes["rows"] == 700
    shown = capsys.readouterr()
    assert "6 of 6: gradient boosting" in shown.err
    assert "Health of the chains" in shown.out


def test_demo_compares_in_megapascal():
    """An exact prediction with a known sd has the density of that normal; ends and means are in the units of y."""
    from examples import demo

    rows = demo.load(0, 309)
    assert len(rows.y) == 721
    assert abs(rows.y.mean()) < 1e-5
    found = demo.from_moments(rows.y_new, np.full(309, 0.25), rows)
    mpa = rows.y_new * rows.scale + rows.center
    assert 2 < mpa.min() < mpa.max() < 83
    np.testing.assert_allclose(found.log_density, stats.norm.logpdf(0, scale=0.5 * rows.scale), rtol=1e-5)
    np.testing.assert_allclose(found.high - found.mean, 1.645 * 0.5 * rows.scale, rtol=1e-5)
    made = demo.scores(found, found, rows, 1.0)
    assert made["coverage"] == 1
    assert made["rmse"] == pytest.approx(0, abs=1e-4)
    worse = demo.from_moments(rows.y_new + 0.5, np.full(309, 0.25), rows)
    assert demo.scores(worse, found, rows, 1.0)["behind"] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.slow
def test_minibatch(tmp_path, capsys):
    rows = run("examples.minibatch", "--output", tmp_path / "out")
    assert [row.method for row in rows] == ["SGLD", "PSGLD", "SGHMC", "NUTS, 40 rows"]
    check_scores(rows)
    out = capsys.readouterr().out
    assert "diabetes data instead" in out
    for row in rows[:3]:
        assert row.gradients == 2 * (10 + 12) * 30  # chains x draws x steps
        assert row.passes == pytest.approx(row.gradients * 64 / 353, rel=1e-2)
        assert row.method in out
        saved = az.from_netcdf(tmp_path / "out" / f"minibatch_{row.method.lower()}.nc")
        assert dict(saved["predictions"]["y_mean"].sizes) == {"chain": 2, "draw": 12, "data": 30}
        assert not saved["sample_stats"]["diverging"].any()
        assert (saved["sample_stats"]["step_size"] > 0).all()
        assert saved.attrs["dataset"] == "diabetes"
    assert rows[3].gradients >= 2 * (15 + 12)
    assert (tmp_path / "out" / "minibatch.png").stat().st_size > 10_000


@pytest.mark.slow
def test_minibatch_takes_california_housing(tmp_path):
    """The file is made here: 200 rows of the columns and ranges of the real one."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(200, 8))
    names = np.array([f"feature{i}" for i in range(8)])
    np.savez(tmp_path / "california_housing.npz", X=x, y=2 + x[:, 0], feature_names=names)
    module = importlib.import_module("examples.minibatch")
    data = module.load_data(module.parse(["--data", str(tmp_path)]))
    assert data.name == "california"
    assert data.x_train.shape == (160, 8)
    np.testing.assert_allclose(data.y_train.mean(), 0, atol=1e-10)


def test_minibatch_names_a_wrong_data_folder(tmp_path):
    with pytest.raises(ValueError, match="No such folder"):
        run("examples.minibatch", "--data", tmp_path / "absent", "--output", tmp_path)


@pytest.mark.slow
def test_ensembles(tmp_path, capsys):
    rows = run("examples.ensembles", "--output", tmp_path / "out")
    assert [row.method for row in rows] == ["deep ensemble", "MCLMC", "NUTS"]
    check_scores(rows)
    out = capsys.readouterr().out
    assert "made in the place of energy" in out
    assert "energy errors imply a bias" in out
    assert rows[0].gradients == 2 * 600
    # 6 transitions of 100 steps of Adam, 14 + 12 of 4 steps of two gradients; 24 products with the Hessian, and a
    # gradient at each of the 6 ends of a window of the warm-up.
    assert rows[1].gradients == 2 * (6 * 100 + 26 * 4 * 2 + 24 * 2 + 6)
    assert math.isnan(rows[0].median_ess)
    assert rows[1].median_ess > 0
    members = az.from_netcdf(tmp_path / "out" / "ensembles_energy_deep_ensemble.nc")
    assert dict(members["predictions"]["y_mean"].sizes) == {"chain": 2, "draw": 1, "data": 40}
    assert (tmp_path / "out" / "ensembles_energy.png").stat().st_size > 10_000


@pytest.mark.slow
def test_microcanonical(tmp_path):
    report = run("examples.benchmarks.microcanonical", "--output", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()).keys() == report.keys()
    case = report["cases"]["energy, 1x20"]
    assert set(case) == {"MCLMC"}
    longest = max(found["equal_gradients"]["seconds"] for found in case.values())
    for found in case.values():
        equal = found["equal_gradients"]
        assert equal["median_ess"] > 0
        assert len(equal["mean"]) == len(equal["sd"]) == 40
        assert found["equal_seconds"]["seconds"] >= longest
        assert found["equal_seconds"]["draws"] >= equal["draws"]
    assert case["MCLMC"]["equal_gradients"]["gradients"] == 2 * 12 * 25 * 2
    costs = report["step_costs"]["energy, 1x20"]
    assert costs["flops"]["gradient"] > 0
    # Not much more arithmetic than two gradients.
    assert costs["flops"]["step, mclachlan"] < 2.5 * costs["flops"]["gradient"]
    assert set(costs["ratios"]) > {"mclachlan / bare gradient"}


@pytest.mark.slow
def test_function_agreement(tmp_path):
    page = page_with(tmp_path, "function_agreement")
    output = tmp_path / "out.json"
    (row,) = run("examples.benchmarks.function_agreement", "--output", output, "--docs", page)
    assert json.loads(output.read_text())["rows"] == [row]
    assert "| energy, 1x20 | MCLMC |" in page.read_text()
    assert all(math.isfinite(value) for value in row["agreement"].values())


def test_agreement_is_one_of_equal_laws_and_sees_a_shift():
    """Chains of autocorrelated normal draws: the root mean square of t is what Welch's t has, a shift raises it."""
    from examples.benchmarks.function_agreement import compare

    rng = np.random.default_rng(0)
    level = rng.normal(size=(2, 8, 1, 2000))  # chains that have not mixed
    first, second = level + rng.normal(size=(2, 8, 50, 2000))
    same = compare(first, second)
    assert same["rms t, mean"] == pytest.approx(same["expected rms t"], rel=0.06)
    assert same["share beyond 95 %, mean"] == pytest.approx(0.05, abs=0.02)
    assert compare(first + 2.0, second)["rms t, mean"] > 3


@pytest.mark.slow
def test_collapse_cost(tmp_path):
    rows = run("examples.benchmarks.collapse_cost", "--output", tmp_path / "cost.json")
    assert [(row["hidden"], row["outputs"]) for row in rows] == [(50, 1), (50, 3)]
    # Counted by the compiler, not timed: without derivatives by directions, and outputs apart from each other.
    assert all(row["flops_ratio"] < limit for row, limit in zip(rows, (12, 25), strict=True))
    assert all(row["ratio"] > 0 and row["processor_ratio"] > 0 for row in rows)
    assert json.loads((tmp_path / "cost.json").read_text())["rows"] == rows


@pytest.mark.slow
def test_mixing(tmp_path):
    page, path = page_with(tmp_path, "mixing", "mixing_agreement"), tmp_path / "mixing.json"
    report = run("examples.benchmarks.mixing", "--output", path, "--docs", page)
    written = json.loads(path.read_text())["rows"]
    assert [row["way"] for row in written] == ["collapsed", "exchange", "smc"]
    assert page.read_text().count("| energy | smc |") == 1
    assert all(row["seconds"] >= 1 and len(row["noise_by_chain"]) == 2 for row in written)
    again = run("examples.benchmarks.mixing", "--output", path)  # nothing is left to do
    assert again["rows"] == written == json.loads(json.dumps(report["rows"], default=str))


def test_annealing_finds_evidence_and_posterior_of_a_linear_model():
    """Log evidence and mean of eight populations, within four standard errors (and the bias of a log, var / 2)."""
    from types import SimpleNamespace

    from examples.benchmarks.annealing import Clock, anneal

    rng = np.random.default_rng(0)
    design, noise = rng.normal(size=(12, 3)), 0.3
    y = design @ np.array([1.0, -0.5, 0.2]) + noise * rng.normal(size=12)

    def prior(q):
        return -jax.scipy.stats.norm.logpdf(q).sum()

    def potential(q):
        return prior(q) - jax.scipy.stats.norm.logpdf(y, design @ q, noise).sum()

    options = SimpleNamespace(leapfrogs=5, mutations=4, effective=0.7, seed=0)
    start = rng.normal(size=(8, 200, 3)).astype(np.float32)
    now, _ = anneal(start, potential, prior, options, Clock())
    exact = stats.multivariate_normal(np.zeros(12), design @ design.T + noise**2 * np.eye(12)).logpdf(y)
    variance = now.log_evidence.var(ddof=1)
    assert (now.beta == 1).all()
    assert variance < 0.5
    assert abs(now.log_evidence.mean() + variance / 2 - exact) < 4 * (variance / 8) ** 0.5
    covariance = np.linalg.inv(np.eye(3) + design.T @ design / noise**2)
    means, sd = now.q.mean(1), np.diag(covariance) ** 0.5
    z = (means.mean(0) - covariance @ design.T @ y / noise**2) / (means.std(0, ddof=1) / 8**0.5)
    assert np.abs(z).max() < 5  # t with 7 degrees of freedom: 5 has a p-value of 0.0016
    assert np.allclose(now.q.std(1).mean(0), sd, rtol=0.1)


def test_exchanges_of_units_follow_the_density_of_all_chains():
    """A chain that prefers large biases gets them, by the exact odds: of two exchangeable states, e^2 : 1."""
    from types import SimpleNamespace

    from examples.benchmarks import mixing

    case = SimpleNamespace(potential=lambda q: -2.0 * q[0] * q[1])  # biases come first
    z = {mixing.BIAS: np.array([[1.0], [0.0]]), mixing.KERNEL: np.array([[[1.0]], [[0.0]]])}
    z = jax.tree.map(jax.numpy.asarray, z)
    _, accepted = mixing.exchange_units(case, z, jax.random.key(0), 50)
    assert accepted == 1.0  # both have the same density, whichever chain has the unit
    tilted = SimpleNamespace(potential=lambda q: -q[0] * q[2])
    z["side"] = jax.numpy.array([2.0, 0.0])  # of the first chain alone
    ends = jax.vmap(lambda key: mixing.exchange_units(tilted, z, key, 21)[0][mixing.BIAS][0, 0])
    share = float(ends(jax.random.split(jax.random.key(1), 2000)).mean())
    expected = math.exp(2) / (1 + math.exp(2))
    # After n moves the share of one state is off by at most (-e^-2)^n: nothing after 21.
    assert abs(share - expected) < 4 * (expected * (1 - expected) / 2000) ** 0.5


@pytest.mark.slow
def test_gradient_cost(tmp_path):
    path, page = tmp_path / "new" / "cost.json", page_with(tmp_path, "gradient_cost")
    rows = run("examples.benchmarks.gradient_cost", "--output", path, "--docs", page)
    assert [row["n"] for row in rows] == [455, 455, 5000]
    assert all(row["gradient_ratio"] > 0 and row["leapfrog_ratio"] > 0 for row in rows)
    # Counted by the compiler, not timed: our models do no more arithmetic than the hand-written ones.
    assert all(row["flops_ratio"] < 1.05 for row in rows)
    written = json.loads(path.read_text())
    assert written["rows"] == rows
    assert set(written) == {"rows", "versions", "machine", "options"}
    shown = page.read_text()
    assert f"| 455 | 50, 50, 1 | {rows[1]['gradient_ratio']:.2f} |" in shown
    assert f"jax {written['versions']['jax']}" in shown


@pytest.mark.slow
def test_compilation(tmp_path, monkeypatch, capsys):
    """Processes are asked for with and without a cache, which one process fills before; what one prints is read."""
    asked = []

    def pretend(words, env, **kwargs):
        asked.append((json.loads(words[-1]), env.get("JAX_COMPILATION_CACHE_DIR")))
        return subprocess.CompletedProcess(words, 0, f"noise\n[{len(asked)}, 0.5]\n")

    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    module = importlib.import_module("examples.benchmarks.compilation")
    monkeypatch.setattr(module.subprocess, "run", pretend)
    page = page_with(tmp_path, "compilation")
    report = run("examples.benchmarks.compilation", "--output", tmp_path / "out.json", "--docs", page)
    assert [row["first"] for row in report["rows"]] == [1, 2, 4, 6]
    assert [row["data_as_arguments"] for row in report["rows"]] == [False, True] * 2
    assert [job["seeds"] for job, _ in asked] == [[0, 1], [0, 1]] + 2 * [[0, 1], [2, 3]]
    folders = [folder for _, folder in asked]
    assert folders[:2] == [None, None]
    assert folders[2] == folders[3] != folders[4] == folders[5]
    assert "| NUTS | yes | no | 4.0 | 0.5 |" in page.read_text()
    # What such a process does.
    capsys.readouterr()
    assert module.main(["--job", json.dumps(asked[0][0] | {"seeds": [0]})]) is None
    (seconds,) = json.loads(capsys.readouterr().out)
    assert seconds > 0


def test_first_draw(tmp_path, monkeypatch):
    """A process for each way, without a cache on disk; what one prints is read, and compared with NUTS."""
    asked = []

    def pretend(words, env, **kwargs):
        asked.append((words[words.index("--job") + 1], env))
        phases = {"import": [0.25, 0], "first": [4.0 / len(asked), 30], "other_data": [1.0, 1]}
        return subprocess.CompletedProcess(words, 0, f"noise\n{json.dumps(phases)}\n")

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    module = importlib.import_module("examples.benchmarks.first_draw")
    module.environment([])  # Python may start a process to name the platform, once
    monkeypatch.setattr(module.subprocess, "run", pretend)
    path, page = tmp_path / "out.json", page_with(tmp_path, "first_draw")
    report = run("examples.benchmarks.first_draw", "--output", path, "--docs", page)
    assert json.loads(path.read_text()) == report
    assert [way for way, _ in asked] == ["NUTS", "AutoMeanField"]
    assert not any("JAX_COMPILATION_CACHE_DIR" in env for _, env in asked)
    assert all(env["JAX_ENABLE_COMPILATION_CACHE"] == "false" for _, env in asked)
    assert "| AutoMeanField | 0.25 | 2.00 (30) | 0.50 | 1.00 (1) |  |  |" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["SGLD, step size given", "AutoMeanField", "AutoADF", "BlackJAX MCLMC"])
def test_a_process_of_first_draw(way, capsys):
    module = importlib.import_module("examples.benchmarks.first_draw")
    if way in module.BY_HAND:
        pytest.importorskip("blackjax")
    assert module.main(["--job", way, "--rows", "6", "--width", "1"]) is None
    found = json.loads(capsys.readouterr().out)
    assert tuple(found) == module.PHASES[: 3 if way in module.BY_HAND else 5]
    assert all(seconds >= 0 and programs >= 0 for seconds, programs in found.values())
    assert found["first"][0] > 0


@pytest.mark.slow
def test_minibatches(tmp_path):
    """Everything once; a second run leaves out what the file has; gradients are close to what was asked for."""
    path, page = tmp_path / "out.json", page_with(tmp_path, "minibatches")
    some = ["--methods", "SGNHT", "MCLMC", "long chain", "deep ensemble", "AutoMeanField"]
    report = run("examples.benchmarks.minibatches", *some, "--output", path, "--gradients", "4000", "--docs", page)
    assert json.loads(path.read_text()) == json.loads(json.dumps(report, default=str))
    assert {"jax", "numpyro"} <= set(report["versions"])
    assert len(report["rows"]) == 5
    for row in report["rows"]:
        assert all(math.isfinite(row[name]) for name in ("sd", "rmse", "lppd", "sigma"))
        if row["method"] in ("SGNHT", "MCLMC"):
            assert 0.75 * 4000 < row["spent"] < 1.25 * 4000
            assert len(row["variance_covered"]) == 2
    assert "| 40 | 4,000 | SGNHT | " in page.read_text()
    before = path.read_text()
    run("examples.benchmarks.minibatches", *some, "--output", path, "--gradients", "4000", "--docs", page)
    assert json.loads(path.read_text())["rows"] == json.loads(before)["rows"]


@pytest.mark.slow
def test_gradient_variance(tmp_path):
    path = tmp_path / "new" / "variance.json"
    report = run("examples.benchmarks.gradient_variance", "--output", path)
    written = json.loads(path.read_text())
    assert written["variance"] == report["variance"]
    (row,) = written["variance"]
    assert row["batch_size"] == 8
    assert row["ratio"]["one draw"] == 1
    assert all(value > 0 for value in row["variance"].values())
    assert [part["network"] for part in written["steps"]] == ["mlp"]
    for part in written["steps"]:
        assert set(part["milliseconds"]) == {*row["ratio"], "deterministic"} - {"ten draws"}
        assert part["time_ratio"]["deterministic"] == part["flops_ratio"]["deterministic"] == 1
    assert written["options"]["width"] == 3


@pytest.mark.slow
def test_sgld_step(tmp_path, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    path, page = tmp_path / "new" / "step.json", page_with(tmp_path, "sgld_step", "sgld_sizes")
    report = run("examples.benchmarks.sgld_step", "--output", path, "--docs", page)
    written = json.loads(path.read_text())
    assert {part: written[part] for part in ("steps", "run", "sizes", "memory")} == {
        part: report[part] for part in ("steps", "run", "sizes", "memory")
    }
    assert {"bare SGD", "leafwise SGLD", "engine"} <= set(written["steps"]["wall_us"])
    for part, ratio in (("steps", "engine / bare SGD"), ("run", "MCMC(SGLD) / engine"), ("sizes", "N=640 / N=64")):
        assert written[part]["wall_ratio"][ratio] > 0
        assert written[part]["processor_ratio"][ratio] > 0
    assert written["progress_bar"]
    assert written["options"]["steps"] == 20
    shown, wall = page.read_text(), written["steps"]["wall_us"]
    both = f"{wall['engine']:.1f} | {wall['bare SGD']:.1f}"
    assert f"| engine / bare SGD | {both} | {written['steps']['wall_ratio']['engine / bare SGD']:.2f} |" in shown
    sizes = written["sizes"]["wall_us"]
    assert f"| 640 | {sizes['N=640']:.1f} | {sizes['N=640 epochs']:.1f} |" in shown
    assert written["versions"]["jax"]
    assert written["machine"]["cores"] >= 1


@pytest.mark.slow
def test_memory_is_set_by_the_draws_alone(tmp_path):
    """Compiled working memory does not grow with the steps, nor what is kept with the steps per draw."""
    memory = importlib.import_module("examples.benchmarks.sgld_step").measure_memory(640)
    short, long, longest = memory["temporary_bytes_by_steps"].values()
    assert longest <= 1.1 * short
    assert long <= 1.1 * short
    few, same, double = memory["kept_bytes"].values()
    assert few == same
    assert 1.8 * few < double < 2.2 * few


@pytest.mark.slow
def test_probabilistic_backpropagation(tmp_path, capsys):
    rows = run("examples.probabilistic_backpropagation", "--output", tmp_path / "out")
    assert [row.method for row in rows] == ["PBP, all rows", "NUTS, 30 rows", "ridge regression"]
    check_scores(rows)
    assert rows[0].rmse < 75  # that of the mean
    out = capsys.readouterr().out
    assert "diabetes data instead" in out
    assert "noise variance" in out
    assert (tmp_path / "out" / "probabilistic_backpropagation.png").stat().st_size > 10_000


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*posterior sds from the mode")
def test_laplace_uci(tmp_path, data_folder):
    """One split, tiny; JSON and a table."""
    page, path = page_with(tmp_path, "laplace_uci"), tmp_path / "uci.json"
    report = run("examples.benchmarks.laplace_uci", "--data", data_folder, "--output", path, "--docs", page)
    assert json.loads(path.read_text())["rows"][0]["by_split"] == report["rows"][0]["by_split"]
    assert "| yacht | 3 | 1 |" in page.read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*posterior sds from the mode")
def test_laplace_torch(tmp_path):
    found = run("examples.benchmarks.laplace_torch", "--output", tmp_path / "times.json")
    assert set(found["diag"]) == {"first", "second"}


@pytest.mark.data
@pytest.mark.slow
def test_adf_uci(tmp_path, data_folder, capsys):
    """Two splits, tiny; JSON, and a table put into a page between its marks."""
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- table of adf_uci: begin -->\nold\n<!-- table of adf_uci: end -->\nbelow\n")
    path = tmp_path / "new" / "uci.json"
    report = run("examples.benchmarks.adf_uci", "--data", data_folder, "--output", path, "--docs", page)
    assert json.loads(path.read_text())["rows"][0]["by_split"] == report["rows"][0]["by_split"]
    assert len(report["rows"][0]["by_split"]["rmse"]) == 2
    assert page.read_text().startswith("above")
    assert page.read_text().endswith("below\n")
    assert "old" not in page.read_text()
    assert capsys.readouterr().out.strip() in page.read_text()


@pytest.mark.slow
def test_adf_speed(tmp_path):
    path = tmp_path / "new" / "speed.json"
    report = run("examples.benchmarks.adf_speed", "--output", path)
    assert json.loads(path.read_text())["boston"] == report["boston"]
    for name in ("boston", "california"):
        assert set(report[name]["microseconds"]) == {"AutoADF", "plain scan, float64", "plain scan, float32"}
        assert all(value > 0 for value in report[name]["ratio"].values())


# -- variational guides -------------------------------------------------------------------------------


@pytest.mark.slow
def test_variational(tmp_path, capsys):
    rows = run("examples.variational", "--output", tmp_path / "out")
    assert [row.method for row in rows] == ["mean field", "full rank", "coupling flow", "NUTS"]
    for row in rows:
        assert row.gap_sd > 0
        assert math.isfinite(row.log_score)
        assert (row.elbo is None) == (row.pareto_k is None) == (row.method == "NUTS")
    assert rows[-1].sd_distance == 0
    assert "network 1-3-1" in capsys.readouterr().out
    assert (tmp_path / "out" / "variational.png").stat().st_size > 10_000


@pytest.mark.slow
def test_last_layer(tmp_path, capsys):
    rows = run("examples.last_layer", "--output", tmp_path / "out")
    assert [row.random_weights for row in rows] == [0, 30, 30, 300, 300]  # 64-4-2-10: 260 + 10 + 30
    for row in rows:
        assert 0 <= row.accuracy <= 1
        assert row.log_score < 0
        assert (row.ess is None) == (row.random_weights == 0)
    assert "30 training and 898 test digits" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "last_layer.json").read_text())
    assert [line["accuracy"] for line in written] == [row.accuracy for row in rows]
    assert (tmp_path / "out" / "last_layer.png").stat().st_size > 10_000


@pytest.mark.slow
def test_lotka_volterra(tmp_path, capsys):
    report = run("examples.lotka_volterra", "--output", tmp_path / "out")
    for found in report["pelts"].values():
        assert all(low <= mean <= high for mean, low, high in found["intervals"].values())
        assert math.isfinite(found["log_score"])
    assert all(count in (0, 1) for counts in report["covered"].values() for count in counts.values())
    assert "| with a network |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "lotka_volterra.json").read_text())["covered"] == report["covered"]
    assert (tmp_path / "out" / "lotka_volterra.png").stat().st_size > 10_000


@pytest.mark.filterwarnings("ignore:.*rows lie more than 3 standard deviations")  # so few rows to learn from
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*posterior sds from the mode")
def test_active_learning(tmp_path, capsys):
    report = run("examples.active_learning", "--output", tmp_path / "out")
    assert report["labels"] == [16, 19]
    assert report["programs"][0] > 0
    assert sum(report["programs"][2:]) == 0  # the second seed compiles nothing
    assert np.shape(report["random"]) == np.shape(report["uncertain"]) == (2, 2)
    assert [row[0] for row in report["random"]] == [row[0] for row in report["uncertain"]]
    assert "diabetes, 2 seeds" in capsys.readouterr().out
    assert (tmp_path / "out" / "active_learning.png").stat().st_size > 10_000


@pytest.mark.filterwarnings("ignore:.*rows lie more than 3 standard deviations")  # so few rows to learn from
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*worse than by a constant")
def test_bayesian_optimization(tmp_path, capsys):
    from examples.bayesian_optimization import FUNCTIONS

    found = run("examples.bayesian_optimization", "--output", tmp_path / "out")
    assert {name: list(by_model) for name, by_model in found.items()} == {
        name: ["network", "Gaussian process", "random"] for name in ("branin", "hartmann")
    }
    regrets = np.array([list(by_model.values()) for by_model in found.values()])
    assert regrets.shape == (2, 3, 2, 6)
    assert (regrets >= 0).all()
    assert (np.diff(regrets) <= 0).all()
    # The published minima.
    least = {"branin": [0.5427728, 0.151667], "hartmann": [0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573]}
    for name, at in least.items():
        np.testing.assert_allclose(FUNCTIONS[name].value(np.array([at])), FUNCTIONS[name].least, atol=1e-4)
    assert "| hartmann | random |" in capsys.readouterr().out
    assert (tmp_path / "out" / "bayesian_optimization.png").stat().st_size > 10_000


@pytest.mark.slow
def test_nnx_module(tmp_path, capsys):
    found = run("examples.nnx_module", "--output", tmp_path / "out")
    assert set(found) == {"Bayesian", "trained by optax", "least squares"}
    assert all(len(values) == 2 for by_name in found.values() for values in by_name.values())
    assert "| Bayesian |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "nnx_module.json").read_text()) == found
    assert (tmp_path / "out" / "nnx_module.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:to_inference_data")  # chains this short are not healthy
def test_groups(tmp_path, capsys):
    found = run("examples.groups", "--output", tmp_path / "out")
    assert list(found["log_likelihood"]) == ["network, no groups", "linear, groups", "network, groups"]
    assert all(math.isfinite(value) for value in found["log_likelihood"].values())
    assert "| network, groups |" in capsys.readouterr().out
    assert (tmp_path / "out" / "groups.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:to_inference_data")  # chains this short are not healthy
def test_unknown_digits(tmp_path, capsys):
    found = run("examples.unknown_digits", "--output", tmp_path / "out")
    assert list(found) == ["one network", "ensemble", "MCLMC"]
    for by_score in found.values():
        assert all(len(values) == 2 for values in by_score.values())
        assert all(0 <= value <= 1 for name in ("accuracy", "auroc") for value in by_score[name])
        assert min(by_score["nll"]) > 0
    assert "| MCLMC minus ensemble |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "unknown_digits.json").read_text()) == found
    assert (tmp_path / "out" / "unknown_digits.png").stat().st_size > 10_000


@pytest.mark.slow
def test_image_classification(tmp_path, capsys):
    page = page_with(tmp_path, "image_classification")
    report = run("examples.image_classification", "--output", tmp_path / "out", "--docs", page)
    assert f"| textbook | 2 | 1 | {report['accuracy']:.3f} |" in page.read_text()
    assert len(report["seconds"]) == 2
    assert 0 <= report["accuracy"] <= 1
    assert 0 <= report["auroc digits 5 to 9, mutual information"] <= 1
    assert report["step"]["ratio"] > 0
    assert "small digits instead" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "image_classification_textbook.json").read_text())
    assert written["accuracy"] == report["accuracy"]
    for name in ("uncertainty", "samples"):
        assert (tmp_path / "out" / f"image_classification_{name}.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:guides.AutoLaplace.run. .* sds from the mode")  # one epoch on few digits
def test_image_chains(tmp_path, monkeypatch):
    """Two methods, then two more in a second call, which keeps the rows and the networks of the first."""
    module, page = importlib.import_module("examples.image_chains"), page_with(tmp_path, "image_chains")
    given = ("--output", tmp_path / "out", "--docs", page)
    first = run("examples.image_chains", *given)["rows"]
    monkeypatch.setattr(module, "trained", lambda *_: pytest.fail("trained again"))
    report = run("examples.image_chains", *given, "--methods", "ensemble", "network", "last-layer-Laplace")
    rows = report["rows"]
    assert rows[:2] == first
    assert [row["method"] for row in rows] == ["ensemble", "SGHMC", "network", "last-layer-Laplace"]
    assert [(row["draws"], row["epochs"]) for row in rows] == [(2, 2), (4, 4), (1, 1), (4, 2)]
    for row in rows:
        assert 0 <= row["accuracy"] <= 1
        assert row["path"][-1] == row["NLL"] <= row["NLL of a draw"]
        assert ("AUROC digits 5 to 9, logits" in row) == (row["draws"] > 1)
    assert module.table(report) in page.read_text()
    assert json.loads((tmp_path / "out" / "image_chains.json").read_text())["rows"] == rows
    assert (tmp_path / "out" / "image_chains.png").stat().st_size > 10_000


def test_table_of_image_chains_is_that_of_its_file():
    from examples.benchmarks.shared import provenance
    from examples.image_chains import table

    report = json.loads((FOLDER.parent / "docs" / "image_chains.json").read_text())
    made = f"begin -->\n{table(report)}\n\n{provenance([report])}\n<!-- table of image_chains"
    assert made in (FOLDER.parent / "docs" / "guides.md").read_text()


@pytest.mark.data
@pytest.mark.slow
def test_variational_uci(tmp_path, data_folder, capsys):
    path, page = tmp_path / "new" / "uci.json", tmp_path / "page.md"
    page.write_text("a\n<!-- table of variational_uci: begin -->\n<!-- table of variational_uci: end -->\nb\n")
    script = "examples.benchmarks.variational_uci"
    report = run(script, "--data", data_folder, "--output", path, "--docs", page)
    assert json.loads(path.read_text())["rows"][0]["NUTS"]["mean_distance"] == [0.0]
    assert report["rows"][0]["AutoCoupling"]["mean_distance"][0] > 0
    assert capsys.readouterr().out.strip() in page.read_text()


@pytest.mark.slow
def test_coupling_step(tmp_path):
    path, page = tmp_path / "new" / "coupling.json", page_with(tmp_path, "coupling_step")
    report = run("examples.benchmarks.coupling_step", "--output", path, "--docs", page)
    written = json.loads(path.read_text())
    assert written["rows"] == report["rows"]
    (row,) = report["rows"]
    assert row["latent"] == 12
    assert len(set(row["parameters"].values())) == 1  # the flows compared have the same size
    assert all(value > 0 for value in row["microseconds"].values())
    assert row["ratio"] is None or row["ratio"] > 0
    assert f"| 12 | 1 | {row['microseconds']['AutoCoupling']:.0f} |" in page.read_text()
    module = importlib.import_module("examples.benchmarks.coupling_step")
    times = {"AutoCoupling": [2.0, 2.0, 9.0], "a": [4.0, 4.0, 4.0], "b": [5.0, 1.0, 5.0]}
    assert module.ratio_to_fastest(times) == 0.5


@pytest.mark.slow
def test_hierarchical_hmc(tmp_path):
    page = page_with(tmp_path, "hierarchical_hmc")
    path = tmp_path / "new" / "hmc.json"
    report = run("examples.benchmarks.hierarchical_hmc", "--output", path, "--docs", page)
    assert json.loads(path.read_text())["rows"] == report["rows"]
    assert [row["way"] for row in report["rows"]] == ["long", "persistent"]
    assert page.read_text().count("Gibbs, long trajectories") == page.read_text().count("persistent momentum") == 1
    # Four trajectories per draw of one leapfrog, and the gradient at their start.
    assert report["rows"][1]["gradients"] == 2 * 8 * 4 * 2
    for row in report["rows"]:
        assert len(row["mean log precision by chain"]) == 2


@pytest.mark.slow
def test_horseshoe(tmp_path, capsys):
    path = tmp_path / "new" / "horseshoe.json"
    report = run("examples.benchmarks.horseshoe", "--output", path)
    written = json.loads(path.read_text())
    assert written["comparison"].keys() == report["comparison"].keys()
    assert "ESS/s" in capsys.readouterr().out
    for name, draws in (("gibbs", 24), ("nuts", 16)):
        part = written[name]
        assert part["draws"] == draws
        assert sorted(part["log tau"]["quantiles"].values()) == list(part["log tau"]["quantiles"].values())
        assert part["ess per second"]["tau"] == pytest.approx(part["ess"]["tau"] / part["cost"]["sampling"])
    assert written["gibbs"]["cost"]["gradients"] == 0
    assert 16 <= written["nuts"]["cost"]["gradients"] <= 16 * 3
    ratio = report["gibbs"]["ess per second"]["tau"] / report["nuts"]["ess per second"]["tau"]
    assert report["comparison"]["ess per second, gibbs / nuts"]["tau"] == pytest.approx(ratio)
    module = importlib.import_module("examples.benchmarks.horseshoe")
    parts = [
        {**report[name], "top inputs": top}
        for name, top in (("gibbs", [4, 1, 0, 2, 3, 6]), ("nuts", [5, 1, 0, 2, 3]))
    ]
    assert module.compare(*parts)["ranking exact"] == {"gibbs": True, "nuts": False}


# -- symmetries ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_symmetries(tmp_path, capsys):
    rows = run("examples.symmetries", "--output", tmp_path / "out")
    assert [row["way"] for row in rows] == ["moves", "quotient"]
    for row in rows:
        assert set(row["ess"]) == {"log norm", "log ratio", "place", "log product", "log s", "function"}
        for ess in row["ess"].values():
            assert ess["median_per_draw"] >= ess["min_per_draw"] >= 0
            draws_per_second = 16 / row["processor_seconds"]
            assert ess["min_per_second"] == pytest.approx(ess["min_per_draw"] * draws_per_second)
        assert 1 <= row["mean_tree"] <= 3
        assert 0 <= row["divergences"] <= 16
        assert row["seconds"] > 0
        assert math.isfinite(row["scale_mean"])
        assert row["scale_mcse"] >= 0
    written = json.loads((tmp_path / "out" / "symmetries.json").read_text())
    assert written["rows"] == rows
    assert written["dataset"] == "diabetes"
    assert written["settings"]["max_tree_depth"] == 2
    assert (tmp_path / "out" / "symmetries_relu.png").stat().st_size > 10_000

    module, page = importlib.import_module("examples.symmetries"), tmp_path / "tables" / "table.md"
    again = module.main(["--summarize", str(tmp_path / "out" / "symmetries.json"), "--table", str(page)])
    assert again == rows
    table = module.table(rows, "relu")
    assert table in capsys.readouterr().out
    assert table in page.read_text()
    assert "2 chains × (6 + 8) transitions, tree depth at most 2" in page.read_text()


def prior_fit(name, way, draws=2000):
    """A data set, a network and independent draws from the prior in the place of a run."""
    module = importlib.import_module("examples.symmetries")
    args = module.parse(["--width", "3", "--residual-width", "2"])
    data, net = module.load_data(args), module.make_net(name, args)
    model = module.make_model(net, centered=way == "centered")
    sites = Predictive(model, num_samples=draws)(jax.random.key(0), data.x_train[:9])
    sites = {k: np.asarray(v).reshape(2, draws // 2, *v.shape[1:]) for k, v in sites.items() if k != "y"}
    return module, data, net, module.Fit(sites, 3, 7.0, 1.0, 2.0, 4.0)


@pytest.mark.parametrize("name", ["bn", "residual", "relu"])
def test_summaries_of_independent_draws(name):
    """Draws from the prior: every ESS is that of independent draws, the scale has its exact mean."""
    way = "centered" if name == "relu" else "non-centered"
    module, data, net, fit = prior_fit(name, way)
    found = [
        s
        for s in symmetry.from_network(net, data.x_train.shape[1:])
        if not isinstance(s, symmetry.Permutation | symmetry.SignFlip)
    ]
    if name != "relu":
        kernels = [s.unit_axes[0].site for s in found if isinstance(s, symmetry.Scale)]
        found += [symmetry.JointScale((site,), f"{site}_scale") for site in kernels]
    values = module.statistics_of(name, fit, found)
    units = {"bn": 3, "residual": 4, "relu": 3}[name]
    assert {key: value.shape[2] for key, value in values.items() if key != "log s"} == dict.fromkeys(
        set(values) - {"log s"}, units
    )
    assert values["log s"].shape[2] == {"bn": 1, "residual": 2, "relu": 2}[name]
    function = module.predictor(net, data)(fit.sites)
    assert function.shape == (2, 1000, module.TEST_POINTS)
    summary = module.summarize(fit, values, function)
    for ess in summary["ess"].values():
        assert 0.7 < ess["min_per_draw"] <= ess["median_per_draw"] < 1.4
        assert ess["median_per_second"] == pytest.approx(ess["median_per_draw"] * 2000 / 4)
    # log |N(0, 1)| has variance pi^2 / 8; failure rate 1e-5.
    error = np.pi / 8**0.5 / 2000**0.5
    assert abs(summary["scale_mean"] - module.EXACT_MEAN) < 4.5 * error
    assert summary["scale_mcse"] == pytest.approx(error, rel=0.3)
    low, high = np.exp(module.EXACT_INTERVAL)
    np.testing.assert_allclose([low, high], stats.halfnorm(scale=1).ppf([0.05, 0.95]), rtol=1e-5)
    if name == "relu":  # uniform, whatever the orbit; failure rate 1e-5 each
        for unit in range(3):
            assert stats.kstest(values["place"][..., unit].ravel(), "uniform").pvalue > 1e-5


def test_place_on_an_orbit_is_the_distribution_function_of_scipy():
    module = importlib.import_module("examples.symmetries")
    draws = np.random.default_rng(0)
    for p in (0.0, 0.5, 6.5, -3.0):
        root = np.exp(draws.uniform(-3, 4, size=12))
        u = stats.geninvgauss.rvs(p, root, random_state=draws)
        np.testing.assert_allclose(
            module.place_on_orbit(p, root * u, root / u), stats.geninvgauss.cdf(u, p, root), atol=2e-4
        )


@pytest.mark.slow
def test_runs(tmp_path):
    report = run("examples.benchmarks.runs", "--output", tmp_path / "runs.json", "--data", tmp_path / "rows")
    assert report["psgld_same"]
    assert report["mean_field_same"]
    assert json.loads((tmp_path / "runs.json").read_text())["rows"] == 600


@pytest.mark.slow
def test_scale(tmp_path):
    report = run("examples.benchmarks.scale", "--output", tmp_path / "scale.json")
    assert report["chains"]["60"]["ratio"] > 0
    assert set(report["rows"]) == set(report["one_core"]) == {"60"}
    assert report["exchange_processes"].keys() == report["exchange_devices"].keys()


@pytest.mark.slow
def test_orbit_moves(tmp_path):
    path, page = tmp_path / "new" / "moves.json", page_with(tmp_path, "orbit_moves")
    report = run("examples.benchmarks.orbit_moves", "--output", path, "--docs", page)
    written = json.loads(path.read_text())
    assert written["nets"] == report["nets"]
    part = written["nets"]["ReLU"]
    assert part["leapfrog_steps"] == 3  # full trees of depth 2
    ratios, times = part["ratios"], part["microseconds"]
    own = ratios["sweep + refresh, NUTS / NUTS transition"]
    assert f"| ReLU | sweep + refresh | NUTS transition | {own['median']:.4f} |" in page.read_text()
    parts = {name.partition(":")[0] for name in times}  # the method follows
    assert {"Rescale(net/Dense_0.kernel)", "Permutation(net/Dense_0.kernel)"} < parts
    assert {"sweep", "NUTS transition", "SGLD step, B=8"} < parts
    assert all(time["wall_median"] >= time["wall_min"] > 0 for time in times.values())
    assert {ratio["limit"] for ratio in ratios.values()} == {0.05, 0.5}
    # One round: ratios of the medians are ratios of the times.
    for kernel, own in (("NUTS transition", "NUTS"), ("SGLD step, B=8", "SGLD B=8")):
        for sweep in ("sweep", "sweep, continuous", f"sweep + refresh, {own}"):
            expected = times[sweep]["wall_median"] / times[kernel]["wall_median"]
            assert ratios[f"{sweep} / {kernel}"]["median"] == pytest.approx(expected)
    draw = times["sweep + refresh, SGLD B=8"]["wall_min"] / times["SGLD step, B=8"]["wall_min"] / 2
    assert ratios["sweep + refresh, SGLD B=8 / draw of 2 SGLD steps, B=8"]["min"] == pytest.approx(draw)
    assert written["network"]["width"] == 3
    assert written["versions"]["jax"]


@pytest.mark.slow
def test_neal(tmp_path, capsys):
    report = run("examples.neal", "--output", tmp_path / "out")
    out = capsys.readouterr().out
    assert set(report) == {"bdata", "cdata"}
    assert set(json.loads((tmp_path / "out" / "neal.json").read_text())) == set(report)
    for name, part in report.items():
        assert f"a made-up set of the kind of {name}" in out
        assert set(part["test"]) == {"chain 1", "chain 2", "all chains"}
        for scores in part["test"].values():
            assert scores["log_probability"][0] < 0 <= scores["error"][0] <= 1
        # Averaged probabilities of the label score at least the average score (Jensen).
        first, second, both = (scores["log_probability"][0] for scores in part["test"].values())
        assert both > (first + second) / 2
        assert (tmp_path / "out" / f"neal_{name}.png").stat().st_size > 10_000
    middle, low, high = np.transpose(report["cdata"]["scales"])
    assert ((low <= middle) & (middle <= high)).all()
    assert np.shape(report["cdata"]["medians"]) == (2, 4)
    assert "Neal's run" not in out  # nothing to compare made-up cases with


def test_neal_scales_the_ard_prior_as_he_does():
    """His x0.2:0.5:1 with four inputs: width 0.2 / 4, because alpha is 1 (section on priors of his documentation).

    The precision of an input over that they share is Gamma(0.5) of mean 1, whatever the width.
    """
    neal = importlib.import_module("examples.neal")

    def draw(key):
        trace = handlers.trace(handlers.seed(neal.ard, key)).get_trace("k", (4, 3))
        return trace["k_shared_precision"]["value"], trace["k_precision"]["value"]

    shared, each = jax.vmap(draw)(jax.random.split(jax.random.key(0), 2000))
    # Two tests at 1e-4: a seed in 5000 fails.
    assert stats.kstest(shared * 0.25 * 0.05**2, stats.gamma(0.25).cdf).pvalue > 1e-4
    assert stats.kstest(np.ravel(0.5 * each / shared[:, None]), stats.gamma(0.5).cdf).pvalue > 1e-4


@pytest.mark.slow
def test_two_modes(tmp_path, capsys):
    page = page_with(tmp_path, "two_modes")
    report = run("examples.two_modes", "--output", tmp_path / "out", "--docs", page)
    assert page.read_text().count("\n| chain") == 2
    out = capsys.readouterr().out
    assert set(report["test"]) == {"chain 1", "chain 2", "all chains"}
    for scores in report["test"].values():
        assert math.isfinite(scores["log_probability"][0])
        assert scores["squared_error"][0] > 0
        assert scores["turns_up"] in np.arange(9) / 8  # of 4 draws, or of 8
    assert report["moves"] == 2 * 12 * 3
    assert 0 < report["accepted"] <= 1
    assert "a made-up set of the kind of rdata" in out
    assert "Neal's run" in out
    assert "Neal  " not in out  # nothing to compare made-up cases with
    assert json.loads((tmp_path / "out" / "two_modes.json").read_text())["moves"] == report["moves"]
    assert (tmp_path / "out" / "two_modes.png").stat().st_size > 10_000
    assert not jax.config.jax_enable_x64


@pytest.mark.slow
def test_infinite_width(tmp_path):
    report = run("examples.infinite_width", "--output", tmp_path / "out")
    assert [row.width for row in report.widths] == [2, 4]
    assert all(value > 0 and math.isfinite(value) for row in report.widths for value in row)
    assert report.distance > 0
    assert (tmp_path / "out" / "infinite_width.png").stat().st_size > 10_000


@pytest.mark.data
@pytest.mark.slow
def test_estimators(tmp_path, data_folder):
    page = page_with(tmp_path, "estimators")
    best = FOLDER.parent / "docs" / "uci.jsonl"
    files = ["--output", tmp_path / "estimators.json", "--docs", page, "--best", best]
    report = run("examples.benchmarks.estimators", "--data", data_folder, *files)
    (row,) = report["rows"]
    assert np.isfinite(row["log_likelihood"])
    assert row["best"]["method"] == "recipe 16x16x16, both"
    assert f"{row['rmse']:.3f}" in page.read_text()
    assert json.loads((tmp_path / "estimators.json").read_text())["rows"] == report["rows"]


@pytest.mark.data
@pytest.mark.slow
def test_estimators_of_random_rows(tmp_path, data_folder):
    page = page_with(tmp_path, "estimators_rows")
    call = ["--output", tmp_path / "rows.json", "--docs", page, "--rows", 40, "--effort", 0.01]
    report = run("examples.benchmarks.estimators", "--data", data_folder, *call)
    deep, shallow = report["rows"]
    assert (deep["network"], shallow["network"]) == ("deep", "shallow")
    assert deep["rmse"] != shallow["rmse"]
    assert f"{deep['log_likelihood'] - shallow['log_likelihood']:+.3f}" in page.read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # fits of a few steps
def test_classification(tmp_path):
    page = page_with(tmp_path, "classification")
    files = ["--output", tmp_path / "classification.json", "--docs", page]
    report = run("examples.benchmarks.classification", *files)
    assert json.loads((tmp_path / "classification.json").read_text())["rows"] == report["rows"]
    methods = [row["method"] for row in report["rows"] if row["split"] == 1]
    assert methods == ["Classifier", "logistic regression", "boosting", "boosting, tuned", "one network, temperature"]
    for row in report["rows"]:
        assert 0 <= row["accuracy"] <= 1
        assert 0 <= row["ece"] <= 1
        assert 0 < row["log_loss"] < 5
    assert "| wine | 2 | Classifier, effort 0.005 |" in page.read_text()
    assert run("examples.benchmarks.classification", *files)["rows"] == report["rows"]  # nothing is left to do


def test_classification_compares_split_by_split():
    """Signs are such that above 0 ours is better; the number of test rows of each class is the same in all splits."""
    from examples.benchmarks.classification import held_out_fifth, log_loss, scores, split_of, table

    first, second = (split_of("wine", split, 0.2) for split in (0, 1))
    assert np.bincount(first.y_test).tolist() == np.bincount(second.y_test).tolist() == [12, 14, 10]
    assert not np.array_equal(first.x_test, second.x_test)
    rows, held_out = held_out_fifth(first, 0)
    assert [len(rows[1]), len(held_out[1])] == [113, 29]

    probs, labels = np.array([[0.75, 0.25], [0.5, 0.5]]), np.array([0, 1])
    found = scores(probs, labels)
    assert found["log_loss"] == pytest.approx(-np.log(0.75 * 0.5) / 2) == pytest.approx(log_loss(probs, labels))
    assert found["accuracy"] == 0.5

    def row(method, split, loss, accuracy, **more):
        line = {"set": "wine", "split": split, "method": method, "log_loss": loss, "accuracy": accuracy, "ece": 0.1}
        return line | {"seconds": 2.0, "warnings": []} | more

    lines = [row("Classifier", split, 0.1, 0.9, effort=0.5) for split in (0, 1)]
    lines += [row("boosting", split, 0.3 + 0.2 * split, 0.8) for split in (0, 1)]
    head, _, ours, other = table(lines).splitlines()
    assert head.startswith("| set | splits |  | log loss | accuracy | ECE | gain in log loss |")
    assert ours == "| wine | 2 | Classifier, effort 0.5 | 0.100 | 0.900 | 0.100 |  |  |  | 2 |"
    assert other.startswith("| wine | 2 | boosting | 0.400 | 0.800 | 0.100 | +0.300 ± 0.100 | +0.100 ± 0.000 |")


def test_infinite_uci(tmp_path, data_folder):
    """One split, two steps; JSON, and two tables put into a page between the marks."""
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- table of infinite_uci: begin -->\nold\n<!-- table of infinite_uci: end -->\nbelow\n")
    path, nuts = tmp_path / "new" / "uci.json", tmp_path / "nuts.json"
    scores = {"rmse": [1.0, 3.0], "log_likelihood": [-1.0, -1.0]}
    nuts.write_text(json.dumps({"rows": [{"set": "yacht", "NUTS": scores}]}))
    files = ("--output", path, "--docs", page, "--nuts", nuts)
    report = run("examples.benchmarks.infinite_uci", "--data", data_folder, *files)
    assert "| 2.000 ± 1.000 |" in page.read_text()
    assert json.loads(path.read_text())["rows"][0]["by_split"] == report["rows"][0]["by_split"]
    assert [row["variant"] for row in report["rows"]] == ["relu", "erf-ard"]
    written = page.read_text()
    assert "old" not in written
    assert written.count("| yacht |") == 2
    assert "NNGP, erf, ARD" in written


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:to_inference_data.* checks failed")  # so little effort is not enough
@pytest.mark.parametrize(
    ("run_name", "head", "methods"),
    [
        ("recipe", "hetero", ["members", "recipe"]),
        ("deep recipe", "both", ["members 16x16x16", "recipe 16x16x16"]),
        ("mixed recipe", "tails", ["members mixed", "recipe mixed"]),
        ("mclmc", "hetero", ["deep ensemble", "MCLMC"]),
        ("nuts", "hetero", ["NUTS + OrbitMoves"]),
        ("sghmc", "hetero", ["SGHMC"]),
        ("variational", "hetero", ["AutoMeanField", "AutoCoupling"]),
    ],
)
def test_uci_samples_and_fits(tmp_path, data_folder, run_name, head, methods):
    lines = run(
        "examples.benchmarks.uci",
        *("--data", data_folder, "--output", tmp_path / "uci.jsonl"),
        *("--methods", run_name, "--heads", head, "--effort", 0.01),
    )
    assert [line["method"] for line in lines] == methods
    for line in lines:
        assert line["rmse"] > 0
        assert math.isfinite(line["log_likelihood"])
        assert 0 <= line["coverage"] <= 1


@pytest.mark.data
@pytest.mark.slow
def test_uci_goes_on_where_it_was_interrupted(tmp_path, data_folder):
    path, page = tmp_path / "new" / "uci.jsonl", tmp_path / "page.md"
    marks = [
        f"<!-- table of uci_{score}: begin -->\nold\n<!-- table of uci_{score}: end -->"
        for score in ("rmse", "log_likelihood", "cost", "summary")
    ]
    page.write_text("\n".join(marks))
    call = ("--data", data_folder, "--output", path, "--docs", page, "--effort", 0.05)
    first = run("examples.benchmarks.uci", *call, "--methods", "adf")
    assert [(line["method"], line["head"]) for line in first] == [("AutoADF", "homo")]
    # A line that was cut is computed again; whole ones are not.
    path.write_text(path.read_text() + '\n{"set": "yacht", "split": 0, "run": "nn')
    second = run("examples.benchmarks.uci", *call, "--methods", "adf", "nngp")
    assert second[0] == first[0]
    assert [line["method"] for line in second] == ["AutoADF", "NNGP"]
    assert len(path.read_text().splitlines()) >= 3
    assert run("examples.benchmarks.uci", *call, "--methods", "none") == second
    text = page.read_text()
    assert "old" not in text
    assert text.count("| yacht |") == 3  # heads of two tables, a row of the third
    assert "-1.647 ± 0.022" in text


def test_uci_tables_name_the_best_and_count_the_splits():
    from examples.benchmarks.uci_table import tables

    def line(method, split, value):
        scores = {"rmse": 1.0, "log_likelihood": value, "coverage": 0.9, "seconds": 3.0, "seed": 0, "effort": 1.0}
        scores |= {"machine": {"cores": 2, "device": "cpu"}, "versions": {"jax": "1"}}
        return {"set": "yacht", "split": split, "method": method, "head": "homo", **scores}

    text = tables([line("a", 0, -1.0), line("a", 1, -2.0), line("b", 0, 0.5)])["uci_log_likelihood"]
    head, _, *rows = text.splitlines()
    cost = tables([line("a", 0, -1.0), line("a", 1, -2.0)])["uci_cost"]
    assert "| a, homo | 2 | 0.900 | 3 |" in cost
    assert "Machine: 2 cores, cpu. jax 1. Seed 0, effort 1.0." in cost
    # Of -1 and -2: mean -1.5, standard error 0.5; the method of one split says so, and is not compared.
    assert head == "| test log likelihood | yacht |"
    assert rows[:3] == [
        "| a, homo | -1.500 ± 0.500 |",
        "| b, homo | 0.500 (1) |",
        "| PBP, published | -1.647 ± 0.022 |",
    ]
    assert "| DVI, published | **-0.47** ± 0.03 |" in rows


def test_uci_summary_takes_the_best_of_the_methods_with_most_splits():
    from examples.benchmarks.uci_table import tables

    about = {"rmse": 1.0, "coverage": 0.9, "seconds": 3.0, "seed": 0, "effort": 1.0, "head": "homo"}
    about |= {"machine": {"cores": 2, "device": "cpu"}, "versions": {"jax": "1"}}
    values = [
        *(("yacht", "a", split, -0.4 - 0.2 * split) for split in (0, 1)),
        ("yacht", "b", 0, 0.5),  # one split of two: not compared
        ("wine", "NNGP", 0, 2.0),  # knows its test rows
        ("wine", "a", 0, -1.2),
    ]
    names = ("set", "method", "split", "log_likelihood")
    text = tables([dict(zip(names, row, strict=True)) | about for row in values])["uci_summary"]
    wine, yacht = text.splitlines()[2:]
    assert yacht == "| yacht | -0.500 ± 0.100 | a, homo (2) | -0.47 ± 0.03, DVI | -0.03 ± 0.10 |"
    assert wine == "| wine | -1.200 | a, homo (1) | -0.90 ± 0.01, DVI | -0.30 |"


def uci_line(name, run_name, method, split, value, head="hetero"):
    about = {"rmse": 2 - value, "coverage": 0.9, "seconds": 3.0, "seed": 0, "effort": 1.0, "head": head}
    about |= {"machine": {"cores": 2, "device": "cpu"}, "versions": {"jax": "1"}}
    return {"set": name, "run": run_name, "method": method, "split": split, "log_likelihood": value} | about


def test_uci_tables_compare_with_boosting_split_by_split():
    """Boosting is never the best of ours, and only the splits of ours count."""
    from examples.benchmarks.uci_table import paired, tables

    values = [
        *(("yacht", "mclmc", "MCLMC", split, 0.5 + 0.1 * split) for split in (0, 1)),
        *(("yacht", "ngboost", "NGBoost", split, 0.2 + 0.4 * split) for split in (0, 1, 2)),
        *(("yacht", "catboost", "CatBoost", split, -9.0) for split in (0, 1)),
    ]
    lines = [uci_line(*row) for row in values]
    made = tables(lines)
    # Gains 0.3 and 0.0: mean 0.15, standard error 0.15.
    row = made["uci_summary"].splitlines()[2]
    assert "MCLMC, hetero (2)" in row
    assert row.endswith("| 0.400, NGBoost | +0.150 ± 0.150 (2) |")
    assert "| NGBoost, hetero | 0.400 ± 0.200 |" in made["uci_log_likelihood"]  # of two splits, not of three
    expected = "| yacht | MCLMC, hetero | - | +0.150 ± 0.150 (2) | +9.550 ± 0.050 (2) |"
    assert made["uci_paired_log_likelihood"].splitlines()[2] == expected
    assert made["uci_paired_rmse"].splitlines()[2] == expected.replace("+0", "-0").replace("+9", "-9")
    assert "but not those of boosting" in made["uci_cost"]

    # The recipe stands above the older chains.
    lines += [uci_line("yacht", "recipe", "recipe", split, 0.7, "tails") for split in (0, 1)]
    head, _, row, last = tables(lines)["uci_paired_log_likelihood"].splitlines()
    assert head == "| log likelihood | by | minus MCLMC, hetero | minus NGBoost | minus CatBoost |"
    assert row.startswith("| yacht | recipe, tails | +0.150 ± 0.050 (2) | +0.300 ± 0.200 (2) |")
    assert last == expected
    # Without others, or a common split, nothing is compared.
    assert "uci_paired_rmse" not in tables(lines[:2])
    assert paired(lines[:1] + lines[3:4], ["MCLMC"], ["NGBoost"], "rmse") == ""


def test_uci_gap_table_stands_beside_published_figures():
    from examples.benchmarks import uci
    from examples.benchmarks.uci_gap import PUBLISHED

    about = {"splits_of": "tail", "machine": {"cores": 2, "device": "cpu"}, "versions": {"jax": "1"}}
    lines = [uci_line("yacht", "mclmc", "MCLMC", split, -1.0 - split) | about for split in range(6)]
    lines += [uci_line("yacht", "mclmc", "deep ensemble", 0, 5.0) | about]
    made = uci.tables(lines)
    two_sets = uci.tables([*lines, *(line | {"set": "energy", "log_likelihood": 0.0} for line in lines[:3])])
    rows = zip(made["uci_tail"].splitlines()[:8], two_sets["uci_tail"].splitlines()[:8], strict=True)
    assert all(row.split("|")[2] == other.split("|")[3] for row, other in rows)  # both have a split 0
    assert two_sets["uci_tail"].splitlines()[2].split("|")[2] == " 0.000 ± 0.000, 4.000 (3) "
    assert set(made) == {"uci_tail"}  # the other tables are of the standard splits
    head, _, ours, other, *published = made["uci_tail"].splitlines()[:8]
    assert head == "| tail: log likelihood, RMSE | yacht (6 splits) |"
    assert ours == "| MCLMC, hetero | -3.500 ± 0.764, 5.500 |"
    assert other == "| deep ensemble, hetero | 5.000 ± 0.000, -3.000 (1) |"
    assert published[2] == "| PNN-E (deep ensemble), published | **-2.591** ± 0.383, 4.587 |"
    assert set(PUBLISHED) == {(kind, name) for kind in uci.KINDS for name in uci.COLUMNS}


@pytest.mark.data
def test_uci_runs_splits_along_inputs(tmp_path, data_folder):
    call = ("--data", data_folder, "--output", tmp_path / "uci.jsonl", "--methods", "adf", "--effort", 0.02)
    first = run("examples.benchmarks.uci", *call, "--splits-of", "gap")
    assert [(line["splits_of"], line["split"]) for line in first] == [("gap", 0)]
    again = run("examples.benchmarks.uci", *call, "--splits-of", "gap")
    assert again == first
    both = run("examples.benchmarks.uci", *call)  # the standard split with the same number is another job
    assert both[0] == first[0]
    assert "splits_of" not in both[1]
    assert both[0]["rmse"] != both[1]["rmse"]
    assert importlib.import_module("examples.benchmarks.uci").splits_of("wine", "tail") == ()


def test_scores_of_a_mixture_of_normal_densities():
    """One member: the normal scores; two members: the density is their mean, and so is the distribution function."""
    from examples import loaders
    from examples.benchmarks.boosting import mixture_scores

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2)), 3 + 5 * rng.normal(size=60)
    data = loaders.standardize(loaders.Dataset(x[:40], y[:40], x[40:], y[40:], "mine"))
    mean, variance = rng.normal(size=(2, 20)), rng.gamma(3.0, size=(2, 20)) / 3
    one = mixture_scores(mean[:1], variance[:1], data)
    scale, errors, sd = data.y_scaler.scale_factor, data.y_test - mean[0], np.sqrt(variance[0])
    expected = {
        "rmse": scale * np.sqrt(np.mean(errors**2)),
        "log_likelihood": stats.norm.logpdf(errors, scale=sd).mean() - np.log(scale),
        "coverage": np.mean(np.abs(errors) < stats.norm.ppf(0.95) * sd),
    }
    assert one == pytest.approx(expected, rel=1e-5)
    two = mixture_scores(mean, variance, data)
    density = stats.norm.pdf(data.y_test, mean, np.sqrt(variance)).mean(axis=0)
    assert two["log_likelihood"] == pytest.approx(np.log(density).mean() - np.log(data.y_scaler.scale_factor))
    draws = mean + np.sqrt(variance) * rng.normal(size=(20_000, 2, 20))
    low, high = np.quantile(draws.reshape(-1, 20), (0.05, 0.95), axis=0)
    assert two["coverage"] == pytest.approx(np.mean((low < data.y_test) & (data.y_test < high)), abs=0.06)


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


@pytest.mark.parametrize("package", ["ngboost", "catboost"])
def test_absent_boosting_is_named(package, monkeypatch, tmp_path, data_folder):
    """They are in none of our extras, and are run only if they are named."""
    from examples.benchmarks import uci

    monkeypatch.setitem(sys.modules, package, None)
    assert package not in uci.parse([]).methods
    call = ("--data", data_folder, "--output", tmp_path / "uci.jsonl", "--methods", package)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        run("examples.benchmarks.uci", *call)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "methods"),
    [
        ("ngboost", ["NGBoost", "NGBoost, tuned"]),
        ("catboost", ["CatBoost", "CatBoost, tuned", "CatBoost, tuned, 5 models"]),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of packages that we do not choose
def test_uci_boosting(tmp_path, data_folder, package, methods):
    pytest.importorskip(package)
    call = ("--data", data_folder, "--output", tmp_path / "uci.jsonl", "--methods", package, "--effort", 0.05)
    lines = run("examples.benchmarks.uci", *call)
    assert [line["method"] for line in lines] == methods
    for line in lines:
        assert 0 < line["rmse"] < 15  # sd of the targets
        assert math.isfinite(line["log_likelihood"])
        assert 0 <= line["coverage"] <= 1
        assert line["versions"][package]
        assert line["head"] == "hetero"


def test_one_door_to_all_measurements(capsys, tmp_path):
    """Every benchmark has a name there, every option is one of its script, every table of a page is made by one."""
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

    pages = [FOLDER.parent / "README.md", *(FOLDER.parent / "docs").glob("*.md")]
    tables = {name for page in pages for name in re.findall("table of (.*): begin", page.read_text())}
    sources = "".join(path.read_text() for path in FOLDER.rglob("*.py"))
    assert len(tables) > 10
    assert all(f'"{name}"' in sources or (name.startswith("uci_") and name[4:] in sources) for name in tables)


# Where the figures of a page lie, and what writes its tables; others are of files too large to be kept.
KEPT = {
    "adf_speed": "adf.md",
    "adf_uci": "adf.md",
    "classification": "estimators.md",
    "coupling_step": "speed.md",
    "estimators": "estimators.md",
    "estimators_rows": "estimators.md",
    "function_agreement": "microcanonical.md",
    "compilation": "speed.md",
    "first_draw": "speed.md",
    "gradient_cost": "speed.md",
    "hierarchical_hmc": "hierarchical.md",
    "infinite_kernel": "infinite.md",
    "infinite_uci": "infinite.md",
    "laplace_uci": "guides.md",
    "minibatches": "minibatches.md",
    "microcanonical": "microcanonical.md",
    "microcanonical_cost": "microcanonical.md",
    "mixing": "hierarchical.md",
    "orbit_moves": "speed.md",
    "sgld_step": "speed.md",
    "uci": "evidence.md",
    "variational_uci": "guides.md",
}


@pytest.mark.parametrize("name", KEPT)
def test_tables_of_pages_are_those_of_their_files(name):
    """Nothing is typed: file, table function and page agree, and what the figures are of stands below."""
    from examples.benchmarks.shared import provenance

    docs = FOLDER.parent / "docs"
    script = {"microcanonical_cost": "microcanonical", "estimators_rows": "estimators"}.get(name, name)
    module = importlib.import_module(f"examples.benchmarks.{script}")
    if name == "uci":
        made = module.tables(module.lines_of(docs / "uci.jsonl"))
    else:
        report = json.loads((docs / f"{name}.json").read_text())
        if hasattr(module, "tables"):
            made = module.tables(report)
        else:
            first = next(iter(inspect.signature(module.table).parameters))
            more = [module.nuts_of(docs / "variational_uci.json")] if name == "infinite_uci" else []
            made = {name: module.table(report.get(first, report), *more)}
        if name != "laplace_uci":  # its rows are of several runs, and say so themselves
            made = {table: f"{text}\n\n{provenance([report])}" for table, text in made.items()}
    if script == "microcanonical":  # one script, two runs
        made = {name: made[name]}
    page = (docs / KEPT[name]).read_text()
    for table, text in made.items():
        assert f"<!-- table of {table}: begin -->\n{text}\n<!-- table of {table}: end -->" in page


def test_all_measurements_are_run_once(tmp_path, monkeypatch, capsys):
    from examples.benchmarks import __main__ as door

    ran = []

    def pretend(words, check):
        assert not check
        ran.append(words[2])
        return subprocess.CompletedProcess(words, int(words[2].endswith("horseshoe")))

    monkeypatch.setattr(door.subprocess, "run", pretend)
    call = ["all", "--data", str(tmp_path), "--output", str(tmp_path / "out")]
    assert door.main(call)  # one has failed
    assert capsys.readouterr().out.splitlines()[-1] == "failed: horseshoe"
    assert len(ran) == len(door.MEASUREMENTS)
    ran.clear()
    door.main(call)
    names = ("benchmarks.minibatches", "benchmarks.horseshoe", "benchmarks.mixing", "image_chains", "benchmarks.uci")
    assert ran == [f"examples.{name}" for name in names]
    with pytest.raises(SystemExit):
        door.main(["all", "--output", str(tmp_path / "other")])


@pytest.mark.slow
def test_infinite_kernel(tmp_path):
    page = page_with(tmp_path, "infinite_kernel")
    path = tmp_path / "new" / "kernel.json"
    report = run("examples.benchmarks.infinite_kernel", "--output", path, "--docs", page)
    assert [row["kernel"] for row in report["rows"]] == ["nngp", "ntk"]
    assert json.loads(path.read_text())["rows"] == report["rows"]
    assert "| ntk |" in page.read_text()
