"""Figures of classifiers: what their artists hold."""

import re
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.stats
from figure_data import example_classes, example_results

from numpyro_bnn import _arviz, metrics, plots

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


# --- all of them

FIGURES = {"reliability_diagram": (1, lambda f, ax: plots.reliability_diagram(f["labeled"], ax=ax))}


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
    ],
)
def test_errors_say_what_to_write(call, message, fits):
    with pytest.raises(ValueError, match=f"(?s)^plots.*{message}"):
        call(fits)
    assert plt.get_fignums() == []
