//! State reports to the service manager: the protocol of sd_notify(3).
//!
//! A report is one datagram to the socket that `NOTIFY_SOCKET` names. The socket does not block, because a service
//! manager that does not read must not hold the control thread. Reports that find no room are sent later.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use signal_hook::consts::SIGHUP;
use wirepath_pipeline::ControlPlane;
use wirepath_pmd::port::{LinkState, PortEvent, PortId};

use super::output::sanitized;
use super::stop::hangup_flag;

/// Reports that wait for room at most. Later ones replace the last.
const MAX_WAITING: usize = 8;

/// Set by SIGHUP.
static HANGUP: OnceLock<Arc<AtomicBool>> = OnceLock::new();
/// Number of reloads in progress.
static RELOADS: AtomicUsize = AtomicUsize::new(0);

/// Begins to note SIGHUP for the reports.
pub(super) fn start() {
    HANGUP.get_or_init(|| {
        let flag = Arc::default();
        // This fails only for signals that no program can handle.
        let _ = signal_hook::flag::register(SIGHUP, Arc::clone(&flag));
        flag
    });
}

/// A reload in progress. The program reports that it is ready again when no guard is left.
#[derive(Debug)]
pub struct ReloadGuard(());

impl ReloadGuard {
    /// Creates a guard.
    #[expect(clippy::new_without_default, reason = "a guard has an effect")]
    pub fn new() -> Self {
        RELOADS.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for ReloadGuard {
    fn drop(&mut self) {
        RELOADS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// State reports of a program that forwards. Its control calls each method from the method of the same name.
///
/// | Report | When |
/// |---|---|
/// | `READY=1` | at the first tick: all ports are started, and all checks have passed |
/// | `STATUS=` | with `READY=1`, and when a link or device goes or returns |
/// | `RELOADING=1`, `MONOTONIC_USEC=` | after SIGHUP; `READY=1` follows when the rule file was applied or refused |
/// | `WATCHDOG=1` | four times in each `WATCHDOG_USEC`, from the control thread |
/// | `STOPPING=1` | when the workers have stopped |
///
/// Without `NOTIFY_SOCKET` nothing is reported.
#[derive(Debug, Default)]
pub struct Service {
    manager: Option<Manager>,
    phase: Phase,
    /// Why ports do not carry packets.
    down: BTreeMap<u16, &'static str>,
    status: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Starting,
    Running,
    Reloading,
}

impl Service {
    /// Reads the environment that the service manager has set.
    pub fn new() -> Self {
        Self { manager: Manager::from_environment(), ..Self::default() }
    }

    /// Reports what has changed.
    pub fn tick(&mut self, plane: &ControlPlane) {
        let Some(manager) = &mut self.manager else { return };
        manager.send_waiting();
        if HANGUP.get().is_some_and(|flag| flag.swap(false, Ordering::SeqCst)) && self.phase != Phase::Starting {
            let now = clock_gettime(ClockId::Monotonic);
            let micros = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
            manager.report(format!("RELOADING=1\nMONOTONIC_USEC={micros}\nSTATUS=reloading"));
            self.phase = Phase::Reloading;
            return;
        }
        let ready = match self.phase {
            Phase::Starting => true,
            Phase::Running => false,
            // A reload that nobody has begun yet has no guard.
            Phase::Reloading => RELOADS.load(Ordering::SeqCst) == 0 && !hangup_flag().load(Ordering::SeqCst),
        };
        let names: Vec<&str> = plane.ports().iter().map(|port| port.name.as_str()).collect();
        self.down.retain(|port, _| names.get(usize::from(*port)).is_some_and(|name| !name.is_empty()));
        let status = status(&names, &self.down);
        if ready {
            manager.report(format!("READY=1\nSTATUS={status}"));
            self.phase = Phase::Running;
        } else if self.phase == Phase::Running && status != self.status {
            manager.report(format!("STATUS={status}"));
        }
        self.status = status;
        manager.ping();
    }

    /// Notes the state of a port for the next report.
    pub fn port_event(&mut self, port: PortId, event: &PortEvent) {
        let port = port.index() as u16;
        match event {
            PortEvent::Link(link) if link.state == LinkState::Down => _ = self.down.insert(port, "no link"),
            PortEvent::Lost(_) => _ = self.down.insert(port, "lost"),
            PortEvent::Link(_) | PortEvent::Returned => _ = self.down.remove(&port),
            _ => {}
        }
    }

    /// Reports the stop.
    pub fn stop(&mut self) {
        if let Some(manager) = &mut self.manager {
            manager.report("STOPPING=1\nSTATUS=stopping".to_owned());
        }
    }
}

/// Returns the line for `systemctl status`.
fn status(names: &[&str], down: &BTreeMap<u16, &'static str>) -> String {
    let count = names.iter().filter(|name| !name.is_empty()).count();
    let mut text = format!("{count} port{}", if count == 1 { "" } else { "s" });
    for (port, why) in down {
        let name = names.get(usize::from(*port)).copied().unwrap_or("?");
        text += &format!(", {}: {why}", sanitized(name).replace('\n', "\\n"));
    }
    text
}

/// The way to the service manager.
#[derive(Debug)]
struct Manager {
    socket: UnixDatagram,
    address: SocketAddr,
    waiting: VecDeque<String>,
    /// Time between two pings.
    ping_interval: Option<Duration>,
    last_ping: Instant,
}

impl Manager {
    fn from_environment() -> Option<Self> {
        let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
        let own =
            std::env::var_os("WATCHDOG_PID").is_none() || number("WATCHDOG_PID") == Some(u64::from(std::process::id()));
        let watchdog = number("WATCHDOG_USEC").filter(|micros| own && *micros > 0).map(Duration::from_micros);
        Self::connect(&std::env::var_os("NOTIFY_SOCKET")?, watchdog)
    }

    /// `name` is a path, or `@` and the name of an abstract socket. Others, such as `vsock:`, are not served.
    fn connect(name: &OsStr, watchdog: Option<Duration>) -> Option<Self> {
        let address = match name.as_bytes() {
            [b'/', ..] => SocketAddr::from_pathname(name),
            [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
            _ => return None,
        };
        let socket = UnixDatagram::unbound().ok()?;
        socket.set_nonblocking(true).ok()?;
        Some(Self {
            socket,
            address: address.ok()?,
            waiting: VecDeque::new(),
            ping_interval: watchdog.map(|time| time / 4),
            last_ping: Instant::now(),
        })
    }

    fn report(&mut self, report: String) {
        if self.waiting.len() == MAX_WAITING {
            self.waiting.pop_back();
        }
        self.waiting.push_back(report);
        self.send_waiting();
    }

    fn send_waiting(&mut self) {
        while let Some(report) = self.waiting.front() {
            match self.socket.send_to_addr(report.as_bytes(), &self.address) {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return,
                // Nobody gets a report for which there is no service manager.
                _ => _ = self.waiting.pop_front(),
            }
        }
    }

    /// Tells the watchdog that the control thread works. A ping that finds no room is repeated at the next tick.
    fn ping(&mut self) {
        let due = self.ping_interval.is_some_and(|interval| self.last_ping.elapsed() >= interval);
        if due && self.socket.send_to_addr(b"WATCHDOG=1", &self.address).is_ok() {
            self.last_ping = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_manager_that_does_not_read_holds_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let receiver = UnixDatagram::bind(&path).unwrap();
        let mut manager = Manager::connect(path.as_os_str(), Some(Duration::ZERO)).unwrap();
        while manager.waiting.is_empty() {
            manager.report("STATUS=x".to_owned());
        }
        (0..100).for_each(|n| manager.report(format!("STATUS={n}")));
        manager.ping();
        assert_eq!((manager.waiting.len(), manager.waiting.back().unwrap().as_str()), (MAX_WAITING, "STATUS=99"));
        let mut bytes = [0; 100];
        let mut last = String::new();
        receiver.set_nonblocking(true).unwrap();
        for _ in 0..2 {
            while let Ok(n) = receiver.recv(&mut bytes) {
                last = String::from_utf8_lossy(&bytes[..n]).into_owned();
            }
            manager.send_waiting();
        }
        while let Ok(n) = receiver.recv(&mut bytes) {
            last = String::from_utf8_lossy(&bytes[..n]).into_owned();
        }
        assert!(manager.waiting.is_empty() && last == "STATUS=99", "{last}");
    }

    #[test]
    fn sockets_are_paths_or_abstract() {
        let name = format!("wirepath-test-{}", std::process::id());
        let receiver = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        Manager::connect(format!("@{name}").as_ref(), None).unwrap().report("READY=1".to_owned());
        let mut bytes = [0; 100];
        assert_eq!(receiver.recv(&mut bytes).unwrap(), 7);
        assert!(Manager::connect("vsock:2:1".as_ref(), None).is_none());
        assert!(Manager::connect("".as_ref(), None).is_none());
    }

    #[test]
    fn the_status_is_one_line_that_names_ports_that_are_down() {
        let down = [(1, "no link"), (2, "lost")].into_iter().collect();
        assert_eq!(status(&["a", "b\nREADY=1", "c"], &down), "3 ports, b\\nREADY=1: no link, c: lost");
        assert_eq!(status(&["a"], &BTreeMap::new()), "1 port");
    }
}
