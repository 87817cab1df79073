"""The warm start: an optimizer per chain before it samples; its ends are a deep ensemble."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from numpyro_bnn._checks import argument_error, check_count, check_number
from numpyro_bnn.infer.state import SGMCMCState
from numpyro_bnn.infer.target import Target

if TYPE_CHECKING:
    from numpyro_bnn.infer.base import SGMCMCKernel

__all__ = ["Member", "WarmStart", "check_held_out", "held_out_rows", "members_of"]


class Member(NamedTuple):
    """State of a warm start.

    :param optimizer: of the optimizer.
    :param position: (P,) where the chain is, or was best on held-out rows.
    :param score: held-out log density there, per row.
    """

    optimizer: Any
    position: jax.Array
    score: jax.Array


@dataclass(frozen=True)
class WarmStart:
    """How a kernel warms up: chains descend, each from a start of its own; then each samples around its end.

    The ends are a deep ensemble, from which ``to_inference_data(mcmc, members=True)`` predicts.

    :param share: of the transitions of the warm-up, in [0, 1); 0 for none.
    :param num_steps: steps of the optimizer, in all; by default as many as that share would sample.
    :param optimizer: optax transformation; by default Adam with learning rate 0.01, of gradients clipped to norm 1:
        at a random start one may be a billion times larger than the others, and Adam's scale would not forget it.
    :param held_out: share of the rows that are kept from the optimizer, in [0, 1). Where it is not 0, a chain goes on
        from the transition whose end predicts them best: early stopping, judged afterwards. The same rows for all
        chains; sampling then uses all rows.
    :param spread: factor of the initial unconstrained values, for overdispersed starts.
    :raises ValueError: outside these ranges.

    >>> WarmStart(0.5, num_steps=1000).steps_of(20, 100)
    50
    """

    share: float = 0.25
    num_steps: int | None = None
    optimizer: Any = None
    held_out: float = 0.0
    spread: float = 1.0

    def __post_init__(self) -> None:
        call = "infer.WarmStart"
        for name in ("share", "held_out"):
            value = getattr(self, name)
            check_number(call, name, value)
            if value >= 1:
                raise argument_error(call, name, value, "Pass a share in [0, 1).")
        check_number(call, "spread", self.spread, strict=True)
        if self.num_steps is not None:
            check_count(call, "num_steps", self.num_steps)

    @property
    def transformation(self) -> Any:
        """The optimizer."""
        usual = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))
        return usual if self.optimizer is None else self.optimizer

    def steps_of(self, transitions: int, usual: int) -> int:
        """Steps per transition, where there are so many, and ``usual`` steps would be sampled in one."""
        return usual if self.num_steps is None else -(-self.num_steps // transitions)

    def start(self, position: jax.Array) -> Member:
        """The state at a position."""
        worst = jnp.full((), -jnp.inf, position.dtype)
        return Member(self.transformation.init(position), position, worst)


def held_out_rows(size: int, share: float) -> tuple[jax.Array, jax.Array]:
    """Rows to learn from and rows held out, in an order that depends on their number alone.

    >>> learned, held = held_out_rows(10, 0.2)
    >>> len(learned), len(held)
    (8, 2)
    """
    order = np.random.default_rng(0).permutation(size)
    held = min(max(1, round(share * size)), size - 1)
    return jnp.asarray(np.sort(order[held:])), jnp.asarray(np.sort(order[:held]))


def check_held_out(
    call: str, warm: WarmStart, target: Target, z: Any, args: tuple, kwargs: Mapping[str, Any] | None
) -> None:
    """Refuse to hold rows out of a model that cannot do without them.

    :param z: unconstrained values of one chain.
    :raises ValueError: for a model without a plate around its observations, or one that does not index by it.
    """
    if not warm.held_out:
        return
    instead = "Observe inside a plate and index the data by it: `with plate(...) as i: ... obs=y[i]`."
    if not target.rows:
        raise argument_error(call, "warm_start", "held_out of a model without a plate of data", instead)
    if min(target.rows.values()) < 2:
        raise argument_error(call, "warm_start", "held_out of a plate with one row", "Set `held_out=0`.")
    held = {name: held_out_rows(size, warm.held_out)[1] for name, size in target.rows.items()}

    def total(z: Any) -> Any:
        return target.log_likelihood(args, kwargs, held)(z)

    try:
        jax.eval_shape(total, z)
    except (TypeError, ValueError) as error:
        raise argument_error(
            call, "warm_start", "held_out of a model that needs all rows", instead
        ) from error


def members_of(
    kernel: "SGMCMCKernel", state: SGMCMCState, args: tuple, kwargs: Mapping[str, Any] | None
) -> dict[str, jax.Array]:
    """Values of the sites where each chain ended its warm start, (C, ...).

    :raises ValueError: for a kernel without warm start.
    """
    if not kernel.warm_start_length:
        instead = "Give it a warm start, and a warm-up: its ends are the members."
        raise argument_error("to_inference_data", "members", "a run without warm start", instead)
    many = state.i.ndim > 0
    unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], state.z) if many else state.z)[1]
    positions = state.optimizer.position if many else state.optimizer.position[None]
    return jax.vmap(kernel.postprocess_fn(args, kwargs))(jax.vmap(unravel)(positions))
