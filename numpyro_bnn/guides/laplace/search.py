"""The search for the mode, and what is summed over the rows there."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import Array
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
    """A point v, what was tuned, and all that the evidence depends on there: sums over
    rows, curvature of the prior, and the log likelihood.
    """

    v: Values
    tuned: Tuned
    sums: PyTree
    curvature: Values  # of sites without Normal prior, (P_s,)
    coupling: Array | None
    log_likelihood: Array


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
        """L-BFGS on all rows, until the loss no longer falls."""
        import optax

        solver = optax.lbfgs()

        def loss(v: Values) -> Array:
            return self.posterior.potential(batch, v, tuned)

        value_and_grad = optax.value_and_grad_from_state(loss)

        def go_on(carry: tuple) -> Array:
            *_, since, epochs = carry
            return (since < self.patience) & (epochs < self.num_epochs)

        def step(carry: tuple) -> tuple:
            v, state, losses, best, best_v, since, epochs = carry
            value, grad = value_and_grad(v, state=state)
            updates, state = solver.update(
                grad, state, v, value=value, grad=grad, value_fn=loss
            )
            lower = value < best
            # A step that overflows ends the search at the lowest point so far.
            since = jnp.where(jnp.isfinite(value), since + 1, self.patience)
            best, best_v = jax.tree.map(
                lambda new, previous: jnp.where(lower, new, previous),
                (value, v),
                (best, best_v),
            )
            losses = losses.at[epochs].set(value)
            since = jnp.where(lower, 0, since)
            v = optax.apply_updates(v, updates)
            return v, state, losses, best, best_v, since, epochs + 1

        losses, zero = jnp.zeros(self.num_epochs), jnp.asarray(0)
        start = (v, solver.init(v), losses, jnp.asarray(jnp.inf), v, zero, zero)
        *_, losses, _, best_v, _, epochs = jax.lax.while_loop(go_on, step, start)
        return best_v, losses, epochs

    # -- at a mode ---------------------------------------------------------------------

    def measure(self, v: Values, tuned: Tuned) -> Mode:
        """All that is summed over the rows at a mode."""
        posterior = self.posterior
        curvature, coupling = self._prior_curvature(v)
        positive: Values = {}
        if self.structure.scales_by_prior:
            positive = self.rows.run_once(self._positive_prior, v, tuned, curvature)
        sums = self.structure.measure(partial(posterior.sweep, v), positive)
        log_likelihood = self.rows.total(posterior.log_likelihood, v)
        return Mode(v, tuned, sums, curvature, coupling, log_likelihood)

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
        """The Gaussian at a mode, for its prior precisions, by one program."""
        return self.rows.run_once(self.gaussian_of, mode)

    def gaussian_of(self, batch: Batch, mode: Mode) -> LaplaceGaussian:
        """:meth:`gaussian` inside a program."""
        return self.structure.gaussian(mode.sums, self.prior(mode), mode.coupling)

    def weight_variances(self, batch: Batch, mode: Mode) -> Values:
        """Of the weights given their prior scales, inside a program."""
        prior, variance = self.prior(mode), self.given_scales(mode).variance
        of_unit = {
            name: prior[name] * variance[name] for name in self.posterior.learned
        }
        return self.posterior.weight_variances(batch, mode.v, of_unit)

    def given_scales(self, mode: Mode) -> LaplaceGaussian:
        """The Gaussian given the prior scales that are learned, inside a program."""
        prior, learned = self.prior(mode), self.posterior.learned
        parents = [scale.parents for scale in learned.values()]
        for name in (set().union(*parents) & prior.keys()) - learned.keys():
            prior[name] = jnp.full_like(prior[name], HELD_PRECISION)
        return self.structure.gaussian(mode.sums, prior, mode.coupling)

    def _prior_curvature(self, v: Values) -> tuple[Values, Array | None]:
        """-d^2 log p / dv^2 of sites whose prior is not Normal: its diagonal and, if
        the precision is dense, all the rest.
        """
        names = set(self.posterior.sites) & set(self.posterior.other_sites)
        if not names:
            return {}, None
        diagonal, coupling, share = self.rows.run_once(self._curvature, v)
        if share > MAX_MIXED_SHARE:
            got = (
                f"{self.posterior.sites}, whose joint prior is not independent "
                f"({', '.join(sorted(names))})"
            )
            instead = 'Use "full", or give these sites independent priors.'
            raise argument_error(CALL, "structure", got, instead)
        return self.structure.split(diagonal), coupling

    def _curvature(self, batch: Batch, v: Values) -> tuple:
        """The diagonal, what is beside it, and the share of others in the diagonal of
        independent priors.
        """
        posterior, chosen = self.posterior, {}
        names = [name for name in posterior.sites if name in posterior.other_sites]
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
        for _ in (bar := tqdm.tqdm(range(num_steps), disable=not progress_bar)):
            value, gradient = self.rows.run(self._slope, None, mode.v, mode.tuned)
            matrix = self._precision_at(mode)
            distance = _dense_distance(matrix, gradient)
            positive = bool(np.isfinite(distance))
            if losses and distance < NEWTON_DISTANCE_SDS:
                break
            if positive_mode and not positive:
                break
            positive_mode = mode if positive else None
            v, lower, damping = self._damped_step(
                mode, float(value), _float64(gradient), _float64(matrix), damping
            )
            if not lower < value:
                break
            losses.append(lower)
            bar.set_postfix_str(f"loss {lower:.5g}", refresh=False)
            mode = self.measure(v, mode.tuned)
        if positive_mode:
            distance = _dense_distance(self._precision_at(mode), gradient)
            if not np.isfinite(distance):
                # the fit became so close that no digits are left
                return positive_mode, losses[:-1]
        return mode, losses

    def _damped_step(
        self,
        mode: Mode,
        value: float,
        gradient: np.ndarray,
        matrix: np.ndarray,
        damping: float,
    ) -> tuple[Values, float, float]:
        """A point whose loss is lower, that loss, and the damping that led there.

        The narrow valleys of networks are curved. Along a step s the outputs have a
        second derivative f'', and -1/2 H^-1 J^T F f'' is added to the step; one that
        would bend too much is tried again with more damping (Transtrum & Sethna 2012).
        """
        from scipy.linalg import LinAlgError, cho_factor, cho_solve

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

    def _slope(self, batch: Batch, v: Values, tuned: Tuned) -> tuple:
        """-log p(D, v) and its gradient, flat."""
        value, grads = jax.value_and_grad(
            lambda v: self.posterior.potential(batch, v, tuned)
        )(v)
        return value, self.structure.flat(grads)

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

    def distance(self, mode: Mode, gradient: np.ndarray) -> float:
        r"""From the mode in posterior sds, :math:`\sqrt{g^\top H^{-1} g / P}`, H being
        the whole Gauss-Newton matrix.

        Structures other than "full" leave out directions in which the posterior is
        wide. They solve by conjugate gradients, whose partial sums grow to the result,
        and end where the prior bounds what is left.
        """
        if isinstance(self.structure, FullStructure):
            return _dense_distance(self._precision_at(mode), gradient)
        flat = self.structure.flat
        scale = np.sqrt(_float64(flat(self.gaussian(mode).variance)))
        prior_floor = scale**2 * np.maximum(_float64(flat(self.prior(mode))), 1e-6)
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

    def _precision_at(self, mode: Mode) -> np.ndarray:
        """(P, P) of a dense structure."""
        return np.asarray(self.rows.run_once(self._precision, mode))

    def _precision(self, batch: Batch, mode: Mode) -> Array:
        structure: Any = self.structure
        return structure.precision(mode.sums, self.prior(mode), mode.coupling)


def _dense_distance(precision: np.ndarray, gradient: ArrayLike) -> float:
    """Not finite if rounding, in the precision of the matrix, leaves none positive."""
    from scipy.linalg import LinAlgError, cho_factor, solve_triangular

    try:
        factor, lower = cho_factor(precision, lower=True)
        whitened = solve_triangular(_float64(factor), _float64(gradient), lower=lower)
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
