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
    python -m examples.benchmarks.gauntlet --seeds 0 0 --families groups censored
"""

import argparse
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.scipy.special import logsumexp
from numpyro.contrib.module import random_flax_module
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, log_likelihood
from numpyro.infer.autoguide import AutoDelta

import numpyro_bnn as bnn
from examples.benchmarks.shared import continued_report, put_table, write_report
from examples.shared import at_least, markdown

NEW_ROWS = 500
MOST_ROWS_OF_FULL_GRADIENTS = 2000
VERDICTS = ("good", "behind", "announced", "SILENT", "crash")
# options in which runs of a file may differ
VARIED = ("methods", "seeds", "families", "only", "docs")
FAMILY_ROWS, GROUPS = 150, 12


# -- problems --------------------------------------------------------------------------


class Problem(NamedTuple):
    """What a seed draws; ``new`` rows are those that no method sees.

    :param net: makes a network of its own kind, from its input shape and its number of
        outputs.
    """

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
    family: str = ""
    net: Callable | None = None

    @property
    def label(self) -> int | str:
        """What tells problems apart."""
        return self.family or self.seed

    def describe(self) -> str:
        words = self._asdict()
        for name in ("x", "y", "x_new", "y_new", "net"):
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


def cut_points() -> dist.Distribution:
    return dist.TransformedDistribution(
        dist.Normal(0.0, 2.0).expand([3]).to_event(1),
        dist.transforms.OrderedTransform(),
    )


# Those of families. The second output of two of them is a column of the inputs.
OTHER_LIKELIHOODS = {
    "two outputs": Likelihood(
        2,
        lambda f, s: dist.Normal(f, s["sigma"]).to_event(1),
        {"sigma": lambda: dist.HalfNormal(1.0).expand([2]).to_event(1)},
    ),
    "proportions": Likelihood(
        1,
        lambda f, s: dist.BetaProportion(jax.nn.sigmoid(f[..., 0]), s["size"]),
        {"size": lambda: dist.LogNormal(2.0, 1.0)},
    ),
    "binomial": Likelihood(1, lambda f, s: dist.Binomial(20, logits=f[..., 0])),
    "zero-inflated": Likelihood(
        1,
        lambda f, s: dist.ZeroInflatedPoisson(s["gate"], jnp.exp(f[..., 0])),
        {"gate": lambda: dist.Beta(1.0, 1.0)},
    ),
    "ordinal": Likelihood(
        1, lambda f, s: dist.OrderedLogistic(f[..., 0], s["cuts"]), {"cuts": cut_points}
    ),
    "gamma": Likelihood(
        1,
        lambda f, s: dist.Gamma(s["shape"], s["shape"] / jnp.exp(f[..., 0])),
        {"shape": lambda: dist.LogNormal(0.0, 1.0)},
    ),
    "vague noise": Likelihood(
        1,
        lambda f, s: dist.Normal(f[..., 0], s["precision"] ** -0.5),
        {"precision": lambda: dist.Gamma(0.01, 0.01)},
    ),
    "masked": Likelihood(
        2,
        lambda f, s: dist.Normal(f[..., 0], s["sigma"]).mask(f[..., 1] > 0),
        {"sigma": noise_site},
    ),
    "censored": Likelihood(
        2,
        lambda f, s: dist.RightCensoredDistribution(
            dist.Normal(f[..., 0], s["sigma"]), (f[..., 1] > 0).astype(int)
        ),
        {"sigma": noise_site},
    ),
}
ALL_LIKELIHOODS = LIKELIHOODS | OTHER_LIKELIHOODS

PRIORS: dict[str, Callable[[], Any]] = {
    "Normal": bnn.priors.Normal,
    "Hierarchical": bnn.priors.Hierarchical,
    "centered Hierarchical": lambda: bnn.priors.Hierarchical(centered=True),
    "ARD": bnn.priors.ARD,
    "Laplace": bnn.priors.Laplace,
}
OTHER_PRIORS: dict[str, Callable[[], Any]] = {
    "StudentT": bnn.priors.StudentT,
    "ScaleMixture": bnn.priors.ScaleMixture,
    "GammaPrecision": bnn.priors.GammaPrecision,
    "RegularizedHorseshoe": bnn.priors.RegularizedHorseshoe,
    "by site": lambda: {
        "*kernel": bnn.priors.Hierarchical(),
        "*bias": dist.Cauchy(0.0, 1.0),
    },
}


def network(layers: Callable[[int], Any], prior: Any) -> Callable:
    """What makes a network: ``make(input_shape, outputs)``, called in a model."""

    def make(shape: tuple[int, ...], outputs: int) -> Callable:
        return bnn.random_network("net", layers(outputs), shape, prior)

    return make


def network_model(
    likelihood_name: str,
    widths: Sequence[int],
    activation: str,
    prior_name: str,
    make_net: Callable | None = None,
) -> Callable:
    """The NumPyro model that a user would write."""
    likelihood = ALL_LIKELIHOODS[likelihood_name]
    if make_net is None:
        prior = (PRIORS | OTHER_PRIORS)[prior_name]()
        make_net = network(lambda out: bnn.nn.MLP([*widths, out], activation), prior)

    def model(x, y=None, batch_size=None):
        net = make_net(x.shape[1:], likelihood.outputs)
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
        problem.likelihood,
        problem.widths,
        problem.activation,
        problem.prior,
        problem.net,
    )


def linear(problem: Problem) -> np.ndarray:
    """Log densities of the new rows under a linear model of the same likelihood."""
    from scipy import stats
    from sklearn import linear_model

    if problem.likelihood in OTHER_LIKELIHOODS or problem.x.ndim > 2:
        return linear_mode(problem)
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
    sd = max(sd, 1e-3 * y.std())  # two rows lie on a line
    return stats.norm.logpdf(y_new, fit.predict(x_new), sd)


def linear_mode(problem: Problem) -> np.ndarray:
    """The same where scikit-learn has none: the mode of a network without hidden units,
    on standardized inputs.
    """

    def make(shape: tuple[int, ...], outputs: int) -> Callable:
        linear_net = network(lambda out: bnn.nn.MLP([out]), bnn.priors.Normal())
        if problem.likelihood in ("masked", "censored"):
            return with_first_column(linear_net)(shape, outputs)
        return linear_net(shape, outputs)

    x, x_new = (a.reshape(len(a), -1) for a in (problem.x, problem.x_new))
    start = int(problem.likelihood in ("masked", "censored"))  # of the inputs
    mean, sd = x.mean(0), np.maximum(x.std(0), 1e-6)
    mean[:start], sd[:start] = 0.0, 1.0
    model = network_model(problem.likelihood, (), "", "", make)
    rows = jnp.asarray((x - mean) / sd), jnp.asarray(problem.y)
    new_rows = jnp.asarray((x_new - mean) / sd), jnp.asarray(problem.y_new)
    guide = AutoDelta(model)
    svi = SVI(model, guide, optax.adam(0.02), Trace_ELBO())
    fit = svi.run(jax.random.key(0), 2000, *rows, progress_bar=False)
    mode = {name: value[None] for name, value in guide.median(fit.params).items()}
    densities = log_likelihood(model, mode, *new_rows)
    return np.asarray(densities["y"][0], float)


# -- families of problems that no seed draws -------------------------------------------


def with_first_column(make: Callable) -> Callable:
    """The network of all inputs but the first, which is an output as it is."""

    def made(shape: tuple[int, ...], outputs: int) -> Callable:
        net = make((shape[0] - 1,), outputs - 1)
        return lambda x: jnp.concatenate([net(x[:, 1:]), x[:, :1]], 1)

    return made


def with_groups(shape: tuple[int, ...], outputs: int) -> Callable:
    """Effects of groups, whose codes are the first column."""
    net = SMALL((shape[0] - 1,), outputs)
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("groups", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(0.0, spread))
    return lambda x: net(x[:, 1:]) + effect[x[:, 0].astype(int)][:, None]


def with_embedding(shape: tuple[int, ...], outputs: int) -> Callable:
    """Codes of categories in the first column, as three numbers each."""
    table = numpyro.sample("table", dist.Normal().expand([GROUPS, 3]).to_event(2))
    net = SMALL((shape[0] + 2,), outputs)
    return lambda x: net(jnp.concatenate([x[:, 1:], table[x[:, 0].astype(int)]], 1))


def recurrent(shape: tuple[int, ...], outputs: int) -> Callable:
    from flax import linen

    class Recurrent(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(outputs)(linen.RNN(linen.GRUCell(4))(x)[:, -1])

    prior = bnn.priors.Normal()
    return random_flax_module("net", Recurrent(), prior, input_shape=(1, *shape))


def correlated(shape: tuple[int, ...], outputs: int) -> Callable:
    """Weights that depend on each other a priori."""
    size = shape[0]
    covariance = 0.9 * jnp.ones((size, size)) + 0.1 * jnp.eye(size)
    rows = dist.MultivariateNormal(jnp.zeros(size), covariance).expand([6]).to_event(1)
    w = numpyro.sample("w", rows)
    b = numpyro.sample("b", dist.Normal().expand([6]).to_event(1))
    v = numpyro.sample("v", dist.Normal(0.0, 0.4).expand([6, outputs]).to_event(2))
    return lambda x: jnp.tanh(x @ w.T + b) @ v


def normalized(norm: Any) -> Callable:
    return network(lambda out: bnn.nn.MLP([8, out], norm=norm), bnn.priors.Normal())


SMALL = network(lambda out: bnn.nn.MLP([8, out], "tanh"), bnn.priors.Normal())


def families() -> dict[str, Problem]:
    """Rows, likelihoods, networks and priors that :func:`draw` does not have, a problem
    of each.
    """
    rng = np.random.default_rng(1)
    total = FAMILY_ROWS + NEW_ROWS
    x, noise = rng.normal(size=(total, 3)), rng.normal(size=total)
    signal = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1]
    y, rate, chance = signal + 0.1 * noise, np.exp(signal), 1 / (1 + np.exp(-signal))
    codes, effects = rng.integers(0, GROUPS, total), rng.normal(0.0, 0.7, GROUPS)
    with_codes, of_groups = np.c_[codes, x], y + effects[codes]
    learned = np.arange(total) < FAMILY_ROWS
    seen = (rng.uniform(size=total) < 0.7) | ~learned
    cut = (y > 0.8) & learned
    images = rng.normal(size=(total, 6, 6, 1))
    images[signal > 0, :3, :3] += 1.0
    series = rng.normal(size=(total, 5, 2))
    few = np.r_[:30, FAMILY_ROWS:total]
    cnn = network(lambda out: bnn.nn.CNN([3], [out], window=3), bnn.priors.Normal())
    zeros = rng.uniform(size=total) < 0.3
    found: dict[str, Problem] = {}

    def add(name: str, x: Any, y: Any, likelihood: str = "normal", **options: Any):
        rows = len(x) - NEW_ROWS
        kind = np.float32 if y.dtype.kind == "f" else np.int32
        x, y = x.astype(np.float32), y.astype(kind)
        words = {"widths": (8,), "activation": "tanh", "prior": "Normal", **options}
        found[name] = Problem(
            seed=1,
            rows=rows,
            columns=x.shape[1],
            inputs=name,
            function="",
            noise=0.1,
            likelihood=likelihood,
            x=x[:rows],
            y=y[:rows],
            x_new=x[rows:],
            y_new=y[rows:],
            family=name,
            **words,
        )

    # rows and columns
    add("one column", x[few, :1], np.sin(2 * x[few, 0]) + 0.1 * noise[few])
    add("30 x 40", rng.normal(size=(len(few), 40)), y[few], prior="Hierarchical")
    add("two rows", x[FAMILY_ROWS - 2 :], y[FAMILY_ROWS - 2 :])
    add("same columns", np.c_[x, x[:, :1], 0 * noise + 1], y, prior="Hierarchical")
    add("nearly equal", x[:, :1] + 0.03 * rng.normal(size=(total, 4)), y, prior="ARD")
    add("heavy inputs", rng.standard_t(1.5, size=x.shape), y, activation="relu")
    add("integers", rng.integers(0, 9, size=x.shape), y)
    add("large inputs", 5000 + 1000 * x, y)
    add("large targets", x, 1e4 * y)
    add("small targets", x, 1e-4 * y)
    add("far targets", x, y + 1e6)
    add("outliers", x, np.where(rng.uniform(size=total) < 0.05, 30 * noise, y))
    add("no signal", x, noise, activation="relu", prior="Hierarchical")
    add("no noise", x, signal)
    # likelihoods
    rare = (signal + 0.3 * noise > 1.6).astype(int)
    levels = np.digitize(signal + 0.5 * rng.logistic(size=total), [-1, 0, 1])
    share = np.clip(rng.beta(10 * chance, 10 * (1 - chance)), 1e-4, 1 - 1e-4)
    add("rare class", x, rare, "bernoulli", prior="Hierarchical")
    add("missing class", x, np.digitize(y, [-0.5, 0.5]), "categorical", prior="ARD")
    add("large counts", x, rng.poisson(400 * rate), "poisson")
    add("two outputs", x, np.c_[y, 10 * signal**2 + noise], "two outputs")
    add("proportions", x, share, "proportions")
    add("binomial", x, rng.binomial(20, chance), "binomial")
    add("zero-inflated", x, rng.poisson(3 * rate) * ~zeros, "zero-inflated")
    add("ordinal", x, levels, "ordinal")
    add("gamma", x, rng.gamma(3, rate / 3), "gamma", activation="relu")
    add("vague noise", x, y, "vague noise", prior="Hierarchical")
    hidden = with_first_column(SMALL)
    add("masked", np.c_[seen, x], np.where(seen, y, 1e3), "masked", net=hidden)
    add("censored", np.c_[cut, x], np.where(cut, 0.8, y), "censored", net=hidden)
    # networks
    add("one unit", x, y, widths=(1,), prior="Hierarchical")
    add("no hidden layer", x, y, widths=())
    add("three layers", x, y, widths=(16, 16, 16), activation="relu")
    add("layer norm", x, y, net=normalized(bnn.nn.LayerNorm()))
    add("batch norm", x, y, net=normalized(bnn.nn.BatchNorm()))
    add("images", images, (signal > 0).astype(int), "bernoulli", net=cnn)
    add("recurrent", series, np.tanh(series[..., 0]).sum(1) / 2, net=recurrent)
    add("groups", with_codes, of_groups, net=with_groups)
    add("embedding", with_codes, of_groups, net=with_embedding)
    add("correlated prior", x, y, net=correlated)
    for prior in OTHER_PRIORS:
        add(f"prior {prior}", x, y, prior=prior)
    return found


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
    size = {"batch_size": max(1, min(256, problem.rows // 4))} if batch else {}
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
        "seed": problem.label,
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
    best: dict[int | str, float] = {}
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
        "--families",
        nargs="*",
        default=[],
        choices=("all", *families()),
        help="problems that no seed draws",
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


def problems(args: argparse.Namespace) -> Iterator[Problem]:
    """Those of the seeds, then the families."""
    yield from map(draw, range(*args.seeds))
    by_name = families()
    for name in by_name if "all" in args.families else args.families:
        yield by_name[name]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    report = continued_report(args, VARIED)
    rows = report["rows"]
    done = {(row["seed"], row["method"]) for row in rows}
    for problem in problems(args):
        words = problem.describe()
        if problem.rows > args.most_rows or any(
            word not in words for word in args.only
        ):
            continue
        base = linear(problem)
        for name in args.methods:
            if (problem.label, name) in done or not METHODS[name].takes(problem):
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
