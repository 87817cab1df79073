"""Do the defaults hold? Random problems, every method as a user first calls it.

A seed draws the rows and columns of a table, the kind of its inputs, a function, a
likelihood, a network and a prior. Nothing is set by problem. A score is the mean log
density of 500 new rows. It is compared with a linear model of the same likelihood and
with the best method on that problem:

    good       within .2 nats of the best, and no worse than the linear model
    behind     no worse than the linear model, more than .2 nats behind the best
    announced  worse than the linear model, or refused, and says so
    SILENT     worse than the linear model, or not a number, without a word
    crash      an error that does not name an argument

Worse means by more than .05 nats and two standard errors of the difference. `alarms`
counts the good runs that warn nevertheless. Writes JSON after each run, and leaves out
what the file already has.

    python -m examples.benchmarks.gauntlet --seeds 0 40 --methods SGNHT "mean field"
    python -m examples.benchmarks.gauntlet --seeds 0 200 --only relu Hierarchical
"""

import argparse
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.scipy.special import logsumexp
from numpyro.infer import MCMC, NUTS, SVI

import numpyro_bnn as bnn
from examples.benchmarks.shared import continued_report, put_table, write_report
from examples.shared import at_least, markdown

NEW_ROWS = 500
MOST_ROWS_OF_FULL_GRADIENTS = 2000
VERDICTS = ("good", "behind", "announced", "SILENT", "crash")
VARIED = (
    "methods",
    "seeds",
    "only",
    "docs",
)  # options in which runs of a file may differ


# -- problems --------------------------------------------------------------------------


class Problem(NamedTuple):
    """What a seed draws; ``new`` rows are those that no method sees."""

    seed: int
    rows: int
    columns: int
    inputs: str
    function: str
    noise: float
    likelihood: str
    widths: tuple[int, ...]
    activation: str
    prior: str
    x: np.ndarray
    y: np.ndarray
    x_new: np.ndarray
    y_new: np.ndarray

    def describe(self) -> str:
        words = self._asdict()
        for name in ("x", "y", "x_new", "y_new"):
            del words[name]
        return " ".join(f"{name}={value}" for name, value in words.items())


def draw(seed: int) -> Problem:
    """A problem and its data."""
    rng = np.random.default_rng([seed, 20])

    def pick(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    rows = pick(60, 150, 500, 1500, 5000, 20_000)
    columns = pick(1, 3, 8, 20)
    inputs = pick("normal", "correlated", "binary", "heavy tails", "one-hot", "shifted")
    function = pick("additive", "product", "network", "steps", "periodic", "linear")
    likelihood = pick(*LIKELIHOODS)
    noise = pick(0.03, 0.1, 0.3, 1.0)
    x = draw_inputs(rng, inputs, rows, columns)
    hidden = x @ (rng.normal(size=(columns, 4)) / columns**0.5)
    weights = rng.normal(size=4)
    signal = {
        "additive": np.sin(2 * hidden) @ weights,
        "product": hidden[:, 0] * hidden[:, 1] + hidden[:, 2],
        "network": np.tanh(2 * hidden) @ weights,
        "steps": np.sign(hidden[:, 0]) + 0.5 * (hidden[:, 1] > 0.5),
        "periodic": np.sin(4 * hidden[:, 0]) + hidden[:, 1],
        "linear": hidden[:, 0],
    }[function]
    signal = (signal - signal.mean()) / max(signal.std(), 1e-6)
    y = draw_targets(rng, likelihood, signal, hidden, noise)
    if y.dtype.kind == "f":
        y = (y - y[:rows].mean()) / y[:rows].std()
    return Problem(
        seed=seed,
        rows=rows,
        columns=columns,
        inputs=inputs,
        function=function,
        noise=noise,
        likelihood=likelihood,
        widths=pick((1,), (8,), (32,), (50,), (16, 16), (32, 32, 32)),
        activation=pick("relu", "tanh", "silu", "gelu"),
        prior=pick(*PRIORS),
        x=x[:rows].astype(np.float32),
        y=y[:rows].astype(np.float32 if y.dtype.kind == "f" else np.int32),
        x_new=x[rows:].astype(np.float32),
        y_new=y[rows:].astype(np.float32 if y.dtype.kind == "f" else np.int32),
    )


def draw_inputs(rng: Any, kind: str, rows: int, columns: int) -> np.ndarray:
    """Standardized by the rows that methods see."""
    x = rng.normal(size=(rows + NEW_ROWS, columns))
    if kind == "correlated":
        x = x @ (np.eye(columns) + 0.7 * rng.normal(size=(columns, columns)) / columns)
    elif kind == "binary":
        x = (x > 0.5).astype(float)
    elif kind == "heavy tails":
        x = rng.standard_t(2.5, size=x.shape)
    elif kind == "one-hot" and columns > 1:
        levels = columns // 2 + 1
        x[:, :levels] = np.eye(levels)[rng.integers(levels, size=len(x))]
    x = (x - x[:rows].mean(0)) / np.maximum(x[:rows].std(0), 1e-6)
    if kind == "shifted":
        x[rows:] += 0.3
    return x


def draw_targets(
    rng: Any, kind: str, signal: np.ndarray, hidden: np.ndarray, noise: float
) -> np.ndarray:
    if kind == "normal":
        return signal + noise * rng.normal(size=len(signal))
    if kind == "heteroscedastic":
        return signal + noise * np.exp(0.7 * hidden[:, 1]) * rng.normal(
            size=len(signal)
        )
    if kind == "student":
        return signal + noise * rng.standard_t(3, size=len(signal))
    if kind == "bernoulli":
        probability = 1 / (1 + np.exp(-signal / max(noise, 0.1)))
        return (rng.uniform(size=len(signal)) < probability).astype(int)
    if kind == "categorical":
        logits = np.stack([signal, hidden[:, 1], hidden[:, 2], 0 * signal], -1)
        logits = logits / max(noise, 0.2)
        return np.argmax(logits + rng.gumbel(size=logits.shape), -1)
    rate = np.exp(1 + 0.7 * signal)
    if kind == "negative binomial":
        rate = rate * rng.gamma(3.0, 1 / 3.0, size=len(rate))
    return rng.poisson(rate)


# -- models ----------------------------------------------------------------------------


class Likelihood(NamedTuple):
    """A distribution of the outputs of a network (N, outputs) and of further sites."""

    outputs: int
    of: Callable[[jax.Array, dict[str, Any]], dist.Distribution]
    sites: Mapping[str, Callable[[], dist.Distribution]] = {}


def noise_site() -> dist.Distribution:
    return dist.HalfNormal(1.0)


LIKELIHOODS = {
    "normal": Likelihood(
        1, lambda f, s: dist.Normal(f[..., 0], s["sigma"]), {"sigma": noise_site}
    ),
    "heteroscedastic": Likelihood(
        2, lambda f, s: dist.Normal(f[..., 0], 1e-3 + jnp.exp(f[..., 1]))
    ),
    "student": Likelihood(
        1, lambda f, s: dist.StudentT(4.0, f[..., 0], s["sigma"]), {"sigma": noise_site}
    ),
    "bernoulli": Likelihood(1, lambda f, s: dist.Bernoulli(logits=f[..., 0])),
    "categorical": Likelihood(4, lambda f, s: dist.Categorical(logits=f)),
    "poisson": Likelihood(1, lambda f, s: dist.Poisson(jnp.exp(f[..., 0]))),
    "negative binomial": Likelihood(
        1,
        lambda f, s: dist.NegativeBinomial2(jnp.exp(f[..., 0]), s["concentration"]),
        {"concentration": lambda: dist.LogNormal(0.0, 1.0)},
    ),
}

PRIORS: dict[str, Callable[[], Any]] = {
    "Normal": bnn.priors.Normal,
    "Hierarchical": bnn.priors.Hierarchical,
    "centered Hierarchical": lambda: bnn.priors.Hierarchical(centered=True),
    "ARD": bnn.priors.ARD,
    "Laplace": bnn.priors.Laplace,
}


def network_model(
    likelihood_name: str, widths: Sequence[int], activation: str, prior_name: str
) -> Callable:
    """The NumPyro model that a user would write."""
    likelihood = LIKELIHOODS[likelihood_name]
    layers = bnn.nn.MLP([*widths, likelihood.outputs], activation)
    prior = PRIORS[prior_name]()

    def model(x, y=None, batch_size=None):
        net = bnn.random_network("net", layers, x.shape[1:], prior)
        sites = {
            name: numpyro.sample(name, make())
            for name, make in likelihood.sites.items()
        }
        with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
            observed = None if y is None else y[i]
            numpyro.sample("y", likelihood.of(net(x[i]), sites), obs=observed)

    return model


def build(problem: Problem) -> Callable:
    return network_model(
        problem.likelihood, problem.widths, problem.activation, problem.prior
    )


def linear(problem: Problem) -> np.ndarray:
    """Log densities of the new rows under a linear model of the same likelihood."""
    from scipy import stats
    from sklearn import linear_model

    x, y, x_new, y_new = problem.x, problem.y, problem.x_new, problem.y_new
    if problem.likelihood in ("bernoulli", "categorical"):
        fit = linear_model.LogisticRegression(max_iter=1000).fit(x, y)
        classes = int(max(y.max(), y_new.max())) + 1
        probabilities = np.full((len(x_new), classes), 1e-4)
        probabilities[:, fit.classes_] = np.maximum(fit.predict_proba(x_new), 1e-4)
        return np.log(probabilities[np.arange(len(y_new)), y_new])
    if problem.likelihood in ("poisson", "negative binomial"):
        fit = linear_model.PoissonRegressor(alpha=1e-3, max_iter=500).fit(x, y)
        return stats.poisson.logpmf(y_new, fit.predict(x_new))
    fit = linear_model.RidgeCV(np.logspace(-3, 3, 13)).fit(x, y)
    residual = y - fit.predict(x)
    sd = np.sqrt(np.sum(residual**2) / max(1, len(y) - x.shape[1] - 1))
    return stats.norm.logpdf(y_new, fit.predict(x_new), sd)


# -- methods ---------------------------------------------------------------------------


def mixture(idata: Any) -> np.ndarray:
    """Log densities of the new rows, over the draws that the export does not mark."""
    values = np.asarray(idata["predictions"]["y_log_likelihood"], float)
    values = values.reshape(-1, values.shape[-1])
    finite = np.isfinite(values).all(1)
    values = values[finite] if finite.any() else values
    return np.asarray(logsumexp(values, axis=0) - np.log(len(values)))


def sampled(kernel: Any, problem: Problem, draws: int, batch: bool) -> np.ndarray:
    mcmc = MCMC(
        kernel,
        num_warmup=draws,
        num_samples=draws,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(*call_of(problem, batch)[0], **call_of(problem, batch)[1])
    new = {"x": jnp.asarray(problem.x_new), "y": jnp.asarray(problem.y_new)}
    return mixture(bnn.to_inference_data(mcmc, predictions=new))


def call_of(problem: Problem, batch: bool) -> tuple[tuple, dict[str, int]]:
    """Key and data, and the size of a minibatch if there is one."""
    size = {"batch_size": min(256, problem.rows // 4)} if batch else {}
    data = jnp.asarray(problem.x), jnp.asarray(problem.y)
    return (jax.random.key(problem.seed), *data), size


def minibatch_chains(name: str) -> Callable:
    def run(problem: Problem, model: Callable) -> np.ndarray:
        return sampled(getattr(bnn.infer, name)(model), problem, 100, batch=True)

    return run


def chains(make: Callable) -> Callable:
    def run(problem: Problem, model: Callable) -> np.ndarray:
        return sampled(make(model), problem, 300, batch=False)

    return run


def ensemble(problem: Problem, model: Callable) -> np.ndarray:
    members = bnn.infer.ensemble(
        model, 10_000, num_chains=4, num_samples=100, progress_bar=False
    )
    members.run(*call_of(problem, False)[0])
    new = {"x": jnp.asarray(problem.x_new), "y": jnp.asarray(problem.y_new)}
    return mixture(bnn.to_inference_data(members, predictions=new))


def variational(make: Callable) -> Callable:
    def run(problem: Problem, model: Callable) -> np.ndarray:
        guide, steps = make(model), 5000
        optimizer = optax.adam(optax.cosine_decay_schedule(0.01, steps))
        svi = SVI(model, guide, optimizer, bnn.guides.TraceLocalReparam_ELBO())
        (key, *data), size = call_of(problem, True)
        fit = bnn.guides.fit(svi, key, steps, *data, progress_bar=False, **size)
        new = {"x": jnp.asarray(problem.x_new), "y": jnp.asarray(problem.y_new)}
        idata = bnn.to_inference_data(
            fit, guide=guide, args=tuple(data), predictions=new, num_samples=200
        )
        return mixture(idata)

    return run


def deterministic(make: Callable) -> Callable:
    def run(problem: Problem, model: Callable) -> np.ndarray:
        guide = make(model)
        (key, *data), _ = call_of(problem, False)
        fit = guide.run(key, *data, progress_bar=False)
        new = jnp.asarray(problem.x_new), jnp.asarray(problem.y_new)
        # what the health report says of it is heard
        bnn.to_inference_data(fit, guide=guide, args=tuple(data), num_samples=200)
        return np.asarray(guide.log_predictive_density(fit.params, *new), float)

    return run


def estimator(problem: Problem, model: Callable) -> np.ndarray:
    """The default of tables; it takes numbers and classes, and no model."""
    from numpyro_bnn.estimators import Classifier, Regressor

    classes = problem.likelihood in ("bernoulli", "categorical")
    fit = (Classifier if classes else Regressor)(random_state=problem.seed)
    fit.fit(problem.x, problem.y)
    return np.asarray(fit.log_predictive_density(problem.x_new, problem.y_new), float)


class Method(NamedTuple):
    """:param run: log densities of the new rows, for a problem and its model.
    :param full: every step takes a gradient of all rows; not run on many.
    :param counts: it has a likelihood for counts.
    """

    run: Callable[[Problem, Callable], np.ndarray]
    full: bool = False
    counts: bool = True

    def takes(self, problem: Problem) -> bool:
        few = problem.rows <= MOST_ROWS_OF_FULL_GRADIENTS
        counts = problem.likelihood in ("poisson", "negative binomial")
        return (few or not self.full) and (self.counts or not counts)


METHODS = {
    **{name: Method(minibatch_chains(name)) for name in ("SGNHT", "SGHMC", "SGLD")},
    "MCLMC, minibatches": Method(minibatch_chains("MCLMC")),
    "MCLMC": Method(
        chains(lambda model: bnn.infer.MCLMC(model, steps_per_draw=20)), full=True
    ),
    "NUTS": Method(chains(lambda model: NUTS(model, max_tree_depth=7)), full=True),
    "ensemble": Method(ensemble, full=True),
    "mean field": Method(variational(bnn.guides.AutoMeanField)),
    "coupling": Method(variational(bnn.guides.AutoCoupling)),
    **{
        f"Laplace, {structure}": Method(
            deterministic(
                lambda model, structure=structure: bnn.guides.AutoLaplace(
                    model, structure
                )
            ),
            full=True,
        )
        for structure in ("kron", "diag", "low_rank", "full")
    },
    "ADF": Method(deterministic(bnn.guides.AutoADF)),
    "estimator": Method(estimator, full=True, counts=False),
}


# -- verdicts --------------------------------------------------------------------------


def attempt(name: str, problem: Problem, base: np.ndarray) -> dict[str, Any]:
    """A run: its score, how far it is from the linear model, and what it said."""
    started, error, score, ahead, ahead_error = (
        time.process_time(),
        "",
        None,
        None,
        None,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            densities = METHODS[name].run(problem, build(problem))
        except Exception as cause:  # the verdict says of which kind it is
            error = f"{type(cause).__name__}: {cause}"[:300]
        else:
            if np.isfinite(densities).all():
                difference = densities - base
                score, ahead = float(densities.mean()), float(difference.mean())
                ahead_error = float(difference.std() / len(difference) ** 0.5)
    health = [str(w.message) for w in caught if "Health" in w.category.__name__]
    return {
        "seed": problem.seed,
        "method": name,
        "problem": problem.describe(),
        "score": score,
        "ahead_of_linear": ahead,
        "standard_error": ahead_error,
        "error": error,
        "warnings": [re.sub(r"\s+", " ", text)[:300] for text in health],
        "seconds": round(time.process_time() - started, 1),
    }


def verdict(row: Mapping[str, Any], best: float) -> str:
    if row["error"]:
        return "announced" if "argument `" in row["error"] else "crash"
    score, ahead, error = row["score"], row["ahead_of_linear"], row["standard_error"]
    if score is None or ahead < -0.05 - 2 * error:
        return "announced" if row["warnings"] else "SILENT"
    return "good" if score >= best - 0.2 else "behind"


def verdicts(rows: list[dict[str, Any]]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """By method: the verdict of each run, beside the best score of its problem."""
    best: dict[int, float] = {}
    for row in rows:
        if row["score"] is not None:
            of_linear = row["score"] - row["ahead_of_linear"]
            known = best.get(row["seed"], -np.inf)
            best[row["seed"]] = max(known, row["score"], of_linear)
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for row in rows:
        judged = verdict(row, best.get(row["seed"], -np.inf)), row
        found.setdefault(row["method"], []).append(judged)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """How often each method is good; of the good runs, how many warn."""
    cells = []
    by_method = verdicts(rows)
    for name in METHODS:
        if name not in by_method:
            continue
        judged = by_method[name]
        counts = Counter(word for word, _ in judged)
        alarms = sum(word == "good" and bool(row["warnings"]) for word, row in judged)
        seconds = np.median([row["seconds"] for _, row in judged])
        numbers = [counts[word] for word in VERDICTS]
        cells.append((name, len(judged), *numbers, alarms, f"{seconds:.0f}"))
    return markdown(("method", "problems", *VERDICTS, "alarms", "seconds"), cells)


# -- script ----------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.gauntlet",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--seeds", nargs=2, type=int, default=[0, 200], help="first, and last + 1"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="to run"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="words that describe a problem"
    )
    parser.add_argument(
        "--most-rows", type=int, default=20_000, help="of a problem that is run"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output/gauntlet.json"), help="JSON file"
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(parser, args, ("most_rows",))
    at_least(parser, args, ("seeds",), 0)
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    report = continued_report(args, VARIED)
    rows = report["rows"]
    done = {(row["seed"], row["method"]) for row in rows}
    for seed in range(*args.seeds):
        problem = draw(seed)
        words = problem.describe()
        if problem.rows > args.most_rows or any(
            word not in words for word in args.only
        ):
            continue
        base = linear(problem)
        for name in args.methods:
            if (seed, name) in done or not METHODS[name].takes(problem):
                continue
            row = attempt(name, problem, base)
            rows.append(row)
            write_report(args.output, report)
            said = row["error"] or " ".join(row["warnings"])
            print(
                (
                    f"{words}: {name} {row['score']}, linear {base.mean():.3f}. "
                    f"{said[:100]}"
                ),
                file=sys.stderr,
                flush=True,
            )
        jax.clear_caches()  # hundreds of problems would fill the memory with programs
    print(table(rows), flush=True)
    put_table(args.docs, "gauntlet", table(rows), report)
    return report


if __name__ == "__main__":
    main()
