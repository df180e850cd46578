"""Student's t: its tail, its quantiles, and what skewness makes of them."""

import math
from statistics import NormalDist

# By how much an end of an interval moves out, and in, relative to Hall's formula. Few documents
# show less skewness than there is, and of what they show much is chance, so that ends that move in
# as far cover too little. On the log-odds there is less of it (tests/evaluation/simulated.py).
OUT, IN, IN_ON_ODDS = 1.3, 0.4, 0.75


def reach(t: float, skewness: float, inward: float = IN) -> float:
    """How many errors an end lies away whose tail is that of `t` without skewness.

    skewness: of the estimate, towards that end. Hall's cubic, inverted (J. R. Statist. Soc. B 54,
    1992, 221): t -> t + skewness (2 t^2 + 1) / 6 + ...
    """
    s = skewness * (OUT if skewness > 0 else inward)
    return 3 * (1 - math.cbrt(1 - s * (t + s / 6))) / s if abs(s) > 1e-6 else t


def unskewed(distance: float, skewness: float) -> float:
    """The t whose `reach` is `distance`."""
    s = skewness * (OUT if skewness > 0 else IN)
    moved = s * distance / 3
    return distance * (1 - moved + moved**2 / 3) - s / 6


def student_t_tail(t: float, degrees: float) -> float:
    """P(T > t) of Student's t, whose degrees of freedom need not be whole; NaN of NaN."""
    if t <= 0:
        return 1.0 - student_t_tail(-t, degrees) if t < 0 else 0.5
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2


def student_t_quantile(degrees: float, tail: float = 0.025) -> float:
    """The t that is exceeded with probability `tail`, below one half.

    Newton's method from the normal quantile, which lies below; the tail is convex.
    """
    t = NormalDist().inv_cdf(1 - tail)
    scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    for _ in range(100):
        density = math.exp(scale - (degrees + 1) / 2 * math.log1p(t * t / degrees))
        step = (student_t_tail(t, degrees) - tail) * math.sqrt(degrees * math.pi) / density
        t += step
        if abs(step) < 1e-12 * t:
            break
    return t


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), to about 1e-13.

    By its continued fraction (Abramowitz and Stegun, 26.5.8), evaluated by Lentz's method, on the
    side on which it converges fast.
    """
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    ratio, inverse = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = inverse
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            inverse, ratio = 1 / (1 + term * inverse), 1 + term / ratio
            value *= inverse * ratio
        if abs(inverse * ratio - 1) < 1e-15:
            break
    log_front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b)
    return math.exp(log_front - math.lgamma(a) - math.lgamma(b)) * value / a
