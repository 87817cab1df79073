"""BlackJAX both ways: its algorithms as kernels of ``MCMC``, and kernels as pairs of
functions.
"""

import copy
import pickle
import re
import sys
from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import each, group, refused, run_chains
from jax import lax
from numpyro.infer import MCMC, NUTS, BarkerMH, Gibbs, init_to_uniform, init_to_value
from truth.problems import FAMILIES
from zoo import BATCH, ZOO

import numpyro_bnn as bnn
from numpyro_bnn import infer, runs
from numpyro_bnn.program import Posterior

pytestmark = pytest.mark.core

SPREAD = ZOO["spread"]


def shrink(rng_key, log_density, position, num_steps):
    """A warm-up of the user's own: a step size by the size of the gradient."""
    gradient = jax.grad(log_density)(position)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradient.values()))
    return position, {"step_size": 0.3 / (1 + 0.01 * norm)}, 1


def from_builder(log_density, scale=0.5):
    """An algorithm of the user's own."""
    steps = import_module("blackjax.mcmc.random_walk").normal(scale)
    return blackjax().additive_step_random_walk(log_density, steps)


def langevin(log_density, step_size=0.2):
    """An algorithm whose state is its position: steps of an exact sd of a normal."""
    SamplingAlgorithm = blackjax().SamplingAlgorithm

    def step(rng_key, z):
        def moved(x, gradient):
            noise = jax.random.normal(rng_key, x.shape)
            return x + step_size * gradient + (2 * step_size) ** 0.5 * noise

        return jax.tree.map(moved, z, jax.grad(log_density)(z)), None

    return SamplingAlgorithm(lambda z, rng_key: z, step)


def langevin_with(name):
    """An algorithm whose state has a field that does not follow from its position."""
    State = NamedTuple("State", [("position", Any), (name, Any)])

    def algorithm(log_density):
        def init(z, rng_key):
            return State(z, jax.tree.map(jnp.zeros_like, z))

        return blackjax().SamplingAlgorithm(init, lambda rng_key, state: (state, None))

    return algorithm


class Row(NamedTuple):
    """A kernel by names of BlackJAX, whose import computes; or by functions."""

    algorithm: Any
    adaptation: Any = None
    steps_per_draw: int = 1
    options: Mapping[str, Any] = {}


def named(value):
    if value == "laps":
        return import_module("blackjax.adaptation.laps").laps
    return getattr(blackjax(), value) if isinstance(value, str) else value


def blackjax():
    return import_module("blackjax")


WINDOWS = "window_adaptation"
MEADS, MAMS = "meads_adaptation", "adjusted_mclmc_find_L_and_step_size"
ONE_SCALE = {"inverse_mass_matrix": np.ones(())}
THREE = {"inverse_mass_matrix": np.ones(3)}
ALGORITHMS = {
    "nuts": Row("nuts", WINDOWS),
    "nuts, low rank": Row("nuts", "window_adaptation_low_rank"),
    "nuts after pathfinder": Row("nuts", "pathfinder_adaptation"),
    "hmc": Row("hmc", WINDOWS, 1, {"num_integration_steps": 8}),
    "adjusted_mclmc_dynamic": Row("adjusted_mclmc_dynamic", MAMS, 4),
    "mclmc": Row(
        "mclmc", "mclmc_find_L_and_step_size", 10, {"desired_energy_var": 5e-5}
    ),
    "mclmc, low rank": Row(
        "mclmc", "mclmc_lrd_warmup", 10, {"desired_energy_var": 5e-5, "k": 1}
    ),
    "adjusted_mclmc after laps": Row("adjusted_mclmc", "laps"),
    "barker": Row("barker", None, 20, {"step_size": 0.3}),
    "mala": Row("mala", None, 60, {"step_size": 0.01}),
    "slice": Row("slice_sampling", None, 5),
    "ghmc": Row("ghmc", MEADS, 10),
    "dynamic_hmc": Row("dynamic_hmc", "chees_adaptation", 4),
    "barker after tempering": Row(
        "barker", "adaptive_tempered_smc", 20, {"step_size": 0.3}
    ),
    "barker after persistent sampling": Row(
        "barker", "adaptive_persistent_sampling_smc", 20, {"step_size": 0.3}
    ),
    "sgld": Row("sgld", None, 150, {"step_size": 5e-4}),
    "sghmc": Row("sghmc", None, 10, {"step_size": 0.005, "num_integration_steps": 40}),
    "sgnht": Row("sgnht", None, 1500, {"step_size": 0.005, "alpha": 1.0}),
    "of a function": Row(from_builder, None, 40, {"scale": 0.4}),
    "own warm-up": Row("mala", shrink),
}
WRONG = {
    "no algorithm": Row(lambda log_density: 1.0),
    "scale of no axis": Row("nuts", None, 1, {"step_size": 1, **ONE_SCALE}),
    "own barker": Row("barker", None, 1, {"step_size": 0.3}),
    "velocity": Row(langevin_with("velocity")),
    "three scales": Row("barker", None, 1, {"step_size": 1, **THREE}),
}


def kernel_of(name, model=SPREAD.model):
    row = (ALGORITHMS | WRONG)[name]
    parts = named(row.algorithm), named(row.adaptation)
    # where algorithms whose step size is given do not reject all steps
    near = init_to_uniform(radius=0.5)
    settings = {"steps_per_draw": row.steps_per_draw, "init_strategy": near}
    settings |= row.options
    return infer.BlackJAX(model, *parts, **settings)


CHAINS, WARMUP, DRAWS = 64, 200, 100
POSTERIORS = {problem.name: problem for problem in FAMILIES["supports"]}
# in place of the one of a single parameter, where a velocity needs two
PAIR = {p.name: p for p in FAMILIES["learned scales"] if p.name == "scale by hand"}
FAST = {("nuts", "ordered")}
NOT_MEASURED = ("own warm-up",)


def answers():
    """Each algorithm on each posterior."""
    for name in ALGORITHMS.keys() - set(NOT_MEASURED):
        posteriors = [*POSTERIORS]
        if "mclmc" in name:
            posteriors = [*(POSTERIORS.keys() - {"positive"}), *PAIR]
        for posterior in posteriors:
            marks = () if (name, posterior) in FAST else pytest.mark.slow
            yield pytest.param(name, posterior, id=f"{name}, {posterior}", marks=marks)


def exact_moments(problem):
    """Means and standard deviations by site, from quadrature."""
    weights = problem.probabilities
    for name, nodes in problem.nodes.items():
        mean = np.tensordot(weights, nodes, 1)
        yield name, mean, np.sqrt(np.tensordot(weights, (nodes - mean) ** 2, 1))


def assert_exact(draws, problem):
    """Means and standard deviations within a tenth of a standard deviation."""
    for site, mean, sd in exact_moments(problem):
        values = np.asarray(draws[site], np.float64)
        np.testing.assert_array_less(np.abs(values.mean(0) - mean), 0.1 * sd)
        np.testing.assert_allclose(values.std(0), sd, rtol=0.1)


@cache
def finished(name, posterior):
    problem = (POSTERIORS | PAIR)[posterior]
    return run_chains(
        kernel_of(name, problem.model),
        *problem.args,
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=CHAINS,
    )


@pytest.mark.parametrize(("name", "posterior"), sorted(answers(), key=lambda p: p.id))
def test_algorithms_have_the_exact_posterior(name, posterior):
    draws = finished(name, posterior).get_samples()
    assert_exact(draws, (POSTERIORS | PAIR)[posterior])


@cache
def function_of(name):
    """Means of a network at new inputs, in draws of one sampler (C, S, N)."""
    x = np.linspace(-2, 2, 40, dtype=np.float32)[:, None]
    y = np.sin(2 * x[:, 0]) + 0.3 * np.random.default_rng(0).normal(size=40)
    net = bnn.nn.MLP([5, 1], "tanh")
    model = bnn.models.regression(net, bnn.priors.Hierarchical())
    kernel, chains = NUTS(model, max_tree_depth=6), 8
    if name == "LAPS":
        parts, chains = (named("adjusted_mclmc"), named("laps")), 64
        kernel = infer.BlackJAX(model, *parts)
    elif name != "NUTS":
        parts = named("mclmc"), named("mclmc_lrd_warmup")
        kernel = infer.BlackJAX(model, *parts, steps_per_draw=20)
    draws, warm_up = (100, 200) if name == "LAPS" else (1000, 500)
    settings = {"num_warmup": warm_up, "num_samples": draws, "num_chains": chains}
    mcmc = run_chains(kernel, x, y.astype(np.float32), **settings)
    new = {"x": np.linspace(-2.5, 2.5, 20, dtype=np.float32)[:, None]}
    idata = bnn.to_inference_data(mcmc, predictions=new)
    return np.asarray(group(idata, "predictions")["y_mean"], np.float64)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.filterwarnings("ignore::numpyro_bnn.metrics.HealthWarning")
@pytest.mark.parametrize("name", ["LAPS", "mclmc, low rank"])
def test_networks_have_the_function_of_nuts(name):
    """About two hundred effective draws know a mean to .07 of a standard deviation, at
    the worst of twenty inputs to .2. Some chains of LAPS stand in narrow places.
    """
    draws, expected = function_of(name), function_of("NUTS")
    sd = expected.std((0, 1))
    off = draws.mean((0, 1)) - expected.mean((0, 1))
    np.testing.assert_array_less(np.abs(off), 0.2 * sd)
    np.testing.assert_allclose(draws.std((0, 1)), sd, rtol=0.1)


@pytest.mark.slow
def test_laps_ends_at_a_step_size_that_it_has_tried():
    """Also after few steps, and its gradients are those of its own integrator: five for
    each of 15 steps.
    """

    def model():
        numpyro.sample("x", dist.Normal().expand([201]).to_event(1))

    kernel = infer.BlackJAX(model, named("adjusted_mclmc"), named("laps"))
    options = {"extra_fields": ("num_gradients", "accept_prob")}
    mcmc = run_chains(
        kernel, num_warmup=10, num_samples=5, num_chains=16, run_options=options
    )
    fields = mcmc.get_extra_fields(group_by_chain=True)
    assert np.mean(fields["accept_prob"]) > 0.5
    assert (np.diff(fields["num_gradients"]) == 5 * 15 + 1).all()


@pytest.mark.parametrize("name", ["nuts after pathfinder", "nuts, low rank", "staged"])
def test_warm_ups_decompose_the_matrices_of_one_chain_at_a_time(name):
    """On a CPU decompositions of many matrices at once may wait for each other."""
    if name == "staged":
        recipes = import_module("blackjax.adaptation.metric_recipes").REGISTRY
        metric = recipes["fisher_low_rank"].build_core(buffer_size=10)
        parts = named("nuts"), named("staged_adaptation")
        kernel = infer.BlackJAX(SPREAD.model, *parts, metric=metric)
    else:
        kernel = kernel_of(name)
    keys = jax.random.split(jax.random.key(0), 7)
    state = kernel.init(keys, 4, None, SPREAD.args, {})
    program = str(jax.make_jaxpr(lambda s: kernel.sample(s, SPREAD.args, {}))(state))
    shapes = re.findall(r":f32\[([\d,]+)\] = (?:qr|svd|eigh)\[", program)
    assert shapes
    assert not any(shape.startswith("7,") for shape in shapes)


def test_minibatches_are_those_of_the_plate():
    """On half of the rows SGLD has the posterior of all rows; on rows that were not
    scaled to all it would be about 1.4 times as wide.
    """
    problem = FAMILIES["plates"][0]
    mcmc = run_chains(
        kernel_of("sgld", problem.model),
        *problem.args,
        num_warmup=20,
        num_samples=40,
        num_chains=128,
        batch_size=problem.batch,
    )
    assert_exact(mcmc.get_samples(), problem)


def tempered(adaptation, **options):
    """Particles after a warm-up and one short step."""
    problem = POSTERIORS["real"]
    parts = named("barker"), named(adaptation)
    kernel = infer.BlackJAX(problem.model, *parts, step_size=0.3, **options)
    rounds = 50 if "target_ess" not in options else 2
    settings = {"num_warmup": rounds, "num_samples": 1, "num_chains": 2048}
    return problem, run_chains(kernel, *problem.args, **settings).get_samples()


@each(
    "adaptation", ["adaptive_tempered_smc", "adaptive_persistent_sampling_smc"], fast=1
)
def test_particles_arrive_at_the_posterior(adaptation):
    """By tempering alone, from the prior, whose sd is another."""
    problem, draws = tempered(adaptation)
    assert_exact(draws, problem)


def test_particles_that_did_not_arrive_are_no_draws():
    _, draws = tempered("adaptive_tempered_smc", target_ess=0.999)
    assert all(np.isnan(values).all() for values in draws.values())


@pytest.mark.slow
def test_particles_of_density_zero_are_no_draws():
    def model():
        z = numpyro.sample("z", dist.Normal())
        numpyro.factor("f", jnp.where(z > 0.5, -0.5 * (z - 2) ** 2, -jnp.inf))

    near = init_to_value(values={"z": 1.0})
    parts = named("barker"), named("adaptive_tempered_smc")
    kernel = infer.BlackJAX(model, *parts, step_size=0.5, init_strategy=near)
    settings = {"num_warmup": 50, "num_samples": 1, "num_chains": 2048}
    draws = run_chains(kernel, **settings).get_samples()["z"]
    assert not np.any(draws <= 0.5)


def test_states_that_are_positions_are_moved():
    """The sd of these steps is known, also for a step that is not small."""
    kernel = infer.BlackJAX(one_number, langevin, steps_per_draw=10)
    draws = run_chains(kernel, num_warmup=5, num_samples=10, num_chains=512)
    expected = (1 - 0.2 / 2) ** -0.5
    np.testing.assert_allclose(np.std(draws.get_samples()["x"]), expected, rtol=0.05)


# -- the contract ----------------------------------------------------------------------


CHAIN_OPTIONS = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}


@each("name", ["own warm-up", "sgld", "nuts", "mclmc", "dynamic_hmc"], fast=1)
def test_resumed_runs_are_one_longer_run(name, tmp_path, monkeypatch):
    """Bit for bit, from a folder, but not with another version of BlackJAX."""
    stochastic = {"batch_size": BATCH} if name == "sgld" else {}

    def run(folder, num_samples):
        mcmc = MCMC(
            kernel_of(name), num_warmup=20, num_samples=num_samples, **CHAIN_OPTIONS
        )
        key = jax.random.key(3)
        options = {"progress_bar": False, **stochastic}
        return runs.start(tmp_path / folder, mcmc, key, *SPREAD.args, **options)

    run("resumed", 4)
    resumed, whole = run("resumed", 8), run("whole", 8)
    for site, values in whole.get_samples().items():
        np.testing.assert_array_equal(resumed.get_samples()[site], values)
    fields = resumed.get_extra_fields(), whole.get_extra_fields()
    np.testing.assert_array_equal(*(field["num_gradients"] for field in fields))
    monkeypatch.setattr(blackjax(), "__version__", "1.0.0")
    with refused("folder", "option algorithm"):
        run("whole", 8)


@pytest.mark.parametrize(
    ("name", "method", "bar"),
    [
        ("own warm-up", jax.vmap, False),
        pytest.param("own warm-up", "sequential", True, marks=pytest.mark.slow),
        pytest.param("nuts", jax.vmap, False, marks=pytest.mark.slow),
        pytest.param("nuts", "sequential", True, marks=pytest.mark.slow),
    ],
    ids=["vmap", "bar", "nuts, vmap", "nuts, bar"],
)
def test_chain_methods_give_the_same_chains(name, method, bar):
    """Under `jax.vmap` a branch would run the warm-up in each transition."""
    draws = []
    for one, shown in (("vectorized", False), (method, bar)):
        options = {"num_chains": 2, "chain_method": one, "progress_bar": shown}
        mcmc = MCMC(kernel_of(name), num_warmup=8, num_samples=4, thinning=2, **options)
        mcmc.run(jax.random.key(3), *SPREAD.args)
        draws.append(mcmc.get_samples()["w"])
    assert draws[0].shape == (4, 2)
    np.testing.assert_allclose(draws[1], draws[0], rtol=2e-3, atol=1e-4)


def test_export_says_what_was_run():
    mcmc = finished("nuts", "ordered")
    idata = bnn.to_inference_data(mcmc)
    stats = group(idata, "sample_stats")
    assert set(stats.data_vars) == {"diverging", "acceptance_rate", "num_gradients"}
    about = idata.attrs
    assert about["algorithm"] == "BlackJAX"
    assert about["blackjax_algorithm"] == "nuts"
    assert about["blackjax_adaptation"] == "window_adaptation"
    assert not about["biased"]
    assert not about["noisy_gradients"]
    assert bnn.metrics.health(idata) is not None
    sizes = np.asarray(mcmc.last_state.step_size)
    assert len(np.unique(sizes)) == CHAINS  # each has tuned its own
    # a trajectory of the warm-up, and one of a draw with its start
    assert np.min(mcmc.last_state.num_gradients) >= WARMUP + DRAWS * 2
    assert f"{sizes.mean():.2e}" in mcmc.sampler.get_diagnostics_str(mcmc.last_state)


@pytest.mark.slow
def test_an_exact_chain_goes_on_with_other_data():
    """The density of the data before would refuse all proposals."""

    def model(y):
        w = numpyro.sample("w", dist.Normal(0.0, 10.0))
        numpyro.sample("y", dist.Normal(w, 0.1).expand([50]).to_event(1), obs=y)

    kernel = kernel_of("slice", model)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=20, progress_bar=False)
    mcmc.run(jax.random.key(0), jnp.zeros(50))
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(jax.random.key(1), jnp.full(50, 3.0))
    np.testing.assert_allclose(mcmc.get_samples()["w"][10:], 3.0, atol=0.1)


def test_a_chain_goes_on_from_where_it_was_moved():
    """As moves along symmetries do: its caches are those of the new place."""
    row = Row("barker", None, 1, {"step_size": 1e-6})
    kernel = infer.BlackJAX(SPREAD.model, named(row.algorithm), **row.options)
    state = kernel.init(jax.random.key(0), 0, None, SPREAD.args, {})
    place = {"w": jnp.array([3.0, -2.0]), "sigma": jnp.array(1.5)}
    state = kernel.refresh(state._replace(z=place), SPREAD.args, {})
    state = kernel.sample(state, SPREAD.args, {})
    posterior = Posterior(SPREAD.model, SPREAD.args)
    expected = -posterior.potential(state.z)
    np.testing.assert_allclose(state.chain.logdensity, expected, rtol=1e-5)
    np.testing.assert_allclose(state.z["w"], place["w"], atol=0.01)
    assert state.accept_prob > 0.99


@pytest.mark.slow
def test_a_block_of_gibbs():
    """It follows the other block: the scale of a weight that is known to be large."""

    def model():
        scale = numpyro.sample("scale", dist.HalfNormal())
        numpyro.sample("w", dist.Normal(0.0, scale))

    def gibbs(name):
        return Gibbs([(kernel_of(name, model), ["scale"]), (NUTS(model), None)])

    mcmc = MCMC(gibbs("slice"), num_warmup=50, num_samples=400, progress_bar=False)
    mcmc.run(jax.random.key(0))
    scale, w = (np.asarray(mcmc.get_samples()[name]) for name in ("scale", "w"))
    assert (scale > 0).all()
    assert np.corrcoef(scale, np.abs(w))[0, 1] > 0.3
    mcmc = MCMC(gibbs("nuts"), num_warmup=5, num_samples=1, progress_bar=False)
    with refused("adaptation", "a block of `Gibbs`"):
        mcmc.run(jax.random.key(0))


def test_a_refused_run_leaves_the_kernel_as_it_was():
    fails = []

    def warm_up(*args):
        if fails:
            raise RuntimeError("no warm-up today")
        return shrink(*args)

    kernel = infer.BlackJAX(SPREAD.model, named("mala"), warm_up)
    state = kernel.init(jax.random.key(0), 1, None, SPREAD.args, {})
    fails.append(True)
    with pytest.raises(RuntimeError, match="no warm-up"):
        kernel.init(jax.random.key(0), 2, None, SPREAD.args, {})
    fails.clear()
    assert kernel.sample(state, SPREAD.args, {}).i == 1


def test_pickles_of_algorithms_are_the_algorithms():
    algorithm = pickle.loads(pickle.dumps(blackjax().sgld))
    kernel = infer.BlackJAX(SPREAD.model, algorithm, step_size=1e-3)
    state = kernel.init(jax.random.key(0), 0, None, SPREAD.args, {})
    assert kernel.describe(state)["blackjax_algorithm"] == "sgld"


# -- what a run costs ------------------------------------------------------------------


def evaluations_of(name):
    """Gradients that the program of one integration step has."""
    calls = []

    def log_density(x):
        calls.append(1)
        return -0.5 * jnp.sum(x**2)

    integrators = import_module("blackjax.mcmc.integrators")
    integrator, x = getattr(integrators, name), jnp.ones(2)
    state = integrators.IntegratorState(x, x / 2**0.5, 0.0, -x)
    if name.startswith("isokinetic"):
        step = integrator(log_density)
    else:
        metrics = import_module("blackjax.mcmc.metrics")
        metric = metrics.default_metric(jnp.ones(2))
        step = integrator(log_density, metric.kinetic_energy)
    step(state, 0.1)
    return integrator, len(calls)


SLOW_INTEGRATORS = (
    "velocity_verlet",
    "omelyan",
    "yoshida",
    "isokinetic_velocity_verlet",
)


@each("name", ["isokinetic_mclachlan", *SLOW_INTEGRATORS], fast=1)
def test_gradients_of_integrators_are_counted(name):
    """A draw has one for the caches, and those of a step."""
    integrator, evaluations = evaluations_of(name)
    if name.startswith("isokinetic"):
        algorithm, options = "mclmc", {"L": 1.0}
    else:
        algorithm, options = "hmc", {"num_integration_steps": 1, **THREE}
    options |= {"step_size": 0.01, "integrator": integrator}
    kernel = infer.BlackJAX(SPREAD.model, named(algorithm), **options)
    first = kernel.init(jax.random.key(0), 0, None, SPREAD.args, {})
    then = kernel.sample(first, SPREAD.args, {})
    assert then.num_gradients - first.num_gradients == 1 + evaluations


@pytest.mark.slow
def test_gradients_of_runs_are_counted():
    """One for the caches of each draw, the others by BlackJAX's own numbers."""
    metric = {"step_size": 0.05, **THREE}
    kernel = infer.BlackJAX(
        SPREAD.model,
        blackjax().hmc,
        num_integration_steps=7,
        steps_per_draw=3,
        **metric,
    )
    mcmc = run_chains(kernel, *SPREAD.args, num_warmup=1, num_samples=3)
    counts = mcmc.get_extra_fields(group_by_chain=True)["num_gradients"]
    np.testing.assert_array_equal(counts[0], 1 + 22 * np.arange(2, 5))


def counted(calls):
    """A normal distribution that counts its gradients."""

    @jax.custom_vjp
    def zero(x):
        return 0.0 * jnp.sum(x)

    def count(x):
        calls.append(1)
        return np.zeros(np.shape(x), np.int32)

    def backward(x, cotangent):
        shape = jax.ShapeDtypeStruct(x.shape, jnp.int32)
        place = x + 0 * cotangent
        zeros = jax.pure_callback(count, shape, place, vmap_method="sequential")
        return (zeros.astype(x.dtype),)

    zero.defvjp(lambda x: (zero(x), x), backward)

    def model():
        x = numpyro.sample("x", dist.Normal().expand([2]).to_event(1))
        numpyro.factor("count", zero(x))

    return model


_TWO = {"inverse_mass_matrix": np.ones(2, np.float32)}


@pytest.mark.parametrize(
    ("algorithm", "adaptation", "options", "chains", "exact"),
    [
        pytest.param(
            "hmc",
            "adaptive_tempered_smc",
            {"step_size": 0.5, "num_integration_steps": 2, **_TWO},
            8,
            False,
            id="tempering",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "nuts",
            "window_adaptation_low_rank",
            {},
            None,
            True,
            id="low rank",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_of_warm_ups_are_counted(
    algorithm, adaptation, options, chains, exact, x64
):
    """Also of an integrator of two gradients, and in 64 bits."""
    calls = []
    if not exact:
        omelyan = import_module("blackjax.mcmc.integrators").omelyan
        options = options | {"integrator": omelyan, "divergence_threshold": 500}
    parts = named(algorithm), named(adaptation)
    kernel = infer.BlackJAX(counted(calls), *parts, **options)
    key = jax.random.key(0)
    key = jax.random.split(key, chains) if chains else key
    state = jax.block_until_ready(kernel.init(key, 25, None, (), {}))
    calls.clear()
    state = jax.block_until_ready(jax.jit(lambda s: kernel.sample(s, (), {}))(state))
    np.testing.assert_array_equal(state.num_gradients, len(calls) // (chains or 1))
    assert len(calls) > 25


@pytest.mark.slow
@pytest.mark.parametrize("fractions", [{}, {"frac_tune3": 0.1}])
def test_mams_tunes_for_as_long_as_it_says(fractions):
    calls = []

    def next_key(rng_key):
        jax.debug.callback(lambda: calls.append(1))
        return jax.random.split(rng_key)[1]

    parts = named("adjusted_mclmc_dynamic"), named(MAMS)
    kernel = infer.BlackJAX(
        SPREAD.model, *parts, next_random_arg_fn=next_key, **fractions
    )
    state = kernel.init(jax.random.key(0), 60, None, SPREAD.args, {})
    jax.block_until_ready(
        jax.jit(lambda state: kernel.sample(state, SPREAD.args, {}))(state)
    )
    jax.effects_barrier()
    assert 34 <= len(calls) <= 40  # two thirds, with a Metropolis test


# -- kernels as pairs of functions -----------------------------------------------------


def scanned(kernel, key, num_warmup, num_samples, **kwargs):
    """Draws by hand, of the chain that `MCMC` runs with this key."""
    init, step = infer.as_blackjax(
        kernel, *SPREAD.args, num_warmup=num_warmup, **kwargs
    )

    def one_step(state, _):
        state, info = step(state.rng_key, state)
        return state, (state.z, info["num_gradients"])

    first = init(None, key)
    steps = num_warmup + num_samples
    _, (z, counts) = jax.jit(lambda s: lax.scan(one_step, s, None, steps))(first)
    return jax.tree.map(lambda leaf: leaf[num_warmup:], z), counts[num_warmup:]


@pytest.mark.parametrize(
    ("make", "kwargs"),
    [
        pytest.param(
            partial(infer.SGHMC, step_size=1e-3, steps_per_draw=3, warm_start=0.0),
            {"batch_size": BATCH},
            id="SGHMC",
            marks=pytest.mark.slow,
        ),
        pytest.param(partial(kernel_of, "own warm-up"), {}, id="own warm-up"),
        pytest.param(partial(kernel_of, "nuts"), {}, id="nuts", marks=pytest.mark.slow),
        pytest.param(
            partial(infer.MCLMC, steps_per_draw=3),
            {},
            id="MCLMC",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            partial(kernel_of, "sgld"),
            {"batch_size": BATCH},
            id="sgld",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_chains_by_hand_are_those_of_mcmc(make, kwargs):
    """Bit for bit, in unconstrained values."""
    key, kernel = jax.random.key(3), make(SPREAD.model)
    mcmc = MCMC(copy.deepcopy(kernel), num_warmup=8, num_samples=6, progress_bar=False)
    fields = ("z.w", "z.sigma")
    mcmc.run(key, *SPREAD.args, extra_fields=fields, **kwargs)
    z, counts = scanned(kernel, key, 8, 6, **kwargs)
    extra = mcmc.get_extra_fields()
    for field in fields:
        np.testing.assert_array_equal(z[field[2:]], extra[field])
    np.testing.assert_array_equal(counts, extra["num_gradients"])


@each("name", ["Gibbs", "ParallelTempering"], fast=1)
def test_other_keys_give_other_chains(name):
    """Also of kernels whose inner states have keys; their own are those of `MCMC`."""
    model = SPREAD.model
    if name == "Gibbs":
        kernel = Gibbs([(kernel_of("slice"), ["w"]), (kernel_of("slice"), None)])
    else:
        kernel = infer.ParallelTempering(kernel_of("own barker", model), num_replicas=2)
    init, step = infer.as_blackjax(kernel, *SPREAD.args)
    first = init(None, jax.random.key(0))
    step = jax.jit(step)
    same = jax.jit(lambda state: kernel.sample(state, SPREAD.args, {}))(first)
    state, _ = step(first.rng_key, first)
    np.testing.assert_allclose(state.z["w"], same.z["w"], rtol=1e-4)
    draws = [step(jax.random.key(i), state)[0].z["w"] for i in range(2)]
    assert np.all(draws[0] != draws[1])


# -- refusals --------------------------------------------------------------------------

_WHITE = {"step_size": 0.1, **THREE}
_LISTED = {"step_size": 0.1, "inverse_mass_matrix": [1.0, 1.0, 1.0]}
_NO_NUMBERS = {"step_size": 0.1, "inverse_mass_matrix": np.full(3, np.nan)}
_NEGATIVE = {"step_size": 0.1, "inverse_mass_matrix": np.array([1.0, 0.0, 1.0])}
_DENSE = {"step_size": 0.1, "inverse_mass_matrix": np.diag([1.0, -1.0, 1.0])}
_WHOLE = {"step_size": 0.1, "inverse_mass_matrix": np.ones(3, int)}
_TEXT = {"step_size": 0.1, "inverse_mass_matrix": "diagonal"}
_WINDOWS = {"adaptation": WINDOWS}
_LOW_RANK, _LAPS = {"adaptation": "mclmc_lrd_warmup"}, {"adaptation": "laps"}


@pytest.mark.parametrize(
    ("argument", "fragment", "algorithm", "options"),
    [
        ("algorithm", "Pass `blackjax.nuts`", 3, {}),
        ("algorithm", "Pass `blackjax.nuts`", (len, len), {}),
        ("algorithm", "unequal weights", "csgld", {}),
        ("algorithm", "equally weighted", "tempered_smc", {}),
        ("algorithm", "equally weighted", "pathfinder", {}),
        ("algorithm", "equally weighted", "rhat", {}),
        ("algorithm", "Gaussian prior", "elliptical_slice", {}),
        ("options", "'inverse_mass_matrix', 'step_size'", "nuts", {}),
        ("options", "'step_size'", "sgld", {}),
        ("options", "max_num_doublings", "nuts", _WHITE | {"max_doublings": 3}),
        ("options", "'step_size'", "nuts", _WINDOWS | {"step_size": 0.1}),
        ("options", "'temperature'", "sghmc", {"step_size": 1, "temperature": 0.1}),
        ("inverse_mass_matrix", "an array", "nuts", _LISTED),
        ("adaptation", "`step_size`", "sgld", {"step_size": 1, "adaptation": shrink}),
        ("num_folds", "above 0", "ghmc", {"adaptation": MEADS, "num_folds": 0}),
        ("step_size", "above 0", "nuts", _WHITE | {"step_size": -0.1}),
        ("step_size", "number", "mala", {"step_size": np.array([0.1, 0.2])}),
        ("inverse_mass_matrix", "integers", "nuts", _WHOLE),
        (
            "num_integration_steps",
            "integer of at least 1",
            "hmc",
            _WHITE | {"num_integration_steps": 1.5},
        ),
        (
            "target_acceptance_rate",
            "above 0 and below 1",
            "nuts",
            _WINDOWS | {"target_acceptance_rate": 2.0},
        ),
        ("temperature", "above 0", "sgld", {"step_size": 1, "temperature": 0}),
        ("adaptation", "`blackjax.nuts`", "barker", _WINDOWS | {"step_size": 1}),
        ("adaptation", "of your own", from_builder, _WINDOWS),
        ("adaptation", "`blackjax.mclmc`", "nuts", _LOW_RANK),
        ("options", "'position'", "mclmc", _LOW_RANK | {"position": {}}),
        ("k", "at least 1", "mclmc", _LOW_RANK | {"k": -1}),
        (
            "steps_per_sample",
            "at least 1",
            "adjusted_mclmc",
            _LAPS | {"steps_per_sample": 0},
        ),
        ("acc_prob", "below 1", "adjusted_mclmc", _LAPS | {"acc_prob": 2.0}),
        ("inverse_mass_matrix", "above 0", "nuts", _DENSE),
        ("inverse_mass_matrix", "an array", "nuts", _TEXT),
        ("inverse_mass_matrix", "not finite", "nuts", _NO_NUMBERS),
        ("inverse_mass_matrix", "above 0", "barker", _NEGATIVE),
        ("adaptation", "num_steps", "mala", {"adaptation": lambda key: key}),
        ("steps_per_draw", "at least 1", "barker", {"steps_per_draw": 0}),
    ],
)
def test_wrong_arguments_are_refused(argument, fragment, algorithm, options):
    options = dict(options)
    if "adaptation" in options:
        options["adaptation"] = named(options["adaptation"])
    with refused(argument, fragment):
        infer.BlackJAX(SPREAD.model, named(algorithm), **options)


def test_scales_of_half_precision_are_floats():
    scales = jnp.ones(3, jnp.bfloat16)
    options = {"step_size": 0.1, "inverse_mass_matrix": scales}
    infer.BlackJAX(SPREAD.model, named("nuts"), **options)


def one_number():
    numpyro.sample("x", dist.Normal())


def draws_keys():
    x = numpyro.sample("x", dist.Normal().expand([2]).to_event(1))
    numpyro.factor("noise", x[0] * jax.random.normal(numpyro.prng_key()))


@pytest.mark.parametrize(
    ("argument", "fragment", "name", "model", "warmup"),
    [
        ("algorithm", "returns a float", "no algorithm", one_number, 0),
        ("inverse_mass_matrix", "1 parameters", "three scales", one_number, 0),
        ("adaptation", "no warm-up", "nuts", one_number, 0),
        ("inverse_mass_matrix", "1 parameters", "scale of no axis", one_number, 0),
        ("algorithm", "velocity", "velocity", one_number, 0),
        ("adaptation", "1 chain", "dynamic_hmc", one_number, 5),
        ("model", "two directions", "mclmc", one_number, 5),
        ("model", "random numbers of its own", "barker", draws_keys, 0),
    ],
)
def test_models_and_runs_that_it_cannot_take_are_refused(
    argument, fragment, name, model, warmup
):
    kernel = kernel_of(name, model)
    with refused(argument, fragment):
        kernel.init(jax.random.key(0), warmup, None, (), {})


@pytest.mark.parametrize(("chains", "folds"), [(3, 4), (8, 4), (18, 4), (6, 2)])
def test_too_few_chains_for_folds_are_refused(chains, folds):
    kernel = infer.BlackJAX(
        one_number,
        named("ghmc"),
        named(MEADS),
        **({} if folds == 4 else {"num_folds": folds}),
    )
    with refused("adaptation", f"Run {4 * folds} or more"):
        kernel.init(jax.random.split(jax.random.key(0), chains), 5, None, (), {})


def test_a_kernel_is_needed_for_functions():
    with refused("kernel", "Pass a kernel"):
        infer.as_blackjax(SPREAD.model)
    init, _ = infer.as_blackjax(BarkerMH(SPREAD.model), *SPREAD.args)
    with refused("position", "init_to_value"):  # which it would ignore
        init({"w": np.ones(2), "sigma": 1.0}, jax.random.key(0))


def test_without_blackjax_only_the_kernel_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "blackjax", None)
    with refused("algorithm", "numpyro_bnn[blackjax]", ImportError):
        infer.BlackJAX(SPREAD.model, from_builder)
    init, _ = infer.as_blackjax(infer.SGHMC(SPREAD.model), *SPREAD.args)
    assert init(None, jax.random.key(0)).z["w"].shape == (2,)
