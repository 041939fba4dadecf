//! System calls that stay allowed, and the filter that refuses all others.

use std::collections::BTreeMap;

use rustix::thread::CapabilitySet;
use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::SeccompCmpOp::{Eq, MaskedEq, Ne};
use seccompiler::{BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule, TargetArch};

use crate::{names, signal};

/// Calls that every program may use after its start, whatever their arguments. The tests against real peers show that
/// none is missing: all drivers, loss and return of devices, reload, changes of ports, capture and metrics. Some belong
/// to paths of the C library that depend on its version.
const ALLOWED: &[&str] = &[
    // Files and descriptors: reload, saved configurations, captures, sysfs, sockets of new ports.
    "read",
    "write",
    "readv",
    "writev",
    "pread64",
    "pwrite64",
    "open",
    "openat",
    "openat2",
    "close",
    "close_range",
    "stat",
    "fstat",
    "lstat",
    "newfstatat",
    "statx",
    "statfs",
    "fstatfs",
    "access",
    "faccessat",
    "faccessat2",
    "lseek",
    "dup",
    "dup2",
    "dup3",
    "fcntl",
    "flock",
    "fsync",
    "fdatasync",
    "ftruncate",
    "fallocate",
    "getdents64",
    "readlink",
    "readlinkat",
    "getcwd",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "mkdir",
    "mkdirat",
    "chmod",
    "fchmod",
    "fchmodat",
    "fchmodat2",
    "chown",
    "fchown",
    "fchownat",
    "umask",
    "copy_file_range",
    "sendfile",
    "pipe2",
    "utimensat",
    "eventfd2",
    "memfd_create",
    // Waiting.
    "poll",
    "ppoll",
    "select",
    "pselect6",
    "epoll_create1",
    "epoll_ctl",
    "epoll_wait",
    "epoll_pwait",
    "epoll_pwait2",
    "futex",
    "futex_waitv",
    "nanosleep",
    "clock_nanosleep",
    "restart_syscall",
    "sched_yield",
    "pause",
    // Sockets; their families are listed below.
    "connect",
    "accept",
    "accept4",
    "bind",
    "listen",
    "shutdown",
    "sendto",
    "sendmsg",
    "sendmmsg",
    "recvfrom",
    "recvmsg",
    "recvmmsg",
    "getsockname",
    "getpeername",
    "getsockopt",
    "setsockopt",
    "socketpair",
    // Memory.
    "munmap",
    "mremap",
    "madvise",
    "msync",
    "mincore",
    "brk",
    "mlock",
    "mlock2",
    "munlock",
    "mbind",
    "set_mempolicy",
    "get_mempolicy",
    "move_pages",
    "membarrier",
    // Threads and signals.
    "clone",
    "set_robust_list",
    "get_robust_list",
    "rseq",
    "set_tid_address",
    "gettid",
    "getpid",
    "getppid",
    "exit",
    "exit_group",
    "sched_getaffinity",
    "sched_setaffinity",
    "sched_getparam",
    "sched_getscheduler",
    "getcpu",
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigreturn",
    "rt_sigtimedwait",
    "sigaltstack",
    "arch_prctl",
    // Questions.
    "getrandom",
    "clock_gettime",
    "clock_getres",
    "gettimeofday",
    "time",
    "times",
    "uname",
    "sysinfo",
    "getrusage",
    "getrlimit",
    "prlimit64",
    "getuid",
    "geteuid",
    "getgid",
    "getegid",
    "getresuid",
    "getresgid",
    "getgroups",
    "capget",
];

/// Families of sockets.
const FAMILIES: [libc::c_int; 6] =
    [libc::AF_UNIX, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_XDP, libc::AF_INET, libc::AF_INET6];

/// Operations of prctl(2): names of threads and of memory.
const PRCTL: [libc::c_int; 3] = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA];

/// A call that the filter has refused since the last question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedCall {
    /// Name as in syscalls(2), or the number if this crate does not know the call.
    pub name: String,
    /// Number of calls.
    pub count: u32,
}

/// Returns the system calls that were refused since the last question. Costs one load if there is none.
pub fn refused_calls() -> Vec<RefusedCall> {
    let name = |number| names::name(number).map_or_else(|| number.to_string(), str::to_owned);
    signal::take_refused().into_iter().map(|(number, count)| RefusedCall { name: name(number), count }).collect()
}

/// Returns the names of the calls that stay allowed, some of them with conditions for their arguments. `keep` are the
/// capabilities of the process.
pub fn allowed_calls(keep: CapabilitySet) -> Vec<&'static str> {
    let mut calls: Vec<_> = ALLOWED.to_vec();
    calls.extend(conditional(0).map(|(name, _)| name));
    calls.extend(bpf(keep));
    calls.sort_unstable();
    calls
}

/// Returns the call that only programs with this capability may use.
fn bpf(keep: CapabilitySet) -> Option<&'static str> {
    keep.intersects(CapabilitySet::BPF | CapabilitySet::SYS_ADMIN).then_some("bpf")
}

/// Condition of a call: any of these rules, each of which is a list of conditions for arguments.
type Alternatives = Vec<Vec<(u8, seccompiler::SeccompCmpOp, u64)>>;

/// Returns the calls that are allowed with certain arguments only. `process` is the own number.
fn conditional(process: i32) -> impl Iterator<Item = (&'static str, Alternatives)> {
    let any_of = |values: &[libc::c_int]| values.iter().map(|value| vec![(0, Eq, *value as u64)]).collect();
    let without = |flag: libc::c_int| vec![(2, MaskedEq(flag as u64), 0)];
    [
        ("socket", any_of(&FAMILIES)),
        ("prctl", any_of(&PRCTL)),
        // Memory that can be written is never executed. Libraries that are loaded later have their own memory for code.
        ("mmap", vec![without(libc::PROT_EXEC), without(libc::PROT_WRITE)]),
        ("mprotect", vec![without(libc::PROT_EXEC)]),
        // Signals to the own process: abort(3).
        ("tgkill", vec![vec![(0, Eq, process as u64)]]),
        ("kill", vec![vec![(0, Eq, process as u64)]]),
        // Copies that report a fault instead of raising a signal: the emulator reads the memory of its program so.
        ("process_vm_readv", vec![vec![(0, Eq, process as u64)]]),
        ("process_vm_writev", vec![vec![(0, Eq, process as u64)]]),
        // Requests to devices, but no input for the terminal of an operator.
        ("ioctl", vec![vec![(1, Ne, libc::TIOCSTI), (1, Ne, TIOCLINUX)]]),
    ]
    .into_iter()
}

/// Input for a virtual console: ioctl_console(2).
const TIOCLINUX: u64 = 0x541c;

/// Makes the filters of a process with these capabilities. All are installed, in this order; the strictest result
/// counts.
pub(crate) fn filters(keep: CapabilitySet) -> Result<Vec<BpfProgram>, seccompiler::BackendError> {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let mut rules = Rules::new();
    for name in ALLOWED.iter().copied().chain(bpf(keep)).chain(["clone3"]) {
        add(&mut rules, name, Vec::new())?;
    }
    for (name, alternatives) in conditional(process) {
        add(&mut rules, name, alternatives)?;
    }
    let allowed = SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, TargetArch::x86_64)?;
    // glibc blocks all signals while it makes threads and processes, so these refusals must not be signals. A filter
    // cannot read the flags of clone3, which are in memory. Without it, glibc takes clone, which may make threads only.
    let clone3 = failing("clone3", Vec::new(), libc::ENOSYS)?;
    let processes = failing("clone", vec![vec![(0, MaskedEq(libc::CLONE_THREAD as u64), 0)]], libc::EPERM)?;
    [clone3, processes, allowed].into_iter().map(TryInto::try_into).collect()
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Adds the rule of a call.
fn add(rules: &mut Rules, name: &str, alternatives: Alternatives) -> Result<(), seccompiler::BackendError> {
    let rule = |conditions: Vec<_>| {
        let condition = |(argument, operation, value)| SeccompCondition::new(argument, Dword, operation, value);
        SeccompRule::new(conditions.into_iter().map(condition).collect::<Result<_, _>>()?)
    };
    let alternatives = alternatives.into_iter().map(rule).collect::<Result<_, _>>()?;
    // Numbers are small.
    rules.extend(names::number(name).map(|number| (number as i64, alternatives)));
    Ok(())
}

/// Makes a filter in which a call fails under these conditions.
fn failing(name: &str, when: Alternatives, errno: libc::c_int) -> Result<SeccompFilter, seccompiler::BackendError> {
    let mut rules = Rules::new();
    add(&mut rules, name, when)?;
    SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(errno as u32), TargetArch::x86_64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_of_the_list_exists_once() {
        let calls = allowed_calls(CapabilitySet::BPF);
        for pair in calls.windows(2) {
            assert_ne!(pair[0], pair[1]);
        }
        for call in &calls {
            assert!(names::number(call).is_some(), "{call}");
        }
        assert!(calls.contains(&"bpf") && !allowed_calls(CapabilitySet::NET_RAW).contains(&"bpf"));
    }

    /// Calls that let a process leave its confinement, or change the machine.
    #[test]
    fn dangerous_calls_are_not_on_the_list() {
        let calls = allowed_calls(CapabilitySet::all());
        for call in "execve execveat fork vfork ptrace mount umount2 pivot_root chroot \
                     setns unshare init_module finit_module delete_module kexec_load reboot keyctl add_key request_key \
                     userfaultfd io_uring_setup open_by_handle_at setuid setgid setresuid capset seccomp personality \
                     perf_event_open iopl ioperm modify_ldt settimeofday clock_settime sethostname swapon quotactl"
            .split_whitespace()
        {
            assert!(names::number(call).is_some(), "{call}");
            assert!(!calls.contains(&call), "{call}");
        }
    }
}
