"""The observation of one data point: Gaussian quantities of the network, and a distribution given them.

Moments are propagated up to quantities that can be treated as Gaussian; the likelihood is integrated over these. For
``Poisson(jnp.exp(f))`` that is f, not the rate: a Gaussian rate would be negative at some nodes. So the program of
the distribution's parameters is cut before the first nonlinear elementwise function of a single random operand.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.extend.core import Literal, jaxpr_as_fun
from numpyro.distributions import constraints

from numpyro_bnn import moments
from numpyro_bnn._dependence import needed_equations
from numpyro_bnn._distributions import unwrapped
from numpyro_bnn.guides.adf.reading import Arguments, mask_of, refuse, run_model
from numpyro_bnn.guides.adf.sites import Sites
from numpyro_bnn.moments import Gaussian
from numpyro_bnn.moments.elementwise import ELEMENTWISE

Context = dict[str, Any]

# Affine in a single random operand, or a mere change of shape: no reason to cut before them.
AFFINE = {"add", "sub", "neg", "mul", "div", "convert_element_type", "copy"}
SHAPING = {"squeeze", "reshape", "broadcast_in_dim", "expand_dims"}


@dataclass(frozen=True)
class Observation:
    """One data point's observation: Gaussian quantities of the network, and a distribution given these.

    :param kind: "normal", "categorical" or "other".
    :param name: name of the site.
    :param cut: the program of the distribution's parameters, the observed ``value`` and its ``mask``, if it has one.
    :param build: builds the distribution from these parameters, elementwise.
    :param shape: shape of one observation.
    """

    kind: str
    name: str
    cut: "Split"
    build: Callable[[Mapping[str, Any]], dist.Distribution]
    shape: tuple[int, ...]

    @property
    def integrated(self) -> set[str]:
        """The quantities that are integrated numerically."""
        return set(self.cut.cuts) - ({"loc"} if self.kind == "normal" else set())

    def quantities(self, weights: Mapping[str, Gaussian], context: Context) -> dict[str, Gaussian]:
        """Moments of the Gaussian quantities, from those of the weights."""
        found = moments.propagate(lambda w: self.cut.head(w, context))(dict(weights))
        return {
            name: value if isinstance(value, Gaussian) else Gaussian(value, jnp.zeros_like(value))
            for name, value in found.items()
        }


def observe(
    model: Callable, arguments: Arguments, sites: Sites, context: Context, with_value: bool
) -> Observation:
    """Read the observation of one data point from the model.

    :param context: example of ``{"rows", "arrays", "hyperparameters"}``: one row of the data, the other arrays, and
        values of the hyperparameters.
    :param with_value: whether the observed value is among the arguments.
    """
    weights = {name: weight.loc for name, weight in sites.weights.items()}
    found: dict[str, Any] = {}

    def program(weights: Any, context: Context) -> dict[str, Any]:
        args, kwargs = arguments.row(context["rows"], context["arrays"])
        site = run_model(model, {**weights, **context["hyperparameters"]}, args, kwargs)[sites.observed]
        base = unwrapped(site["fn"], masked=True)
        if base.event_dim:
            why = f"a {type(base).__name__}, whose elements are not independent given the network"
            raise refuse(sites.observed, why, "Use independent observations, or MCMC.")
        shape = site["fn"].shape()
        kind, parameters, build = _parameters(base, shape)
        found.update(kind=kind, build=build, shape=shape, bounded=_bounded(base, parameters))
        if not with_value:
            return parameters
        _check_one_row(sites.observed, np.broadcast_shapes(shape, np.shape(site["value"])))
        mask = mask_of(site["fn"])
        given = {} if mask is True else {"mask": jnp.broadcast_to(mask, shape)}
        return parameters | given | {"value": site["value"]}

    cut = split(program, weights, context, keep=("loc", "logits"))
    observation = Observation(found["kind"], sites.observed, cut, found["build"], found["shape"])
    for name in cut.random & found["bounded"]:
        if name in cut.cuts and name not in cut.nonlinear:
            why = f"whose {name.split(' (')[0]} is not an elementwise function of a linear predictor"
            instead = "Write e.g. `Poisson(jnp.exp(f))` or `Categorical(logits=f)` with f straight from the network."
            raise refuse(sites.observed, why, instead)
    if observation.kind != "categorical" and len(observation.integrated) > 2:
        why = f"with {len(cut.cuts)} parameters that depend on the weights"
        raise refuse(sites.observed, why, "At most two can be integrated.")
    return observation


def _check_one_row(name: str, shape: tuple[int, ...]) -> None:
    if shape[:1] != (1,):
        why = f"of shape {shape} for one row of the data"
        raise refuse(name, why, "Pass data, targets and masks as arguments of the model.")


def _parameters(base: dist.Distribution, shape: tuple) -> tuple[str, dict[str, Any], Callable]:
    """Kind, parameters by name, and how to build the distribution from them."""
    if type(base) is dist.Normal:
        given = {"loc": jnp.broadcast_to(base.loc, shape), "scale": jnp.broadcast_to(base.scale, shape)}
        return "normal", given, lambda p: dist.Normal(p["loc"], p["scale"])
    if isinstance(base, dist.CategoricalLogits):
        logits = jnp.broadcast_to(base.logits, (*shape, base.logits.shape[-1]))
        return "categorical", {"logits": logits}, lambda p: dist.Categorical(logits=p["logits"])
    if isinstance(base, dist.BernoulliLogits):
        return "other", {"logits": base.logits}, lambda p: dist.Bernoulli(logits=p["logits"])
    leaves, structure = jax.tree.flatten(base)
    names = [_leaf_name(base, leaf, k) for k, leaf in enumerate(leaves)]
    given = dict(zip(names, leaves, strict=True))
    return "other", given, lambda p: jax.tree.unflatten(structure, [p[n] for n in names])


def _leaf_name(base: dist.Distribution, leaf: Any, index: int) -> str:
    """Name of a parameter; a number distinguishes two parameters of the same name (in an inner distribution)."""
    named = [name for name in base.arg_constraints if base.__dict__.get(name) is leaf]
    return f"{named[0]} ({index})" if named else f"parameter {index}"


def _bounded(base: dist.Distribution, parameters: Mapping[str, Any]) -> set[str]:
    """Parameters whose support is not the whole real line."""
    free = {"logits", *(name for name, kind in base.arg_constraints.items() if kind is constraints.real)}
    return {name for name in parameters if name.split(" (")[0] not in free}


def check_rows(arguments: Arguments, sites: Sites, hyperparameters: Mapping[str, Any]) -> None:
    """Refuse a model in which the likelihood of a data point depends on other rows (batch statistics, sequences)."""
    random = np.random.default_rng(0)
    weights = {
        n: jnp.asarray(w.loc + w.scale * random.normal(size=w.loc.shape)) for n, w in sites.weights.items()
    }
    arrays = arguments.part("array")

    def parameters(rows: Any) -> list[jax.Array]:
        args, kwargs = arguments.call(rows, arrays)
        site = run_model(arguments.model, {**weights, **hyperparameters}, args, kwargs)[sites.observed]
        return jax.tree.leaves((unwrapped(site["fn"], masked=True), mask_of(site["fn"]), site["value"]))

    def both(rows: Any) -> list[tuple[jax.Array, jax.Array]]:
        alone = [parameters({name: leaf[k : k + 1] for name, leaf in rows.items()}) for k in range(2)]
        found = []
        for whole, first, second in zip(parameters(rows), *alone, strict=True):
            if jnp.shape(first)[:1] == (1,):
                stacked = jnp.concatenate([first, second])
                found.append((jnp.broadcast_to(whole, stacked.shape), stacked))
        return found

    rows = {name: leaf[:2] for name, leaf in arguments.part("row").items()}
    if arguments.num_rows < 2 or any(isinstance(leaf, jax.core.Tracer) for leaf in rows.values()):
        return
    for together, alone in jax.jit(both)(rows):
        if not np.allclose(together, alone, rtol=1e-6, atol=1e-9, equal_nan=True):
            raise refuse(
                sites.observed,
                "whose rows influence each other",
                "Data points are learned one at a time: remove batch statistics and the like.",
            )


def rewritten(fn: Callable, rules: Mapping[str, Callable]) -> Callable:
    """The same function with sub-programs inlined and some primitives evaluated by rules."""
    walk = moments.Interpreter(
        rules,
        lambda value: True,
        "guides.AutoADF",
        default=lambda equation, *operands: equation.bind(*operands),
    )

    def inlined(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
        outputs = walk.run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return inlined


@dataclass(frozen=True)
class Split:
    """A program ``fn(weights, context)`` in two parts.

    :param head: computes the Gaussian quantities from weights and context.
    :param tail: computes all outputs from quantities and context.
    :param cuts: the Gaussian quantities, named by the first output computed from each.
    :param random: outputs that depend on the weights, cut or not.
    :param nonlinear: outputs that are a nonlinear function of their quantity.
    """

    head: Callable[[Any, Any], dict[str, Any]]
    tail: Callable[[Mapping[str, Any], Any], dict[str, Any]]
    cuts: tuple[str, ...]
    random: set[str]
    nonlinear: set[str]


def split(
    fn: Callable[[Any, Any], Mapping[str, Any]], weights: Any, context: Any, keep: Sequence[str]
) -> Split:
    """Cut ``fn(weights, context)``, a dictionary of arrays.

    :param weights: example of the random argument.
    :param context: example of the other argument.
    :param keep: outputs that are Gaussian quantities themselves.
    """
    closed, shapes = jax.make_jaxpr(rewritten(fn, {}), return_shape=True)(weights, context)
    jaxpr = closed.jaxpr
    outputs = {
        path[0].key: var
        for (path, _), var in zip(jax.tree.flatten_with_path(shapes)[0], jaxpr.outvars, strict=True)
    }
    count = len(jax.tree.leaves(weights))
    depends = set(jaxpr.invars[:count])
    for equation in jaxpr.eqns:
        if depends.intersection(var for var in equation.invars if not isinstance(var, Literal)):
            depends.update(equation.outvars)
    random = {name for name, var in outputs.items() if not isinstance(var, Literal) and var in depends}
    cuts: dict[str, Any] = {}
    for name in outputs:
        if name in random:
            found = outputs[name] if name in keep else _cut(jaxpr, outputs[name], depends)
            if found not in cuts.values():
                cuts[name] = found

    def evaluate(inputs: list[Any], wanted: list[Any], values: list[Any]) -> list[Any]:
        equations = [equation for equation, _ in needed_equations(jaxpr, wanted, frozenset(inputs))]
        part = jaxpr.replace(invars=inputs, outvars=wanted, eqns=equations)
        return jaxpr_as_fun(closed.replace(jaxpr=part))(*values)

    def head(weights: Any, context: Any) -> dict[str, Any]:
        found = evaluate(jaxpr.invars, list(cuts.values()), jax.tree.leaves((weights, context)))
        return dict(zip(cuts, found, strict=True))

    def tail(quantities: Mapping[str, Any], context: Any) -> dict[str, Any]:
        inputs = [cuts[name] for name in quantities] + jaxpr.invars[count:]
        found = evaluate(inputs, jaxpr.outvars, [*quantities.values(), *jax.tree.leaves(context)])
        return dict(zip(outputs, found, strict=True))

    nonlinear = {name for name in cuts if cuts[name] is not outputs[name]}
    return Split(head, tail, tuple(cuts), random, nonlinear)


def _cut(jaxpr: Any, var: Any, random: set) -> Any:
    """The variable before the first elementwise nonlinear function on the way to ``var``; itself if none."""
    made_by = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    ends: dict[Any, Any] = {}

    def passed(equation: Any) -> list[Any]:
        """The random operands of an elementwise equation; none for any other."""
        name = equation.primitive.name
        shaping = name in SHAPING and equation.invars[0].aval.size == equation.outvars[0].aval.size
        if not (name in ELEMENTWISE or shaping):
            return []
        return [v for v in equation.invars if not isinstance(v, Literal) and v in random]

    def end(var: Any) -> Any:
        """The most distant variable of which ``var`` is an elementwise function."""
        if var not in ends:
            sources = {end(v) for v in passed(made_by[var])} if var in made_by else set()
            ends[var] = sources.pop() if len(sources) == 1 else var
        return ends[var]

    # From there, go back towards ``var`` over the affine steps that lie on the only path.
    users: dict[Any, list] = {}
    for equation, _ in needed_equations(jaxpr, [var]):
        for used in equation.invars:
            if not isinstance(used, Literal) and used in random:
                users.setdefault(used, []).append(equation)
    source = end(var)
    while source is not var:
        (step, *others) = users[source]
        divides_by_it = step.primitive.name == "div" and step.invars[1] is source
        if others or step.primitive.name not in AFFINE | SHAPING or divides_by_it:
            break
        source = step.outvars[0]
    return source
