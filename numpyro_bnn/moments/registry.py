"""The table of rules, how to add a rule, and the transformation that applies
the rules.
"""

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from numpyro_bnn._jaxprs.walk import Equation, Interpreter, Rule
from numpyro_bnn._options import Count, Kind, Switch, checked
from numpyro_bnn._types import Operand
from numpyro_bnn.moments.expectation import NODES, known_moments
from numpyro_bnn.moments.terms import Gaussian, Term, Variable, as_gaussian, terms_among

# Name of a primitive -> rule of terms and plain arrays, as the interpreter calls it.
RULES: dict[str, Rule] = {}


@checked("moments.propagate")
def propagate(
    fn: Annotated[Callable[..., Any], Kind(callable, "Pass a function of arrays.")],
    num_nodes: Annotated[int, Count(2)] = 32,
) -> Callable[..., Any]:
    """Mean and variance of what a program makes of independent random numbers, such as
    a network of its weights, without sampling.

    :param fn: any function of arrays made of supported operations.
    :param num_nodes: quadrature nodes on each side of a kink, for elementwise functions
        without a closed form.
    :return: a function of the same arguments, in which any array may be a
        :class:`Gaussian`. Outputs that depend on one are ``Gaussian``, the others plain
        arrays. It can be jitted, mapped and differentiated.

    Exact for one layer: an affine map with independent Gaussian weights or inputs, then
    an elementwise function (up to quadrature error if it has no closed form).
    Approximate beyond that: the elements of all arrays are treated as independent,
    whatever they were computed from, and the input of a nonlinearity as Gaussian.

    :raises ValueError: for an operation without a rule, and for an estimated error of
        the quadrature above 1 % (under ``jit`` NaN instead); the message names the
        primitive and the line of ``fn``.

    Reference: Frey and Hinton (1999); Hernandez-Lobato and Adams (2015), section 3.1.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn import moments
    >>> w = moments.Gaussian(jnp.zeros((2, 3)), jnp.ones((2, 3)))
    >>> h = moments.propagate(lambda x, w: jax.nn.relu(x @ w))(
    ...     jnp.array([[3.0, 4.0]]), w
    ... )
    >>> h.mean.shape, round(float(h.mean[0, 0]), 3), round(float(h.var[0, 0]), 3)
    ((1, 3), 1.995, 8.521)
    """
    interpreter = Interpreter(
        RULES, lambda value: isinstance(value, Term), "moments.propagate"
    )

    @wraps(fn)
    def propagated(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten(
            (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Gaussian)
        )
        random = {
            i: as_gaussian(leaf)
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Gaussian)
        }

        def of_random(*values: Operand) -> Operand:
            filled = list(leaves)
            for i, value in zip(random, values, strict=True):
                filled[i] = value
            filled_args, filled_kwargs = jax.tree.unflatten(tree, filled)
            return fn(*filled_args, **filled_kwargs)

        closed, shapes = jax.make_jaxpr(of_random, return_shape=True)(
            *(g.mean for g in random.values())
        )
        token = NODES.set(num_nodes)
        try:
            outputs = interpreter.run(
                closed.jaxpr, closed.consts, list(map(wrap, random.values()))
            )
            outputs = list(map(known_moments, outputs))
        finally:
            NODES.reset(token)
        outputs = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        return jax.tree.map(jnp.asarray, outputs)

    return propagated


@checked("moments.register")
def register(
    *names: str,
    view: Switch = False,
    reduces: Switch = False,
    multiplies: Switch = False,
) -> Callable[[Rule], Rule]:
    """Add a rule for primitives: ``rule(equation, *operands)`` computes the output from
    Gaussians and plain arrays.

    At least one operand is a :class:`Gaussian`. The rule returns a ``Gaussian`` (or a
    plain array), or a list of them if the primitive has several outputs.
    ``equation.params`` holds the parameters of the primitive,
    ``equation.bind(*arrays)`` applies it, ``raise equation.refuse(why, instead)``
    refuses a case.

    :param names: names of primitives, as ``jax.make_jaxpr`` prints them.
    :param view: whether each element of the output is an element of one operand.
    :param reduces: whether the output mixes elements of the operand, and so depends on
        it: combining the two again is refused.
    :param multiplies: whether the operands are multiplied as independent; a product of
        an array with itself is refused.

    >>> import jax, jax.numpy as jnp
    >>> @register("cumsum", reduces=True)
    ... def cumsum(equation, x):
    ...     return Gaussian(equation.bind(x.mean), equation.bind(x.var))
    >>> from numpyro_bnn.moments import propagate
    >>> propagate(jnp.cumsum)(Gaussian(jnp.ones(3), jnp.ones(3))).var.tolist()
    [1.0, 2.0, 3.0]
    """

    for name in names:
        Kind(str, 'Pass names of primitives, e.g. `"cumsum"`.').check(
            "moments.register", "names", name
        )

    def decorate(rule: Rule) -> Rule:
        Kind(callable, "Put it above a function, `@register(...)`.").check(
            "moments.register", "rule", rule
        )
        for name in names:
            RULES[name] = _from_moments(rule, view, reduces, multiplies)
        return rule

    return decorate


def _from_moments(rule: Rule, view: bool, reduces: bool, multiplies: bool) -> Rule:
    """The rule as the interpreter calls it, which tracks which variables share
    elements.
    """

    def apply(equation: Equation, *operands: Operand) -> Operand:
        terms = terms_among(operands)
        variables = [term.variable for term in terms]
        key = (
            (equation.name, str(equation.params))
            if view and len(operands) == 1
            else None
        )
        views = variables[0].views if key and terms[0].equation is None else {}
        if key in views:
            return views[key]
        if (
            multiplies
            and len(variables) == 2
            and variables[0].parts & variables[1].parts
        ):
            raise equation.refuse(
                "multiplies a random array with itself",
                "Moments treat the factors of a matrix product as independent.",
            )
        result = rule(equation, *map(known_moments, operands))
        holders = frozenset().union(*(variable.parts for variable in variables))
        reduced = frozenset().union(*(variable.reduced for variable in variables))
        if reduces:
            reduced |= holders
        wrapped = []
        for i, output in enumerate(result if isinstance(result, list) else [result]):
            wrapped.append(
                wrap(
                    output,
                    parts=holders if view else frozenset(),
                    reduced=reduced if view or reduces else frozenset(),
                    # each output holds other elements, so each has its own path
                    path=(*variables[0].path, key, i) if key else (),
                )
            )
        outputs = wrapped if isinstance(result, list) else wrapped[0]
        if key:
            views[key] = outputs
        return outputs

    return apply


def wrap(value: Operand, **relations: Any) -> Operand:
    """A Gaussian as the term of a new variable; other values unchanged."""
    return (
        Term(Variable(value, **relations), None, ())
        if isinstance(value, Gaussian)
        else value
    )
