"""Gaussian guides against targets with known optimum, their starts, their summaries, and their errors."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.linalg import block_diag
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO, init_to_uniform, init_to_value
from numpyro.infer.autoguide import AutoNormal

from numpyro_bnn import guides, nn, priors, random_network
from numpyro_bnn.guides.initialization import base_spread

STEPS, PARTICLES = 3000, 10


def fit(model, guide, *args, steps=STEPS, seed=0):
    """SVI with decreasing steps; the parameters are averages over the second half (Polyak & Ruppert).

    The average of T steps has covariance H^-1 G H^-1 / (T K) whatever the step size, with H the Hessian of the loss
    and G the covariance of its gradient at one draw; K draws are taken in each step.
    """
    schedule = optax.exponential_decay(0.05, steps, 0.05)
    svi = SVI(model, guide, optax.adam(schedule), Trace_ELBO(num_particles=PARTICLES))
    state = svi.init(jax.random.key(seed), *args)

    def step(carry, i):
        state, total = carry
        state, _ = svi.update(state, *args)
        params = svi.optim.get_params(state.optim_state)
        total = jax.tree.map(lambda a, b: a + jnp.where(i >= steps // 2, b, 0.0), total, params)
        return (state, total), None

    zero = jax.tree.map(jnp.zeros_like, svi.optim.get_params(state.optim_state))
    run = jax.jit(lambda state: jax.lax.scan(step, (state, zero), jnp.arange(steps)))
    total = run(state)[0][1]
    return svi.constrain_fn(jax.tree.map(lambda value: value / (steps - steps // 2), total))


def losses(model, guide, params, *args, num=4000, elbo=Trace_ELBO):
    """Minus the ELBO at single draws; for a model without data its mean is KL(q || p)."""
    keys = jax.random.split(jax.random.key(99), num)
    each = jax.vmap(lambda key: elbo().loss(key, params, model, guide, *args))
    return np.asarray(jax.jit(each)(keys))


def divergence(*args):
    """KL(q || p) and its standard error."""
    found = losses(*args)
    return found.mean(), found.std() / len(found) ** 0.5


def first_params(guide, *args):
    """Parameters before any step."""
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(*args)
    return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}


# ----------------------------------------------------------------------------------------- known optima


def correlated(rho):
    covariance = jnp.array([[1.0, rho], [rho, 1.0]])
    return lambda: numpyro.sample("z", dist.MultivariateNormal(jnp.zeros(2), covariance))


@pytest.mark.parametrize("rho", [pytest.param(0.5, marks=pytest.mark.slow), 0.9])
def test_mean_field_of_a_correlated_gaussian(rho):
    """The optimum has variance 1 - rho^2 and KL = -ln(1 - rho^2) / 2.

    In log sd the Hessian is 2 I and the noise of the gradient has variance 2 + rho^2 per draw, so that the averages
    of 1500 steps of 10 draws have sd (3 / 4 / 15000)^1/2 = 0.0071, variances twice that, relatively: 5 sd are 7 %.
    In the mean the Hessian is P = covariance^-1 and the covariance of the gradient P diag(1 - rho^2) P.
    """
    model = correlated(rho)
    guide = guides.AutoMeanField(model)
    params = fit(model, guide)
    variance, mean = params["z_auto_scale"] ** 2, params["z_auto_loc"]
    np.testing.assert_allclose(variance, 1 - rho**2, rtol=0.07)
    np.testing.assert_allclose(mean, 0.0, atol=5 * ((1 - rho**2) / 15000) ** 0.5)
    precision = np.linalg.inv([[1.0, rho], [rho, 1.0]])
    trace = np.sum(np.diag(precision) * variance) + mean @ precision @ mean
    kl = 0.5 * (trace - 2 + np.log(1 - rho**2) - np.sum(np.log(variance)))
    # What is above the optimum is sum e^2 for errors e of log sd: 25 * 2 * 0.0071^2, and less for the means.
    assert -1e-5 < kl + 0.5 * np.log(1 - rho**2) < 0.004


def gaussian_over(shapes, covariance):
    """Sites whose joint distribution is a Gaussian with this covariance."""
    root = np.linalg.cholesky(covariance)

    def model():
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        flat = [numpyro.sample(n, dist.Normal().expand(s).to_event(len(s)).mask(False)) for n, s in shapes.items()]
        z = jnp.concatenate([jnp.ravel(value) for value in flat])
        assert len(z) == sum(sizes)
        numpyro.factor("target", dist.MultivariateNormal(jnp.arange(len(z)) / 4, scale_tril=root).log_prob(z))

    return model


def random_factor(seed, *shape):
    return np.tril(np.random.default_rng(seed).normal(size=shape)) / 2 + np.eye(*shape)


A = random_factor(0, 3, 3)
FACTOR = np.random.default_rng(2).normal(size=(5, 1))
DEEP = {"net/Dense_0.kernel": (2, 2), "net/Dense_0.bias": (2,), "net/Dense_1.kernel": (2, 1)}
LAYERS = block_diag(*(r @ r.T for r in (random_factor(3, 6, 6), random_factor(4, 2, 2))))
TARGETS = {
    "full rank": (lambda m: guides.AutoStructured(m, blocks=["*"]), {"a": (2,), "b": ()}, A @ A.T),
    "per layer": (guides.AutoStructured, DEEP, LAYERS),
    "low rank": (
        lambda m: guides.AutoBlocks(m, {"*": guides.LowRank(1)}),
        {"a": (2, 2), "b": (1,)},
        np.diag([1.0, 0.3, 0.5, 2.0, 1.0]) + FACTOR @ FACTOR.T,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_family_reaches_a_target_it_contains(name):
    make, shapes, covariance = TARGETS[name]
    model = gaussian_over(shapes, covariance)
    guide = make(model)
    params = fit(model, guide)
    kl, error = divergence(model, guide, params)
    assert kl + 3 * error < 0.01
    # Where q = p, log q - log p is one number: the density is right everywhere, not on the average only.
    assert np.std(losses(model, guide, params, num=200)) < 0.2


# -------------------------------------------------------------------------- guides that follow their scales


def funnel():
    """Neal's funnel with three levels: all of it is Gaussian given the scale, and the scale is log-normal."""
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
    mu = numpyro.sample("mu", dist.Normal(1.0, tau))
    numpyro.sample("w", dist.Normal(mu, 2 * tau).expand([4]).to_event(1))


@pytest.mark.slow
@pytest.mark.parametrize("family", [None, guides.FullRank()], ids=["mean field", "full rank"])
def test_conditioning_on_scales_makes_the_funnel_exact(family):
    blocks = {"*": family} if family else {}
    plain, given = (guides.AutoBlocks(funnel, blocks, condition_on_scales=c) for c in (False, True))
    kl, error = divergence(funnel, given, fit(funnel, given))
    assert kl + 3 * error < 0.01
    kl, error = divergence(funnel, plain, fit(funnel, plain))
    assert kl - 3 * error > 0.5


@pytest.mark.slow
def test_local_sites_follow_their_scale_in_minibatches():
    """Sites in a subsampled plate: parameters of full size, an unbiased loss, the exact posterior."""

    def model(batch_size):
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("data", 6, subsample_size=batch_size):
            z = numpyro.sample("z", dist.Normal(0.0, tau))
            numpyro.deterministic("double", 2 * z)

    guide = guides.AutoMeanField(model, condition_on_scales=True)
    params = fit(model, guide, 2)
    assert params["z_auto_loc"].shape == (6,)
    kl, error = divergence(model, guide, params, 2)
    whole = guides.AutoMeanField(model, condition_on_scales=True)
    first_params(whole, 6)
    full, full_error = divergence(model, whole, params, 6)
    assert abs(kl - full) < 5 * (error**2 + full_error**2) ** 0.5
    assert full + 3 * full_error < 0.02
    draws = guide.sample_posterior(jax.random.key(0), params, sample_shape=(5,))
    assert draws["double"].shape == (5, 6)
    np.testing.assert_allclose(draws["double"], 2 * draws["z"], rtol=1e-6)


@pytest.mark.slow
def test_conditioning_improves_the_bound_of_eight_schools():
    """Data that say little about single effects: the guide that follows their scale has the higher bound."""
    y = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    noise = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def model():
        mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = numpyro.sample("tau", dist.HalfNormal(5.0))
        with numpyro.plate("schools", 8):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, noise), obs=y)

    bounds = []
    for condition in (False, True):
        guide = guides.AutoMeanField(model, condition_on_scales=condition)
        bounds.append(divergence(model, guide, fit(model, guide)))
    (plain, error), (given, given_error) = bounds
    assert given + 4 * (error**2 + given_error**2) ** 0.5 < plain


# ------------------------------------------------------------------------------------------------- starts


def wide(x):
    w = [numpyro.sample(f"w{i}", dist.Normal(0.0, 1.0).expand([400, 400])) for i in range(2)]
    b = numpyro.sample("b", dist.Normal(0.5, 1.0).expand([400]))
    first = numpyro.deterministic("first", x @ w[0] / 1.0)
    numpyro.deterministic("second", jnp.tanh(first) @ w[1])
    numpyro.deterministic("shift", b)


def test_wide_layers_start_with_unit_preactivations():
    """With n = 400 inputs of variance 1: sum w_i^2 is 1, where NumPyro's own start gives n 4 / 3."""
    x = jax.random.normal(jax.random.key(0), (100, 400))

    def start(**settings):
        guide = guides.AutoMeanField(wide, **settings)
        return guide.median(first_params(guide, x))

    # The mean of 40,000 squares with correlated inputs and weights: relative sd about (2/400)^1/2 / 400^1/2 twice.
    found = start()
    assert np.var(found["first"]) == pytest.approx(1.0, rel=0.05)
    tanh = float(np.mean(np.tanh(np.random.default_rng(0).normal(size=10**6)) ** 2))
    assert np.var(found["second"]) == pytest.approx(tanh, rel=0.05)
    np.testing.assert_allclose(found["shift"], 0.5)
    exploded = start(init_loc_fn=init_to_uniform)
    assert np.var(exploded["first"]) == pytest.approx(400 * 4 / 3, rel=0.05)


@pytest.mark.parametrize("centered", [True, False])
def test_hierarchical_kernels_start_at_fan_in_scale(centered):
    """The kernel itself, also when the model samples it as scale times unit normal: sd 0.1, uncertain by 0.01."""
    prior = priors.Hierarchical(dist.LogNormal(3.0, 0.1), centered=centered, fan_in_scaling=False)

    def model():
        random_network("net", nn.Dense(50), (100,), prior)

    guide = guides.AutoMeanField(model, init_scale={"*_scale": 1e-4} if not centered else 0.1)
    params = first_params(guide)
    assert np.std(guide.median(params)["net/kernel"]) == pytest.approx(0.1, rel=0.05)  # 5 sd of 5000
    draws = guide.sample_posterior(jax.random.key(1), params, sample_shape=(200,))["net/kernel"]
    assert np.mean(np.std(draws, axis=0)) == pytest.approx(0.01, rel=0.15 if not centered else 0.01)


def test_spread_of_a_base_is_that_of_its_weight():
    """A weight 3 z of 100 inputs, z of sd 2: a factor 1 / 60 / (1 / 2) on z gives it the sd 0.1; never above 1."""
    z = 2.0 * jax.random.normal(jax.random.key(0), (100, 50))
    for factor, expected in ((3.0, 0.1 / 3), (0.01, 1.0)):
        found = base_spread("net/Dense_0.kernel_base", z, factor * z)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_first_scales_by_site():
    def model():
        numpyro.sample("w", dist.Normal(0.0, 1.0).expand([4, 2]).to_event(2))
        numpyro.sample("v", dist.Normal(0.0, 0.01).expand([4, 2]).to_event(2))
        numpyro.sample("s", dist.HalfNormal(1.0))

    def scales(init_scale):
        params = first_params(guides.AutoMeanField(model, init_scale=init_scale))
        return {name: params[f"{name}_auto_scale"] for name in ("w", "v", "s")}

    for name, value in {"w": 0.2 * 0.5, "v": 0.2 * 0.01, "s": 0.2}.items():
        np.testing.assert_allclose(scales(0.2)[name], value, rtol=1e-5)
    chosen = jnp.linspace(0.1, 0.8, 8).reshape(4, 2)
    np.testing.assert_allclose(scales({"w": chosen, "[s]": 0.3})["w"], chosen, rtol=1e-5)
    np.testing.assert_allclose(scales({"w": chosen, "[s]": 0.3})["s"], 0.3, rtol=1e-5)
    np.testing.assert_allclose(scales({"w": chosen})["v"], 0.1 * 0.01, rtol=1e-5)
    at = first_params(
        guides.AutoMeanField(model, init_loc_fn=init_to_value(values={"s": 2.0, "w": chosen, "v": chosen}))
    )
    np.testing.assert_allclose(at["s_auto_loc"], np.log(2.0), rtol=1e-5)
    np.testing.assert_allclose(at["w_auto_loc"], chosen, rtol=1e-5)


# --------------------------------------------------------------------------------------------- closed forms


def test_divergence_from_hierarchical_priors_is_closed_form():
    """TraceMeanField_ELBO: without data, given fixed scales, every draw gives the same number, KL(q || p)."""

    def model():
        numpyro.sample("w", dist.Normal(0.0, 2.0).expand([3, 2]).to_event(2))
        numpyro.sample("b", dist.Normal(1.0, 1.0).expand([2]).to_event(1))

    guide = guides.AutoMeanField(model)
    params = first_params(guide)
    found = losses(model, guide, params, num=5, elbo=TraceMeanField_ELBO)
    expected = sum(
        dist.kl_divergence(dist.Normal(params[f"{n}_auto_loc"], params[f"{n}_auto_scale"]), prior).sum()
        for n, prior in {"w": dist.Normal(0.0, 2.0), "b": dist.Normal(1.0, 1.0)}.items()
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def scaled_about_a_mean():
    """Weights whose prior mean and scale are both unknown."""
    mean = numpyro.sample("mean", dist.Normal(0.3, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    numpyro.sample("w", dist.Normal(mean, scale).expand([3]).to_event(1))


CONDITIONED = {
    "mean field": lambda **options: guides.AutoMeanField(scaled_about_a_mean, **options),
    "block": lambda **options: guides.AutoBlocks(
        scaled_about_a_mean, {"w": guides.FullRank()}, prefix="w_auto", **options
    ),
}
LOC, SPREAD = np.array([0.4, -1.0, 2.0]), np.array([0.5, 0.2, 1.5])


def conditioned(form, spread=SPREAD):
    """A guide with w = mean + scale u, and its parameters with u ~ N(LOC, spread^2)."""
    guide = CONDITIONED[form](condition_on_scales=True)
    params = first_params(guide)
    given = {"mean field": ("w_auto", {"scale": spread}), "block": ("w_auto_w", {"scale_tril": np.diag(spread)})}
    at, scale = given[form]
    chosen = {f"{at}_loc": jnp.asarray(LOC)} | {f"{at}_{n}": jnp.asarray(v) for n, v in scale.items()}
    assert chosen.keys() <= params.keys()
    return guide, params | chosen


@pytest.mark.parametrize("form", CONDITIONED)
def test_conditioned_weights_have_the_density_of_their_scale_and_mean(form):
    """log q(w | mean, scale) = log N((w - mean) / scale; LOC, SPREAD^2) - 3 log scale."""
    guide, params = conditioned(form)
    trace = handlers.trace(handlers.seed(handlers.substitute(guide, params), 3)).get_trace()
    mean, scale, w = (trace[name]["value"] for name in ("mean", "scale", "w"))
    sites = [site for name, site in trace.items() if name in ("w", "w_auto_w_latent")]
    found = sum(site["fn"].log_prob(site["value"]) for site in sites)
    expected = dist.Normal(LOC, SPREAD).log_prob((w - mean) / scale).sum() - 3 * jnp.log(scale)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("form", CONDITIONED)
def test_draws_of_conditioned_weights_follow_their_scale_and_mean(form):
    """With u nearly constant, w = mean + scale LOC in every draw."""
    guide, params = conditioned(form, np.full(3, 1e-6))
    draws = guide.sample_posterior(jax.random.key(1), params, sample_shape=(20,))
    assert np.std(draws["mean"]) > 0.01
    expected = draws["mean"][:, None] + draws["scale"][:, None] * LOC
    np.testing.assert_allclose(draws["w"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", CONDITIONED)
def test_conditioned_weights_start_at_the_same_values(form):
    """A start w = 1, 2, 3 with mean 0.5 and scale 2 is u = (w - 0.5) / 2; the sd of w, 0.1, is 0.05 of u."""
    values = {"w": jnp.array([1.0, 2.0, 3.0]), "mean": jnp.array(0.5), "scale": jnp.array(2.0)}
    guide = CONDITIONED[form](condition_on_scales=True, init_loc_fn=init_to_value(values=values))
    params = first_params(guide)
    at, scale = {"mean field": ("w_auto", "scale"), "block": ("w_auto_w", "scale_tril")}[form]
    np.testing.assert_allclose(params[f"{at}_loc"], [0.25, 0.75, 1.25], rtol=1e-5)
    sds = params[f"{at}_{scale}"] if form == "mean field" else np.diagonal(params[f"{at}_{scale}"])
    np.testing.assert_allclose(sds, 0.05, rtol=1e-5)


def test_quantiles_of_a_block_are_those_of_its_marginals():
    guide = guides.AutoBlocks(correlated(0.5), {"z": guides.FullRank()})
    params = first_params(guide)
    params["auto_z_scale_tril"] = jnp.array([[0.5, 0.0], [1.2, 0.9]])
    sd = np.array([0.5, np.hypot(1.2, 0.9)])
    found = guide.quantiles(params, [0.1, 0.8])["z"]
    expected = params["auto_z_loc"] + dist.Normal(0.0, 1.0).icdf(jnp.array([[0.1], [0.8]])) * sd
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_low_rank_covariance_is_the_published_form():
    """diag(s) (I + F F') diag(s)."""
    scale, factor = jnp.array([0.5, 2.0, 1.5]), jnp.array([[1.0, 0.2], [-0.3, 0.4], [0.0, 2.0]])
    block = guides.Block("b", {"a": (3,)}, jnp.zeros(3), jnp.ones(3))
    given = {"b_scale": scale, "b_cov_factor": factor}
    fn = handlers.seed(handlers.substitute(guides.LowRank(2).distribution, given), 0)(block)
    expected = jnp.diag(scale) @ (jnp.eye(3) + factor @ factor.T) @ jnp.diag(scale)
    np.testing.assert_allclose(fn.covariance_matrix, expected, rtol=1e-5)


def test_mean_field_is_auto_normal_with_another_start():
    """The same parameters by the same names, densities and draws, in plates with local sites too."""

    def model(y, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", len(y), subsample_size=batch_size) as i:
            z = numpyro.sample("z", dist.LogNormal(mu[0], 1.0))
            numpyro.sample("y", dist.Normal(z, 1.0), obs=y[i])

    y = jnp.ones(6)
    ours, theirs = guides.AutoMeanField(model), AutoNormal(model)
    params = first_params(ours, y, 2)
    assert {n: v.shape for n, v in params.items()} == {n: v.shape for n, v in first_params(theirs, y, 2).items()}
    assert params["z_auto_loc"].shape == (6,)
    traces = [
        handlers.trace(handlers.seed(handlers.substitute(guide, params), 1)).get_trace(y, 2)
        for guide in (ours, theirs)
    ]
    assert list(traces[0]) == list(traces[1])
    for name, site in traces[1].items():
        np.testing.assert_allclose(traces[0][name]["value"], site["value"], rtol=1e-6)
        if site["type"] == "sample":
            expected = site["fn"].log_prob(site["value"])
            np.testing.assert_allclose(traces[0][name]["fn"].log_prob(site["value"]), expected, rtol=1e-6)
            assert traces[0][name]["scale"] == site["scale"]


def test_quantiles_behind_falling_and_mixing_transforms():
    """Sites below a bound, and points of a simplex: quantiles agree with draws."""

    def model():
        numpyro.sample("below", dist.TruncatedNormal(0.0, 1.0, high=2.0))
        numpyro.sample("shares", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])))

    guide = guides.AutoMeanField(model, init_scale={"*": 1.0})
    params, q = first_params(guide), np.array([0.1, 0.5, 0.7, 0.9])
    found = guide.quantiles(params, q)
    draws = guide.sample_posterior(jax.random.key(5), params, sample_shape=(4000,))
    assert found["below"].shape == (4,)
    assert found["shares"].shape == (4, 3)
    for name, value in draws.items():
        share = np.mean(value[:, None] < found[name], axis=0).reshape(4, -1)
        bound = 5 * (q * (1 - q) * (1 / 4000 + 1 / 4096)) ** 0.5  # 16 shares, at 6e-7
        assert np.all(np.abs(share - q[:, None]) < bound[:, None])
    assert float(guide.median(params)["shares"].sum()) == pytest.approx(1.0, abs=1e-6)


# --------------------------------------------------------------------------------------------------- errors


def several(y=None, batch_size=None):
    numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("data", 4, subsample_size=batch_size):
        z = numpyro.sample("z", dist.Normal(0.0, s))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=jnp.ones(jnp.shape(z)))


def imputed():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a, 1.0), obs=jnp.ones(2), obs_mask=jnp.array([True, False]))


def huge():
    numpyro.sample("w", dist.Normal(0.0, 1.0).expand([12000, 1]).to_event(2))


FULL = guides.FullRank()
ERRORS = {
    "pattern": (lambda: guides.AutoBlocks(several, {"b*": FULL}), "argument `blocks` got 'b\\*'. Known: a, s, z"),
    "overlap": (lambda: guides.AutoBlocks(several, [("a", FULL), (("s", "a"), FULL)]), "site 'a' in"),
    "local": (lambda: guides.AutoBlocks(several, {"*": FULL}), "'z' inside the subsampled plate 'data'"),
    "init_scale": (lambda: guides.AutoMeanField(several, init_scale={"sigma": 0.1}), "Known: a, s, z"),
    "array": (lambda: guides.AutoMeanField(several, init_scale={"a": jnp.ones(3)}), "unconstrained shape \\(2,\\)"),
    "full rank": (lambda: guides.AutoStructured(huge), "LowRank"),
    "imputed": (lambda: guides.AutoMeanField(imputed), "'y_unobserved' of `obs_mask`"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_when_the_model_is_read(name):
    make, message = ERRORS[name]
    guide = make()
    args = (None, 2) if guide.model is several else ()
    with pytest.raises(ValueError, match=message):
        handlers.seed(guide, 0)(*args)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: guides.AutoMeanField("model"), "argument `model`"),
        (lambda: guides.AutoMeanField(several, init_scale=0.0), "positive"),
        (lambda: guides.AutoMeanField(several, init_scale={"a": -1.0}), "positive"),
        (lambda: guides.AutoBlocks(several, {"a": "full"}), "dictionary from patterns to families"),
        (lambda: guides.AutoStructured(several, "full"), "Pass a family"),
        (lambda: guides.LowRank(0), "integer of at least 1"),
        (lambda: guides.AutoMeanField(several).median({}), "it reads the model"),
    ],
)
def test_errors_at_once(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
