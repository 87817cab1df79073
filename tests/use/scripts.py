"""The scripts of examples/ as tests run them: options for a tiny run, what it writes, and what is checked of it."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

SHORT_CHAINS = "ignore:to_inference_data"  # chains this short are not healthy, and say so
NOT_AT_THE_MODE = "ignore:.*posterior sds from the mode"  # nor are fits of a few steps at the mode
FEW_ROWS = "ignore:.*rows lie more than 3 standard deviations"


class Script(NamedTuple):
    """A script and a tiny run of it.

    :param options: of the command line.
    :param refused: options that the script answers with "must be at least", with their values.
    :param tables: names of the tables that it writes into a page.
    :param json: file that it writes, in its output folder; the output itself if it ends in ``.json``.
    :param pictures: files that it draws, in its output folder.
    :param says: what it prints, in part.
    :param needs_data: it reads the folder of benchmark data.
    :param warnings: filters for what a run this small warns of.
    :param check: called with the result, the page, and the output path; asserts what is special.
    :param runs: False if another test runs it.
    """

    options: str
    refused: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    json: str = ""
    pictures: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    needs_data: bool = False
    warnings: tuple[str, ...] = ()
    check: Callable[[SimpleNamespace], None] | None = None
    runs: bool = True


def rows_of(run: SimpleNamespace) -> Any:
    """The rows of a report, or a result that is rows itself."""
    return run.result["rows"] if isinstance(run.result, dict) else run.result


# -- checks ----------------------------------------------------------------------------------------------


def scored(*methods: str) -> Callable[[SimpleNamespace], None]:
    """Rows of these methods, with scores that are possible."""

    def check(run: SimpleNamespace) -> None:
        assert [row.method for row in run.result] == list(methods)
        for row in run.result:
            assert row.rmse > 0
            assert math.isfinite(row.log_score)
            assert 0 <= row.coverage <= 1
            assert row.seconds > 0

    return check


def check_tabular(run):
    assert list(run.result["diabetes"]) == ["network", "boosting", "boosting, conformal"]
    for rows in run.result["diabetes"].values():
        assert len(rows) == 2
        assert all(row["interval_score"] >= row["width"] > 0 for row in rows)


def check_demo(run):
    import arviz as az

    assert next(iter(run.result)) == "microcanonical chains"
    assert len(run.result) == 6
    for row in run.result.values():
        assert row["rmse"] > 0
        assert math.isfinite(row["log_likelihood"])
        assert 0 <= row["coverage"] <= 1
    assert az.from_netcdf(run.output / "demo.nc")["predictions"]["y_mean"].sizes["rows"] == 700
    assert "6 of 6: gradient boosting" in run.errors


def check_minibatch(run):
    import arviz as az

    scored("SGLD", "PSGLD", "SGHMC", "NUTS, 40 rows")(run)
    for row in run.result[:3]:
        assert row.gradients == 2 * (10 + 12) * 30  # chains x draws x steps
        assert row.passes == pytest.approx(row.gradients * 64 / 353, rel=1e-2)
        saved = az.from_netcdf(run.output / f"minibatch_{row.method.lower()}.nc")
        assert dict(saved["predictions"]["y_mean"].sizes) == {"chain": 2, "draw": 12, "data": 30}
        assert not saved["sample_stats"]["diverging"].any()
        assert saved.attrs["dataset"] == "diabetes"


def check_ensembles(run):
    import arviz as az

    scored("deep ensemble", "MCLMC", "NUTS")(run)
    ensemble, chains, _ = run.result
    assert ensemble.gradients == 2 * 600
    # 6 transitions of 100 steps of Adam, 14 + 12 of 4 steps of two gradients; 24 products with the Hessian, and a
    # gradient at each of the 6 ends of a window of the warm-up.
    assert chains.gradients == 2 * (6 * 100 + 26 * 4 * 2 + 24 * 2 + 6)
    assert math.isnan(ensemble.median_ess)
    assert chains.median_ess > 0
    members = az.from_netcdf(run.output / "ensembles_energy_deep_ensemble.nc")
    assert dict(members["predictions"]["y_mean"].sizes) == {"chain": 2, "draw": 1, "data": 40}


def check_microcanonical(run):
    case = run.result["cases"]["energy, 1x20"]["MCLMC"]
    equal = case["equal_gradients"]
    assert equal["median_ess"] > 0
    assert len(equal["mean"]) == len(equal["sd"]) == 40
    assert equal["gradients"] == 2 * 12 * 25 * 2
    assert case["equal_seconds"]["seconds"] >= equal["seconds"]
    flops = run.result["step_costs"]["energy, 1x20"]["flops"]
    assert flops["step, mclachlan"] < 2.5 * flops["gradient"]  # not much more arithmetic than two gradients


def check_collapse_cost(run):
    assert [(row["hidden"], row["outputs"]) for row in run.result] == [(50, 1), (50, 3)]
    # Counted by the compiler, not timed: without derivatives by directions, and outputs apart from each other.
    assert all(row["flops_ratio"] < limit for row, limit in zip(run.result, (12, 25), strict=True))
    assert all(row["ratio"] > 0 and row["processor_ratio"] > 0 for row in run.result)


def check_mixing(run):
    assert [row["way"] for row in rows_of(run)] == ["collapsed", "exchange", "smc"]
    assert all(row["seconds"] >= 1 and len(row["noise_by_chain"]) == 2 for row in rows_of(run))
    assert run.page.count("| energy | smc |") == 1


def check_gradient_cost(run):
    assert [row["n"] for row in run.result] == [455, 455, 5000]
    # Counted by the compiler, not timed: our models do no more arithmetic than the hand-written ones.
    assert all(row["flops_ratio"] < 1.05 for row in run.result)
    assert f"| 455 | 50, 50, 1 | {run.result[1]['gradient_ratio']:.2f} |" in run.page


def check_minibatches(run):
    assert len(rows_of(run)) == 5
    for row in rows_of(run):
        assert all(math.isfinite(row[name]) for name in ("sd", "rmse", "lppd", "sigma"))
        if row["method"] in ("SGNHT", "MCLMC"):
            assert 0.75 * 4000 < row["spent"] < 1.25 * 4000  # gradients close to what was asked for
            assert len(row["variance_covered"]) == 2


def check_gradient_variance(run):
    (row,) = run.result["variance"]
    assert row["ratio"]["one draw"] == 1
    assert all(value > 0 for value in row["variance"].values())
    (part,) = run.result["steps"]
    assert set(part["milliseconds"]) == {*row["ratio"], "deterministic"} - {"ten draws"}
    assert part["time_ratio"]["deterministic"] == part["flops_ratio"]["deterministic"] == 1


def check_sgld_step(run):
    assert {"bare SGD", "leafwise SGLD", "engine"} <= set(run.result["steps"]["wall_us"])
    ratios = (("steps", "engine / bare SGD"), ("run", "MCMC(SGLD) / engine"), ("sizes", "N=640 / N=64"))
    for part, ratio in ratios:
        assert run.result[part]["wall_ratio"][ratio] > 0
        assert run.result[part]["processor_ratio"][ratio] > 0
    wall = run.result["steps"]["wall_us"]
    assert f"| engine / bare SGD | {wall['engine']:.1f} | {wall['bare SGD']:.1f} | " in run.page


def check_backpropagation(run):
    scored("PBP, all rows", "NUTS, 30 rows", "ridge regression")(run)
    assert run.result[0].rmse < 75  # that of the mean


def check_adf_speed(run):
    for name in ("boston", "california"):
        assert set(run.result[name]["microseconds"]) == {"AutoADF", "plain scan, float64", "plain scan, float32"}
        assert all(value > 0 for value in run.result[name]["ratio"].values())


def check_variational(run):
    assert [row.method for row in run.result] == ["mean field", "full rank", "coupling flow", "NUTS"]
    for row in run.result:
        assert row.gap_sd > 0
        assert math.isfinite(row.log_score)
        assert (row.elbo is None) == (row.pareto_k is None) == (row.method == "NUTS")
    assert run.result[-1].sd_distance == 0


def check_last_layer(run):
    assert [row.random_weights for row in run.result] == [0, 30, 30, 300, 300]  # 64-4-2-10: 260 + 10 + 30
    assert all(0 <= row.accuracy <= 1 and row.log_score < 0 for row in run.result)


def check_lotka_volterra(run):
    for pelts in run.result["pelts"].values():
        assert all(low <= mean <= high for mean, low, high in pelts["intervals"].values())
    assert all(count in (0, 1) for counts in run.result["covered"].values() for count in counts.values())


def check_active_learning(run):
    assert run.result["labels"] == [16, 19]
    assert run.result["programs"][0] > 0
    assert sum(run.result["programs"][2:]) == 0  # the second seed compiles nothing
    assert [row[0] for row in run.result["random"]] == [row[0] for row in run.result["uncertain"]]


def check_bayesian_optimization(run):
    from examples.bayesian_optimization import FUNCTIONS

    regrets = np.array([list(by_model.values()) for by_model in run.result.values()])
    assert regrets.shape == (2, 3, 2, 8)
    assert (regrets >= 0).all()
    assert (np.diff(regrets) <= 0).all()
    # The published minima.
    minima = {"branin": [0.5427728, 0.151667], "hartmann": [0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573]}
    for name, point in minima.items():
        np.testing.assert_allclose(FUNCTIONS[name].value(np.array([point])), FUNCTIONS[name].least, atol=1e-4)


def check_unknown_digits(run):
    assert list(run.result) == ["one network", "ensemble", "MCLMC"]
    for by_score in run.result.values():
        assert all(0 <= value <= 1 for name in ("accuracy", "auroc") for value in by_score[name])
        assert min(by_score["nll"]) > 0


def check_image_classification(run):
    assert f"| textbook | 2 | 1 | {run.result['accuracy']:.3f} |" in run.page
    assert 0 <= run.result["accuracy"] <= 1
    assert 0 <= run.result["auroc digits 5 to 9, mutual information"] <= 1


def check_coupling_step(run):
    from examples.benchmarks.coupling_step import ratio_to_fastest

    (row,) = rows_of(run)
    assert row["latent"] == 12
    assert len(set(row["parameters"].values())) == 1  # the flows compared have the same size
    times = {"AutoCoupling": [2.0, 2.0, 9.0], "a": [4.0, 4.0, 4.0], "b": [5.0, 1.0, 5.0]}
    assert ratio_to_fastest(times) == 0.5


def check_hierarchical_hmc(run):
    assert [row["way"] for row in rows_of(run)] == ["long", "persistent"]
    # Four trajectories per draw of one leapfrog, and the gradient at their start.
    assert rows_of(run)[1]["gradients"] == 2 * 8 * 4 * 2


def check_horseshoe(run):
    from examples.benchmarks.horseshoe import compare

    for name, draws in (("gibbs", 24), ("nuts", 16)):
        part = run.result[name]
        assert part["draws"] == draws
        assert sorted(part["log tau"]["quantiles"].values()) == list(part["log tau"]["quantiles"].values())
        assert part["ess per second"]["tau"] == pytest.approx(part["ess"]["tau"] / part["cost"]["sampling"])
    assert run.result["gibbs"]["cost"]["gradients"] == 0
    assert 16 <= run.result["nuts"]["cost"]["gradients"] <= 16 * 3
    tops = (("gibbs", [4, 1, 0, 2, 3, 6]), ("nuts", [5, 1, 0, 2, 3]))
    parts = [{**run.result[name], "top inputs": top} for name, top in tops]
    assert compare(*parts)["ranking exact"] == {"gibbs": True, "nuts": False}


def check_symmetries(run):
    from examples import symmetries

    assert [row["way"] for row in run.result] == ["moves", "quotient"]
    for row in run.result:
        for ess in row["ess"].values():
            assert ess["median_per_draw"] >= ess["min_per_draw"] >= 0
            per_second = ess["min_per_draw"] * 16 / row["processor_seconds"]
            assert ess["min_per_second"] == pytest.approx(per_second)
        assert 1 <= row["mean_tree"] <= 3
        assert 0 <= row["divergences"] <= 16
    written, page = run.output / "symmetries.json", run.output / "table.md"
    assert symmetries.main(["--summarize", str(written), "--table", str(page)]) == run.result
    assert symmetries.table(run.result, "relu") in page.read_text()


def check_orbit_moves(run):
    part = run.result["nets"]["ReLU"]
    assert part["leapfrog_steps"] == 3  # full trees of depth 2
    ratios, times = part["ratios"], part["microseconds"]
    assert {"sweep", "NUTS transition", "SGLD step, B=8"} < {name.partition(":")[0] for name in times}
    assert {ratio["limit"] for ratio in ratios.values()} == {0.05, 0.5}
    # One round: ratios of the medians are ratios of the times.
    for kernel, name in (("NUTS transition", "NUTS"), ("SGLD step, B=8", "SGLD B=8")):
        for sweep in ("sweep", "sweep, continuous", f"sweep + refresh, {name}"):
            expected = times[sweep]["wall_median"] / times[kernel]["wall_median"]
            assert ratios[f"{sweep} / {kernel}"]["median"] == pytest.approx(expected)


def check_neal(run):
    assert set(run.result) == {"bdata", "cdata"}
    for name, part in run.result.items():
        assert f"a made-up set of the kind of {name}" in run.printed
        # Averaged probabilities of the label score at least the average score (Jensen).
        first, second, both = (scores["log_probability"][0] for scores in part["test"].values())
        assert both > (first + second) / 2
    middle, low, high = np.transpose(run.result["cdata"]["scales"])
    assert ((low <= middle) & (middle <= high)).all()
    assert "Neal's run" not in run.printed  # nothing to compare made-up cases with


def check_two_modes(run):
    import jax

    assert run.page.count("\n| chain") == 2
    assert set(run.result["test"]) == {"chain 1", "chain 2", "all chains"}
    assert run.result["moves"] == 2 * 12 * 3
    assert 0 < run.result["accepted"] <= 1
    assert not jax.config.jax_enable_x64


def check_infinite_width(run):
    assert [row.width for row in run.result.widths] == [2, 4]
    assert all(value > 0 and math.isfinite(value) for row in run.result.widths for value in row)
    assert run.result.distance > 0


def check_estimators(run):
    (row,) = rows_of(run)
    assert math.isfinite(row["log_likelihood"])
    assert row["best"]["method"] == "recipe 16x16x16, both"
    assert f"{row['rmse']:.3f}" in run.page


def check_classification(run):
    methods = [row["method"] for row in rows_of(run) if row["split"] == 1]
    assert methods == ["Classifier", "logistic regression", "boosting", "boosting, tuned", "one network, temperature"]
    for row in rows_of(run):
        assert 0 <= row["accuracy"] <= 1
        assert 0 <= row["ece"] <= 1
        assert 0 < row["log_loss"] < 5


def check_adf_uci(run):
    assert len(rows_of(run)[0]["by_split"]["rmse"]) == 2
    assert run.printed.strip() in run.page


def check_variational_uci(run):
    assert rows_of(run)[0]["NUTS"]["mean_distance"] == [0.0]
    assert rows_of(run)[0]["AutoCoupling"]["mean_distance"][0] > 0


def check_scale(run):
    assert run.result["chains"]["60"]["ratio"] > 0
    assert set(run.result["rows"]) == set(run.result["one_core"]) == {"60"}
    assert run.result["exchange_processes"].keys() == run.result["exchange_devices"].keys()


def check_runs(run):
    assert run.result["psgld_same"]
    assert run.result["mean_field_same"]


# -- scripts ---------------------------------------------------------------------------------------------

BENCHMARK = "examples.benchmarks"
SCRIPTS: dict[str, Script] = {
    "examples.demo": Script(
        "--held-out 700 --effort 0.004",
        ("--held-out 1",),
        pictures=("demo.png",),
        says=("Health of the chains",),
        check=check_demo,
    ),
    "examples.tabular": Script(
        "--splits 2 --effort 0.004 --trees 3",
        ("--splits 0",),
        json="tabular.json",
        says=("| diabetes | network |",),
        check=check_tabular,
    ),
    "examples.minibatch": Script(
        "--width 3 --batch-size 64 --num-warmup 10 --num-samples 12 --steps-per-draw 30"
        " --nuts-rows 40 --nuts-warmup 15 --num-chains 2 --test-rows 30",
        ("--batch-size 0",),
        pictures=("minibatch.png",),
        says=("diabetes data instead", "PSGLD"),
        check=check_minibatch,
    ),
    "examples.ensembles": Script(
        "--sets energy --widths 3 --members 2 --optimizer-steps 600 --num-warmup 20"
        " --num-samples 12 --steps-per-draw 4 --nuts-warmup 6 --max-tree-depth 2",
        ("--members 1",),
        pictures=("ensembles_energy.png",),
        says=("made in the place of energy", "energy errors imply a bias"),
        check=check_ensembles,
    ),
    "examples.symmetries": Script(
        "--nets relu --ways moves quotient --width 3 --num-warmup 6 --num-samples 8 --max-tree-depth 2",
        ("--num-chains 1",),
        json="symmetries.json",
        pictures=("symmetries_relu.png",),
        check=check_symmetries,
    ),
    "examples.probabilistic_backpropagation": Script(
        "--widths 4 3 --num-epochs 2 --nuts-rows 30 --nuts-warmup 10 --nuts-samples 10",
        ("--widths 3 0", "--num-epochs 0"),
        pictures=("probabilistic_backpropagation.png",),
        says=("diabetes data instead", "noise variance"),
        check=check_backpropagation,
    ),
    "examples.neal": Script(
        "--num-warmup 4 --num-samples 6 --num-chains 2 --max-tree-depth 2",
        ("--num-samples 3",),
        json="neal.json",
        pictures=("neal_bdata.png", "neal_cdata.png"),
        check=check_neal,
    ),
    "examples.two_modes": Script(
        "--num-warmup 4 --num-samples 8 --kept-draws 4 --num-chains 2 --num-moves 3 --max-tree-depth 2",
        tables=("two_modes",),
        json="two_modes.json",
        pictures=("two_modes.png",),
        says=("a made-up set of the kind of rdata", "Neal's run"),
        check=check_two_modes,
    ),
    "examples.last_layer": Script(
        "--width 2 --train-rows 30 --num-steps 5 --num-warmup 8 --num-samples 6 --max-tree-depth 2"
        " --steps-per-draw 5",
        ("--train-rows 9",),
        json="last_layer.json",
        pictures=("last_layer.png",),
        says=("30 training and 898 test digits",),
        check=check_last_layer,
    ),
    "examples.lotka_volterra": Script(
        "--data-sets 1 --num-warmup 6 --num-samples 6 --max-tree-depth 2",
        ("--held-out 0",),
        json="lotka_volterra.json",
        pictures=("lotka_volterra.png",),
        says=("| with a network |",),
        check=check_lotka_volterra,
    ),
    "examples.active_learning": Script(
        "--seeds 2 --rounds 1 --width 2 --effort 0.02",
        ("--seeds 1",),
        pictures=("active_learning.png",),
        says=("diabetes, 2 seeds",),
        warnings=(FEW_ROWS, NOT_AT_THE_MODE),
        check=check_active_learning,
    ),
    "examples.bayesian_optimization": Script(
        "--seeds 2 --start 6 --evaluations 8 --candidates 32 --width 2 --effort 0.02",
        ("--evaluations 3", "--start 5"),
        pictures=("bayesian_optimization.png",),
        says=("| hartmann | random |",),
        warnings=(FEW_ROWS, "ignore:.*rows hardly show", "ignore:.*worse than by a constant"),
        check=check_bayesian_optimization,
    ),
    "examples.nnx_module": Script(
        "--splits 2 --width 2 --optimizer-steps 5 --num-warmup 8 --num-samples 8 --num-chains 2 --steps-per-draw 3",
        ("--splits 1",),
        json="nnx_module.json",
        pictures=("nnx_module.png",),
        says=("| Bayesian |", "| trained by optax |", "| least squares |"),
    ),
    "examples.groups": Script(
        "--groups 4 --batch-size 10 --steps-per-draw 3 --num-warmup 8 --num-samples 6 --num-chains 2",
        ("--groups 2",),
        pictures=("groups.png",),
        says=("| network, groups |",),
        warnings=(SHORT_CHAINS,),
    ),
    "examples.unknown_digits": Script(
        "--pairs 2 --train-rows 40 --width 3 --members 2 --optimizer-steps 20 --num-chains 2"
        " --num-warmup 8 --num-samples 6 --steps-per-draw 3",
        ("--pairs 1",),
        json="unknown_digits.json",
        pictures=("unknown_digits.png",),
        says=("| MCLMC minus ensemble |",),
        warnings=(SHORT_CHAINS,),
        check=check_unknown_digits,
    ),
    "examples.variational": Script(
        "--width 3 --points 8 --num-steps 20 --num-particles 1 --num-warmup 8 --num-samples 8",
        ("--points 3",),
        pictures=("variational.png",),
        says=("network 1-3-1",),
        check=check_variational,
    ),
    "examples.image_classification": Script(
        "--num-epochs 1 --batch-size 200 --members 2 --num-draws 4 --rounds 1 --test-images 40",
        ("--num-epochs 0",),
        tables=("image_classification",),
        json="image_classification_textbook.json",
        pictures=("image_classification_uncertainty.png", "image_classification_samples.png"),
        says=("small digits instead",),
        check=check_image_classification,
    ),
    "examples.image_chains": Script(
        "--methods ensemble SGHMC --num-epochs 1 --chain-epochs 1 --members 2 --chains 2"
        " --num-draws 2 --batch-size 200 --test-images 40 --foreign-images 30",
        ("--members 1",),
        runs=False,
    ),
    "examples.infinite_width": Script(
        "--widths 2 4 --networks 20 --trained 2 --steps 2 --nuts-width 3 --nuts-warmup 5 --nuts-samples 5",
        ("--widths 4 0",),
        pictures=("infinite_width.png",),
        check=check_infinite_width,
    ),
    f"{BENCHMARK}.microcanonical": Script(
        "--sets energy --nets 1x20 --methods MCLMC --gradients 1200 --draws 12 --num-chains 2 --rounds 1 --steps 4",
        ("--gradients 10",),
        json="out.json",
        check=check_microcanonical,
    ),
    f"{BENCHMARK}.function_agreement": Script(
        "--sets energy --methods MCLMC --gradients 600 --draws 6 --num-chains 4 --max-tree-depth 3",
        ("--num-chains 2",),
        tables=("function_agreement",),
        json="out.json",
    ),
    f"{BENCHMARK}.gradient_cost": Script(
        "--repeats 1 --calls 2 --steps 2", tables=("gradient_cost",), json="out.json", check=check_gradient_cost
    ),
    f"{BENCHMARK}.collapse_cost": Script(
        "--repeats 1 --calls 2 --rows 1000 --hidden 50 --outputs 1 3", json="out.json", check=check_collapse_cost
    ),
    f"{BENCHMARK}.mixing": Script(
        "--sets energy --ways collapsed exchange smc --seconds 1 --num-chains 2"
        " --steps 3 --moves 4 --replicas 2 --leapfrogs 2 --particles 6 --mutations 1",
        ("--particles 2",),
        tables=("mixing", "mixing_agreement"),
        json="out.json",
        check=check_mixing,
    ),
    f"{BENCHMARK}.compilation": Script("--kernels NUTS --rows 6 --width 1 --num-chains 1", runs=False),
    f"{BENCHMARK}.first_draw": Script("--ways NUTS AutoMeanField --rows 6 --width 1", ("--rows 0",), runs=False),
    f"{BENCHMARK}.minibatches": Script(
        "--rows 40 --gradients 4000 --width 2 --batch-size 8 --num-chains 2 --reference-gradients 6000"
        " --methods SGNHT MCLMC long\\ chain deep\\ ensemble AutoMeanField",
        ("--gradients 0",),
        tables=("minibatches",),
        json="out.json",
        check=check_minibatches,
    ),
    f"{BENCHMARK}.runs": Script(
        "--rows 600 --rounds 1 --draws 2 --data rows", ("--rows 0",), json="out.json", check=check_runs
    ),
    f"{BENCHMARK}.scale": Script(
        "--rows 60 --rounds 1 --draws 2", ("--rounds 0",), json="out.json", check=check_scale
    ),
    f"{BENCHMARK}.sgld_step": Script(
        "--rounds 1 --steps 20 --run-rounds 1 --run-steps 40 --steps-per-draw 20 --sizes 64 640",
        ("--rounds 0", "--run-steps 3", "--sizes 3"),
        tables=("sgld_step", "sgld_sizes"),
        json="out.json",
        check=check_sgld_step,
    ),
    f"{BENCHMARK}.variational_uci": Script(
        "--sets yacht --splits 1 --width 3 --num-steps 20 --num-warmup 6 --num-samples 6 --max-tree-depth 2",
        ("--splits 0",),
        tables=("variational_uci",),
        json="out.json",
        needs_data=True,
        check=check_variational_uci,
    ),
    f"{BENCHMARK}.infinite_uci": Script(
        "--sets yacht --variants relu erf-ard --splits 1 --max-steps 2", ("--splits 0",), runs=False
    ),
    f"{BENCHMARK}.estimators": Script(
        "--sets yacht --splits 1 --method mean_field --effort 0.01",
        ("--splits 0",),
        tables=("estimators",),
        json="out.json",
        needs_data=True,
        check=check_estimators,
    ),
    f"{BENCHMARK}.classification": Script(
        "--sets wine --splits 2 --effort 0.01",
        ("--splits 0",),
        tables=("classification",),
        json="out.json",
        warnings=("default",),
        check=check_classification,
    ),
    f"{BENCHMARK}.infinite_kernel": Script(
        "--points 60 --depth 2 --block-size 25",
        ("--points 0",),
        tables=("infinite_kernel",),
        json="out.json",
        says=("| nngp |", "| ntk |"),
    ),
    f"{BENCHMARK}.adf_uci": Script(
        "--sets boston --splits 2 --epochs 2 --width 5",
        ("--epochs 0",),
        tables=("adf_uci",),
        json="out.json",
        needs_data=True,
        check=check_adf_uci,
    ),
    f"{BENCHMARK}.laplace_uci": Script(
        "--sets yacht --splits 1 --rounds 2 --steps 5 --widths 3",
        ("--rounds 0",),
        tables=("laplace_uci",),
        json="out.json",
        needs_data=True,
        warnings=(NOT_AT_THE_MODE,),
    ),
    f"{BENCHMARK}.laplace_torch": Script(
        "ours --structures diag --rows 8 --batch-size 4", json="out.json", warnings=(NOT_AT_THE_MODE,)
    ),
    f"{BENCHMARK}.adf_speed": Script(
        "--rounds 1 --splits 2 --rows 30 --width 4", ("--rounds 0",), json="out.json", check=check_adf_speed
    ),
    f"{BENCHMARK}.gradient_variance": Script(
        "--batch-sizes 8 --width 3 --draws 4 --steps 2 --rounds 1 --calls 1 --networks mlp",
        ("--draws 1", "--rounds 0"),
        json="out.json",
        check=check_gradient_variance,
    ),
    f"{BENCHMARK}.orbit_moves": Script(
        "--nets ReLU --rounds 1 --rows 64 --width 3 --sweeps 3 --refreshes 2"
        " --transitions 1 --tree-depth 2 --draws 1 --steps-per-draw 2 --batches 8",
        ("--tree-depth 0", "--batches 65"),
        tables=("orbit_moves",),
        json="out.json",
        check=check_orbit_moves,
    ),
    f"{BENCHMARK}.hierarchical_hmc": Script(
        "--sets boston --ways long persistent --num-chains 2 --num-warmup 8 --num-samples 8 --num-steps 4",
        tables=("hierarchical_hmc",),
        json="out.json",
        check=check_hierarchical_hmc,
    ),
    f"{BENCHMARK}.horseshoe": Script(
        "--rows 12 --inputs 7 --num-chains 2 --num-warmup 10 --sweeps 12 --nuts-draws 8 --max-tree-depth 2",
        ("--inputs 5", "--sweeps 3"),
        json="out.json",
        says=("ESS/s",),
        check=check_horseshoe,
    ),
    f"{BENCHMARK}.uci": Script("--sets yacht --splits 1 --no-progress-bar", runs=False),
    f"{BENCHMARK}.coupling_step": Script(
        "--rounds 1 --steps 2 --widths 1 --particles 1 --num-flows 1 --hidden 2 --rows 3",
        ("--widths 3 0",),
        tables=("coupling_step",),
        json="out.json",
        check=check_coupling_step,
    ),
}
