"""The figures are those of the answers."""

import re


def test_figures_add_up(client):
    here = client()
    asked = {"model": "tiny", "prompt": "abcabcabc", "max_tokens": 30, "n": 2}
    usages = [here.post("/v1/completions", asked)[1]["usage"] for _ in range(2)]
    _, _, body = here.loop.run_until_complete(here.send("/metrics", method="GET"))
    lines = re.findall(r"^slipstream:(\S+) (\S+)$", body.decode(), re.MULTILINE)
    found = {name: float(value) for name, value in lines}
    assert found["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages) == 120
    assert found["prompt_tokens_total"] == 2 * sum(usage["prompt_tokens"] for usage in usages)  # each choice
    drafted, accepted = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
    assert found[drafted] == sum(usage["drafted_tokens"] for usage in usages) > 0
    assert found[accepted] == sum(usage["accepted_tokens"] for usage in usages)
    assert found["mean_accepted_length"] == (120 - 4) / found["spec_decode_num_drafts_total"]
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0
    assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 4
    assert found["time_per_output_token_seconds_count"] == 120 - 4
    assert found['request_success_total{finished_reason="length"}'] == 4
    assert found['http_responses_total{status="200"}'] == 2
