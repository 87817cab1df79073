"""Priors: the contract of every family, and draws held to the moments, tails and distributions theory gives."""

import copy
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from numpyro import handlers
from numpyro.infer.util import log_density
from registry import KNOWN_FAILURES, LAYER_VARIANTS, LAYERS, PRIOR_VARIANTS, PRIORS, rows
from sklearn.gaussian_process.kernels import RBF, Matern

from numpyro_bnn import nn, priors
from numpyro_bnn.priors import filters
from numpyro_bnn.priors.base import as_prior

pytestmark = pytest.mark.core

DENSE, CONV = ("Dense_0.kernel", (4, 3)), ("Conv2d_0.kernel", (2, 3, 2, 3))
FLAX_PARAMETERS = [DENSE, CONV, ("Dense_0.bias", (3,)), ("BatchNorm_0.scale", (3,))]
EQUINOX_PARAMETERS = [("layers[0].weight", (3, 4)), ("layers[0].bias", (3,)), ("norm.weight", (3,))]


def model_of(prior, *parameters):
    """The sites NumPyro's module functions make, and nothing else."""

    def model():
        for name, shape in parameters:
            fn = prior(name, shape)
            numpyro.sample(name, fn.expand(shape[: len(shape) - fn.event_dim]).to_event())

    return model


def trace_of(model, seed=0):
    return handlers.trace(handlers.seed(model, seed)).get_trace()


def sites_of(model):
    """Type, shape, and shape of the log density of every site, without running anything."""
    found = {}

    def run():
        for name, site in trace_of(model).items():
            density = site["fn"].log_prob(site["value"]).shape if site["type"] == "sample" else None
            found[name] = (site["type"], jnp.shape(site["value"]), density)

    jax.eval_shape(run)
    return found


def values_of(model, key):
    """A draw of every sample site."""
    return {name: s["value"] for name, s in trace_of(model, key).items() if s["type"] == "sample"}


def draws_of(prior, parameter, number, seed=0, given=None):
    """Independent prior draws of one parameter and its hyper-sites."""
    model = model_of(prior, parameter)
    if given is not None:
        model = handlers.substitute(model, given)

    def one(key):
        trace = handlers.trace(handlers.seed(priors.noncenter(model), key)).get_trace()
        return {name: site["value"] for name, site in trace.items()}

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(seed), number)))


# -- the contract of every prior ------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows(PRIORS, "test_prior_serves_every_parameter", PRIOR_VARIANTS))
def test_prior_serves_every_parameter(row):
    parameters = dict(FLAX_PARAMETERS + EQUINOX_PARAMETERS)
    sites = sites_of(model_of(row.prior, *parameters.items()))
    for name, shape in parameters.items():
        assert sites[name] == ("sample", shape, ())
    assert all(site.startswith(tuple(parameters)) for site in sites)


@pytest.mark.parametrize("row", rows(PRIORS, "test_prior_takes_equinox_convolutions", PRIOR_VARIANTS))
def test_prior_takes_equinox_convolutions(row):
    name, shape = "layers[0].weight", (3, 2, 2, 3)
    assert sites_of(priors.noncenter(model_of(row.prior, (name, shape))))[name][1] == shape


@pytest.mark.parametrize("row", rows(PRIORS, "test_hyper_sites", PRIOR_VARIANTS))
def test_hyper_sites(row):
    name = DENSE[0]
    sites = sites_of(model_of(row.prior, DENSE))
    hyper = {key.removeprefix(f"{name}_"): shape for key, (_, shape, _) in sites.items() if key != name}
    assert hyper == dict(row.hyper_sites)
    noncentered = sites_of(priors.noncenter(model_of(row.prior, DENSE)))
    has_base = bool(row.hyper_sites) and not getattr(row.prior, "centered", False)
    assert noncentered[name][0] == ("deterministic" if has_base else "sample")
    assert set(noncentered) - set(sites) == ({f"{name}_base"} if has_base else set())


@pytest.mark.parametrize("row", rows(PRIORS, "test_centered_and_noncentered_forms_agree", PRIOR_VARIANTS))
def test_centered_and_noncentered_forms_agree(row, x64):
    """log p(hyper, z) = log p(hyper, w(z)) + log |dw/dz|, with the Jacobian from autodiff."""
    parameter = CONV if isinstance(row.prior, priors.GPFilters) else DENSE
    name, shape = parameter
    centered = model_of(row.prior, parameter)
    noncentered = priors.noncenter(centered)

    @jax.jit
    def both(key):
        values = values_of(noncentered, key)
        base = f"{name}_base" if f"{name}_base" in values else name
        z = values.pop(base)

        def weight(z):
            trace = handlers.trace(handlers.substitute(noncentered, {**values, base: z})).get_trace()
            return trace[name]["value"]

        jacobian = jax.jacfwd(weight)(z).reshape(np.prod(shape), np.prod(shape))
        return (
            log_density(noncentered, (), {}, {**values, base: z})[0],
            log_density(centered, (), {}, {**values, name: weight(z)})[0] + jnp.linalg.slogdet(jacobian)[1],
        )

    left, right = both(jax.random.key(0))
    np.testing.assert_allclose(left, right, rtol=1e-10)


@pytest.mark.parametrize("row", rows(PRIORS, "test_density_is_differentiable_and_keeps_dtype", PRIOR_VARIANTS))
def test_density_is_differentiable_and_keeps_dtype(row):
    model = priors.noncenter(model_of(row.prior, *FLAX_PARAMETERS))

    def run(key):
        values = values_of(model, key)
        return values, jax.value_and_grad(lambda v: log_density(model, (), {}, v)[0])(values)

    low = jax.jit(run)(jax.random.key(0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(low))
    assert {leaf.dtype for leaf in jax.tree.leaves(low)} == {np.dtype("float32")}
    with jax.enable_x64(True):
        high = jax.eval_shape(run, jax.random.key(0))
        assert {leaf.dtype for leaf in jax.tree.leaves(high)} == {np.dtype("float64")}


@pytest.mark.parametrize("row", rows(PRIORS, "test_specification_compares_equal", PRIOR_VARIANTS))
def test_specification_compares_equal(row):
    assert copy.copy(row.prior) == row.prior
    again = pickle.loads(pickle.dumps(row.prior))
    assert sites_of(model_of(again, DENSE, CONV)) == sites_of(model_of(row.prior, DENSE, CONV))


def test_known_failures_name_tests_and_rows():
    """A row that stopped failing is caught by ``xfail(strict=True)``; a misspelt one here."""
    written = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    for test, row in KNOWN_FAILURES:
        assert f'"{test}"' in written
        assert row in {**LAYERS, **PRIORS}
    assert set(PRIORS) > PRIOR_VARIANTS
    assert set(LAYERS) > LAYER_VARIANTS


# -- distributions of draws -----------------------------------------------------------------------------
# Kolmogorov-Smirnov tests fail by chance with probability 1e-6 each; moments are held to five standard errors
# (probability 6e-7 each). Both bounds are two-sided and the seeds are fixed.

NUMBER = 20_000
RATE = 1e-6


def scale_mixture_cdf(scale_ppf, nodes=4000):
    """Cdf of s z, z ~ N(0, 1), s with quantile function ``scale_ppf``: the mean of Phi(w / s) over s."""
    scales = scale_ppf((np.arange(nodes) + 0.5) / nodes)

    def cdf(w):
        grid = np.sinh(np.linspace(-14, 14, 3001))  # from 1e-2 near 0 to 6e5 in the tails
        return np.interp(w, grid, scipy.special.ndtr(grid[:, None] / scales).mean(axis=1))

    return cdf


def mixture_cdf(w):
    return 0.3 * scipy.stats.norm.cdf(w) + 0.7 * scipy.stats.norm.cdf(w, scale=0.1)


# Marginal distribution of one weight with fan-in 4 (or of a bias): what the docstrings say.
MARGINALS = {
    "Normal": (priors.Normal(2.0), DENSE, scipy.stats.norm(scale=1.0).cdf),
    "Normal unscaled": (priors.Normal(2.0, fan_in_scaling=False), DENSE, scipy.stats.norm(scale=2).cdf),
    "bias": (priors.Normal(bias_scale=0.3), ("Dense_0.bias", (3,)), scipy.stats.norm(scale=0.3).cdf),
    "gain": (priors.Normal(gain_scale=0.3), ("LayerNorm_0.scale", (3,)), scipy.stats.norm(1, 0.3).cdf),
    "Laplace": (priors.Laplace(2.0), DENSE, scipy.stats.laplace(scale=0.5**0.5).cdf),
    "StudentT": (priors.StudentT(3.0, 2.0), DENSE, scipy.stats.t(3).cdf),
    "ScaleMixture": (priors.ScaleMixture(0.3, 1.0, 0.1), DENSE, mixture_cdf),
    "ScaleMixture bias": (priors.ScaleMixture(0.3, 1.0, 0.1), ("Dense_0.bias", (3,)), mixture_cdf),
    "Hierarchical": (priors.Hierarchical(), DENSE, scale_mixture_cdf(scipy.stats.halfnorm(scale=0.5).ppf)),
    "Hierarchical Gamma": (
        priors.Hierarchical(dist.Gamma(3.0, 2.0), centered=True),
        DENSE,
        scale_mixture_cdf(scipy.stats.gamma(3, scale=0.25).ppf),
    ),
    "ARD": (priors.ARD(), DENSE, scale_mixture_cdf(scipy.stats.halfcauchy(scale=0.5).ppf)),
    "GammaPrecision": (priors.GammaPrecision(0.1, 3.0), DENSE, scipy.stats.t(3, scale=0.05).cdf),
    "GammaPrecision vague": (
        priors.GammaPrecision(0.05, 0.5, fan_in_scaling=False, centered=True),
        DENSE,
        scipy.stats.t(0.5, scale=0.05).cdf,
    ),
    "GammaPrecision integrated": (
        priors.GammaPrecision(0.1, 3.0, marginal=True),
        DENSE,
        scipy.stats.t(3, scale=0.05).cdf,
    ),
    "GammaPrecision bias": (priors.GammaPrecision(0.1, 3.0), ("Dense_0.bias", (3,)), scipy.stats.t(3, scale=0.1).cdf),
}


@pytest.mark.parametrize(("prior", "parameter", "cdf"), MARGINALS.values(), ids=MARGINALS)
def test_marginal_of_a_weight(prior, parameter, cdf):
    name = parameter[0]
    draws = draws_of(prior, parameter, NUMBER)[name].reshape(NUMBER, -1)
    for column in (0, -1):  # weights of one draw share hyper-sites: one weight of each
        assert scipy.stats.kstest(draws[:, column], cdf).pvalue > RATE


def within_five_standard_errors(samples, expected):
    error = samples.std(ddof=1) / len(samples) ** 0.5
    assert abs(samples.mean() - expected) < 5 * error, (samples.mean(), expected, error)


def test_moments_of_independent_priors():
    fan = 4
    for prior, variance, fourth in [
        (priors.Normal(2.0), 4 / fan, 3 * (4 / fan) ** 2),
        (priors.Laplace(2.0), 4 / fan, 6 * (4 / fan) ** 2),  # excess kurtosis 3
        (priors.StudentT(10.0, 2.0), 4 / fan * 10 / 8, (3 + 6 / 6) * (4 / fan * 10 / 8) ** 2),
        (priors.ScaleMixture(0.3, 1.0, 0.1), 0.3 + 0.007, 3 * (0.3 + 0.7e-4)),
    ]:
        w = draws_of(prior, DENSE, NUMBER)["Dense_0.kernel"][:, 0, 0].astype(float)
        within_five_standard_errors(w, 0.0)
        within_five_standard_errors(w**2, variance)
        within_five_standard_errors(w**4, fourth)


@pytest.mark.parametrize("family", [priors.Normal, priors.Hierarchical, priors.GPFilters])
def test_gains_are_around_one_and_biases_around_zero(family):
    prior = family(gain_scale=0.3, bias_scale=0.7)
    gain, bias = prior("LayerNorm_0.scale", (3,)), prior("LayerNorm_0.bias", (3,))
    assert (gain.mean, bias.mean) == (1.0, 0.0)
    np.testing.assert_allclose([gain.variance, bias.variance], [0.3**2, 0.7**2], rtol=1e-6)


def test_hierarchical_weights_of_a_layer_share_their_scale():
    """s ~ HalfNormal(1): Var w = 1 / fan_in, and E[w1^2 w2^2] = E s^4 / fan_in^2 = 3 / fan_in^2."""
    w = draws_of(priors.Hierarchical(), DENSE, NUMBER)["Dense_0.kernel"].astype(float)
    within_five_standard_errors(w[:, 0, 0] ** 2, 1 / 4)
    within_five_standard_errors(w[:, 0, 0] ** 2 * w[:, 3, 2] ** 2, 3 / 16)


@pytest.mark.parametrize(
    ("parameter", "same", "other"),
    [
        (DENSE, ((1, 0), (1, 2)), ((1, 0), (2, 0))),
        (CONV, ((0, 0, 1, 0), (1, 2, 1, 2)), ((0, 0, 0, 0), (0, 0, 1, 0))),
        (("layers[0].weight", (3, 4)), ((0, 1), (2, 1)), ((0, 1), (0, 2))),
        (("layers[0].weight", (3, 2, 2, 3)), ((0, 1, 0, 0), (2, 1, 1, 2)), ((0, 0, 0, 0), (0, 1, 0, 0))),
    ],
    ids=["dense", "convolution", "Equinox linear", "Equinox convolution"],
)
@pytest.mark.parametrize("centered", [False, True], ids=["non-centered", "centered"])
def test_ard_shares_a_scale_per_input(parameter, same, other, centered):
    """E[w_a^2 w_b^2] fan_in^2 is E s^4 for one input and (E s^2)^2 for two; s ~ Uniform(0.5, 1.5)."""
    name, shape = parameter
    fan = nn.base.fan_in(name, shape)
    w = draws_of(priors.ARD(dist.Uniform(0.5, 1.5), centered=centered), parameter, NUMBER)[name].astype(float)
    second, fourth = (1.5**3 - 0.5**3) / 3, (1.5**5 - 0.5**5) / 5

    def product(pair):
        a, b = ((slice(None), *index) for index in pair)
        return w[a] ** 2 * w[b] ** 2 * fan**2

    within_five_standard_errors(product(same), fourth)
    within_five_standard_errors(product(other), second**2)


def test_gamma_precision_has_the_mean_of_neal():
    """tau has mean 1 / width^2 and variance 2 / (alpha width^4); the kernel and the bias have one each."""
    prior = priors.GammaPrecision(0.2, 3.0)
    for parameter, width in [(DENSE, 0.1), (("Dense_0.bias", (3,)), 0.2)]:
        tau = draws_of(prior, parameter, NUMBER)[f"{parameter[0]}_precision"].astype(float)
        within_five_standard_errors(tau, width**-2)
        within_five_standard_errors((tau * width**2 - 1) ** 2, 2 / 3)


def test_group_student_is_the_integral_over_its_precision():
    """Closed density against scipy, the length of a draw against F, and what `given_rest` leaves invariant."""
    fn = priors.GroupStudentT(3.0, 0.5, (2, 3))
    w = np.random.default_rng(0).normal(size=(4, 2, 3))
    expected = scipy.stats.multivariate_t(np.zeros(6), 0.25 * np.eye(6), df=3.0).logpdf(w.reshape(4, 6))
    np.testing.assert_allclose(fn.log_prob(jnp.asarray(w)), expected, rtol=1e-5)
    key, other = jax.random.split(jax.random.key(0))
    draws = fn.sample(key, (NUMBER,))
    lengths = np.asarray((draws**2).sum((1, 2)), float) / (6 * 0.25)
    assert scipy.stats.kstest(lengths, scipy.stats.f(6, 3).cdf).pvalue > RATE

    def redraw(key, value):
        return fn.given_rest(key, value, jnp.array([False, True, False]))

    redrawn = jax.vmap(redraw)(jax.random.split(other, NUMBER), draws)
    np.testing.assert_array_equal(redrawn[:, :, [0, 2]], draws[:, :, [0, 2]])
    assert not np.any(redrawn[:, :, 1] == draws[:, :, 1])
    lengths = np.asarray((redrawn**2).sum((1, 2)), float) / (6 * 0.25)
    assert scipy.stats.kstest(lengths, scipy.stats.f(6, 3).cdf).pvalue > RATE
    share = np.asarray((redrawn[:, :, 1] ** 2).sum(1) / (redrawn**2).sum((1, 2)), float)
    assert scipy.stats.kstest(share, scipy.stats.beta(1, 2).cdf).pvalue > RATE  # directions are uniform


# -- horseshoe ------------------------------------------------------------------------------------------

ONE = ("Dense_0.kernel", (1, 1))


def horseshoe_density(w):
    """Marginal of a weight given tau = 1: (2 pi^3)^(-1/2) exp(w^2/2) E1(w^2/2)."""
    return np.exp(w**2 / 2) * scipy.special.exp1(w**2 / 2) / np.sqrt(2 * np.pi**3)


def horseshoe_mass_inside(x):
    """P(|w| < x) given tau = 1: the mean over lambda, on tan of a uniform angle, of 2 Phi(x / lambda) - 1."""

    def integrand(angle):
        return scipy.special.erf(x / np.tan(angle) / 2**0.5) / (np.pi / 2)

    points = [np.arctan(x / 4), np.arctan(x), np.arctan(4 * x)]
    return scipy.integrate.quad(integrand, 0, np.pi / 2, points=points, limit=200, epsabs=1e-13)[0]


@pytest.mark.parametrize("centered", [False, True], ids=["non-centered", "centered"])
def test_horseshoe_density_is_the_closed_form_with_a_log_spike(centered, x64):
    """Our joint density, integrated over lambda, is the closed form; near 0 it grows like log(1/|w|)."""
    model = model_of(priors.Horseshoe(centered=centered), ONE)
    # Trapezoid rule in log lambda: the integrand is analytic and decays, so the error is far below 1e-8.
    log_lambda = jnp.linspace(-30.0, 30.0, 4001)
    name = ONE[0]

    @jax.jit
    @jax.vmap
    def marginal(w):
        def joint(u):
            sites = {f"{name}_global": 1.0, f"{name}_local": jnp.exp(u).reshape(1, 1), name: w.reshape(1, 1)}
            return log_density(model, (), {}, sites)[0] + u

        return jnp.trapezoid(jnp.exp(jax.vmap(joint)(log_lambda)), log_lambda)

    w = np.array([1e-8, 1e-6, 1e-4, 1e-2, 0.1, 1.0, 5.0, 20.0])
    # The prior of tau itself is a constant at tau = 1: the half-Cauchy density 1 / pi.
    p = np.asarray(marginal(w)) * np.pi
    np.testing.assert_allclose(p, horseshoe_density(w), rtol=1e-8)
    # Spike: p / log(1/|w|) -> 2 / sqrt(2 pi^3), next order (log 2 - Euler) / (2 log(1/|w|)).
    ratio = p[:3] / np.log(1 / w[:3]) / (2 / np.sqrt(2 * np.pi**3))
    np.testing.assert_allclose(ratio, 1 + (np.log(2) - np.euler_gamma) / (2 * np.log(1 / w[:3])), rtol=1e-7)
    # Tail: p w^2 -> sqrt(2 / pi^3), next order 1 - 2 / w^2.
    np.testing.assert_allclose(p[-1] * 20.0**2 / np.sqrt(2 / np.pi**3), 1 - 2 / 20.0**2, atol=10 / 20.0**4)


def test_horseshoe_draws_have_spike_and_tail():
    """Counts near 0 and far out are binomial with the exact probabilities; P(|w| > x) x -> (2/pi)^(3/2)."""
    number, name = 400_000, ONE[0]
    w = np.abs(draws_of(priors.Horseshoe(), ONE, number, given={f"{name}_global": 1.0})[name].ravel())
    for x in (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1000.0):
        inside = horseshoe_mass_inside(x)
        error = (inside * (1 - inside) / number) ** 0.5
        assert abs((w < x).mean() - inside) < 5 * error, x
    assert (w < 1e-4).mean() > 5 * scipy.special.erf(1e-4 / 2**0.5)  # far above what N(0, 1) puts there
    for x in (100.0, 1000.0):
        np.testing.assert_allclose((1 - horseshoe_mass_inside(x)) * x, (2 / np.pi) ** 1.5, rtol=2 / x)
    # Hill estimate of the tail exponent of the survival function: 1, with standard error 1 / sqrt(k).
    largest = np.sort(w)[-2001:]
    hill = 1 / np.log(largest[1:] / largest[0]).mean()
    assert abs(hill - 1) < 5 / 2000**0.5


def test_horseshoe_scales_with_fan_in_and_global_scale():
    name = DENSE[0]
    given = {f"{name}_global": 0.5}
    w = draws_of(priors.Horseshoe(), DENSE, NUMBER, given=given)[name][:, 0, 0]
    assert scipy.stats.kstest(w, scale_mixture_cdf(scipy.stats.halfcauchy(scale=0.25).ppf)).pvalue > RATE
    tau = draws_of(priors.Horseshoe(0.3), DENSE, NUMBER)[f"{name}_global"]
    assert scipy.stats.kstest(tau, scipy.stats.halfcauchy(scale=0.3).cdf).pvalue > RATE


@pytest.mark.parametrize(
    ("unit", "parameter", "shape"),
    [
        ("input", DENSE, (4, 1)),
        ("output", DENSE, (1, 3)),
        ("input", ("layers[0].weight", (3, 4)), (1, 4)),
        ("output", ("layers[0].weight", (3, 4)), (3, 1)),
        ("output", CONV, (1, 1, 1, 3)),
    ],
)
def test_horseshoe_units_share_a_local_scale(unit, parameter, shape):
    name, prior = parameter[0], priors.Horseshoe(unit=unit, centered=True)
    local = jnp.arange(1.0, max(shape) + 1)
    with handlers.substitute(data={f"{name}_global": 0.5, f"{name}_local": local}):
        fn = prior(*parameter)
    np.testing.assert_allclose(fn.scale * nn.base.fan_in(*parameter) ** 0.5, 0.5 * local.reshape(shape), rtol=1e-6)


def regularized(tau, local, slab, z=1.0):
    name = ONE[0]
    values = {f"{name}_global": tau, f"{name}_local": jnp.full((1, 1), local), f"{name}_slab": slab}
    values[f"{name}_base"] = jnp.full((1, 1), z)
    model = priors.noncenter(model_of(priors.RegularizedHorseshoe(), ONE))
    return handlers.trace(handlers.substitute(model, values)).get_trace()[name]["value"][0, 0]


def test_regularized_horseshoe_limits():
    """sd = tau lambda where that is small beside c, and c where it is large; finite gradients everywhere."""
    sd = jax.jit(regularized)
    for tau, local, slab in [(0.3, 2.0, 4.0), (1.0, 1.0, 1.0), (5.0, 3.0, 0.1)]:
        c, plain = slab**0.5, tau * local
        np.testing.assert_allclose(sd(tau, local, slab), c * plain / np.hypot(c, plain), rtol=1e-6)
    np.testing.assert_allclose(sd(1e-6, 10.0, 4.0), 1e-5, rtol=1e-6)
    np.testing.assert_allclose(sd(1e6, 1e3, 4.0), 2.0, rtol=1e-6)
    gradient = jax.jit(jax.grad(regularized, (0, 1, 2)))
    for tau, local in [(1e-18, 1e-18), (1e18, 1e18), (1e-30, 1.0), (1e30, 1.0), (2.0, 1.0)]:
        assert all(np.isfinite(g) for g in gradient(tau, local, 4.0))


def test_regularized_horseshoe_far_out_is_the_slab():
    """With tau lambda -> infinity a weight is Student t: ``slab_df`` degrees, scale slab_scale / sqrt(fan_in)."""
    name = DENSE[0]
    w = draws_of(priors.RegularizedHorseshoe(slab_scale=3.0), DENSE, NUMBER, given={f"{name}_global": 1e12})
    assert scipy.stats.kstest(w[name][:, 0, 0], scipy.stats.t(4, scale=1.5).cdf).pvalue > RATE
    w = draws_of(priors.RegularizedHorseshoe(slab_scale=1e9), DENSE, NUMBER, given={f"{name}_global": 1.0})
    cdf = scale_mixture_cdf(scipy.stats.halfcauchy(scale=0.5).ppf)
    assert scipy.stats.kstest(w[name][:, 0, 0], cdf).pvalue > RATE


# -- filters --------------------------------------------------------------------------------------------

SKLEARN = {
    "rbf": RBF(1.7),
    "matern12": Matern(1.7, nu=0.5),
    "matern32": Matern(1.7, nu=1.5),
    "matern52": Matern(1.7, nu=2.5),
}


def grid_of(window):
    return np.array([(i, j) for i in range(window[0]) for j in range(window[1])], float)


@pytest.mark.parametrize("covariance", filters.COVARIANCES)
def test_filter_covariance_is_that_of_scikit_learn(covariance, x64):
    ours = filters.filter_covariance((3, 4), covariance, 1.7)
    np.testing.assert_allclose(ours, SKLEARN[covariance](grid_of((3, 4))), rtol=1e-12)


@pytest.mark.parametrize("centered", [False, True], ids=["non-centered", "centered"])
@pytest.mark.parametrize("covariance", ["rbf", "matern32"])
def test_filters_have_that_covariance_over_channels(covariance, centered):
    """Each entry of the empirical covariance within five standard errors, sqrt((K_ii K_jj + K_ij^2) / n)."""
    name, shape = "Conv2d_0.kernel", (3, 3, 2, 50)
    prior = priors.GPFilters(2.0, 1.7, covariance, centered=centered)
    draws = draws_of(prior, (name, shape), 200)[name]
    samples = draws.astype(float).transpose(1, 2, 0, 3, 4).reshape(9, -1)
    expected = 4.0 / 18 * SKLEARN[covariance](grid_of((3, 3)))
    diagonal = np.diag(expected)
    error = np.sqrt((np.outer(diagonal, diagonal) + expected**2) / samples.shape[1])
    assert (np.abs(samples @ samples.T / samples.shape[1] - expected) < 5 * error).all()
    # Channels do not correlate: 0 within five standard errors.
    a, b = draws[:, 1, 1, 0, 0].astype(float), draws[:, 1, 1, 1, 0].astype(float)
    within_five_standard_errors(a * b, 0.0)


def test_filters_with_a_large_jitter_keep_their_variance():
    """N(0, (a^2 / fan_in) (K + j I) / (1 + j)) for each of six pairs of channels, with a large jitter j."""
    prior = priors.GPFilters(2.0, 1.5, jitter=0.5, centered=True)("Conv2d_0.kernel", (3, 2, 2, 3))
    w = np.random.default_rng(0).normal(size=(3, 2, 2, 3))
    correlation = np.asarray(filters.filter_covariance((3, 2), "rbf", 1.5)) + 0.5 * np.eye(6)
    exact = scipy.stats.multivariate_normal(np.zeros(6), 4 / 12 * correlation / 1.5).logpdf(w.reshape(6, 6).T).sum()
    np.testing.assert_allclose(prior.log_prob(jnp.asarray(w, jnp.float32)), exact, rtol=1e-4)


def test_filters_with_learned_amplitude_and_length():
    """Given its hyper-sites the density is that of independent multivariate normals, one per channel pair."""
    name, shape = CONV
    prior = priors.GPFilters(dist.HalfNormal(1.0), dist.LogNormal(0.0, 0.3), "matern52", jitter=1e-9)
    with jax.enable_x64(True):
        trace = trace_of(model_of(prior, CONV))
        assert list(trace) == [f"{name}_amplitude", f"{name}_length_scale", name]
        a, length = (float(trace[f"{name}_{site}"]["value"]) for site in ("amplitude", "length_scale"))
        covariance = a**2 / 12 * Matern(length, nu=2.5)(grid_of(shape[:2]))
        filters = np.asarray(trace[name]["value"]).reshape(6, 6).T
        expected = scipy.stats.multivariate_normal(cov=covariance).logpdf(filters).sum()
        density = trace[name]["fn"].log_prob(trace[name]["value"])
        np.testing.assert_allclose(density, expected, rtol=1e-6)  # the jitter of 1e-9
    w = draws_of(prior, CONV, NUMBER)[name].astype(float)
    within_five_standard_errors(w[:, 0, 0, 0, 0] ** 2, 1 / 12)  # E a^2 = 1


@pytest.mark.parametrize(("window", "length_scale"), [(5, 0.1), (5, 1e4), (7, 30.0), (11, 1e3)])
def test_filters_stay_finite_where_the_matrix_is_singular(window, length_scale):
    model = model_of(priors.GPFilters(1.0, length_scale), ("c.kernel", (window, window, 1, 2)))

    @jax.jit
    def run(key):
        site = trace_of(model, key)["c.kernel"]
        return site["value"], site["fn"].log_prob(site["value"])

    assert all(bool(np.isfinite(value).all()) for value in run(jax.random.key(0)))


def test_filters_leave_the_rest_to_the_other_prior():
    own = priors.GPFilters(bias_scale=0.1, gain_scale=0.2, fan_in_scaling=False)
    assert own("Dense_0.kernel", (4, 3)).scale == 1.0
    assert own("Dense_0.bias", (3,)).scale == 0.1
    assert own("BatchNorm_0.scale", (3,)).scale == 0.2
    given = priors.GPFilters(other=priors.Normal(3.0, gain_scale=0.7))
    assert given("Dense_0.kernel", (4, 3)).scale == 1.5
    assert given("BatchNorm_0.scale", (3,)).scale == 0.7


# -- choice by site -------------------------------------------------------------------------------------


def test_first_matching_pattern_wins():
    prior = priors.BySite(
        {"Dense_0.*": priors.Laplace(), "*.kernel": dist.Cauchy(0.0, 2.0), "*": priors.Normal(bias_scale=0.5)}
    )
    assert isinstance(prior("Dense_0.kernel", (4, 3)), dist.Laplace)
    assert isinstance(prior("Dense_1.kernel", (4, 3)), dist.Cauchy)
    assert prior("Dense_1.bias", (3,)).scale == 0.5


def test_positional_arguments_are_the_familys_own():
    assert priors.ScaleMixture(0.25, 1.0, 0.1) == priors.ScaleMixture(weight=0.25, wide_scale=1.0, narrow_scale=0.1)
    assert priors.Normal(2.0).scale == 2.0


# -- errors that teach ----------------------------------------------------------------------------------

MISTAKES = {
    "scale": (
        lambda: priors.Normal(-1.0),
        ValueError,
        "priors.Normal: argument `scale` got -1.0. Pass a finite number above 0.",
    ),
    "scale nan": (lambda: priors.Laplace(float("nan")), ValueError, "priors.Laplace: argument `scale` got nan"),
    "scale inf": (lambda: priors.Normal(float("inf")), ValueError, "`scale` got inf"),
    "scale text": (lambda: priors.Normal("1"), TypeError, "`scale` got '1'"),
    "bias_scale": (lambda: priors.ARD(bias_scale=0), ValueError, "priors.ARD: argument `bias_scale` got 0"),
    "gain_scale": (lambda: priors.Normal(gain_scale=-1), ValueError, "`gain_scale`"),
    "df": (lambda: priors.StudentT(0.0), ValueError, "priors.StudentT: argument `df`"),
    "weight": (lambda: priors.ScaleMixture(1.0), ValueError, "Pass a finite number above 0 and below 1"),
    "weight nan": (lambda: priors.ScaleMixture(float("nan")), ValueError, "`weight`"),
    "scale_prior": (
        lambda: priors.Hierarchical(dist.Normal()),
        ValueError,
        "Pass a scalar distribution on (0, inf), e.g. `dist.HalfNormal(1.0)`",
    ),
    "scale_prior interval": (lambda: priors.ARD(dist.Uniform(-1.0, 1.0)), ValueError, "`scale_prior`"),
    "scale_prior batch": (lambda: priors.ARD(dist.HalfNormal(jnp.ones(3))), ValueError, "scalar distribution"),
    "centered and integrated": (
        lambda: priors.GammaPrecision(centered=True, marginal=True),
        ValueError,
        "pass only one of them",
    ),
    "alpha": (lambda: priors.GammaPrecision(1.0, -2.0), ValueError, "priors.GammaPrecision: argument `alpha`"),
    "unit": (lambda: priors.Horseshoe(unit="inputs"), ValueError, "Did you mean 'input'"),
    "slab": (lambda: priors.RegularizedHorseshoe(slab_df=0), ValueError, "`slab_df` got 0"),
    "covariance": (lambda: priors.GPFilters(covariance="matern"), ValueError, "Did you mean 'matern"),
    "covariance name": (lambda: filters.filter_covariance((2, 2), "rbff", 1.0), ValueError, "Did you mean 'rbf'"),
    "length_scale": (lambda: priors.GPFilters(length_scale=0.0), ValueError, "`length_scale` got 0.0"),
    "other": (lambda: priors.GPFilters(other="normal"), TypeError, "Pass a prior such as `priors.Normal()`"),
    "layout": (
        lambda: priors.GPFilters()("layers[0].weight", (3, 2, 2, 2)),
        ValueError,
        "It takes Flax kernels (h, w, in, out), not Equinox ones",
    ),
    "patterns": (lambda: priors.BySite(["*"]), TypeError, "priors.BySite: argument `patterns`"),
    "pattern class": (lambda: priors.BySite({"*": priors.Normal}), TypeError, "Pass an object such as"),
    "default": (lambda: priors.BySite({}, default=1.0), TypeError, "priors.BySite: argument `default` got 1.0"),
    "no pattern": (
        lambda: priors.BySite({"Dense_0.*": priors.Normal()})("Dense_1.bias", (3,)),
        ValueError,
        "no pattern for parameter 'Dense_1.bias' (patterns: Dense_0.*)",
    ),
    "name": (lambda: as_prior("hierarchical"), TypeError, "Did you mean 'Hierarchical'"),
    "class": (lambda: as_prior(priors.Normal), TypeError, "Pass an object, `priors.Normal()`"),
    "number": (lambda: as_prior(1.0), TypeError, "random_network: argument `prior` got '1.0'"),
}


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


def test_scales_on_part_of_the_half_line_are_welcome():
    for good in (
        dist.Uniform(0.1, 2.0),
        dist.LogNormal(),
        dist.InverseGamma(2.0),
        dist.TruncatedNormal(1.0, 1.0, low=0.0),
        dist.HalfCauchy(),
        dist.Pareto(1.0, 2.0),
    ):
        # Also where the prior is made inside a traced model.
        sites = sites_of(lambda good=good: model_of(priors.Hierarchical(good), DENSE)())
        assert sites[DENSE[0]][1] == DENSE[1]
    assert priors.Normal(np.float32(2.0)) == priors.Normal(2.0)
