"""What the dashboards show: a page a row of the story, a panel a question, a query an answer.

`python -m deploy.monitoring.build` writes them as Grafana's JSON. Every sample has labels
`room` and `replica` of who counted it; the router's own counters have room="router".
Longer than other files because it is one list.

Longer than 300 lines because it is a list of panels, as a reader goes through them.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = "1m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: `queries` maps a legend to PromQL; `unit` is Grafana's id of a unit."""

    title: str
    unit: str
    queries: dict[str, str]
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One dashboard."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


def once(expr: str) -> str:
    """Each replica once, however many routers tell of it."""
    return f"max without (instance, pod, container, endpoint) ({expr})"


def gauge(metric: str, room: str = "") -> str:
    """A gauge, by replica."""
    return once(f"{metric}{{{in_room(room)}}}" if room else metric)


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Per second, summed, by the labels `by`."""
    group = f" by ({by})" if by else ""
    return f"sum{group} ({once(f'rate({metric}{{{where}}}[{WINDOW}])')})"


def more(metric: str, by: str = "") -> str:
    """How many in five minutes; 0 where nothing was ever counted."""
    group = f" by ({by})" if by else ""
    return f"sum{group} ({once(f'increase({metric}[5m])')}) or vector(0)"


def quantile(share: float, metric: str, by: str = "", where: str = "") -> str:
    """A quantile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return (
        f"histogram_quantile({share:g}, "
        f"sum by ({labels}) ({once(f'rate({metric}_bucket{{{where}}}[{WINDOW}])')}))"
    )


def mean(metric: str, by: str = "", where: str = "") -> str:
    """The mean of a histogram's observations."""
    return f"{rate(metric + '_sum', by, where)} / {rate(metric + '_count', by, where)}"


def spread(metric: str, where: str = "") -> dict[str, str]:
    """Median, 95th and 99th percentile."""
    return {
        f"p{share * 100:g}": quantile(share, metric, where=where) for share in (0.5, 0.95, 0.99)
    }


def in_room(room: str) -> str:
    """The selector of one room's samples."""
    return f'room="{room}"'


def share_used(kind: str, room: str) -> str:
    """Share of slots or pages taken, by replica."""
    inside = in_room(room)
    return once(f"1 - baton_free_{kind}{{{inside}}} / (baton_total_{kind}{{{inside}}} > 0)")


def _common(room: str) -> tuple[Panel, ...]:
    return (
        Panel(
            title="Jobs waiting", unit="short", queries={"{{replica}}": gauge("baton_queued", room)}
        ),
        Panel(
            title="Oldest job",
            unit="s",
            queries={"{{replica}}": gauge("baton_oldest_seconds", room)},
        ),
        Panel(
            title="Resident memory",
            unit="bytes",
            queries={"{{replica}}": gauge("baton_resident_bytes", room)},
        ),
    )


OVERVIEW = Page(
    uid="baton-overview",
    title="Baton: overview",
    panels=(
        Panel(title="Ready", unit="bool_yes_no", queries={"{{replica}}": "baton_ready"}),
        Panel(
            title="Requests a second",
            unit="reqps",
            queries={"{{outcome}}": rate("baton_requests_total", "outcome")},
        ),
        Panel(
            title="Goodput",
            unit="percentunit",
            queries={
                "within the objective": rate("baton_good_requests_total")
                + " / "
                + rate("baton_requests_total")
            },
        ),
        Panel(title="First token", unit="s", queries=spread("baton_first_token_seconds")),
        Panel(
            title="Where the first token's time goes",
            unit="s",
            queries={"{{part}}": mean("baton_first_token_part_seconds", "part")},
        ),
        Panel(title="Time per token", unit="s", queries=spread("baton_next_token_seconds")),
        Panel(
            title="Tokens a second",
            unit="short",
            queries={
                "prompt": rate("baton_prefill_tokens_total"),
                "answer": rate("baton_decode_tokens_total"),
            },
        ),
        Panel(
            title="Replicas", unit="short", queries={"{{stage}}": "max by (stage) (baton_replicas)"}
        ),
    ),
)

ROUTER = Page(
    uid="baton-router",
    title="Baton: router",
    panels=(
        Panel(
            title="Answers by status",
            unit="reqps",
            queries={"{{status}}": rate("baton_http_responses_total", "status")},
        ),
        Panel(
            title="Requests",
            unit="short",
            queries={
                "running": "sum (baton_requests_running)",
                "waiting for a reservation": "sum (baton_admission_queued)",
            },
        ),
        Panel(
            title="Longest wait for a reservation",
            unit="s",
            queries={"{{replica}}": "baton_admission_oldest_seconds"},
        ),
        Panel(
            title="Wait for a reservation", unit="s", queries=spread("baton_admission_wait_seconds")
        ),
        Panel(title="Request in all", unit="s", queries=spread("baton_request_seconds")),
        Panel(
            title="Second passes",
            unit="short",
            queries={
                "prefilled again": more("baton_reprefills_total"),
                "after a death: {{died}}": more("baton_replays_total", "died"),
            },
        ),
        Panel(
            title="Probes of pairs",
            unit="short",
            queries={
                "{{outcome}}": rate("baton_probes_total", "outcome"),
                "pairs ready": "max (baton_pairs_ready)",
            },
        ),
        Panel(
            title="Readers dropped",
            unit="short",
            queries={"not reading": more("baton_slow_readers_total")},
        ),
        Panel(
            title="Silent replicas",
            unit="short",
            queries={"silent": f"sum ({gauge('baton_replica_silent')})"},
        ),
        Panel(
            title="Resident memory",
            unit="bytes",
            queries={"{{replica}}": f"baton_resident_bytes{{{in_room('router')}}}"},
        ),
    ),
)

ENCODER = Page(
    uid="baton-encoder",
    title="Baton: encoder",
    panels=(
        Panel(
            title="Images a second",
            unit="short",
            queries={
                "encoded": rate("baton_images_total"),
                "from the cache": rate("baton_image_hits_total") + " or vector(0)",
            },
        ),
        Panel(
            title="Patches a second",
            unit="short",
            queries={"patches": rate("baton_encode_patches_sum")},
        ),
        Panel(title="Pass of the tower", unit="s", queries=spread("baton_encode_seconds")),
        Panel(title="Patches a pass", unit="short", queries={"mean": mean("baton_encode_patches")}),
        Panel(
            title="Embeddings",
            unit="short",
            queries={
                "held {{replica}}": gauge("baton_embeddings_held"),
                "cached {{replica}}": gauge("baton_embeddings_cached"),
            },
        ),
        Panel(
            title="Embedding memory used",
            unit="percentunit",
            queries={"{{replica}}": share_used("pages", "encoder")},
        ),
        *_common("encoder"),
    ),
)

PREFILL = Page(
    uid="baton-prefill",
    title="Baton: prefill",
    panels=(
        Panel(
            title="Prompt tokens a second",
            unit="short",
            queries={"{{replica}}": rate("baton_prefill_tokens_total", "replica")},
        ),
        Panel(
            title="From a prefix cache",
            unit="percentunit",
            queries={
                "share of prompts": rate("baton_prefix_tokens_total")
                + " / "
                + rate("baton_prompt_tokens_total")
            },
        ),
        Panel(title="Wait for a step", unit="s", queries=spread("baton_prefill_wait_seconds")),
        Panel(title="Prompt in all", unit="s", queries=spread("baton_prefill_seconds")),
        Panel(title="One step", unit="s", queries=spread("baton_prefill_step_seconds")),
        Panel(
            title="Tokens a step", unit="short", queries={"mean": mean("baton_prefill_step_tokens")}
        ),
        Panel(
            title="Queued tokens",
            unit="short",
            queries={"{{replica}}": gauge("baton_queued_tokens", "prefill")},
        ),
        Panel(
            title="Slots used",
            unit="percentunit",
            queries={"{{replica}}": share_used("slots", "prefill")},
        ),
        Panel(
            title="Pages used",
            unit="percentunit",
            queries={"{{replica}}": share_used("pages", "prefill")},
        ),
        *_common("prefill"),
    ),
)

DECODE = Page(
    uid="baton-decode",
    title="Baton: decode",
    panels=(
        Panel(
            title="Tokens a second",
            unit="short",
            queries={"{{replica}}": rate("baton_decode_tokens_total", "replica")},
        ),
        Panel(
            title="Steps a second",
            unit="short",
            queries={"{{replica}}": rate("baton_decode_steps_total", "replica")},
        ),
        Panel(title="One step", unit="s", queries=spread("baton_decode_step_seconds")),
        Panel(title="Choices a step", unit="short", queries={"mean": mean("baton_decode_batch")}),
        Panel(
            title="Slots used",
            unit="percentunit",
            queries={"{{replica}}": share_used("slots", "decode")},
        ),
        Panel(
            title="Pages used",
            unit="percentunit",
            queries={"{{replica}}": share_used("pages", "decode")},
        ),
        Panel(
            title="Reservations refused",
            unit="short",
            queries={"refused": rate("baton_reservations_refused_total") + " or vector(0)"},
        ),
        Panel(
            title="Given up",
            unit="short",
            queries={
                "reader left": more("baton_cancelled_total"),
                "not finite": more("baton_poisoned_total"),
            },
        ),
        Panel(
            title="Busiest expert",
            why="Its rows over the mean of all, in the worst layer; 1 is even, or not known yet",
            unit="short",
            queries={"{{replica}}": gauge("baton_expert_skew", "decode") + " or vector(1)"},
        ),
        Panel(
            title="Busiest share of experts",
            why="Rows over the mean of all shares at the last look; 1 is even, or never looked at",
            unit="short",
            queries={
                "{{replica}}": gauge("baton_expert_imbalance", "decode") + " or vector(1)",
                "{{replica}} moved": rate("baton_experts_moved_total", "replica") + " or vector(0)",
            },
        ),
        *_common("decode"),
    ),
)

HAND_OFF = Page(
    uid="baton-hand-off",
    title="Baton: hand-off",
    panels=(
        Panel(
            title="Hand-off to decode",
            unit="s",
            queries={
                "wait": mean("baton_decode_wait_seconds"),
                "pull": mean("baton_pull_seconds", where=in_room("decode")),
                "verify": mean("baton_verify_seconds", where=in_room("decode")),
            },
        ),
        Panel(
            title="Pull, slowest hundredth",
            unit="s",
            queries={"{{room}}": quantile(0.99, "baton_pull_seconds", "room")},
        ),
        Panel(
            title="Bytes moved a second",
            unit="Bps",
            queries={"into {{room}}": rate("baton_pulled_bytes_total", "room")},
        ),
        Panel(
            title="Tickets by ending",
            unit="short",
            queries={"{{outcome}}": rate("baton_tickets_total", "outcome")},
        ),
        Panel(
            title="Tickets under lease",
            unit="short",
            queries={"{{room}}": f"sum by (room) ({gauge('baton_tickets_held')})"},
        ),
        Panel(
            title="Refused, by part",
            unit="short",
            queries={"{{part}}": more("baton_handoffs_refused_total", "part")},
        ),
        Panel(
            title="READs that failed",
            unit="short",
            queries={
                "{{code}}": more("baton_transfer_errors_total", "code"),
                "NIXL: {{kind}}": more("baton_nixl_errors_total", "kind"),
            },
        ),
        Panel(
            title="Quarantine",
            unit="short",
            queries={"{{room}} {{replica}}": gauge("baton_quarantine")},
        ),
    ),
)

SCALING = Page(
    uid="baton-scaling",
    title="Baton: scaling",
    panels=(
        Panel(
            title="Replicas", unit="short", queries={"{{stage}}": "max by (stage) (baton_replicas)"}
        ),
        Panel(
            title="Wanted",
            unit="short",
            queries={
                "{{stage}}": "max by (stage) (baton_scaling_target)"
                " or max by (stage) (baton_replicas)"
            },
        ),
        Panel(
            title="Changes of target in ten minutes",
            unit="short",
            queries={
                "{{stage}}": "max by (stage) (increase(baton_scaling_changes_total[10m]))"
                " or vector(0)"
            },
        ),
        Panel(
            title="Frozen for want of figures",
            unit="bool_yes_no",
            queries={"{{stage}}": "max by (stage) (baton_scaling_frozen) or vector(0)"},
        ),
        Panel(
            title="Work waiting",
            unit="short",
            queries={
                "jobs in {{room}}": f"sum by (room) ({gauge('baton_queued')})",
                "requests at the door": "sum (baton_admission_queued)",
            },
        ),
        Panel(
            title="Decode slots used",
            unit="percentunit",
            queries={
                "all replicas": f"1 - sum ({gauge('baton_free_slots', 'decode')})"
                f" / sum ({gauge('baton_total_slots', 'decode')})"
            },
        ),
    ),
)

PAGES = (OVERVIEW, ROUTER, ENCODER, PREFILL, DECODE, HAND_OFF, SCALING)
