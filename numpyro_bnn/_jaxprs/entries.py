"""Where a site enters a program: until then what is computed is an elementwise affine
image of it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from numpyro_bnn._jaxprs.walk import Equation


class SiteImage(NamedTuple):
    """An elementwise affine image of a site: its value, and its slope in the site."""

    site: str
    value: Any
    slope: Any

    def after(
        self, equation: Equation, operands: Sequence[Any], operand: int
    ) -> "SiteImage":
        """The image after an operation that is affine in one of its operands."""

        def image(value: Any) -> Any:
            return equation.bind(*operands[:operand], value, *operands[operand + 1 :])

        return SiteImage(self.site, *jax.jvp(image, (self.value,), (self.slope,)))
