//! One of the programs under test, on emulated NICs if its configuration has such ports.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value};
use tempfile::TempDir;
use wirepath::control_socket::Client;
use wirepath_nic_emulator::launch::{self, Launch};
use wirepath_testlab::{Background, Namespace, Outcome};

use crate::world::{colons, device_of};

/// Maximum time for a program to stop.
const STOPPING: Duration = Duration::from_secs(30);

/// A running program with its configuration. If the test panics, the program's log is shown.
pub(crate) struct Program {
    process: Option<Background>,
    folder: TempDir,
    /// Keeps the files of the emulated NICs.
    _nics: Option<Launch>,
}

impl Program {
    /// Starts `binary --config FILE --json` in a namespace.
    pub(crate) fn start(namespace: &Namespace, binary: &str, config: &str) -> Self {
        Self::start_with_faults(namespace, binary, config, "")
    }

    /// Starts a program with faults of the emulated NICs behind its ports.
    pub(crate) fn start_with_faults(namespace: &Namespace, binary: &str, config: &str, faults: &str) -> Self {
        Self::start_under(namespace, &[], binary, config, faults)
    }

    /// Starts a program by way of another one that executes its arguments, such as env(1).
    pub(crate) fn start_under(
        namespace: &Namespace,
        wrapper: &[&str],
        binary: &str,
        config: &str,
        faults: &str,
    ) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("config.toml");
        std::fs::write(&file, config).expect("write the configuration");
        let nics = nics(namespace, &folder, config, faults);
        let mut arguments: Vec<String> = wrapper.iter().map(|&word| word.to_owned()).collect();
        if let Some(nics) = &nics {
            arguments.push("env".to_owned());
            let variable = |(name, value): (&str, std::ffi::OsString)| format!("{name}={}", value.display());
            arguments.extend(nics.environment().into_iter().map(variable));
        }
        arguments.extend([binary, "--config", file.to_str().expect("a plain path"), "--json"].map(str::to_owned));
        let process = namespace.spawn(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        Self { process: Some(process), folder, _nics: nics }
    }

    /// Returns the path of a file beside the configuration.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Replaces the configuration file.
    pub(crate) fn write_config(&self, config: &str) {
        std::fs::write(self.file("config.toml"), config).expect("write the configuration");
    }

    /// Removes an emulated NIC from the program: it is reset and cannot be opened again.
    pub(crate) fn lose_nic(&self, device: &str) {
        for fault in
            ["kind = 'refuse'\ncommand = 'get_context'\nerrno = 'ENODEV'\ncount = 1000000", "kind = 'device-fatal'"]
        {
            self.inject(device, fault);
        }
    }

    /// Resets an emulated NIC, which the program takes back.
    pub(crate) fn reset_nic(&self, device: &str) {
        self.inject(device, "kind = 'device-fatal'");
    }

    /// Takes the link of an emulated NIC away, or gives it back.
    pub(crate) fn set_nic_link(&self, device: &str, up: bool) {
        let kind = if up { "port-up" } else { "port-down" };
        self.inject(device, &format!("kind = '{kind}'\nport = 1"));
    }

    /// Injects a fault of an emulated NIC.
    fn inject(&self, device: &str, fault: &str) {
        assert_eq!(self.ask_nics(&format!("device = 'nic-{device}'\n{fault}\n")).trim(), "injected");
    }

    fn ask_nics(&self, request: &str) -> String {
        let mut socket = UnixStream::connect(self.folder.path().join("control")).expect("the control socket");
        write!(socket, "{request}").expect("a request");
        socket.shutdown(Shutdown::Write).expect("the end of the request");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("an answer");
        answer
    }

    /// Returns the counters of the emulated NICs.
    pub(crate) fn nic_counters(&self) -> Value {
        serde_json::from_str(&self.ask_nics("counters\n")).expect("counters")
    }

    fn process(&mut self) -> &mut Background {
        self.process.as_mut().expect("not stopped yet")
    }

    /// Returns whether the program still runs.
    pub(crate) fn running(&mut self) -> bool {
        self.process().running()
    }

    /// Returns the path of a file beside the configuration.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the rows of a table, by the control socket `operators.sock` beside the configuration. Programs close
    /// connections that are idle for long, so each call has one of its own.
    pub(crate) fn rows(&self, table: &str) -> Vec<Map<String, Value>> {
        let mut client = Client::connect(&self.path("operators.sock")).expect("a connection");
        let table = client.show(table, &[], None).expect("a table");
        let row = |cells: Vec<Value>| table.columns.iter().cloned().zip(cells).collect();
        table.rows.into_iter().map(row).collect()
    }

    /// Returns the process ID.
    pub(crate) fn id(&mut self) -> u32 {
        self.process().id()
    }

    /// Stops the program with SIGTERM. It must exit with code 0 and a summary.
    pub(crate) fn stop(self) -> Summary {
        self.stop_with(0).0
    }

    /// Stops the program with SIGTERM, like [`Self::stop`]. Returns the summary and the log.
    pub(crate) fn stop_with_log(self) -> (Summary, String) {
        self.stop_with(0)
    }

    /// Waits for the end of a program that the kernel kills. Returns the log.
    pub(crate) fn wait_for_kill(mut self) -> String {
        let outcome = self.process.take().expect("not stopped yet").wait(STOPPING);
        assert_eq!(outcome.code, None, "it ended by itself: {}{}", outcome.stdout, outcome.stderr);
        outcome.stderr
    }

    /// Sends a signal.
    pub(crate) fn signal(&mut self, signal: rustix::process::Signal) {
        self.process().signal(signal);
    }

    /// Stops the program after a failure. It must exit with code 1 and a summary. Returns the summary and the
    /// log.
    pub(crate) fn stop_after_failure(self) -> (Summary, String) {
        self.stop_with(1)
    }

    fn stop_with(mut self, code: i32) -> (Summary, String) {
        let outcome = self.process.take().expect("not stopped yet").terminate(STOPPING);
        let log = std::fs::read_to_string(self.folder.path().join("nic.log")).unwrap_or_default();
        let refused: Vec<_> = log.lines().filter(|line| !line.contains("injected fault")).collect();
        assert!(refused.is_empty() || code != 0, "a NIC would have refused:\n{}", refused.join("\n"));
        // No program under test needs a system call that is not on the list.
        assert!(!outcome.stderr.contains(" was refused ("), "{}", outcome.stderr);
        let summary = Summary::read(&outcome, code);
        assert_eq!(summary.json["in_flight"].as_i64(), Some(0), "{}", summary.json);
        (summary, outcome.stderr)
    }

    /// Kills the program.
    pub(crate) fn kill(mut self) {
        let outcome = self.process.take().expect("not stopped yet").kill();
        assert_eq!(outcome.code, None, "it had ended by itself: {}{}", outcome.stdout, outcome.stderr);
    }
}

/// Prefix of the cable of a NIC beside the kernel's interface with the port's name.
pub(crate) const CABLE: &str = "cable-";

/// Starts a NIC for each port whose driver has emulated devices. The NIC is linked to the interface with the
/// port's name and has its address, as if the interface belonged to the NIC. If there is a [`CABLE`], the NIC is linked
/// to that, and the kernel has the interface with the frames that no rule takes.
fn nics(namespace: &Namespace, folder: &TempDir, config: &str, faults: &str) -> Option<Launch> {
    let file = |name: &str| folder.path().join(name).display().to_string();
    let mut topology = format!("log = '{}'\ncontrol = '{}'\n", file("nic.log"), file("control"));
    let mut number = 0;
    for port in config.split("[[port]]") {
        let value = |key: &str| port.lines().find_map(|line| line.strip_prefix(key)?.strip_suffix('"'));
        let Some(kind) = value("driver = \"").and_then(device_of) else { continue };
        let device = value("device = \"").expect("a port names its device");
        let mac = colons(namespace.mac(device));
        topology +=
            &format!("[[device]]\nkind = '{kind}'\nname = 'nic-{device}'\n[[device.port]]\nnetdev = '{device}'\n");
        let cable = format!("{CABLE}{device}");
        let has_cable = namespace.inside(|| Path::new("/sys/class/net").join(&cable).exists());
        let link = if has_cable { &cable } else { device };
        topology += &format!("mac = '{mac}'\nkernel = {has_cable}\nlink = 'veth:{link}'\n");
        if has_cable {
            topology += &format!("mtu = {}\n", namespace.mtu(device));
        }
        number += 1;
    }
    (number > 0).then(|| launch::prepare(&(topology + faults)))
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(process) = self.process.take()
            && std::thread::panicking()
        {
            process.signal(rustix::process::Signal::TERM);
            std::thread::sleep(Duration::from_secs(2));
            let outcome = process.kill();
            eprintln!(
                "{} ended with {:?} and printed:\n{}{}",
                outcome.command, outcome.code, outcome.stdout, outcome.stderr
            );
        }
    }
}

/// The summary of a program.
#[derive(Debug)]
pub(crate) struct Summary {
    pub(crate) json: Value,
}

impl Summary {
    fn read(outcome: &Outcome, code: i32) -> Self {
        assert_eq!(outcome.code, Some(code), "{}:\n{}{}", outcome.command, outcome.stdout, outcome.stderr);
        let json = serde_json::from_str(outcome.stdout.trim()).unwrap_or_else(|error| {
            panic!("{error}: the summary is no JSON object:\n{}{}", outcome.stdout, outcome.stderr)
        });
        let summary = Self { json };
        for key in ["rx_packets", "tx_packets", "pps", "drops"] {
            assert!(summary.json.get(key).is_some(), "the summary has no {key}: {}", summary.json);
        }
        assert_eq!(summary.number("leaked_buffers"), 0, "{}", summary.json);
        summary
    }

    /// Returns a top-level figure.
    pub(crate) fn number(&self, key: &str) -> u64 {
        self.json[key].as_u64().unwrap_or_else(|| panic!("no number {key}: {}", self.json))
    }

    /// Returns the drops for a reason.
    pub(crate) fn drops(&self, reason: &str) -> u64 {
        self.json["drops"].get(reason).map_or(0, |n| n.as_u64().expect("a number"))
    }
}
