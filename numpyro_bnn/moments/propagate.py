"""The transformation: from a function of arrays to a function of means and variances."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_bnn._checks import argument_error
from numpyro_bnn.moments.expectation import moments_of, num_nodes
from numpyro_bnn.moments.gaussian import as_gaussian, is_gaussian
from numpyro_bnn.moments.interpret import Interpreter
from numpyro_bnn.moments.registry import RULES, wrap
from numpyro_bnn.moments.term import Term

__all__ = ["propagate"]


def propagate(fn: Callable[..., Any], num_nodes: int = 32) -> Callable[..., Any]:
    """Carry means and variances through a JAX program.

    :param fn: any function of arrays made of supported operations.
    :param num_nodes: nodes per panel of the quadrature that is used where an elementwise function has no closed form.
    :return: a function of the same arguments, any array of which may be a :class:`Gaussian`. Outputs that depend on
        one are ``Gaussian``, the others plain arrays. It can be jitted, mapped and differentiated.

    Exact for one layer: an affine map with independent Gaussian weights or inputs, then an elementwise function (up
    to quadrature where that has no closed form). Approximate beyond: the elements of all arrays count as
    independent, whatever they were computed from, and what enters a nonlinearity counts as Gaussian.

    :raises ValueError: for an operation without a rule; it names the primitive and the line of ``fn``.

    Reference: Frey and Hinton (1999); Hernandez-Lobato and Adams (2015), section 3.1.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_bnn import moments
    >>> w = moments.Gaussian(jnp.zeros((2, 3)), jnp.ones((2, 3)))
    >>> h = moments.propagate(lambda x, w: jax.nn.relu(x @ w))(jnp.array([[3.0, 4.0]]), w)
    >>> h.mean.shape, round(float(h.mean[0, 0]), 3), round(float(h.var[0, 0]), 3)
    ((1, 3), 1.995, 8.521)
    """
    if not callable(fn):
        raise argument_error("moments.propagate", "fn", fn, "Pass a function of arrays.", TypeError)
    if not isinstance(num_nodes, int) or isinstance(num_nodes, bool) or num_nodes < 2:
        raise argument_error("moments.propagate", "num_nodes", num_nodes, "Pass an integer of at least 2.")

    @wraps(fn)
    def propagated(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_gaussian)
        random = [i for i, leaf in enumerate(leaves) if is_gaussian(leaf)]
        gaussians = [as_gaussian(leaves[i]) for i in random]

        def of_random(*values: Any) -> Any:
            given = dict(zip(random, values, strict=True))
            filled = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
            filled_args, filled_kwargs = jax.tree.unflatten(tree, filled)
            return fn(*filled_args, **filled_kwargs)

        closed, shapes = jax.make_jaxpr(of_random, return_shape=True)(*(g.mean for g in gaussians))
        with _nodes(num_nodes):
            interpreter = Interpreter(RULES, _is_term, "moments.propagate")
            outputs = interpreter.run(closed.jaxpr, closed.consts, [wrap(g) for g in gaussians])
            outputs = [moments_of(out) if isinstance(out, Term) else jnp.asarray(out) for out in outputs]
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return propagated


_nodes = num_nodes


def _is_term(value: Any) -> bool:
    return isinstance(value, Term)
