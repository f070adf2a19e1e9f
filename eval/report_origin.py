"""Where the report's figures come from, and what its columns mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.report_cell import Section
from eval.report_html import escaped
from eval.report_learning import Policy

UNKNOWN = "not recorded"
VERSIONS = ("python", "numpy", "torch")


def origin_html(
    results: Mapping[str, Any], sections: Sequence[Section], policies: Sequence[Policy]
) -> str:
    """Command, commit, hardware, environment, policies, and how to run it again."""
    machine = results.get("machine")
    machine = machine if isinstance(machine, Mapping) else {}
    hardware = [machine.get("cpu"), _unit(machine, "cores", "cores")]
    hardware += [_unit(machine, "memory_gib", "GiB"), machine.get("platform")]
    versions = [f"{name} {machine[name]}" for name in VERSIONS if machine.get(name)]
    rows = [
        ("Command", _code(results.get("command"))),
        ("Commit", _code(results.get("revision"))),
        ("Hardware", escaped(", ".join(str(part) for part in hardware if part) or UNKNOWN)),
        ("Environment", escaped(", ".join(versions) or UNKNOWN)),
        ("Simulated node", _listed([_node(section.cell["scenario"]) for section in sections])),
        ("Load", _listed([_load(section.cell["scenario"]) for section in sections])),
        ("Load tables", f"digest {_code(results.get('load_tables'))}"),
        *((f"Policy {policy.name}", _policy(policy)) for policy in policies),
        ("Replay", _replay(sections)),
    ]
    items = "".join(f"<dt>{escaped(name)}</dt><dd>{text}</dd>" for name, text in rows)
    return f'<footer><h2 id="origin">Origin</h2><dl>{items}</dl></footer>'


def _unit(machine: Mapping[str, Any], key: str, unit: str) -> str | None:
    return f"{machine[key]} {unit}" if machine.get(key) is not None else None


def _code(value: object) -> str:
    return f"<code>{escaped(value)}</code>" if value else UNKNOWN


def _listed(values: Sequence[str]) -> str:
    return "<br>".join(escaped(value) for value in dict.fromkeys(values))


def _node(scenario: Mapping[str, Any]) -> str:
    pool = scenario.get("pool_bytes")
    size = f", pool of {pool / 1e9:g} GB" if pool else ""
    return (
        f"{scenario.get('hardware')} profile{size}, {scenario.get('tables')} tables, gather"
        f" bandwidth x {scenario.get('gather_scale'):g}; no figure here was measured on a GPU"
    )


def _load(scenario: Mapping[str, Any]) -> str:
    return (
        f"histories of {scenario.get('mean_history_tokens'):g} tokens, population x"
        f" {scenario.get('population_factor'):g}; the node is busy for"
        f" {scenario.get('utilisation')} of the time at the workload's own best alpha under the"
        " scan-resistant KV cache; plain LRU gets the same requests"
    )


def _policy(policy: Policy) -> str:
    config = policy.about.get("mdp_config")
    config = config if isinstance(config, Mapping) else {}
    facts = [
        f"{key} {value}"
        for key, value in (
            ("features", config.get("features")),
            ("reward", config.get("reward")),
            ("seed", policy.about.get("seed")),
            ("weights", str(policy.about.get("weights_sha256", ""))[:12] or None),
        )
        if value is not None
    ]
    text = f"revision {_code(policy.about.get('git_revision'))}"
    return text + (f"; {escaped(', '.join(facts))}" if facts else "")


def _replay(sections: Sequence[Section]) -> str:
    records = [
        file
        for section in sections
        for columns in section.cell["controllers"].values()
        for file in (columns.get("record") or [])[:1]
    ]
    example = next((r for r in records if "ppo" in str(r)), records[0] if records else "RECORD")
    return (
        "Every episode is a record. In the comparison&#x27;s folder, <code>python -m eval.replay"
        f" {escaped(example)}</code> runs one again and says whether it matches; <code>python -m"
        " eval.report .</code> draws this page again."
    )


def glossary_html() -> str:
    """What the columns mean."""
    terms = (
        ("P99", "mean over the episode's epochs of the epoch's 99th percentile of latency;"
         " interquartile mean over seeds, as all figures that are no ratio or difference"),
        ("QoS", "share of all requests within the SLO"),
        ("gap", "mean distance of alpha from alpha*, the alpha that, held since the episode's"
         " start, gives an epoch its lowest mean P99; says little where the curve is flat"),
        ("P99 regret", "P99 over the P99 at alpha* less 1; below 0 is possible, since alpha* is"
         " found on redrawn arrivals and with alpha held"),
        ("reachable oracle", "the best sequence of alphas under the step limit and with the caches'"
         " real delays, found with all requests known: a bound"),
        ("room recovered", "(P99 of best static − P99) / (P99 of best static − P99 of the reachable"
         " oracle), means over seeds; not given where the room is below 2 %; negative is worse than"
         " best static"),
        ("best static in hindsight", "for each seed, the split of a 0.02 grid with the lowest P99 on"
         " that seed's very requests, which nobody knows beforehand"),
        ("design-point static", "the best split for Steady of the same preset, left there: what an"
         " operator has"),
        ("ties and beats", "by the 95 % interval of the mean difference in P99, paired by seed: it"
         " includes 0, or lies below it. The best PPO policy is picked on these same seeds, which"
         " favours it"),
        ("alpha moved", "sum of the absolute steps of alpha over the episode"),
        ("decision", "wall time of a decision on the machine below, with the comparison's own"
         " checks"),
        ("saturated", "busy for more than 0.95 of the time, or a growing backlog: the figures would"
         " depend on how long one waits, so none is given"),
    )  # fmt: skip
    items = "".join(f"<dt>{escaped(t)}</dt><dd>{escaped(d)}.</dd>" for t, d in terms)
    return f"<details><summary>What the columns mean</summary><dl>{items}</dl></details>"
