"""What a load generator counted over a stretch of time: latencies, and how requests ended."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from eval.load_client import Answer

OUTCOMES = ("served", "refused", "failed", "lost")


class Totals:
    """Counts of one stretch of time."""

    def __init__(self) -> None:
        self.sent = 0
        self.outcomes: Counter[str] = Counter()
        self.asked_again = 0
        """Requests whose user the node did not know: it got the whole history then."""
        self.wrong_length = 0
        """Answers that told of a history of another length than the client's."""
        self.details: Counter[str] = Counter()
        self._latency_ms: list[float] = []

    def add(self, answer: Answer, latency_ms: float) -> None:
        """Count an answer; the latency is kept if it was served."""
        self.outcomes[answer.outcome] += 1
        self.asked_again += answer.asked_again
        self.wrong_length += answer.wrong_length
        if answer.detail:
            self.details[answer.detail] += 1
        if answer.outcome == "served":
            self._latency_ms.append(latency_ms)

    def percentile_ms(self, share: float) -> float:
        """Of the latencies; 0 without any."""
        if not self._latency_ms:
            return 0.0
        return float(np.percentile(self._latency_ms, 100 * share, method="inverted_cdf"))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "sent": self.sent,
            **{name: self.outcomes[name] for name in OUTCOMES},
            "asked_again": self.asked_again,
            "wrong_length": self.wrong_length,
            "p50_ms": self.percentile_ms(0.5),
            "p99_ms": self.percentile_ms(0.99),
            "details": dict(self.details),
        }
