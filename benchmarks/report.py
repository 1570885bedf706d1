"""Render the tables of op timings in docs/benchmarks.md from the raw lines.

    python -m benchmarks.report

Replaces what stands between the two marks of that page; everything else on it is written by hand.
A later line of the same case stands in for an earlier one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINES = ROOT / "benchmarks" / "results" / "ops.jsonl"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tables of ops.jsonl -->", "<!-- end of tables -->"

TITLES = {
    "kda_step": "KDA, one token for a batch: convolution, gate, norms, recurrence, gated norm",
    "kda_chunks": "KDA prefill",
    "experts": "MXFP4 experts",
    "mla_steps": "Latent attention, one token, absorbed",
    "mla_chunks": "Latent attention of a prompt, keys and values expanded on the way",
    "attnres": "Attention residual with the pending add and the norm",
    "route": "Router's choice, 16 of 896",
    "router": "Router's logits of a prompt: three products in bf16, or one in fp32",
    "front": "First products of a layer against their weights' bytes",
    "draw": "Choice of tokens over 163,840 ids",
    "tower": "Vision tower",
    "digest": "Digest and finite check of a request",
    "conv": "Short convolution of a prompt",
    "rms_norm": "RMS norm",
    "situ": "SiTU",
    "parts": "A decode step of those layers by part",
    "slice": "Whole passes of four layers, decode captured in a CUDA graph",
}

EARLIER_NAMES = {"body, two products": "bf16 unit, two products"}  # what the same was called once


def latest(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Lines by op, case and who; the last of its kind wins, whatever it was called before."""
    tables: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for line in lines:
        case = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in line["case"].items())
        who = EARLIER_NAMES.get(line["who"], line["who"])
        tables.setdefault(line["op"], {}).setdefault(case, {})[who] = line
    return tables


def cell(line: dict[str, Any] | None) -> str:
    """Microseconds, and the share of the floor."""
    if line is None:
        return ""
    if "error" in line:
        return str(line["error"])
    return f"{line['us']:,.1f} ({line['of_floor']:.2f})"


def table(cases: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """One op's table: a row a case, a column for each who."""
    who = list(dict.fromkeys(name for lines in cases.values() for name in lines))
    rows = [f"| case | floor | {' | '.join(who)} |", f"|---|---|{'---|' * len(who)}"]
    for case, lines in cases.items():
        floor = next(iter(lines.values()))["floor_us"]
        cells = " | ".join(cell(lines.get(name)) for name in who)
        rows.append(f"| {case} | {floor:,.1f} | {cells} |")
    return rows


def parts(lines: Iterable[dict[str, Any]]) -> list[str]:
    """The table of a step's parts: a row a part, with its launches."""
    rows = ["| step | part | floor | took | of the floor | launches |", "|---|---|---|---|---|---|"]
    for line in lines:
        case = dict(line["case"])
        part = case.pop("part")
        what = ", ".join(f"{key} {value}" for key, value in case.items())
        share = f"{line['of_floor']:.2f}" if line["floor_us"] else ""
        rows.append(
            f"| {what} | {part} | {line['floor_us']:,.1f} | {line['us']:,.1f} | {share} | "
            f"{line['launches']} |"
        )
    return rows


def render(lines: Iterable[dict[str, Any]]) -> str:
    """All tables, in the order of `TITLES`."""
    found = list(lines)
    tables = latest(found)
    machines = {json.dumps(line["machine"], sort_keys=True): line["machine"] for line in found}
    told = "; ".join(", ".join(f"{k} {v}" for k, v in m.items()) for m in machines.values())
    pieces = [f"Microseconds, and in brackets the share of the floor. Machine: {told}.", ""]
    for op, title in TITLES.items():
        if op == "parts" and op in tables:
            found_parts = parts(line for who in tables[op].values() for line in who.values())
            pieces += [f"### {title}", "", *found_parts, ""]
        elif op in tables:
            pieces += [f"### {title}", "", *table(tables[op]), ""]
    return "\n".join(pieces)


def main() -> None:
    """Rewrite the page between its marks."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    tables = render(json.loads(line) for line in LINES.read_text().splitlines())
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}")


if __name__ == "__main__":
    main()
