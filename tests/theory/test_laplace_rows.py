"""AutoLaplace knows its rows by the program of the model: linear models whose axes have
equal lengths, in NumPy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import nnx
from helpers import each, refused
from numpy.testing import assert_allclose as close
from numpyro.contrib.module import random_nnx_module
from scipy import stats

from numpyro_bnn import guides

pytestmark = pytest.mark.usefixtures("x64")
NOISE = 0.5
RANDOM = 3  # seed of all data


def exact(design, targets):
    """Mean, covariance and evidence of weights N(0, I) by rows (N, P)."""
    covariance = np.linalg.inv(design.T @ design / NOISE**2 + np.eye(design.shape[1]))
    marginal = design @ design.T + NOISE**2 * np.eye(len(design))
    evidence = stats.multivariate_normal(np.zeros(len(design)), marginal).logpdf(
        targets
    )
    return covariance @ design.T @ targets / NOISE**2, covariance, evidence


def run(model, structure, args, mode, **settings):
    guide = guides.AutoLaplace(model, structure)
    options = {"num_epochs": 0, "init_params": mode, "progress_bar": False, **settings}
    return guide, guide.run(jax.random.key(0), *args, **options)


def weights(name, *shape):
    return numpyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event())


def test_blocks_of_the_precision_of_many_rows_are_exact():
    """One product makes the precision of few rows, one for each pair of sites this."""
    random = np.random.default_rng(RANDOM)
    x = random.normal(size=(3000, 4))
    design = np.kron(np.c_[x, np.ones(len(x))], np.eye(3))  # of rows and outputs
    y = design @ random.normal(size=15) + NOISE * random.normal(size=len(design))
    covariance = np.linalg.inv(design.T @ design / NOISE**2 + np.eye(15))
    mean = covariance @ design.T @ y / NOISE**2

    def model(x, y=None):
        w, b = weights("w", 4, 3), weights("b", 3)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(x @ w + b, NOISE).to_event(1), obs=y)

    mode = {"w": mean[:12].reshape(4, 3), "b": mean[12:]}
    _, fit = run(model, "full", (x, y.reshape(-1, 3)), mode)
    tril = np.asarray(fit.params["auto_scale_tril"])
    close(tril @ tril.T, covariance, rtol=1e-8, atol=1e-12)
    assert fit.converged


# -- time axes -------------------------------------------------------------------------

OUT, SCALE = np.array([1.0, -0.5, 2.0]), 1.5


def time_major(x, y=None, batch_size=None, power=1.0):
    """Sums over time of a layer of (T, N, 2); the site "b" is no matrix of it."""
    w, b = SCALE * weights("w", 2, 3), weights("b")
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        hidden = jnp.swapaxes(x[i], 0, 1) @ w
        mean = jnp.tensordot(1.0 + jnp.arange(x.shape[1]), hidden @ OUT, 1)
        mean = mean + x[i].sum((1, 2)) * b
        with numpyro.handlers.scale(scale=power):
            obs = None if y is None else y[i]
            numpyro.sample("y", dist.Normal(mean, NOISE), obs=obs)


def design_of_time(x):
    times = 1.0 + np.arange(x.shape[1])
    layer = np.einsum("t,nti,o->nio", times, x, SCALE * OUT).reshape(len(x), -1)
    return np.c_[layer, x.sum((1, 2))]


def mode_of_time(mean):
    return {"w": mean[:6].reshape(2, 3), "b": mean[6]}


@each(("length", "batch_size"), [(2, 3), (3, 1), (7, None)], fast=1)
def test_a_time_axis_is_not_taken_for_rows(length, batch_size):
    """As many times as rows, new rows as many as times, and one by one; densities are
    squared, which makes the noise narrower.
    """
    power = 2.0
    random = np.random.default_rng(RANDOM)
    x, y, new = (
        random.normal(size=(7, length, 2)),
        random.normal(size=7),
        random.normal(size=(length, length, 2)),
    )
    mean, covariance, evidence = exact(power**0.5 * design_of_time(x), power**0.5 * y)
    evidence += (power - 1) * 7 * stats.norm.logpdf(0.0, scale=NOISE)
    args = x, y, batch_size, power
    guide, fit = run(time_major, "full", args, mode_of_time(mean))
    close(fit.log_evidence, evidence, rtol=1e-9)
    variance = np.diag(design_of_time(new) @ covariance @ design_of_time(new).T)
    found = guide.predictive(fit.params, new)
    close(found.output_variance["loc"], variance, rtol=1e-8)
    close(
        guide.predictive(fit.params, new[:1]).output_variance["loc"],
        variance[:1],
        rtol=1e-8,
    )


def test_factors_of_time_major_layers():
    """Of all rows and times, as the definition of the factors says."""
    random = np.random.default_rng(RANDOM)
    x, y = random.normal(size=(7, 3, 2)), random.normal(size=7)
    mean, _, _ = exact(design_of_time(x), y)
    guide, fit = run(time_major, "kron", (x, y, 3), mode_of_time(mean))
    left = np.einsum("nti,ntj->ij", x, x)
    grads = SCALE * OUT / NOISE
    right = np.outer(grads, grads) * np.mean((1.0 + np.arange(3)) ** 2)
    precision = np.pad(np.kron(left, right), (0, 1)) + np.eye(7)
    precision[6, 6] += np.sum(x.sum((1, 2)) ** 2) / NOISE**2
    covariance = np.linalg.inv(precision)
    variance = np.diag(design_of_time(x) @ covariance @ design_of_time(x).T)
    close(
        guide.predictive(fit.params, x[:3]).output_variance["loc"],
        variance[:3],
        rtol=1e-8,
    )


@pytest.mark.parametrize("centered", [False, True])
def test_predictions_by_a_kronecker_product(centered):
    """Scaled by input; also where new rows influence one another."""
    scale, noise = np.array([0.5, 2.0, 1.0]), np.array([0.5, 0.2])
    last = np.array([[1.0, 1.0], [0.5, -1.0]])

    def model(x, y=None, centered=False):
        mean = x @ (scale[:, None] * weights("w", 3, 2)) @ last
        mean = mean - mean.mean(0) if centered else mean
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=y)

    random = np.random.default_rng(RANDOM)
    x, new = random.normal(size=(7, 3)), random.normal(size=(4, 3))
    y, w = random.normal(size=(7, 2)), random.normal(size=(3, 2))
    with pytest.warns(UserWarning, match="posterior sds from the mode"):
        guide, fit = run(model, "kron", (x, y), {"w": w})
    left = np.einsum("ni,nj->ij", x * scale, x * scale)
    precision = np.kron(left, last / noise**2 @ last.T) + np.eye(6)
    rows = (new - new.mean(0) if centered else new) * scale
    design = np.einsum("ni,od->ndio", rows, last).reshape(4, 2, 6)
    covariance = design @ np.linalg.inv(precision) @ design.swapaxes(1, 2)
    found = guide.predictive(fit.params, new, centered=centered)
    close(found.covariance, covariance, rtol=1e-8)


@pytest.mark.slow
def test_a_recurrent_layer_in_minibatches():
    """Rows in a loop over time do not mix."""

    def recurrent(x, y=None, batch_size=None):
        w = weights("w", 2)
        with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
            inputs = jnp.swapaxes(x[i], 0, 1) @ w
            mean, _ = jax.lax.scan(
                lambda h, u: (0.5 * h + u, None), jnp.zeros(len(i)), inputs
            )
            numpyro.sample(
                "y", dist.Normal(mean, NOISE), obs=None if y is None else y[i]
            )

    random = np.random.default_rng(RANDOM)
    x, y = random.normal(size=(6, 2, 2)), random.normal(size=6)
    mean, _, evidence = exact(0.5 * x[:, 0] + x[:, 1], y)
    _, fit = run(recurrent, "full", (x, y, 2), {"w": mean})
    close(fit.log_evidence, evidence, rtol=1e-9)


# -- plates ----------------------------------------------------------------------------


def test_crossed_plates_and_sites_of_other_rows():
    """Rows and columns of a table, and rows of another measurement."""

    def model(x, z, extra, y=None, more=None):
        a, b = weights("a", 2), weights("b", 2)
        with numpyro.plate("rows", 3, dim=-2), numpyro.plate("columns", 3, dim=-1):
            numpyro.sample("y", dist.Normal((x @ a)[:, None] + z @ b, NOISE), obs=y)
        with numpyro.plate("others", len(extra)):
            numpyro.sample("more", dist.Normal(extra @ a, NOISE), obs=more)

    random = np.random.default_rng(RANDOM)
    x, z, extra = (random.normal(size=(n, 2)) for n in (3, 3, 4))
    y, more = random.normal(size=(3, 3)), random.normal(size=4)
    table = np.concatenate([np.repeat(x, 3, axis=0), np.tile(z, (3, 1))], axis=1)
    design = np.concatenate([table, np.pad(extra, ((0, 0), (0, 2)))])
    mean, covariance, evidence = exact(design, np.concatenate([y.ravel(), more]))
    guide, fit = run(
        model, "full", (x, z, extra, y, more), {"a": mean[:2], "b": mean[2:]}
    )
    close(fit.log_evidence, evidence, rtol=1e-9)
    found = guide.predictive(fit.params, x, z, extra, site="y").output_variance["loc"]
    close(found, np.diag(table @ covariance @ table.T).reshape(3, 3), rtol=1e-8)


def test_rows_that_influence_one_another_are_refused_in_every_chunk():
    """Centered by the minibatch; chunks of three features by three rows hid it."""

    def centered(x, y=None, batch_size=None):
        w = weights("w", 3)
        with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
            mean = (x[i] - x[i].mean(0)) @ w
            numpyro.sample(
                "y", dist.Normal(mean, NOISE), obs=None if y is None else y[i]
            )

    x, y = np.random.default_rng(RANDOM).normal(size=(7, 3)), np.zeros(7)
    with pytest.raises(ValueError, match="one row changes the outputs of others"):
        run(centered, "full", (x, y, 3), {"w": np.zeros(3)})


class Normalized(nnx.Module):
    """Batch normalization of Flax: its statistics are state, or constants."""

    def __init__(self, constant):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(3, use_running_average=constant, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.norm(self.first(x))))[..., 0]


@pytest.mark.filterwarnings("ignore:scatter inputs", "ignore:guides.AutoLaplace.run")
@pytest.mark.slow
def test_state_that_a_module_changes_is_refused():
    """Predictions would normalize by the new rows."""
    x = np.random.default_rng(RANDOM).normal(size=(6, 2))
    for constant in (False, True):

        def model(x, y=None):
            net = random_nnx_module("net", Normalized(constant), dist.Normal(0.0, 1.0))  # noqa: B023
            with numpyro.plate("data", len(x)):
                numpyro.sample("y", dist.Normal(net(x), NOISE), obs=y)

        guide = guides.AutoLaplace(model, "diag")
        if constant:
            fit = guide.run(
                jax.random.key(0), x, x[:, 0], num_epochs=0, progress_bar=False
            )
            whole, part = (
                guide.predictive(fit.params, rows).mean for rows in (x, x[:2])
            )
            close(part, whole[:2], rtol=1e-6)
            continue
        with refused("model", "['n"):
            guide.run(jax.random.key(0), x, x[:, 0], num_epochs=0, progress_bar=False)
