"""`make bench`: measures the forwarding engine beside the floor of its harness and a yardstick, prints one table, and
writes docs/reference/performance.md.

  demo/bench              measure everything
  demo/bench PATTERN...   measure the runs whose names match (`nat*`), and keep the other figures
  demo/bench --list       print the names of the runs
  demo/bench --rows       print the first cell of each row
  demo/bench --check      fail if a packet is wrong or dropped

SECONDS_EACH: seconds of each measurement, 1 by default. SLUICE_BIN: the folder of sluiced, target/release by default.
"""

import fnmatch
import sys

import page
import rows
import runs
from machine import describe


def check(what, options):
    """Expects verified packets and no drops. Time is not judged: that of a loaded machine, or of a program that is not
    optimised, says nothing. .ci/bench-guard limits instructions."""
    report = runs.sluiced(options)
    print(
        f"{what}, {report['flows']} flows: {report['ns_per_packet']:.1f} ns per packet, {report['drops']} drops, "
        f"{report['verified']} packets checked",
        flush=True,
    )
    if report["verified"] == 0 or report["drops"] > 0:
        raise SystemExit("bench: expected verified packets and no drops")


def measure(patterns):
    """Measures the runs that match, all without patterns; prints the table and writes the page when none is missing."""
    if runs.cores() < 2:
        raise SystemExit("bench: the table needs two cores, for rings, two workers and testpmd")
    known = runs.all_runs()
    chosen = [name for name in known if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    if not chosen:
        raise SystemExit(f"bench: no run matches {' '.join(patterns)}; see demo/bench --list")
    stored = runs.load() if patterns else {"runs": {}}
    runs.end_on_sigterm()
    with runs.hugepages() as has_hugepages:
        yardstick = runs.Yardstick(has_hugepages)
        stored["machine"] = describe(has_hugepages)
        stored["skipped"] = None if yardstick.program else "dpdk-testpmd is missing (Debian: dpdk-dev)"
        for name in chosen:
            yardstick_ns = yardstick.now()
            report = runs.measure(known[name])
            stored["runs"][name] = {"yardstick_ns": yardstick_ns, "report": report}
            runs.store(stored)
            print(f"bench: {name}: {report['ns_per_packet']:.1f} ns", file=sys.stderr, flush=True)
    missing = [name for name in known if name not in stored["runs"]]
    if missing:
        print(f"bench: not measured yet, so there is no table: {', '.join(missing)}", file=sys.stderr)
        return
    table = rows.table(stored)
    print_table([rows.HEADER, *table])
    print(rows.summary(table))
    page.write(stored, table)
    print(f"bench: written: {page.PAGE.relative_to(runs.ROOT)}", file=sys.stderr)


def print_table(table):
    widths = [max(map(len, column)) for column in zip(*table)]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())


def main(arguments):
    if any(argument.startswith("-") for argument in arguments) and arguments not in (["--list"], ["--rows"], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    if arguments == ["--list"]:
        print("\n".join(runs.all_runs()))
    elif arguments == ["--rows"]:
        print("\n".join(rows.titles(runs.all_runs())))
    elif not runs.SLUICED.exists():
        raise SystemExit(f"bench: expected {runs.SLUICED}: run 'make build'")
    elif arguments == ["--check"]:
        for io in ("mem", "ring"):
            check(f"nat over {io}", ["--io", io, "--backends", "100", "--flows", "100000"])
        check("mixed traffic", ["--mix", "--flows", "10000"])
    else:
        measure(arguments)
    return 0


sys.exit(main(sys.argv[1:]))
