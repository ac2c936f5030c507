"""tune: what was measured is kept."""

import json
from functools import partial

from slipstream.measure import cost


def test_what_was_measured_is_kept_for_each_machine(run, model, tmp_path, monkeypatch):
    """One machine's or precision's costs in the place of another's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "cost_curve", partial(cost.cost_curve, contexts=(16,), batches=(1,)))
    path, plot = tmp_path / "slipstream" / "costs.json", tmp_path / "costs.svg"
    path.parent.mkdir()
    path.write_text('{"another machine": {"a model": {"passes": []}}}')
    code, out, _ = run("tune", "--measure", "--target", model, "--dtype", "float64", "--plot", str(plot))
    assert code == 0
    assert "rows" in out
    (_, others), (place, here) = json.loads(path.read_text()).items()
    assert others == {"a model": {"passes": []}}
    assert place.endswith("float64")
    assert here[model]["passes"]
    assert "<svg" in plot.read_text()
