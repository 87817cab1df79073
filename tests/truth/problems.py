"""Models whose posteriors are known by quadrature: supports, hidden units, handlers and
plates, likelihoods.

Every row holds a NumPyro model and, beside it, the log joint density in NumPy, written
by hand.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam
from scipy.special import gammaln, log_ndtr

from numpyro_bnn import nn, priors, random_network
from truth.quadrature import Axis, Problem, joined, line, normal, positive

X = np.array([-1.4, -0.6, 0.1, 0.7, 1.2, 1.9])
Y = np.array([-1.1, -0.2, 0.6, 0.5, 1.4, 1.2])
ARGS = (X.astype(np.float32), Y.astype(np.float32))
SD = 0.5
LINE = {"a": line(-6, 6, 200), "b": line(-5.5, 6.5, 200)}


# -- parts of models, and of their densities at coordinates c --------------------------


def observe(distribution, y, inside=None, **options):
    """Observe a row for each element of y."""
    with numpyro.plate("data", len(y)), inside or nullcontext():
        numpyro.sample("y", distribution, obs=y, **options)


def weights():
    """Priors of the line a + b x."""
    return numpyro.sample("a", dist.Normal(0.0, 1.0)), numpyro.sample(
        "b", dist.Normal(0.5, 1.0)
    )


def observed(likelihood: Callable) -> Callable:
    """The line as predictor f of a likelihood."""

    def model(x, y):
        a, b = weights()
        observe(likelihood(a + b * x), y)

    return model


real = observed(lambda f: dist.Normal(f, SD))


def means(c):
    """Means a + b x of all rows at all nodes, (G, N)."""
    return c["a"][:, None] + c["b"][:, None] * X


def line_rows(c):
    """Log likelihood of each row of the line, (G, N)."""
    return normal(Y, means(c), SD)


def line_density(prior_power: float = 1.0, power: Any = 1.0) -> Callable:
    """Log joint of the line, with powers of the prior of b and of each row."""

    def log_joint(c):
        prior = normal(c["a"], 0, 1) + prior_power * normal(c["b"], 0.5, 1)
        return prior + (power * line_rows(c)).sum(-1)

    return log_joint


real_density = line_density()


def of_line(
    name: str,
    model: Callable,
    log_joint: Callable,
    *data: np.ndarray,
    axes: Any = None,
    **others,
) -> Problem:
    """A problem with coordinates a and b, and maybe with a third argument."""
    return Problem(name, model, (*ARGS, *data), axes or LINE, log_joint, **others)


def gamma(x, shape, rate):
    """Log density of a gamma distribution."""
    return shape * np.log(rate) - gammaln(shape) + (shape - 1) * np.log(x) - rate * x


def half_normal(s):
    return np.log(2) + normal(s, 0, 1)


# -- supports --------------------------------------------------------------------------

TWO = np.array([2.0, -1.5])
COUNTS = np.array([1, 4, 2])


def positive_scale(y):
    observe(dist.Normal(0.0, numpyro.sample("s", dist.Gamma(0.5, 1.0))), y)


def two(fn: dist.Distribution) -> dist.Distribution:
    return fn.expand([2]).to_event(1)


def of_two(prior: Callable) -> Callable:
    """The line whose weights are one site of two elements."""

    def model(x, y):
        w = numpyro.sample("w", prior())
        observe(dist.Normal(w[0] + w[1] * x, SD), y)

    return model


def simplex(counts):
    p = numpyro.sample("p", dist.Dirichlet(jnp.array([2.0, 1.0, 3.0])))
    numpyro.sample("y", dist.Multinomial(7, p), obs=counts)


def simplex_sites(c):
    u, v = c["u"], c["v"]
    return {"p": np.stack([u, (1 - u) * v, (1 - u) * (1 - v)], -1)}


def simplex_density(c):
    constant = (
        gammaln(6.0)
        - gammaln([2.0, 1.0, 3.0]).sum()
        + gammaln(8)
        - gammaln(COUNTS + 1).sum()
    )
    powers = np.array([1.0, 0.0, 2.0]) + COUNTS
    return (
        constant + (np.log(simplex_sites(c)["p"]) * powers).sum(-1) + np.log1p(-c["u"])
    )


def ordered_density(c):
    # w = (first, first + exp(u)): first and u are standard normal.
    prior = normal(c["first"], 0, 1) + normal(np.log(c["gap"]), 0, 1) - np.log(c["gap"])
    return prior + line_rows({"a": c["first"], "b": c["first"] + c["gap"]}).sum(-1)


def of_interval(name: str, prior: Callable, axis: Axis, log_prior: Callable) -> Problem:
    """Two weights between bounds."""

    def log_joint(c):
        return (
            log_prior(c["u"])
            + log_prior(c["v"])
            + line_rows({"a": c["u"], "b": c["v"]}).sum(-1)
        )

    sites = lambda c: {"w": np.stack([c["u"], c["v"]], -1)}  # noqa: E731
    return Problem(name, of_two(prior), ARGS, {"u": axis, "v": axis}, log_joint, sites)


SUPPORTS = [
    of_line("real", real, real_density),
    Problem(
        "positive",
        positive_scale,
        (TWO.astype(np.float32),),
        {"s": positive(1e-3, 60, 400)},
        lambda c: gamma(c["s"], 0.5, 1.0) + normal(TWO, 0, c["s"][:, None]).sum(-1),
    ),
    of_interval(
        "interval",
        lambda: two(dist.Uniform(-1.0, 1.0)),
        line(-1, 1),
        lambda u: np.log(0.5),
    ),
    of_interval(
        "half-line",
        lambda: two(dist.TruncatedNormal(0.0, 1.0, low=-0.5)),
        line(-0.5, 4),
        lambda u: normal(u, 0, 1) - log_ndtr(0.5),
    ),
    Problem(
        "simplex",
        simplex,
        (COUNTS,),
        {"u": line(0, 1), "v": line(0, 1)},
        simplex_density,
        simplex_sites,
        log_volume=lambda c: np.log1p(-c["u"]),
    ),
    Problem(
        "ordered",
        of_two(
            lambda: dist.TransformedDistribution(
                two(dist.Normal(0.0, 1.0)), dist.transforms.OrderedTransform()
            )
        ),
        ARGS,
        {"first": line(-4, 3), "gap": positive(1e-3, 30)},
        ordered_density,
        lambda c: {"w": np.stack([c["first"], c["first"] + c["gap"]], -1)},
    ),
]


# -- handlers --------------------------------------------------------------------------

SOME = np.array([True, False, True, True, False, True])
MASKS = {"some": SOME, "none": np.ones(6, bool), "all": np.zeros(6, bool)}


def around(prior=nullcontext, rows=nullcontext) -> Callable:
    """The line with a handler around the prior of b or around the rows."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with prior():
            b = numpyro.sample("b", dist.Normal(0.5, 1.0))
        with rows():
            observe(dist.Normal(a + b * x, SD), y)

    return model


def masked_rows(x, y, keep):
    a, b = weights()
    observe(dist.Normal(a + b * x, SD), y, handlers.mask(mask=keep))


def masked_likelihood(x, y, keep):
    a, b = weights()
    observe(dist.Normal(a + b * x, SD).mask(keep), y)


def partly_observed(x, y, seen):
    a, b = weights()
    observe(dist.Normal(a + b * x, SD), y, obs_mask=seen)


def factored(x, y):
    a, b = weights()
    numpyro.factor("close", -2.0 * (a - b) ** 2)
    observe(dist.Normal(a + b * x, SD), y)


def with_rows_masked(keep):
    """Log likelihoods of the rows that are kept."""
    return lambda c: np.where(keep, line_rows(c), np.nan)


def fixed(c):
    """Log joint of a where b is known, with the prior density of that value."""
    return real_density({"a": c["a"], "b": np.full_like(c["a"], 0.8)})


def mean_of_hidden(c):
    """Log joint of a, with the mean over the hidden b of the log likelihood: what a
    noisy gradient samples.
    """
    mean = normal(Y, c["a"][:, None] + 0.5 * X, SD) - X**2 / (2 * SD**2)
    return normal(c["a"], 0, 1) + mean.sum(-1)


A = {"a": LINE["a"]}
RANDOM_INSIDE = [of_line("block", around(prior=handlers.block), mean_of_hidden, axes=A)]
POWER = partial(handlers.scale, scale=2.5)
HANDLERS = [
    of_line("no handler", real, real_density, rows=line_rows),
    of_line(
        "scale of the model", handlers.scale(real, 2.5), lambda c: 2.5 * real_density(c)
    ),
    of_line("scale of the rows", around(rows=POWER), line_density(power=2.5)),
    of_line("scale of a prior", around(prior=POWER), line_density(prior_power=2.5)),
    *(
        of_line(
            f"mask of {name} of the rows",
            masked_rows,
            line_density(power=keep),
            keep,
            rows=with_rows_masked(keep),
        )
        for name, keep in MASKS.items()
    ),
    of_line(
        "mask of the likelihood",
        masked_likelihood,
        line_density(power=SOME),
        SOME,
        rows=with_rows_masked(SOME),
    ),
    of_line(
        "mask of a prior",
        around(prior=partial(handlers.mask, mask=False)),
        line_density(prior_power=0.0),
    ),
    of_line(
        "obs_mask",
        partly_observed,
        line_density(power=SOME),
        SOME,
        completed=lambda draws, rng: {
            **draws,
            "y_unobserved": rng.normal(means(draws), SD),
        },
    ),
    of_line("condition", handlers.condition(real, {"b": 0.8}), fixed, axes=A),
    # A substituted value is replaced by the sampler's, here as with NumPyro's own
    # kernels.
    of_line("substitute", handlers.substitute(real, {"b": 0.8}), real_density),
    of_line(
        "do",
        handlers.do(real, {"b": 0.8}),
        lambda c: fixed(c) - normal(0.8, 0.5, 1),
        axes=A,
        completed=lambda draws, rng: {
            **draws,
            "b": rng.normal(0.5, 1.0, len(draws["a"])),
        },
    ),
    of_line(
        "reparam",
        handlers.reparam(real, {"b": LocScaleReparam(0.0)}),
        real_density,
        sites=lambda c: {"a": c["a"], "b_decentered": c["b"] - 0.5},
    ),
    of_line(
        "scope",
        handlers.scope(real, "part"),
        real_density,
        sites=lambda c: {"part/a": c["a"], "part/b": c["b"]},
    ),
    of_line(
        "factor", factored, lambda c: real_density(c) - 2.0 * (c["a"] - c["b"]) ** 2
    ),
]


# -- plates ----------------------------------------------------------------------------

GROUP = np.array([0, 0, 0, 1, 1, 1])
GRID = np.array([[0.3, -0.2, 0.5], [1.1, 0.9, 1.6]])


def subsampled(x, y, batch_size=None):
    a, b = weights()
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(a + b * x[i], SD), obs=y[i])


def subsampled_by_name(x, y, batch_size=None):
    a, b = weights()
    with numpyro.plate("data", len(x), subsample_size=batch_size):
        few_x = numpyro.subsample(x, event_dim=0)
        few_y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(a + b * few_x, SD), obs=few_y)


def entered_twice(x, y, batch_size=None):
    a, b = weights()
    data = numpyro.plate("data", len(x), subsample_size=batch_size)
    with data as i:
        numpyro.sample("y", dist.Normal(a + b * x[i], SD), obs=y[i])
    with data as i:
        numpyro.sample("z", dist.Normal(a - b * x[i], 2 * SD), obs=y[i])


def outside_of_plate(x, y, batch_size=None):
    a, b = weights()
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        mean = a + b * x[i]
    numpyro.sample("y", dist.Normal(mean, SD).to_event(1), obs=y[i])


def one_not_indexed(x, y, batch_size=None):
    a, b = weights()
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(a + b * x[i], SD), obs=y[i])
        numpyro.sample("z", dist.Normal(a, 2 * SD), obs=0.5)


def nested(x, y, batch_size=None):
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    with numpyro.plate("groups", 2):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", 3, subsample_size=batch_size) as i:
            numpyro.sample(
                "y",
                dist.Normal(a + b * jnp.reshape(x, (2, 3)).T[i], SD),
                obs=jnp.reshape(y, (2, 3)).T[i],
            )


def nested_density(c):
    mean = levels(c)[:, GROUP] + c["b"][:, None] * X
    return (
        normal(levels(c), 0, 1).sum(-1)
        + normal(c["b"], 0.5, 1)
        + normal(Y, mean, SD).sum(-1)
    )


def parallel(grid, batch_size=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    rows = numpyro.plate("rows", 2, dim=-2)
    columns = numpyro.plate("columns", 3, dim=-1, subsample_size=batch_size)
    with rows:
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with rows, columns as i:
        numpyro.sample("y", dist.Normal(a + b * i, SD), obs=grid[:, i])


def parallel_density(c):
    mean = levels(c)[:, :, None] + c["b"][:, None, None] * np.arange(3)
    return (
        normal(levels(c), 0, 1).sum(-1)
        + normal(c["b"], 0, 1)
        + normal(GRID, mean, SD).sum((-2, -1))
    )


def levels(c):
    return np.stack([c["a0"], c["a1"]], -1)


LEVELS = {name: line(-4, 4, 60) for name in ("a0", "a1", "b")}
PLATES = [
    of_line("subsampled plate", subsampled, real_density, batch=3, rows=line_rows),
    of_line(
        "numpyro.subsample", subsampled_by_name, real_density, batch=3, rows=line_rows
    ),
    of_line(
        "plate entered twice",
        entered_twice,
        lambda c: (
            real_density(c)
            + normal(Y, c["a"][:, None] - c["b"][:, None] * X, 2 * SD).sum(-1)
        ),
        batch=3,
    ),
    of_line("rows outside of their plate", outside_of_plate, real_density, batch=3),
    of_line(
        "an observation that is not indexed",
        one_not_indexed,
        lambda c: real_density(c) + 6 * normal(0.5, c["a"], 2 * SD),
        batch=3,
    ),
    Problem(
        "nested plates",
        nested,
        ARGS,
        LEVELS,
        nested_density,
        lambda c: {"a": levels(c), "b": c["b"]},
        batch=2,
    ),
    Problem(
        "parallel plates",
        parallel,
        (GRID.astype(np.float32),),
        LEVELS,
        parallel_density,
        lambda c: {"a": levels(c)[..., None], "b": c["b"]},
        batch=2,
    ),
]


# -- likelihoods -----------------------------------------------------------------------

SMALL_COUNTS = np.array([0, 1, 1, 2, 4, 9])
FLAGS = np.array([0, 0, 1, 1, 0, 1])
OF_TEN = np.array([1, 3, 4, 7, 8, 9])
CLASSES = np.array([0, 1, 2, 2, 1, 2])
PAIRS = np.stack([Y, Y**2], -1).astype(np.float32)


def likelihood(
    name: str,
    distribution: Callable,
    log_density: Callable,
    values: np.ndarray = ARGS[1],
) -> Problem:
    """A problem from the density of a row given its predictor, (G, N)."""

    def log_joint(c):
        return line_density(power=0.0)(c) + log_density(means(c)).sum(-1)

    rows = lambda c: log_density(means(c))  # noqa: E731
    return Problem(
        name, observed(distribution), (ARGS[0], values), LINE, log_joint, rows=rows
    )


def two_sites(x, y, flags):
    a, b = weights()
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(a + b * x, SD), obs=y)
        numpyro.sample("flag", dist.Bernoulli(logits=a + b * x), obs=flags)


def log_bernoulli(f):
    return -np.logaddexp(0, np.where(FLAGS, -f, f))


def student(f):
    z = (Y - f) / SD
    return (
        gammaln(2.5)
        - gammaln(2.0)
        - 0.5 * np.log(4 * np.pi)
        - np.log(SD)
        - 2.5 * np.log1p(z**2 / 4)
    )


def negative_binomial(f):
    y, mean = SMALL_COUNTS, np.exp(f)
    constant = gammaln(y + 3) - gammaln(3) - gammaln(y + 1)
    return constant + 3 * np.log(3 / (3 + mean)) + y * np.log(mean / (3 + mean))


def binomial(f):
    constant = gammaln(11) - gammaln(OF_TEN + 1) - gammaln(11 - OF_TEN)
    return constant - OF_TEN * np.logaddexp(0, -f) - (10 - OF_TEN) * np.logaddexp(0, f)


def categorical(f):
    logits = np.stack([np.zeros_like(f), f, -0.5 * f], -1)
    chosen = np.take_along_axis(
        logits, np.broadcast_to(CLASSES, f.shape)[..., None], -1
    )[..., 0]
    return chosen - np.logaddexp.reduce(logits, -1)


LIKELIHOODS = [
    likelihood("Student's t", lambda f: dist.StudentT(4.0, f, SD), student),
    likelihood(
        "Laplace",
        lambda f: dist.Laplace(f, 0.5),
        lambda f: -np.abs(Y - f) / 0.5 - np.log(2 * 0.5),
    ),
    likelihood(
        "Poisson",
        lambda f: dist.Poisson(jnp.exp(f)),
        lambda f: SMALL_COUNTS * f - np.exp(f) - gammaln(SMALL_COUNTS + 1),
        SMALL_COUNTS,
    ),
    likelihood(
        "negative binomial",
        lambda f: dist.NegativeBinomial2(jnp.exp(f), 3.0),
        negative_binomial,
        SMALL_COUNTS,
    ),
    likelihood("Bernoulli", lambda f: dist.Bernoulli(logits=f), log_bernoulli, FLAGS),
    likelihood("binomial", lambda f: dist.Binomial(10, logits=f), binomial, OF_TEN),
    likelihood(
        "categorical",
        lambda f: dist.Categorical(logits=jnp.stack([0 * f, f, -0.5 * f], -1)),
        categorical,
        CLASSES,
    ),
    likelihood(
        "heteroscedastic",
        lambda f: dist.Normal(f, jnp.exp(-0.5 + 0.3 * f)),
        lambda f: normal(Y, f, np.exp(-0.5 + 0.3 * f)),
    ),
    likelihood(
        "vector events",
        lambda f: dist.Normal(
            jnp.stack([f, 2 * f], -1), jnp.array([SD, 2 * SD])
        ).to_event(1),
        lambda f: normal(Y, f, SD) + normal(Y**2, 2 * f, 2 * SD),
        PAIRS,
    ),
    of_line(
        "two observed sites",
        two_sites,
        lambda c: real_density(c) + log_bernoulli(means(c)).sum(-1),
        FLAGS,
    ),
]


# -- the same problem under other handlers ---------------------------------------------


def power(problem: Problem) -> Problem:
    """The problem under `handlers.scale` of the whole model."""
    return replace(
        problem,
        name=f"{problem.name}, scaled",
        model=handlers.scale(problem.model, 2.5),
        log_joint=lambda c: 2.5 * problem.log_joint(c),
    )


class RowsMasked(handlers.Messenger):
    """Leaves some of the rows out."""

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["name"] == "y":
            msg["fn"] = msg["fn"].mask(SOME)


def few_rows(problem: Problem, rows: Callable) -> Problem:
    """The problem with a mask on rows, of which the densities are given here."""
    return replace(
        problem,
        name=f"{problem.name}, rows masked",
        model=RowsMasked(problem.model),
        log_joint=lambda c: problem.log_joint(c) - rows(c)[:, ~SOME].sum(-1),
    )


# -- scales that are learned -----------------------------------------------------------


def scale_and_weight(decentered: bool) -> Callable:
    """w ~ N(0, s), centered or made of a standard normal z."""

    def model(x, y):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        if decentered:
            w = numpyro.deterministic(
                "w", s * numpyro.sample("z", dist.Normal(0.0, 1.0))
            )
        else:
            w = numpyro.sample("w", dist.Normal(0.0, s))
        observe(dist.Normal(w * x, SD), y)

    return model


def precision_of_weight(
    mean: Callable, inside: Callable = lambda tau: None
) -> Callable:
    """w ~ N(0, 1 / tau), tau ~ Gamma(2, 1)."""

    def model(x, y):
        tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
        w = numpyro.sample("w", dist.Normal(0.0, tau**-0.5))
        observe(dist.Normal(mean(w, x, tau), SD), y, inside(tau))

    return model


def precision_of_noise(sd: Callable) -> Callable:
    """y ~ N(w x, sd(tau)^2), tau ~ Gamma(2, 1)."""

    def model(x, y):
        tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        observe(dist.Normal(w * x, sd(tau)), y)

    return model


def weight_density(c):
    """Log density of tau ~ Gamma(2, 1) and w ~ N(0, 1 / tau)."""
    return gamma(c["tau"], 2.0, 1.0) + normal(c["w"], 0, c["tau"] ** -0.5)


def slope_rows(c, sd=SD, shift=0.0):
    return normal(Y, c["w"][:, None] * X + shift, sd)


def noise_rows(c, factor=1.0):
    return slope_rows(c, (factor * c["tau"] ** -0.5)[:, None])


def noise_density(c, factor=1.0):
    return (
        gamma(c["tau"], 2.0, 1.0) + normal(c["w"], 0, 1) + noise_rows(c, factor).sum(-1)
    )


def standard_density(c):
    """Log joint in the coordinates s and z, w = s z."""
    return (
        half_normal(c["s"])
        + normal(c["z"], 0, 1)
        + slope_rows({"w": c["s"] * c["z"]}).sum(-1)
    )


def of_slope(
    name: str, model: Callable, log_joint: Callable, sites: Callable = dict, **axes: Any
) -> Problem:
    """A problem of a scale s or precision tau, and of a weight w, or of z = w / s."""
    return Problem(name, model, ARGS, axes, log_joint, sites)


SCALE = positive(1e-5, 7, 300)
SLOPE = line(-1, 2.5, 300)
TAU = positive(1e-3, 25, 300)
STANDARD = line(-6, 6, 300)
CUT = {
    "tau": joined(positive(1e-3, 1, 150), positive(1, 25, 150)),
    "w": line(-3, 4, 300),
}
CENTERED = of_slope(
    "centered scale",
    scale_and_weight(decentered=False),
    lambda c: half_normal(c["s"]) + normal(c["w"], 0, c["s"]) + slope_rows(c).sum(-1),
    s=SCALE,
    w=SLOPE,
)
OF_WEIGHT = of_slope(
    "precision of a weight",
    precision_of_weight(lambda w, x, tau: w * x),
    lambda c: weight_density(c) + slope_rows(c).sum(-1),
    tau=TAU,
    w=SLOPE,
)
OF_NOISE = of_slope(
    "precision of the noise",
    precision_of_noise(lambda tau: tau**-0.5),
    noise_density,
    tau=TAU,
    w=line(-2, 3.5, 300),
)
SCALES = [
    CENTERED,
    of_slope(
        "scale by hand",
        scale_and_weight(decentered=True),
        standard_density,
        s=SCALE,
        z=STANDARD,
    ),
    of_slope(
        "reparametrized scale",
        handlers.reparam(CENTERED.model, {"w": LocScaleReparam(0.0)}),
        standard_density,
        lambda c: {"s": c["s"], "w_decentered": c["z"]},
        s=SCALE,
        z=STANDARD,
    ),
    OF_WEIGHT,
    OF_NOISE,
    *map(power, (CENTERED, OF_WEIGHT, OF_NOISE)),
    few_rows(OF_WEIGHT, slope_rows),
    few_rows(OF_NOISE, noise_rows),
    of_slope(
        "precision of a weight and the mean",
        precision_of_weight(lambda w, x, tau: w * x + 0.2 * tau),
        lambda c: (
            weight_density(c) + slope_rows(c, shift=0.2 * c["tau"][:, None]).sum(-1)
        ),
        **CUT,
    ),
    of_slope(
        "precision of the noise, in pieces",
        precision_of_noise(lambda tau: jnp.where(tau < 1.0, 1.0, 0.5) * tau**-0.5),
        lambda c: noise_density(c, np.where(c["tau"] < 1.0, 1.0, 0.5)),
        **CUT,
    ),
    of_slope(
        "precision of a scale handler",
        precision_of_weight(
            lambda w, x, tau: w * x, lambda tau: handlers.scale(scale=tau)
        ),
        lambda c: weight_density(c) + c["tau"] * slope_rows(c).sum(-1),
        **CUT,
    ),
]


# -- hidden units ----------------------------------------------------------------------

NET_Y = np.array([0.9, 0.6, -0.2, -0.4, -0.9, -1.0])
LOCATIONS = {"exchangeable": np.zeros(3), "pinned": np.array([-1.5, 0.0, 1.5])}
NODES = {1: 400, 2: 160, 3: 80}


def units_rows(c):
    """Log likelihoods of the rows of a sum of tanh units."""
    return normal(NET_Y, sum(np.tanh(w[:, None] * X) for w in c.values()), SD)


def units(count: int, kind: str) -> Problem:
    """The sum of tanh units whose input weights are unknown."""
    names, loc = [f"w{i}" for i in range(count)], LOCATIONS[kind][:count]

    def model(x, y):
        w = numpyro.sample(
            "w", dist.Normal(jnp.asarray(loc, jnp.float32), 1.0).to_event(1)
        )
        observe(dist.Normal(jnp.tanh(x[:, None] * w).sum(-1), SD), y)

    def log_joint(c):
        return sum(
            normal(c[name], mean, 1) for name, mean in zip(names, loc, strict=True)
        ) + units_rows(c).sum(-1)

    return Problem(
        f"{count} tanh {'unit' if count == 1 else 'units'}, {kind}",
        model,
        (ARGS[0], NET_Y.astype(np.float32)),
        {name: line(-5.5, 5.5, NODES[count]) for name in names},
        log_joint,
        lambda c: {"w": np.stack([c[name] for name in names], -1)},
    )


UNIT = nn.Dense(1, use_bias=False)
LAYERS = {
    "ReLU": [UNIT, "relu", UNIT],
    "BatchNorm": [UNIT, nn.BatchNorm(False, False), UNIT],
}


def network(kind: str, prior: Callable) -> Callable:
    """A network of two kernels without biases."""

    def model(x, y):
        net = random_network(
            "net", nn.Sequential(LAYERS[kind]), input_shape=(1,), prior=prior()
        )
        observe(dist.Normal(net(x[:, None])[..., 0], SD), y)

    return model


def net_density(kind: str, c: Any) -> np.ndarray:
    """Log likelihood of a network with the kernels w and v."""
    w, v = c["w"][:, None], c["v"][:, None]
    hidden = (
        np.maximum(w * X, 0)
        if kind == "ReLU"
        else np.sign(w) * (X - X.mean()) / X.std()
    )
    return normal(Y, hidden * v, SD).sum(-1)


def kernels(w, v, base=""):
    return {
        f"net/Dense_0.kernel{base}": w[:, None, None],
        "net/Dense_1.kernel": v[:, None, None],
    }


def cut_line(low: float, high: float, size: int) -> Axis:
    return joined(line(low, 0.0, size // 2), line(0.0, high, size // 2))


def relu_unit(
    kind: str, prior: Callable, log_prior: Callable, w: Axis, v: Axis
) -> Problem:
    """One ReLU unit: w and v are known up to a factor that the prior decides."""

    def log_joint(c):
        return log_prior(c["w"]) + log_prior(c["v"]) + net_density("ReLU", c)

    model, axes = network("ReLU", prior), {"w": w, "v": v}
    return Problem(
        f"one ReLU unit{kind}",
        model,
        ARGS,
        axes,
        log_joint,
        lambda c: kernels(c["w"], c["v"]),
    )


# prior of the first kernel, centered or not; log density of its scale or precision, and
# its nodes
HYPERS = {
    "scale half-normal": (
        lambda centered: priors.Hierarchical(dist.HalfNormal(1.0), centered=centered),
        half_normal,
        positive(0.02, 6, 60),
    ),
    "scale uniform": (
        lambda centered: priors.Hierarchical(dist.Uniform(0.3, 2.0), centered=centered),
        lambda s: np.full_like(s, -np.log(1.7)),
        line(0.3, 2.0, 50),
    ),
    "scale log-uniform": (
        lambda centered: priors.Hierarchical(
            dist.LogUniform(0.3, 2.0), centered=centered
        ),
        lambda s: -np.log(s * np.log(2.0 / 0.3)),
        line(0.3, 2.0, 50),
    ),
    "scale truncated normal": (
        lambda centered: priors.Hierarchical(
            dist.TruncatedNormal(1.0, 0.5, low=0.5), centered=centered
        ),
        lambda s: normal(s, 1.0, 0.5) - log_ndtr(1.0),
        line(0.5, 4.0, 60),
    ),
    "precision gamma": (
        lambda centered: priors.GammaPrecision(0.5**0.5, 4.0, centered=centered),
        lambda s: gamma(s, 2.0, 1.0),
        positive(0.005, 14, 60),
    ),
}


def learned(kind: str, name: str, centered: bool = True) -> Problem:
    """A network of two kernels, the first with a learned scale, in the coordinates s, z
    and v: w = sd(s) z.
    """
    make_prior, log_density, axis = HYPERS[name]
    site, power_of_s = (
        ("scale", 1.0) if name.startswith("scale") else ("precision", -0.5)
    )

    def prior():
        return priors.BySite(
            {"Dense_0.kernel": make_prior(centered), "*": priors.Normal()}
        )

    def first(c):
        return c["s"] ** power_of_s * c["z"]

    def log_joint(c):
        log_prior = log_density(c["s"]) + normal(c["z"], 0, 1) + normal(c["v"], 0, 1)
        return log_prior + net_density(kind, {"w": first(c), "v": c["v"]})

    def sites(c):
        values = (
            kernels(first(c), c["v"])
            if centered
            else kernels(c["z"], c["v"], base="_base")
        )
        return {f"net/Dense_0.kernel_{site}": c["s"], **values}

    return Problem(
        f"{kind}, {name}{'' if centered else ', non-centered'}",
        network(kind, prior),
        ARGS,
        {"s": axis, "z": cut_line(-6, 6, 110), "v": STANDARD},
        log_joint,
        sites,
        log_volume=lambda c: power_of_s * np.log(c["s"]) if centered else 0.0,
    )


TANH = {(count, kind): units(count, kind) for kind in LOCATIONS for count in NODES}
RELU = relu_unit(
    "", priors.Normal, lambda w: normal(w, 0, 1), cut_line(-6, 6, 300), STANDARD
)
UNITS = [
    *TANH.values(),
    RELU,
    relu_unit(
        ", uniform weights",
        lambda: (
            lambda name, shape: (
                dist.Uniform(-1.5, 2.0).expand(shape).to_event(len(shape))
            )
        ),
        lambda w: np.log(1 / 3.5),
        cut_line(-1.5, 2.0, 300),
        line(-1.5, 2.0, 300),
    ),
    *(power(problem) for (count, _), problem in TANH.items() if count > 1),
    *(few_rows(TANH[2, kind], units_rows) for kind in LOCATIONS),
    power(RELU),
    *(learned("ReLU", "scale half-normal", centered) for centered in (True, False)),
    *(
        learned(kind, "scale uniform", centered)
        for kind in LAYERS
        for centered in (True, False)
    ),
    learned("ReLU", "scale log-uniform"),
    learned("BatchNorm", "scale truncated normal"),
    learned("BatchNorm", "precision gamma"),
    relu_unit(
        ", half-normal weights",
        lambda: (
            lambda name, shape: dist.HalfNormal(1.0).expand(shape).to_event(len(shape))
        ),
        half_normal,
        line(0, 6, 300),
        line(0, 6, 300),
    ),
]

FAMILIES: dict[str, list[Problem]] = {
    "supports": SUPPORTS,
    "hidden units": UNITS,
    "learned scales": SCALES,
    "handlers": HANDLERS,
    "random inside": RANDOM_INSIDE,
    "plates": PLATES,
    "likelihoods": LIKELIHOODS,
}
PROBLEMS: dict[str, Problem] = {
    problem.name: problem for rows in FAMILIES.values() for problem in rows
}
