//! Remotes watched by BFD, with another end beside the kernel's `vxlan` device of each remote. It is FRR's bfdd, and
//! scapy for sessions in VXLAN tunnels, which FRR does not have.

use serde_json::Value;
use wirepath::control_socket::{Client, Rows};
use wirepath_testlab::{Background, FramePort, Namespace, Requirement, eventually, oracle, python, skip_or_fail};

use crate::frr::Daemons;
use crate::program::Program;
use crate::world::{VNI, Variant, WAIT_LIMIT, World, colons, pings, remote_address};

/// FRR's daemon (Debian: frr). It has no program in the search path.
const BFDD: &str = "/usr/lib/frr/bfdd";
/// Settings of the gateway's sessions.
pub(crate) const SETTINGS: &str = "[bfd]\ntransmit_interval = 100\nreceive_interval = 150\nmultiplier = 4\n";

/// FRR's BFD in the namespace of a remote.
pub(crate) struct Frr<'a> {
    daemons: Daemons<'a>,
    process: Option<Background>,
}

impl<'a> Frr<'a> {
    /// Starts bfdd with a session from `local` to `peer`. `kind` is empty or "multihop".
    pub(crate) fn start(namespace: &'a Namespace, peer: &str, local: &str, kind: &str) -> Self {
        let text = format!(
            "bfd\n peer {peer} {kind} local-address {local}\n  detect-multiplier 3\n  receive-interval 200\n  \
             transmit-interval 120\n  no shutdown\n !\n!\n"
        );
        let mut frr = Self { daemons: Daemons::new(namespace, &[("bfdd", &text)]), process: None };
        frr.restart();
        frr
    }

    fn restart(&mut self) {
        self.process = Some(self.daemons.start(BFDD, "bfdd", true));
    }

    fn kill(&mut self) {
        let outcome = self.process.take().expect("a running bfdd").kill();
        assert_eq!(outcome.code, None, "it had ended by itself: {}{}", outcome.stdout, outcome.stderr);
    }

    /// Runs commands of FRR's shell.
    #[track_caller]
    fn vtysh(&self, commands: &[&str]) -> String {
        self.daemons.vtysh(commands).expect()
    }

    /// Returns what FRR says about its session.
    fn peer(&self) -> Value {
        let text = self.vtysh(&["show bfd peers json"]);
        serde_json::from_str::<Value>(&text).unwrap_or_else(|error| panic!("{error}: {text}"))[0].clone()
    }

    #[track_caller]
    pub(crate) fn wait(&self, status: &str) -> Value {
        let mut peer = Value::Null;
        let found = eventually(WAIT_LIMIT, || {
            peer = self.peer();
            peer["status"] == status
        });
        assert!(found, "FRR's session is not {status}: {peer}");
        peer
    }
}

/// The gateway and its operator.
pub(crate) struct Gateway {
    pub(crate) program: Program,
}

impl Gateway {
    pub(crate) fn start(world: &World, tables: &str) -> Self {
        Self::start_with(world, &(world.one_segment() + tables))
    }

    fn start_with(world: &World, config: &str) -> Self {
        let program = world.start_with(&format!("[control]\nsocket = 'operators.sock'\n{config}"));
        let socket = program.path("operators.sock");
        assert!(eventually(WAIT_LIMIT, || Client::connect(&socket).is_ok()), "no control socket");
        Self { program }
    }

    /// Returns a table. The gateway closes connections that are idle for long, so each table has one of its own.
    fn show(&self, table: &str, conditions: &[String]) -> Rows {
        let mut client = Client::connect(&self.program.path("operators.sock")).expect("a connection");
        client.show(table, conditions, None).expect("a table")
    }

    /// Returns the session with a remote as `wirepath show bfd` has it.
    pub(crate) fn session(&self, remote: &str) -> Value {
        let condition = [format!("remote={remote}")];
        let mut table = self.show("bfd", &condition);
        assert_eq!(table.rows.len(), 1, "{remote}: {table:?}");
        table.columns.into_iter().zip(table.rows.remove(0)).collect::<serde_json::Map<_, _>>().into()
    }

    #[track_caller]
    pub(crate) fn wait(&self, remote: &str, state: &str) -> Value {
        let mut session = Value::Null;
        let found = eventually(WAIT_LIMIT, || {
            session = self.session(remote);
            session["state"] == state
        });
        assert!(found, "the session with {remote} is not {state}: {session}");
        session
    }

    /// The session with the first remote ends for want of packets, and no frame of `host` goes to the remote, which
    /// `wire` belongs to. The second remote is not concerned.
    #[track_caller]
    fn assert_lost(&self, remote: &str, host: &Namespace, wire: &mut FramePort) {
        let session = self.wait(remote, "down");
        assert_eq!(session["diagnostic"], "control detection time expired");
        assert_eq!((&session["carries"], &session["downs"]), (&0.into(), &1.into()));
        wire.drain();
        assert!(!pings(host, &remote_address(0), 56, 1), "no way leads to the remote");
        assert!(pings(host, &remote_address(1), 56, 3), "the other remote is not concerned");
        let tunnelled = wire.drain().into_iter().filter(|frame| {
            wirepath_wire::parse(&frame.bytes).is_ok_and(|it| it.vni().is_some_and(|vni| vni.get() == VNI))
        });
        assert_eq!(tunnelled.count(), 0, "frames to a remote that is down");
    }
}

pub(crate) fn is_missing(variant: Variant) -> bool {
    for need in [Requirement::File(BFDD), Requirement::Program("vtysh")] {
        if let Err(why) = need.check() {
            skip_or_fail(file!(), line!(), &format!("{}: {why}", variant.name));
            return true;
        }
    }
    false
}

/// The session comes up at both ends with the negotiated intervals. The remote leaves when bfdd is killed or shut down,
/// and returns.
pub(crate) fn a_remote_leaves_and_returns(variant: Variant) {
    if !is_missing(variant) {
        follows_bfdd(variant, "", SETTINGS);
    }
}

/// The same with a multihop session.
pub(crate) fn multihop(variant: Variant) {
    if !is_missing(variant) {
        follows_bfdd(variant, "multihop", &format!("{SETTINGS}multihop = true\n"));
    }
}

fn follows_bfdd(variant: Variant, kind: &str, settings: &str) {
    let world = World::new(variant, 1, 2, 1500);
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    let (local, other) = (variant.remote(0).to_string(), variant.remote(1).to_string());
    let mut gateway = Gateway::start(&world, &format!("{settings}except = [\"{other}\"]\n"));
    // The other remote has no session, so it always carries frames.
    world.wait_for(&mut gateway.program, host, &remote_address(1));
    assert!(!pings(host, &remote_address(0), 56, 1), "nothing is sent before the session is up");

    let mut wire = remote.frames("eth0");
    let mut frr = Frr::start(remote, &variant.vtep().to_string(), &local, kind);
    gateway.wait(&local, "up");
    let peer = frr.wait("up");
    // After the poll sequences, both ends have the same view.
    let settled = |gateway: &mut Gateway, frr: &Frr<'_>| {
        let (session, peer) = (gateway.session(&local), frr.peer());
        (session["transmit_interval"] == 0.2 && peer["remote-transmit-interval"] == 100, session, peer)
    };
    assert!(eventually(WAIT_LIMIT, || settled(&mut gateway, &frr).0), "{:?}", settled(&mut gateway, &frr));
    let (_, session, now) = settled(&mut gateway, &frr);
    let mode = if kind.is_empty() { "single_hop" } else { "multihop" };
    assert_eq!((&session["mode"], &now["multihop"]), (&mode.into(), &(!kind.is_empty()).into()));
    // FRR sends every 150 ms at most, since the gateway takes no more; its multiplier is 3.
    assert_eq!(session["detection_time"], 0.45, "{session}");
    assert_eq!((&now["remote-receive-interval"], &now["remote-detect-multiplier"]), (&150.into(), &4.into()), "{now}");
    assert_ne!(peer["remote-id"], 0);
    world.wait_for(&mut gateway.program, host, &remote_address(0));

    let is_bfd = |bytes: &[u8]| {
        let parsed = wirepath_wire::parse(bytes);
        parsed.is_ok_and(|it| it.outer().udp(bytes).is_some_and(|udp| [3784, 4784].contains(&udp.dst_port())))
    };
    let mut of_bfd: Vec<Vec<u8>> = Vec::new();
    let are_many = eventually(WAIT_LIMIT, || {
        of_bfd.extend(wire.drain().into_iter().map(|frame| frame.bytes).filter(|bytes| is_bfd(bytes)));
        of_bfd.len() > 20
    });
    assert!(are_many, "{} packets", of_bfd.len());
    oracle::assert_clean(&of_bfd);
    let states: Vec<String> = oracle::fields(&of_bfd, &["bfd.sta"]).into_iter().map(|row| row[0].clone()).collect();
    for state in ["0x01", "0x03"] {
        assert!(states.iter().any(|it| it == state), "{state}: {states:?}");
    }

    // A dead bfdd takes the remote out, although the kernel's VXLAN device still works.
    frr.kill();
    gateway.assert_lost(&local, host, &mut wire);
    frr.restart();
    gateway.wait(&local, "up");
    frr.wait("up");
    world.wait_for(&mut gateway.program, host, &remote_address(0));

    // FRR ends the session on purpose, and begins it again.
    let address = format!("peer {} {kind} local-address {local}", variant.vtep());
    frr.vtysh(&["configure terminal", "bfd", &address, "shutdown"]);
    let session = gateway.wait(&local, "down");
    assert_eq!((&session["remote_state"], &session["carries"]), (&"admin_down".into(), &0.into()), "{session}");
    frr.vtysh(&["configure terminal", "bfd", &address, "no shutdown"]);
    gateway.wait(&local, "up");
    // Other intervals of FRR: its poll sequence ends.
    frr.vtysh(&["configure terminal", "bfd", &address, "transmit-interval 400"]);
    assert!(eventually(WAIT_LIMIT, || gateway.session(&local)["detection_time"] == 1.2), "{}", gateway.session(&local));
    assert_eq!(gateway.session(&local)["downs"], 2);

    // The gateway says that it stops.
    let summary = gateway.program.stop();
    let peer = frr.wait("down");
    assert_eq!(peer["remote-diagnostic"], "administratively down", "{peer}");
    for reason in ["bfd_invalid", "bfd_authentication", "bfd_ttl", "bfd_no_session"] {
        assert_eq!(summary.drops(reason), 0, "{reason}: {}", summary.json);
    }
}

/// A backup with the same hosts takes the place of a primary remote whose bfdd is killed.
pub(crate) fn a_backup_takes_over(variant: Variant) {
    if is_missing(variant) {
        return;
    }
    let world = World::new(variant, 1, 2, 1500);
    let host = &world.hosts[0];
    // Both remotes reach the same host.
    world.remotes[1].ip("addr flush dev vx0");
    world.remotes[1].ip(&format!("addr add {}/24 dev vx0", remote_address(0)));
    let mac = colons(world.remotes[0].mac("vx0"));
    world.remotes[1].ip(&format!("link set vx0 address {mac}"));
    let addresses = [variant.remote(0).to_string(), variant.remote(1).to_string()];
    let [primary, backup] = &addresses;
    let peer = variant.vtep().to_string();
    let mut frrs = [0, 1].map(|n| Frr::start(&world.remotes[n], &peer, &addresses[n], ""));
    let config = world.one_segment().replace(
        "remotes = [",
        &format!("backups = [{{ primary = \"{primary}\", backup = \"{backup}\" }}]\nremotes = ["),
    );
    let mut gateway = Gateway::start_with(&world, &(config + SETTINGS));
    for (from, to) in [(primary, backup), (backup, primary), (primary, backup)] {
        // The primary is up in the first and last round.
        gateway.wait(from, "up");
        world.wait_for(&mut gateway.program, host, &remote_address(0));
        let (used, idle) = if from == primary { (0, 1) } else { (1, 0) };
        let received = || -> Vec<u64> { world.remotes.iter().map(|it| it.statistic("vx0", "rx_packets")).collect() };
        // The address of the host moves with the first frame that returns on the new way.
        let mut seen = Vec::new();
        let has_moved = eventually(WAIT_LIMIT, || {
            let before = received();
            assert!(pings(host, &remote_address(0), 56, 20), "by {from}");
            let after = received();
            let all = after[used] >= before[used] + 20 && after[idle] == before[idle];
            seen = vec![before, after];
            all
        });
        assert!(has_moved, "{from} gets all and {to} gets nothing: {seen:?}");
        if from == primary {
            frrs[0].kill();
            gateway.wait(primary, "down");
        } else {
            frrs[0].restart();
        }
    }
    gateway.program.stop();
}

/// Management VNI of the sessions in tunnels.
const MANAGEMENT: u32 = 4095;

/// Headers and control packets of scapy's end. `own` and `gw` are Ethernet addresses.
const SCAPY_END: &str = "
from scapy.contrib.bfd import BFD
L3, loopback = (IPv6, '::ffff:127.0.0.1') if version == 6 else (IP, '127.0.0.1')
hops = lambda n: {'hlim': n} if version == 6 else {'ttl': n}
def inner(ttl=255, mac='00:00:5e:00:52:02', to=loopback, dport=3784):
    ip = L3(src=remote, dst=to, **hops(ttl))
    return Ether(src=own, dst=mac)/ip/UDP(sport=49200, dport=dport)
def outer(vni, source=remote):
    return Ether(src=own, dst=gw)/L3(src=source, dst=vtep)/UDP(sport=50000, dport=4789)/VXLAN(flags=8, vni=vni)
def control(**fields):
    intervals = {'min_tx_interval': 200000, 'min_rx_interval': 120000, 'echo_rx_interval': 0, 'detect_mult': 15}
    return BFD(**{'sta': 1, 'my_discriminator': 7, 'your_discriminator': 0, **intervals, **fields})
";

/// One end of a session (RFC 5880 section 6.8.6). It ends with an error if a packet has not the form of RFC 8971.
const SCAPY_LOOP: &str = "
import select, time
s = conf.L2socket(iface='eth0')
state, yours, due = 1, 0, 0
while True:
    ready, _, _ = select.select([s], [], [], max(0, due - time.monotonic()))
    final = False
    if ready:
        p = s.recv()
        if p is None or p.src != gw or VXLAN not in p or p[VXLAN].vni != management: continue
        frame = p[VXLAN].payload
        ip = frame.payload
        assert (frame.dst, frame.src) == ('00:00:5e:00:52:02', gw), frame.summary()
        assert (ip.src, ip.dst) == (vtep, loopback), frame.summary()
        assert getattr(ip, 'hlim' if version == 6 else 'ttl') == 255, frame.summary()
        got = frame[BFD]
        yours = got.my_discriminator
        assert got.your_discriminator in (0, 7), got.your_discriminator
        if got.sta == 0 or (state, got.sta) == (3, 1): state = 1
        elif (state, got.sta) == (1, 1): state = 2
        elif (state, got.sta) in ((1, 2), (2, 2), (2, 3)): state = 3
        final = bool(got.flags.P)
        if not final: continue
    else:
        due = time.monotonic() + 0.17
    packet = control(sta=state, your_discriminator=yours, flags='F' if final else 0)
    s.send(outer(management)/inner()/packet)
";

/// Returns what scapy code needs to know about the ends.
fn scapy_names(world: &World) -> String {
    let variant = world.variant;
    format!(
        "version, remote, vtep, management = {}, '{}', '{}', {MANAGEMENT}\nown, gw = '{}', '{}'\n{SCAPY_END}",
        if variant.ipv6 { 6 } else { 4 },
        variant.remote(0),
        variant.vtep(),
        colons(world.remotes[0].mac("eth0")),
        colons(world.gateway.mac("wan")),
    )
}

/// The session of a remote in VXLAN tunnels (RFC 8971), whose other end is scapy beside the kernel's VXLAN device.
/// Packets of another form do not disturb it, and no host gets them.
pub(crate) fn a_remote_in_vxlan_leaves_and_returns(variant: Variant) {
    let world = World::new(variant, 1, 2, 1500);
    let (host, remote) = (&world.hosts[0], &world.remotes[0]);
    let (local, other) = (variant.remote(0).to_string(), variant.remote(1).to_string());
    let settings = format!("{SETTINGS}management_vni = {MANAGEMENT}\nexcept = [\"{other}\"]\n");
    let mut gateway = Gateway::start(&world, &settings);
    world.wait_for(&mut gateway.program, host, &remote_address(1));
    assert!(!pings(host, &remote_address(0), 56, 1), "nothing is sent before the session is up");

    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = folder.path().join("end.py").display().to_string();
    let text = "from scapy.all import *\nfrom scapy.layers.vxlan import VXLAN\n".to_owned() + &scapy_names(&world);
    std::fs::write(&script, text + SCAPY_LOOP).expect("write the script");
    let end = || remote.spawn(&[python().expect("the requirement is met"), &script]);
    let mut wire = remote.frames("eth0");
    let gateway_mac = world.gateway.mac("wan");
    let is_bfd = |bytes: &[u8]| {
        let parsed = wirepath_wire::parse(bytes);
        bytes[6..12] == gateway_mac && parsed.is_ok_and(|it| it.vni().is_some_and(|vni| vni.get() == MANAGEMENT))
    };
    let get = |wire: &mut FramePort, found: &mut Vec<Vec<u8>>, count: usize| {
        eventually(WAIT_LIMIT, || {
            found.extend(wire.drain().into_iter().map(|frame| frame.bytes).filter(|bytes| is_bfd(bytes)));
            found.len() >= count
        })
    };
    // The session is down until scapy begins.
    let mut of_bfd: Vec<Vec<u8>> = Vec::new();
    assert!(get(&mut wire, &mut of_bfd, 1), "the gateway sends nothing");
    let mut scapy = end();
    let session = gateway.wait(&local, "up");
    assert_eq!(session["mode"], "vxlan");
    world.wait_for(&mut gateway.program, host, &remote_address(0));
    // Scapy announces 200 ms. Its multiplier is 15, because a loaded machine makes it wait.
    let settled = eventually(WAIT_LIMIT, || gateway.session(&local)["detection_time"] == 3.0);
    assert!(settled, "{}", gateway.session(&local));

    assert!(get(&mut wire, &mut of_bfd, 20), "{} packets", of_bfd.len());
    oracle::assert_clean(&of_bfd);
    let names = ["vxlan.vni", "eth.dst", "udp.dstport", "bfd.sta", "bfd.my_discriminator", "bfd.your_discriminator"];
    let rows = oracle::fields(&of_bfd, &names);
    for row in &rows {
        let inside: Vec<&str> = row[..3].iter().map(|it| it.split(',').next_back().unwrap_or_default()).collect();
        assert_eq!(inside, ["4095", "00:00:5e:00:52:02", "3784"], "{row:?}");
    }
    for state in ["0x01", "0x03"] {
        assert!(rows.iter().any(|row| row[3] == state), "{state}: {rows:?}");
    }
    let last = rows.last().expect("a packet");
    assert_eq!(last[5], "0x00000007", "{last:?}");

    // Each of them would take the session down.
    let code = format!(
        "{}
yours = {}
down = control(your_discriminator=yours)
emit(outer(management)/inner(ttl=254)/down)
emit(outer(management + 1)/inner()/down)
emit(outer({VNI})/inner()/down)
emit(outer(management, source='{other}')/inner()/down)
emit(outer(management)/inner()/control(your_discriminator=yours ^ 1))
emit(outer(management)/inner(to='fd00:1::9' if version == 6 else '10.1.0.9')/down)
emit(outer(management)/inner(dport=4784)/control(your_discriminator=yours))
emit(outer(management)/inner()/control(your_discriminator=yours, detect_mult=0))
emit(Ether(src=own, dst=gw)/L3(src=remote, dst=vtep, **hops(255))/UDP(sport=49200, dport=3784)/down)
",
        scapy_names(&world),
        last[4],
    );
    let none: [&[u8]; 0] = [];
    let bad = oracle::scapy(&none, &code).frames;
    let mut at_host = host.frames("eth0");
    bad.iter().for_each(|frame| wire.send(frame).expect("sent"));
    let counted = || format!("{:?}", gateway.show("drops", &[]));
    assert!(eventually(WAIT_LIMIT, || counted().contains("bfd_ttl")), "{}", counted());
    world.wait_for(&mut gateway.program, host, &remote_address(0));
    let session = gateway.session(&local);
    assert_eq!((&session["state"], &session["downs"]), (&"up".into(), &0.into()), "{session}");
    let at_tenant = at_host.drain().into_iter().filter(|frame| frame.bytes.starts_with(&[0, 0, 0x5e, 0, 0x52, 2]));
    assert_eq!(at_tenant.count(), 0, "a host gets a control packet");

    // A silent end takes the remote out, although the kernel's VXLAN device still works.
    let outcome = scapy.kill();
    assert_eq!(outcome.code, None, "it had ended by itself: {}{}", outcome.stdout, outcome.stderr);
    gateway.assert_lost(&local, host, &mut wire);
    scapy = end();
    gateway.wait(&local, "up");
    world.wait_for(&mut gateway.program, host, &remote_address(0));

    // The gateway says that it stops.
    wire.drain();
    let summary = gateway.program.stop();
    let of_bfd: Vec<Vec<u8>> = wire.drain().into_iter().map(|it| it.bytes).filter(|bytes| is_bfd(bytes)).collect();
    let rows = oracle::fields(&of_bfd, &["bfd.sta", "bfd.diag"]);
    assert_eq!(rows.last().map(|row| [&*row[0], &*row[1]]), Some(["0x00", "0x07"]), "{rows:?}");
    let outcome = scapy.kill();
    assert_eq!(outcome.code, None, "it had ended by itself: {}{}", outcome.stdout, outcome.stderr);
    for (reason, count) in
        [("bfd_ttl", 1), ("unknown_vni", 1), ("bfd_no_session", 4), ("bfd_invalid", 3), ("bfd_authentication", 0)]
    {
        assert_eq!(summary.drops(reason), count, "{reason}: {}", summary.json);
    }
}
