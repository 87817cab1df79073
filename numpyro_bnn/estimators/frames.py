"""A data frame as people have it, as the numbers of a network: one plan per column."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from numpyro_bnn._checks import argument_error
from numpyro_bnn.estimators.tables import HUGE

# Levels in fewer rows are joined, and so are those beyond the most frequent.
MIN_LEVEL_SHARE, MAX_LEVELS = 0.01, 50
# So many joined levels, with twice as many rows as there are levels, show how much
# levels differ: each has an effect, of at most so many, the most frequent.
MIN_JOINED, MIN_ROWS_PER_LEVEL, MAX_EFFECTS = 20, 2, 2000
# Effects for levels that the fit has not seen: two of these rarely share one.
NUM_NEW_EFFECTS = 31
# Largest distance from the median, in interquartile ranges, of a column that is used
# as it is; 10,000 normal values reach 3.
HEAVY_TAIL = 10.0
DAY = 86400.0  # seconds
# Length in days, and the span from which dates show it.
PERIODS = {"year": (365.25, 550.0), "week": (7.0, 21.0), "day": (1.0, 2.0)}
# A column of 0 and 1 that stands alone has the variance 1 if both are as frequent, and
# so have the columns of a category together: rare levels are not blown up.
SWITCH_SCALE, LEVEL_SCALE = 0.5, 0.5**0.5
MISSING = "(missing)"


def is_frame(table: Any) -> bool:
    """Whether a table has named columns (pandas, polars)."""
    return hasattr(table, "columns") and hasattr(table, "__getitem__")


class ColumnPlan(Protocol):
    """What is done with a column, a pandas series of floats, text or dates."""

    @staticmethod
    def read(call: str, name: Any, series: Any) -> Any:
        """A column as floats, text or dates, with NaN, None or NaT where values are
        missing.
        """

    @classmethod
    def fit(cls, values: Any) -> "ColumnPlan":
        """What to do with a column that was read."""

    @property
    def scales(self) -> np.ndarray:
        """By which each of its numbers is divided, NaN for the standard deviation."""

    @property
    def words(self) -> str:
        """What is done, for people; empty if numbers are used as they are."""

    def encode(self, values: Any) -> np.ndarray:
        """Numbers (N, K)."""

    def notes(self, name: Any, values: Any) -> Iterator[str]:
        """What is new about rows after the fit."""


class Columns:
    """Numbers, categories, text, booleans, dates and gaps, made into numbers.

    - numbers: as they are; text of numbers is read. Where a value lies more than ten
      interquartile ranges from the median, asinh of the distance from the median in
      interquartile ranges;
    - booleans: 0 and 1;
    - categories and text: one column per level; levels in less than 1 % of the rows are
      joined, and so are those beyond the 50 most frequent. If at least 20 are joined,
      and there are two rows for each level, all have codes, too, for their effects;
    - dates: days, and the place in year, week and day where the dates span them;
    - missing numbers and dates: the median, and a column that marks them; a missing
      category is one more level.

    :param call: what the user called, for messages.
    :param frame: the rows of the fit.
    :param categories: names of columns whose numbers are names.
    :param dates: names of columns whose text or numbers are dates.
    :param counted: rows (N,) from which is learned what columns are, by default all.
    """

    def __init__(
        self,
        call: str,
        frame: Any,
        categories: Sequence[str] | None = None,
        dates: Sequence[str] | None = None,
        counted: np.ndarray | None = None,
    ) -> None:
        self._plans: dict[Any, ColumnPlan] = {}
        names = list(frame.columns)
        for option, columns in (("categories", categories), ("dates", dates)):
            for name in columns or ():
                if option == "dates" and name in (categories or ()):
                    got = f"{name!r}, which is in `categories` too"
                    raise argument_error(call, option, got, "Name it in one of them.")
                if name not in names:
                    got = f"{name!r}, which is no column of X"
                    known = ", ".join(map(repr, names))
                    raise argument_error(call, option, got, f"Columns: {known}.")
        if not names:
            raise argument_error(call, "X", "no columns", "Pass at least one.")
        for name in names:
            series = _series(call, frame, name)
            if name in (categories or ()):
                kind = "category"
            elif name in (dates or ()):
                kind = "date"
            else:
                kind = _kind(call, name, series)
            plan = PLANS[kind]
            values = plan.read(call, name, series)
            values = values if counted is None else values[counted]
            self._plans[name] = plan.fit(values)
        # places and plans of columns whose levels have effects
        self._with_effects: dict[Hashable, tuple[int, CategoryPlan]] = {}
        for place, (name, fitted) in enumerate(self._plans.items()):
            if isinstance(fitted, CategoryPlan) and fitted.levels:
                self._with_effects[name] = (place, fitted)

    @property
    def described(self) -> dict[str, str]:
        """What was done, by name of the columns that are not used as they are."""
        return {
            str(name): plan.words for name, plan in self._plans.items() if plan.words
        }

    @property
    def names(self) -> list[str]:
        return [str(name) for name in self._plans]

    @property
    def mean_and_scale(self) -> tuple[np.ndarray, np.ndarray]:
        """What is subtracted from each number and code, and by what it is divided; NaN
        for mean and standard deviation of its values.
        """
        scales = np.concatenate([plan.scales for plan in self._plans.values()])
        codes = np.ones(len(self._with_effects))
        mean = np.append(np.full(len(scales), np.nan), 0 * codes)
        return mean, np.append(scales, codes)

    @property
    def groups(self) -> np.ndarray:
        """For each number and code, the place of the column from which it comes."""
        widths = [len(plan.scales) for plan in self._plans.values()]
        places = np.repeat(np.arange(len(widths)), widths)
        with_codes = [place for place, _ in self._with_effects.values()]
        return np.append(places, with_codes).astype(int)

    @property
    def num_levels(self) -> tuple[tuple[str, int], ...]:
        """Names of the columns with codes, and numbers of their codes."""
        return tuple(
            (str(name), len(plan.levels) + 1 + NUM_NEW_EFFECTS)
            for name, (_, plan) in self._with_effects.items()
        )

    def named(self, rows: np.ndarray) -> Any:
        """Rows (N, D) without names, as a frame with the columns of the fit."""
        import pandas as pd

        return pd.DataFrame(rows, columns=list(self._plans))

    def numbers(self, call: str, frame: Any) -> tuple[np.ndarray, list[str]]:
        """The numbers (N, D) of rows, codes of levels last, and what is new about them,
        in words.
        """
        blocks: list[np.ndarray] = []
        codes: list[np.ndarray] = []
        notes: list[str] = []
        for name, plan in self._plans.items():
            values = plan.read(call, name, _series(call, frame, name))
            blocks.append(plan.encode(values))
            notes += plan.notes(name, values)
            if name in self._with_effects:
                codes.append(self._with_effects[name][1].codes(values))
        return np.concatenate(blocks + codes, axis=1), notes


def _series(call: str, frame: Any, name: Any) -> Any:
    """A column as a pandas series without an index."""
    import pandas as pd

    if name not in list(frame.columns):
        got = f"a table without the column {name!r}"
        raise argument_error(call, "X", got, "Pass the columns of the fit.")
    column = frame[name]
    if getattr(column, "ndim", 1) != 1:
        got = f"several columns {name!r}"
        raise argument_error(call, "X", got, "Give each column a name of its own.")
    if isinstance(column, pd.Series):
        return column.reset_index(drop=True)
    # polars, and whatever else has columns
    return pd.Series(list(column))


def _kind(call: str, name: Any, series: Any) -> str:
    """Whether a column holds numbers, categories or dates."""
    from pandas.api import types

    dtype = series.dtype
    if isinstance(dtype, types.CategoricalDtype):
        return "category"
    if types.is_datetime64_any_dtype(dtype):
        return "date"
    if types.is_complex_dtype(dtype):
        # The first words are those that scikit-learn's `check_estimator` looks for.
        instead = "Complex data not supported: pass real and imaginary parts."
        raise argument_error(call, "X", f"complex numbers in column {name!r}", instead)
    if types.is_numeric_dtype(dtype) or types.is_timedelta64_dtype(dtype):
        return "number"
    return _kind_of_objects(call, name, series.dropna())


def _kind_of_objects(call: str, name: Any, values: Any) -> str:
    import datetime

    import pandas as pd

    if all(isinstance(value, datetime.date | np.datetime64) for value in values):
        return "date" if len(values) else "category"
    for value in values:
        if not isinstance(value, str | bytes | int | float | np.generic):
            got = f"values of type {type(value).__name__} in column {name!r}"
            instead = "Pass numbers, text, booleans or dates."
            raise argument_error(call, "X", got, instead, TypeError)
    if pd.to_numeric(values, errors="coerce").notna().all():
        return "number"
    text = values.astype(str)
    if text.str.match(r"\d{4}-\d{2}-\d{2}").all():
        parsed = pd.to_datetime(text, format="ISO8601", errors="coerce", utc=True)
        if parsed.notna().all():
            return "date"
    return "category"


def _level(value: Any) -> str:
    """A level as text: 3 and 3.0 are the same one, since a gap turns integers into
    floats.
    """
    whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value) if whole else value)


@dataclass(frozen=True)
class NumberPlan:
    """A number; missing ones are the median, and marked.

    :param width: interquartile range of a column with a heavy tail, otherwise ``None``.
    :param is_switch: whether there are no numbers but 0 and 1.
    :param num_missing: in the fit.
    """

    median: float
    width: float | None
    is_switch: bool
    num_missing: int

    @staticmethod
    def read(call: str, name: Any, series: Any) -> Any:
        import pandas as pd
        from pandas.api import types

        if types.is_timedelta64_dtype(series.dtype):
            return series.dt.total_seconds() / DAY
        if types.is_datetime64_any_dtype(series.dtype):
            got = f"dates in column {name!r}, which held numbers"
            raise argument_error(call, "X", got, "Pass numbers, as in the fit.")
        numbers = pd.to_numeric(series, errors="coerce").astype("Float64")
        values = pd.Series(numbers.to_numpy(np.float64, na_value=np.nan))
        text = series.notna() & values.isna()
        if text.any():
            got = f"{series[text].iloc[0]!r} in column {name!r}, which held numbers"
            raise argument_error(call, "X", got, "Pass numbers, as in the fit.")
        bad = ~(values.abs() < HUGE) & values.notna()
        if bad.any():
            got = (
                f"{bad.sum()} values in column {name!r} that are infinite or above "
                f"{HUGE:g}, first in row {int(np.argmax(bad))}"
            )
            raise argument_error(
                call, "X", got, "Drop those rows, or mark them missing."
            )
        return values

    @classmethod
    def fit(cls, values: Any) -> "NumberPlan":
        known = values.dropna().to_numpy()
        num_missing = len(values) - len(known)
        if not len(known):
            return cls(0.0, None, False, num_missing)
        low, median, high = np.quantile(known, (0.25, 0.5, 0.75))
        width = float(high - low)
        is_heavy = width > 0 and np.abs(known - median).max() > HEAVY_TAIL * width
        is_switch = set(np.unique(known)) == {0.0, 1.0}
        return cls(float(median), width if is_heavy else None, is_switch, num_missing)

    @property
    def scales(self) -> np.ndarray:
        scale = SWITCH_SCALE if self.is_switch else np.nan
        return np.array([scale, SWITCH_SCALE][: 1 + bool(self.num_missing)])

    @property
    def words(self) -> str:
        words = []
        if self.width is not None:
            words.append(
                f"a heavy tail: asinh((value - {self.median:.4g}) / {self.width:.4g})"
            )
        return "; ".join(words + _words_of_gaps(self.num_missing))

    def encode(self, values: Any) -> np.ndarray:
        numbers = values.fillna(self.median).to_numpy(np.float64)
        if self.width is not None:
            numbers = np.arcsinh((numbers - self.median) / self.width)
        return _with_marks(numbers[:, None], values, self.num_missing)

    def notes(self, name: Any, values: Any) -> Iterator[str]:
        return _notes_of_gaps(name, values, self.num_missing)


@dataclass(frozen=True)
class CategoryPlan:
    """A column of 0 and 1 for each level, by scikit-learn's encoder.

    :param levels: those that have effects, if rare ones are many.
    """

    encoder: Any
    levels: tuple[str, ...] = ()

    @staticmethod
    def read(call: str, name: Any, series: Any) -> Any:
        text = series.astype(object).where(series.notna(), None)
        return text.map(_level, na_action="ignore")

    @classmethod
    def fit(cls, values: Any) -> "CategoryPlan":
        from sklearn.preprocessing import OneHotEncoder

        encoder = OneHotEncoder(
            min_frequency=max(2, int(np.ceil(MIN_LEVEL_SHARE * len(values)))),
            max_categories=MAX_LEVELS,
            handle_unknown="infrequent_if_exist",
            sparse_output=False,
        )
        plan = cls(encoder.fit(_table_of_levels(values)))
        levels, counts = np.unique(_table_of_levels(values), return_counts=True)
        is_rich = len(values) >= MIN_ROWS_PER_LEVEL * len(levels)
        if plan._num_joined < MIN_JOINED or not is_rich:
            return plan
        order = np.argsort(-counts, kind="stable")
        return replace(plan, levels=tuple(levels[order[:MAX_EFFECTS]]))

    @property
    def _num_joined(self) -> int:
        joined = self.encoder.infrequent_categories_[0]
        return 0 if joined is None else len(joined)

    @property
    def _is_idle(self) -> bool:
        """Whether all levels are rare: joined, they say nothing about a row."""
        return self._num_joined == len(self.encoder.categories_[0])

    @property
    def scales(self) -> np.ndarray:
        return np.full(len(self.encoder.get_feature_names_out()), LEVEL_SCALE)

    @property
    def words(self) -> str:
        words = f"{len(self.encoder.categories_[0])} levels"
        if self.levels:
            if len(self.levels) == len(self.encoder.categories_[0]):
                words += ", each with an effect of its own"
            else:
                number = len(self.levels)
                words += f", the {number} most frequent with effects of their own"
        elif self._is_idle:
            return (
                f"{words}, all of them rare: not used (dates need the form 2026-01-31)"
            )
        if MISSING in self.encoder.categories_[0]:
            words += ", one of which is that it is missing"
        if self._num_joined and not self._is_idle:
            words += f"; {self._num_joined} rare ones are joined"
        return words

    def encode(self, values: Any) -> np.ndarray:
        return self.encoder.transform(_table_of_levels(values))

    def codes(self, values: Any) -> np.ndarray:
        """Places (N, 1) among the levels with effects; other levels of the fit share
        the next code, and new ones have those that follow.
        """
        import pandas as pd

        levels = values.fillna(MISSING)
        codes = pd.Index(self.levels).get_indexer(levels)
        codes[codes < 0] = len(self.levels)
        is_new = ~levels.isin(self.encoder.categories_[0]).to_numpy()
        # a checksum: the same level has the same effect in all calls
        sums = [
            crc32(level.encode(errors="replace")) % NUM_NEW_EFFECTS
            for level in levels[is_new]
        ]
        codes[is_new] = len(self.levels) + 1 + np.array(sums, int)
        return codes[:, None].astype(float)

    def notes(self, name: Any, values: Any) -> Iterator[str]:
        levels = values.fillna(MISSING)
        unknown = levels[~levels.isin(self.encoder.categories_[0])]
        if len(unknown) and (self.levels or not self._is_idle):
            yield (
                f"{len(unknown)} rows of column {name!r} have a level that the fit has "
                f"not seen, such as {unknown.iloc[0]!r}"
            )


def _table_of_levels(values: Any) -> np.ndarray:
    return values.fillna(MISSING).to_numpy(object)[:, None]


@dataclass(frozen=True)
class DatePlan:
    """Days since midnight before the first date, and sine and cosine of the place in
    each period that the dates span.
    """

    origin: Any
    median: float
    periods: tuple[str, ...]
    num_missing: int

    @staticmethod
    def read(call: str, name: Any, series: Any) -> Any:
        import pandas as pd

        if series.dtype.kind == "M":
            # hours are those of the clock on the wall, also where summer time begins
            return series.dt.tz_localize(None)
        # Dates of Python become text, and 20260131 is one, which a gap makes a float.
        series = CategoryPlan.read(call, name, series)
        dates = pd.to_datetime(series, utc=True, format="ISO8601", errors="coerce")
        dates = dates.dt.tz_localize(None)
        unread = series.notna() & dates.isna()
        if unread.any():
            got = f"{series[unread].iloc[0]!r} in column {name!r}, which holds dates"
            instead = "Write dates as 2026-01-31, or pass pandas' timestamps."
            raise argument_error(call, "X", got, instead)
        return dates

    @classmethod
    def fit(cls, values: Any) -> "DatePlan":
        known = values.dropna()
        num_missing = len(values) - len(known)
        if not len(known):
            return cls(None, 0.0, (), num_missing)
        origin = known.min().normalize()
        days = _days(known, origin)
        span = np.ptp(days)
        periods = []
        for name, (length, min_span) in PERIODS.items():
            # dates without a time of day say nothing about hours
            if span >= min_span and np.ptp(np.mod(days, length)) > 1 / DAY:
                periods.append(name)
        return cls(origin, float(np.median(days)), tuple(periods), num_missing)

    @property
    def scales(self) -> np.ndarray:
        scales = np.full(1 + 2 * len(self.periods), np.nan)
        return np.append(scales, SWITCH_SCALE) if self.num_missing else scales

    @property
    def words(self) -> str:
        if self.origin is None:
            return "; ".join(_words_of_gaps(self.num_missing))
        places = [f"place in the {name}" for name in self.periods]
        words = ", ".join([f"days since {self.origin:%Y-%m-%d}", *places])
        return "; ".join([words, *_words_of_gaps(self.num_missing)])

    def encode(self, values: Any) -> np.ndarray:
        days = np.full(len(values), self.median)
        if self.origin is not None:
            known = values.notna().to_numpy()
            days[known] = _days(values[known], self.origin)
        parts = [days]
        for name in self.periods:
            angle = 2 * np.pi * days / PERIODS[name][0]
            parts += [np.sin(angle), np.cos(angle)]
        return _with_marks(np.column_stack(parts), values, self.num_missing)

    def notes(self, name: Any, values: Any) -> Iterator[str]:
        return _notes_of_gaps(name, values, self.num_missing)


def _days(dates: Any, origin: Any) -> np.ndarray:
    return ((dates - origin).dt.total_seconds() / DAY).to_numpy(np.float64)


def _words_of_gaps(num_missing: int) -> list[str]:
    if not num_missing:
        return []
    return [f"{num_missing} missing: the median, and a column that marks them"]


def _with_marks(numbers: np.ndarray, values: Any, num_missing: int) -> np.ndarray:
    """Add a column that marks missing values, if the fit had any."""
    if not num_missing:
        return numbers
    return np.column_stack([numbers, values.isna().to_numpy(float)])


def _notes_of_gaps(name: Any, values: Any, num_missing: int) -> Iterator[str]:
    new_gaps = int(values.isna().sum())
    if new_gaps and not num_missing:
        yield (
            f"{new_gaps} missing values in column {name!r}, which had none in the fit, "
            "are taken to be its median"
        )


PLANS: dict[str, type[ColumnPlan]] = {
    "number": NumberPlan,
    "category": CategoryPlan,
    "date": DatePlan,
}
