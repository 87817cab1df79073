"""Moves that redraw hidden units from their prior: exact conditionals, modes, and what
they refuse.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.stats
from helpers import refused
from jax import random
from numpyro import handlers
from orbits import Still, after_moves

from numpyro_bnn import infer, priors

RATE = 1e-5  # failure rate of a test that draws


def unit_moves(units, num_moves, **options):
    return lambda kernel: infer.UnitMoves(kernel, units, num_moves=num_moves, **options)


def parent():
    """One weight, whose prior has a scale, and a site below it that stays."""
    with handlers.scale(scale=0.3):
        w = numpyro.sample("w", dist.Normal(0.3, 1.0).expand([1]).to_event(1))
    numpyro.sample("v", dist.Normal(w[0], 10.0))
    numpyro.sample("y", dist.Normal(w[0] ** 2, 10.0), obs=1.5)


def test_moves_leave_an_exact_conditional_as_it_is():
    """Of a weight given data and a site below it, by quadrature."""
    w, v = np.linspace(-9, 9, 40_001), 0.4
    log_density = 0.3 * scipy.stats.norm.logpdf(w, 0.3)
    log_density += scipy.stats.norm.logpdf(v, w, 10.0) + scipy.stats.norm.logpdf(
        1.5, w**2, 10.0
    )
    cdf = scipy.integrate.cumulative_trapezoid(np.exp(log_density), w, initial=0)
    cdf /= cdf[-1]
    start = np.interp(
        np.random.default_rng(0).permutation((np.arange(20_000) + 0.5) / 20_000), cdf, w
    )
    draws = {"w": jnp.asarray(start[:, None], jnp.float32), "v": jnp.full(20_000, v)}
    # The first of the two transitions is warm-up, in which nothing moves.
    _, found, on_the_way = after_moves(
        unit_moves({"w": 0}, 10),
        parent,
        draws,
        transitions=2,
        num_warmup=1,
        read=lambda s: s.z["w"],
    )
    np.testing.assert_array_equal(on_the_way[:, 0], draws["w"])
    assert np.mean(np.abs(found["w"][:, 0] - start) > 1e-5) > 0.2
    assert (
        scipy.stats.kstest(found["w"][:, 0], lambda at: np.interp(at, w, cdf)).pvalue
        > RATE
    )


def test_moves_of_weights_with_a_common_scale_leave_their_radius():
    """Without data every move is accepted; sums of squares have an F distribution."""

    def model():
        numpyro.sample("w", priors.GroupStudentT(3.0, 0.5, (4,)))
        numpyro.factor("none", 0.0)

    fn = priors.GroupStudentT(3.0, 0.5, (4,))
    start = np.asarray(jax.jit(jax.vmap(fn.sample))(random.split(random.key(0), 3000)))
    _, found, _ = after_moves(unit_moves({"w": 0}, 4), model, {"w": start})
    assert (np.abs(found["w"] - start) > 0).mean() > 0.5
    radius = (found["w"] ** 2).sum(1) / 4 / 0.5**2
    assert scipy.stats.kstest(radius, scipy.stats.f(4, 3).cdf).pvalue > RATE


def test_moves_stay_where_the_data_are_possible():
    """Outside of its support a uniform density that is not validated is finite."""

    def model():
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([1]).to_event(1))
        fn = dist.Uniform(w[0] - 1.0, w[0] + 1.0, validate_args=False)
        numpyro.sample("y", fn, obs=jnp.array(0.5))

    _, found, _ = after_moves(
        unit_moves({"w": 0}, 10), model, {"w": jnp.full((200, 1), 0.5)}
    )
    assert np.abs(found["w"] - 0.5).max() <= 1
    assert np.std(found["w"]) > 0.3


def test_a_missing_datum_behind_a_mask_is_no_border():
    """Moves are accepted."""
    y = jnp.array([0.5, jnp.nan])

    def model():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        with numpyro.plate("data", 2), handlers.mask(mask=jnp.isfinite(y)):
            numpyro.sample("y", dist.Normal(w[0], 1.0), obs=y)

    start = jnp.zeros((50, 1))
    _, found, _ = after_moves(unit_moves({"w": 0}, 5), model, {"w": start})
    assert (found["w"] != 0).any()


def test_sites_with_bounds_that_move_keep_their_values():
    """A site that moves leave alone, between bounds that depend on moved ones."""

    def model(y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        u = numpyro.sample("u", dist.Uniform(0.0, jnp.ones(2)).to_event(1))
        v = numpyro.sample("v", dist.Uniform(w[0] - 20.0, w[0] + 20.0))
        numpyro.sample("y", dist.Normal(v + u.sum(), 0.3), obs=y)

    draws = {"w": jnp.zeros((50, 1)), "u": jnp.full((50, 2), 0.3)}
    draws["v"] = jnp.full(50, 0.7)
    _, after, _ = after_moves(unit_moves({"w": 0}, 5), model, draws, (1.5,))
    assert (np.abs(after["w"]) > 1e-3).any()
    for name in ("u", "v"):
        np.testing.assert_allclose(after[name], draws[name], atol=1e-4)


def chained():
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    numpyro.sample("v", dist.Normal(w, 1.0).to_event(1))
    numpyro.sample("u", dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3)))
    numpyro.sample("wide", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
    numpyro.sample("y", dist.Normal(w.sum(), 1.0), obs=0.0)


@pytest.mark.parametrize(
    ("units", "fragment"),
    [
        ({}, ""),
        (["w"], ""),
        ({"W": 0}, "Did you mean 'w'"),
        ({"w": 1}, "axis 1 of 'w', shaped (3,)"),
        ({"u": 0}, "'u', a site with a MultivariateNormal prior"),
        ({"w": 0, "v": 0}, "'v', whose prior depends on ['w']"),
        ({"w": 0, "wide": 0}, "{'w': 3, 'wide': 1} units"),
    ],
)
def test_units_that_do_not_fit_are_refused(units, fragment):
    with refused("units", fragment):
        infer.UnitMoves(Still(chained), units).init(random.key(0), 0, {})
    with refused("kernel"):
        infer.UnitMoves(chained, {"w": 0})
