"""ParallelTempering: targets of all replicas, crossing between modes, the ladder, inner kernels, errors."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import HMC, MCMC, NUTS, Gibbs
from numpyro.infer.gibbs import conditioned
from numpyro.infer.reparam import TransformReparam
from numpyro.infer.util import compute_log_probs, constrain_fn
from scipy import stats

import numpyro_bnn as bnn
from numpyro_bnn import infer, models, nn, priors, symmetry
from numpyro_bnn.infer.tempering import exchange, respaced
from numpyro_bnn.infer.wrapper import with_constrained
from numpyro_bnn.program.reading import CONDITIONED


def run(kernel, args=(), warmup=300, draws=1000, chains=1, key=None, fields=(), method="vectorized"):
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(random.key(0) if key is None else key, *args, extra_fields=fields)
    return mcmc


def hmc(model, length=1.5):
    return HMC(model, trajectory_length=length)


# ------------------------------------------------------------------------------------------------- what it targets


def conjugate():
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(w, 0.5), obs=1.0)


@pytest.mark.parametrize("temper", ["likelihood", pytest.param("joint", marks=pytest.mark.slow)])
def test_every_replica_has_its_tempered_posterior(temper):
    """Mean and variance of w at every temperature, within 4.5 MCSE: failure rate 1e-5 for each of the eight."""
    kernel = infer.ParallelTempering(hmc(conjugate), 4, lowest=0.05, temper=temper)
    mcmc = run(kernel, draws=3000, fields=("base.z",))
    betas = np.asarray(mcmc.last_state.inverse_temperatures)
    assert betas[0] == 1
    assert (np.diff(betas) < 0).all()
    for beta, w in zip(betas, np.asarray(mcmc.get_extra_fields()["base.z"]["w"]).T, strict=True):
        precision = (1 if temper == "likelihood" else beta) + 4 * beta
        mean, sd = 4 * beta / precision, precision**-0.5
        z = (w - mean) / sd
        assert abs(z.mean()) < 4.5 / effective_sample_size(z[None]) ** 0.5
        assert abs((z**2).mean() - 1) < 4.5 * (2 / effective_sample_size(z[None] ** 2)) ** 0.5


OBSERVED = np.array([1.5, -2.5])


def positive_scale():
    s = numpyro.sample("s", dist.Gamma(0.5, 1.0))
    with numpyro.plate("data", 2):
        numpyro.sample("y", dist.Normal(0.0, s), obs=jnp.asarray(OBSERVED))


def log_scale_moments(beta, temper):
    """Mean and sd of log s under the tempered density of s, by quadrature."""
    z = np.linspace(-12, 8, 50_001)
    s = np.exp(z)
    log_likelihood = stats.norm(0.0, s[:, None]).logpdf(OBSERVED).sum(1)
    log_prior = stats.gamma(0.5).logpdf(s)
    log_weight = (1 if temper == "likelihood" else beta) * log_prior + beta * log_likelihood + z
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    mean = (weight * z).sum()
    return mean, ((weight * (z - mean) ** 2).sum()) ** 0.5


@pytest.mark.parametrize("temper", ["likelihood", "joint"])
@pytest.mark.parametrize("name", ["NUTS", pytest.param("MALA", marks=pytest.mark.slow)])
def test_constrained_sites_have_their_tempered_posterior(name, temper):
    """Mean and variance of log s at every temperature, within 5 MCSE: failure rate 6e-7 for each of the sixteen."""
    inner = {"NUTS": NUTS, "MALA": lambda model: infer.MALA(model, steps_per_draw=10)}[name](positive_scale)
    mcmc = run(infer.ParallelTempering(inner, 4, lowest=0.05, temper=temper), draws=3000, fields=("base.z",))
    draws = np.asarray(mcmc.get_extra_fields()["base.z"]["s"]).T
    for beta, log_s in zip(np.asarray(mcmc.last_state.inverse_temperatures), draws, strict=True):
        mean, sd = log_scale_moments(beta, temper)
        z = (log_s - mean) / sd
        for quantity, exact in ((z, 0.0), (z**2, 1.0)):
            error = (quantity.var() / effective_sample_size(quantity[None])) ** 0.5
            assert abs(quantity.mean() - exact) < 5 * error


def ordered():
    base = dist.Normal(0.0, 1.0).expand([3]).to_event(1)
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(base, dist.transforms.OrderedTransform()))
    numpyro.sample("y", dist.OrderedLogistic(0.3, cuts), obs=2)


def simplex():
    p = numpyro.sample("p", dist.Dirichlet(jnp.array([0.5, 2.0, 3.0])))
    numpyro.sample("y", dist.Categorical(p), obs=1)


def interval_and_factor():
    with numpyro.plate("two", 2), handlers.mask(mask=jnp.array([True, False])):
        u = numpyro.sample("u", dist.Uniform(-1.0, 2.0))
    numpyro.factor("penalty", -(u.sum() ** 2))


def scaled_prior():
    with handlers.scale(scale=3.0):
        s = numpyro.sample("s", dist.HalfNormal(2.0))
    numpyro.sample("y", dist.Normal(0.0, s), obs=1.0)


def scanned():
    def step(total, x):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(total, s), obs=x)
        return total + s, s

    scan(step, 0.0, jnp.array([0.3, 1.0, -0.4]))


def reparametrized():
    config = {"s": TransformReparam()}
    with handlers.reparam(config=config):
        s = numpyro.sample(
            "s",
            dist.TransformedDistribution(dist.Exponential(1.0), dist.transforms.AffineTransform(0.0, 2.0)),
        )
    numpyro.sample("y", dist.Normal(0.0, s), obs=1.0)


@pytest.mark.parametrize("temper", ["likelihood", "joint"])
@pytest.mark.parametrize(
    "model",
    [
        ordered,
        simplex,
        interval_and_factor,
        scaled_prior,
        scanned,
        reparametrized,
        handlers.scope(positive_scale, prefix="a"),
        handlers.scope(handlers.scope(positive_scale, prefix="a", divider="."), prefix="b"),
    ],
    ids=lambda model: getattr(model, "prefix", model.__name__),
)
def test_potentials_of_replicas_differ_by_tempered_densities_of_sites(model, temper):
    """Never by a Jacobian, whatever the supports, handlers and names."""
    kernel = infer.ParallelTempering(hmc(model), 3, lowest=0.1, temper=temper)
    state = kernel.init(random.key(1), 0)
    held = kernel.refresh(
        state._replace(base=state.base._replace(z={k: v[:1].repeat(3, 0) for k, v in state.base.z.items()})),
        (),
        {},
    )
    values = constrain_fn(model, (), {}, {k: v[0] for k, v in state.base.z.items()})
    sites = compute_log_probs(model, (), {}, values)
    tempered = sum(
        log_prob for name, log_prob in sites[0].items() if temper == "joint" or sites[1][name]["is_observed"]
    )
    assert abs(tempered) > 0.01
    energies = held.base.potential_energy
    expected = (1 - held.inverse_temperatures) * tempered
    np.testing.assert_allclose(energies - energies[0], expected, rtol=1e-4, atol=1e-5)
    found = kernel._tempered_density({k: v[0] for k, v in state.base.z.items()}, (), {})
    np.testing.assert_allclose(found, tempered, rtol=1e-5)


@pytest.mark.parametrize("temper", ["likelihood", "joint"])
def test_scales_and_masks_of_the_user_leave_jacobians_alone(temper):
    """The potential of every replica, exactly, though NumPyro's own scales the Jacobian of a scaled site."""
    masked = handlers.mask(scaled_prior, mask=jnp.array(False))
    for model, weight in ((scaled_prior, 3.0), (masked, 0.0)):
        kernel = infer.ParallelTempering(hmc(model), 3, lowest=0.1, temper=temper)
        state = kernel.init(random.key(1), 0)
        u, beta = state.base.z["s"], state.inverse_temperatures
        s = jnp.exp(u)
        prior = weight * dist.HalfNormal(2.0).log_prob(s) * (beta if temper == "joint" else 1.0)
        likelihood = jnp.sign(weight) * beta * dist.Normal(0.0, s).log_prob(1.0)
        np.testing.assert_allclose(state.base.potential_energy, -(prior + likelihood + u), rtol=1e-5)


def test_moves_that_weigh_the_likelihood_know_its_temperature():
    """Moves of inexact symmetries under a scale of the log density: mean and variance of a sum of weights at every
    temperature, within 5 MCSE: failure rate 6e-7 for each of the six."""

    def model():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with handlers.scale(scale=4.0):
            numpyro.sample("y", dist.Normal(w.sum(), 1.0), obs=3.0)

    moves = infer.OrbitMoves(hmc(model), [symmetry.Scale("w")], exact=False)
    mcmc = run(infer.ParallelTempering(moves, 3, lowest=0.1), draws=4000, fields=("base.base.z",))
    draws = np.asarray(mcmc.get_extra_fields()["base.base.z"]["w"]).sum(-1).T
    for beta, total in zip(np.asarray(mcmc.last_state.inverse_temperatures), draws, strict=True):
        precision = 1 / 2 + 4 * beta
        z = (total - 12 * beta / precision) * precision**0.5
        for quantity, exact in ((z, 0.0), (z**2, 1.0)):
            error = (quantity.var() / effective_sample_size(quantity[None])) ** 0.5
            assert abs(quantity.mean() - exact) < 5 * error


def two_modes():
    w = numpyro.sample("w", dist.Normal(0.5, 1.5))
    numpyro.sample("y", dist.Normal(w**2, 0.2), obs=4.0)


@pytest.mark.slow
def test_crosses_between_modes():
    """The weight of the mode at 2 is that of quadrature, from chains that all start in one of them."""
    grid = np.linspace(-4, 4, 100_001)
    density = stats.norm(0.5, 1.5).pdf(grid) * stats.norm(grid**2, 0.2).pdf(4.0)
    weight = density[grid > 0].sum() / density.sum()
    start = {"w": jnp.full(2, -2.0)}

    def positive(kernel):
        mcmc = MCMC(
            kernel,
            num_warmup=300,
            num_samples=2000,
            num_chains=2,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(1), init_params=start)
        return (np.asarray(mcmc.get_samples(group_by_chain=True)["w"]) > 0).astype(float), mcmc

    found, mcmc = positive(infer.ParallelTempering(hmc(two_modes), 6))
    error = np.sqrt(weight * (1 - weight) / effective_sample_size(found))
    assert error < 0.04
    assert abs(found.mean() - weight) < 4.5 * error
    assert mcmc.last_state.round_trips.min() > 20
    accepted = np.asarray(mcmc.get_extra_fields()["swap_accept_prob"]).mean(0)
    assert np.ptp(accepted) < 0.25  # a ladder of equal rates
    assert positive(hmc(two_modes))[0].mean() == 0  # without exchanges no chain leaves


def test_exchange():
    betas, log_density = jnp.array([1.0, 0.5, 0.25, 0.1]), jnp.array([-3.0, -1.0, -2.0, jnp.nan])
    sources = {0: set(), 1: set()}
    for i in (0, 1):
        for seed in range(40):
            source, accept_prob = exchange(random.key(seed), betas, log_density, jnp.array(i))
            sources[i].add(tuple(source.tolist()))
    np.testing.assert_allclose(accept_prob, [1.0, np.exp(-0.25), 0.0], rtol=1e-6)
    assert sources[0] == {(1, 0, 2, 3)}  # the first pair always, the last never
    assert sources[1] == {(0, 1, 2, 3), (0, 2, 1, 3)}


def test_respaced_equalizes_rejections():
    """Rejections proportional to the distance of sqrt(beta): the ladder becomes even in sqrt(beta)."""
    betas = jnp.array([1.0, 0.9, 0.3, 0.2, 0.04])
    for _ in range(200):
        betas = respaced(betas, -jnp.diff(jnp.sqrt(betas)))
    np.testing.assert_allclose(np.sqrt(betas), np.linspace(1, 0.2, 5), atol=0.01)


# --------------------------------------------------------------------------------------------------- inner kernels

X = jnp.linspace(-1, 1, 6)[:, None]
Y = jnp.sin(3 * X[:, 0])


def network(prior):
    return models.regression(nn.MLP([2, 1], "tanh"), prior)


def inner_kernels():
    centered, other = network(priors.GammaPrecision(centered=True)), network(priors.Normal())
    sites = infer.PrecisionGibbs(centered).conjugate_sites(X, Y)
    return {
        "NUTS": NUTS(other, max_tree_depth=3),
        "Gibbs": Gibbs([(infer.PrecisionGibbs(centered), sites), (hmc(centered, 0.5), None)]),
        "OrbitMoves": infer.OrbitMoves(hmc(other, 0.5), symmetry.find(other, X, Y)),
        "MALA": infer.MALA(other, steps_per_draw=2),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MALA", "NUTS", "Gibbs", "OrbitMoves"])
def test_inner_kernels(name):
    """Any kernel with a model, also after a round through pickle; what ArviZ gets."""
    kernel = pickle.loads(pickle.dumps(infer.ParallelTempering(inner_kernels()[name], 3)))
    mcmc = run(kernel, (X, Y), 6, 4, chains=2)
    for values in mcmc.get_samples(group_by_chain=True).values():
        assert np.isfinite(values).all()
        assert len(np.unique(values[:, -1])) > 1  # chains differ
    idata = bnn.to_inference_data(mcmc, posterior_predictive=False)
    assert idata["sample_stats"]["swap_accept_prob"].dims == ("chain", "draw", "neighbors")
    assert idata.attrs["inner_kernel"] == type(kernel.kernel).__name__
    assert idata.attrs["num_replicas"] == 3


def test_the_ladder_is_fixed_after_warm_up():
    """It is spaced after 2, 4, 8 and 16 transitions by the rejections since the last time, and never afterwards."""
    kernel = infer.ParallelTempering(hmc(conjugate), 3)
    state = kernel.init(random.key(0), 20)
    first = state.inverse_temperatures

    def body(state, _):
        state = kernel.sample(state, (), {})
        return state, state._replace(base=(), z=(), rng_key=())

    state, seen = jax.jit(lambda s: lax.scan(body, s, None, 150))(state)
    betas = np.concatenate([first[None], seen.inverse_temperatures])
    moved = np.flatnonzero(np.abs(np.diff(betas, axis=0)).max(1)) + 1
    np.testing.assert_array_equal(moved, [2, 4, 8, 16])
    total = np.zeros(2)
    for i, (accept_prob, rejections) in enumerate(zip(seen.swap_accept_prob, seen.rejections, strict=True), 1):
        total = total + 1 - np.asarray(accept_prob)
        total = np.zeros(2) if i in moved else total
        np.testing.assert_allclose(rejections, total, rtol=1e-4, atol=1e-5)
    assert (seen.round_trips[:20] == 0).all()
    assert state.round_trips > 0
    # What the replicas cache belongs to their values and temperatures.
    fresh = kernel.refresh(state, (), {})
    np.testing.assert_allclose(state.base.potential_energy, fresh.base.potential_energy, rtol=1e-5)


def test_sites_that_other_blocks_hold_are_not_tempered():
    """As a block of ``Gibbs``, exchanges and replicas agree: what is given is no data."""

    def model():
        u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        w = numpyro.sample("w", dist.Normal(u, 0.5))
        numpyro.sample("y", dist.Normal(w + u, 1.0), obs=1.0)

    kernel = infer.ParallelTempering(hmc(model).wrap_model(conditioned), 3)
    kwargs = {CONDITIONED: {"w": jnp.array(2.0)}}
    kernel.init(random.key(0), 0, None, (), kwargs)
    for u in (-0.3, 0.8):
        found = kernel._tempered_density({"u": jnp.array(u)}, (), kwargs)
        assert float(found) == pytest.approx(stats.norm.logpdf(1.0, 2.0 + u), rel=1e-5)


def test_refresh_takes_the_first_replica_to_z():
    """What moves around the kernel write into ``z`` is where its first replica goes on, with its energy."""
    kernel = infer.ParallelTempering(hmc(conjugate), 3)
    state = kernel.init(random.key(0), 0)
    moved = kernel.refresh(state._replace(z={"w": jnp.array(0.7)}), (), {})
    np.testing.assert_allclose(moved.base.z["w"], [0.7, *state.base.z["w"][1:]])
    potential = 0.5 * 0.7**2 + 0.5 * ((0.7 - 1) / 0.5) ** 2 + np.log(2 * np.pi) + np.log(0.5)
    assert float(moved.base.potential_energy[0]) == pytest.approx(potential, rel=1e-5)


@pytest.mark.slow
def test_values_are_placed_through_kernels_around_a_gibbs():
    """Its blocks hold constrained values, however deep it lies."""
    gibbs = inner_kernels()["Gibbs"]
    found = symmetry.find(gibbs.model, X, Y)
    for kernel in (infer.OrbitMoves(gibbs, found), infer.ParallelTempering(gibbs, 2)):
        state = kernel.init(random.key(0), 0, None, (X, Y), {})
        held = {"sigma": jnp.array(0.7), "net/Dense_0.bias": jnp.array([1.0, 2.0])}
        prior = {name: dist.HalfNormal(1.0) if name == "sigma" else dist.Normal(0.0, 1.0) for name in held}
        placed = kernel.refresh(with_constrained(kernel, state, held, prior), (X, Y), {})
        values = kernel.get_constrain_fn((X, Y), {})(placed.z)
        for name, value in held.items():
            np.testing.assert_allclose(values[name], value, rtol=1e-6)


@pytest.mark.slow
def test_chain_methods_and_kinds_of_keys_agree():
    kernel = infer.ParallelTempering(hmc(conjugate), 3)
    one = run(kernel, warmup=5, draws=5, chains=2).get_samples()["w"]
    for options in ({"method": "sequential"}, {"method": "parallel"}, {"key": random.PRNGKey(0)}):
        other = run(pickle.loads(pickle.dumps(kernel)), warmup=5, draws=5, chains=2, **options)
        np.testing.assert_allclose(one, other.get_samples()["w"], rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 1}, "`num_replicas` got 1"),
        ({"lowest": 0.0}, "`lowest` got 0.0"),
        ({"lowest": 1.5}, "`lowest` got 1.5"),
        ({"temper": "prior"}, "`temper` got 'prior'"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=r"infer\.ParallelTempering") as error:
        infer.ParallelTempering(hmc(conjugate), **options)
    assert message in str(error.value)


def test_kernel_without_model_is_refused():
    with pytest.raises(TypeError, match=r"infer\.ParallelTempering: argument `kernel`"):
        infer.ParallelTempering(HMC(potential_fn=lambda z: jnp.sum(z**2)))
