"""Moves that redraw hidden units from their prior: invariance, modes, and what they refuse."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.stats
from jax import random
from numpyro import handlers
from numpyro.infer import HMC, MCMC, NUTS, Gibbs

import numpyro_bnn as bnn
from numpyro_bnn import infer, models, nn, priors, symmetry

RATE = 1e-5  # failure rate of a test that draws
X = jnp.linspace(-1.0, 1.0, 6)[:, None]


def plain(x, y=None):
    """A layer of three units under independent priors; another site depends on them."""
    w = numpyro.sample("w", dist.Normal(0.5, 1.0).expand([1, 3]).to_event(2))
    b = numpyro.sample("b", dist.Laplace(0.0, 1.0).expand([3]).to_event(1))
    level = numpyro.sample("level", dist.Normal(b.sum(), 0.5))
    numpyro.sample("y", dist.Normal(jnp.tanh(x @ w + b).sum(-1) + level, 0.7).to_event(1), obs=y)


def grouped(x, y=None):
    """The same with a common unknown size of the weights, and a prior weighed by a handler."""
    w = numpyro.sample("w", priors.GroupStudentT(3.0, 0.5, (1, 3)))
    with handlers.scale(scale=0.5):
        b = numpyro.sample("b", dist.Normal(0.0, 0.5**0.5).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.tanh(x @ w + b).sum(-1), 0.4).to_event(1), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("model", [plain, grouped])
def test_joint_law_of_sites_and_data_is_invariant(model):
    """Sites from the prior, data given them, moves given the data: the sites still have the law of the prior.

    The prior N(0, 1/2) to the power 1/2 is N(0, 1), which is what the data of ``grouped`` are drawn with.
    """
    number = 2000
    key_sites, key_data, key_moves = random.split(random.key(0), 3)

    def draw(key):
        traced = handlers.trace(handlers.seed(model, key)).get_trace(X)
        return {n: s["value"] for n, s in traced.items() if n != "y"}

    start = jax.vmap(draw)(random.split(key_sites, number))
    if model is grouped:
        start["b"] = start["b"] * 2**0.5

    def data(key, sites):
        placed = handlers.substitute(handlers.seed(model, key), data=sites)
        return handlers.trace(placed).get_trace(X)["y"]["value"]

    y = jax.vmap(data)(random.split(key_data, number), start)
    kernel = infer.UnitMoves(HMC(model), {"w": 1, "b": 0}, num_moves=25)
    state = kernel.init(random.key(1), 0, None, (X, y[0]))

    def moves(key, sites, y):
        here = state._replace(base=state.base._replace(z={**state.base.z, **sites}))
        after = kernel._transition(here, key, (X, y), {})
        return after.base.z, after.unit_accept_prob

    moved, accepted = jax.jit(jax.vmap(moves))(random.split(key_moves, number), start, y)
    assert 0.1 < float(accepted.mean()) < 0.9
    laws = {
        "w": scipy.stats.norm(0.5, 1.0) if model is plain else scipy.stats.t(3, scale=0.5),
        "b": scipy.stats.laplace() if model is plain else scipy.stats.norm(),
    }
    for name, law in laws.items():
        values = np.asarray(moved[name], float).reshape(number, -1)
        before = np.asarray(start[name], float).reshape(number, -1)
        assert np.mean(values != before) > 0.5
        for unit in range(3):
            assert scipy.stats.kstest(values[:, unit], law.cdf).pvalue > RATE
    # The law given the data, too: what the data say of the function is the same before and after.
    fit = [np.asarray(jnp.tanh(X[0] * s["w"][:, 0] + s["b"]).sum(-1), float) for s in (start, moved)]
    products = [f * np.asarray(y[:, 0], float) for f in fit]
    gap = products[1] - products[0]
    assert abs(gap.mean()) < 4.5 * gap.std() / number**0.5


def parent(scale=None):
    """One weight, and a site below it that stays; the weaker the prior, the weaker the data."""
    spread = 0.7 if scale is None else 10.0
    with handlers.scale(scale=scale) if scale else nullcontext():
        w = numpyro.sample("w", dist.Normal(0.3, 1.0).expand([1]).to_event(1))
    numpyro.sample("v", dist.Normal(w[0], spread))
    numpyro.sample("y", dist.Normal(w[0] ** 2, spread), obs=1.5)


def moved_from(kernel, start, num_warmup=0):
    """One transition's moves of each of many states of the first site; the others stay as they are."""
    state = kernel.init(random.key(1), num_warmup)
    keys = random.split(random.key(2), len(start))

    def moves(key, w):
        here = state._replace(base=state.base._replace(z={**state.base.z, "w": w}))
        return kernel._transition(here, key, (), {}).base.z["w"]

    return np.asarray(jax.jit(jax.vmap(moves))(keys, start), float)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_moves_leave_an_exact_conditional_as_it_is(scale):
    """Of a weight given data and a site below it, by quadrature; its prior may have a scale of its own."""
    model = partial(parent, scale)
    kernel = infer.UnitMoves(HMC(model), {"w": 0}, num_moves=10)
    v = kernel.init(random.key(1), 0).base.z["v"]
    w, spread = np.linspace(-9, 9, 40_001), 0.7 if scale is None else 10.0
    log_density = (scale or 1) * scipy.stats.norm.logpdf(w, 0.3)
    log_density += scipy.stats.norm.logpdf(v, w, spread) + scipy.stats.norm.logpdf(1.5, w**2, spread)
    cdf = scipy.integrate.cumulative_trapezoid(np.exp(log_density), w, initial=0)
    cdf /= cdf[-1]
    start = np.interp(np.random.default_rng(0).permutation((np.arange(20_000) + 0.5) / 20_000), cdf, w)
    found = moved_from(kernel, jnp.asarray(start[:, None], jnp.float32))
    assert np.mean(np.abs(found[:, 0] - start) > 1e-5) > 0.2
    assert scipy.stats.kstest(found[:, 0], lambda at: np.interp(at, w, cdf)).pvalue > RATE
    # In warm-up nothing moves.
    still = moved_from(infer.UnitMoves(HMC(model), {"w": 0}), jnp.ones((5, 1)), num_warmup=1)
    assert (still == 1).all()


def test_moves_of_weights_with_a_common_scale_leave_their_radius():
    """Without data every move is accepted; sums of squares have the F distribution of their prior."""

    def model():
        numpyro.sample("w", priors.GroupStudentT(3.0, 0.5, (4,)))
        numpyro.factor("none", 0.0)

    fn = priors.GroupStudentT(3.0, 0.5, (4,))
    start = jax.vmap(fn.sample)(random.split(random.key(0), 3000))
    found = moved_from(infer.UnitMoves(HMC(model), {"w": 0}, num_moves=4), start)
    assert (np.abs(found - start) > 0).mean() > 0.5
    radius = (found**2).sum(1) / 4 / 0.5**2
    assert scipy.stats.kstest(radius, scipy.stats.f(4, 3).cdf).pvalue > RATE


def test_moves_stay_where_the_data_are_possible():
    """Outside of its support a uniform density that is not validated is finite."""

    def model():
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([1]).to_event(1))
        fn = dist.Uniform(w[0] - 1.0, w[0] + 1.0, validate_args=False)
        numpyro.sample("y", fn, obs=jnp.array(0.5))

    found = moved_from(infer.UnitMoves(HMC(model), {"w": 0}, num_moves=10), jnp.full((200, 1), 0.5))
    assert np.abs(found - 0.5).max() <= 1
    assert np.std(found) > 0.3


def test_sites_with_bounds_that_move_keep_their_values():
    """A site that the moves leave alone, between bounds that depend on those that they move, in any inner kernel."""

    def model(y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        u = numpyro.sample("u", dist.Uniform(0.0, jnp.ones(2)).to_event(1))
        v = numpyro.sample("v", dist.Uniform(w[0] - 20.0, w[0] + 20.0))
        numpyro.sample("y", dist.Normal(v + u.sum(), 0.3), obs=y)

    kernels = (
        infer.UnitMoves(HMC(model), {"w": 0}, num_moves=5),
        infer.OrbitMoves(infer.MALA(model, 0.1, warm_start=0.0), [symmetry.Shift("w")], exact=False),
    )
    for kernel in kernels:
        state = kernel.init(random.key(0), 0, None, (1.5,), {})
        values = kernel.get_constrain_fn((1.5,), {})

        def move(key, kernel=kernel, state=state, values=values):
            return values(kernel._transition(state, key, (1.5,), {}).base.z)

        before, after = values(state.base.z), jax.vmap(move)(random.split(random.key(1), 50))
        assert (np.abs(after["w"] - before["w"]) > 1e-3).any()
        for name in ("u", "v"):
            expected = np.broadcast_to(before[name], after[name].shape)
            np.testing.assert_allclose(after[name], expected, atol=1e-4)


def two_modes(y=None):
    """|w| near 3, either sign, the positive one half as likely."""
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([1]).to_event(1))
    numpyro.factor("y", jnp.logaddexp(-0.5 * ((w[0] - 3) / 0.2) ** 2, jnp.log(2) - 0.5 * ((w[0] + 3) / 0.2) ** 2))


@pytest.mark.slow
def test_modes_are_crossed_in_every_chain():
    """Weights of the modes against quadrature; without moves no chain leaves its mode."""
    kernels = {False: NUTS(two_modes), True: infer.UnitMoves(NUTS(two_modes), {"w": 0}, num_moves=20)}
    shares = {}
    for moving, kernel in kernels.items():
        mcmc = MCMC(kernel, num_warmup=200, num_samples=1000, num_chains=4, chain_method="vectorized",
                    progress_bar=False)  # fmt: skip
        mcmc.run(random.key(0))
        shares[moving] = np.asarray(mcmc.get_samples(group_by_chain=True)["w"][..., 0] > 0, float)
    assert set(shares[False].mean(1)) <= {0.0, 1.0}

    def density(w):
        return scipy.stats.norm(0, 3).pdf(w) * (
            np.exp(-0.5 * ((w - 3) / 0.2) ** 2) + 2 * np.exp(-0.5 * ((w + 3) / 0.2) ** 2)
        )

    above, below = (scipy.integrate.quad(density, *ends, points=[p])[0] for *ends, p in ((0, 9, 3), (-9, 0, -3)))
    ess = numpyro.diagnostics.effective_sample_size(shares[True][..., None])[0]
    expected = above / (above + below)
    assert ess > 1000
    assert abs(shares[True].mean() - expected) < 4.5 * np.sqrt(expected * (1 - expected) / ess)


@pytest.mark.slow
def test_around_gibbs_and_symmetry_moves_and_in_results():
    """The axis may be negative; moves around a Gibbs, and around moves; the statistic is exported."""
    model = models.regression(nn.MLP([3, 1], "tanh"), priors.GammaPrecision(1.0, 3.0, centered=True))
    y = X[:, 0] ** 2
    inner = Gibbs(
        [(infer.PrecisionGibbs(model), infer.PrecisionGibbs(model).conjugate_sites(X, y)), (NUTS(model), None)]
    )
    units = {"net/Dense_0.kernel": -1, "net/Dense_0.bias": -1, "net/Dense_1.kernel": -2}
    kernel = infer.UnitMoves(
        infer.OrbitMoves(inner, symmetry.from_network(nn.MLP([3, 1], "tanh"), (1,))), units, num_moves=5
    )
    mcmc = MCMC(kernel, num_warmup=10, num_samples=6, num_chains=2, chain_method=jax.vmap, progress_bar=False)
    mcmc.run(random.key(0), X, y)
    idata = bnn.to_inference_data(mcmc)
    probs = idata["sample_stats"]["unit_accept_prob"].values
    assert probs.shape == (2, 6)
    assert np.all((probs > 0) & (probs <= 1))


def chained(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    v = numpyro.sample("v", dist.Normal(w, 1.0).to_event(1))
    u = numpyro.sample("u", dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3)))
    numpyro.sample("y", dist.Normal(w.sum() + v.sum() + u.sum(), 1.0), obs=0.0)


@pytest.mark.parametrize(
    ("units", "error", "message"),
    [
        ({}, TypeError, "infer.UnitMoves: argument `units`"),
        (["w"], TypeError, "argument `units`"),
        ({"W": 0}, ValueError, "Did you mean 'w'"),
        ({"w": 1}, ValueError, r"axis 1 of 'w', shaped \(3,\)"),
        ({"u": 0}, ValueError, "'u', a site with a MultivariateNormal prior"),
        ({"w": 0, "v": 0}, ValueError, r"'v', whose prior depends on \['w'\]"),
    ],
)
def test_refusals_teach(units, error, message):
    with pytest.raises(error, match=message):
        infer.UnitMoves(NUTS(chained), units).init(random.key(0), 0, None, (X,))


def test_other_refusals_teach():
    with pytest.raises(ValueError, match=r"\{'w': 1, 'b': 3\} units"):
        infer.UnitMoves(NUTS(plain), {"w": 0, "b": 0}).init(random.key(0), 0, None, (X, X[:, 0]))
    with pytest.raises(ValueError, match="`num_moves` got 0"):
        infer.UnitMoves(NUTS(plain), {"w": 1}, num_moves=0)
    with pytest.raises(TypeError, match=r"infer\.UnitMoves: argument `kernel`"):
        infer.UnitMoves(plain, {"w": 1})
