"""The arguments of a model at which to predict."""

from collections.abc import Callable, Collection

import numpy as np

from numpyro_bnn._checks import (
    argument_error,
    check_finite,
    check_same_length,
    unknown_name,
)
from numpyro_bnn._types import Shape, Trees
from numpyro_bnn.program.arguments import Arguments, as_numpy
from numpyro_bnn.program.axes import Counted
from numpyro_bnn.results.fit import CALL


def for_prediction(
    arguments: Arguments,
    new: Trees,
    observed: set[str],
    affecting: Callable[[], Collection[str]] = tuple,
    counts: Callable[[], Counted] = Counted,
) -> Arguments:
    """Arguments of a prediction: new values replace the old, and observations without a
    new value are dropped.

    So are optional arguments with one row per training point that only weight or mask
    the likelihood.

    :param arguments: those of the run.
    :param new: values by argument name, e.g. ``{"x": x_test, "y": y_test}``.
    :param observed: names of the arguments that carry observations.
    :param affecting: finds the arguments that change what is predicted.
    :param counts: finds which axes of the arguments have the same rows; where it cannot
        tell, those of one length.
    :raises ValueError: for an unknown name, NaN, an array of another shape than in the
        run, mismatched lengths, or an argument with one row per training point and no
        new value that changes what is predicted.
    """
    new = as_numpy((), new)[1]
    arrays, run_arrays = Arguments(new).arrays, arguments.arrays
    for name in new:
        if name not in {**arguments.values, **arguments.optional}:
            raise unknown_name(
                CALL, "predictions", name, {**arguments.values, **arguments.optional}
            )
    rows = _RowAxes(run_arrays, observed, counts() if arrays else Counted())
    for name, value in arrays.items():
        if np.issubdtype(np.asarray(value).dtype, np.floating):
            check_finite(CALL, f"predictions[{name!r}]", value)
        if name in run_arrays:
            rows.check_shape(name, np.shape(value))
    replaced = [name for name in arrays if name in run_arrays]
    for name in replaced:
        # Arguments with the same rows in the run are columns of one table, so their new
        # lengths must agree.
        columns = {
            column: np.moveaxis(arrays[column], rows.axes[column], 0)
            for column in replaced
            if rows.same(name, rows.axes[name], column)
        }
        check_same_length(CALL, **columns)
    lacking = set()
    for name in run_arrays.keys() - new.keys() - observed:
        for axis in range(np.ndim(run_arrays[name])):
            if any(rows.same(name, axis, column) for column in replaced):
                lacking.add(name)
    affected = affecting() if lacking else ()
    for name in sorted(lacking):
        if name in affected or name not in arguments.optional:
            got = f"no value for {name!r}, which has one row per training point"
            instead = f"Write e.g. `predictions={{..., {name!r}: {name}_test}}`"
            if name in arguments.optional:
                instead += f", or its default, `{name!r}: {arguments.optional[name]!r}`"
            raise argument_error(CALL, "predictions", got, f"{instead}.")
    defaults = {}
    for name, default in arguments.optional.items():
        if name in lacking or (name in observed and default is None):
            defaults[name] = default
    return arguments.with_values({**defaults, **new})


class _RowAxes:
    """The axis of each array of a run that has its rows: the first, unless the program
    has them along another.
    """

    def __init__(self, arrays: Trees, observed: set[str], counts: Counted) -> None:
        self.arrays, self.counts = arrays, counts
        self.axes: dict[str, int] = {}
        for name, array in arrays.items():
            answers = []  # by axis: whether it has the rows of each observation
            for axis in range(np.ndim(array)):
                answers.append(
                    {
                        counts.alike((name, axis), (y, 0))
                        for y in observed & arrays.keys()
                    }
                )
            along = [axis for axis, alike in enumerate(answers) if True in alike]
            self.axes[name] = along[0] if along and answers[0] == {False} else 0

    def check_shape(self, name: str, shape: Shape) -> None:
        """Refuse a new array that differs from that of the run in more than rows."""
        run_shape = np.shape(self.arrays[name])
        sizes, expected = list(map(str, shape)), list(map(str, run_shape))
        row_axis = self.axes[name]
        sizes[row_axis : row_axis + 1] = ["M"]
        expected[row_axis : row_axis + 1] = ["M"]
        if sizes != expected or len(shape) != len(run_shape):
            comma = "," if len(run_shape) == 1 else ""
            instead = (
                f"Pass ({', '.join(expected)}{comma}), one row per new point, as "
                f"in the run's {run_shape}."
            )
            raise argument_error(
                CALL, f"predictions[{name!r}]", f"shape {shape}", instead
            )

    def same(self, name: str, axis: int, column: str) -> bool:
        """Whether an axis of an array has the rows of another array."""
        along = self.axes[column]
        if np.shape(self.arrays[name])[axis] != np.shape(self.arrays[column])[along]:
            return False
        alike = self.counts.alike((name, axis), (column, along))
        return axis == self.axes[name] if alike is None else alike
