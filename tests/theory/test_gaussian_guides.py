"""Gaussian guides: sites that follow their scales, starts, closed forms, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import refused
from numpy.testing import assert_allclose as close
from numpyro import handlers
from numpyro.infer import Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoNormal

from numpyro_bnn import guides, nn, priors, random_network


def first_params(guide, *args):
    """Parameters before any step."""
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(*args)
    return {
        name: site["value"] for name, site in trace.items() if site["type"] == "param"
    }


# -- blocks, and sites that follow their scales ----------------------------------------


def test_a_structured_guide_has_a_block_for_each_layer():
    def model():
        random_network("net", nn.MLP([2, 1], "tanh"), (3,), priors.Normal())

    params = first_params(guides.AutoStructured(model))
    assert [value.shape for name, value in params.items() if name.endswith("tril")] == [
        (8, 8),
        (3, 3),
    ]


def levels(batch_size=None):
    """Three levels, Gaussian given a log-normal scale; the last has a site per row."""
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
    mu = numpyro.sample("mu", dist.Normal(1.0, tau))
    numpyro.sample("w", dist.Normal(mu, 2 * tau).expand([4]).to_event(1))
    with numpyro.plate("data", 6, subsample_size=batch_size):
        numpyro.sample("z", dist.Normal(0.0, tau))


@pytest.mark.slow
def test_a_guide_that_follows_its_scales_contains_them_all():
    """At location 0 and scale 1 it is the model: every weight is 1."""
    guide = guides.AutoBlocks(
        levels, {"w": guides.FullRank()}, condition_on_scales=True
    )
    batch_size = 2
    params = first_params(guide, batch_size)
    assert params["z_auto_loc"].shape == (6,)
    params = {
        name: jnp.full_like(value, float(name.endswith("scale")))
        for name, value in params.items()
    }
    params |= {"auto_w_scale_tril": jnp.eye(4)}

    def loss(key):
        return Trace_ELBO().loss(key, params, levels, guide, batch_size)

    close(
        jax.jit(jax.vmap(loss))(jax.random.split(jax.random.key(0), 5)), 0.0, atol=1e-4
    )
    found = guides.evidence(
        guide, params, batch_size, rng_key=jax.random.key(1), num_samples=5
    )
    close(found.log_weights, 0.0, atol=1e-4)


def scaled_about_a_mean():
    """Weights whose prior mean and scale are both unknown."""
    mean = numpyro.sample("mean", dist.Normal(0.3, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    numpyro.sample("w", dist.Normal(mean, scale).expand([3]).to_event(1))


# Blocks, prefix of the parameters of `w`, and what its standard deviations are.
CONDITIONED = {
    "mean field": ({}, "w_auto", "scale"),
    "block": ({"w": guides.FullRank()}, "auto_w", "scale_tril"),
}


@pytest.mark.parametrize("form", CONDITIONED)
def test_conditioned_weights_follow_their_scale_and_mean(form):
    """With u nearly constant, w = mean + scale loc in every draw. A start w = 1, 2, 3
    with mean 0.5 and scale 2 is u = (w - 0.5) / 2; the sd of w, 0.1, is 0.05 of u.
    """
    blocks, prefix, of_scale = CONDITIONED[form]
    start = init_to_value(
        values={
            "w": jnp.array([1.0, 2.0, 3.0]),
            "mean": jnp.array(0.5),
            "scale": jnp.array(2.0),
        }
    )
    guide = guides.AutoBlocks(
        scaled_about_a_mean, blocks, condition_on_scales=True, init_loc_fn=start
    )
    params = first_params(guide)
    close(params[f"{prefix}_loc"], [0.25, 0.75, 1.25], rtol=1e-5)
    first = params[f"{prefix}_{of_scale}"]
    close(np.diagonal(first) if first.ndim == 2 else first, 0.05, rtol=1e-5)
    loc = jnp.array([0.4, -1.0, 2.0])
    at = params | {f"{prefix}_loc": loc, f"{prefix}_{of_scale}": 1e-6 * jnp.sign(first)}
    draws = guide.sample_posterior(jax.random.key(1), at, sample_shape=(20,))
    assert np.std(draws["mean"]) > 0.01
    expected = draws["mean"][:, None] + draws["scale"][:, None] * loc
    close(draws["w"], expected, rtol=1e-4, atol=1e-4)


# -- starts ----------------------------------------------------------------------------


@pytest.mark.parametrize("centered", [True, False])
def test_hierarchical_kernels_start_at_fan_in_scale(centered):
    """The kernel itself, also when the model samples it as scale times unit normal."""

    def model():
        prior = priors.Hierarchical(
            dist.LogNormal(3.0, 0.1), centered=centered, fan_in_scaling=False
        )
        random_network("net", nn.Dense(50), (100,), prior)

    guide = guides.AutoMeanField(model)
    found = guide.median(first_params(guide))["net/kernel"]
    assert np.std(found) == pytest.approx(0.1, rel=0.05)  # 5 sd of 5000


def test_spread_of_a_base_is_that_of_its_weight():
    """A weight 3 z of 100 inputs, z of sd 2: z is uncertain by a tenth of 0.1 / 3,
    which gives the weight the sd 0.1 of its fan-in; never by more than a tenth of 1.
    """
    z = 2.0 * jax.random.normal(jax.random.key(0), (100, 50))

    def model():
        for name, factor in (("large", 3.0), ("small", 0.01)):
            base = numpyro.sample(
                f"{name}_base", dist.Normal(0.0, 1.0).expand(z.shape).to_event(2)
            )
            numpyro.deterministic(name, factor * base)

    guide = guides.AutoMeanField(
        model, init_loc_fn=init_to_value(values={"large_base": z, "small_base": z})
    )
    params = first_params(guide)
    close(params["large_base_auto_scale"], 0.1 * 0.1 / 3, rtol=1e-5)
    close(params["small_base_auto_scale"], 0.1, rtol=1e-5)


def test_first_scales_by_site():
    def model():
        numpyro.sample("w", dist.Normal(0.0, 1.0).expand([4, 2]).to_event(2))
        numpyro.sample("v", dist.Normal(0.0, 0.01).expand([4, 2]).to_event(2))
        numpyro.sample("s", dist.HalfNormal(1.0))

    def scales(init_scale, **options):
        params = first_params(
            guides.AutoMeanField(model, init_scale=init_scale, **options)
        )
        return {name: params[f"{name}_auto_scale"] for name in ("w", "v", "s")}, params

    for name, value in {"w": 0.2 * 0.5, "v": 0.2 * 0.01, "s": 0.2}.items():
        close(scales(0.2)[0][name], value, rtol=1e-5)
    chosen = jnp.linspace(0.1, 0.8, 8).reshape(4, 2)
    start = init_to_value(values={"s": 2.0, "w": chosen, "v": chosen})
    found, params = scales({"w": chosen, "[s]": 0.3}, init_loc_fn=start)
    close(found["w"], chosen, rtol=1e-5)
    close(found["s"], 0.3, rtol=1e-5)
    close(found["v"], 0.1 * 0.01, rtol=1e-5)
    close(params["s_auto_loc"], np.log(2.0), rtol=1e-5)
    close(params["w_auto_loc"], chosen, rtol=1e-5)


# -- closed forms ----------------------------------------------------------------------


def test_low_rank_covariance_is_the_published_form():
    """diag(s) (I + F F') diag(s)."""
    scale = jnp.array([0.5, 2.0, 1.5])
    factor = jnp.array([[1.0, 0.2], [-0.3, 0.4], [0.0, 2.0]])
    block = guides.Block("b", {"a": (3,)}, jnp.zeros(3), jnp.ones(3))
    given = {"b_scale": scale, "b_cov_factor": factor}
    fn = handlers.seed(handlers.substitute(guides.LowRank(2).distribution, given), 0)(
        block
    )
    expected = jnp.diag(scale) @ (jnp.eye(3) + factor @ factor.T) @ jnp.diag(scale)
    close(fn.covariance_matrix, expected, rtol=1e-5)


@pytest.mark.core
def test_mean_field_is_numpyros_auto_normal_with_another_start():
    """The same parameters, densities and draws, in plates with local sites too."""

    def model(y, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", len(y), subsample_size=batch_size) as i:
            z = numpyro.sample("z", dist.LogNormal(mu[0], 1.0))
            numpyro.sample("y", dist.Normal(z, 1.0), obs=y[i])

    y = jnp.ones(6)
    ours, theirs = guides.AutoMeanField(model), AutoNormal(model)
    params = first_params(ours, y, 2)
    assert {n: v.shape for n, v in params.items()} == {
        n: v.shape for n, v in first_params(theirs, y, 2).items()
    }
    assert params["z_auto_loc"].shape == (6,)
    traces = [
        handlers.trace(handlers.seed(handlers.substitute(guide, params), 1)).get_trace(
            y, 2
        )
        for guide in (ours, theirs)
    ]
    assert list(traces[0]) == list(traces[1])
    for name, site in traces[1].items():
        close(traces[0][name]["value"], site["value"], rtol=1e-6)
        if site["type"] == "sample":
            expected = site["fn"].log_prob(site["value"])
            close(traces[0][name]["fn"].log_prob(site["value"]), expected, rtol=1e-6)
            assert traces[0][name]["scale"] == site["scale"]


@pytest.mark.slow
def test_quantiles_behind_falling_and_mixing_transforms():
    """Sites below a bound, and points of a simplex: quantiles agree with draws."""

    def model():
        numpyro.sample("below", dist.TruncatedNormal(0.0, 1.0, high=2.0))
        numpyro.sample("shares", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])))

    guide = guides.AutoMeanField(model, init_scale={"*": 1.0})
    params, q = first_params(guide), np.array([0.1, 0.5, 0.7, 0.9])
    found = guide.quantiles(params, q)
    draws = guide.sample_posterior(jax.random.key(5), params, sample_shape=(4000,))
    for name, value in draws.items():
        share = np.mean(value[:, None] < found[name], axis=0).reshape(4, -1)
        bound = 5 * (q * (1 - q) * (1 / 4000 + 1 / 4096)) ** 0.5  # 16 shares, at 6e-7
        assert np.all(np.abs(share - q[:, None]) < bound[:, None])
    assert float(guide.median(params)["shares"].sum()) == pytest.approx(1.0, abs=1e-6)


# -- refusals --------------------------------------------------------------------------


def several():
    numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("data", 4, subsample_size=2):
        z = numpyro.sample("z", dist.Normal(0.0, s))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=jnp.ones(jnp.shape(z)))


def imputed():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample(
        "y", dist.Normal(a, 1.0), obs=jnp.ones(2), obs_mask=jnp.array([True, False])
    )


def huge():
    numpyro.sample("w", dist.Normal(0.0, 1.0).expand([12000, 1]).to_event(2))


FULL, Blocks, MeanField = guides.FullRank(), guides.AutoBlocks, guides.AutoMeanField
# What is wrong: argument, part of the message, guide.
ERRORS = [
    ("blocks", "'b*'. Known: a, s, z", lambda: Blocks(several, {"b*": FULL})),
    (
        "blocks",
        "site 'a' in",
        lambda: Blocks(several, [("a", FULL), (("s", "a"), FULL)]),
    ),
    (
        "blocks",
        "'z' inside the subsampled plate 'data'",
        lambda: Blocks(several, {"*": FULL}),
    ),
    (
        "blocks",
        "dictionary from patterns to families",
        lambda: Blocks(several, {"a": "full"}),
    ),
    ("block", "LowRank", lambda: guides.AutoStructured(huge)),
    (
        "init_scale",
        "Known: a, s, z",
        lambda: MeanField(several, init_scale={"sigma": 0.1}),
    ),
    (
        "init_scale",
        "unconstrained shape (2,)",
        lambda: MeanField(several, init_scale={"a": np.ones(3)}),
    ),
    ("model", "'y_unobserved' of `obs_mask`", lambda: MeanField(imputed)),
]


@pytest.mark.parametrize(("argument", "fragment", "make"), ERRORS)
def test_guides_refuse_what_does_not_fit_the_model(argument, fragment, make):
    with refused(argument, fragment):
        handlers.seed(make(), 0)()
    with refused("params", "it reads the model"):
        MeanField(several).median({})  # before it has read one
