use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Something that a test cannot do without.
#[derive(Clone, Copy, Debug)]
pub enum Need {
    /// The rights of root.
    Root,
    /// A program in `PATH`.
    Program(&'static str),
    /// A file, such as a header, that a package brings.
    File(&'static str),
    /// Scapy for the Python that [`crate::judge`] uses.
    Scapy,
    /// A kernel of at least this version.
    Kernel(u32, u32),
    /// A device type of `ip link add ... type`, tried out in a namespace of its own.
    LinkType(&'static str),
}

impl Need {
    /// What [`crate::Lab`] needs.
    pub const LAB: [Self; 2] = [Self::Root, Self::Program("ip")];

    /// Whether it is there; if not, why and what helps.
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
        }
    }
}

/// Ends the test as skipped unless everything is there: `require!(Need::Root, Need::Program("ping"))`, or a slice such as
/// `require!(all Need::LAB)`. With `WIREPATH_NO_SKIP=1` it fails the test instead.
#[macro_export]
macro_rules! require {
    (all $needs:expr $(, $need:expr)* $(,)?) => {
        for need in $needs {
            $crate::require!(need);
        }
        $($crate::require!($need);)*
    };
    ($($need:expr),+ $(,)?) => {
        $(if let Err(why) = $crate::Need::check($need) {
            $crate::skip_or_fail(file!(), line!(), &why);
            return;
        })+
    };
}

/// Prints why a test is skipped, past the capture of test output; panics where nothing may be skipped.
pub fn skip_or_fail(file: &str, line: u32, why: &str) {
    assert!(std::env::var_os("WIREPATH_NO_SKIP").is_none_or(|v| v == "0"), "nothing may be skipped here, but: {why}");
    let test = std::thread::current().name().filter(|name| *name != "main").unwrap_or("test").to_owned();
    announce(&format!("skipped: {test} ({file}:{line}): {why}"));
}

/// Prints a line that the capture of test output does not swallow, in one piece: other tests print at the same time.
pub fn announce(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Where a program lies.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    // The system directories too: an ordinary user has no sbin in PATH.
    path.split(':')
        .chain(["/usr/sbin", "/sbin", "/usr/bin"])
        .map(|dir| PathBuf::from(dir).join(name))
        .find(|p| p.is_file())
}

/// A Python that has scapy. Debian's own comes first: that is where the package python3-scapy goes.
pub(crate) fn python() -> Result<&'static str, String> {
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
    for need in Need::LAB {
        need.check()?;
    }
    let lab = crate::Lab::new("probe");
    let host = lab.namespace("host");
    let extra: &[&str] = if kind == "vxlan" { &["id", "1", "dstport", "4789"] } else { &[] };
    let outcome = host.run(&[&["ip", "link", "add", "probe0", "type", kind], extra].concat());
    if outcome.success { Ok(()) } else { Err(format!("needs '{kind}' devices, but: {}", outcome.stderr.trim())) }
}
