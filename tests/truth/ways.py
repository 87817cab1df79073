"""Ways to a posterior: densities, kernels, wrappers, guides, AutoADF and exports, each
held to the exact answer.

A way is a function of a problem that returns a :class:`Figure`; what it cannot do it
refuses with an error of the package. Chains start at exact draws of the posterior, many
side by side: a kernel that leaves the posterior invariant keeps its moments, whatever
its mixing, and the chains are independent, which gives an honest standard error.
"""

import itertools
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import registry
from jax import random
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import MCMC, NUTS, SVI, Gibbs, Trace_ELBO
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import unconstrain_fn

from numpyro_bnn import guides, infer, symmetry, to_inference_data
from numpyro_bnn.infer.model_arguments import Start
from numpyro_bnn.infer.target import bind
from numpyro_bnn.program.plates import full_plates
from truth.quadrature import Problem, features

WIDEST = 5.0  # standard errors: one of a million right figures is beyond
MOST_ALIKE = (
    0.95  # correlation of the first and the last draws of chains that show anything
)


class Figure(NamedTuple):
    """How far a way is from the truth, in units of its own tolerance: at most 1 is
    right; and the figure to show.
    """

    error: float
    text: str


# -- chains ----------------------------------------------------------------------------


def beyond_chance(means: np.ndarray, problem: Problem, allowed: float) -> Figure:
    """Compare means of features by chain (C, F) with the exact ones."""
    nodes = features(problem.nodes)
    exact, squares = problem.probabilities @ nodes, problem.probabilities @ nodes**2
    sd = np.sqrt(np.maximum(squares - exact**2, 1e-12))
    standard_error = means.std(0, ddof=1) / np.sqrt(len(means))
    if not np.all(np.isfinite(means)):
        return Figure(np.inf, "draws are not finite")
    if np.max(standard_error / sd) > 0.15:
        return Figure(
            np.inf,
            f"standard error of {np.max(standard_error / sd):.2f} sd says nothing",
        )
    off = np.abs(means.mean(0) - exact)
    errors = off / (WIDEST * standard_error + allowed * sd)
    worst = int(np.argmax(errors))
    text = (
        f"z = {off[worst] / standard_error[worst]:.1f}, {off[worst] / sd[worst]:.3f} sd"
    )
    return Figure(float(errors[worst]), text)


def has_moved(start: dict[str, np.ndarray], samples: dict[str, Any]) -> bool:
    """Whether the last draws of the chains are nearly uncorrelated with the first."""
    for name, value in start.items():
        first, last = (
            np.reshape(v, (len(value), -1)).T
            for v in (value, np.asarray(samples[name])[:, -1])
        )
        if any(
            np.corrcoef(*pair)[0, 1] > MOST_ALIKE
            for pair in zip(first, last, strict=True)
        ):
            return False
    return True


def options_of(problem: Problem, minibatch: bool = True) -> dict[str, Any]:
    """Keywords of the model: on minibatches, if it takes any."""
    return {"batch_size": problem.batch} if minibatch and problem.batch else {}


def unconstrained(
    problem: Problem, sites: dict[str, np.ndarray], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Draws of the sites as samplers represent them, (draws, ...)."""
    model = full_plates(handlers.seed(problem.model, 0))
    values = {name: jnp.asarray(value, jnp.float32) for name, value in sites.items()}
    return jax.vmap(partial(unconstrain_fn, model, problem.args, kwargs))(values)


def chains(
    make: Callable[[Callable], Any],
    problem: Problem,
    *,
    warmup: int = 0,
    draws: int = 20,
    number: int = 2048,
    allowed: float = 0.0,
    minibatch: bool = False,
    from_exact: bool = True,
    model: Callable | None = None,
    method: Any = "vectorized",
    constrained: bool = False,
    without: str | None = None,
) -> Figure:
    """Run a kernel from exact draws and compare the means of its own draws.

    :param allowed: bias of a kernel that is not exact, in posterior standard
        deviations.
    :param constrained: whether the kernel takes initial values as the model has them,
        as ``Gibbs`` does.
    :param without: a site that the kernel does not sample.
    """
    kwargs, exact, start = options_of(problem, minibatch), problem.draws(number), None
    if from_exact:
        start = exact if constrained else unconstrained(problem, exact, kwargs)
        start = {name: value for name, value in start.items() if name != without}
    options = {"num_chains": number, "chain_method": method, "progress_bar": False}
    mcmc = MCMC(
        make(model or problem.model), num_warmup=warmup, num_samples=draws, **options
    )
    mcmc.run(random.key(1), *problem.args, init_params=start, **kwargs)
    samples = mcmc.get_samples(group_by_chain=True)
    if from_exact and not has_moved(exact, samples):
        return Figure(np.inf, "the chains hardly moved: nothing is shown")
    flat = {
        name: np.reshape(samples[name], (number * draws, -1)).astype(np.float64)
        for name in problem.nodes
    }
    return beyond_chance(
        features(flat).reshape(number, draws, -1).mean(1), problem, allowed
    )


# -- densities -------------------------------------------------------------------------


def density(problem: Problem) -> Figure:
    """The kernels' potential against the exact log joint density; on minibatches its
    mean over all of them.
    """
    kwargs = options_of(problem)
    start = Start(random.key(0), 0, None, problem.args, kwargs)
    target, first = bind("infer.SGLD", problem.model, start, init_to_uniform)
    chosen = np.random.default_rng(0).choice(
        len(problem.probabilities), 50, p=problem.probabilities
    )
    z = unconstrained(
        problem, {name: value[chosen] for name, value in problem.nodes.items()}, kwargs
    )
    if first.keys() != z.keys():
        return Figure(np.inf, f"latent sites {sorted(first)}, right {sorted(z)}")
    coordinates = {name: value[chosen] for name, value in problem.coordinates.items()}
    exact = problem.log_joint(coordinates) - problem.log_volume(coordinates)
    sites = handlers.trace(handlers.seed(problem.model, 0)).get_trace(*problem.args)
    for name in problem.nodes:
        bijection = biject_to(sites[name]["fn"].support)
        jacobian = jax.vmap(
            lambda u, b=bijection: jnp.sum(b.log_abs_det_jacobian(u, b(u)))
        )
        exact = exact + np.asarray(jacobian(z[name]), np.float64)
    rows = [
        itertools.combinations(range(plate.size), plate.batch_size)
        for plate in target.plates.values()
    ]
    batches = [
        dict(zip(target.plates, map(jnp.asarray, chosen), strict=True))
        for chosen in itertools.product(*rows)
    ]
    potentials = [
        jax.vmap(target.potential(problem.args, kwargs, batch))(z) for batch in batches
    ]
    off = np.abs(np.mean(np.asarray(potentials, np.float64), 0) + exact).max()
    return Figure(off / 1e-4, f"{off:.0e} nats")


# -- wrappers --------------------------------------------------------------------------


def inner_kernel(model: Callable) -> infer.GHMC:
    """Hamiltonian Monte Carlo with a step size that suits all problems."""
    return infer.GHMC(
        model, step_size=0.03, num_steps=6, warm_start=0.0, steps_per_draw=1
    )


def symmetries_of(problem: Problem) -> list[symmetry.Symmetry]:
    """Symmetries of a problem: found in a network, or written by hand."""
    return (
        [symmetry.Permutation([("w", 0)])]
        if "w" in problem.nodes
        else symmetry.find(problem.model, *problem.args)
    )


def tempered(
    inner: Callable, problem: Problem, temper: str | None, alone: int = 0, **options
) -> Figure:
    """A kernel in parallel tempering with three replicas, given the temperatures; or so
    many chains of it alone.
    """

    def make(model):
        return infer.ParallelTempering(inner(model), 3, lowest=0.25, temper=temper)

    if temper is None:
        return chains(inner, problem, number=alone, **options)
    return chains(make, problem, warmup=4, number=512, **options)


def moved(problem: Problem, exact: bool, temper: str | None = None) -> Figure:
    """Moves along symmetries after each transition, alone or in tempering."""
    symmetries = symmetries_of(problem)

    def make(model):
        return infer.OrbitMoves(inner_kernel(model), symmetries, exact=exact)

    return tempered(make, problem, temper, alone=1024, draws=40)


def redrawn_units(problem: Problem) -> Figure:
    """Units redrawn from their prior."""
    units = (
        {"w": 0}
        if "w" in problem.nodes
        else {"net/Dense_0.kernel": 1, "net/Dense_1.kernel": 0}
    )
    return chains(
        lambda model: infer.UnitMoves(inner_kernel(model), units, num_moves=5),
        problem,
        draws=80,
    )


def collapsed(problem: Problem) -> Figure:
    """A sampler without one linear site, which the draws have again."""
    linear = "w" if "w" in problem.site_names else "b"
    free = infer.collapse(problem.model, [linear], *problem.args)
    return chains(inner_kernel, problem, model=free, number=1024, without=linear)


def blocks_of_precisions(problem: Problem, temper: str | None = None) -> Figure:
    """Gibbs updates of scales, and HMC for the rest."""
    (site,) = problem.site_names & {"s", "tau"}

    def make(model):
        return Gibbs(
            [(infer.PrecisionGibbs(model), [site]), (inner_kernel(model), None)]
        )

    return tempered(
        make, problem, temper, alone=512, draws=40, method=jax.vmap, constrained=True
    )


# -- guides ----------------------------------------------------------------------------


def evidence_of(make: Callable, problem: Problem) -> Figure:
    """The evidence by importance weights of a fitted guide: unbiased if its density and
    the model's are right.
    """
    guide = make(problem.model)
    svi = SVI(problem.model, guide, optax.adam(0.03), Trace_ELBO(num_particles=8))
    fit = guides.fit(svi, random.key(0), 300, *problem.args, progress_bar=False)
    result = guides.evidence(
        guide, fit.params, *problem.args, rng_key=random.key(1), num_samples=10_000
    )
    exact = problem.log_evidence
    above = (result.elbo - exact) / (WIDEST * result.elbo_se + 1e-4)
    text = (
        f"log Z {result.iw_bound - exact:+.3f} ± {result.iw_se:.3f}, ELBO "
        f"{result.elbo - exact:+.2f}"
    )
    if result.pareto_k > 0.5:
        # the variance of the weights may be infinite: only the bound can be checked
        return Figure(
            float(above),
            f"ELBO {result.elbo - exact:+.2f}, k-hat {result.pareto_k:.2f}",
        )
    off = abs(result.iw_bound - result.iw_bias - exact) / (WIDEST * result.iw_se + 1e-4)
    return Figure(float(max(above, off)), text)


# -- AutoADF ---------------------------------------------------------------------------


def dense_adf(problem: Problem, size: int = 160) -> tuple[np.ndarray, np.ndarray]:
    """One pass over the rows by dense quadrature: means and variances of a and b after
    moment matching of each.
    """
    mean, variance = np.array([0.0, 0.5]), np.ones(2)
    unit = np.linspace(-9, 9, 12 * size + 1)[::12]
    first, second = (mesh.ravel() for mesh in np.meshgrid(unit, unit, indexing="ij"))
    base = -0.5 * (first**2 + second**2)
    for row in range(6):
        sd = np.sqrt(variance)
        a, b = mean[0] + sd[0] * first, mean[1] + sd[1] * second
        weight = base + np.nan_to_num(
            problem.rows({"a": a, "b": b})[:, row], nan=0.0, neginf=-1e30
        )
        weight = np.exp(weight - weight.max())
        weight /= weight.sum()
        mean = np.array([weight @ a, weight @ b])
        variance = np.array([weight @ a**2, weight @ b**2]) - mean**2
    return mean, variance


def adf(problem: Problem) -> Figure:
    """`AutoADF` after one pass in the order of the rows, against the dense one."""
    guide = guides.AutoADF(problem.model)
    options = {"orders": np.arange(6)[None], "progress_bar": False}
    result = guide.run(
        random.key(0),
        *problem.args,
        num_epochs=1,
        init_means={"a": 0.0, "b": 0.5},
        **options,
    )
    mean, variance = dense_adf(problem)
    draws = guide.sample_posterior(
        random.key(1), result.params, sample_shape=(100_000,)
    )
    found = np.array(
        [[np.mean(draws[k]), np.var(draws[k])] for k in "ab"], np.float64
    ).T
    off = np.abs(found - np.array([mean, variance])) / np.array(
        [np.sqrt(variance), variance]
    )
    chance = WIDEST * np.sqrt(np.array([[1.0], [2.0]]) / 100_000)
    return Figure(float((off / chance).max()), f"{off.max():.3f} sd")


# -- exports ---------------------------------------------------------------------------


def exported(problem: Problem) -> Figure:
    """Log likelihoods in ArviZ's format against those by hand, of a short run."""
    mcmc = MCMC(NUTS(problem.model), num_warmup=2, num_samples=10, progress_bar=False)
    mcmc.run(random.key(0), *problem.args)
    idata = to_inference_data(mcmc)
    exact = problem.rows(
        {
            name: np.asarray(mcmc.get_samples()[name], np.float64)
            for name in problem.axes
        }
    )
    # A site of which all rows are masked is left out.
    found = (
        np.asarray(idata["log_likelihood"]["y"])
        if hasattr(idata, "log_likelihood")
        else exact[:, :0]
    )
    found, exact = (
        x[:, ~np.isnan(x).all(0)]
        for x in (found.reshape(len(exact), -1), exact.reshape(len(exact), -1))
    )
    if found.shape != exact.shape:
        return Figure(np.inf, f"log likelihoods {found.shape}, right {exact.shape}")
    off = float(np.abs(found - exact).max()) if exact.size else 0.0
    return Figure(off / 1e-3, f"{off:.0e} nats")


# -- the table -------------------------------------------------------------------------

# Ways that have something to say about some problems only.
APPLIES: dict[Callable, Callable[[Problem], bool]] = {
    density: lambda problem: problem.completed is None,
    exported: lambda problem: problem.rows is not None,
    adf: lambda problem: problem.rows is not None and problem.site_names == {"a", "b"},
    collapsed: lambda problem: (
        len(problem.site_names) > 1 and bool(problem.site_names & {"w", "b"})
    ),
    redrawn_units: lambda problem: bool(
        problem.site_names & {"w", "net/Dense_0.kernel"}
    ),
}


def blackjax_nuts(problem: Problem, **options: Any) -> Figure:
    """NUTS of BlackJAX with a given step size and metric."""
    blackjax = import_module("blackjax")
    size = sum(
        np.size(value)
        for value in unconstrained(problem, problem.draws(1), {}).values()
    )
    settings = {
        "algorithm": blackjax.nuts,
        "step_size": 0.3,
        "inverse_mass_matrix": np.ones(size),
        "max_num_doublings": 4,
    }
    return chains(partial(infer.BlackJAX, **settings), problem, **options)


KERNELS: dict[str, Callable[[Problem], Figure]] = {
    "NUTS of NumPyro": partial(
        chains,
        partial(NUTS, step_size=0.2, adapt_step_size=False, max_tree_depth=4),
        number=512,
    ),
    "BlackJAX NUTS": partial(blackjax_nuts, draws=10, number=512),
    **{
        name: partial(
            chains,
            partial(usual, **registry.KERNELS[name].truth.options),
            **registry.KERNELS[name].truth.chains,
        )
        for name, usual in registry.USUAL.items()
    },
}
WRAPPERS: dict[str, Callable[[Problem], Figure]] = {
    "ParallelTempering, likelihood": partial(
        tempered, inner_kernel, temper="likelihood", draws=25
    ),
    "ParallelTempering, joint": partial(
        tempered, inner_kernel, temper="joint", draws=25
    ),
    "PrecisionGibbs": blocks_of_precisions,
    "PrecisionGibbs in ParallelTempering, likelihood": partial(
        blocks_of_precisions, temper="likelihood"
    ),
    "PrecisionGibbs in ParallelTempering, joint": partial(
        blocks_of_precisions, temper="joint"
    ),
    "OrbitMoves": partial(moved, exact=True),
    "OrbitMoves, exact=False": partial(moved, exact=False),
    "OrbitMoves in ParallelTempering": partial(moved, exact=False, temper="likelihood"),
    "UnitMoves": redrawn_units,
    "collapse": collapsed,
}
GUIDES: dict[str, Callable[[Problem], Figure]] = {
    "AutoMeanField": partial(evidence_of, guides.AutoMeanField),
    "AutoStructured": partial(evidence_of, guides.AutoStructured),
    "AutoBlocks, full rank": partial(
        evidence_of, partial(guides.AutoBlocks, blocks={"*": guides.FullRank()})
    ),
    "AutoCoupling": partial(
        evidence_of, partial(guides.AutoCoupling, num_flows=4, hidden=(8,))
    ),
    "AutoADF": adf,
}
RESULTS: dict[str, Callable[[Problem], Figure]] = {
    "density of our kernels": density,
    "to_inference_data": exported,
}
