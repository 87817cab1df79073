"""What was read from a model against plain NumPyro: densities, values, minibatches."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import each
from jax import random
from numpy.testing import assert_allclose as close
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
from numpyro.distributions import biject_to
from numpyro.infer import log_likelihood
from numpyro.infer.util import constrain_fn, initialize_model, log_density
from scipy import stats
from zoo import BATCH, NET, ZOO, N, X, Y

from numpyro_bnn import models
from numpyro_bnn.priors import GroupStudentT
from numpyro_bnn.program import Posterior

ROWS = np.array([3, 1, 7, 20, 11, 5])
WITHOUT_BATCHES = ("flax", "random inside")


def bounded(x, y, batch_size=None):
    """Supports that follow from other sites and from data."""
    high = numpyro.sample("high", dist.HalfNormal(2.0))
    w = numpyro.sample("w", dist.Uniform(-high, high).expand([2]).to_event(1))
    sd = numpyro.sample("sd", dist.Uniform(0.0, jnp.abs(y).max()))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, sd), obs=y[i])


def local(x, y, batch_size=None):
    """A positive value of each row, and of each row and output."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        sd = numpyro.sample("sd", dist.HalfNormal(1.0))
        shift = numpyro.sample("shift", dist.Normal(x[i], 1.0).to_event(1))
        numpyro.sample("y", dist.Normal((x[i] + shift) @ w, sd), obs=y[i])


def handled(x, y, batch_size=None):
    """Scales and masks of the user, a factor, a parameter with a value."""
    offset = numpyro.param("offset", jnp.array(0.3))
    with handlers.scale(scale=0.5):
        w = numpyro.sample("w", dist.Gamma(2.0, 1.0).expand([2]).to_event(1))
    numpyro.factor("penalty", -jnp.sum(w**2))
    numpyro.deterministic("norm", jnp.linalg.norm(w))
    with (
        numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i,
        handlers.scale(scale=1.0 + x[i, 0] ** 2),
        handlers.mask(mask=y[i] > 0),
    ):
        numpyro.sample("y", dist.Normal(x[i] @ w + offset, 1.0), obs=y[i])


def looped(x, y, batch_size=None):
    """A walk, and a branch."""

    def step(carry, value):
        level = numpyro.sample("level", dist.Normal(0.9 * carry, 0.5))
        numpyro.sample("y", dist.Normal(level, 0.5), obs=value)
        return level, level

    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    start = cond(scale > 1, lambda s: 2 * s, lambda s: s, scale)
    scan(step, start, y)


def bounded_steps(x, y, batch_size=None):
    """Bounds in a loop: constant, from outside, and from another site of the step."""
    high = numpyro.sample("high", dist.HalfNormal(1.0))

    def step(last, value):
        level = numpyro.sample("level", dist.TruncatedNormal(last, 1.0, low=0.0))
        share = numpyro.sample("share", dist.Uniform(0.0, high))
        part = numpyro.sample("part", dist.Uniform(0.0, share))
        numpyro.sample("y", dist.Normal(level + part, 0.5), obs=value)
        return level, level

    scan(step, 0.0 * high, y[:4])


LOOPED = ("looped", "bounded steps")
# Others of the zoo have nothing that these have not.
NAMES = ("random inside", "several", "hierarchical", "groups", "flax")
MODELS = {
    **{name: (ZOO[name].model, ZOO[name].data) for name in NAMES},
    "bounded": (bounded, (X, Y)),
    "local": (local, (X, Y)),
    "handled": (handled, (X, Y)),
    "looped": (looped, (X, Y)),
    "bounded steps": (bounded_steps, (X, Y)),
}
FAST = ("random inside", "several", "bounded", "local", "looped")


def log_joint(model, args, kwargs, values, rng_key):
    """NumPyro's log density of constrained values, and the trace."""
    placed = handlers.substitute(model, data=values)
    return log_density(handlers.seed(placed, rng_key), args, kwargs, {})


def expected_potential(model, args, kwargs, values, z, rng_key):
    """NumPyro scales Jacobians by the handlers around a site, which we do not."""
    total, trace = log_joint(model, args, kwargs, values, rng_key)
    for name, value in z.items():
        transform = biject_to(trace[name]["fn"].support)
        total += jnp.sum(transform.log_abs_det_jacobian(value, values[name]))
    return -total


@each("name", MODELS, fast=FAST)
def test_densities_are_those_of_numpyro(name):
    """Under JAX's transformations, in parts and by row; and values."""
    model, args = MODELS[name][0], tuple(map(jnp.asarray, MODELS[name][1]))
    posterior, key = Posterior(model, args), random.key(3)
    z = posterior.initial(random.key(0))
    seeded = handlers.seed(model, 0)

    def potential(z):
        return posterior.potential(z, rng_key=key)

    def potential_of_numpyro(z):
        return expected_potential(model, args, {}, posterior.constrain(z), z, key)

    @jax.jit
    def of_numpyro(z):
        values = constrain_fn(seeded, args, {}, z)
        by_row = log_likelihood(seeded, values, *args, batch_ndims=0)
        return values, by_row, *jax.value_and_grad(potential_of_numpyro)(z)

    @jax.jit
    def of_posterior(z):
        constrained = posterior.constrain(z)
        likelihoods = posterior.log_likelihood(z, rng_key=key)
        parts = posterior.log_prior(z), posterior.log_jacobian(z)
        inverse = posterior.unconstrain(constrained)
        return constrained, inverse, likelihoods, parts, potential(z)

    values, by_row, expected, gradient = of_numpyro(z)
    constrained, inverse, likelihoods, parts, energy = of_posterior(z)
    assert constrained.keys() == z.keys()
    for site in z:
        close(constrained[site], values[site], rtol=1e-6)
        close(inverse[site], z[site], rtol=1e-4, atol=1e-5)
    close(energy, expected, rtol=1e-5)
    pair = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), z)
    energies, gradients = jax.jit(jax.vmap(jax.value_and_grad(potential)))(pair)
    close(energies, expected, rtol=1e-5)
    for site in z:
        size = 1.0 + np.abs(gradient[site]).max()
        close(gradients[site][0] / size, gradient[site] / size, atol=1e-4)
    scale = posterior.scale()
    total = sum(np.sum(value * scale[site]) for site, value in likelihoods.items())
    total += sum(float(value) for part in parts for value in part.values())
    close(-total, expected, rtol=1e-5)
    if name != "random inside":
        assert by_row.keys() == likelihoods.keys()
        for site, value in by_row.items():
            close(likelihoods[site], value, rtol=1e-4, atol=1e-5)


@each("name", [n for n in MODELS if n not in (*WITHOUT_BATCHES, *LOOPED)], fast=FAST)
def test_minibatches_are_those_of_numpyro(name):
    """Indices are inputs of a program; the mean over batches is the whole."""
    model, args = MODELS[name][0], tuple(map(jnp.asarray, MODELS[name][1]))
    chosen = jnp.asarray(ROWS)
    on_all = Posterior(model, args)
    z = on_all.initial(random.key(0))
    kwargs = {"batch_size": BATCH}
    on_batch = Posterior(model, args, kwargs, full=False)
    if name == "local":
        assert on_batch.local == ("sd", "shift")
        assert on_all.local == ()

        @jax.jit
        def expected_density(values):
            on_rows = {site: values[site][chosen] for site in ("sd", "shift")}
            placed = {**values, **on_rows, "data": chosen}
            _, trace = log_joint(model, args, kwargs, placed, 0)
            return trace["y"]["fn"].log_prob(trace["y"]["value"])

        density = on_all.log_likelihood(z, {"data": chosen})["y"]
        expected = expected_density(on_all.constrain(z))
        close(density, expected, rtol=1e-5)
    else:

        @jax.jit
        def expected_at(z):
            values = {**on_all.constrain(z), "data": chosen}
            return expected_potential(model, args, kwargs, values, z, 0)

        expected = expected_at(z)
        for posterior in (on_all, on_batch):
            potential = jax.jit(posterior.potential)(z, {"data": chosen})
            close(potential, expected, rtol=1e-5)
        if name == "several":
            assert on_all.scale() == {"y": 1.0, "label": 1.0}
            scale = N / BATCH
            assert on_batch.scale({"data": chosen}) == {"y": scale, "label": scale}
    batches = np.arange(N).reshape(-1, BATCH)
    energies = jax.jit(jax.vmap(lambda rows: on_batch.potential(z, {"data": rows})))(
        batches
    )
    whole = jax.jit(on_all.potential)(z)
    close(jax.jit(on_batch.potential)(z), whole, rtol=1e-5)
    close(energies.mean(), whole, rtol=1e-4)


def test_standardized_weights_have_the_density_of_the_non_centered_model():
    """Up to a constant, for all families with a location and a scale; also the positive
    values of rows, on a minibatch, whose prior follows weights, and behind a mask.
    """
    lower = np.array([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [0.0, -0.5, 2.0]])
    shift = dist.transforms.AffineTransform
    families = {
        "normal": lambda loc, s, df: dist.Normal(loc, s).expand([3]).to_event(1),
        "t": lambda loc, s, df: dist.StudentT(df, loc, s).expand([3]).to_event(1),
        "masked": lambda loc, s, df: (
            dist.Cauchy(loc, s * jnp.ones(3)).mask(jnp.arange(3) < 2).to_event(1)
        ),
        "joint normal": lambda loc, s, df: dist.MultivariateNormal(
            loc * jnp.ones(3), scale_tril=s * lower
        ),
        "joint t": lambda loc, s, df: dist.TransformedDistribution(
            GroupStudentT(df, s, (3,)), shift(loc, 1.0)
        ),
        "affine": lambda loc, s, df: dist.TransformedDistribution(
            dist.Laplace(0.0, 2.0).expand([3]).to_event(1), shift(loc, -s)
        ),
        "lower": lambda loc, s, df: dist.TransformedDistribution(
            dist.StudentT(df).expand([3]).to_event(1),
            dist.transforms.LowerCholeskyAffine(loc * jnp.ones(3), s * lower),
        ),
    }

    def model(y, centered, batch_size=None):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        df = numpyro.sample("df", dist.HalfNormal(5.0))
        own, mean = (0.3, s) if centered else (0.0, 1.0), 0.0
        with handlers.scale(scale=0.7):
            for name, family in families.items():
                w = numpyro.sample(name, family(*own, df))
                mean += jnp.mean(w if centered else 0.3 + s * w) / len(families)
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            if centered:
                b = numpyro.sample("b", dist.LogNormal(mean, 2 * s))
            else:
                b = jnp.exp(mean + 2 * s * numpyro.sample("b", dist.Normal()))
            numpyro.sample("y", dist.Normal(b, 1.0), obs=y[i])

    @jax.jit
    def potentials(s, rows):
        w, hypers = 0.3 + s * u, {"s": jnp.log(s), "df": jnp.log(15 * s)}
        kept = hypers | dict.fromkeys(families, u) | {"b": v}
        moved = hypers | dict.fromkeys(families, w) | {"b": w.mean() + 2 * s * v}
        expected = Posterior(model, (y, False)).potential(kept, rows)
        return posterior.potential(moved, rows, standardized=True), expected

    y, u = jnp.arange(4.0), jnp.array([0.5, -1.0, 2.0])
    v, posterior = jnp.array([1.0, 0.0, -0.5, 2.0]), Posterior(model, (y, True))
    for rows in (None, {"rows": jnp.array([3, 1])}):
        both = [potentials(s, rows) for s in (0.2, 0.5)]
        close(*np.diff(both, axis=0)[0], rtol=1e-5)
    assert posterior.scaled == {"normal": {"s"}}


def test_only_unbounded_values_are_standardized():
    """The density of a covariance matrix is that of logs, which has a mode."""

    def model():
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        numpyro.sample("v", dist.Wishart(4.0, scale_tril=s * jnp.eye(2)))
        numpyro.sample(
            "m", dist.MatrixNormal(jnp.zeros((1, 2)), s * jnp.eye(1), jnp.eye(2))
        )

    posterior = Posterior(model)
    z = {"s": 0.7, "v": jnp.ones(3), "m": jnp.ones((1, 2))}
    plain, standardized = jax.jit(
        lambda z: [posterior.potential(z, standardized=s) for s in (False, True)]
    )(z)
    difference = plain - standardized
    close(difference, 2 * 0.7, rtol=1e-4)  # of m alone


def test_sites_of_a_sample_shape():
    def model(y):
        w = numpyro.sample("w", dist.Gamma(2.0), sample_shape=(3,))
        numpyro.sample("y", dist.Normal(w.sum()), obs=y)

    y, key = jnp.float32(1.0), random.key(0)
    expected = initialize_model(key, model, model_args=(y,))
    posterior = Posterior(model, (y,))
    z = posterior.initial(key)
    np.testing.assert_array_equal(z["w"], expected.param_info.z["w"])
    energies = [jax.jit(f)(z) for f in (posterior.potential, expected.potential_fn)]
    close(*energies, rtol=1e-6)


def test_starts_are_nearer_to_0_where_an_exponential_overflows():
    def counts():
        w = numpyro.sample("w", dist.Normal().expand([50]).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.exp(1000 * w.max())), obs=1)

    with pytest.raises(RuntimeError, match="initial"):
        initialize_model(random.key(0), counts)
    posterior = Posterior(counts)
    z = posterior.initial(random.key(0))
    assert np.isfinite(posterior.potential(z))


def test_densities_end_where_distributions_leave_their_bounds():
    def model(y):
        numpyro.sample("y", dist.Poisson(numpyro.sample("w", dist.Normal())), obs=y)

    posterior = Posterior(model, (jnp.array([0, 2]),))
    assert np.isfinite(posterior.potential({"w": 0.5}))
    assert not np.isfinite(jax.jit(posterior.potential)({"w": -0.5}))


@pytest.mark.parametrize("df", [2.5, 60.0, 1e6])
def test_the_density_of_heavy_tails_is_that_of_a_t(df):
    """Also in float32 near a normal, where log gamma functions cancel."""
    model = models.regression(NET, noise=2.0, heavy_tails=True)
    known = handlers.substitute(model, {"excess_df": jnp.float32(df - 2)})
    fn = handlers.trace(handlers.seed(known, 0)).get_trace(X, Y)["y"]["fn"]
    y = np.linspace(-30.0, 30.0, N)
    expected = stats.t.logpdf(y, df, fn.loc, fn.scale)
    close(fn.log_prob(y), expected, rtol=1e-5)
    with jax.enable_x64(True):  # which leaves arrays of float32 what they are
        assert fn.log_prob(jnp.float32(1.0)).dtype == jnp.float32
