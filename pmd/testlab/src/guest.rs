use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::lab::Namespace;
use crate::permit::{Limit, Permit};
use crate::process::{Background, Outcome, run};
use crate::requirements::find_program;

/// Maximum time from the start of QEMU until the guest takes commands. Seconds are usual.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// Maximum time of a command in [`LinuxGuest::run`].
const COMMAND_LIMIT: Duration = Duration::from_secs(120);
/// Time after which a guest that nobody stops powers off.
const LIFETIME: Duration = Duration::from_secs(60 * 60);
/// Memory of the guest in MiB.
const MEMORY: &str = "512";
/// First part of the names of files of background commands in the guest.
const JOBS: &str = "/tmp/job";

/// Kernel modules in the guest. They come with the modules that they need, and the kernel loads them on demand.
const MODULES: &[&str] = &[
    "8021q",
    "act_mirred",
    "act_tunnel_key",
    "af_packet",
    "bonding",
    "bridge",
    "cls_flower",
    "dummy",
    "fou",
    "fou6",
    "geneve",
    "ip6_gre",
    "ip6_tunnel",
    "ip6_udp_tunnel",
    "ip_gre",
    "ip_tunnel",
    "ipip",
    "ipv6",
    "mpls_gso",
    "mpls_iptunnel",
    "mpls_router",
    "sch_fq",
    "sch_ingress",
    "sch_netem",
    "sch_tbf",
    "sit",
    "tunnel4",
    "tunnel6",
    "udp_tunnel",
    "veth",
    "virtio_console",
    "virtio_net",
    "virtio_pci",
    "vrf",
    "vxlan",
];

/// First program of the guest: it takes commands from the host until the end.
///
/// A command is its length in a line, and then a shell script of this length. The answer is a line with the exit code
/// and the lengths of standard output and error, and then both of them.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/programs:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
modprobe -a virtio_pci virtio_net virtio_console
ip link set lo up
(sleep @LIFETIME@; echo 'guest: its time is over'; poweroff -f) &
until ls /dev/vport* >/dev/null 2>&1; do sleep 0.05; done
port=$(echo /dev/vport*)
exec 3<>$port
echo ready >&3
while read -r length <&3; do
    dd bs=1 count=$length <&3 >/tmp/script 2>/dev/null
    /programs/sh /tmp/script </dev/null >/tmp/out 2>/tmp/err 3<&-
    code=$?
    { echo $code $(stat -c %s /tmp/out /tmp/err); cat /tmp/out /tmp/err; } >&3
done
poweroff -f
";

/// Debian's kernel under QEMU, with network interfaces on TAP devices: a Linux host that has what the kernel of the
/// test machine may lack.
///
/// The processor is emulated, so it works without KVM and is slow: a boot takes some seconds. It runs one command
/// after another until the value is dropped.
#[derive(Debug)]
pub struct LinuxGuest {
    machine: Option<Background>,
    commands: BufReader<UnixStream>,
    jobs: u32,
    _files: TempDir,
    // The last field: the machine has ended when the next one boots.
    _permit: Permit,
}

/// Threads that have guests. Emulation takes a whole processor, so there is at most one guest for each of them. Other
/// tests mostly wait, and more of them than processors may run.
static GUESTS: Limit = Limit::new(1, usize::MAX);

/// A background command in a [`LinuxGuest`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct GuestJob(u32);

impl LinuxGuest {
    /// Boots a guest. It needs [`crate::Requirement::GUEST`]. While the process has as many guests as the machine has
    /// processors, it waits.
    ///
    /// `taps` are TAP devices of the namespace; they are `eth0`, `eth1` and so on in the guest. `programs` of this
    /// machine, each a name or a path, are copied beside `ip`, `bridge` and `tc`, with their libraries. The guest
    /// also has busybox.
    ///
    /// # Panics
    /// If the guest takes no commands within three minutes. The message has its console.
    #[track_caller]
    pub fn boot(namespace: &Namespace, taps: &[&str], programs: &[&str]) -> Self {
        let permit = GUESTS.take();
        let files = tempfile::tempdir().expect("a temporary folder");
        let kernel = kernel_folder().expect("a kernel for the guest: scripts/guest-kernel");
        let initial = initial_ram_disk(files.path(), &kernel, programs);
        let socket = files.path().join("commands");
        let mut arguments: Vec<String> = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot"]
            .into_iter()
            .chain(["-machine", "q35", "-accel", "tcg", "-cpu", "max,-erms,-fsrm", "-m", MEMORY, "-display", "none"])
            // Mitigations for processors are slow in emulation and protect nothing here.
            .chain(["-serial", "stdio", "-append", "console=ttyS0 quiet panic=-1 mitigations=off"])
            .chain(["-device", "virtio-serial-pci"])
            .chain(["-device", "virtserialport,chardev=commands"])
            .map(str::to_owned)
            .collect();
        arguments.extend(["-kernel".to_owned(), kernel.join("vmlinuz").display().to_string()]);
        arguments.extend(["-initrd".to_owned(), initial.display().to_string()]);
        let channel = format!("socket,id=commands,path={},server=on,wait=off", socket.display());
        arguments.extend(["-chardev".to_owned(), channel]);
        for (n, tap) in taps.iter().enumerate() {
            arguments.extend(["-netdev".to_owned(), format!("tap,id=net{n},ifname={tap},script=no,downscript=no")]);
            arguments.extend(["-device".to_owned(), format!("virtio-net-pci,netdev=net{n},romfile=")]);
        }
        let mut machine = namespace.spawn(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let end = Instant::now() + BOOT_LIMIT;
        let stream = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(_) if machine.running() && Instant::now() < end => std::thread::sleep(Duration::from_millis(10)),
                Err(error) => give_up(machine, &format!("QEMU does not start: {error}")),
            }
        };
        let mut guest =
            Self { machine: Some(machine), commands: BufReader::new(stream), jobs: 0, _files: files, _permit: permit };
        let first = guest.line(end);
        assert_eq!(first, "ready", "the first line of the guest");
        guest
    }

    /// Runs a shell script in the guest to its end, at most two minutes.
    ///
    /// # Panics
    /// If the guest does not answer. The message has its console, and the guest is stopped.
    #[track_caller]
    pub fn run(&mut self, script: &str) -> Outcome {
        let end = Instant::now() + COMMAND_LIMIT;
        let request = format!("{}\n{script}", script.len());
        if let Err(error) = self.commands.get_mut().write_all(request.as_bytes()) {
            self.fail(&format!("the guest takes no command: {error}"));
        }
        let answer = self.line(end);
        let numbers: Vec<usize> = answer.split(' ').filter_map(|number| number.parse().ok()).collect();
        let &[code, output, errors] = numbers.as_slice() else { self.fail(&format!("no answer: {answer}")) };
        let [stdout, stderr] = [output, errors].map(|length| String::from_utf8_lossy(&self.bytes(length, end)).into());
        Outcome { command: script.to_owned(), success: code == 0, code: i32::try_from(code).ok(), stdout, stderr }
    }

    /// Runs a script that must succeed. Returns its standard output.
    #[track_caller]
    pub fn sh(&mut self, script: &str) -> String {
        self.run(script).expect()
    }

    /// Starts a script in the background.
    #[track_caller]
    pub fn start(&mut self, script: &str) -> GuestJob {
        self.jobs += 1;
        let job = format!("{JOBS}{}", self.jobs);
        // The code appears whole, since it is written elsewhere first.
        self.sh(&format!(
            "( ( {script}\n) >{job}.out 2>{job}.err; echo $? >{job}.part; mv {job}.part {job}.code ) </dev/null \
             >/dev/null 2>&1 &"
        ));
        GuestJob(self.jobs)
    }

    /// Waits for the end of a background script, at most two minutes.
    ///
    /// # Panics
    /// If it does not end.
    #[track_caller]
    pub fn wait(&mut self, job: GuestJob) -> Outcome {
        let job = format!("{JOBS}{}", job.0);
        let end = Instant::now() + COMMAND_LIMIT;
        while !self.run(&format!("[ -e {job}.code ]")).success {
            if Instant::now() >= end {
                self.fail(&format!("{job} does not end"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.run(&format!("cat {job}.out; cat {job}.err >&2; code=$(cat {job}.code); rm {job}.*; exit $code"))
    }

    #[track_caller]
    fn line(&mut self, end: Instant) -> String {
        let mut line = Vec::new();
        // A time limit leaves what has arrived in `line`.
        while !line.ends_with(b"\n") {
            let got = self.patient(end, |commands| commands.read_until(b'\n', &mut line));
            if got == 0 {
                self.fail("the guest has ended");
            }
        }
        String::from_utf8_lossy(&line).trim().to_owned()
    }

    #[track_caller]
    fn bytes(&mut self, length: usize, end: Instant) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let mut filled = 0;
        while filled < length {
            let got = self.patient(end, |commands| commands.read(&mut bytes[filled..]));
            if got == 0 {
                self.fail("the guest has ended");
            }
            filled += got;
        }
        bytes
    }

    /// Reads until the limit.
    #[track_caller]
    fn patient(
        &mut self,
        end: Instant,
        read: impl FnOnce(&mut BufReader<UnixStream>) -> std::io::Result<usize>,
    ) -> usize {
        // Zero would be no limit.
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.commands.get_ref().set_read_timeout(Some(left)).expect("a time limit");
        match read(&mut self.commands) {
            Ok(got) => got,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                self.fail("the guest does not answer in time")
            }
            Err(error) => self.fail(&format!("the guest has ended: {error}")),
        }
    }

    /// Stops the guest and panics with its console.
    #[track_caller]
    fn fail(&mut self, why: &str) -> ! {
        match self.machine.take() {
            Some(machine) => give_up(machine, why),
            None => panic!("{why}; it has been stopped before"),
        }
    }
}

#[track_caller]
fn give_up(machine: Background, why: &str) -> ! {
    let outcome = machine.kill();
    panic!("{why}. {} printed:\n{}{}", outcome.command, outcome.stdout, outcome.stderr)
}

/// Returns the folder of the kernel for guests, which `scripts/guest-kernel` makes.
pub(crate) fn kernel_folder() -> Result<PathBuf, String> {
    let folder = |name, below: &str| std::env::var_os(name).map(|value| PathBuf::from(value).join(below));
    let cache = folder("XDG_CACHE_HOME", "").or_else(|| folder("HOME", ".cache"));
    let kernel = cache.unwrap_or_else(|| "/root/.cache".into()).join("wirepath/guest-kernel");
    if kernel.join("vmlinuz").exists() {
        Ok(kernel)
    } else {
        Err(format!("needs a kernel for guests in {}; scripts/guest-kernel gets it", kernel.display()))
    }
}

/// Makes the guest's file system, which it keeps in memory. Returns the name of its archive.
#[track_caller]
fn initial_ram_disk(folder: &Path, kernel: &Path, programs: &[&str]) -> PathBuf {
    let (root, archive) = (folder.join("root"), folder.join("initial"));
    for name in ["bin", "programs", "dev", "proc", "sys", "tmp", "run", "etc", "lib"] {
        fs::create_dir_all(root.join(name)).expect("a folder");
    }
    // The kernel starts /sbin/modprobe.
    symlink("bin", root.join("sbin")).expect("a link");
    copy(&find_program("busybox").expect("busybox"), &root.join("bin/busybox"));
    // A shell that is not busybox: that one prefers its own programs to those in PATH.
    for program in ["sh", "ip", "bridge", "tc"].iter().chain(programs) {
        copy_program(&root, program);
    }
    copy_modules(&root, kernel);
    let init = root.join("init");
    fs::write(&init, INIT.replace("@LIFETIME@", &LIFETIME.as_secs().to_string())).expect("a program");
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).expect("an executable file");
    // Without compression, since the guest is slower than the disk.
    let script = format!("cd {} && find . | cpio --quiet -o -H newc >{}", root.display(), archive.display());
    run(&["sh", "-c", &script]).expect();
    archive
}

#[track_caller]
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to.parent().expect("a folder")).expect("a folder");
    fs::copy(from, to).unwrap_or_else(|error| panic!("copy {}: {error}", from.display()));
}

/// Copies a program and its libraries.
#[track_caller]
fn copy_program(root: &Path, name: &str) {
    let found = if name.contains('/') { Some(PathBuf::from(name)) } else { find_program(name) };
    let path = found.unwrap_or_else(|| panic!("no program '{name}' in PATH"));
    copy(&path, &root.join("programs").join(path.file_name().expect("the name of a program")));
    // A static program has none, which ldd reports as an error.
    let libraries = run(&["ldd", path.to_str().expect("a plain path")]).stdout;
    for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
        copy(Path::new(library), &root.join(library.trim_start_matches('/')));
    }
}

/// Copies [`MODULES`] with the modules that they need, and the lists by which modprobe finds them.
#[track_caller]
fn copy_modules(root: &Path, kernel: &Path) {
    let folder =
        fs::read_dir(kernel.join("lib/modules")).expect("modules").next().expect("a version").expect("a folder");
    let target = root.join("lib/modules").join(folder.file_name());
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let stem = |path: &str| {
        let file = path.rsplit('/').next().unwrap_or(path);
        file.split('.').next().unwrap_or(file).replace('-', "_")
    };
    let mut dependencies = String::new();
    let mut names = Vec::new();
    let lists = read("modules.dep");
    let needed: Vec<&str> = lists
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(path, _)| MODULES.contains(&stem(path).as_str()))
        .flat_map(|(path, needs)| needs.split_whitespace().chain([path]))
        .collect();
    for line in lists.lines() {
        let Some((path, _)) = line.split_once(':') else { continue };
        if needed.contains(&path) {
            copy(&folder.path().join(path), &target.join(path));
            dependencies += &format!("{line}\n");
            names.push(stem(path));
        }
    }
    let is_here = |line: &&str| line.rsplit(' ').next().is_some_and(|name| names.iter().any(|one| one == name));
    let aliases: Vec<String> = read("modules.alias").lines().filter(is_here).map(|line| format!("{line}\n")).collect();
    for (name, text) in [("modules.dep", dependencies), ("modules.alias", aliases.concat())] {
        fs::write(target.join(name), text).expect("a list of modules");
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::{Lab, Requirement};

    #[test]
    fn commands_frames_and_the_end() {
        crate::require!(all Requirement::GUEST);
        let lab = Lab::new("guest");
        let host = lab.namespace("host");
        host.ip("tuntap add tap0 mode tap vnet_hdr");
        host.ip("addr add 10.0.0.1/24 dev tap0");
        host.ip("link set tap0 up");
        let mut guest = LinuxGuest::boot(&host, &["tap0"], &[]);
        let outcome = guest.run("echo out\necho err >&2\nexit 3");
        assert_eq!((outcome.code, &*outcome.stdout, &*outcome.stderr), (Some(3), "out\n", "err\n"));
        let long: Vec<String> = guest.sh("seq 100000").lines().map(str::to_owned).collect();
        assert_eq!((long.len(), long[99_999].as_str()), (100_000, "100000"));
        // The kernel finds the modules of its devices.
        for kind in
            ["geneve id 1 remote 10.0.0.1", "gretap remote 10.0.0.1 key 5", "sit remote 10.0.0.1", "vrf table 5"]
        {
            guest.sh(&format!("ip link add t0 type {kind} && ip link del t0"));
        }
        guest.sh("ip addr add 10.0.0.2/24 dev eth0 && ip link set eth0 mtu 9000 up");
        let job = guest.start("sleep 1; echo done; exit 4");
        assert!(host.run(&["ping", "-c", "2", "-W", "20", "10.0.0.2"]).success, "the guest answers");
        let outcome = guest.wait(job);
        assert_eq!((outcome.code, &*outcome.stdout), (Some(4), "done\n"));
        let message = catch_unwind(AssertUnwindSafe(|| guest.run("poweroff -f"))).unwrap_err();
        let message = message.downcast::<String>().expect("a message");
        assert!(message.contains("the guest has ended"), "{message}");
        assert!(host.run(&["ip", "netns", "pids", host.name()]).stdout.trim().lines().count() <= 1, "QEMU has ended");
    }
}
