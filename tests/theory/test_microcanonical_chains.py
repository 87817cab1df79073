"""The warm-up of the microcanonical kernel, the bias it reports, and the steps it
refuses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import walk
from numpyro.infer import MCMC
from scipy import stats

import numpyro_bnn as bnn
from numpyro_bnn import infer

SCALES = np.exp(np.linspace(-1.5, 1.5, 40)).astype(np.float32)
CORRELATION = 0.7
FAR = 30 * SCALES  # a mean


def gaussian():
    """Pairs of correlated coordinates of 40 scales, off the origin: no diagonal
    preconditioner makes it round.
    """
    x = numpyro.sample("x", dist.Normal(FAR, SCALES).to_event(1))
    root = (1 - CORRELATION**2) ** 0.5
    numpyro.sample("y", dist.Normal(CORRELATION * (x - FAR), root * SCALES).to_event(1))


def run(
    kernel, num_warmup, num_samples, *args, chains=4, start=None, fields=(), **kwargs
):
    options = {
        "num_warmup": num_warmup,
        "num_samples": num_samples,
        "num_chains": chains,
    }
    mcmc = MCMC(kernel, chain_method="vectorized", progress_bar=False, **options)
    mcmc.run(jax.random.key(0), *args, init_params=start, extra_fields=fields, **kwargs)
    return mcmc


def by_chain(mcmc, field):
    return np.asarray(mcmc.get_extra_fields(group_by_chain=True)[field])


# -- the warm-up -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.optimized
def test_warm_up_meets_its_target_and_tells_the_bias():
    mcmc = run(infer.MCLMC(gaussian, steps_per_draw=20), 400, 500)
    state, kernel = mcmc.last_state, mcmc.sampler
    _, target = kernel.energy_targets
    # Energy errors of 1500 correlated steps of warm-up: relative standard error about
    # (2 / 400)^(1/2).
    energy = by_chain(mcmc, "energy_variance").mean(1)
    np.testing.assert_allclose(energy, target, rtol=0.35)
    about = kernel.describe(state)
    np.testing.assert_allclose(
        about["implied_bias"], infer.implied_bias(energy.max()), rtol=1e-3
    )
    assert about["biased"]
    # The mean over directions of the bias is within what is said.
    draws = mcmc.get_samples(group_by_chain=True)
    white = [
        (np.asarray(draws[name], float) - mean) / SCALES
        for name, mean in (("x", FAR), ("y", 0.0))
    ]
    squares = (np.concatenate(white, -1) ** 2).mean((1, 2))
    error = 2 * squares.std() / len(squares) ** 0.5  # of four chains: a t distribution
    assert abs(squares.mean() - 1) < about["implied_bias"] + 3 * error
    # The length is that of a spread of one in 80 whitened directions; scales are those
    # of the prior.
    np.testing.assert_allclose(state.decoherence_length, 80**0.5, rtol=0.35)
    learned = np.asarray(state.engine.adaptation)[:, :40]
    ratio = np.log(learned / SCALES)
    assert np.abs(ratio - ratio.mean(1, keepdims=True)).max() < 0.35
    assert "implied_bias_bound" in bnn.to_inference_data(mcmc).attrs


@pytest.mark.slow
@pytest.mark.optimized
def test_energy_errors_follow_their_target():
    """They grow with the sixth power of the step size, so transitions correct what they
    saw at other step sizes. By default the target starts at errors of a twelfth of the
    largest taken, far below a hundred times the last target, and falls geometrically.
    In 10,000 directions errors of single transitions are still off by a factor of two.
    """
    size = 10_000
    sd = np.exp(np.linspace(-1, 1, size)).astype(np.float32)

    def wide():
        numpyro.sample("x", dist.Normal(0.0, sd).to_event(1))

    start = {
        "x": jnp.asarray(sd * np.random.default_rng(0).normal(size=size), jnp.float32)
    }
    kernel = infer.MCLMC(
        wide, warm_start=0.0, preconditioner="identity", steps_per_draw=20
    )
    _, (energy, steps) = walk(
        kernel,
        60,
        start=start,
        warmup=60,
        keep=lambda state: (state.energy_variance, state.step_size),
    )
    _, last = kernel.energy_targets
    limit = kernel.max_energy_error(size)
    assert limit == pytest.approx(24 * (size * last) ** 0.5)
    assert kernel.max_energy_error(10) == 15
    # in warm-up the limit contains the targets of a user
    given = infer.MCLMC(wide, energy_variance=(0.5, 0.1))
    assert given.max_warm_up_error(1000) == pytest.approx(12 * 500**0.5)
    assert given.max_energy_error(1000) == pytest.approx(24 * 100**0.5)
    first = (limit / 12) ** 2 / size
    assert first < 10 * last
    target = np.r_[first * (last / first) ** (np.arange(36) / 36), np.full(24, last)]
    ratio = energy / target
    assert abs(ratio[12:36].mean() - 1) < 0.5
    assert abs(ratio[36:].mean() - 1) < 0.5
    assert (steps[1:] / steps[:-1]).max() < 1.2501
    # errors at other step sizes would lead far off, and back
    assert steps[12:].max() < 1.5 * steps[12:].min()


@pytest.mark.optimized
def test_the_last_steps_are_chosen_for_rare_stiff_places():
    """The curvature along the weights is the square of a scale that the data hardly
    know. Visits to large scales make up most of the mean energy variance. With all
    errors in full, and two standard errors, it meets the target; refused steps count
    64 times that.
    """

    def rare():
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.5))
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([10]).to_event(1))
        numpyro.sample("y", dist.Normal(scale * z, 1.0).to_event(1), obs=jnp.zeros(10))

    kernel = infer.MCLMC(rare, warm_start=0.0, steps_per_draw=10)
    end, (energy, refused, steps) = walk(
        kernel,
        101,
        warmup=100,
        keep=lambda state: (
            state.energy_variance,
            state.refused_steps,
            state.step_size,
        ),
    )
    target = kernel.energy_targets[1]
    most = kernel.max_energy_error(11) ** 2 / 11
    energy, refused, steps = (value[60:100] for value in (energy, refused, steps))
    seen = (1 - refused) * np.minimum(energy, most) + refused * 64 * target
    in_unit_steps = seen / steps**6
    expected = in_unit_steps.mean() + 2 * in_unit_steps.max() / len(seen)
    assert energy.max() > 64 * target, "no stiff place was met"
    chosen = np.asarray(end.base_step_size)
    np.testing.assert_allclose(chosen, (target / expected) ** (1 / 6), rtol=1e-3)


def autocorrelation_time(draws):
    """Pairs of autocorrelations are summed until one is negative; the mean over
    coordinates, lag by lag.
    """
    times = []
    for column in (draws - draws.mean(0)).T:
        lags = np.array(
            [
                column[: len(draws) - lag] @ column[lag:]
                for lag in range(len(draws) // 2 * 2)
            ]
        )
        pairs = (lags / lags[0]).reshape(-1, 2).sum(1)
        first = np.flatnonzero(pairs <= 0)
        times.append(
            max(2 * pairs[: first[0] if len(first) else None].sum() - 1, 1 / len(draws))
        )
    return np.mean(times)


def test_lengths_are_a_share_of_the_distance_traveled_per_effective_draw():
    """0.4 of it, where draws are correlated: as one step apart. Before, they are the
    spread of the whitened draws.
    """
    kernel = infer.MCLMC(gaussian, warm_start=0.0, steps_per_draw=1)
    keep = {
        "keep": lambda state: (
            state.z,
            state.decoherence_length,
            state.step_size,
            state.engine.adaptation,
        )
    }
    _, (z, lengths, steps, scales) = walk(kernel, 400, warmup=400, **keep)
    changes = np.flatnonzero(np.diff(lengths) != 0) + 1
    assert len(changes) == 3
    middle, late, end = (
        # where variances set it, where they set it again, and where correlations do
        changes
    )
    flat = np.concatenate([z["x"], z["y"]], 1).astype(float)
    spread = (
        flat[middle - 80 : middle + 1].var(0, ddof=1) / scales[middle] ** 2
    ).sum() ** 0.5
    assert lengths[middle] == pytest.approx(spread, rel=0.15)
    white = flat[late + 1 : end + 1] / scales[end]
    expected = 0.4 * autocorrelation_time(white) * steps[end + 1]
    assert lengths[end] == pytest.approx(expected, rel=0.02)


# -- refused steps ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.optimized
def test_a_cliff_that_no_gradient_shows_is_not_passed():
    """Single steps are refused there; the density up to the edge is truncated."""

    def cliff():
        x = numpyro.sample("x", dist.Normal(0.0, 1.0).expand([20]).to_event(1))
        numpyro.factor("cliff", jnp.where(x[0] > 1.0, -1e4, 0.0))

    kernel = infer.MCLMC(
        cliff, 0.4, warm_start=0.0, steps_per_draw=40, preconditioner="identity"
    )
    start, fields = {"x": jnp.zeros((16, 20))}, ("refused_steps",)
    mcmc = run(kernel, 10, 400, chains=16, start=start, fields=fields)
    x = np.asarray(mcmc.get_samples(group_by_chain=True)["x"], np.float64)[..., 0]
    assert x.max() <= 1
    refused = by_chain(mcmc, "refused_steps")
    assert set(np.unique(np.round(40 * refused))) >= {0, 1}
    exact, means = stats.truncnorm(-np.inf, 1.0).mean(), x.mean(1)
    error = means.std(ddof=1) / 4
    # t with 15 degrees of freedom: failure rate 2e-4
    assert abs(means.mean() - exact) < 5 * error
    assert error < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("step_size", [1e-9, 1e10])
def test_a_chain_that_takes_no_step_is_marked(step_size):
    """Steps lost in rounding, or so long that all are refused."""
    mcmc = run(infer.MCLMC(gaussian, step_size, steps_per_draw=10), 40, 20, chains=2)
    assert np.isnan(mcmc.get_samples()["x"]).all()
    with pytest.warns(UserWarning, match=r"diverged \(chain 0 at step"):
        about = bnn.to_inference_data(mcmc).attrs
    assert about["frozen"] == "[True, True]"
    assert about["refused_steps"] == "[1.0, 1.0]"
    assert np.isnan(about["implied_bias"])
