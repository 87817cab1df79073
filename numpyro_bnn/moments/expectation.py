"""Mean and variance of a term: exact where there is a closed form, else by quadrature."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax.numpy as jnp

from numpyro_bnn.moments.gaussian import Gaussian
from numpyro_bnn.moments.quadrature import quadrature
from numpyro_bnn.moments.term import Term

__all__ = ["CLOSED_FORMS", "NODES", "closed_form", "moments_of", "num_nodes"]

# Name of an elementwise primitive -> function of the term; ``None`` where the term is of another form.
CLOSED_FORMS: dict[str, Callable[[Term], Gaussian | None]] = {}
NODES: ContextVar[int] = ContextVar("num_nodes", default=32)


@contextmanager
def num_nodes(number: int) -> Iterator[None]:
    """Use so many nodes of quadrature inside the block."""
    token = NODES.set(number)
    try:
        yield
    finally:
        NODES.reset(token)


def closed_form(*names: str) -> Callable:
    """Give elementwise primitives exact moments: ``form(term)`` returns them, or ``None`` if it does not apply."""

    def decorate(form: Callable[[Term], Gaussian | None]) -> Callable[[Term], Gaussian | None]:
        CLOSED_FORMS.update(dict.fromkeys(names, form))
        return form

    return decorate


def moments_of(term: Term) -> Gaussian:
    """Mean and variance of a term, computed once."""
    if term.moments is None:
        if not jnp.issubdtype(term.dtype, jnp.floating):
            raise term.equation.refuse(  # type: ignore[union-attr]
                f"makes {term.dtype} numbers of random ones",
                "Such numbers have moments only inside an elementwise function of one variable, "
                "e.g. `jnp.where(x > 0, x, 0.1 * x)`.",
            )
        term.moments = _affine(term) if term.base is not term else _nonlinear(term)
    return term.moments


def _affine(term: Term) -> Gaussian:
    base = moments_of(term.base)
    mean, var = term.slope * base.mean + term.shift, term.slope * term.slope * base.var
    return Gaussian(*(jnp.broadcast_to(m, term.shape).astype(term.dtype) for m in (mean, var)))


def _nonlinear(term: Term) -> Gaussian:
    form = CLOSED_FORMS.get(term.equation.name)  # type: ignore[union-attr]
    known = form(term) if form else None
    return quadrature(term, NODES.get()) if known is None else known
