// UNSAFETY: a thread gets a separate mount namespace.
#![allow(unsafe_code)]

use std::fs::File;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::eventually;
use crate::frames::FramePort;
use crate::permit::{Limit, Permit};
use crate::process::{Background, Outcome, run, spawn};

/// Prefix of namespace names. The process id, a number and the given name follow.
const PREFIX: &str = "wp-";
/// Maximum time until a cable carries frames. It only ends a hopeless wait.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Hosts and cables, which are removed when the lab is dropped.
///
/// Only as many threads of a process as there are processors may have labs at the same time. The others wait,
/// because tests with real traffic would disturb each other.
#[derive(Debug)]
pub struct Lab {
    prefix: String,
    _permit: Permit,
}

impl Lab {
    /// Creates an empty lab. It needs [`crate::Requirement::LAB`].
    pub fn new(name: &str) -> Self {
        static CLEANED: Once = Once::new();
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let permit = LABS.take();
        CLEANED.call_once(remove_stale_namespaces);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self { prefix: format!("{PREFIX}{}-{number}-{name}", std::process::id()), _permit: permit }
    }

    /// Creates a host: a network namespace with loopback up and without unsolicited IPv6 traffic (see
    /// [`Namespace::ipv6`]).
    pub fn namespace(&self, name: &str) -> Namespace {
        let name = format!("{}-{name}", self.prefix);
        run(&["ip", "netns", "add", &name]).expect();
        let namespace = Namespace { name };
        namespace.ip("link set lo up");
        namespace.sysctl("net.ipv6.conf.default.disable_ipv6", "1");
        namespace
    }

    /// Connects two hosts, or two interfaces of one, by a cable with both ends up.
    pub fn veth(&self, a: (&Namespace, &str), b: (&Namespace, &str)) {
        Veth::new(a, b).plug();
    }
}

/// A network namespace of a [`Lab`]. It may be dropped before or after the lab. Its processes and links are
/// removed with it.
#[derive(Debug)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Returns the name, as in `ip netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip -n NAME ...` with words separated by blanks. Panics if it fails.
    #[track_caller]
    pub fn ip(&self, words: &str) -> String {
        let arguments: Vec<&str> = ["ip", "-n", &self.name].into_iter().chain(words.split_whitespace()).collect();
        run(&arguments).expect()
    }

    /// Runs a program in this namespace to its end.
    #[track_caller]
    pub fn run(&self, arguments: &[&str]) -> Outcome {
        run(&self.command(arguments))
    }

    /// Starts a program in this namespace.
    #[track_caller]
    pub fn spawn(&self, arguments: &[&str]) -> Background {
        spawn(&self.command(arguments))
    }

    fn command<'a>(&'a self, arguments: &[&'a str]) -> Vec<&'a str> {
        [&["ip", "netns", "exec", &self.name], arguments].concat()
    }

    /// Runs `work` on a thread in this namespace, including `/sys`. Threads that it starts are in the
    /// namespace too. Panics are propagated.
    pub fn inside<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.enter();
                work()
            });
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    fn enter(&self) {
        let path = PathBuf::from("/run/netns").join(&self.name);
        let file = File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), Some(LinkNameSpaceType::Network)).expect("setns");
        // Sysfs shows the network devices of the namespace that mounted it. Like `ip netns exec`, mount it
        // again, visible to this thread only.
        // SAFETY: unsharing the descriptor table would be unsound, since other code relies on it. It stays shared.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.expect("unshare");
        mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC).expect("private mounts");
        mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None).expect("mount /sys");
    }

    /// Sets a kernel parameter of this namespace, if the kernel has it.
    pub fn sysctl(&self, key: &str, value: &str) {
        let path = format!("/proc/sys/{}", key.replace('.', "/"));
        self.inside(|| {
            if std::fs::exists(&path).unwrap_or(false) {
                std::fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
            }
        });
    }

    /// Enables IPv6 on an interface. Addresses are usable at once: no duplicate address detection and no
    /// router solicitations.
    pub fn ipv6(&self, interface: &str) {
        self.sysctl(&format!("net.ipv6.conf.{interface}.accept_dad"), "0");
        self.sysctl(&format!("net.ipv6.conf.{interface}.router_solicitations"), "0");
        self.sysctl(&format!("net.ipv6.conf.{interface}.disable_ipv6"), "0");
    }

    /// Opens a packet socket on an interface.
    pub fn frames(&self, interface: &str) -> FramePort {
        self.inside(|| FramePort::open(interface).unwrap_or_else(|error| panic!("{interface}: {error}")))
    }

    /// Returns the link-layer address of an interface.
    #[track_caller]
    pub fn mac(&self, interface: &str) -> [u8; 6] {
        let text =
            self.inside(|| std::fs::read_to_string(format!("/sys/class/net/{interface}/address"))).expect("address");
        let mut bytes = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).expect("hex"));
        std::array::from_fn(|_| bytes.next().expect("six bytes"))
    }

    /// Returns the MTU of an interface.
    #[track_caller]
    pub fn mtu(&self, interface: &str) -> u32 {
        let text = self.inside(|| std::fs::read_to_string(format!("/sys/class/net/{interface}/mtu"))).expect("an MTU");
        text.trim().parse().expect("a number")
    }

    /// Returns a statistic of an interface, such as `rx_packets`.
    #[track_caller]
    pub fn statistic(&self, interface: &str, name: &str) -> u64 {
        let path = format!("/sys/class/net/{interface}/statistics/{name}");
        self.inside(|| std::fs::read_to_string(path)).expect("a statistic").trim().parse().expect("a number")
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        remove_namespace(&self.name);
    }
}

/// Parameters of a cable.
#[derive(Debug)]
pub struct Veth<'a> {
    ends: [(&'a Namespace, &'a str); 2],
    mtu: u32,
    queues: u32,
    macs: [Option<&'a str>; 2],
}

impl<'a> Veth<'a> {
    /// A cable between interfaces of two namespaces, or of one.
    pub fn new(a: (&'a Namespace, &'a str), b: (&'a Namespace, &'a str)) -> Self {
        Self { ends: [a, b], mtu: 1500, queues: 1, macs: [None, None] }
    }

    /// Sets the MTU of both ends.
    #[must_use]
    pub fn mtu(mut self, mtu: u32) -> Self {
        self.mtu = mtu;
        self
    }

    /// Sets the number of receive and transmit queues of both ends.
    #[must_use]
    pub fn queues(mut self, queues: u32) -> Self {
        self.queues = queues;
        self
    }

    /// Sets the link-layer addresses of the ends.
    #[must_use]
    pub fn macs(mut self, a: &'a str, b: &'a str) -> Self {
        self.macs = [Some(a), Some(b)];
        self
    }

    /// Creates the cable. Both ends are up afterwards and carry frames.
    #[track_caller]
    pub fn plug(self) {
        let [(a, a_name), (b, b_name)] = self.ends;
        let queues = format!("numtxqueues {0} numrxqueues {0}", self.queues);
        a.ip(&format!(
            "link add {a_name} mtu {0} {queues} type veth peer name {b_name} mtu {0} {queues} netns {1}",
            self.mtu, b.name
        ));
        for ((namespace, name), mac) in self.ends.into_iter().zip(self.macs) {
            if let Some(mac) = mac {
                namespace.ip(&format!("link set {name} address {mac}"));
            }
            namespace.ip(&format!("link set {name} up"));
        }
        // The end that was set up first learns of its carrier asynchronously, and until then drops frames
        // without an error (linux: net/core/link_watch.c).
        for (namespace, name) in self.ends {
            let is_up = || namespace.ip(&format!("-o link show {name}")).contains(" state UP ");
            assert!(eventually(TIMEOUT, is_up), "{name} does not see the other end of its cable");
        }
    }
}

fn remove_namespace(name: &str) {
    for pid in run(&["ip", "netns", "pids", name]).stdout.split_whitespace() {
        if let Some(pid) = pid.parse().ok().and_then(rustix::process::Pid::from_raw)
            && pid != rustix::process::getpid()
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
    // Delete links first: an open descriptor would keep the namespace alive, and with it the links.
    let links = run(&["ip", "-n", name, "-o", "link", "show"]).stdout;
    for link in links.lines().filter_map(|line| line.split(": ").nth(1)) {
        let link = link.split('@').next().unwrap_or(link);
        if link != "lo" {
            run(&["ip", "-n", name, "link", "del", link]);
        }
    }
    run(&["ip", "netns", "del", name]);
}

/// Removes namespaces of killed processes.
fn remove_stale_namespaces() {
    let names = run(&["ip", "netns", "list"]).stdout;
    for name in names.lines().filter_map(|line| line.split_whitespace().next()) {
        let owner =
            name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()).and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| pid != std::process::id() && !std::path::Path::new(&format!("/proc/{pid}")).exists())
        {
            remove_namespace(name);
        }
    }
}

/// Threads that have labs. Tests with real traffic wait two thirds of their time, so twice as many as there are
/// processors keep these busy. More would only disturb each other.
static LABS: Limit = Limit::new(2, 8);

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::Requirement;

    #[test]
    fn a_cable_between_two_hosts_and_nothing_left() {
        crate::require!(all Requirement::LAB);
        let lab = Lab::new("cable");
        let (a, b) = (lab.namespace("a"), lab.namespace("b"));
        Veth::new((&a, "eth0"), (&b, "eth0")).mtu(9000).queues(2).macs("02:00:00:00:00:0a", "02:00:00:00:00:0b").plug();
        // The first frame sent arrives.
        let mut ends = [a.frames("eth0"), b.frames("eth0")];
        let frame = [&[0xff; 12][..], &[0x88, 0xb5], &[7; 46]].concat();
        for [from, to] in [[0, 1], [1, 0]] {
            ends[from].send(&frame).unwrap();
            assert_eq!(ends[to].receive(TIMEOUT).map(|got| got.bytes), Some(frame.clone()));
        }
        assert_eq!(b.mac("eth0"), [2, 0, 0, 0, 0, 0x0b]);
        a.inside(|| {
            let queues = std::fs::read_dir("/sys/class/net/eth0/queues").unwrap().count();
            assert_eq!(queues, 4, "two each way");
        });
        let names = [a.name().to_owned(), b.name().to_owned()];
        drop((a, b, lab));
        let left = run(&["ip", "netns", "list"]).stdout;
        assert!(names.iter().all(|name| !left.contains(name.as_str())));
    }

    #[test]
    fn a_panic_leaves_nothing() {
        crate::require!(all Requirement::LAB);
        let name = Mutex::new(String::new());
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let lab = Lab::new("panic");
            let host = lab.namespace("host");
            name.lock().unwrap().push_str(host.name());
            let _sleeper = host.spawn(&["sleep", "100"]);
            host.inside(|| panic!("on purpose"));
        }));
        assert!(result.is_err());
        assert!(!run(&["ip", "netns", "list"]).stdout.contains(name.lock().unwrap().as_str()));
    }
}
