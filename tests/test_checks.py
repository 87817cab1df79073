"""The argument checks that every room shares, and the form of their messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_bnn import _checks

pytestmark = pytest.mark.core


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)])
def test_counts_take_any_integer(value):
    count = _checks.check_count("f", "n", value)
    assert (count, type(count)) == (3, int)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, np.True_, "3", None, np.float32(3), np.array([3])])
def test_counts_refuse_everything_else(value):
    with pytest.raises(ValueError, match=r"^f: argument `n` got .*\. Pass an integer of at least 1\.$"):
        _checks.check_count("f", "n", value)


def test_a_text_is_shown_in_quotes():
    with pytest.raises(ValueError, match=r"^f: argument `n` got '3'\."):
        _checks.check_count("f", "n", "3")
    with pytest.raises(TypeError, match=r"^f: argument `x` got '0\.1'\. Pass a finite number at least 0\.$"):
        _checks.check_number("f", "x", "0.1")


@pytest.mark.parametrize("value", [0.5, 0, np.float32(0.5), jnp.float32(0.5), np.array(0.5)])
def test_numbers_at_least_the_minimum_pass(value):
    _checks.check_number("f", "x", value, below=1.0)


@pytest.mark.parametrize(
    ("value", "options", "kind"),
    [
        (float("nan"), {}, ValueError),
        (-0.1, {}, ValueError),
        (0.0, {"strict": True}, ValueError),
        (1.0, {"below": 1.0}, ValueError),
        (float("inf"), {}, ValueError),
        (float("-inf"), {"minimum": -float("inf")}, ValueError),
        (True, {}, TypeError),
        (None, {}, TypeError),
        ([0.1, 0.2], {}, TypeError),
    ],
)
def test_wrong_numbers_are_refused(value, options, kind):
    with pytest.raises(kind, match=r"^f: argument `x` got .*\. Pass a finite number"):
        _checks.check_number("f", "x", value, **options)


def test_infinity_passes_where_it_may_and_traced_values_always():
    _checks.check_number("f", "x", float("inf"), infinite=True)
    assert jax.jit(lambda x: _checks.check_number("f", "x", x) or x)(-1.0) == -1.0


def test_bounds_stand_in_the_message():
    with pytest.raises(ValueError, match=r"Pass a finite number above 0 and below 1\.$"):
        _checks.check_number("f", "x", 2.0, strict=True, below=1.0)


@pytest.mark.parametrize("value", ["Relu", None, 1])
def test_choices_name_the_closest(value):
    _checks.check_choice("f", "name", "relu", ("relu", "tanh"))
    with pytest.raises(ValueError, match=r"^f: argument `name` got .*Known: relu, tanh\.$") as refused:
        _checks.check_choice("f", "name", value, ("relu", "tanh"))
    assert ("Did you mean 'relu'?" in str(refused.value)) == (value == "Relu")
