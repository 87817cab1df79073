"""Figures of classifiers, out-of-distribution scores, relevance and members: what their artists hold."""

import re
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.stats
from figure_data import example_classes, example_results
from matplotlib.colors import to_hex, to_rgb

from numpyro_bnn import _arviz, metrics, plots
from numpyro_bnn.plots import _style

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("closed_figures")]

SAMPLE = ("chain", "draw")


@pytest.fixture(scope="module")
def labeled():
    return example_classes()


@pytest.fixture(scope="module")
def numbers():
    return example_results(num_samples=40)


@pytest.fixture(scope="module")
def weights():
    """Two chains of 60 draws of a kernel, its scales by input, and precisions."""
    rng = np.random.default_rng(0)
    draws = {
        "net.Dense_0.kernel": rng.normal(size=(2, 60, 2, 3)),
        "net.Dense_0.kernel_scale": np.exp(rng.normal([0.0, 2.0], 1.0, (2, 60, 2))),
        "tau_precision": rng.gamma(2.0, size=(2, 60, 2)),
    }
    names = {name: (*SAMPLE, *(f"{name}_{i}" for i in range(v.ndim - 2))) for name, v in draws.items()}
    names["net.Dense_0.kernel"] = (*SAMPLE, "net.Dense_0.kernel_in", "net.Dense_0.kernel_out")
    variables = {name: (names[name], value) for name, value in draws.items()}
    posterior = _arviz.dataset(variables, {"net.Dense_0.kernel_in": ["age", "height"]})
    return _arviz.inference_data({"posterior": posterior})


def values(idata, group, name):
    return _arviz.group(idata, group)[name].to_numpy()


def legend(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


# --- reliability_diagram


def test_reliability_holds_shares_of_right_labels_and_of_points(labeled):
    axis = plots.reliability_diagram(labeled, bins=12)
    probs = values(labeled, "predictions", "y_probs")
    labels = values(labeled, "predictions_constant_data", "y")
    mean = probs.mean(axis=(0, 1))
    right, top = mean.argmax(axis=1) == labels, mean.max(axis=1)
    place = np.ceil(12 * top).astype(int) - 1  # a bin holds its upper edge
    filled = np.unique(place)
    expected = [[top[place == m].mean() for m in filled], [right[place == m].mean() for m in filled]]
    np.testing.assert_allclose(axis.lines[-1].get_data(), expected)
    share = axis.patches[0].get_data().values
    np.testing.assert_allclose(share, np.bincount(place, minlength=12) / 500)
    (bands,) = axis.collections
    for m, segment in zip(filled, bands.get_segments(), strict=True):
        size = (place == m).sum()
        expected = np.array(scipy.stats.binom.interval(0.95, size, top[place == m].mean())) / size
        np.testing.assert_allclose(segment[:, 1], expected)
    ece = sum((place == m).mean() * abs(a - c) for m, c, a in zip(filled, *axis.lines[-1].get_data(), strict=True))
    assert axis.get_legend().get_title().get_text() == f"ECE {100 * ece:.1f} %"
    assert legend(axis) == ["share of 500 points", "95 % if calibrated", "most probable class"]
    assert axis.get_xlim() == pytest.approx((0.3, 1.0))


def test_reliability_of_a_calibrated_classifier_stays_in_its_bands(labeled):
    """At most 1 band in 20 is missed on average, so more than 3 of 10 with probability 1e-3 (binomial)."""
    axis = plots.reliability_diagram(example_classes(num_points=3000), bins=15)
    accuracy = axis.lines[-1].get_ydata()
    bounds = np.array([segment[:, 1] for segment in axis.collections[0].get_segments()])
    assert np.sum((accuracy < bounds[:, 0]) | (accuracy > bounds[:, 1])) <= 3


def test_reliability_of_a_label_with_a_mean():
    """Bernoulli sites have a mean and no probabilities of classes."""
    rng = np.random.default_rng(0)
    p = rng.uniform(size=(2, 30, 200))
    y = rng.integers(0, 2, 200)
    groups = {
        "predictions": _arviz.dataset(
            {"y": ((*SAMPLE, "data"), rng.binomial(1, p)), "y_mean": ((*SAMPLE, "data"), p)}
        ),
        "predictions_constant_data": _arviz.dataset({"y": (("data",), y)}),
    }
    axis = plots.reliability_diagram(_arviz.inference_data(groups))
    table = metrics.ece(np.stack([1 - p, p], axis=-1), y)
    filled = table.counts > 0
    np.testing.assert_allclose(axis.lines[-1].get_data(), [table.confidence[filled], table.accuracy[filled]])


# --- ood_histograms


def test_ood_histograms_hold_the_scores_and_their_auroc(labeled):
    foreign = {
        "far": example_classes(300, spread=3.0, seed=1),
        "near": example_classes(200, seed=2),
    }
    axis = plots.ood_histograms(labeled, foreign, bins=20, name="seen")
    found = {"seen": labeled, **foreign}
    scores = {
        name: metrics.uncertainty(values(idata, "predictions", "y_probs")).mutual_information
        for name, idata in found.items()
    }
    ends = [min(s.min() for s in scores.values()), max(s.max() for s in scores.values())]
    for patch, (name, score) in zip(axis.patches, scores.items(), strict=True):
        counts, edges = np.histogram(score, 20, ends)
        np.testing.assert_allclose(patch.get_data().values, counts / score.size, err_msg=name)
        np.testing.assert_allclose(patch.get_data().edges, edges)
    area = {name: metrics.auroc(scores["seen"], scores[name]) for name in foreign}
    shown = [re.fullmatch(r"(\w+), AUROC (0\.\d+) ± (0\.0*[1-9])", text).groups() for text in legend(axis)[1:]]
    assert [name for name, _, _ in shown] == ["far", "near"]
    for name, value, error in shown:  # as many digits as the error has
        assert len(value) == len(error)
        assert float(value) == pytest.approx(area[name].value, abs=0.51 * 10.0 ** (2 - len(value)))
        assert float(error) == pytest.approx(area[name].standard_error, rel=0.5)
    assert area["far"].value > 0.9
    assert axis.get_xlabel() == "mutual information of label and weights [nats]"
    assert len({to_hex(patch.get_edgecolor()) for patch in axis.patches}) == 3


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("entropy", lambda p: scipy.stats.entropy(p.mean(axis=(0, 1)), axis=-1)),
        ("max_prob", lambda p: 1 - p.mean(axis=(0, 1)).max(axis=-1)),
        ("function_sd", lambda p: np.sqrt(p.var(axis=(0, 1)).sum(axis=-1))),
        (lambda p: p[0, 0, :, 0], lambda p: p[0, 0, :, 0]),
    ],
)
def test_ood_scores_of_classes(score, expected, labeled):
    axis = plots.ood_histograms(labeled, labeled, score, bins=7)
    counts, _ = np.histogram(expected(values(labeled, "predictions", "y_probs")), 7)
    for patch in axis.patches:
        np.testing.assert_allclose(patch.get_data().values, counts / 500)
    assert legend(axis)[1].startswith("OOD, AUROC 0.50 ")


def test_ood_histograms_of_numbers_take_the_spread_of_the_function(numbers):
    axis = plots.ood_histograms(numbers, numbers, bins=9)
    counts, _ = np.histogram(values(numbers, "predictions", "y_mean").std(axis=(0, 1)), 9)
    np.testing.assert_allclose(axis.patches[0].get_data().values, counts / 120)
    assert axis.get_xlabel() == "sd of the function over draws"


def test_ood_histograms_of_given_scores_on_a_logarithmic_axis():
    """A score of 0 stands in the first bin, an infinite one in the last."""
    known, foreign = np.array([0.0, 0.1, 1.0, 1.0]), np.array([1.0, 10.0, np.inf])
    axis = plots.ood_histograms(known, foreign, bins=2, log=True, xlabel="score")
    np.testing.assert_allclose(axis.patches[0].get_data().edges, [0.1, 1.0, 10.0])
    np.testing.assert_allclose(axis.patches[0].get_data().values, [0.5, 0.5])
    np.testing.assert_allclose(axis.patches[1].get_data().values, [0.0, 1.0])
    assert axis.get_xscale() == "log"
    # 12 pairs, two of them ties.
    assert legend(axis)[1].startswith(f"OOD, AUROC {11 / 12:.1f}")


# --- relevance


def test_relevance_holds_medians_and_intervals(weights):
    axis = plots.relevance(weights, "net/Dense_0.kernel_scale", level=0.8)
    draws = values(weights, "posterior", "net.Dense_0.kernel_scale").reshape(-1, 2)
    low, middle, high = scipy.stats.mstats.mquantiles(draws, [0.1, 0.5, 0.9], alphap=0, betap=0, axis=0)
    np.testing.assert_allclose(axis.lines[0].get_data(), [middle, [0, 1]])
    segments = axis.collections[0].get_segments()
    np.testing.assert_allclose([segment[:, 0] for segment in segments], np.transpose([low, high]))
    assert axis.get_xscale() == "log"
    assert [text.get_text() for text in axis.get_yticklabels()] == ["age", "height"]
    assert axis.get_ylim() == (1.5, -0.5)  # the first input on top
    assert axis.get_title(loc="left") == "net.Dense_0.kernel_scale"


def test_relevance_by_chain_of_precisions_in_order(weights):
    axis = plots.relevance(weights, ["tau_precision"], by_chain=True, ordered=True, names=["a", "b"])
    scales = values(weights, "posterior", "tau_precision") ** -0.5
    order = np.argsort(-np.median(scales, axis=(0, 1)))
    for chain, line in enumerate(axis.lines):
        np.testing.assert_allclose(line.get_xdata(), np.median(scales[chain], axis=0)[order])
        assert to_hex(line.get_color()) == _style.CYCLE[chain].lower()
    assert (axis.lines[0].get_ydata() < axis.lines[1].get_ydata()).all()
    assert [text.get_text() for text in axis.get_yticklabels()] == [["a", "b"][i] for i in order]
    assert legend(axis) == ["chain 0", "chain 1"]


def test_relevance_of_two_variables_side_by_side(weights):
    axis = plots.relevance(weights, ["net.Dense_0.kernel_scale", "tau_precision"])
    assert legend(axis) == ["net.Dense_0.kernel_scale", "tau_precision"]
    np.testing.assert_allclose([line.get_ydata().mean() for line in axis.lines], [0.4, 0.6])


# --- member_intervals


def test_member_intervals_hold_every_chain_in_the_order_of_targets(numbers):
    """Two fits of 4 and 2 chains: 6 intervals at each point, the first four left of the other two."""
    other = example_results(num_chains=2, num_samples=30, seed=0)
    axis = plots.member_intervals({"a": numbers, "b": other}, 5, level=0.5)
    y = values(numbers, "predictions_constant_data", "y")
    chosen = np.argsort(y)[[0, 30, 60, 89, 119]]
    chains = [*values(numbers, "predictions", "y_mean"), *values(other, "predictions", "y_mean")]
    bars, dots = axis.collections[:6], axis.lines
    for draws, bar, dot in zip(chains, bars, dots, strict=True):
        low, middle, high = np.quantile(draws[:, chosen], [0.25, 0.5, 0.75], axis=0, method="weibull")
        np.testing.assert_allclose(dot.get_ydata(), middle)
        np.testing.assert_allclose([segment[:, 1] for segment in bar.get_segments()], np.transpose([low, high]))
    places = np.array([dot.get_xdata() for dot in dots])
    assert (np.diff(places, axis=0) > 0).all()
    np.testing.assert_allclose(np.round(places), np.tile(np.arange(5), (6, 1)))
    assert [to_hex(dot.get_color()) for dot in dots] == [
        c.lower() for c in [_style.CYCLE[0]] * 4 + [_style.CYCLE[1]] * 2
    ]
    np.testing.assert_allclose([segment[0, 1] for segment in axis.collections[6].get_segments()], y[chosen])
    assert legend(axis) == ["a", "b", "target"]


def test_member_intervals_of_one_fit_color_its_chains(numbers):
    axis = plots.member_intervals(numbers, [3, 50, 7])
    assert len({to_rgb(line.get_color()) for line in axis.lines}) == 4
    y = values(numbers, "predictions_constant_data", "y")
    np.testing.assert_allclose([s[0, 1] for s in axis.collections[-1].get_segments()], np.sort(y[[3, 50, 7]]))


# --- all of them

FIGURES = {
    "reliability_diagram": (1, lambda f, ax: plots.reliability_diagram(f["labeled"], ax=ax)),
    "ood_histograms": (1, lambda f, ax: plots.ood_histograms(f["labeled"], f["labeled"], ax=ax)),
    "relevance": (1, lambda f, ax: plots.relevance(f["weights"], "tau_precision", ax=ax)),
    "member_intervals": (1, lambda f, ax: plots.member_intervals(f["numbers"], ax=ax)),
}


@pytest.fixture
def fits(labeled, numbers, weights):
    return {"labeled": labeled, "numbers": numbers, "weights": weights}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_draw_on_the_axes_they_are_given(name, fits, tmp_path):
    count, figure = FIGURES[name]
    canvas, axes = plt.subplots(1, count, squeeze=False)
    result = figure(fits, axes[0] if count > 1 else axes[0, 0])
    assert list(np.asarray(result, dtype=object).ravel()) == list(axes[0])
    assert plt.get_fignums() == [canvas.number]
    canvas.savefig(tmp_path / "figure.svg")
    with pytest.raises(ValueError, match=r"argument `ax` got 5 axes"):
        figure(fits, plt.subplots(1, 5)[1])


@pytest.mark.parametrize("name", FIGURES)
def test_new_figures_hold_all_their_text(name, fits):
    axes = np.asarray(FIGURES[name][1](fits, None), dtype=object).ravel()
    canvas = axes[0].figure
    canvas.draw_without_rendering()
    assert canvas.get_figwidth() <= 6.8
    for axis in axes:
        box = axis.get_tightbbox()  # with its labels, title and legend
        assert box.x0 >= canvas.bbox.x0 - 1
        assert box.x1 <= canvas.bbox.x1 + 1
        assert box.y0 >= canvas.bbox.y0 - 1
        assert box.y1 <= canvas.bbox.y1 + 1


@pytest.mark.parametrize("name", FIGURES)
def test_without_matplotlib_the_error_says_what_to_install(name, fits, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=re.escape('pip install "numpyro_bnn[plots]"')):
        FIGURES[name][1](fits, None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: plots.reliability_diagram(f["numbers"]), "`site` got 'y', which is not a class label"),
        (lambda f: plots.reliability_diagram(f["labeled"], bins=0), "`bins` got 0"),
        (lambda f: plots.reliability_diagram(f["weights"]), "`site` got nothing"),
        (lambda f: plots.ood_histograms(f["labeled"], f["labeled"], "entropi"), "Did you mean 'entropy'"),
        (
            lambda f: plots.ood_histograms(f["numbers"], f["numbers"], "entropy"),
            "'y', which is not a class label",
        ),
        (lambda f: plots.ood_histograms(f["labeled"], {}), "`outside` got {}. Pass at least one"),
        (
            lambda f: plots.ood_histograms(f["labeled"], {"a": np.ones((2, 2))}),
            r"`outside\['a'\]` got scores of shape",
        ),
        (lambda f: plots.ood_histograms([1.0, np.nan], [1.0]), "`inside` got scores of shape .*with NaN"),
        (lambda f: plots.ood_histograms([0.0], [0.0], log=True), "`log` got True. No score is positive"),
        (lambda f: plots.ood_histograms([0.0], [0.0], bins=0.5), "`bins` got 0.5"),
        (lambda f: plots.relevance(f["weights"]), r"2 variables end in .*Name one of \['net"),
        (lambda f: plots.relevance(f["numbers"]), r"0 variables end in .*Name one of \['w'\]"),
        (lambda f: plots.relevance(f["weights"], "taupreci"), "Did you mean 'tau_precision'"),
        (lambda f: plots.relevance(f["weights"], "net.Dense_0.kernel"), r"of shape \(2, 3\)"),
        (lambda f: plots.relevance(f["numbers"], "w"), "not positive"),
        (
            lambda f: plots.relevance(f["weights"], "tau_precision", names=["a"]),
            "`names` got 1 names.*2 inputs",
        ),
        (
            lambda f: plots.relevance(f["weights"], ["tau_precision", "net.Dense_0.kernel_scale"], by_chain=True),
            "`by_chain` got True for 2 variables",
        ),
        (lambda f: plots.relevance(f["labeled"]), "without posterior"),
        (lambda f: plots.member_intervals([1]), "`fits` got .*Pass a result"),
        (
            lambda f: plots.member_intervals({"a": f["numbers"], "b": example_results(5)}),
            "numbers of points {'a': 120, 'b': 5}",
        ),
        (lambda f: plots.member_intervals(f["numbers"], [200]), "indices between 0 and 119"),
    ],
)
def test_errors_say_what_to_write(call, message, fits):
    with pytest.raises(ValueError, match=f"(?s)^plots.*{message}"):
        call(fits)
    assert plt.get_fignums() == []
