"""The observation of one data point: Gaussian quantities of the network, and a
distribution given them.

Moments are propagated up to quantities that can be treated as Gaussian; the likelihood
is integrated over these. For ``Poisson(jnp.exp(f))`` that is f, not the rate: a
Gaussian rate would be negative at some nodes. So the program of the distribution's
parameters is cut before the first nonlinear elementwise function of a single random
operand.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.extend.core import Literal, jaxpr_as_fun
from jax.flatten_util import ravel_pytree
from numpyro.distributions import constraints

from numpyro_bnn import moments
from numpyro_bnn._distributions import unmasked_elements, unwrapped
from numpyro_bnn._jaxprs import ELEMENTWISE, dependence, needed_equations, reached
from numpyro_bnn.guides.adf.reading import CALL, Data, Roles, refuse
from numpyro_bnn.moments import Equation, Gaussian
from numpyro_bnn.program.compiled import is_traced, shared

Context = dict[str, Any]

CHECKED_ROWS = 100  # that are compared alone and among all
# Affine in a single random operand, or a mere change of shape: no reason to cut before
# them.
AFFINE = {"add", "sub", "neg", "mul", "div", "convert_element_type", "copy"}
SHAPING = {"squeeze", "reshape", "broadcast_in_dim", "expand_dims"}
HYPERPARAMETERS = (jax.tree_util.DictKey("hyperparameters"),)


@dataclass(frozen=True)
class ADFObservation:
    """One data point's observation: Gaussian quantities of the network, and a
    distribution given these.
    """

    kind: str  # "normal", "categorical" or "other"
    name: str  # of the site
    # the program of the distribution's parameters, the observed `value`, and its `mask`
    # if it has one
    cut: "Split"
    # from these parameters, elementwise
    build: Callable[[Mapping[str, Any]], dist.Distribution]
    shape: tuple[int, ...]  # of one observation

    @property
    def integrated(self) -> set[str]:
        """The quantities that are integrated numerically."""
        return set(self.cut.cuts) - ({"loc"} if self.kind == "normal" else set())

    def quantities(
        self, weights: Mapping[str, Gaussian], context: Context
    ) -> dict[str, Gaussian]:
        """Moments of the Gaussian quantities, from those of the weights."""
        outputs = moments.propagate(lambda w: self.cut.head(w, context))(dict(weights))
        for name, value in outputs.items():
            if not isinstance(value, Gaussian):
                outputs[name] = Gaussian(value, jnp.zeros_like(value))
        return outputs


def observe(
    data: Data, sites: Roles, context: Context, with_value: bool
) -> ADFObservation:
    """Read the observation of one data point from the model.

    :param context: example of ``{"rows", "arrays", "hyperparameters"}``: one row of the
        data, the other arrays, and values of the hyperparameters.
    :param with_value: whether the observed value is among the arguments.
    """
    weights = sites.prior_means
    description: dict[str, Any] = {}

    def program(weights: Any, context: Context) -> dict[str, Any]:
        call = data.row(context["rows"], context["arrays"])
        site = data.site(
            sites.observed, {**weights, **context["hyperparameters"]}, call
        )
        base = unwrapped(site["fn"], masked=True)
        if base.event_dim:
            reason = (
                f"a {type(base).__name__}, whose elements are not independent given "
                f"the network"
            )
            raise refuse(
                sites.observed, reason, "Use independent observations, or MCMC."
            )
        shape = site["fn"].shape()
        kind, parameters, build = _parameters(base, shape)
        description.update(
            kind=kind, build=build, shape=shape, bounded=_bounded(base, parameters)
        )
        if not with_value:
            return parameters
        if not site["is_observed"]:
            raise refuse(
                sites.observed,
                "that has no value",
                "Pass the targets among the arguments, e.g. `y`.",
            )
        joint_shape = np.broadcast_shapes(shape, np.shape(site["value"]))
        if joint_shape[:1] != (1,):
            instead = "Pass data, targets and masks as arguments of the model."
            raise refuse(
                sites.observed,
                f"of shape {joint_shape} for one row of the data",
                instead,
            )
        return parameters | {
            "value": site["value"],
            "mask": jnp.broadcast_to(unmasked_elements(site["fn"]), shape),
        }

    cut = split(program, weights, context, keep=("loc", "logits"))
    kind = description["kind"] if cut.direct & {"loc", "logits"} else "other"
    _check_cut(cut, description["bounded"], sites, context)
    return ADFObservation(
        kind, sites.observed, cut, description["build"], description["shape"]
    )


def _check_cut(cut: "Split", bounded: set[str], sites: Roles, context: Context) -> None:
    """Refuse predictors that depend on hyperparameters, and bounded parameters that
    would be treated as Gaussian.
    """
    weights = sites.prior_means
    entering = dependence(
        lambda hypers: cut.head(weights, {**context, "hyperparameters": hypers}),
        context["hyperparameters"],
    )
    for name in set().union(*entering.values()):  # they would not be learned
        prior = type(unwrapped(sites.hyperparameters[name])).__name__
        instead = (
            "Scale weights in their prior, `Normal(0, tau)`; give other sites a prior "
            "on the real line."
        )
        raise refuse(name, f"a {prior} from which the predictor is computed", instead)
    for name in (cut.random & bounded) - cut.nonlinear:
        reason = (
            f"whose {name.split(' (')[0]} is not an elementwise function of a "
            f"linear predictor"
        )
        instead = (
            "Write e.g. `Poisson(jnp.exp(f))` or `Categorical(logits=f)` with f "
            "straight from the network."
        )
        raise refuse(sites.observed, reason, instead)


def _parameters(
    base: dist.Distribution, shape: tuple
) -> tuple[str, dict[str, Any], Callable]:
    """Kind, parameters by name, and how to build the distribution from them."""
    if type(base) is dist.Normal:
        parameters = {
            "loc": jnp.broadcast_to(base.loc, shape),
            "scale": jnp.broadcast_to(base.scale, shape),
        }
        return "normal", parameters, lambda p: dist.Normal(p["loc"], p["scale"])
    if isinstance(base, dist.CategoricalLogits):
        logits = jnp.broadcast_to(base.logits, (*shape, base.logits.shape[-1]))
        return (
            "categorical",
            {"logits": logits},
            lambda p: dist.Categorical(logits=p["logits"]),
        )
    if isinstance(base, dist.BernoulliLogits):
        return (
            "other",
            {"logits": base.logits},
            lambda p: dist.Bernoulli(logits=p["logits"]),
        )
    leaves, structure = jax.tree.flatten(base)
    names = [_leaf_name(base, leaf, k) for k, leaf in enumerate(leaves)]
    parameters = dict(zip(names, leaves, strict=True))
    return (
        "other",
        parameters,
        lambda p: jax.tree.unflatten(structure, [p[n] for n in names]),
    )


def _leaf_name(base: dist.Distribution, leaf: Any, index: int) -> str:
    """Name of a parameter; a number distinguishes two parameters of the same name (in
    an inner distribution).
    """
    for name in base.arg_constraints:
        if base.__dict__.get(name) is leaf:
            return f"{name} ({index})"
    return f"parameter {index}"


def _bounded(base: dist.Distribution, parameters: Mapping[str, Any]) -> set[str]:
    """Parameters whose support is not the whole real line."""
    bounded = set()
    for name in parameters:
        argument = name.split(" (")[0]
        real = base.arg_constraints.get(argument) is constraints.real
        if argument != "logits" and not real:
            bounded.add(name)
    return bounded


def check_quantities(
    observation: ADFObservation, sites: Roles, context: Context
) -> None:
    """Refuse quantities of one row that are functions of fewer: they are integrated as
    if they were independent.

    Their slopes at random weights, along as many random directions as there are
    quantities, are then dependent.
    """
    weights = _random_weights(sites)

    def flat(weights: Any) -> jax.Array:
        return ravel_pytree(observation.cut.head(weights, context))[0]

    count = jax.eval_shape(flat, weights).size
    if count == 1:
        return

    def slopes_at(weights: Any) -> jax.Array:
        point, unflatten = ravel_pytree(weights)

        def slope(key: jax.Array) -> jax.Array:
            direction = unflatten(jax.random.normal(key, point.shape))
            return jax.jvp(flat, (weights,), (direction,))[1]

        return jax.lax.map(slope, jax.random.split(jax.random.key(0), count))

    slopes = jax.jit(slopes_at)(weights)
    if isinstance(slopes, jax.core.Tracer) or not np.all(np.isfinite(slopes)):
        return
    slopes = np.asarray(slopes)[:, np.any(slopes, axis=0)]
    sizes = np.linalg.svd(slopes / np.linalg.norm(slopes, axis=0), compute_uv=False)
    if len(sizes) and np.min(sizes) < 1e-9:
        reason = (
            f"whose {count} linear predictors for one row are functions of each other"
        )
        instead = (
            "Give each its own weights, or write one observation per row of the data."
        )
        raise refuse(observation.name, reason, instead)


def _random_weights(sites: Roles) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        n: w.loc + w.scale * random.normal(size=w.loc.shape)
        for n, w in sites.weights.items()
    }


def check_rows(data: Data, sites: Roles, hyperparameters: Mapping[str, Any]) -> None:
    """Refuse a model in which the likelihood of a data point depends on other rows
    (batch statistics, sequences).

    Arrays as long as the observation are taken for its rows. Another one, such as a
    table of as many groups, shows here: a data point gives other numbers with all rows
    than with its own.
    """
    weights = _random_weights(sites)
    row_indices = np.unique(np.linspace(0, data.num_rows - 1, CHECKED_ROWS).astype(int))

    def parameters(rows: Any) -> list[jax.Array]:
        site = data.site(
            sites.observed, {**weights, **hyperparameters}, data.call(rows, data.arrays)
        )
        return jax.tree.leaves(
            (
                unwrapped(site["fn"], masked=True),
                unmasked_elements(site["fn"]),
                site["value"],
            )
        )

    def both(rows: Any) -> list[tuple[jax.Array, jax.Array]]:
        sample_rows = jax.tree.map(lambda leaf: leaf[row_indices, None], rows)
        pairs = []
        for together, separate in zip(
            parameters(rows), jax.vmap(parameters)(sample_rows), strict=True
        ):
            if jnp.shape(separate)[1:2] == (1,):
                shape = data.num_rows, *jnp.shape(separate)[2:]
                pairs.append(
                    (jnp.broadcast_to(together, shape)[row_indices], separate[:, 0])
                )
        return pairs

    rows = data.rows
    if data.num_rows < 2 or is_traced(rows):
        return
    for together, separate in shared(both, once=True)(rows):
        if not np.allclose(together, separate, rtol=1e-6, atol=1e-9, equal_nan=True):
            instead = (
                f"Data points are learned one at a time, each with its own row of "
                f"{', '.join(rows)}: remove"
            )
            instead += (
                " batch statistics and the like, and let the model close over other "
                "arrays of this length."
            )
            raise refuse(sites.observed, "whose rows influence each other", instead)


def rewritten(fn: Callable, rules: Mapping[str, Callable]) -> Callable:
    """The same function with sub-programs inlined and some primitives evaluated by
    rules.
    """
    rules = {"name": lambda equation, value: value, **rules}  # a mark of a site
    walk = moments.Interpreter(rules, lambda value: True, CALL, default=Equation.bind)

    def inlined(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
        outputs = walk.run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return inlined


@dataclass(frozen=True)
class Split:
    """A program ``fn(weights, context)`` in two parts."""

    # computes the Gaussian quantities from weights and context
    head: Callable[[Any, Any], dict[str, Any]]
    # computes all outputs from quantities and context
    tail: Callable[[Mapping[str, Any], Any], dict[str, Any]]
    # the Gaussian quantities, named by the first output computed from each
    cuts: tuple[str, ...]
    random: set[str]  # outputs that depend on the weights, cut or not
    nonlinear: set[str]  # outputs that are a nonlinear function of their quantity
    # outputs that are a quantity of their own, or computed from neither weights nor
    # hyperparameters
    direct: set[str]


def split(
    fn: Callable[[Any, Any], Mapping[str, Any]],
    weights: Any,
    context: Any,
    keep: Sequence[str],
) -> Split:
    """Cut ``fn(weights, context)``, a dictionary of arrays.

    Outputs computed from one quantity share it. No cut lies behind a use of
    ``context["hyperparameters"]`` that could come after it: then the hyperparameter
    belongs to the tail, where it is integrated.

    :param weights: example of the random argument.
    :param context: example of the other argument.
    :param keep: outputs that may be Gaussian quantities themselves.
    """
    closed, shapes = jax.make_jaxpr(rewritten(fn, {}), return_shape=True)(
        weights, context
    )
    jaxpr = closed.jaxpr
    outputs = dict(zip(sorted(shapes), jaxpr.outvars, strict=True))
    count = len(jax.tree.leaves(weights))
    hypers = []
    for var, (path, _) in zip(
        jaxpr.invars[count:], jax.tree.flatten_with_path(context)[0], strict=True
    ):
        if path[:1] == HYPERPARAMETERS:
            hypers.append(var)
    depends = reached(jaxpr.eqns, jaxpr.invars[:count])
    on_hypers = reached(jaxpr.eqns, hypers)
    sources = _sources(jaxpr, depends)
    ends = {}
    for name, var in outputs.items():
        if not isinstance(var, Literal) and var in depends:
            ends[name] = sources.get(var, var)
    cut_vars = {}
    for name, end in ends.items():
        var = outputs[name]
        if list(ends.values()).count(end) > 1 or end.aval.size < var.aval.size:
            cut_vars[name] = end
        elif name in keep and var not in on_hypers:
            cut_vars[name] = var
        else:
            cut_vars[name] = _before_nonlinear(jaxpr, end, var, depends, on_hypers)
    cuts: dict[str, Any] = {}
    for name, var in cut_vars.items():
        if var not in cuts.values():
            cuts[name] = var

    def evaluate(inputs: list[Any], targets: list[Any], values: list[Any]) -> list[Any]:
        needed = needed_equations(jaxpr, targets, frozenset(inputs))
        equations = [equation for equation, _ in needed]
        subprogram = jaxpr.replace(invars=inputs, outvars=targets, eqns=equations)
        return jaxpr_as_fun(closed.replace(jaxpr=subprogram))(*values)

    def head(weights: Any, context: Any) -> dict[str, Any]:
        values = evaluate(
            jaxpr.invars, list(cuts.values()), jax.tree.leaves((weights, context))
        )
        return dict(zip(cuts, values, strict=True))

    def tail(quantities: Mapping[str, Any], context: Any) -> dict[str, Any]:
        inputs = [cuts[name] for name in quantities] + jaxpr.invars[count:]
        values = evaluate(
            inputs, jaxpr.outvars, [*quantities.values(), *jax.tree.leaves(context)]
        )
        return dict(zip(outputs, values, strict=True))

    nonlinear, direct = set(), set()
    for name, var in outputs.items():
        if name not in ends:
            if isinstance(var, Literal) or var not in on_hypers:
                direct.add(name)
            continue
        if _before_nonlinear(jaxpr, ends[name], var, depends) is not var:
            nonlinear.add(name)
        if cut_vars[name] is var and list(cut_vars.values()).count(var) == 1:
            direct.add(name)
    return Split(head, tail, tuple(cuts), set(ends), nonlinear, direct)


def _sources(jaxpr: Any, random: set) -> dict[Any, Any]:
    """For every random variable, the most distant one of which it is an elementwise
    function, if there is one.

    Of a single number everything is such a function.
    """
    sources: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        ends = set()
        for var in equation.invars:
            if not isinstance(var, Literal) and var in random:
                ends.add(sources.get(var, var))
        if len(ends) != 1:
            continue
        (end,) = ends
        name = equation.primitive.name
        shaping = (
            name in SHAPING
            and equation.invars[0].aval.size == equation.outvars[0].aval.size
        )
        if name in ELEMENTWISE or shaping or end.aval.size == 1:
            sources.update(dict.fromkeys(equation.outvars, end))
    return sources


def _before_nonlinear(
    jaxpr: Any, source: Any, var: Any, random: set, barrier: Container = frozenset()
) -> Any:
    """From the source of ``var``, the end of the affine steps that lie on the only path
    and use nothing behind the ``barrier``.
    """
    users: dict[Any, list] = {}
    for equation, _ in needed_equations(jaxpr, [var]):
        for used in equation.invars:
            if not isinstance(used, Literal) and used in random:
                users.setdefault(used, []).append(equation)
    while source is not var:
        (step, *other_users) = users[source]
        divides_by_it = step.primitive.name == "div" and step.invars[1] is source
        if other_users or step.primitive.name not in AFFINE | SHAPING or divides_by_it:
            break
        if step.outvars[0] in barrier and source not in barrier:
            break
        source = step.outvars[0]
    return source
