"""The programs and rows of a comparison."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time

from .build import ROOT, release

LOADS = "10000,30000,100000,200000,400000"


class Failed(Exception):
    """A program did not give a figure."""


class Program:
    """A command that gives figures: `read` returns them by key from its output."""

    def __init__(self, command, read, seconds, once=False, debian=True, needs=None, role="ours"):
        self.command, self.read, self.seconds, self.once = command, read, seconds, once
        self.debian, self.needs, self.role = debian, needs, role
        self.samples, self.failure, self.worked = {}, None, False
        # Reasons why a key has no figure although others have one, and whether that is a failure.
        self.missing = {}

    def shown(self):
        """The command as somebody types it in the root of the project."""
        return shlex.join(
            [os.path.relpath(part, ROOT) if part.startswith(ROOT + "/") else part for part in self.command]
        )

    def finished(self):
        """Runs the command in a session of its own; returns exit code, output and errors.

        A script that is ended gets the time to remove its namespaces and to return huge pages."""
        try:
            child = subprocess.Popen(
                self.command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise Failed(f"missing: {error.filename}") from error
        try:
            text, errors = child.communicate(timeout=60 + 10 * self.seconds)
            return child.returncode, text, errors
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            child.terminate()
            try:
                child.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
            if isinstance(error, KeyboardInterrupt):
                raise
            raise Failed("it did not end in time") from error

    def run(self):
        """Returns lists of samples by key. A script that makes its own turns gives several samples at once."""
        before, started = processor_times(), time.monotonic()
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        code, text, errors = self.finished()
        reap()
        elapsed = time.monotonic() - started
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        if code:
            words = (errors.strip() or text.strip() or f"exit code {code}").split("\n")
            raise Failed(words[-1][:300].replace(ROOT + "/", ""))
        try:
            figures = self.read(text)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise Failed(f"no figure in its output ({error}): {text.strip()[-200:]}") from error
        own = used.ru_utime + used.ru_stime - own.ru_utime - own.ru_stime
        busy, steal = (b - a for a, b in zip(before, processor_times()))
        share = figures.pop("cpu_share", None)
        points, causes = figures.pop("points", None), figures.pop("causes", {})
        lists = {key: value if isinstance(value, list) else [value] for key, value in figures.items()}
        for key, values in lists.items():
            if not values or not all(isinstance(value, (int, float)) and value > 0 for value in values):
                raise Failed(f"no figure for {key}")
        common = {
            "cpu_share": share,
            "others": max(0.0, busy - own) / elapsed,
            "steal": steal / elapsed / (os.cpu_count() or 1),
        }
        if points:
            return {"points": points, **common}
        return {
            key: [{"value": value, "causes": causes.get(key, []), **common} for value in values]
            for key, values in lists.items()
        }


def processor_times():
    """Returns busy and stolen seconds of all processors since the start of the machine (proc(5))."""
    fields = [int(field) for field in open("/proc/stat").readline().split()[1:]]
    tick = os.sysconf("SC_CLK_TCK")
    return (sum(fields[:3]) + sum(fields[5:7])) / tick, (fields[7] if len(fields) > 7 else 0) / tick


def reap():
    """Waits for ended daemons of the peers, so that their processor time counts as ours and not as that of others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def count(number, noun):
    """Returns a number with its noun, in groups of three digits from 10 000 on."""
    digits = f"{number:,}".replace(",", " ") if number >= 10_000 else str(number)
    return f"{digits} {noun}{'' if number == 1 else 's'}"


def peer(name, *arguments):
    return [os.path.join(ROOT, "benches", "peers", name), *map(str, arguments)]


class Plan:
    """The programs and rows that are to be measured. Programs of one turn run one after the other in each round."""

    def __init__(self, options):
        self.options, self.turns, self.rows, self.loads = options, [], [], []

    def bench(self, key, *arguments, figure="cycles_per_packet", role="ours"):
        """Returns wirepath-bench with arguments; `figure` names the value in its JSON, or maps keys to such names."""
        command = [release("wirepath-bench"), "-q", *arguments, "--core", str(self.options.core)]
        command += ["--seconds", f"{self.options.seconds:g}", "--json"]

        def read(text):
            result = json.loads(text)
            names = figure if isinstance(figure, dict) else {key: figure}
            found = {key: result[name] for key, name in names.items()}
            return found | ({"cpu_share": result["cpu_share"]} if "cpu_share" in result else {})

        return Program(command, read, self.options.seconds + 0.5, role=role)

    def floor(self, key, mode, flows, buffers):
        command = ["taskset", "-c", str(self.options.core), release("wirepath-floor"), mode]
        command += [str(flows), str(buffers), f"{self.options.seconds:g}"]
        return Program(command, lambda text: {key: float(text.split()[0])}, self.options.seconds + 0.3, role="floor")

    def system(self, key, program, *arguments):
        command = peer(
            "system",
            program,
            *arguments,
            "--core",
            self.options.core,
            "--seconds",
            f"{max(1.0, self.options.seconds):g}",
            "--json",
        )
        read = lambda text: (lambda r: {key: r["cycles_per_packet"], "cpu_share": r["cpu_share"]})(json.loads(text))
        seconds = {"gateway": 3, "testpmd": 5, "ovs": 7}[program] + max(1.0, self.options.seconds)
        return Program(command, read, seconds, needs=need_root, role="ours" if program == "gateway" else "peer")

    def turn(self, group, programs):
        if self.wanted(group):
            self.turns.append((group, programs))

    def wanted(self, group):
        return group in self.options.rows

    def row(
        self,
        group,
        name,
        title,
        series,
        unit="cycles per packet",
        better="lower",
        bars=None,
        limit=None,
        x=None,
        line="",
    ):
        """Adds a row; `series` are (name, program, key), or these and a role."""
        if self.wanted(group):
            row = {
                "id": f"{group}/{name}",
                "group": group,
                "title": title,
                "unit": unit,
                "better": better,
                "x": x,
                "line": line,
            }
            self.rows.append((row, series, bars or {}, limit))

    def pair(self, group, name, title, *series, **more):
        """Adds a row whose programs have a turn of their own; `series` are (name, program)."""
        self.turn(group, [program for _, program in series])
        self.row(group, name, title, [(label, program, "figure") for label, program in series], **more)

    def add_all(self):
        for kind in ("vxlan", "geneve"):
            for direction in ("encap", "decap"):
                work = ("--kind", kind, "--direction", direction, "--flows", "1000")
                words = {"encap": "into the tunnel", "decap": "out of the tunnel"}[direction]
                self.pair(
                    "systems",
                    f"{kind}-{direction}",
                    f"{kind.upper()}, {words}, 1000 flows",
                    ("tunnel-gateway", self.system("figure", "gateway", *work)),
                    ("testpmd io, moves only", self.system("figure", "testpmd", *work)),
                    ("Open vSwitch with DPDK", self.system("figure", "ovs", *work)),
                )
        self.add_loads()
        self.add_stages()
        self.add_kinds()
        self.add_tables()
        self.add_drivers()
        self.add_grout()

    def add_loads(self):
        if not self.wanted("veth"):
            return
        common = (
            "--loads",
            LOADS,
            "--seconds",
            f"{self.load_seconds():g}",
            "--core",
            self.options.core,
            "--json",
        )
        pairs = [
            ("l2fwd, af_packet", "ours", ("l2fwd",)),
            ("l2fwd, af_xdp", "ours", ("l2fwd", "--driver", "af_xdp")),
            ("testpmd, af_packet", "peer", ("testpmd",)),
            ("testpmd, af_xdp", "peer", ("testpmd", "--driver", "af_xdp")),
            ("kernel bridge", "peer", ("bridge",)),
        ]
        tunnels = [
            ("tunnel-gateway, af_packet", "ours", ("gateway",)),
            ("kernel bridge and vxlan", "peer", ("vxlan",)),
        ]
        about = (
            "64-byte frames from pktgen, one way over veth. The program has one core; pktgen and the kernel have "
            "the next one. On two cores the generator is often the limit."
        )
        for name, title, programs in (
            ("veth-forward", "Between two veth ports", pairs),
            ("veth-vxlan", "VXLAN between two veth ports, into the tunnel", tunnels),
        ):
            seconds = 10 + 5 * (self.load_seconds() + 0.8)
            series = [
                (label, role, Program(peer("veth-load", *arguments, *common), None, seconds, needs=need_root))
                for label, role, arguments in programs
            ]
            for _, _, program in series:
                program.read = lambda text: {"points": json.loads(text)["points"]}
            self.loads.append(({"id": name, "title": title, "about": about}, series))

    def add_stages(self):
        for mode in ("io", "macswap"):
            for buffers in (32, 8192):
                series = [
                    ("wirepath", self.bench("figure", "forward", "--mode", mode, "--buffers", str(buffers))),
                    ("floor", self.floor("figure", mode, 1, buffers)),
                ]
                if buffers == 32:
                    series.append(("testpmd", self.system("figure", "testpmd", "--source", "null", "--mode", mode)))
                self.pair("forward", f"{mode}-{buffers}", f"{mode}, {buffers} buffers", *series)
        for direction, counts in (("encap", (1, 10_000, 1_000_000)), ("decap", (1, 10_000, 1_000_000))):
            for buffers in (32, 8192):
                for flows in counts:
                    ours = self.bench(
                        "figure",
                        "tunnel",
                        "--kind",
                        "vxlan",
                        "--direction",
                        direction,
                        "--flows",
                        str(flows),
                        "--buffers",
                        str(buffers),
                    )
                    series = [("wirepath", ours), ("floor", self.floor("figure", direction, flows, buffers))]
                    if (direction, flows, buffers) == ("encap", 1, 32):
                        series.append(("Open vSwitch", self.system("figure", "ovs", "--source", "null")))
                    bar = (
                        {"floor": {"encap": 1.35, "decap": 1.45}[direction]}
                        if buffers == 32 and flows <= 10_000
                        else {}
                    )
                    self.pair(
                        direction,
                        f"{flows}-{buffers}",
                        f"{count(flows, 'flow')}, {buffers} buffers",
                        *series,
                        bars=bar,
                        x=flows,
                        line=f", {buffers} buffers",
                    )
        for buffers in (32, 8192):
            ours = self.bench("figure", "tunnel", "--direction", "both", "--flows", "10000", "--buffers", str(buffers))
            self.pair(
                "gateway",
                f"10000-{buffers}",
                f"10 000 flows, {buffers} buffers",
                ("wirepath", ours),
                ("floor", self.floor("figure", "both", 10_000, buffers)),
                bars={"floor": 1.4} if buffers == 32 else {},
            )

    def add_kinds(self):
        bridged = ["geneve", "vxlan-gpe", "gretap", "nvgre", "mpls-udp", "mpls-gre"]
        routed = ["geneve-ip", "vxlan-gpe-ip", "gre", "ipip", "mpls-udp-ip", "mpls-gre-ip"]
        for direction in ("encap", "decap"):
            for version in ("4", "6"):
                for base, kinds in (("vxlan", bridged), ("vxlan-routed", routed)):
                    make = lambda kind, role="ours": self.bench(
                        "figure",
                        "tunnel",
                        "--kind",
                        kind,
                        "--direction",
                        direction,
                        "--flows",
                        "10000",
                        *([] if version == "4" else ["--ipv6"]),
                        role=role,
                    )
                    reference = make(base, "reference")
                    programs = [(kind, make(kind)) for kind in kinds]
                    name = base.replace("vxlan-routed", "VXLAN behind a router").replace("vxlan", "VXLAN")
                    self.turn("kinds", [reference, *(program for _, program in programs)])
                    self.row(
                        "kinds",
                        f"{base}-{direction}-{version}",
                        f"{'Ethernet' if base == 'vxlan' else 'IP'} in tunnels over IPv{version}, {direction}",
                        [(name, reference, "figure"), *((kind, program, "figure") for kind, program in programs)],
                        bars={name: 1.3},
                    )
        shapes = [(10_000, 1, 1), (10_000, 1, 10), (10_000, 10, 1), (1_000_000, 1, 1), (1_000_000, 4000, 10_000)]
        one = self.bench("figure", "tunnel", "--direction", "both", "--flows", "1", role="reference")
        programs = [
            (
                f"{count(flows, 'host')}, {count(segments, 'segment')}, {count(remotes, 'remote')}",
                self.bench(
                    "figure",
                    "tunnel",
                    "--direction",
                    "both",
                    "--flows",
                    str(flows),
                    "--segments",
                    str(segments),
                    "--remotes",
                    str(remotes),
                ),
            )
            for flows, segments, remotes in shapes
        ]
        self.turn("scale", [one, *(program for _, program in programs)])
        self.row(
            "scale",
            "both",
            "Both ways",
            [("one of each", one, "figure"), *((n, p, "figure") for n, p in programs)],
            bars={"one of each": 1.5},
        )

    def add_tables(self):
        ours = self.bench("", "table", figure={"lookup": "lookup_cycles", "insert": "insert_cycles"})
        ours.seconds += 3

        def read_hash(text):
            match = re.match(r"([\d.]+) cycles/insert, ([\d.]+) cycles/lookup", text)
            return {"insert": float(match[1]), "lookup": float(match[2])}

        # DPDK's test takes two minutes, so it runs once.
        rte_hash = Program(
            peer("rte-hash", self.options.core), read_hash, 155, once=True, needs=need_root, role="peer"
        )
        floors = [self.floor("figure", mode, 1_000_000, 32) for mode in ("table", "random")]
        self.turn("table", [ours, *floors, rte_hash])
        unit = "cycles per key"
        self.row(
            "table",
            "lookup",
            "Lookup",
            [
                ("wirepath", ours, "lookup"),
                ("floor", floors[0], "figure"),
                ("floor, random keys", floors[1], "figure"),
                ("rte_hash", rte_hash, "lookup"),
            ],
            unit,
            bars={"floor": 1.5},
        )
        self.row(
            "table",
            "insert",
            "Insertion",
            [("wirepath", ours, "insert"), ("rte_hash", rte_hash, "insert")],
            unit,
            bars={"rte_hash": 1.0},
        )
        self.add_routes()
        self.add_rules()

    def add_routes(self):
        rounds = self.options.rounds
        command = peer(
            "route-tables", "--rounds", rounds, "--routes", 100_000, "--routes6", 100_000, "--core", self.options.core
        )

        def read(text):
            names = ("ipv4", "ipv6", "lpm", "fib", "fib6")
            found = {name: [float(n) for n in re.findall(rf"^ +{name} ([\d.]+)$", text, re.M)] for name in names}
            if not all(found.values()):
                raise ValueError("a table is missing")
            return found

        # The peers keep their tables between rounds, so the script makes the turns itself.
        tables = Program(command, read, 12 + 5 * rounds, once=True, needs=need_root, role="peer")
        self.turn("routes", [tables])
        unit = "cycles per lookup"
        self.row(
            "routes",
            "ipv4",
            "IPv4, 100 000 routes",
            [("wirepath", tables, "ipv4", "ours"), ("rte_lpm", tables, "lpm"), ("rte_fib", tables, "fib")],
            unit,
            bars={"rte_lpm": 0.95},
        )
        self.row(
            "routes",
            "ipv6",
            "IPv6, 100 000 routes",
            [("wirepath", tables, "ipv6", "ours"), ("rte_fib6", tables, "fib6")],
            unit,
            bars={"rte_fib6": 1.2},
        )

    def add_rules(self):
        names = ("cycles", "one_rule_cycles", "miss_cycles", "changing_cycles", "quiet_cycles")
        rules = self.bench("", "rules", "--changes", "100000", figure={name: name for name in names})
        read = rules.read

        def checked(text):
            made = json.loads(text)["changes"]
            cause = {
                "cause": f"only {made:.0f} of 100 000 changes a second were made",
                "remedy": "keep the second processor free for the control thread",
            }
            return read(text) | ({"causes": {"changing_cycles": [cause]}} if made < 99_000 else {})

        rules.read = checked
        rules.seconds = 3 + 6 * self.options.seconds
        self.turn("rules", [rules])
        self.row(
            "rules",
            "cached",
            "In the flow cache",
            [("wirepath", rules, "cycles"), ("one rule", rules, "one_rule_cycles", "reference")],
            bars={"one rule": 1.5},
        )
        self.row("rules", "missed", "Not in the flow cache", [("wirepath", rules, "miss_cycles")], limit=400)
        self.row(
            "rules",
            "changing",
            "100 000 changes a second",
            [("wirepath", rules, "changing_cycles"), ("without changes", rules, "quiet_cycles", "reference")],
            bars={"without changes": 1.1},
        )

    def add_drivers(self):
        for driver in ("mana", "mlx5"):
            for mode in ("tx", "rx", "loopback"):
                command = peer(
                    "nic",
                    "--driver",
                    driver,
                    "--mode",
                    mode,
                    "--rounds",
                    1,
                    "--seconds",
                    max(2, round(self.options.seconds)),
                    "--json",
                )

                def read(text):
                    result = json.loads(text)
                    found = {"ours": result["wirepath"] / 1e6}
                    return found | ({"peer": result["testpmd"] / 1e6} if result["testpmd"] else {})

                program = Program(command, read, 9, needs=need_root, role="ours")
                program.missing = {"peer": testpmd_lacks(driver)}
                self.turn("nic", [program])
                label = {"tx": "transmit", "rx": "receive", "loopback": "loop-back"}[mode]
                self.row(
                    "nic",
                    f"{driver}-{mode}",
                    f"{driver}, {label}",
                    [("wirepath", program, "ours"), (f"testpmd, net_{driver}", program, "peer", "peer")],
                    "million packets per second",
                    "higher",
                    bars={f"testpmd, net_{driver}": 1.1 if driver == "mana" else 1.0},
                )
        seconds = max(2, round(self.options.seconds))
        command = peer("vpp", "--rate", "--mode", "mode dv no-multi-seg", "--rounds", 1, "--seconds", seconds)

        def read_vpp(text):
            match = re.search(r"wirepath ([\d.]+).*?VPP ([\d.]+)", text, re.S)
            return {"ours": float(match[1]), "peer": float(match[2])}

        # Debian has no VPP.
        vpp = Program(command, read_vpp, 35, debian=False, needs=need_vpp)
        self.turn("vpp", [vpp])
        self.row(
            "vpp",
            "rx",
            "mlx5, receive",
            [("wirepath", vpp, "ours"), ("VPP, rdma plugin", vpp, "peer", "peer")],
            "million packets per second",
            "higher",
        )

    def add_grout(self):
        works = [
            ("ipv4-1", "IPv4 routing, 1 destination", ("--kind", "ipv4", "--flows", 1)),
            ("ipv4-10000", "IPv4 routing, 10 000 destinations", ("--kind", "ipv4")),
            ("ipv6-10000", "IPv6 routing, 10 000 destinations", ("--kind", "ipv6")),
            ("vxlan-encap", "VXLAN, into the tunnel, 1000 hosts", ("--kind", "vxlan")),
            ("vxlan-decap", "VXLAN, out of the tunnel, 1000 hosts", ("--kind", "vxlan", "--direction", "decap")),
            ("ipip-encap", "IP in IP, into the tunnel, 1000 networks", ("--kind", "ipip")),
            ("ipip-decap", "IP in IP, out of the tunnel, 1000 networks", ("--kind", "ipip", "--direction", "decap")),
        ]

        def read(text):
            result = json.loads(text)
            ours, grout = result["wirepath"], result["grout"]
            return {"ours": ours["alone"], "peer": grout["alone"], "cpu_share": result["cpu_share"]}

        seconds = max(1.0, self.options.seconds)
        for name, title, work in works:
            command = peer("grout", *work, "--rounds", 1, "--seconds", f"{seconds:g}")
            command += ["--core", str(self.options.core), "--json"]
            # Debian has no grout.
            program = Program(command, read, 11 + 4 * seconds, debian=False, needs=need_grout)
            self.turn("grout", [program])
            self.row(
                "grout",
                name,
                title,
                [("wirepath", program, "ours"), ("grout", program, "peer", "peer")],
            )

    def seconds(self):
        """Estimates the time of the whole run."""
        turns = sum(
            p.seconds * (1 if p.once else self.options.rounds)
            for _, programs in self.turns
            for p in programs
            if not (p.needs and p.needs())
        )
        return turns + sum(p.seconds * self.load_rounds() for _, series in self.loads for _, _, p in series)

    def load_seconds(self):
        # Shorter trials have too few packets for the 99.99th percentile at low loads.
        return max(1.0, 4 * self.options.seconds)

    def load_rounds(self):
        # A curve has thirty figures for each program, so fewer rounds keep the whole run short.
        return max(1, self.options.rounds // 2)


def need_root():
    return "it needs root" if os.geteuid() else None


def need_vpp():
    if "VPP" not in os.environ:
        return "VPP names no build, and Debian has none"
    return need_root()


def need_grout():
    if not os.environ.get("GROUT"):
        return "GROUT names no build, and Debian has none"
    return need_root()


def testpmd_path():
    return os.environ.get("TESTPMD") or shutil.which("dpdk-testpmd")


def testpmd_lacks(driver):
    """Returns why testpmd cannot drive a NIC, as far as its package tells."""
    if not testpmd_path():
        return ("missing: dpdk-testpmd", True)
    if driver == "mana" and "TESTPMD" not in os.environ:
        return ("Debian's testpmd has no net_mana; name a newer one by TESTPMD", False)
    return ("testpmd gave no rate", True)
