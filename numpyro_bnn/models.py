"""Regression and classification models, each a few lines of NumPyro after checks of the
data.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.primitives import _PYRO_STACK

from numpyro_bnn import _checks
from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import NoiseStudentT
from numpyro_bnn._options import Count, Number, Switch, checked
from numpyro_bnn.networks import random_network
from numpyro_bnn.nn import Layer
from numpyro_bnn.nn.base import Net
from numpyro_bnn.priors.base import PriorLike, as_prior, is_positive
from numpyro_bnn.program.plates import full_plates, unobserved
from numpyro_bnn.program.rows import Rows

__all__ = ["classification", "regression"]


@checked("models.regression")
def regression(
    net: Net,
    prior: PriorLike | None = None,
    noise: float | dist.Distribution | None = None,
    heteroscedastic: Switch = False,
    heavy_tails: Switch = False,
) -> Callable[..., None]:
    """Regression with normal or Student's t noise: y_n ~ N(f(x_n), sigma^2), f a random
    network.

    The result is a NumPyro model ``model(x, y=None, batch_size=None)`` with x ``(N,
    *input_shape)`` and y (N,), or (N, K) for a network with K > 1 outputs; integer
    targets are treated as numbers. Standardize both first.

    :param net: specification with one output per target; with ``heteroscedastic`` two,
        for the mean and sd = 1e-6 + softplus(second output): in float32 a softplus
        below -104 is 0.
    :param prior: prior of the network, as for :func:`~numpyro_bnn.random_network`.
    :param noise: distribution of sigma, or its fixed value; HalfNormal(1) by default.
        Site ``sigma``.
    :param heteroscedastic: let the network predict the noise of each data point; there
        is then no ``sigma``.
    :param heavy_tails: Student's t noise, for outliers: y_n ~ t(f(x_n), sigma, 2 + d),
        d ~ Gamma(2, 0.1), site ``excess_df``. Its sd is then sigma sqrt(1 + 2 / d).
        Wrong for targets that are mostly a few repeated values, for which an output for
        the noise may vanish, too.
    :raises ValueError: for NaN or infinite data, mismatched lengths, wrong rank, a
        batch size above N, a network with the wrong number of outputs, or heavy tails
        of such targets.

    >>> import jax, numpyro
    >>> from numpyro_bnn import models, nn, priors
    >>> model = models.regression(nn.MLP([5, 1], "tanh"), priors.Hierarchical())
    >>> x = jax.numpy.linspace(-1, 1, 20)[:, None]
    >>> trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(
    ...     x, jax.numpy.sin(3 * x[:, 0])
    ... )
    >>> [name for name, site in trace.items() if site["type"] == "sample"][-2:]
    ['sigma', 'y']
    """
    call = "models.regression"
    if heteroscedastic and noise is not None:
        instead = (
            "With `heteroscedastic=True` the network predicts the noise: leave it out."
        )
        raise argument_error(call, "noise", noise, instead)
    noise = dist.HalfNormal(1.0) if noise is None else noise
    _check_noise(call, noise)
    as_prior({} if prior is None else prior, call)
    return partial(
        _regression,
        net=net,
        prior=prior,
        noise=noise,
        heteroscedastic=heteroscedastic,
        heavy_tails=heavy_tails,
    )


def _regression(
    x, y=None, batch_size=None, *, net, prior, noise, heteroscedastic, heavy_tails
):
    call = "models.regression"
    _check_inputs(call, x, batch_size)
    targets = _outputs(call, net, x, 1 + heteroscedastic) // (1 + heteroscedastic)
    if y is not None:
        shape = (1, "(N,)") if targets == 1 else (2, f"(N, {targets})")
        _checks.check_rank(call, "y", y, *shape)
        _checks.check_same_length(call, x=x, y=y)
        _check_finite(call, "y", y)
        if heavy_tails and not _inside(unobserved):
            # new rows may repeat
            check_not_repeated(call, y.head() if isinstance(y, Rows) else y)
    f = random_network("net", net, np.shape(x)[1:], prior)
    sigma = noise
    if not heteroscedastic and isinstance(noise, dist.Distribution):
        sigma = numpyro.sample("sigma", noise)
    family = noise_family(heavy_tails)
    with numpyro.plate("data", np.shape(x)[0], subsample_size=batch_size) as index:
        out = f(_rows(x, index))
        mean = out[..., :targets]
        sd = 1e-6 + jax.nn.softplus(out[..., targets:]) if heteroscedastic else sigma
        sd = jnp.broadcast_to(sd, mean.shape)
        if targets == 1:
            likelihood = family(mean[..., 0], sd[..., 0])
        else:
            likelihood = family(mean, sd).to_event(1)
        numpyro.sample(
            "y", likelihood, obs=None if y is None else _rows(y, index).astype(float)
        )


def noise_family(heavy_tails: bool) -> Callable[..., dist.Distribution]:
    """Normal, or Student's t with more than 2 degrees of freedom, where it has a
    variance; of location and scale.
    """
    df = [2 + numpyro.sample("excess_df", dist.Gamma(2.0, 0.1))] if heavy_tails else []
    return partial(NoiseStudentT, *df) if df else dist.Normal


def repeats_values(y: Any) -> bool:
    """Whether most rows have values of a twentieth each: the likelihood of a t that
    hits 2/3 of them has no bound.
    """
    for column in np.asarray(y).reshape(len(y), -1).T:
        counts = np.unique(column, return_counts=True)[1]
        if 2 * counts[counts >= max(3, len(y) / 20)].sum() > len(y):
            return True
    return False


def check_not_repeated(call: str, y: ArrayLike) -> None:
    """Refuse targets that heavy tails cannot describe, if the values are known."""
    if not isinstance(y := _checks.known(y), jax.core.Tracer) and repeats_values(y):
        instead = (
            "Leave it out: most targets are a few repeated values, at which this "
            "density has no bound."
        )
        raise argument_error(call, "heavy_tails", True, instead)


@checked("models.classification")
def classification(
    net: Net, num_classes: Annotated[int, Count(2)], prior: PriorLike | None = None
) -> Callable[..., None]:
    """Classification: y_n ~ Categorical(softmax(f(x_n))), f a random network with K
    outputs.

    The result is a NumPyro model ``model(x, y=None, batch_size=None)`` with x ``(N,
    *input_shape)`` and integer labels y (N,) in 0..K-1.

    :param net: specification with K outputs.
    :param num_classes: K.
    :param prior: prior of the network, as for :func:`~numpyro_bnn.random_network`.
    :raises ValueError: for NaN or infinite inputs, labels outside 0..K-1, mismatched
        lengths, wrong rank, a batch size above N, or a network with the wrong number of
        outputs.

    >>> import jax, numpyro
    >>> from numpyro_bnn import models, nn
    >>> model = models.classification(nn.MLP([5, 3]), num_classes=3)
    >>> trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(
    ...     jax.numpy.ones((7, 2))
    ... )
    >>> trace["y"]["value"].shape
    (7,)
    """
    as_prior({} if prior is None else prior, "models.classification")
    return partial(_classification, net=net, num_classes=num_classes, prior=prior)


def _classification(x, y=None, batch_size=None, *, net, num_classes, prior):
    call = "models.classification"
    _check_inputs(call, x, batch_size)
    _outputs(call, net, x, num_classes)
    if y is not None:
        _checks.check_rank(call, "y", y, 1, "(N,)")
        _checks.check_same_length(call, x=x, y=y)
        _checks.check_labels(
            call, "y", y.extremes if isinstance(y, Rows) else y, num_classes
        )
    f = random_network("net", net, np.shape(x)[1:], prior)
    with numpyro.plate("data", np.shape(x)[0], subsample_size=batch_size) as index:
        logits = f(_rows(x, index))
        labels = None if y is None else _rows(y, index).astype(int)
        numpyro.sample("y", dist.Categorical(logits=logits), obs=labels)


def _inside(handler: type) -> bool:
    return any(isinstance(frame, handler) for frame in _PYRO_STACK)


def _rows(values: ArrayLike, index: Array) -> Array:
    """Those of a minibatch; all rows as they are, so that they may be spread over
    devices.
    """
    if isinstance(values, Rows):
        return values[index]
    values = jnp.asarray(values)
    return values if len(index) == len(values) else values[index]


def _check_finite(call: str, argument: str, value: object) -> None:
    """Refuse NaN and infinity, also in rows on disk, which are read for it once."""
    if not isinstance(value, Rows):
        _checks.check_finite(call, argument, value)
    elif not len(value) or not np.isfinite(value.extremes).all():
        got = f"{value!r} that are empty, or have NaN or infinite values"
        raise argument_error(call, argument, got, "Drop or impute those rows first.")


def _check_noise(call: str, noise: float | dist.Distribution | None) -> None:
    """Refuse a noise that is not positive: a distribution, or one fixed value or
    several.
    """
    if isinstance(noise, dist.Distribution):
        if not is_positive(noise.support):
            instead = "Pass a distribution on (0, inf), e.g. `dist.HalfNormal(1.0)`."
            raise argument_error(call, "noise", noise, instead)
    elif not isinstance(noise, jax.core.Tracer):
        for value in np.ravel(np.asarray(noise, dtype=object)):
            Number(strict=True).check(call, "noise", value)


def _check_inputs(call: str, x: ArrayLike, batch_size: int | None) -> None:
    if np.ndim(x) < 2:
        instead = "Pass (N, *input_shape), e.g. `x[:, None]` for one feature."
        raise argument_error(call, "x", f"shape {np.shape(x)}", instead)
    _check_finite(call, "x", x)
    size = np.shape(x)[0]
    # Predictions run on full plates, where the batch size of the run does not apply.
    if batch_size is None or _inside(full_plates):
        return
    if Count().check(call, "batch_size", batch_size) > size:
        raise argument_error(
            call, "batch_size", batch_size, f"Pass a number from 1 to N = {size}."
        )


def _outputs(call: str, net: Layer, x: ArrayLike, multiple: int) -> int:
    """Number of outputs of the network; refuse a network that does not match the
    likelihood.
    """
    shape = net.output_shape(np.shape(x)[1:])
    if (
        len(shape) != 1
        or shape[0] % multiple
        or (call.endswith("classification") and shape[0] != multiple)
    ):
        instead = f"The last layer must have {multiple} outputs."
        raise argument_error(
            call, "net", f"a network with output shape {shape}", instead
        )
    return shape[0]
