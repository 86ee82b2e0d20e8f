"""Plans, proofs and tables for a terminal. JSON for machines is `resources/documents.py`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warmers.plan import WarmPlan
    from warmers.prefixes import PrefixSet
    from warmers.why import Explanation


def print_plan(plan: "WarmPlan", found: "PrefixSet") -> None:
    """A plan for people."""
    rows = [
        [r.label, f"{r.tokens:,}", str(r.chunks), str(r.present), str(r.missing), str(r.tail_tokens), size(r.bytes)]
        for r in plan.rows()
    ]
    print_table(["prefix", "tokens", "chunks", "there", "missing", "tail", "bytes"], rows)
    for p in found.too_short:
        print(f"{p.label}: {p.shared} shared tokens, {p.short_by} short of a chunk: it can never hit")
    for p in found.found:
        for variation in p.unstable:
            print(f"{p.label}: varies at {variation}")
    for f in found.failed:
        print(f"{f.template}: {f.reason}")
    for label in plan.over_budget:
        print(f"{label}: over l2.budget_bytes, not warmed")
    seconds = f", about {plan.engine_seconds:.0f} s of one engine" if plan.engine_seconds else ""
    deferred = f"; {plan.deferred_chunks} chunks are left for the next run" if plan.deferred_chunks else ""
    steps = f"{plan.compute_tokens:,} tokens in {len(plan.steps)} requests, {size(plan.store_bytes)}{seconds}"
    print(f"To compute: {steps if plan.steps else 'nothing'}{deferred}")


def print_proof(proof: dict[str, Any]) -> None:
    """A proof for people."""
    rows = [
        [
            p["label"],
            f"{p['hit_tokens']:,} / {p['expected_tokens']:,}",
            f"{p['ttft_cold_s']:.2f}",
            f"{p['ttft_warm_s']:.2f}",
            f"{p['speedup']:.1f} x",
            "yes" if p["output_unchanged"] else "NO",
            p["verdict"],
        ]
        for p in proof["prefixes"]
    ]
    print_table(["prefix", "hit / expected", "cold TTFT s", "warm TTFT s", "faster", "same output", "verdict"], rows)
    print(
        f"{proof['hit_rate']:.1%} of {proof['expected_tokens']:,} expected tokens hit from L2 on a cold engine; "
        f"TTFT {proof['ttft_cold_s']:.2f} s cold, {proof['ttft_warm_s']:.2f} s warm ({proof['speedup']:.1f} x); "
        f"output {'unchanged' if proof['output_unchanged'] else 'CHANGED'}"
    )


def print_capacity(document: dict[str, Any]) -> None:
    """Windows, offerings, and when a roll-out may begin. `document`: of resources.capacity.Capacity."""
    rows = [
        [
            *(w["reservation"], w["instance_type"], w["zone"], f"{w['available']} / {w['instances']}", w["state"]),
            *(w["opens_at"], w["admits_until"] or "-", w["drains_at"] or "-", w["note"]),
        ]
        for w in document["windows"]
    ]
    head = ["reservation", "type", "zone", "free", "state", "opens", "admits until", "drains", "note"]
    print_table(head, rows)
    for offer in document["offerings"]:
        each = offer["fee_per_usable_accelerator_hour"] or "no usable hour"
        print(
            f"{offer['instances']} x {offer['instance_type']} in {offer['zone']}, {offer['starts_at']} to "
            f"{offer['ends_at']}: {offer['fee']} {offer['currency']}, {each} for a usable accelerator-hour"
        )
        print(f"  {offer['buy']}")
    at = document["roll_out_at"]
    if at is None:
        print(f"No window that is in sight leaves a roll-out its {document['lead_s'] / 60:.0f} minutes.")
    else:
        print(f"A roll-out may begin {'now' if at <= document['at'] else f'at {at}'}.")


def print_retention(document: dict[str, Any], *, applied: bool) -> None:
    """What happens to chunks, namespaces and stages of weights. `document`: of pipelines.retaining.Retention."""

    def fate(row: dict[str, Any]) -> str:
        if row["removed"]:
            return "removed"
        return "to be removed" if row["remove"] else "stays"

    stages, namespaces, chunks = document["stages"], document["namespaces"], document.get("chunks")
    what = "removed" if applied else "to be removed"
    if stages:
        rows = [[d["digest"][:16], size(d["bytes"]), fate(d), d["why"]] for d in stages]
        print_table(["stage", "bytes", "", "why"], rows)
        going = sum(d["bytes"] for d in stages if d["remove"])
        print(f"{size(going)} of {size(sum(d['bytes'] for d in stages))} of weights {what}\n")
    if namespaces:
        print_table(["namespace", "", "why"], [[d["name"], fate(d), d["why"]] for d in namespaces])
    if chunks is None:
        return
    print()
    if chunks["by_template"]:
        rows = [[row["template"], f"{row['chunks']:,}", size(row["bytes"])] for row in chunks["by_template"]]
        print_table([f"{what} of template", "chunks", "bytes"], rows)
    counted = chunks["removed"] if applied else chunks["remove"]
    print(f"{counted:,} of {chunks['total']:,} warmed chunks {what}, {chunks['needed']:,} are needed")


MAX_CHUNKS = 4
"""Chunks that are not there are listed by key up to so many."""


def print_explanation(explanation: "Explanation") -> None:
    """Why a request does not hit, most important first."""
    if explanation.label is not None:
        print(_what_it_hits(explanation))
    for finding in explanation.findings:
        print(f"- {finding.what}")
        if finding.texts:
            print(f"    warmed:  {finding.texts[0]!r}")
            print(f"    request: {finding.texts[1]!r}")
        print(f"    {finding.do}")
    absent = [chunk for chunk in explanation.chunks if chunk.state != "present"]
    if explanation.chunks:
        print(f"{len(explanation.chunks) - len(absent)} of {len(explanation.chunks)} keys are in L2")
    for chunk in absent[:MAX_CHUNKS]:
        print(f"    chunk {chunk.chunk}, rank {chunk.rank}: {chunk.state}  {chunk.key}")
    if len(absent) > MAX_CHUNKS:
        print(f"    and {len(absent) - MAX_CHUNKS} more")


def _what_it_hits(explanation: "Explanation") -> str:
    about = f"nearest to {explanation.label}"
    if explanation.hit_tokens is None:
        whole = "" if explanation.findings else "; nothing stands in the way of a hit"
        return f"{about} by its text{whole}; token positions need an engine (warmfront up)"
    whole = "" if explanation.findings else ": all there is to hit"
    of = f"of {explanation.full_tokens:,} warmed tokens, {explanation.prompt_tokens:,} in the prompt"
    return f"{about}: it hits {explanation.hit_tokens:,} {of}{whole}"


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Columns as wide as they need; numbers to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    align: list[Callable[[str, int], str]] = [
        str.rjust if rows and all(r[i][:1].isdigit() for r in rows) else str.ljust for i in range(len(head))
    ]
    for row in [head, *rows]:
        print("  ".join(put(cell, width) for put, cell, width in zip(align, row, widths, strict=True)).rstrip())


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            break
        count, unit = count / 1000, {"B": "KB", "KB": "MB", "MB": "GB", "GB": "TB"}[unit]
    return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
