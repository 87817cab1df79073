"""Wrong models, data and combinations of arguments; options: `test_options.py`."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import mala, refused, results
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from options import ROOMS, calls, declared
from zoo import LABELS, NET, ZOO, N, X, Y

import numpyro_bnn as bnn
from numpyro_bnn import (
    guides,
    infer,
    infinite,
    metrics,
    models,
    moments,
    nn,
    plots,
    priors,
    sgmcmc,
    symmetry,
)
from numpyro_bnn.estimators import Classifier, Regressor
from numpyro_bnn.program import Posterior
from numpyro_bnn.sgmcmc import schedules
from use.readers import READERS

pytestmark = pytest.mark.core

LINE = ZOO["line"].model
NAN, HALVES = np.full(N, np.nan), np.full((N, 2), 0.5)
RAGGED = [[1.0], [1.0, 2.0]]
DAYS = np.arange("2020-01-01", "2020-01-25", dtype="M8[D]")
KERNEL, STREAM = {"kernel": np.ones((2, 1))}, sgmcmc.WithReplacement(10, 2)
SCALE = [symmetry.Scale("w")]


@cache
def key():
    return jax.random.key(0)


def start(kernel, *args, init_params=None, num_warmup=0, **kwargs):
    return kernel.init(key(), num_warmup, init_params, args, kwargs)


def network(net=NET, shape=(2,), prior=None, name="net"):
    return handlers.seed(bnn.random_network, 0)(name, net, shape, prior)


def trace(model, *args):
    return handlers.trace(handlers.seed(model, 0)).get_trace(*args)


def regression(*args):
    return trace(models.regression(NET), *args)


def changing():
    """A model whose site has another name in every call."""
    names = (f"w{i}" for i in range(10**6))

    def model(x, y=None):
        w = numpyro.sample(next(names), dist.Normal(0.0, 1.0))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(x[:, 0] * w, 0.5), obs=y)

    return model


def fit(*args, num_steps=5, **options):
    svi = SVI(LINE, AutoNormal(LINE), numpyro.optim.Adam(0.1), Trace_ELBO())
    return guides.fit(svi, key(), num_steps, *args, progress_bar=False, **options)


def adf(*args, **options):
    return guides.AutoADF(LINE).run(key(), *args, progress_bar=False, **options)


def laplace(*args, sites=None, **options):
    return guides.AutoLaplace(LINE, sites=sites).run(
        key(), *args, progress_bar=False, **options
    )


@cache
def fitted():
    guide = guides.AutoADF(LINE)
    return guide, guide.run(key(), X, Y, num_epochs=1, progress_bar=False).params


def sampler(dynamics=None, schedule=0.1, gradient=None, **options):
    dynamics = sgmcmc.Overdamped() if dynamics is None else dynamics
    gradient = sgmcmc.Full(lambda q: 0.5 * q @ q) if gradient is None else gradient
    return sgmcmc.build(gradient, dynamics, schedule=schedule, **options)


def flow():
    return pytest.importorskip("flowjax.distributions").StandardNormal((2,))


@cache
def gp():
    return infinite.gp_regression(NET, X, Y, noise_sd=0.1)


@cache
def regressor():
    return Regressor("adf", widths=(2,), effort=0.05, random_state=0).fit(X, Y)


@cache
def classifier():
    labels = np.where(LABELS > 0, "yes", "no")
    return Classifier("adf", widths=(2,), effort=0.05, random_state=0).fit(X, labels)


def named(name, column):
    return pytest.importorskip("pandas").DataFrame({"a": X[:, 0], name: column})


def without_inputs():
    """A network with batch normalization, and results without its inputs."""
    net = nn.MLP([3, 1], norm=nn.BatchNorm())
    shapes = {
        f"net.{name}": (1, 1, *shape) for name, shape in net.param_shapes((2,)).items()
    }
    axes = {
        name: ["chain", "draw", *(f"{name}_{i}" for i in range(len(s) - 2))]
        for name, s in shapes.items()
    }
    posterior = {name: (axes[name], np.ones(shape)) for name, shape in shapes.items()}
    model = models.regression(net, priors.Normal(), noise=0.5)
    return model, results(
        {"posterior": posterior, "observed_data": {"y": (["data"], Y)}}
    )


@cache
def idata():
    xr = pytest.importorskip("xarray")
    draws = np.random.default_rng(0).normal(size=(1, 5, N))
    axes = ("chain", "draw", "data")
    groups = {
        "posterior": {"w": (("chain", "draw", "k"), draws[..., :2])},
        "posterior_predictive": {"y": (axes, draws), "y_mean": (axes, draws)},
        "observed_data": {"y": (("data",), Y)},
        "constant_data": {"x": (("data",), Y)},
    }
    return xr.DataTree.from_dict(
        {name: xr.Dataset(values) for name, values in groups.items()}
    )


# By room: (call, argument at fault, part of the message).
ROWS = {}
ROWS["estimators"] = [
    *[
        (lambda option=option: Regressor(**option).fit(X, Y), *why)
        for option, *why in [
            ({"widths": b"5"}, "widths", "Pass the hidden widths"),
            ({"random_state": np.nan}, "random_state", "cannot be used to seed"),
            ({"prior": 0}, "prior", "priors."),
            ({"network": 3}, "network", "Pass a function of the number of outputs"),
            (
                {"network": lambda outputs: nn.MLP([2, outputs + 1])},
                "network",
                "as many as your function is told: 1.",
            ),
            ({"target": "count"}, "target", "Did you mean 'counts'?"),
            ({"target": "positive"}, "y", 'Another `target` than "positive"'),
            ({"target": "bounded"}, "bounds", "Pass the bounds of the targets"),
            ({"bounds": (1, 0)}, "bounds", "the lower and the upper bound"),
            ({"target": "positive", "heavy_tails": True}, "heavy_tails", "has its own"),
            (
                {"target": "ordered", "heteroscedastic": True},
                "heteroscedastic",
                "has no scale",
            ),
            ({"target": "counts", "method": "laplace"}, "method", "Use another"),
        ]
    ],
    (lambda: regressor().predict("abc"), "X", "Pass a table of numbers, (N, D)."),
    (
        lambda: regressor().conformal_interval(X, RAGGED, Y),
        "X_held_out",
        "inhomogeneous",
    ),
    (lambda: regressor().predict_quantiles(X, []), "levels", "between 0 and 1"),
    (lambda: regressor().score(X, 3.0), "y", "array-like"),
    (lambda: regressor().calibrate(len, Y), "X", "must be a string or a real"),
    (lambda: regressor().sample(X, random_state="a"), "random_state", "seed"),
    (lambda: Classifier("nut").fit(X, LABELS), "method", "Did you mean 'nuts'?"),
    (lambda: bnn.estimators.inside(3), "model", "Pass a fitted `Pipeline`"),
    (lambda: Classifier().fit(X, 0 * LABELS), "y", "Pass rows of at least two"),
    (lambda: regressor().conformal_interval(X, X[:3], Y[:3]), "X_held_out", "Hold out"),
    (lambda: regressor().calibrate(X[:9], Y[:9]), "X", "Hold out at least 10 rows."),
    *[
        (lambda X=X, y=y: Regressor("adf").fit(X, y), argument, fragment)
        for X, y, argument, fragment in [
            (named("b", [np.inf, *Y[1:]]), Y, "X", "1 values in column 'b'"),
            (np.c_[X, [None, *Y[1:]]], Y, "X", "1 values in column 2 that are NaN"),
            (X.astype("m8[s]"), Y, "X", "dates or durations in column 0"),
            ([["x", 1.0]] * N, Y, "X", "the text 'x' in column 0"),
            (X, DAYS, "y", "dates or durations, such as 2020-01-01"),
            (X, ["a", *Y[1:]], "y", "the text 'a'. Pass numbers, or use `Classifier`"),
            (X, [np.inf, *Y[1:]], "y", "1 values that are NaN, None, infinite or"),
            (X, np.array([1.7e308, -1.7e308] * 12), "y", "24 values that are NaN"),
        ]
    ],
    *[
        (lambda y=y: Classifier("adf").fit(X, y), "y", fragment)
        for y, fragment in [
            ([None, *"ab" * 11, "a"], "1 missing labels (NaN, None), the first in row"),
            ([*"ab" * 11, "a", NAN[0]], "1 missing labels (NaN, None), the first in"),
            ([3, *"ab" * 11, "a"], "text beside other labels, such as 'a' and 3"),
        ]
    ],
    (lambda: Regressor("laplace").fit(X[:5], Y[:5]), "X", "Pass at least 6 rows,"),
    (lambda: classifier().conformal_set(X, X, ["none"] * N), "y_held_out", "the label"),
    (lambda: regressor().conformal_interval(X, X, ["a"] * N), "y_held_out", "the text"),
    (lambda: regressor().score(X, ["a"] * N), "y", "Regressor.score"),
    (lambda: regressor().score(X * 1j, Y), "X", "complex numbers in column 0. Complex"),
    (lambda: classifier().score(X, np.ones(N) * 1j), "y", "complex numbers. Complex"),
    (lambda: regressor().calibrate(X, Y * 1e30), "y", "so far from the predictions"),
    (lambda: regressor().calibrate(X, np.stack([Y, Y], 1)), "y", "Regressor.calibrate"),
    (lambda: regressor().predict(X.astype(np.float64) * 1e200), "X", "Check the units"),
    (lambda: regressor().most_uncertain(X, 1000), "num_rows", "Ask for fewer rows."),
]
ROWS["nn"] = [
    (lambda: nn.MLP(b"12"), "widths", "Pass a list of positive integers"),
    (lambda: nn.Conv2d(4, window=b"33"), "window", "Pass an integer of at least"),
    (lambda: NET.output_shape(b"2"), "input_shape", "as a tuple"),
    (lambda: nn.Conv2d(4, window=(3, 3, 3)), "window", "Pass a positive integer"),
    (lambda: nn.Conv2d(4, padding="same"), "padding", "Known: SAME, VALID, an"),
    (lambda: nn.Flatten().output_shape((3,)), "x", "It takes inputs of 3 axes"),
    (lambda: nn.Residual(nn.Dense(3)).output_shape((2,)), "x", "It takes a body"),
    (lambda: nn.Sequential([nn.Dense(3), None]), "layers", "Pass layers"),
    (lambda: nn.MLP([3, 1], "rellu"), "name", "Did you mean 'relu'? Known: identity"),
    (lambda: nn.CNN([4], 10), "widths", "Pass a list of positive integers"),
    (lambda: NET.output_shape((0,)), "input_shape", "Every size must be at least 1."),
]
ROWS["priors"] = [
    (lambda: priors.Hierarchical(dist.Normal()), "scale_prior", "Pass a scalar"),
    (
        lambda: priors.GammaPrecision(centered=True, marginal=True),
        "marginal",
        "there is nothing to center",
    ),
    (lambda: priors.Fixed(0.5), "params", "Pass parameters: a dictionary"),
    (lambda: priors.Fixed(KERNEL)("bias", (1,)), "params", "Known: kernel."),
    (lambda: priors.Fixed(KERNEL)("kernel", (3, 1)), "params", "network of this size."),
    (lambda: priors.Learned({}), "init", "Pass parameters: a dictionary"),
    (lambda: priors.BySite([priors.Normal()]), "patterns", "Pass a dictionary, e.g."),
    (lambda: priors.BySite({"a": priors.Normal()})("b", (2, 2)), "patterns", "Add one"),
]
ROWS["numpyro_bnn"] = [
    (lambda: bnn.random_network("net", NET, (2,)), "name", "Call it in a model"),
    (lambda: bnn.to_inference_data(3), "result", "Pass a run `numpyro.infer.MCMC`"),
    (lambda: bnn.to_inference_data(None, predictions=[X]), "predictions", "Name the"),
    (lambda: bnn.predict(LINE, 3, X), "idata", ""),
]
ROWS["models"] = [
    *[
        (lambda p=prior: models.regression(NET, p), "prior", "priors.")
        for prior in (0, "", np.ones(2))
    ],
    (
        lambda: models.regression(NET, noise=dist.Normal()),
        "noise",
        "Pass a distribution on (0, inf)",
    ),
    (
        lambda: models.regression(NET, noise=0.1, heteroscedastic=True),
        "noise",
        "leave it out",
    ),
    (lambda: regression(X, Y, np.array([2, 3])), "batch_size", "Pass an integer"),
]
ROWS["symmetry"] = [
    (lambda: symmetry.Scale({"w": 1}), "weights", "Pass a site, or a pair"),
    (lambda: symmetry.JointRescale("w", "v", [("s", "1")]), "scales", "Pass a finite"),
    (
        lambda: symmetry.canonical({"w": X * 1j}, [symmetry.Shift("w")]),
        "draws",
        "Pass an array of numbers",
    ),
    (lambda: symmetry.find(LINE, X, NAN), "args[1]", "Drop or impute"),
    (lambda: symmetry.find(LINE, X, Y[:3]), "args", "an array of 3 rows"),
    (lambda: symmetry.find(changing(), X, Y[:3]), "obs", f"distribution, ({N},)"),
    (lambda: symmetry.check(LINE, SCALE, 3), "args", "Pass the arguments of the model"),
    (lambda: symmetry.invariants(None, SCALE), "draws", "Pass arrays"),
    (lambda: symmetry.Rescale("v", 3), "outgoing", "Pass a site, or a pair of site"),
    (lambda: symmetry.JointScale("w", "s", 0), "power", "Pass 1 for a scale, -2"),
    (lambda: symmetry.SignFlip(3), "elements", "Pass a site, or a pair of site"),
    (lambda: symmetry.Permutation([]), "elements", "Name at least one site."),
    (lambda: symmetry.JointScale([("w", 1)], "s"), "weights", "without axes"),
    (lambda: symmetry.JointScale("w", ["s", "t"]), "scale", "Name one site"),
    (lambda: symmetry.from_network("net", (3,)), "net", "Pass a specification"),
    (lambda: symmetry.check(LINE, SCALE, (X, Y)), "symmetries", "Leave it out, remove"),
    (lambda: symmetry.check(LINE, [symmetry.Scale("v")], (X, Y)), "site", "Known: w."),
    (lambda: symmetry.canonical({"w": X[:0]}, SCALE), "draws", "Pass at least one"),
    (lambda: symmetry.JointRescale("a", "b", []), "scales", "Name hyper-sites"),
    (lambda: symmetry.JointRescale("w", "v", "s"), "scales", "with powers"),
    (
        lambda: symmetry.orbit_coordinates({"w": X}, "scale"),
        "symmetries",
        "Pass symmetries such as",
    ),
]
ROWS["moments"] = [
    (lambda: moments.register(3), "names", "Pass names of primitives"),
    (lambda: moments.register("cumsum")(3), "rule", "Put it above a function"),
    (lambda: moments.register_elementwise(jnp.tanh), "names", "Pass names"),
    (
        lambda: moments.propagate(jnp.sum)(moments.Gaussian(X[0], Y[:3])),
        "var",
        "Pass one variance per element",
    ),
    (
        lambda: moments.propagate(np.sum)(moments.Gaussian(LABELS, LABELS)),
        "mean",
        "Pass floating-point",
    ),
]
ROWS["sgmcmc"] = [
    (lambda: sgmcmc.WithReplacement(10, 11), "batch_size", "Pass at most num_data ="),
    (lambda: sgmcmc.Epochs(2**31, 1), "num_data", "Pass fewer than 2^31 rows"),
    (lambda: sgmcmc.Diagonal([-1.0]), "values", "Pass positive finite numbers."),
    (lambda: sgmcmc.Dense([[1.0, 2.0], [0.0, 1.0]]), "matrix", "Pass a symmetric"),
    (lambda: sampler(sgmcmc.HMC(1), temperature=0), "temperature", "Pass a finite"),
    (
        lambda: sampler(sgmcmc.HMC(1), gradient=sgmcmc.Minibatch(np.sum, STREAM)),
        "gradient",
        "Pass `Full`",
    ),
    (lambda: sampler().init(0.0, jnp.ones(2)), "position", "Pass one flat vector"),
    (lambda: sampler().init(jnp.ones(2), 0), "rng_key", "Pass one key"),
    (lambda: sampler().init(jnp.arange(3), key()), "position", ""),
    (lambda: sampler(sgmcmc.Microcanonical()).init(jnp.ones(1), key()), "position", ""),
    (
        lambda: sampler(sgmcmc.HMC(1), preconditioner=sgmcmc.RMSProp(running=True)),
        "preconditioner",
        "",
    ),
    (lambda: sgmcmc.Epochs(10, 11), "batch_size", ""),
    (lambda: sampler().init(jnp.ones(2), key(), -1), "num_warmup", "Pass an integer"),
    (
        lambda: sampler(preconditioner=sgmcmc.RMSProp()).init(X[0], key()),
        "num_warmup",
        "learns during warm-up",
    ),
    (lambda: schedules.polynomial(1.0, gamma=2), "gamma", "Above 1 the chain freezes:"),
    (lambda: schedules.cyclical(0.1, 2, 3), "num_cycles", "Pass at most num_steps ="),
]
ROWS["infinite"] = [
    (lambda: infinite.empirical_ntk(NET, "a", X), "params", "Pass one array for each"),
    (
        lambda: infinite.empirical_ntk(NET, {"Dense_0.kernel": NAN}, X),
        "params['Dense_0.kernel']",
        "Drop or impute",
    ),
    (lambda: infinite.gp_regression(NET, 3.0, Y, noise_sd=0.1), "x", "Pass one row"),
    (lambda: gp().log_density(X, RAGGED), "y", "rows of several lengths"),
    (lambda: infinite.nngp(NET, X[:, 0]), "x1", "Pass one row per data point, (N, D)"),
    (lambda: infinite.ntk(NET, X[:0]), "x1", "Pass at least one row."),
]
ROWS["guides"] = [
    *[
        (lambda s=scale: guides.AutoBlocks(LINE, init_scale=s), "init_scale", "")
        for scale in ({}, {3: 0.1}, np.ones(2) * 1j)
    ],
    (lambda: guides.AutoBlocks(LINE, 3), "blocks", "Pass a dictionary from"),
    (lambda: guides.init_to_fan_in("w"), "site", "init_strategy=init_to_fan_in"),
    (lambda: fit(X, Y, batch_size=2.5), "subsample_size", f"from 1 to {N}"),
    (lambda: fit(X + NAN[:, None], Y), "args[0][0]", "NaN or infinite"),
    (
        lambda: fit(X, Y, init_params={"w_auto_loc": NAN[:2]}),
        "init_params['w_auto_loc']",
        "Drop or impute",
    ),
    (lambda: adf(X, Y, init_means={"w": NAN[:2]}), "init_means['w']", "Drop or impute"),
    (
        lambda: adf(X, Y, init_means={"w": np.ones(3)}),
        "init_means['w']",
        "Pass a value",
    ),
    (
        lambda: adf(X, Y, orders=[[0, 1]], num_epochs=1),
        "orders",
        f"E = 1 permutations of N = {N} rows.",
    ),
    (lambda: fitted()[0].update(fitted()[1], X), "model", "Pass the targets among"),
    (lambda: laplace(X, Y, sites="v.*"), "sites", "Known: w."),
    (lambda: laplace(X), "sites", "Pass the targets (`y`)"),
    (
        lambda: laplace(X, Y, init_params={"w": np.ones(3)}),
        "init_params",
        "Pass a value of shape (2,).",
    ),
    (lambda: guides.AutoLaplace(LINE).predictive({}, X), "params", "Call `run` of"),
    (
        lambda: guides.AutoLaplace(LINE).predictive({}, X, link="sample"),
        "rng_key",
        "Pass a key, e.g.",
    ),
    (lambda: guides.AutoBlocks(LINE, init_scale=0), "init_scale", "Pass a positive"),
    (lambda: guides.Coupling(hidden=(0,)), "hidden", "Pass an integer of at least 1."),
    (lambda: guides.Flowjax(3), "flow", "lowjax"),
    (lambda: guides.Flowjax(flow(), standardized="no"), "standardized", "Pass True"),
    (lambda: guides.evidence(3, {}, X, Y, rng_key=key()), "guide", "Pass a NumPyro"),
    (
        lambda: guides.evidence(AutoNormal(LINE), 3, X, Y, rng_key=key()),
        "params",
        "Pass the parameters of",
    ),
    (lambda: guides.summarize([1.0, np.nan]), "log_weights", "a density of the model"),
]
ROWS["infer"] = [
    (
        lambda: infer.SGLD(LINE, 0.1).init(0, 0, None, (X, Y), {}),
        "rng_key",
        "Pass a key",
    ),
    (
        lambda: start(infer.SGLD(LINE), X, Y, batch_size=0),
        "subsample_size",
        f"from 1 to {N}",
    ),
    (lambda: start(infer.MCLMC(LINE), X, NAN), "args[0][1]", "Drop or impute those"),
    (lambda: start(infer.SGLD(changing()), X, Y), "model", "the same name in each"),
    (
        lambda: start(infer.SGLD(LINE), X, Y, init_params={"w": NAN[:2]}),
        "init_params['w']",
        "Drop or impute",
    ),
    (
        lambda: start(infer.SGLD(LINE), X, Y, init_params={"w": np.zeros(3)}),
        "init_params",
        "{'w': (2,)}.",
    ),
    (
        lambda: start(infer.SGLD(LINE, warm_start=0.01), X, Y, num_warmup=10),
        "warm_start",
        "Take a larger share",
    ),
    (
        lambda: infer.SGLD(LINE, preconditioner="rms"),
        "preconditioner",
        "Known: identity, rmsprop, warm_start",
    ),
    (
        lambda: infer.PSGLD(LINE, preconditioner="warm_start", warm_start=0),
        "preconditioner",
        "Set `warm_start=",
    ),
    (
        lambda: infer.SGHMC(LINE, momentum_decay=0),
        "momentum_decay",
        "Pass a `step_size`, or a decay",
    ),
    (lambda: infer.SGNHT(LINE, momentum_decay=1), "momentum_decay", "a thermostat"),
    (
        lambda: infer.CyclicalSGLD(LINE, 0.1, steps_per_draw=3),
        "steps_per_draw or warm_start",
        "Set `cycle_len",
    ),
    (lambda: infer.CyclicalSGLD(LINE, schedules.polynomial(0.1)), "step_size", ""),
    (
        lambda: infer.CyclicalSGLD(LINE, 1.0, cycle_length=9),
        "cycle_length, draws_per_cycle, explore",
        "one step",
    ),
    (lambda: mala(LINE, gradient="control_variates"), "gradient", "Leave it out: this"),
    (lambda: infer.MCLMC(LINE, temperature=0.0), "temperature", "Pass a finite number"),
    (
        lambda: infer.MCLMC(LINE, energy_variance=(1, 2, 3)),
        "energy_variance",
        "Pass a number or (first, last).",
    ),
    (lambda: infer.implied_bias([0.1, -1]), "energy_variance", "Pass a finite number"),
    (lambda: infer.OrbitMoves(NUTS, SCALE), "kernel", "Pass a kernel"),
    (lambda: infer.OrbitMoves(NUTS(LINE), []), "symmetries", "Declare one"),
    (lambda: infer.collapse(LINE, "w", X, Y), "sites", "Pass a nonempty sequence"),
]
ROWS["metrics"] = [
    (lambda: metrics.lppd(np.ones(3)), "log_likelihood", "Pass draws shaped (S, N)"),
    (lambda: metrics.rmse(Y, Y[:3]), "y", "Pass one row per data point in each."),
    (lambda: metrics.crps(Y, Y), "draws", "Pass draws shaped (S, N), or (C, S, N)"),
    (lambda: metrics.pit(Y[None], Y, None), "rng", "Pass an integer of at least 0."),
    (lambda: metrics.accuracy(HALVES * 2, LABELS), "probs", "Normalize over the last"),
    (lambda: metrics.brier(HALVES - 1, LABELS), "probs", "Pass probabilities"),
    (lambda: metrics.auroc([], [1.0]), "scores_in", "Pass at least one row."),
    (lambda: metrics.log_score(HALVES, LABELS.astype(str)), "labels", "Pass integer"),
    (lambda: metrics.uncertainty(HALVES), "probs", "Pass probabilities shaped (S, N"),
    (lambda: metrics.relative_logit_variance(HALVES), "logits", "Pass logits shaped"),
    (lambda: metrics.function_space(Y), "draws", "Pass predictions shaped (C, S, N"),
    (lambda: metrics.health(Y), "idata", "Pass the result of `to_inference_data`"),
    (lambda: metrics.lppd(NAN[None]), "log_likelihood", "NaN or plus infinite values"),
    (lambda: metrics.crps(Y[None], Y), "draws", "absolute error"),
    (lambda: metrics.log_score(HALVES, LABELS + 1), "labels", "pass labels 0..1"),
    (lambda: metrics.function_space(NAN.reshape(2, 3, 4)), "draws", "NaN"),
    (
        lambda: metrics.relative_logit_variance(np.zeros((1, 5, 3))),
        "logits",
        "at least two draws",
    ),
]
ROWS["datasets"] = [
    (lambda: bnn.datasets.Scaler.fit("x"), "train", "Pass an array with one row per"),
    (lambda: bnn.datasets.Scaler("0", 1.0), "mean", "Pass an array of numbers."),
    (lambda: bnn.datasets.Scaler(np.zeros(2), np.arange(2)), "scale", "Pass positive"),
]
ROWS["results"] = [
    (
        lambda: bnn.to_inference_data(None, coords={"data": 3}),
        "coords",
        "Pass a dictionary of lists",
    ),
    (lambda: bnn.to_inference_data(None, dims={"w": 3}), "dims", "Pass a dictionary"),
    (lambda: bnn.to_inference_data(None, attrs={3: "a"}), "attrs", "names as keys"),
    (lambda: bnn.to_inference_data("folder", args=(X,)), "args", "Leave it out"),
    (lambda: bnn.to_inference_data("folder", guide=3), "guide", "Leave it out"),
    (lambda: bnn.predict(*without_inputs(), X), "idata", "no `constant_data` of ['x']"),
    (lambda: bnn.predict(LINE, idata()), "args", "missing a required argument: 'x'"),
    (lambda: bnn.predict(LINE, idata(), "a"), "args", "with which the model fails"),
]
ROWS["numbers"] = [
    (lambda: metrics.uncertainty(np.ones((1, 0, 2, 2))), "probs", "Pass at least one"),
    (lambda: metrics.ece(HALVES, RAGGED), "labels", "rows of several lengths"),
    (lambda: sgmcmc.Dense(np.eye(2) * 1j), "matrix", "Pass an array of numbers"),
    (lambda: bnn.predict(LINE, idata(), X * np.inf), "x", "NaN or infinite"),
    (
        lambda: metrics.ece(np.full((2, 2), 0.5), np.ones(2, "m8[D]")),
        "labels",
        "dtype timedelta64[D]",
    ),
]
ROWS["plots"] = [
    (lambda: plots.importances({"a": "b"}), "shares", "Pass an array of numbers"),
    (lambda: plots.importances({"a": [1, 2]}), "shares", "at least one share"),
    (
        lambda: plots.calibration(idata(), group=np.ones(2)),
        "group",
        "Known: posterior_predictive",
    ),
    (lambda: plots.predictive_band(idata(), Y * 1j), "x", "Pass an array of numbers"),
    (lambda: plots.predictive_band(idata(), levels=0.9), "levels", "Pass several"),
    (lambda: plots.predictive_band(idata(), levels=(1.5,)), "levels", "above 0"),
    (
        lambda: plots.predictive_band(idata(), Y[:2]),
        "x",
        f"Pass one value for each of {N} points.",
    ),
    (lambda: plots.reliability_diagram(idata()), "site", "Class probabilities"),
]
ROWS["runs"] = [
    (lambda: Posterior("model"), "model", "Pass a NumPyro model"),
    (lambda: bnn.runs.batches(np.ones((3, 1)), 3), "source", "Pass an iterable"),
    (
        lambda: bnn.runs.fit("folder", 3, key(), 10),
        "method",
        "Pass a `numpyro.infer.SVI` or a `guides.AutoADF`",
    ),
    (
        lambda: bnn.runs.start(
            "a", MCMC(NUTS(potential_fn=np.sum), num_warmup=1, num_samples=1), key()
        ),
        "mcmc",
        "",
    ),
]


def marks(call):
    """A second fit, of a classifier, is slow: a regressor goes the same way."""
    return pytest.mark.slow if "classifier" in call.__code__.co_names else ()


@pytest.mark.parametrize(
    ("call", "argument", "fragment"),
    [
        pytest.param(*row, id=f"{room}-{i}-{row[1]}", marks=marks(row[0]))
        for room, rows in ROWS.items()
        for i, row in enumerate(rows)
    ],
)
def test_wrong_arguments_are_refused(call, argument, fragment):
    with refused(argument, fragment):
        call()


# -- data and names that no model can use, wherever a model is read --------------------


@pytest.mark.parametrize(
    ("reader", "dtype"),
    [
        *((reader, "U1") for reader in READERS),
        *(("SGLD", dtype) for dtype in ("S1", "M8[D]", "m8[D]", object)),
    ],
)
def test_arrays_of_text_and_dates_are_refused_as_data(reader, dtype):
    strange = np.zeros(N, int).astype(dtype)
    for data in ((X, strange), (np.stack([strange, strange], 1), Y)):
        with pytest.raises(
            TypeError,
            match=r"argument `.+` got an array of dtype .* Pass an array of numbers",
        ):
            READERS[reader](LINE, *data)


@pytest.mark.parametrize("reader", ["SGLD", "find"])
def test_complex_targets_are_refused(reader):
    with refused("obs", "complex numbers for the site 'y'"):
        READERS[reader](LINE, X, Y + 1j)
    with refused("fn", "complex numbers for the site 'y'"):
        READERS[reader](LINE, X + 1j, Y)
    with refused("y", "Pass an array of numbers"):
        regression(X, Y + 1j)


@pytest.mark.parametrize("reader", READERS)
def test_an_error_of_a_model_says_what_the_model_got(reader):
    """It stays as it is, with a note."""
    with pytest.raises(AttributeError) as caught:
        READERS[reader](LINE, "abc", Y)
    notes = " ".join(caught.value.__notes__)
    assert "argument `x` got 'abc'; argument `y` got an array of shape" in notes


@pytest.mark.parametrize("name", ["", "..", "/", "a\0"])
def test_names_of_which_no_file_can_be_named_are_refused(name):
    """A run folder and an export name files and variables by them."""

    def model(x, y, site="w", plate="data"):
        w = numpyro.sample(site, dist.Normal(0.0, 1.0))
        with numpyro.plate(plate, N):
            numpyro.sample("y", dist.Normal(x[:, 0] * w, 0.5), obs=y)

    for names in ([name], ["w", name]):
        with refused("name", repr(name)):
            start(infer.SGLD(model), X, Y, *names)


# Results, states, base classes and distributions, and classes without arguments: nobody
# can call them wrongly.
NOT_CALLED = """
ADFResult LaplaceResult Block Evidence Prediction PriorFit Score Uncertainty Run
Equation Interpreter Layer BatchStatistics ForwardContext GroupStudentT Prior
Sampler State Symmetry HealthWarning Diagonal FullRank Overdamped Posterior
GPRegression
"""


def test_every_public_function_has_a_declared_option_or_a_row():
    """By the names that the code of the rows and of their helpers holds."""
    helpers = [
        value
        for value in globals().values()
        if hasattr(value, "__code__") or hasattr(value, "__wrapped__")
    ]
    codes = [getattr(value, "__wrapped__", value).__code__ for value in helpers]
    codes += [row[0].__code__ for rows in ROWS.values() for row in rows]
    called = {name for code in codes for name in code.co_names}
    public = {
        name: call
        for room in ROOMS
        for name, owner, call in calls(room)
        if owner is None
    }
    public = {name for name, call in public.items() if not declared(call)}
    assert public - called - {*NOT_CALLED.split()} == set()
