"""BlackJAX both ways: its algorithms under ``MCMC``, our kernels as functions."""

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
from numpyro.infer import MCMC, NUTS, BarkerMH, Gibbs, init_to_uniform
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
# Each algorithm on one posterior, whose constraint is the hardest; one on all of them.
MEASURED = [("nuts", name) for name in POSTERIORS]
MEASURED += [(name, "ordered") for name in {*ALGORITHMS} - {"nuts", "own warm-up"}]


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
    problem = POSTERIORS[posterior]
    sizes = {"num_warmup": WARMUP, "num_samples": DRAWS, "num_chains": CHAINS}
    return run_chains(kernel_of(name, problem.model), *problem.args, **sizes)


@each(("name", "posterior"), sorted(MEASURED), fast=[("nuts", "ordered")])
def test_algorithms_have_the_exact_posterior(name, posterior):
    draws = finished(name, posterior).get_samples()
    assert_exact(draws, POSTERIORS[posterior])


@pytest.mark.parametrize("name", ["nuts after pathfinder", "nuts, low rank"])
def test_warm_ups_decompose_the_matrices_of_one_chain_at_a_time(name):
    """On a CPU decompositions of many matrices at once may wait for each other."""
    kernel = kernel_of(name)
    keys = jax.random.split(jax.random.key(0), 7)
    state = kernel.init(keys, 4, None, SPREAD.args, {})
    program = str(jax.make_jaxpr(lambda s: kernel.sample(s, SPREAD.args, {}))(state))
    shapes = re.findall(r":f32\[([\d,]+)\] = (?:qr|svd|eigh)\[", program)
    assert shapes
    assert not any(shape.startswith("7,") for shape in shapes)


def test_minibatches_are_those_of_the_plate():
    """On half of the rows SGLD has the posterior of all rows."""
    problem = FAMILIES["plates"][0]
    kernel, batch = kernel_of("sgld", problem.model), {"batch_size": problem.batch}
    sizes = {"num_warmup": 20, "num_samples": 40, "num_chains": 128}
    mcmc = run_chains(kernel, *problem.args, **sizes, **batch)
    assert_exact(mcmc.get_samples(), problem)


def tempered(adaptation, **options):
    """Particles after a warm-up and one short step."""
    problem = POSTERIORS["real"]
    parts = named("barker"), named(adaptation)
    kernel = infer.BlackJAX(problem.model, *parts, step_size=0.3, **options)
    rounds = 50 if "target_ess" not in options else 2
    settings = {"num_warmup": rounds, "num_samples": 1, "num_chains": 2048}
    return problem, run_chains(kernel, *problem.args, **settings).get_samples()


def test_particles_arrive_at_the_posterior_or_are_no_draws():
    """By tempering alone, from the prior, whose sd is another."""
    problem, draws = tempered("adaptive_tempered_smc")
    assert_exact(draws, problem)
    _, draws = tempered("adaptive_tempered_smc", target_ess=0.999)
    assert all(np.isnan(values).all() for values in draws.values())


def test_states_that_are_positions_are_moved():
    """The sd of these steps is known, also for a step that is not small."""
    kernel = infer.BlackJAX(one_number, langevin, steps_per_draw=10)
    draws = run_chains(kernel, num_warmup=5, num_samples=10, num_chains=512)
    expected = (1 - 0.2 / 2) ** -0.5
    np.testing.assert_allclose(np.std(draws.get_samples()["x"]), expected, rtol=0.05)


# -- the contract ----------------------------------------------------------------------


CHAIN_OPTIONS = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}


@each("name", ["own warm-up", "sgld", "dynamic_hmc"], fast=1)
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


@each(
    ("name", "method", "bar"),
    [("own warm-up", jax.vmap, False), ("nuts", "sequential", True)],
    fast=1,
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
    counts = mcmc.get_extra_fields(group_by_chain=True)["num_gradients"]
    assert np.min(counts[:, 0]) >= WARMUP + 2
    assert np.min(np.diff(counts)) >= 2
    assert f"{sizes.mean():.2e}" in mcmc.sampler.get_diagnostics_str(mcmc.last_state)


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


def test_pickles_of_algorithms_are_the_algorithms():
    algorithm = pickle.loads(pickle.dumps(blackjax().sgld))
    kernel = infer.BlackJAX(SPREAD.model, algorithm, step_size=1e-3)
    state = kernel.init(jax.random.key(0), 0, None, SPREAD.args, {})
    assert kernel.describe(state)["blackjax_algorithm"] == "sgld"


# -- what a run costs ------------------------------------------------------------------


# Integrator: its evaluations of the gradient in a step, an algorithm, and its options.
INTEGRATORS = {
    "isokinetic_mclachlan": (2, "mclmc", {"L": 1.0}),
    "omelyan": (5, "hmc", {"num_integration_steps": 1, **THREE}),
}


@each("name", INTEGRATORS, fast=1)
def test_gradients_of_integrators_are_counted(name):
    """A draw has one for the caches, and those of a step."""
    evaluations, algorithm, options = INTEGRATORS[name]
    integrator = getattr(import_module("blackjax.mcmc.integrators"), name)
    options = options | {"step_size": 0.01, "integrator": integrator}
    kernel = infer.BlackJAX(SPREAD.model, named(algorithm), **options)
    first = kernel.init(jax.random.key(0), 0, None, SPREAD.args, {})
    then = kernel.sample(first, SPREAD.args, {})
    assert then.num_gradients - first.num_gradients == 1 + evaluations


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


SGHMC = partial(infer.SGHMC, step_size=1e-3, steps_per_draw=3, warm_start=0.0)
BY_HAND = [(partial(kernel_of, "own warm-up"), {}), (SGHMC, {"batch_size": BATCH})]


@each(("make", "kwargs"), BY_HAND, fast=1)
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


def test_other_keys_give_other_chains():
    """Also of kernels whose inner states have keys; their own are those of `MCMC`."""
    kernel = Gibbs([(kernel_of("slice"), ["w"]), (kernel_of("slice"), None)])
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


@pytest.mark.parametrize(("chains", "folds"), [(18, 4), (6, 2)])
def test_too_few_chains_for_folds_are_refused(chains, folds):
    parts = named("ghmc"), named(MEADS)
    kernel = infer.BlackJAX(one_number, *parts, num_folds=folds)
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
