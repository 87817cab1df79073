"""Effective draws per gradient and per second: samplers of BlackJAX, NUTS of NumPyro
and `MCLMC`.

The posteriors are two of the tests and a Gaussian, whose moments are known, and small
networks on data sets, of which the function at test inputs counts. All ways run the
same model with the same number of vectorized chains, each from its own start. `MCLMC`
and those of BlackJAX get a number of gradients for the warm-up, and as many for the
draws; NUTS gets 300 transitions or more of warm-up, and draws until they are spent. The
gradients of the warm-up are shown, and do not count in the rates. Seconds are those of
processors, without compilation. A sampler whose largest R-hat is above 1.05 has not
converged: its rates stand in brackets, and those within its chains say only how fast
each moves around its own function. *Covariance* is `MCLMC` whose `preconditioner` is
the covariance of draws of a first run, whose gradients count as warm-up. Writes JSON,
and goes on where it was interrupted.

    python -m examples.benchmarks.blackjax_ess --data FOLDER --output
    output/blackjax_ess.json
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from numpyro.infer import NUTS
from numpyro.infer.mcmc import MCMCKernel

import numpyro_bnn as bnn
from examples import loaders
from examples.benchmarks.shared import continued_report, put_table, write_report
from examples.shared import at_least, markdown
from numpyro_bnn import infer, metrics

SIZE, CONDITION = 30, 30.0
TREE_DEPTH = 7
MAX_RHAT = 1.05
TEST_ROWS = 50
# Names in the table, and in tests/truth.
REFERENCES = {
    "half-line": "half-line",
    "ReLU unit": "ReLU, scale half-normal, non-centered",
}
SETS = ("boston", "energy", "concrete", "digits")
POSTERIORS = (*REFERENCES, "gaussian", *SETS)


class Posterior(NamedTuple):
    """A model, and the function that counts.

    :param model: a model without arguments.
    :param function: the values that count of draws by site, (S, C, ...).
    :param gradients_per_draw: of a chain that is thinned.
    :param exact: means and sds of these values, if they are known.
    """

    model: Callable[[], None]
    function: Callable[[Mapping[str, Array]], np.ndarray]
    gradients_per_draw: int
    exact: tuple[np.ndarray, np.ndarray] | None = None


def values_of(name: str, draws: Mapping[str, Array]) -> np.ndarray:
    return np.asarray(draws[name], np.float64)


def gaussian() -> Posterior:
    """A Gaussian with correlations: its widest direction is 30 times its narrowest."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, SIZE)))[0]
    factor = basis * np.geomspace(1.0, CONDITION, SIZE)
    covariance = factor @ factor.T

    def model() -> None:
        numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(SIZE), covariance))

    exact = np.zeros(SIZE), np.sqrt(np.diag(covariance))
    return Posterior(model, partial(values_of, "f"), 20, exact)


def reference(name: str) -> Posterior:
    """A posterior of the tests: the values of its sites, with moments by quadrature."""
    tests = str(Path(__file__).parents[2] / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    problem = import_module("truth.problems").PROBLEMS[REFERENCES[name]]
    sites = sorted(problem.site_names)

    def joined(values: Mapping[str, Any], batch: int) -> np.ndarray:
        flat = []
        for site in sites:
            array = np.asarray(values[site], np.float64)
            flat.append(array.reshape(*array.shape[:batch], -1))
        return np.concatenate(flat, -1)

    nodes, weights = joined(problem.nodes, 1), problem.probabilities
    mean = weights @ nodes
    sd = np.sqrt(weights @ (nodes - mean) ** 2)
    model = partial(problem.model, *problem.args)
    return Posterior(model, partial(joined, batch=2), 8, (mean, sd))


def load(name: str, folder: Path | None) -> loaders.Dataset:
    if name == "digits":
        data = loaders.load_sklearn("digits", test_fraction=0.85)  # few rows to train
        return loaders.standardize(data, targets=False)
    folder = folder or os.environ.get("NUMPYRO_BNN_DATA")
    if not folder:
        print("no data folder: the diabetes set of scikit-learn instead")
        return loaders.standardize(loaders.load_sklearn("diabetes"))
    return loaders.standardize(loaders.load_uci(name, 0, folder))


def network(name: str, folder: Path | None) -> Posterior:
    """Ten tanh units; the function at test inputs, of digits its probabilities."""
    data = load(name, folder)
    x, y = jnp.asarray(data.x_train, float), jnp.asarray(data.y_train)
    x_new = jnp.asarray(data.x_test[:TEST_ROWS], float)
    outputs = 10 if name == "digits" else 1
    net = bnn.nn.MLP([10, outputs], "tanh")

    def model() -> None:
        f = bnn.random_network("net", net, x.shape[1:], bnn.priors.Hierarchical())
        if name == "digits":
            numpyro.deterministic("f", jax.nn.softmax(f(x_new)))
            numpyro.sample("y", dist.Categorical(logits=f(x)).to_event(1), obs=y)
        else:
            sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
            numpyro.deterministic("f", f(x_new)[..., 0])
            numpyro.sample("y", dist.Normal(f(x)[..., 0], sigma).to_event(1), obs=y)

    return Posterior(model, partial(values_of, "f"), 40)


def posterior_of(name: str, folder: Path | None) -> Posterior:
    if name == "gaussian":
        return gaussian()
    return reference(name) if name in REFERENCES else network(name, folder)


# -- samplers --------------------------------------------------------------------------


def tune_barker(
    rng_key: Array, log_density: Callable, z: Any, num_steps: int
) -> tuple[Any, dict[str, Array], int]:
    """A warm-up for Barker's proposal, which has none in BlackJAX: step sizes for 57 %
    acceptance, at first with unit scales, then with those of the second quarter.
    """
    barker = import_module("blackjax").barker
    adaptation = import_module("blackjax.adaptation.step_size")
    begin, update, final = adaptation.dual_averaging_adaptation(0.57)
    kernel, flat = barker.build_kernel(), ravel_pytree(z)[0]

    def step(scales: Array, carry: tuple, rng_key: Array) -> tuple[tuple, Array]:
        state, tuning = carry
        size = jnp.exp(tuning.log_step_size)
        state, info = kernel(rng_key, state, log_density, size, scales)
        accepted = jnp.nan_to_num(info.acceptance_rate)
        return (state, update(tuning, accepted)), ravel_pytree(state.position)[0]

    keys, half = random.split(rng_key, num_steps), num_steps // 2
    carry = barker.init(z, log_density), begin(0.1)
    carry, places = lax.scan(partial(step, jnp.ones_like(flat)), carry, keys[:half])
    scales = jnp.var(places[half // 2 :], axis=0) + 1e-6
    carry = carry[0], begin(jnp.asarray(1.0))
    (state, tuning), _ = lax.scan(partial(step, scales), carry, keys[half:])
    found = {"step_size": final(tuning), "inverse_mass_matrix": scales}
    return state.position, found, num_steps + 1


# Gradients of a step of each sampler, on average; `None` if trajectories differ.
WAYS = {
    "NUTS": None,
    "NUTS, low rank (BlackJAX)": None,
    "MAMS (BlackJAX)": 5,
    "mclmc (BlackJAX)": 2,
    "mclmc, low rank (BlackJAX)": 2,
    "Barker (BlackJAX)": 1,
    "MCLMC": 2,
    "MCLMC, covariance": 2,
}


def kernel_of(way: str, model: Callable, steps: int) -> MCMCKernel:
    if way == "NUTS":
        return NUTS(model, max_tree_depth=TREE_DEPTH)
    if way == "MCLMC":
        return infer.MCLMC(model, steps_per_draw=steps)
    blackjax = import_module("blackjax")
    if way.startswith("NUTS"):
        adaptation = blackjax.window_adaptation_low_rank
        limit = {"max_num_doublings": TREE_DEPTH}
        return infer.BlackJAX(model, blackjax.nuts, adaptation, **limit)
    algorithm, adaptation = {
        "MAMS": ("adjusted_mclmc_dynamic", "adjusted_mclmc_find_L_and_step_size"),
        "mclmc": ("mclmc", "mclmc_find_L_and_step_size"),
        "mclmc, low rank": ("mclmc", "mclmc_lrd_warmup"),
        "Barker": ("barker", ""),
    }[way.removesuffix(" (BlackJAX)")]
    tune = getattr(blackjax, adaptation) if adaptation else tune_barker
    return infer.BlackJAX(
        model, getattr(blackjax, algorithm), tune, steps_per_draw=steps
    )


class Lengths(NamedTuple):
    """Transitions of a part of a run, parts of warm-up, and steps of a transition."""

    part: int
    warm_up: int
    steps: int


def lengths_of(way: str, gradients: int, per_draw: int) -> Lengths:
    per_step = WAYS[way]
    if per_step is not None:
        part = max(gradients // (4 * per_draw), 2)
        return Lengths(part, 4, max(per_draw // per_step, 1))
    full = gradients // 2**TREE_DEPTH
    part = max(full // 4, 2)
    if per_draw < 40:  # small trees
        part = max(gradients // (4 * per_draw), 2)
    return Lengths(part, max(1, -(-max(300, full) // part)), 1)


# -- what is measured ------------------------------------------------------------------


class Chains:
    """Vectorized chains that go on in parts of one length, by one program."""

    def __init__(self, kernel: MCMCKernel, lengths: Lengths, keys: Array) -> None:
        num_warmup = lengths.warm_up * lengths.part
        self.state = kernel.init(keys, num_warmup, None, (), {})
        self.gradients, self.seconds = 0, 0.0
        # NUTS gives the gradients of each draw, others their sum so far
        self._is_nuts = isinstance(kernel, NUTS)
        constrain = jax.vmap(jax.vmap(kernel.postprocess_fn((), {})))
        self._constrain = jax.jit(constrain)

        def step(state: Any, _: None) -> tuple[Any, tuple]:
            state = kernel.sample(state, (), {})
            spent = state.num_steps if self._is_nuts else state.num_gradients
            return state, (state.z, spent)

        run = jax.jit(partial(lax.scan, step, xs=None, length=lengths.part))
        self._run = run.lower(self.state).compile()

    def go_on(self) -> dict[str, Array]:
        """The sites of further draws, (S, C, ...)."""
        start = time.process_time()
        self.state, (z, spent) = jax.block_until_ready(self._run(self.state))
        self.positions = z
        self.seconds += time.process_time() - start
        counts = np.asarray(spent, np.int64)
        if self._is_nuts:
            self.gradients += counts.sum()
        else:
            self.gradients = counts[-1].sum()
        return self._constrain(z)


def warmed_up(kernel: MCMCKernel, lengths: Lengths, keys: Array) -> Chains:
    chains = Chains(kernel, lengths, keys)
    for _ in range(lengths.warm_up):
        chains.go_on()
    return chains


def covariance_of(chains: Chains) -> np.ndarray:
    """Of unconstrained positions of a part; correlations are shrunk with the weight of
    five draws.
    """
    chains.go_on()
    leaves = [chains.positions[site] for site in sorted(chains.positions)]
    number = leaves[0].shape[0] * leaves[0].shape[1]
    flat = [np.asarray(leaf, np.float64).reshape(number, -1) for leaf in leaves]
    covariance = np.atleast_2d(np.cov(np.concatenate(flat, 1).T))
    variances = np.diag(np.diag(covariance))
    return (number * covariance + 5 * variances) / (number + 5)


def measure(name: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """One way on one posterior."""
    posterior = posterior_of(name, args.data)
    lengths = lengths_of(way, args.gradients, posterior.gradients_per_draw)
    keys = random.split(random.key(args.seed), args.num_chains)
    before = 0
    if way == "MCLMC, covariance":
        kernel = kernel_of("MCLMC", posterior.model, lengths.steps)
        first = warmed_up(kernel, lengths, random.split(keys[0], len(keys)))
        metric = covariance_of(first)
        kernel = infer.MCLMC(
            posterior.model, steps_per_draw=lengths.steps, preconditioner=metric
        )
        before = first.gradients
    else:
        kernel = kernel_of(way, posterior.model, lengths.steps)
    chains = warmed_up(kernel, lengths, keys)
    of_warm_up, chains.seconds = chains.gradients, 0.0
    parts: list[np.ndarray] = []
    while chains.gradients - of_warm_up < args.num_chains * args.gradients:
        parts.append(posterior.function(chains.go_on()))
    f = np.concatenate(parts).swapaxes(0, 1)
    spent = chains.gradients - of_warm_up
    return {
        "posterior": name,
        "way": way,
        "gradients": int(spent),
        "warm-up gradients": int(before + of_warm_up),
        "seconds per gradient": float(chains.seconds / spent),
        **mixing_of(f),
        **errors_of(f, posterior.exact),
    }


def mixing_of(f: np.ndarray) -> dict[str, Any]:
    """Effective sizes and R-hat of the function; entries that are constant are left
    out.
    """
    f = f.reshape(*f.shape[:2], -1)
    found = metrics.function_space(f)
    sizes = found.ess_bulk[np.isfinite(found.ess_bulk)]
    # of a chain that does not move it is not a number
    by_chain = [metrics.function_space(chain[None]).ess_bulk for chain in f]
    within = np.nansum(by_chain, axis=0)
    return {
        "draws": f.shape[0] * f.shape[1],
        "ess": {"median": float(np.median(sizes)), "least": float(np.min(sizes))},
        "ess within chains": float(np.median(within)),
        "largest r_hat": float(found.max_rhat),
    }


def errors_of(
    f: np.ndarray, exact: tuple[np.ndarray, np.ndarray] | None
) -> dict[str, float]:
    """Largest errors of means, in standard deviations, and of standard deviations."""
    if exact is None:
        return {}
    mean, sd = exact
    of_means = np.abs(f.mean((0, 1)) - mean) / sd
    of_sds = np.abs(f.std((0, 1)) / sd - 1)
    return {"error of means": float(of_means.max()), "of sds": float(of_sds.max())}


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["posterior", "sampler", "ESS per 1,000 gradients, median", "least"]
    heads += ["within chains, median", "ESS per second, median", "largest R-hat"]
    heads += ["gradients of warm-up"]
    heads += ["error of a mean (sd)", "of an sd (%)"]
    lines = []
    for row in rows:
        sizes, gradients = row["ess"], row["gradients"]
        seconds = gradients * row["seconds per gradient"]
        rates = [1000 * sizes["median"] / gradients, 1000 * sizes["least"] / gradients]
        rates += [1000 * row["ess within chains"] / gradients]
        rates += [sizes["median"] / seconds]
        converged = row["largest r_hat"] <= MAX_RHAT
        shape = "{:.3g}" if converged else "({:.3g})"
        rates = [shape.format(rate) for rate in rates]
        rates[2] = rates[2].strip("()")
        cells = [row["posterior"], row["way"], *rates]
        cells += [f"{row['largest r_hat']:.2f}"]
        cells += [f"{100 * row['warm-up gradients'] / gradients:.0f} %"]
        if "of sds" in row:
            cells += [f"{row['error of means']:.2f}", f"{100 * row['of sds']:.0f}"]
        else:
            cells += ["", ""]
        lines.append(cells)
    return markdown(heads, lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.blackjax_ess",
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    every = list(POSTERIORS)
    parser.add_argument("--posteriors", nargs="+", choices=POSTERIORS, default=every)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--num-chains", type=int, default=4, help="vectorized")
    parser.add_argument("--gradients", type=int, default=20_000, help="of a chain")
    parser.add_argument("--seed", type=int, default=0, help="seed of the chains")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    default = Path("output/blackjax_ess.json")
    parser.add_argument("--output", type=Path, default=default, help="JSON file")
    parser.add_argument("--docs", type=Path, help="page whose table shows the figures")
    args = parser.parse_args(argv)
    at_least(parser, args, ("num_chains",), 2)
    at_least(parser, args, ("gradients",), 100)
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure all ways on all posteriors that are not measured yet."""
    args = parse(argv)
    report = continued_report(args, ("posteriors", "ways"))
    rows = {(row["posterior"], row["way"]): row for row in report["rows"]}
    for name in args.posteriors:
        for way in args.ways:
            if (name, way) in rows:
                continue
            rows[name, way] = measure(name, way, args)
            print(rows[name, way], flush=True)
            report["rows"] = sorted(rows.values(), key=order)
            write_report(args.output, report)
    put_table(args.docs, "blackjax_ess", table(report["rows"]), report)
    return report


def order(row: Mapping[str, Any]) -> tuple[int, int]:
    return POSTERIORS.index(row["posterior"]), list(WAYS).index(row["way"])


if __name__ == "__main__":
    main()
