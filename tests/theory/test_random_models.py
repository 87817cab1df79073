"""Small random models against NumPy and plain NumPyro: export, predict, evidence,
collapsed sites.

A model is drawn by a seed: plates nested and crossed, masks, scales, events, several
observed sites, groups, batch normalization, weights used twice, time axes as long as
the rows. What a room answers is right, refused with an error that teaches, or wrong.
"""

import warnings
from contextlib import ExitStack
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import each, group
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy import stats
from scipy.special import expit, gammaln, log_softmax

import numpyro_bnn as bnn
from numpyro_bnn import guides, infer, nn, priors

SIGMA, GROUPS, CLASSES = 0.5, 3, 3
HIDDEN, OUTPUT = "net/Dense_0", "net/Dense_1"


class Spec(NamedTuple):
    """A model.

    :param rows: N; ``outputs`` K; ``features`` D.
    :param layout: where the plates and the outputs are, see ``LAYOUTS``.
    :param net: how the network is used, see ``forward``.
    :param mask: ``rows`` or ``elements`` that are left out; ``scale``: a number or
        ``rows``.
    :param second: whether there is another observed site; ``grouped``: an effect of
        groups.
    :param size: rows in a minibatch.
    """

    rows: int
    outputs: int
    features: int
    times: int
    layout: str
    family: str
    net: str
    mask: str
    scale: object
    second: bool
    grouped: bool
    size: int | None


# Plates (name of the axis -> dim) of the layout, and how (N, K) lies in it.
LAYOUTS = {
    "rows": ({"data": -1}, lambda f: f[..., 0]),
    "event": ({"data": -1}, lambda f: f),
    "beside": ({"data": -2}, lambda f: f),
    "crossed": ({"data": -2, "outputs": -1}, lambda f: f),
    "nested": ({"outputs": -2, "data": -1}, lambda f: f.T),
    "left": ({"data": -1}, lambda f: f.T),
}
NETS = ("linear", "no bias", "tanh", "normalized", "twice", "times", "times first")


def random_spec(random):
    rows = int(random.integers(4, 7))
    net = str(random.choice(NETS))
    layout = str(random.choice(list(LAYOUTS)))
    family = str(
        random.choice(
            ["normal", "sigma", "two heads", "bernoulli", "poisson", "classes"]
        )
    )
    if family == "classes":
        layout = "rows"
    outputs = int(random.choice([2, 3, rows]))
    return Spec(
        rows=rows,
        outputs=1 if layout == "rows" else outputs,
        features=int(random.integers(1, 3)),
        times=int(random.choice([3, rows])),
        layout=layout,
        family=family,
        net=net,
        mask=str(random.choice(["", "", "rows", "elements"])),
        scale=(1.0, 1.0, 2.0, "rows")[random.integers(4)] if net != "no bias" else 1.0,
        second=bool(random.random() < 0.3),
        grouped=bool(random.random() < 0.3) and net != "no bias",
        size=3 if random.random() < 0.3 else None,
    )


def layer_of(spec):
    width = (
        CLASSES
        if spec.family == "classes"
        else spec.outputs * (1 + (spec.family == "two heads"))
    )
    if spec.net in ("linear", "no bias"):
        return nn.Sequential([nn.Dense(width, use_bias=spec.net == "linear")])
    norm = nn.BatchNorm() if spec.net == "normalized" else None
    return nn.MLP([2, width], "tanh", norm)


def forward(net, net_name, x):
    """(N, width) outputs of rows; times are (N, T, D), or (T, N, D) if first."""
    if net_name == "twice":
        return net(x) + net(-0.5 * x)
    if net_name in ("times", "times first"):
        return net(x).mean(1 if net_name == "times" else 0)
    return net(x)


def model_of(spec):
    plates, lie = LAYOUTS[spec.layout]

    def model(x, y=None, z=None, g=None, known=None, weight=None, size=None):
        net = bnn.random_network(
            "net",
            layer_of(spec),
            (spec.features,),
            priors.Normal(0.8, fan_in_scaling=False),
        )
        sigma = (
            numpyro.sample("sigma", dist.HalfNormal(1.0))
            if spec.family == "sigma"
            else SIGMA
        )
        if spec.grouped:
            with numpyro.plate("groups", GROUPS):
                effect = numpyro.sample("effect", dist.Normal(0.0, 0.7))
        rows = x.shape[1 if spec.net == "times first" else 0]

        def taken(values, i):
            return None if values is None else values[i]

        with ExitStack() as stack:
            data = numpyro.plate("data", rows, size, dim=plates["data"])
            outer = (
                [numpyro.plate("outputs", spec.outputs, dim=plates["outputs"])]
                if "outputs" in plates
                else []
            )
            # around the other plate, or in it
            i = stack.enter_context(data) if spec.rows % 2 else None
            for plate in outer:
                stack.enter_context(plate)
            i = stack.enter_context(data) if i is None else i
            out = forward(net, spec.net, x[:, i] if spec.net == "times first" else x[i])
            if spec.grouped:
                out = out + effect[g[i]][:, None]
            target = lie(out[:, : out.shape[1] // (1 + (spec.family == "two heads"))])
            fn = {
                "normal": lambda: dist.Normal(target, sigma),
                "sigma": lambda: dist.Normal(target, sigma),
                "two heads": lambda: dist.Normal(
                    target, jnp.exp(0.3 * lie(out[:, out.shape[1] // 2 :]))
                ),
                "bernoulli": lambda: dist.Bernoulli(logits=target),
                "poisson": lambda: dist.Poisson(jnp.exp(target)),
                "classes": lambda: dist.Categorical(logits=out),
            }[spec.family]()

            def along(values):  # rows first, as the outputs lie
                last = spec.layout in ("nested", "left")
                part = values[..., i] if last else values[i]
                return (
                    part[:, None]
                    if spec.layout in ("beside", "crossed") and part.ndim == 1
                    else part
                )

            if spec.mask:
                mask = along(known)
                fn = fn.mask(
                    mask[:, None]
                    if spec.layout == "event" and spec.mask == "rows"
                    else mask
                )
            if spec.layout == "event":
                fn = fn.to_event(1)
            if spec.scale != 1.0:
                by_rows = spec.scale == "rows"
                stack.enter_context(
                    handlers.scale(
                        scale=along(weight) if by_rows else float(spec.scale)
                    )
                )
            at = (slice(None), i) if spec.layout in ("nested", "left") else i
            numpyro.sample("y", fn, obs=taken(y, at))
        if spec.second:
            with numpyro.plate("others", rows):
                again = forward(net, spec.net, x)
                numpyro.sample("z", dist.Normal(again.sum(-1), SIGMA), obs=z)

    return model


def data_of(spec, random, rows, times=None):
    """The arguments, with targets, of so many rows."""
    shapes = {"times": (rows, spec.times), "times first": (spec.times, rows)}
    x = random.normal(size=(*shapes.get(spec.net, (rows,)), spec.features))
    shape = {
        "rows": (rows,),
        "nested": (spec.outputs, rows),
        "left": (spec.outputs, rows),
    }
    shape = shape.get(spec.layout, (rows, spec.outputs))
    draw = {
        "bernoulli": lambda: random.integers(0, 2, shape),
        "poisson": lambda: random.poisson(1.0, shape),
    }
    draw["classes"] = lambda: random.integers(0, CLASSES, shape)
    data = {"x": x, "y": draw.get(spec.family, lambda: random.normal(size=shape))()}
    if spec.second:
        data["z"] = random.normal(size=rows)
    if spec.grouped:
        data["g"] = random.integers(0, GROUPS, rows)
    if spec.mask:
        data["known"] = random.random((rows,) if spec.mask == "rows" else shape) < 0.7
        data["known"].flat[0] = True
    if spec.scale == "rows":
        data["weight"] = random.uniform(0.5, 2.0, rows)
    return data


# -- the same by hand ------------------------------------------------------------------


def by_hand(spec, weights, data, training, xp=np):
    """Location and log sd (or ``None``) like y, or logits (N, K); mean of z."""

    def net(x, seen):
        if spec.net in ("linear", "no bias"):
            return x @ weights[f"{HIDDEN}.kernel"] + weights.get(f"{HIDDEN}.bias", 0.0)
        h, h_seen = (
            a @ weights[f"{HIDDEN}.kernel"] + weights[f"{HIDDEN}.bias"]
            for a in (x, seen)
        )
        if spec.net == "normalized":
            gain, shift = (
                weights[f"net/BatchNorm_0.{part}"] for part in ("scale", "bias")
            )
            h = gain * (h - h_seen.mean(0)) / h_seen.std(0) + shift
        return xp.tanh(h) @ weights[f"{OUTPUT}.kernel"] + weights[f"{OUTPUT}.bias"]

    x, seen = data["x"], training["x"]
    if spec.net == "twice":
        out = net(x, seen) + net(-0.5 * x, seen)
    else:
        out = net(x, seen)
        out = (
            out.mean({"times": 1, "times first": 0}[spec.net])
            if spec.net.startswith("times")
            else out
        )
    second = out.sum(-1)
    if spec.grouped:
        out = out + weights["effect"][data["g"]][:, None]
    if spec.family == "classes":
        return out, None, second
    lie, half = LAYOUTS[spec.layout][1], out.shape[1] // 2
    if spec.family == "two heads":
        return lie(out[:, :half]), 0.3 * lie(out[:, half:]), second
    if spec.family not in ("normal", "sigma"):
        return lie(out), None, second
    loc = lie(out)
    return loc, 0 * loc + xp.log(weights.get("sigma", SIGMA)), second


def densities(spec, weights, data, training):
    """Elementwise log likelihood shaped like y, mean (or probabilities) of y."""
    f, log_sd, _ = by_hand(spec, weights, data, training)
    y = data["y"]
    if spec.family == "classes":
        logs = log_softmax(f, -1)
        return np.take_along_axis(logs, y[:, None], 1)[:, 0], np.exp(logs)
    if spec.family == "bernoulli":
        return -np.logaddexp(0, np.where(y == 1, -f, f)), expit(f)
    if spec.family == "poisson":
        return y * f - np.exp(f) - gammaln(y + 1), np.exp(f)
    return stats.norm.logpdf(y, f, np.exp(log_sd)), f


def spread_over(spec, values, shape):
    """A mask or weights, by rows or elements, in the shape of y."""
    if (
        np.ndim(values) == 1
        and len(shape) == 2
        and spec.layout not in ("nested", "left")
    ):
        values = np.asarray(values)[:, None]
    return np.broadcast_to(values, shape)


def kept_of(spec, data):
    return (
        spread_over(spec, data["known"], data["y"].shape)
        if spec.mask
        else np.ones(data["y"].shape, bool)
    )


def powers_of(spec, data):
    """(like y) the powers of the densities."""
    scale = data["weight"] if spec.scale == "rows" else float(spec.scale)
    return spread_over(spec, scale, data["y"].shape) * kept_of(spec, data)


def pointwise(spec, weights, data, training):
    """Log likelihood of y as ArviZ has it: of events, without masked elements."""
    logs, _ = densities(spec, weights, data, training)
    kept = kept_of(spec, data)
    logs = np.where(kept, logs, 0.0)
    if spec.layout == "event":
        logs, kept = logs.sum(-1), kept.any(-1)
    return logs if kept.all() else logs[kept]


# -- what rooms answer -----------------------------------------------------------------


def near(found, expected, what, rtol=2e-6):
    np.testing.assert_allclose(np.asarray(found), expected, rtol, 1e-7, err_msg=what)


def draws_of(idata):
    """Values by site of each draw."""
    posterior = group(idata, "posterior")
    names = {
        str(name).replace("net.", "net/"): posterior[name].to_numpy()[0]
        for name in posterior.data_vars
    }
    return [
        {name: value[s] for name, value in names.items()}
        for s in range(len(posterior["draw"]))
    ]


class Case:
    """A random model with data, new data, and the export of draws from a guide."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.spec = random_spec(random)
        self.model = model_of(self.spec)
        self.data = data_of(self.spec, random, self.spec.rows)
        sizes = [3, self.spec.rows, 7]
        if self.spec.layout in ("nested", "left") or self.spec.net == "times first":
            # the export takes other numbers of rows along the first axis
            sizes = [self.spec.rows]
        self.new = data_of(self.spec, random, int(random.choice(sizes)))
        self.random = random

    @property
    def arguments(self):
        data = {name: jnp.asarray(value) for name, value in self.data.items()}
        return data | ({"size": self.spec.size} if self.spec.size else {})

    def point(self):
        """Weights by site, drawn anew from a normal distribution."""
        sites = (
            handlers.trace(handlers.seed(self.model, 0))
            .get_trace(**self.arguments)
            .items()
        )
        latent = {
            n: np.shape(s["value"])
            for n, s in sites
            if s["type"] == "sample" and not s["is_observed"]
        }
        values = {
            name: 0.7 * self.random.normal(size=shape) for name, shape in latent.items()
        }
        return values | ({"sigma": np.array(0.6)} if "sigma" in values else {})

    def exported(self):
        guide = guides.AutoMeanField(self.model)
        start = handlers.trace(handlers.seed(guide, 0)).get_trace(**self.arguments)
        params = {
            name: site["value"]
            for name, site in start.items()
            if site["type"] == "param"
        }
        return bnn.to_inference_data(
            SimpleNamespace(params=params),
            self.new,
            guide=guide,
            kwargs=self.arguments,
            num_samples=2,
            progress_bar=False,
        )


def check_export(case):
    """Log likelihood, mean, predictions and their density, and the log joint."""
    spec, data, new = case.spec, case.data, case.new
    idata = case.exported()
    mean = "y_probs" if spec.family == "classes" else "y_mean"
    for s, weights in enumerate(draws_of(idata)):
        logs = group(idata, "log_likelihood")["y"].to_numpy()[0, s]
        near(logs, pointwise(spec, weights, data, data), "log likelihood")
        near(
            group(idata, "posterior_predictive")[mean].to_numpy()[0, s],
            densities(spec, weights, data, data)[1],
            "mean",
        )
        predictions = group(idata, "predictions")
        near(
            predictions[mean].to_numpy()[0, s],
            densities(spec, weights, new, data)[1],
            "predicted mean",
        )
        near(
            predictions["y_log_likelihood"].to_numpy()[0, s],
            pointwise(spec, weights, new, data),
            "new likelihood",
        )
        if spec.second:
            near(
                predictions["z_mean"].to_numpy()[0, s],
                by_hand(spec, weights, new, data)[2],
                "mean of z",
            )
        joint, _ = log_density(
            handlers.seed(case.model, 0), (), {**case.arguments, "size": None}, weights
        )
        # lp is of unconstrained values, as NUTS has it
        jacobian = np.log(weights.get("sigma", 1.0))
        near(
            group(idata, "sample_stats")["lp"].to_numpy()[0, s],
            joint + jacobian,
            "log joint",
        )
        logs, _ = densities(spec, weights, data, data)
        prior = joint - (powers_of(spec, data) * logs).sum()
        if spec.second:
            prior -= stats.norm.logpdf(
                data["z"], by_hand(spec, weights, data, data)[2], SIGMA
            ).sum()
        near(prior, log_prior(case, weights), "log prior", 1e-5)
    again = bnn.predict(
        case.model,
        idata,
        **{name: value for name, value in new.items() if name not in ("y", "z")},
    )
    near(
        again[mean].to_numpy(), group(idata, "predictions")[mean].to_numpy(), "predict"
    )


def log_prior(case, weights, jax_values=False):
    """By plain NumPyro."""
    placed = handlers.substitute(handlers.seed(case.model, 0), data=weights)
    sites = handlers.trace(placed).get_trace(**{**case.arguments, "size": None})
    total = sum(
        jnp.sum(sites[name]["fn"].log_prob(value)) for name, value in weights.items()
    )
    return total if jax_values else float(total)


def coordinates(weights):
    return {
        name: np.log(value) if name == "sigma" else value
        for name, value in weights.items()
    }


def outputs_of(case, data, training):
    """Natural outputs (E,) by coordinates: of y, log scales, of z."""

    def outputs(v):
        weights = {
            name: jnp.exp(value) if name == "sigma" else value
            for name, value in v.items()
        }
        f, log_sd, second = by_hand(case.spec, weights, data, training, jnp)
        parts = [f] if log_sd is None else [f, log_sd]
        return jnp.concatenate(
            [
                jnp.ravel(part)
                for part in [*parts, *([second] if case.spec.second else [])]
            ]
        )

    return outputs


def information(case, weights):
    """(E, E) Fisher information of the natural outputs at the training rows."""
    spec, data = case.spec, case.data
    f, log_sd, _ = by_hand(spec, weights, data, data)
    power = powers_of(spec, data)
    if spec.family == "classes":
        p = np.exp(log_softmax(f, -1))
        blocks = [
            w * (np.diag(row) - np.outer(row, row))
            for w, row in zip(power, p, strict=True)
        ]
        found = jax.scipy.linalg.block_diag(*blocks)
    else:
        parts = {
            "bernoulli": lambda: [expit(f) * expit(-f)],
            "poisson": lambda: [np.exp(f)],
        }.get(spec.family, lambda: [np.exp(-2 * log_sd), np.full(f.shape, 2.0)])()
        found = np.diag(np.concatenate([np.ravel(power * part) for part in parts]))
    if spec.second:
        found = jax.scipy.linalg.block_diag(found, np.eye(spec.rows) / SIGMA**2)
    return np.asarray(found)


def check_laplace(case):
    """Evidence, and variances at new rows, by the whole Gauss-Newton matrix."""
    spec, weights = case.spec, case.point()
    plain = spec.family == "normal" and not (spec.mask or spec.second or spec.grouped)
    structures = ["full", "diag", "low_rank"] + 2 * ["kron"] * (
        plain and spec.net == "no bias"
    )  # where it is exact
    structure = str(case.random.choice(structures))
    guide = guides.AutoLaplace(case.model, structure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*posterior sds from the mode")
        options = {"num_epochs": 0, "init_params": weights, "progress_bar": False}
        fit = guide.run(jax.random.key(0), **options, **case.arguments)
    flat, back = ravel_pytree(coordinates(weights))

    def joint_prior(flat):
        v = back(flat)
        values = {
            name: jnp.exp(value) if name == "sigma" else value
            for name, value in v.items()
        }
        return log_prior(case, values, True) + v.get("sigma", 0.0)

    @jax.jit
    def parts(flat):
        at = [outputs_of(case, data, case.data) for data in (case.data, case.new)]
        return jax.hessian(joint_prior)(flat), *(
            jax.jacobian(lambda flat, f=f: f(back(flat)))(flat) for f in at
        )

    prior, here, there = map(np.asarray, parts(flat))
    precision = here.T @ information(case, weights) @ here - prior
    precision = np.diag(np.diag(precision)) if structure == "diag" else precision
    logs, _ = densities(spec, weights, case.data, case.data)
    joint = (powers_of(spec, case.data) * logs).sum() + float(joint_prior(flat))
    if spec.second:
        joint += stats.norm.logpdf(
            case.data["z"], by_hand(spec, weights, case.data, case.data)[2], SIGMA
        ).sum()
    evidence = (
        joint
        + 0.5 * len(flat) * np.log(2 * np.pi)
        - 0.5 * np.linalg.slogdet(precision)[1]
    )
    near(fit.log_evidence, evidence, f"evidence {structure}", 1e-5)
    new = {name: value for name, value in case.new.items() if name not in ("y", "z")}
    found = guide.predictive(fit.params, **new, site="y" if spec.second else None)
    expected = np.diag(there @ np.linalg.inv(precision) @ there.T)[
        : np.size(next(iter(found.outputs.values())))
    ]
    f, _, _ = by_hand(spec, weights, case.new, case.data)
    name = next(iter(found.outputs))
    rows_first = np.moveaxis(f, -1, 0) if spec.layout in ("nested", "left") else f
    variance = expected.reshape(f.shape)
    variance = (
        np.moveaxis(variance, -1, 0) if spec.layout in ("nested", "left") else variance
    )
    near(np.reshape(found.outputs[name], rows_first.shape), rows_first, "outputs")
    near(
        np.reshape(found.output_variance[name], rows_first.shape),
        variance,
        f"variances {structure}",
        1e-5,
    )


def check_collapse(case):
    """The density without the last layer, or all but the groups: an integral."""
    spec, data, weights = case.spec, case.data, case.point()
    last = HIDDEN if spec.net in ("linear", "no bias") else OUTPUT
    sites = [name for name in weights if name.startswith(last)]
    arguments = {**case.arguments, "size": None}
    hidden = infer.collapse(case.model, sites, **arguments)
    others = {name: value for name, value in weights.items() if name not in sites}
    found, _ = log_density(handlers.seed(hidden, 0), (), arguments, others)
    inside, back = ravel_pytree({name: weights[name] for name in sites})

    def means(inside):
        f, _, second = by_hand(spec, {**others, **back(inside)}, data, data, jnp)
        return jnp.concatenate(
            [jnp.ravel(f), second] if spec.second else [jnp.ravel(f)]
        )

    zero = jnp.zeros(inside.shape)
    base, slope = map(
        np.asarray, jax.jit(lambda zero: (means(zero), jax.jacobian(means)(zero)))(zero)
    )
    sd = float(weights.get("sigma", SIGMA))
    power, noise = powers_of(spec, data).ravel(), np.full(data["y"].size, sd**2)
    y = data["y"].ravel()
    if spec.second:
        y, power = (
            np.concatenate([y, data["z"]]),
            np.concatenate([power, np.ones(spec.rows)]),
        )
        noise = np.concatenate([noise, np.full(spec.rows, SIGMA**2)])
    kept = power > 0
    base, slope, y, power, noise = (
        part[kept] for part in (base, slope, y, power, noise)
    )
    trace = handlers.trace(
        handlers.substitute(handlers.seed(case.model, 0), weights)
    ).get_trace(**arguments)
    prior = {
        name: jnp.broadcast_to(trace[name]["fn"].variance, weights[name].shape)
        for name in sites
    }
    variance = np.asarray(ravel_pytree(prior)[0])
    covariance = slope @ np.diag(variance) @ slope.T + np.diag(noise / power)
    integral = stats.multivariate_normal.logpdf(y, base, covariance)
    integral += (
        0.5 * (1 - power) * np.log(2 * np.pi * noise) - 0.5 * np.log(power)
    ).sum()
    everything = log_prior(case, weights)
    inner = stats.norm.logpdf(inside, 0.0, np.sqrt(variance)).sum()
    near(found, everything - inner + integral, "collapsed density", 1e-5)


ROOMS = {"export": check_export, "laplace": check_laplace, "collapse": check_collapse}


# Seeds whose models together have nearly as many pairs of settings as there are; those
# of normal targets, which `collapse` takes; and nested plates, and where kron is exact.
MIXED = (4, 351, 60, 398, 297, 58, 312, 138, 357, 82, 370, 221)
NORMAL = (10, 176, 130, 103, 236, 113, 27)
KRON = (99, 582, 604, 720, 743, 1183, 1357)
CASES = [(seed, room) for seed in MIXED for room in ("export", "laplace")]
CASES += [(seed, "collapse") for seed in NORMAL]
CASES += [(seed, "laplace") for seed in KRON]
FAST = {(10, "collapse")}
# Minibatches of one site beside another on all rows, and rows that are normalized.
REFUSED = {(58, "laplace"), (357, "laplace"), (221, "laplace"), (113, "collapse")}


@pytest.mark.usefixtures("x64")
# NumPyro's, of axes that have no plate; new rows that are far away
@pytest.mark.filterwarnings("ignore:Missing a plate", "ignore:to_inference_data")
@each(("seed", "room"), CASES, fast=FAST)
def test_what_a_room_says_of_a_random_model_is_right_or_refused(seed, room):
    if (seed, room) in REFUSED:
        with pytest.raises(ValueError, match=": argument `"):
            ROOMS[room](Case(seed))
    else:
        ROOMS[room](Case(seed))
