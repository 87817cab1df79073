"""Moves along symmetries, and sampling on the quotient: exactness, mixing, and every way to run them."""

import pickle
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import HMC, MCMC, NUTS, SVI, Gibbs, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.gibbs import CustomGibbs
from numpyro.infer.util import constrain_fn
from scipy import stats

import numpyro_bnn as bnn
from numpyro_bnn import infer, nn, priors, symmetry
from numpyro_bnn.program.reading import Reading
from numpyro_bnn.symmetry.model_info import PriorProgram, model_info
from numpyro_bnn.symmetry.moves import move
from numpyro_bnn.symmetry.moves import plan as plan_of

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)), jnp.float32)
Y = jnp.sin(X[:, 0])
NORMED = nn.MLP([3, 1], "tanh", norm=nn.BatchNorm())
RELU = nn.MLP([3, 1], "relu")
SCALE = dist.LogNormal(0.0, 0.5)


def plan(model, symmetries, args=(), kwargs=None, exact=True):
    return plan_of(model_info(Reading(model, args, kwargs)), symmetries, exact)


def network_model(net, prior):
    def model(x, y=None):
        f = bnn.random_network("net", net, (2,), prior)(x)[..., 0]
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    return model


MODELS = {
    "BN, centered": network_model(NORMED, priors.Hierarchical(SCALE, centered=True)),
    "BN, non-centered": network_model(NORMED, priors.Hierarchical(SCALE)),
    "LN, gamma precision, centered": network_model(
        nn.MLP([3, 1], "tanh", norm=nn.LayerNorm(False, False)),
        priors.GammaPrecision(3.0, 2.0, centered=True),
    ),
    "ReLU, centered": network_model(RELU, priors.Hierarchical(SCALE, centered=True)),
    "ReLU, non-centered": network_model(RELU, priors.Hierarchical(SCALE)),
    "ReLU, Laplace": network_model(RELU, priors.Laplace()),
    "LN, ReLU, horseshoe": network_model(nn.MLP([3, 1], "relu", norm=nn.LayerNorm()), priors.Horseshoe(unit="input")),
}


# -- exactness: Geweke's joint-distribution test ------------------------------------------------------
#
# Alternate a transition of the kernel on the data with new data given the parameters. If the kernel leaves the
# posterior invariant the parameters keep their prior distribution. All chains start at prior draws.

CHAINS, SWEEPS = 600, 25


def summaries(sites):
    """Functions of the parameters whose prior distribution is tested."""
    first, last = sites["net/Dense_0.kernel"], sites["net/Dense_1.kernel"]
    found = {
        "log |w_in|": jnp.log(jnp.linalg.norm(first, axis=0)),
        "log |w_out|": jnp.log(jnp.linalg.norm(last, axis=1)),
        "w_in of unit 0": first[0, 0],
        "bias of unit 1": sites["net/Dense_0.bias"][1],
    }
    for name in sites:
        if name.endswith(("_scale", "_precision", "_global", "Norm_0.scale")):
            found[name] = jnp.log(jnp.abs(sites[name]))
    # Bounded, so that heavy-tailed priors have well-behaved standard errors: location and spread.
    location = {name: jnp.mean(jnp.tanh(value)) for name, value in found.items()}
    return location | {f"{name}, spread": jnp.mean(jnp.tanh(value**2)) for name, value in found.items()}


def latent_sites(model, rng_key):
    trace = handlers.trace(handlers.seed(model, rng_key)).get_trace(X)
    return {k: s["value"] for k, s in trace.items() if s["type"] in ("sample", "deterministic")}


def unconstrained(model, sites, z):
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(X)
    return {name: dist.biject_to(trace[name]["fn"].support).inv(sites[name]) for name in z}


def with_z(state, z):
    if isinstance(state, infer.orbit.OrbitState):
        return state._replace(base=with_z(state.base, z))
    return state._replace(z=z)


def geweke(kernel):
    """z-scores of the summaries after alternating transitions and new data, over independent chains."""
    model = kernel.model
    state = kernel.init(random.key(0), 0, None, model_args=(X, Y), model_kwargs={})

    def chain(key):
        start, data, run = random.split(key, 3)
        sites = latent_sites(model, start)
        begin = with_z(state, unconstrained(model, sites, state.z))._replace(rng_key=run)

        def sweep(carry, key):
            state, y = carry
            state = kernel.sample(kernel.refresh(state, (X, y), {}), (X, y), {})
            sites = constrain_fn(model, (X, y), {}, state.z, return_deterministic=True)
            at_draw = handlers.seed(handlers.substitute(model, data=sites), key)
            y = handlers.trace(at_draw).get_trace(X)["y"]["value"]
            return (state, y), summaries(sites)

        _, values = lax.scan(sweep, (begin, sites["y"]), random.split(data, SWEEPS))
        return jax.tree.map(lambda v: v.mean(0), values)

    after = jax.jit(jax.vmap(chain))(random.split(random.key(1), CHAINS))
    prior = jax.jit(jax.vmap(lambda key: summaries(latent_sites(model, key))))(random.split(random.key(2), 20_000))
    return {
        name: float(
            (after[name].mean() - prior[name].mean())
            / jnp.sqrt(after[name].var() / CHAINS + prior[name].var() / prior[name].size)
        )
        for name in after
    }


def assert_calibrated(scores):
    """All z-scores below the level that one test in 10,000 exceeds, Bonferroni-corrected."""
    worst = max(scores, key=lambda name: abs(scores[name]))
    print({name: round(score, 1) for name, score in scores.items()})
    assert abs(scores[worst]) < stats.norm.isf(1e-4 / 2 / len(scores)), (worst, scores[worst])


def hmc(model):
    return HMC(model, step_size=0.15, num_steps=6, adapt_step_size=False, adapt_mass_matrix=False)


def nuts(model):
    return NUTS(model, step_size=0.2, max_tree_depth=3, adapt_step_size=False, adapt_mass_matrix=False)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "ReLU, centered" else pytest.mark.slow)
        for name in MODELS
        if name != "BN, non-centered"
    ],
)
def test_moves_leave_the_posterior_invariant(name):
    model = MODELS[name]
    kernel = nuts(model) if name.startswith("BN") else hmc(model)
    assert_calibrated(geweke(infer.OrbitMoves(kernel, symmetry.find(model, X, Y))))


@pytest.mark.slow
def test_moves_around_an_exact_kernel_of_ours_leave_the_posterior_invariant():
    model = MODELS["ReLU, non-centered"]
    kernel = infer.MALA(model, step_size=0.02, steps_per_draw=3, warm_start=0.0)
    assert_calibrated(geweke(infer.OrbitMoves(kernel, symmetry.find(model, X, Y))))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BN, centered", "LN, gamma precision, centered", "ReLU, Laplace"])
def test_quotient_sampling_leaves_the_posterior_invariant(name):
    model = MODELS[name]
    free = symmetry.quotient(model, symmetry.find(model, X, Y), X, Y)
    assert_calibrated(geweke(hmc(free)))


@dataclass(frozen=True)
class WrongJacobian(symmetry.Scale):
    """A scale that counts one dimension too many."""

    def dimension(self, values):
        return super().dimension(values) + 1


@pytest.mark.slow
def test_a_wrong_jacobian_is_caught():
    """The same test, which the right one passes above, on a walk that counts one dimension too many."""
    model = MODELS["BN, centered"]
    scores = geweke(infer.OrbitMoves(hmc(model), [WrongJacobian([("net/Dense_0.kernel", 1)])]))
    assert max(abs(score) for score in scores.values()) > 10


def test_walks_agree_with_exact_draws():
    """Metropolis-Hastings on the group, forced where the exact conditional is known, has the same distribution."""
    model = MODELS["ReLU, non-centered"]
    rescale = [s for s in symmetry.find(model, X, Y) if isinstance(s, symmetry.Rescale)]
    (entry,) = plan(model, rescale, (X, Y))
    sites = latent_sites(model, random.key(5))
    values = {name: sites[name] for name in unconstrained_names(model)}
    prior = PriorProgram(Reading(model, (X, Y)))

    def exact(key):
        return move(entry, key, values, prior, jnp.ones(()))[0]["net/Dense_1.kernel_base"]

    def walked(key):
        def body(moved, key):
            new, _ = move(entry._replace(method="walk"), key, {**values, **moved}, prior, jnp.full((), 0.7))
            return new, None

        start = {site: values[site] for site in entry.symmetry.sites}
        return lax.scan(body, start, random.split(key, 60))[0]["net/Dense_1.kernel_base"]

    keys = random.split(random.key(0), 4000)
    one, other = (np.abs(jax.jit(jax.vmap(fn))(keys))[..., 0] for fn in (exact, walked))
    for unit in range(3):  # failure rate 1e-5 each
        assert stats.ks_2samp(one[:, unit], other[:, unit]).pvalue > 1e-5


LOC, SD = np.array([[0.4, -1.0], [2.0, 0.3]]), np.array([[0.5, 2.0], [1.5, 0.8]])
W, V = np.array([[0.3, -1.2], [0.7, 1.9]]), np.array([[1.1], [-0.6]])


def log_normal_density(value, loc, sd):
    return -0.5 * ((value - loc) / sd) ** 2


# Symmetry, means of the prior, exact method, and the log density of the group element of unit u.
EXACT_DRAWS = {
    "radius": (
        symmetry.Scale([("w", 1)]),
        0.0,
        "gig",
        lambda g, u: 2 * g + log_normal_density(np.exp(g) * W[:, [u]], 0.0, SD[:, [u]]).sum(0),
    ),
    "factor": (
        symmetry.Rescale([("w", 1)], [("v", 0)]),
        0.0,
        "gig",
        lambda g, u: (
            (2 - 1) * g
            + log_normal_density(np.exp(g) * W[:, [u]], 0.0, SD[:, [u]]).sum(0)
            + log_normal_density(np.exp(-g) * V[u], 0.0, 0.7)
        ),
    ),
    "shift": (
        symmetry.Shift([("w", 1)]),
        1.0,
        "normal",
        lambda g, u: log_normal_density(g + W[:, [u]], LOC[:, [u]], SD[:, [u]]).sum(0),
    ),
    "shift of one element": (
        symmetry.Shift([("v", 0)]),
        1.0,
        "prior",
        lambda g, u: log_normal_density(g + V[u], 0.0, 0.7),
    ),
}


@pytest.mark.parametrize("name", EXACT_DRAWS)
def test_exact_draws_have_the_density_on_the_orbit(name):
    """Group elements of one point against quadrature; Kolmogorov-Smirnov, failure rate 1e-6 each."""
    group, loc, method, log_density = EXACT_DRAWS[name]
    values = {"w": jnp.asarray(W, jnp.float32), "v": jnp.asarray(V, jnp.float32)}

    def model():
        numpyro.sample("w", dist.Normal(loc * jnp.asarray(LOC), jnp.asarray(SD)).to_event(2))
        numpyro.sample("v", dist.Normal(jnp.zeros((2, 1)), 0.7).to_event(2))

    (entry,) = plan(model, [group])
    assert entry.method == method
    prior = PriorProgram(Reading(model))
    site = group.sites[0]
    after = jax.vmap(lambda key: move(entry, key, values, prior, jnp.ones(()))[0][site])(
        random.split(random.key(0), 4000)
    )
    first = np.asarray(after, np.float64)[:, 0] if site == "w" else np.asarray(after, np.float64)[..., 0]
    start = W[0] if site == "w" else V[:, 0]
    drawn = np.log(first / start) if group.sites[0] == "w" and method == "gig" else first - start
    grid = np.linspace(-12.0, 12.0, 40_001)
    for unit in range(2):
        density = np.exp(log_density(grid, unit) - log_density(grid, unit).max())
        cdf = np.cumsum(density) / density.sum()
        assert stats.kstest(drawn[:, unit], lambda x, cdf=cdf: np.interp(x, grid, cdf)).pvalue > 1e-6, unit
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 5 / np.sqrt(4000)  # units draw independently


def test_a_redrawn_precision_keeps_the_standardized_weights():
    """And has its prior; failure rate 1e-6."""

    def model():
        precision = numpyro.sample("p", dist.Gamma(2.0, 2.0))
        numpyro.sample("w", dist.Normal(0.0, precision**-0.5).expand([3]).to_event(1))

    (entry,) = plan(model, [symmetry.JointScale("w", "p", -2.0)])
    assert entry.method == "scale prior"
    values = {"p": jnp.asarray(3.0), "w": jnp.array([0.5, -1.0, 2.0])}
    prior = PriorProgram(Reading(model))
    after = jax.vmap(lambda key: move(entry, key, values, prior, jnp.ones(()))[0])(random.split(random.key(0), 2000))
    assert stats.kstest(after["p"], stats.gamma(2.0, scale=0.5).cdf).pvalue > 1e-6
    standard = after["w"] * jnp.sqrt(after["p"] / values["p"])[:, None]
    np.testing.assert_allclose(standard, jnp.broadcast_to(values["w"], (2000, 3)), rtol=1e-5)


def test_a_redrawn_scale_is_corrected_for_a_site_that_stays():
    """Moves take draws of the prior to draws of the prior; failure rate 1e-6 each."""

    def model():
        s = numpyro.sample("s", dist.Gamma(3.0, 2.0))
        numpyro.sample("w", dist.Normal(0.0, s).expand([2]).to_event(1))
        numpyro.sample("t", dist.HalfNormal(s))

    (entry,) = plan(model, [symmetry.JointScale("w", "s")])
    assert entry.method == "hyperprior"
    assert entry.affected == ("s", "t", "w")
    s = dist.Gamma(3.0, 2.0).sample(random.key(0), (3000,))
    noise = random.normal(random.key(1), (3000, 3))
    draws = {"s": s, "w": s[:, None] * noise[:, :2], "t": s * jnp.abs(noise[:, 2])}
    prior = PriorProgram(Reading(model))

    def moved(key, values):
        def body(values, key):
            return values | move(entry, key, values, prior, jnp.ones(()))[0], None

        return lax.scan(body, values, random.split(key, 3))[0]

    after = jax.jit(jax.vmap(moved))(random.split(random.key(2), 3000), draws)
    assert stats.kstest(after["s"], stats.gamma(3.0, scale=0.5).cdf).pvalue > 1e-6
    assert stats.kstest(after["t"] / after["s"], stats.halfnorm.cdf).pvalue > 1e-6
    np.testing.assert_array_equal(after["t"], draws["t"])
    assert (after["s"] != s).mean() > 0.5


COUPLED = np.array([[1.0, 0.8, 0.5], [0.8, 1.0, 0.7], [0.5, 0.7, 1.0]])


@pytest.mark.parametrize("group", [symmetry.SignFlip, symmetry.Scale, symmetry.Shift])
def test_units_that_depend_on_one_another_move_one_by_one(group):
    """Moves take draws of a correlated prior to draws of it: second moments, 5 standard errors (6e-7 each)."""

    def model():
        numpyro.sample("w", dist.MultivariateNormal(jnp.zeros(3), jnp.asarray(COUPLED)))

    (entry,) = plan(model, [group([("w", 0)])])
    assert entry.method == ("flip" if group is symmetry.SignFlip else "walk")
    assert not entry.by_unit
    prior = PriorProgram(Reading(model))
    draws = random.multivariate_normal(random.key(0), jnp.zeros(3), jnp.asarray(COUPLED), (6000,))

    def moved(key, w):
        def body(w, key):
            return move(entry, key, {"w": w}, prior, jnp.ones(()))[0]["w"], None

        return lax.scan(body, w, random.split(key, 4))[0]

    after = np.asarray(jax.jit(jax.vmap(moved))(random.split(random.key(1), 6000), draws))
    # Var(x y) = 1 + r^2 of standard normals.
    error = np.sqrt((1 + COUPLED**2) / 6000)
    np.testing.assert_array_less(np.abs(after.T @ after / 6000 - COUPLED), 5 * error)
    assert ((after != np.asarray(draws)).mean(0) > 0.2).all()


def test_no_key_is_used_twice():
    """Every kind of move, as JAX counts the uses of a key."""

    def model():
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        numpyro.sample("t", dist.HalfNormal(s))
        numpyro.sample("w", dist.Normal(0.0, s).expand([3, 2]).to_event(2))
        numpyro.sample("v", dist.Normal(jnp.arange(3.0), 1.0).to_event(1))
        numpyro.sample("c", dist.MultivariateNormal(jnp.zeros(3), jnp.asarray(COUPLED)))

    groups = [
        symmetry.Scale([("w", 1)]),
        symmetry.Scale("c"),
        symmetry.Scale([("v", 0)]),
        symmetry.SignFlip([("w", 1)]),
        symmetry.SignFlip([("c", 0)]),
        symmetry.Shift("v"),
        symmetry.Shift([("v", 0)]),
        symmetry.Shift([("c", 0)]),
        symmetry.Permutation([("w", 1)]),
        symmetry.Permutation([("v", 0)]),
        symmetry.JointScale("w", "s"),
    ]
    plans = plan(model, groups)
    assert {entry.method for entry in plans} == {
        "gig",
        "walk",
        "flip",
        "normal",
        "prior",
        "order",
        "shuffle",
        "hyperprior",
    }
    values = {"s": jnp.ones(()), "t": jnp.ones(()), "w": jnp.ones((3, 2)), "v": jnp.ones(3), "c": jnp.ones(3)}
    prior = PriorProgram(Reading(model))

    def all_moves(rng_key):
        keys = random.split(rng_key, len(plans))
        return [move(plans[i], keys[i], values, prior, jnp.ones(())) for i in range(len(plans))]

    with jax.debug_key_reuse(True):
        jax.jit(all_moves)(random.key(0))


@pytest.mark.parametrize("units", [2, 3])
@pytest.mark.parametrize("pinned", [False, True])
def test_orders_of_few_units_are_corrected_where_the_prior_tells_units_apart(units, pinned):
    """Moves leave the prior as it is: units pinned 6 sd apart keep their order, exchangeable ones do not."""
    loc = 6.0 * jnp.arange(units) * pinned

    def model():
        numpyro.sample("w", dist.Normal(loc, 1.0).to_event(1))

    (entry,) = plan(model, [symmetry.Permutation([("w", 0)])])
    assert entry.method == ("shuffle" if pinned else "order")
    prior = PriorProgram(Reading(model))
    draws = loc + random.normal(random.key(0), (2000, units))
    keys = random.split(random.key(1), 2000)
    moved = jax.vmap(lambda key, w: move(entry, key, {"w": w}, prior, jnp.ones(()))[0]["w"])(keys, draws)
    # Means of 2000 draws, 4.5 standard errors: failure rate 7e-6 each. In a wrong order they would be 6 and more off.
    np.testing.assert_allclose(moved.mean(0), loc, atol=4.5 / np.sqrt(2000))
    changed = float(jnp.mean(jnp.any(moved != draws, axis=1)))
    assert changed < 0.01 if pinned else changed > 0.4


RING = np.eye(4) + 0.4 * (np.roll(np.eye(4), 1, axis=0) + np.roll(np.eye(4), -1, axis=0))


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (lambda: dist.Normal(jnp.array([0.0, 0.0, 6.0]), 1.0).to_event(1), "shuffle"),
        (lambda: dist.MultivariateNormal(jnp.zeros(4), jnp.asarray(RING)), "shuffle"),
        (lambda: dist.MultivariateNormal(jnp.zeros(4), jnp.asarray(0.6 * np.eye(4) + 0.4)), "order"),
    ],
    ids=["two exchangeable units of three", "rotations only", "exchangeable"],
)
def test_orders_are_accepted_only_if_all_orders_are_equally_likely(make, method):
    """Neither one exchange of units nor a rotation of all shows that."""
    (entry,) = plan(lambda: numpyro.sample("w", make()), [symmetry.Permutation([("w", 0)])])
    assert entry.method == method


@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_walks_with_the_likelihood_know_its_scale(scale):
    """Draws of a conjugate posterior under `handlers.scale` stay draws of it."""
    y = 3.0

    def model():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with handlers.scale(scale=scale):
            numpyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y)

    covariance = np.linalg.inv(np.eye(2) + scale * np.ones((2, 2)))
    mean = covariance @ np.full(2, scale * y)
    (entry,) = plan(model, [symmetry.Scale("w")], exact=False)
    prior = PriorProgram(Reading(model))

    def walked(key):
        start_key, walk_key = random.split(key)
        w = random.multivariate_normal(start_key, jnp.asarray(mean), jnp.asarray(covariance))

        def body(w, key):
            return move(entry, key, {"w": w}, prior, jnp.full((), 0.5))[0]["w"], None

        return lax.scan(body, w, random.split(walk_key, 20))[0].sum()

    total = jax.jit(jax.vmap(walked))(random.split(random.key(0), 4000))
    variance = covariance.sum()
    # Standard errors of independent draws; 4.5 of them, failure rate 7e-6 each.
    assert float(total.mean()) == pytest.approx(mean.sum(), abs=4.5 * np.sqrt(variance / 4000))
    assert float(total.var()) == pytest.approx(variance, rel=4.5 * np.sqrt(2 / 4000))


def unconstrained_names(model):
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(X, Y)
    return [k for k, s in trace.items() if s["type"] == "sample" and not s["is_observed"]]


# -- bounded supports ---------------------------------------------------------------------------------

# Made anew for every trace: some distributions cache arrays.
FAMILIES = {
    "uniform": lambda: dist.Uniform(-1.0, 1.0),
    "half-normal": lambda: dist.HalfNormal(1.0),
    "truncated": lambda: dist.TruncatedNormal(0.0, 1.0, low=-0.5, high=1.0),
    "log-uniform": lambda: dist.LogUniform(0.1, 2.0),
    "uniform scale": lambda: dist.Uniform(0.1, 2.0),
    "log-uniform scale": lambda: dist.LogUniform(0.1, 2.0),
    "truncated scale": lambda: dist.TruncatedNormal(1.0, 1.0, low=0.2, high=1.5),
    "half-normal scale": lambda: dist.HalfNormal(1.0),
    "gamma scale": lambda: dist.Gamma(2.0, 2.0),
}
# Symmetries of weights (2, 3) and (3,), or of the scales of weights.
OF_WEIGHTS = {
    "Scale": lambda w, v: symmetry.Scale([(w, 1)]),
    "Rescale": lambda w, v: symmetry.Rescale([(w, 1)], [(v, 0)]),
    "Shift": lambda w, v: symmetry.Shift([(w, 1)]),
    "Shift of one": lambda w, v: symmetry.Shift([(v, 0)]),
    "SignFlip": lambda w, v: symmetry.SignFlip([(w, 1), (v, 0)]),
    "Permutation": lambda w, v: symmetry.Permutation([(w, 1), (v, 0)]),
}
OF_SCALES = {
    "JointScale": lambda s, t: symmetry.JointScale(f"{s} weights", s),
    "JointRescale": lambda s, t: symmetry.JointRescale(f"{s} weights", f"{t} weights", [(s, 1), (t, -1)]),
}
FAST_FAMILIES = ("uniform", "half-normal", "uniform scale")
EVERY_FAMILY = [pytest.param(name, marks=[] if name in FAST_FAMILIES else pytest.mark.slow) for name in FAMILIES]


def groups_of(family):
    return OF_SCALES if family.endswith("scale") else OF_WEIGHTS


def bounded_model(family):
    """For every group two sites of a family, with nothing in the likelihood."""

    def model(y=None):
        for group in groups_of(family):
            for name, shape in ((f"{group} 1", (2, 3)), (f"{group} 2", (3,))):
                fn = FAMILIES[family]()
                if family.endswith("scale"):
                    scale = numpyro.sample(name, fn)
                    numpyro.sample(f"{name} weights", dist.Normal(0.0, scale).expand([2]).to_event(1))
                else:
                    numpyro.sample(name, fn.expand(shape).to_event(len(shape)))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    return model, [make(f"{group} 1", f"{group} 2") for group, make in groups_of(family).items()]


def prior_draws(model, size=2000):
    def draw(key):
        trace = handlers.trace(handlers.seed(model, key)).get_trace()
        return {name: site["value"] for name, site in trace.items() if name != "y"}

    return jax.jit(jax.vmap(draw))(random.split(random.key(0), size))


def assert_prior(draws, family):
    """Kolmogorov-Smirnov tests of independent draws of the prior; failure rate 1e-6 each."""
    fn = FAMILIES[family]()
    for group in groups_of(family):
        for name in (f"{group} 1", f"{group} 2"):
            assert np.asarray(fn.support(draws[name])).all(), name
            values = np.asarray(draws[name]).ravel()
            assert stats.kstest(values, lambda x: np.asarray(fn.cdf(x))).pvalue > 1e-6, name


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_moves_stay_in_bounded_supports(family):
    """Ten moves along every symmetry take draws of the prior to draws of the prior."""
    model, symmetries = bounded_model(family)
    draws = prior_draws(model)
    plans = plan(model, symmetries, (0.3,))
    prior = PriorProgram(Reading(model, (0.3,)))

    def sweep(values, key):
        for i, entry in enumerate(plans):
            values = values | move(entry, random.fold_in(key, i), values, prior, jnp.ones(()))[0]
        return values, None

    def moved(values, key):
        return lax.scan(sweep, values, random.split(key, 10))[0]

    after = jax.jit(jax.vmap(moved))(draws, random.split(random.key(1), 2000))
    assert_prior(after, family)
    for entry in plans:  # and they move, but for signs of positive weights
        stays = isinstance(entry.symmetry, symmetry.SignFlip) and family in ("half-normal", "log-uniform")
        assert all(stays == bool((after[name] == draws[name]).all()) for name in entry.symmetry.sites)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_quotients_stay_in_bounded_supports(family):
    model, symmetries = bounded_model(family)
    assert_prior(prior_draws(symmetry.quotient(model, symmetries, 0.3)), family)


def test_orders_are_corrected_where_only_supports_tell_units_apart():
    """The density of uniform weights is the same number wherever it is not 0."""
    high = jnp.array([1.0, 1.2])

    def model():
        numpyro.sample("w", dist.Uniform(0.0, high).to_event(1))

    (entry,) = plan(model, [symmetry.Permutation([("w", 0)])])
    prior = PriorProgram(Reading(model))
    draws = high * random.uniform(random.key(0), (2000, 2))
    moved = jax.vmap(lambda key, w: move(entry, key, {"w": w}, prior, jnp.ones(()))[0]["w"])(
        random.split(random.key(1), 2000), draws
    )
    assert (moved < high).all()
    assert (moved != draws).any()


def test_moves_of_a_kernel_keep_other_sites_where_their_support_depends_on_a_moved_one():
    def model(y):
        s = numpyro.sample("s", dist.Uniform(0.5, 2.0))
        numpyro.sample("u", dist.Uniform(0.0, s))
        numpyro.sample("w", dist.Normal(0.0, s).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    kernel = infer.OrbitMoves(HMC(model), [symmetry.JointScale("w", "s")])
    state = kernel.init(random.key(0), 0, {name: jnp.zeros(()) for name in "su"} | {"w": jnp.ones(2)}, (0.3,))
    constrain = kernel.get_constrain_fn((0.3,), {})
    before = constrain(state.z)
    keys = random.split(random.key(1), 200)
    after = jax.vmap(lambda key: constrain(kernel._transition(state, key, (0.3,), {}).z))(keys)
    np.testing.assert_allclose(after["u"], np.full(200, before["u"]), rtol=1e-5)
    assert (after["s"] > after["u"]).all()
    assert len(np.unique(after["s"])) > 50


# -- the order of the symmetries of a quotient ------------------------------------------------------------

# The likelihood ignores all sites: a scale and a bias are not sampled, and the walk reads their densities.
IN_ANY_ORDER = {
    "scale": symmetry.JointScale("w", "w scale"),
    "bias": symmetry.Shift([("b", 0)]),
    "walk": symmetry.JointRescale("u", "w", [("u scale", 1), ("b scale", 1), ("w scale", -1)]),
    "radius": symmetry.Scale([("w", 0)]),
}
MEANS = {"u": 1.5, "w": 0.0, "b": 0.0}
WRONG_IF_IN_ORDER = [("walk", "scale"), ("walk", "bias")]


def scales_and_weights(y=None):
    for name in "uwb":
        scale = numpyro.sample(f"{name} scale", dist.LogNormal(1.0, 0.5))
        numpyro.sample(name, dist.Normal(MEANS[name], scale).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(order, marks=[] if order in WRONG_IF_IN_ORDER else pytest.mark.slow)
        for order in permutations(IN_ANY_ORDER, 2)
    ],
    ids=" then ".join,
)
def test_a_quotient_has_the_prior_in_any_order_of_its_symmetries(order):
    """Kolmogorov-Smirnov tests against the prior of the model; failure rate 1e-6 each."""
    free = symmetry.quotient(scales_and_weights, [IN_ANY_ORDER[name] for name in order], 0.3)
    draws = jax.tree.map(np.asarray, prior_draws(free, 4000))
    for name in "uwb":
        scale = draws[f"{name} scale"]
        assert stats.kstest((np.log(scale) - 1.0) / 0.5, "norm").pvalue > 1e-6, name
        standard = (draws[name] - MEANS[name]) / scale[:, None]
        assert stats.kstest(standard.ravel(), "norm").pvalue > 1e-6, name


def test_orbits_of_a_quotient_are_drawn_independently():
    """Radii of two sites with one prior: correlation, 5 standard errors."""

    def model(y=None):
        for name in "wv":
            numpyro.sample(name, dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    draws = prior_draws(symmetry.quotient(model, [symmetry.Scale("w"), symmetry.Scale("v")], 0.3))
    radii = [np.linalg.norm(draws[name], axis=1) for name in "wv"]
    assert abs(np.corrcoef(*radii)[0, 1]) < 5 / np.sqrt(2000)


# -- deterministic sites of a quotient --------------------------------------------------------------------


def own_random_numbers(x, y=None, batch_size=None):
    """Two odd units with dropout on a minibatch; returns what it drew."""
    w, v = (numpyro.sample(name, dist.Normal(0.0, 1.0).expand([2]).to_event(1)) for name in "wv")
    other = numpyro.sample("other", dist.Normal(0.0, 1.0))
    numpyro.deterministic("twice", 2.0 * other)
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as index:
        keep = random.bernoulli(numpyro.prng_key(), 0.5, index.shape)
        f = numpyro.deterministic("f", jnp.tanh(x[index, None] * w) @ v * keep)
        numpyro.deterministic("of one unit", x[index] * w[0])
        numpyro.sample("y", dist.Normal(f, 0.5), obs=None if y is None else y[index])
    return index, keep


@pytest.mark.parametrize("batch_size", [None, 2])
def test_deterministic_sites_belong_to_the_recorded_weights(batch_size):
    """Of the same rows and the same dropout, wherever on the orbit the draw lies."""
    x = X[:, 0]
    units = [("w", 0), ("v", 0)]
    free = symmetry.quotient(own_random_numbers, [symmetry.SignFlip(units), symmetry.Permutation(units)], x, Y)

    def draw(key):
        trace = handlers.trace(handlers.seed(lambda: numpyro.deterministic("run", free(x, Y, batch_size)), key))
        return {name: site["value"] for name, site in trace.get_trace().items() if site["type"] != "plate"}

    for found in map(jax.jit(draw), random.split(random.key(0), 20)):
        index, keep = found["run"]
        assert index.shape == (batch_size or 6,)
        f = jnp.tanh(x[index, None] * found["w"]) @ found["v"] * keep
        np.testing.assert_allclose(found["f"], f, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["of one unit"], x[index] * found["w"][0], rtol=1e-5)
        np.testing.assert_allclose(found["twice"], 2.0 * found["other"], rtol=1e-6)


def test_a_quotient_records_non_centered_kernels():
    """With two units the orders tried by chance are often the identity."""
    model = network_model(nn.MLP([2, 1], "tanh"), priors.Hierarchical(SCALE))
    free = symmetry.quotient(model, symmetry.find(model, X, Y), X, Y)
    draws = prior_draws(lambda: free(X), 200)
    for layer in ("net/Dense_0.kernel", "net/Dense_1.kernel"):  # w = s w_base / sqrt(2)
        expected = draws[f"{layer}_scale"][:, None, None] * draws[f"{layer}_base"] / np.sqrt(2)
        np.testing.assert_allclose(draws[layer], expected, rtol=1e-5)


# -- hyperparameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("centered", [True, False])
def test_scales_of_single_units_move_with_the_units(centered):
    """So an order of the units is always accepted, and each weight keeps its scale."""
    axes = [("w", 1), ("v", 0)]

    def weights(name, scale, shape):
        if centered:
            return numpyro.sample(name, dist.Normal(0.0, scale).expand(shape).to_event(2))
        base = numpyro.sample(f"{name}_base", dist.Normal(0.0, 1.0).expand(shape).to_event(2))
        return numpyro.deterministic(name, scale * base)

    def model():
        s, t = (numpyro.sample(name, dist.HalfCauchy(1.0).expand([3]).to_event(1)) for name in "st")
        numpyro.sample("other", dist.HalfCauchy(1.0).expand([3]).to_event(1))
        weights("w", s, (2, 3))
        weights("v", t[:, None], (3, 4))

    (entry,) = plan(model, [symmetry.Permutation(axes)])
    end = "" if centered else "_base"
    assert {axis[:2] for axis in entry.symmetry.unit_axes} == {
        (f"w{end}", 1),
        (f"v{end}", 0),
        ("s", 0),
        ("t", 0),
    }
    assert entry.method == "order"


def test_walks_adapt_their_width_in_warm_up_only():
    """To an acceptance of 0.44: the mean of 50 transitions of 200 chains has a standard error of about 0.01."""

    def model():
        numpyro.sample("w", dist.Laplace(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.0)  # a model without observations is refused

    kernel = infer.OrbitMoves(hmc(model), [symmetry.Scale("w")])
    state = kernel.init(random.key(0), 150)
    assert kernel._plans[0].method == "walk"

    def chain(key):
        def body(state, _):
            state = kernel.sample(state, (), {})
            return state, (state.orbit_width[0], state.orbit_accept_prob[0])

        start = state._replace(rng_key=key, orbit_width=jnp.array([10.0]))
        return lax.scan(body, start, None, 200)[1]

    widths, accepted = jax.jit(jax.vmap(chain))(random.split(random.key(1), 200))
    assert (widths[:, 149:] == widths[:, 149:150]).all()
    assert (widths[:, 148] != widths[:, 149]).all()
    assert abs(accepted[:, 150:].mean() - 0.44) < 0.05


def test_find_includes_learned_scales():
    """With the powers of scales and of precisions, and of those that stand behind the units."""

    def joint(name):
        found = symmetry.find(MODELS[name], X, Y)
        return {s for s in found if isinstance(s, symmetry.JointScale | symmetry.JointRescale)}

    first, last = "net/Dense_0.kernel", "net/Dense_1.kernel"
    assert joint("LN, gamma precision, centered") == {
        symmetry.JointScale([first, "net/Dense_0.bias"], f"{first}_precision", -2.0),
        symmetry.JointScale([first, "net/Dense_0.bias"], "net/Dense_0.bias_precision", -2.0),
    }
    rescale = symmetry.JointRescale(
        [first, "net/Dense_0.bias"], [last], [(f"{first}_scale", 1.0), (f"{last}_scale", -1.0)]
    )
    assert joint("ReLU, centered") == joint("ReLU, non-centered") == {rescale}


# -- exactness: simulation-based calibration ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["NUTS with moves", "MALA with moves", "quotient"])
def test_simulation_based_calibration(kind):
    """Ranks of the truth among 11 draws, 600 data sets; chi-squared tests at 1e-4 / 4 each.

    Chains start at the truth, a draw of the posterior; 8 transitions separate draws.
    """
    model, replications, draws, apart = MODELS["BN, centered"], 600, 11, 8
    found = symmetry.find(model, X, Y)
    kernel = {
        "NUTS with moves": lambda: infer.OrbitMoves(nuts(model), found),
        "MALA with moves": lambda: infer.OrbitMoves(infer.MALA(model, 0.02, steps_per_draw=8, warm_start=0.0), found),
        "quotient": lambda: nuts(symmetry.quotient(model, found, X, Y)),
    }[kind]()
    state = kernel.init(random.key(0), 0, None, model_args=(X, Y), model_kwargs={})

    def quantities(z, y):
        sites = constrain_fn(kernel.model, (X, y), {}, z, return_deterministic=True)
        params = {name.removeprefix("net/"): value for name, value in sites.items() if "gauge" not in name}
        return {
            "scale": sites["net/Dense_0.kernel_scale"],
            "radius of unit 0": jnp.linalg.norm(sites["net/Dense_0.kernel"][:, 0]),
            "bias of unit 1": sites["net/Dense_0.bias"][1],
            "function": NORMED.apply(params, X)[0, 0],
        }

    def posterior(key):
        start, begin = random.split(key)
        sites = latent_sites(kernel.model, start)
        y = sites["y"]
        z = unconstrained(kernel.model, sites, state.z)
        chain = kernel.refresh(with_z(state, z)._replace(rng_key=begin), (X, y), {})

        def draw(chain, _):
            chain = lax.fori_loop(0, apart, lambda _, s: kernel.sample(s, (X, y), {}), chain)
            return chain, quantities(chain.z, y)

        return quantities(z, y), lax.scan(draw, chain, None, 1 + draws)[1]

    truth, samples = jax.jit(jax.vmap(posterior))(random.split(random.key(7), replications))
    for name, values in samples.items():
        ranks = np.asarray(values[:, 1:] < truth[name][:, None]).sum(1)
        p = stats.chisquare(np.bincount(ranks, minlength=draws + 1)).pvalue
        print(f"{kind}, {name}: p = {p:.3f}")
        assert p > 1e-4 / 4, name


# -- transitions of a kernel --------------------------------------------------------------------------------


def two_walks_and_two_radii():
    """Walks of different best widths, and exact draws of two radii, the first with a sign."""

    def model(y=None):
        numpyro.sample("narrow", dist.Normal(2.0, 0.1).expand([2]).to_event(1))
        numpyro.sample("wide", dist.StudentT(2.0, 0.0, 3.0))
        for name in "wv":
            numpyro.sample(name, dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    radii = [symmetry.Scale(site) for site in ("narrow", "wide", "w", "v")]
    return infer.OrbitMoves(HMC(model), [*radii, symmetry.SignFlip("w")])


def transitions(num_warmup, count, chains=1):
    """States after each transition of the moves alone: (chains, count, ...)."""
    kernel = two_walks_and_two_radii()
    state = kernel.init(random.key(0), num_warmup, None, (0.3,), {})

    def chain(key):
        def step(state, key):
            state = kernel._transition(state, key, (0.3,), {})
            return state, (state.orbit_accept_prob, state.orbit_width, state.z)

        return lax.scan(step, state, random.split(key, count))[1]

    found = jax.jit(jax.vmap(chain))(random.split(random.key(1), chains))
    return jax.tree.map(np.asarray, (*found, state.z))


def test_each_walk_finds_its_width_in_warm_up():
    accepted, widths, _, _ = transitions(1000, 1000, 4)
    # Independent chains: their mean has a standard error near 0.003.
    np.testing.assert_allclose(accepted[:, 300:, :2].mean((0, 1)), 0.44, atol=0.03)
    assert (accepted[..., 2:4] == 1.0).all()
    assert (widths[:, -1, 1] > 10 * widths[:, -1, 0]).all()


def test_widths_stay_after_warm_up():
    _, widths, _, _ = transitions(3, 10)
    assert (widths[0, 1:3, :2] != widths[0, :2, :2]).all()
    assert (widths[0, 3:] == widths[0, 2]).all()


def test_moves_of_one_transition_are_independent_and_follow_one_another():
    """From one point; failure rate 1e-6 each."""
    _, _, after, start = transitions(0, 1, 2000)
    radii = {name: np.linalg.norm(after[name][:, 0], axis=-1) for name in "wv"}
    for radius in radii.values():
        assert stats.kstest(radius, stats.chi(2).cdf).pvalue > 1e-6
    assert abs(np.corrcoef(radii["w"], radii["v"])[0, 1]) < 5 / np.sqrt(2000)
    signs = np.sign(after["w"][:, 0] / start["w"])
    assert stats.binomtest(int((signs[:, 0] > 0).sum()), 2000).pvalue > 1e-6
    assert (after["v"][:, 0] / start["v"] > 0).all()


# -- mixing -------------------------------------------------------------------------------------------

N = 40
X_TRAIN = jnp.asarray(np.random.default_rng(1).normal(size=(N, 3)), jnp.float32)
Y_TRAIN = jnp.sin(X_TRAIN[:, 0]) + 0.3 * jnp.asarray(np.random.default_rng(2).normal(size=N), jnp.float32)


def normed_model(x, y=None, batch_size=None):
    net = nn.MLP([4, 1], "tanh", norm=nn.BatchNorm())
    network = bnn.random_network("net", net, (3,), priors.Hierarchical(SCALE, centered=True))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        f = network(x[i])[..., 0]
        numpyro.sample("y", dist.Normal(f, 0.3), obs=None if y is None else y[i])


def run(kernel, draws=400, warmup=200, chains=2, method="vectorized", args=(X_TRAIN, Y_TRAIN), **call):
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method=method,
        progress_bar=method in ("sequential", "parallel"),
    )
    mcmc.run(random.key(3), *args, **call)
    return mcmc


def scales_of_the_first_layer():
    found = symmetry.find(normed_model, X_TRAIN, Y_TRAIN)
    return [s for s in found if isinstance(s, symmetry.Scale | symmetry.JointScale)]


def log_scale(mcmc):
    return np.log(mcmc.get_samples(group_by_chain=True)["net/Dense_0.kernel_scale"])


def assert_prior_scale(log_scales):
    """The likelihood does not see the scale: log s ~ N(0, 1/4), from independent draws; failure rate 1e-5 each."""
    size, z = log_scales.size, stats.norm.isf(1e-5 / 2)
    print(f"log scale: mean {log_scales.mean():.3f}, variance {log_scales.var():.3f}, {size} draws")
    assert abs(log_scales.mean()) < z * 0.5 / size**0.5
    assert abs(log_scales.var() / 0.25 - 1) < z * (2 / size) ** 0.5


@pytest.mark.slow
def test_four_ways_agree_on_a_tiny_network():
    """NUTS of both forms, moves, quotient: means of log radius, log scale, and their squares; 4.5 MCSE."""
    centered, other = MODELS["BN, centered"], MODELS["BN, non-centered"]
    found = symmetry.find(other, X, Y)
    ways = {
        "centered": NUTS(centered, max_tree_depth=6),
        "non-centered": NUTS(other, max_tree_depth=6),
        "moves": infer.OrbitMoves(NUTS(other, max_tree_depth=4), found),
        "quotient": NUTS(symmetry.quotient(other, found, X, Y), max_tree_depth=4),
    }
    table = {}
    for way, kernel in ways.items():
        sites = run(kernel, 1000, 300, args=(X, Y)).get_samples(group_by_chain=True)
        radius = np.log(np.linalg.norm(sites["net/Dense_0.kernel"], axis=2))[..., 0]
        scale = np.log(sites["net/Dense_0.kernel_scale"])
        out = np.log(sites["net/Dense_1.kernel_scale"])
        table[way] = [
            (v.mean(), v.std() / effective_sample_size(v) ** 0.5)
            for v in (radius, radius**2, scale, scale**2, out, out**2)
        ]
    for way, entries in table.items():
        print(way, " ".join(f"{mean:.3f} +- {error:.3f}" for mean, error in entries))
        for (mean, error), (reference, its_error) in zip(entries, table["quotient"], strict=True):
            assert abs(mean - reference) < 4.5 * np.hypot(error, its_error), way


@pytest.mark.slow
def test_quotient_draws_radius_and_scale_independently():
    """Effective sample sizes are those of independent draws: 800 of them, whose estimate has a sd of about 8 %."""
    found = symmetry.find(normed_model, X_TRAIN, Y_TRAIN)
    free = symmetry.quotient(normed_model, found, X_TRAIN, Y_TRAIN)
    mcmc = run(NUTS(free, max_tree_depth=6, target_accept_prob=0.95))
    sites = mcmc.get_samples(group_by_chain=True)
    assert "net/Dense_0.kernel_gauge" in sites
    assert "net/Dense_0.kernel_scale_gauge" not in sites
    scale, kernel = sites["net/Dense_0.kernel_scale"], sites["net/Dense_0.kernel"]
    radius = np.linalg.norm(kernel, axis=2) / scale[..., None] * 3**0.5  # w ~ N(0, s^2 / fan_in)
    for values in (np.log(scale), *np.moveaxis(np.log(radius), -1, 0)):
        assert effective_sample_size(values) > 0.6 * values.size
    assert_prior_scale(np.log(scale))
    for unit in range(4):
        assert stats.kstest(radius[..., unit].ravel(), stats.chi(3).cdf).pvalue > 1e-5
        assert stats.kstest(sites["net/Dense_0.bias"][..., unit].ravel(), "norm").pvalue > 1e-5
    # The function turns ever faster as a gauge weight nears 0, so a trajectory diverges now and then: 4 of 4800 draws
    # at an acceptance of 0.8, fewer at 0.95. At one in a thousand, more than 8 of 800 have a probability of 1e-7.
    assert mcmc.get_extra_fields()["diverging"].sum() <= 8

    # The draws of the function are those of the model at the original sites, and `Predictive` agrees.
    sites = mcmc.get_samples()
    mean = Predictive(normed_model, {k: v for k, v in sites.items() if "gauge" not in k})
    gauge = Predictive(free, {k: v for k, v in sites.items() if "gauge" in k or "Norm" in k or "Dense_1" in k})
    one, other = (predict(random.key(0), X_TRAIN)["y"] for predict in (mean, gauge))
    np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)
    idata = bnn.to_inference_data(mcmc, predictions={"x": X_TRAIN[:5]})
    np.testing.assert_allclose(idata["posterior"]["net.Dense_0.kernel"].to_numpy(), kernel, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [infer.SGLD, infer.PSGLD, infer.MCLMC])
def test_minibatch_kernels_find_the_scale_posterior_only_with_moves(kernel):
    """Batch norm: the posterior of the scale is its prior. Without moves the kernels stay near their start."""
    step_size = 0.01 if kernel is infer.MCLMC else 1e-4
    make = partial(kernel, normed_model, step_size, steps_per_draw=20, warm_start=0.1)
    found = scales_of_the_first_layer()
    moved = run(infer.OrbitMoves(make(), found), batch_size=20)
    assert_prior_scale(log_scale(moved))
    with pytest.raises(AssertionError):
        assert_prior_scale(log_scale(run(make(), batch_size=20)))
    idata = bnn.to_inference_data(moved, log_likelihood=False, posterior_predictive=False)
    accept = idata["sample_stats"]["orbit_accept_prob"]
    assert accept.dims == ("chain", "draw", "symmetry")
    assert list(accept["symmetry"].to_numpy()) == [s.name for s in found]
    np.testing.assert_allclose(accept.to_numpy(), 1.0, atol=1e-3)
    assert idata.attrs["inner_kernel"] == kernel.__name__
    assert idata.attrs["biased"]


# -- every way to run them ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_chain_methods_agree():
    """A pickled kernel; legacy and typed keys give the same draws by every chain method."""
    found = symmetry.find(normed_model, X_TRAIN, Y_TRAIN)
    kernel = infer.OrbitMoves(HMC(normed_model, step_size=0.05, num_steps=3, trajectory_length=None), found)
    parallel = run(kernel, 6, 3, method="parallel")
    others = [run(pickle.loads(pickle.dumps(kernel)), 6, 3, method=method) for method in ("vectorized", "sequential")]
    for mcmc in others:
        np.testing.assert_allclose(log_scale(mcmc), log_scale(parallel), rtol=1e-2, atol=1e-3)
    assert parallel.get_extra_fields()["orbit_accept_prob"].shape == (12, len(found))
    assert parallel.last_state.base.potential_energy.shape == (2,)
    first = log_scale(parallel)
    parallel.post_warmup_state = parallel.last_state
    parallel.run(parallel.last_state.rng_key, X_TRAIN, Y_TRAIN)
    assert np.abs(log_scale(parallel) - first).max() > 1e-3


def small_mala(model):
    return infer.MALA(model, 1e-3, warm_start=0.0)


@pytest.mark.parametrize("make", [HMC, pytest.param(small_mala, marks=pytest.mark.slow)])
def test_caches_of_the_inner_kernel_are_renewed(make):
    kernel = infer.OrbitMoves(make(normed_model), symmetry.find(normed_model, X_TRAIN, Y_TRAIN))
    state = kernel.init(random.key(0), 0, None, model_args=(X_TRAIN, Y_TRAIN), model_kwargs={})
    state = kernel.sample(state, (X_TRAIN, Y_TRAIN), {})
    fresh = kernel.refresh(state, (X_TRAIN, Y_TRAIN), {})
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), _energies(state), _energies(fresh))


def _energies(state):
    base = state.base
    return (base.potential_energy, base.z_grad) if hasattr(base, "z_grad") else base.engine.memory


def scale_given_weights(rng_key, gibbs_sites, hmc_sites):
    """An independent block: a grid draw of the scale of the output weights under its log-normal prior."""
    grid = jnp.exp(jnp.linspace(-4.0, 2.0, 400))
    weights = hmc_sites["net/Dense_1.kernel"]
    log_density = dist.Normal(0.0, grid[:, None] / 2.0).log_prob(weights.ravel()).sum(1)
    log_density = log_density + SCALE.log_prob(grid) + jnp.log(grid)
    return {"net/Dense_1.kernel_scale": grid[random.categorical(rng_key, log_density)]}


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize(
    "outside",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["moves in a block", "moves around Gibbs"],
)
def test_with_gibbs(outside):
    """As a block of ``Gibbs`` and around it: the scale of the normalized layer has its prior either way."""
    found = scales_of_the_first_layer()
    hmc_kernel = HMC(normed_model, step_size=0.1, num_steps=5, adapt_step_size=False)
    block = hmc_kernel if outside else infer.OrbitMoves(hmc_kernel, found)
    gibbs = Gibbs([(block, None), (CustomGibbs(scale_given_weights), ["net/Dense_1.kernel_scale"])])
    mcmc = run(infer.OrbitMoves(gibbs, found) if outside else gibbs, method="sequential")
    assert_prior_scale(log_scale(mcmc))
    if outside:  # what the block of HMC caches belongs to the values after the moves
        state = jax.tree.map(lambda leaf: leaf[0], mcmc.last_state)
        kernel = mcmc.sampler
        fresh = kernel.refresh(state, (X_TRAIN, Y_TRAIN), {})
        one, other = (s.base.block_states[0].potential_energy for s in (state, fresh))
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.slow
def test_quotient_under_a_guide():
    """Any guide fits the quotient; draws of it hold the original sites."""
    free = symmetry.quotient(normed_model, symmetry.find(normed_model, X_TRAIN, Y_TRAIN), X_TRAIN, Y_TRAIN)
    guide = AutoNormal(free, init_scale=0.01)
    svi = SVI(free, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    fit = svi.run(random.key(0), 50, X_TRAIN, Y_TRAIN, batch_size=10, progress_bar=False)
    assert fit.losses[-10:].mean() < fit.losses[:10].mean()
    draws = Predictive(free, guide=guide, params=fit.params, num_samples=500)(random.key(1), X_TRAIN)
    scale = draws["net/Dense_0.kernel_scale"]
    assert_prior_scale(np.log(scale))
    assert draws["net/Dense_0.kernel"].shape == (500, 3, 4)


# -- exactness of the symmetry itself, and errors -------------------------------------------------------


def normalized_with_epsilon(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    f = x @ w
    f = (f - f.mean()) / jnp.sqrt(f.var() + 0.3)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.slow
def test_an_inexact_symmetry_is_refused_or_corrected():
    """Corrected with the likelihood, moves and a kernel that hardly moves agree with NUTS; failure rate 2e-5."""
    args = (X_TRAIN, X_TRAIN[:, 0] + Y_TRAIN)
    scale = [symmetry.Scale("w")]
    kernel = NUTS(normalized_with_epsilon, step_size=0.1, adapt_step_size=False, max_tree_depth=2)
    with pytest.raises(ValueError, match=r"changes by \d.*exact=False"):
        symmetry.check(normalized_with_epsilon, scale, args)
    norms = []
    for chosen in (infer.OrbitMoves(kernel, scale, exact=False), NUTS(normalized_with_epsilon)):
        mcmc = MCMC(
            chosen,
            num_warmup=200,
            num_samples=1500,
            num_chains=2,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(3), *args)
        norms.append(np.linalg.norm(mcmc.get_samples(group_by_chain=True)["w"], axis=-1))
    one, other = norms
    error = sum(v.var() / effective_sample_size(v) for v in norms) ** 0.5
    assert abs(one.mean() - other.mean()) < stats.norm.isf(1e-5) * error
    assert effective_sample_size(one) > 300


@pytest.mark.slow
def test_the_cost_of_moves_does_not_depend_on_the_data():
    """Compiled flops of one sweep with 40 and with 4000 rows; the likelihood is not in the program."""

    def flops(x, y):
        found = symmetry.find(normed_model, x, y)
        kernel = infer.OrbitMoves(HMC(normed_model), found)
        state = kernel.init(random.key(0), 0, None, model_args=(x, y), model_kwargs={})
        sweep = jax.jit(lambda state, key: kernel._transition(state, key, (x, y), {}))
        return sweep.lower(state, random.key(1)).compile().cost_analysis()["flops"]

    large = jnp.tile(X_TRAIN, (100, 1)) + 0.01 * random.normal(random.key(0), (100 * N, 3))
    assert flops(X_TRAIN, Y_TRAIN) == flops(large, jnp.tile(Y_TRAIN, 100))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: infer.OrbitMoves(lambda: None, []), "has `refresh`"),
        (lambda: run(infer.OrbitMoves(HMC(normed_model), ["w"])), "symmetry.find"),
        (
            lambda: run(infer.OrbitMoves(HMC(normed_model), [symmetry.Scale("net/Dense_0.kernl")])),
            "Did you mean",
        ),
        (
            lambda: run(infer.OrbitMoves(HMC(normed_model), [symmetry.Scale([("net/Dense_0.kernel", 5)])])),
            "axes",
        ),
        (lambda: symmetry.Scale([]), "at least one site"),
        (lambda: symmetry.JointScale([("w", 1)], "s"), "whole sites"),
        (lambda: symmetry.from_network("net", (3,)), "specification"),
        (
            lambda: jax.jit(
                lambda y: infer.OrbitMoves(HMC(normed_model), [symmetry.Scale("net/Dense_0.kernel")]).init(
                    random.key(0), 0, None, (X_TRAIN, y), {}
                )
            )(Y_TRAIN),
            "outside",
        ),
    ],
    ids=[
        "no kernel",
        "no symmetry",
        "unknown site",
        "axis",
        "empty",
        "axes of a scale",
        "no net",
        "traced data",
    ],
)
def test_errors_teach(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()
