"""Figures for Prometheus, under vLLM's names where it has them, with a prefix of our own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from slipstream.serve.worker import Update, Worker, cached_tokens

SHORT = (0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)  # seconds
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """What was served since the start."""

    def __init__(self, worker: Worker) -> None:
        self.registry = CollectorRegistry()
        for name, what, value in (
            ("num_requests_running", "texts under way", lambda: worker.running),
            ("num_requests_waiting", "texts in the queue", lambda: worker.waiting),
            ("mean_accepted_length", "τ: tokens per target pass after the prompt's", self._tau),
        ):
            Gauge(f"slipstream:{name}", what, registry=self.registry).set_function(value)
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts")
        self.shared = self._counter("prompt_tokens_cached", "tokens of prompts that were not read again")
        self.tokens = self._counter("generation_tokens", "tokens of answers")
        self.passes = self._counter("spec_decode_num_drafts", "rounds, counted for each text")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "depth of the guesses of these rounds")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "guesses accepted")
        self.finished = self._counter("request_success", "answers, by why they ended", "finished_reason")
        self.responses = self._counter("http_responses", "responses, by status", "status")
        self.queued = self._histogram("request_queue_time_seconds", "from arrival to the prompt's pass", LONG)
        self.first = self._histogram("time_to_first_token_seconds", "from arrival to the first token", LONG)
        self.later = self._histogram("time_per_output_token_seconds", "of each token after the first", SHORT)
        self.whole = self._histogram("e2e_request_latency_seconds", "from arrival to the last token", LONG)
        self._passes = self._kept = 0
        self.typical_seconds = 1.0  # of an answer, lately

    def hear(self, update: Update, since: float) -> None:
        """Count what a pass brought a request; `since`: when it had an update before."""
        request = update.request
        self.tokens.inc(update.tokens)
        if update.step is None and update.tokens:  # the prompt's pass
            self.prompt_tokens.inc(len(request.prompt))
            self.shared.inc(cached_tokens(request))
            self.queued.observe(request.began - request.arrived)
            self.first.observe(update.at - request.arrived)
        if update.step is not None:
            self.passes.inc()
            self.drafted.inc(update.step.drafted)
            self.accepted.inc(update.step.accepted)
            self._passes += 1
            self._kept += update.step.kept
            for _ in range(update.tokens):
                self.later.observe((update.at - since) / update.tokens)
        if update.finish is not None:
            self.finished.labels(update.finish).inc()
            self.whole.observe(update.at - request.arrived)
            self.typical_seconds += 0.1 * (update.at - request.arrived - self.typical_seconds)

    def _tau(self) -> float:
        return self._kept / self._passes if self._passes else 1.0

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"slipstream:{name}", what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"slipstream:{name}", what, buckets=buckets, registry=self.registry)
