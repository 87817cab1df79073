"""`guides.fit` beside NumPyro's SVI: steps, resuming, failures; exported fits."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
import tqdm
from helpers import each, group, group_names, refused
from numpy.testing import assert_allclose, assert_array_equal
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.svi import SVIRunResult
from numpyro.infer.util import potential_energy
from zoo import NOISE, ZOO, N, X, Y, line

from numpyro_bnn import guides, to_inference_data
from numpyro_bnn.program.plates import draw_indices, random_indices

pytestmark = pytest.mark.core

LINE = ZOO["line"]


def make(optim=None, guide=AutoNormal, model=line, loss=None, **static):
    optim = optim or numpyro.optim.Adam(0.02)
    return SVI(model, guide(model), optim, loss or Trace_ELBO(), **static)


@cache
def shared_svi():
    """One SVI for all tests that may share its compiled steps."""
    return make()


def fit(steps, svi=None, x=X, y=Y, key=None, **options):
    key = jax.random.key(0) if key is None else key
    return guides.fit(
        svi or shared_svi(), key, steps, x, y, **{"progress_bar": False, **options}
    )


def equal(tree, other):
    """Every leaf of two trees equal in every bit."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in leaves)


# -- minibatches -----------------------------------------------------------------------


def test_rows_of_a_minibatch_are_distinct_and_equally_likely():
    number, size, batch = 20_000, 10, 4
    keys = jax.random.split(jax.random.key(2), number)
    drawn = np.asarray(
        jax.jit(jax.vmap(lambda key: draw_indices(size, batch, key)))(keys)
    )
    assert drawn.min() >= 0
    assert drawn.max() < size
    assert all(len(set(row)) == batch for row in drawn[:500])
    share = batch / size
    # Five standard errors for the largest of 10 counts: one of 10^5 seeds fails.
    error = np.sqrt(share * (1 - share) / number)
    # By the theory of stratified sampling, sums of sorted values vary far less than
    # with replacement.
    assert drawn.mean(1).var() < 0.6 * np.arange(size).var() / batch
    assert np.all(
        np.abs(np.bincount(drawn.ravel(), minlength=size) / number - share) <= 5 * error
    )


def test_a_minibatch_costs_its_own_rows_only():
    """No array of the size of the data is made."""

    def batch(key):
        with random_indices(), numpyro.plate("data", 10**6, subsample_size=7) as index:
            return index

    program = jax.make_jaxpr(lambda key: handlers.seed(batch, key)(key))(
        jax.random.key(0)
    )
    assert max(var.aval.size for eqn in program.jaxpr.eqns for var in eqn.outvars) <= 64


# -- steps -----------------------------------------------------------------------------


class Bounded(AutoNormal):
    """Bounds that NumPyro computes."""

    @property
    def scale_constraint(self):
        return dist.constraints.interval(0.0, jnp.array([2.0, 3.0]))


def test_full_batch_steps_are_those_of_numpyro(key):
    """The same start, keys and updates; a loop may change the order of operations."""
    svi, start = make(guide=Bounded), {"w_auto_loc": jnp.array([1.0, -0.5])}
    ours = fit(40, svi, init_params=start)
    theirs = svi.run(key, 40, *LINE.args, progress_bar=False, init_params=start)
    assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
    for name, value in theirs.params.items():
        assert_allclose(ours.params[name], value, rtol=1e-4, atol=1e-5)
    assert type(ours) is type(theirs)


def test_a_first_fit_compiles_few_programs(compiled):
    """Arguments, keys, initial values and scales, state, steps, parameters."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([7]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)

    # shapes that are new to this process
    x = np.random.default_rng(0).normal(size=(13, 7)).astype("float32")
    svi, key = make(guide=guides.AutoMeanField, model=model), jax.random.key(0)
    compiled.clear()
    assert fit(3, svi, x, x[:, 0], key).losses.shape == (3,)
    assert 0 < len(compiled) <= 14, len(compiled)


def test_a_resumed_fit_continues_bit_for_bit_without_compiling():
    """And typed and legacy keys give the same."""
    traced = []

    def counted(x, y):
        traced.append(1)
        line(x, y)

    svi = make(model=counted)
    first = fit(5, svi)
    before = len(traced)
    second = fit(7, svi, init_state=first.state)
    assert len(traced) == before
    whole = fit(12, key=jax.random.PRNGKey(0))
    assert_array_equal(np.concatenate([first.losses, second.losses]), whole.losses)
    assert equal(second.params, whole.params)


def test_arguments_that_are_no_arrays_are_part_of_the_program():
    """1 and True are equal, but not the same argument."""

    def model(x, y, how):
        line(x, 10 * y if how is True else y)

    svi = make(model=model)
    number, flag = (fit(3, svi, how=how).losses for how in (1, True))
    assert flag[0] > 2 * number[0]


def test_mutable_state_is_carried_and_the_bar_shows_the_mean_loss(capsys):
    def counting(x, y):
        state = numpyro.primitives.mutable("steps", {"count": jnp.zeros(())})
        state["count"] = state["count"] + 1.0
        line(x, y)

    svi = make(model=counting)
    result = fit(30, svi, progress_bar=True)
    shown = capsys.readouterr().err
    assert "30/30" in shown
    assert f"loss {np.mean(result.losses):.5g}" in shown
    # with that of the start
    assert int(result.state.mutable_state["steps"]["count"]) == 31


# -- interruption and steps that are not finite ----------------------------------------


def optimizer(at, how=None):
    """Steps of a fixed size; number ``at`` multiplies the gradient by ``how``."""

    def update(updates, state, params=None):
        factor = -0.01 if how is None else jnp.where(state == at, how, -0.01)
        return jax.tree.map(lambda g: factor * g, updates), state + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def test_ctrl_c_returns_the_steps_that_are_done(monkeypatch):
    """The user presses it when the bar moves for the third time."""
    whole, moves = fit(20_000, make(optimizer(-1))), []

    def interrupt(bar, steps=1):
        moves.append(steps)
        if len(moves) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(tqdm.tqdm, "update", interrupt)
    with pytest.warns(UserWarning, match=r"that of \d+ of 20000 steps") as caught:
        result = fit(20_000, make(optimizer(-1)))
    assert 0 < len(result.losses) < 20_000
    assert_array_equal(result.losses, whole.losses[: len(result.losses)])
    assert caught[0].filename == __file__


def test_ctrl_c_before_the_first_step_is_raised():
    def interrupted(x, y):
        line(x, y)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(10, make(model=interrupted))


def test_a_bad_gradient_keeps_the_last_finite_state():
    """The last update makes the parameters NaN: the result is that of one step less."""
    with pytest.warns(
        UserWarning,
        match="a gradient that is not finite at step 12; .* 11 steps before",
    ):
        result = fit(12, make(optimizer(11, jnp.nan)))
    assert equal(result.params, fit(11, make(optimizer(-1, jnp.nan))).params)
    assert len(result.losses) == 11


def test_a_loss_that_is_not_finite_is_named():
    """Parameters that jump to 1e30 are finite, but the loss there is not."""
    with pytest.warns(
        UserWarning,
        match=r"loss (inf|nan) at step 6; the result is that of the 5 steps before",
    ):
        result = fit(50, make(optimizer(4, 1e30)))
    assert np.isfinite(result.losses).all()
    assert len(result.losses) == 5
    lost = np.where(np.arange(N) == 3, np.nan, Y)
    fit(1)  # the guide has its start, and looks at no data for one
    with refused("args", "at the first step"):
        fit(5, y=lost)


@pytest.mark.filterwarnings("ignore:Out-of-support values")  # NumPyro's, of NaN
def test_data_without_a_start_are_refused():
    with refused("args", "no finite log density at any start"):
        fit(5, make(), y=np.where(np.arange(N) == 3, np.nan, Y))


def test_stable_update_leaves_bad_steps_out():
    def fragile(x, y):
        line(x, y)
        numpyro.factor(
            "rare",
            jnp.where(jax.random.uniform(numpyro.prng_key()) < 0.2, jnp.nan, 0.0),
        )

    result = fit(60, make(model=fragile), stable_update=True)
    assert 1 <= np.isnan(result.losses).sum() < 40
    assert all(np.isfinite(value).all() for value in result.params.values())


# -- refusals --------------------------------------------------------------------------


def state_of(name, size):
    """A state of another model."""

    def model(x, y):
        numpyro.sample(name, dist.Normal(0.0, 1.0).expand([size]).to_event(1))
        numpyro.sample("y", dist.Normal(0.0, 0.5), obs=y)

    return make(model=model).init(jax.random.key(0), X, Y)


# What is wrong: argument, part of the message, call.
WRONG = "in which parameter ['w_auto_loc']"
REFUSED = [
    ("init_state", WRONG, lambda: fit(3, init_state=state_of("v", 2))),
    ("init_state", WRONG, lambda: fit(3, make(), init_state=state_of("w", 3))),
    (
        "init_params",
        "Did you mean 'w_auto_loc'",
        lambda: fit(3, init_params={"w_auto_lok": 0.0}),
    ),
    ("init_params", "shape", lambda: fit(3, init_params={"w_auto_loc": np.ones(3)})),
    (
        "init_params",
        "beside `init_state`",
        lambda: fit(1, init_state=fit(1).state, init_params={"w": 0}),
    ),
    ("subsample_size", "of size 24", lambda: fit(3, make(), batch_size=25)),
    (
        "args",
        "scan over `svi.update`",
        lambda: jax.jit(lambda y: fit(3, y=y).losses)(Y),
    ),
]


@pytest.mark.parametrize(("argument", "fragment", "call"), REFUSED)
@pytest.mark.filterwarnings("ignore:subsample_size does not match")  # of NumPyro
def test_fits_refuse_what_would_be_ignored_or_wrong(argument, fragment, call):
    with refused(argument, fragment):
        call()


# -- exported fits ---------------------------------------------------------------------


def posterior(x, y):
    """Mean and covariance of the weights."""
    covariance = np.linalg.inv(np.eye(2) + x.T @ x / NOISE**2)
    return covariance @ x.T @ y / NOISE**2, covariance


def export(result, guide, **options):
    return to_inference_data(
        result, guide=guide, args=(X, Y), **{"posterior_predictive": False, **options}
    )


@cache
def wide():
    """Draws of a guide 1.5 times as wide as the posterior."""
    mean, covariance = posterior(X.astype(float), Y.astype(float))
    tril = 1.5 * np.linalg.cholesky(covariance)
    params = {"auto_loc": jnp.asarray(mean), "auto_scale_tril": jnp.asarray(tril)}
    result = SVIRunResult(params, None, jnp.array([3.0, 2.0]))
    return export(
        result, AutoMultivariateNormal(line), num_samples=4000, kwargs={"batch_size": 5}
    )


def test_exported_draws_have_their_log_density_weights_and_judgment():
    """4000 draws: bounds within four standard errors of their exact values."""
    stats, about = group(wide(), "sample_stats"), wide().attrs
    assert stats["lp"].dims == stats["log_weight"].dims == ("chain", "draw")
    w = group(wide(), "posterior")["w"].to_numpy()[0]
    joint = scipy.stats.norm(0, 1).logpdf(w).sum(1) + scipy.stats.norm(
        w @ X.T, NOISE
    ).logpdf(Y).sum(1)
    assert_allclose(stats["lp"].to_numpy()[0], joint, rtol=1e-4)
    mean, covariance = posterior(X.astype(float), Y.astype(float))
    log_q = scipy.stats.multivariate_normal(mean, 1.5**2 * covariance).logpdf(w)
    assert_allclose(stats["log_weight"].to_numpy()[0], joint - log_q, atol=2e-3)
    # KL between Gaussians with covariances of ratio 1.5^2.
    divergence, evidence = 1.5**2 - 1 - np.log(1.5**2), LINE.exact.log_evidence
    assert abs(about["elbo"] - (evidence - divergence)) < 4 * about["elbo_se"]
    assert abs(about["iw_bound"] - evidence) < 4 * about["iw_se"] + 1e-3
    assert about["pareto_k"] < 0.5
    assert (about["num_steps"], about["final_loss"], about["algorithm"]) == (
        2,
        2.0,
        "AutoMultivariateNormal",
    )


def test_exported_log_density_is_that_of_mcmc():
    """Of unconstrained values, as ``lp`` of MCMC: minus NumPyro's potential energy."""
    model, args = ZOO["spread"].model, ZOO["spread"].args
    svi = make(model=model)
    result = SVIRunResult(svi.get_params(svi.init(jax.random.key(0), *args)), None, [])
    idata = export(result, svi.guide, num_samples=5)

    def q(name):
        normal = (result.params[f"{name}_auto_{part}"] for part in ("loc", "scale"))
        return dist.Normal(*normal)

    @jax.jit
    def densities(u):
        lp = -potential_energy(model, args, {}, u)
        return lp, lp - sum(q(name).log_prob(u[name]).sum() for name in u)

    draws, stats = group(idata, "posterior"), group(idata, "sample_stats")
    for i in range(5):
        w, sigma = (draws[name].to_numpy()[0, i] for name in ("w", "sigma"))
        lp, weight = densities({"w": w, "sigma": np.log(sigma)})
        exported = [stats[name].to_numpy()[0, i] for name in ("lp", "log_weight")]
        assert_allclose(exported, [lp, weight], rtol=1e-4, atol=2e-3)


@each("guide", [AutoLaplaceApproximation, AutoDelta], fast=1)
def test_nothing_is_weighed_without_a_density(guide):
    """AutoLaplaceApproximation is fitted as a point, and sampled as a Gaussian."""
    svi = make(numpyro.optim.Adam(0.1), guide)
    idata = export(fit(100, svi), svi.guide, num_samples=50)
    assert "sample_stats" not in group_names(idata)
    spread = group(idata, "posterior")["w"].to_numpy().std(axis=1)
    assert (spread > 1e-3).all() == (guide is not AutoDelta)


def test_exports_use_learned_parameters_of_a_model_behind_handlers():
    """Their values belong to the likelihood, starting values would be wrong."""

    def learned(x, y=None):
        sigma = numpyro.param("sigma", 5.0, constraint=dist.constraints.positive)
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)

    guide = AutoNormal(handlers.substitute(learned, data={}))
    params = {
        "w_auto_loc": jnp.ones(2),
        "w_auto_scale": jnp.full(2, 0.1),
        "sigma": jnp.array(NOISE),
    }
    idata = export(
        SVIRunResult(params, None, []), guide, num_samples=20, posterior_predictive=True
    )
    assert "posterior_predictive" in group_names(idata)
    w = group(idata, "posterior")["w"].to_numpy()[0]
    expected = scipy.stats.norm(w @ X.T, NOISE).logpdf(Y)
    densities = group(idata, "log_likelihood")["y"].to_numpy()[0]
    assert_allclose(densities, expected, rtol=1e-3, atol=1e-4)
