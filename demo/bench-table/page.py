"""The page docs/reference/performance.md, with two graphs.

Not here: rows (rows.py).
"""

import math

from rows import HEADER, Figures, summary
from runs import FLOWS, MODES, ROOT, SERVICES

PAGE = ROOT / "docs/reference/performance.md"
TEXT = """# Performance

Written by `make bench`. It measures the forwarding engine with `sluiced bench`
([Commands](commands.md#sluiced)), without a NIC: a real 100G port costs about 44 ns per packet more. Every packet is
accounted for, and one in 100 is checked in full. A figure is the better of two measurements; of latency, and with
4,000,000 flows, it is the only one. Flows are established; `nat` and `dnat` carry both directions. They go to one
Service of 16 backends, unless the row says otherwise.

- **Floor**: the same harness with a worker that only swaps Ethernet addresses, in the same process, ns per packet. It
  is included in the figure.
- **Yardstick**, y: DPDK's `testpmd` in mode `5tswap` (it parses a packet, and swaps addresses and ports) over two null
  devices that copy nothing, on the same core. It is measured again every minute; the column compares a figure with the
  yardstick of its minute, and targets in y are computed from it.
- **A random cache line of 64 MB**, L: what memory costs on this machine, in huge pages as the tables are. A packet of
  one of a million flows needs two lines, a reply up to three. Targets of many flows and of many Services are computed
  from the time of a line that is fetched ahead. Where such a line takes long, as in a virtual machine whose host has
  small pages, figures of many flows cannot come near those of few.
- **Mixed traffic**: each burst has packets of all modes, both families and both directions, with and without VLAN tags
  and next hops of equal cost; one in 100 is a SYN, one a FIN and one a fragment ([`--mix`](commands.md#sluiced)). It is
  compared with the mean of the rows that it is mixed of, by their shares.
- **Latency**: from the arrival of a packet until it leaves. Packets arrive at a steady rate, whether or not the worker
  polls: at this part of the rate that the worker reaches when every burst is full. What interrupts the worker counts
  too, such as other programs. There is no target.

## Machine

"""


def markdown(header, rows):
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join(["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *lines]) + "\n"


def write(stored, rows):
    """Writes the page with these rows, and its graphs."""
    figures = Figures(stored)
    flows = {mode: [(n, figures.ns(f"{mode} {n}")) for n in FLOWS] for mode in MODES}
    services = {"nat": [(n, figures.ns(f"services {n}")) for n in SERVICES]}
    for name, runs, series in (("flows", "nat", flows), ("services", "services", services)):
        of = f"{runs} %s" % (FLOWS if name == "flows" else SERVICES)[-1]
        floor = [(n, figures.report(f"{runs} {n}")["floor_ns"]) for n, _ in next(iter(series.values()))]
        series = series | {"floor": floor}
        if figures.yardstick(of):
            series["yardstick"] = [(n, figures.yardstick(f"{runs} {n}")) for n, _ in floor]
        graph_file(name).write_text(graph(f"ns per packet by number of {name}", f"number of {name}", series))
    PAGE.write_text(
        TEXT
        + markdown(["", ""], stored["machine"])
        + f"\n## Figures\n\n{summary(rows)}\n\n"
        + markdown(HEADER, rows)
        + "\n## Flows\n\n"
        + "![ns per packet of each mode over the number of flows](performance-flows.svg)\n"
        + "\n## Services\n\n"
        + "`nat`, 1,000,000 flows, 10 backends for each Service.\n\n"
        + "![ns per packet over the number of Services](performance-services.svg)\n"
    )


def graph_file(name):
    return PAGE.with_name(f"performance-{name}.svg")


# Colours on white and on dark. Lines are labelled at their ends, so that no reader has to tell colours apart.
COLOURS = [("#1f5fae", "#6db1ff"), ("#2e7d43", "#6fd08a"), ("#a05a00", "#f0ac4e"), ("#a32a4a", "#ff8ba7"), ("#6a3fa0", "#c3a0ff")]
GREY = ("#4a5a6e", "#a9bacd")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 56, 96, 44, 52
LABEL_HEIGHT = 16


def graph(title, x_name, series):
    """An SVG of lines over a logarithmic axis from 0 ns up."""
    xs = [x for x, _ in next(iter(series.values()))]
    top = max(y for points in series.values() for _, y in points)
    step = next(step for step in (5, 10, 20, 50, 100, 200, 500) if top / step <= 8)
    highest = math.ceil(top / step) * step
    x_of = lambda x: LEFT + (WIDTH - LEFT - RIGHT) * math.log(x / xs[0]) / math.log(xs[-1] / xs[0])
    y_of = lambda y: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / highest
    parts = [f'<text class="text head" x="{LEFT}" y="24">{title}</text>']
    for y in range(0, highest + 1, step):
        parts.append(f'<path class="grid" d="M{LEFT} {y_of(y):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="dim" x="{LEFT - 8}" y="{y_of(y) + 4:.1f}" text-anchor="end">{y}</text>')
    for x in xs:
        parts.append(f'<text class="dim" x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{x:,}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="dim" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{x_name} (no NIC, one core)</text>')
    label_ys = spread({name: y_of(points[-1][1]) for name, points in series.items()})
    for n, (name, points) in enumerate(series.items()):
        at = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        kind = f"c{n}" if name in MODES else "grey"
        parts.append(f'<polyline class="line {kind}" points="{at}"/>')
        if name in MODES:
            parts += [f'<circle class="dot {kind}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3.5"/>' for x, y in points]
        parts.append(f'<text class="label {kind}" x="{WIDTH - RIGHT + 10}" y="{label_ys[name] + 4:.1f}">{name}</text>')
    body = "\n  ".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" \
role="img" font-family="Helvetica, Arial, sans-serif" font-size="13">
  <title>{title}</title>
  <desc>{description(series)}</desc>
  <style>
{style()}
  </style>
  <rect class="page" width="{WIDTH}" height="{HEIGHT}"/>
  {body}
</svg>
"""


def spread(ys):
    """Heights of labels, so that none covers another: from top to bottom, moved down, and then up from the axis."""
    names = sorted(ys, key=ys.get)
    placed, lowest = [], TOP
    for name in names:
        placed.append(max(ys[name], lowest))
        lowest = placed[-1] + LABEL_HEIGHT
    highest = HEIGHT - BOTTOM
    for n in reversed(range(len(placed))):
        placed[n] = min(placed[n], highest)
        highest = placed[n] - LABEL_HEIGHT
    return dict(zip(names, placed))


def description(series):
    """The figures in words."""
    figures = lambda points: ", ".join(f"{y:.0f} ns at {x:,}" for x, y in points)
    return ". ".join(f"{name}: {figures(points)}" for name, points in series.items()) + "."


def style():
    """Classes for both colour schemes."""
    plain = [
        ".head { font-weight: bold; }",
        ".line { fill: none; stroke-width: 2.5; }",
        ".line.grey { stroke-width: 1.5; stroke-dasharray: 6 5; }",
        ".dot, .label { stroke: none; }",
    ]
    light, dark = (scheme(n) for n in (0, 1))
    lines = [*plain, *light, "@media (prefers-color-scheme: dark) {", *(f"  {line}" for line in dark), "}"]
    return "\n".join(f"    {line}" for line in lines)


def scheme(n):
    """Colours of the light scheme (0), or the dark one."""
    page, text, grid = (("#ffffff", "#16202c", "#dfe5ec"), ("#0d1520", "#e8eff7", "#263445"))[n]
    yield f".page {{ fill: {page}; }}"
    yield f".text {{ fill: {text}; }}"
    yield f".dim {{ fill: {GREY[n]}; }}"
    yield f".grid {{ stroke: {grid}; }}"
    for name, pair in [*((f"c{i}", pair) for i, pair in enumerate(COLOURS)), ("grey", GREY)]:
        yield f".line.{name} {{ stroke: {pair[n]}; }}"
        yield f".dot.{name}, .label.{name} {{ fill: {pair[n]}; }}"
