"""The machine, for the reader of figures. Nothing that names it: no host name, no path.

Not here: figures (rows.py).
"""

import datetime
import os
import pathlib
import platform
import re
import subprocess

CACHES = pathlib.Path("/sys/devices/system/cpu/cpu0/cache")
HUGEPAGE_MODE = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def processor():
    """Fields of the first processor in /proc/cpuinfo."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def caches():
    """Caches of a core, nearest first: `32K L1d, 1024K L2`."""
    read = lambda index, name: (index / name).read_text().strip()
    each = []
    for index in sorted(CACHES.glob("index*")):
        kind = {"Data": "d", "Instruction": "i"}.get(read(index, "type"), "")
        each.append(f"{read(index, 'size')} L{read(index, 'level')}{kind}")
    return ", ".join(each) or "unknown"


def text_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def describe(has_hugepages):
    """What a figure depends on, as pairs."""
    core = processor()
    is_virtual = "hypervisor" in core.get("flags", "")
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    mode = re.search(r"\[(\w+)\]", HUGEPAGE_MODE.read_text()) if HUGEPAGE_MODE.exists() else None
    mhz = core.get("cpu MHz")
    return [
        ("processor", core.get("model name", platform.machine()) + (", virtual machine" if is_virtual else "")),
        ("cores", str(os.cpu_count())),
        ("clock", f"{float(mhz) / 1e3:.2f} GHz" if mhz else "unknown"),
        ("caches of a core", caches()),
        ("memory", f"{memory_gb:.0f} GB"),
        ("huge pages of DPDK", "2 MB" if has_hugepages else "none could be reserved"),
        ("transparent huge pages", mode[1] if mode else "unknown"),
        ("kernel", "Linux " + re.match(r"[\d.]*\d", platform.release())[0]),
        ("DPDK", text_of("pkg-config", "--modversion", "libdpdk")),
        ("compiler", " ".join(text_of("rustc", "--version").split()[:2])),
        ("date", datetime.date.today().isoformat()),
    ]
