"""The published equations of probabilistic backpropagation in NumPy, gradients by hand:
a reference for the tests.

Hernandez-Lobato & Adams (2015): equations 10 and 11 (Gaussian updates), 13 to 16
(moments of layers), section 3 of the supplement (Gamma updates and the refinement of
the prior factors). Nothing here is shared with the package.
"""

import numpy as np
from scipy.stats import norm


class Published:
    """One network of ReLU layers with weights (out, in + 1), the last for the bias."""

    def __init__(self, weights, shape=6.0, rate=6.0):
        self.m = [np.array(w, dtype=float) for w in weights]
        self.a_w, self.b_w = shape, rate
        self.a, self.b = shape, rate
        self.v = [np.full(w.shape, rate / (shape - 1)) for w in self.m]
        # Natural parameters of the approximate prior factor of each weight, and of its
        # share of the Gamma.
        self.factor = [
            {
                "m": np.zeros(w.shape),
                "v": np.full(w.shape, (shape - 1) / rate),
                "a": np.zeros(w.shape),
                "b": np.zeros(w.shape),
            }
            for w in self.m
        ]

    # -- moments and their derivatives -------------------------------------------------

    def forward(self, x):
        mean, var, tape = np.asarray(x, float), np.zeros(len(x)), []
        for layer, (m, v) in enumerate(zip(self.m, self.v, strict=True)):
            if layer:
                mean, var, local = rectify(mean, var)
                tape.append(local)
            mean, var = np.append(mean, 1.0), np.append(var, 0.0)
            tape.append((mean, var))
            n = len(mean)
            mean, var = m @ mean / np.sqrt(n), (m**2 @ var + v @ mean**2 + v @ var) / n
        return mean[0], var[0], tape

    def backward(self, tape, dmean, dvar):
        """Gradients of a function of the outputs by every mean and variance."""
        dmean, dvar = np.array([dmean]), np.array([dvar])
        gradients = []
        for layer in reversed(range(len(self.m))):
            mean, var = tape.pop()
            m, v, n = self.m[layer], self.v[layer], len(mean)
            dm = np.outer(dmean, mean) / np.sqrt(n) + 2 * m * np.outer(dvar, var) / n
            dv = np.outer(dvar, mean**2 + var) / n
            gradients.insert(0, (dm, dv))
            if layer:
                dx = m.T @ dmean / np.sqrt(n) + 2 * mean * (v.T @ dvar) / n
                dx_var = (m**2 + v).T @ dvar / n
                (mean_m, mean_v, var_m, var_v) = tape.pop()
                dx, dx_var = dx[:-1], dx_var[:-1]
                dmean, dvar = dx * mean_m + dx_var * var_m, dx * mean_v + dx_var * var_v
        return gradients

    # -- learning ----------------------------------------------------------------------

    def learn(self, x, y):
        """One data point."""
        mean, var, tape = self.forward(x)
        noise = [self.b / (self.a + k) for k in (-1, 0, 1)]
        log_z = [-0.5 * (np.log(var + s) + (y - mean) ** 2 / (var + s)) for s in noise]
        total = var + noise[0]
        d_mean = (y - mean) / total
        d_var = -0.5 / total + 0.5 * (y - mean) ** 2 / total**2
        for layer, (dm, dv) in enumerate(self.backward(tape, d_mean, d_var)):
            m, v = self.m[layer], self.v[layer]
            new_m, new_v = m + v * dm, v - v**2 * (dm**2 - 2 * dv)
            good = (new_v > 0) & np.isfinite(new_v) & np.isfinite(new_m)
            self.m[layer], self.v[layer] = (
                np.where(good, new_m, m),
                np.where(good, new_v, v),
            )
        self.a, self.b = gamma_update(self.a, self.b, *log_z)
        return log_z[0] - 0.5 * np.log(2 * np.pi)

    def refine(self):
        """Every prior factor once, weight after weight, sharing one Gamma."""
        for m, v, factor in zip(self.m, self.v, self.factor, strict=True):
            for i in np.ndindex(m.shape):
                precision = 1 / v[i] - factor["v"][i]
                a, b = self.a_w - factor["a"][i], self.b_w + factor["b"][i]
                if precision == 0:
                    continue
                v_c = 1 / precision
                m_c = v_c * (m[i] / v[i] - factor["m"][i])
                if not (0 < v_c < 1e6 and b > 0 and a > 1):
                    continue
                totals = [v_c + b / (a + k) for k in (-1, 0, 1)]
                log_z = [-0.5 * (np.log(s) + m_c**2 / s) for s in totals]
                d_m = -m_c / totals[0]
                d_v = -0.5 / totals[0] + 0.5 * m_c**2 / totals[0] ** 2
                m[i], v[i] = m_c + v_c * d_m, v_c - v_c**2 * (d_m**2 - 2 * d_v)
                self.a_w, self.b_w = gamma_update(a, b, *log_z)
                factor["m"][i], factor["v"][i] = (
                    m[i] / v[i] - m_c / v_c,
                    1 / v[i] - 1 / v_c,
                )
                factor["a"][i], factor["b"][i] = self.a_w - a, -(self.b_w - b)

    def epoch(self, x, y, order):
        total = sum(self.learn(x[i], y[i]) for i in order)
        self.refine()
        return total


def rectify(mean, var):
    """Moments of max(0, N(mean, var)) and their derivatives, by Stein's identities."""
    sd = np.sqrt(var)
    alpha = mean / sd
    cdf, pdf = norm.cdf(alpha), norm.pdf(alpha)
    first = mean * cdf + sd * pdf
    second = (mean**2 + var) * cdf + mean * sd * pdf
    local = (cdf, pdf / (2 * sd), 2 * first * (1 - cdf), cdf - first * pdf / sd)
    return first, np.maximum(second - first**2, 0.0), local


def gamma_update(a, b, z0, z1, z2):
    shape = 1 / (np.exp(z2 - 2 * z1 + z0) * (a + 1) / a - 1)
    rate = 1 / (np.exp(z2 - z1) * (a + 1) / b - np.exp(z1 - z0) * a / b)
    return shape, rate
