"""What the server's own description of itself allows: schemathesis asks it, and nothing ends in a 5xx."""

from contextlib import suppress

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, of the extra dev")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402

EXAMPLES = 40


def test_no_request_that_the_description_allows_ends_in_a_5xx(serve, listening):
    """Nor one that it does not allow. What takes long is cut: the answers are of 128 tokens at most."""
    server = serve(rows=4, queue=200)
    with listening(server) as url:
        described = schemathesis.openapi.from_url(f"{url}/openapi.json")
        asked = dict.fromkeys(("positive", "negative"), 0)
        for result in described.get_all_operations():
            operation = result.ok()
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

                @given(case=operation.as_strategy(generation_mode=mode))
                @settings(
                    max_examples=EXAMPLES,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                    database=None,
                )
                def ask(case):
                    asked[mode.value] += 1  # noqa: B023 (it is called here alone)
                    assert case.call(base_url=url).status_code < 500

                with suppress(Unsatisfiable):  # nothing that takes no input can be given a wrong one
                    ask()
    assert min(asked.values()) >= 2 * EXAMPLES
    assert not server.worker.running
