"""An online model of step time, one per worker: what a budget, a swap and a move are worth.

seconds = a + b * tokens + c * sequences + d * attended positions, fitted by recursive least squares with
forgetting; coefficients are kept from going below zero where they are used.
"""

from services.scheduler.core.step import Features

# Units in which the features are about one: they keep the fit well conditioned.
SCALE = (1.0, 1 / 256, 1 / 64, 1 / 65536)
# A prior in those units, weak: a handful of steps overrules it.
PRIOR_S = (0.005, 0.020, 0.002, 0.001)
PRIOR_WEIGHT = 0.1
FORGETTING = 0.995
# A result that is this many times what was foreseen is a pause of the machine, not a property of the step; but several
# in a row are no accident.
OUTLIER = 20.0
MAX_OUTLIERS = 2


class StepTimeModel:
    """Learns from every step. Until it has seen some, its answers are the prior's."""

    def __init__(self) -> None:
        self.num_observed = 0
        self._outliers = 0
        self._theta = list(PRIOR_S)
        self._covariance = [[(1.0 / PRIOR_WEIGHT) * (row == column) for column in range(4)] for row in range(4)]

    def observe(self, features: Features, seconds: float) -> None:
        """A step with these features took so long."""
        if self.num_observed > 8 and seconds > OUTLIER * self.predict(features) and self._outliers < MAX_OUTLIERS:
            self._outliers += 1
            return
        self._outliers = 0
        x = _scaled(features)
        covariance = self._covariance
        px = [sum(p * v for p, v in zip(row, x, strict=True)) for row in covariance]
        gain = 1.0 / (FORGETTING + sum(p * v for p, v in zip(px, x, strict=True)))
        error = seconds - sum(t * v for t, v in zip(self._theta, x, strict=True))
        for i, p in enumerate(px):
            self._theta[i] += p * gain * error
            row = covariance[i]
            for j, q in enumerate(px):
                row[j] = (row[j] - p * gain * q) / FORGETTING
        if max(covariance[i][i] for i in range(4)) > 1e6:  # one kind of step for long: keep numbers finite
            self._covariance = [
                [min(max(v, -1e5), 1e5) if i == j else 0.0 for j, v in enumerate(row)]
                for i, row in enumerate(covariance)
            ]
        self.num_observed += 1

    def predict(self, features: Features) -> float:
        """Seconds that a step with these features takes."""
        return max(1e-6, sum(max(0.0, t) * v for t, v in zip(self._theta, _scaled(features), strict=True)))

    def token_s(self, context: int = 0) -> float:
        """Seconds that one more token of prefill adds, at this context."""
        return max(1e-9, max(0.0, self._theta[1]) * SCALE[1] + max(0.0, self._theta[3]) * SCALE[3] * context)

    def sequence_s(self, context: int = 0) -> float:
        """Seconds that one more decoding sequence adds to a step, at this context."""
        return self.token_s(context) + max(0.0, self._theta[2]) * SCALE[2]

    def budget(self, target_s: float, decodes: Features, context: int) -> int:
        """The most tokens that a step can have, beside its decodes, and still end within target_s. May be 0."""
        return max(0, int((target_s - self.predict(decodes)) / self.token_s(context)))


def _scaled(features: Features) -> tuple[float, float, float, float]:
    return (1.0, features.tokens * SCALE[1], features.sequences * SCALE[2], features.attended * SCALE[3])
