use std::time::Duration;

use wirepath_testlab::FramePort;

use crate::world::{PATIENCE, Way, World, ethernet, pings, remote_address};

const STRANGER: [u8; 6] = [2, 0, 0, 0, 0x77, 1];
const EVERYBODY: [u8; 6] = [0xff; 6];
/// Long enough for a second copy to arrive, had one been sent.
const QUIET: Duration = Duration::from_millis(300);

/// With three remotes, a broadcast from the local side reaches each of them once; one from a remote reaches the local side and no
/// other remote (split horizon). So does a frame to an address that nobody knows. ARP, which needs both, works with all of them.
pub(crate) fn reaches_every_remote_once(way: Way) {
    let world = World::new(way, 2, 3, 1500);
    let mut gateway = world.start();
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    for n in 0..3 {
        assert!(pings(&world.hosts[0], &remote_address(n), 56, 5), "host0 to remote{n}");
        assert!(pings(&world.hosts[1], &remote_address(n), 56, 5), "host1 to remote{n}");
    }

    let mut hosts: Vec<FramePort> = world.hosts.iter().map(|host| host.frames("eth0")).collect();
    let mut remotes: Vec<FramePort> = world.remotes.iter().map(|remote| remote.frames("vx0")).collect();
    for (destination, what) in
        [(EVERYBODY, "broadcast"), ([2, 0, 0, 0, 0x66, 0x66], "unknown"), ([1, 0, 0x5e, 1, 2, 3], "multicast")]
    {
        let out = ethernet(destination, STRANGER, &format!("out {what}"));
        hosts[0].send(&out).expect("sent");
        for (n, remote) in remotes.iter_mut().enumerate() {
            assert_eq!(copies(remote, &out), 1, "{what} from host0 at remote{n}");
        }
        assert_eq!(copies(&mut hosts[1], &out), 1, "{what} from host0 at host1");
        assert_eq!(copies(&mut hosts[0], &out), 0, "{what} from host0 back at host0");

        let back = ethernet(destination, [2, 0, 0, 0, 0x77, 2], &format!("in {what}"));
        remotes[1].send(&back).expect("sent");
        for (n, host) in hosts.iter_mut().enumerate() {
            assert_eq!(copies(host, &back), 1, "{what} from remote1 at host{n}");
        }
        for n in [0, 2] {
            assert_eq!(copies(&mut remotes[n], &back), 0, "{what} from remote1 at remote{n}: split horizon");
        }
    }
    gateway.stop();
}

/// How many copies of a frame arrive.
fn copies(port: &mut FramePort, wanted: &[u8]) -> usize {
    let Some(_) = port.receive_where(QUIET.max(PATIENCE / 20), |frame| frame.bytes == wanted) else { return 0 };
    let mut count = 1;
    while port.receive_where(QUIET, |frame| frame.bytes == wanted).is_some() {
        count += 1;
    }
    count
}
