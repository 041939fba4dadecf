//! Remotes watched by BFD, with FRR's bfdd beside the kernel's `vxlan` device of each remote.

use serde_json::Value;
use tempfile::TempDir;
use wirepath::control_socket::Client;
use wirepath_testlab::{Background, Namespace, Requirement, eventually, oracle, run, skip_or_fail};

use crate::program::Program;
use crate::world::{VNI, Variant, WAIT_LIMIT, World, colons, pings, remote_address};

/// FRR's daemon (Debian: frr). It has no program in the search path.
const BFDD: &str = "/usr/lib/frr/bfdd";
/// Settings of the gateway's sessions.
const SETTINGS: &str = "[bfd]\ntransmit_interval = 100\nreceive_interval = 150\nmultiplier = 4\n";

/// FRR's BFD in the namespace of a remote, with files of its own.
struct Frr<'a> {
    namespace: &'a Namespace,
    folder: TempDir,
    process: Option<Background>,
}

impl<'a> Frr<'a> {
    /// Starts bfdd with a session from `local` to `peer`. `kind` is empty or "multihop".
    fn start(namespace: &'a Namespace, peer: &str, local: &str, kind: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let text = format!(
            "bfd\n peer {peer} {kind} local-address {local}\n  detect-multiplier 3\n  receive-interval 200\n  \
             transmit-interval 120\n  no shutdown\n !\n!\n"
        );
        std::fs::write(folder.path().join("bfdd.conf"), text).expect("write the configuration");
        // The daemon gives up its rights before it makes its files.
        run(&["chown", "-R", "frr:frr", &folder.path().display().to_string()]).expect();
        let mut frr = Self { namespace, folder, process: None };
        frr.restart();
        frr
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn restart(&mut self) {
        let socket = self.path("bfdd.vty");
        _ = std::fs::remove_file(&socket);
        let process = self.namespace.spawn(&[
            BFDD,
            "--config_file",
            &self.path("bfdd.conf"),
            "--vty_socket",
            &self.path(""),
            "--pid_file",
            &self.path("bfdd.pid"),
            "--bfdctl",
            &self.path("bfdd.sock"),
            "--socket",
            &self.path("no-zebra"),
            "--vty_port",
            "0",
            "--user",
            "frr",
            "--group",
            "frr",
        ]);
        self.process = Some(process);
        assert!(eventually(WAIT_LIMIT, || std::fs::exists(&socket).unwrap_or(false)), "bfdd does not start");
    }

    fn kill(&mut self) {
        let outcome = self.process.take().expect("a running bfdd").kill();
        assert_eq!(outcome.code, None, "it had ended by itself: {}{}", outcome.stdout, outcome.stderr);
    }

    /// Runs commands of FRR's shell.
    #[track_caller]
    fn vtysh(&self, commands: &[&str]) -> String {
        let folder = self.path("");
        let mut arguments = vec!["vtysh", "--vty_socket", &folder];
        commands.iter().for_each(|command| arguments.extend(["-c", command]));
        run(&arguments).expect()
    }

    /// Returns what FRR says about its session.
    fn peer(&self) -> Value {
        let text = self.vtysh(&["show bfd peers json"]);
        serde_json::from_str::<Value>(&text).unwrap_or_else(|error| panic!("{error}: {text}"))[0].clone()
    }

    #[track_caller]
    fn wait(&self, status: &str) -> Value {
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
struct Gateway {
    program: Program,
    client: Client,
}

impl Gateway {
    fn start(world: &World, tables: &str) -> Self {
        let program = world.start_with(&(world.one_segment() + "[control]\nsocket = 'operators.sock'\n" + tables));
        let socket = program.path("operators.sock");
        assert!(eventually(WAIT_LIMIT, || Client::connect(&socket).is_ok()), "no control socket");
        let client = Client::connect(&socket).expect("a connection");
        Self { program, client }
    }

    /// Returns the session with a remote as `wirepath show bfd` has it.
    fn session(&mut self, remote: &str) -> Value {
        let condition = [format!("remote={remote}")];
        let mut table = self.client.show("bfd", &condition, None).expect("a table");
        assert_eq!(table.rows.len(), 1, "{remote}: {table:?}");
        table.columns.into_iter().zip(table.rows.remove(0)).collect::<serde_json::Map<_, _>>().into()
    }

    #[track_caller]
    fn wait(&mut self, remote: &str, state: &str) -> Value {
        let mut session = Value::Null;
        let found = eventually(WAIT_LIMIT, || {
            session = self.session(remote);
            session["state"] == state
        });
        assert!(found, "the session with {remote} is not {state}: {session}");
        session
    }
}

fn is_missing(variant: Variant) -> bool {
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
    let session = gateway.wait(&local, "down");
    assert_eq!(session["diagnostic"], "control detection time expired");
    assert_eq!((&session["carries"], &session["downs"]), (&0.into(), &1.into()));
    wire.drain();
    assert!(!pings(host, &remote_address(0), 56, 1), "no way leads to the remote");
    assert!(pings(host, &remote_address(1), 56, 3), "the other remote is not concerned");
    let tunnelled = wire.drain().into_iter().filter(|frame| {
        wirepath_wire::parse(&frame.bytes).is_ok_and(|it| it.vni().is_some_and(|vni| vni.get() == VNI))
    });
    assert_eq!(tunnelled.count(), 0, "frames to a remote that is down");
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
    let config = config + "[control]\nsocket = 'operators.sock'\n" + SETTINGS;
    let program = world.start_with(&config);
    let socket = program.path("operators.sock");
    assert!(eventually(WAIT_LIMIT, || Client::connect(&socket).is_ok()), "no control socket");
    let client = Client::connect(&socket).expect("a connection");
    let mut gateway = Gateway { program, client };
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
