"""The rows of the table: a figure, the floor of the same harness, the target, the ratio to the yardstick.

Not here: how figures are measured (runs.py).
"""

from runs import MODES

HEADER = ["one core, IPv4 TCP, 64 B", "figure", "floor", "target", "x yardstick", "target is"]
PACKET_Y = 1.9  # the target of a packet of `nat` whose flow is in the cache, in yardsticks
FLOWS_L = {1_000: 0, 1_000_000: 3.3, 4_000_000: 5.2}  # random cache lines that it may take in addition, by number of flows
TUNNEL_NS = {"ipip": 4, "gue": 4}  # headers in front may take that in addition
V6_FACTOR, V6_L = 1.3, {1_000: 0, 1_000_000: 5.5}  # IPv6: a multiple of IPv4's time with 1,000 flows, and cache lines
NEW_FLOW_Y = {"v4": 15.5, "v6": 16.5, "snat-load": 17}
HANDOVER_Y = 2
SERVICES_L = 3  # 10,000 Services instead of one
MIX_FACTOR = 1.3  # mixed traffic: a multiple of the mean of what it is mixed of
# Shares of the runs that mixed traffic is mixed of, in twentieths (dataplane/bench/src/scenario/part.rs).
MIX = {"nat": 8, "nat v6": 4} | {f"{mode}{family}": 1 for mode in MODES if mode != "nat" for family in ("", " v6")}
MIX_NEW = {"new-flows v4": 0.6, "new-flows v6": 0.4}  # one packet in a hundred opens a flow


class Figures:
    """What was measured, by the names of the runs. The methods make rows, which are lists of texts."""

    def __init__(self, stored):
        self.runs = stored["runs"]
        self.skipped = stored["skipped"]

    def report(self, run):
        return self.runs[run]["report"]

    def ns(self, run):
        return self.report(run)["ns_per_packet"]

    def yardstick(self, run):
        """ns of the yardstick when the run was measured, or None."""
        return self.runs[run]["yardstick_ns"]

    def line_ns(self):
        """ns of a random cache line that is fetched ahead."""
        return self.report("none")["memory_line"]["fetched_ahead_ns"]

    def ratio(self, run, ns):
        yardstick = self.yardstick(run)
        return f"{ns / yardstick:.2f}" if yardstick else "-"

    def per_packet(self, what, run, limit_ns=None, limit_text=""):
        """ns per packet, with the harness."""
        target, met = "-", "-"
        if limit_ns is not None:
            target, met = f"<= {limit_ns:.1f}{limit_text}", verdict(self.ns(run) <= limit_ns)
        elif limit_text:
            target = f"<={limit_text}"
        floor = f"{self.report(run)['floor_ns']:.1f}"
        return [what, f"{self.ns(run):.1f} ns", floor, target, self.ratio(run, self.ns(run)), met]

    def in_units(self, what, run, lines, more_ns):
        """ns per packet; the target is `PACKET_Y` yardsticks, some cache lines, and `more_ns`."""
        yardstick = self.yardstick(run)
        limit_ns = yardstick and PACKET_Y * yardstick + lines * self.line_ns() + more_ns
        text = f"{PACKET_Y} y" + (f" + {lines} L" if lines else "") + (f" + {more_ns}" if more_ns else "")
        return self.per_packet(what, run, limit_ns, f" ({text})")

    def v6_row(self, what, run, mode, flows):
        """ns per packet of IPv6, beside that of IPv4 with 1,000 flows. There is no target for 4,000,000 flows."""
        lines = V6_L.get(flows)
        if lines is None:
            return self.per_packet(what, run)
        limit_ns = V6_FACTOR * self.ns(f"{mode} 1000") + lines * self.line_ns()
        text = f"{V6_FACTOR} x IPv4, 1,000 flows" + (f", + {lines} L" if lines else "")
        return self.per_packet(what, run, limit_ns, f" ({text})")

    def mix_row(self, what):
        """ns per packet of mixed traffic, beside the weighted mean of the runs that it is mixed of. Those of replies, next
        hops and tags, and FINs and fragments, count as the others."""
        known = sum(share * self.ns(f"{run} 1000000") for run, share in MIX.items()) / sum(MIX.values())
        mean = 0.99 * known + 0.01 * sum(share * self.ns(run) for run, share in MIX_NEW.items())
        return self.per_packet(what, "mix", MIX_FACTOR * mean, f" ({MIX_FACTOR} x the mean of its parts)")

    def new_flows_row(self, what, kind):
        """Millions of flows a second; the target is a time in units of the yardstick."""
        run, units = f"new-flows {kind}", NEW_FLOW_Y[kind]
        yardstick = self.yardstick(run)
        if yardstick is None:
            return [what, f"{self.report(run)['mpps']:.1f} M/s, no NIC", "-", f"<= {units} y", "-", "-"]
        return self.rate(what, run, "M/s", 1e3 / (units * yardstick), f" ({units} y)")

    def rate(self, what, run, unit, limit, limit_text=""):
        """Millions a second."""
        rate = self.report(run)["mpps"]
        target = f">= {limit:.1f}{limit_text}"
        return [what, f"{rate:.1f} {unit}, no NIC", "-", target, self.ratio(run, 1e3 / rate), verdict(rate >= limit)]

    def yardstick_row(self):
        all_ns = sorted(run["yardstick_ns"] for run in self.runs.values() if run["yardstick_ns"])
        spread = f"{all_ns[0]:.1f} to {all_ns[-1]:.1f} ns" if all_ns else f"skipped: {self.skipped}"
        return ["yardstick y: testpmd `5tswap`", spread, "-", "-", "1.00" if all_ns else "-", "-"]

    def memory_rows(self):
        """What the memory of the machine allows."""
        line = self.report("none")["memory_line"]
        whats = {"fetched_ahead_ns": "fetched ahead", "dependent_ns": "after the one before"}
        return [
            [f"a random cache line of 64 MB, {what}", f"{line[name]:.1f} ns", "-", "-", self.ratio("none", line[name]), "-"]
            for name, what in whats.items()
        ]

    def handover_row(self, what):
        report = self.report("handover")
        ns, yardstick = report["ns_per_packet"] - report["without_handover_ns"], self.yardstick("handover")
        target = f"<= {HANDOVER_Y * yardstick:.1f} ({HANDOVER_Y} y)" if yardstick else f"<= {HANDOVER_Y} y"
        met = verdict(ns <= HANDOVER_Y * yardstick) if yardstick else "-"
        return [what, f"{ns:.1f} ns", "-", target, self.ratio("handover", ns), met]

    def latency_row(self, what, load):
        times = "p50 {p50_ns:,}, p99 {p99_ns:,}, p99.9 {p999_ns:,} ns at {mpps:.1f} Mpps, no NIC".format(**load)
        return [f"{what}, {load['load_percent']} % load", times, "-", "-", "-", "-"]


def verdict(is_met):
    return "met" if is_met else "not met"


def summary(table):
    """How many targets are met."""
    verdicts = [row[-1] for row in table]
    return f"{verdicts.count('met')} of {len(table) - verdicts.count('-')} targets are met."


def table(stored):
    """All rows."""
    figures = Figures(stored)
    rows = [figures.yardstick_row(), *figures.memory_rows(), figures.per_packet("harness alone, 1,000,000 flows", "none", 4)]
    for mode in MODES:
        for flows, lines in FLOWS_L.items():
            rows.append(figures.in_units(f"`{mode}`, {flows:,} flows", f"{mode} {flows}", lines, TUNNEL_NS.get(mode, 0)))
    for mode in MODES:
        for flows in FLOWS_L if mode == "nat" else [1_000_000]:
            rows.append(figures.v6_row(f"`{mode}` IPv6, {flows:,} flows", f"{mode} v6 {flows}", mode, flows))
    for run, what in ("nat no-df", "without DF"), ("nat ecmp 4", "4 next hops"), ("nat vlan", "VLAN tags"):
        limit_ns = 1.2 * figures.ns("nat 1000")
        rows.append(figures.per_packet(f"`nat`, 1,000 flows, {what}", run, limit_ns, " (1.2 x the plain row)"))
    rows.append(figures.mix_row("mixed traffic, 1,000,000 flows"))
    for flows, more_ns in (1_000, 12), (1_000_000, 20):
        run = f"ring {flows}"
        limit_ns = figures.report(run)["floor_ns"] + more_ns
        rows.append(figures.per_packet(f"`nat`, {flows:,} flows, over rings", run, limit_ns, f" (floor + {more_ns})"))
    limit_ns = figures.ns("services 1") + SERVICES_L * figures.line_ns()
    rows += [
        figures.per_packet("`nat`, 1,000,000 flows, 1 Service of 10 backends", "services 1"),
        figures.per_packet(
            "`nat`, 1,000,000 flows, 10,000 Services of 10 backends",
            "services 10000",
            limit_ns,
            f" (1 Service + {SERVICES_L} L)",
        ),
        figures.rate(
            "`nat`, 1,000,000 flows, two workers", "workers 2", "Mpps", 1.9 * figures.report("worker")["mpps"], " (1.9 x one)"
        ),
        figures.handover_row("hand-over between two workers, additional time per packet"),
        figures.new_flows_row("new flows, IPv4", "v4"),
        figures.new_flows_row("new flows, IPv6", "v6"),
        figures.new_flows_row("new flows, IPv4, 95 % of the SNAT ports held", "snat-load"),
    ]
    latency = figures.report("latency")["latency"]
    return rows + [figures.latency_row("latency of `nat`, 1,000,000 flows", load) for load in latency]


def titles(names_of_runs):
    """The first cell of each row."""
    loads = [{"load_percent": percent, "p50_ns": 0, "p99_ns": 0, "p999_ns": 0, "mpps": 0} for percent in (10, 50, 90)]
    report = {"ns_per_packet": 1, "floor_ns": 1, "mpps": 1, "without_handover_ns": 1, "latency": loads}
    report["memory_line"] = {"fetched_ahead_ns": 1, "dependent_ns": 1}
    runs = {name: {"yardstick_ns": None, "report": report} for name in names_of_runs}
    return [row[0] for row in table({"runs": runs, "skipped": "this is no measurement"})]
