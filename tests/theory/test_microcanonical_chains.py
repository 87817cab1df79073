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
from numpy.testing import assert_allclose as close
from numpyro.infer import MCMC

import numpyro_bnn as bnn
from numpyro_bnn import infer

SCALES = np.exp(np.linspace(-1.5, 1.5, 40)).astype(np.float32)
CORRELATION = 0.7
FAR = 30 * SCALES  # a mean


def gaussian():
    """Correlated pairs of 40 scales: no diagonal makes it round."""
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
    close(energy, target, rtol=0.35)
    about = kernel.describe(state)
    close(about["implied_bias"], infer.implied_bias(energy.max()), rtol=1e-3)
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
    close(state.decoherence_length, 80**0.5, rtol=0.35)
    learned = np.asarray(state.engine.adaptation)[:, :40]
    ratio = np.log(learned / SCALES)
    assert np.abs(ratio - ratio.mean(1, keepdims=True)).max() < 0.35
    assert "implied_bias_bound" in bnn.to_inference_data(mcmc).attrs


def test_limits_of_energy_errors_follow_the_targets():
    """Also those of a user, in warm-up."""
    kernel = infer.MCLMC(gaussian)
    assert kernel.max_energy_error(10) == 15
    limit = 24 * (10_000 * kernel.energy_targets[1]) ** 0.5
    assert kernel.max_energy_error(10_000) == pytest.approx(limit)
    given = infer.MCLMC(gaussian, energy_variance=(0.5, 0.1))
    assert given.max_warm_up_error(1000) == pytest.approx(12 * 500**0.5)
    assert given.max_energy_error(1000) == pytest.approx(24 * 100**0.5)


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
    close(chosen, (target / expected) ** (1 / 6), rtol=1e-3)


def autocorrelation_time(draws):
    """The mean over coordinates of sums of pairs until one is negative."""
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
    """0.4 of it; before, the spread of the whitened draws."""
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
def test_a_chain_that_takes_no_step_is_marked():
    """Its steps are lost in rounding."""
    mcmc = run(infer.MCLMC(gaussian, 1e-9, steps_per_draw=10), 40, 20, chains=2)
    assert np.isnan(mcmc.get_samples()["x"]).all()
    with pytest.warns(UserWarning, match=r"diverged \(chain 0 at step"):
        about = bnn.to_inference_data(mcmc).attrs
    assert about["frozen"] == "[True, True]"
    assert about["refused_steps"] == "[1.0, 1.0]"
    assert np.isnan(about["implied_bias"])
