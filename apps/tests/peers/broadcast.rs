use std::time::Duration;

use wirepath_testlab::{FramePort, eventually};

use crate::world::{Variant, WAIT_LIMIT, World, ethernet, remote_address};

const STRANGER: [u8; 6] = [2, 0, 0, 0, 0x77, 1];
const BROADCAST: [u8; 6] = [0xff; 6];
/// Long enough for a duplicate to arrive.
const QUIET: Duration = Duration::from_millis(300);

/// With three remotes, a broadcast from the local side reaches each remote once. A broadcast from a remote
/// reaches the local side and no other remote (split horizon). The same holds for frames to unknown
/// addresses. ARP, which needs both directions, works with all remotes.
pub(crate) fn reaches_every_remote_once(variant: Variant) {
    let world = World::new(variant, 2, 3, 1500);
    let mut gateway = world.start();
    for n in 0..3 {
        world.wait_for(&mut gateway, &world.hosts[0], &remote_address(n));
        world.wait_for(&mut gateway, &world.hosts[1], &remote_address(n));
    }

    let hosts = world.hosts.iter().map(|host| host.frames("eth0"));
    let mut ports: Vec<FramePort> = hosts.chain(world.remotes.iter().map(|remote| remote.frames("vx0"))).collect();
    for (destination, what) in
        [(BROADCAST, "broadcast"), ([2, 0, 0, 0, 0x66, 0x66], "unknown"), ([1, 0, 0x5e, 1, 2, 3], "multicast")]
    {
        let out = ethernet(destination, STRANGER, &format!("out {what}"));
        assert_eq!(copies(&mut ports, 0, &out), [0, 1, 1, 1, 1], "{what} from host0 at hosts and remotes");
        let back = ethernet(destination, [2, 0, 0, 0, 0x77, 2], &format!("in {what}"));
        // Split horizon: the other remotes get nothing.
        assert_eq!(copies(&mut ports, 3, &back), [1, 1, 0, 0, 0], "{what} from remote1 at hosts and remotes");
    }
    gateway.stop();
}

/// Sends a frame and counts its copies at each port.
fn copies(ports: &mut [FramePort], from: usize, frame: &[u8]) -> Vec<usize> {
    ports[from].send(frame).expect("sent");
    let mut counts = vec![0; ports.len()];
    // Waits until copies have arrived and no more arrive for a while.
    eventually(WAIT_LIMIT, || {
        std::thread::sleep(QUIET);
        let before = counts.clone();
        for (count, port) in counts.iter_mut().zip(&mut *ports) {
            *count += port.drain().iter().filter(|seen| seen.bytes == frame).count();
        }
        counts == before && counts.iter().any(|count| *count > 0)
    });
    counts
}
