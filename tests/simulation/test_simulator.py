"""The simulator: the production core on a virtual clock, the papers' figures, and one clear line on bad input."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.core import scheduler as core_module
from services.scheduler.core.builder import StepBuilder
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.policies.orca import Orca
from services.scheduler.core.request import Slo
from services.scheduler.core.step import Features, WorkerLimits
from services.simulator import costs, engine, trace
from services.simulator.engine import Cluster, Simulation
from services.simulator.main import main
from services.simulator.metrics import Measures, measures

A100 = costs.DEVICES["a100-40gb"]
GPT_175B = costs.Roofline(costs.MODELS["gpt3-175b"], A100, shards=8, stages=2)


def cluster(policy: str, max_num_seqs: int, cost: costs.Roofline = GPT_175B, **more: Any) -> Cluster:
    blocks = more.pop("num_blocks", 0) or cost.num_blocks(16, 0.9)
    limits = WorkerLimits(blocks, 16, 2048, max_num_seqs, 512, 2, cost.stages)
    return Cluster(cost, limits, policy=policy, config=SchedulerConfig(prefix_cache=False), **more)


def run(of: Cluster, arrivals: list[trace.Arrival]) -> Measures:
    return measures(Simulation(of, arrivals).run(), of.slo)


def median_latency(of: Cluster, rate: float, count: int = 400) -> float:
    return float(run(of, trace.synthetic("orca", rate, count, seed=0))["normalised_latency_s"]["p50"])


def test_it_is_the_production_core() -> None:
    assert engine.Scheduler is core_module.Scheduler
    assert engine.BATCHING_POLICIES["orca"] is Orca


def test_the_cost_model_goes_through_its_one_point() -> None:
    """GPT-3 175B, 128 input tokens, 32 generated, nothing else running: 95 ms per token."""
    prefill = GPT_175B.stage_s(Features(128, 1, 128 * 129 // 2, 128))
    decodes = sum(GPT_175B.stage_s(Features(1, 1, 128 + i, 128 + i)) for i in range(1, 32))
    assert 2 * (prefill + decodes) / 32 == pytest.approx(0.095, rel=0.01)


def test_orca_s_headline_on_175b() -> None:
    """At 190 ms per token: request-level 0.185 req/s, orca 6.81, each within 25 %."""
    assert median_latency(cluster("request-level", 1), 0.185 * 0.75, count=85) < 0.19
    assert median_latency(cluster("request-level", 1), 0.185 * 1.25, count=200) > 0.19
    assert median_latency(cluster("orca", 32), 6.81 * 0.75) < 0.19
    assert median_latency(cluster("orca", 32), 6.81 * 1.25) > 0.19


def test_a_broken_policy_moves_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orca that admits only when nothing runs is request-level scheduling, and as slow."""
    whole = median_latency(cluster("orca", 32), 4.0)
    fill = Orca.fill

    def only_when_idle(self: Orca, step: StepBuilder) -> None:
        if step.worker.running:
            step.decode(step.limits.max_num_seqs)
        else:
            fill(self, step)

    monkeypatch.setattr(Orca, "fill", only_when_idle)
    assert median_latency(cluster("orca", 32), 4.0) > 3 * whole


def test_uniform_lengths_leave_iteration_level_little_to_gain() -> None:
    """(32, 32): nobody ends early. Orca with max_bs 1 loses to batches of 8, with 8 it keeps up (figure 11)."""
    arrivals = trace.synthetic("32x32", 1e6, 200, seed=0)
    rates = {
        (policy, size): run(cluster(policy, size), arrivals)["req_s"]
        for policy, size in (("request-level", 8), ("orca", 1), ("orca", 8))
    }
    assert rates["orca", 1] < rates["request-level", 8]
    gain = rates["orca", 8] / rates["request-level", 8]
    assert 1 < gain < 3, "two batches fill the two stages; nothing more"


def test_running_requests_as_in_vllm_s_figure_13() -> None:
    """Memory-bound on ShareGPT lengths at 2 req/s: 7.00, 9.81, 13.62, 30.42 within 30 %, in this order."""
    cost = costs.Roofline(costs.MODELS["opt-13b"], A100)
    arrivals = trace.synthetic("sharegpt", 2.0, 1200, seed=0)
    paper = {"orca-max": 7.00, "orca-pow2": 9.81, "orca-oracle": 13.62, "chunked": 30.42}
    found = {policy: run(cluster(policy, 256, cost, num_blocks=983), arrivals)["mean_running"] for policy in paper}
    assert sorted(found, key=lambda policy: found[policy]) == list(paper)
    for policy, running in paper.items():
        assert found[policy] == pytest.approx(running, rel=0.3), policy


@pytest.mark.parametrize("policy", sorted(engine.BATCHING_POLICIES))
@pytest.mark.parametrize("order", sorted(engine.ORDER_POLICIES))
def test_everything_is_served_under_every_policy_and_order(policy: str, order: str) -> None:
    tenants = trace.tenants_of("a=0.2:1,b=0.8")
    arrivals = trace.synthetic("chat", 20.0, 150, seed=3, burstiness=3.0, tenants=tenants)
    cost = costs.Roofline(costs.MODELS["llama3-8b"], costs.DEVICES["l4"], shards=2)
    of = cluster(policy, 16, cost, num_blocks=400, order=order, workers=2, slo=Slo(2.0, 0.2))
    first, second = run(of, arrivals), run(of, arrivals)
    assert first == second, "the same inputs, the same result"
    assert first["requests"] == 150
    assert set(first["tenants"]) == {"a", "b"}


def test_rates_scale_a_recorded_trace() -> None:
    arrivals = trace.synthetic("alpaca", 4.0, 50, seed=1)
    scaled = trace.scaled(arrivals, 8.0)
    assert trace.rate_of(scaled) == pytest.approx(8.0)
    assert [a.prompt_tokens for a in scaled] == [a.prompt_tokens for a in arrivals]


def test_means_of_the_synthetic_traces() -> None:
    """As the papers state them."""
    for name, prompt, output in (("sharegpt", 161, 338), ("alpaca", 19.3, 58.5), ("orca", 272, 64.5)):
        arrivals = trace.synthetic(name, 1.0, 20_000, seed=0)
        assert sum(a.prompt_tokens for a in arrivals) / 20_000 == pytest.approx(prompt, rel=0.08)
        assert sum(a.output_tokens for a in arrivals) / 20_000 == pytest.approx(output, rel=0.08)


def test_a_measured_model_is_fitted_and_never_negative() -> None:
    steps = [
        (Features(t, s, a, a), 0.01 + 0.0002 * t + 0.001 * s)
        for t, s, a in ((1, 1, 50), (16, 16, 900), (128, 1, 8256), (200, 32, 20_000), (64, 64, 5000), (2, 2, 3))
    ]
    model = costs.fit(steps)
    assert min(model.coefficients) >= 0
    for features, seconds in steps:
        assert model.stage_s(features) == pytest.approx(seconds, rel=0.02)


def test_what_takes_long_by_chance_counts_in_a_measured_model() -> None:
    """Its whole is as long as what was measured: near saturation a few percent decide about the queue."""
    rng = random.Random(5)
    shapes = [(rng.choice((1, 4, 16, 64, 300)), rng.randint(1, 32)) for _ in range(4000)]
    steps = [
        (Features(t, s, 50 * t, 50 * t), (0.01 + 0.0006 * t + 0.0003 * s) * rng.lognormvariate(0.0, 0.3))
        for t, s in shapes
    ]
    model = costs.fit(steps)
    predicted = sum(model.stage_s(features) for features, _ in steps)
    assert predicted == pytest.approx(sum(seconds for _, seconds in steps), rel=0.01)


def simulate(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = main(flags)
    out, err = capsys.readouterr()
    return code, out, err


def test_json_is_one_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    flags = ("--policy", "orca,chunked", "--requests", "60", "--rate", "5", "--json", "--html", str(page))
    code, out, err = simulate(capsys, *flags)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert set(result["results"]) == {"orca", "chunked"}
    assert result["results"]["orca"]["requests"] == 60
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "http" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", ""), "nothing is fetched"


def test_searches(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--requests", "60", "--preset", "llama3-8b-h100", "--json")
    _, out, _ = simulate(capsys, *few, "--find-rate", "--target-ms", "20")
    found = json.loads(out)["results"]["chunked"]
    assert found["req_s_at_target"] > 0
    assert found["normalised_latency_s"]["p50"] <= 0.02
    _, out, _ = simulate(capsys, *few, "--find-workers", "--rate", "400", "--ttft-slo-ms", "300")
    found = json.loads(out)["results"]["chunked"]
    assert found["workers"] > 1
    assert found["slo_attainment"] >= 0.99


def test_explain_one_request(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = simulate(capsys, "--requests", "20", "--rate", "50", "--explain", "3")
    assert code == 0
    assert "admitted" in out
    assert "scheduled" in out


BAD_LINES = {
    "no json": "no JSON",
    '{"arrival": -1, "prompt_tokens": 3, "output_tokens": 3}': "arrival",
    '{"arrival": 0, "prompt_tokens": 0, "output_tokens": 3}': "prompt_tokens",
    '{"arrival": 0, "output_tokens": 3}': "prompt_tokens: missing",
    '{"arrival": 0, "prompt_tokens": 3, "output_tokens": "many"}': "output_tokens",
    '{"arrival": 0, "prompt_tokens": 3, "output_tokens": 5, "max_tokens": 4}': "max_tokens",
    '{"arrival": NaN, "prompt_tokens": 3, "output_tokens": 5}': "arrival",
    '{"arrival": 0, "prompt": [1, -5], "output_tokens": 5}': "prompt.1",
    "[1, 2]": "line",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_trace_names_the_line_and_what_is_wrong(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt_tokens": 3, "output_tokens": 3}\n\n' + line + "\n")
    code, out, err = simulate(capsys, "--trace", str(path))
    assert (code, out) == (2, "")
    assert err.startswith(f"orca simulate: {path} line 3: ")
    assert BAD_LINES[line] in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--preset", "none"),
        ("--policy", "orca,none"),
        ("--order", "none"),
        ("--trace", "none"),
        ("--trace", "0x5"),
        ("--model", "none"),
        ("--device", "none"),
        ("--tenants", "a"),
        ("--tenants", "a=-1"),
        ("--max-num-seqs", "0"),
        ("--find-rate",),
        ("--find-workers", "--target-ms", "5"),
        ("--cost", "measured"),
        ("--cost", "measured", "--steps", "none"),
        ("--rate", "-1"),
        ("--model", "llama3-70b", "--device", "l4"),
        ("--requests", "30", "--find-rate", "--target-ms", "0.001"),
    ],
)
def test_bad_flags_are_one_line(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = simulate(capsys, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("orca simulate: ")
    assert err.count("\n") == 1


def test_a_hugging_face_config_is_a_model(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (
        costs.model_of(str(tmp_path)).parameters
        == costs.MODELS["llama3-8b"].parameters
        == pytest.approx(8.03e9, rel=0.01)
    )
