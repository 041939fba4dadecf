use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;

/// A requirement of a test.
#[derive(Clone, Copy, Debug)]
pub enum Requirement {
    /// Root privileges.
    Root,
    /// A program in `PATH`.
    Program(&'static str),
    /// A file, such as a header, that a package installs.
    File(&'static str),
    /// Scapy in the Python that [`crate::oracle`] uses.
    Scapy,
    /// A kernel of at least this version: major, minor.
    Kernel(u32, u32),
    /// A device type of `ip link add ... type`. The check creates one in a separate namespace.
    LinkType(&'static str),
    /// Debian's kernel for a [`crate::LinuxGuest`].
    GuestKernel,
}

impl Requirement {
    /// Requirements of [`crate::Lab`].
    pub const LAB: [Self; 2] = [Self::Root, Self::Program("ip")];

    /// Requirements of [`crate::LinuxGuest`].
    pub const GUEST: [Self; 6] = [
        Self::Root,
        Self::Program("ip"),
        Self::Program("qemu-system-x86_64"),
        Self::Program("busybox"),
        Self::Program("cpio"),
        Self::GuestKernel,
    ];

    /// Checks the requirement. The error says what is missing and how to get it.
    pub fn check(self) -> Result<(), String> {
        match self {
            Self::Root if rustix::process::geteuid().is_root() => Ok(()),
            Self::Root => Err("needs root (network namespaces and raw sockets); run scripts/test as root".to_owned()),
            Self::Program(name) if find_program(name).is_some() => Ok(()),
            Self::Program(name) => {
                Err(format!("needs the program '{name}', which is not in PATH; scripts/test installs it as root"))
            }
            Self::File(path) if std::path::Path::new(path).exists() => Ok(()),
            Self::File(path) => Err(format!("needs {path}; scripts/test installs it as root")),
            Self::Scapy => python().map(drop),
            Self::Kernel(major, minor) => {
                let (has_major, has_minor) = kernel();
                if (has_major, has_minor) >= (major, minor) {
                    Ok(())
                } else {
                    Err(format!("needs Linux {major}.{minor}, this is {has_major}.{has_minor}"))
                }
            }
            Self::LinkType(kind) => link_type(kind),
            Self::GuestKernel => crate::guest::kernel_folder().map(drop),
        }
    }
}

/// Ends the test as skipped unless all requirements hold: `require!(Requirement::Root,
/// Requirement::Program("ping"))`, or with a slice `require!(all Requirement::LAB)`. With
/// `WIREPATH_NO_SKIP=1` the test fails instead.
#[macro_export]
macro_rules! require {
    (all $needs:expr $(, $need:expr)* $(,)?) => {
        for need in $needs {
            $crate::require!(need);
        }
        $($crate::require!($need);)*
    };
    ($($need:expr),+ $(,)?) => {
        $(if let Err(why) = $crate::Requirement::check($need) {
            $crate::skip_or_fail(file!(), line!(), &why);
            return;
        })+
    };
}

/// Prints why a test is skipped, uncaptured. Panics where no test may be skipped.
pub fn skip_or_fail(file: &str, line: u32, why: &str) {
    assert!(std::env::var_os("WIREPATH_NO_SKIP").is_none_or(|v| v == "0"), "nothing may be skipped here, but: {why}");
    let test = std::thread::current().name().filter(|name| *name != "main").unwrap_or("test").to_owned();
    print_uncaptured(&format!("skipped: {test} ({file}:{line}): {why}"));
}

/// Prints a line that is not captured with the test output, in one write, since other tests print at the same
/// time.
pub fn print_uncaptured(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Returns the path of a program.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    // Also search the system directories: users have no sbin in PATH.
    path.split(':')
        .chain(["/usr/sbin", "/sbin", "/usr/bin"])
        .map(|dir| PathBuf::from(dir).join(name))
        .find(|p| p.is_file())
}

/// Returns a Python with scapy. Debian's Python comes first, since the package python3-scapy installs there.
///
/// # Errors
/// If there is none: what to install.
pub fn python() -> Result<&'static str, String> {
    static PYTHON: OnceLock<Option<&'static str>> = OnceLock::new();
    PYTHON
        .get_or_init(|| {
            ["/usr/bin/python3", "python3"].into_iter().find(|python| {
                let mut command = std::process::Command::new(python);
                command.args(["-c", "import scapy"]).stdin(std::process::Stdio::null());
                command.output().is_ok_and(|output| output.status.success())
            })
        })
        .ok_or_else(|| "needs scapy (Debian: python3-scapy); scripts/test installs it as root".to_owned())
}

fn kernel() -> (u32, u32) {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn link_type(kind: &'static str) -> Result<(), String> {
    for need in Requirement::LAB {
        need.check()?;
    }
    let lab = crate::Lab::new("probe");
    let host = lab.namespace("host");
    let extra: &[&str] = if kind == "vxlan" { &["id", "1", "dstport", "4789"] } else { &[] };
    let outcome = host.run(&[&["ip", "link", "add", "probe0", "type", kind], extra].concat());
    if outcome.success { Ok(()) } else { Err(format!("needs '{kind}' devices, but: {}", outcome.stderr.trim())) }
}
