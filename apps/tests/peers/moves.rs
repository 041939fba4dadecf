use std::time::Duration;

use wirepath_testlab::{FramePort, eventually};

use crate::world::{PATIENCE, Way, World, ethernet, remote_address};

const NOMAD: [u8; 6] = [2, 0, 0, 0, 0xaa, 1];
const SETTLER: [u8; 6] = [2, 0, 0, 0, 0xbb, 1];
const EVERYBODY: [u8; 6] = [0xff; 6];

/// An address that moves from a remote to another, to a local host, and back: frames to it follow, and go nowhere else.
pub(crate) fn the_forwarding_database_follows(way: Way) {
    let world = World::new(way, 2, 2, 1500);
    let mut gateway = world.start();
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(1));
    let mut talker = world.hosts[0].frames("eth0");
    let mut places: Vec<(&str, FramePort)> = vec![
        ("remote0", world.remotes[0].frames("vx0")),
        ("remote1", world.remotes[1].frames("vx0")),
        ("host1", world.hosts[1].frames("eth0")),
    ];
    // Known on the local side, so that answers to it are not flooded.
    talker.send(&ethernet(EVERYBODY, SETTLER, "here")).expect("sent");
    for (round, home) in [0, 1, 2, 0, 2, 1].into_iter().enumerate() {
        let here = ethernet(SETTLER, NOMAD, &format!("moved {round}"));
        places[home].1.send(&here).expect("sent");
        assert!(
            talker.receive_where(PATIENCE, |frame| frame.bytes == here).is_some(),
            "round {round}: from {}",
            places[home].0
        );
        for (_, port) in &mut places {
            port.drain();
        }
        // Learning is the control thread's work: the first frames may still be flooded, or go to the old place.
        let mut attempt = 0;
        let followed = eventually(PATIENCE, || {
            attempt += 1;
            let to = ethernet(NOMAD, SETTLER, &format!("to {round} {attempt}"));
            talker.send(&to).expect("sent");
            let arrived = places[home].1.receive_where(Duration::from_secs(2), |frame| frame.bytes == to).is_some();
            std::thread::sleep(Duration::from_millis(50));
            let elsewhere = places
                .iter_mut()
                .enumerate()
                .any(|(n, (_, port))| n != home && port.drain().iter().any(|frame| frame.bytes == to));
            arrived && !elsewhere
        });
        assert!(followed, "round {round}: frames do not go to {} alone", places[home].0);
    }
    gateway.stop();
}
