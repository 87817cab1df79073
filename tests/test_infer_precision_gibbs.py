"""PrecisionGibbs: conditionals against closed forms, what it reads from a model, composites, errors."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import HMC, MCMC, Gibbs
from scipy import integrate, stats

from numpyro_bnn import infer, models, nn, priors
from numpyro_bnn.infer.precision_gibbs import PrecisionGibbsState
from numpyro_bnn.program.reading import CONDITIONED

NUM_DRAWS = 4000
FAILURE = 1e-5  # of each Kolmogorov-Smirnov test, one of about thirty here


def many(model, held, args=(), start=None, num_draws=NUM_DRAWS):
    """One sweep from each of many states, all given the same values of the other sites."""
    kernel = infer.PrecisionGibbs(model)
    kwargs = {CONDITIONED: held}
    state = kernel.init(random.key(0), 0, None, args, kwargs)
    z = {name: jnp.broadcast_to(value, (num_draws, *value.shape)) for name, value in state.z.items()}
    keys = random.split(random.key(1), num_draws)
    states = PrecisionGibbsState({**z, **(start or {})}, keys)
    return jax.jit(lambda s: kernel.sample(s, args, kwargs))(states).z


def assert_distribution(draws, cdf):
    assert stats.kstest(np.asarray(draws, np.float64), cdf).pvalue > FAILURE


W = np.array([[0.3, -1.2, 0.7], [2.0, 0.1, -0.4]], np.float32)


# ------------------------------------------------------------------------------------------- conditionals by hand


def test_gamma_precisions_of_weights_and_of_noise():
    x, y = np.linspace(-1, 1, 7, dtype=np.float32), np.array([0.1, 0.4, -0.3, 1.2, 0.8, 0.2, 0.9], np.float32)

    def model():
        alpha = numpyro.sample("alpha", dist.Gamma(1.5, 0.7))
        w = numpyro.sample("w", dist.Normal(0.5, 2 / jnp.sqrt(alpha)).expand([2, 3]).to_event(2))
        tau = numpyro.sample("tau", dist.Gamma(2.0, 0.3))
        numpyro.sample("y", dist.Normal(w.sum() * x, tau**-0.5), obs=y)

    draws = many(model, {"w": jnp.asarray(W)})
    squares = ((W - 0.5) ** 2).sum() / 4
    assert_distribution(draws["alpha"], stats.gamma(1.5 + 3, scale=1 / (0.7 + squares / 2)).cdf)
    rest = ((y - W.sum() * x) ** 2).sum()
    assert_distribution(draws["tau"], stats.gamma(2 + 3.5, scale=1 / (0.3 + rest / 2)).cdf)


VARIANCES = {
    "inverse gamma": (dist.InverseGamma(3.0, 2.0), lambda v, n, s: v ** (-4.0) * np.exp(-2 / v)),
    "gamma": (dist.Gamma(1.3, 0.8), lambda v, n, s: v**0.3 * np.exp(-0.8 * v)),
    "chi2": (dist.Chi2(3.0), lambda v, n, s: v**0.5 * np.exp(-0.5 * v)),
    "exponential": (dist.Exponential(0.6), lambda v, n, s: np.exp(-0.6 * v)),
}
SCALES = {
    "half-normal": (dist.HalfNormal(1.7), lambda v, n, s: np.exp(-0.5 * (v / 1.7) ** 2)),
    "half-Cauchy": (dist.HalfCauchy(0.6), lambda v, n, s: 1 / (1 + (v / 0.6) ** 2)),
}


def quantiles(density, size):
    """Cumulative distribution on a fine grid of logs, from a density up to a factor."""
    log_v = np.linspace(-8, 8, 20_001)
    mass = density(np.exp(log_v)) * np.exp(log_v)
    cdf = integrate.cumulative_trapezoid(mass, log_v, initial=0.0)
    cdf /= cdf[-1]
    start = np.exp(np.interp((np.arange(size) + 0.5) / size, cdf, log_v))
    return lambda v: np.interp(np.log(v), log_v, cdf), np.random.default_rng(3).permutation(start)


FAST = ("inverse gamma", "half-normal", "half-Cauchy")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
        for name in (*VARIANCES, *SCALES, "precision, inverse gamma", "precision, exponential")
    ],
)
def test_variances_and_scales(name):
    """From draws of the conditional to draws of it: exact also for the half-Cauchy, whose update is a transition."""
    if name.startswith("precision"):
        prior, density = VARIANCES[name.partition(", ")[2]]
        power = -0.5
    else:
        prior, density = {**VARIANCES, **SCALES}[name]
        power = 1.0 if name in SCALES else 0.5

    def model():
        v = numpyro.sample("v", prior)
        numpyro.sample("w", dist.Normal(0.0, 1.5 * v**power).expand([2, 3]).to_event(2))

    squares = (W**2).sum() / 1.5**2

    def conditional(v):
        sd = v**power
        return density(v, 6, squares) * sd**-6.0 * np.exp(-0.5 * squares / sd**2)

    cdf, start = quantiles(conditional, NUM_DRAWS)
    draws = many(model, {"w": jnp.asarray(W)}, start={"v": jnp.asarray(start, jnp.float32)})["v"]
    assert_distribution(draws, cdf)
    # From far away it gets there too (the half-Cauchy within some sweeps).
    if name != "half-Cauchy":
        assert_distribution(many(model, {"w": jnp.asarray(W)}, start={"v": jnp.full(NUM_DRAWS, 30.0)})["v"], cdf)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in (*VARIANCES, *SCALES)],
)
def test_a_scaled_prior_is_a_power_of_its_density(name):
    """Density of the value ** scale, times the likelihood of the normal sites, which have a scale of their own."""
    prior, density = {**VARIANCES, **SCALES}[name]
    power, scales = 1.0 if name in SCALES else 0.5, (0.4, 2.0)

    def model():
        with numpyro.plate("columns", 2):
            with handlers.scale(scale=jnp.array(scales)):
                v = numpyro.sample("v", prior)
            with handlers.scale(scale=1.5), numpyro.plate("rows", 3):
                numpyro.sample("w", dist.Normal(0.0, v**power))

    exact = []
    for w, scale in zip(W, scales, strict=True):
        squares = 1.5 * (w**2).sum()

        def conditional(v, scale=scale, squares=squares):
            return density(v, 3, squares) ** scale * v ** (-4.5 * power) * np.exp(-0.5 * squares * v ** (-2 * power))

        exact.append(quantiles(conditional, NUM_DRAWS))
    start = jnp.stack([jnp.asarray(values, jnp.float32) for _, values in exact], axis=1)
    draws = many(model, {"w": jnp.asarray(W.T)}, start={"v": start})["v"]
    for j, (cdf, _) in enumerate(exact):
        assert_distribution(draws[:, j], cdf)


@pytest.mark.parametrize("temper", ["likelihood", "joint"])
def test_every_temperature_of_tempered_precisions(temper):
    """Draws of the only site are independent, and have their gamma distribution at every temperature."""
    y = np.array([1.5, -0.5, 0.3])

    def model():
        tau = numpyro.sample("tau", dist.Gamma(3.0, 2.0))
        with numpyro.plate("data", 3):
            numpyro.sample("y", dist.Normal(0.0, tau**-0.5), obs=jnp.asarray(y))

    kernel = infer.ParallelTempering(infer.PrecisionGibbs(model), 3, lowest=0.2, temper=temper)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=NUM_DRAWS, progress_bar=False)
    mcmc.run(random.key(0), extra_fields=("base.z",))
    betas, draws = mcmc.last_state.inverse_temperatures, mcmc.get_extra_fields()["base.z"]["tau"]
    for beta, tau in zip(np.asarray(betas), np.asarray(draws).T, strict=True):
        prior = beta if temper == "joint" else 1.0
        shape, rate = prior * 2 + beta * 1.5 + 1, prior * 2 + beta * (y**2).sum() / 2
        assert_distribution(tau, stats.gamma(shape, scale=1 / rate).cdf)


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=pytest.mark.slow), None])
def test_elements_own_rows_columns_or_elements(axis):
    """A site of several elements: each has the conditional of the weights that it scales."""
    shape = {0: (2, 1), 1: (1, 3), None: (2, 3)}[axis]

    def model():
        size = int(np.prod(shape))
        alpha = numpyro.sample("alpha", dist.Gamma(1.0, 0.5).expand([size]).to_event(1))
        numpyro.sample("w", dist.Normal(0.0, jnp.reshape(alpha, shape) ** -0.5).expand([2, 3]).to_event(2))

    draws = many(model, {"w": jnp.asarray(W)})["alpha"]
    other = {0: 1, 1: 0, None: ()}[axis]
    squares = (W**2).sum(axis=other).ravel()
    for j, square in enumerate(squares):
        number = W.size / squares.size
        assert_distribution(draws[:, j], stats.gamma(1 + number / 2, scale=1 / (0.5 + square / 2)).cdf)


def test_one_precision_of_two_sites_with_scales_and_masks():
    mask = np.array([True, False, True])

    def model():
        alpha = numpyro.sample("alpha", dist.Gamma(1.0, 0.5))
        numpyro.sample("a", dist.Normal(0.0, alpha**-0.5).expand([2]).to_event(1))
        with handlers.scale(scale=0.25), handlers.mask(mask=jnp.asarray(mask)), numpyro.plate("rows", 3):
            numpyro.sample("y", dist.Normal(1.0, 3 * alpha**-0.5), obs=jnp.array([2.0, 100.0, -1.0]))

    draws = many(model, {"a": jnp.array([0.5, -2.0])})["alpha"]
    number, squares = 2 + 0.25 * 2, 0.25 + 4 + 0.25 * (1 + 4) / 9
    assert_distribution(draws, stats.gamma(1 + number / 2, scale=1 / (0.5 + squares / 2)).cdf)


def test_two_scales_of_one_site_take_turns():
    """A sweep from exact draws of both given the weights: product and ratio keep their distribution."""

    def model():
        a = numpyro.sample("a", dist.HalfNormal(1.0))
        b = numpyro.sample("b", dist.HalfNormal(2.0))
        numpyro.sample("w", dist.Normal(0.0, a * b).expand([3]).to_event(1))

    # By rejection from the prior: the density of w is largest where the product is its root mean square.
    rng, w = np.random.default_rng(0), W[0].astype(float)
    a, b = np.abs(rng.normal(size=(2, 200_000))) * [[1.0], [2.0]]
    log_density = stats.norm.logpdf(w, 0.0, (a * b)[:, None]).sum(1)
    largest = stats.norm.logpdf(w, 0.0, np.sqrt((w**2).mean())).sum()
    kept = np.flatnonzero(np.log(rng.uniform(size=a.size)) < log_density - largest)
    assert len(kept) > 2 * NUM_DRAWS
    a, b = a[kept], b[kept]
    start = {name: jnp.asarray(v[:NUM_DRAWS], jnp.float32) for name, v in (("a", a), ("b", b))}
    found = {k: np.asarray(v, float) for k, v in many(model, {"w": jnp.asarray(W[0])}, start=start).items()}
    for one, other in ((found["a"] * found["b"], a * b), (found["a"] / found["b"], a / b)):
        assert stats.ks_2samp(one, other[NUM_DRAWS:]).pvalue > FAILURE


# ------------------------------------------------------------------------------------------------ reading a model


def test_sites_of_a_network():
    x = jnp.zeros((4, 3))
    net = nn.MLP([2, 1])

    def find(model):
        return infer.PrecisionGibbs(model).conjugate_sites(x, y=jnp.zeros(4))

    centered = models.regression(net, priors.GammaPrecision(centered=True))
    kernels = [f"net/Dense_{i}.{part}_precision" for i in (0, 1) for part in ("kernel", "bias")]
    assert find(centered) == (*kernels, "sigma")
    assert find(models.regression(net, priors.GammaPrecision())) == ("sigma",)  # not centered
    horseshoe = priors.Horseshoe(unit="input", centered=True)
    scales = [f"net/Dense_{i}.kernel_{part}" for i in (0, 1) for part in ("global", "local")]
    assert find(models.regression(net, horseshoe)) == (*scales, "sigma")


def no_model(power, prior=None):
    def model():
        v = numpyro.sample("v", prior or dist.Gamma(1.0, 1.0))
        numpyro.sample("w", dist.Normal(0.0, power(v)).expand([3]).to_event(1))

    return model


def observed(value):
    def model():
        v = numpyro.sample("v", dist.Gamma(1.0, 1.0))
        numpyro.sample("w", dist.Normal(0.0, v**-0.5).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=value(v))

    return model


def weighted(handler):
    def model():
        v = numpyro.sample("v", dist.Gamma(1.0, 1.0))
        with handler(v):
            numpyro.sample("w", dist.Normal(0.0, v**-0.5).expand([3]).to_event(1))

    return model


def moved_mean():
    v = numpyro.sample("v", dist.Gamma(1.0, 1.0))
    numpyro.sample("w", dist.Normal(v, 1.0))


def not_normal():
    v = numpyro.sample("v", dist.HalfCauchy(1.0))
    numpyro.sample("w", dist.StudentT(3.0, 0.0, v))


# Not powers: some only far away, in a window, by a constant factor, or inside a function of their own.
PIECES = [
    lambda v: jnp.where(v > 1.0, v**-0.5, 2.0 * v**-0.5),
    lambda v: jnp.where(jnp.abs(v - 3.0) < 1e-3, 2.0, 1.0) * v**-0.5,
    lambda v: jnp.clip(v, 1e-12, 1e12) ** -0.5,
    lambda v: jnp.maximum(v**-0.5, 1e-25),
    lambda v: (v + 1e-6) ** -0.5,
    lambda v: v**-0.5 * jnp.exp(1e-9 * v),
    lambda v: jnp.floor(v) * 0.0 + v**-0.5,
    jax.jit(lambda v: jax.nn.relu(v - 1e-20) ** -0.5),
    lambda v: jax.lax.cond(v > 5.0, lambda: 3.0 * v**-0.5, lambda: v**-0.5),
]
POWERS = [
    lambda v: jnp.where(jnp.arange(3) > 1, v**-0.5, 2.0),
    lambda v: jnp.exp(-0.5 * jnp.log(v)),
    lambda v: 3.0 / jnp.sqrt(jnp.abs(v)) * jnp.clip(2.0, 0.0, 1.0),
    jax.jit(lambda v: jax.lax.rsqrt(v)),
    lambda v: jnp.sqrt(1 / v) * jnp.max(jnp.arange(3.0)),
]


@pytest.mark.parametrize("power", POWERS)
def test_powers_are_found_however_written(power):
    assert infer.PrecisionGibbs(no_model(power)).conjugate_sites() == ("v",)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (no_model(lambda v: v**-0.5, dist.LogNormal(0.0, 1.0)), "its prior is LogNormal"),
        (no_model(lambda v: 1 + v), "not proportional to one power"),
        (no_model(lambda v: v, dist.Gamma(1.0, 1.0)), "a Gamma prior is not conjugate"),
        (moved_mean, "the mean of 'w' depends on it"),
        (not_normal, "'w' depends on it"),
        (observed(lambda v: 2.0 * v), "the observed value of 'y' depends on it"),
        (weighted(lambda v: handlers.scale(scale=v)), "the scale of the log density of 'w' depends on it"),
        (weighted(lambda v: handlers.mask(mask=v > 1.0)), "the mask of 'w' depends on it"),
        *((no_model(piece), "not proportional to one power") for piece in PIECES),
        (lambda: numpyro.sample("v", dist.Gamma(1.0, 1.0)), "no normal site depends on it"),
        (
            no_model(lambda v: v[0] * v[1] * jnp.ones(3), dist.HalfNormal(1.0).expand([2]).to_event(1)),
            "one power",
        ),
    ],
)
def test_reasons(model, reason):
    assert "v" not in infer.PrecisionGibbs(model).conjugate_sites()
    with pytest.raises(ValueError, match=r"infer\.PrecisionGibbs: argument `sites` got") as error:
        infer.PrecisionGibbs(model).init(random.key(0), 0, None, (), {CONDITIONED: {"w": jnp.zeros(3)}})
    assert reason in str(error.value)


# ------------------------------------------------------------------------------------------------------ composites

X = np.linspace(-1, 1, 5, dtype=np.float32)[:, None]


def small_network(x, y=None):
    """1-2-1 with Gamma precisions of kernels and noise."""
    u = numpyro.sample("u_precision", dist.Gamma(3.0, 3.0))
    v = numpyro.sample("v_precision", dist.Gamma(3.0, 3.0))
    tau = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    w_in = numpyro.sample("u", dist.Normal(0.0, u**-0.5).expand([1, 2]).to_event(2))
    w_out = numpyro.sample("v", dist.Normal(0.0, v**-0.5).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.tanh(x @ w_in) @ w_out, tau**-0.5), obs=y)


def composite(model, **options):
    sites = ["u_precision", "v_precision", "precision"]
    return Gibbs([(infer.PrecisionGibbs(model), sites), (HMC(model, **options), None)])


def persistent(model, **options):
    sites = ["u_precision", "v_precision", "precision"]
    return Gibbs([(infer.PrecisionGibbs(model), sites), (infer.GHMC(model, **options), None)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "num_warmup"),
    [
        (
            composite(small_network, step_size=0.25, num_steps=8, trajectory_length=None, adapt_step_size=False),
            0,
        ),
        # A momentum that persists between sweeps.
        (persistent(small_network, step_size=0.3, num_steps=4, momentum_decay=0.4, warm_start=0.0), 20),
    ],
    ids=["HMC", "GHMC"],
)
def test_simulation_based_calibration(kernel, num_warmup):
    """Ranks of the truth among 31 draws are uniform: chi-square over 16 bins, failure rate 1e-5 for each quantity."""
    replicates, num_draws, thin, burn = 512, 31, 12, 150

    def simulate(key):
        traced = handlers.trace(handlers.seed(small_network, key)).get_trace(X)
        return {name: site["value"] for name, site in traced.items()}

    truth = jax.vmap(simulate)(random.split(random.key(2), replicates))
    state = kernel.init(random.key(3), num_warmup, None, (X, truth["y"][0]), {})

    def chain(key, y):
        start = simulate(random.fold_in(key, 7))
        precisions, weights = state.block_states
        precisions = precisions._replace(z={n: start[n] for n in precisions.z}, rng_key=random.fold_in(key, 0))
        weights = weights._replace(z={n: start[n] for n in weights.z}, rng_key=random.fold_in(key, 1))
        held = {CONDITIONED: precisions.z}
        weights = kernel.blocks[1][0].refresh(weights, (X, y), held)
        begin = state._replace(z={**start}, block_states=(precisions, weights), rng_key=random.fold_in(key, 2))
        begin = begin._replace(z={n: start[n] for n in state.z})

        def step(_, at):
            return kernel.sample(at, (X, y), {})

        begin = jax.lax.fori_loop(0, burn, step, begin)
        return jax.lax.scan(lambda s, _: ((s := jax.lax.fori_loop(0, thin, step, s)), s.z), begin, None, num_draws)[1]

    draws = jax.jit(jax.vmap(chain))(random.split(random.key(4), replicates), truth["y"])
    quantities = {
        "precision": lambda z: z["precision"],
        "u_precision": lambda z: z["u_precision"],
        "v_precision": lambda z: z["v_precision"],
        "f(1)": lambda z: (jnp.tanh(z["u"][..., 0, :]) * z["v"]).sum(-1),
        "norm": lambda z: (z["u"] ** 2).sum((-1, -2)) * (z["v"] ** 2).sum(-1),
    }
    for name, quantity in quantities.items():
        ranks = (np.asarray(quantity(draws)) < np.asarray(quantity(truth))[:, None]).sum(1)
        counts = np.bincount(ranks // 2, minlength=16)
        p = stats.chisquare(counts).pvalue
        print(name, p)
        assert p > 1e-5, name


@pytest.mark.slow
def test_pickled_legacy_and_typed_keys_give_the_same_draws():
    kernel = composite(small_network, num_steps=None, trajectory_length=0.5)
    y = jnp.asarray(X[:, 0])

    def run(kernel, key, **options):
        mcmc = MCMC(kernel, num_warmup=3, num_samples=4, progress_bar=False, **options)
        mcmc.run(key, X, y)
        return mcmc.get_samples()

    base = run(kernel, random.key(5))
    for other in (run(pickle.loads(pickle.dumps(kernel)), random.key(5)), run(kernel, random.PRNGKey(5))):
        for name, values in base.items():
            np.testing.assert_array_equal(values, other[name])
    chains = run(kernel, random.key(5), num_chains=2, chain_method=jax.vmap)
    assert chains["precision"].shape == (8,)
    assert len(np.unique(chains["precision"])) == 8
