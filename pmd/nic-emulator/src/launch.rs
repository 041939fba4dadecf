//! Starting programs on emulated NICs.
//!
//! A program finds the NICs by three variables: `LD_PRELOAD` (the library), [`TOPOLOGY`] (the file) and, for programs that look into sysfs,
//! `SYSFS_PATH` and `SYSFS_PCI_DEVICES` (a generated tree). [`Launch`] prepares all of them.
//!
//! A test of a driver runs on emulated NICs by [`under`]: it starts its own test program again, under the library, with just that test.
//!
//! ```no_run
//! # use wirepath_nic_emulator::launch;
//! const NIC: &str = "[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\n";
//!
//! # #[allow(clippy::test_attr_in_doctest)]
//! #[test]
//! fn what_is_sent_comes_back() {
//!     launch::under("what_is_sent_comes_back", NIC, || {
//!         // open the device with libibverbs, send, receive, assert
//!     });
//! }
//! ```

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use wirepath_settings::{ConfigError, Source};

use crate::sysfs;
use crate::topology::Topology;

/// Environment variable that names the topology file.
pub const TOPOLOGY: &str = "WIREPATH_NIC_TOPOLOGY";
/// Environment variable that takes the place of the topology's `doorbells`: `trap`, `queue` or `scan`.
pub const DOORBELLS: &str = "WIREPATH_NIC_DOORBELLS";
/// Environment variable that takes the place of the topology's `abi`: `ioctl` or `write`.
pub const ABI: &str = "WIREPATH_NIC_ABI";
/// Environment variable that names the library, where it does not lie beside the program.
pub const PRELOAD: &str = "WIREPATH_NIC_PRELOAD";
/// Set in programs that [`under`] has started again: the name of the test.
const INSIDE: &str = "WIREPATH_NIC_INSIDE";
/// What the names of generated folders begin with; the process that made them follows.
const FOLDER: &str = "wirepath-nic-";
/// File name of the library.
const LIBRARY: &str = "libwirepath_nic.so";

/// Why a program cannot be started on emulated NICs.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The topology file is wrong.
    #[error(transparent)]
    Topology(#[from] ConfigError),
    /// The library is not where it should be.
    #[error(
        "{LIBRARY} is neither beside this program nor in ../lib/wirepath; build it with `cargo build -p wirepath-nic-preload`, or name it in {PRELOAD}"
    )]
    NoLibrary,
    /// A file that the topology names cannot be written.
    #[error("{key} = \"{}\" of the topology cannot be opened: {error}", .path.display())]
    File {
        /// Which one.
        key: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// The generated sysfs cannot be written.
    #[error("cannot write the sysfs of the emulated devices in {0}: {1}")]
    Sysfs(PathBuf, io::Error),
}

/// Everything that a program needs to find emulated NICs; removed when dropped.
#[derive(Debug)]
pub struct Launch {
    folder: PathBuf,
    topology: PathBuf,
    library: PathBuf,
    /// The control socket, which a program that is killed leaves behind.
    control: Option<PathBuf>,
}

impl Launch {
    /// For a topology file, which is read and checked here already.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn new(topology: &Path) -> Result<Self, LaunchError> {
        Self::with_library(topology, find_library().ok_or(LaunchError::NoLibrary)?)
    }

    /// As [`Self::new`], with the library named.
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
        // What a killed run with the same process id left.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).map_err(failed)?;
        sysfs::generate(&read, &folder.join("sys")).map_err(failed)?;
        let topology = fs::canonicalize(topology).unwrap_or_else(|_| topology.to_owned());
        Ok(Self { folder, topology, library, control: read.control })
    }

    /// Variables that the program needs.
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

    /// The program, ready to be started.
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

/// Removes a socket on which nobody listens any more.
fn remove_abandoned(path: &Path) {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if is_socket && UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
        // Another program may have been quicker.
        let _ = fs::remove_file(path);
    }
}

/// Opens what the program's NICs will open, as long as there is somebody to tell.
fn check_files(topology: &Topology) -> Result<(), LaunchError> {
    for (key, path) in [("log", &topology.log), ("stats", &topology.stats)] {
        let Some(path) = path else { continue };
        let opened = fs::File::options().create(true).append(true).open(path);
        opened.map_err(|error| LaunchError::File { key, path: path.clone(), error })?;
    }
    let Some(path) = &topology.control else { return Ok(()) };
    let failed = |error| LaunchError::File { key: "control", path: path.clone(), error };
    SocketAddr::from_pathname(path).map_err(failed)?;
    // Binding beside it shows whether there is a folder, and one that may be written.
    let trial = path.with_extension(format!("{}", std::process::id()));
    match UnixListener::bind(&trial) {
        Ok(_) => fs::remove_file(&trial).map_err(failed),
        Err(error) => Err(failed(error)),
    }
}

/// Removes the folders of runs that were killed.
fn remove_leftovers(folder: &Path) {
    let Ok(entries) = folder.read_dir() else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(FOLDER)?.split_once('-'));
        let Some(process) = process.and_then(|(pid, _)| pid.parse().ok()).and_then(Pid::from_raw) else { continue };
        if test_kill_process(process) == Err(Errno::SRCH) {
            // Another user's folder stays.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Where the library lies: named by [`PRELOAD`], beside this program, or in `../lib/wirepath`.
pub fn find_library() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(PRELOAD) {
        return Some(named.into());
    }
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    [folder.join(LIBRARY), folder.join("../lib/wirepath").join(LIBRARY)].into_iter().find(|path| path.is_file())
}

/// The library, built by cargo for the profile of the running test program. For tests: `cargo test -p` of another crate builds no library.
///
/// # Panics
/// If it cannot be built.
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

/// A topology text in a file, with everything that a program needs to find its NICs. For tests.
///
/// # Panics
/// If the topology is wrong or the library cannot be built.
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

/// Runs `work`, the body of the test `name` (its full path within the test program), in a process with the emulated NICs of `topology`:
/// this test program, started again for this test alone.
///
/// # Panics
/// If the work panics there.
pub fn under(name: &str, topology: &str, work: impl FnOnce()) {
    under_with(name, topology, &[], work);
}

/// As [`under`], with more environment, for example [`DOORBELLS`].
///
/// # Panics
/// As [`under`].
pub fn under_with(name: &str, topology: &str, environment: &[(&str, &str)], work: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some_and(|inside| inside == name) {
        return work();
    }
    let launch = prepare(topology);
    let program = std::env::current_exe().expect("the test program's path");
    let output = launch
        .command(program)
        .args([name, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
        .env(INSIDE, name)
        .envs(environment.iter().copied())
        .output()
        .expect("the test program starts again");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name} on emulated NICs: {}\n{stdout}\n{stderr}", output.status);
    assert!(stdout.contains("1 passed"), "there is no test named {name}:\n{stdout}");
    // What the test announces (a skip and its reason) is for people.
    eprint!("{stderr}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_killed_runs_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mut dead = Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        let names = [format!("{FOLDER}{}-0", dead.id()), format!("{FOLDER}{}-0", std::process::id()), "other".into()];
        names.iter().for_each(|name| fs::create_dir(folder.path().join(name)).unwrap());
        remove_leftovers(folder.path());
        assert_eq!(names.map(|name| folder.path().join(name).exists()), [false, true, true]);
    }

    #[test]
    fn a_control_socket_goes_with_the_programs_that_had_it() {
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
        fs::write(&path, "no socket").unwrap();
        drop(launch());
        assert!(path.exists());
    }

    #[test]
    fn files_that_cannot_be_opened_are_named_before_the_program_starts() {
        for key in ["log", "stats", "control"] {
            let text = format!("{key} = '/nowhere/at/all'\n[[device]]\nkind = 'mana'\n[[device.port]]\n");
            let topology = Topology::read(&Source::new("t", text)).unwrap();
            let error = check_files(&topology).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{key} = \"/nowhere/at/all\"")), "{error}");
        }
    }
}
