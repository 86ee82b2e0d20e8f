"""Every figure that `make bench` takes, what it says, and the goal it is held against. The one place for goals."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RELATIONS = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is held against."""

    what: str
    relation: Literal["<=", ">=", "="] = "<="
    bound: float | str | None = None
    """A number, or the name of another figure of the same run. None: shown, held against nothing."""

    def met(self, value: float, values: Mapping[str, float]) -> bool | None:
        """None where there is nothing to hold it against."""
        bound = values.get(self.bound) if isinstance(self.bound, str) else self.bound
        return None if bound is None else bool(RELATIONS[self.relation](value, bound))

    def __str__(self) -> str:
        bound = self.bound if isinstance(self.bound, str | None) else f"{self.bound:g}"
        return f"{self.relation} {bound}" if bound is not None else "-"


GOALS: Mapping[str, Goal] = {
    # chapters/hashing.py
    "key_hash_speedup": Goal("our chunk hashes over LMCache's TokenHasher, numpy ids", ">=", 0.9),
    "key_hash_speedup_lists": Goal("the same where LMCache gets lists, its faster form"),
    "key_hash_mtokens_s": Goal("million tokens hashed a second"),
    # chapters/loading.py
    "load_cpu_s": Goal("CPU seconds of loading the definitions beyond `import dagster`", "<=", 0.5),
    # chapters/planning.py
    "plan_10k_s": Goal(
        "10,000 stored prefixes of 4,000 tokens to a written plan: seconds, process start to end", "<=", 60
    ),
    "plan_10k_rss_mb": Goal("the same: peak resident memory, MB", "<=", 2000),
    # chapters/presence.py
    "presence_over_raw_exists": Goal("100,000 keys: existence and size over redis-py's pipelined EXISTS", "<=", 1.3),
    "presence_over_bare_exists": Goal("the same over EXISTS by hiredis on a bare socket"),
    # chapters/rendering.py
    "render_10k_calls_after_one_edit": Goal(
        "engine renders after 1 of 10,000 templates changed", "=", "render_calls_of_one_template"
    ),
    "render_calls_of_one_template": Goal("engine renders that this one template needs alone"),
    # chapters/sensing.py
    "sensor_tick_s": Goal("a tick of the sensor over 10,000 unchanged templates, seconds", "<=", 2),
    "sensor_tick_after_one_edit_s": Goal("a tick that finds one of them changed, and reads that one, seconds"),
    "sensor_cursor_bytes": Goal("its cursor, bytes"),
    # chapters/staging.py
    "stage_speed_over_fastest": Goal(
        "2 GB staged, with digests: speed over the faster of aws s3 cp and s5cmd", ">=", 1.0
    ),
    "stage_mb_s": Goal("the same, MB a second"),
    "stage_peak_rss_mb": Goal("the same: peak resident memory, MB", "<=", 300),
    "stage_peak_rss_mb_small": Goal("of staging 0.5 GB, MB"),
    "restage_bytes": Goal("bytes sent by staging again with nothing changed", "=", 0),
    "verify_speed_over_read": Goal(
        "full verification: speed over plainly reading the objects, both from the server's disk", ">=", 0.8
    ),
    "verify_speed_over_cached_read": Goal("the same from its memory, where the CPU is the limit"),
    "verify_mb_s": Goal("the same, MB a second"),
    # chapters/cold_start.py
    "cold_start_local_s": Goal("start to healthy with the sample model (200 MB) from a local directory, s"),
    "cold_start_streamed_s": Goal("the same streamed from its stage, s"),
    "cold_start_streamed_over_local": Goal("the second over the first"),
    "cold_start_local_rss_mb": Goal("peak resident memory of the largest engine process, from a directory, MB"),
    "cold_start_streamed_rss_mb": Goal("the same, streamed, MB"),
    # chapters/warming.py
    "ttft_speedup": Goal("TTFT of a cold request over TTFT of an L2 hit, median over prefixes", ">=", 10),
    "hit_share": Goal("tokens hit from L2 over expected", "=", 1),
    "computed_over_unique": Goal(
        "tokens that the engine computed while warming over unique planned tokens", "<=", 1.02
    ),
    "noop_tokens": Goal("tokens computed by a second warm with nothing changed", "=", 0),
    "warm_over_raw_prefill": Goal("wall time of warming over raw prefill of the same tokens", "<=", 1.10),
    # chapters/reading.py
    "l2_read_ms_1900_tokens": Goal("time that reading 1,900 tokens from L2 adds to TTFT, plain Valkey, ms"),
    "l2_read_ms_1900_tokens_fs": Goal("the same from files on this machine, ms"),
    "l2_read_ms_1900_tokens_plugin": Goal("the same over TLS through warmfront's adapter, ms"),
    # chapters/gating.py
    "gate_ttft_over_l0": Goal("TTFT of a user's first request after the gate opened, over an L0 hit", "<=", 1.3),
    "gate_seconds_to_warm": Goal("from the gate's start until the sample's hot set was loaded and replayed, s"),
    # chapters/stock.py
    "inventory_1m_s": Goal("inventory of 1,000,000 chunks on a local Valkey: seconds, process start to end", "<=", 60),
    "inventory_1m_rss_mb": Goal("the same: peak resident memory, MB", "<=", 1000),
    # chapters/tiers.py
    "presence_keys_per_s_over_raw_valkey": Goal("existence and size: keys a second over redis-py's pipelined STRLEN"),
    "presence_keys_per_s_over_raw_fs": Goal("the same with files over os.stat in a loop, on a local disk"),
    "presence_keys_per_s_over_raw_s3": Goal("the same in a bucket over a HEAD each, 32 at once"),
    "iam_plugin_load_over_builtin": Goal(
        "8 chunks of 3 MB loaded: warmfront's Valkey adapter over LMCache's own", "<=", 1.3
    ),
    "iam_plugin_load_over_builtin_tls": Goal("the same over TLS", "<=", 1.3),
    "iam_plugin_load_ms": Goal("the same by warmfront's adapter, plain, ms"),
}
