"""The search for the mode, and what is summed over the rows there."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from numpyro_bnn._checks import argument_error
from numpyro_bnn._keys import split
from numpyro_bnn._types import Optimizer, PyTree
from numpyro_bnn.guides.laplace.likelihoods import CALL
from numpyro_bnn.guides.laplace.posterior import LaplacePosterior, Tuned, Values
from numpyro_bnn.guides.laplace.rows import Batch, ModelRows
from numpyro_bnn.guides.laplace.structures import (
    FullStructure,
    LaplaceGaussian,
    Structure,
)
from numpyro_bnn.program.plates import draw_indices

LEARNING_RATE = 3e-3
EPOCHS_PER_PROGRAM = 50  # epochs of one step each that are made at once
# share of a derivative that comes from others, above which they are not independent
MAX_MIXED_SHARE = 1e-3
# most products with the whole precision to find the distance from the mode
MAX_CG_STEPS = 20
MIN_GAIN_NATS = 1e-6  # nats that a step of Newton must promise
MAX_DAMPING = 1e12
HELD_PRECISION = 1e12  # of a site that is conditioned on
# distance from the mode, as in the result of a run, at which the steps end
NEWTON_DISTANCE_SDS = 0.01
# length of the second part of such a step, twice, against the first
MAX_BEND_RATIO = 0.75


class Mode(NamedTuple):
    """A point v, what was tuned, and all that is computed from the rows there: sums for
    the precision, curvature of the prior, log p(D | v), and -log p(D, v) with its
    gradient.
    """

    v: Values
    tuned: Tuned
    sums: PyTree
    curvature: Values  # of sites without Normal prior, (P_s,)
    coupling: Array | None
    log_likelihood: Array
    loss: Array
    gradient: Values


@dataclass(frozen=True)
class ModeSearch:
    """The search for the mode of a posterior, whose precision has some structure.

    :param optimizer: an optax optimizer; by default L-BFGS on all rows, and Adam in
        minibatches.
    """

    posterior: LaplacePosterior
    structure: Structure
    num_epochs: int
    optimizer: Optimizer
    patience: int
    progress_bar: bool

    @property
    def rows(self) -> ModelRows:
        return self.posterior.rows

    def descend(
        self, v: Values, tuned: Tuned, key: Array
    ) -> tuple[Values, list[float]]:
        """From a start to the mode, and the losses on the way."""
        import optax

        if self.optimizer is not None:
            return self._epochs(self.optimizer, v, tuned, key)
        if self.rows.plate is not None:
            total = max(1, self.num_epochs * self._steps_per_program)
            schedule = optax.cosine_decay_schedule(LEARNING_RATE, total)
            return self._epochs(optax.adam(schedule), v, tuned, key)
        if not self.num_epochs:
            return v, []
        v, losses, epochs = self.rows.run(self._lbfgs, None, v, tuned)
        losses = np.asarray(losses)[: int(epochs)]
        finite(float(losses[0]))
        return v, losses[np.isfinite(losses)].tolist()

    @property
    def _steps_per_program(self) -> int:
        plate = self.rows.plate
        return -(-plate.size // plate.batch_size) if plate else EPOCHS_PER_PROGRAM

    def _epochs(
        self, optimizer: Optimizer, v: Values, tuned: Tuned, key: Array
    ) -> tuple[Values, list[float]]:
        import optax

        plate, posterior = self.rows.plate, self.posterior
        index = jnp.arange(plate.batch_size) if plate else None
        epochs_per_program = 1 if plate else EPOCHS_PER_PROGRAM

        def program(
            batch: Batch, v: Values, state: PyTree, tuned: Tuned, key: Array
        ) -> PyTree:
            def step(carry: tuple, key: Array) -> tuple:
                v, state = carry
                index = draw_indices(*plate, key) if plate else None
                rows = self.rows.batch(batch.reading, index)
                loss, grads = jax.value_and_grad(
                    lambda v: posterior.potential(rows, v, tuned)
                )(v)
                updates, state = optimizer.update(grads, state, v)
                return (optax.apply_updates(v, updates), state), loss

            keys = jax.random.split(key, self._steps_per_program)
            losses: Array
            end, losses = jax.lax.scan(step, (v, state), keys)
            return *end, jnp.mean(losses) if plate else losses[-1]

        losses: list[float] = []
        state, best, epochs, since = optimizer.init(v), np.inf, 0, 0
        with tqdm.tqdm(total=self.num_epochs, disable=not self.progress_bar) as bar:
            while epochs < self.num_epochs and since < self.patience:
                key, epoch_key = split(key)
                v, state, loss = self.rows.run(
                    program, index, v, state, tuned, epoch_key, key="epoch"
                )
                losses.append(finite(float(loss)))
                epochs += epochs_per_program
                since += epochs_per_program
                if losses[-1] < best:
                    best, since = losses[-1], 0
                bar.set_postfix_str(f"loss {loss:.5g}", refresh=False)
                bar.update(epochs_per_program)
        return v, losses

    def _lbfgs(self, batch: Batch, v: Values, tuned: Tuned) -> tuple:
        """L-BFGS on all rows, until the loss no longer falls; of one vector, which is
        less to compile than many.
        """
        import optax

        solver = optax.lbfgs()
        flat, unravel = ravel_pytree(v)

        @jax.jit  # traced once for the step and its line search
        def loss(flat: Array) -> Array:
            return self.posterior.potential(batch, unravel(flat), tuned)

        value_and_grad = optax.value_and_grad_from_state(loss)

        def go_on(carry: tuple) -> Array:
            *_, since, epochs = carry
            return (since < self.patience) & (epochs < self.num_epochs)

        def step(carry: tuple) -> tuple:
            flat, state, losses, best, best_flat, since, epochs = carry
            value, grad = value_and_grad(flat, state=state)
            updates, state = solver.update(
                grad, state, flat, value=value, grad=grad, value_fn=loss
            )
            lower = value < best
            # A step that overflows ends the search at the lowest point so far.
            since = jnp.where(jnp.isfinite(value), since + 1, self.patience)
            best = jnp.where(lower, value, best)
            best_flat = jnp.where(lower, flat, best_flat)
            losses = losses.at[epochs].set(value)
            since = jnp.where(lower, 0, since)
            return flat + updates, state, losses, best, best_flat, since, epochs + 1

        losses, zero = jnp.zeros(self.num_epochs), jnp.asarray(0)
        start = (
            flat,
            solver.init(flat),
            losses,
            jnp.asarray(jnp.inf),
            flat,
            zero,
            zero,
        )
        *_, losses, _, best_flat, _, epochs = jax.lax.while_loop(go_on, step, start)
        return unravel(best_flat), losses, epochs

    # -- at a mode ---------------------------------------------------------------------

    def measure(self, v: Values, tuned: Tuned) -> Mode:
        """All that is summed over the rows at a mode."""
        if isinstance(self.structure, FullStructure) and self.rows.plate is None:
            return self._measure_dense(v, tuned)[0]
        curvature, coupling = self._prior_curvature(v)
        positive: Values = {}
        if self.structure.scales_by_prior:
            positive = self.rows.run_once(self._positive_prior, v, tuned, curvature)
        sums = self.structure.measure(partial(self.posterior.sweep, v), positive)
        densities = self.rows.total(self._densities, v, tuned)
        return Mode(v, tuned, sums, curvature, coupling, *densities)

    def _measure_dense(self, v: Values, tuned: Tuned) -> tuple[Mode, Array]:
        """:meth:`measure`, and the precision (P, P), by one program with all rows."""
        *parts, precision = self.rows.run(self._dense, None, v, tuned)
        return Mode(v, tuned, *parts), precision

    def _dense(self, batch: Batch, v: Values, tuned: Tuned) -> tuple:
        structure: Any = self.structure
        curvature, coupling = {}, None
        if self._others:
            diagonal, coupling, _ = self._curvature(batch, v)
            curvature = structure.split(diagonal)
        jac = self.posterior.jacobians(batch, v)
        sums = structure.measure(lambda fn: fn(jac), {})
        densities = self._densities(batch, v, tuned)
        mode = Mode(v, tuned, sums, curvature, coupling, *densities)
        precision = structure.precision(sums, self.prior(mode), coupling)
        return *mode[2:], precision

    def _densities(self, batch: Batch, v: Values, tuned: Tuned) -> tuple:
        """log p(D | v) of these rows, and -log p(D, v) with its gradient, of the prior
        the share of these rows.
        """
        posterior = self.posterior

        def loss(v: Values) -> tuple[Array, Array]:
            likelihood = posterior.log_likelihood(batch, v, tuned.spread)
            prior = posterior.log_prior(batch, v, tuned, list(v))
            total = likelihood + prior / len(self.rows.chunks)
            return -total, posterior.log_likelihood(batch, v)

        (value, log_likelihood), grads = jax.value_and_grad(loss, has_aux=True)(v)
        return log_likelihood, value, grads

    def prior(self, mode: Mode) -> Values:
        """(P_s,) the diagonal precision of the prior, by site."""
        precision = mode.tuned.precision
        return self.posterior.prior_precision(mode.v, precision, mode.curvature)

    def _positive_prior(
        self, batch: Batch, v: Values, tuned: Tuned, curvature: Values
    ) -> Values:
        prior = self.posterior.prior_precision(v, tuned.precision, curvature)
        return {name: jnp.maximum(value, 1e-6) for name, value in prior.items()}

    def gaussian(self, mode: Mode) -> LaplaceGaussian:
        """The Gaussian at a mode, for its prior precisions, inside a program."""
        return self.structure.gaussian(mode.sums, self.prior(mode), mode.coupling)

    def given_scales(self, mode: Mode) -> LaplaceGaussian:
        """The Gaussian given the prior scales that are learned, inside a program."""
        prior, learned = self.prior(mode), self.posterior.learned
        parents = [scale.parents for scale in learned.values()]
        for name in (set().union(*parents) & prior.keys()) - learned.keys():
            prior[name] = jnp.full_like(prior[name], HELD_PRECISION)
        return self.structure.gaussian(mode.sums, prior, mode.coupling)

    @property
    def _others(self) -> list[str]:
        """Sites of the Gaussian whose prior is not Normal."""
        return [
            name for name in self.posterior.sites if name in self.posterior.other_sites
        ]

    def _prior_curvature(self, v: Values) -> tuple[Values, Array | None]:
        """-d^2 log p / dv^2 of sites whose prior is not Normal: its diagonal and, if
        the precision is dense, all the rest.
        """
        if not self._others:
            return {}, None
        diagonal, coupling, share = self.rows.run_once(self._curvature, v)
        if share > MAX_MIXED_SHARE:
            got = (
                f"{self.posterior.sites}, whose joint prior is not independent "
                f"({', '.join(sorted(self._others))})"
            )
            instead = 'Use "full", or give these sites independent priors.'
            raise argument_error(CALL, "structure", got, instead)
        return self.structure.split(diagonal), coupling

    def _curvature(self, batch: Batch, v: Values) -> tuple:
        """The diagonal, what is beside it, and the share of others in the diagonal of
        independent priors.
        """
        posterior, chosen, names = self.posterior, {}, self._others
        for name in posterior.sites:
            chosen[name] = jnp.full(v[name].shape, float(name in names))
        of_others = self.structure.flat(chosen)

        def negative(flat: Array) -> Array:
            values = {**v, **posterior.unflat(flat, v)}
            return -posterior.log_prior(batch, values, Tuned(), names)

        flat = self.structure.flat(v)
        if isinstance(self.structure, FullStructure):
            # Locations of such a prior may be sites with a Normal one.
            matrix = jax.hessian(negative)(flat)
            diagonal = of_others * jnp.diag(matrix)
            return diagonal, matrix - jnp.diag(diagonal), 0.0

        def product(vector: Array) -> Array:
            return of_others * jax.jvp(jax.grad(negative), (flat,), (vector,))[1]

        heads = jax.random.bernoulli(jax.random.key(3), shape=flat.shape)
        signs = jnp.where(heads, of_others, -of_others)
        diagonal = product(of_others)
        error = jnp.max(jnp.abs(product(signs) - signs * diagonal))
        return diagonal, None, error / (jnp.max(jnp.abs(diagonal)) + 1e-30)

    # -- steps of Newton ---------------------------------------------------------------

    def newton(
        self, mode: Mode, num_steps: int, progress_bar: bool
    ) -> tuple[Mode, list[float]]:
        """To the mode by the steps of Levenberg and Marquardt, bent along with the
        outputs; the precision is dense.
        """
        losses: list[float] = []
        # the last mode, if the precision is positive there
        positive_mode: Mode | None = None
        damping = 1e-3
        mode, precision = self._measure_dense(mode.v, mode.tuned)
        for _ in (bar := tqdm.tqdm(range(num_steps), disable=not progress_bar)):
            gradient = self._flat(mode.gradient)
            distance = _dense_distance(precision, gradient)
            positive = bool(np.isfinite(distance))
            if losses and distance < NEWTON_DISTANCE_SDS:
                break
            if positive_mode and not positive:
                break
            positive_mode = mode if positive else None
            v, lower, damping = self._damped_step(mode, precision, damping)
            if not lower < mode.loss:
                break
            losses.append(lower)
            bar.set_postfix_str(f"loss {lower:.5g}", refresh=False)
            mode, precision = self._measure_dense(v, mode.tuned)
        if positive_mode and not np.isfinite(_dense_distance(precision, gradient)):
            # the fit became so close that no digits are left
            return positive_mode, losses[:-1]
        return mode, losses

    def _damped_step(
        self,
        mode: Mode,
        precision: Array,
        damping: float,
    ) -> tuple[Values, float, float]:
        """A point whose loss is lower, that loss, and the damping that led there.

        The narrow valleys of networks are curved. Along a step s the outputs have a
        second derivative f'', and -1/2 H^-1 J^T F f'' is added to the step; one that
        would bend too much is tried again with more damping (Transtrum & Sethna 2012).
        """
        from scipy.linalg import LinAlgError, cho_factor, cho_solve

        value, gradient = float(mode.loss), self._flat(mode.gradient)
        matrix = _float64(precision)
        diagonal, v, dtype = np.abs(np.diag(matrix)), mode.v, jnp.result_type(float)
        lower, gain, new = np.inf, np.inf, v
        while lower >= value and gain > MIN_GAIN_NATS and damping < MAX_DAMPING:
            try:
                factor = cho_factor(matrix + damping * np.diag(diagonal))
            except LinAlgError:
                damping *= 10
                continue
            step = -cho_solve(factor, gradient)
            gain = -(gradient @ step)
            bend = self.rows.run(self._bend, None, v, step.astype(dtype))
            turn = -0.5 * cho_solve(factor, _float64(bend))
            lower = np.inf
            bent_length = np.sqrt(diagonal @ turn**2)
            if 2 * bent_length < MAX_BEND_RATIO * np.sqrt(diagonal @ step**2):
                move = (step + turn).astype(dtype)
                lower, new = self.rows.run(self._moved, None, v, move, mode.tuned)
                lower = float(lower)
            damping = max(damping / 3, 1e-12) if lower < value else 2 * damping
        return new, lower, damping

    def _moved(self, batch: Batch, v: Values, move: Array, tuned: Tuned) -> tuple:
        """-log p(D, v) after a move (P,), and the values there."""
        new = dict(v)
        for name, part in self.posterior.unflat(move, v).items():
            new[name] = v[name] + part
        return self.posterior.potential(batch, new, tuned), new

    def _bend(self, batch: Batch, v: Values, step: Array) -> Array:
        posterior = self.posterior
        try:
            bends = posterior.bend(batch, v, posterior.unflat(step, v))
            bend = self.structure.flat(bends)
        except (NotImplementedError, TypeError):
            # a function that has only a rule for reverse mode: straight steps
            return jnp.zeros_like(step)
        return jnp.where(jnp.all(jnp.isfinite(bend)), bend, 0.0)

    # -- the distance from the mode ----------------------------------------------------

    def distance(self, mode: Mode, gaussian: LaplaceGaussian) -> float:
        r"""From the mode in posterior sds, :math:`\sqrt{g^\top H^{-1} g / P}`, H being
        the whole Gauss-Newton matrix.

        Structures other than "full" leave out directions in which the posterior is
        wide. They solve by conjugate gradients, whose partial sums grow to the result,
        and end where the prior bounds what is left.
        """
        gradient = self._flat(mode.gradient)
        if isinstance(self.structure, FullStructure):
            whitened = gradient @ _float64(gaussian.params["*", "scale_tril"])
            return float(np.sqrt(np.mean(whitened**2)))
        scale = np.sqrt(self._flat(gaussian.variance))
        prior_floor = scale**2 * np.maximum(self._flat(self.prior(mode)), 1e-6)
        sweep = partial(self.posterior.sweep, mode.v)
        residual = direction = scale * gradient
        squares, total = residual @ residual, 0.0
        for _ in range(MAX_CG_STEPS):
            left = np.sum(residual**2 / prior_floor)
            if left <= max(0.1 * total, NEWTON_DISTANCE_SDS**2 * len(scale)):
                break
            vectors = jnp.asarray(direction[:, None], float)
            image = self.structure.product(sweep, vectors, jnp.asarray(scale, float))
            image = _float64(image)[:, 0] + prior_floor * direction
            step = squares / (direction @ image)
            total += step * squares
            residual = residual - step * image
            old_squares, squares = squares, residual @ residual
            direction = residual + squares / old_squares * direction
        else:
            left = 0.0
        return float(np.sqrt((total + left) / len(scale)))

    def _flat(self, vectors: Values) -> np.ndarray:
        """(P,) by NumPy: JAX would compile a program for each shape."""
        return np.concatenate(
            [np.ravel(_float64(vectors[name])) for name in self.structure.sizes]
        )


def _dense_distance(precision: Array, gradient: np.ndarray) -> float:
    """Not finite if rounding, in the precision of the matrix, leaves none positive."""
    from scipy.linalg import LinAlgError, cho_factor, solve_triangular

    try:
        factor, lower = cho_factor(np.asarray(precision), lower=True)
        whitened = solve_triangular(_float64(factor), gradient, lower=lower)
    except (LinAlgError, ValueError):  # not positive, or not finite
        return np.inf
    return float(np.sqrt(np.mean(whitened**2)))


def _float64(values: ArrayLike) -> np.ndarray:
    return np.asarray(values, np.float64)


def finite(loss: float) -> float:
    """The loss, if it is finite."""
    if not np.isfinite(loss):
        instead = (
            "Look for NaN in the data; start from likely values (`init_params=`), or "
            "pass a smaller step size."
        )
        raise argument_error(
            f"{CALL}.run", "args", f"data and parameters with loss {loss}", instead
        )
    return loss
