"""Models whose posteriors are known by quadrature: supports, hidden units, handlers and plates, likelihoods.

Every row holds a NumPyro model and, beside it, the log joint density in NumPy, written by hand.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam
from scipy.special import gammaln, log_ndtr

from numpyro_bnn import nn, priors, random_network
from truth.quadrature import Axis, Problem, cut_line, line, normal, positive

X = np.array([-1.4, -0.6, 0.1, 0.7, 1.2, 1.9])
Y = np.array([-1.1, -0.2, 0.6, 0.5, 1.4, 1.2])
ARGS = (X.astype(np.float32), Y.astype(np.float32))
SD = 0.5
A_LINE, B_LINE = line(-6, 6, 200), line(-5.5, 6.5, 200)


def rows(coordinates: Mapping[str, np.ndarray]) -> np.ndarray:
    """Means a + b x of all rows at all nodes, (G, N)."""
    return coordinates["a"][:, None] + coordinates["b"][:, None] * X


def prior_of_line(coordinates: Mapping[str, np.ndarray]) -> np.ndarray:
    """Log density of a ~ N(0, 1), b ~ N(.5, 1)."""
    return normal(coordinates["a"], 0, 1) + normal(coordinates["b"], 0.5, 1)


# -- supports ---------------------------------------------------------------------------------------


def real(x, y):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(a + b * x, SD), obs=y)


def real_density(c):
    return prior_of_line(c) + normal(Y, rows(c), SD).sum(-1)


def positive_scale(y):
    s = numpyro.sample("s", dist.Gamma(0.5, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(0.0, s), obs=y)


TWO = np.array([2.0, -1.5])


def gamma(x, shape, rate):
    """Log density of a gamma distribution."""
    return shape * np.log(rate) - gammaln(shape) + (shape - 1) * np.log(x) - rate * x


def interval(x, y):
    w = numpyro.sample("w", dist.Uniform(-1.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * x, SD), obs=y)


def pair(names: tuple[str, str]) -> Callable:
    """Values of one site w of two elements."""
    return lambda c: {"w": np.stack([c[names[0]], c[names[1]]], -1)}


COUNTS = np.array([1, 4, 2])


def simplex(counts):
    p = numpyro.sample("p", dist.Dirichlet(jnp.array([2.0, 1.0, 3.0])))
    numpyro.sample("y", dist.Multinomial(7, p), obs=counts)


def simplex_sites(c):
    u, v = c["u"], c["v"]
    return {"p": np.stack([u, (1 - u) * v, (1 - u) * (1 - v)], -1)}


def simplex_density(c):
    p = simplex_sites(c)["p"]
    constant = gammaln(6.0) - gammaln([2.0, 1.0, 3.0]).sum() + gammaln(8) - gammaln(COUNTS + 1).sum()
    return constant + (np.log(p) * (np.array([1.0, 0.0, 2.0]) + COUNTS)).sum(-1) + np.log1p(-c["u"])


def ordered(x, y):
    base = dist.Normal(0.0, 1.0).expand([2]).to_event(1)
    w = numpyro.sample("w", dist.TransformedDistribution(base, dist.transforms.OrderedTransform()))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * x, SD), obs=y)


def ordered_density(c):
    # w = (first, first + exp(u)): first and u are standard normal.
    gap = c["gap"]
    prior = normal(c["first"], 0, 1) + normal(np.log(gap), 0, 1) - np.log(gap)
    mean = c["first"][:, None] + (c["first"] + gap)[:, None] * X
    return prior + normal(Y, mean, SD).sum(-1)


def bounded_below(x, y):
    w = numpyro.sample("w", dist.TruncatedNormal(0.0, 1.0, low=-0.5).expand([2]).to_event(1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * x, SD), obs=y)


def line_of(first: str, second: str) -> Callable:
    """Log likelihood of the line with these coordinates."""
    return lambda c: normal(Y, c[first][:, None] + c[second][:, None] * X, SD).sum(-1)


SUPPORTS = [
    Problem("real", real, ARGS, {"a": A_LINE, "b": B_LINE}, real_density),
    Problem(
        "positive",
        positive_scale,
        (np.asarray(TWO, np.float32),),
        {"s": positive(1e-3, 60, 400)},
        lambda c: gamma(c["s"], 0.5, 1.0) + normal(TWO, 0, c["s"][:, None]).sum(-1),
    ),
    Problem(
        "interval",
        interval,
        ARGS,
        {"u": line(-1, 1), "v": line(-1, 1)},
        lambda c: 2 * np.log(0.5) + line_of("u", "v")(c),
        pair(("u", "v")),
    ),
    Problem(
        "half-line",
        bounded_below,
        ARGS,
        {"u": line(-0.5, 4), "v": line(-0.5, 4)},
        lambda c: normal(c["u"], 0, 1) + normal(c["v"], 0, 1) - 2 * log_ndtr(0.5) + line_of("u", "v")(c),
        pair(("u", "v")),
    ),
    Problem(
        "simplex",
        simplex,
        (np.asarray(COUNTS),),
        {"u": line(0, 1), "v": line(0, 1)},
        simplex_density,
        simplex_sites,
        log_volume=lambda c: np.log1p(-c["u"]),
    ),
    Problem(
        "ordered",
        ordered,
        ARGS,
        {"first": line(-4, 3), "gap": positive(1e-3, 30)},
        ordered_density,
        lambda c: {"w": np.stack([c["first"], c["first"] + c["gap"]], -1)},
    ),
]


# -- hidden units -----------------------------------------------------------------------------------

PINNED = np.array([-1.5, 0.0, 1.5])
NET_Y = np.array([0.9, 0.6, -0.2, -0.4, -0.9, -1.0])
NET_ARGS = (ARGS[0], np.asarray(NET_Y, np.float32))


def units(count: int, locations: np.ndarray) -> Callable:
    """The sum of tanh units whose input weights are unknown."""

    def model(x, y):
        loc = jnp.asarray(locations[:count], jnp.float32)
        w = numpyro.sample("w", dist.Normal(loc, 1.0).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(jnp.tanh(x[:, None] * w).sum(-1), SD), obs=y)

    return model


def units_problem(count: int, locations: np.ndarray, kind: str) -> Problem:
    """Exact posterior of that sum."""
    names = [f"w{i}" for i in range(count)]

    def log_joint(c):
        mean = sum(np.tanh(c[name][:, None] * X) for name in names)
        prior = sum(normal(c[name], loc, 1) for name, loc in zip(names, locations, strict=False))
        return prior + normal(NET_Y, mean, SD).sum(-1)

    axes = {name: line(-5.5, 5.5, 400 if count == 1 else 160 if count == 2 else 80) for name in names}
    return Problem(
        f"{count} tanh {'unit' if count == 1 else 'units'}, {kind}",
        units(count, locations),
        NET_ARGS,
        axes,
        log_joint,
        lambda c: {"w": np.stack([c[name] for name in names], -1)},
    )


def relu_net(prior: Any) -> Callable:
    """One ReLU unit: w and v are known up to a factor that the prior decides."""
    unit = nn.Dense(1, use_bias=False)

    def model(x, y):
        net = random_network("net", nn.Sequential([unit, "relu", unit]), input_shape=(1,), prior=prior)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(net(x[:, None])[..., 0], SD), obs=y)

    return model


def relu_sites(c):
    return {"net/Dense_0.kernel": c["w"][:, None, None], "net/Dense_1.kernel": c["v"][:, None, None]}


def relu_likelihood(c):
    mean = np.maximum(c["w"][:, None] * X, 0) * c["v"][:, None]
    return normal(Y, mean, SD).sum(-1)


UNITS = [
    *(units_problem(count, np.zeros(3), "exchangeable") for count in (1, 2, 3)),
    *(units_problem(count, PINNED, "pinned") for count in (1, 2, 3)),
    Problem(
        "one ReLU unit",
        relu_net(priors.Normal()),
        ARGS,
        {"w": cut_line(-6, 6, 300), "v": line(-6, 6, 300)},
        lambda c: normal(c["w"], 0, 1) + normal(c["v"], 0, 1) + relu_likelihood(c),
        relu_sites,
    ),
    Problem(
        "one ReLU unit, uniform weights",
        relu_net(lambda name, shape: dist.Uniform(-1.5, 2.0).expand(shape).to_event(len(shape))),
        ARGS,
        {"w": cut_line(-1.5, 2.0, 300), "v": line(-1.5, 2.0, 300)},
        lambda c: 2 * np.log(1 / 3.5) + relu_likelihood(c),
        relu_sites,
    ),
]


# -- handlers ---------------------------------------------------------------------------------------

LINE = {"a": A_LINE, "b": B_LINE}
SOME = np.array([True, False, True, True, False, True])
NONE, ALL = np.zeros(6, bool), np.ones(6, bool)


def line_model(wrap_prior: Any = None, wrap_rows: Any = None) -> Callable:
    """The line with a handler around the prior of b or around the rows."""
    nothing = handlers.scale(scale=1.0)

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with wrap_prior() if wrap_prior else nothing:
            b = numpyro.sample("b", dist.Normal(0.5, 1.0))
        with wrap_rows() if wrap_rows else nothing, numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(a + b * x, SD), obs=y)

    return model


def masked_rows(x, y, keep):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    with numpyro.plate("data", len(x)), handlers.mask(mask=keep):
        numpyro.sample("y", dist.Normal(a + b * x, SD), obs=y)


def masked_likelihood(x, y, keep):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(a + b * x, SD).mask(keep), obs=y)


def line_density(prior_power: float = 1.0, power: Any = 1.0) -> Callable:
    """Its log joint: powers of the prior of b and of each row."""

    def log_joint(c):
        prior = normal(c["a"], 0, 1) + prior_power * normal(c["b"], 0.5, 1)
        return prior + (power * line_rows(c)).sum(-1)

    return log_joint


def line_rows(c):
    """Log likelihood of each row, (G, N)."""
    return normal(Y, rows(c), SD)


def of_line(name: str, model: Callable, log_joint: Callable, **others: Any) -> Problem:
    """A problem with coordinates a and b."""
    return Problem(name, model, others.pop("args", ARGS), others.pop("axes", LINE), log_joint, **others)


def fixed(b: float = 0.8) -> Callable:
    """Log joint of a alone, where b is known; its prior density at that value belongs to the model."""

    def log_joint(c):
        return real_density({"a": c["a"], "b": np.full_like(c["a"], b)})

    return log_joint


def factored(x, y):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    numpyro.factor("close", -2.0 * (a - b) ** 2)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(a + b * x, SD), obs=y)


def partly_observed(x, y, seen):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(a + b * x, SD), obs=y, obs_mask=seen)


def imputed(draws, rng):
    mean = draws["a"][:, None] + draws["b"][:, None] * X
    return {**draws, "y_unobserved": rng.normal(mean, SD)}


def intervened(draws, rng):
    return {**draws, "b": rng.normal(0.5, 1.0, len(draws["a"]))}


def scoped(c):
    return {"part/a": c["a"], "part/b": c["b"]}


def decentered(c):
    return {"a": c["a"], "b_decentered": c["b"] - 0.5}


def hidden_site(x, y):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with handlers.block():
        b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(a + b * x, SD), obs=y)


def mean_of_hidden(c):
    """Log joint of a, with the mean over the hidden b of the log likelihood: what a noisy gradient samples."""
    mean = normal(Y, c["a"][:, None] + 0.5 * X, SD) - X**2 / (2 * SD**2)
    return normal(c["a"], 0, 1) + mean.sum(-1)


RANDOM_INSIDE = [of_line("block", hidden_site, mean_of_hidden, axes={"a": A_LINE})]
HANDLERS = [
    of_line("no handler", real, real_density, rows=line_rows),
    of_line("scale of the model", handlers.scale(real, 2.5), lambda c: 2.5 * real_density(c)),
    of_line("scale of the rows", line_model(wrap_rows=lambda: handlers.scale(scale=2.5)), line_density(power=2.5)),
    of_line(
        "scale of a prior", line_model(wrap_prior=lambda: handlers.scale(scale=2.5)), line_density(prior_power=2.5)
    ),
    *(
        of_line(
            f"mask of {name} of the rows",
            masked_rows,
            line_density(power=keep),
            args=(*ARGS, np.asarray(keep)),
            rows=lambda c, keep=keep: np.where(keep, line_rows(c), np.nan),
        )
        for name, keep in {"some": SOME, "none": ALL, "all": NONE}.items()
    ),
    of_line(
        "mask of the likelihood",
        masked_likelihood,
        line_density(power=SOME),
        args=(*ARGS, np.asarray(SOME)),
        rows=lambda c: np.where(SOME, line_rows(c), np.nan),
    ),
    of_line(
        "mask of a prior", line_model(wrap_prior=lambda: handlers.mask(mask=False)), line_density(prior_power=0.0)
    ),
    of_line("obs_mask", partly_observed, line_density(power=SOME), completed=imputed, args=(*ARGS, np.asarray(SOME))),
    of_line("condition", handlers.condition(real, {"b": 0.8}), fixed(), axes={"a": A_LINE}),
    # A substituted value is replaced by the sampler's, here as with NumPyro's own kernels.
    of_line("substitute", handlers.substitute(real, {"b": 0.8}), real_density),
    of_line(
        "do",
        handlers.do(real, {"b": 0.8}),
        lambda c: fixed()(c) - normal(0.8, 0.5, 1),
        axes={"a": A_LINE},
        completed=intervened,
    ),
    of_line(
        "reparam", handlers.reparam(real, {"b": LocScaleReparam(0.0)}), lambda c: real_density(c), sites=decentered
    ),
    of_line("scope", handlers.scope(real, "part"), real_density, sites=scoped),
    of_line("factor", factored, lambda c: real_density(c) - 2.0 * (c["a"] - c["b"]) ** 2),
]


# -- plates -----------------------------------------------------------------------------------------

GROUP = np.array([0, 0, 0, 1, 1, 1])
GRID = np.array([[0.3, -0.2, 0.5], [1.1, 0.9, 1.6]])


def subsampled(x, y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(a + b * x[i], SD), obs=y[i])


def subsampled_by_name(x, y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    with numpyro.plate("data", len(x), subsample_size=batch_size):
        few_x, few_y = numpyro.subsample(x, event_dim=0), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(a + b * few_x, SD), obs=few_y)


def entered_twice(x, y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    data = numpyro.plate("data", len(x), subsample_size=batch_size)
    with data as i:
        numpyro.sample("y", dist.Normal(a + b * x[i], SD), obs=y[i])
    with data as i:
        numpyro.sample("z", dist.Normal(a - b * x[i], 2 * SD), obs=y[i])


def outside_of_plate(x, y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        mean = a + b * x[i]
    numpyro.sample("y", dist.Normal(mean, SD).to_event(1), obs=y[i])


def one_not_indexed(x, y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(a + b * x[i], SD), obs=y[i])
        numpyro.sample("z", dist.Normal(a, 2 * SD), obs=0.5)


def nested(x, y, batch_size=None):
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    with numpyro.plate("groups", 2):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", 3, subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(a + b * jnp.reshape(x, (2, 3)).T[i], SD), obs=jnp.reshape(y, (2, 3)).T[i])


def nested_density(c):
    levels = np.stack([c["a0"], c["a1"]], -1)
    mean = levels[:, GROUP] + c["b"][:, None] * X
    return normal(levels, 0, 1).sum(-1) + normal(c["b"], 0.5, 1) + normal(Y, mean, SD).sum(-1)


def parallel(grid, batch_size=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    rows = numpyro.plate("rows", 2, dim=-2)
    columns = numpyro.plate("columns", 3, dim=-1, subsample_size=batch_size)
    with rows:
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with rows, columns as i:
        numpyro.sample("y", dist.Normal(a + b * i, SD), obs=grid[:, i])


def parallel_density(c):
    levels = np.stack([c["a0"], c["a1"]], -1)
    mean = levels[:, :, None] + c["b"][:, None, None] * np.arange(3)
    prior = normal(levels, 0, 1).sum(-1) + normal(c["b"], 0, 1)
    return prior + normal(GRID, mean, SD).sum((-2, -1))


LEVELS = {"a0": line(-4, 4, 60), "a1": line(-4, 4, 60), "b": line(-4, 4, 60)}

PLATES = [
    of_line("subsampled plate", subsampled, real_density, batch=3, rows=line_rows),
    of_line("numpyro.subsample", subsampled_by_name, real_density, batch=3, rows=line_rows),
    of_line(
        "plate entered twice",
        entered_twice,
        lambda c: real_density(c) + normal(Y, c["a"][:, None] - c["b"][:, None] * X, 2 * SD).sum(-1),
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
        lambda c: {"a": np.stack([c["a0"], c["a1"]], -1), "b": c["b"]},
        batch=2,
    ),
    Problem(
        "parallel plates",
        parallel,
        (np.asarray(GRID, np.float32),),
        LEVELS,
        parallel_density,
        lambda c: {"a": np.stack([c["a0"], c["a1"]], -1)[..., None], "b": c["b"]},
        batch=2,
    ),
]


# -- likelihoods ------------------------------------------------------------------------------------

SMALL_COUNTS = np.array([0, 1, 1, 2, 4, 9])
FLAGS = np.array([0, 0, 1, 1, 0, 1])
OF_TEN = np.array([1, 3, 4, 7, 8, 9])
CLASSES = np.array([0, 1, 2, 2, 1, 2])


def observed(distribution: Callable) -> Callable:
    """The line as predictor f of a likelihood."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        b = numpyro.sample("b", dist.Normal(0.5, 1.0))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", distribution(a + b * x), obs=y)

    return model


def likelihood(name: str, distribution: Callable, log_density: Callable, values: Any = None) -> Problem:
    """A problem from the density of a row given its predictor, (G, N)."""
    return of_line(
        name,
        observed(distribution),
        lambda c: prior_of_line(c) + log_density(rows(c)).sum(-1),
        args=ARGS if values is None else (ARGS[0], np.asarray(values)),
        rows=lambda c: log_density(rows(c)),
    )


def two_sites(x, y, flags):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.5, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(a + b * x, SD), obs=y)
        numpyro.sample("flag", dist.Bernoulli(logits=a + b * x), obs=flags)


def log_sigmoid(f):
    return -np.logaddexp(0, -f)


def student(f):
    z = (Y - f) / SD
    return gammaln(2.5) - gammaln(2.0) - 0.5 * np.log(4 * np.pi) - np.log(SD) - 2.5 * np.log1p(z**2 / 4)


def negative_binomial(f):
    y, mean = SMALL_COUNTS, np.exp(f)
    constant = gammaln(y + 3) - gammaln(3) - gammaln(y + 1)
    return constant + 3 * np.log(3 / (3 + mean)) + y * np.log(mean / (3 + mean))


def categorical(f):
    logits = np.stack([np.zeros_like(f), f, -0.5 * f], -1)
    chosen = np.take_along_axis(logits, np.broadcast_to(CLASSES, f.shape)[..., None], -1)[..., 0]
    return chosen - np.logaddexp.reduce(logits, -1)


def vector(f):
    return normal(Y, f, SD) + normal(Y**2, 2 * f, 2 * SD)


LIKELIHOODS = [
    likelihood("Student's t", lambda f: dist.StudentT(4.0, f, SD), student),
    likelihood("Laplace", lambda f: dist.Laplace(f, 0.5), lambda f: -np.abs(Y - f) / 0.5 - np.log(2 * 0.5)),
    likelihood(
        "Poisson",
        lambda f: dist.Poisson(jnp.exp(f)),
        lambda f: SMALL_COUNTS * f - np.exp(f) - gammaln(SMALL_COUNTS + 1),
        SMALL_COUNTS,
    ),
    likelihood(
        "negative binomial", lambda f: dist.NegativeBinomial2(jnp.exp(f), 3.0), negative_binomial, SMALL_COUNTS
    ),
    likelihood(
        "Bernoulli",
        lambda f: dist.Bernoulli(logits=f),
        lambda f: np.where(FLAGS, log_sigmoid(f), log_sigmoid(-f)),
        FLAGS,
    ),
    likelihood(
        "binomial",
        lambda f: dist.Binomial(10, logits=f),
        lambda f: (
            gammaln(11)
            - gammaln(OF_TEN + 1)
            - gammaln(11 - OF_TEN)
            + OF_TEN * log_sigmoid(f)
            + (10 - OF_TEN) * log_sigmoid(-f)
        ),
        OF_TEN,
    ),
    likelihood(
        "categorical", lambda f: dist.Categorical(logits=jnp.stack([0 * f, f, -0.5 * f], -1)), categorical, CLASSES
    ),
    likelihood(
        "heteroscedastic",
        lambda f: dist.Normal(f, jnp.exp(-0.5 + 0.3 * f)),
        lambda f: normal(Y, f, np.exp(-0.5 + 0.3 * f)),
    ),
    likelihood(
        "vector events",
        lambda f: dist.Normal(jnp.stack([f, 2 * f], -1), jnp.array([SD, 2 * SD])).to_event(1),
        vector,
        np.stack([Y, Y**2], -1).astype(np.float32),
    ),
    of_line(
        "two observed sites",
        two_sites,
        lambda c: real_density(c) + np.where(FLAGS, log_sigmoid(rows(c)), log_sigmoid(-rows(c))).sum(-1),
        args=(*ARGS, np.asarray(FLAGS)),
    ),
]


# -- scales that are learned ------------------------------------------------------------------------


def centered(x, y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0.0, s))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w * x, SD), obs=y)


def by_hand(x, y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    w = numpyro.deterministic("w", s * z)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w * x, SD), obs=y)


def by_precision(x, y):
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, tau**-0.5))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w * x, SD), obs=y)


def noise_precision(x, y):
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w * x, tau**-0.5), obs=y)


def slope_rows(c, sd=SD):
    return normal(Y, c["w"][:, None] * X, sd)


def half_normal(s):
    return np.log(2) + normal(s, 0, 1)


def mean_of_precision(x, y):
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, tau**-0.5))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w * x + 0.2 * tau, SD), obs=y)


def density_with_mean(c):
    mean = c["w"][:, None] * X + 0.2 * c["tau"][:, None]
    return normal(c["w"], 0, c["tau"] ** -0.5) + normal(Y, mean, SD).sum(-1)


def piecewise(x, y):
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(w * x, jnp.where(tau < 1.0, 1.0, 0.5) * tau**-0.5), obs=y)


def density_in_pieces(c):
    sd = np.where(c["tau"] < 1.0, 1.0, 0.5) * c["tau"] ** -0.5
    return normal(c["w"], 0, 1) + slope_rows(c, sd[:, None]).sum(-1)


def scaled_by_precision(x, y):
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, tau**-0.5))
    with numpyro.plate("data", len(x)), handlers.scale(scale=tau):
        numpyro.sample("y", dist.Normal(w * x, SD), obs=y)


def density_scaled(c):
    return normal(c["w"], 0, c["tau"] ** -0.5) + c["tau"] * slope_rows(c).sum(-1)


TAU_CUT_AT_1 = Axis(*map(np.concatenate, zip(positive(1e-3, 1, 150), positive(1, 25, 150), strict=True)))
SCALE, SLOPE, TAU = positive(1e-5, 7, 300), line(-1, 2.5, 300), positive(1e-3, 25, 300)
SCALES = [
    Problem(
        "centered scale",
        centered,
        ARGS,
        {"s": SCALE, "w": SLOPE},
        lambda c: half_normal(c["s"]) + normal(c["w"], 0, c["s"]) + slope_rows(c).sum(-1),
    ),
    Problem(
        "scale by hand",
        by_hand,
        ARGS,
        {"s": SCALE, "z": line(-6, 6, 300)},
        lambda c: half_normal(c["s"]) + normal(c["z"], 0, 1) + slope_rows({"w": c["s"] * c["z"]}).sum(-1),
    ),
    Problem(
        "reparametrized scale",
        handlers.reparam(centered, {"w": LocScaleReparam(0.0)}),
        ARGS,
        {"s": SCALE, "z": line(-6, 6, 300)},
        lambda c: half_normal(c["s"]) + normal(c["z"], 0, 1) + slope_rows({"w": c["s"] * c["z"]}).sum(-1),
        lambda c: {"s": c["s"], "w_decentered": c["z"]},
    ),
    Problem(
        "precision of a weight",
        by_precision,
        ARGS,
        {"tau": TAU, "w": SLOPE},
        lambda c: gamma(c["tau"], 2.0, 1.0) + normal(c["w"], 0, c["tau"] ** -0.5) + slope_rows(c).sum(-1),
    ),
    Problem(
        "precision of the noise",
        noise_precision,
        ARGS,
        {"tau": TAU, "w": line(-2, 3.5, 300)},
        lambda c: gamma(c["tau"], 2.0, 1.0) + normal(c["w"], 0, 1) + slope_rows(c, c["tau"][:, None] ** -0.5).sum(-1),
    ),
]


def power(problem: Problem, factor: float) -> Problem:
    """The problem under `handlers.scale` of the whole model."""
    model, log_joint = handlers.scale(problem.model, factor), problem.log_joint
    return Problem(
        f"{problem.name}, scaled", model, problem.data, problem.axes, lambda c: factor * log_joint(c), problem.sites
    )


def few_rows(problem: Problem, likelihood: Callable) -> Problem:
    """The problem with a mask on the rows, which leaves them to the likelihood given here."""

    def model(x, y):
        def hidden(site):
            return site["fn"].mask(np.asarray(SOME)) if site["name"] == "y" else site["fn"]

        with _EditedDistributions(hidden):
            problem.model(x, y)

    log_joint = problem.log_joint
    return Problem(
        f"{problem.name}, rows masked",
        model,
        problem.data,
        problem.axes,
        lambda c: log_joint(c) - likelihood(c)[:, ~SOME].sum(-1),
        problem.sites,
    )


class _EditedDistributions(handlers.Messenger):
    """Replaces distributions of sites."""

    def __init__(self, edit: Callable) -> None:
        super().__init__()
        self.edit = edit

    def process_message(self, msg):
        if msg["type"] == "sample":
            msg["fn"] = self.edit(msg)


def units_rows(count: int) -> Callable:
    """Log likelihood of the rows of a sum of tanh units."""
    return lambda c: normal(NET_Y, sum(np.tanh(c[f"w{i}"][:, None] * X) for i in range(count)), SD)


def net_of_two(make_prior: Callable, layers: Any) -> Callable:
    """A network of two kernels without biases; the prior of the second is standard normal."""

    def model(x, y):
        prior = priors.BySite({"Dense_0.kernel": make_prior(), "*": priors.Normal()})
        net = random_network("net", nn.Sequential(layers), input_shape=(1,), prior=prior)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(net(x[:, None])[..., 0], SD), obs=y)

    return model


def norm_likelihood(c):
    z = np.sign(c["w"])[:, None] * (X - X.mean()) / X.std()
    return normal(Y, c["v"][:, None] * z, SD).sum(-1)


def net_sites(site: str, sd: Callable, centered: bool = True) -> Callable:
    """Values of the sites of a network of two kernels whose first is z times an sd, a function of the site s."""

    def sites(c):
        first = sd(c["s"]) * c["z"] if centered else c["z"]
        name = "net/Dense_0.kernel" if centered else "net/Dense_0.kernel_base"
        return {
            f"net/Dense_0.kernel_{site}": c["s"],
            name: first[:, None, None],
            "net/Dense_1.kernel": c["v"][:, None, None],
        }

    return sites


UNIT = nn.Dense(1, use_bias=False)
RELU, NORM = [UNIT, "relu", UNIT], [UNIT, nn.BatchNorm(False, False), UNIT]
SECOND = line(-6, 6, 300)


def learned(
    name: str, layers: Any, make_hyper: Callable, log_hyper: Callable, axis: Any, likelihood: Callable, centered: bool
) -> Problem:
    """A network of two kernels, the first with a learned scale s."""

    make_prior = lambda: priors.Hierarchical(make_hyper(), centered=centered)  # noqa: E731
    return standardized(name, layers, make_prior, log_hyper, axis, likelihood, centered)


def standardized(
    name: str,
    layers: Any,
    make_prior: Callable,
    log_hyper: Callable,
    axis: Any,
    likelihood: Callable,
    centered: bool,
    site: str = "scale",
    sd: Callable = lambda s: s,
) -> Problem:
    """That network in the coordinates s, z and v, with w = sd(s) z."""

    def log_joint(c):
        scaled = {"w": sd(c["s"]) * c["z"], "v": c["v"]}
        return log_hyper(c["s"]) + normal(c["z"], 0, 1) + normal(c["v"], 0, 1) + likelihood(scaled)

    return Problem(
        name,
        net_of_two(make_prior, layers),
        ARGS,
        {"s": axis, "z": cut_line(-6, 6, 110), "v": SECOND},
        log_joint,
        net_sites(site, sd, centered),
        log_volume=(lambda c: np.log(sd(c["s"]))) if centered else (lambda c: 0.0),
    )


def log_uniform(s):
    return -np.log(s) - np.log(np.log(2.0 / 0.3))


def truncated(s):
    return normal(s, 1.0, 0.5) - np.log(1 - np.exp(log_ndtr((0.5 - 1.0) / 0.5)))


HALF = positive(0.02, 6, 60)
UNITS += [
    *(power(problem, 2.5) for problem in UNITS[:6] if not problem.name.startswith("1")),
    few_rows(UNITS[1], units_rows(2)),
    few_rows(UNITS[4], units_rows(2)),
    power(UNITS[6], 2.5),
    learned("ReLU, scale half-normal", RELU, lambda: dist.HalfNormal(1.0), half_normal, HALF, relu_likelihood, True),
    learned(
        "ReLU, scale half-normal, non-centered",
        RELU,
        lambda: dist.HalfNormal(1.0),
        half_normal,
        HALF,
        relu_likelihood,
        False,
    ),
    *(
        learned(
            f"{kind}, scale uniform{'' if centered else ', non-centered'}",
            layers,
            lambda: dist.Uniform(0.3, 2.0),
            lambda s: np.full_like(s, -np.log(1.7)),
            line(0.3, 2.0, 50),
            density,
            centered,
        )
        for kind, layers, density in (("ReLU", RELU, relu_likelihood), ("BatchNorm", NORM, norm_likelihood))
        for centered in (True, False)
    ),
    learned(
        "ReLU, scale log-uniform",
        RELU,
        lambda: dist.LogUniform(0.3, 2.0),
        log_uniform,
        line(0.3, 2.0, 50),
        relu_likelihood,
        True,
    ),
    learned(
        "BatchNorm, scale truncated normal",
        NORM,
        lambda: dist.TruncatedNormal(1.0, 0.5, low=0.5),
        truncated,
        line(0.5, 4.0, 60),
        norm_likelihood,
        True,
    ),
    standardized(
        "BatchNorm, precision gamma",
        NORM,
        lambda: priors.GammaPrecision(0.5**0.5, 4.0, centered=True),
        lambda s: gamma(s, 2.0, 1.0),
        positive(0.005, 14, 60),
        norm_likelihood,
        centered=True,
        site="precision",
        sd=lambda s: s**-0.5,
    ),
    Problem(
        "one ReLU unit, half-normal weights",
        relu_net(lambda name, shape: dist.HalfNormal(1.0).expand(shape).to_event(len(shape))),
        ARGS,
        {"w": line(0, 6, 300), "v": line(0, 6, 300)},
        lambda c: half_normal(c["w"]) + half_normal(c["v"]) + relu_likelihood(c),
        relu_sites,
    ),
]
SCALES += [power(problem, 2.5) for problem in (SCALES[0], SCALES[3], SCALES[4])]
SCALES += [few_rows(SCALES[3], slope_rows), few_rows(SCALES[4], lambda c: slope_rows(c, c["tau"][:, None] ** -0.5))]
SCALES += [
    Problem(
        f"precision of {name}",
        model,
        ARGS,
        {"tau": TAU_CUT_AT_1, "w": line(-3, 4, 300)},
        lambda c, density=density: gamma(c["tau"], 2.0, 1.0) + density(c),
    )
    for name, model, density in (
        ("a weight and the mean", mean_of_precision, density_with_mean),
        ("the noise, in pieces", piecewise, density_in_pieces),
        ("a scale handler", scaled_by_precision, density_scaled),
    )
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
PROBLEMS: dict[str, Problem] = {problem.name: problem for rows in FAMILIES.values() for problem in rows}
