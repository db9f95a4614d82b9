"""What a server says of itself to Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counts and times of one server.

    Args:
        waiting: requests that wait at the moment.
        held: bytes of those and of those that are being scored.
        arriving: bytes that have come of those that are on their way.
    """

    def __init__(self, *, waiting: Callable[[], int], held: Callable[[], int], arriving: Callable[[], int]) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.requests = Counter(
            "flowrl_requests", "Requests to score, by the status of the answer.", ["status"], registry=registry
        )
        self.samples = Counter("flowrl_samples", "Pictures, videos or latents that were scored.", registry=registry)
        self.lost = Counter("flowrl_scorer_lost", "Times that the scorer hung or died.", registry=registry)
        self.request_seconds = Histogram(
            "flowrl_request_seconds",
            "From the first byte of a request to its scores.",
            buckets=SECONDS,
            registry=registry,
        )
        self.score_seconds = Histogram(
            "flowrl_score_seconds", "Of one batch in the scorer.", buckets=SECONDS, registry=registry
        )
        self.batch_requests = Histogram(
            "flowrl_batch_requests", "Requests that were scored together.", buckets=SIZES, registry=registry
        )
        for name, about, value in (
            ("flowrl_waiting_requests", "Requests in the queue.", waiting),
            ("flowrl_held_bytes", "Of requests in the queue and in the scorer.", held),
            ("flowrl_arriving_bytes", "Of requests that are on their way, what has come of them.", arriving),
        ):
            Gauge(name, about, registry=registry).set_function(value)

    def text(self) -> bytes:
        """The page of `/metrics`."""
        return generate_latest(self._registry)
