//! Starts programs on emulated NICs.
//!
//! Environment variables tell a program about the NICs. `LD_PRELOAD` names the library and [`TOPOLOGY`] the
//! topology file. `SYSFS_PATH` and `SYSFS_PCI_DEVICES` name a generated tree, for programs that read sysfs.
//! [`Launch`] prepares all of them.
//!
//! [`run_test`] runs the test of a driver on emulated NICs: it starts the test program again, under the
//! library, for this test alone.
//!
//! ```no_run
//! # use wirepath_nic_emulator::launch;
//! const NIC: &str = "[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\n";
//!
//! # #[allow(clippy::test_attr_in_doctest)]
//! #[test]
//! fn sent_frames_are_received() {
//!     launch::run_test("sent_frames_are_received", NIC, || {
//!         // open the device with libibverbs, send, receive, assert
//!     });
//! }
//! ```

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use wirepath_control_socket::remove_abandoned;
use wirepath_settings::{ConfigError, Source};

use crate::sysfs;
use crate::topology::Topology;

/// Environment variable with the path of the topology file.
pub const TOPOLOGY: &str = "WIREPATH_NIC_TOPOLOGY";
/// Environment variable that overrides `doorbells` of the topology: `trap`, `queue` or `scan`.
pub const DOORBELLS: &str = "WIREPATH_NIC_DOORBELLS";
/// Environment variable that overrides `abi` of the topology: `ioctl` or `write`.
pub const ABI: &str = "WIREPATH_NIC_ABI";
/// Environment variable with the path of the library, if it is not beside the program.
pub const PRELOAD: &str = "WIREPATH_NIC_PRELOAD";
/// Environment variable with the name of the test, set in programs that [`run_test`] has started again.
const TEST_NAME: &str = "WIREPATH_NIC_INSIDE";
/// Prefix of the names of generated folders; the process id follows.
const FOLDER: &str = "wirepath-nic-";
/// File name of the library.
const LIBRARY: &str = "libwirepath_nic.so";

/// Reasons why a program cannot be started on emulated NICs.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The topology file is invalid.
    #[error(transparent)]
    Topology(#[from] ConfigError),
    /// The library was not found.
    #[error(
        "{LIBRARY} is neither beside this program nor in ../lib/wirepath; \
         build it with `cargo build -p wirepath-nic-preload`, or name it in {PRELOAD}"
    )]
    NoLibrary,
    /// A file that the topology names cannot be written.
    #[error("{key} = \"{}\" of the topology cannot be opened: {error}", .path.display())]
    File {
        /// Key of the file in the topology.
        key: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// The generated sysfs cannot be written.
    #[error("cannot write the sysfs of the emulated devices in {0}: {1}")]
    Sysfs(PathBuf, io::Error),
}

/// Files and environment that a program needs to find emulated NICs. The files are removed when this is
/// dropped.
#[derive(Debug)]
pub struct Launch {
    folder: PathBuf,
    topology: PathBuf,
    library: PathBuf,
    /// Path of the control socket, which remains if the program is killed.
    control: Option<PathBuf>,
}

impl Launch {
    /// Prepares a launch for a topology file. The file is read and checked at once.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn new(topology: &Path) -> Result<Self, LaunchError> {
        Self::with_library(topology, find_library().ok_or(LaunchError::NoLibrary)?)
    }

    /// Prepares a launch with the library at a given path.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn with_library(topology: &Path, library: PathBuf) -> Result<Self, LaunchError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let read = Topology::load(topology)?;
        check_files(&read)?;
        remove_leftovers(&std::env::temp_dir());
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("{FOLDER}{}-{number}", std::process::id()));
        let failed = |error| LaunchError::Sysfs(folder.clone(), error);
        // A killed run with the same process id may have left a folder.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).map_err(failed)?;
        sysfs::generate(&read, &folder.join("sys")).map_err(failed)?;
        let topology = fs::canonicalize(topology).unwrap_or_else(|_| topology.to_owned());
        Ok(Self { folder, topology, library, control: read.control })
    }

    /// Returns the environment variables that the program needs.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        let root = self.folder.join("sys");
        let mut preload = self.library.clone().into_os_string();
        if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            preload.push(":");
            preload.push(others);
        }
        vec![
            ("LD_PRELOAD", preload),
            (TOPOLOGY, self.topology.clone().into_os_string()),
            ("SYSFS_PATH", root.clone().into_os_string()),
            ("SYSFS_PCI_DEVICES", sysfs::pci_devices(&root).into_os_string()),
        ]
    }

    /// Returns the command that starts a program, with its environment.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.envs(self.environment());
        command
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
        if let Some(control) = &self.control {
            remove_abandoned(control);
        }
    }
}

/// Opens the files that the NICs of the program will open, because errors can still be reported here.
fn check_files(topology: &Topology) -> Result<(), LaunchError> {
    for (key, path) in [("log", &topology.log), ("stats", &topology.stats)] {
        let Some(path) = path else { continue };
        // Opening a pipe that nobody reads is an error then, and does not wait.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let opened = fs::File::options().create(true).append(true).custom_flags(flags).open(path);
        opened.map_err(|error| LaunchError::File { key, path: path.clone(), error })?;
    }
    let Some(path) = &topology.control else { return Ok(()) };
    let failed = |error| LaunchError::File { key: "control", path: path.clone(), error };
    SocketAddr::from_pathname(path).map_err(failed)?;
    if fs::symlink_metadata(path).is_ok_and(|file| !file.file_type().is_socket()) {
        return Err(failed(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is not a socket")));
    }
    // Binding another socket in the same folder shows whether the folder exists and is writable.
    let trial = path.with_extension(format!("{}", std::process::id()));
    match UnixListener::bind(&trial) {
        Ok(_) => fs::remove_file(&trial).map_err(failed),
        Err(error) => Err(failed(error)),
    }
}

/// Removes the folders of killed runs.
fn remove_leftovers(folder: &Path) {
    let Ok(entries) = folder.read_dir() else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(FOLDER)?.split_once('-'));
        let Some(process) = process.and_then(|(pid, _)| pid.parse().ok()).and_then(Pid::from_raw) else { continue };
        if test_kill_process(process) == Err(Errno::SRCH) {
            // The folder of another user stays.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns the path of the library: from [`PRELOAD`], beside this program, or in `../lib/wirepath`.
pub fn find_library() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(PRELOAD) {
        return Some(named.into());
    }
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    [folder.join(LIBRARY), folder.join("../lib/wirepath").join(LIBRARY)].into_iter().find(|path| path.is_file())
}

/// Builds the library with cargo, for the profile of the running test program, and returns its path. Tests
/// call this because `cargo test -p` of another crate does not build the library.
///
/// # Panics
/// If the library cannot be built.
pub fn build_library() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT
        .get_or_init(|| {
            if let Some(named) = std::env::var_os(PRELOAD) {
                return named.into();
            }
            // target/PROFILE/deps/TEST
            let program = std::env::current_exe().expect("the test program's path");
            let profile = program.ancestors().nth(2).expect("a profile folder");
            let target = profile.parent().expect("a target folder");
            let name = match profile.file_name().and_then(OsStr::to_str) {
                Some("debug") | None => "dev",
                Some(name) => name,
            };
            let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
            let output = Command::new(cargo)
                .args(["build", "--quiet", "-p", "wirepath-nic-preload", "--profile", name, "--manifest-path"])
                .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("preload/Cargo.toml"))
                .arg("--target-dir")
                .arg(target)
                .env_remove("LD_PRELOAD")
                .output()
                .expect("cargo runs");
            assert!(output.status.success(), "building {LIBRARY}: {}", String::from_utf8_lossy(&output.stderr));
            let library = profile.join(LIBRARY);
            assert!(library.is_file(), "cargo built no {}", library.display());
            library
        })
        .clone()
}

/// Writes a topology to a file and prepares a launch for it. For tests.
///
/// # Panics
/// If the topology is invalid or the library cannot be built.
pub fn prepare(topology: &str) -> Launch {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let file = std::env::temp_dir().join(format!("wirepath-nic-{}-{number}.toml", std::process::id()));
    let source = Source::new("topology", topology);
    if let Err(error) = Topology::read(&source) {
        panic!("{error}");
    }
    fs::write(&file, topology).expect("a temporary file");
    let launch = Launch::with_library(&file, build_library());
    let moved = launch.and_then(|mut launch| {
        let inside = launch.folder.join("topology.toml");
        fs::rename(&file, &inside).map_err(|error| LaunchError::Sysfs(inside.clone(), error))?;
        launch.topology = inside;
        Ok(launch)
    });
    moved.unwrap_or_else(|error| panic!("{error}"))
}

/// Runs `work`, the body of the test `name`, in a process with the emulated NICs of `topology`. The process
/// is this test program, started again for this test alone. `name` is the full path of the test within the
/// program.
///
/// # Panics
/// If `work` panics in that process.
pub fn run_test(name: &str, topology: &str, work: impl FnOnce()) {
    run_test_with_env(name, topology, &[], work);
}

/// Runs a test like [`run_test`], with additional environment variables such as [`DOORBELLS`].
///
/// # Panics
/// If `work` panics in that process.
pub fn run_test_with_env(name: &str, topology: &str, environment: &[(&str, &str)], work: impl FnOnce()) {
    if std::env::var_os(TEST_NAME).is_some_and(|inside| inside == name) {
        return work();
    }
    let launch = prepare(topology);
    let program = std::env::current_exe().expect("the test program's path");
    let output = launch
        .command(program)
        .args([name, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
        .env(TEST_NAME, name)
        .envs(environment.iter().copied())
        .output()
        .expect("the test program starts again");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name} on emulated NICs: {}\n{stdout}\n{stderr}", output.status);
    assert!(stdout.contains("1 passed"), "there is no test named {name}:\n{stdout}");
    // Shows what the test printed, for example the reason of a skip.
    eprint!("{stderr}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_killed_runs_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mut dead = Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        let names = [format!("{FOLDER}{}-0", dead.id()), format!("{FOLDER}{}-0", std::process::id()), "other".into()];
        names.iter().for_each(|name| fs::create_dir(folder.path().join(name)).unwrap());
        remove_leftovers(folder.path());
        assert_eq!(names.map(|name| folder.path().join(name).exists()), [false, true, true]);
    }

    #[test]
    fn abandoned_control_sockets_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, topology) = (folder.path().join("nic.sock"), folder.path().join("nic.toml"));
        let text = "[[device]]\nkind = 'mana'\n[[device.port]]\n";
        fs::write(&topology, format!("control = '{}'\n{text}", path.display())).unwrap();
        let launch = || Launch::with_library(&topology, PathBuf::new()).unwrap();
        let first = launch();
        let listener = UnixListener::bind(&path).unwrap();
        drop(first);
        assert!(path.exists(), "somebody listens");
        let second = launch();
        drop(listener);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
        let third = launch();
        fs::write(&path, "no socket").unwrap();
        drop(third);
        assert!(path.exists());
        let error = Launch::with_library(&topology, PathBuf::new()).unwrap_err().to_string();
        assert!(error.contains("there is a file that is not a socket") && path.exists(), "{error}");
    }

    #[test]
    fn unwritable_files_are_reported_before_the_start() {
        for key in ["log", "stats", "control"] {
            let text = format!("{key} = '/nowhere/at/all'\n[[device]]\nkind = 'mana'\n[[device.port]]\n");
            let topology = Topology::read(&Source::new("t", text)).unwrap();
            let error = check_files(&topology).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{key} = \"/nowhere/at/all\"")), "{error}");
        }
    }
}
