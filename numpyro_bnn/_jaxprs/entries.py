"""Where a site enters a program: until then what is computed is an elementwise affine
image of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from numpyro_bnn._jaxprs.walk import Equation
from numpyro_bnn._types import Operand


class SiteImage(NamedTuple):
    """An elementwise affine image of a site: its value, and its slope in the site."""

    site: str
    value: Operand
    slope: Operand

    def after(
        self, equation: Equation, operands: Sequence[Operand], operand: int
    ) -> "SiteImage":
        """The image after an operation that is affine in one of its operands."""

        def image(value: Operand) -> Operand:
            return equation.bind(*operands[:operand], value, *operands[operand + 1 :])

        return SiteImage(self.site, *jax.jvp(image, (self.value,), (self.slope,)))
