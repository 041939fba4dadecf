//! `wirepath doctor --collect`: one archive with what a bug report needs.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;

use wirepath::cli::{Failure, print};

/// Longest run of one of this program's own reports. A library that hangs must not lose the other parts.
const REPORT_TIMEOUT: Duration = Duration::from_secs(60);
/// Largest part of the archive in bytes. A longer file is cut.
const MAX_PART: u64 = 4 << 20;
/// Largest number of files from `/sys`.
const MAX_FILES: usize = 4096;

/// Files of the machine that tell versions and limits. They hold no secrets: no environment, no kernel command line.
const FILES: [&str; 11] = [
    "/proc/version",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/interrupts",
    "/proc/softirqs",
    "/proc/net/dev",
    "/proc/self/status",
    "/proc/self/limits",
    "/etc/os-release",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/devices/system/cpu/isolated",
];

/// Files of each network interface below `/sys/class/net/NAME`.
const INTERFACE_FILES: [&str; 8] = [
    "mtu",
    "operstate",
    "speed",
    "tx_queue_len",
    "device/numa_node",
    "device/vendor",
    "device/device",
    "device/uevent",
];

/// Folders of counters of each port below `/sys/class/infiniband/NAME/ports/N`.
const COUNTER_FOLDERS: [&str; 2] = ["counters", "hw_counters"];

/// An archive that is being written.
struct Archive {
    tar: tar::Builder<GzEncoder<File>>,
    time: u64,
    parts: usize,
}

/// Writes the archive. `files` are added as the user names them, such as logs and configurations.
pub(super) fn collect(path: &Path, files: &[PathBuf]) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::failed(format!("{}: {error}", path.display()));
    // Only the user may read it, and nothing is overwritten.
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut archive = Archive { tar: tar::Builder::new(GzEncoder::new(file, Compression::default())), time, parts: 0 };
    for (name, arguments) in [
        ("version.txt", &["--version"][..]),
        ("doctor.json", &["doctor", "--json"]),
        ("devices.json", &["devices", "--json"]),
    ] {
        archive.add(name, &own_report(arguments)).map_err(failed)?;
    }
    for file in FILES.into_iter().map(Path::new).chain(machine_files().iter().map(PathBuf::as_path)) {
        if let Some(content) = read(file) {
            archive.add(&format!("machine{}", file.display()), &content).map_err(failed)?;
        }
    }
    for (i, file) in files.iter().enumerate() {
        let content = read(file).ok_or_else(|| Failure::usage(format!("{}: not a readable file", file.display())))?;
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        archive.add(&format!("files/{i}-{name}"), &content).map_err(failed)?;
    }
    let parts = archive.parts;
    archive.tar.into_inner().and_then(GzEncoder::finish).and_then(|file| file.sync_all()).map_err(failed)?;
    print(format_args!(
        "{}: {parts} files. It holds no passwords or keys, but names and addresses of interfaces; look into it before \
         you send it.\n",
        path.display()
    ))
}

impl Archive {
    fn add(&mut self, name: &str, content: &[u8]) -> std::io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(self.time);
        self.parts += 1;
        self.tar.append_data(&mut header, format!("wirepath-report/{name}"), content)
    }
}

/// Returns the start of a regular file. `None` if it cannot be read: files of `/sys` may refuse.
fn read(path: &Path) -> Option<Vec<u8>> {
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut content = Vec::new();
    File::open(path).ok()?.take(MAX_PART).read_to_end(&mut content).ok()?;
    Some(content)
}

/// Lists the files of all interfaces and RDMA devices.
fn machine_files() -> Vec<PathBuf> {
    let mut files = Vec::new();
    for interface in entries(Path::new("/sys/class/net")) {
        files.extend(INTERFACE_FILES.iter().map(|name| interface.join(name)));
        files.extend(entries(&interface.join("statistics")));
    }
    for device in entries(Path::new("/sys/class/infiniband")) {
        files.extend(["fw_ver", "hca_type", "board_id", "node_type"].iter().map(|name| device.join(name)));
        for port in entries(&device.join("ports")) {
            files.extend(["state", "phys_state", "rate", "link_layer"].iter().map(|name| port.join(name)));
            files.extend(COUNTER_FOLDERS.iter().flat_map(|folder| entries(&port.join(folder))));
        }
    }
    files.truncate(MAX_FILES);
    files
}

/// Returns the entries of a folder, sorted.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).take(MAX_FILES).collect();
    all.sort();
    all
}

/// Runs this program with other arguments and returns what it printed, with its errors and its exit status.
fn own_report(arguments: &[&str]) -> Vec<u8> {
    run_own_report(arguments).unwrap_or_else(|error| format!("{arguments:?}: {error}\n").into_bytes())
}

fn run_own_report(arguments: &[&str]) -> std::io::Result<Vec<u8>> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // Threads read both pipes, so that a full pipe does not block the child.
    let reader = |pipe: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut content = Vec::new();
            let _ = pipe.map(|pipe| pipe.take(MAX_PART).read_to_end(&mut content));
            content
        })
    };
    let output = reader(child.stdout.take().map(|pipe| Box::new(pipe) as _));
    let errors = reader(child.stderr.take().map(|pipe| Box::new(pipe) as _));
    let start = Instant::now();
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status.to_string(),
            None if start.elapsed() > REPORT_TIMEOUT => {
                child.kill()?;
                child.wait()?;
                break format!("ended after {} s without a result", REPORT_TIMEOUT.as_secs());
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let mut content = output.join().unwrap_or_default();
    let errors = errors.join().unwrap_or_default();
    if !errors.is_empty() || !status.ends_with(": 0") {
        writeln!(content, "\n[{status}]")?;
        content.extend(errors);
    }
    Ok(content)
}
