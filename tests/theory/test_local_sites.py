"""Latent sites inside subsampled plates: chains of the model that declares them
outside, exactly.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import group, refused, walk
from numpyro import handlers
from numpyro.infer import MCMC
from scipy import stats

from numpyro_bnn import infer, to_inference_data

G, B, N = 7, 3, 4  # groups, those of a minibatch, rows of a group


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(G, N))
    y = 0.5 * x + rng.normal(size=(G, 1)) + 0.3 * rng.normal(size=(G, N))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def observe(y, i, mean):
    numpyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y[i])


def effects(inside):
    """One effect per group."""

    def model(x, y, batch_size=B):
        tau = numpyro.sample("tau", dist.LogNormal(-0.5, 0.5))
        with numpyro.plate("all", G):
            b = None if inside else numpyro.sample("b", dist.Normal(0.3, tau))
        with numpyro.plate("groups", G, subsample_size=batch_size) as i:
            rows = numpyro.sample("b", dist.Normal(0.3, tau)) if inside else b[i]
            observe(y, i, rows[:, None] * x[i])

    return model


def several(inside):
    """Effects whose priors follow data and other effects, or are masked."""

    def model(x, y, batch_size=B):
        def draw(x):
            prior = dist.MultivariateNormal(
                jnp.zeros(2), jnp.array([[1.0, 0.3], [0.3, 0.5]])
            )
            s = numpyro.sample("s", dist.LogNormal(x[:, 0], 0.5))
            with handlers.mask(mask=x[:, 0] > 0):
                c = numpyro.sample("c", dist.Normal(0.3, 0.7))
            return (
                s,
                numpyro.sample("t", dist.Gamma(2.0, s)),
                numpyro.sample("b", prior),
                c,
            )

        with numpyro.plate("all", G):
            outside = None if inside else draw(x)
        with numpyro.plate("groups", G, subsample_size=batch_size) as i:
            s, t, b, c = draw(x[i]) if inside else (value[i] for value in outside)
            observe(y, i, (s + b[:, 1])[:, None] * x[i] + (t + b[:, 0] + c)[:, None])

    return model


def crossed(inside):
    """Two subsampled plates, nested, with effects of the first and of both."""

    def model(x, y, batch_size=B):
        rows = numpyro.plate("groups", G, subsample_size=batch_size, dim=-2)
        columns = numpyro.plate("columns", N, subsample_size=2, dim=-1)
        if not inside:
            with numpyro.plate("all", G, dim=-2):
                b = numpyro.sample("b", dist.Normal(0.0, 1.0))
                with numpyro.plate("every", N, dim=-1):
                    c = numpyro.sample("c", dist.LogNormal(0.0, 1.0))
        with rows as i:
            effect = numpyro.sample("b", dist.Normal(0.0, 1.0)) if inside else b[i]
            with columns as j:
                cell = (
                    numpyro.sample("c", dist.LogNormal(0.0, 1.0))
                    if inside
                    else c[i[:, None], j]
                )
                numpyro.sample(
                    "y", dist.Normal(effect + cell, 1.0), obs=y[i[:, None], j]
                )

    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [several, crossed], ids=lambda make: make.__name__)
def test_chains_are_those_of_the_model_with_locals_outside(make):
    """With control variates: all groups at the start, then minibatches."""
    args = data()

    def moved(inside):
        options = {
            "temperature": 0.5,
            "gradient": "control_variates",
            "warm_start": 0.0,
            "steps_per_draw": 1,
        }
        kernel = infer.SGLD(make(inside), 0.02, **options)
        start = kernel.init(jax.random.key(0), 0, None, args, {}).z
        return walk(
            kernel,
            4,
            args,
            start={name: 0.3 * jnp.ones_like(value) for name, value in start.items()},
        )[1]

    found, expected = moved(True), moved(False)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_a_step_follows_the_prior_of_all_groups_and_the_scaled_likelihood_of_some():
    """Without noise, from 0: no group has the gradient of another."""
    x, y = data()
    kernel = infer.SGLD(
        effects(True), 0.02, temperature=0.0, steps_per_draw=1, warm_start=0.0
    )
    _, draws = walk(kernel, 1, (x, y), start={"tau": jnp.zeros(()), "b": jnp.zeros(G)})
    prior, likelihood = 0.3, G / B * (np.asarray(x) * np.asarray(y)).sum(1) / 0.25
    in_batch = np.abs(draws["b"][0] - 0.01 * (prior + likelihood)) < 1e-5
    assert in_batch.sum() == B
    np.testing.assert_allclose(draws["b"][0][~in_batch], 0.01 * prior, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.core
def test_draws_are_exported_by_group():
    """With the log likelihood of all groups; some may be held out."""
    x, y = data()
    kernel = infer.SGLD(
        effects(True), warm_start=infer.WarmStart(0.5, held_out=0.3), steps_per_draw=3
    )
    mcmc = MCMC(kernel, num_warmup=8, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), x, y)
    draws = mcmc.get_samples()
    assert {name: value.shape for name, value in draws.items()} == {
        "b": (5, G),
        "tau": (5,),
    }
    found = to_inference_data(mcmc)
    posterior = group(found, "posterior")["b"]
    assert posterior.dims == ("chain", "draw", "groups")
    np.testing.assert_array_equal(posterior[0], draws["b"])
    density = stats.norm(np.asarray(draws["b"])[..., None] * x, 0.5).logpdf(y).sum(-1)
    np.testing.assert_allclose(
        group(found, "log_likelihood")["y"][0], density, rtol=1e-4
    )


# -- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("outside", "site 'penalty' outside of plate 'groups', whose indices"),
        ("fixed rows", "site 'y' in plate 'groups', whose value is not one row"),
        ("discrete", "discrete latent site 'b'"),
    ],
)
def test_likelihoods_that_would_be_wrong_are_refused_with_locals_too(fault, message):
    def model(x, y):
        with numpyro.plate("groups", G, subsample_size=B) as i:
            b = numpyro.sample(
                "b",
                dist.Bernoulli(0.5) if fault == "discrete" else dist.Normal(0.0, 1.0),
            )
            observe(y, jnp.arange(B) if fault == "fixed rows" else i, b[:, None] * x[i])
        if fault == "outside":
            numpyro.factor("penalty", -jnp.sum(b**2))

    with refused("model", message):
        infer.SGLD(model, 1e-4).init(jax.random.key(0), 0, None, data(), {})
