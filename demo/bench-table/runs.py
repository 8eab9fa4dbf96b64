"""What is measured: calls of `sluiced bench`, and of the yardstick.

The yardstick is `dpdk-testpmd` in mode `5tswap` over two null devices: it parses each packet and swaps addresses and
ports. It runs on the same core, at the same priority, and again when a minute has passed.

Not here: targets (rows.py).
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SLUICED = pathlib.Path(os.environ.get("SLUICE_BIN", ROOT / "target/release")) / "sluiced"
STORE = ROOT / "target/bench/figures.json"

FLOWS = [1_000, 10_000, 100_000, 1_000_000, 4_000_000]
MODES = ["nat", "dnat", "dsr", "ipip", "gue"]
SERVICES = [1, 10, 100, 1_000, 10_000]

SECONDS = os.environ.get("SECONDS_EACH", "1")
# Seconds that the yardstick runs, and after which it is measured again.
YARDSTICK_SECONDS, YARDSTICK_AGE = 5, 60
# Huge pages of 2 MB: testpmd takes 300, `--io ring` 200.
HUGEPAGES = 320
NR_HUGEPAGES = pathlib.Path("/proc/sys/vm/nr_hugepages")
# Negative niceness needs rights; without them `nice` says so and goes on.
AT_HIGH_PRIORITY = ["nice", "-n", "-20"]


def all_runs():
    """The runs by their names, in the order in which they are measured: those that are compared are neighbours."""
    runs = {"none": ["--mode", "none"]}
    for flows in FLOWS:
        for mode in MODES:
            runs[f"{mode} {flows}"] = ["--mode", mode, "--flows", str(flows)]
            if flows == 1_000_000 or (mode == "nat" and flows in (1_000, 4_000_000)):
                runs[f"{mode} v6 {flows}"] = ["--mode", mode, "--flows", str(flows), "--family", "v6"]
        if flows == 1_000:
            for option in ("--no-df", "--ecmp 4", "--vlan"):
                runs[f"nat {option[2:]}"] = ["--flows", "1000", *option.split()]
    runs["mix"] = ["--mix"]
    for flows in (1_000, 1_000_000):
        runs[f"ring {flows}"] = ["--io", "ring", "--flows", str(flows)]
    for services in SERVICES:
        runs[f"services {services}"] = ["--services", str(services), "--backends", "10"]
    first_of_two = str(cores() - 2)
    runs["worker"] = ["--core", first_of_two]
    runs["workers 2"] = ["--workers", "2", "--core", first_of_two]
    runs["handover"] = ["--workers", "2", "--core", first_of_two, "--handover", "--flows", "1000"]
    runs["new-flows v4"] = ["--new-flows"]
    runs["new-flows v6"] = ["--new-flows", "--family", "v6"]
    runs["new-flows snat-load"] = ["--new-flows", "--snat-load", "95"]
    runs["latency"] = ["--latency", "--seconds", "4"]
    return runs


def cores():
    return os.cpu_count() or 1


def sluiced(options):
    """The report of a run of `sluiced bench`, which fails if a packet is wrong, lost or dropped."""
    given = [] if "--core" in options else ["--core", str(cores() - 1)]
    given += [] if "--seconds" in options else ["--seconds", SECONDS]
    command = [*AT_HIGH_PRIORITY, SLUICED, "bench", "-o", "json", *given, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"bench: sluiced bench {' '.join(options)} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def measure(options):
    """The better of two reports; of a long run the only one."""
    again = 1 if "--seconds" in options or "4000000" in options else 2
    return min((sluiced(options) for _ in range(again)), key=lambda report: report["ns_per_packet"])


class Yardstick:
    """Measures testpmd when the last figure is too old."""

    def __init__(self, has_hugepages):
        self.program = shutil.which("dpdk-testpmd")
        self.memory = ["--in-memory"] if has_hugepages else ["--no-huge", "--no-shconf", "-m", "1024"]
        self.measured_at = None
        self.ns = None

    def now(self):
        """ns per packet, or None if there is no testpmd."""
        is_old = self.measured_at is None or time.monotonic() - self.measured_at > YARDSTICK_AGE
        if self.program and is_old:
            self.ns = self.measure()
            self.measured_at = time.monotonic()
        return self.ns

    def measure(self):
        """ns per packet in the best second."""
        core = cores() - 1
        devices = ["--no-pci", "--vdev", "net_null0,copy=0", "--vdev", "net_null1,copy=0"]
        forward = ["--forward-mode=5tswap", "--nb-cores=1", "--auto-start", "--stats-period=1", "--no-mlockall"]
        command = [*AT_HIGH_PRIORITY, self.program, "-l", f"{core - 1},{core}", *self.memory, *devices, "--", *forward]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, text=True, **streams) as child:
            lines, best = [], 0
            try:
                for line in child.stdout:
                    lines.append(line)
                    rates = [int(text.split()[1]) for text in lines if text.strip().startswith("Tx-pps:")]
                    seconds = [sum(pair) for pair in zip(rates[::2], rates[1::2])]
                    best = max(seconds, default=0)
                    if len(seconds) > YARDSTICK_SECONDS:
                        break
            finally:
                child.kill()
        if best == 0:
            raise SystemExit("bench: testpmd shows no rate:\n" + "".join(lines[-20:]))
        return 1e9 / best


@contextlib.contextmanager
def hugepages():
    """Reserves huge pages, says whether there are enough, and puts back the number that was there."""
    before = int(NR_HUGEPAGES.read_text())
    with contextlib.suppress(OSError):
        NR_HUGEPAGES.write_text(str(before + HUGEPAGES))
    try:
        yield int(NR_HUGEPAGES.read_text()) >= before + HUGEPAGES
    finally:
        with contextlib.suppress(OSError):
            NR_HUGEPAGES.write_text(str(before))


def end_on_sigterm():
    """Lets `finally` run when the program is ended."""
    signal.signal(signal.SIGTERM, lambda *_: exit(143))


def load():
    """What was measured before: machine, why the yardstick was skipped, and each run with its yardstick and report."""
    return json.loads(STORE.read_text()) if STORE.exists() else {"runs": {}}


def store(figures):
    STORE.parent.mkdir(parents=True, exist_ok=True)
    STORE.write_text(json.dumps(figures, indent=1))
