use std::time::Duration;

use wirepath_testlab::{FramePort, eventually};

use crate::world::{Variant, WAIT_LIMIT, World, ethernet, remote_address};

const MOVING: [u8; 6] = [2, 0, 0, 0, 0xaa, 1];
const FIXED: [u8; 6] = [2, 0, 0, 0, 0xbb, 1];
const BROADCAST: [u8; 6] = [0xff; 6];

/// An address moves from one remote to another, to a local host, and back. Frames to it follow and go nowhere
/// else.
pub(crate) fn the_forwarding_database_follows(variant: Variant) {
    let world = World::new(variant, 2, 2, 1500);
    let mut gateway = world.start();
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(1));
    let mut talker = world.hosts[0].frames("eth0");
    let mut ends: Vec<(&str, FramePort)> = vec![
        ("remote0", world.remotes[0].frames("vx0")),
        ("remote1", world.remotes[1].frames("vx0")),
        ("host1", world.hosts[1].frames("eth0")),
    ];
    // The local side learns the address, so that replies to it are not flooded.
    talker.send(&ethernet(BROADCAST, FIXED, "here")).expect("sent");
    for (round, current) in [0, 1, 2, 0, 2, 1].into_iter().enumerate() {
        let here = ethernet(FIXED, MOVING, &format!("moved {round}"));
        ends[current].1.send(&here).expect("sent");
        assert!(
            talker.receive_where(WAIT_LIMIT, |frame| frame.bytes == here).is_some(),
            "round {round}: from {}",
            ends[current].0
        );
        for (_, port) in &mut ends {
            port.drain();
        }
        // The control thread learns the address. The first frames may still be flooded or go to the old
        // destination.
        let mut attempt = 0;
        let followed = eventually(WAIT_LIMIT, || {
            attempt += 1;
            let to = ethernet(MOVING, FIXED, &format!("to {round} {attempt}"));
            talker.send(&to).expect("sent");
            let arrived = ends[current].1.receive_where(Duration::from_secs(2), |frame| frame.bytes == to).is_some();
            std::thread::sleep(Duration::from_millis(50));
            let misdelivered = ends
                .iter_mut()
                .enumerate()
                .any(|(n, (_, port))| n != current && port.drain().iter().any(|frame| frame.bytes == to));
            arrived && !misdelivered
        });
        assert!(followed, "round {round}: frames do not go to {} alone", ends[current].0);
    }
    gateway.stop();
}
