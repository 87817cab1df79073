"""Scores and figures leave out a chain at fault, and name it."""

import warnings

import numpy as np
import pytest
import xarray as xr
from helpers import results

from numpyro_bnn import metrics, plots

SOUND, ROWS = [0, 2], 12


def faulty(value=np.nan, marked=False):
    """Predictions of chains 4, 5 and 6, of which the second has a value that is not
    finite, or is marked.
    """
    rng = np.random.default_rng(0)
    y = rng.normal(size=ROWS)
    draws = y + rng.normal(size=(3, 50, ROWS))
    probs = rng.dirichlet(np.ones(3), size=(3, 50, ROWS))
    draws[1, 20:], probs[1, 3] = value, value
    dims = ("chain", "draw", "data")
    predictions = xr.Dataset(
        {
            "y": (dims, draws),
            "y_mean": (dims, 0.5 * draws),
            "c_probs": ((*dims, "k"), probs),
        },
        {"chain": [4, 5, 6]},
    )
    if marked:
        predictions = predictions.assign_coords(marked=("chain", [False, True, False]))
    return predictions, y, rng.integers(3, size=ROWS)


SCORES = {
    "lppd": lambda draws, y, *_: metrics.lppd(-((draws - y) ** 2)).pointwise,
    "crps": lambda draws, y, *_: metrics.crps(draws, y).pointwise,
    "interval_coverage": lambda draws, y, *_: (
        metrics.interval_coverage(draws, y).inside
    ),
    "pit": lambda draws, y, *_: metrics.pit(draws, y, 0),
    "function_space": lambda draws, *_: metrics.function_space(draws).ess_bulk,
    "log_score": lambda draws, y, probs, labels: (
        metrics.log_score(probs, labels).pointwise
    ),
    "ece": lambda draws, y, probs, labels: metrics.ece(probs, labels).confidence,
    "uncertainty": lambda draws, y, probs, labels: metrics.uncertainty(probs).total,
}


@pytest.mark.parametrize(
    ("value", "marked"), [(np.nan, False), (0.25, True)], ids=["nan", "marked"]
)
@pytest.mark.parametrize("name", SCORES)
def test_scores_leave_out_a_chain_at_fault(name, value, marked):
    """They equal those of the other chains alone."""
    given, y, labels = faulty(value, marked)
    with pytest.warns(
        metrics.HealthWarning, match=f"^{name}: left out chains 5, which"
    ) as caught:
        found = SCORES[name](given["y"], y, given["c_probs"], labels)
    assert len(caught) == 1
    sound = given.isel(chain=SOUND)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = SCORES[name](sound["y"], y, sound["c_probs"], labels)
    assert np.isfinite(found[~np.isnan(alone)]).all()
    np.testing.assert_array_equal(found, alone)


def test_arrays_name_chains_by_their_position():
    densities = np.zeros((3, 5, 4))
    densities[2, 1, 0] = np.nan
    densities[0, 0, 0] = -np.inf  # a density of 0 is not at fault
    with pytest.warns(metrics.HealthWarning, match="left out chains 2, "):
        assert metrics.lppd(densities).pointwise[0] == pytest.approx(np.log(0.9))


def test_without_a_sound_chain_the_error_says_what_to_do():
    marked = faulty(0.25, marked=True)[0]["y"][1:2]
    with pytest.raises(
        ValueError, match=r"lppd.*no chain to use \(at fault: 5\).*metrics.health"
    ):
        metrics.lppd(marked)
    with pytest.raises(ValueError, match="NaN"):
        metrics.lppd(np.full((2, 5, 4), np.nan))


@pytest.mark.parametrize(
    ("value", "marked"), [(np.nan, False), (0.25, True)], ids=["nan", "marked"]
)
def test_figures_leave_out_a_chain_at_fault(value, marked, closed_figures):
    predictions, y, labels = faulty(value, marked)
    targets = {
        "y": ("data", y),
        "c": ("data", labels),
        "x": ("data", np.arange(float(ROWS))),
    }
    observed = {name: targets[name] for name in ("y", "c")}
    groups = {"predictions_constant_data": targets, "observed_data": observed}
    idata = results({"predictions": predictions, **groups})
    for name, site in (("predicted_vs_observed", "y"), ("calibration", "c")):
        with pytest.warns(metrics.HealthWarning, match="left out chains 5, ") as caught:
            getattr(plots, name)(idata, site=site)
        assert len(caught) == 1
    with pytest.warns(metrics.HealthWarning, match="^plots.predictive_band: left out"):
        axis = plots.predictive_band(idata, x="x", site="y")
    (mean,) = (line for line in axis.lines if line.get_label() == "function mean")
    expected = predictions["y_mean"].to_numpy()[SOUND].mean((0, 1))
    np.testing.assert_allclose(mean.get_ydata(), expected, rtol=1e-12)
