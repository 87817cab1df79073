"""Chains that survive: steps that are not finite, chains that start again, divergences
that are reported.
"""

import warnings
from functools import partial

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from helpers import each, group, refused, run_chains, walk
from jax import lax
from numpy.testing import assert_allclose as close
from numpy.testing import assert_array_equal as equal
from numpyro.infer import MCMC
from registry import USUAL
from scipy import stats

import numpyro_bnn as bnn
from numpyro_bnn import infer, metrics
from numpyro_bnn.sgmcmc import (
    BAOAB,
    Full,
    Microcanonical,
    NoseHoover,
    Overdamped,
    build,
)

# -- the density up to a border --------------------------------------------------------


def walled(q):
    """A unit Gaussian in front of 1, without a density behind."""
    return 0.5 * jnp.vdot(q, q) + jnp.where(q[0] < 1, 0.0, jnp.nan) * q[0]


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("dynamics", "size", "eps", "bias"),
    [
        # The discretization makes a variance too large by eps / 4.
        pytest.param(Overdamped(), 1, 0.1, 0.03, id="overdamped"),
        pytest.param(BAOAB(1.0), 1, 0.1, 0.01, id="momentum"),
        pytest.param(NoseHoover(1.0, mass=40.0), 1, 0.1, 0.02, id="thermostat"),
        pytest.param(Microcanonical(), 20, 0.4, 0.01, id="microcanonical"),
    ],
)
def test_the_density_up_to_a_border_is_the_truncated_one(dynamics, size, eps, bias):
    """A chain that stays and turns back is a Metropolis rejection. With another
    momentum, up to twice the mass would lie within a step of the border.
    """
    chains, number = 128, 1500
    sampler = build(Full(walled), dynamics, schedule=eps)

    def draw(state, _):
        state = sampler.run(state, 2)
        return state, state.position[0]

    @jax.jit
    @jax.vmap
    def run(key):
        state = sampler.run(sampler.init(jnp.zeros(size), key), 100)
        return lax.scan(draw, state, None, number)

    state, x = run(jax.random.split(jax.random.key(0), chains))
    x, exact = np.asarray(x, np.float64), stats.truncnorm(-np.inf, 1.0)
    assert (np.asarray(state.first_divergence) == -1).all()
    assert (np.asarray(state.statistics.num_refused) > 0).all()
    assert (x < 1).all()
    width = eps if size > 1 else eps**0.5
    near, share = (x > 1 - width).mean(1), 1 - exact.cdf(1 - width)
    for values, target, allowed in (
        (x.mean(1), exact.mean(), bias),
        (near / share, 1.0, bias),
    ):
        error = values.std(ddof=1) / chains**0.5
        assert abs(values.mean() - target) < allowed + 4.5 * error
        assert error < 0.05


# -- chains that start again -----------------------------------------------------------


def unit(size=3):
    """Full-batch SGLD multiplies by 1 - eps / 2: without noise all is known."""
    numpyro.sample("w", dist.Normal(0.0, 1.0).expand([size]).to_event(1))


LOST = [(infer.SGLD, 165, 180), (infer.SGNHT, 74, 90)]


@each(("make", "begin", "back"), LOST, fast=1)
def test_a_chain_that_is_lost_in_warm_up_starts_again(make, begin, back):
    """One of two chains gets far too long steps; the other is the same, bit for bit, as
    beside a healthy one. Late in warm-up it returns to its middle.
    """
    kernel = make(unit, steps_per_draw=20, warm_start=0.2)
    state = kernel.init(
        jax.random.split(jax.random.key(0), 2), 200, {"w": jnp.ones((2, 3))}, (), {}
    )

    def transition(lost, state, i):
        far = lost & (jnp.arange(2) == 0) & (i == begin)
        state = state._replace(
            base_step_size=jnp.where(far, 1e12, state.base_step_size)
        )
        state = kernel.sample(state, (), {})
        return state, (state.z["w"], state.refused_steps, state.base_step_size)

    run = jax.jit(
        lambda state, lost: lax.scan(partial(transition, lost), state, jnp.arange(230))
    )
    healthy, (calm, refused, sizes) = jax.device_get(run(state, jnp.asarray(False)))
    end, (w, failing, found) = jax.device_get(run(state, jnp.asarray(True)))
    assert not refused.any()
    equal(w[:, 1], calm[:, 1])
    equal(end.num_gradients, healthy.num_gradients)
    assert np.isfinite(w).all()
    # Chains are looked at every ten transitions: first after fewer than 200 steps that
    # failed.
    equal(np.flatnonzero(failing[:, 0]), np.arange(begin, back))
    assert not end.diverging.any()
    # the curvature is 1 everywhere
    close(found[back, 0], 0.5 * sizes[begin, 0], rtol=1e-4)
    close(found[-1, 0], 0.5 * sizes[-1, 0], rtol=1e-4)
    assert np.abs(w[back:, 0]).max() < 6
    assert kernel.describe(end)["restarts"] == "[1, 0]"


@each("make", [infer.SGLD, infer.SGHMC], fast=1)
def test_steps_that_would_explode_are_refused_and_get_shorter(make):
    """A step of 200, where 4 is the limit of SGLD, multiplies a position by 99. It is
    refused, and shorter after each such transition. Late in warm-up that lasts.
    """
    kernel = make(unit, steps_per_draw=20, warm_start=0.2)
    state = kernel.init(jax.random.key(0), 200, {"w": jnp.ones(3)}, (), {})

    def transition(late, state, i):
        far = i == jnp.where(late, 150, 90)
        size = jnp.where(far, 200.0, state.base_step_size)
        state = kernel.sample(state._replace(base_step_size=size), (), {})
        return state, (state.z["w"], state.refused_steps, state.base_step_size)

    run = jax.jit(
        lambda state, late: lax.scan(partial(transition, late), state, jnp.arange(230))
    )
    sizes = []
    for late in (False, True):
        end, (w, refused, base) = jax.device_get(run(state, late))
        begin = 150 if late else 90
        assert refused[begin] > 0.3
        close(base[begin], 0.25 * 200, rtol=1e-5)
        assert np.abs(w).max() < 30
        assert not end.diverging
        assert kernel.describe(end)["restarts"] == "[0]"
        sizes.append(base[-1])
    assert sizes[1] <= 0.25 * sizes[0] * 1.001


def test_a_chain_that_takes_only_tiny_steps_is_marked():
    """Late in warm-up steps get shorter by 1/4 again and again."""
    kernel = infer.SGLD(unit, steps_per_draw=20, warm_start=0.0)
    state = kernel.init(jax.random.split(jax.random.key(0), 2), 60, None, (), {})

    def transition(state, i):
        far = (jnp.arange(2) == 0) & (i >= 45) & (i < 60)
        size = jnp.where(far, 1e5, state.base_step_size)
        state = kernel.sample(state._replace(base_step_size=size), (), {})
        return state, state.z["w"]

    end, w = jax.jit(lambda s: lax.scan(transition, s, jnp.arange(62)))(state)
    equal(end.diverging, [True, False])
    assert np.isnan(w[-1, 0]).all()
    assert np.isfinite(w[:, 1]).all()


def test_no_step_size_is_chosen_where_a_chain_happens_to_be_last():
    """At the flat bottom of a quartic the curvature allows any step."""

    def quartic():
        w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.factor("quartic", -0.25 * w**4)

    kernel = infer.SGLD(quartic, steps_per_draw=5, warm_start=0.0)
    state = kernel.init(jax.random.key(0), 40, {"w": jnp.ones(())}, (), {})

    def transition(state, i):
        place = jnp.where(i == 40, 1e-3, state.engine.position)
        engine = state.engine._replace(position=place)
        state = kernel.sample(state._replace(engine=engine), (), {})
        return state, state.base_step_size

    _, sizes = jax.jit(lambda s: lax.scan(transition, s, jnp.arange(42)))(state)
    assert (np.asarray(sizes[30:]) == sizes[30]).all()


def test_a_chain_that_is_lost_at_a_given_step_size_is_marked():
    """It starts again with that step size while there is warm-up."""
    kernel = infer.SGLD(unit, 1e6, steps_per_draw=50, warm_start=0.0)
    mcmc = MCMC(kernel, num_warmup=32, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0))
    assert np.isnan(mcmc.get_samples()["w"]).all()
    with pytest.warns(metrics.HealthWarning, match=r"diverged \(chain 0 at step"):
        idata = bnn.to_inference_data(mcmc)
    assert idata.attrs["restarts"] == "[2]"  # at transitions 8 and 16, of 4, 8, ..., 20
    assert idata.attrs["base_step_size"] == "[1000000.0]"
    assert idata.attrs["refused_steps"] == "[1.0]"
    equal(group(idata, "posterior")["marked"], [True])


def test_a_chain_that_is_lost_twice_keeps_its_given_step_size():
    """Before it should have arrived at the typical set, and after."""
    kernel = infer.SGLD(unit, 0.1, steps_per_draw=20, warm_start=0.0)
    state = kernel.init(jax.random.key(0), 100, {"w": jnp.ones(3)}, (), {})

    def transition(state, i):
        far = (i == 20) | (i == 75)
        size = jnp.where(far, 1e12, state.base_step_size)
        return kernel.sample(state._replace(base_step_size=size), (), {}), None

    end, _ = jax.jit(lambda s: lax.scan(transition, s, jnp.arange(100)))(state)
    assert kernel.describe(end)["restarts"] == "[2]"
    close(end.base_step_size, 0.1, rtol=1e-6)


def test_a_diverging_warm_start_is_undone_and_reported():
    """Sampling begins where the optimizer did."""
    options = {"temperature": 0.0, "warm_start": 0.5, "optimizer": optax.sgd(1e30)}
    kernel = infer.SGLD(unit, 0.1, steps_per_draw=5, **options)
    mcmc = MCMC(kernel, num_warmup=4, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params={"w": jnp.ones(3)})
    close(mcmc.get_samples()["w"][0], 0.95**15, rtol=1e-5)
    idata = bnn.to_inference_data(mcmc)
    assert idata.attrs["restarts"] == "[2]"
    report = {finding.name: finding for finding in metrics.health(idata).findings}
    assert (report["restarts"].verdict, report["restarts"].value) == ("note", 2)


# -- divergences -----------------------------------------------------------------------


def test_divergence_is_reported_with_chain_and_step():
    eps = 2.0 * (1 + 1e6)  # each step multiplies by -1e6
    kernel = infer.SGLD(unit, eps, temperature=0.0, steps_per_draw=100, warm_start=0.0)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=4,
        num_chains=3,
        chain_method="vectorized",
        progress_bar=False,
    )
    # |w|^2 leaves float32 (3.4e38) when |w| > 1.8e19: from 1 at the fourth step, from
    # 1e9 at the second.
    begin = {
        "w": jnp.stack(
            [jnp.array([1.0, 1.0, 0.0]), jnp.array([1e9, 0.0, 0.0]), jnp.zeros(3)]
        )
    }
    mcmc.run(jax.random.key(0), init_params=begin)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"])
    fields = mcmc.get_extra_fields(group_by_chain=True)
    diverged = np.asarray(fields["diverging"])
    refused = np.asarray(fields["refused_steps"])
    # After 200 steps that are not taken.
    equal(
        diverged, [[False, False, True, True], [False, False, True, True], [False] * 4]
    )
    close(refused, [[0.97, 1, 1, 1], [0.99, 1, 1, 1], [0] * 4])
    equal(np.isnan(draws).all(-1), diverged)
    equal(draws[2], 0.0)
    expected = (
        r"SGLD diverged \(chain 0 at step 3, chain 1 at step 1\).*NaN.*smaller "
        r"`step_size`"
    )
    with pytest.warns(UserWarning, match=expected) as caught:
        idata = bnn.to_inference_data(mcmc)
    assert caught[0].filename == __file__  # it points at the user's line
    assert idata.attrs["first_divergence"] == "[3, 1, -1]"
    equal(group(idata, "sample_stats")["diverging"], diverged)
    single = jax.tree.map(lambda leaf: leaf[0], mcmc.last_state)
    assert (
        kernel.get_diagnostics_str(single)
        == "100 steps of size 2.00e+06, DIVERGED at step 3"
    )


def test_a_run_with_a_lost_chain_is_of_use(tmp_path):
    """Export with predictions, file, scores; the first chain is at a place from which
    no step is finite, although NumPyro refuses a normal distribution whose mean is NaN.
    """
    lost = [True, False, False]

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(w[0] * x, 1.0), obs=y)

    x = jnp.linspace(-1.0, 1.0, 9)
    start = {"w": jnp.array([[1e19, 0.0], [0.5, 0.0], [0.4, 0.0]])}
    options = {
        "num_warmup": 0,
        "num_samples": 30,
        "num_chains": 3,
        "run_options": {"init_params": start},
    }
    mcmc = run_chains(
        infer.SGHMC(model, 0.01, steps_per_draw=50, warm_start=0.0), x, x, **options
    )
    with pytest.warns(metrics.HealthWarning, match=r"diverged \(chain 0 at step 0\)"):
        idata = bnn.to_inference_data(mcmc, predictions={"x": x, "y": x})
    refused = group(idata, "sample_stats")["refused_steps"]
    equal(refused, np.broadcast_to(np.c_[lost], refused.shape))
    idata.to_netcdf(tmp_path / "fit.nc")
    idata = az.from_netcdf(tmp_path / "fit.nc")
    for name in ("posterior", "sample_stats", "predictions", "log_likelihood"):
        equal(group(idata, name)["marked"], lost)
    assert metrics.health(idata).marked == (0,)
    predictions = group(idata, "predictions")
    # after 200 steps that were not taken
    assert np.isnan(predictions["y_mean"][0, 4:]).all()
    assert np.isfinite(predictions["y_mean"][1:]).all()
    densities = predictions["y_log_likelihood"]
    with pytest.warns(metrics.HealthWarning, match="left out chains 0, "):
        score = metrics.lppd(densities)
    assert score.value == metrics.lppd(densities.to_numpy()[1:]).value


# -- bounded likelihoods ---------------------------------------------------------------

# The distribution of an observation given a weight, the bounds of the weight, and
# observations. Beyond the bounds some log densities are NaN and others finite: NumPyro
# clamps probabilities, and gamma functions are defined below 0.
BOUNDED = {
    "Poisson": (dist.Poisson, (0, np.inf), lambda rng: rng.poisson(0.6, 20)),
    "Bernoulli": (dist.BernoulliProbs, (0, 1), lambda rng: np.arange(20) % 10 == 0),
    "Beta": (
        lambda w: dist.Beta(w, 1.0),
        (0, np.inf),
        lambda rng: rng.beta(0.3, 1.0, 20),
    ),
    "Uniform": (
        partial(dist.Uniform, 0.0),
        (0.95, np.inf),
        lambda rng: np.linspace(0.0, 0.95, 20),
    ),
}
BOUNDED_KERNELS = USUAL | {"GHMC": partial(infer.GHMC, num_steps=10)}
# A kernel of each dynamics on a likelihood that is NaN behind the border and on one
# that is finite there; noisy ones on minibatches.
CELLS = [
    *(
        (kernel, name, None)
        for kernel in ("SGLD", "SGHMC", "GHMC", "MCLMC")
        for name in ("Poisson", "Beta")
    ),
    *((kernel, "Poisson", 5) for kernel in ("SGLD", "SGNHT", "MCLMC")),
    *(("SGHMC", name, None) for name in ("Bernoulli", "Uniform")),
]


def observations(name):
    return jnp.asarray(BOUNDED[name][2](np.random.default_rng(0)), jnp.float32)


def bounded(name):
    family, _, _ = BOUNDED[name]

    def model(y, batch_size=None):
        w = numpyro.sample("w", dist.Normal(0.5, 1.0))
        numpyro.sample("other", dist.Normal(0.0, 1.0))  # MCLMC needs two
        with numpyro.plate("data", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", family(w), obs=y[i])

    return model


def moments_within_bounds(name):
    (family, (low, high), _), y = BOUNDED[name], observations(name)
    w = np.linspace(low, min(high, 8.0), 40_002)[1:-1]
    log_p = (
        np.asarray(family(jnp.asarray(w)[:, None]).log_prob(y).sum(1), np.float64)
        - 0.5 * (w - 0.5) ** 2
    )
    p = np.exp(log_p - log_p.max())
    mean = (p / p.sum()) @ w
    return mean, ((p / p.sum()) @ (w - mean) ** 2) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name", "batch"), CELLS)
def test_chains_stay_within_the_bounds_of_a_likelihood(kernel, name, batch):
    """Right within errors and a bias of .2 sd, or reported; none behind the border."""
    low, high = BOUNDED[name][1]
    chains, options = 8, {"chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(
        BOUNDED_KERNELS[kernel](bounded(name)),
        num_warmup=200,
        num_samples=300,
        num_chains=chains,
        **options,
    )
    mcmc.run(
        jax.random.key(1),
        observations(name),
        **({} if batch is None else {"batch_size": batch}),
    )
    w = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], np.float64)
    # a chain may stop on the border itself
    outside = (w < np.float32(low)) | (w > high)
    assert batch is not None or not outside.any()
    mean, sd = moments_within_bounds(name)
    error = w.mean(1).std(ddof=1) / chains**0.5
    right = abs(w.mean() - mean) < 0.2 * sd + 4.5 * error and error < sd
    if not right or outside.any():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = metrics.health(bnn.to_inference_data(mcmc))
        stuck = {"frozen", "moved", "covered", "rhat"}
        lost = {"diverged", "support", "refused_steps", "temperature"}
        assert {finding.name for finding in report.warnings} & (stuck | lost)


def test_a_start_outside_of_the_bounds_is_refused():
    kernel = infer.SGLD(bounded("Beta"), warm_start=0.0)
    start = {"w": jnp.array([1.0, -1.0]), "other": jnp.zeros(2)}
    with refused("init_params", "a start of chain 1 where the log density is "):
        kernel.init(
            jax.random.split(jax.random.key(0), 2),
            0,
            start,
            (observations("Beta"),),
            {},
        )


def test_starts_are_searched_for_where_uniform_ones_have_no_density():
    """Of four chains, all three values: by chance once in 4096."""

    def model():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.factor("positive", jnp.where(jnp.all(w > 0), 0.0, -jnp.inf))

    kernel = infer.MCLMC(model, warm_start=infer.WarmStart(0.5, spread=0.5))
    keys = jax.random.split(jax.random.key(0), 4)
    starts = kernel.init(keys, 20, None, (), {}).z["w"]
    assert jnp.all((starts > 0) & (starts < 1)), starts
    assert len(jnp.unique(starts)) == starts.size


def test_an_optimizer_goes_back_where_the_density_ends():
    """The mode lies on the border: steps of 1 would end far behind it."""

    def model(y):
        w = numpyro.sample("w", dist.Normal(0.5, 1.0))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Exponential(1 / w), obs=y)

    warm = infer.WarmStart(0.5, num_steps=60, optimizer=optax.sgd(1.0))
    kernel = infer.SGHMC(model, 1e-4, steps_per_draw=2, warm_start=warm)
    y = jnp.full(20, 0.01)
    state, w = walk(
        kernel,
        3,
        (y,),
        warmup=4,
        start={"w": jnp.array(1.0)},
        keep=lambda state: state.z["w"],
    )
    assert (w > 0).all()
    assert np.isfinite(state.phases["Optimize"].position).all()
    # those that look at the ends of transitions count
    assert state.num_gradients >= 2 * 31
