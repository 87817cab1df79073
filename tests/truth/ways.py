"""Ways to a posterior: densities, kernels, wrappers, guides, AutoADF and exports, each held to the exact answer.

A way is a function of a problem that returns a :class:`Figure`; what it cannot do it refuses with an error of the
package. Chains start at exact draws of the posterior, many side by side: a kernel that leaves the posterior invariant
keeps its moments, whatever its mixing, and the chains are independent, which gives an honest standard error.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import random
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import MCMC, NUTS, SVI, Gibbs, Trace_ELBO
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import unconstrain_fn

from numpyro_bnn import guides, infer, symmetry, to_inference_data
from numpyro_bnn.infer.target import bind
from numpyro_bnn.program.plates import full_plates
from truth.quadrature import Problem, features

WIDEST = 5.0  # standard errors: one of a million right figures is beyond
MOST_ALIKE = 0.95  # correlation of the first and the last draws of chains that show anything


class Figure(NamedTuple):
    """How far a way is from the truth.

    :param error: largest error, in units of its own tolerance; at most 1 is right.
    :param text: the measured figure, as the table shows it.
    """

    error: float
    text: str


# -- chains -----------------------------------------------------------------------------------------


def beyond_chance(means: np.ndarray, problem: Problem, allowed: float = 0.0) -> Figure:
    """Compare means of features by chain (C, F) with the exact ones.

    :param allowed: bias of a kernel that is not exact, in posterior standard deviations.
    """
    nodes = features(problem.nodes)
    exact = problem.mean(nodes)
    sd = np.sqrt(np.maximum(problem.mean(nodes**2) - exact**2, 1e-12))
    standard_error = means.std(0, ddof=1) / np.sqrt(len(means))
    off = np.abs(means.mean(0) - exact)
    if not np.all(np.isfinite(means)):
        return Figure(np.inf, "draws are not finite")
    if np.max(standard_error / sd) > 0.15:
        return Figure(np.inf, f"standard error of {np.max(standard_error / sd):.2f} sd says nothing")
    worst = int(np.argmax(off / (WIDEST * standard_error + allowed * sd)))
    error = off[worst] / (WIDEST * standard_error[worst] + allowed * sd[worst])
    return Figure(float(error), f"z = {off[worst] / standard_error[worst]:.1f}, {off[worst] / sd[worst]:.3f} sd")


def has_moved(start: dict[str, np.ndarray], samples: dict[str, Any]) -> bool:
    """Whether the last draws of the chains are little correlated with the first, for every element."""
    for name, value in start.items():
        first = np.reshape(value, (len(value), -1))
        last = np.reshape(np.asarray(samples[name])[:, -1], (len(value), -1))
        if any(np.corrcoef(before, after)[0, 1] > MOST_ALIKE for before, after in zip(first.T, last.T, strict=True)):
            return False
    return True


def unconstrained(problem: Problem, sites: dict[str, np.ndarray], kwargs: dict[str, Any]) -> dict[str, Any]:
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

    :param constrained: whether the kernel takes initial values as the model has them, as ``Gibbs`` does.
    :param without: a site that the kernel does not sample.
    """
    kwargs = dict(problem.kwargs) | ({"batch_size": problem.batch} if minibatch and problem.batch else {})
    exact_draws = problem.draws(number)
    start: Any = None
    if from_exact:
        start = exact_draws if constrained else unconstrained(problem, exact_draws, kwargs)
        start = {name: value for name, value in start.items() if name != without}
    mcmc = MCMC(
        make(model or problem.model),
        num_warmup=warmup,
        num_samples=draws,
        num_chains=number,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(random.key(1), *problem.args, init_params=start, **kwargs)
    samples = mcmc.get_samples(group_by_chain=True)
    if start is not None and not has_moved(exact_draws, samples):
        return Figure(np.inf, "the chains hardly moved: nothing is shown")
    sites = {name: np.asarray(samples[name], np.float64) for name in problem.nodes}
    flat = features({name: value.reshape(-1, *value.shape[2:]) for name, value in sites.items()})
    return beyond_chance(flat.reshape(number, draws, -1).mean(1), problem, allowed)


# -- densities --------------------------------------------------------------------------------------


def log_joint_of(problem: Problem, chosen: np.ndarray, z: dict[str, Any]) -> np.ndarray:
    """Exact log density in the sampler's coordinates at chosen nodes."""
    coordinates = {name: value[chosen] for name, value in problem.coordinates.items()}
    exact = problem.log_joint(coordinates) - problem.log_volume(coordinates)
    sites = handlers.trace(handlers.seed(problem.model, 0)).get_trace(*problem.args, **problem.kwargs)
    for name, value in z.items():
        if name in problem.nodes:
            bijection = biject_to(sites[name]["fn"].support)
            jacobian = jax.vmap(lambda u, b=bijection: jnp.sum(b.log_abs_det_jacobian(u, b(u))))
            exact = exact + np.asarray(jacobian(value), np.float64)
    return exact


def density(problem: Problem) -> Figure:
    """The kernels' potential against the exact log joint density; on minibatches its mean over all of them."""
    kwargs = dict(problem.kwargs) | ({"batch_size": problem.batch} if problem.batch else {})
    target, start = bind("infer.SGLD", problem.model, random.key(0), init_to_uniform, problem.args, kwargs)
    chosen = np.random.default_rng(0).choice(len(problem.probabilities), 50, p=problem.probabilities)
    sites = {name: value[chosen] for name, value in problem.nodes.items()}
    z = unconstrained(problem, sites, kwargs)
    if start.keys() != z.keys():
        return Figure(np.inf, f"latent sites {sorted(start)}, right {sorted(z)}")
    batches: list[Any] = [{}]
    if target.plates:
        sets = [
            [(name, rows) for rows in itertools.combinations(range(plate.size), plate.batch_size)]
            for name, plate in target.plates.items()
        ]
        batches = [{name: jnp.asarray(rows) for name, rows in pairs} for pairs in itertools.product(*sets)]
    total = sum(
        np.asarray(jax.vmap(target.potential(problem.args, kwargs, batch))(z), np.float64) for batch in batches
    )
    off = np.abs(-total / len(batches) - log_joint_of(problem, chosen, z)).max()
    return Figure(off / 1e-4, f"{off:.0e} nats")


# -- wrappers ---------------------------------------------------------------------------------------


def inner_kernel(model: Callable) -> infer.GHMC:
    """Hamiltonian Monte Carlo with a step size that suits all problems, inside of the wrappers."""
    return infer.GHMC(model, step_size=0.03, num_steps=6, warm_start=0.0, steps_per_draw=1)


def symmetries_of(problem: Problem) -> list[symmetry.Symmetry]:
    """Symmetries of a problem: those found in a network, or orders of units written by hand."""
    if any(name.startswith("net/") for name in problem.nodes):
        return symmetry.find(problem.model, *problem.args)
    return [symmetry.Permutation([("w", 0)])]


def tempered(problem: Problem, inner: Callable, temper: str) -> Figure:
    """Parallel tempering with three replicas, given the temperatures."""
    make = lambda model: infer.ParallelTempering(inner(model), 3, lowest=0.25, temper=temper)  # noqa: E731
    return chains(make, problem, warmup=4, draws=25, number=512)


def moved(problem: Problem, exact: bool, temper: str | None = None) -> Figure:
    """Moves along the symmetries after each transition, alone or inside of parallel tempering."""
    symmetries = symmetries_of(problem)

    def make(model):
        kernel = infer.OrbitMoves(inner_kernel(model), symmetries, exact=exact)
        return kernel if temper is None else infer.ParallelTempering(kernel, 3, lowest=0.25, temper=temper)

    warmup, number = (0, 1024) if temper is None else (4, 512)
    return chains(make, problem, warmup=warmup, draws=40, number=number)


def redrawn_units(problem: Problem) -> Figure:
    """Units redrawn from their prior."""
    units = {"w": 0} if "w" in problem.nodes else {"net/Dense_0.kernel": 1, "net/Dense_1.kernel": 0}
    return chains(lambda model: infer.UnitMoves(inner_kernel(model), units, num_moves=5), problem, draws=80)


def on_quotient(problem: Problem) -> Figure:
    """NUTS on the model without its symmetries."""
    free = symmetry.quotient(problem.model, symmetries_of(problem), *problem.args, **problem.kwargs)
    return chains(NUTS, problem, model=free, warmup=150, draws=40, number=128, from_exact=False)


def collapsed(problem: Problem) -> Figure:
    """A sampler of the sites that remain without one that enters linearly; the draws have it back."""
    linear = "w" if "w" in problem.site_names else "b"
    free = infer.collapse(problem.model, [linear], *problem.args, **problem.kwargs)
    return chains(inner_kernel, problem, model=free, number=1024, without=linear)


def blocks_of_precisions(problem: Problem, temper: str | None = None) -> Figure:
    """Gibbs updates of scales, and HMC for the rest."""
    (site,) = problem.site_names & {"s", "tau"}

    def make(model):
        kernel = Gibbs([(infer.PrecisionGibbs(model), [site]), (inner_kernel(model), None)])
        return kernel if temper is None else infer.ParallelTempering(kernel, 3, lowest=0.25, temper=temper)

    warmup = 0 if temper is None else 4
    return chains(make, problem, warmup=warmup, draws=40, number=512, method=jax.vmap, constrained=True)


# -- guides -----------------------------------------------------------------------------------------


def evidence_of(make: Callable, problem: Problem, steps: int = 300, draws: int = 10_000) -> Figure:
    """The evidence by importance weights of a fitted guide: unbiased if its density and the model's are right."""
    guide = make(problem.model)
    svi = SVI(problem.model, guide, optax.adam(0.03), Trace_ELBO(num_particles=8))
    fit = guides.fit(svi, random.key(0), steps, *problem.args, progress_bar=False, **problem.kwargs)
    result = guides.evidence(
        guide, fit.params, *problem.args, rng_key=random.key(1), num_samples=draws, **problem.kwargs
    )
    exact = problem.log_evidence
    above = (result.elbo - exact) / (WIDEST * result.elbo_se + 1e-4)
    text = f"log Z {result.iw_bound - exact:+.3f} ± {result.iw_se:.3f}, ELBO {result.elbo - exact:+.2f}"
    if result.pareto_k > 0.5:  # the variance of the weights may be infinite: only the bound can be checked
        return Figure(float(above), f"ELBO {result.elbo - exact:+.2f}, k-hat {result.pareto_k:.2f}")
    off = abs(result.iw_bound - result.iw_bias - exact) / (WIDEST * result.iw_se + 1e-4)
    return Figure(float(max(above, off)), text)


# -- AutoADF ----------------------------------------------------------------------------------------


def dense_adf(problem: Problem, size: int = 160) -> tuple[np.ndarray, np.ndarray]:
    """One pass over the rows by dense quadrature: means and variances of a and b after moment matching of each."""
    mean, variance = np.array([0.0, 0.5]), np.ones(2)
    unit = np.linspace(-9, 9, 12 * size + 1)[::12]
    first, second = (mesh.ravel() for mesh in np.meshgrid(unit, unit, indexing="ij"))
    base = -0.5 * (first**2 + second**2)
    for row in range(6):
        sd = np.sqrt(variance)
        a, b = mean[0] + sd[0] * first, mean[1] + sd[1] * second
        weight = base + np.nan_to_num(problem.rows({"a": a, "b": b})[:, row], nan=0.0, neginf=-1e30)
        weight = np.exp(weight - weight.max())
        weight /= weight.sum()
        mean = np.array([weight @ a, weight @ b])
        variance = np.array([weight @ a**2, weight @ b**2]) - mean**2
    return mean, variance


def adf(problem: Problem) -> Figure:
    """`AutoADF` after one pass in the order of the rows, against the dense one."""
    guide = guides.AutoADF(problem.model)
    result = guide.run(
        random.key(0),
        *problem.args,
        num_epochs=1,
        init_means={"a": 0.0, "b": 0.5},
        orders=np.arange(6)[None],
        progress_bar=False,
        **problem.kwargs,
    )
    mean, variance = dense_adf(problem)
    draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(100_000,))
    found = np.array([[np.mean(draws[k]), np.var(draws[k])] for k in "ab"], np.float64).T
    error = np.array([np.sqrt(variance / 100_000), variance * np.sqrt(2 / 100_000)])
    off = np.abs(found - np.array([mean, variance]))
    exact_error = (off / np.array([np.sqrt(variance), variance])).max()
    return Figure(float((off / (WIDEST * error)).max()), f"{exact_error:.3f} sd")


# -- exports ----------------------------------------------------------------------------------------


def exported(problem: Problem) -> Figure:
    """Log likelihoods in ArviZ's format against those by hand, at the draws of a short run."""
    mcmc = MCMC(NUTS(problem.model), num_warmup=2, num_samples=10, progress_bar=False)
    mcmc.run(random.key(0), *problem.args, **problem.kwargs)
    idata = to_inference_data(mcmc)
    draws = {name: np.asarray(value, np.float64) for name, value in mcmc.get_samples().items()}
    exact = problem.rows({name: draws[name] for name in problem.axes})
    # A site of which all rows are masked is left out.
    found = np.asarray(idata["log_likelihood"]["y"]) if hasattr(idata, "log_likelihood") else exact[:, :0]
    found = found.reshape(len(exact), -1)
    exact = exact[:, ~np.isnan(exact).all(0)].reshape(len(exact), -1)
    found = found[:, ~np.isnan(found).all(0)]
    if found.shape != exact.shape:
        return Figure(np.inf, f"log likelihoods {found.shape}, right {exact.shape}")
    off = float(np.abs(found - exact).max()) if exact.size else 0.0
    return Figure(off / 1e-3, f"{off:.0e} nats")


# -- the table --------------------------------------------------------------------------------------

# Ways that have something to say about some problems only.
APPLIES: dict[Callable, Callable[[Problem], bool]] = {
    density: lambda problem: problem.completed is None,
    exported: lambda problem: problem.rows is not None,
    adf: lambda problem: problem.rows is not None and problem.site_names == {"a", "b"},
    collapsed: lambda problem: len(problem.site_names) > 1 and bool(problem.site_names & {"w", "b"}),
    redrawn_units: lambda problem: bool(problem.site_names & {"w", "net/Dense_0.kernel"}),
}


def applies(way: Callable, problem: Problem) -> bool:
    """Whether a way has something to say about a problem."""
    return APPLIES.get(getattr(way, "func", way), lambda problem: True)(problem)


_SHORT = {"warm_start": 0.0, "step_size": 5e-4, "steps_per_draw": 300}
_MOMENTUM = {"warm_start": 0.0, "steps_per_draw": 50}
NOISY = {"allowed": 0.03, "minibatch": True}

KERNELS: dict[str, Callable[[Problem], Figure]] = {
    "NUTS of NumPyro": partial(
        chains, partial(NUTS, step_size=0.2, adapt_step_size=False, max_tree_depth=4), number=512
    ),
    "SGLD": partial(chains, partial(infer.SGLD, **_SHORT), **NOISY),
    "PSGLD": partial(chains, partial(infer.PSGLD, **_SHORT), warmup=5, draws=100, **NOISY),
    "SGHMC": partial(chains, partial(infer.SGHMC, step_size=1e-3, **_MOMENTUM), **NOISY),
    "SGNHT": partial(chains, partial(infer.SGNHT, step_size=1e-3, **_MOMENTUM), **NOISY),
    "CyclicalSGLD": partial(
        chains, partial(infer.CyclicalSGLD, step_size=1e-3, cycle_length=400, draws_per_cycle=4), **NOISY
    ),
    "MALA": partial(chains, partial(infer.MALA, step_size=0.05, warm_start=0.0, steps_per_draw=20)),
    "GHMC": partial(chains, partial(infer.GHMC, step_size=0.1, num_steps=3, warm_start=0.0, steps_per_draw=5)),
    "GGMC": partial(chains, partial(infer.GGMC, step_size=0.03, warm_start=0.0, steps_per_draw=40)),
    "MCLMC": partial(
        chains,
        partial(infer.MCLMC, step_size=0.025, decoherence_length=1.0, warm_start=0.0, steps_per_draw=120),
        allowed=0.05,
        minibatch=True,
    ),
}
WRAPPERS: dict[str, Callable[[Problem], Figure]] = {
    "ParallelTempering, likelihood": partial(tempered, inner=inner_kernel, temper="likelihood"),
    "ParallelTempering, joint": partial(tempered, inner=inner_kernel, temper="joint"),
    "PrecisionGibbs": blocks_of_precisions,
    "PrecisionGibbs in ParallelTempering, likelihood": partial(blocks_of_precisions, temper="likelihood"),
    "PrecisionGibbs in ParallelTempering, joint": partial(blocks_of_precisions, temper="joint"),
    "OrbitMoves": partial(moved, exact=True),
    "OrbitMoves, exact=False": partial(moved, exact=False),
    "OrbitMoves in ParallelTempering": partial(moved, exact=False, temper="likelihood"),
    "UnitMoves": redrawn_units,
    "symmetry.quotient": on_quotient,
    "collapse": collapsed,
}
GUIDES: dict[str, Callable[[Problem], Figure]] = {
    "AutoMeanField": partial(evidence_of, guides.AutoMeanField),
    "AutoStructured": partial(evidence_of, guides.AutoStructured),
    "AutoBlocks, full rank": partial(evidence_of, partial(guides.AutoBlocks, blocks={"*": guides.FullRank()})),
    "AutoCoupling": partial(evidence_of, partial(guides.AutoCoupling, num_flows=4, hidden=(8,))),
    "AutoADF": adf,
}
RESULTS: dict[str, Callable[[Problem], Figure]] = {"density of our kernels": density, "to_inference_data": exported}
