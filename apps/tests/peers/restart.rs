use std::collections::HashSet;
use std::time::Duration;

use serde_json::{Map, Value};
use wirepath_testlab::{FramePort, eventually};

use crate::program::Program;
use crate::world::{Variant, WAIT_LIMIT, World, ethernet};

/// Stations at the local port, each with a partner behind a remote. Each pair has a flow in each direction.
const PAIRS: u64 = 5_000;
/// Pairs whose frames are on their way at the same time, so that no queue overflows.
const WINDOW: usize = 100;

/// Ethernet addresses of a pair.
fn stations(pair: u64) -> [[u8; 6]; 2] {
    [1, 2].map(|side| {
        let bytes = (0x0200_0000_0000 | side << 32 | pair).to_be_bytes();
        [bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7]]
    })
}

/// The ends of the frames: the first host, and both remotes. Nothing is sent to the second host.
struct Ends {
    host: FramePort,
    remotes: [FramePort; 2],
    bystander: FramePort,
}

impl Ends {
    fn open(world: &World) -> Self {
        let port = |n: usize| world.remotes[n].frames("vx0");
        Self {
            host: world.hosts[0].frames("eth0"),
            remotes: [port(0), port(1)],
            bystander: world.hosts[1].frames("eth0"),
        }
    }

    fn send(&self, pair: u64) {
        let [near, far] = stations(pair);
        self.host.send(&ethernet(far, near, "out")).expect("sent");
        self.remotes[pair as usize % 2].send(&ethernet(near, far, "back")).expect("sent");
    }

    /// Sends a frame of each flow. Each arrives at its station, and nowhere else.
    fn exchange(&mut self) {
        let pairs: Vec<u64> = (0..PAIRS).collect();
        for window in pairs.chunks(WINDOW) {
            window.iter().for_each(|pair| self.send(*pair));
            let of = |pairs: &mut dyn Iterator<Item = &u64>, side: usize| -> HashSet<[u8; 6]> {
                pairs.map(|pair| stations(*pair)[side]).collect()
            };
            arrive(&mut self.host, of(&mut window.iter(), 0), "the host");
            for (n, port) in self.remotes.iter_mut().enumerate() {
                let mut own = window.iter().filter(|pair| **pair as usize % 2 == n);
                arrive(port, of(&mut own, 1), "a remote");
            }
        }
        assert_eq!(marked(&mut self.bystander), 0, "frames at another host");
    }
}

/// Waits until a port has received one frame to each of these addresses, and no other one.
fn arrive(port: &mut FramePort, mut expected: HashSet<[u8; 6]>, whose: &str) {
    while !expected.is_empty() {
        let frame = port.receive_where(WAIT_LIMIT, |frame| frame.bytes.get(12..14) == Some(&[0x88, 0xb5]));
        let frame = frame.unwrap_or_else(|| panic!("{} frames do not reach {whose}", expected.len()));
        let to = frame.bytes.first_chunk::<6>().expect("a frame");
        assert!(expected.remove(to), "{whose} receives a frame to {to:x?}, which is not there");
    }
}

/// Drains a port. Returns the number of its frames of the test.
fn marked(port: &mut FramePort) -> usize {
    port.drain().iter().filter(|frame| frame.bytes.get(12..14) == Some(&[0x88, 0xb5])).count()
}

fn row(program: &Program, table: &str, at: usize) -> Map<String, Value> {
    let rows = program.rows(table);
    rows.into_iter().nth(at).unwrap_or_else(|| panic!("no row {at} in {table}"))
}

/// Waits until both remotes can be reached.
fn wait_for_remotes(program: &mut Program) {
    let ready = eventually(WAIT_LIMIT, || {
        assert!(program.running(), "the gateway has ended");
        program.path("operators.sock").exists()
            && program.rows("remotes").iter().filter(|row| row["state"] == "ready").count() == 2
    });
    assert!(ready, "{:?}", program.rows("remotes"));
}

/// A gateway that is killed under traffic goes on with what it had learned: the first frame of each known flow reaches
/// its station, and none is flooded. An old file is not used.
pub(crate) fn floods_no_known_station(variant: Variant) {
    let world = World::new(variant, 2, 2, 1500);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("state");
    let second = format!(", \"{}\"", variant.remote(1));
    let state = |max_age: u32| format!("[state]\nfile = \"{}\"\ninterval = 1\nmax_age = {max_age}\n", file.display());
    // The gateway learns the second remote.
    let accepting = "accept_unknown_remotes = true\nremotes = ";
    let config = world.one_segment().replace(&second, "").replace("remotes = ", accepting)
        + "[control]\nsocket = 'operators.sock'\n";
    assert!(!config.contains(&variant.remote(1).to_string()), "{config}");
    let mut gateway = world.start_with(&(config.clone() + &state(60)));
    let mut ends = Ends::open(&world);
    let stations = 2 * PAIRS;
    let learned = eventually(WAIT_LIMIT * 3, || {
        assert!(gateway.running(), "the gateway has ended");
        for window in (0..PAIRS).collect::<Vec<_>>().chunks(WINDOW) {
            window.iter().for_each(|pair| ends.send(*pair));
            std::thread::sleep(Duration::from_millis(5));
        }
        // Hosts have addresses of their own besides.
        gateway.path("operators.sock").exists()
            && row(&gateway, "segments", 0)["learned"].as_u64().is_some_and(|learned| learned >= stations)
    });
    assert!(learned, "{:?}", row(&gateway, "segments", 0));
    wait_for_remotes(&mut gateway);
    std::thread::sleep(Duration::from_millis(200));
    for port in [&mut ends.host, &mut ends.bystander].into_iter().chain(&mut ends.remotes) {
        port.drain();
    }
    ends.exchange();
    let before = row(&gateway, "state", 0)["written"].as_u64();
    let written = eventually(WAIT_LIMIT, || row(&gateway, "state", 0)["written"].as_u64() > before.map(|n| n + 1));
    assert!(written, "{:?}", row(&gateway, "state", 0));
    (0..PAIRS / 10).for_each(|pair| ends.send(pair));
    gateway.kill();

    let mut gateway = world.start_with(&(config.clone() + &state(60)));
    wait_for_remotes(&mut gateway);
    let restored = row(&gateway, "state", 0);
    assert!(restored["restored_addresses"].as_u64().is_some_and(|n| n >= stations), "{restored:?}");
    assert_eq!((&restored["restored_remotes"], &restored["left_out"]), (&1.into(), &0.into()), "{restored:?}");
    for port in [&mut ends.host, &mut ends.bystander].into_iter().chain(&mut ends.remotes) {
        port.drain();
    }
    ends.exchange();
    let segment = row(&gateway, "segments", 0);
    assert_eq!(segment["unknown_unicast"], 0, "{segment:?}");

    // A process that stops leaves a file too.
    gateway.stop();
    let gateway = world.start_with(&(config.clone() + &state(60)));
    assert!(eventually(WAIT_LIMIT, || gateway.path("operators.sock").exists()));
    let restored = row(&gateway, "state", 0);
    assert!(restored["restored_addresses"].as_u64().is_some_and(|n| n >= stations), "{restored:?}");
    gateway.stop();

    std::thread::sleep(Duration::from_millis(1200));
    let gateway = world.start_with(&(config + &state(1)));
    assert!(eventually(WAIT_LIMIT, || gateway.path("operators.sock").exists()));
    assert_eq!(row(&gateway, "state", 0)["restored_addresses"], 0, "the file is too old");
    gateway.stop();
}
