"""Figures: what their artists hold, not that they run."""

import sys

import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from figure_data import SAMPLE, example_classes, example_results
from helpers import group, results, run_chains
from helpers import with_groups as changed
from matplotlib.colors import to_rgb
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer import BarkerMH
from zoo import NEW_X, NOISE, X, Y

from numpyro_bnn import metrics, plots
from numpyro_bnn.results import to_inference_data

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("closed_figures")]

FIGURES = [
    "predictive_band",
    "predicted_vs_observed",
    "calibration",
    "reliability_diagram",
]


def drawn(name, idata, labeled, **options):
    """A figure of the results it is for."""
    return getattr(plots, name)(
        labeled if name == "reliability_diagram" else idata, **options
    )


@pytest.fixture(scope="module")
def idata():
    return example_results()


@pytest.fixture(scope="module")
def labeled():
    return example_classes()


def values(idata, group_name, name):
    return group(idata, group_name)[name].to_numpy()


def binomial_band(count, share):
    return np.array(scipy.stats.binom.interval(0.95, count, share)) / count


def legend(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def fills(axis):
    """Bands by label: x, lower and upper bound."""
    found = {}
    for band in axis.collections:
        if "%" in str(band.get_label()):
            edge = band.get_paths()[0].vertices
            x = np.unique(edge[:, 0])
            bounds = [edge[edge[:, 0] == at, 1] for at in x]
            found[band.get_label()] = (
                x,
                np.array([b.min() for b in bounds]),
                np.array([b.max() for b in bounds]),
            )
    return found


# --- predictive_band


def test_band_holds_the_quantiles_of_function_and_observation(idata):
    axis = plots.predictive_band(idata, levels=(0.8, 0.5))
    x = values(idata, "predictions_constant_data", "x")
    names = [(name, level) for name in ("y", "function") for level in (80, 50)]
    bands = fills(axis)
    # the widest at the back
    assert list(bands) == [f"{name}, {level} %" for name, level in names]
    for (name, level), (at, low, high) in zip(names, bands.values(), strict=True):
        draws = values(idata, "predictions", "y" if name == "y" else "y_mean")
        tails = np.array([50 - level / 2, 50 + level / 2]) / 100
        draws = draws.reshape(-1, x.size)
        expected = np.quantile(draws, tails, axis=0, method="weibull")
        assert_allclose(at, x)
        assert_allclose([low, high], expected, rtol=1e-10)
    (mean,) = axis.lines
    assert_allclose(mean.get_xdata(), x)
    assert_allclose(mean.get_ydata(), draws.mean(0))


def test_band_shows_the_training_data_and_names_its_axes(idata):
    axis = plots.predictive_band(idata)
    (points,) = [c for c in axis.collections if c.get_label() == "data"]
    names = {"constant_data": "x", "observed_data": "y"}
    expected = [values(idata, *pair) for pair in names.items()]
    assert_allclose(points.get_offsets().T, expected)
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("x", "y")
    bands = [f"{name}, {level} %" for name in ("y", "function") for level in (90, 50)]
    assert legend(axis) == [*bands, "function mean", "data"]
    inputs = group(idata, "predictions_constant_data").copy()
    inputs["x"].attrs.update(long_name="distance", units="km")
    bare = changed(idata, constant_data=None, predictions_constant_data=inputs)
    axis = plots.predictive_band(bare, ylabel="T [K]")
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("distance [km]", "T [K]")
    assert "data" not in legend(axis)


def test_band_draws_the_data_where_there_are_no_predictions(idata):
    without = changed(idata, predictions=None, predictions_constant_data=None)
    axis = plots.predictive_band(without)
    assert_allclose(axis.lines[0].get_xdata(), values(idata, "constant_data", "x"))
    only = changed(idata, predictions=group(idata, "predictions")[["y_mean"]])
    bands = fills(plots.predictive_band(only))
    assert list(bands) == ["function, 90 %", "function, 50 %"]
    same = plots.predictive_band(idata, group="posterior_predictive")
    assert_allclose(same.lines[0].get_ydata(), axis.lines[0].get_ydata())


# --- predicted_vs_observed


def test_predicted_vs_observed_holds_means_intervals_and_scores(idata):
    axis = plots.predicted_vs_observed(idata, level=0.8)
    y = values(idata, "predictions_constant_data", "y")
    draws = values(idata, "predictions", "y").reshape(-1, y.size)
    mean = values(idata, "predictions", "y_mean").mean(axis=(0, 1))
    coverage = metrics.interval_coverage(draws, y, 0.8)
    bars, dots = axis.collections[0::2], axis.collections[1::2]
    for inside, bar, dot in zip((True, False), bars, dots, strict=True):
        these = coverage.inside == inside
        assert_allclose(dot.get_offsets(), np.stack([y[these], mean[these]], axis=1))
        bounds = np.quantile(draws[:, these], [0.1, 0.9], axis=0, method="weibull")
        ends = [segment[:, 1] for segment in bar.get_segments()]
        assert_allclose(ends, bounds.T, rtol=1e-12)
    colors = [to_rgb(points.get_facecolor()[0, :3]) for points in dots]
    assert colors[0] != colors[1]
    title = axis.get_legend().get_title().get_text()
    assert f"RMSE {metrics.rmse(mean, y).value:.3g} ±" in title
    share, error = 100 * coverage.coverage, 100 * coverage.standard_error
    assert f"{share:.1f} % of targets inside (80 ± {error:.1f}" in title
    (line,) = axis.lines
    assert_array_equal(line.get_xdata(), line.get_ydata())
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("observed y", "predicted y")


def test_predicted_vs_observed_says_that_it_shows_training_data(idata):
    without = group(idata, "predictions_constant_data")[["x"]]
    without = changed(idata, predictions_constant_data=without)
    axis = plots.predicted_vs_observed(without)
    assert axis.get_xlabel() == "observed y (training data)"
    assert sum(len(dots.get_offsets()) for dots in axis.collections[1::2]) == 60
    renamed = group(idata, "predictions_constant_data").rename(y="targets")
    other = changed(idata, predictions_constant_data=renamed)
    axis = plots.predicted_vs_observed(other)
    assert axis.get_xlabel() == "observed y (training data)"
    axis = plots.predicted_vs_observed(other, target="targets")
    assert axis.get_xlabel() == "observed y"


# --- calibration


def test_calibration_holds_the_transform_and_the_coverage(idata):
    histogram, curve = plots.calibration(idata, bins=8, seed=3)
    y = values(idata, "predictions_constant_data", "y")
    draws = values(idata, "predictions", "y").reshape(-1, y.size)
    places, unit = metrics.pit(draws, y, 3), {"range": (0, 1), "density": True}
    expected, _ = np.histogram(places, bins=8, **unit)
    assert_allclose(histogram.patches[-1].get_data().values, expected)
    (band,) = (p for p in histogram.patches if p.get_label() == "95 % if calibrated")
    edges = np.unique(band.get_path().get_extents(band.get_patch_transform()).intervaly)
    assert_allclose(edges, 8 * binomial_band(y.size, 1 / 8))
    x, found = curve.lines[-1].get_data()
    assert_allclose(x, np.linspace(0.05, 0.95, 19))
    coverages = [metrics.interval_coverage(draws, y, level).coverage for level in x]
    assert_allclose(found, coverages)
    _, low, high = fills(curve)["95 % if calibrated"]
    bands = [binomial_band(y.size, level) for level in x]
    assert_allclose(np.transpose([low, high]), bands)


def test_calibration_ends_where_the_draws_end():
    """Nine draws hold a new one with probability 0.8: curve and intervals stop."""
    idata = example_results(num_points=50, num_samples=9, num_chains=1)
    _, curve = plots.calibration(idata)
    assert_allclose(curve.lines[-1].get_data()[0], np.linspace(0.05, 0.8, 16))
    message = r"9 draws of y, which hold a new one with probability 0\.80 at most"
    with pytest.raises(ValueError, match=message):
        plots.predicted_vs_observed(idata, level=0.9)
    bands = fills(plots.predictive_band(idata, levels=(0.5, 0.9)))
    assert {"y, 80 %", "y, 50 %", "function, 80 %"} <= set(bands)


def test_calibration_of_classes_holds_the_reliability_curve(labeled):
    shares, curve = plots.calibration(labeled, bins=10)
    labels = values(labeled, "predictions_constant_data", "y")
    table = metrics.ece(values(labeled, "predictions", "y_probs"), labels, bins=10)
    filled = table.counts > 0
    assert_allclose(shares.patches[-1].get_data().values, table.counts / labels.size)
    assert_allclose(
        curve.lines[-1].get_data(), [table.confidence[filled], table.accuracy[filled]]
    )
    assert curve.get_legend().get_title().get_text() == f"ECE {100 * table.ece:.1f} %"


# --- importances


def test_importances_are_bars_with_the_largest_first():
    shares = {f"column {place}": share for place, share in enumerate([0.1, 0.7, 0.2])}
    axis = plots.importances(shares)
    assert [bar.get_width() for bar in axis.patches] == [0.7, 0.2, 0.1]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["column 1", "column 2", "column 0"]
    assert axis.yaxis_inverted()  # the first bar is at the top
    axis = plots.importances(shares, max_columns=2)
    assert axis.get_yticklabels()[-1].get_text() == "2 others"
    assert_allclose(axis.patches[-1].get_width(), 0.3)
    for wrong in ({}, {"a": -0.1}, {"a": np.nan}):
        with pytest.raises(ValueError, match="argument `shares`"):
            plots.importances(wrong)
    with pytest.raises(ValueError, match=r"`ax` got 3\. Pass 1"):
        plots.importances(shares, ax=3)


# --- reliability_diagram


def test_reliability_holds_shares_of_right_labels_and_of_points(labeled):
    axis = plots.reliability_diagram(labeled, bins=12)
    labels = values(labeled, "predictions_constant_data", "y")
    table = metrics.ece(values(labeled, "predictions", "y_probs"), labels, bins=12)
    filled = table.counts > 0
    sizes, tops = table.counts[filled], table.confidence[filled]
    assert_allclose(axis.lines[-1].get_data(), [tops, table.accuracy[filled]])
    assert_allclose(axis.patches[0].get_data().values, table.counts / 500)
    (bands,) = axis.collections
    for size, top, segment in zip(sizes, tops, bands.get_segments(), strict=True):
        assert_allclose(segment[:, 1], binomial_band(size, top))
    assert axis.get_legend().get_title().get_text() == f"ECE {100 * table.ece:.1f} %"
    about = ["share of 500 points", "95 % if calibrated", "most probable class"]
    assert legend(axis) == about
    assert axis.get_xlim() == pytest.approx((0.3, 1.0))


def test_reliability_of_a_label_with_a_mean():
    """Bernoulli sites have a mean and no probabilities of classes."""
    rng = np.random.default_rng(0)
    p = rng.uniform(size=(2, 30, 200))
    y = rng.integers(0, 2, 200)
    groups = {
        "predictions": {"y": (SAMPLE, rng.binomial(1, p)), "y_mean": (SAMPLE, p)},
        "predictions_constant_data": {"y": (("data",), y)},
    }
    axis = plots.reliability_diagram(results(groups))
    table = metrics.ece(np.stack([1 - p, p], axis=-1), y)
    filled = table.counts > 0
    assert_allclose(
        axis.lines[-1].get_data(), [table.confidence[filled], table.accuracy[filled]]
    )


# --- all of them


@pytest.mark.parametrize("name", FIGURES)
def test_figures_draw_on_the_axes_they_are_given_or_on_new_ones_that_hold_their_text(
    name, idata, labeled, tmp_path
):
    count = 2 if name == "calibration" else 1
    canvas, axes = plt.subplots(1, count, squeeze=False)
    result = drawn(name, idata, labeled, ax=axes[0] if count > 1 else axes[0, 0])
    assert list(np.atleast_1d(np.asarray(result, dtype=object))) == list(axes[0])
    assert plt.get_fignums() == [canvas.number]
    with pytest.raises(ValueError, match=r"argument `ax` got 5 axes"):
        drawn(name, idata, labeled, ax=plt.subplots(1, 5)[1])

    axes = np.atleast_1d(np.asarray(drawn(name, idata, labeled), dtype=object))
    canvas = axes[0].figure
    canvas.savefig(tmp_path / "figure.pdf")
    assert canvas.get_figwidth() == pytest.approx(3.4 * count)  # a column, or the page
    for axis in axes:
        box = axis.get_tightbbox()  # with its labels, title and legend
        assert np.all(box.min >= canvas.bbox.min - 1)
        assert np.all(box.max <= canvas.bbox.max + 1)
        assert min(text.get_fontsize() for text in axis.get_yticklabels()) >= 7


def test_figures_draw_what_to_inference_data_gives():
    """One input, whose name and values the export keeps."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(w * x, NOISE), obs=y)

    sizes = {"num_warmup": 100, "num_samples": 50, "num_chains": 1}
    mcmc = run_chains(BarkerMH(model), X[:, 0], Y, **sizes)
    fitted = to_inference_data(mcmc, predictions={"x": NEW_X[:, 0], "y": NEW_X[:, 0]})
    axis = plots.predictive_band(fitted)
    assert "data" in legend(axis)
    assert_allclose(axis.lines[0].get_xdata(), np.sort(NEW_X[:, 0]), rtol=1e-6)
    assert "training" not in plots.predicted_vs_observed(fitted).get_xlabel()
    assert plots.calibration(fitted)[1].lines


def test_without_matplotlib_the_error_says_what_to_install(idata, labeled, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for name in FIGURES:
        with pytest.raises(ImportError, match=r'pip install "numpyro_bnn\[plots\]"'):
            drawn(name, idata, labeled)


def bare(idata):
    return results({"observed_data": group(idata, "observed_data")})


def in_columns(idata):
    inputs = {"x": (("data", "column"), np.zeros((120, 2)))}
    return changed(idata, predictions_constant_data=inputs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i, c: plots.predictive_band(i, "z"), "`x` got 'z'.*Known: x"),
        (lambda i, c: plots.predictive_band(in_columns(i)), r"'x' of shape \(120,"),
        (lambda i, c: plots.predictive_band(i, site="z"), "`site` got 'z'.*Known: y"),
        (lambda i, c: plots.predictive_band(i, group="prior"), "`group` got"),
        (lambda i, c: plots.predictive_band(bare(i)), r"without predictions\. Pass"),
        (lambda i, c: plots.predictive_band(c), "'y', a class label"),
        (lambda i, c: plots.predicted_vs_observed(i, target="z"), "`target` got"),
        (lambda i, c: plots.predicted_vs_observed(c), r"'y', a class"),
        (lambda i, c: plots.calibration(bare(i)), "without predictions and their"),
    ],
)
def test_figures_of_what_a_result_lacks_are_refused(idata, labeled, call, message):
    with pytest.raises(ValueError, match=message):
        call(idata, labeled)
    assert plt.get_fignums() == []


def test_several_sites_or_inputs_must_be_named(idata):
    two = group(idata, "observed_data").copy()
    two["z"] = two["y"]
    both = changed(idata, observed_data=two)
    with pytest.raises(
        ValueError, match=r"`site` got nothing, and there are 2 sites.*\['y', 'z'\]"
    ):
        plots.predictive_band(both)
    assert plots.predictive_band(both, site="y").get_ylabel() == "y"
    inputs = group(idata, "predictions_constant_data").copy()
    inputs["t"] = 2 * inputs["x"]
    timed = changed(idata, predictions_constant_data=inputs)
    with pytest.raises(ValueError, match="there are 2 inputs"):
        plots.predictive_band(timed)
    assert plots.predictive_band(timed, "t").get_xlabel() == "t"
