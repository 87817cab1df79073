"""Names of the walk over programs that other files still import from here."""

from numpyro_bnn._programs.walk import CALLS, Equation, Interpreter, Rule

__all__ = ["CALLS", "Equation", "Interpreter", "Rule"]
