"""The band a measured temperature should lie in."""

from statistics import NormalDist

from numpyro_bnn._checks import argument_error

__all__ = ["temperature_band"]


def temperature_band(
    num_parameters: int, temperature: float = 1.0, level: float = 0.95
) -> tuple[float, float]:
    r"""Central band of the temperature of one state: quantiles of T chi^2_P / P (Wilson and Hilferty).

    The kinetic temperature m' M^-1 m / P of one state has exactly this law at stationarity; the configurational one
    has it on a centered Gaussian target with exact gradients. Statistics of a draw are means over its steps, so a
    kinetic value outside means that something is wrong: gradient noise heats, or the chain has not arrived. Values
    inside may still have a mean that is off.

    :param num_parameters: P.
    :param temperature: T of the target.
    :param level: probability of the band.
    :return: lower and upper bound.
    :raises ValueError: for fewer than one parameter, or a level outside (0, 1).

    Reference: Wenzel et al. (2020), appendix on temperature diagnostics; Wilson & Hilferty (1931).

    >>> [round(bound, 2) for bound in temperature_band(50)]
    [0.65, 1.43]
    """
    if num_parameters < 1 or not 0 < level < 1:
        raise argument_error(
            "infer.temperature_band",
            "num_parameters, level",
            (num_parameters, level),
            "Pass at least 1, in (0, 1).",
        )
    z, spread = NormalDist().inv_cdf(0.5 + level / 2), 2 / (9 * num_parameters)
    low, high = (temperature * (1 - spread + sign * z * spread**0.5) ** 3 for sign in (-1, 1))
    return max(low, 0.0), high
