//! `xdp_live` on a real kernel: contents of bursts, refused frames, and interfaces that take no live frames.

use std::time::Duration;

use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Pool};
use wirepath_pmd::port::StartedPort;
use wirepath_testlab::{FramePort, Lab, Namespace, Requirement, eventually, require};

use crate::common;

const TIMEOUT: Duration = Duration::from_secs(20);

/// A cable: the port is at `near`, a packet socket at `far`.
struct Cable {
    near: Namespace,
    far: Namespace,
    far_end: FramePort,
    pool: Pool,
    _lab: Lab,
}

impl Cable {
    fn new(name: &str) -> Self {
        let lab = Lab::new(name);
        let (near, far) = (lab.namespace("near"), lab.namespace("far"));
        lab.veth((&near, "eth0"), (&far, "eth0"));
        let far_end = far.frames("eth0");
        let cable = Self { near, far, far_end, pool: common::pool(), _lab: lab };
        cable.set_gro(true);
        cable
    }

    fn set_gro(&self, on: bool) {
        self.far.run(&["ethtool", "-K", "eth0", "gro", if on { "on" } else { "off" }]).expect();
    }

    fn start(&self, keys: &str) -> Result<StartedPort, String> {
        let table = format!("driver = \"xdp_live\"\ndevice = \"eth0\"\n[port.xdp_live]\n{keys}");
        common::start(&table, &self.pool).map_err(|error| error.to_string())
    }

    /// Gives frames to the port, as many at once as a batch has room for.
    fn send(&self, port: &mut StartedPort, frames: &[Vec<u8>]) {
        for chunk in frames.chunks(64) {
            let mut batch: Batch = chunk.iter().map(|frame| common::packet(&self.pool, frame)).collect();
            while !batch.is_empty() {
                port.tx[0].transmit(&mut batch);
            }
        }
    }

    /// Returns the experimental frames that have arrived.
    fn arrived(&mut self) -> Vec<Vec<u8>> {
        self.far_end
            .drain()
            .into_iter()
            .map(|frame| frame.bytes)
            .filter(|frame| frame[12..14] == [0x88, 0xb5])
            .collect()
    }
}

/// An experimental frame of `len` bytes with a number, which all of its bytes depend on.
fn frame(number: u32, len: usize) -> Vec<u8> {
    let mut frame = [&[2; 6][..], &[4; 6], &[0x88, 0xb5], &number.to_be_bytes()].concat();
    frame.extend((frame.len()..len).map(|at| (at as u32).wrapping_mul(31).wrapping_add(number) as u8));
    frame
}

/// Live frames are recycled with their old contents and lengths, so lengths go up and down here.
#[test]
fn bursts_of_all_lengths_arrive_whole_and_in_order() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 3), Requirement::Program("ethtool"));
    for burst in [1, 7, 64, 512, 4096] {
        let mut cable = Cable::new("livebursts");
        let seed = 0x11fe + burst;
        let mut random = fastrand::Rng::with_seed(seed);
        let frames: Vec<_> = (0..3000).map(|number| frame(number, random.usize(60..=1514))).collect();
        let namespace = cable.near.name().to_owned();
        let mut arrived = Vec::new();
        let mut it = cable.near.inside(|| cable.start(&format!("burst = {burst}\n"))).unwrap();
        for part in frames.chunks(500) {
            cable.near.inside(|| {
                cable.send(&mut it, part);
                it.tx[0].reclaim();
            });
            assert_eq!(it.tx[0].in_flight(), Some(0));
            arrived.extend(cable.arrived());
        }
        eventually(TIMEOUT, || {
            arrived.extend(cable.arrived());
            arrived.len() >= frames.len()
        });
        let wrong = arrived.iter().zip(&frames).position(|(arrived, sent)| arrived != sent);
        assert_eq!((wrong, arrived.len()), (None, frames.len()), "burst {burst}, seed {seed}, {namespace}");
        let sent = it.port.tx_statistics().remove(0);
        let bytes: usize = frames.iter().map(Vec::len).sum();
        assert_eq!((sent.packets, sent.bytes, sent.dropped()), (3000, bytes as u64, 0), "{sent:?}");
    }
}

/// The kernel tells only how many frames an interface refused. Here the other end has a smaller MTU.
#[test]
fn refused_frames_are_counted() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 3), Requirement::Program("ethtool"));
    let mut cable = Cable::new("liverefused");
    cable.far.ip("link set eth0 mtu 600");
    let mut it = cable.near.inside(|| cable.start("burst = 100\n")).unwrap();
    let frames: Vec<_> = (0..1000).map(|number| frame(number, if number % 50 == 49 { 1000 } else { 60 })).collect();
    cable.near.inside(|| cable.send(&mut it, &frames));
    let mut arrived = Vec::new();
    eventually(TIMEOUT, || {
        it.port.events();
        cable.near.inside(|| it.tx[0].reclaim());
        arrived.extend(cable.arrived());
        let sent = it.port.tx_statistics().remove(0);
        sent.dropped() > 0 && sent.packets <= arrived.len() as u64
    });
    let sent = it.port.tx_statistics().remove(0);
    let refused = cable.near.statistic("eth0", "tx_dropped");
    assert!(refused >= 20, "as many as are too long at least: {refused}");
    assert_eq!(sent.drops, [(DropReason::TxFull, refused)]);
    assert_eq!((sent.packets, arrived.len() as u64), (1000 - refused, 1000 - refused), "{sent:?}");
    assert!(arrived.iter().all(|frame| frame.len() == 60));
}

#[test]
fn a_peer_that_stops_taking_frames_is_noticed() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 3), Requirement::Program("ethtool"));
    let mut cable = Cable::new("livegro");
    let mut it = cable.near.inside(|| cable.start("")).unwrap();
    cable.set_gro(false);
    let drops = |it: &StartedPort| it.port.tx_statistics().remove(0).drops;
    let noticed = eventually(TIMEOUT, || {
        cable.near.inside(|| {
            it.port.events();
            cable.send(&mut it, &[frame(1, 60)]);
            it.tx[0].reclaim();
        });
        !drops(&it).is_empty()
    });
    assert!(noticed, "frames count as sent that nobody takes");
    assert!(matches!(drops(&it)[..], [(DropReason::LinkDown, 1)]), "{:?}", drops(&it));
    cable.set_gro(true);
    let again = eventually(TIMEOUT, || {
        cable.near.inside(|| {
            it.port.events();
            cable.send(&mut it, &[frame(2, 60)]);
            it.tx[0].reclaim();
        });
        cable.arrived().contains(&frame(2, 60))
    });
    assert!(again, "nothing arrives although the peer takes frames again");
}

#[test]
fn interfaces_that_cannot_are_refused_with_the_remedy() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 3), Requirement::Program("ethtool"));
    let cable = Cable::new("liveno");
    cable.set_gro(false);
    cable.near.inside(|| {
        let error = cable.start("").unwrap_err();
        assert!(
            error.starts_with("xdp_live: eth0: the other end of the cable takes no frames of XDP programs")
                && error.contains("`ethtool -K PEER gro on`"),
            "{error}"
        );
    });
    cable.set_gro(true);
    cable.near.ip("link add bridge type bridge");
    cable.near.inside(|| {
        let error = common::start("driver = \"xdp_live\"\ndevice = \"bridge\"\n", &cable.pool).unwrap_err().to_string();
        assert!(error.starts_with("xdp_live: bridge: its driver sends no frames of XDP programs"), "{error}");
        let other = common::start("driver = \"af_xdp\"\ndevice = \"eth0\"\n", &cable.pool).unwrap();
        let error = cable.start("").unwrap_err();
        assert!(
            error.starts_with("xdp_live: eth0: an XDP program is attached to the interface")
                && error.ends_with("`ip link set dev eth0 xdp off`"),
            "{error}"
        );
        drop((other.rx, other.tx, other.port));
        // The port leaves no program behind.
        for _ in 0..2 {
            let it = cable.start("").unwrap();
            assert!(cable.near.ip("link show eth0").contains("xdpgeneric"));
            it.port.stop(it.rx, it.tx).unwrap();
            assert!(!cable.near.ip("link show eth0").contains("xdp"));
        }
    });
}

/// Frames that come from the interface pass the program on their way to the kernel.
#[test]
fn the_kernel_still_gets_the_frames_of_the_interface() {
    require!(all Requirement::LAB, Requirement::Kernel(6, 3), Requirement::Program("ethtool"));
    let cable = Cable::new("livepass");
    let mut it = cable.near.inside(|| cable.start("")).unwrap();
    let received = frame(3, 1000);
    let mut got = Vec::new();
    eventually(TIMEOUT, || {
        if got.is_empty() {
            cable.far_end.send(&received).unwrap();
        }
        let mut batch = Batch::new();
        it.rx[0].receive(&mut batch);
        got.extend(batch.iter().map(common::bytes).filter(|bytes| bytes[12..14] == [0x88, 0xb5]));
        !got.is_empty()
    });
    assert!(got.first() == Some(&received), "{} frames came, none as it was sent", got.len());
}
