"""Chains that survive: steps that are not finite, chains that start again, chains that are marked and left out."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from numpyro.infer import MCMC, init_to_value
from scipy import stats

import numpyro_bnn as bnn
from numpyro_bnn import infer, metrics, plots, symmetry
from numpyro_bnn.sgmcmc import BAOAB, Full, Microcanonical, NoseHoover, Overdamped, build

# -- the density up to a border -------------------------------------------------------------------------


def walled(q):
    """A unit Gaussian in front of 1, without a density behind."""
    return 0.5 * jnp.vdot(q, q) + jnp.where(q[0] < 1, 0.0, jnp.nan) * q[0]


@pytest.mark.parametrize(
    ("dynamics", "size", "eps", "bias"),
    [
        # The discretization makes a variance too large by eps / 4.
        (Overdamped(), 1, 0.1, 0.03),
        (BAOAB(1.0), 1, 0.1, 0.01),
        (NoseHoover(1.0, mass=40.0), 1, 0.1, 0.02),
        (Microcanonical(), 20, 0.4, 0.01),
    ],
    ids=["overdamped", "momentum", "thermostat", "microcanonical"],
)
def test_the_density_up_to_a_border_is_the_truncated_one(dynamics, size, eps, bias):
    """A chain that stays and turns back is a Metropolis rejection. With another momentum, up to twice the mass would
    lie within a step of the border."""
    chains, number = 128, 1500
    sampler = build(Full(walled), dynamics, schedule=eps)

    def draw(state, _):
        state = sampler.run(state, 2)
        return state, state.known_position[0]

    @jax.jit
    @jax.vmap
    def run(key):
        state = sampler.run(sampler.init(jnp.zeros(size), key), 100)
        return lax.scan(draw, state, None, number)

    state, x = run(jax.random.split(jax.random.key(0), chains))
    x, exact = np.asarray(x, np.float64), stats.truncnorm(-np.inf, 1.0)
    assert (np.asarray(state.first_divergence) == -1).all()
    assert (np.asarray(state.statistics.num_refused) > 0).all()
    # Overdamped moves are refused one step late, which a chain does not know before the first.
    late = (x >= 1).sum(1).max()
    assert late <= isinstance(dynamics, Overdamped)
    width = eps if size > 1 else eps**0.5
    near, share = (x > 1 - width).mean(1), 1 - exact.cdf(1 - width)
    for values, target, allowed in ((x.mean(1), exact.mean(), bias), (near / share, 1.0, bias)):
        error = values.std(ddof=1) / chains**0.5
        print(f"{values.mean():.4f}, exact {target:.4f}, standard error {error:.4f}")
        assert abs(values.mean() - target) < allowed + 4.5 * error
        assert error < 0.05


# -- chains that start again ----------------------------------------------------------------------------


def unit():
    numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))


def one_by_one(kernel, state):
    """A transition of each chain alone, as the chain methods other than "vectorized" make it."""
    parts = [jax.tree.map(lambda leaf, c=c: leaf[c], state) for c in range(2)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(kernel.sample(part, (), {}) for part in parts))


@pytest.mark.parametrize("method", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    "make", [infer.SGLD, partial(infer.SGHMC, momentum_decay=0.3), infer.SGNHT], ids=["SGLD", "SGHMC", "SGNHT"]
)
def test_a_chain_that_is_lost_in_warm_up_starts_again(make, method):
    """One of two chains gets far too long steps; the other is the same, bit for bit, as beside a healthy one."""
    kernel = make(unit, steps_per_draw=20, warm_start=0.2)
    state = kernel.init(jax.random.split(jax.random.key(0), 2), 200, {"w": jnp.ones((2, 3))}, (), {})

    def transition(lost, state, i):
        far = lost & (jnp.arange(2) == 0) & (i == 74)
        state = state._replace(base_step_size=jnp.where(far, 1e12, state.base_step_size))
        state = kernel.sample(state, (), {}) if method == "vectorized" else one_by_one(kernel, state)
        return state, (state.z["w"], state.refused_steps, state.base_step_size)

    run = jax.jit(lambda state, lost: lax.scan(partial(transition, lost), state, jnp.arange(230)))
    healthy, (calm, refused, sizes) = jax.device_get(run(state, jnp.asarray(False)))
    end, (w, failing, found) = jax.device_get(run(state, jnp.asarray(True)))
    assert not refused.any()
    np.testing.assert_array_equal(healthy.origin.shrinkage, [1, 1])
    np.testing.assert_array_equal(w[:, 1], calm[:, 1])
    np.testing.assert_array_equal(end.num_gradients[1], healthy.num_gradients[1])
    assert np.isfinite(w).all()
    # Chains are looked at every ten transitions: at 80, after fewer than 200 steps that failed, and at 90.
    np.testing.assert_array_equal(np.flatnonzero(failing[:, 0]), np.arange(74, 90))
    np.testing.assert_array_equal(end.origin.shrinkage, [0.5, 1])
    np.testing.assert_array_equal(end.engine.first_divergence, [-1, -1])
    np.testing.assert_allclose(found[90, 0], 0.5 * end.origin.step_size[0], rtol=1e-6)
    np.testing.assert_allclose(found[-1, 0], 0.5 * sizes[-1, 0], rtol=1e-4)  # the curvature is 1 everywhere
    assert np.abs(w[90:, 0]).max() < 6
    assert int(end.num_gradients[0] - healthy.num_gradients[0]) == 0  # where only a half kick needs it


def test_a_chain_that_is_lost_at_a_given_step_size_is_marked():
    """It starts again while there is warm-up left, with the step size that was asked for, and is marked after it."""
    kernel = infer.SGLD(unit, 1e6, steps_per_draw=50, warm_start=0.0)
    mcmc = MCMC(kernel, num_warmup=32, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0))
    assert np.isnan(mcmc.get_samples()["w"]).all()
    with pytest.warns(metrics.HealthWarning, match=r"diverged \(chain 0 at step"):
        idata = bnn.to_inference_data(mcmc)
    assert idata.attrs["restarts"] == "[2.0]"  # at transitions 8 and 16, of 4, 8, ..., 20
    assert idata.attrs["base_step_size"] == "[1000000.0]"
    assert idata.attrs["refused_steps"] == "[1.0]"
    np.testing.assert_array_equal(idata["posterior"]["marked"], [True])


# -- gradients that measurements use --------------------------------------------------------------------

DATA = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


def gaussian(x, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("x", dist.Normal(w, 1.0).to_event(1), obs=x[i])


@pytest.mark.parametrize(
    ("make", "batch_size", "step", "refresh", "noise", "curvature"),
    [
        (infer.SGLD, 8, 1, 0, 128, 3),
        (infer.SGLD, None, 1, 0, 0, 3),
        (partial(infer.SGHMC, step_size=1e-3), 8, 1, 1, 128, 0),
        (partial(infer.SGHMC, gradient="control_variates"), 8, 2, 3, 256, 3),  # a gradient of all data at the center
        (infer.MALA, None, 1, 1, 0, 1),
        (infer.MCLMC, None, 2, 1, 0, 1),
    ],
    ids=["minibatch", "all data", "given", "control variates", "metropolis", "microcanonical"],
)
def test_gradients_of_measurements_are_counted(make, batch_size, step, refresh, noise, curvature):
    """Of 24 products with the Hessian, two each; where the step size is adapted, it needs the curvature once."""
    kernel = make(gaussian, steps_per_draw=10, preconditioner="identity")
    state = kernel.init(jax.random.key(0), 4, None, (DATA,), {"batch_size": batch_size})
    sample = jax.jit(lambda s: kernel.sample(s, (DATA,), {"batch_size": batch_size}))
    counts = [int((state := sample(state)).num_gradients) for _ in range(6)]
    # Ten steps of the optimizer in the first transition; measured before the second, third and fifth.
    products = 48 * (2 if noise == 256 else 1)
    found = [refresh + noise + products * (n < curvature) for n in range(3)]
    expected = np.cumsum([10, 10 * step + found[0], 10 * step + found[1], 10 * step, 10 * step + found[2], 10 * step])
    np.testing.assert_array_equal(counts, expected)


def test_a_refresh_is_counted():
    """Moves along orbits refresh the inner kernel after each transition."""
    net = bnn.models.regression(bnn.nn.MLP([3, 1], "tanh"), noise=0.5)
    call = DATA, DATA[:, 0]
    moved = infer.OrbitMoves(infer.MCLMC(net, 1.0, steps_per_draw=10), symmetry.find(net, *call))
    mcmc = MCMC(moved, num_warmup=4, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), *call, extra_fields=("base.num_gradients",))
    np.testing.assert_array_equal(np.diff(mcmc.get_extra_fields()["base.num_gradients"]), 21)


# -- chains that are marked -----------------------------------------------------------------------------

FAULTY, SOUND = [False, True, False], [0, 2]


def result(value=np.nan, marked=False):
    """Predictions of chains 4, 5 and 6, of which the second has a value that is not finite, or is marked."""
    rng = np.random.default_rng(0)
    y, names = rng.normal(size=12), ("chain", "draw", "data")
    draws = y + rng.normal(size=(3, 50, 12))
    draws[1, 20:] = value
    probs = rng.dirichlet(np.ones(3), size=(3, 50, 12))
    probs[1, 3] = value
    labels = rng.integers(3, size=12)
    groups = {"predictions": {"y": (names, draws), "y_mean": (names, 0.5 * draws), "c_probs": ((*names, "k"), probs)}}
    targets = {"y": (("data",), y), "c": (("data",), labels), "x": (("data",), np.arange(12.0))}
    groups |= {"predictions_constant_data": targets, "observed_data": {n: targets[n] for n in ("y", "c")}}
    made = {name: bnn._arviz.dataset(group, {"chain": [4, 5, 6]}) for name, group in groups.items()}
    if marked:
        made["predictions"] = made["predictions"].assign_coords(marked=("chain", FAULTY))
    return bnn._arviz.inference_data(made)


SCORES = {
    "lppd": lambda draws, y, *_: metrics.lppd(-((draws - y) ** 2)).pointwise,
    "crps": lambda draws, y, *_: metrics.crps(draws, y).pointwise,
    "interval_coverage": lambda draws, y, *_: metrics.interval_coverage(draws, y).inside,
    "pit": lambda draws, y, *_: metrics.pit(draws, y, 0),
    "function_space": lambda draws, *_: metrics.function_space(draws).ess_bulk,
    "log_score": lambda draws, y, probs, labels: metrics.log_score(probs, labels).pointwise,
    "ece": lambda draws, y, probs, labels: metrics.ece(probs, labels).confidence,
    "uncertainty": lambda draws, y, probs, labels: metrics.uncertainty(probs).total,
}


@pytest.mark.parametrize(("value", "marked"), [(np.nan, False), (0.25, True)], ids=["nan", "marked"])
@pytest.mark.parametrize("name", SCORES)
def test_scores_leave_out_a_chain_at_fault(name, value, marked):
    """They equal those of the other chains alone; a warning names the chain."""
    idata = result(value, marked)
    given = idata["predictions"]
    y, labels = (idata["observed_data"][n].to_numpy() for n in ("y", "c"))
    with pytest.warns(metrics.HealthWarning, match=f"^{name}: left out chains 5, which") as caught:
        found = SCORES[name](given["y"], y, given["c_probs"], labels)
    assert len(caught) == 1
    sound = given.isel(chain=SOUND) if hasattr(given, "isel") else given.to_dataset().isel(chain=SOUND)
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
    marked = result(0.25, marked=True)["predictions"]["y"][1:2]
    with pytest.raises(ValueError, match=r"lppd.*no chain to use \(at fault: 5\).*metrics.health"):
        metrics.lppd(marked)
    with pytest.raises(ValueError, match="NaN"):
        metrics.lppd(np.full((2, 5, 4), np.nan))


@pytest.mark.parametrize(("value", "marked"), [(np.nan, False), (0.25, True)], ids=["nan", "marked"])
def test_figures_leave_out_a_chain_at_fault(value, marked):
    import matplotlib.pyplot as plt

    idata, drawn = result(value, marked), {}
    for name, site in (("predictive_band", "y"), ("predicted_vs_observed", "y"), ("calibration", "c")):
        with pytest.warns(metrics.HealthWarning, match=f"^plots.{name}: left out chains 5, ") as caught:
            axes = getattr(plots, name)(idata, site=site, **({"x": "x"} if name == "predictive_band" else {}))
        assert len(caught) == 1
        drawn[name] = np.ravel(axes)[-1]
    mean = next(line for line in drawn["predictive_band"].lines if line.get_label() == "function mean")
    expected = idata["predictions"]["y_mean"].to_numpy()[SOUND].mean((0, 1))
    np.testing.assert_allclose(mean.get_ydata(), expected, rtol=1e-12)
    plt.close("all")


@pytest.mark.parametrize("method", ["sequential", "vectorized"])
def test_a_run_with_a_lost_chain_is_of_use(method, tmp_path):
    """Export, file, scores and figures; one chain is at a place from which no step is finite."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(w[0] * x, 1.0), obs=y)

    x = jnp.linspace(-1.0, 1.0, 9)
    kernel = infer.SGHMC(model, 0.01, steps_per_draw=50, warm_start=0.0)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=30, num_chains=3, chain_method=method, progress_bar=False)
    begin = jnp.array([[0.5, 0.0], [1e19, 0.0], [0.4, 0.0]])
    mcmc.run(jax.random.key(0), x, x, init_params={"w": begin}, extra_fields=("refused_steps", "diverging"))
    with pytest.warns(metrics.HealthWarning, match=r"diverged \(chain 1 at step 0\)"):
        idata = bnn.to_inference_data(mcmc, predictions={"x": x, "y": x})
    np.testing.assert_array_equal(idata["sample_stats"]["refused_steps"][1], 1.0)
    np.testing.assert_array_equal(idata["sample_stats"]["refused_steps"][0], 0.0)
    idata.to_netcdf(tmp_path / "fit.nc")
    idata = bnn._arviz.opened("test", tmp_path / "fit.nc")
    for group in ("posterior", "sample_stats", "predictions", "log_likelihood"):
        np.testing.assert_array_equal(idata[group]["marked"], FAULTY)
    assert idata["posterior"].sizes["chain"] == 3
    assert metrics.health(idata).marked == (1,)
    densities = idata["predictions"]["y_log_likelihood"]
    with pytest.warns(metrics.HealthWarning, match="left out chains 1, "):
        score = metrics.lppd(densities)
    assert score.value == metrics.lppd(densities.to_numpy()[SOUND]).value
    # The others are the chains of a run without it.
    alone = MCMC(kernel, num_warmup=0, num_samples=30, num_chains=3, chain_method=method, progress_bar=False)
    alone.run(jax.random.key(0), x, x, init_params={"w": begin.at[1].set(0.0)})
    both = [np.asarray(m.get_samples(group_by_chain=True)["w"])[SOUND] for m in (mcmc, alone)]
    np.testing.assert_array_equal(*both)
    report = {f.name: f for f in metrics.health(bnn.to_inference_data(alone)).findings}
    assert report["diverged"].verdict == report["refused_steps"].verdict == report["restarts"].verdict == "ok"
    assert "marked" not in bnn.to_inference_data(alone)["posterior"].coords


class Bounded(dist.Normal):
    """No density beyond 0.5."""

    def log_prob(self, value):
        return super().log_prob(value) + jnp.where(value < 0.5, 0.0, jnp.nan) * value


def test_a_chain_inside_orbit_moves_turns_back_at_a_border():
    net = bnn.models.regression(bnn.nn.MLP([3, 1], "tanh"), noise=0.5)

    def bounded(x, y=None):
        net(x, y)
        numpyro.sample("v", Bounded(0.0, 1.0))

    call = DATA, DATA[:, 0]
    at = init_to_value(values={"v": 0.0})
    kernel = infer.OrbitMoves(
        infer.MCLMC(bounded, 0.7, steps_per_draw=20, init_strategy=at), symmetry.find(net, *call)
    )
    mcmc = MCMC(kernel, num_warmup=30, num_samples=60, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), *call, extra_fields=("base.refused_steps", "base.diverging"))
    v = np.asarray(mcmc.get_samples()["v"])
    assert v.max() < 0.5
    fields = mcmc.get_extra_fields(group_by_chain=True)
    assert (np.asarray(fields["base.refused_steps"]).max(1) > 0).all()
    assert not np.asarray(fields["base.diverging"]).any()
